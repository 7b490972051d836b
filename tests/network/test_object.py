"""The object tier on an S3 server, through a proxy that goes wrong on purpose."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.network.s3_server import (
    BUCKET,
    CREDENTIALS,
    Faults,
    MotoServer,
    S3Proxy,
    error,
    s3_proxy,
    s3_server,
)

import kvtier
import kvtier.testing
from kvtier import HIT_PENDING, MISS, errors
from kvtier.testing.engine import PATIENCE_S, STEP_S, Engine, key

CHUNK = 4096
OBJECT = CHUNK + 128


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    with s3_server() as server:
        yield server


@pytest.fixture
def proxy(server: MotoServer) -> Iterator[S3Proxy]:
    with s3_proxy(server) as proxy:
        yield proxy


def settings(endpoint: str, prefix: Path, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "url": f"s3://{BUCKET}/{prefix.name}",
        "endpoint": endpoint,
        "allow_http": True,
        "listing_interval_s": 0.2,
        **CREDENTIALS,
        **fields,
    }


def objects(server: MotoServer, prefix: Path) -> dict[str, int]:
    """Names and lengths of what lies under a prefix."""
    pages = server.client().get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=BUCKET, Prefix=f"{prefix.name}/")
    return {each["Key"]: each["Size"] for page in found for each in page.get("Contents", ())}


def name_of(server: MotoServer, prefix: Path, number: int) -> str:
    (name,) = (name for name in objects(server, prefix) if name.endswith(key(number).hex()))
    return name


class TestObjectTier(kvtier.testing.TierConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def with_server(self, server: MotoServer) -> None:
        self.server = server

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:  # noqa: ARG002
        # Long, so that no listing of its own brings what only a look-up may.
        name = path.parent / f"{path.parent.name}-{path.name}"
        return settings(self.server.endpoint, name, listing_interval_s=60.0)

    def damage(self, path: Path) -> None:
        client = self.server.client()
        prefix = path.parent / f"{path.parent.name}-{path.name}"
        for name in objects(self.server, prefix):
            body = bytearray(client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
            body[-1] ^= 1
            client.put_object(Bucket=BUCKET, Key=name, Body=bytes(body))


class TestObjectTierInADirectory(kvtier.testing.TierConformance):
    persistent = True

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:  # noqa: ARG002
        return {"type": "object", "url": path.as_uri()}

    def damage(self, path: Path) -> None:
        for file in path.rglob("*"):
            if file.is_file():
                body = bytearray(file.read_bytes())
                body[-1] ^= 1
                file.write_bytes(body)


def engine(config: Mapping[str, Any], **fields: Any) -> Engine:
    return Engine({**config, **fields}, slots=32)


def details(tier: Engine) -> dict[str, int]:
    return {name: count for name, count in tier.tier["details"].items() if count}


def until(tier: Engine, holds: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, tier.tier
        tier.manager.end_step()
        time.sleep(STEP_S)


def until_found(tier: Engine, numbers: list[int]) -> None:
    """Looks up until the tier has heard of all of them."""
    until(tier, lambda: tier.ask(numbers) == [HIT_PENDING] * len(numbers))
    tier.settle()


def test_engines_of_one_namespace_serve_each_other(server: MotoServer, tmp_path: Path) -> None:
    one, two = (engine(settings(server.endpoint, tmp_path)) for _ in range(2))
    assert two.ask([1]) == [MISS]
    one.store([1, 2, 3])
    one.settle()
    until_found(two, [1, 2, 3])
    assert two.compare([1, 2, 3, 4]) == [1, 2, 3]
    other = Engine(settings(server.endpoint, tmp_path), slots=8, namespace="another")
    assert other.ask([1, 2, 3]) == [MISS] * 3
    for each in (one, two, other):
        each.close()


def test_a_look_up_costs_no_request(proxy: S3Proxy, tmp_path: Path) -> None:
    tier = engine(settings(proxy.endpoint, tmp_path, listing_interval_s=3600.0))
    tier.store([1])
    assert tier.ask([2]) == [MISS]
    tier.settle()
    asked = len(proxy.seen)
    for number in range(100, 400):
        assert tier.ask([number]) == [MISS]
    assert len(proxy.seen) == asked
    tier.close()


def test_chunks_above_the_bound_go_in_parts(server: MotoServer, tmp_path: Path) -> None:
    bytes_of = 12 << 20
    # No listing may find out first that an object is too short.
    fields = {"part_bytes": 5 << 20, "listing_interval_s": 60.0}
    config = settings(server.endpoint, tmp_path, **fields)
    tier = Engine(config, slots=4, chunk_bytes=bytes_of)
    tier.store([1, 2])
    tier.forget()
    assert tier.bring([1, 2]) == [1, 2]
    assert set(objects(server, tmp_path).values()) == {bytes_of + 128}
    client, name = server.client(), name_of(server, tmp_path, 1)
    body = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    client.put_object(Bucket=BUCKET, Key=name, Body=body[: 4 << 20])
    tier.forget()
    assert tier.bring([1, 2]) == [2]
    assert details(tier)["bad_length"] == 1
    tier.close()


@pytest.mark.parametrize(
    ("spoil", "counted"),
    [
        pytest.param(lambda body: body[:-1], "bad_length", id="truncated"),
        pytest.param(lambda body: body + b"x", "bad_length", id="longer"),
        pytest.param(lambda _: b"", "bad_length", id="empty"),
        pytest.param(lambda body: body[:128] + bytes(CHUNK), "bad_checksum", id="other bytes"),
        pytest.param(lambda body: b"KVTX" + body[4:], "bad_header", id="no header"),
    ],
)
def test_an_object_that_is_not_what_was_stored_is_a_miss_and_goes(
    server: MotoServer, tmp_path: Path, spoil: Callable[[bytes], bytes], counted: str
) -> None:
    tier = engine(settings(server.endpoint, tmp_path, listing_interval_s=60.0))
    tier.store([1, 2])
    tier.forget()
    client, name = server.client(), name_of(server, tmp_path, 1)
    body = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    client.put_object(Bucket=BUCKET, Key=name, Body=spoil(body))
    assert tier.bring([1, 2]) == [2]
    assert details(tier) == {"questions": 1, "round_trips": 16, counted: 1, "removed": 1} or (
        details(tier) == {counted: 1, "removed": 1}
    )
    assert name not in objects(server, tmp_path)
    assert tier.ask([1]) == [MISS]
    tier.store([1])
    tier.forget()
    assert tier.bring([1]) == [1]
    tier.close()


def test_the_object_of_another_key_is_a_miss(server: MotoServer, tmp_path: Path) -> None:
    tier = engine(settings(server.endpoint, tmp_path))
    tier.store([1, 2])
    tier.forget()
    source = {"Bucket": BUCKET, "Key": name_of(server, tmp_path, 2)}
    server.client().copy_object(Bucket=BUCKET, Key=name_of(server, tmp_path, 1), CopySource=source)
    assert tier.bring([1, 2]) == [2]
    assert details(tier)["other_key"] == 1
    tier.close()


def test_an_object_that_expired_is_a_miss(server: MotoServer, tmp_path: Path) -> None:
    tier = engine(settings(server.endpoint, tmp_path, listing_interval_s=60.0))
    tier.store([1, 2])
    tier.forget()
    server.client().delete_object(Bucket=BUCKET, Key=name_of(server, tmp_path, 1))
    assert tier.bring([1, 2]) == [2]
    assert tier.tier["load_failures"]["missing"] == 1
    assert tier.ask([1]) == [MISS]
    tier.close()


def test_a_bad_copy_that_can_not_be_removed_is_written_over(
    server: MotoServer, proxy: S3Proxy, tmp_path: Path
) -> None:
    tier = engine(settings(proxy.endpoint, tmp_path))
    tier.store([1])
    tier.forget()
    client, name = server.client(), name_of(server, tmp_path, 1)
    client.put_object(Bucket=BUCKET, Key=name, Body=bytes(OBJECT))
    proxy.faults = Faults(answers={"DELETE": error(403, "AccessDenied")})
    assert tier.bring([1]) == []
    # Listings name it, and it stays hidden.
    until(tier, lambda: tier.ask([1, 5]) == [MISS] * 2 and details(tier)["questions"] >= 3)
    tier.store([1])
    tier.forget()
    assert tier.bring([1]) == [1]
    tier.close()


@pytest.mark.parametrize(
    ("status", "code", "counted"),
    [
        (503, "SlowDown", "slow_down"),
        (500, "InternalError", "refused"),
    ],
)
def test_what_passes_is_tried_again(
    proxy: S3Proxy, tmp_path: Path, status: int, code: str, counted: str
) -> None:
    tier = engine(settings(proxy.endpoint, tmp_path))
    tier.store([1])
    tier.forget()
    tier.ask([1])
    proxy.faults = Faults(answers={"GET": error(status, code)})
    until(tier, lambda: details(tier).get(counted, 0) >= 2)
    proxy.faults = Faults()
    tier.settle()
    assert tier.compare([1]) == [1]
    assert details(tier)["retries"] >= 2
    assert not any(tier.tier["load_failures"].values())
    tier.close()


@pytest.mark.parametrize(
    ("status", "code", "counted"),
    [
        (403, "SignatureDoesNotMatch", "denied"),
        (403, "RequestTimeTooSkewed", "clock_skew"),
        (404, "NoSuchBucket", "no_bucket"),
        (507, "InsufficientStorage", "full"),
        (400, "InvalidRequest", "refused"),
    ],
)
def test_what_lasts_fails_at_once_with_its_cause(
    proxy: S3Proxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    status: int,
    code: str,
    counted: str,
) -> None:
    # How long a key that did not come is not asked for.
    tier = engine(settings(proxy.endpoint, tmp_path), load_deadline_s=1.0)
    tier.store([1])
    tier.forget()
    tier.ask([1])
    proxy.faults = Faults(answers=dict.fromkeys(("GET", "PUT"), error(status, code)))
    with caplog.at_level(logging.WARNING, logger="kvtier"):
        tier.settle()
        tier.store([2])
        tier.settle()
        until(tier, lambda: any("failed" in record.getMessage() for record in caplog.records))
    assert details(tier)[counted] >= 2
    assert "retries" not in details(tier)
    assert tier.compare([1]) == []
    proxy.faults = Faults()
    until_found(tier, [1])
    assert tier.compare([1]) == [1]
    tier.close()


@pytest.mark.parametrize(
    ("spoil", "counted"),
    [
        pytest.param(lambda body: body[:1000], "unreachable", id="cut in the middle"),
        pytest.param(
            lambda body: body[:2000] + bytes([body[2000] ^ 1]) + body[2001:],
            "bad_checksum",
            id="a byte flipped",
        ),
    ],
)
def test_what_happens_on_the_way_is_never_served(
    proxy: S3Proxy, tmp_path: Path, spoil: Callable[[bytes], bytes], counted: str
) -> None:
    tier = engine(settings(proxy.endpoint, tmp_path), load_deadline_s=1.0)
    tier.store([1, 2])
    tier.forget()
    tier.ask([1, 2])
    proxy.faults = Faults(spoil=spoil)
    assert tier.bring([1, 2]) == []
    assert details(tier)[counted] >= 1
    proxy.faults = Faults()
    tier.store([1, 2])
    tier.forget()
    assert tier.bring([1, 2]) == [1, 2]
    tier.close()


def test_a_server_that_stops_holds_nothing_up(tmp_path: Path) -> None:
    with s3_server() as server:
        config = settings(server.endpoint, tmp_path, idle_timeout_s=0.3, listing_interval_s=0.1)
        tier = engine(config, load_deadline_s=1.0, store_deadline_s=1.0, lookup_deadline_s=0.02)
        tier.store([1, 2, 3])
        tier.forget()
        assert tier.ask([1, 2, 3]) == [HIT_PENDING] * 3
        server.signal(signal.SIGSTOP)
        tier.settle()
        assert tier.compare([1, 2, 3]) == []
        assert details(tier)["timed_out"] >= 3
        assert tier.tier["loads_overdue"] == 0, "it answers before it is given up"
        tier.store([4])
        tier.settle()
        assert tier.tier["store_failures"]["io"] == 1
        server.signal(signal.SIGCONT)
        until_found(tier, [1, 2, 3])
        assert tier.compare([1, 2, 3]) == [1, 2, 3]
        tier.close()


def test_a_server_that_dies_and_comes_back_empty(tmp_path: Path) -> None:
    with s3_server() as server:
        tier = engine(
            settings(server.endpoint, tmp_path), load_deadline_s=1.0, store_deadline_s=1.0
        )
        tier.store([1])
        tier.forget()
        tier.ask([1])
        server.kill()
        assert tier.bring([1]) == []
        assert details(tier)["unreachable"] >= 1
        server.start()
        until(tier, lambda: tier.ask([1]) == [MISS])
        tier.store([2])
        tier.forget()
        assert tier.bring([2]) == [2]
        tier.close()


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    config = settings("http://no-such-host.invalid:1", tmp_path)
    tier = engine(config, store_deadline_s=0.5)
    assert tier.ask([1]) == [MISS]
    tier.store([1])
    tier.settle()
    assert details(tier)["unreachable"] >= 1
    assert tier.tier["store_failures"]["io"] == 1
    tier.close()


def test_a_certificate_that_nobody_knows(proxy: S3Proxy, tmp_path: Path) -> None:
    certificate, private_key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    pair = ("-keyout", private_key, "-out", certificate)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", *subject, *pair],  # noqa: S607
        check=True,
        capture_output=True,
    )
    proxy.encrypt(certificate, private_key)
    tier = engine(settings(proxy.endpoint, tmp_path), store_deadline_s=0.5)
    tier.store([1])
    tier.settle()
    assert tier.tier["store_failures"]["io"] == 1
    assert details(tier)["unreachable"] >= 1
    assert proxy.seen == [], "nothing was sent"
    tier.close()


def test_shutdown_does_not_wait_for_a_server_that_hangs(proxy: S3Proxy, tmp_path: Path) -> None:
    tier = engine(settings(proxy.endpoint, tmp_path))
    tier.store([1])
    tier.forget()
    tier.ask([1])
    gate = threading.Event()
    proxy.faults = Faults(hang=gate)
    tier.manager.end_step()
    tier.manager.shutdown()
    tier.check_closed()
    gate.set()


def test_settings_that_can_not_be_are_refused_and_no_secret_is_shown() -> None:
    for fields, part in (
        ({"url": "ftp://x"}, "expected s3://"),
        ({"url": "s3://b", "access_key_id": "x"}, "give both or none"),
        ({"url": "s3://b", "secret_access_key": 271828}, "a secret must be a text"),
        ({}, "missing field `url`"),
    ):
        with pytest.raises(errors.ConfigError) as caught:
            kvtier.Manager(kvtier.Region(1, CHUNK), [{"type": "object", **fields}])
        assert part in str(caught.value)
        assert "271828" not in str(caught.value)
