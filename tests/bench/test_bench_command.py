"""`kvtier bench`: the record of a figure, the report, exit codes. Nothing here judges a speed."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvtier.bench import Figure, alternate, compared, engine, scheduler, transfer, untaken
from kvtier.cli import main

RECORD = {
    *("name", "value", "unit", "min", "max", "reference", "reference_value", "ratio", "target"),
}
SMALL = ("bench", "transfer", "--size", "1MiB", "--rounds", "1")


def test_ratios_are_taken_within_a_round() -> None:
    figure = compared("a", "GB/s", [1, 2, 9], reference="b", theirs=[2, 4, 9], target=0.5)
    assert (figure.value, figure.min, figure.max, figure.reference_value) == (2, 1, 9, 4)
    assert figure.ratio == 0.5
    assert figure.met
    assert figure.as_json().keys() == RECORD


def test_targets_are_goals_or_limits() -> None:
    assert compared("a", "us", [3.0], target=2.0, smaller_is_better=True).met is False
    assert compared("a", "us", [3.0], target=3.0, smaller_is_better=True).met is True
    assert compared("a", "GB/s", [3.0], target=4.0).met is False
    assert compared("a", "GB/s", [3.0]).met is None
    assert untaken("a", "GB/s", "why").met is None


def test_rounds_alternate_after_one_to_warm_up() -> None:
    calls: list[str] = []

    def take(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return len(calls)

        return run

    assert alternate(2, take("a"), take("b")) == [[3.0, 5.0], [4.0, 6.0]]
    assert calls == ["a", "b"] * 3


def test_json_is_one_object_of_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert out.count("\n") == 1
    assert not err
    assert set(report) == {"machine", "versions", "figures"}
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["kvtier"]
    assert report["figures"]
    for record in report["figures"]:
        assert record.keys() == RECORD
        assert record["name"].startswith(("transfer.", "tables."))
        assert record["value"] > 0


def test_the_table_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL]) == 0
    out = capsys.readouterr().out
    assert "transfer.store.64KiB.cpu" in out
    assert "memcpy" in out


def test_a_figure_that_could_not_be_taken_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(**_flags: object) -> Iterator[Figure]:
        yield compared("transfer.a", "GB/s", [1.0])
        yield untaken("transfer.b", "GB/s", "no such device")

    monkeypatch.setattr(transfer, "measure", measure)
    assert main([*SMALL, "--json"]) == 1
    out, err = capsys.readouterr()
    assert [record["value"] for record in json.loads(out)["figures"]] == [1.0, None]
    assert err == "kvtier bench: transfer.b not taken: no such device\n"


def test_what_can_not_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--rounds", "0"]) == 2
    assert main(["bench", "nothing"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "--rounds 0" in err
    assert "nothing" in err


def test_parsing_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvtier.bench.transfer")
    assert main(["bench", "transfer", "--help"]) == 0
    assert "kvtier.bench.transfer" not in sys.modules


def test_the_file_tier_is_measured_beside_what_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--size", "2MiB", "--chunks", "500", "--rounds", "1", "--directory", str(tmp_path))
    code = main(["bench", "file", "--json", *flags])
    out, err = capsys.readouterr()
    figures = {figure["name"]: figure for figure in json.loads(out)["figures"]}
    untaken = {name for name, figure in figures.items() if figure["value"] is None}
    assert code == (1 if untaken else 0), err
    assert all(name.endswith(".vllm") for name in untaken), "what is not installed"
    for name in ("store.1MiB.direct", "load.64KiB.direct", "load.1MiB.warm", "lookup"):
        assert figures[f"file.{name}"]["value"] > 0
    assert {"file.reopen.500.checkpoint", "file.reopen.500.headers"} <= set(figures)
    assert list(tmp_path.iterdir()) == []


VERBS = ("lookup", "array_lookup", "single_lookup", "load_cycle", "store_cycle")


@pytest.mark.parametrize(
    ("question", "flags", "names"),
    [
        (
            "index",
            ("--keys", "300", "--batches", "2"),
            {f"index.{policy}.{verb}" for policy in ("lru", "arc") for verb in VERBS},
        ),
        ("manager", ("--keys", "64"), {f"manager.{n}" for n in ("request", "idle_step", "stats")}),
    ],
)
def test_figures_are_taken_with_and_without_vllm(
    question: str, flags: tuple[str, ...], names: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", question, "--rounds", "2", "--json", *flags]) == 0
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert all(figure["value"] > 0 for figure in figures.values())
    assert all(figures[name]["reference"] is None for name in names)
    beside = figures.keys() - names
    assert all(name.endswith(".vllm") and figures[name]["ratio"] > 0 for name in beside)
    assert bool(beside) == (importlib.util.find_spec("vllm") is not None)


@pytest.mark.parametrize(("module", "count"), [(scheduler, 3), (engine, 6)])
def test_figures_beside_vllm_say_that_it_is_not_there(
    module: ModuleType,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "import_vllm", lambda _modules: None)
    assert main(["bench", module.__name__.rpartition(".")[2], "--json"]) == 1
    out, err = capsys.readouterr()
    assert [figure["value"] for figure in json.loads(out)["figures"]] == [None] * count
    assert err.count("not taken: vllm is not installed") == count


@pytest.mark.parametrize(
    "flags",
    [
        ("index", "--keys", "127", "--batches", "1"),
        ("index", "--keys", "256", "--batches", "3"),
        ("manager", "--keys", "3"),
        ("scheduler", "--requests", "0"),
        ("scheduler", "--tokens", "65"),
    ],
)
def test_sizes_that_can_not_be_measured_are_refused(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert flags[1] in err
