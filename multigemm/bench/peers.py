"""Peers: grouped GEMMs of other libraries, each behind an adapter that imports it only when needed.

An adapter imports its library when it prepares a call. If the library is not installed, or does not run a workload, the
reason becomes the row. What a library requires of its inputs (padded rows, another memory order of the weights) is done
before the timing and noted in `why`; that favours the peer. Results come back in the workload's row order, so that they
can be checked.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from multigemm.bench.entries import Entry, Prepared, Refused
from multigemm.bench.layers import LayerTensors, hold, is_layer, prepared
from multigemm.bench.operands import Tensors, is_plain
from multigemm.bench.workloads import Workload
from multigemm.errors import InvalidSetting, LibraryError

Group = tuple[Tensor, Tensor, Tensor]
cuda: Any = torch.cuda  # parts of torch.cuda carry no types


# --- PyTorch: grouped_mm with either memory order of the weights, a loop, and bmm ------------------


def without_epilogue(tensors: Tensors) -> None:
    """Refuses workloads with an epilogue: peers run plain products only."""
    if tensors.workload.recipe is not None:
        raise Refused("this adapter runs operands without scales")
    if tensors.problem.bias is not None or not is_plain(tensors.problem):
        raise Refused("this adapter runs products without a bias or another epilogue")
    if tensors.workload.dtype == "tf32":
        raise Refused("this adapter does not switch torch to tf32")


def grouped_mm() -> Callable[..., Any]:
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise Refused(f"torch {torch.__version__} has no grouped_mm")
    return found  # type: ignore[no-any-return]


def _grouped(tensors: Tensors) -> Prepared:
    if tensors.workload.dtype == "fp8-rows":
        return _scaled_grouped(tensors)
    without_epilogue(tensors)
    if tensors.offsets is None:
        raise Refused("grouped_mm takes packed groups with offsets, not lists or masks")
    if isinstance(tensors.b, Tensor) and tensors.workload.shared_b:
        raise Refused("grouped_mm takes one weight per group, not a shared one")
    if tensors.offsets.is_cuda and _odd_start(tensors.workload):
        raise Refused("grouped_mm asserts on the device, and ends its context, where groups begin off 16 bytes")
    call, ends, a, b = grouped_mm(), tensors.offsets[1:].contiguous(), tensors.a, tensors.b
    return Prepared(lambda: call(a, b, offs=ends), None, "grouped_mm", why="allocates its result")


def _scaled_grouped(tensors: Tensors) -> Prepared:
    """torch's scaled_grouped_mm, called as an operator, whose arguments are the same in all versions."""
    workload, given = tensors.workload, tensors.problem
    if workload.form != "jagged_m" or tensors.offsets is None:
        raise Refused("packed rows only")
    if tensors.offsets.device.type != "cuda":
        raise Refused("scaled_grouped_mm needs a CUDA device")
    if workload.n % 16 or workload.k % 16:
        raise Refused("scaled_grouped_mm takes N and K that are multiples of 16")
    a, b, scale_a, scale_b = given.a, given.b, given.scale_a, given.scale_b
    assert isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(scale_a, Tensor)
    assert isinstance(scale_b, Tensor)
    rows, columns = scale_a.reshape(-1).contiguous(), scale_b.reshape(workload.groups, -1).contiguous()
    ends = tensors.offsets[1:].contiguous()

    def call() -> Tensor:
        return torch._scaled_grouped_mm(a, b, rows, columns, offs=ends, out_dtype=torch.bfloat16)

    return Prepared(call, None, "_scaled_grouped_mm", why="allocates its result")


def _odd_start(workload: Workload) -> int:
    """The start of a group, counted along rows of memory, that is not a multiple of 16 bytes; 0 if there is none."""
    along_rows = {"jagged_n": True, "jagged_k": workload.trans_b or not workload.trans_a}.get(workload.form, False)
    starts = workload.sizes.cumsum()[:-1] if along_rows else ()
    return next((int(start) for start in starts if workload.torch_dtype.itemsize * int(start) % 16), 0)


