//! What the manager counts, and the events it tells.

use std::collections::VecDeque;
use std::path::PathBuf;

use super::histogram::Histogram;
use crate::tier::BreakerState;
use crate::tier::{Failure, Fault, Locality, Medium, Usage};

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
    /// Slots that a late job, or the engine since a reset, still holds.
    pub detached: u64,
    /// Requests that loaded or stored and have not ended.
    pub requests: u64,
    /// Steps that ended.
    pub steps: u64,
    /// Keys looked up and ready.
    pub hits: u64,
    /// Keys looked up and on their way.
    pub hits_pending: u64,
    /// Keys looked up and in no tier, or behind the first miss of a prefix.
    pub misses: u64,
    /// Keys looked up that a tier could not tell of yet.
    pub retries: u64,
    /// Chunks evicted.
    pub evictions: u64,
    /// Chunks stored by the engine.
    pub stored_chunks: u64,
    /// Chunks loaded by the engine.
    pub loaded_chunks: u64,
    /// Calls of `prepare_store` that found no room.
    pub stores_refused: u64,
    /// Chunks of other tiers that were not promoted: no room, or more than the tier's share.
    pub promotions_refused: u64,
    /// Chunks that were offered less often than the admission threshold asks.
    pub not_admitted: u64,
}

/// Figures of one direction between the primary tier and another one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Moved {
    /// Chunks that arrived.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Worker seconds spent on all.
    pub seconds: f64,
    /// Chunks that did not arrive, by cause: see [`Failure::ALL`].
    pub failures: [u64; Failure::ALL.len()],
    /// Jobs that the tier works on.
    pub in_flight: u64,
    /// Jobs that passed their deadline.
    pub overdue: u64,
    /// From submission to the end, of jobs that ended in time.
    pub latency: Histogram,
    /// What the breaker lets through.
    pub breaker: BreakerState,
    /// How often the breaker opened.
    pub breaker_opened: u64,
}

impl Moved {
    /// Chunks that did not arrive for this cause.
    pub fn failed(&self, cause: Failure) -> u64 {
        self.failures[cause as usize]
    }
}

/// Figures of one secondary tier.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TierFigures {
    /// How full it is.
    pub usage: Usage,
    /// Keys that it was asked for.
    pub lookups: u64,
    /// Promotions started from it.
    pub hits: u64,
    /// Look-ups that it did not answer in time.
    pub lookups_overdue: u64,
    /// Promotions: from it into the primary tier.
    pub loads: Moved,
    /// Cascades: from the primary tier to it.
    pub stores: Moved,
    /// Chunks it evicted.
    pub evictions: u64,
    /// Chunks not stored in it because it could not keep up.
    pub sheds: u64,
    /// Chunks not offered to it because its breaker was open.
    pub refused: u64,
    /// Bytes of stores it works on.
    pub queued_bytes: u64,
    /// Slots that late loads of it still hold.
    pub quarantined: u64,
    /// Seconds it takes to store a MiB, on average.
    pub store_seconds_per_mib: f64,
    /// Whether it is under pressure.
    pub under_pressure: bool,
    /// How often it broke the contract, by kind: see [`Fault::ALL`].
    pub faults: [u64; Fault::ALL.len()],
}

/// A secondary tier in a [`Snapshot`].
#[derive(Debug, Clone, PartialEq)]
pub struct TierSnapshot {
    /// Its name.
    pub name: String,
    /// What it keeps chunks on.
    pub medium: Medium,
    /// Where.
    pub locality: Locality,
    /// The directory that it keeps its chunks in, if it does.
    pub directory: Option<PathBuf>,
    /// What it did.
    pub figures: TierFigures,
    /// What it counts by itself, by name.
    pub details: Vec<(&'static str, u64)>,
}

/// All figures at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Counts the snapshots of a manager: a later one has a higher number.
    pub number: u64,
    /// [`Manager::revision`](super::Manager::revision) at that moment.
    pub revision: u64,
    /// The primary tier's.
    pub primary: PrimaryFigures,
    /// Every other tier's, in order.
    pub tiers: Vec<TierSnapshot>,
}

/// Which way a job moves chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Direction {
    /// From a secondary tier into the primary one.
    Load = 0,
    /// From the primary tier to a secondary one.
    Store = 1,
}

impl Direction {
    /// The name in figures and events.
    pub fn as_str(self) -> &'static str {
        ["load", "store"][self as usize]
    }
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The tier has these keys now.
    Stored,
    /// The tier has them no more.
    Removed,
    /// The breaker of the tier's direction is in another state now.
    Breaker(Direction, BreakerState),
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

    /// Notes what happened to keys, if there are any.
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
        if !keys.is_empty() {
            self.append(Event { kind, tier, keys });
        }
    }

    /// Notes a change of a breaker.
    pub(super) fn breaker(&mut self, tier: usize, direction: Direction, state: BreakerState) {
        if self.wanted {
            let kind = EventKind::Breaker(direction, state);
            self.append(Event { kind, tier: Some(tier), keys: Vec::new() });
        }
    }

    fn append(&mut self, event: Event) {
        if self.queue.len() == MAX_EVENTS {
            self.queue.pop_front();
        }
        self.queue.push_back(event);
    }

    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.queue).into()
    }
}
