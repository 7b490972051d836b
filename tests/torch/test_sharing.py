from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import SharingError
from kvtier.torch import resolve_sharing


@given(st.data(), st.integers(1, 12))
def test_chains_lead_to_their_end_in_any_order(data: st.DataObject, count: int) -> None:
    # Every layer may point to a lower number, so there is no cycle; names are shuffled.
    names = [f"layer{index}" for index in range(count)]
    shared = {}
    for index in range(1, count):
        target = data.draw(st.none() | st.integers(0, index - 1))
        if target is not None:
            shared[names[index]] = names[target]
    layers = data.draw(st.permutations(names))
    declared = dict(data.draw(st.permutations(list(shared.items()))))

    owners = resolve_sharing(layers, declared)

    assert list(owners) == layers
    for layer in names:
        walked = layer
        while walked in shared:
            walked = shared[walked]
        assert owners[layer] == walked


@given(st.integers(1, 6), st.integers(0, 4))
def test_cycles_are_printed(length: int, lead_in: int) -> None:
    ring = [f"r{index}" for index in range(length)]
    shared = {layer: ring[(index + 1) % length] for index, layer in enumerate(ring)}
    path = [f"p{index}" for index in range(lead_in)]
    shared |= dict(pairwise([*path, ring[0]]))
    with pytest.raises(SharingError, match="cycle") as caught:
        resolve_sharing([*path, *ring], shared)
    assert " -> ".join([*path, *ring, ring[0]]) in str(caught.value)


def test_unknown_names_are_named() -> None:
    with pytest.raises(SharingError, match=r"'z' does not exist.*a -> b -> z"):
        resolve_sharing(["a", "b"], {"a": "b", "b": "z"})
    with pytest.raises(SharingError, match="'q'"):
        resolve_sharing(["a"], {"q": "a"})
