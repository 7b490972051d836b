//! How new keys come in: reserving slots for a batch, evicting for it, all or nothing.

use super::table::step;
use super::{
    Chain, Entry, Index, IndexError, NIL, Removal, Requester, Reserved, State, Token, Writer, hash,
};
use crate::key::KeyBatch;

/// An entry that a running call made, until it is known that there is room for all of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Newcomer {
    token: Token,
    parent: Token,
    hash: u64,
}

/// How often a call may name a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Named {
    Once,
    Often,
}

impl Index {
    /// Reserves a slot for every key of the batch that is absent, evicting as needed. All or
    /// nothing: `None`, and nothing changed, when the room cannot be made. Present keys of the
    /// batch, and everything else the running call marked, are never evicted for it.
    ///
    /// The keys continue `chain`, in the order of their prefix. The caller began the call.
    ///
    /// # Errors
    /// [`IndexError::Duplicate`] for a key that the call named before.
    pub fn reserve<'k>(
        &mut self,
        keys: impl Iterator<Item = (u32, &'k [u8])> + Clone,
        writer: Writer,
        requester: Requester,
        chain: &mut Chain,
    ) -> Result<Option<Reserved>, IndexError> {
        self.reserve_named(keys, Named::Once, writer, requester, chain)
    }

    /// As [`Index::reserve`], for keys that the running call may have named before: those and
    /// the present ones only tell what follows what.
    ///
    /// # Errors
    /// None but those of a key that can not be.
    pub fn reserve_absent<'k>(
        &mut self,
        keys: impl Iterator<Item = (u32, &'k [u8])> + Clone,
        writer: Writer,
        requester: Requester,
        chain: &mut Chain,
    ) -> Result<Option<Reserved>, IndexError> {
        self.reserve_named(keys, Named::Often, writer, requester, chain)
    }

    /// Evicts `count` keys that the running call did not mark, for an owner that keeps the slots
    /// itself. `None`, and nothing changed, when not as many may go.
    pub fn evict_unmarked(&mut self, count: usize) -> Option<KeyBatch> {
        (count <= self.policy.evictable() - self.protected).then(|| self.evict(count))
    }

    /// How many keys could be reserved now, by a call that marked what it has marked.
    pub fn room(&self) -> usize {
        self.free() + self.policy.evictable() - self.protected
    }

    fn reserve_named<'k>(
        &mut self,
        keys: impl Iterator<Item = (u32, &'k [u8])> + Clone,
        named: Named,
        writer: Writer,
        requester: Requester,
        chain: &mut Chain,
    ) -> Result<Option<Reserved>, IndexError> {
        let mut newcomers = std::mem::take(&mut self.newcomers);
        newcomers.clear();
        let reserved = self.reserve_all(keys, named, writer, requester, chain, &mut newcomers);
        if !matches!(reserved, Ok(Some(_))) {
            for newcomer in &newcomers {
                self.drop_unreserved(newcomer.token);
            }
        }
        chain.keep(self);
        self.newcomers = newcomers;
        reserved
    }

