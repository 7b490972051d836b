"""Runs what a page of documentation shows, from its top to its end, in an empty directory.

    python run_page.py PAGE [--with NEED ...]

- `python` blocks of a page are one program. `sh` blocks run in between, by bash, and must succeed.
  `json`, `toml` and `yaml` blocks must be that. Blocks without a language, of `text`, and of
  `rust` and `mermaid` are not run; any other language is an error.
- `/tmp/` on a page is the empty directory.
- `<!-- run: ... -->` in the line above a block says more. `as=FILE` writes it to a file instead of
  running it, `needs=NEED` runs it only `--with` that need, and `is=output` says that a `text` block
  is what the commands above it print, blanks aside.
- `<!-- check ... -->` is Python that readers do not see: what the blocks above it must have done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SHOWN = {"", "text", "mermaid", "rust"}
CHECKED: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}
NEEDS = {
    "install": "packages, a toolchain or the repository: `make test-release` and `make test` do it",
    "vllm": "vLLM: `make test-vllm`",
    "network": "servers: the tests of the network tiers have them",
    "process": "a process that serves: tests/seeing watch one",
}
"""What a block may need that not every machine has, and who has it."""

_STEP = re.compile(
    r"(?:^<!-- run: (?P<options>[^\n]*?) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>[^\n`]*)\n(?P<code>.*?)^[ ]*```$"
    r"|^<!-- check(?P<check>\n.*?)-->$",
    re.MULTILINE | re.DOTALL,
)


class PageError(Exception):
    """A page that can not be run as it is written."""


@dataclass(frozen=True)
class Step:
    """One block, or one check."""

    line: int
    language: str
    code: str
    file: str | None = None
    need: str | None = None
    is_output: bool = False


def steps(text: str) -> Iterator[Step]:
    """The blocks and checks of a page. Raises `PageError` for what would never be run."""
    for found in _STEP.finditer(text):
        kind = "check" if found["check"] is not None else "code"
        line = text.count("\n", 0, found.start(kind)) + 1
        if kind == "check":
            yield Step(line, "python", found["check"])
            continue
        options = dict(option.split("=", 1) for option in (found["options"] or "").split())
        language = found["language"].strip()
        step = Step(
            line,
            language,
            re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
            options.pop("as", None),
            options.pop("needs", None),
            options.pop("is", None) == "output",
        )
        if language not in {"python", "sh", *SHOWN, *CHECKED}:
            raise PageError(
                f"line {line}: what is {language!r}? Use sh, python, json, toml, yaml or text"
            )
        if options or (step.need is not None and step.need not in NEEDS):
            raise PageError(f"line {line}: {found['options']!r} is no option")
        yield step


def run(page: Path, given: Collection[str]) -> int:
    """Runs the page in the current directory; returns how many steps were run."""
    names: dict[str, Any] = {"__name__": "__page__", "__file__": str(page)}
    count, printed = 0, ""
    for step in steps(page.read_text()):
        if step.language in CHECKED:
            CHECKED[step.language](step.code)
        if step.is_output and _words(step.code) != _words(printed):
            raise PageError(f"line {step.line}: what is printed is\n{printed}")
        if step.language in SHOWN or (step.need is not None and step.need not in given):
            continue
        code = step.code.replace("/tmp/", f"{Path.cwd()}/")
        count += 1
        if step.file is not None:
            Path(step.file).write_text(code)
        elif step.language == "python":
            # Line numbers of a traceback are those of the page.
            exec(compile("\n" * (step.line - 1) + code, page, "exec"), names)  # noqa: S102
        elif step.language == "sh":
            print(f"{page}:{step.line}: {code.strip()}", flush=True)
            command = ["bash", "-euo", "pipefail", "-c", code]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            printed = done.stdout
            print(printed, flush=True)
    return count


def _words(text: str) -> list[list[str]]:
    """The words of the lines that have any."""
    return [line.split() for line in text.splitlines() if line.strip()]


def main(argv: list[str] | None = None) -> int:
    """Runs one page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--with", dest="given", choices=NEEDS, action="append", default=[])
    arguments = parser.parse_args(argv)
    page = arguments.page.resolve()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Modules that a page writes are found as if its user had written them.
    sys.path.insert(0, str(Path.cwd()))
    try:
        print(f"{run(page, arguments.given)} steps")
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
