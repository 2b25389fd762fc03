"""Whole mixture-of-experts layers as workloads: the suites `layers` (forward and training) and `quantised-layers`.

    multigemm bench --suite layers                                  # on a GPU
    multigemm bench --suite layers --only Qwen3 --peers none
    multigemm bench --suite layers --device cpu                     # extents and tokens divided by CPU_SCALE

All entries share weights, tokens and a random routing, and go through the runner as products do. A layer in bfloat16
is compared with a loop over experts in float32: its result, and in training the gradient of x. A layer whose weights
(and activations) are quantised tells its error, the norm of the difference over the norm of the result. Bytes of the
floor are those of the weights of experts that have a token and of the tokens in and out, in training also those of all
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from multigemm import quantize
from multigemm.api import grouped_gemm
from multigemm.bench.entries import Entry, Prepared, Refused
from multigemm.bench.operands import Matrices, float32_precision
from multigemm.bench.reports import AUTO, STATIC
from multigemm.bench.workloads import LAYERS, Layer, Workload
from multigemm.errors import LibraryError
from multigemm.integrations.expert_network import combine, dispatch, route
from multigemm.integrations.layer_ops import swiglu
from multigemm.nn import Experts

WHOLE, QUANTISED = "layers", "quantised-layers"
TOKENS, TRAINED = (1, 16, 64, 512, 4096, 16384), (512, 4096, 16384)
TOKENS_QUANTISED = (1, 64, 4096)
CPU_SCALE = 32
LIMIT = 2e-2
"""The error of a right result in bfloat16, in norm: products, gates and sums are rounded."""
CHECKED_TOKENS = 4096
"""The largest number of tokens of a checked training pass: the loop in float32 keeps all that its gradients need."""
FORMATS: dict[str, tuple[quantize.Format, str, torch.dtype, float]] = {
    "fp8-blocks": ("e4m3", "128x128", torch.float32, 0.1),
    "fp8-weights": ("e4m3", "128x128", torch.float32, 0.1),
    "mxfp4-weights": ("e2m1", "1x32", torch.float8_e8m0fnu, 0.3),
}
"""Of the weights of a quantised layer: elements, what a scale covers, scales, and the largest error of a right result.
"fp8-blocks" also quantises activations, 1 x 128, before both products, as DeepSeek-V3 has it."""

Forward = Callable[[Tensor, Tensor, Tensor], Any]
"""A layer as a function of x, experts and their weights."""


@dataclass(frozen=True)
class LayerCase(Workload):
    """A layer with `total` tokens. `distribution` is "forward" or "training"."""

    layer: Layer = field(kw_only=True)

    @property
    def training(self) -> bool:
        return self.distribution == "training"

    @cached_property
    def routing(self) -> tuple[Tensor, Tensor]:
        """Experts and weights of each token [tokens, top k]. The seed depends on the case alone."""
        draw = torch.Generator().manual_seed(self.layer.experts * 100003 + self.total)
        logits = torch.rand(self.total, self.layer.experts, generator=draw)
        weights, index = logits.softmax(-1).topk(self.layer.top_k)
        return index, weights

    @cached_property
    def active(self) -> int:
        """The number of experts that have a token."""
        return len(set(self.routing[0].flatten().tolist()))

    @property
    def flops(self) -> int:
        products = 6 * self.total * self.layer.top_k * self.layer.hidden * self.layer.inner
        return 3 * products if self.training else products

    @property
    def bytes(self) -> int:
        expert, tokens = self._expert_bytes, self.total * self.layer.hidden * self.torch_dtype.itemsize
        if self.training:
            return (2 * self.active + self.layer.experts) * expert + 5 * tokens
        return self.active * expert + 2 * tokens

    @property
    def _expert_bytes(self) -> int:
        return 3 * self.layer.hidden * self.layer.inner * self.torch_dtype.itemsize

    @property
    def resident_bytes(self) -> int:
        return self.layer.experts * self._expert_bytes

    def describe(self) -> str:
        w = self.layer
        extents = f"E={w.experts} top {w.top_k} H={w.hidden} I={w.inner} T={self.total}"
        return f"layer {extents} {self.distribution} {self.dtype}"

    def for_device(self, device: torch.device) -> Workload:
        if device.type != "cpu":
            return self
        return layer_case(self.suite, self.layer.scaled(CPU_SCALE), max(1, self.total // CPU_SCALE), self.distribution)


def layer_case(suite: str, layer: Layer, tokens: int, distribution: str) -> LayerCase:
    """A layer with a number of tokens."""
    name = f"{layer.name}:{tokens}"
    return LayerCase(name, suite, "layer", layer.experts, total=tokens, distribution=distribution, layer=layer)


def whole_layers() -> list[Workload]:
    """The suite `layers`."""
    forward = [(layer, tokens, "forward") for layer in LAYERS.values() for tokens in TOKENS]
    training = [(layer, tokens, "training") for layer in LAYERS.values() for tokens in TRAINED]
    return [layer_case(WHOLE, *each) for each in (*forward, *training)]


def quantised_layers() -> list[Workload]:
    """The suite `quantised-layers`."""
    return [layer_case(QUANTISED, LAYERS["deepseek-v3"], tokens, "forward") for tokens in TOKENS_QUANTISED]


# --- operands, and what is right ----------------------------------------------------------------------


@dataclass
class LayerTensors:
    """The weights of a layer, its tokens and their routing."""

    workload: LayerCase
    up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor] | None
    x: Tensor
    flow: Tensor
    index: Tensor
    weights: Tensor
    quantised: dict[str, Experts] = field(default_factory=dict)

    def poison(self) -> None:
        """Results are new tensors: there is nothing to poison."""

    def reference(self) -> LayerTruth:
        """The result of the loop over experts, and in training the gradient of x, for the tokens that are checked."""
        with float32_precision("highest"):
            return LayerTruth(self.checked(partial(by_loop, self), torch.float32))

    def checked(self, forward: Forward, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The result and, in training, the gradient of x for the tokens that are checked."""
        if not self.workload.training:
            with torch.no_grad():
                return [forward(self.x.to(dtype or self.x.dtype), self.index, self.weights)]
        few = slice(0, CHECKED_TOKENS)
        x = self.x[few].detach().to(dtype or self.x.dtype).requires_grad_()
        y = forward(x, self.index[few], self.weights[few])
        (gradient,) = torch.autograd.grad(y, x, self.flow[few].to(y.dtype))
        return [y.detach(), gradient]

    def step(self, forward: Forward, parameters: list[Tensor]) -> Any:
        """Runs forward, and computes all gradients."""
        leaves = [self.x.detach().requires_grad_(), self.weights.detach().requires_grad_()]
        return torch.autograd.grad(forward(leaves[0], self.index, leaves[1]), [*leaves, *parameters], self.flow)

    def once(self, forward: Forward) -> Any:
        """Runs forward alone."""
        with torch.no_grad():
            return forward(self.x, self.index, self.weights)


