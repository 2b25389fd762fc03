"""multigemm inside other people's programs: the torch operator, autograd, drop-ins, transformers, TritonBench.

Importing this package registers `torch.ops.multigemm.grouped_gemm`. Packages that are not installed
are imported by the module that is about them, and by no other.
"""

from multigemm.integrations.torch_op import grouped_gemm

__all__ = ["grouped_gemm"]
