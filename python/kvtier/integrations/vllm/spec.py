"""`KVTierOffloadingSpec`: what vLLM's `OffloadingConnector` makes in every process of an engine."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

import kvtier
from kvtier.integrations.vllm.identity import (
    key_bytes,
    namespace_of,
    seed_is_random,
    worker_facts,
)
from kvtier.integrations.vllm.layout import rank_layout, slot_layout
from kvtier.integrations.vllm.manager import KVTierOffloadingManager
from kvtier.integrations.vllm.meeting import join_as_scheduler, join_as_worker
from kvtier.integrations.vllm.metrics import metric_definitions
from kvtier.integrations.vllm.settings import parse_settings
from kvtier.integrations.vllm.vllm_tiers import with_vllm_tiers
from kvtier.integrations.vllm.worker import KVTierOffloadingWorker
from kvtier.torch.transfers import check_device

__all__ = ["KVTierOffloadingSpec"]

_INFO = (
    "cpu_num_chunks",
    "cpu_blocks_per_chunk",
    "cpu_kv_cache_size_bytes",
    "kvtier_version",
    "kvtier_policy",
    "kvtier_tiers",
)

_log = logging.getLogger(__name__)


class KVTierOffloadingSpec(OffloadingSpec):
    """kvtier's tiers for vLLM; see `kvtier.integrations.vllm.settings` for what can be set."""

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003
    ) -> dict[str, OffloadingMetricMetadata]:
        """All figures that `get_stats` may have."""
        return metric_definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """The labels of `config_info`; only 0.33 asks."""
        return _INFO

    def __init__(self, config: OffloadingConfig) -> None:
        """Checks the settings; opens nothing. Raises `ConfigError`."""
        super().__init__(config)
        self._settings = parse_settings(config.extra_config)
        self._slots = slot_layout(config, self._settings.host_bytes)
        # Tells vLLM that only rank 0 stores.
        self.replicated_layout = config.replicated_layout
        self._manager: KVTierOffloadingManager | None = None
        self._worker: KVTierOffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side; opens the tiers.

        Raises `ConfigError` for a tier that can not work, `StoreIdentityError` for a store of
        another model, `StoreLockedError` for one that another engine has open.
        """
        if self._manager is None:
            settings = self._settings
            region, facts = join_as_scheduler(self.config.engine_id, self._slots)
            if settings.tiers and seed_is_random(facts):
                _log.warning(
                    "%s has a random seed in every process, so chunks in tiers are not found "
                    "after a restart: set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256",
                    facts["hash"],
                )
            events = self.kv_events_config.enable_kv_cache_events
            manager = kvtier.Manager(
                region,
                with_vllm_tiers(settings.tiers, region, self),
                policy=settings.policy,
                key_bytes=key_bytes(facts),
                namespace=namespace_of(self.config, facts, settings.namespace),
                store_threshold=settings.store_threshold,
                events=events,
            )
            self._manager = KVTierOffloadingManager(
                manager,
                request_level=any(tier.get("offload") == "request" for tier in settings.tiers),
                events=events,
                batches_in_flight=facts["batches_in_flight"],
                drain_seconds=settings.shutdown_drain_s,
                info=dict(zip(_INFO, self._info(manager), strict=True)),
            )
            _log.info(
                "kvtier: %d slots of %d bytes in host memory, policy %s, %d tiers",
                region.slots,
                region.slot_bytes,
                settings.policy,
                len(settings.tiers),
            )
        return self._manager

    def _info(self, manager: kvtier.Manager) -> tuple[str | int, ...]:
        slots, settings = self._slots, self._settings
        return (
            slots.slots,
            slots.blocks_per_chunk,
            slots.slots * slots.slot_bytes,
            kvtier.__version__,
            settings.policy,
            ",".join(manager.stats()["tiers"]),
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The side of one rank.

        Raises `LayoutError` for a KV cache that does not fit vLLM's config, `TransferError` for
        one on a device other than cpu and cuda, `ConfigError` when ranks differ.
        """
        if self._worker is None:
            layout = rank_layout(self.config, kv_caches)
            # Before there is a region, which a refused engine would leave to be found.
            check_device(layout.device)
            region = join_as_worker(
                self.config.engine_id,
                self._slots,
                worker_facts(layout.device),
                self._settings.prefault_threads,
            )
            self._worker = KVTierOffloadingWorker(region, layout, self._slots.blocks_per_chunk)
        return self._worker
