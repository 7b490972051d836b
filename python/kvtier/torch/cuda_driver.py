"""The few calls of the CUDA driver that torch does not offer, found when they are needed.

`libcuda` comes with the driver, so nothing of CUDA is needed to build or import kvtier. Errors of
the driver's own interface are returned and leave nothing behind: no "last error" for which the
next kernel launch would be blamed.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import DeviceError

__all__ = ["Driver"]

_LIBRARY = "libcuda.so.1"
# Pinned for every context of the process, and mapped, so that kernels reach it.
_REGISTER_PORTABLE_MAPPED = 0x01 | 0x02
_PREFER_OVERLAP = 0x1


class _Location(ctypes.Structure):
    """CUmemLocation; no hint here."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    )


class Driver:
    """The driver of this machine."""

    IN_STREAM_ORDER = 1
    """The source of a copy is read when the stream gets there."""
    ANY_TIME = 3
    """It may be read at once: nothing that the stream still has to do writes it."""

    def __init__(self) -> None:
        """Raises `DeviceError` where there is no driver."""
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise DeviceError(f"no CUDA driver: {error}") from error
        # CUDA 13 took an argument away; drivers from 12.8 on have one of the two, or both.
        self._batch = getattr(self._library, "cuMemcpyBatchAsync_v2", None)
        self._batch_names_failure = self._batch is None
        if self._batch is None:
            self._batch = getattr(self._library, "cuMemcpyBatchAsync", None)

    @property
    def has_batched_memcpy(self) -> bool:
        """Whether `memcpy_batch` can be called."""
        return self._batch is not None

    def context(self) -> int:
        """The context that is current in this thread."""
        context = c_void_p()
        self._call("cuCtxGetCurrent", byref(context))
        if not context.value:
            raise DeviceError("no CUDA context is current in this thread")
        return context.value

    def use_context(self, context: int) -> None:
        """Makes a context current in this thread."""
        self._call("cuCtxSetCurrent", c_void_p(context))

    def register(self, address: int, size: int) -> None:
        """Pins host memory; it must stay mapped until `unregister`."""
        self._call(
            "cuMemHostRegister_v2",
            c_void_p(address),
            c_size_t(size),
            c_uint(_REGISTER_PORTABLE_MAPPED),
        )

    def unregister(self, address: int) -> None:
        """Undoes `register` of the same address."""
        self._call("cuMemHostUnregister", c_void_p(address))

    def memcpy_batch(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        sizes: NDArray[np.int64],
        *,
        source_order: int,
        stream: int,
    ) -> None:
        """Queues copies between device and pinned host memory, in any order among themselves.

        All three are C-contiguous and of one length; they may be changed after the call. `stream`
        is a handle, not of the default stream.
        """
        if self._batch is None:
            raise DeviceError("this CUDA driver has no batched memcpy: it needs CUDA 12.8")
        if not len(sizes):
            return
        attributes = _Attributes(source_order=source_order, flags=_PREFER_OVERLAP)
        first = c_size_t(0)
        failure = [byref(c_size_t())] if self._batch_names_failure else []
        self._check(
            "cuMemcpyBatchAsync",
            self._batch(
                c_void_p(targets.ctypes.data),
                c_void_p(sources.ctypes.data),
                c_void_p(sizes.ctypes.data),
                c_size_t(len(sizes)),
                byref(attributes),
                byref(first),
                c_size_t(1),
                *failure,
                c_void_p(stream),
            ),
        )

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status == 0:
            return
        text = c_char_p()
        self._library.cuGetErrorName(c_int(status), byref(text))
        code = text.value.decode() if text.value else "unknown"
        raise DeviceError(f"{name} failed with CUDA error {status} ({code})")
