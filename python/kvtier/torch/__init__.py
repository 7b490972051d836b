"""The GPU side: paged KV cache, block pool and tables, and transfers to the primary region.

Everything here also runs on `cpu` tensors. `import kvtier` does not import this package, and
with it torch; engines import it where they need it. `docs/layouts.md` draws the layouts.

| module | question it answers |
|---|---|
| `specs`, `layouts` | what does a layer keep, and in which order? |
| `sharing`, `groups` | which layers have one cache, and which one block table? |
| `plan`, `kv_cache` | where does each page lie, and what do kernels see of it? |
| `canonical` | which bytes belong to a block, in any engine's tensors? |
| `chunk_layout` | which byte of a block lies where in a slot? |
| `transfers` | how do they get there and back? |
| `block_pool`, `block_table` | who holds which block? |
"""

from kvtier.torch.block_pool import BlockPool, BlockPoolStats
from kvtier.torch.block_table import PAD_SLOT, BlockTables, ContextParallel, TableGroup
from kvtier.torch.canonical import CanonicalKVCaches, PageRef, register_kv_caches
from kvtier.torch.chunk_layout import (
    ChunkLayout,
    GroupLayout,
    Piece,
    TensorParallel,
    layout_identity,
)
from kvtier.torch.groups import CacheGroup, make_groups
from kvtier.torch.kernel_blocks import MultipleOf, kernel_block_size
from kvtier.torch.kv_cache import KVCache, LayerView, allocate, allocate_kv_cache
from kvtier.torch.layouts import KVLayout
from kvtier.torch.plan import KVCachePlan, plan_kv_cache
from kvtier.torch.sharing import resolve_sharing
from kvtier.torch.specs import (
    AttentionSpec,
    ChunkedLocalSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from kvtier.torch.transfers import GroupBlocks, TransferEngine, TransferJob, region_tensor

__all__ = [
    "PAD_SLOT",
    "AttentionSpec",
    "BlockPool",
    "BlockPoolStats",
    "BlockTables",
    "CacheGroup",
    "CanonicalKVCaches",
    "ChunkLayout",
    "ChunkedLocalSpec",
    "ContextParallel",
    "EncoderOnlySpec",
    "FullAttentionSpec",
    "GroupBlocks",
    "GroupLayout",
    "KVCache",
    "KVCachePlan",
    "KVLayout",
    "LayerSpec",
    "LayerView",
    "MLASpec",
    "MambaSpec",
    "MultipleOf",
    "PageRef",
    "Piece",
    "SlidingWindowSpec",
    "TableGroup",
    "TensorParallel",
    "TransferEngine",
    "TransferJob",
    "allocate",
    "allocate_kv_cache",
    "kernel_block_size",
    "layout_identity",
    "make_groups",
    "plan_kv_cache",
    "region_tensor",
    "register_kv_caches",
    "resolve_sharing",
]
