//! What moves when: the verbs an engine calls, between one primary tier and several others.
//!
//! ```text
//! lookup          index: HIT / HIT_PENDING / MISS; a miss asks the tiers in order, the first
//!                 that has the key gets a slot reserved and a promotion queued
//! prepare_load    pin, give slots            complete_load    unpin
//! prepare_store   drop known keys, evict, reserve slots       complete_store   ready, cascade
//! end_step        results of jobs, deadlines, then ONE load job per (tier, request)
//! ```
//!
//! # Promises
//! - One mutex, held for index work only: never across I/O, a copy, or a call into a tier.
//! - A slot that a job may still touch is never given out: it is pinned (stores), in state
//!   writing (loads), or detached (loads that are late) until the job's result was taken.
//! - A job that is past its deadline becomes a miss at once; its slot follows when it lets go.
//! - Every pin a job holds comes back with its result, and every job has a result.
//!
//! # Recency
//! Chunks of one request are ordered leaf-first: of one call the head is the most recently used,
//! and [`Manager::request_finished`] orders all that the request loaded and stored in the same
//! way, since a prefix without its head is worthless. A request that finishes with transfers
//! still open is finished by its last `complete_load` or `complete_store`.

mod figures;
mod lookup;
mod step;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use figures::{Event, EventKind, PrimaryFigures, Snapshot, TierFigures};

use crate::index::{
    Admission, Chain, Index, IndexError, Pin, PolicyKind, Requester, Slot, State, Token, Writer,
};
use crate::key::{KeyBatch, KeyError};
use crate::region::Region;
use crate::sync::Mutex;
use crate::sync::atomic::AtomicBool;
use crate::tier::{Chunks, JobId, Results, SecondaryTier, TierConfig, TierError};
use figures::Events;

/// A number that the engine gives a request.
pub type RequestId = u64;

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
    /// Used after `shutdown`.
    #[error("this manager was shut down")]
    Closed,
}

impl From<KeyError> for ManagerError {
    fn from(error: KeyError) -> Self {
        Self::Index(error.into())
    }
}

/// What `prepare_store` reserved.
#[derive(Debug, PartialEq, Eq)]
pub struct PreparedStore {
    /// Positions, in the batch, of the keys to write, ascending.
    pub indices: Vec<u32>,
    /// The slot of each.
    pub slots: Vec<Slot>,
    /// Keys that left the primary tier for it.
    pub evicted: KeyBatch,
}

/// How a manager works.
#[derive(Debug, Clone, Copy)]
pub struct ManagerOptions {
    /// Bytes a key.
    pub key_bytes: usize,
    /// Who goes first when room is needed.
    pub policy: PolicyKind,
    /// How often a chunk must be offered before it is stored; 1 stores it at once.
    pub store_threshold: u8,
    /// Whether events are kept for [`Manager::take_events`].
    pub events: bool,
}

/// A secondary tier and its limits.
pub struct TierSlot {
    /// Its name in figures and events.
    pub name: String,
    /// The tier.
    pub tier: Box<dyn SecondaryTier>,
    /// After which a load counts as a miss.
    pub load_deadline: Duration,
    /// After which a store is given up.
    pub store_deadline: Duration,
    /// Bytes of stores under way above which new ones are shed.
    pub max_queued_bytes: u64,
}

/// What a job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Load,
    Store,
}

/// A job that a tier works on.
struct Running {
    tier: usize,
    direction: Direction,
    chunks: Arc<Chunks>,
    deadline: Instant,
    cancelled: Arc<AtomicBool>,
    overdue: bool,
}

/// A promotion that the next `end_step` submits.
struct Promotion {
    tier: usize,
    request: RequestId,
    token: Token,
}

/// What a live request did, for when it ends.
struct Request {
    /// Keys that it loaded or stored, in order.
    used: KeyBatch,
    /// Its last chunk of each group: what the next one follows.
    chain: Chain,
    /// What `prepare_load` pinned for it and it has not given back, in order.
    loading: Vec<Token>,
    /// Keys of `prepare_store` that it has not completed.
    open_stores: usize,
    finished: bool,
}

struct Inner {
    index: Index,
    admission: Admission,
    requests: HashMap<RequestId, Request>,
    promotions: Vec<Promotion>,
    jobs: HashMap<JobId, Running>,
    next_job: JobId,
    /// No job that is not overdue ends earlier.
    next_deadline: Option<Instant>,
    events: Events,
    primary: PrimaryFigures,
    tiers: Vec<TierFigures>,
    closed: bool,
}

