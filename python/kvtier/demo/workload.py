"""What is asked: chats about source files, real text that is found on any machine.

Every session is a chat about one module of the Python standard library, or about one of the
user's own files. Its first turn brings a long excerpt, every later turn a question and the
lines that follow. One system prompt is shared by all. Tokens are bytes plus a few marks.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError

__all__ = ["VOCABULARY", "Chat", "Workload", "make_workload"]

_SYSTEM, _USER, _ASSISTANT, _END = 256, 257, 258, 259
VOCABULARY = 264
"""256 bytes, four marks, rounded up to a multiple of 8."""

_MORE_BYTES = 160
"""Source that every later turn brings along."""

_SYSTEM_PROMPT = """\
You are a coding assistant. You are shown the source of one file and asked about it. Read the
whole excerpt before you answer. Name the functions and classes you talk about as they are
spelled in the source, and quote a line where that is clearer than words. When an answer
depends on code that is not shown, say which part is missing instead of guessing. Mention
errors that callers have to expect, and the cost of a call where it is not obvious. Keep the
answer short: a few sentences, no headings, no lists unless the question asks for one.
"""

_QUESTIONS = (
    "What is this file for, and where would I start to read it?",
    "Which errors can a caller see here, and when?",
    "What does the following part add to what you saw so far?",
    "Which of these names belong to the public interface?",
    "Is any of this safe to call from several threads?",
    "Where would a test for this part begin?",
    "What would break if this part was removed?",
    "How does this part depend on the lines before it?",
)

# Pure-Python modules of more than 8 KiB that every CPython since 3.11 has as source files.
_MODULES = (
    "argparse", "ast", "calendar", "cmd", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "difflib", "fileinput", "fractions", "ftplib", "functools", "getopt",
    "gettext", "glob", "heapq", "hmac", "inspect", "ipaddress", "locale", "mailbox", "netrc",
    "optparse", "pickle", "poplib", "pprint", "queue", "random", "sched", "selectors", "shelve",
    "shlex", "shutil", "smtplib", "socket", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "traceback", "uuid", "weakref", "zipfile",
)  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """One session: what the user says, turn by turn, as bytes."""

    title: str
    messages: tuple[bytes, ...]


@dataclass(frozen=True)
class Workload:
    """All sessions of a run, and the order in which their turns come."""

    chats: tuple[Chat, ...]
    system: bytes
    order: tuple[tuple[int, int], ...]
    """`(session, turn)`, interleaved: see `_interleave`."""

    def prompt(self, session: int, turn: int, replies: Sequence[Sequence[int]]) -> list[int]:
        """Returns the tokens of the whole chat up to the reply of `turn`.

        `replies` are the tokens that were answered in the turns before.
        """
        tokens = [_SYSTEM, *self.system, _END]
        for number, message in enumerate(self.chats[session].messages[: turn + 1]):
            tokens += [_USER, *message, _END, _ASSISTANT]
            if number < turn:
                tokens += [*replies[number], _END]
        return tokens

    def half_resident_tokens(self, new_tokens: int) -> int:
        """Tokens that host memory holds when half of a returning session has left it.

        That is the shared system prompt, every session that comes in between, and half of
        the one that returns, each as long as at the middle of the run.
        """
        turns = len(self.chats[0].messages)
        between = len(self.chats) - 1 - _shift(len(self.chats))
        middle = len(self.prompt(0, turns // 2, [[0] * new_tokens] * turns))
        return len(self.system) + int((between + 0.5) * (middle - len(self.system)))

    def longest_turn_tokens(self, new_tokens: int) -> int:
        """Tokens of the longest turn, its reply of `new_tokens` tokens included."""
        last = len(self.chats[0].messages) - 1
        blank = [[0] * new_tokens] * last
        return new_tokens + max(
            len(self.prompt(session, last, blank)) for session in range(len(self.chats))
        )


def make_workload(
    sessions: int,
    turns: int,
    context_tokens: int,
    *,
    seed: int = 0,
    texts: Sequence[Path] = (),
) -> Workload:
    """Makes `sessions` chats of `turns` turns whose first message has `context_tokens` bytes.

    `texts` replaces the standard library; sessions take the files in turn. The same arguments
    give the same workload on one machine. Raises `ConfigError` for a file that can not be
    read, is empty or is too short for that many turns.
    """
    chooser = random.Random(seed)
    needed = context_tokens + (turns - 1) * _MORE_BYTES
    sources = [_read_text(path, needed) for path in texts] or _stdlib_sources(needed, chooser)
    chats: list[Chat] = []
    for session in range(sessions):
        title, source = sources[session % len(sources)]
        # A text that several sessions get starts at another place for each, or they would
        # all be one prefix.
        shift = (session // len(sources)) * 997 % len(source)
        source = source[shift:] + source[:shift]
        chats.append(_make_chat(f"{title}@{shift}" if shift else title, source, context_tokens,
                                turns, chooser))  # fmt: skip
    return Workload(tuple(chats), _SYSTEM_PROMPT.encode(), _interleave(sessions, turns))


def _make_chat(
    title: str, source: bytes, context_tokens: int, turns: int, chooser: random.Random
) -> Chat:
    messages: list[bytes] = []
    at = 0
    for turn in range(turns):
        size = context_tokens if turn == 0 else _MORE_BYTES
        question = _QUESTIONS[0] if turn == 0 else chooser.choice(_QUESTIONS[1:])
        excerpt = source[at : at + size]
        at += size
        messages.append(f"{title}:\n".encode() + excerpt + f"\n\n{question}\n".encode())
    return Chat(title, tuple(messages))


def _interleave(sessions: int, turns: int) -> tuple[tuple[int, int], ...]:
    """Round-robin, where each round starts a third further on.

    With plain round-robin and LRU, a session that returns finds either everything or nothing in
    host memory. With the shift, most sessions return after about half of the others, and some
    after all of them: both host memory and disk have something to do.
    """
    return tuple(
        ((position + turn * _shift(sessions)) % sessions, turn)
        for turn in range(turns)
        for position in range(sessions)
    )


def _shift(sessions: int) -> int:
    return sessions // 3


def _read_text(path: Path, needed: int) -> tuple[str, bytes]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--text {path}: {error.strerror or error}; give a file that can be read"
        ) from error
    if len(data) < needed:
        state = "is empty" if not data else f"has only {len(data)} bytes"
        raise ConfigError(
            f"--text {path}: the file {state}, but {needed} bytes are needed; give a longer file, "
            f"or lower --context or --turns"
        )
    return path.name, data


def _stdlib_sources(needed: int, chooser: random.Random) -> list[tuple[str, bytes]]:
    folder = Path(sysconfig.get_path("stdlib"))
    sources: list[tuple[str, bytes]] = []
    for name in _MODULES:
        path = folder / f"{name}.py"
        if path.is_file() and len(data := path.read_bytes()) >= needed:
            sources.append((path.name, data))
    if not sources:
        raise ConfigError(
            f"no module with {needed} bytes of source in {folder}: lower --context or --turns, "
            f"or give your own files with --text"
        )
    chooser.shuffle(sources)
    return sources
