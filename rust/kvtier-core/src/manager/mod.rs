//! What moves when: the verbs an engine calls, between one primary tier and several others.
//!
//! ```text
//! begin_request   optional: which tiers may serve it, which ones get all of its chunks
//! lookup          index: HIT / HIT_PENDING / MISS; a miss asks the tiers in order, the first
//!                 that has the key gets a slot reserved and a promotion queued
//! prepare_load    pin, give slots            complete_load    unpin
//! prepare_store   drop known keys, evict, reserve slots       complete_store   ready, cascade
//! end_step        results of jobs, deadlines, then ONE load job per (tier, request)
//! request_finished
//! reset           forget the primary tier    reset_flushed    promote again
//! ```
//!
//! # Promises
//! - One mutex, held for index work only: never across I/O, a copy, or a call into a tier.
//! - A slot that a job may still touch is never given out: it is pinned (stores), in state
//!   writing (loads), or detached (loads that are late, all that a reset forgot) until the job's
//!   result was taken.
//! - A job that is past its deadline becomes a miss at once; its slot follows when it lets go.
//! - Every pin a job holds comes back with its result, and every job has a result.
//! - A tier can fail, stall, lie or panic: its breaker ([`BreakerState`]) keeps it out of the
//!   way, and what it can hold is bounded: bytes of stores queued, and a share of the slots for
//!   loads; one whose late loads hold more than half of it gets no more.
//!
//! # Recency
//! Chunks of one request are ordered leaf-first: of one call the head is the most recently used,
//! and [`Manager::request_finished`] orders all that the request loaded and stored in the same
//! way, since a prefix without its head is worthless. A request that finishes with transfers
//! still open is finished by its last `complete_load` or `complete_store`.
//!
//! | file | what |
//! |---|---|
//! | `lookup.rs` | finding keys, queueing promotions |
//! | `transfer.rs` | the engine's loads and stores |
//! | `request.rs` | what a live request holds, and its end |
//! | `step.rs` | the end of a step, waiting, shutdown, handing jobs to tiers |
//! | `job.rs` | accounting for jobs: cascades, results, deadlines |
//! | `tier.rs` | a tier as the manager knows it, and calls into it |
//! | `reset.rs` | forgetting the primary tier under an engine that runs |
//! | `tier/breaker.rs`, `pressure.rs` | when a tier is switched off, when its stores are shed |
//! | `doubts.rs` | which chunks a tier is not asked for, since it did not bring them |
//! | `solo.rs` | one tier, without a manager of ours |
//! | `spans.rs` | what a trace is told |
//! | `figures.rs`, `histogram.rs`, `named.rs` | what is counted, and under which names it is shown |

mod doubts;
mod figures;
mod histogram;
mod job;
mod lookup;
mod named;
mod pressure;
mod request;
mod reset;
mod solo;
mod spans;
mod step;
mod tier;
mod transfer;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub use figures::{
    Direction, Event, EventKind, Moved, PrimaryFigures, Snapshot, TierFigures, TierSnapshot,
};
pub use histogram::{BUCKETS, Histogram};
pub use named::{Figure, Tell};
pub use request::{RequestOptions, TierMatcher};
pub use solo::{Ended, SoloError, SoloTier};
pub use transfer::PreparedStore;

pub use crate::tier::{BreakerState, RequestId};

use crate::clock::Clock;
use crate::index::{Admission, Index, IndexError, PolicyKind, Requester, Slot};
use crate::key::{KeyBatch, KeyError};
use crate::page::{self, Description, Page, PageError};
use crate::region::Region;
use crate::sync::Mutex;
use crate::tier::{JobId, Offload, Results, SecondaryTier, TierConfig, TierError, TierLimits};
use crate::trace::Trace;
use figures::Events;
use job::Running;
use lookup::{Promotion, Retrying};
use request::Request;
use spans::Spans;
use tier::{Tier, TierState};

/// What a look-up answers for a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Lookup {
    /// In no tier: compute it.
    Miss = 0,
    /// In the primary tier: `prepare_load` will give its slot.
    Hit = 1,
    /// On its way into the primary tier: look again in a later step.
    HitPending = 2,
    /// A tier does not know yet: look again in a later step.
    Retry = 3,
}

