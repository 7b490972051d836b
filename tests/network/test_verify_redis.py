"""`kvtier verify redis://...`: what is on a server is what was stored, or is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.network.redis_servers import Cluster, Server, free_port
from tests.network.test_redis_conformance import flip
from tests.network.test_redis_faults import Client

from kvtier import errors, store
from kvtier.cli import main


def filled(**config: object) -> None:
    engine = Client(chunk_bytes=3 * 4096, part_bytes=5000, **config)  # type: ignore[arg-type]
    engine.store(list(range(20)))
    engine.close()


def test_good_chunks_are_good(shared_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    filled(url=shared_server.url, prefix="verify-good")
    flags = ["--prefix", "verify-good"]
    assert main(["verify", shared_server.url, *flags]) == 0
    assert "20 of 20 chunks are good" in capsys.readouterr().out
    assert main(["verify", shared_server.url, *flags, "--sample", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["chunks"], report["ok"]) == (5, 5)


def test_bad_chunks_are_found_and_removed(
    shared_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = "verify-bad"
    filled(url=shared_server.url, prefix=prefix)
    with shared_server.client() as client:
        names = sorted(client.scan_iter(f"{prefix}:*}}"))
        flip(client, names[:2])
        client.set(names[2], b"something else" * 20)
        client.rename(names[3], names[4])
        client.delete(next(client.scan_iter(names[5].decode() + ":*:1")))
        client.setrange(names[6], 60, b"\xff\xff")
    flags = ["--prefix", prefix, "--json"]
    assert main(["verify", shared_server.url, *flags]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["chunks"] == 19
    found = {finding["where"].encode(): finding["what"] for finding in report["corrupt"]}
    assert found == {
        names[0]: "payload",
        names[1]: "payload",
        names[2]: "header",
        names[4]: "name",
        names[5]: "length",
        names[6]: "header",
    }
    assert main(["verify", shared_server.url, *flags, "--repair"]) == 1
    assert json.loads(capsys.readouterr().out)["repaired"] == 6
    assert main(["verify", shared_server.url, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 13


def test_a_cluster_is_checked_master_by_master(shared_cluster: Cluster) -> None:
    filled(nodes=shared_cluster.nodes, prefix="verify")
    found = store.verify_redis({"nodes": shared_cluster.nodes[:1], "prefix": "verify"})
    assert (found.chunks, found.good) == (20, True)


def test_what_can_not_be_checked_says_why(
    tmp_path: Path, shared_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = f"redis://:hunter2@127.0.0.1:{free_port()}"
    for arguments in (
        [nobody],
        ["http://u:hunter2@localhost"],
        [shared_server.url, "--sample", "0"],
        [shared_server.url, "--tls-ca", str(tmp_path), "--prefix", "{}"],
        [str(tmp_path), "--sample", "3"],
    ):
        assert main(["verify", *arguments]) == 2, arguments
        _, error = capsys.readouterr()
        assert error.count("\n") == 1, error
        assert "hunter2" not in error
    with pytest.raises(errors.ConfigError, match="unknown field"):
        store.verify_redis({"url": nobody, "prefx": "a"})
