"""The CUDA runtime under every hand-written kernel: compile, load, tensor maps, argument blocks, launch, counters."""
