"""The backends: one folder each, with the same rooms in each. `multigemm.select.registry` loads them by name."""
