"""One ladder for configs: explicit > measured > heuristic. And the table of what was measured.

An entry belongs to (device, spec class, backend) and keeps the best config, its time, and why other
configs failed. Entries come from the files that ship with the package and from the user's own
cache, which wins. The spec class holds exact N and K but only buckets of M and G, so that token
counts that were never measured still find their neighbours. Where the sizes lie is part of the
class, and whether the host sees that they are all equal: a library that needs them on the host is
another choice where it has them there, and a batch of equal groups its best case. Kernels that read
sizes on the device do not care, so that their times on the device stand in for host sizes too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch

from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.planning import launch_cache
from multigemm.problem.spec import OperandSpec, ProblemSpec, bucket
from multigemm.select import forecast
from multigemm.select.forecast import Asked, Lately
from multigemm.select.measured import (
    EQUAL,
    ON_DEVICE,
    ON_HOST,
    SCHEMA,
    Measured,
    config_text,
    encode,
    from_cache,
    unfold,
    where_of,
)
from multigemm.select.measured_cache import FirstMeetings, FirstMet
from multigemm.select.nearest import Estimate, Footprint, Sample, estimates
from multigemm.select.shape import Shape, shape_in
from multigemm.settings import settings


@lru_cache(maxsize=16)
def device_name(device: torch.device) -> str:
    """What entries call a device: its model, not its index."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@lru_cache(maxsize=16)
def capability(device: torch.device) -> str:
    """The generation of a GPU, as in "9.0"; GPUs of one generation run the same kernels."""
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else ""


def _operand_key(x: OperandSpec) -> str:
    short = str(x.dtype).removeprefix("torch.")
    return f"{short}/{x.order}{'' if x.align >= 16 else x.align}{'/shared' if x.shared else ''}"


@lru_cache(maxsize=4096)
def spec_key(spec: ProblemSpec, equal: bool = False) -> str:
    """The class of a spec as readable text; equal texts share measurements.

    `equal` says that the host knows all groups to have one size.
    """
    extents = f"m{spec.m or '*'} n{spec.n or '*'} k{spec.k or '*'}"
    operands = f"{_operand_key(spec.a)} {_operand_key(spec.b)} {_operand_key(spec.out)}"
    where = ON_DEVICE if spec.device_sizes else EQUAL if equal else ON_HOST
    return f"{spec.form} g{bucket(spec.groups)} {extents} t{spec.total} {operands} {spec.precision} {where}"


def _stand_ins(spec: ProblemSpec, equal: bool) -> list[str]:
    """The classes whose measurements hold for a spec, the best first."""
    own = [spec_key(spec, equal)]
    if equal and not spec.device_sizes:
        own.append(spec_key(spec))
    return own if spec.device_sizes else [*own, spec_key(replace(spec, device_sizes=True))]


generation = 0
"""Counts what changed in any table; whatever was chosen by an earlier generation is chosen anew."""


def _change() -> None:
    global generation
    generation += 1
    launch_cache.clear()


