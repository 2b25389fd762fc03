"""Which config a backend runs. The ladder: given > measured > the backend's first guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from multigemm.errors import InvalidSetting
from multigemm.problem.spec import ProblemSpec
from multigemm.select import registry, table
from multigemm.select.problem_class import ProblemClass


def config_for(
    name: str, spec: ProblemSpec, device: torch.device, given: Any, problem_class: ProblemClass
) -> tuple[Any, str]:
    """The config of a backend, and where it comes from. A measured config that is no longer valid is passed over."""
    valid = registry.get(name).configs(spec, device)
    if given is not None:
        return _completed(given, valid), "given"
    found = table.table().find(name, problem_class, device)
    if found is not None:
        measured, source = found
        match = [c for c in valid if is_dataclass(c) and _as_dict(c) == dict(measured.config)]
        if match:
            return match[0], f"measured ({measured.us:.1f} us, {source})"
    return (valid[0] if valid else None), "heuristic"


def _as_dict(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}


def _completed(given: Any, valid: Sequence[Any]) -> Any:
    """What the user gave as a config: a mapping completes the best guess, another config is the backend's to judge."""
    if not valid or not is_dataclass(valid[0]):
        return given
    kind: Any = type(valid[0])
    known = _as_dict(valid[0])
    if isinstance(given, Mapping):
        if wrong := set(given) - set(known):
            raise InvalidSetting(
                f"config has no field {min(wrong, key=str)!r}; {kind.__name__} has {', '.join(sorted(known)) or 'none'}"
            )
        given = kind(**{**known, **given})
    elif (
        not is_dataclass(given)
        or isinstance(given, type)
        or _package(type(given)) not in {_package(type(config)) for config in valid}
    ):
        raise InvalidSetting(
            f"config={given!r} is no config of this backend: pass its {kind.__name__}, or a mapping of some of its "
            f"fields ({', '.join(sorted(known)) or 'none'})"
        )
    if type(given) is kind:
        _check_types(_as_dict(given), known)
    return given


def _package(kind: type) -> str:
    """The package of a config's class: a backend may have several, in modules beside each other."""
    return kind.__module__.rpartition(".")[0]


def _check_types(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Values are of the types that a valid config holds: arithmetic on others fails far from here, or goes wrong.

    A field that a valid config leaves at None may hold anything.
    """
    for name, value in given.items():
        wanted = type(known[name]).__name__
        if type(value) is not type(known[name]) and known[name] is not None:
            raise InvalidSetting(f"config has {name}={value!r}, a {type(value).__name__}; it must be of type {wanted}")
