"""The backends: one folder each, with the same rooms in each. `registry` loads them by name."""
