//! Ghosts: what a policy remembers of keys that left the index.
//!
//! A ghost is a fingerprint and a mark of the policy's choosing, in one list in order of
//! departure, newest in front. A directory may serve several lists: they belong to the policy,
//! which says which one a ghost is in.
//!
//! Ghosts live in a slab, found by one hash table of `u32` and threaded by links, so a ghost
//! leaves from anywhere in its list in O(1), and nothing is allocated a ghost after warm-up: the
//! slab is as large as the directory ever was, freed places are used again. Memory a ghost: 8
//! (fingerprint) + 8 (links) + 6 to 11 (table) + the mark; the slab's spare room comes on top.
//!
//! # Invariants (checked by [`Ghosts::validate`])
//! - Every place in the slab is in one list of the policy's, or free.
//! - Every ghost is found by its fingerprint, once.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Place;

use super::Token;
use super::list::{Links, List};

/// Names a ghost of one directory.
pub(super) type Ghost = Token;

/// A directory; `M` is what the policy notes on each ghost.
#[derive(Debug, Default)]
pub(super) struct Ghosts<M> {
    table: HashTable<Ghost>,
    fingerprints: Vec<u64>,
    marks: Vec<M>,
    links: Links,
    free: List,
}

impl<M: Copy> Ghosts<M> {
    /// The ghost with a fingerprint.
    pub(super) fn find(&self, fingerprint: u64) -> Option<Ghost> {
        let known = |&ghost: &Ghost| self.fingerprints[ghost as usize] == fingerprint;
        self.table.find(fingerprint, known).copied()
    }

    /// What was noted on a ghost.
    pub(super) fn mark(&self, ghost: Ghost) -> M {
        self.marks[ghost as usize]
    }

    /// Puts a new ghost in front of a list. If there is a ghost with this fingerprint (a second
    /// key with the same one), that one stays where it is and stands for both.
    pub(super) fn push(&mut self, list: &mut List, fingerprint: u64, mark: M) {
        let fingerprints = &self.fingerprints;
        let place = self.table.entry(
            fingerprint,
            |&ghost| fingerprints[ghost as usize] == fingerprint,
            |&ghost| fingerprints[ghost as usize],
        );
        let Place::Vacant(vacant) = place else { return };
        let ghost = self.free.front().unwrap_or(fingerprints.len() as Ghost);
        vacant.insert(ghost);
        if ghost as usize == self.fingerprints.len() {
            self.fingerprints.push(fingerprint);
            self.marks.push(mark);
            self.links.grow(self.fingerprints.len());
        } else {
            self.free.remove(&mut self.links, ghost);
            self.fingerprints[ghost as usize] = fingerprint;
            self.marks[ghost as usize] = mark;
        }
        list.push_front(&mut self.links, ghost);
    }

    /// Forgets a ghost of a list.
    pub(super) fn remove(&mut self, list: &mut List, ghost: Ghost) {
        list.remove(&mut self.links, ghost);
        self.free.push_front(&mut self.links, ghost);
        let fingerprint = self.fingerprints[ghost as usize];
        if let Ok(place) = self.table.find_entry(fingerprint, |&other| other == ghost) {
            place.remove();
        }
    }

    /// Forgets the oldest ghosts of a list until `keep` are left.
    pub(super) fn truncate(&mut self, list: &mut List, keep: usize) {
        while list.len() > keep
            && let Some(oldest) = list.back()
        {
            self.remove(list, oldest);
        }
    }

    /// Bytes on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        self.table.allocation_size()
            + self.fingerprints.capacity() * size_of::<u64>()
            + self.marks.capacity() * size_of::<M>()
            + self.links.heap_bytes()
    }

    /// Walks every invariant; `lists` are all lists, each with a test that its marks must pass.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn validate(&self, lists: &[(&List, &dyn Fn(M) -> bool)]) -> Result<(), String> {
        self.free.validate(&self.links)?;
        let mut members = 0;
        for (list, belongs) in lists {
            list.validate(&self.links)?;
            members += list.len();
            for ghost in list.iter_back(&self.links) {
                if self.find(self.fingerprints[ghost as usize]) != Some(ghost) {
                    return Err(format!("ghost {ghost} is not found by its fingerprint"));
                }
                if !belongs(self.mark(ghost)) {
                    return Err(format!("ghost {ghost} is in a list that its mark denies"));
                }
            }
        }
        if members != self.table.len() || members + self.free.len() != self.fingerprints.len() {
            return Err(format!(
                "of {} places for ghosts {members} are in lists, {} in the table, {} free",
                self.fingerprints.len(),
                self.table.len(),
                self.free.len()
            ));
        }
        Ok(())
    }
}
