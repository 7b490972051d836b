//! One tier behind a primary tier that somebody else manages.
//!
//! vLLM's manager keeps its own index and its own memory, and hands jobs to tiers. A [`SoloTier`]
//! lets one of ours take them: it is what is left of a manager when somebody else decides what is
//! where. It moves chunks between the slots it is told and the tier, checks them, and keeps a
//! tier that fails out of the way.
//!
//! # What is contained, and what is not
//! - What [`Manager`](super::Manager) does about a bad tier happens here too: panics are caught,
//!   a direction that keeps failing is switched off and probed, a chunk that did not come is in
//!   doubt, stores above a bound are refused, RETRY for too long is a miss.
//! - A load past its deadline can not be given up, since its slots are not ours to set aside: it
//!   ends when the tier lets go of it. Until then the tier is not asked for anything, so that no
//!   other request begins to wait for it.
//!
//! Memory: what a job takes, and a number for each request that waits for an answer.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::doubts::Doubts;
use super::figures::{Direction, Event, EventKind, Events};
use super::tier::Tier;
use super::{RequestId, TierSlot};
use crate::checksum::Checksum;
use crate::clock::Clock;
use crate::index::{NIL, Slot};
use crate::key::{KeyBatch, KeyError};
use crate::region::Region;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::tier::breaker::Breaker;
use crate::tier::{
    Chunks, Failure, JobId, JobParts, JobResult, LoadJob, Locality, Medium, News, Outcome,
    Presence, Results, StoreJob, Usage,
};

/// A call of a [`SoloTier`] that was refused; nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SoloError {
    /// A key that cannot be.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A number that a job has.
    #[error("job {0} is under way: give every job a number of its own")]
    Job(JobId),
    /// Slots that do not fit the keys or the memory.
    #[error(
        "{keys} keys came with slots {slots:?}: one different slot below {most} each is needed"
    )]
    Slots {
        /// How many keys.
        keys: usize,
        /// The slots.
        slots: Vec<Slot>,
        /// How many slots there are.
        most: u32,
    },
    /// Used after `shutdown`.
    #[error("this tier was shut down")]
    Closed,
}

/// The end of a job.
#[derive(Debug)]
pub struct Ended {
    /// Its number.
    pub job: JobId,
    /// What became of each chunk, in the job's order.
    pub outcomes: Vec<Outcome>,
    /// Bytes moved.
    pub bytes: u64,
    /// Worker time it took.
    pub busy: Duration,
}

struct Running {
    direction: Direction,
    keys: KeyBatch,
    cancelled: Arc<AtomicBool>,
    deadline: Instant,
    late: bool,
}

struct Inner {
    jobs: HashMap<JobId, Running>,
    ended: Vec<Ended>,
    breakers: [Breaker; 2],
    doubts: Doubts,
    /// Since when requests are told to ask again.
    waiting: HashMap<RequestId, Instant>,
    /// Bytes of stores under way.
    queued_bytes: u64,
    events: Events,
    closed: bool,
}

/// See the module. Shared by reference between threads.
pub struct SoloTier {
    region: Arc<Region>,
    tier: Tier,
    key_bytes: usize,
    results: Arc<Results>,
    clock: Clock,
    inner: Mutex<Inner>,
}

impl SoloTier {
    /// A tier behind the slots of `region`, for keys of `key_bytes`. Of its limits those count
    /// that are not about the primary tier: deadlines, the breaker's, `max_queued_bytes`.
    pub fn new(
        region: Arc<Region>,
        slot: TierSlot,
        key_bytes: usize,
        events: bool,
        clock: Clock,
    ) -> Self {
        let limits = &slot.limits;
        let inner = Inner {
            jobs: HashMap::new(),
            ended: Vec::new(),
            breakers: [Breaker::new(limits), Breaker::new(limits)],
            doubts: Doubts::new(limits.load_deadline),
            waiting: HashMap::new(),
            queued_bytes: 0,
            events: Events::new(events),
            closed: false,
        };
        Self {
            tier: Tier::new(slot, &region),
            region,
            key_bytes,
            results: Arc::new(Results::new(clock.clone())),
            clock,
            inner: Mutex::new(inner),
        }
    }

    /// Bytes a key.
    pub fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// What it keeps chunks on.
    pub fn medium(&self) -> Medium {
        self.tier.medium
    }

    /// Where.
    pub fn locality(&self) -> Locality {
        self.tier.locality
    }

