"""The backends: one folder each, with the same rooms in each. `multigemm.registry` loads them by name."""
