"""Which tiers there are by name, and whether the settings of those in Python can be.

A `type` is looked up in this order: the tiers that are built in, those of `register_tier`, those
of installed packages (entry point group `kvtier.tiers`), and `"package.module:Class"`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvtier._kvtier import TIER_TYPES
from kvtier.config import TierLimits
from kvtier.errors import ConfigError
from kvtier.tiers.contract import SecondaryTier, overridden

__all__ = ["ENTRY_POINTS", "plan", "register_tier"]

ENTRY_POINTS = "kvtier.tiers"

# Fields that every tier has and the manager reads: `name` is one of TierLimits.
_SHARED = ("type", *TierLimits.__annotations__)

_registered: dict[str, type[SecondaryTier]] = {}


def register_tier(name: str, tier: type[SecondaryTier]) -> None:
    """Makes `{"type": name, ...}` mean `tier`, in this process.

    Raises `ConfigError` for a name that is built in or taken, and for a class that is no tier.
    """
    if not name or ":" in name:
        raise ConfigError(f"{name!r} is no name of a tier: use one without ':'")
    if name in TIER_TYPES:
        raise ConfigError(f"{name!r} is built in: choose another name")
    if name in _registered:
        taken = _registered[name]
        raise ConfigError(
            f"{name!r} is taken by {taken.__module__}.{taken.__qualname__}: choose another name"
        )
    _registered[name] = _checked(tier, repr(name))


class PlannedTier(NamedTuple):
    """A tier in Python that is still to be made."""

    kind: str
    tier_class: type[SecondaryTier]
    settings: dict[str, Any]
    overridden: list[str]


class Planned(NamedTuple):
    """One entry of `tiers`: the fields that the core reads, and who makes it if not the core."""

    fields: Any
    tier: PlannedTier | None


def plan(tiers: Iterable[Any]) -> list[Planned]:
    """Resolves types and checks the settings of tiers in Python; what is left checks the core."""
    return [_plan_one(position, given) for position, given in enumerate(tiers)]


def _plan_one(position: int, given: Any) -> Planned:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "faulty" and "inner" in given:
        inner = _plan_one(position, given["inner"])
        return Planned({**given, "inner": inner.fields}, inner.tier)
    if not isinstance(kind, str) or kind in TIER_TYPES:
        return Planned(given, None)
    where = f"tier {position} ({kind})"
    tier = _find(kind, where)
    shared = {field: value for field, value in given.items() if field in _SHARED}
    settings = {field: value for field, value in given.items() if field not in _SHARED}
    _check_settings(tier, settings, where)
    return Planned(shared, PlannedTier(kind, tier, settings, overridden(tier)))


def _find(kind: str, where: str) -> type[SecondaryTier]:
    if kind in _registered:
        return _registered[kind]
    if ":" in kind:
        module, _, name = kind.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{where}: type = {kind!r} can not be imported: {error}") from error
        return _checked(found, where)
    from importlib import metadata  # slow to import, and seldom needed

    installed = metadata.entry_points(group=ENTRY_POINTS)
    if kind in installed.names:
        point = installed[kind]
        try:
            found = point.load()
        except Exception as error:
            raise ConfigError(
                f"{where}: entry point {point.value!r} can not be loaded: {error}"
            ) from error
        return _checked(found, where)
    names = [f"`{name}`" for name in (*TIER_TYPES, *_registered, *sorted(installed.names))]
    raise ConfigError(
        f"{where}: unknown type, expected {' or '.join(names)} or 'package.module:Class'"
    )


def _checked(tier: Any, where: str) -> type[SecondaryTier]:
    if not (isinstance(tier, type) and issubclass(tier, SecondaryTier)):
        raise ConfigError(f"{where}: {tier!r} is no class derived from kvtier.SecondaryTier")
    missing = sorted(getattr(tier, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{where}: {tier.__qualname__} does not define {', '.join(missing)}")
    taken = [name for name in inspect.signature(tier).parameters if name in _SHARED]
    if taken:
        raise ConfigError(
            f"{where}: {tier.__qualname__}.__init__ takes {', '.join(taken)}, which kvtier reads: "
            "rename"
        )
    return tier


def _check_settings(tier: type[SecondaryTier], settings: dict[str, Any], where: str) -> None:
    """Holds the settings against the parameters of `__init__` behind the context."""
    parameters = list(inspect.signature(tier).parameters.values())[1:]
    named = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    known = [parameter.name for parameter in named]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    own = ", ".join(known) or "no field of its own"
    allowed = f"{own} (every tier also takes {', '.join(_SHARED[1:])})"
    for field in settings:
        if not isinstance(field, str) or (field not in known and not takes_any):
            raise ConfigError(f"{where}: unknown field `{field}`, expected {allowed}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in settings:
            raise ConfigError(f"{where}: missing field `{parameter.name}`, expected {allowed}")
