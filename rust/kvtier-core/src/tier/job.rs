//! Jobs: what a tier is handed, and how it reports back.
//!
//! A job is shared by the workers that move its chunks, one `Arc` each. Per chunk there is one
//! outcome, written once; when the last owner lets go, the outcomes become a [`JobResult`].

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::TierError;
use super::network::NetworkError;
use crate::checksum::Checksum;
use crate::clock::Clock;
use crate::index::{Slot, Token};
use crate::key::{KeyBatch, MIN_KEY_BYTES};
use crate::region::Region;
use crate::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use crate::sync::{Condvar, Mutex};

/// Numbers jobs, ascending.
pub type JobId = u64;

/// A number that the engine gives a request.
pub type RequestId = u64;

/// Why a chunk was not moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Failure {
    /// Nobody reported: dropped, cancelled, or the worker died.
    Lost = 0,
    /// Reading or writing failed.
    Io = 1,
    /// Its bytes are not those that were stored.
    Corrupt = 2,
    /// The tier has it no more.
    Missing = 3,
    /// The tier had no room.
    Full = 4,
}

impl Failure {
    /// All causes, in the order of their numbers, by name.
    pub const ALL: [(&str, Self); 5] = [
        ("lost", Self::Lost),
        ("io", Self::Io),
        ("corrupt", Self::Corrupt),
        ("missing", Self::Missing),
        ("full", Self::Full),
    ];
}

impl From<&TierError> for Failure {
    fn from(error: &TierError) -> Self {
        match error {
            TierError::Corrupt { .. } | TierError::BadCopy { .. } => Self::Corrupt,
            TierError::Missing(_) => Self::Missing,
            TierError::Busy(_) | TierError::Network(NetworkError::Full { .. }) => Self::Full,
            TierError::Io { source, .. }
                if source.kind() == std::io::ErrorKind::StorageFull
                    || source.kind() == std::io::ErrorKind::QuotaExceeded =>
            {
                Self::Full
            }
            _ => Self::Io,
        }
    }
}

/// What became of one chunk.
pub type Outcome = Result<(), Failure>;

const DONE: u8 = u8::MAX;

/// The chunks of one batch: shared by the jobs of one cascade.
#[derive(Debug)]
pub struct Chunks {
    /// Their keys.
    pub keys: KeyBatch,
    /// Their entries in the primary index.
    pub tokens: Vec<Token>,
    /// Their slots in the region.
    pub slots: Vec<Slot>,
    checksums: Box<[OnceLock<Checksum>]>,
}

impl Chunks {
    /// Chunks `keys[i]` at `slots[i]`, named `tokens[i]` in the primary index.
    pub fn new(keys: KeyBatch, tokens: Vec<Token>, slots: Vec<Slot>) -> Self {
        debug_assert!(keys.len() == slots.len() && keys.len() == tokens.len());
        let checksums = (0..slots.len()).map(|_| OnceLock::new()).collect();
        Self { keys, tokens, slots, checksums }
    }

    /// Number of chunks.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

/// The end of a job.
#[derive(Debug)]
pub struct JobResult {
    /// Which job.
    pub job: JobId,
    /// What became of each chunk, in the job's order.
    pub outcomes: Vec<Outcome>,
    /// Keys that the tier evicted for it, or of a load, whose copies it dropped since they were bad.
    pub evicted: KeyBatch,
    /// Bytes moved.
    pub bytes: u64,
    /// Worker time it took, summed over its chunks.
    pub busy: Duration,
    /// When its last owner let go.
    pub ended: Instant,
}

/// Where results go, and where the manager fetches them.
#[derive(Debug, Default)]
pub struct Results {
    queue: Mutex<VecDeque<JobResult>>,
    arrived: Condvar,
    waiting: AtomicBool,
    clock: Clock,
}

impl Results {
    /// An empty queue that stamps what it gets with the time of `clock`.
    pub fn new(clock: Clock) -> Self {
        Self { clock, ..Self::default() }
    }

