#!/usr/bin/env bash
# Serves a model with vLLM, its KV cache tiered by kvtier: host memory, then files on a disk.
#
#     examples/vllm_serve.sh MODEL [options of vllm serve]
#
# KVTIER_HOST_BYTES, KVTIER_DISK and KVTIER_DISK_BYTES say how much and where.
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: $0 MODEL [options of vllm serve]" >&2
    exit 2
fi
model=$1
shift

host_bytes=${KVTIER_HOST_BYTES:-8589934592}
disk=${KVTIER_DISK:-$HOME/.cache/kvtier}
disk_bytes=${KVTIER_DISK_BYTES:-68719476736}

exec vllm serve "$model" --kv-transfer-config "$(cat <<JSON
{
  "kv_connector": "OffloadingConnector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier.integrations.vllm",
    "cpu_bytes_to_use": $host_bytes,
    "secondary_tiers": [{"type": "file", "path": "$disk", "capacity_bytes": $disk_bytes}]
  }
}
JSON
)" "$@"
