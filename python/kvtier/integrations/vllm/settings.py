"""The plug-in's settings: `kv_connector_extra_config`, checked before anything is opened.

| field | meaning | default |
|---|---|---|
| `cpu_bytes_to_use` | bytes of host memory of one engine, all its ranks together | required |
| `eviction_policy` | one of `kvtier._kvtier.POLICIES` | `"auto"` |
| `secondary_tiers` | tiers behind host memory, fastest first, as in `kvtier.config`, or vLLM's own, as in `vllm_tiers` | none |
| `store_threshold` | a chunk is stored when it was offered so often | 1 |
| `namespace` | text that sets stores apart which vLLM's settings do not: new weights under an old name, a LoRA set | `""` |
| `prefault_threads` | threads that touch host memory at start; 0: pages come at first use | 2 |
| `shutdown_drain_s` | seconds that a stopping engine waits for stores to reach their tiers | 5 |

`block_size` or `blocks_per_chunk`, `offload_prompt_only`, `self_describing_kv_events` and
`canonical_layout` are vLLM's own and mean what its documentation says.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier._kvtier import POLICIES
from kvtier.errors import ConfigError

__all__ = ["Settings", "parse_settings"]

_VLLM_FIELDS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "canonical_layout",
        "sync_load_budget_bytes",
    }
)
_OUR_FIELDS = frozenset(
    {
        "cpu_bytes_to_use",
        "eviction_policy",
        "secondary_tiers",
        "store_threshold",
        "namespace",
        "prefault_threads",
        "shutdown_drain_s",
    }
)


@dataclass(frozen=True)
class Settings:
    """What a user can set; the module says what each does."""

    host_bytes: int
    policy: str
    tiers: tuple[Mapping[str, Any], ...]
    store_threshold: int
    namespace: str
    prefault_threads: int
    shutdown_drain_s: float


def parse_settings(extra_config: Mapping[str, Any]) -> Settings:
    """Checks the fields; tiers are checked by the manager that opens them.

    Raises `ConfigError` that names the field for one that is unknown or can not work.
    """
    unknown = sorted(set(extra_config) - _VLLM_FIELDS - _OUR_FIELDS)
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: unknown field {unknown[0]!r}; there are "
            f"{', '.join(sorted(_VLLM_FIELDS | _OUR_FIELDS))}"
        )
    policy = extra_config.get("eviction_policy", "auto")
    if policy not in POLICIES:
        raise ConfigError(
            f"eviction_policy is {policy!r}, but must be one of {', '.join(POLICIES)}"
        )
    tiers = extra_config.get("secondary_tiers", [])
    if not isinstance(tiers, (list, tuple)) or not all(isinstance(tier, Mapping) for tier in tiers):
        raise ConfigError(f"secondary_tiers is {tiers!r}, but must be a list of objects")
    namespace = extra_config.get("namespace", "")
    if not isinstance(namespace, str):
        raise ConfigError(f"namespace is {namespace!r}, but must be a string")
    return Settings(
        host_bytes=_number(extra_config, "cpu_bytes_to_use", None, least=1),
        policy=policy,
        tiers=tuple(tiers),
        # vLLM takes 0 and 1 both as "store at once".
        store_threshold=max(1, _number(extra_config, "store_threshold", 1, least=0)),
        namespace=namespace,
        prefault_threads=_number(extra_config, "prefault_threads", 2, least=0),
        shutdown_drain_s=_seconds(extra_config, "shutdown_drain_s", 5.0),
    )


def _number(extra_config: Mapping[str, Any], field: str, default: int | None, least: int) -> int:
    value = extra_config.get(field, default)
    # JSON written by hand and by scripts has 1e10 for a number of bytes.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{field} {found}: it must be an integer of {least} or more")
    return value


def _seconds(extra_config: Mapping[str, Any], field: str, default: float) -> float:
    value = extra_config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"{field} is {value!r}, but must be a number of seconds from 0 up")
    return float(value)
