//! Which block goes to or comes from which place of which slot, checked before any byte moves.

use std::collections::HashSet;
use std::fmt;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Blocks to slots.
    Store,
    /// Slots to blocks.
    Load,
}

/// What there is: the sizes that moves are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Blocks of the KV cache.
    pub blocks: usize,
    /// Slots of the region.
    pub slots: u32,
    /// Blocks of a chunk.
    pub blocks_per_chunk: u32,
}

impl fmt::Display for Bounds {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, slots, blocks_per_chunk } = self;
        write!(out, "{blocks} blocks, {slots} slots and chunks of {blocks_per_chunk} blocks")
    }
}

/// One block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The block.
    pub block: usize,
    /// The slot of its chunk.
    pub slot: u32,
    /// Its place among the blocks of the chunk.
    pub position: u32,
}

/// Moves that were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// Slots that do not fit the number of blocks.
    #[error(
        "{blocks} blocks from place {first} of their first chunk take {wanted} slots of \
         {blocks_per_chunk} blocks, but {slots} were given"
    )]
    Shape {
        /// Blocks given.
        blocks: usize,
        /// Place of the first one.
        first: u32,
        /// Slots they take.
        wanted: usize,
        /// Slots given.
        slots: usize,
        /// Blocks a chunk.
        blocks_per_chunk: u32,
    },
    /// A first place past the chunk.
    #[error("the first block is at place {first} of its chunk, but a chunk has {blocks_per_chunk}")]
    First {
        /// The place.
        first: u32,
        /// Blocks a chunk.
        blocks_per_chunk: u32,
    },
    /// A block past the cache.
    #[error("block {block} (number {number} of the transfer) does not exist: there are {blocks}")]
    Block {
        /// The id.
        block: i64,
        /// Its place in the list.
        number: usize,
        /// Blocks there are.
        blocks: usize,
    },
    /// A slot past the region.
    #[error("slot {slot} (chunk {number} of the transfer) does not exist: there are {slots}")]
    Slot {
        /// The slot.
        slot: i64,
        /// Its place in the list.
        number: usize,
        /// Slots there are.
        slots: u32,
    },
    /// A destination twice.
    #[error("{what} {id} is given twice as a destination of one transfer")]
    Twice {
        /// Block or slot.
        what: &'static str,
        /// Which.
        id: i64,
    },
}

/// A checked list of [`Move`]s: all in bounds, and no destination twice.
#[derive(Debug, Clone)]
pub struct Moves {
    list: Vec<Move>,
    bounds: Bounds,
    way: Way,
}

impl Moves {
    /// Lays `block_ids` out over `slots`: the first one at place `first` of the first slot's
    /// chunk, each next one behind it. So the first and the last chunk may be partial.
    ///
    /// # Errors
    /// [`MoveError`].
    pub fn new(
        block_ids: &[i64],
        slots: &[i64],
        first: u32,
        bounds: Bounds,
        way: Way,
    ) -> Result<Self, MoveError> {
        let blocks_per_chunk = bounds.blocks_per_chunk;
        if first >= blocks_per_chunk {
            return Err(MoveError::First { first, blocks_per_chunk });
        }
        let per_chunk = blocks_per_chunk as usize;
        let wanted = match block_ids.len() {
            0 => 0,
            count => (first as usize + count).div_ceil(per_chunk),
        };
        if slots.len() != wanted {
            return Err(MoveError::Shape {
                blocks: block_ids.len(),
                first,
                wanted,
                slots: slots.len(),
                blocks_per_chunk,
            });
        }
        let slots = slots
            .iter()
            .enumerate()
            .map(|(number, &slot)| {
                u32::try_from(slot)
                    .ok()
                    .filter(|&slot| slot < bounds.slots)
                    .ok_or(MoveError::Slot { slot, number, slots: bounds.slots })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let mut list = Vec::with_capacity(block_ids.len());
        for (number, &id) in block_ids.iter().enumerate() {
            let block = usize::try_from(id)
                .ok()
                .filter(|&block| block < bounds.blocks)
                .ok_or(MoveError::Block { block: id, number, blocks: bounds.blocks })?;
            let place = first as usize + number;
            list.push(Move {
                block,
                slot: slots[place / per_chunk],
                position: (place % per_chunk) as u32,
            });
        }
        match way {
            Way::Store => distinct("slot", slots.iter().map(|&slot| i64::from(slot)))?,
            Way::Load => distinct("block", block_ids.iter().copied())?,
        }
        Ok(Self { list, bounds, way })
    }

    /// The moves.
    pub fn list(&self) -> &[Move] {
        &self.list
    }

    /// What they were checked against.
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// Their direction.
    pub fn way(&self) -> Way {
        self.way
    }
}

fn distinct(what: &'static str, ids: impl ExactSizeIterator<Item = i64>) -> Result<(), MoveError> {
    let mut seen =
        HashSet::with_capacity_and_hasher(ids.len(), foldhash::fast::RandomState::default());
    for id in ids {
        if !seen.insert(id) {
            return Err(MoveError::Twice { what, id });
        }
    }
    Ok(())
}
