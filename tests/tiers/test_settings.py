from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.tiers.plain import KEY_BYTES, Plain

import kvtier
from kvtier import TierContext
from kvtier.errors import ConfigError


class Tuned(Plain):
    def __init__(self, context: TierContext, *, where: Any, speed: int = 3) -> None:
        super().__init__(context)
        self.settings = (where, speed)


class Anything(Plain):
    def __init__(self, context: TierContext, first: int = 1, **rest: Any) -> None:
        super().__init__(context)
        self.settings = {"first": first, **rest}


kvtier.register_tier("tuned", Tuned)
kvtier.register_tier("anything", Anything)


def manager(*tiers: Any) -> kvtier.Manager:
    return kvtier.Manager(kvtier.Region(1, 4096), tiers, key_bytes=KEY_BYTES)


def made(tier: type[Plain], config: dict[str, Any]) -> Any:
    tier.made = []
    manager(config).shutdown()
    (only,) = tier.made
    return only


def test_settings_are_the_constructors() -> None:
    where = object()  # JSON has no word for it
    fields: dict[str, Any] = {"where": where, "name": "t", "load_deadline_s": 2}
    assert made(Tuned, {"type": "tuned", **fields}).settings == (where, 3)
    assert made(Tuned, {"type": "tuned", "speed": 4, **fields}).settings == (where, 4)
    assert made(Anything, {"type": "anything", "b": 2}).settings == {"first": 1, "b": 2}
    assert made(Tuned, {"type": f"{__name__}:Tuned", **fields}).settings == (where, 3)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"type": "tuned"}, ["tier 0 (tuned): missing field `where`", "where, speed"]),
        ({"type": "tuned", "where": 1, "sped": 2}, ["unknown field `sped`", "load_deadline_s"]),
        ({"type": "tuned", "where": 1, "shed": "all"}, ["`newest` or `oldest`"]),
        ({"type": "tuned", "where": 1, "load_deadline_s": -1}, ["load_deadline_s = -1"]),
        ({"type": "tuned", "where": 1, "name": "primary"}, ['the name "primary" is taken']),
        ({"type": "tund"}, ["unknown type, expected `memory` or `file`", "`tuned`", "module:Cl"]),
        ({"type": "no.such.module:Tier"}, ["can not be imported", "No module named 'no'"]),
        ({"type": "kvtier:Nothing"}, ["can not be imported", "Nothing"]),
        ({"type": "kvtier:Region"}, ["no class derived from kvtier.SecondaryTier"]),
        ({"type": "kvtier:SecondaryTier"}, ["does not define finished, lookup, submit_load, sub"]),
    ],
)
def test_settings_that_can_not_be(config: dict[str, Any], parts: list[str]) -> None:
    Tuned.made = []
    with pytest.raises(ConfigError) as raised:
        manager(config)
    for part in parts:
        assert part in str(raised.value)
    assert Tuned.made == []


def test_all_tiers_are_checked_before_any_is_opened(tmp_path: Path) -> None:
    disk = tmp_path / "store"
    with pytest.raises(ConfigError, match="tier 1"):
        manager({"type": "file", "path": disk, "capacity_bytes": 1 << 20}, {"type": "tuned"})
    assert not disk.exists()


@pytest.mark.parametrize(
    ("name", "tier", "part"),
    [
        ("file", Plain, "built in"),
        ("tuned", Plain, r"taken by tests\.tiers\.test_settings\.Tuned"),
        ("", Plain, "no name"),
        ("a:b", Plain, "no name"),
        ("new", object, "no class derived"),
        ("new", "Plain", "no class derived"),
        ("new", kvtier.SecondaryTier, "does not define"),
    ],
)
def test_names_that_can_not_be_registered(name: str, tier: Any, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        kvtier.register_tier(name, tier)
    with pytest.raises(ConfigError, match="unknown type"):
        manager({"type": "new"})


def test_a_parameter_that_the_manager_would_read_is_refused() -> None:
    class Named(Plain):
        def __init__(self, context: TierContext, name: str, shed: str) -> None:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="takes name, shed, which kvtier reads"):
        kvtier.register_tier("named", Named)


def test_a_medium_that_there_is_not() -> None:
    class Tape(Plain):
        medium: ClassVar[Any] = "tape"

    kvtier.register_tier("tape", Tape)
    with pytest.raises(ConfigError, match='medium = "tape" is not one of memory, file, network'):
        manager({"type": "tape"})


def test_tiers_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_tiers.py").write_text(
        "from tests.tiers.plain import Plain\nclass Other(Plain):\n    made = []\n"
    )
    info = tmp_path / "other_tiers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tiers\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[kvtier.tiers]\nother = other_tiers:Other\ntorn = other_tiers:Nothing\n"
        "memory = other_tiers:Other\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    manager({"type": "other"}).shutdown()
    assert len(sys.modules["other_tiers"].Other.made) == 1
    # What is built in stays what it is.
    manager({"type": "memory", "capacity_bytes": 4096}).shutdown()
    assert len(sys.modules["other_tiers"].Other.made) == 1
    with pytest.raises(ConfigError, match=r"'other_tiers:Nothing' can not be loaded"):
        manager({"type": "torn"})
    with pytest.raises(ConfigError, match="`other` or `torn`"):
        manager({"type": "othre"})
