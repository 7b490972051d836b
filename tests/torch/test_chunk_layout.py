"""Layouts that an integration makes: transfers of them, and what is refused."""

import re

import pytest
import torch

from kvtier import Region
from kvtier.errors import LayoutError, TransferError
from kvtier.torch import ChunkLayout, GroupLayout, Piece, TensorParallel, TransferEngine

BLOCKS = 6


def rows(width: int, seed: int, padding: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randint(-128, 128, (BLOCKS, width + padding), generator=draw, dtype=torch.int8)
    return wide[:, :width]


def test_two_ranks_share_blocks_in_an_order_of_their_own() -> None:
    """`[block][rank][tensor]`: each rank moves its part of a slot, and nothing of the other's."""
    region = Region(2, 2 * 2 * 12)
    ranks = [(rows(8, rank, padding=4), rows(4, rank + 2)) for rank in range(2)]
    before = [tensor.clone() for tensors in ranks for tensor in tensors]
    engines = [
        TransferEngine(
            region,
            ChunkLayout(
                tensors,
                (GroupLayout(24, (Piece(0, 0, 8, 12 * rank), Piece(1, 0, 4, 12 * rank + 8))),),
            ),
            blocks_per_chunk=2,
        )
        for rank, tensors in enumerate(ranks)
    ]
    for engine in engines:
        engine.wait(engine.store([4, 1], [1]))
    slot = torch.frombuffer(region, dtype=torch.int8).view(2, -1)[1, :48]
    expected = [tensor[block] for block in (4, 1) for tensor in before]
    assert torch.equal(slot, torch.cat(expected))
    for engine in engines:
        engine.wait(engine.load([0, 5], [1]))
        engine.close()
    for tensor, old in zip((tensor for both in ranks for tensor in both), before, strict=True):
        assert torch.equal(tensor[[0, 5]], old[[4, 1]])
        assert torch.equal(tensor[1:5], old[1:5])


def test_a_given_layout_says_already_what_a_rank_moves() -> None:
    layout = ChunkLayout((rows(8, 0),), (GroupLayout(8, (Piece(0, 0, 8, 0),)),))
    with pytest.raises(TransferError, match="leave tensor_parallel out"):
        TransferEngine(Region(1, 8), layout, 1, tensor_parallel=TensorParallel(2, 0))


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ((), "0 tensors and 1 groups"),
        ((rows(8, 0).float(),), "tensor 0 is torch.float32"),
        ((rows(8, 0).t(),), "must be int8 (num_blocks, bytes) with contiguous rows"),
        ((rows(8, 0)[0],), "of shape (8,)"),
        ((rows(8, 0), rows(8, 0)[1:]), "tensor 1 has 5 blocks on cpu, but tensor 0 6 on cpu"),
        ((rows(8, 0), rows(8, 0).to("meta")), "tensor 1 has 6 blocks on meta"),
    ],
)
def test_tensors_that_are_not_rows_of_blocks_are_refused(
    tensors: tuple[torch.Tensor, ...], complaint: str
) -> None:
    with pytest.raises(LayoutError, match=re.escape(complaint)):
        ChunkLayout(tensors, (GroupLayout(8, (Piece(0, 0, 8, 0),)),))


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ((Piece(1, 0, 8, 0),), "there is no tensor 1"),
        ((Piece(0, 0, 0, 0),), "does not fit into rows of 8 bytes and blocks of 16"),
        ((Piece(0, 1, 8, 0),), "does not fit"),
        ((Piece(0, -1, 8, 0),), "does not fit"),
        ((Piece(0, 0, 8, 9),), "does not fit"),
        ((Piece(0, 0, 8, 0, turns=2, turn=2),), "does not fit"),
        ((Piece(0, 0, 4, 0), Piece(0, 3, 4, 8)), "group 0: two pieces overlap at byte 3"),
        ((Piece(0, 0, 4, 0), Piece(0, 4, 4, 2)), "group 0: two pieces overlap at byte 2"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces: tuple[Piece, ...], complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        ChunkLayout((rows(8, 0),), (GroupLayout(16, pieces),))
