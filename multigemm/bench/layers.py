"""The suite `layers`: whole mixture-of-experts layers, forward and training, beside transformers' implementations.

    multigemm bench --suite layers                                  # on a GPU
    multigemm bench --suite layers --only Qwen3 --peers none
    multigemm bench --suite layers --device cpu                     # extents and tokens divided by CPU_SCALE

Contenders share weights, tokens and a random routing. Each result, and in training the gradient of x, is compared with
a loop over experts in float32 before anything is timed; who is wrong or raises is left out, with the reason. Times are
medians of the one clock, calls interleaved: of a CUDA graph and of an eager call, of which the shorter one counts.
Floor: max(FLOPs / the machine's dense rate, bytes / its copy rate); bytes are those of the weights of experts that have
a token and of the tokens in and out, in training also those of all gradients. `kept` is what backward keeps for each
token beside x and the weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multigemm import fleet as places
from multigemm.bench import machine
from multigemm.bench.workloads import Rates
from multigemm.errors import InvalidSetting
from multigemm.integrations.expert_network import Network
from multigemm.nn import Experts
from multigemm.select import registry
from multigemm.select.timing import measure

SUITE = "layers"
TOKENS, TRAINED = (1, 16, 64, 512, 4096, 16384), (512, 4096, 16384)
CPU_SCALE = 32
LIMIT = 2e-2
"""The error of a right result, in norm: bfloat16 rounds products, gates and sums."""
CHECKED_TOKENS = 4096
"""Of a training pass, at most: the loop in float32 keeps all that its gradients need."""


@dataclass(frozen=True)
class Layer:
    """The extents of a model's layer, and its gate."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    network: Network = field(default_factory=Network)
    bias: bool = False


GPT_OSS = Network("swiglu", "interleaved", 1.702, 1.0, 7.0, stacked=True)
LAYERS = (
    Layer("Mixtral", 8, 2, 4096, 14336),
    Layer("Qwen3-30B", 128, 8, 2048, 768),
    Layer("DeepSeek-V3", 256, 8, 7168, 2048),
    Layer("gpt-oss-20b", 32, 4, 2880, 2880, GPT_OSS, bias=True),
)


@dataclass(frozen=True)
class LayerCase:
    """A layer with so many tokens."""

    layer: Layer
    tokens: int
    training: bool

    @property
    def key(self) -> str:
        """What `--only` looks at."""
        return f"{self.layer.name}/{self.tokens}/{'training' if self.training else 'forward'}"

    def floor_us(self, active: int, rates: Rates) -> float:
        """What no layer on this machine undercuts; `active`: experts that have a token."""
        layer, size = self.layer, 2
        pairs, expert = self.tokens * layer.top_k, 3 * layer.hidden * layer.inner * size
        flops, moved = 6.0 * pairs * layer.hidden * layer.inner, active * expert + 2 * self.tokens * layer.hidden * size
        if self.training:
            flops *= 3
            moved = (2 * active + layer.experts) * expert + 5 * self.tokens * layer.hidden * size
        return max(flops / rates.tflops, moved / rates.tbps) / 1e6


@dataclass
class Row:
    """What was found of one contender in one case; times in microseconds."""

    case: str
    contender: str
    floor_us: float
    us: float = 0.0
    graph_us: float = 0.0
    eager_us: float = 0.0
    kept: float = 0.0
    error: str = ""


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Contender = tuple[Forward, list[Tensor]]
"""A layer as a function of x, experts and their weights, and its parameters."""


def cases(only: list[str], scale: int = 1) -> list[LayerCase]:
    """The cases whose keys contain one of these parts (all, if none is named), divided by `scale`."""
    every = [(layer, tokens, False) for layer in LAYERS for tokens in TOKENS]
    every += [(layer, tokens, True) for layer in LAYERS for tokens in TRAINED]
    asked = [case for case in (LayerCase(*each) for each in every) if not only or any(x in case.key for x in only)]
    if not asked:
        raise InvalidSetting(f"--only {','.join(only)!r} matches no layer: `multigemm bench --list --suite {SUITE}`")
    return asked if scale == 1 else list(dict.fromkeys(map(partial(_smaller, scale=scale), asked)))


