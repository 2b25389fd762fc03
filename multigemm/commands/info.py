"""`multigemm info`: what is available, what is missing, how to install it, and what is unusable and why."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, fields
from typing import Any

import torch

from multigemm import __version__
from multigemm.api import BackendInfo, list_backends
from multigemm.bench import machine
from multigemm.settings import PREFIX, Settings, settings

PACKAGES = (*machine.PACKAGES, "cuda-bindings", "ml_dtypes", "hypothesis", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def main(args: argparse.Namespace) -> int:
    """Prints the state of this machine."""
    state = collect()
    print(json.dumps(state, indent=2) if args.json else as_text(state))
    return 0


def collect() -> dict[str, Any]:
    """The facts about this machine, for a report."""
    current = settings()
    return {
        "multigemm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": machine.versions(PACKAGES),
        "devices": _devices(),
        "backends": [asdict(info) for info in list_backends()],
        "settings": {PREFIX + f.name.upper(): _setting(getattr(current, f.name)) for f in fields(Settings)},
        "settings_doc": {PREFIX + f.name.upper(): f.metadata["doc"] for f in fields(Settings)},
    }


def _setting(value: Any) -> Any:
    if isinstance(value, tuple):
        return ",".join(value)
    return value if value is None or isinstance(value, bool) else str(value)


def _devices() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": p.name,
                "capability": f"{p.major}.{p.minor}",
                "multiprocessors": p.multi_processor_count,
                "memory_gib": round(p.total_memory / 2**30, 1),
                "cuda": torch.version.cuda,
            }
        )
    return found


def as_text(state: dict[str, Any]) -> str:
    """The facts as text."""
    lines = [f"multigemm {state['multigemm']}, Python {state['python']}, {sys.platform}"]
    lines.append("packages: " + ", ".join(f"{k} {v}" for k, v in state["packages"].items()))
    lines.append("devices:")
    lines += [
        f"  cuda:{d['index']} {d['name']}, sm_{d['capability'].replace('.', '')}, {d['multiprocessors']} SMs, "
        f"{d['memory_gib']} GiB, CUDA {d['cuda']}"
        for d in state["devices"]
    ] or ["  no CUDA device; the cpu backend is the default here"]
    lines += ["backends:", *(f"  {BackendInfo(**b)}" for b in state["backends"])]
    lines.append("settings (environment variables):")
    lines += [f"  {k}={'' if v is None else v}  ({state['settings_doc'][k]})" for k, v in state["settings"].items()]
    return "\n".join(lines)
