"""A config as a user gives it: completed by what a backend would take, and checked against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from multigemm.errors import InvalidSetting


def as_dict(config: Any) -> dict[str, Any]:
    """The fields of a config, which is a dataclass."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def completed(given: Any, valid: Sequence[Any]) -> Any:
    """The config to run, where `valid` are a backend's own, the best guess first: a mapping replaces fields of the best
    guess, a config of the backend is the backend's to judge. Raises InvalidSetting for anything else."""
    if not valid or not is_dataclass(valid[0]):
        return given
    kind: Any = type(valid[0])
    known = as_dict(valid[0])
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
        _check_types(as_dict(given), known)
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
