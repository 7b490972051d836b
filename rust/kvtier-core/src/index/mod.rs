//! Who is resident, and who may go.
//!
//! An index maps keys to slots and keeps, for every key, its state:
//!
//! ```text
//! absent -> writing(store | promotion) -> ready(0 pins) <-> ready(n pins) -> absent
//! ```
//!
//! Entries live in a slab and are named by `u32` tokens; one hash table maps keys to tokens;
//! policies thread their lists through tokens. There is no pointer and no allocation a key
//! after warm-up. Memory an entry with LRU and keys of 36 bytes: 36 (key) + 20 (state) + 8
//! (links) + 12 (table), 76 bytes.
//!
//! Every tier is an index over slots of its own medium: the primary tier over the region, the
//! memory tier over a second region, the file tier over files.
//!
//! # Invariants (checked by [`Index::validate`])
//! - Every slot is free, held by one entry, or detached (being let go by a late writer).
//! - An entry is in the policy's lists exactly when it is ready and has no pin.
//! - A batch call changes everything it names or nothing.

mod admission;
mod arc;
mod auto;
mod chain;
mod check;
mod evictor;
mod ghosts;
mod gittins;
mod lirs;
mod list;
mod lru;
mod policy;
mod reserve;
mod s3fifo;
mod state;
mod table;

use foldhash::fast::FixedState;
use std::hash::{BuildHasher, Hasher};

pub use admission::Admission;
pub use chain::Chain;
pub use evictor::Evictor;
pub use list::{Links, List};
pub use policy::{Policy, PolicyKind, Removal, UnknownPolicy};

use reserve::Newcomer;
use table::Table;

use crate::key::{HexKey, KeyBatch, KeyError, check_key_bytes};

/// Names an entry of the index.
pub type Token = u32;
/// Names a slot of the medium.
pub type Slot = u32;
/// No token, no slot.
pub const NIL: u32 = u32::MAX;
/// Names who uses a key, so that one request's second use is told from another's first.
pub type Requester = u32;
/// A requester that is different from every other, itself included.
pub const ANYONE: Requester = 0;
/// The largest capacity: tokens are `u32`, and the last one means none.
pub const MAX_CAPACITY: u32 = u32::MAX / 2;

/// Who writes an entry's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// The engine: `prepare_store` to `complete_store`.
    Store,
    /// A job that brings the chunk from a secondary tier.
    Promotion,
}

/// Who holds a pin; each kind is counted by itself, so that nobody can return another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    /// The engine, from `prepare_load` to `complete_load`.
    Load,
    /// A job that reads the slot.
    Job,
}

/// State of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Its slot is being written; nobody may read it.
    Writing(Writer),
    /// Its slot holds the chunk.
    Ready,
}

/// An index call that was refused; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// A key or key length that cannot be.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Not a capacity.
    #[error("a capacity of {0} chunks is not possible: use 1 to {MAX_CAPACITY}")]
    Capacity(u64),
    /// No slot is free.
    #[error("all {0} slots are taken: evict a key first")]
    Full(u32),
    /// The key is not resident.
    #[error("key {0} is not resident")]
    Unknown(HexKey),
    /// The key is still being written.
    #[error("key {0} is still being written: wait for its completion")]
    NotReady(HexKey),
    /// The key is not being written by a store, so there is nothing to complete.
    #[error("key {0} is not being stored: it was never prepared, or completed before")]
    NotPrepared(HexKey),
    /// The key has no pin of this kind, so there is nothing to give back.
    #[error("key {0} has no pin to give back: it was never prepared, or completed before")]
    NotPinned(HexKey),
    /// The key came twice in one call.
    #[error("key {0} was given twice in one call")]
    Duplicate(HexKey),
    /// The pin counter is full.
    #[error("key {0} has {max} pins already, more are not counted", max = u16::MAX)]
    PinOverflow(HexKey),
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    slot: Slot,
    /// The call that last named this entry; see [`Index::begin_call`].
    call: u32,
    /// Who used it last.
    requester: Requester,
    load_pins: u16,
    job_pins: u16,
    state: State,
}

impl Entry {
    fn pinned(&self) -> bool {
        self.load_pins != 0 || self.job_pins != 0
    }

    fn evictable(&self) -> bool {
        self.state == State::Ready && !self.pinned()
    }
}

