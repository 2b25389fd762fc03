"""Peers: other people's grouped GEMMs, each behind a small adapter that never makes a hard dependency.

An adapter imports its library when it prepares a call. A library that is not installed, or that does
not run a workload, says so in one sentence, and the sentence becomes the row. Whatever a library
demands of its inputs beforehand (padded rows, another memory order of the weights) is done outside
the timing and noted in `why`, which flatters the peer rather than us.
"""

from __future__ import annotations

import importlib.util

import torch

from multigemm.bench import peer_cublas, peer_libraries, peer_torch, peer_tutorial
from multigemm.bench.entries import Entry
from multigemm.errors import InvalidSetting

MODULES = {"deep_gemm": "DeepGEMM", "quack": "QuACK", "fbgemm_gpu": "FBGEMM", "triton_kernels": "OpenAI triton_kernels"}
ON_REQUEST = {peer_tutorial.NAME: "triton"}
"""Peers that run only where they are named, and the modules that they need."""


def peer_entries(names: list[str], device: torch.device) -> tuple[list[Entry], dict[str, str]]:
    """Entries for the named peers (all, if none is named) that are here, and the reasons of the others."""
    entries = dict(peer_torch.ENTRIES) | {peer_cublas.ENTRY.name: peer_cublas.ENTRY} | peer_libraries.ENTRIES
    entries |= {peer_tutorial.NAME: peer_tutorial.ENTRY}
    needs = peer_libraries.MODULE_OF | ON_REQUEST
    if unknown := [name for name in names if name not in entries]:
        raise InvalidSetting(f"--peers: no peer is called {unknown[0]!r}; known: {', '.join(entries)}, none")
    absent: dict[str, str] = {}
    here: list[Entry] = []
    for name, entry in entries.items():
        if name not in names and (names or name in ON_REQUEST):
            continue
        module = needs.get(name)
        if module and importlib.util.find_spec(module) is None:
            absent[name] = f"{MODULES.get(module, module)} is not installed (no module {module})"
        elif device.type != "cuda" and (module or name in ("cublas_grouped", "torch_grouped_nt")):
            absent[name] = "needs a CUDA device"
        else:
            here.append(entry)
    return here, absent