def _smaller(case: LayerCase, scale: int) -> LayerCase:
    layer = case.layer
    hidden, inner = (max(16, n // scale // 16 * 16) for n in (layer.hidden, layer.inner))
    experts = min(layer.experts, 32)
    return LayerCase(
        replace(layer, hidden=hidden, inner=inner, experts=experts), max(1, case.tokens // scale), case.training
    )


# --- operands, and what is right ----------------------------------------------------------------------


@dataclass
class Operands:
    """The weights of a layer, and a random routing."""

    layer: Layer
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    x: Tensor
    index: Tensor
    weights: Tensor

    @property
    def active(self) -> int:
        """Experts that have a token."""
        return len(set(self.index.flatten().tolist()))


def _generator(case: LayerCase, device: torch.device) -> torch.Generator:
    """Its own, since a capture that fails leaves torch's default one unusable."""
    return torch.Generator(device=device).manual_seed(case.layer.experts * 100003 + case.tokens)


def operands(case: LayerCase, device: torch.device) -> Operands:
    """Of a seed that the case alone decides."""
    layer, dtype = case.layer, torch.bfloat16
    draw = _generator(case, device)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, scale, generator=draw)

    shapes = (2 * layer.inner, layer.hidden), (layer.hidden, layer.inner)
    up, down = (
        normal(layer.experts, *(shape[::-1] if layer.network.stacked else shape), scale=shape[1] ** -0.5)
        for shape in shapes
    )
    biases = [normal(layer.experts, out) if layer.bias else None for out, _ in shapes]
    logits = torch.rand(case.tokens, layer.experts, device=device, generator=draw)
    weights, index = logits.softmax(-1).topk(layer.top_k)
    return Operands(layer, up, down, biases[0], biases[1], normal(case.tokens, layer.hidden), index, weights.to(dtype))


def by_loop(given: Operands, x: Tensor) -> Tensor:
    """The layer expert by expert in float32."""
    layer, y = given.layer, torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for expert in sorted(set(given.index.flatten().tolist())):
        token, place = (given.index == expert).nonzero(as_tuple=True)
        up, down = (
            w[expert].float() if layer.network.stacked else w[expert].float().t() for w in (given.up, given.down)
        )
        hidden = x[token].float() @ up
        hidden = hidden if given.up_bias is None else hidden + given.up_bias[expert].float()
        rows = layer.network.activate(hidden) @ down
        rows = rows if given.down_bias is None else rows + given.down_bias[expert].float()
        y = y.index_add(0, token, rows * given.weights[token, place, None].float())
    return y


def wrong(forward: Forward, given: Operands, training: bool) -> str:
    """How a contender's result, or gradient of x, differs from the loop's; "" for a right one."""
    x = given.x[:CHECKED_TOKENS] if training else given.x
    part = replace(given, x=x, index=given.index[: len(x)], weights=given.weights[: len(x)])
    with torch.no_grad():
        found = _difference("the result", forward(x, part.index, part.weights), by_loop(part, x))
    if found or not training:
        return found
    flow = torch.empty_like(x).normal_(generator=torch.Generator(device=x.device).manual_seed(0))
    one, other = x.detach().requires_grad_(), x.float().requires_grad_()
    (got,) = torch.autograd.grad(forward(one, part.index, part.weights), one, flow)
    (want,) = torch.autograd.grad(by_loop(part, other), other, flow.float())
    return _difference("the gradient of x", got, want)


def _difference(what: str, got: Tensor, want: Tensor) -> str:
    error = ((got.float() - want).norm() / want.norm().clamp_min(1e-30)).item()
    return "" if error <= LIMIT else f"wrong: {what} is off by {error:.2g} in norm"


# --- who is measured ------------------------------------------------------------------------------------


def ours(given: Operands, backend: str, fused: bool) -> Contender:
    """`nn.Experts`."""
    layer = given.layer
    _, layout, alpha, beta, limit, stacked, *_ = layer.network
    made = Experts(
        layer.experts, layer.hidden, layer.inner, bias=layer.bias, backend=backend, glu_layout=layout, glu_alpha=alpha,
        glu_beta=beta, glu_limit=limit, stacked=stacked, fused=fused, device="meta", dtype=given.x.dtype,
    )  # fmt: skip
    return made, _hold(made, given)


def _hold(module: nn.Module, given: Operands) -> list[Tensor]:
    """Gives a module the shared weights; returns them as its parameters."""
    named = {"gate_up_proj": given.up, "down_proj": given.down}
    if given.up_bias is not None and given.down_bias is not None:
        named |= {"gate_up_proj_bias": given.up_bias, "down_proj_bias": given.down_bias}
    for name, x in named.items():
        setattr(module, name, nn.Parameter(x))
    return [getattr(module, name) for name in named]


def of_transformers(given: Operands, implementation: str, compiled: bool) -> Contender:
    """The experts of transformers' models, by one of its implementations."""
    layer = given.layer
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
    parameters = _hold(module, given)
    return (torch.compile(module, dynamic=False) if compiled else module), parameters


PEERS = {
    "transformers eager": ("eager", False),
    "transformers grouped_mm": ("grouped_mm", False),
    "transformers grouped_mm, compiled": ("grouped_mm", True),
    "transformers multigemm": ("multigemm", False),
}


def contenders(backends: str, peers: str, device: torch.device) -> dict[str, Callable[[Operands], Contender]]:
    """By name what makes a layer of the shared weights; none of what is not installed."""
    found: dict[str, Callable[[Operands], Contender]] = {}
    for backend in [] if backends == "none" else [x for x in backends.split(",") if x] or ["auto"]:
        if backend != "auto":
            registry.get(backend)  # raises for one that does not exist
        for fused in (True, False):
            found[f"{backend}, {'fused' if fused else 'in steps'}"] = partial(ours, backend=backend, fused=fused)
    if peers == "none" or importlib.util.find_spec("transformers") is None:
        return found
    import multigemm.integrations.transformers  # noqa: F401  (registers the name "multigemm")

    for name, (implementation, compiled) in PEERS.items():
        if (not peers or implementation in peers) and not (compiled and device.type == "cpu"):
            found[name] = partial(of_transformers, implementation=implementation, compiled=compiled)
    return found


# --- measuring ------------------------------------------------------------------------------------------


def kept_per_token(forward: Forward, given: Operands, parameters: list[Tensor]) -> float:
    """Bytes that a forward pass keeps for backward, beside x, routing and parameters."""
    known = {x.untyped_storage().data_ptr() for x in (*parameters, given.x, given.index, given.weights)}
    seen: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    leaf = given.x.detach().requires_grad_()
    known.add(leaf.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward(leaf, given.index, given.weights.detach().requires_grad_())
    return sum(seen.values()) / len(given.x)


def _step(forward: Forward, given: Operands, parameters: list[Tensor], flow: Tensor) -> Any:
    """Forward and all gradients."""
    leaves = [given.x.detach().requires_grad_(), given.weights.detach().requires_grad_()]
    return torch.autograd.grad(forward(leaves[0], given.index, leaves[1]), [*leaves, *parameters], flow)


def _forward(forward: Forward, given: Operands) -> Tensor:
    with torch.no_grad():
        return forward(given.x, given.index, given.weights)


def measured(
    case: LayerCase, makers: dict[str, Callable[[Operands], Contender]], device: torch.device, rates: Rates,
    budget_ms: float,
) -> Iterator[Row]:  # fmt: skip
    """A row for each contender of a case."""
    given, calls, rows = operands(case, device), dict[str, Callable[[], Any]](), dict[str, Row]()
    flow = torch.empty_like(given.x).normal_(generator=_generator(case, device))
    floor = case.floor_us(given.active, rates)
    for name, make in makers.items():
        row = rows[name] = Row(case.key, name, round(floor, 2))
        try:
            forward, parameters = make(given)
            row.error = wrong(forward, given, case.training)
            if not row.error and case.training:
                row.kept = kept_per_token(forward, given, parameters)
        except Exception as error:  # of a peer, or a refusal: the reason stands in its row
            row.error = f"{type(error).__name__}: {str(error)[:300]}"
        if not row.error:
            calls[name] = (
                partial(_step, forward, given, parameters, flow) if case.training else partial(_forward, forward, given)
            )
    for mode in ("cold", "graph") if device.type == "cuda" else ("cold",):
        for name, timing in measure(calls, device, mode, budget_ms=budget_ms * max(1, len(calls))).items():
            if timing.ok:
                setattr(rows[name], "graph_us" if mode == "graph" else "eager_us", round(timing.median, 2))
            elif mode == "cold":
                rows[name].error = str(timing.error)
    for row in rows.values():
        row.us = min((us for us in (row.graph_us, row.eager_us) if us), default=0.0)
        yield row


def line(row: Row) -> str:
    """A row for people."""
    if row.error or not row.us:
        return f"  {row.contender:36} {row.error or 'not timed'}"
    times = ", ".join(f"{name} {us:.1f}" for name, us in (("graph", row.graph_us), ("eager", row.eager_us)) if us)
    kept = f"  keeps {row.kept:,.0f} bytes a token" if row.kept else ""
    return f"  {row.contender:36} {row.us:10.1f} us  {row.floor_us / row.us:5.2f} of the floor  ({times}){kept}"


def listed() -> str:
    """What `--list` prints."""
    keys = "\n".join(f"  {case.key}" for case in cases([]))
    return f"{SUITE}: {len(cases([]))} whole layers (multigemm bench --suite {SUITE}, alone)\n{keys}"


def main(args: argparse.Namespace) -> int:
    """Measures what was asked for; 0, or 1 if nothing could be timed."""
    device = places.default_device(args.device)
    scale = 1 if device.type == "cuda" else CPU_SCALE
    asked = cases([part for part in args.only.split(",") if part], scale)
    if args.floor:
        tflops, tbps = map(float, args.floor.split(","))
        rates = Rates(tflops, tbps)
    else:
        rates = machine.measured_rates(device, {"bf16"})["bf16"]
    makers, rows = contenders(args.backends, args.peers, device), list[Row]()
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.json or args.out / "layers.json"
    report: dict[str, Any] = {"machine": machine.describe(device), "scale": scale, "rates": asdict(rates)}
    for case in asked:
        print(f"{case.key}, {case.layer.experts} experts, {case.layer.hidden} x {case.layer.inner}", flush=True)
        for row in measured(case, makers, device, rates, args.budget_ms or 100.0):
            rows.append(row)
            print(line(row), flush=True)
        target.write_text(json.dumps(report | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(f"{target}")
    return 0 if any(row.us for row in rows) else 1
