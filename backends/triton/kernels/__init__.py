"""Device code: what Triton compiles. Nothing here is imported by a process that finds its kernels on disk."""