/// A call of the manager that was refused; nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagerError {
    /// A key that is not in the state that the call needs.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// A tier that could not be opened.
    #[error("tier {name:?}: {source}")]
    Tier {
        /// Its name.
        name: String,
        /// What it said.
        source: TierError,
    },
    /// A name that no tier has.
    #[error("there is no tier {name:?}: the tiers are {known}")]
    UnknownTier {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// More tiers than a mask has bits.
    #[error("{0} tiers are too many: use {MAX_TIERS} at most")]
    TooManyTiers(usize),
    /// Used after `shutdown`.
    #[error("this manager was shut down")]
    Closed,
}

impl From<KeyError> for ManagerError {
    fn from(error: KeyError) -> Self {
        Self::Index(error.into())
    }
}

/// How a manager works.
#[derive(Debug, Clone)]
pub struct ManagerOptions {
    /// Bytes a key.
    pub key_bytes: usize,
    /// Who goes first when room is needed.
    pub policy: PolicyKind,
    /// How often a chunk must be offered before it is stored; 1 stores it at once.
    pub store_threshold: u8,
    /// Whether events are kept for [`Manager::take_events`].
    pub events: bool,
    /// What deadlines, breakers and back-pressure go by.
    pub clock: Clock,
}

/// A secondary tier and its limits.
pub struct TierSlot {
    /// Its name in figures and events.
    pub name: String,
    /// The tier.
    pub tier: Box<dyn SecondaryTier>,
    /// What it is granted.
    pub limits: TierLimits,
}

/// Tiers, by their bits.
type TierMask = u64;

/// The most tiers a manager can have.
pub const MAX_TIERS: usize = TierMask::BITS as usize;

/// The origin of a chunk that no tier brought; no tier has this number.
const FROM_ENGINE: u8 = u8::MAX;

struct Inner {
    index: Index,
    admission: Admission,
    requests: HashMap<RequestId, Request>,
    promotions: Vec<Promotion>,
    jobs: HashMap<JobId, Running>,
    next_job: JobId,
    /// No job that is not overdue ends earlier.
    next_deadline: Option<Instant>,
    /// Steps that ended.
    step: u64,
    /// Snapshots that were taken.
    snapshots: u64,
    /// Since when requests are told to ask again.
    retrying: HashMap<RequestId, Retrying>,
    /// Chunks promoted for requests since they loaded or stored one.
    promised: HashMap<RequestId, u32>,
    /// Requests that wait for a key to be written before a tier can get it.
    parked: Vec<RequestId>,
    /// Requests whose end the tiers have not been told.
    ended: Vec<RequestId>,
    /// Holders beyond the first of slots that are detached.
    more_holders: HashMap<Slot, u32>,
    /// Slots that the engine held when they were forgotten.
    engine_held: Vec<Slot>,
    /// Of each slot, which tier its chunk was promoted from; [`FROM_ENGINE`] for one that was stored.
    origins: Box<[u8]>,
    /// Between `reset` and `reset_flushed`.
    resetting: bool,
    events: Events,
    primary: PrimaryFigures,
    tiers: Vec<TierState>,
    /// Grows whenever a figure may have changed.
    revision: u64,
    closed: bool,
}

impl Inner {
    /// For a call that changes something.
    fn open(&mut self) -> Result<&mut Self, ManagerError> {
        self.revision += 1;
        self.look()
    }

    /// For a call that changes nothing, or notes it where it does.
    fn look(&mut self) -> Result<&mut Self, ManagerError> {
        if self.closed { Err(ManagerError::Closed) } else { Ok(self) }
    }

    /// Notes the new state of a breaker, if it is another.
    fn breaker_is(&mut self, tier: usize, direction: Direction, state: Option<BreakerState>) {
        let Some(state) = state else {
            return;
        };
        if state == BreakerState::Open {
            self.tiers[tier].moved(direction).breaker_opened += 1;
        }
        self.events.breaker(tier, direction, state);
    }

