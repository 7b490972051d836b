//! The memory tier: chunks in host memory that the GPU does not reach, a second [`Region`].

use std::sync::Arc;

use super::store::ChunkStore;
use super::{Medium, Presence, TierError, Usage};
use crate::checksum::Checksum;
use crate::index::{ANYONE, Chain, Index, Pin, PolicyKind, State, Token, Writer};
use crate::key::KeyBatch;
use crate::region::{Region, RegionKind};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Chunks in anonymous memory, evicted least recently used.
pub struct MemoryStore {
    region: Arc<Region>,
    index: Mutex<Index>,
    checksums: Box<[AtomicU64]>,
    capacity_bytes: u64,
}

impl MemoryStore {
    /// A store of at most `capacity_bytes` for chunks of `chunk_bytes` with keys of `key_bytes`.
    ///
    /// # Errors
    /// [`TierError::Capacity`] below one chunk, [`TierError::Region`] without the memory.
    pub fn new(
        capacity_bytes: u64,
        chunk_bytes: usize,
        key_bytes: usize,
    ) -> Result<Self, TierError> {
        let slots = capacity_bytes / chunk_bytes as u64;
        if slots == 0 {
            return Err(TierError::Capacity {
                medium: Medium::Memory.as_str(),
                given: capacity_bytes,
                needed: chunk_bytes as u64,
            });
        }
        let slots = u32::try_from(slots).unwrap_or(u32::MAX / 2);
        Ok(Self {
            region: Region::new(slots, chunk_bytes, RegionKind::Anonymous)?,
            index: Mutex::new(Index::new(slots, key_bytes, PolicyKind::Lru)?),
            checksums: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            capacity_bytes,
        })
    }
}

impl ChunkStore for MemoryStore {
    fn medium(&self) -> Medium {
        Medium::Memory
    }

    fn lookup(&self, keys: &KeyBatch, wanted: &[u32], presence: &mut [Presence]) {
        lookup(&self.index.lock(), keys, wanted, presence);
    }

    fn put(
        &self,
        key: &[u8],
        bytes: &[u8],
        checksum: impl FnOnce() -> Checksum,
    ) -> Result<KeyBatch, TierError> {
        let Some(reservation) = reserve(&mut self.index.lock(), key)? else {
            return Ok(KeyBatch::empty(key.len()));
        };
        let Reservation { token, slot, evicted } = reservation;
        // SAFETY: the slot is in state writing, and this call is its one writer.
        unsafe { self.region.slot_mut(slot) }.copy_from_slice(bytes);
        self.checksums[slot as usize].store(checksum().0, Ordering::Release);
        self.index.lock().commit(token);
        Ok(evicted)
    }

    fn get(&self, key: &[u8], place: &mut [u8]) -> Result<Checksum, TierError> {
        let (token, slot) = pin(&self.index, key)?;
        // SAFETY: the pin keeps writers away.
        place.copy_from_slice(unsafe { self.region.slot(slot) });
        let stored = Checksum(self.checksums[slot as usize].load(Ordering::Acquire));
        self.index.lock().unpin(token, Pin::Job)?;
        Ok(stored)
    }

    fn discard(&self, key: &[u8]) -> bool {
        let mut index = self.index.lock();
        let Some(slot) = detach_unpinned(&mut index, key) else {
            return false;
        };
        index.reclaim(slot);
        true
    }

    fn touch(&self, keys: &KeyBatch) {
        self.index.lock().touch_batch(keys, ANYONE);
    }

    fn usage(&self) -> Usage {
        let chunks = self.index.lock().len() as u64;
        Usage {
            capacity_bytes: self.capacity_bytes,
            used_bytes: chunks * self.region.slot_bytes() as u64,
            chunks,
        }
    }

    fn close(&self) {}
}

/// A slot reserved for a new key.
pub(super) struct Reservation {
    pub(super) token: Token,
    pub(super) slot: u32,
    pub(super) evicted: KeyBatch,
}

/// Reserves a slot for `key`, or counts it as used and gives `None` when it is here already.
pub(super) fn reserve(index: &mut Index, key: &[u8]) -> Result<Option<Reservation>, TierError> {
    if let Some(token) = index.find(key) {
        index.touch(token, ANYONE);
        return Ok(None);
    }
    index.begin_call();
    let reserved = index
        .reserve(std::iter::once((0, key)), Writer::Store, ANYONE, &mut Chain::default())?
        .ok_or_else(|| TierError::Busy(key.into()))?;
    Ok(Some(Reservation {
        token: reserved.tokens[0],
        slot: reserved.slots[0],
        evicted: reserved.evicted,
    }))
}

/// Pins a ready key for reading.
pub(super) fn pin(index: &Mutex<Index>, key: &[u8]) -> Result<(Token, u32), TierError> {
    let mut index = index.lock();
    let token = index
        .find(key)
        .filter(|&token| index.state(token) == State::Ready)
        .ok_or_else(|| TierError::Missing(key.into()))?;
    index.touch(token, ANYONE);
    index.pin(token, Pin::Job)?;
    Ok((token, index.slot(token)))
}

/// Answers a look-up from an index.
pub(super) fn lookup(index: &Index, keys: &KeyBatch, wanted: &[u32], presence: &mut [Presence]) {
    let wanted = wanted.iter().map(|&position| keys.get(position as usize));
    index.find_many(wanted, |at, token| {
        let ready = token.is_some_and(|token| index.state(token) == State::Ready);
        presence[at] = if ready { Presence::Hit } else { Presence::Miss };
    });
}

/// Makes a key absent whose slot is about to be cleared, unless somebody still reads it: that
/// reader finds the same damage and comes here after its pin.
pub(super) fn detach_unpinned(index: &mut Index, key: &[u8]) -> Option<u32> {
    let token = index.find(key)?;
    let idle = index.state(token) == State::Ready && index.pins(token, Pin::Job) == 0;
    idle.then(|| index.detach(token))
}