def _grouped_nt(tensors: Tensors) -> Prepared:
    """torch's grouped_mm on weights that lie in memory as [G, N, K], which torch's kernels prefer."""
    b = tensors.b
    if not isinstance(b, Tensor) or b.dim() != 3 or tensors.workload.trans_b:
        raise Refused("the other memory order is only of interest for [G, K, N] weights in row order")
    without_epilogue(tensors)
    if tensors.workload.form != "jagged_m" or tensors.offsets is None:
        raise Refused("packed rows only")
    call, ends, a = grouped_mm(), tensors.offsets[1:].contiguous(), tensors.a
    turned = b.transpose(1, 2).contiguous().transpose(1, 2)
    return Prepared(
        lambda: call(a, turned, offs=ends), None, "grouped_mm", why="weights turned to [G, N, K] beforehand"
    )


def _loop(tensors: Tensors) -> Prepared:
    without_epilogue(tensors)
    if tensors.workload.dtype == "int8":
        raise Refused("torch.mm has no int8")
    products = [(a, b, out) for a, b, out in tensors.products() if out.numel()]

    def loop() -> None:
        for a, b, out in products:
            torch.mm(a, b, out=out)

    return Prepared(loop, tensors.out, "torch.mm per group", why="knows the sizes on the host")


def _bmm(tensors: Tensors) -> Prepared:
    without_epilogue(tensors)
    workload = tensors.workload
    if workload.dtype == "int8":
        raise Refused("torch.bmm has no int8")
    if len(set(workload.extents)) != 1:
        raise Refused("bmm needs equal groups")
    m, n, k = workload.extents[0]
    products = tensors.products()
    if workload.form == "jagged_m" and isinstance(tensors.a, Tensor) and isinstance(tensors.b, Tensor):
        if workload.shared_b or workload.trans_a:
            raise Refused("bmm needs one weight per group and rows in order")
        a, b = tensors.a.view(len(products), m, k), tensors.b
    elif isinstance(tensors.a, list):
        a, b = torch.stack([x for x, _, _ in products]), torch.stack([y for _, y, _ in products])
    elif workload.form == "batched":
        a, b = tensors.a, tensors.b  # type: ignore[assignment]
    else:
        raise Refused("bmm would need copies of the operands")
    out = torch.empty(len(products), m, n, dtype=a.dtype, device=a.device)
    result = (
        list(out)
        if isinstance(tensors.out, list)
        else out.view(len(products) * m, n)
        if workload.form == "jagged_m"
        else out
    )
    return Prepared(lambda: torch.bmm(a, b, out=out), result, "torch.bmm", why="stacked beforehand")


# --- cublasGemmGroupedBatchedEx --------------------------------------------------------------------

CUDA_TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float32: 0, torch.float64: 1}
COMPUTE_TYPES = {torch.float16: 68, torch.bfloat16: 68, torch.float32: 68, torch.float64: 70}
NORMAL, TRANSPOSED = 0, 1


@lru_cache(maxsize=1)
def cublas_library() -> ctypes.CDLL:
    """The cuBLAS library that torch has loaded, so that torch's handle is valid in it."""
    cuda.current_blas_handle()
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcublas.so" in line}
    if not paths:
        raise Refused("no libcublas.so is loaded in this process")
    found = ctypes.CDLL(sorted(paths)[0])
    if not hasattr(found, "cublasGemmGroupedBatchedEx"):
        raise Refused("this cuBLAS has no cublasGemmGroupedBatchedEx (it came with CUDA 12.5)")
    return found


def _leading(matrix: Tensor) -> tuple[int, int]:
    """(operation, leading dimension) of a row-major matrix that is read as the transpose of a column-major one."""
    rows, cols = matrix.shape
    if matrix.stride(1) == 1 or cols == 1:
        return NORMAL, max(matrix.stride(0) if rows > 1 else cols, cols, 1)
    if matrix.stride(0) == 1 or rows == 1:
        return TRANSPOSED, max(matrix.stride(1), rows, 1)
    raise Refused("cuBLAS needs one contiguous direction")


def _array(kind: Any, values: list[Any]) -> Any:
    return (kind * len(values))(*values)


