//! Lives that go on outside: what is remembered of evicted keys.
//!
//! A set-associative table: a fingerprint names a set of [`WAYS`] places, and a newcomer takes the
//! place that was used longest ago. No lists and no hash table: twelve bytes a ghost. Of the
//! fingerprint 32 bits are kept, so one in 2^29 newcomers is taken for a ghost that it is not,
//! which costs a wrong guess.

use super::class::Class;

const WAYS: usize = 8;

/// What is remembered of a key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ghost {
    tag: u32,
    /// When it was last used.
    pub(super) used: u32,
    class: u8,
    taken: bool,
}

impl Ghost {
    pub(super) fn class(&self) -> Class {
        Class::from_index(self.class)
    }
}

/// The table; empty until the first eviction.
#[derive(Debug)]
pub(super) struct Ghosts {
    places: Vec<Ghost>,
    sets: usize,
}

impl Ghosts {
    /// Room for `count` ghosts or a few more.
    pub(super) fn new(count: usize) -> Self {
        Self { places: Vec::new(), sets: count.div_ceil(WAYS).max(1) }
    }

    fn set(&mut self, fingerprint: u64) -> &mut [Ghost] {
        // The upper half chooses the set, evenly over any number of sets; the lower is the tag.
        let set = (((fingerprint >> 32) * self.sets as u64) >> 32) as usize;
        &mut self.places[set * WAYS..(set + 1) * WAYS]
    }

    /// Takes the ghost of a key out.
    pub(super) fn take(&mut self, fingerprint: u64) -> Option<Ghost> {
        if self.places.is_empty() {
            return None;
        }
        let set = self.set(fingerprint);
        let place = set.iter_mut().find(|ghost| ghost.taken && ghost.tag == fingerprint as u32)?;
        Some(std::mem::take(place))
    }

    /// Remembers a key; gives the ghost that had to go.
    pub(super) fn put(
        &mut self,
        fingerprint: u64,
        used: u32,
        class: Class,
        now: u32,
    ) -> Option<Ghost> {
        if self.places.is_empty() {
            self.places = vec![Ghost::default(); self.sets * WAYS];
        }
        let set = self.set(fingerprint);
        let age = |ghost: &Ghost| if ghost.taken { now.wrapping_sub(ghost.used) } else { u32::MAX };
        let place = set.iter_mut().max_by_key(|ghost| age(ghost))?;
        let ghost =
            Ghost { tag: fingerprint as u32, used, class: class.index() as u8, taken: true };
        Some(std::mem::replace(place, ghost)).filter(|old| old.taken)
    }

    /// Places in all.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The ghost in a place.
    pub(super) fn at(&self, place: usize) -> Option<&Ghost> {
        self.places.get(place).filter(|ghost| ghost.taken)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.places.capacity() * size_of::<Ghost>()
    }
}
