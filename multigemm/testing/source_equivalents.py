"""Changes of a kernel's source that no result can show, and why: survivors without blame.

An entry names an operator and the text of the line before the change, never a line number, so that it
outlives edits elsewhere in the file. Nothing is listed because it survived: the reason has to show that
no input could tell the change from the original.
"""

from __future__ import annotations

import re

from multigemm.testing.source_sites import Site

EQUIVALENT: tuple[tuple[str, str, str], ...] = (
    (r"sum|one lost|difference", r"(count|across|down|per_group|rows|columns) = .*(BM|BN|end - start)",
     "more tiles than there are: the extra ones lie outside their group and store nothing"),
    (r"zero for one", r"mask=.*other=0", "lanes that the mask leaves out are left out of the result as well"),
    (r"wider|narrower", r"if rows_left > 0", "a tile without rows adds zeros to nothing"),
    (r"zero for one", r"rows = tl.minimum\(tl.maximum\(rows, 0\), m\)", "one tile for no rows, which stores nothing"),
    (r"mask conjunct lost", r"\(back != x\) & \(x == x\)", "a NaN whose last bit is set is a NaN"),
    (r"one lost", r"tl.range\(0, \(gk \+ BK - 1\) // BK", "one more step, in which every element is masked"),
    (r"zero for one", r"value = cast\(0\)$", "every branch behind it sets the value"),
    (r"wider", r"while distance < threads", "one more round, in which no thread takes part"),
    (r"product lost", r"zero_unowned\(p, block \* threads", "the same elements are zeroed more than once"),
)  # fmt: skip
"""(operator, line before the change, reason), the first two as regular expressions."""


def excuse(site: Site) -> str:
    """Why a survivor is no fault; empty if nobody has said so."""
    for operator, line, reason in EQUIVALENT:
        if re.search(operator, site.operator) and re.search(line, site.before):
            return reason
    return ""
