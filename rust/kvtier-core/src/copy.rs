//! Chunks between paged KV cache tensors in host memory and slots of the region.
//!
//! A slot holds a chunk as `[tensor][block of the chunk][page]`, densely from its start, the
//! same bytes that the GPU path writes. Copies are split over threads by chunks; with large
//! pages two threads are enough for the memory of a small machine.

use std::collections::HashSet;
use std::sync::Arc;

use crate::region::Region;

/// One canonical tensor: `blocks` rows of `page_bytes`, `stride` bytes apart.
#[derive(Debug, Clone, Copy)]
pub struct Pages {
    /// Start of block 0.
    pub start: *mut u8,
    /// Rows.
    pub blocks: usize,
    /// Bytes a row.
    pub page_bytes: usize,
    /// Bytes from one row to the next, at least `page_bytes`.
    pub stride: usize,
}

/// A transfer that was refused before any byte moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// Slots too small for a chunk.
    #[error(
        "a chunk has {chunk_bytes} bytes, but a slot of the region only {slot_bytes}: make the region \
         with slot_bytes of at least {chunk_bytes}"
    )]
    SlotTooSmall {
        /// Bytes a chunk.
        chunk_bytes: usize,
        /// Bytes a slot.
        slot_bytes: usize,
    },
    /// Nothing to copy, or rows that overlap.
    #[error("{0}")]
    Layout(String),
    /// Not `blocks_per_chunk` ids for every slot.
    #[error("{ids} block ids for {slots} slots: a chunk has {blocks_per_chunk} blocks")]
    Shape {
        /// Block ids given.
        ids: usize,
        /// Slots given.
        slots: usize,
        /// Blocks a chunk.
        blocks_per_chunk: usize,
    },
    /// A block id past the tensors.
    #[error("block {block} of chunk {chunk} is out of range: the KV cache has {blocks} blocks")]
    Block {
        /// The id.
        block: i64,
        /// Position of the chunk.
        chunk: usize,
        /// Blocks there are.
        blocks: usize,
    },
    /// A slot past the region.
    #[error("slot {slot} of chunk {chunk} is out of range: the region has {slots} slots")]
    Slot {
        /// The slot.
        slot: u32,
        /// Position of the chunk.
        chunk: usize,
        /// Slots there are.
        slots: u32,
    },
    /// A destination twice: two threads would write it.
    #[error("{what} {number} is a destination twice in one transfer")]
    Twice {
        /// Block or slot.
        what: &'static str,
        /// Which.
        number: i64,
    },
}

/// Copies chunks; see the module.
#[derive(Debug)]
pub struct HostCopier {
    region: Arc<Region>,
    pages: Vec<Pages>,
    blocks: usize,
    blocks_per_chunk: usize,
    chunk_bytes: usize,
    threads: usize,
}

// SAFETY: the pointers of `pages` may be used from any thread, and exclusively while a copy runs,
// by the contract of `HostCopier::new` and of its copies.
unsafe impl Send for HostCopier {}
// SAFETY: as above.
unsafe impl Sync for HostCopier {}

/// Less than this is copied by the calling thread alone.
const BYTES_PER_THREAD: usize = 1 << 20;

#[derive(Clone, Copy)]
enum Way {
    Store,
    Load,
}

