"""Which layer owns the KV cache that a layer reads (cross-layer KV sharing).

Models declare sharing as "layer x uses the cache of layer y", in any order and through any
number of steps. Only the last layer of such a chain has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtier.errors import SharingError

__all__ = ["chain_text", "resolve_sharing"]


def resolve_sharing(layers: Iterable[str], shared: Mapping[str, str]) -> dict[str, str]:
    """Returns the owner of every layer, in the order of `layers`; owners own themselves.

    `shared` maps a layer to the layer whose KV cache it uses. Raises `SharingError` that
    prints the chain of layers for a cycle, and for a layer or target that is not in `layers`.
    Linear in the number of layers: every chain is walked once.
    """
    owners: dict[str, str] = {}
    names = dict.fromkeys(layers)
    for layer in shared:
        if layer not in names:
            raise SharingError(
                f"sharing is declared for layer {layer!r}, which is not among the "
                f"{len(names)} layers"
            )
    for layer in names:
        chain: dict[str, None] = {}
        current = layer
        while current not in owners:
            if current in chain:
                raise SharingError(f"layers share in a cycle: {chain_text(layer, shared)}")
            if current not in names:
                raise SharingError(
                    f"layer {current!r} does not exist, but its KV cache is shared: "
                    f"{chain_text(layer, shared)}"
                )
            chain[current] = None
            if current not in shared:
                owners[current] = current
                break
            current = shared[current]
        owner = owners[current]
        owners.update(dict.fromkeys(chain, owner))
    return {layer: owners[layer] for layer in names}


def chain_text(layer: str, shared: Mapping[str, str]) -> str:
    """`a -> b -> c`: the layers from `layer` to its owner, or once around a cycle."""
    chain = [layer]
    while chain[-1] in shared:
        chain.append(shared[chain[-1]])
        if chain[-1] in chain[:-1]:
            break
    return " -> ".join(chain)
