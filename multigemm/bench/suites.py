"""The suites: workloads under names that reports, tuning and tests share.

`tutorial`, `helion-jagged`, `l2`, `cpu-tile`  the published cases of the systems this project grew from
`cpu-rows`   packed rows of float32 as a CPU meets them: few large groups, many small ones, skewed and odd ones
`moe`        11 shapes of real mixture-of-experts layers x balanced, zipf and empty groups
`moe-more`   further models, and the lists of DeepGEMM and Tokamax
`wgrad`      jagged K: weight gradients
`layer-products`  both products of one MoE layer of four models, at 64 and 4096 tokens: for the energy of a token
`decode`     a few rows per group: one step of token generation
`fp8`        float8 on both sides: the MoE layers by blocks of scales and by rows, weight gradients, mx
`wonly`      the decode suite's layers with weights of 8 and 4 bits under bfloat16
`small`      launch and scheduling cost rather than arithmetic
`ragged-odd` primes and unaligned extents, where most libraries refuse or pad
`unaligned`  40 drawn problems of jagged rows whose lines begin anywhere
`layers`     whole mixture-of-experts layers, forward and training; `quantised-layers`  one with quantised weights
`random`     20 other shapes, which nobody tunes: what `auto` is worth where nothing was measured; `random:7`: 20 of
             another seed, over all forms
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch

from multigemm.bench.layers import QUANTISED, WHOLE, quantised_layers, whole_layers
from multigemm.bench.workloads import DTYPES, LAYERS, Workload, parse_shape, parts, with_dtype
from multigemm.errors import InvalidSetting
from multigemm.select.timing import measure

UNEVEN = ("balanced", "zipf", "empty")
LAYER_PRODUCTS = "layer-products"


def _cubes(name: str, suite: str, sizes: Sequence[int], dtype: str) -> Workload:
    products = tuple((n, n, n) for n in sizes)
    return Workload(name, suite, "per_group", len(products), dtype=dtype, distribution="list", products=products)


def _tutorial() -> list[Workload]:
    cases: list[Workload] = []
    for dtype in ("fp16", "bf16"):
        cases += [_cubes(f"seed_cube_{n}", "tutorial", [n] * 4, dtype) for n in (128, 256, 512, 1024)]
        cases.append(_cubes("seed_mixed", "tutorial", [1024, 512, 256, 128], dtype))
    return cases


def _helion() -> list[Workload]:
    ramp = ((64, 128, 256), (128, 128, 256), (192, 128, 256), (256, 128, 256))
    unlike = ((128, 128, 128), (512, 128, 128), (128, 256, 128))
    suite = "helion-jagged"
    return [
        Workload("helion_seed", suite, "per_group", 4, products=ramp, shared_b=True, distribution="ramp"),
        Workload("helion_packed", suite, "jagged_m", 4, n=128, k=256, total=640, shared_b=True, distribution="uniform"),
        Workload(
            "helion_wide", suite, "jagged_m", 16, n=1024, k=1024, total=4096, shared_b=True, distribution="uniform"
        ),
        Workload("helion_unlike", suite, "per_group", 3, products=unlike, distribution="list"),
    ]


def _l2() -> list[Workload]:
    shapes = {"l2_seed": (4096, 1024, 2048), "l2_1k": (1024,) * 3, "l2_2k": (2048,) * 3, "l2_4k": (4096,) * 3}
    return [
        Workload(name, "l2", "per_group", 1, dtype="fp16", products=(shape,), distribution="one")
        for name, shape in shapes.items()
    ]


def _cpu_tile() -> list[Workload]:
    base = Workload(
        "cpu_tile", "cpu-tile", "per_group", 1, dtype="fp32", products=((512, 512, 256),), distribution="one"
    )  # fmt: skip
    return [
        base,
        replace(base, name="cpu_tile_bias", bias=True),
        replace(base, name="cpu_tile_transposed", trans_a=True, trans_b=True),
    ]


def _cpu_rows() -> list[Workload]:
    shapes = [  # name, G, rows per group, K, N, distribution
        ("few_large", 8, 256, 512, 512, "uniform"),
        ("few_equal", 8, 256, 512, 512, "balanced"),
        ("wide", 8, 64, 1024, 1024, "uniform"),
        ("moe_8", 8, 256, 768, 1024, "zipf"),
        ("moe_32", 32, 64, 512, 512, "zipf"),
        ("moe_empty", 32, 24, 256, 512, "empty"),
        ("moe_64", 64, 48, 256, 256, "zipf"),
        ("heads", 16, 50, 64, 64, "uniform"),
        ("tiny_few", 4, 10, 64, 64, "uniform"),
        ("odd", 24, 30, 131, 197, "uniform"),
        ("lora_up", 32, 32, 16, 512, "uniform"),
        ("lora_down", 32, 32, 512, 16, "uniform"),
        ("small_16", 64, 16, 128, 128, "uniform"),
        ("small_16_wide", 64, 16, 256, 256, "uniform"),
        ("small_8", 128, 8, 128, 128, "multinomial"),
        ("small_equal", 64, 16, 128, 128, "balanced"),
        ("small_4", 256, 4, 64, 64, "multinomial"),
        ("small_2", 64, 2, 256, 256, "multinomial"),
        ("small_empty", 256, 8, 64, 128, "empty"),
        ("small_decode", 128, 1, 128, 256, "multinomial"),
    ]
    return [
        Workload(name, "cpu-rows", groups=g, n=n, k=k, total=g * rows, distribution=distribution, dtype="fp32")
        for name, g, rows, k, n, distribution in shapes
    ]


def _spread(base: Workload) -> list[Workload]:
    return [replace(base, distribution=name) for name in UNEVEN]


def _moe() -> list[Workload]:
    shapes = [  # name, G, K, N, T
        ("dsv3_up_8k", 32, 7168, 4096, 8192),
        ("dsv3_down_8k", 32, 2048, 7168, 8192),
        ("dsv3_up_32k", 32, 7168, 4096, 32768),
        ("dsv3_down_32k", 32, 2048, 7168, 32768),
        ("mixtral_512", 8, 4096, 14336, 512),
        ("mixtral_4k", 8, 4096, 14336, 4096),
        ("mixtral_16k", 8, 4096, 14336, 16384),
        ("qwen3_32k", 128, 2048, 1536, 32768),
        ("gptoss_8k", 32, 2880, 5760, 8192),
        ("decode_g64", 64, 4096, 4096, 256),
        ("fine_g256", 256, 1024, 512, 16384),
    ]
    cases: list[Workload] = []
    for name, groups, k, n, total in shapes:
        cap = 8 if name == "decode_g64" else 0
        cases += _spread(Workload(name, "moe", groups=groups, n=n, k=k, total=total, cap=cap))
    return cases


def _moe_more() -> list[Workload]:
    shapes = [  # name, G, K, N, T, distribution
        ("qwen3_235b_up", 128, 4096, 3072, 16384, "zipf"),
        ("qwen3_235b_down", 128, 1536, 4096, 16384, "zipf"),
        ("gemma4_up", 128, 2816, 1408, 16384, "zipf"),
        ("gemma4_down", 128, 704, 2816, 16384, "zipf"),
        ("llama4_scout_up", 16, 5120, 16384, 8192, "multinomial"),
        ("llama4_tp_up", 16, 5120, 2048, 8192, "multinomial"),
        ("llama4_tp_down", 16, 896, 5120, 8192, "multinomial"),
        ("dbrx_up", 16, 6144, 21504, 4096, "multinomial"),
        ("dbrx_down", 16, 10752, 6144, 4096, "multinomial"),
        ("gptoss_120b", 128, 2880, 5760, 16384, "zipf"),
        ("glm_up", 256, 6144, 4096, 65536, "multinomial"),
        ("one_hot", 32, 2048, 7168, 8192, "one-hot"),
    ]
    cases = [
        Workload(name, "moe-more", groups=groups, n=n, k=k, total=total, distribution=distribution)
        for name, groups, k, n, total, distribution in shapes
    ]
    for groups, rows in ((4, 8192), (8, 4096)):
        for n, k in ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048)):
            name = f"deepgemm_g{groups}_{n}x{k}"
            case = Workload(name, "moe-more", groups=groups, n=n, k=k, total=groups * rows, distribution="uniform")
            cases.append(replace(case, trans_b=True))
    for groups, n, k in ((256, 1024, 7168), (256, 512, 7168), (128, 768, 2048), (128, 2880, 2880)):
        name = f"tokamax_g{groups}_{n}x{k}"
        cases.append(Workload(name, "moe-more", groups=groups, n=n, k=k, total=131072, distribution="multinomial"))
    return cases


def _wgrad() -> list[Workload]:
    dsv3 = Workload("wgrad_dsv3_32k", "wgrad", "jagged_k", 32, m=2048, n=7168, total=32768, trans_a=True)
    mixtral = Workload("wgrad_mixtral_16k", "wgrad", "jagged_k", 8, m=4096, n=14336, total=16384, trans_a=True)
    return _spread(dsv3) + _spread(mixtral)


def _layer_products() -> list[Workload]:
    return [
        Workload(
            f"{layer.name}:{tokens}:{name}", LAYER_PRODUCTS, groups=layer.experts, n=n, k=k,
            total=tokens * layer.top_k, distribution="multinomial",
        )
        for layer in LAYERS.values()
        for tokens in (64, 4096)
        for name, n, k in (("up", 2 * layer.inner, layer.hidden), ("down", layer.hidden, layer.inner))
    ]  # fmt: skip


def layer_of(name: str) -> tuple[str, int]:
    """The model and the number of tokens of a workload of `layer-products`, from its name."""
    model, tokens, _ = name.split(":")
    return model, int(tokens)


def _decode() -> list[Workload]:
    cases = [
        Workload(f"decode_{name}_m{rows}", "decode", groups=groups, n=n, k=k, total=groups * rows)
        for name, groups, n, k in (("dsv3_up", 32, 4096, 7168), ("qwen3_down", 128, 2048, 768))
        for rows in (1, 4, 16)
    ]
    masked = Workload("decode_masked", "decode", "masked", 32, m=64, n=4096, k=7168, total=512, cap=64)
    return [
        *cases,
        Workload("decode_random", "decode", groups=64, n=4096, k=4096, total=256, distribution="decode"),
        replace(masked, distribution="multinomial"),
        Workload("decode_mixtral", "decode", groups=8, n=14336, k=4096, total=64, distribution="multinomial"),
    ]


def _fp8() -> list[Workload]:
    tiny = Workload("fp8_small", "fp8", groups=8, n=256, k=384, total=200, distribution="empty")
    moe = [*_moe(), tiny]
    cases = [replace(case, dtype=recipe) for recipe in ("fp8-blocks", "fp8-rows") for case in moe]
    cases += [replace(case, dtype="fp8-1x128", trans_a=False) for case in _wgrad()]
    cases += [replace(case, dtype="mxfp8") for case in moe if case.distribution == "zipf" or case is tiny]
    return [replace(case, suite="fp8") for case in cases]


def _wonly() -> list[Workload]:
    tiny = Workload("wonly_small", "wonly", groups=8, n=256, k=384, total=24, distribution="empty")
    recipes = ("fp8-weights", "int8-weights", "int4-weights", "mxfp4-weights")
    return [replace(case, suite="wonly", dtype=recipe) for recipe in recipes for case in (*_decode(), tiny)]


def _small() -> list[Workload]:
    cubes = [_cubes(f"small_cube_{n}", "small", [n] * 4, "bf16") for n in (64, 128, 256, 512)]
    packed = [
        Workload("small_g16", "small", groups=16, n=256, k=256, total=1024, distribution="uniform"),
        Workload("small_g64", "small", groups=64, n=128, k=128, total=2048, distribution="zipf"),
        Workload("lora_down", "small", groups=32, n=16, k=4096, total=512, distribution="zipf"),
        Workload("lora_up", "small", groups=32, n=4096, k=16, total=512, distribution="zipf"),
        Workload("small_batched", "small", "batched", 16, m=128, n=128, k=128),
        Workload("small_jagged_n", "small", "jagged_n", 8, m=256, k=256, total=1024, distribution="uniform"),
    ]
    return cubes + packed


def _ragged_odd() -> list[Workload]:
    primes = ((127, 257, 509), (61, 131, 67), (1, 1021, 251), (523, 3, 701), (0, 64, 64))
    suite = "ragged-odd"
    return [
        Workload("odd_list", suite, "per_group", 5, products=primes, distribution="list"),
        Workload("odd_list_fp32", suite, "per_group", 5, products=primes, distribution="list", dtype="fp32"),
        Workload("odd_fbgemm", suite, groups=16, n=451, k=257, total=2053, distribution="zipf"),
        Workload("odd_704", suite, groups=32, n=2816, k=704, total=4099, distribution="empty"),
        Workload("odd_wgrad", suite, "jagged_k", 16, m=509, n=1021, total=2053, distribution="empty", trans_a=True),
        Workload("odd_prime_big", suite, groups=16, n=4099, k=2053, total=8191, distribution="zipf"),
    ]


# --- generated workloads: nobody picked them ------------------------------------------------------

UNTUNED = "random"
UNEVEN_AND_EVEN = ("balanced", "zipf", "empty", "multinomial", "uniform")
SEED = 20
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 256)
ANY_KIND = "m mt k m list mt m batched mt m fp16 mt masked m k mt list m mt n".split()  # noqa: SIM905
"""The kinds of problems in turn: packed rows (t: with transposed weights), the other forms, another dtype."""
LEAST_OCTAVE = 6.5
"""The least N and K of these workloads, in octaves."""
MOST_PRODUCTS, MOST_PRODUCTS_OF_COLUMNS, MOST_ELEMENTS = 1.5e11, 2e10, 2**28
"""The largest numbers of multiply-adds (fewer for jagged columns, which are slow) and of elements."""


def _generated(name: str, kind: str, place: Sequence[float], index: int) -> list[Workload]:
    """One workload of a kind at a point of the unit cube (rows per group, N, K, groups); none if it is too large.

    Extents are multiples of 64, some of 8.
    """
    step = 8 if index % 4 == 3 else 64
    groups = GROUPS[int(place[3] * len(GROUPS))]
    rows = max(1, int(2.0 ** (place[0] * (8 if kind == "n" else 11.5))))
    n, k = (max(step, int(step * round(2.0 ** (LEAST_OCTAVE + (13 - LEAST_OCTAVE) * p) / step))) for p in place[1:3])
    most = MOST_PRODUCTS_OF_COLUMNS if kind == "n" else MOST_PRODUCTS
    if groups * rows * n * k > most or groups * (n * k + rows * (n + k)) > MOST_ELEMENTS:
        return []
    distribution = UNEVEN_AND_EVEN[index % len(UNEVEN_AND_EVEN)]
    case = Workload(name, UNTUNED, groups=groups, n=n, k=k, total=groups * rows, distribution=distribution, seed=index)
    case = replace(case, trans_b=kind.endswith("t") or (kind not in ("m", "k") and index % 2 == 0))
    if kind in DTYPES:
        return [replace(case, dtype=kind)]
    if kind == "list":
        unequal = [(max(1, rows >> (g % 3)) if index % 3 == 1 else rows, n, k) for g in range(min(groups, 64))]
        return [
            replace(case, form="per_group", groups=len(unequal), products=tuple(unequal), distribution="list", total=0)
        ]
    if kind == "k":
        return [replace(case, form="jagged_k", m=n, n=k, k=0, trans_a=True)] if groups * n * k < 2**28 else []
    if kind == "n":
        return [replace(case, form="jagged_n", m=n, n=0)]
    if kind == "masked":
        return [replace(case, form="masked", m=rows, total=max(1, groups * rows // 2), cap=rows)]
    if kind == "batched":
        return [replace(case, form="batched", m=rows, total=0, distribution="balanced")]
    return [case]


def _unaligned() -> list[Workload]:
    """40 problems of jagged rows with 0.2 to 200 GFLOP, whose lines begin anywhere."""
    draw = np.random.default_rng(SEED)
    cases: list[Workload] = []
    while len(cases) < 40:
        groups, products = int(draw.choice([4, 8, 16, 32, 64, 128])), 10.0 ** draw.uniform(8, 11)
        n, k = (int(draw.integers(1, 8193)) for _ in range(2))
        total, kind = max(groups, int(products / (n * k))), str(draw.choice(UNEVEN_AND_EVEN))
        if (n % 8 or k % 8) and groups * n * k + total * (n + k) < MOST_ELEMENTS:
            case = Workload(f"unaligned_{len(cases):02d}", "unaligned", groups=groups, n=n, k=k, total=total)
            cases.append(replace(case, distribution=kind, trans_b=len(cases) % 2 == 1))
    return cases


def random(seed: int = SEED) -> list[Workload]:
    """Random workloads. The usual seed draws packed rows, with G, T, N and K over three octaves each; other seeds draw
    every kind of problem."""
    draw = np.random.default_rng(seed)
    cases: list[Workload] = []
    while len(cases) < 20:
        index = len(cases)
        name = f"random_{index:02d}" if seed == SEED else f"random_{seed}_{index:02d}"
        if seed != SEED:
            cases += _generated(name, ANY_KIND[index], draw.uniform(0, 1, 4).tolist(), int(draw.integers(1, 10**6)))
            continue
        step = 64 if index % 4 else 8
        groups = int(draw.choice([2, 6, 12, 24, 48, 96, 160]))
        n, k = (int(step * round(2.0 ** draw.uniform(8, 12) / step)) for _ in range(2))
        total = int(groups * 2.0 ** draw.uniform(2, 9))
        kind = str(draw.choice(["balanced", "zipf", "empty", "multinomial"]))
        case = Workload(name, UNTUNED, groups=groups, n=n, k=k, total=total, distribution=kind)
        cases.append(replace(case, trans_b=bool(index % 3 == 2)))
    return cases


SUITES: dict[str, Callable[[], list[Workload]]] = {
    "tutorial": _tutorial,
    "helion-jagged": _helion,
    "l2": _l2,
    "cpu-tile": _cpu_tile,
    "cpu-rows": _cpu_rows,
    "moe": _moe,
    "moe-more": _moe_more,
    "wgrad": _wgrad,
    LAYER_PRODUCTS: _layer_products,
    "decode": _decode,
    "fp8": _fp8,
    "wonly": _wonly,
    "small": _small,
    "ragged-odd": _ragged_odd,
    "unaligned": _unaligned,
    UNTUNED: random,
    WHOLE: whole_layers,
    QUANTISED: quantised_layers,
}


def seed_of(part: str) -> int:
    """The seed in "random:7"; 0 for any other text."""
    head, _, seed = part.partition(":")
    return int(seed) if head == UNTUNED and seed.isdecimal() else 0


def suite(name: str) -> list[Workload]:
    """The workloads of a suite, or of several joined by commas, or of "all" that are no whole layers."""
    names = [each for each in SUITES if each not in (WHOLE, QUANTISED)] if name == "all" else parts(name)
    unknown = [part for part in names if part not in SUITES and not seed_of(part)]
    if unknown or not names:
        raise InvalidSetting(
            f"suite {', '.join(unknown) or name!r} is unknown; known: {', '.join(SUITES)}, {UNTUNED}:SEED, all"
        )
    return [case for part in names for case in (random(seed_of(part)) if seed_of(part) else SUITES[part]())]


# --- what a command line names ---------------------------------------------------------------------------

USUAL_SUITE = "tutorial"
CPU_DTYPES = ("fp32", "bf16", "fp16")
HOPELESS = 8.0
"""The default suite leaves out a dtype that the CPU multiplies this many times slower than float32."""


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select workloads."""
    add = parser.add_argument_group("workloads").add_argument
    suites = f"suites, separated by commas: {', '.join(SUITES)}, all of products (default: {USUAL_SUITE})"
    add("--suite", default="", help=suites)
    own = "a workload of your own instead of a suite: G,M per group,N,K; may be repeated"
    add("--shape", action="append", default=[], help=own)
    add("--only", default="", help="keep workloads whose key contains one of these texts, separated by commas")
    add("--dist", default="", help="keep workloads with these distributions, separated by commas")
    add("--dtypes", default="", help=f"dtypes, separated by commas, instead of a workload's own: {', '.join(DTYPES)}")
    add("--nt", action="store_true", help="store B as [G, N, K] and pass the transpose")


