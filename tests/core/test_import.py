"""Where kvtier can not be imported, it says why."""

import subprocess
import sys


def test_a_free_threaded_interpreter_is_refused() -> None:
    code = "import sys; sys.abiflags += 't'; import kvtier"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: kvtier does not support free-threaded Python")
