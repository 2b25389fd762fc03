"""Peers: other people's grouped GEMMs, each behind a small adapter that never makes a hard dependency.

An adapter imports its library when it prepares a call. A library that is not installed, or that does
not run a workload, says so in one sentence, and the sentence becomes the row. Whatever a library
demands of its inputs beforehand (padded rows, another memory order of the weights) is done outside
the timing and noted in `why`, which flatters the peer rather than us.
"""

from __future__ import annotations

import importlib.util

import torch

from multigemm.bench import peer_cublas, peer_libraries, peer_torch
from multigemm.bench.entries import Entry
from multigemm.errors import InvalidSetting

MODULES = {"deep_gemm": "DeepGEMM", "quack": "QuACK", "fbgemm_gpu": "FBGEMM", "triton_kernels": "OpenAI triton_kernels"}


def peer_entries(names: list[str], device: torch.device) -> tuple[list[Entry], dict[str, str]]:
    """Entries for the named peers (all, if none is named) that are here, and the reasons of the others."""
    entries = dict(peer_torch.ENTRIES) | {peer_cublas.ENTRY.name: peer_cublas.ENTRY} | peer_libraries.ENTRIES
    needs = peer_libraries.MODULE_OF
    if unknown := [name for name in names if name not in entries]:
        raise InvalidSetting(f"--peers: no peer is called {unknown[0]!r}; known: {', '.join(entries)}, none")
    absent: dict[str, str] = {}
    here: list[Entry] = []
    for name, entry in entries.items():
        if names and name not in names:
            continue
        module = needs.get(name)
        if module and importlib.util.find_spec(module) is None:
            absent[name] = f"{MODULES[module]} is not installed (no module {module})"
        elif device.type != "cuda" and (module or name in ("cublas_grouped", "torch_grouped_nt")):
            absent[name] = "needs a CUDA device"
        else:
            here.append(entry)
    return here, absent
