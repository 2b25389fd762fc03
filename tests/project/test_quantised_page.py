"""The program of docs/quantised-operands.md runs."""

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "quantised-operands.md"


def test_the_program_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["y"].shape == (300, 384)
    assert (names["back"] - names["w"]).abs().max() < 0.4
    assert names["y"].dtype is torch.bfloat16