impl HostCopier {
    /// A copier between `pages` and `region`, chunks of `blocks_per_chunk` blocks.
    ///
    /// # Errors
    /// [`CopyError`] when a chunk does not fit into a slot or the tensors do not fit together.
    ///
    /// # Safety
    /// Each of `pages` is memory that may be read and written, of its shape, as long as the
    /// copier lives.
    pub unsafe fn new(
        region: Arc<Region>,
        pages: Vec<Pages>,
        blocks_per_chunk: usize,
        threads: usize,
    ) -> Result<Self, CopyError> {
        let Some(first) = pages.first() else {
            return Err(CopyError::Layout("there is no tensor to copy".into()));
        };
        let blocks = first.blocks;
        for (number, page) in pages.iter().enumerate() {
            if page.blocks != blocks || page.page_bytes == 0 || page.stride < page.page_bytes {
                return Err(CopyError::Layout(format!(
                    "tensor {number} has {} blocks of {} bytes, {} bytes apart; tensor 0 has \
                     {blocks} blocks",
                    page.blocks, page.page_bytes, page.stride
                )));
            }
        }
        if blocks_per_chunk == 0 {
            return Err(CopyError::Layout("a chunk needs at least one block".into()));
        }
        let block_bytes: usize = pages.iter().map(|page| page.page_bytes).sum();
        let chunk_bytes = block_bytes * blocks_per_chunk;
        if chunk_bytes > region.slot_bytes() {
            return Err(CopyError::SlotTooSmall { chunk_bytes, slot_bytes: region.slot_bytes() });
        }
        Ok(Self { region, pages, blocks, blocks_per_chunk, chunk_bytes, threads: threads.max(1) })
    }

    /// Bytes a chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Copies blocks to slots: chunk `i` is `block_ids[i * blocks_per_chunk..]`, its place
    /// `slots[i]`. Returns the bytes.
    ///
    /// # Errors
    /// [`CopyError`], before any byte moved.
    ///
    /// # Safety
    /// Nobody else touches the slots, and nobody writes the blocks, while it runs.
    pub unsafe fn store(&self, block_ids: &[i64], slots: &[u32]) -> Result<usize, CopyError> {
        self.check(block_ids, slots)?;
        distinct("slot", slots.iter().map(|&slot| i64::from(slot)))?;
        Ok(self.run(block_ids, slots, Way::Store))
    }

    /// Copies slots to blocks.
    ///
    /// # Errors
    /// [`CopyError`], before any byte moved.
    ///
    /// # Safety
    /// Nobody writes the slots, and nobody else touches the blocks, while it runs.
    pub unsafe fn load(&self, block_ids: &[i64], slots: &[u32]) -> Result<usize, CopyError> {
        self.check(block_ids, slots)?;
        distinct("block", block_ids.iter().copied())?;
        Ok(self.run(block_ids, slots, Way::Load))
    }

    fn check(&self, block_ids: &[i64], slots: &[u32]) -> Result<(), CopyError> {
        if block_ids.len() != slots.len() * self.blocks_per_chunk {
            return Err(CopyError::Shape {
                ids: block_ids.len(),
                slots: slots.len(),
                blocks_per_chunk: self.blocks_per_chunk,
            });
        }
        for (position, &block) in block_ids.iter().enumerate() {
            if !usize::try_from(block).is_ok_and(|block| block < self.blocks) {
                return Err(CopyError::Block {
                    block,
                    chunk: position / self.blocks_per_chunk,
                    blocks: self.blocks,
                });
            }
        }
        for (chunk, &slot) in slots.iter().enumerate() {
            if slot >= self.region.slots() {
                return Err(CopyError::Slot { slot, chunk, slots: self.region.slots() });
            }
        }
        Ok(())
    }

    fn run(&self, block_ids: &[i64], slots: &[u32], way: Way) -> usize {
        let bytes = slots.len() * self.chunk_bytes;
        let threads = self.threads.min(bytes / BYTES_PER_THREAD).min(slots.len()).max(1);
        let share = slots.len().div_ceil(threads).max(1);
        let mut parts = slots.chunks(share).zip(block_ids.chunks(share * self.blocks_per_chunk));
        let last = parts.next_back();
        std::thread::scope(|scope| {
            for (slots, blocks) in parts {
                scope.spawn(move || self.copy_chunks(blocks, slots, way));
            }
            if let Some((slots, blocks)) = last {
                self.copy_chunks(blocks, slots, way);
            }
        });
        bytes
    }

