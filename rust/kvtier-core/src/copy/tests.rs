use super::*;
use crate::region::RegionKind;

const BLOCKS: usize = 6;
const BOUNDS: Bounds = Bounds { blocks: BLOCKS, slots: 3, blocks_per_chunk: 2 };

/// Two tensors: rows of 8 bytes, and rows of 16 of which 4 are padding in front and 8 behind.
fn tensors() -> [Vec<u8>; 2] {
    [
        (0..BLOCKS * 8).map(|at| at as u8).collect(),
        (0..BLOCKS * 16).map(|at| 100 + at as u8).collect(),
    ]
}

fn piece(tensor: usize, offset: usize, bytes: usize, slot_offset: usize) -> Piece {
    Piece { tensor, offset, bytes, slot_offset, turns: 1, turn: 0 }
}

fn rows(memory: &mut [Vec<u8>; 2]) -> Vec<Rows> {
    [8, 16]
        .into_iter()
        .zip(memory)
        .map(|(bytes, memory)| Rows {
            start: memory.as_mut_ptr(),
            blocks: BLOCKS,
            bytes,
            stride: bytes,
        })
        .collect()
}

fn made(memory: &mut [Vec<u8>; 2], groups: Vec<Group>) -> Result<HostCopier, CopyError> {
    let region = Region::new(3, 4096, RegionKind::Anonymous).expect("small region");
    // SAFETY: the tests keep `memory` alive and leave it alone while they copy.
    unsafe { HostCopier::new(region, rows(memory), groups, 2, 2) }
}

/// Group 0: both tensors; group 1: the first alone, in two pieces that change places.
fn copier(memory: &mut [Vec<u8>; 2]) -> HostCopier {
    let groups = vec![
        Group { block_bytes: 12, pieces: vec![piece(0, 0, 8, 0), piece(1, 4, 4, 8)] },
        Group { block_bytes: 8, pieces: vec![piece(0, 0, 4, 4), piece(0, 4, 4, 0)] },
    ];
    made(memory, groups).expect("it fits")
}

fn run(
    copier: &HostCopier,
    group: usize,
    way: Way,
    ids: &[i64],
    slots: &[i64],
    first: u32,
) -> usize {
    let moves = Moves::new(ids, slots, first, BOUNDS, way).expect("good ids");
    // SAFETY: single-threaded test.
    unsafe { copier.run(group, &moves) }.expect("good moves")
}

#[test]
fn what_was_stored_comes_back_to_other_blocks() {
    let mut memory = tensors();
    let before = memory.clone();
    let copier = copier(&mut memory);
    assert_eq!(run(&copier, 0, Way::Store, &[0, 1, 2, 3], &[2, 0], 0), 48);
    // SAFETY: nobody writes.
    let slot = unsafe { copier.region.slot(2) };
    assert_eq!(slot[..8], before[0][..8]);
    assert_eq!(slot[8..12], before[1][4..8]);
    assert_eq!(slot[12..20], before[0][8..16]);
    assert_eq!(slot[20..24], before[1][20..24]);
    assert_eq!(run(&copier, 0, Way::Load, &[5, 4], &[0], 0), 24);
    assert_eq!(memory[0][5 * 8..6 * 8], before[0][2 * 8..3 * 8]);
    assert_eq!(memory[1][4 * 16 + 4..4 * 16 + 8], before[1][3 * 16 + 4..3 * 16 + 8]);
    assert_eq!(memory[1][4 * 16..4 * 16 + 4], before[1][4 * 16..4 * 16 + 4], "padding");
    assert_eq!(memory[1][4 * 16 + 8..5 * 16], before[1][4 * 16 + 8..5 * 16], "padding");
}

#[test]
fn first_and_last_chunks_may_be_partial() {
    let mut memory = tensors();
    let before = memory.clone();
    let copier = copier(&mut memory);
    assert_eq!(run(&copier, 1, Way::Store, &[3, 4, 5, 0], &[1, 0, 2], 1), 32);
    let swapped = |block: usize| {
        let row = &before[0][block * 8..(block + 1) * 8];
        [&row[4..], &row[..4]].concat()
    };
    // SAFETY: nobody writes.
    let slots = [0, 1, 2].map(|slot| unsafe { copier.region.slot(slot) });
    assert_eq!(slots[1][..8], [0; 8], "before the first block");
    assert_eq!(slots[1][8..16], swapped(3));
    assert_eq!(slots[0][..16], [swapped(4), swapped(5)].concat());
    assert_eq!(slots[2][..8], swapped(0));
    assert_eq!(slots[2][8..16], [0; 8], "behind the last block");
    assert_eq!(run(&copier, 1, Way::Load, &[1], &[1], 1), 8);
    assert_eq!(memory[0][8..16], before[0][3 * 8..4 * 8]);
}

#[test]
fn ranks_with_the_same_bytes_take_turns_and_store_everything_once() {
    let mut memory = tensors();
    let mut stored = 0;
    for turn in 0..3 {
        let pieces = vec![Piece { turns: 3, turn, ..piece(0, 0, 8, 0) }];
        let copier = made(&mut memory, vec![Group { block_bytes: 8, pieces }]).expect("it fits");
        stored += run(&copier, 0, Way::Store, &[0, 1, 2, 3, 4, 5], &[0, 1, 2], 0);
        assert_eq!(run(&copier, 0, Way::Load, &[0, 1], &[0], 0), 16, "every rank loads all");
    }
    assert_eq!(stored, BLOCKS * 8);
}