    fn reserve_all<'k>(
        &mut self,
        keys: impl Iterator<Item = (u32, &'k [u8])> + Clone,
        named: Named,
        writer: Writer,
        requester: Requester,
        chain: &mut Chain,
        newcomers: &mut Vec<Newcomer>,
    ) -> Result<Option<Reserved>, IndexError> {
        let mut indices = Vec::with_capacity(keys.size_hint().0);
        self.hash_all(keys.clone().map(|(_, key)| key));
        for (position, (index, key)) in keys.enumerate() {
            let parent = chain.parent(self, key);
            let hash = self.hashes[position];
            let found = self.table.find(hash, |token| self.key(token) == key);
            let token = match found {
                Some(present) if self.mark(present) || named == Named::Often => present,
                Some(_) => return Err(IndexError::Duplicate(key.into())),
                None => {
                    let token = self.insert_absent(key, hash, writer, requester);
                    indices.push(index);
                    newcomers.push(Newcomer { token, parent, hash });
                    token
                }
            };
            chain.follow(key, token);
        }
        if newcomers.len() > self.room() {
            return Ok(None);
        }
        let missing = newcomers.len().saturating_sub(self.free());
        for newcomer in &*newcomers {
            self.policy.admit(newcomer.token, newcomer.hash, newcomer.parent);
        }
        let evicted = self.evict(missing);
        let mut tokens = Vec::with_capacity(newcomers.len());
        let mut slots = Vec::with_capacity(newcomers.len());
        for newcomer in &*newcomers {
            let slot = self.free_slots.pop().unwrap_or_else(|| {
                self.next_slot += 1;
                self.next_slot - 1
            });
            self.entries[newcomer.token as usize].slot = slot;
            tokens.push(newcomer.token);
            slots.push(slot);
        }
        Ok(Some(Reserved { indices, tokens, slots, evicted }))
    }

    /// Evicts `count` entries that the running call did not mark; there are as many.
    fn evict(&mut self, count: usize) -> KeyBatch {
        let mut evicted = KeyBatch::with_capacity(count, self.key_bytes);
        if count == 0 {
            return evicted;
        }
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        let (entries, call) = (&self.entries, self.call);
        let protected = |token: Token| entries[token as usize].call == call;
        self.policy.victims(count, &protected, &mut victims);
        debug_assert_eq!(victims.len(), count);
        for &token in &victims {
            // Every key of an index has its length.
            let _ = evicted.push(self.key(token));
        }
        self.hash_all(evicted.iter());
        for (position, &token) in victims.iter().enumerate() {
            let hash = self.hashes[position];
            self.policy.remove(token, hash, Removal::Evicted);
            self.drop_hashed(token, hash);
        }
        self.victims = victims;
        evicted
    }

    /// Hashes a batch into `self.hashes`, and has its buckets fetched.
    fn hash_all<'k>(&mut self, keys: impl Iterator<Item = &'k [u8]>) {
        self.hashes.clear();
        for key in keys {
            let hash = hash(&self.hasher, key);
            self.table.prefetch(hash);
            self.hashes.push(hash);
        }
    }

    /// Makes an entry without a slot for a key that is absent, marked.
    pub(super) fn insert_absent(
        &mut self,
        key: &[u8],
        hash: u64,
        writer: Writer,
        requester: Requester,
    ) -> Token {
        debug_assert_eq!(key.len(), self.key_bytes);
        let entry = Entry {
            slot: NIL,
            call: self.call,
            requester,
            load_pins: 0,
            job_pins: 0,
            state: State::Writing(writer),
        };
        let token = if let Some(token) = self.free_tokens.pop() {
            self.entries[token as usize] = entry;
            let start = token as usize * self.key_bytes;
            self.keys[start..start + self.key_bytes].copy_from_slice(key);
            token
        } else {
            let token = self.entries.len() as Token;
            self.make_room();
            self.entries.push(entry);
            self.keys.extend_from_slice(key);
            token
        };
        self.table.insert(hash, token);
        self.writing += 1;
        token
    }

    /// Makes room for one more token, in steps: doubling would leave half of the memory unused,
    /// and there are no more tokens than slots but for the keys of one call.
    fn make_room(&mut self) {
        let tokens = self.entries.len();
        if tokens < self.entries.capacity() {
            return;
        }
        let more = step(tokens, self.capacity as usize);
        self.entries.reserve_exact(more);
        self.keys.reserve_exact(more * self.key_bytes);
        self.policy.grow(self.entries.capacity());
    }

    /// Takes an entry away that the policy does not know.
    pub(super) fn drop_unreserved(&mut self, token: Token) {
        debug_assert!(matches!(self.state(token), State::Writing(_)));
        self.writing -= 1;
        self.drop_entry(token);
    }
}
