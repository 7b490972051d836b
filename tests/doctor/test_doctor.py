"""`kvtier doctor`: every check can fail, says what to do, and leaves nothing behind."""

from __future__ import annotations

import collections
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier.cli import main
from kvtier.doctor import CHECKS, DISK_CHECKS, Finding, Plan, disk, examine, machine, software

HERE = Path(__file__).parent
CPUINFO = "processor : 0\nflags : fpu sse4_1 pclmulqdq\n"


def fake(root: Path, files: dict[str, str]) -> Plan:
    """A plan for a system with these files."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Plan(root=root)


def assert_told(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    assert finding.advice
    for word in words:
        assert word in finding.found + finding.advice


def test_a_machine_is_examined_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", str(tmp_path), "--seconds", "0", "--json"])
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert out.count("\n") == 1
    assert not err
    assert set(report) == {"machine", "versions", "findings"}
    assert [finding["name"] for finding in report["findings"]] == [*CHECKS, *DISK_CHECKS]
    for finding in report["findings"]:
        assert set(finding) == {"name", "status", "found", "advice"}
        assert (finding["advice"] is None) == (finding["status"] == "ok")
        assert "could not be checked" not in finding["found"]
    assert code == any(finding["status"] == "bad" for finding in report["findings"])
    assert list(tmp_path.iterdir()) == []


def test_the_lines_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--seconds", "0", "--disk", "900TiB"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^BAD   free_space .* wanted\n +-> lower capacity_bytes", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 100


def test_what_can_not_be_examined_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, word in (
        ([str(tmp_path / "absent")], "absent is not a directory"),
        (["--disk", "1GiB"], "Give DIR"),
        ([str(tmp_path), "--seconds", "-1"], "--seconds -1"),
    ):
        assert main(["doctor", *arguments]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert word in err


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls by their number")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("io_uring", ("not permitted", "seccomp")),
        ("direct_io", ("Invalid argument", "ext4")),
        ("locked_memory", ("64.0 KiB", "ulimit -l")),
        ("open_files", ("256", "ulimit -n")),
    ],
)
def test_what_the_system_refuses_is_found(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, str(HERE / "restricted.py"), name, str(tmp_path), "--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    findings = {finding.pop("name"): finding for finding in json.loads(done.stdout)["findings"]}
    assert_told(Finding(**findings[name]), "warn", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_processor_without_fast_checksums_is_told(tmp_path: Path) -> None:
    assert machine.cpu(fake(tmp_path, {"proc/cpuinfo": CPUINFO})).status == "ok"
    assert machine.cpu(fake(tmp_path, {"proc/cpuinfo": "Features : pmull"})).status == "ok"
    plan = fake(tmp_path, {"proc/cpuinfo": "flags : fpu sse4_1\n"})
    assert_told(machine.cpu(plan), "warn", "pclmulqdq")


GROUPS_1 = {
    "proc/self/cgroup": "4:memory:/a/b\n1:cpu,cpuacct:/a\n",
    "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1073741824",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "268435456",
    "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000",
    "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
}
GROUPS_2 = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/memory.max": "max",
    "sys/fs/cgroup/a/memory.max": "1073741824",
    "sys/fs/cgroup/a/memory.current": "268435456",
    "sys/fs/cgroup/a/b/cpu.max": "150000 100000",
}


@pytest.mark.parametrize("files", [GROUPS_1, GROUPS_2], ids=["version 1", "version 2"])
def test_limits_of_a_container_are_found(files: dict[str, str], tmp_path: Path) -> None:
    plan = fake(tmp_path, files)
    assert_told(machine.container(plan), "warn", "quota of 1.5", "1.0 GiB")
    assert machine.memory(plan).found == "768 MiB available"
    wanting = Plan(root=tmp_path, host_bytes=1 << 31)
    assert_told(machine.memory(wanting), "bad", "2.0 GiB wanted")


def test_no_limit_of_a_container_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000"}
    assert machine.container(fake(tmp_path, files)).status == "ok"
    assert_told(machine.memory(Plan(root=tmp_path)), "warn", "/proc")


def test_memory_that_nobody_uses_is_told(tmp_path: Path) -> None:
    files = {"proc/meminfo": "HugePages_Free: 512\nHugepagesize: 2048 kB\nDirectMap4k:\n"}
    assert_told(machine.huge_pages(fake(tmp_path, files)), "warn", "1.0 GiB", "nr_hugepages")


def test_shared_memory_that_is_missing_or_small_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(root=tmp_path)
    assert_told(machine.shared_memory(plan), "warn", "No such file")
    (tmp_path / "dev/shm").mkdir(parents=True)
    small = SimpleNamespace(f_blocks=16_384, f_bavail=16_384, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: small)
    assert_told(machine.shared_memory(plan), "warn", "64.0 MiB", "--shm-size")


@pytest.mark.parametrize(
    ("kind", "word"), [("tmpfs", "memory"), ("overlay", "volume"), ("nfs4", "network")]
)
def test_a_directory_that_is_no_local_disk_is_told(kind: str, word: str, tmp_path: Path) -> None:
    place = tmp_path / "with blank"
    place.mkdir()
    mounts = f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path}/with\\040blank rw - {kind} b rw\n"
    fake(tmp_path, {"proc/self/mountinfo": mounts})
    assert_told(disk.file_system(Plan(place, root=tmp_path)), "warn", word)
    assert disk.file_system(Plan(tmp_path, root=tmp_path)).status == "ok"


def with_free(bytes_free: int) -> Callable[[object], object]:
    usage = collections.namedtuple("usage", "total used free")
    return lambda _path: usage(1 << 40, (1 << 40) - bytes_free, bytes_free)


def test_a_disk_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", with_free(1 << 20))
    assert_told(disk.free_space(Plan(tmp_path)), "warn", "1.0 MiB of 1.0 TiB")
    assert_told(disk.free_space(Plan(tmp_path, disk_bytes=1 << 30)), "bad", "capacity_bytes")
    assert_told(disk.disk_speed(Plan(tmp_path)), "bad", "not measured")


def test_a_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(tmp_path, seconds=0)
    assert "GB/s" in disk.disk_speed(plan).found
    monkeypatch.setattr(disk, "_SLOW", 1e15)
    assert_told(disk.disk_speed(plan), "warn", "GB/s", "NVMe")


def test_versions_that_will_not_do_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan()
    monkeypatch.setattr(software, "build_profile", "debug")
    assert_told(software.build(plan), "bad", "debug", "--release")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.10.1+cpu"))
        assert_told(software.torch(plan), "bad", "2.10.1", "2.11")
        patch.setitem(sys.modules, "torch", None)
        assert_told(software.torch(plan), "bad", "can not be imported", "2.11")
    metadata = tmp_path / "vllm-0.31.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert_told(software.vllm(plan), "bad", "0.31.2", "0.33")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.1+cpu\n")
    assert software.vllm(plan).status == "ok"


def test_the_oldest_torch_is_the_one_that_is_installed_with() -> None:
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    assert f"torch>={'.'.join(map(str, software.OLDEST_TORCH))}" in project["dependencies"]


def test_a_gpu_that_takes_no_host_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(software, "_pinning_failure", lambda: "refused by the driver")
    assert_told(software.gpu(Plan()), "warn", "refused by the driver", "ulimit -l")


@pytest.mark.gpu
def test_a_gpu_takes_host_memory() -> None:
    assert software.gpu(Plan()).status == "ok"


def test_a_check_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_plan: Plan) -> Finding:
        raise PermissionError("not for you")

    monkeypatch.setitem(CHECKS, "cpu", fail)
    findings = dict(examine(Plan(root=tmp_path)))
    assert_told(findings["cpu"], "warn", "not for you")