    fn push(&self, result: JobResult) {
        let mut queue = self.queue.lock();
        queue.push_back(result);
        // Under the lock: who was woken by `wait_until` must find the flag set.
        self.waiting.store(true, Ordering::Release);
        drop(queue);
        self.arrived.notify_all();
    }

    /// Takes all results that have arrived. Costs one atomic load when there is none.
    pub fn take(&self) -> VecDeque<JobResult> {
        if !self.waiting.load(Ordering::Relaxed) || !self.waiting.swap(false, Ordering::Acquire) {
            return VecDeque::new();
        }
        std::mem::take(&mut *self.queue.lock())
    }

    /// Waits until a result is there, or `deadline`; false when none came.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        let mut queue = self.queue.lock();
        while queue.is_empty() {
            if self.arrived.wait_until(&mut queue, deadline).timed_out() {
                return !queue.is_empty();
            }
        }
        true
    }
}

/// What a job is made of.
pub struct JobParts {
    /// Its number.
    pub id: JobId,
    /// For which request it is.
    pub request: RequestId,
    /// What it moves.
    pub chunks: Arc<Chunks>,
    /// Where the slots of `chunks` are.
    pub region: Arc<Region>,
    /// Where its result goes.
    pub results: Arc<Results>,
    /// Set when nobody waits for the job any more: workers skip what is left of it.
    pub cancelled: Arc<AtomicBool>,
}

/// What both kinds of job share; a job of either kind derefs to it.
pub struct Job {
    parts: JobParts,
    outcomes: Box<[AtomicU8]>,
    tally: Mutex<Tally>,
}

struct Tally {
    busy: Duration,
    evicted: KeyBatch,
}

impl Job {
    fn new(parts: JobParts) -> Arc<Self> {
        let chunks = parts.chunks.len();
        let outcomes = (0..chunks).map(|_| AtomicU8::new(Failure::Lost as u8)).collect();
        let evicted = KeyBatch::empty(parts.chunks.keys.key_bytes());
        let tally = Mutex::new(Tally { busy: Duration::ZERO, evicted });
        Arc::new(Self { parts, outcomes, tally })
    }

    /// Its number.
    pub fn id(&self) -> JobId {
        self.parts.id
    }

    /// For which request it is.
    pub fn request(&self) -> RequestId {
        self.parts.request
    }

    /// Number of chunks.
    pub fn len(&self) -> usize {
        self.parts.chunks.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.parts.chunks.is_empty()
    }

    /// Whether nobody waits for it any more.
    pub fn is_cancelled(&self) -> bool {
        self.parts.cancelled.load(Ordering::Relaxed)
    }

    /// The flag that tells so, for jobs that are part of this one.
    pub fn cancelled(&self) -> &Arc<AtomicBool> {
        &self.parts.cancelled
    }

    /// Keys, slots and checksums.
    pub fn chunks(&self) -> &Arc<Chunks> {
        &self.parts.chunks
    }

    /// Where the slots are.
    pub fn region(&self) -> &Arc<Region> {
        &self.parts.region
    }

    /// The key of a chunk.
    pub fn key(&self, index: usize) -> &[u8] {
        self.parts.chunks.keys.get(index)
    }

    fn report(&self, index: usize, outcome: Outcome, busy: Duration) {
        let code = match outcome {
            Ok(()) => DONE,
            Err(failure) => failure as u8,
        };
        self.outcomes[index].store(code, Ordering::Release);
        self.tally.lock().busy += busy;
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let outcomes: Vec<Outcome> = self
            .outcomes
            .iter()
            .map(|code| match code.load(Ordering::Acquire) {
                DONE => Ok(()),
                code => Err(Failure::ALL[code as usize].1),
            })
            .collect();
        let moved = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        let tally = self.tally.get_mut();
        let evicted = std::mem::replace(&mut tally.evicted, KeyBatch::empty(MIN_KEY_BYTES));
        let results = &self.parts.results;
        results.push(JobResult {
            job: self.parts.id,
            bytes: (moved * self.parts.region.slot_bytes()) as u64,
            outcomes,
            evicted,
            busy: tally.busy,
            ended: results.clock.now(),
        });
    }
}

/// Chunks to take from the primary tier. Its slots are pinned until the last clone is gone.
#[derive(Clone)]
pub struct StoreJob(Arc<Job>);