impl Inner {
    fn open(&mut self) -> Result<&mut Self, ManagerError> {
        if self.closed {
            return Err(ManagerError::Closed);
        }
        Ok(self)
    }

    /// Which keys of a batch the admission threshold lets pass; all, without one.
    fn offered(&self, keys: &KeyBatch) -> Offered {
        let mut offered = Offered { admitted: Vec::with_capacity(keys.len()), absent: Vec::new() };
        if self.admission.is_open() {
            offered.admitted.extend(0..keys.len() as u32);
            return offered;
        }
        self.index.find_batch(keys, |position, token| {
            let mut admitted = true;
            if token.is_none() {
                let fingerprint = self.index.fingerprint_of(keys.get(position));
                admitted = self.admission.admits(fingerprint);
                offered.absent.push(fingerprint);
            }
            if admitted {
                offered.admitted.push(position as u32);
            }
        });
        offered
    }

    /// The state of a request, made at its first transfer.
    fn request(&mut self, id: RequestId) -> &mut Request {
        let key_bytes = self.index.key_bytes();
        self.requests.entry(id).or_insert_with(|| Request {
            used: KeyBatch::with_capacity(0, key_bytes),
            chain: Chain::default(),
            loading: Vec::new(),
            open_stores: 0,
            finished: false,
        })
    }

    /// Ends a request that is finished and has nothing open: orders what it used.
    fn end_if_done(&mut self, id: RequestId) {
        if let Entry::Occupied(request) = self.requests.entry(id) {
            let state = request.get();
            if state.finished && state.loading.is_empty() && state.open_stores == 0 {
                self.index.touch_batch(&request.remove().used, requester(id));
            }
        }
    }
}

impl Request {
    fn remember<'k>(&mut self, keys: impl Iterator<Item = &'k [u8]>) {
        for key in keys {
            // Every key of an index has its length.
            let _ = self.used.push(key);
        }
    }
}

/// What a threshold makes of a batch of keys.
struct Offered {
    /// Positions of keys that are resident or were offered often enough.
    admitted: Vec<u32>,
    /// Fingerprints of keys that are not resident; only kept with a threshold.
    absent: Vec<u64>,
}

/// The orchestrator; see the module. Shared by reference between threads.
pub struct Manager {
    region: Arc<Region>,
    tiers: Vec<TierSlot>,
    results: Arc<Results>,
    inner: Mutex<Inner>,
}

impl Manager {
    /// A manager over the slots of `region`, with tiers behind it, fastest first.
    ///
    /// # Errors
    /// [`IndexError`] for an impossible key length.
    pub fn new(
        region: Arc<Region>,
        options: &ManagerOptions,
        tiers: Vec<TierSlot>,
    ) -> Result<Self, ManagerError> {
        let index = Index::new(region.slots(), options.key_bytes, options.policy)?;
        let admission = Admission::new(options.store_threshold, region.slots() as usize);
        Ok(Self {
            inner: Mutex::new(Inner {
                index,
                admission,
                requests: HashMap::new(),
                promotions: Vec::new(),
                jobs: HashMap::new(),
                next_job: 0,
                next_deadline: None,
                events: Events::new(options.events),
                primary: PrimaryFigures::default(),
                tiers: vec![TierFigures::default(); tiers.len()],
                closed: false,
            }),
            region,
            tiers,
            results: Arc::default(),
        })
    }

    /// Opens the tiers of `configs`, then makes the manager.
    ///
    /// # Errors
    /// The first tier that could not be opened; those opened before it are closed again.
    pub fn open(
        region: Arc<Region>,
        options: &ManagerOptions,
        configs: &[TierConfig],
        namespace: &str,
    ) -> Result<Self, ManagerError> {
        let key_bytes = options.key_bytes;
        crate::key::check_key_bytes(key_bytes)?;
        let mut tiers = Vec::with_capacity(configs.len());
        for config in configs {
            match config.open(region.slot_bytes(), key_bytes, namespace) {
                Ok(tier) => tiers.push(TierSlot {
                    name: config.name.clone(),
                    tier,
                    load_deadline: config.load_deadline,
                    store_deadline: config.store_deadline,
                    max_queued_bytes: config.max_queued_bytes.unwrap_or(region.bytes() as u64 / 2),
                }),
                Err(source) => {
                    for slot in &tiers {
                        slot.tier.shutdown();
                    }
                    let name = config.name.clone();
                    return Err(ManagerError::Tier { name, source });
                }
            }
        }
        Self::new(region, options, tiers)
    }

    /// The primary region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Bytes a key.
    pub fn key_bytes(&self) -> usize {
        self.inner.lock().index.key_bytes()
    }

