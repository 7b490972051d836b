//! What an index weighs, and whether it is sound.

use super::{Entry, Index, Newcomer, Slot, State, Token};

impl Index {
    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        let tokens = self.free_tokens.capacity()
            + self.free_slots.capacity()
            + self.victims.capacity()
            + self.newcomers.capacity() * (size_of::<Newcomer>() / size_of::<Token>());
        self.table.heap_bytes()
            + self.entries.capacity() * size_of::<Entry>()
            + self.keys.capacity()
            + tokens * size_of::<Token>()
            + self.hashes.capacity() * size_of::<u64>()
            + self.policy.heap_bytes()
    }

    /// Walks every invariant of the module's list.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validate(&self) -> Result<(), String> {
        self.policy.validate()?;
        let mut taken = vec![false; self.next_slot as usize];
        let mut take = |slot: Slot, by: &str| match taken.get_mut(slot as usize) {
            Some(flag) if !*flag => {
                *flag = true;
                Ok(())
            }
            _ => Err(format!("slot {slot} ({by}) is taken twice or was never given out")),
        };
        let (mut writing, mut pinned, mut evictable) = (0, 0, 0);
        for token in self.table.iter() {
            let entry = &self.entries[token as usize];
            if self.find(self.key(token)) != Some(token) {
                return Err(format!("token {token} is not found by its key"));
            }
            take(entry.slot, "entry")?;
            let is_evictable = entry.evictable();
            writing += usize::from(entry.state != State::Ready);
            pinned += usize::from(entry.pinned());
            evictable += usize::from(is_evictable);
            if entry.state != State::Ready && entry.pinned() {
                return Err(format!("token {token} is pinned while being written"));
            }
            if self.policy.holds(token) != is_evictable {
                return Err(format!("token {token} is on the wrong side of the policy's lists"));
            }
        }
        for &slot in &self.free_slots {
            take(slot, "free")?;
        }
        let loose = taken.iter().filter(|&&flag| !flag).count();
        if loose != self.detached {
            return Err(format!("{loose} slots belong to nobody, {} are detached", self.detached));
        }
        let counted = (writing, pinned, evictable);
        let kept = (self.writing, self.pinned, self.policy.evictable());
        if counted != kept {
            return Err(format!("(writing, pinned, evictable) are {counted:?}, kept {kept:?}"));
        }
        if self.table.len() + self.free_tokens.len() != self.entries.len() {
            return Err("a token is neither used nor free".into());
        }
        Ok(())
    }
}
