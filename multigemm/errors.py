"""The exception catalogue: every failure that a user can meet, by name.

Two words for two failures. *Unsupported* is expected and explained: this backend cannot run this
problem. *Unavailable* means that the backend itself cannot run here: a package or a GPU is missing.
Anything else that escapes from multigemm is a bug and is meant to be loud.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


class MultigemmError(Exception):
    """The common base of everything that multigemm raises on purpose."""


class InvalidProblem(MultigemmError, ValueError):
    """The problem itself has no meaning; the text names the value seen, the limit and the remedy."""


VIEW = "pass {0}.transpose(1, 2), a view ({0}.swapaxes(1, 2) of a NumPy or CuPy array)"
FROM_OTHERS = {
    "offs": "torch's offs are ends= here",
    **dict.fromkeys(("group_sizes", "batch_sizes", "m_sizes", "m_splits", "tokens_per_expert"), "that is sizes= here"),
    **dict.fromkeys(("group_offsets", "seg_indptr"), "that is offsets= here"),
    **dict.fromkeys(("dtype", "output_dtype", "preferred_element_type"), "that is out_dtype= here"),
    **dict.fromkeys(("trans_a", "transpose_a"), VIEW.format("a")),
    **dict.fromkeys(("trans_b", "transpose_b", "transpose_rhs"), VIEW.format("b")),
}
"""Keywords of other libraries' grouped products, and what is written here."""


class UnknownKeyword(InvalidProblem, TypeError):
    """A keyword that a function does not take; the text names what was probably meant."""


def unknown_keyword_text(function: str, keyword: str, known: tuple[str, ...]) -> str:
    """The text of an UnknownKeyword: the nearest of the known keywords, or what another library's is here."""
    near = difflib.get_close_matches(keyword, known, n=1)
    hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
    return f"{function}() takes no keyword {keyword}=: {FROM_OTHERS.get(keyword, hint)}"


class InvalidSetting(MultigemmError, ValueError):
    """A MULTIGEMM_* variable, a config or a command-line value that cannot be read."""


class UnknownBackend(InvalidProblem, InvalidSetting):
    """A backend that does not exist, asked for in a call or in a setting; the text names the nearest one."""


class BackendUnsupported(MultigemmError):
    """No asked backend runs this problem here. `reasons` maps each backend's name to its reasons."""

    def __init__(self, reasons: Mapping[str, Sequence[str]]) -> None:
        self.reasons = {name: list(why) for name, why in reasons.items()}
        lines = [f"{name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("no asked backend supports this problem\n  " + "\n  ".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reasons,)  # made anew from what made it: worker processes hand exceptions on


class BackendUnavailable(MultigemmError):
    """The backend that was asked for cannot run on this machine: not installed, or no GPU."""

    def __init__(self, name: str, reason: str) -> None:
        self.backend, self.reason = name, reason
        super().__init__(f"backend {name!r} is not available: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.backend, self.reason)


class NotCapturable(MultigemmError):
    """This plan has to talk to the host, so it cannot be captured into a CUDA graph."""


class LibraryError(MultigemmError):
    """A vendor library or the driver returned an error code; the text names the call and the code."""


class CompileError(MultigemmError):
    """A kernel did not compile; the text holds the compiler's log and the options used."""
