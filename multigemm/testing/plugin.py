"""The pytest options of the conformance suite.

python -m multigemm.testing.conformance --backend mine
python -m pytest -p multigemm.testing.plugin --pyargs multigemm.testing.conformance --backend mine
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("multigemm", "conformance of a multigemm backend")
    group.addoption("--backend", action="store", default="cpu", help="the backend to examine")
    group.addoption("--device", action="store", default="", help="cuda or cpu; default: cuda where there is one")
    group.addoption(
        "--cases", action="store", type=int, default=40, help="generated problems per form and dtype family"
    )
    group.addoption("--all-configs", action="store_true", help="every config of the backend in turn")