/// Chunks to bring into the primary tier. Its slots belong to it until the last clone is gone.
#[derive(Clone)]
pub struct LoadJob(Arc<Job>);

impl Deref for StoreJob {
    type Target = Job;
    fn deref(&self) -> &Job {
        &self.0
    }
}

impl Deref for LoadJob {
    type Target = Job;
    fn deref(&self) -> &Job {
        &self.0
    }
}

impl StoreJob {
    /// A job over pinned slots.
    ///
    /// # Safety
    /// Until the job's result was taken from its queue, nobody writes the slots of its chunks.
    pub unsafe fn new(parts: JobParts) -> Self {
        Self(Job::new(parts))
    }

    /// The bytes of a chunk.
    pub fn bytes(&self, index: usize) -> &[u8] {
        let parts = &self.0.parts;
        // SAFETY: whoever made the job keeps the slots pinned until its result was taken, and
        // the result is only sent when the last owner of the job, so every borrow of it, is gone.
        unsafe { parts.region.slot(parts.chunks.slots[index]) }
    }

    /// The checksum of a chunk: computed by the first of all tiers that needs it.
    pub fn checksum(&self, index: usize) -> Checksum {
        let known = &self.0.parts.chunks.checksums[index];
        *known.get_or_init(|| Checksum::of_chunk(self.key(index), self.bytes(index)))
    }

    /// Reports a chunk, how long its work took, and what the tier evicted for it.
    pub fn report(
        &self,
        index: usize,
        outcome: Outcome,
        busy: Duration,
        evicted: Option<&KeyBatch>,
    ) {
        self.0.report(index, outcome, busy);
        if let Some(evicted) = evicted.filter(|evicted| !evicted.is_empty()) {
            self.0.tally.lock().evicted.append(evicted);
        }
    }
}

impl LoadJob {
    /// A job over slots that are being written by it.
    ///
    /// # Safety
    /// Until the job's result was taken from its queue, nobody but the job touches the slots of
    /// its chunks, and no slot occurs twice.
    pub unsafe fn new(parts: JobParts) -> Self {
        Self(Job::new(parts))
    }

    /// The place of a chunk.
    ///
    /// # Safety
    /// One worker at a time asks for the place of a chunk, and lets go of it before it delivers.
    #[expect(clippy::mut_from_ref, reason = "one worker a chunk, by the contract above")]
    pub unsafe fn place(&self, index: usize) -> &mut [u8] {
        let parts = &self.0.parts;
        // SAFETY: the slot is the job's alone by `LoadJob::new`, and the chunk this worker's by
        // the contract above.
        unsafe { parts.region.slot_mut(parts.chunks.slots[index]) }
    }

    /// Reports that the bytes of a chunk are in place, and the checksum they were stored with.
    /// The chunk counts as loaded only if key and bytes have this checksum.
    ///
    /// # Errors
    /// [`TierError::Corrupt`] if they have not.
    pub fn deliver(&self, index: usize, stored: Checksum, busy: Duration) -> Result<(), TierError> {
        let start = Instant::now();
        let parts = &self.0.parts;
        // SAFETY: the worker let go of the place before it delivers, and the job owns the slot.
        let bytes = unsafe { parts.region.slot(parts.chunks.slots[index]) };
        let good = Checksum::of_chunk(self.key(index), bytes) == stored;
        let outcome = if good { Ok(()) } else { Err(Failure::Corrupt) };
        self.0.report(index, outcome, busy + start.elapsed());
        if good {
            Ok(())
        } else {
            Err(TierError::Corrupt { what: "payload", key: self.key(index).into() })
        }
    }

    /// Tells that the tier dropped its copy of a chunk, which turned out bad.
    pub fn dropped(&self, index: usize) {
        // Of the job's own keys, so of the same length.
        let _ = self.0.tally.lock().evicted.push(self.key(index));
    }

    /// Reports a chunk that did not come.
    pub fn fail(&self, index: usize, failure: Failure, busy: Duration) {
        self.0.report(index, Err(failure), busy);
    }
}
