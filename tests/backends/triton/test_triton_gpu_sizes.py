"""200 random token counts and group counts, on a GPU: kernels that a layer has met take them all.

A file of its own, because it compiles 24 kernels where the cache holds none of them.
"""

from __future__ import annotations

import pytest
import torch

from tests.backends.triton.test_triton_first_call import recompilations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_new_sizes_compile_nothing() -> None:
    assert recompilations() == 0