class TuningTable:
    """All measurements that this process knows."""

    def __init__(self, cache: DiskCache | None = None) -> None:
        self._cache = cache or DiskCache("tuning")
        tables = list(_tables())
        every = [m for name, raw in tables for entry in raw["entries"] for m in unfold(entry, f"shipped {name}")]
        self._shipped = {self._place(m): m for m in every}
        origins = [raw["origin"] for _, raw in tables]
        self._generations = {o["device"]: o["capability"] for o in origins if o.get("capability")}
        self._own: dict[str, Measured | None] = {}
        self._complete = False
        self._first_met = FirstMeetings(None if cache is None else DiskCache("first_met", cache.folder))
        self._lock = threading.RLock()
        self._lately: dict[tuple[str, int], Lately] = {}
        self._samples: dict[tuple[str, str, tuple[str, ...], int], list[Sample]] = {}
        _change()

    @staticmethod
    def _place(m: Measured) -> str:
        return f"{m.device}|{m.key}|{m.backend}"

    def find(self, backend: str, spec: ProblemSpec, device: torch.device, equal: bool = False) -> Measured | None:
        """The measurement for this class, the user's own first."""
        for key in _stand_ins(spec, equal):
            place = f"{device_name(device)}|{key}|{backend}"
            if place not in self._own:
                self._own[place] = self._read(place)
            if found := self._own[place] or self._shipped.get(place):
                return found
        return None

    def _read(self, place: str) -> Measured | None:
        return from_cache(self._cache.get(fingerprint(SCHEMA, place), ".json"))

    def record(self, measured: Measured) -> bool:
        """Keeps a measurement, in this process and on disk; False where the disk does not take it."""
        place = self._place(measured)
        self._own[place] = measured
        kept = self._cache.put(fingerprint(SCHEMA, place), json.dumps(encode(measured)).encode(), ".json")
        _change()
        return kept

    def learn(self, met: FirstMet) -> None:
        """Keeps what became of one problem, for choices that are still to be made: those that were made stay."""
        with self._lock:
            self._first_met.keep(met)
            self._samples.clear()
            if (its := _together(met.times)) is not None:
                self._lately_on(met.any.device).add(*its)

    def first_met(self, spec: ProblemSpec, device: torch.device, equal: bool, flops: float) -> FirstMet | None:
        """What "auto" measured by itself of this class at about this size; nothing where it may not measure."""
        if not settings().measure:
            return None
        return self._first_met.find(device_name(device), spec_key(spec, equal), flops)

    def keep(self, found: Iterable[Measured]) -> str:
        """Records measurements; where the disk does not take them all, why."""
        kept = [self.record(measured) for measured in found]
        if all(kept):
            return ""
        return f"{settings().cache_dir} cannot be written" if settings().cache else "the cache is off (MULTIGEMM_CACHE)"

    def own(self) -> list[Measured]:
        """Everything in the user's cache that this version can read."""
        raws = (self._cache.get(p.stem, ".json") for p in self._cache.entries() if p.suffix == ".json")
        return [m for raw in raws if (m := from_cache(raw)) is not None]

    def estimates(
        self,
        spec: ProblemSpec,
        device: torch.device,
        equal: bool = False,
        ran: Mapping[str, str] | None = None,
        footprints: Mapping[str, Footprint] | None = None,
        shape: Shape | None = None,
    ) -> list[Estimate]:
        """What other classes that were measured let one expect of each backend, if it runs the configs `ran`, of these
        footprints, on a problem of this shape; empty if there are none.

        What was fitted ships for one generation of GPUs. Else the nearest classes tell: besides the device itself,
        others of its generation that tables ship for count.
        """
        if shape is not None and ran and capability(device) == forecast.CAPABILITY:
            asked = Asked(spec_key(spec, equal), shape, device_name(device), ran, footprints or {})
            if told := forecast.shipped().estimates(asked, self._lately_on(device_name(device))):
                return told
        kinds = tuple(where_of(key) for key in _stand_ins(spec, equal))
        known = self._samples_on(device_name(device), capability(device), kinds)
        want = Sample(spec_key(spec, equal), {}, ran or {}, spec.groups, footprints=footprints or {})
        return estimates(want, known)

    def _lately_on(self, device: str) -> Lately:
        """The classes that the user measured on a device, with what each backend took."""
        with self._lock:
            place = device, generation
            if place not in self._lately:
                self._read_all()
                classes: dict[str, dict[str, Measured]] = {}
                for m in list(self._own.values()):
                    if m is not None and m.device == device and m.us > 0:
                        classes.setdefault(m.key, {})[m.backend] = m
                every = map(_together, [*classes.values(), *(met.times for met in self._met_on(device))])
                self._lately = {place: Lately(its for its in every if its is not None)}
            return self._lately[place]

    def _samples_on(self, device: str, generation_of: str, kinds: tuple[str, ...]) -> list[Sample]:
        """What was measured, by class, on the device or else on another of its generation."""
        with self._lock:
            place = device, generation_of, kinds, generation
            if place not in self._samples:
                akin = [name for name, its in self._generations.items() if its == generation_of and name != device]
                known = {rest: s for name in (*akin, device) for rest, s in self._classes_on(name, kinds).items()}
                self._samples = {
                    place: list(known.values()),
                    **{p: s for p, s in self._samples.items() if p[3] == place[3]},
                }
            return self._samples[place]

    def _classes_on(self, device: str, kinds: tuple[str, ...]) -> dict[str, Sample]:
        """What was measured on a device; a class whose sizes lay in several places counts once."""
        known: dict[str, Sample] = {}
        for m in self._measured_on(device, kinds):
            rest = m.key.removesuffix(where_of(m.key))
            old = known.get(rest, Sample(m.key))
            us, ran = {**old.us, m.backend: m.us}, {**old.ran, m.backend: m.ran or config_text(m.config)}
            footprints = {**old.footprints, m.backend: m.footprint}
            known[rest] = Sample(m.key, us, ran, m.groups, m.flops, device, footprints)
        for met in self._met_on(device):
            m, its = met.any, met.times.items()
            if where_of(m.key) in kinds:
                us, ran = {name: x.us for name, x in its}, {name: x.ran for name, x in its}
                footprints = {name: x.footprint for name, x in its}
                known[f"{m.key} {m.flops}"] = Sample(m.key, us, ran, m.groups, m.flops, device, footprints)
        return known

    def _met_on(self, device: str) -> list[FirstMet]:
        return [met for met in self._first_met.every() if met.any.device == device] if settings().measure else []

    def _read_all(self) -> None:
        """Everything on disk, once."""
        if not self._complete:
            for m in self.own():
                self._own.setdefault(self._place(m), m)
            self._complete = True

    def _measured_on(self, device: str, kinds: tuple[str, ...]) -> list[Measured]:
        """Everything measured on a device with sizes in these places; what stands in comes first and gives way."""
        self._read_all()
        places = {**self._shipped, **{place: m for place, m in list(self._own.items()) if m is not None}}
        usable = [m for m in places.values() if m.device == device and m.us > 0 and where_of(m.key) in kinds]
        return sorted(usable, key=lambda m: kinds.index(where_of(m.key)), reverse=True)


def _together(by: Mapping[str, Measured]) -> tuple[Asked, Mapping[str, float]] | None:
    """What several backends took for one class; None where fewer than two did, or nothing tells how large it was."""
    first = next(iter(by.values()))
    shape = shape_in(first.key, first.groups, first.flops)
    if len(by) < 2 or shape is None:
        return None
    ran = {name: m.ran or config_text(m.config) for name, m in by.items()}
    asked = Asked(first.key, shape, first.device, ran, {name: m.footprint for name, m in by.items()})
    return asked, {name: m.us for name, m in by.items()}


def _tables() -> Iterable[tuple[str, dict[str, Any]]]:
    """The files that ship with the package."""
    folder = files("multigemm") / "tuned"
    if folder.is_dir():
        for path in sorted(folder.iterdir(), key=lambda p: p.name):
            if path.name.endswith(".json"):
                yield path.name, json.loads(path.read_text())


@lru_cache(maxsize=1)
def table() -> TuningTable:
    """The table of this process."""
    return TuningTable()
