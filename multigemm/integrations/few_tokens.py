"""Which layers run by the kernels for one token or a few (decode_kernels.py), and their result.

These kernels read an expert's weights once for each of its pairs of token and expert, and check nothing: what they take
is decided here, and everything else is left to products, which refuse what has no meaning.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from multigemm.integrations.expert_network import Network
from multigemm.integrations.layer_ops import decode_kernels, kernels_for
from multigemm.planning.launch_key import PLAIN
from multigemm.problem.spec import FLOAT_DTYPES
from multigemm.torch_internals import only_result_wanted

EXPERTS_FOR_PAIR = 4
"""Experts for each pair from which on few pairs share one. Time over that of products, H200, 2026-11-23: Qwen3-30B (128
experts) with 2 and 4 tokens 0.87 and 0.90, DeepSeek-V3 (256) with 8 tokens 0.97; Mixtral (8) with 2 tokens 1.00, with 4
tokens 1.3."""
MOST_EACH = 1024
"""The most pairs of a token: a program holds their experts and weights, and where hidden numbers lie has 31 bits."""
MOST_WIDTH = 1 << 16
"""The largest extent of weights: a grid has 65535 blocks of at least two columns."""


@lru_cache(maxsize=256)
def _has_kernels(net: Network) -> bool:
    """Whether there are such kernels for a network; looks at the numbers of its gate if so."""
    found = net.backend in ("auto", "triton") and net.gate is not None and not net.stacked
    if found:
        net.check()
    return found


def may_take_few_tokens(net: Network, index: Tensor, up: Tensor) -> bool:
    """Whether the kernels for few tokens serve a network, and the pairs of index [tokens, k] are of one token, or few
    of them share an expert of up [E, W, H]. A quick test; `takes_few_tokens` tests everything.

    The backends "auto" and "triton" have the kernels. Batch-invariant layers do not use them, nor those with stacked
    weights.

    Raises:
        InvalidProblem: a number of the gate has no meaning.
    """
    if index.dim() != 2 or up.dim() != 3:
        return False
    tokens, pairs = len(index), index.numel()
    few = 0 < pairs <= MOST_EACH * tokens and (tokens == 1 or pairs * EXPERTS_FOR_PAIR <= len(up))
    return few and _has_kernels(net) and not net.invariant


def takes_few_tokens(
    net: Network, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> bool:  # fmt: skip
    """Whether a layer whose result alone is wanted runs by the kernels for few tokens.

    Raises:
        InvalidProblem: a number of the gate has no meaning.
    """
    given = (x, index, weights, up, down, up_bias, down_bias)
    if not may_take_few_tokens(net, index, up) or not only_result_wanted(*given):
        return False
    if kernels_for(x, decode_kernels) is None or index.dtype not in (torch.int64, torch.int32):
        return False
    if not all(t is None or (type(t) in PLAIN and not t.is_neg() and t.device == x.device) for t in given):
        return False
    if x.dtype not in FLOAT_DTYPES or weights.dtype not in (torch.float32, x.dtype):
        return False
    biases = [bias for bias in (up_bias, down_bias) if bias is not None]
    if any(t.dtype is not x.dtype for t in (up, down, *biases)) or not all(t.is_contiguous() for t in biases):
        return False
    return _have_shapes(*given) and up.stride(2) == down.stride(2) == 1


def _have_shapes(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> bool:  # fmt: skip
    """Whether all shapes are those of one layer with a gate, and no extent is 0 or too large."""
    experts, both, width = up.shape
    inner = both // 2
    if not (inner > 0 and both == 2 * inner <= MOST_WIDTH and 0 < width <= MOST_WIDTH):
        return False
    wanted = ((down, (experts, width, inner)), (up_bias, (experts, both)), (down_bias, (experts, width)),
              (x, (len(index), width)), (weights, index.shape))  # fmt: skip
    return all(t is None or t.shape == shape for t, shape in wanted)


def result_of_few_tokens(
    net: Network, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """The layer's result [tokens, H]; None if gradients are wanted, or products have to compute it."""
    given = (x, index, weights, up, down, up_bias, down_bias)
    found: Tensor | None = decode_kernels().decode(net, *given) if takes_few_tokens(net, *given) else None
    return found