def make_layer(case: LayerCase, device: torch.device) -> LayerTensors:
    """Seeded random tensors of a layer."""
    layer, dtype = case.layer, case.torch_dtype
    if not dtype.is_floating_point:
        raise Refused(f"a layer has no {case.dtype}")
    draw = torch.Generator(device=device).manual_seed(layer.experts * 100003 + case.total)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, scale, generator=draw)

    shapes = (2 * layer.inner, layer.hidden), (layer.hidden, layer.inner)
    up, down = (
        normal(layer.experts, *(shape[::-1] if layer.stacked else shape), scale=shape[1] ** -0.5) for shape in shapes
    )
    biases = (normal(layer.experts, shapes[0][0]), normal(layer.experts, shapes[1][0])) if layer.bias else None
    x, flow = (normal(case.total, layer.hidden) for _ in range(2))
    index, weights = case.routing
    return LayerTensors(case, up, down, biases, x, flow, index.to(device), weights.to(device, dtype))


def by_loop(given: LayerTensors, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The layer computed expert by expert in float32."""
    layer, y = given.workload.layer, torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for expert in sorted(set(index.flatten().tolist())):
        token, place = (index == expert).nonzero(as_tuple=True)
        up, down = (w[expert].float() if layer.stacked else w[expert].float().t() for w in (given.up, given.down))
        hidden, rows = x[token].float() @ up, None
        if given.biases is not None:
            hidden, rows = hidden + given.biases[0][expert].float(), given.biases[1][expert].float()
        results = layer.gate(hidden) @ down
        results = results if rows is None else results + rows
        y = y.index_add(0, token, results * weights[token, place, None].float())
    return y


@dataclass
class LayerTruth:
    """The result of a layer in float32, and in training the gradient of x."""

    expected: list[Tensor]

    def verdict(self, out: Matrices) -> str:
        """How a result, or the gradient of x, differs; "" if it is right."""
        for what, got, want in zip(("the result", "the gradient of x"), out, self.expected, strict=False):
            if not (off := error(got, want)) <= LIMIT:
                return f"wrong: {what} is off by {off:.2g} in norm"
        return ""


def error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm of the right result."""
    return float((got.float() - want).norm() / want.norm().clamp_min(1e-30))


# --- who is measured ------------------------------------------------------------------------------------


def prepared(given: LayerTensors, forward: Forward, parameters: list[Tensor], kernel: str) -> Prepared:
    """A layer ready to be timed. In training, `why` tells the bytes that a forward pass keeps."""
    if not given.workload.training:
        return Prepared(partial(given.once, forward), None, kernel, unpack=lambda y: [y])
    kept = f"keeps {kept_per_token(forward, given, parameters):,.0f} bytes a token for backward"
    call = partial(given.step, forward, parameters)
    return Prepared(call, None, kernel, why=kept, unpack=lambda _: given.checked(forward))


def kept_per_token(forward: Forward, given: LayerTensors, parameters: list[Tensor]) -> float:
    """The bytes per token that a forward pass keeps for backward, besides x, routing and parameters."""
    leaf = given.x.detach().requires_grad_()
    known = {x.untyped_storage().data_ptr() for x in (*parameters, leaf, given.index, given.weights)}
    seen: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward(leaf, given.index, given.weights.detach().requires_grad_())
    return sum(seen.values()) / len(given.x)


def hold(module: nn.Module, given: LayerTensors) -> list[Tensor]:
    """Sets a module's weights to the shared ones. Returns them as its parameters."""
    named = {"gate_up_proj": given.up, "down_proj": given.down}
    if given.biases is not None:
        named |= dict(zip(("gate_up_proj_bias", "down_proj_bias"), given.biases, strict=True))
    for name, x in named.items():
        setattr(module, name, nn.Parameter(x))
    return [getattr(module, name) for name in named]


def experts_of(given: LayerTensors, backend: str, fused: bool) -> tuple[Experts, list[Tensor]]:
    """`nn.Experts` with the shared weights, and its parameters."""
    layer = given.workload.layer
    shape = layer.experts, layer.hidden, layer.inner
    made = Experts(*shape, backend=backend, fused=fused, device="meta", dtype=given.x.dtype, **layer.options)
    return made, hold(made, given)


def _ours(given: LayerTensors, backend: str, fused: bool) -> Prepared:
    return prepared(given, *experts_of(given, backend, fused), f"nn.Experts, {'fused' if fused else 'in steps'}")


def _quantised(given: LayerTensors, name: str) -> Prepared:
    """A quantised layer, which is right up to an error of its own; `why` tells the error."""
    format, scale, scale_dtype, most = FORMATS[name]
    if format not in given.quantised:
        dense, _ = experts_of(given, "auto", False)
        given.quantised[format] = dense.quantize_(format, scale, scale_dtype=scale_dtype)
    held = given.quantised[format]
    forward = partial(_by_blocks, held) if name == "fp8-blocks" else held
    few = slice(0, CHECKED_TOKENS)
    x, index, weights = given.x[few], given.index[few], given.weights[few]
    with torch.no_grad(), float32_precision("highest"):
        off = error(forward(x, index, weights), by_loop(given, x, index, weights))
    if not off <= most:
        raise LibraryError(f"wrong: the result is off by {off:.2g} in norm")
    return Prepared(partial(given.once, forward), None, "nn.Experts, quantised", name, f"error {off:.4f}")


def _by_blocks(held: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Both products in float8: tokens are quantised once, and gathered with their scales."""

    def product(name: str, rows: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        codes, scales = getattr(held, name).mT, getattr(held, f"{name}_scale").mT
        found: Tensor = grouped_gemm(rows, codes, ends=ends, scale_a=scale, scale_b=scales, out_dtype=torch.bfloat16)
        return found

    routing = route(index, held.num_experts)
    tokens = quantize.quantize(x, "e4m3", "1x128")
    rows = dispatch(tokens.data.view(torch.uint8), routing).view(tokens.data.dtype)
    hidden = swiglu(product("gate_up_proj", rows, dispatch(tokens.scale, routing), routing.ends))
    inner = quantize.quantize(hidden, "e4m3", "1x128")
    return combine(product("down_proj", inner.data, inner.scale, routing.ends), weights, routing)


def layer_entries(backends: list[str]) -> list[Entry]:
    """Fused layers and layers in steps by each backend ("auto", if none is named), and quantised layers."""
    found = []
    for backend in [name for name in backends if name != STATIC] or [AUTO]:
        for name, fused in (("fused", True), ("steps", False)):
            label = name if backend == AUTO else f"{name}[{backend}]"
            prepare = partial(_ours, backend=backend, fused=fused)
            found.append(Entry(label, "backend", prepare, takes=is_layer))
    for name in FORMATS:
        prepare = partial(_quantised, name=name)
        found.append(Entry(name, "backend", prepare, checks=False, takes=lambda case: case.suite == QUANTISED))
    return found


def is_layer(case: Workload) -> bool:
    """Whether a workload is a whole layer."""
    return isinstance(case, LayerCase)
