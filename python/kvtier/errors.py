"""Everything that kvtier raises, under one root.

Each error also has the built-in base that people expect to catch: a bad value is a
`ValueError`, a failed file operation an `OSError`, and so on. Messages name the value that
was refused and what to do about it. The Rust core raises these classes too.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "DuplicateKeyError",
    "ForkError",
    "InvariantError",
    "KeyLengthError",
    "KeyNotReadyError",
    "KeyStateError",
    "KvTierError",
    "LayoutError",
    "PinOverflowError",
    "PoolExhaustedError",
    "RegionError",
    "SharingError",
    "StatsPageError",
    "StoreDamagedError",
    "StoreFormatError",
    "StoreIdentityError",
    "StoreLockedError",
    "StoreReadOnlyError",
    "TierError",
    "TransferError",
    "UnknownKeyError",
]


class KvTierError(Exception):
    """Root of every error of kvtier."""


class ConfigError(KvTierError, ValueError):
    """A setting that can not work: unknown field, wrong type, impossible size."""


class ClosedError(KvTierError, RuntimeError):
    """Used after `shutdown`."""


class ForkError(KvTierError, RuntimeError):
    """A handle was used in a process that `fork` made. Start workers with `spawn`."""


class InvariantError(KvTierError, AssertionError):
    """An internal invariant does not hold: a bug in kvtier."""


class KeyStateError(KvTierError, ValueError):
    """A key is not in the state that the call needs; nothing was changed."""


class UnknownKeyError(KeyStateError, LookupError):
    """The key is not in the primary tier."""


class KeyNotReadyError(KeyStateError):
    """The key is still being written."""


class DuplicateKeyError(KeyStateError):
    """The same key twice in one call."""


class KeyLengthError(KvTierError, ValueError):
    """A key that has not `key_bytes` bytes."""


class PinOverflowError(KvTierError, OverflowError):
    """More pins on one key than the counter holds."""


class RegionError(KvTierError, OSError):
    """The primary region could not be made, attached or mapped."""


class TierError(KvTierError, OSError):
    """A secondary tier could not be opened or failed."""


class StoreIdentityError(TierError):
    """A store holds data of another namespace; both identities are in the message."""


class StoreLockedError(TierError):
    """Another process owns the store; its pid is in the message."""


class StoreFormatError(TierError):
    """A store of another version of the format; nothing was changed."""


class StoreDamagedError(TierError):
    """A store that does not say any more whose data it holds; nothing was changed."""


class StoreReadOnlyError(TierError):
    """The store's directory can not be written."""


class StatsPageError(KvTierError, OSError):
    """Stats pages that can not be read: no such directory, or none that may be listed."""


class LayoutError(KvTierError, ValueError):
    """KV cache specs or tensors that do not fit together."""


class SharingError(LayoutError):
    """Layers that share a KV cache form a cycle, or name a target that is not there."""


class PoolExhaustedError(KvTierError, RuntimeError):
    """The GPU block pool has no free block."""


class TransferError(KvTierError, ValueError):
    """A transfer that was refused before any byte moved."""


class DeviceError(KvTierError, RuntimeError):
    """The GPU or its driver refused a call; the driver's own code is in the message."""
