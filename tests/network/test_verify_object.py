"""`kvtier verify URL`, and `kvtier.store.verify_objects`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier import errors, store
from kvtier.testing.engine import Engine, key


def kept(directory: Path, numbers: list[int]) -> str:
    """Stores chunks in a directory; gives its URL."""
    url = directory.as_uri()
    engine = Engine({"type": "object", "url": url}, slots=32)
    engine.store(numbers)
    engine.close()
    return url


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_damaged_object_is_found_named_and_removed(tmp_path: Path) -> None:
    url = kept(tmp_path, list(range(20)))
    assert store.verify_objects({"url": url}) == store.Verification(20, [], [])
    (bad,) = tmp_path.rglob(key(7).hex())
    body = bytearray(bad.read_bytes())
    body[1000] ^= 1
    bad.write_bytes(body)

    done = verify(url, "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout) == {
        "chunks": 20,
        "ok": 19,
        "corrupt": [
            {
                "key": key(7).hex(),
                "where": str(bad).lstrip("/"),
                "what": "payload",
            }
        ],
        "files": [],
        "repaired": 0,
    }
    done = verify(url, "--repair")
    assert done.returncode == 1
    assert f"{url}: 19 of 20 chunks are good" in done.stdout
    assert not bad.exists()
    assert verify(url).returncode == 0


def test_a_sample_is_enough(tmp_path: Path) -> None:
    url = kept(tmp_path, list(range(20)))
    found = store.verify_objects({"url": url}, sample=5, seed=3)
    assert (found.chunks, found.good) == (5, True)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["ftp://x/y"], "expected s3://BUCKET/PREFIX"),
        (["s3://bucket", "--sample", "0"], "--sample 0"),
        (["s3://bucket", "--endpoint", "http://h:1"], "set allow_http"),
    ],
)
def test_what_can_not_be_is_said_in_a_line(arguments: list[str], part: str) -> None:
    done = verify(*arguments)
    assert done.returncode == 2
    assert part in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bucket_that_can_not_be_read_is_an_error() -> None:
    settings = {
        "url": "s3://bucket/prefix",
        "endpoint": "http://127.0.0.1:9",
        "allow_http": True,
        "access_key_id": "a",
        "secret_access_key": "hunter2",
    }
    with pytest.raises(errors.TierError, match=r"LIST s3://bucket/prefix at http://127.0.0.1:9"):
        store.verify_objects(settings)
