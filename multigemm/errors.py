"""Every exception that multigemm raises on purpose.

*Unsupported* means that a backend cannot run this problem. *Unavailable* means that a backend cannot run on this
machine, because a package or a GPU is missing. Any other exception out of multigemm is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


class MultigemmError(Exception):
    """The base class of everything that multigemm raises on purpose."""


class InvalidProblem(MultigemmError, ValueError):
    """The arguments do not describe a problem. The text names the value seen, the limit and the remedy."""


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
    """A keyword that the function does not take. The text names the keyword that was probably meant."""


def unknown_keyword_text(function: str, keyword: str, known: tuple[str, ...]) -> str:
    """The text of an UnknownKeyword: the nearest known keyword, or multigemm's name for another library's keyword."""
    near = difflib.get_close_matches(keyword, known, n=1)
    hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
    return f"{function}() takes no keyword {keyword}=: {FROM_OTHERS.get(keyword, hint)}"


class InvalidSetting(MultigemmError, ValueError):
    """A MULTIGEMM_* variable, a config or a command-line value that cannot be read."""


class UnknownBackend(InvalidProblem, InvalidSetting):
    """A call or a setting names a backend that does not exist. The text names the nearest existing one."""


class BackendUnsupported(MultigemmError):
    """None of the requested backends can run this problem. `reasons` maps each backend's name to its reasons."""

    def __init__(self, reasons: Mapping[str, Sequence[str]]) -> None:
        self.reasons = {name: list(why) for name, why in reasons.items()}
        lines = [f"{name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("no asked backend supports this problem\n  " + "\n  ".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reasons,)  # made anew from what made it: worker processes hand exceptions on


class BackendUnavailable(MultigemmError):
    """The requested backend cannot run on this machine: a package or a GPU is missing."""

    def __init__(self, name: str, reason: str) -> None:
        self.backend, self.reason = name, reason
        super().__init__(f"backend {name!r} is not available: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.backend, self.reason)


class NotCapturable(MultigemmError):
    """This plan reads from the device on the host, so a CUDA graph cannot capture it."""


class LibraryError(MultigemmError):
    """A vendor library or the driver returned an error code; the text names the call and the code."""


class CompileError(MultigemmError):
    """A kernel did not compile; the text holds the compiler's log and the options used."""
