"""What the shipped kernels compile to, for GPUs that need not be here: no spills, the right instructions.

A process of its own compiles them, because the interpreter that other tests use changes Triton for
the whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the triton package is not installed: pip install triton")


def compiled(capability: int, folder: Any) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "MULTIGEMM_"))}
    environment |= {"MULTIGEMM_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton-own")}
    command = [sys.executable, "-m", "multigemm.backends.triton.shipped", "--quick", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_shipped_kernels_compile_without_spills(capability: int, tmp_path: Any) -> None:
    reports = compiled(capability, tmp_path)
    assert len(reports) >= (16 if capability == 90 else 5)
    spilled = [r for r in reports if r["stack"]]
    assert not spilled
    assert all(0 < r["registers"] <= 255 for r in reports)
    limit = {80: 163, 90: 227, 100: 227}[capability] * 1024
    assert all(r["shared"] <= limit for r in reports)
    assert any(r["kernel"].startswith("hopper") for r in reports) == (capability == 90)


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled(tmp_path: Any) -> None:
    code = (
        "import sys, torch; from multigemm.backends.triton import build as c, shipped as s;"
        "spec = dict(s.specs())['jagged_m bf16']; source = next(s.sources(spec, 90))[1];"
        "made = c.cubin(source, 90); print(c.compilations, 'triton' in sys.modules, len(made.code), made.params)"
    )
    environment = {**os.environ, "MULTIGEMM_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "own")}
    environment.pop("TRITON_INTERPRET", None)
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, second = (run.stdout.split() for run in runs)
    assert first[0] == "1"
    assert second[0] == "0"
    assert second[1] == "False", "a cached kernel must not import triton"
    assert first[2:] == second[2:]


@pytest.mark.slow
def test_products_of_shifted_weights_overlap(tmp_path: Any) -> None:
    """ptxas lets each wgmma wait for the one before where a register that one reads is written in between, and only
    tells a log that nobody reads. Then every product would be followed by a wait for all."""
    code = (
        "import subprocess; from triton import knobs; from multigemm.backends.triton import build as c, shipped as s;"
        "from multigemm.backends.triton.choice import hopper_candidates;"
        "from multigemm.backends.triton.hopper import hopper_source;"
        "spec = dict(s.specs())['jagged_m bf16 unaligned'];"
        "found = [x for x in hopper_candidates(spec) if x.shift_b and x.block_m == 128];"
        "open('carry.cubin', 'wb').write(c.cubin(hopper_source(spec, found[0]), 90).code);"
        "print(subprocess.check_output([knobs.nvidia.nvdisasm.path, '-c', 'carry.cubin'], text=True))"
    )
    environment = {**os.environ, "MULTIGEMM_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "own")}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True,
                         check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    products, waits_for_all = run.stdout.count("HGMMA"), run.stdout.count("DEPBAR.LE gsb0, 0x0")
    assert products >= 16
    assert waits_for_all < products / 2


QUANTISED = """
import json, re, sys
from multigemm.backends.triton import build, shipped
specs = dict(shipped.quantised_specs())
for name in sys.argv[2:]:
    kernel, source = next(shipped.sources(specs[name], int(sys.argv[1])))
    ptx = build.build(source, int(sys.argv[1])).asm["ptx"]
    products = re.findall(r"(wgmma\\.mma_async|mma\\.sync|tcgen05\\.mma)\\S*?\\.((?:f32|cta)\\S*) (.*?);", ptx)
    kinds = sorted({f"{unit} {types}" for unit, types, _ in products})
    fresh = sum(bool(re.search(r", 0, 1, 1(, [01], [01])?$", rest)) for _, _, rest in products)
    told = {"name": name, "kinds": kinds, "all": len(products), "fresh": fresh, "depth": dict(source.constants)["BK"]}
    print(json.dumps({**told, "multiplied": "mul.rn.bf16x2" in ptx}))
