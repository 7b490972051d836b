//! What the manager counts, and the events it tells.

use std::collections::VecDeque;

use crate::tier::{Failure, Medium, Usage};

/// Figures of the primary tier. Counters run since the manager was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrimaryFigures {
    /// Slots in all.
    pub slots: u64,
    /// Chunks that are ready.
    pub ready: u64,
    /// Chunks being written.
    pub writing: u64,
    /// Ready chunks with a pin.
    pub pinned: u64,
    /// Slots that a late job still holds.
    pub detached: u64,
    /// Requests that loaded or stored and have not ended.
    pub requests: u64,
    /// Keys looked up and ready.
    pub hits: u64,
    /// Keys looked up and on their way.
    pub hits_pending: u64,
    /// Keys looked up and in no tier, or behind the first miss of a prefix.
    pub misses: u64,
    /// Chunks evicted.
    pub evictions: u64,
    /// Chunks stored by the engine.
    pub stored_chunks: u64,
    /// Chunks loaded by the engine.
    pub loaded_chunks: u64,
    /// Calls of `prepare_store` that found no room.
    pub stores_refused: u64,
    /// Chunks that were offered less often than the admission threshold asks.
    pub not_admitted: u64,
}

/// Figures of one secondary tier.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TierFigures {
    /// How full it is.
    pub usage: Usage,
    /// Promotions started from it.
    pub hits: u64,
    /// Chunks loaded.
    pub loads: u64,
    /// Their bytes.
    pub load_bytes: u64,
    /// Worker seconds spent on loads.
    pub load_seconds: f64,
    /// Chunks that did not come, by cause: see [`Failure::ALL`].
    pub load_failures: [u64; Failure::ALL.len()],
    /// Chunks stored.
    pub stores: u64,
    /// Their bytes.
    pub store_bytes: u64,
    /// Worker seconds spent on stores.
    pub store_seconds: f64,
    /// Chunks that were not stored, by cause.
    pub store_failures: [u64; Failure::ALL.len()],
    /// Chunks it evicted.
    pub evictions: u64,
    /// Chunks not offered to it because it could not keep up.
    pub sheds: u64,
    /// Jobs it works on.
    pub in_flight: u64,
    /// Bytes of stores it works on.
    pub queued_bytes: u64,
    /// Jobs that passed their deadline.
    pub overdue: u64,
}

impl TierFigures {
    /// Chunks that came back with other bytes than were stored.
    pub fn corrupt(&self) -> u64 {
        self.load_failures[Failure::Corrupt as usize]
    }

    /// Chunks that were gone when they were wanted.
    pub fn missing(&self) -> u64 {
        self.load_failures[Failure::Missing as usize]
    }
}

/// All figures at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// The primary tier's.
    pub primary: PrimaryFigures,
    /// Every other tier's, in order: name, medium, figures.
    pub tiers: Vec<(String, Medium, TierFigures)>,
}

/// What happened to keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The tier has them now.
    Stored,
    /// The tier has them no more.
    Removed,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// In which tier; `None` is the primary one.
    pub tier: Option<usize>,
    /// To which keys.
    pub keys: Vec<Box<[u8]>>,
}

/// Events nobody fetched are dropped, oldest first, beyond this many.
const MAX_EVENTS: usize = 1 << 16;

/// Events until they are fetched; nothing at all unless wanted.
pub(super) struct Events {
    wanted: bool,
    queue: VecDeque<Event>,
}

impl Events {
    pub(super) fn new(wanted: bool) -> Self {
        Self { wanted, queue: VecDeque::new() }
    }

    pub(super) fn push<'k>(
        &mut self,
        kind: EventKind,
        tier: Option<usize>,
        keys: impl Iterator<Item = &'k [u8]>,
    ) {
        if !self.wanted {
            return;
        }
        let keys: Vec<Box<[u8]>> = keys.map(Into::into).collect();
        if keys.is_empty() {
            return;
        }
        if self.queue.len() == MAX_EVENTS {
            self.queue.pop_front();
        }
        self.queue.push_back(Event { kind, tier, keys });
    }

    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.queue).into()
    }
}
