"""Device code: what Numba compiles, or its simulator runs."""