/// A slot that [`Index::clear`] could not free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Which one.
    pub slot: Slot,
    /// What its key was.
    pub state: State,
    /// Pins of the engine.
    pub load_pins: u16,
    /// Pins of jobs.
    pub job_pins: u16,
}

/// What [`Index::reserve`] did.
#[derive(Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Positions, in the batch, of the keys that were absent.
    pub indices: Vec<u32>,
    /// Their new entries, all in state writing.
    pub tokens: Vec<Token>,
    /// Their slots.
    pub slots: Vec<Slot>,
    /// Keys that had to go.
    pub evicted: KeyBatch,
}

/// Numbers of entries by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Ready entries.
    pub ready: usize,
    /// Entries being written.
    pub writing: usize,
    /// Ready entries with at least one pin.
    pub pinned: usize,
    /// Slots whose late writer has not let go.
    pub detached: usize,
}

/// Keys to slots, with pins and an eviction policy; see the module. Not synchronised: its owner
/// holds a lock.
pub struct Index {
    capacity: u32,
    key_bytes: usize,
    hasher: FixedState,
    table: Table,
    entries: Vec<Entry>,
    keys: Vec<u8>,
    free_tokens: Vec<Token>,
    /// Slots from here on are not given out yet.
    limit: u32,
    /// Slots `next_slot..limit` were never used; used and free ones are in `free_slots`.
    free_slots: Vec<Slot>,
    next_slot: Slot,
    policy: Box<dyn Policy>,
    call: u32,
    /// Evictable entries that the running call marked.
    protected: usize,
    writing: usize,
    pinned: usize,
    detached: usize,
    victims: Vec<Token>,
    newcomers: Vec<Newcomer>,
    hashes: Vec<u64>,
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index")
            .field("capacity", &self.capacity)
            .field("key_bytes", &self.key_bytes)
            .field("occupancy", &self.occupancy())
            .finish_non_exhaustive()
    }
}

impl Index {
    /// An empty index over slots `0..capacity`, for keys of `key_bytes` bytes.
    ///
    /// # Errors
    /// [`IndexError::Capacity`] and [`KeyError::Unsupported`].
    pub fn new(capacity: u32, key_bytes: usize, policy: PolicyKind) -> Result<Self, IndexError> {
        Self::with_policy(capacity, key_bytes, policy.build(capacity as usize))
    }

    /// As [`Index::new`], with a policy of the caller's own, which no other index knows.
    ///
    /// # Errors
    /// [`IndexError::Capacity`] and [`KeyError::Unsupported`].
    pub fn with_policy(
        capacity: u32,
        key_bytes: usize,
        policy: Box<dyn Policy>,
    ) -> Result<Self, IndexError> {
        check_key_bytes(key_bytes)?;
        if capacity == 0 || capacity > MAX_CAPACITY {
            return Err(IndexError::Capacity(u64::from(capacity)));
        }
        Ok(Self {
            capacity,
            limit: capacity,
            key_bytes,
            hasher: FixedState::default(),
            table: Table::new(capacity as usize),
            entries: Vec::new(),
            keys: Vec::new(),
            free_tokens: Vec::new(),
            free_slots: Vec::new(),
            next_slot: 0,
            policy,
            call: 0,
            protected: 0,
            writing: 0,
            pinned: 0,
            detached: 0,
            victims: Vec::new(),
            newcomers: Vec::new(),
            hashes: Vec::new(),
        })
    }

    /// Slots in all.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Bytes a key.
    pub fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// Number of keys, in whatever state.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries by state.
    pub fn occupancy(&self) -> Occupancy {
        Occupancy {
            ready: self.len() - self.writing,
            writing: self.writing,
            pinned: self.pinned,
            detached: self.detached,
        }
    }

    /// The entry of a key.
    pub fn find(&self, key: &[u8]) -> Option<Token> {
        self.table.find(hash(&self.hasher, key), |token| self.key(token) == key)
    }

    /// The key of an entry.
    pub fn key(&self, token: Token) -> &[u8] {
        key_at(&self.keys, self.key_bytes, token)
    }

    /// The state of an entry.
    pub fn state(&self, token: Token) -> State {
        self.entries[token as usize].state
    }

    /// The slot of an entry.
    pub fn slot(&self, token: Token) -> Slot {
        self.entries[token as usize].slot
    }

