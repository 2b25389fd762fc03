"""Files that are there whole or as they were: whoever is stopped while writing one leaves the former."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Through a file beside it and a rename."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
