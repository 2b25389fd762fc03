"""What pyproject.toml cannot say: README.md with links that work on PyPI, and links that no archive brings along."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
REPOSITORY = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
RAW = REPOSITORY.replace("github.com", "raw.githubusercontent.com") + "/main/"


def long_description() -> str:
    """README.md, relative links and pictures made absolute."""
    text = (HERE / "README.md").read_text()
    text = re.sub(r"\]\((?!https?:|#)", f"]({REPOSITORY}/blob/main/", text)
    return re.sub(r'\b(src|srcset)="(?!https?:)', rf'\1="{RAW}', text)


for name in ("backends", "reference"):
    link = HERE / "multigemm" / name
    if not link.exists():
        link.symlink_to(f"../{name}")

setup(long_description=long_description(), long_description_content_type="text/markdown")
