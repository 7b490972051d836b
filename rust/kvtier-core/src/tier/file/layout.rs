//! How many slots fit into a capacity, and where they are. Arithmetic only.

use super::format::{FACTS_PER_PAGE, HEADER_BYTES, PAGE};
use crate::index::{MAX_CAPACITY, Slot};

const PAGE_U64: u64 = PAGE as u64;
/// A full segment is at least so long ...
const SEGMENT_BYTES: u64 = 256 << 20;
/// ... and there are about so many at most, so that descriptors suffice.
const SEGMENTS: u64 = 256;
/// Segments grow by so much at a time at most ...
const GROWTH_BYTES: u64 = 64 << 20;
/// ... and a store takes so many steps at least.
const GROWTH_STEPS: u32 = 16;
/// The longest journal, in pages.
const JOURNAL_PAGES: u64 = 1024;
/// Names that fit into a page of a directory, cautiously.
const NAMES_PER_PAGE: u64 = 64;

/// The shape of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Bytes a slot, whole pages.
    pub(super) slot_bytes: u64,
    /// Slots a full segment.
    pub(super) segment_slots: u32,
    /// Slots in all.
    pub(super) slots: u32,
}

impl Layout {
    /// Slots a full segment of a new store.
    pub(super) fn segment_slots(capacity_bytes: u64, slot_bytes: u64) -> u32 {
        let bytes = SEGMENT_BYTES.max(capacity_bytes / SEGMENTS);
        (bytes / slot_bytes).clamp(1, u64::from(MAX_CAPACITY)) as u32
    }

    /// The most slots that `capacity_bytes` has room for, with everything that they need, beside
    /// an identity of `identity_bytes`. `None` if not even one: [`Layout::needed`] says how
    /// much one takes.
    pub(super) fn within(
        capacity_bytes: u64,
        slot_bytes: u64,
        segment_slots: u32,
        identity_bytes: u64,
    ) -> Option<Self> {
        let fits = |slots: u32| {
            Self { slot_bytes, segment_slots, slots }.total_bytes(identity_bytes) <= capacity_bytes
        };
        let (mut least, mut most) = (0, MAX_CAPACITY);
        while least < most {
            let middle = least + (most - least).div_ceil(2);
            if fits(middle) {
                least = middle;
            } else {
                most = middle - 1;
            }
        }
        (least > 0).then_some(Self { slot_bytes, segment_slots, slots: least })
    }

    /// Bytes that a store of one slot takes.
    pub(super) fn needed(slot_bytes: u64, identity_bytes: u64) -> u64 {
        Self { slot_bytes, segment_slots: 1, slots: 1 }.total_bytes(identity_bytes)
    }

    /// Everything in the directory when it is full: what `capacity_bytes` bounds.
    fn total_bytes(&self, identity_bytes: u64) -> u64 {
        self.fixed_bytes(identity_bytes) + u64::from(self.slots) * self.slot_bytes
    }

    /// Everything but the slots.
    pub(super) fn fixed_bytes(&self, identity_bytes: u64) -> u64 {
        let segments = u64::from(self.segments());
        // The lock, the identity twice, the table of headers, checkpoint and journal; the three
        // last and the segments with a page of the file system's own.
        let lock = PAGE_U64;
        let directory = PAGE_U64 * (1 + segments / NAMES_PER_PAGE);
        let own = PAGE_U64 * (3 + segments);
        lock + directory
            + own
            + 2 * identity_bytes.next_multiple_of(PAGE_U64)
            + self.headers_bytes()
            + PAGE_U64 * (self.checkpoint_pages() + self.journal_pages())
    }

    /// Bytes of the table of headers.
    pub(super) fn headers_bytes(&self) -> u64 {
        (u64::from(self.slots) * HEADER_BYTES as u64).next_multiple_of(PAGE_U64)
    }

    /// Pages of the checkpoint.
    pub(super) fn checkpoint_pages(&self) -> u64 {
        u64::from(self.slots).div_ceil(FACTS_PER_PAGE as u64)
    }

    /// Pages of the journal.
    pub(super) fn journal_pages(&self) -> u64 {
        (self.checkpoint_pages() / 8).clamp(1, JOURNAL_PAGES)
    }

    /// Segments of a full store.
    pub(super) fn segments(&self) -> u32 {
        self.slots.div_ceil(self.segment_slots)
    }

    /// Slots of a segment when the store is full.
    pub(super) fn slots_of(&self, segment: u32) -> u32 {
        let before = u64::from(segment) * u64::from(self.segment_slots);
        u64::from(self.slots).saturating_sub(before).min(u64::from(self.segment_slots)) as u32
    }

    /// Slots by which a segment grows.
    pub(super) fn growth(&self) -> u32 {
        let most = u64::from(self.slots / GROWTH_STEPS).min(u64::from(self.segment_slots));
        (GROWTH_BYTES / self.slot_bytes).min(most).max(1) as u32
    }

    /// Where a slot is: its segment, and the offset in it.
    pub(super) fn place(&self, slot: Slot) -> (u32, u64) {
        let within = u64::from(slot % self.segment_slots);
        (slot / self.segment_slots, within * self.slot_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_of_slots_that_fits() {
        for (capacity, slot_bytes) in
            [(73_728, 4096), (1 << 20, 4096), (1 << 28, 65_536), (4 << 40, 1 << 20)]
        {
            let segment_slots = Layout::segment_slots(capacity, slot_bytes);
            let layout = Layout::within(capacity, slot_bytes, segment_slots, 300).expect("fits");
            assert!(layout.total_bytes(300) <= capacity);
            let one_more = Layout { slots: layout.slots + 1, ..layout };
            assert!(one_more.total_bytes(300) > capacity, "{layout:?}");
            assert!(layout.segments() <= 257, "{layout:?}");
            let counted: u64 =
                (0..layout.segments()).map(|segment| u64::from(layout.slots_of(segment))).sum();
            assert_eq!(counted, u64::from(layout.slots));
        }
        let needed = Layout::needed(4096, 300);
        assert_eq!(Layout::within(needed, 4096, 9, 300).map(|layout| layout.slots), Some(1));
        assert_eq!(Layout::within(needed - 1, 4096, 9, 300), None);
    }

    #[test]
    fn the_last_slot_of_a_segment_and_the_first_of_the_next() {
        let layout = Layout { slot_bytes: 8192, segment_slots: 3, slots: 7 };
        assert_eq!(layout.place(2), (0, 16_384));
        assert_eq!(layout.place(3), (1, 0));
        assert_eq!((layout.segments(), layout.slots_of(2), layout.slots_of(3)), (3, 1, 0));
    }
}