#[test]
fn large_transfers_are_split_over_threads_and_are_complete() {
    const ROW: usize = 64 << 10;
    let mut memory: Vec<u8> = (0..100 * ROW).map(|at| (at % 249) as u8).collect();
    let before = memory.clone();
    let region = Region::new(50, 2 * ROW, RegionKind::Anonymous).expect("region");
    let rows = vec![Rows { start: memory.as_mut_ptr(), blocks: 100, bytes: ROW, stride: ROW }];
    let groups = vec![Group { block_bytes: ROW, pieces: vec![piece(0, 0, ROW, 0)] }];
    // SAFETY: `memory` outlives the copier and is left alone.
    let copier = unsafe { HostCopier::new(region, rows, groups, 2, 3) }.expect("it fits");
    let ids: Vec<i64> = (0..100).collect();
    let slots: Vec<i64> = (0..50).rev().collect();
    let store = Moves::new(&ids, &slots, 0, copier.bounds(), Way::Store).expect("good ids");
    let load = Moves::new(&ids, &slots, 0, copier.bounds(), Way::Load).expect("good ids");
    // SAFETY: single-threaded test.
    unsafe {
        assert_eq!(copier.run(0, &store), Ok(100 * ROW));
        std::ptr::write_bytes(memory.as_mut_ptr(), 0, memory.len());
        assert_eq!(copier.run(0, &load), Ok(100 * ROW));
    }
    assert!(memory == before);
}

#[test]
fn moves_that_can_not_be_made_are_refused() {
    let refused = |ids: &[i64], slots: &[i64], first, way| {
        Moves::new(ids, slots, first, BOUNDS, way).expect_err("refused")
    };
    for way in [Way::Store, Way::Load] {
        assert!(matches!(refused(&[0], &[], 0, way), MoveError::Shape { wanted: 1, .. }));
        assert!(matches!(refused(&[0, 1], &[0], 1, way), MoveError::Shape { wanted: 2, .. }));
        assert!(matches!(refused(&[], &[0], 0, way), MoveError::Shape { wanted: 0, .. }));
        assert!(matches!(refused(&[0], &[0], 2, way), MoveError::First { first: 2, .. }));
        assert!(matches!(refused(&[0, 6], &[0], 0, way), MoveError::Block { block: 6, .. }));
        assert!(matches!(refused(&[-1], &[0], 0, way), MoveError::Block { block: -1, .. }));
        assert!(matches!(refused(&[0, 1], &[3], 0, way), MoveError::Slot { slot: 3, .. }));
        assert!(matches!(refused(&[0, 1], &[-1], 0, way), MoveError::Slot { slot: -1, .. }));
    }
    let twice = |what, id| MoveError::Twice { what, id };
    assert_eq!(refused(&[1, 1], &[0], 0, Way::Load), twice("block", 1));
    assert_eq!(refused(&[0, 1, 2, 3], &[1, 1], 0, Way::Store), twice("slot", 1));
    assert!(Moves::new(&[1, 1], &[0], 0, BOUNDS, Way::Store).is_ok(), "read twice");
    assert!(Moves::new(&[0, 1, 2, 3], &[1, 1], 0, BOUNDS, Way::Load).is_ok(), "read twice");
}

#[test]
fn moves_for_another_copier_are_refused() {
    let mut memory = tensors();
    let copier = copier(&mut memory);
    for bounds in [
        Bounds { blocks: 7, ..BOUNDS },
        Bounds { slots: 4, ..BOUNDS },
        Bounds { blocks_per_chunk: 1, ..BOUNDS },
    ] {
        let moves = Moves::new(&[0], &[0], 0, bounds, Way::Store).expect("good ids");
        // SAFETY: refused.
        let error = unsafe { copier.run(0, &moves) }.expect_err("refused");
        assert_eq!(error, CopyError::Bounds { given: bounds, own: BOUNDS });
    }
    let moves = Moves::new(&[0], &[0], 0, BOUNDS, Way::Store).expect("good ids");
    // SAFETY: refused.
    let error = unsafe { copier.run(2, &moves) }.expect_err("refused");
    assert_eq!(error, CopyError::Group { group: 2, groups: 2 });
}

#[test]
fn pieces_that_do_not_fit_are_refused() {
    let mut memory = tensors();
    let mut refused = |block_bytes, pieces| {
        made(&mut memory, vec![Group { block_bytes, pieces }]).expect_err("refused")
    };
    for bad in [
        piece(2, 0, 1, 0),
        piece(0, 0, 0, 0),
        piece(0, 1, 8, 0),
        piece(0, 0, 8, 1),
        piece(0, usize::MAX, 2, 0),
        Piece { turns: 2, turn: 2, ..piece(0, 0, 8, 0) },
    ] {
        assert!(matches!(refused(8, vec![bad]), CopyError::Layout(_)), "{bad:?}");
    }
    let overlaps =
        [vec![piece(0, 0, 8, 0), piece(1, 0, 8, 7)], vec![piece(0, 0, 8, 0), piece(0, 7, 1, 8)]];
    for pieces in overlaps {
        let error = refused(16, pieces);
        assert!(error.to_string().contains("overlap at byte 7"), "{error}");
    }
    let error = refused(2049, vec![piece(0, 0, 8, 0)]);
    let expected = CopyError::SlotTooSmall { group: 0, chunk_bytes: 4098, slot_bytes: 4096 };
    assert_eq!(error, expected);
}