def asks_nothing(args: argparse.Namespace) -> bool:
    """Whether a command line leaves the selection to the default."""
    return not (args.suite or args.shape or args.dtypes or getattr(args, "problem", None))


@lru_cache(maxsize=1)
def worthwhile_dtypes() -> tuple[str, ...]:
    """The dtypes that this CPU multiplies at a useful speed. Reports the others on stderr."""
    us: dict[str, float] = {}
    for dtype in CPU_DTYPES:
        x = torch.ones(256, 256, dtype=DTYPES[dtype])
        us[dtype] = min(measure({dtype: partial(torch.mm, x, x)}, "cpu", reps=7, min_reps=7)[dtype].samples)
    slower = {dtype: us[dtype] / us["fp32"] for dtype in CPU_DTYPES if us[dtype] > HOPELESS * us["fp32"]}
    for dtype, factor in slower.items():
        print(f"left out: {dtype}, {factor:.0f} times slower here than fp32 (--dtypes {dtype} for it)", file=sys.stderr)
    return tuple(dtype for dtype in CPU_DTYPES if dtype not in slower)


def selected(args: argparse.Namespace, device: torch.device) -> list[Workload]:
    """The workloads that the arguments name.

    Raises:
        InvalidSetting: for a name that is unknown, or where no workload is left.
    """
    if args.shape and args.suite:
        raise InvalidSetting("--suite and --shape: name a suite or one's own workloads, not both")
    cases = [parse_shape(text) for text in args.shape] or suite(args.suite or USUAL_SUITE)
    usual = ",".join(worthwhile_dtypes()) if asks_nothing(args) and device.type == "cpu" else ""
    if dtypes := parts(args.dtypes or usual):
        cases = list({c.key: c for dtype in dtypes for c in (with_dtype(case, dtype) for case in cases)}.values())
    cases = list({case.key: case for case in (case.for_device(device) for case in cases)}.values())
    cases = [replace(case, trans_b=True) if args.nt and case.form != "layer" else case for case in cases]
    only, dists = parts(args.only), parts(args.dist)
    left = [c for c in cases if not only or any(part in c.key for part in only)]
    left = [c for c in left if not dists or c.distribution in dists]
    if not left:
        asked = " and ".join(f"--{name} {text!r}" for name, text in (("only", args.only), ("dist", args.dist)) if text)
        seen = ", ".join(sorted({c.distribution for c in cases}))
        raise InvalidSetting(
            f"no workload is left: {asked} matches none of {len(cases)} (by distribution: {seen}); "
            "`multigemm bench --list` prints their keys"
        )
    return left


def above_zero(args: argparse.Namespace, *names: str) -> None:
    """Refuses bounds of 0 or less, which would leave nothing to do."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise InvalidSetting(f"--{name.replace('_', '-')} {value:g}: it has to be above 0")
