"""Runs `kvtier doctor --json` in a process that takes something away from itself first.

    python restricted.py WITHOUT [arguments of kvtier doctor]

The kernel then really refuses, as it does in a container with such a profile. x86-64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 24, 32
_IO_URING_SETUP, _OPEN, _OPENAT = 425, 2, 257
_CAPSET, _CAPABILITIES_3 = 126, 0x20080522


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _filter(*instructions: tuple[int, int, int, int]) -> None:
    """Has the kernel run these instructions of BPF (code, jump if, jump if not, value) a call."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    program = _Program(len(instructions), code)
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def without_io_uring() -> None:
    _filter(
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 1, _IO_URING_SETUP),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )


def without_direct_io() -> None:
    for call, flags in ((_OPEN, _SECOND_ARGUMENT), (_OPENAT, _THIRD_ARGUMENT)):
        _filter(
            (_LOAD, 0, 0, _NUMBER),
            (_EQUAL, 0, 3, call),
            (_LOAD, 0, 0, flags),
            (_ANY_BIT, 0, 1, os.O_DIRECT),
            (_RETURN, 0, 0, _ERRNO | errno.EINVAL),
            (_RETURN, 0, 0, _ALLOW),
        )


def without_locked_memory() -> None:
    """Lowers the limit, and gives up the capabilities that lift it."""
    header = struct.pack("=Ii", _CAPABILITIES_3, 0)
    _check(_LIBC.syscall(_CAPSET, header, bytes(24)))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))


def without_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def main() -> int:
    {
        "io_uring": without_io_uring,
        "direct_io": without_direct_io,
        "locked_memory": without_locked_memory,
        "open_files": without_open_files,
    }[sys.argv[1]]()
    from kvtier.cli import main as kvtier

    return kvtier(["doctor", "--json", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