    /// Begins a batch call. Entries that the call marks with [`Index::mark`] are protected from
    /// eviction until the next call begins.
    pub fn begin_call(&mut self) {
        self.protected = 0;
        self.call = self.call.wrapping_add(1);
        if self.call == 0 {
            // Once in 2^32 calls: old marks could look like new ones.
            self.entries.iter_mut().for_each(|entry| entry.call = 0);
            self.call = 1;
        }
    }

    /// Marks an entry as named by the running call; false if it was already.
    pub fn mark(&mut self, token: Token) -> bool {
        let entry = &mut self.entries[token as usize];
        let new = std::mem::replace(&mut entry.call, self.call) != self.call;
        self.protected += usize::from(new && entry.evictable());
        new
    }

    /// The entry of every key of a batch, in order; faster than one [`Index::find`] a key.
    pub fn find_batch(&self, keys: &KeyBatch, found: impl FnMut(usize, Option<Token>)) {
        self.find_many(keys.iter(), found);
    }

    /// As [`Index::find_batch`] for keys that lie anywhere; `found` gets their position.
    pub fn find_many<'k>(
        &self,
        mut keys: impl Iterator<Item = &'k [u8]>,
        mut found: impl FnMut(usize, Option<Token>),
    ) {
        const AHEAD: usize = 16;
        let mut batch: [(u64, &[u8]); AHEAD] = [(0, &[]); AHEAD];
        let mut position = 0;
        loop {
            let mut count = 0;
            // `by_ref`: what is left of the keys is the next round's.
            for (slot, key) in batch.iter_mut().zip(keys.by_ref().take(AHEAD)) {
                *slot = (hash(&self.hasher, key), key);
                self.table.prefetch(slot.0);
                count += 1;
            }
            for &(hash, key) in &batch[..count] {
                found(position, self.table.find(hash, |token| self.key(token) == key));
                position += 1;
            }
            if count < AHEAD {
                return;
            }
        }
    }

    /// The fingerprint of an entry that holds a slot.
    fn fingerprint_if_used(&self, token: Token) -> Option<u64> {
        let used = self.entries.get(token as usize).is_some_and(|entry| entry.slot != NIL);
        used.then(|| self.fingerprint(token))
    }

    /// What a policy remembers a key by. Not to be persisted.
    pub fn fingerprint_of(&self, key: &[u8]) -> u64 {
        hash(&self.hasher, key)
    }

    /// The fingerprint of an entry's key.
    fn fingerprint(&self, token: Token) -> u64 {
        hash(&self.hasher, self.key(token))
    }

    /// Marks a key as used by `requester`. One that is being written is as new as can be.
    pub fn touch(&mut self, token: Token, requester: Requester) {
        let entry = &mut self.entries[token as usize];
        let before = std::mem::replace(&mut entry.requester, requester);
        if entry.state == State::Ready {
            self.policy.touch(token, requester != ANYONE && before == requester);
        }
    }

    /// Marks the keys of a batch that are resident as used, the first one last.
    pub fn touch_batch(&mut self, keys: &KeyBatch, requester: Requester) {
        for key in keys.iter().rev() {
            if let Some(token) = self.find(key) {
                self.touch(token, requester);
            }
        }
    }

    /// The entries of all keys of a batch, each marked as named by this call.
    ///
    /// # Errors
    /// [`IndexError::Unknown`] and [`IndexError::Duplicate`].
    pub fn find_all(&mut self, keys: &KeyBatch) -> Result<Vec<Token>, IndexError> {
        self.begin_call();
        let mut tokens = Vec::with_capacity(keys.len());
        self.find_batch(keys, |_, token| tokens.push(token.unwrap_or(NIL)));
        for (&token, key) in tokens.iter().zip(keys) {
            if token == NIL {
                return Err(IndexError::Unknown(key.into()));
            }
            if !self.mark(token) {
                return Err(IndexError::Duplicate(key.into()));
            }
        }
        Ok(tokens)
    }
}

/// Not a persisted hash: seeds and algorithm may change with the library.
fn hash(hasher: &FixedState, key: &[u8]) -> u64 {
    let mut state = hasher.build_hasher();
    state.write(key);
    state.finish()
}

fn key_at(keys: &[u8], key_bytes: usize, token: Token) -> &[u8] {
    let start = token as usize * key_bytes;
    &keys[start..start + key_bytes]
}