"""
"""Prints what kernels multiply by: `fresh` counts wgmma that begin a sum of their own instead of going on with one."""


def products_of(capability: int, folder: Any, *names: str) -> dict[str, dict[str, Any]]:
    environment = {**os.environ, "MULTIGEMM_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "own")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", QUANTISED, str(capability), *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {found["name"]: found for found in map(json.loads, run.stdout.splitlines())}


@pytest.mark.slow
def test_hopper_multiplies_float8_as_such_and_promotes_its_sums(tmp_path: Any) -> None:
    """Every 128 of K, or every block of scales, begins a sum of its own; only "fast" goes on with one."""
    promoted = ("float8 rows", "float8 unscaled", "float8 blocks", "float8 blocks thin", "float8 mx")
    found = products_of(90, tmp_path, *promoted, "float8 fast", "float8 weights")
    for name in promoted:
        seen = found[name]
        assert all(kind.startswith("wgmma.mma_async f32.e") for kind in seen["kinds"]), seen
        assert seen["fresh"] > 0 and seen["all"] == seen["fresh"] * seen["depth"] // 32, seen
    assert found["float8 blocks"]["kinds"] == ["wgmma.mma_async f32.e4m3.e5m2"]
    assert found["float8 fast"]["fresh"] == 0 and "e4m3" in found["float8 fast"]["kinds"][0]
    assert found["float8 weights"]["kinds"] == ["wgmma.mma_async f32.bf16.bf16"]


@pytest.mark.slow
def test_infinities_of_e5m2_weights_stay_infinite(tmp_path: Any) -> None:
    """Triton's own way from e5m2 to bfloat16 multiplies by 2^112, which makes 65536 of infinity."""
    [seen] = products_of(90, tmp_path, "e5m2 weights").values()
    assert seen["kinds"] == ["wgmma.mma_async f32.bf16.bf16"] and not seen["multiplied"]


@pytest.mark.slow
def test_float8_is_converted_where_its_products_are_narrow_or_missing(tmp_path: Any) -> None:
    for capability in (80, 89, 120):
        [seen] = products_of(capability, tmp_path, "float8 rows").values()
        assert seen["kinds"] == ["mma.sync f32.f16.f16.f32"], (capability, seen)


EPILOGUE = """
import re, sys, torch, multigemm as mg
from multigemm.backends.triton import build, shipped
inputs, bits, name = {"16 bits": (torch.float16, 32, "f32"), "64 bits": (torch.float64, 64, "f64")}[sys.argv[1]]
a, b = torch.zeros(512, 264, dtype=inputs), torch.zeros(6, 264, 264, dtype=inputs).mT
c = torch.zeros(512, 264, dtype=torch.float32 if bits == 32 else torch.float64)
for extra in ({"c": c, "alpha": 0.3, "beta": -0.6, "activation": "gelu"}, {"bias": c[:6], "alpha": 0.3},
              {"c": c, "beta": -0.6, "bias": c[:6], "activation": "gelu_tanh"}):
    spec = mg.GroupedGemmProblem(a, b, sizes=[100] * 5 + [12], out_dtype=c.dtype, **extra).spec
    for label, source in shipped.sources(spec, 90, 1):
        if label.startswith(("pointer", "hopper")):
            ptx = build.build(source, 90).asm["ptx"]
            products = set(re.findall(rf"\\bmul(?:\\.rn)?\\.{name}\\s+(%\\w+),", ptx))
            sums = re.findall(rf"\\b(?:add|sub)(?:\\.rn)?\\.{name}\\s+%\\w+, (%\\w+), (%\\w+);", ptx)
            assert not [pair for pair in sums if products & set(pair)], (label, extra.keys())
            print(label, list(extra))
"""


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["16 bits", "64 bits"])
def test_no_product_of_the_epilogue_is_left_to_be_fused_or_not(inputs: str, tmp_path: Any) -> None:
    """Else an element's last bit depends on the tile: compilers fuse in one kernel and not in the next."""
    environment = {**os.environ, "MULTIGEMM_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "own")}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "0"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", EPILOGUE, inputs]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    kernels = {line.split()[0] for line in run.stdout.splitlines()}
    assert kernels == ({"pointer", "hopper"} if inputs == "16 bits" else {"pointer"})