    fn copy_chunks(&self, block_ids: &[i64], slots: &[u32], way: Way) {
        for (blocks, &slot) in block_ids.chunks(self.blocks_per_chunk).zip(slots) {
            let mut at = self.region.slot_ptr(slot);
            for page in &self.pages {
                for &block in blocks {
                    // SAFETY: `check` bounded the block, so its row lies inside the tensor; the
                    // pages of a chunk add up to `chunk_bytes`, which fits into the slot. A
                    // tensor and a region are different memory. Destinations are distinct, and
                    // nobody else touches them, by the contracts of `store` and `load`.
                    unsafe {
                        let row = page.start.add(block.cast_unsigned() as usize * page.stride);
                        match way {
                            Way::Store => at.copy_from_nonoverlapping(row, page.page_bytes),
                            Way::Load => row.copy_from_nonoverlapping(at, page.page_bytes),
                        }
                        at = at.add(page.page_bytes);
                    }
                }
            }
        }
    }
}

fn distinct(what: &'static str, numbers: impl Iterator<Item = i64>) -> Result<(), CopyError> {
    let mut seen = HashSet::new();
    for number in numbers {
        if !seen.insert(number) {
            return Err(CopyError::Twice { what, number });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::RegionKind;

    const BLOCKS: usize = 6;

    /// Two tensors of different page sizes, the second with padded rows.
    fn tensors() -> [Vec<u8>; 2] {
        [
            (0..BLOCKS * 8).map(|at| at as u8).collect(),
            (0..BLOCKS * 16).map(|at| 100 + at as u8).collect(),
        ]
    }

    fn copier(memory: &mut [Vec<u8>; 2], threads: usize) -> HostCopier {
        let region = Region::new(3, 4096, RegionKind::Anonymous).expect("small region");
        let pages =
            [(8, 8), (4, 16)].into_iter().zip(memory).map(|((page_bytes, stride), memory)| Pages {
                start: memory.as_mut_ptr(),
                blocks: BLOCKS,
                page_bytes,
                stride,
            });
        // SAFETY: the tests keep `memory` alive and leave it alone while they copy.
        unsafe { HostCopier::new(region, pages.collect(), 2, threads) }.expect("it fits")
    }

    #[test]
    fn what_was_stored_comes_back_to_other_blocks() {
        let mut memory = tensors();
        let before = memory.clone();
        let copier = copier(&mut memory, 2);
        // SAFETY: single-threaded test.
        unsafe {
            assert_eq!(copier.store(&[0, 1, 2, 3], &[2, 0]), Ok(48));
            assert_eq!(&copier.region.slot(2)[..16], &before[0][..16]);
            assert_eq!(&copier.region.slot(2)[16..20], &before[1][..4]);
            assert_eq!(&copier.region.slot(2)[20..24], &before[1][16..20]);
            assert_eq!(copier.load(&[5, 4], &[0]), Ok(24));
        }
        assert_eq!(memory[0][5 * 8..6 * 8], before[0][2 * 8..3 * 8]);
        assert_eq!(memory[1][4 * 16..4 * 16 + 4], before[1][3 * 16..3 * 16 + 4]);
        assert_eq!(memory[1][4 * 16 + 4..5 * 16], before[1][4 * 16 + 4..5 * 16], "padding");
    }

    #[test]
    fn what_cannot_be_copied_is_refused_before_any_byte_moves() {
        let mut memory = tensors();
        let copier = copier(&mut memory, 1);
        // SAFETY: single-threaded test; every call is refused.
        unsafe {
            assert!(matches!(copier.store(&[0], &[0]), Err(CopyError::Shape { .. })));
            assert!(matches!(copier.store(&[0, 6], &[0]), Err(CopyError::Block { block: 6, .. })));
            assert!(matches!(copier.load(&[0, -1], &[0]), Err(CopyError::Block { block: -1, .. })));
            assert!(matches!(copier.load(&[0, 1], &[3]), Err(CopyError::Slot { slot: 3, .. })));
            assert!(matches!(copier.load(&[1, 1], &[0]), Err(CopyError::Twice { .. })));
            assert!(matches!(
                copier.store(&[0, 1, 2, 3], &[1, 1]),
                Err(CopyError::Twice { what: "slot", .. })
            ));
            assert!(copier.region.slot(0).iter().all(|&byte| byte == 0));
        }
    }
}