    /// One holder lets go of a detached slot.
    fn let_go(&mut self, slot: Slot) {
        match self.more_holders.get_mut(&slot) {
            Some(holders) if *holders > 1 => *holders -= 1,
            Some(_) => drop(self.more_holders.remove(&slot)),
            None => self.index.reclaim(slot),
        }
    }
}

/// The orchestrator; see the module. Shared by reference between threads.
pub struct Manager {
    region: Arc<Region>,
    tiers: Vec<Tier>,
    /// Tiers that get all chunks of every request.
    request_level: TierMask,
    results: Arc<Results>,
    clock: Clock,
    /// Where the figures are shown.
    page: Option<Page>,
    /// Who is told what moves when.
    spans: Option<Spans>,
    inner: Mutex<Inner>,
}

impl Manager {
    /// A manager over the slots of `region`, with tiers behind it, fastest first.
    ///
    /// # Errors
    /// [`IndexError`] for an impossible key length, and more than [`MAX_TIERS`] tiers.
    pub fn new(
        region: Arc<Region>,
        options: &ManagerOptions,
        tiers: Vec<TierSlot>,
    ) -> Result<Self, ManagerError> {
        if tiers.len() > MAX_TIERS {
            return Err(ManagerError::TooManyTiers(tiers.len()));
        }
        let index = Index::new(region.slots(), options.key_bytes, options.policy)?;
        let admission = Admission::new(options.store_threshold, region.slots() as usize);
        let states = tiers.iter().map(|slot| TierState::new(&slot.limits)).collect();
        let tiers: Vec<Tier> = tiers.into_iter().map(|slot| Tier::new(slot, &region)).collect();
        let request_level = (0..tiers.len())
            .filter(|&number| tiers[number].limits.offload == Offload::Request)
            .fold(0, |mask, number| mask | 1 << number);
        Ok(Self {
            inner: Mutex::new(Inner {
                index,
                admission,
                requests: HashMap::new(),
                promotions: Vec::new(),
                jobs: HashMap::new(),
                next_job: 0,
                next_deadline: None,
                step: 0,
                snapshots: 0,
                retrying: HashMap::new(),
                promised: HashMap::new(),
                parked: Vec::new(),
                ended: Vec::new(),
                more_holders: HashMap::new(),
                engine_held: Vec::new(),
                origins: vec![FROM_ENGINE; region.slots() as usize].into(),
                resetting: false,
                events: Events::new(options.events),
                primary: PrimaryFigures::default(),
                tiers: states,
                revision: 0,
                closed: false,
            }),
            region,
            tiers,
            request_level,
            results: Arc::new(Results::new(options.clock.clone())),
            clock: options.clock.clone(),
            page: None,
            spans: None,
        })
    }

    /// Has the tiers of `configs` opened by `open`, then makes the manager.
    ///
    /// # Errors
    /// The first tier that could not be opened; those opened before it are closed again.
    pub fn open(
        region: Arc<Region>,
        options: &ManagerOptions,
        configs: &[TierConfig],
        mut open: impl FnMut(usize, &TierConfig) -> Result<Box<dyn SecondaryTier>, TierError>,
    ) -> Result<Self, ManagerError> {
        crate::key::check_key_bytes(options.key_bytes)?;
        let mut tiers: Vec<TierSlot> = Vec::with_capacity(configs.len());
        for (position, config) in configs.iter().enumerate() {
            let (name, limits) = (config.name.clone(), config.limits.clone());
            match open(position, config) {
                Ok(tier) => tiers.push(TierSlot { name, tier, limits }),
                Err(source) => {
                    for slot in &tiers {
                        slot.tier.shutdown();
                    }
                    return Err(ManagerError::Tier { name, source });
                }
            }
        }
        Self::new(region, options, tiers)
    }

    /// Shows the figures on a [page] in `directory` from now on, anew after each step.
    ///
    /// # Errors
    /// [`PageError`]; the manager works without one.
    pub fn open_page(&mut self, directory: &Path) -> Result<(), PageError> {
        let snapshot = self.stats();
        let description = Description::of(&snapshot, self.region.slot_bytes());
        let page = Page::create(directory, &description)?;
        page.publish(&snapshot);
        self.page = Some(page);
        Ok(())
    }

