//! The life of an entry: writing, ready, pinned, absent, and slots that outlive their keys.

use super::{
    ANYONE, Entry, Held, Index, IndexError, NIL, Pin, Removal, Slot, State, Token, Writer, hash,
};

impl Index {
    /// Slots from `limit` on are not given out, until it is raised: a medium that grows. It is the
    /// capacity unless it was set, and never less than what was given out.
    pub fn set_limit(&mut self, limit: u32) {
        debug_assert!((self.next_slot..=self.capacity).contains(&limit));
        self.limit = limit;
    }

    /// Below which number slots are given out.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Slots below the limit that no entry holds.
    pub fn free(&self) -> usize {
        self.free_slots.len() + (self.limit - self.next_slot) as usize
    }

    /// Fills an empty index with keys that hold their slots already, least recently used first.
    /// Of two with one key the later one counts; a slot that was taken before is passed over.
    /// `dropped` is told of slots past the limit, and of those of earlier copies.
    pub fn restore<'k>(
        &mut self,
        found: impl Iterator<Item = (&'k [u8], Slot)>,
        mut dropped: impl FnMut(Slot),
    ) {
        debug_assert!(self.is_empty() && self.next_slot == 0);
        self.begin_call();
        let mut used = vec![false; self.limit as usize];
        for (key, slot) in found {
            match used.get_mut(slot as usize) {
                None => {
                    dropped(slot);
                    continue;
                }
                Some(true) => continue,
                Some(used) => *used = true,
            }
            let hash = hash(&self.hasher, key);
            if let Some(token) = self.table.find(hash, |token| self.key(token) == key) {
                let earlier = std::mem::replace(&mut self.entries[token as usize].slot, slot);
                used[earlier as usize] = false;
                dropped(earlier);
                self.policy.touch(token, false);
                continue;
            }
            let token = self.insert_absent(key, hash, Writer::Store, ANYONE);
            self.entries[token as usize].slot = slot;
            self.policy.admit(token, hash, NIL);
            self.commit(token);
        }
        self.next_slot = self.limit;
        self.free_slots.extend((0..self.limit).rev().filter(|&slot| !used[slot as usize]));
    }

    /// The write is over and good: the entry becomes ready, and evictable.
    pub fn commit(&mut self, token: Token) {
        let entry = &mut self.entries[token as usize];
        debug_assert!(matches!(entry.state, State::Writing(_)));
        entry.state = State::Ready;
        self.writing -= 1;
        self.policy.insert(token);
    }

    /// The write failed: the key is absent again and its slot free.
    pub fn abort(&mut self, token: Token) {
        self.policy.cancel(token);
        self.drop_unreserved(token);
    }

    /// The key is absent at once, but its slot is still in somebody's hands: it stays taken
    /// until [`Index::reclaim`]. For a write that is late, or a bad copy being deleted.
    pub fn detach(&mut self, token: Token) -> Slot {
        match self.state(token) {
            State::Writing(_) => {
                self.writing -= 1;
                self.policy.cancel(token);
            }
            State::Ready => self.policy.remove(token, self.fingerprint(token), Removal::Dropped),
        }
        let slot = std::mem::replace(&mut self.entries[token as usize].slot, NIL);
        self.drop_entry(token);
        self.detached += 1;
        slot
    }

    /// The keys that are ready, in no order.
    pub fn ready_keys(&self) -> impl Iterator<Item = &[u8]> {
        let ready = self.table.iter().filter(|&token| self.state(token) == State::Ready);
        ready.map(|token| self.key(token))
    }

    /// Forgets every key. A slot that somebody reads or writes stays taken until it is
    /// [reclaimed](Index::reclaim), and `held` is told of it.
    pub fn clear(&mut self, mut held: impl FnMut(Held)) {
        for token in self.table.iter().collect::<Vec<_>>() {
            let Entry { slot, state, load_pins, job_pins, .. } = self.entries[token as usize];
            if state == State::Ready && self.entries[token as usize].pinned() {
                let entry = &mut self.entries[token as usize];
                (entry.load_pins, entry.job_pins) = (0, 0);
                self.pinned -= 1;
                self.policy.release(token);
            }
            self.detach(token);
            if state == State::Ready && load_pins == 0 && job_pins == 0 {
                self.reclaim(slot);
            } else {
                held(Held { slot, state, load_pins, job_pins });
            }
        }
    }

    /// Takes back a slot that [`Index::detach`] gave out.
    pub fn reclaim(&mut self, slot: Slot) {
        debug_assert!(self.detached > 0);
        self.detached -= 1;
        self.free_slots.push(slot);
    }

    /// Pins a ready entry.
    ///
    /// # Errors
    /// [`IndexError::NotReady`], [`IndexError::PinOverflow`].
    pub fn pin(&mut self, token: Token, pin: Pin) -> Result<(), IndexError> {
        let entry = self.entries[token as usize];
        if entry.state != State::Ready {
            return Err(IndexError::NotReady(self.key(token).into()));
        }
        let count = match pin {
            Pin::Load => entry.load_pins,
            Pin::Job => entry.job_pins,
        };
        if count == u16::MAX {
            return Err(IndexError::PinOverflow(self.key(token).into()));
        }
        if !entry.pinned() {
            self.policy.acquire(token);
            self.pinned += 1;
        }
        *self.pins_mut(token, pin) += 1;
        Ok(())
    }

    /// Gives a pin back.
    ///
    /// # Errors
    /// [`IndexError::NotPinned`] when there is none of this kind.
    pub fn unpin(&mut self, token: Token, pin: Pin) -> Result<(), IndexError> {
        let count = self.pins_mut(token, pin);
        if *count == 0 {
            return Err(IndexError::NotPinned(self.key(token).into()));
        }
        *count -= 1;
        if !self.entries[token as usize].pinned() {
            self.pinned -= 1;
            self.policy.release(token);
        }
        Ok(())
    }

    /// The number of pins of a kind on an entry.
    pub fn pins(&self, token: Token, pin: Pin) -> u16 {
        let entry = &self.entries[token as usize];
        match pin {
            Pin::Load => entry.load_pins,
            Pin::Job => entry.job_pins,
        }
    }

    fn pins_mut(&mut self, token: Token, pin: Pin) -> &mut u16 {
        let entry = &mut self.entries[token as usize];
        match pin {
            Pin::Load => &mut entry.load_pins,
            Pin::Job => &mut entry.job_pins,
        }
    }

    /// Frees an entry that no list holds, and its slot if it still has one.
    pub(super) fn drop_entry(&mut self, token: Token) {
        self.drop_hashed(token, self.fingerprint(token));
    }

    pub(super) fn drop_hashed(&mut self, token: Token, hash: u64) {
        self.table.remove(hash, token);
        let slot = std::mem::replace(&mut self.entries[token as usize].slot, NIL);
        if slot != NIL {
            self.free_slots.push(slot);
        }
        self.free_tokens.push(token);
    }
}
