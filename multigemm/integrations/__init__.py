"""Integrations: the torch operator, autograd, stand-ins for other libraries, transformers, TritonBench.

Importing this package registers `torch.ops.multigemm.grouped_gemm`. Each optional package is imported only by the
module named after it.
"""

from multigemm.integrations.torch_op import grouped_gemm

__all__ = ["grouped_gemm"]