def _cublas_arguments(groups: list[Group], pointers: list[Tensor], dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments after the handle. The operands are swapped for column-major order."""
    ints, real = ctypes.c_int, ctypes.c_double if dtype == torch.float64 else ctypes.c_float
    count, kind = len(groups), CUDA_TYPES[dtype]
    left, right = [_leading(b) for _, b, _ in groups], [_leading(a) for a, _, _ in groups]
    first, second, result = (ctypes.c_void_p(p.data_ptr()) for p in pointers)
    return (
        _array(ints, [op for op, _ in left]),
        _array(ints, [op for op, _ in right]),
        _array(ints, [out.shape[1] for _, _, out in groups]),
        _array(ints, [out.shape[0] for _, _, out in groups]),
        _array(ints, [a.shape[1] for a, _, _ in groups]),
        _array(real, [1.0] * count),
        *(first, kind, _array(ints, [ld for _, ld in left])),
        *(second, kind, _array(ints, [ld for _, ld in right])),
        _array(real, [0.0] * count),
        *(result, kind, _array(ints, [_leading(out)[1] for _, _, out in groups])),
        *(count, _array(ints, [1] * count), COMPUTE_TYPES[dtype]),
    )


def _cublas_grouped(tensors: Tensors) -> Prepared:
    """One call, host sizes, device pointer arrays, through ctypes.

    cuBLAS is column-major, so each row-major C = A B is asked for as C^T = B^T A^T: operands swapped, N in the place
    of M. Groups without elements are left out; each other group is a group of one.
    """
    without_epilogue(tensors)
    dtype = tensors.workload.torch_dtype
    if dtype not in CUDA_TYPES:
        raise Refused(f"cublasGemmGroupedBatchedEx has no {dtype}")
    cublas = cublas_library()
    groups = [(a, b, out) for a, b, out in tensors.products() if out.numel()]
    if not groups:
        raise Refused("every group is empty")
    pointers = [
        torch.tensor([group[which].data_ptr() for group in groups], dtype=torch.int64, device=groups[0][0].device)
        for which in (1, 0, 2)
    ]
    arguments = _cublas_arguments(groups, pointers, dtype)

    def call() -> object:
        handle = ctypes.c_void_p(cuda.current_blas_handle())
        if status := cublas.cublasGemmGroupedBatchedEx(handle, *arguments):
            raise LibraryError(f"cublasGemmGroupedBatchedEx returned status {status}")
        return pointers  # kept alive with the call

    return Prepared(call, tensors.out, "cublasGemmGroupedBatchedEx", why="knows the sizes on the host")


# --- libraries that a user may have installed: DeepGEMM, QuACK, FBGEMM, OpenAI's triton_kernels ----


def packed_rows(tensors: Tensors, *dtypes: str) -> tuple[Tensor, Tensor, Tensor]:
    """(a [T, K], b [G, K, N], sizes [G] on the device). Raises Refused if the library cannot run this form."""
    workload = tensors.workload
    without_epilogue(tensors)
    if workload.form != "jagged_m" or workload.shared_b or tensors.offsets is None:
        raise Refused("takes packed rows with one weight per group")
    if workload.dtype not in dtypes:
        raise Refused(f"takes {' or '.join(dtypes)}")
    assert isinstance(tensors.a, Tensor)
    assert isinstance(tensors.b, Tensor)
    return tensors.a, tensors.b, torch.diff(tensors.offsets)


def by_rows(b: Tensor) -> Tensor:
    """The weights stored as [G, N, K]."""
    return b.transpose(1, 2).contiguous()


def _deep_gemm(tensors: Tensors) -> Prepared:
    """DeepGEMM, in bfloat16, or in float8 with scales by blocks. Rows are padded to the library's alignment beforehand;
    -1 marks the padding. Scales of tokens are laid out as its kernel reads them, so that the call does not transpose
    them."""
    given, workload = tensors.problem, tensors.workload
    float8 = workload.dtype == "fp8-blocks"
    if not float8:
        packed_rows(tensors, "bf16")
    elif workload.form != "jagged_m":
        raise Refused("packed rows only")
    elif workload.k % 128:
        raise Refused("takes K that is a multiple of 128")
    deep_gemm: Any = importlib.import_module("deep_gemm")
    a, b, scale_a, scale_b = given.a, given.b, given.scale_a, given.scale_b
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    padded_rows, rows, owner = _padding(tensors, int(deep_gemm.get_mk_alignment_for_contiguous_layout()))
    padded = torch.zeros(padded_rows, a.shape[1], dtype=a.dtype, device=a.device)
    padded.view(torch.uint8)[rows] = a.view(torch.uint8)
    out = torch.full((padded_rows, b.shape[2]), float("nan"), dtype=torch.bfloat16, device=a.device)
    name, left, right = "m_grouped_bf16_gemm_nt_contiguous", padded, by_rows(b)
    if float8:
        assert isinstance(scale_a, Tensor) and isinstance(scale_b, Tensor)
        tokens = -(-padded_rows // 4) * 4  # what TMA asks of a line of float32
        scales = torch.ones(scale_a.shape[1], tokens, device=a.device).mT[:padded_rows]
        scales[rows] = scale_a
        name = "m_grouped_fp8_gemm_nt_contiguous"
        left, right = (padded, scales), (right, scale_b.mT.contiguous())  # type: ignore[assignment]
    call = partial(getattr(deep_gemm, name), left, right, out, owner)
    return Prepared(call, None, name, why="rows padded beforehand", unpack=lambda _: out[rows])


def _padding(tensors: Tensors, step: int) -> tuple[int, Tensor, Tensor]:
    """The number of rows if every group is padded to a multiple of `step`; the position and the group of each row."""
    assert tensors.offsets is not None
    device, sizes = tensors.offsets.device, [int(s) for s in tensors.workload.sizes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // step) * step)
    rows = torch.cat([torch.arange(size) + start for size, start in zip(sizes, starts, strict=False)]).to(device)
    owner = torch.full((starts[-1],), -1, dtype=torch.int32, device=device)
    owner[rows] = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(sizes)).to(device)
    return starts[-1], rows, owner


def _quack(tensors: Tensors) -> Prepared:
    """QuACK, with the fastest of its configs for this device, found before the timing."""
    workload = tensors.workload
    if workload.form == "jagged_k":
        without_epilogue(tensors)
        if workload.dtype not in ("bf16", "fp16") or not workload.trans_a or workload.trans_b:
            raise Refused("takes bf16 or fp16 whose tokens are rows in memory")
        a, b, ends = tensors.a, tensors.b, {"cu_seqlens_k": tensors.offsets}
    else:
        a, b, _ = packed_rows(tensors, "bf16", "fp16")
        ends = {"cu_seqlens_m": tensors.offsets}
    known: Any = importlib.import_module("quack.gemm_config")
    product: Any = importlib.import_module("quack.gemm_interface").gemm_tuned.fn
    major, rows, out = torch.cuda.get_device_capability()[0], workload.form == "jagged_m", tensors.out
    configs = [
        config
        for config in known.get_all_configs()
        if config.device_capacity == major and not config.swap_ab and known.config_supports(config, varlen_m=rows)
    ]
    if not configs:
        raise Refused(f"has no config for a device of capability {major}")
    calls = [partial(product, a, b, out, None, config=each, dynamic_scheduler=False, **ends) for each in configs]
    us = [_microseconds(call) for call in calls]
    best = us.index(min(us))
    chosen, why = configs[best], f"the best of its {len(configs)} configs"
    turns = "ping-pong" if chosen.pingpong else "cooperative"
    name = f"{chosen.tile_m}x{chosen.tile_n}, {turns}, cluster {chosen.cluster_m}x{chosen.cluster_n}"
    return Prepared(calls[best], out, "quack.gemm_tuned", name, why=why)


def _microseconds(call: Callable[[], object]) -> float:
    """The best of three calls after a warm-up; a rough clock for choosing among candidates."""
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(4):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return min(times[1:])


def _fbgemm(tensors: Tensors) -> Prepared:
    a, b, sizes = packed_rows(tensors, "bf16")
    name = "fbgemm_gpu.experimental.gemm.triton_gemm.grouped_gemm"
    grouped_gemm: Any = importlib.import_module(name).grouped_gemm
    weights = by_rows(b).reshape(-1, b.shape[1])
    return Prepared(lambda: grouped_gemm(a, weights, sizes), None, "grouped_gemm (Triton)", why="weights as [G*N, K]")


def _triton_kernels(tensors: Tensors) -> Prepared:
    """The folder python/triton_kernels of Triton's repository; the package of that name is another.

    Up to Triton 3.6 its product is `matmul_ogs`, which writes to a given result; then `matmul`.
    """
    a, b, sizes = packed_rows(tensors, "bf16", "fp16")
    why = "metadata made beforehand"
    try:
        matmul: Any = importlib.import_module("triton_kernels.matmul").matmul
    except ModuleNotFoundError:
        return _matmul_ogs(tensors, a, b, sizes, why)
    make: Any = importlib.import_module("triton_kernels.tensor").make_ragged_tensor_metadata
    metadata = make(sizes, a.shape[0])
    call = partial(matmul, a, b, None, a_ragged_metadata=metadata)
    return Prepared(call, None, "triton_kernels.matmul", why=why)


def _matmul_ogs(tensors: Tensors, a: Tensor, b: Tensor, sizes: Tensor, why: str) -> Prepared:
    ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
    make: Any = importlib.import_module("triton_kernels.tensor_details.ragged_tensor").make_ragged_tensor_metadata
    routing = ogs.RoutingData(None, sizes, b.shape[0], 1, make(sizes, a.shape[0]))
    words = {"routing_data": routing, "precision_config": ogs.PrecisionConfig(), "y": tensors.out}
    call = partial(ogs.matmul_ogs, a, b, None, **words)
    return Prepared(call, tensors.out, "triton_kernels.matmul_ogs", why=why)


# --- whole layers: the experts of transformers' models -----------------------------------------------


def _transformers(given: LayerTensors, implementation: str, compiled: bool) -> Prepared:
    """The experts of transformers' models, by one of its implementations."""
    import multigemm.integrations.transformers  # noqa: F401  (registers the name "multigemm")

    layer = given.workload.layer
    if layer.bias:
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Module

        config: Any = GptOssConfig(
            hidden_size=layer.hidden, intermediate_size=layer.inner, num_local_experts=layer.experts
        )
    else:
        from transformers import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Module

        config = Config(hidden_size=layer.hidden, moe_intermediate_size=layer.inner, num_experts=layer.experts)
    config._experts_implementation_internal = implementation
    with torch.device("meta"):
        module: Any = Module(config)
    parameters = hold(module, given)
    forward = torch.compile(module, dynamic=False) if compiled else module
    return prepared(given, forward, parameters, f"transformers, {implementation}")


LAYER_PEERS = {
    "transformers_eager": ("eager", False),
    "transformers_grouped_mm": ("grouped_mm", False),
    "transformers_compiled": ("grouped_mm", True),
    "transformers_multigemm": ("multigemm", False),
}


# --- all of them ------------------------------------------------------------------------------------

PREPARE: dict[str, Callable[[Tensors], Prepared]] = {
    "torch_grouped": _grouped,
    "torch_grouped_nt": _grouped_nt,
    "torch_loop": _loop,
    "torch_bmm": _bmm,
    "cublas_grouped": _cublas_grouped,
    "deep_gemm": _deep_gemm,
    "quack": _quack,
    "fbgemm": _fbgemm,
    "triton_kernels": _triton_kernels,
}
PEERS = {name: Entry(name, "peer", prepare) for name, prepare in PREPARE.items()} | {
    name: Entry(
        name, "backend" if how == "multigemm" else "peer",
        partial(_transformers, implementation=how, compiled=compiled), takes=is_layer,
    )
    for name, (how, compiled) in LAYER_PEERS.items()
}  # fmt: skip
NEEDS = {
    "deep_gemm": ("deep_gemm", "DeepGEMM"),
    "quack": ("quack", "QuACK"),
    "fbgemm": ("fbgemm_gpu", "FBGEMM"),
    "triton_kernels": ("triton_kernels", "OpenAI triton_kernels"),
    **dict.fromkeys(LAYER_PEERS, ("transformers", "transformers")),
}
"""The module that a peer needs, and what the module's library is called."""
ON_GPU = ("cublas_grouped", "torch_grouped_nt", "deep_gemm", "quack", "fbgemm", "triton_kernels",
          "transformers_compiled")  # fmt: skip


def peer_entries(
    names: list[str], device: torch.device, cases: Sequence[Workload]
) -> tuple[list[Entry], dict[str, str]]:
    """The entries of the named peers (by default all that take one of the workloads), and why others are absent."""
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidSetting(f"--peers: no peer is called {unknown[0]!r}; known: {', '.join(PEERS)}, none")
    absent: dict[str, str] = {}
    here: list[Entry] = []
    for name, entry in PEERS.items():
        if name not in names and (names or not any(map(entry.takes, cases))):
            continue
        module, library = NEEDS.get(name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            absent[name] = f"{library} is not installed (no module {module})"
        elif device.type != "cuda" and name in ON_GPU:
            absent[name] = "needs a CUDA device"
        else:
            here.append(entry)
    return here, absent
