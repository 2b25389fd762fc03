"""Counts copies of rows, and sees whether two exist at a time, which is what raises the peak of memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from torch import Tensor


def note_row_copies(patch: pytest.MonkeyPatch, module: Any) -> list[weakref.ref[Tensor]]:
    """The copies that `module` makes of rows of pairs from now on. A second one beside a living one fails."""
    copies: list[weakref.ref[Tensor]] = []
    copy = module.rows_of_pairs

    def noted(*given: Any) -> Tensor:
        assert all(earlier() is None for earlier in copies), "two copies of rows at a time"
        rows: Tensor = copy(*given)
        copies.append(weakref.ref(rows))
        return rows

    patch.setattr(module, "rows_of_pairs", noted)
    return copies
