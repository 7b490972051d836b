"""The GPU side: paged KV cache, block pool and tables, and transfers to the primary region.

Everything here also runs on `cpu` tensors. `import kvtier` does not import this package, and
with it torch; engines import it where they need it.
"""

from kvtier.torch.block_pool import BlockPool, BlockPoolStats
from kvtier.torch.block_table import BlockTables
from kvtier.torch.kv_cache import KVCache, allocate_kv_cache
from kvtier.torch.sharing import resolve_sharing
from kvtier.torch.specs import FullAttentionSpec, LayerSpec
from kvtier.torch.transfers import TransferEngine, TransferJob, region_tensor

__all__ = [
    "BlockPool",
    "BlockPoolStats",
    "BlockTables",
    "FullAttentionSpec",
    "KVCache",
    "LayerSpec",
    "TransferEngine",
    "TransferJob",
    "allocate_kv_cache",
    "region_tensor",
    "resolve_sharing",
]
