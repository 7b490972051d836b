//! Blocks of a paged KV cache in host memory to slots of the region and back.
//!
//! A slot holds a chunk as `[block of the chunk][layer][page]`, densely from its start: the same
//! bytes that the GPU path writes, and a chunk that is filled in part is a run of bytes. Which
//! bytes of which tensor a page is, the [`Piece`]s of a group say.
//!
//! A transfer is a list of [`Moves`], checked when it is made: block, slot and the block's
//! position in the slot's chunk. Threads take moves in batches off one counter, so a thread that
//! the machine holds up holds up nobody else. Large transfers go around the CPU's cache.

mod bytes;
mod moves;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use self::bytes::ByteCopier;
pub use self::moves::{Bounds, Move, MoveError, Moves, Way};
use crate::region::Region;

/// One canonical tensor: `blocks` rows of `bytes`, `stride` bytes apart.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// Start of block 0.
    pub start: *mut u8,
    /// Rows.
    pub blocks: usize,
    /// Bytes a row.
    pub bytes: usize,
    /// Bytes from one row to the next, at least `bytes`.
    pub stride: usize,
}

/// Bytes of a row, and where they are in a block of the slot.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// Index of the tensor.
    pub tensor: usize,
    /// First byte in the tensor's row.
    pub offset: usize,
    /// Bytes.
    pub bytes: usize,
    /// First byte in the block of a chunk.
    pub slot_offset: usize,
    /// Ranks that hold these very bytes, and take turns to store them; 1: this one alone.
    pub turns: u64,
    /// This rank's turn, below `turns`.
    pub turn: u64,
}

/// What a group moves for each block.
#[derive(Debug, Clone)]
pub struct Group {
    /// Bytes of a block in a chunk.
    pub block_bytes: usize,
    /// All pieces of a block.
    pub pieces: Vec<Piece>,
}

/// A copier that can not be made, or moves that are not for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// Slots too small for a chunk.
    #[error(
        "a chunk of group {group} has {chunk_bytes} bytes, but a slot of the region only \
         {slot_bytes}: make the region with slot_bytes of at least {chunk_bytes}"
    )]
    SlotTooSmall {
        /// The group.
        group: usize,
        /// Bytes a chunk.
        chunk_bytes: usize,
        /// Bytes a slot.
        slot_bytes: usize,
    },
    /// Tensors or pieces that do not fit together.
    #[error("{0}")]
    Layout(String),
    /// A group that does not exist.
    #[error("group {group} does not exist: there are {groups}")]
    Group {
        /// The number.
        group: usize,
        /// Groups there are.
        groups: usize,
    },
    /// Moves made for another cache, region or chunk.
    #[error("the moves were made for {given}, but the copier is for {own}")]
    Bounds {
        /// What the moves were checked against.
        given: Bounds,
        /// What they should have been checked against.
        own: Bounds,
    },
}

/// Copies chunks; see the module.
#[derive(Debug)]
pub struct HostCopier {
    region: Arc<Region>,
    rows: Vec<Rows>,
    groups: Vec<Group>,
    bounds: Bounds,
    threads: usize,
}

// SAFETY: the pointers of `rows` may be used from any thread, and exclusively while a copy runs,
// by the contract of `HostCopier::new` and of its copies.
unsafe impl Send for HostCopier {}
// SAFETY: as above.
unsafe impl Sync for HostCopier {}

/// Less than this is not worth another thread.
const BYTES_PER_THREAD: usize = 1 << 20;
/// What a thread takes at once.
const BYTES_PER_BATCH: usize = 256 << 10;

impl HostCopier {
    /// A copier between `rows` and `region`, chunks of `blocks_per_chunk` blocks.
    ///
    /// # Errors
    /// [`CopyError`] when a chunk does not fit into a slot, or a piece not into its tensor or
    /// block.
    ///
    /// # Safety
    /// Each of `rows` is memory that may be read and written, of its shape, as long as the
    /// copier lives.
    pub unsafe fn new(
        region: Arc<Region>,
        rows: Vec<Rows>,
        groups: Vec<Group>,
        blocks_per_chunk: u32,
        threads: usize,
    ) -> Result<Self, CopyError> {
        let Some(first) = rows.first() else {
            return Err(CopyError::Layout("there is no tensor to copy".into()));
        };
        let blocks = first.blocks;
        for (number, row) in rows.iter().enumerate() {
            if row.blocks != blocks || row.bytes == 0 || row.stride < row.bytes {
                return Err(CopyError::Layout(format!(
                    "tensor {number} has {} blocks of {} bytes, {} bytes apart; tensor 0 has \
                     {blocks} blocks",
                    row.blocks, row.bytes, row.stride
                )));
            }
        }
        if blocks_per_chunk == 0 {
            return Err(CopyError::Layout("a chunk needs at least one block".into()));
        }
        for (number, group) in groups.iter().enumerate() {
            check_group(number, group, &rows, blocks_per_chunk, region.slot_bytes())?;
        }
        let bounds = Bounds { blocks, slots: region.slots(), blocks_per_chunk };
        Ok(Self { region, rows, groups, bounds, threads: threads.max(1) })
    }