    /// Pins every key and gives its slot, in order; all or none.
    ///
    /// # Errors
    /// [`IndexError`] naming the key that is absent, not ready, or given twice.
    pub fn prepare_load(
        &self,
        request: RequestId,
        keys: &KeyBatch,
    ) -> Result<Vec<Slot>, ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        let tokens = inner.index.find_all(keys)?;
        for (pinned, &token) in tokens.iter().enumerate() {
            if let Err(error) = inner.index.pin(token, Pin::Load) {
                for &token in &tokens[..pinned] {
                    // Pinned just above, under this lock.
                    let _ = inner.index.unpin(token, Pin::Load);
                }
                return Err(error.into());
            }
        }
        for &token in tokens.iter().rev() {
            inner.index.touch(token, requester(request));
        }
        if !tokens.is_empty() {
            let state = inner.request(request);
            state.remember(keys.iter());
            state.loading.extend_from_slice(&tokens);
            let mut chain = std::mem::take(&mut state.chain);
            keys.iter().zip(&tokens).for_each(|(key, &token)| chain.follow(key, token));
            chain.keep(&inner.index);
            inner.request(request).chain = chain;
        }
        Ok(tokens.iter().map(|&token| inner.index.slot(token)).collect())
    }

    /// Gives the pins of `prepare_load` back; all or none.
    ///
    /// # Errors
    /// [`IndexError`] naming the key that has no pin of this request to give back.
    pub fn complete_load(&self, request: RequestId, keys: &KeyBatch) -> Result<(), ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        if keys.is_empty() {
            return Ok(());
        }
        let Some(state) = inner.requests.get_mut(&request) else {
            return Err(IndexError::NotPinned(keys.get(0).into()).into());
        };
        let tokens = given_back(&mut inner.index, &state.loading, keys)?;
        if state.loading.starts_with(&tokens) {
            state.loading.drain(..tokens.len());
        } else {
            // Marked by this call, which named each once: one pin of each comes back.
            let mut left: HashSet<Token> = tokens.iter().copied().collect();
            state.loading.retain(|token| !left.remove(token));
        }
        for &token in tokens.iter().rev() {
            inner.index.unpin(token, Pin::Load)?;
        }
        inner.primary.loaded_chunks += tokens.len() as u64;
        inner.end_if_done(request);
        Ok(())
    }

    /// Drops known keys, evicts what is needed and reserves a slot for every other key. `None`,
    /// and nothing changed, when the room cannot be made now. Keys of the call are not evicted.
    ///
    /// # Errors
    /// [`IndexError::Duplicate`].
    pub fn prepare_store(
        &self,
        request: RequestId,
        keys: &KeyBatch,
    ) -> Result<Option<PreparedStore>, ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        // Pins that came back may make the room.
        self.apply_results(inner);
        let offered = inner.offered(keys);
        inner.index.begin_call();
        let numbered = offered.admitted.iter().map(|&at| (at, keys.get(at as usize)));
        let mut chain = match inner.requests.get_mut(&request) {
            Some(state) => std::mem::take(&mut state.chain),
            None => Chain::default(),
        };
        let reserved = inner.index.reserve(numbered, Writer::Store, requester(request), &mut chain);
        if let Some(state) = inner.requests.get_mut(&request) {
            state.chain = chain.clone();
        }
        let Some(reserved) = reserved? else {
            inner.primary.stores_refused += 1;
            return Ok(None);
        };
        for &fingerprint in &offered.absent {
            inner.admission.offer(fingerprint);
        }
        inner.primary.not_admitted += (keys.len() - offered.admitted.len()) as u64;
        inner.primary.evictions += reserved.evicted.len() as u64;
        inner.events.push(EventKind::Removed, None, reserved.evicted.iter());
        if !reserved.indices.is_empty() {
            let state = inner.request(request);
            state.remember(reserved.indices.iter().map(|&at| keys.get(at as usize)));
            state.open_stores += reserved.indices.len();
            state.chain = chain;
        }
        Ok(Some(PreparedStore {
            indices: reserved.indices,
            slots: reserved.slots,
            evicted: reserved.evicted,
        }))
    }

    /// Makes prepared keys ready and cascades them to every tier; with `ok` false, drops them.
    ///
    /// # Errors
    /// [`IndexError`] naming the key that this request is not storing, or that was given twice.
    pub fn complete_store(
        &self,
        request: RequestId,
        keys: &KeyBatch,
        ok: bool,
    ) -> Result<(), ManagerError> {
        let jobs = {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            let tokens = inner.index.find_all(keys)?;
            let open = inner.requests.get(&request).map_or(0, |request| request.open_stores);
            for (position, &token) in tokens.iter().enumerate() {
                let storing = inner.index.state(token) == State::Writing(Writer::Store);
                if position >= open || !storing {
                    return Err(IndexError::NotPrepared(inner.index.key(token).into()).into());
                }
            }
            if tokens.is_empty() {
                return Ok(());
            }
            inner.request(request).open_stores -= tokens.len();
            for &token in tokens.iter().rev() {
                if ok {
                    inner.index.commit(token);
                } else {
                    inner.index.abort(token);
                }
            }
            let jobs = if ok {
                inner.primary.stored_chunks += tokens.len() as u64;
                inner.events.push(EventKind::Stored, None, keys.iter());
                self.cascade(inner, keys, tokens)
            } else {
                Vec::new()
            };
            inner.end_if_done(request);
            jobs
        };
        self.submit(jobs);
        Ok(())
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
            if let Some(state) = inner.requests.get_mut(&request)
                && state.used.len() < keys.len()
            {
                // A request's prefix grows: the longer one takes the shorter one in.
                state.used.clone_from(keys);
            }
        }
        self.tiers.iter().for_each(|slot| slot.tier.touch(keys));
        Ok(())
    }

    /// Ends a request: what it used is ordered leaf-first. A request that is not known is fine.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn request_finished(&self, request: RequestId) -> Result<(), ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        if let Some(state) = inner.requests.get_mut(&request) {
            state.finished = true;
            inner.end_if_done(request);
        }
        Ok(())
    }

    /// What was stored and removed since the last call.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn take_events(&self) -> Result<Vec<Event>, ManagerError> {
        let mut inner = self.inner.lock();
        Ok(inner.open()?.events.take())
    }

    /// The name of a tier in events: `None` is the primary one.
    pub fn tier_name(&self, tier: Option<usize>) -> &str {
        tier.map_or("primary", |number| &self.tiers[number].name)
    }

    /// All figures at one moment.
    pub fn stats(&self) -> Snapshot {
        let (mut primary, mut tiers, occupancy, requests) = {
            let inner = self.inner.lock();
            let requests = inner.requests.len();
            (inner.primary, inner.tiers.clone(), inner.index.occupancy(), requests)
        };
        primary.slots = u64::from(self.region.slots());
        primary.ready = occupancy.ready as u64;
        primary.writing = occupancy.writing as u64;
        primary.pinned = occupancy.pinned as u64;
        primary.detached = occupancy.detached as u64;
        primary.requests = requests as u64;
        for (figures, slot) in tiers.iter_mut().zip(&self.tiers) {
            figures.usage = slot.tier.usage();
        }
        Snapshot {
            primary,
            tiers: self
                .tiers
                .iter()
                .zip(tiers)
                .map(|(slot, figures)| (slot.name.clone(), slot.tier.medium(), figures))
                .collect(),
        }
    }

    /// Walks every invariant.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validate(&self) -> Result<(), String> {
        let inner = self.inner.lock();
        inner.index.validate()?;
        let promoting: usize = inner
            .jobs
            .values()
            .filter(|job| job.direction == Direction::Load && job.overdue)
            .map(|job| job.chunks.len())
            .sum();
        let detached = inner.index.occupancy().detached;
        if promoting != detached {
            return Err(format!("{detached} slots detached, late jobs hold {promoting}"));
        }
        Ok(())
    }
}

/// The entries of keys that a request gives back, each marked; an error if it does not hold one.
fn given_back(
    index: &mut Index,
    loading: &[Token],
    keys: &KeyBatch,
) -> Result<Vec<Token>, IndexError> {
    // As a rule they come back as they were taken, and then no key has to be looked up.
    let taken = keys.iter().zip(loading).all(|(key, &token)| index.key(token) == key);
    if !taken || keys.len() > loading.len() {
        let tokens = index.find_all(keys)?;
        let held: HashSet<Token> = loading.iter().copied().collect();
        let foreign = tokens.iter().zip(keys).find(|(token, _)| !held.contains(token));
        return match foreign {
            Some((_, key)) => Err(IndexError::NotPinned(key.into())),
            None => Ok(tokens),
        };
    }
    index.begin_call();
    let tokens = &loading[..keys.len()];
    for (&token, key) in tokens.iter().zip(keys) {
        if !index.mark(token) {
            return Err(IndexError::Duplicate(key.into()));
        }
    }
    Ok(tokens.to_vec())
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
#[path = "tests.rs"]
mod tests;
