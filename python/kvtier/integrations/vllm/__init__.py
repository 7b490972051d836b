"""kvtier in vLLM: `KVTierOffloadingSpec` for its `OffloadingConnector`.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.integrations.vllm", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "file", "path": "/var/cache/kvtier",
                             "capacity_bytes": 107374182400}]}}'

`kvtier.integrations.vllm.settings` lists every field, `docs/vllm.md` explains them. Importing this
needs vLLM in a version that `versions` names.
"""

from kvtier.integrations.vllm.spec import KVTierOffloadingSpec

__all__ = ["KVTierOffloadingSpec"]
