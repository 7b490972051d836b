//! What a store remembers of each slot beside its index: 28 bytes, touched when they are used.
//!
//! Everything here is relaxed: the index's lock orders what belongs to one chunk, and use is
//! only bookkeeping.

// Not `crate::sync`: no test schedules these, and a scheduler's atomics can not be zeroed memory.
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use zerocopy::FromZeros;

use super::format::Fact;
use crate::checksum::Checksum;
use crate::index::Slot;

/// No header on disk.
pub(super) const NO_HEADER: u64 = 0;

pub(super) struct Slots {
    /// Of the header on disk; [`NO_HEADER`] if there is none.
    sequence: Box<[AtomicU64]>,
    payload: Box<[AtomicU64]>,
    used: Box<[AtomicU64]>,
    hits: Box<[AtomicU32]>,
    /// The store's own count of writes and uses: what orders them.
    tick: AtomicU64,
}

/// Zeros that take no memory before they are touched.
fn zeros<T: FromZeros>(count: usize) -> Option<Box<[T]>> {
    <[T]>::new_box_zeroed_with_elems(count).ok()
}

impl Slots {
    /// For so many slots; `None` without the memory.
    pub(super) fn new(slots: u32) -> Option<Self> {
        let count = slots as usize;
        Some(Self {
            sequence: zeros(count)?,
            payload: zeros(count)?,
            used: zeros(count)?,
            hits: zeros(count)?,
            tick: AtomicU64::new(NO_HEADER),
        })
    }

    pub(super) fn len(&self) -> u32 {
        self.sequence.len() as u32
    }

    /// A number above all that were given out.
    pub(super) fn next_tick(&self) -> u64 {
        self.tick.fetch_add(1, Relaxed) + 1
    }

    /// The highest number that was given out.
    pub(super) fn tick(&self) -> u64 {
        self.tick.load(Relaxed)
    }

    /// No number up to this one is given out any more.
    pub(super) fn pass_tick(&self, tick: u64) {
        self.tick.fetch_max(tick, Relaxed);
    }

    /// The slot has a header now, with this number; its chunk was never used since.
    pub(super) fn written(&self, slot: Slot, sequence: u64, payload: Checksum) {
        let slot = slot as usize;
        self.payload[slot].store(payload.0, Relaxed);
        self.hits[slot].store(0, Relaxed);
        self.used[slot].store(sequence, Relaxed);
        self.sequence[slot].store(sequence, Relaxed);
    }

    /// The slot has no header any more.
    pub(super) fn cleared(&self, slot: Slot) {
        self.sequence[slot as usize].store(NO_HEADER, Relaxed);
    }

    pub(super) fn has_header(&self, slot: Slot) -> bool {
        self.sequence[slot as usize].load(Relaxed) != NO_HEADER
    }

    pub(super) fn payload(&self, slot: Slot) -> Checksum {
        Checksum(self.payload[slot as usize].load(Relaxed))
    }

    pub(super) fn used(&self, slot: Slot) -> u64 {
        self.used[slot as usize].load(Relaxed)
    }

    /// The chunk was asked for.
    pub(super) fn touch(&self, slot: Slot) {
        self.used[slot as usize].store(self.next_tick(), Relaxed);
    }

    /// The chunk was loaded.
    pub(super) fn hit(&self, slot: Slot) {
        self.touch(slot);
        self.hits[slot as usize].fetch_add(1, Relaxed);
    }

    /// What is to be remembered of a slot; `None` if it holds nothing.
    pub(super) fn fact(&self, slot: Slot) -> Option<Fact> {
        let at = slot as usize;
        let sequence = self.sequence[at].load(Relaxed);
        (sequence != NO_HEADER).then(|| Fact {
            slot: slot.into(),
            hits: self.hits[at].load(Relaxed).into(),
            sequence: sequence.into(),
            used: self.used[at].load(Relaxed).into(),
        })
    }

    /// Takes over what a fact says, if it is about the chunk that is here and tells of a later use.
    pub(super) fn learn(&self, fact: &Fact) {
        let at = fact.slot.get() as usize;
        let Some(sequence) = self.sequence.get(at).map(|sequence| sequence.load(Relaxed)) else {
            return;
        };
        let used = fact.used.get();
        if sequence == fact.sequence.get() && used >= self.used[at].load(Relaxed) {
            self.used[at].store(used, Relaxed);
            self.hits[at].store(fact.hits.get(), Relaxed);
            self.pass_tick(used);
        }
    }
}