    /// Tells `trace` of steps and jobs from now on.
    pub fn open_trace(&mut self, trace: Trace) {
        self.spans = Some(Spans::new(trace, &self.clock, &self.tiers));
    }

    /// Opens the page and the trace that the environment asks for. The manager works without
    /// them: what can not be had is a warning.
    pub fn show(&mut self) {
        if let Some(directory) = page::directory()
            && let Err(error) = self.open_page(&directory)
        {
            log::warn!("kvtier top and kvtier exporter will not show this manager: {error}");
        }
        if let Some(trace) = Trace::from_environment() {
            self.open_trace(trace);
        }
    }

    /// The primary region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Bytes a key.
    pub fn key_bytes(&self) -> usize {
        self.inner.lock().index.key_bytes()
    }

    /// Marks keys as used, here and in the tiers, the first one most recently. Keys that are
    /// nowhere are passed over.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn touch(&self, request: RequestId, keys: &KeyBatch) -> Result<(), ManagerError> {
        {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            inner.index.touch_batch(keys, requester(request));
            if let Some(state) = inner.requests.get_mut(&request) {
                state.extend_used(keys);
            }
        }
        for number in 0..self.tiers.len() {
            self.tiers[number].call("touch", |tier| tier.touch(keys));
        }
        Ok(())
    }

    /// What was stored and removed, and how breakers changed, since the last call.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn take_events(&self) -> Result<Vec<Event>, ManagerError> {
        let mut inner = self.inner.lock();
        Ok(inner.look()?.events.take())
    }

    /// The name of a tier in events: `None` is the primary one.
    pub fn tier_name(&self, tier: Option<usize>) -> &str {
        tier.map_or("primary", |number| &self.tiers[number].name)
    }

    /// A number that is another one whenever a figure of [`Manager::stats`] may be, but for the steps
    /// and what a tier tells of itself without a job. Asking for it is cheap.
    pub fn revision(&self) -> u64 {
        self.inner.lock().revision
    }

    /// All figures at one moment.
    pub fn stats(&self) -> Snapshot {
        let (number, revision, mut primary, mut figures, occupancy) = {
            let mut inner = self.inner.lock();
            inner.snapshots += 1;
            let mut primary = inner.primary;
            primary.requests = inner.requests.len() as u64;
            primary.steps = inner.step;
            let figures: Vec<TierFigures> =
                inner.tiers.iter().map(TierState::current_figures).collect();
            (inner.snapshots, inner.revision, primary, figures, inner.index.occupancy())
        };
        primary.slots = u64::from(self.region.slots());
        primary.ready = occupancy.ready as u64;
        primary.writing = occupancy.writing as u64;
        primary.pinned = occupancy.pinned as u64;
        primary.detached = occupancy.detached as u64;
        for (number, figures) in figures.iter_mut().enumerate() {
            figures.usage =
                self.tiers[number].call("usage", |tier| tier.usage()).unwrap_or_default();
        }
        let tiers = self.tiers.iter().zip(figures).map(|(tier, figures)| TierSnapshot {
            name: tier.name.clone(),
            medium: tier.medium,
            locality: tier.locality,
            details: tier.call("details", |tier| tier.details()).unwrap_or_default(),
            directory: tier.inner.directory().map(Path::to_owned),
            figures,
        });
        Snapshot { number, revision, primary, tiers: tiers.collect() }
    }

    /// Walks every invariant.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validate(&self) -> Result<(), String> {
        let inner = self.inner.lock();
        inner.index.validate()?;
        inner.check_holders()?;
        for (tier, state) in self.tiers.iter().zip(&inner.tiers) {
            let (holds, most) = (state.promotions + state.loading, tier.max_loading);
            if holds > most {
                return Err(format!("loads of {:?} hold {holds} slots, {most} at most", tier.name));
            }
        }
        inner.check_queues(self.region.slot_bytes() as u64)
    }
}

/// A request as the index knows it: never [`ANYONE`](crate::index::ANYONE). Two requests that
/// share a number cost a use not counted, once in 2^32.
fn requester(request: RequestId) -> Requester {
    ((request ^ (request >> 32)) as Requester).wrapping_add(1).max(1)
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.shutdown();
    }
}

#[cfg(test)]
pub(crate) mod tests;
