"""The program of docs/moe-keywords.md runs, and says what the page says."""

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "moe-keywords.md"


def test_the_program_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("\ngptoss = ", "\nh_swiglu = h\ngptoss = "), names)
    x, up, down, experts, weights = (names[name] for name in ("x", "up", "down", "experts", "weights"))
    assert names["h"].shape == (128, 48) and names["rows"].shape == (64, 32) and names["dup"].shape == (8, 32, 48)
    want = torch.zeros(64, 32)
    for t in range(64):
        for weight, e in zip(weights[t], experts[t].tolist(), strict=True):
            g, u = (x[t] @ up[e]).split(48)
            want[t] += weight * ((torch.nn.functional.silu(g) * u) @ down[e])
    assert torch.allclose(names["y"], want, atol=1e-3, rtol=1e-4)
