"""The plain-core kernel in Numba's CUDA simulator: its schedule, masks and epilogues without a GPU.

Numba chooses between compiler and simulator when it is imported, so the simulator has a process of its own.
"""

from __future__ import annotations

import re

import pytest

from tests.support.python_process import run_python

CHOSEN = """form_and_dtype or say or (sizes and not graph) or contents or epilogues or output or alpha or few or extents
or quantised or (generated and jagged_m) or simulated"""


@pytest.mark.slow
def test_the_simulated_backend_conforms() -> None:
    """And passes the tests of its own that lie in `numba_simulated.py`."""
    pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")
    suite = ("-m", "multigemm.testing.conformance", "--backend", "numba", "tests/support/numba_simulated.py")
    emulated = {"MULTIGEMM_EMULATE": "1", "NUMBA_ENABLE_CUDASIM": "1"}
    said = run_python(*suite, "-k", CHOSEN.replace("\n", " "), environment=emulated).stdout
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed.group(1)) >= 173 and "skipped" not in said, said[-500:]