    /// What moves for this copier must be made with.
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// Makes `moves`, one after the other or on several threads; returns the bytes.
    ///
    /// # Errors
    /// [`CopyError`], before any byte moved.
    ///
    /// # Safety
    /// Nobody else touches the destination, and nobody writes the source, while it runs: the
    /// blocks and slots of `moves`, by its [`Way`].
    pub unsafe fn run(&self, group: usize, moves: &Moves) -> Result<usize, CopyError> {
        let pieces = &self.group(group)?.pieces;
        if moves.bounds() != self.bounds {
            return Err(CopyError::Bounds { given: moves.bounds(), own: self.bounds });
        }
        let block_bytes = self.groups[group].block_bytes;
        let per_block: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let bytes = per_block * moves.list().len();
        let threads = self.threads.min(bytes / BYTES_PER_THREAD).max(1);
        let batch = (BYTES_PER_BATCH / per_block.max(1)).max(1);
        let next = AtomicUsize::new(0);
        let total = AtomicUsize::new(0);
        let work = || {
            let mut done = 0;
            let mut copier = ByteCopier::for_transfer(bytes);
            loop {
                let first = next.fetch_add(batch, Ordering::Relaxed);
                let Some(rest) = moves.list().get(first..).filter(|rest| !rest.is_empty()) else {
                    break;
                };
                let taken = &rest[..batch.min(rest.len())];
                done += self.copy_blocks(pieces, block_bytes, taken, moves.way(), &mut copier);
            }
            copier.finish();
            total.fetch_add(done, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        Ok(total.into_inner())
    }

    fn group(&self, group: usize) -> Result<&Group, CopyError> {
        self.groups.get(group).ok_or(CopyError::Group { group, groups: self.groups.len() })
    }

    /// Gives every piece of every block to `copier`; returns the bytes.
    fn copy_blocks(
        &self,
        pieces: &[Piece],
        block_bytes: usize,
        moves: &[Move],
        way: Way,
        copier: &mut ByteCopier,
    ) -> usize {
        let mut done = 0;
        for step in moves {
            for piece in pieces {
                if way == Way::Store && !self.is_mine(*step, piece) {
                    continue;
                }
                let (from, to) = self.ends(*step, piece, block_bytes, way);
                // SAFETY: both lie inside tensor and slot, which are different memory.
                // Destinations are distinct, by `Moves` and because pieces of a block do not
                // overlap; nobody else touches them until `HostCopier::run` returns, by its
                // contract, and by then the copier has finished.
                unsafe { copier.copy(from, to, piece.bytes) };
                done += piece.bytes;
            }
        }
        done
    }

    /// Whether it is this rank's turn to store the piece.
    fn is_mine(&self, step: Move, piece: &Piece) -> bool {
        let place = u64::from(step.slot) * u64::from(self.bounds.blocks_per_chunk)
            + u64::from(step.position);
        place % piece.turns == piece.turn
    }

    /// Source and destination of a piece of a block.
    fn ends(
        &self,
        step: Move,
        piece: &Piece,
        block_bytes: usize,
        way: Way,
    ) -> (*const u8, *mut u8) {
        let rows = &self.rows[piece.tensor];
        // SAFETY: `Moves` bounded block, slot and position, and `check_group` the piece, so both
        // offsets lie inside tensor and slot.
        let (page, place) = unsafe {
            let offset = step.position as usize * block_bytes + piece.slot_offset;
            (
                rows.start.add(step.block * rows.stride + piece.offset),
                self.region.slot_ptr(step.slot).add(offset),
            )
        };
        match way {
            Way::Store => (page, place),
            Way::Load => (place, page),
        }
    }
}

fn check_group(
    number: usize,
    group: &Group,
    rows: &[Rows],
    blocks_per_chunk: u32,
    slot_bytes: usize,
) -> Result<(), CopyError> {
    let layout = |text: String| Err(CopyError::Layout(format!("group {number}: {text}")));
    let ends = |offset: usize, bytes: usize| offset.checked_add(bytes);
    let mut ranges = Vec::new();
    for piece in &group.pieces {
        let Some(rows) = rows.get(piece.tensor) else {
            return layout(format!("there is no tensor {}", piece.tensor));
        };
        let inside = ends(piece.offset, piece.bytes).is_some_and(|end| end <= rows.bytes)
            && ends(piece.slot_offset, piece.bytes).is_some_and(|end| end <= group.block_bytes);
        if piece.bytes == 0 || piece.turn >= piece.turns || !inside {
            return layout(format!(
                "{piece:?} does not fit into rows of {} bytes and blocks of {} bytes",
                rows.bytes, group.block_bytes
            ));
        }
        ranges.push([
            (0, piece.slot_offset, piece.bytes),
            (1 + piece.tensor, piece.offset, piece.bytes),
        ]);
    }
    let mut ranges = ranges.concat();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let [(left, start, bytes), (right, next, _)] = [pair[0], pair[1]];
        if left == right && start + bytes > next {
            return layout(format!("two pieces overlap at byte {next}"));
        }
    }
    let chunk_bytes = group.block_bytes.saturating_mul(blocks_per_chunk as usize);
    if chunk_bytes > slot_bytes {
        return Err(CopyError::SlotTooSmall { group: number, chunk_bytes, slot_bytes });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