    /// How full it is.
    pub fn usage(&self) -> Usage {
        self.tier.call("usage", |tier| tier.usage()).unwrap_or_default()
    }

    /// Whether the tier has a key, without waiting.
    ///
    /// # Errors
    /// [`SoloError::Closed`], and a key of another length.
    pub fn lookup(&self, request: RequestId, key: &[u8]) -> Result<Presence, SoloError> {
        let mut keys = KeyBatch::empty(self.key_bytes);
        keys.push(key)?;
        {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            self.settle(inner);
            let now = self.clock.now();
            let late = inner.jobs.values().any(|job| job.late && job.direction == Direction::Load);
            let doubted = !inner.doubts.is_empty() && inner.doubts.has(Checksum::of(key).0, now);
            if late || doubted || !inner.breakers[Direction::Load as usize].admits(now).0 {
                inner.waiting.remove(&request);
                return Ok(Presence::Miss);
            }
        }
        let mut presence = [Presence::Miss];
        self.tier.call("lookup", |tier| tier.lookup(request, &keys, &[0], &mut presence));
        let mut inner = self.inner.lock();
        let [answer] = presence;
        if answer == Presence::Retry {
            let now = self.clock.now();
            let since = *inner.waiting.entry(request).or_insert(now);
            if now.saturating_duration_since(since) >= self.tier.limits.lookup_deadline {
                return Ok(Presence::Miss);
            }
        }
        Ok(answer)
    }

    /// Hands a job to the tier; its end comes with [`SoloTier::finished`]. Stores that the tier
    /// can not take now end at once.
    ///
    /// # Errors
    /// [`SoloError`].
    ///
    /// # Safety
    /// Until the job's end was taken, nobody writes the slots of a store, and nobody else touches
    /// those of a load.
    pub unsafe fn submit(
        &self,
        direction: Direction,
        id: JobId,
        request: RequestId,
        keys: KeyBatch,
        slots: Vec<Slot>,
    ) -> Result<(), SoloError> {
        let most = self.region.slots();
        let mut seen = HashSet::with_capacity(slots.len());
        if keys.len() != slots.len() || !slots.iter().all(|&slot| slot < most && seen.insert(slot))
        {
            return Err(SoloError::Slots { keys: keys.len(), slots, most });
        }
        debug_assert_eq!(keys.key_bytes(), self.key_bytes);
        let cancelled = Arc::new(AtomicBool::new(false));
        {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            self.settle(inner);
            if inner.jobs.contains_key(&id) {
                return Err(SoloError::Job(id));
            }
            let now = self.clock.now();
            let limits = &self.tier.limits;
            let deadline = match direction {
                Direction::Load => limits.load_deadline,
                Direction::Store => {
                    let bytes = self.bytes(&keys);
                    let queued = inner.queued_bytes;
                    let full = queued > 0 && queued + bytes > self.tier.max_queued_bytes;
                    if full || !inner.breakers[Direction::Store as usize].admits(now).0 {
                        inner.refuse(id, keys.len());
                        return Ok(());
                    }
                    inner.queued_bytes += bytes;
                    limits.store_deadline
                }
            };
            inner.breakers[direction as usize].began(id);
            let running = Running {
                direction,
                keys: keys.clone(),
                cancelled: Arc::clone(&cancelled),
                deadline: now + deadline,
                late: false,
            };
            inner.jobs.insert(id, running);
        }
        // The index that these entries would be in is somebody else's.
        let tokens = vec![NIL; slots.len()];
        let chunks = Arc::new(Chunks::new(keys, tokens, slots));
        let (region, results) = (Arc::clone(&self.region), Arc::clone(&self.results));
        let parts = JobParts { id, request, chunks, region, results, cancelled };
        match direction {
            Direction::Store => {
                // SAFETY: the caller's promise.
                let job = unsafe { StoreJob::new(parts) };
                self.tier.call("submit_store", |tier| tier.submit_store(job));
            }
            Direction::Load => {
                // SAFETY: the caller's promise; the slots are distinct, as checked above.
                let job = unsafe { LoadJob::new(parts) };
                self.tier.call("submit_load", |tier| tier.submit_load(job));
            }
        }
        Ok(())
    }

    /// Marks keys as used.
    pub fn touch(&self, keys: &KeyBatch) {
        self.tier.call("touch", |tier| tier.touch(keys));
    }

