"""Which backend solves a problem, with which config, and why."""