    /// A request has ended: no job of it comes any more.
    pub fn finish_request(&self, request: RequestId) {
        self.inner.lock().waiting.remove(&request);
        self.tier.call("finish_request", |tier| tier.finish_request(request));
    }

    /// The jobs that ended since the last call. To be called once a step.
    pub fn finished(&self) -> Vec<Ended> {
        let mut news = News::default();
        self.tier.call("end_step", |tier| tier.end_step(&mut news));
        news.faults.iter().for_each(|&fault| self.tier.note(fault));
        let mut inner = self.inner.lock();
        inner.events.push(EventKind::Removed, None, news.removed.iter().map(AsRef::as_ref));
        self.settle(&mut inner);
        std::mem::take(&mut inner.ended)
    }

    /// Waits until no job is under way, or until `deadline`; false if one is.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        loop {
            {
                let mut inner = self.inner.lock();
                self.settle(&mut inner);
                if inner.jobs.is_empty() {
                    return true;
                }
            }
            if !self.results.wait_until(deadline) {
                return false;
            }
        }
    }

    /// What was stored and removed since the last call; nothing unless made with `events`.
    pub fn take_events(&self) -> Vec<Event> {
        self.inner.lock().events.take()
    }

    /// Drops what is queued, waits for workers that touch a slot, closes the tier. Says how many
    /// jobs it did not get back from the tier: as long as there is one, somebody may still touch
    /// the memory. Idempotent.
    pub fn shutdown(&self) -> usize {
        {
            let mut inner = self.inner.lock();
            inner.closed = true;
            inner.jobs.values().for_each(|job| job.cancelled.store(true, Ordering::Relaxed));
        }
        self.tier.call("shutdown", |tier| tier.shutdown());
        let mut inner = self.inner.lock();
        self.settle(&mut inner);
        inner.jobs.len()
    }

    fn bytes(&self, keys: &KeyBatch) -> u64 {
        (keys.len() * self.region.slot_bytes()) as u64
    }

    /// Takes the results that have arrived, and notes which jobs are late.
    fn settle(&self, inner: &mut Inner) {
        for result in self.results.take() {
            if let Some(job) = inner.jobs.remove(&result.job) {
                if job.direction == Direction::Store {
                    inner.queued_bytes -= self.bytes(&job.keys);
                }
                inner.end(&job, result);
            }
        }
        let now = self.clock.now();
        for (&id, job) in &mut inner.jobs {
            if !job.late && now >= job.deadline {
                job.late = true;
                job.cancelled.store(true, Ordering::Relaxed);
                inner.breakers[job.direction as usize].failed(Some(id), now);
            }
        }
        for noted in &self.tier.faults {
            for _ in 0..noted.swap(0, Ordering::Relaxed) {
                inner.breakers[Direction::Load as usize].failed(None, now);
            }
        }
    }
}

impl Inner {
    fn open(&mut self) -> Result<&mut Self, SoloError> {
        if self.closed { Err(SoloError::Closed) } else { Ok(self) }
    }

    /// Ends a job that the tier never got.
    fn refuse(&mut self, job: JobId, chunks: usize) {
        let outcomes = vec![Err(Failure::Lost); chunks];
        self.ended.push(Ended { job, outcomes, bytes: 0, busy: Duration::ZERO });
    }

    fn end(&mut self, job: &Running, result: JobResult) {
        if !job.late {
            let withdrawn = job.cancelled.load(Ordering::Relaxed);
            self.breakers[job.direction as usize].judge(&result, withdrawn);
        }
        for (key, outcome) in job.keys.iter().zip(&result.outcomes) {
            let chunk = || Checksum::of(key).0;
            match (job.direction, outcome) {
                (Direction::Load, Err(_)) => self.doubts.failed(chunk(), result.ended),
                (_, Ok(())) if !self.doubts.is_empty() => self.doubts.trust(chunk()),
                _ => {}
            }
        }
        self.events.push(EventKind::Removed, None, result.evicted.iter());
        if job.direction == Direction::Store {
            let done = job.keys.iter().zip(&result.outcomes).filter(|(_, outcome)| outcome.is_ok());
            self.events.push(EventKind::Stored, None, done.map(|(key, _)| key));
        }
        let JobResult { job, outcomes, bytes, busy, .. } = result;
        self.ended.push(Ended { job, outcomes, bytes, busy });
    }
}

impl Drop for SoloTier {
    fn drop(&mut self) {
        self.shutdown();
    }
}
