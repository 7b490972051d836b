//! What is behind the primary tier: the contract, and the tiers that keep it.
//!
//! A tier is handed *jobs*. A job owns everything its transfer needs: the keys, the slots, and a
//! handle to the region, so the mapping outlives it. It is a token that resolves itself: whoever
//! works on it reports chunk by chunk, and when the last owner drops it, its result goes to the
//! manager, exactly once. A chunk nobody reported counts as failed. So a job cannot be lost, be
//! reported twice, or be reported under another's number: there is no call to do it with.
//!
//! A chunk that leaves the primary tier gets a checksum, once, by the first worker that needs
//! it. A chunk that comes back can only be reported by [`LoadJob::deliver`], which compares.

pub(crate) mod breaker;
mod config;
mod crew;
mod error;
mod faulty;
mod file;
mod io;
mod job;
mod lanes;
mod limits;
mod memory;
mod namespace;
pub mod network;
mod object;
mod redis;
mod store;
mod workers;

pub use breaker::BreakerState;
pub use config::{OpenForeign, Place, TierConfig, TierConfigError};
pub use error::TierError;
pub use faulty::{Faults, FaultyTier};
pub use file::{Audit, Distribution, FileSettings, FileTier, Finding, Inspection, inspect};
pub use io::{DirectKind, IoKind};
pub use job::{
    Chunks, Failure, Job, JobId, JobParts, JobResult, LoadJob, Outcome, RequestId, Results,
    StoreJob,
};
pub use limits::{Offload, Shed, TierLimits};
pub use memory::MemoryStore;
pub use object::{ObjectAudit, ObjectSettings, ObjectTier};
pub use redis::{Checked, RedisAudit, RedisSettings, RedisTier};
pub use store::{ChunkStore, StoreTier};

use crate::key::KeyBatch;

/// What a tier knows of a key, without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Not here.
    Miss,
    /// Here.
    Hit,
    /// Not known yet: ask again in a later step.
    Retry,
}

/// What a tier keeps its chunks on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Host memory.
    Memory,
    /// Files.
    File,
    /// A store behind a network protocol.
    Network,
}

impl Medium {
    /// Every medium, by its name in settings, figures and events.
    pub const ALL: [(&str, Self); 3] =
        [("memory", Self::Memory), ("file", Self::File), ("network", Self::Network)];

    /// The name in settings, figures and events.
    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// Where a tier's chunks lie, seen from this machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Locality {
    /// On this machine.
    #[default]
    Local,
    /// On another one.
    Remote,
}

impl Locality {
    /// Every locality, by its name in settings and figures.
    pub const ALL: [(&str, Self); 2] = [("local", Self::Local), ("remote", Self::Remote)];

    /// The name in settings and figures.
    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// How full a tier is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes it may take.
    pub capacity_bytes: u64,
    /// Bytes it takes.
    pub used_bytes: u64,
    /// Chunks it holds.
    pub chunks: u64,
}

/// How a tier broke the contract. Each is contained, counted, and held against the tier by its
/// breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Fault {
    /// A method panicked, or raised.
    Raised = 0,
    /// A result for a job that it does not have.
    UnknownJob = 1,
    /// A second result for a job.
    RepeatedJob = 2,
    /// A result with a key that is not the job's.
    ForeignKey = 3,
    /// A call that did not come back in time.
    Blocked = 4,
    /// A value of another type or range than the contract asks for.
    BadValue = 5,
}

impl Fault {
    /// All kinds, in the order of their numbers, by name.
    pub const ALL: [(&str, Self); 6] = [
        ("raised", Self::Raised),
        ("unknown_job", Self::UnknownJob),
        ("repeated_job", Self::RepeatedJob),
        ("foreign_key", Self::ForeignKey),
        ("blocked", Self::Blocked),
        ("bad_value", Self::BadValue),
    ];
}

/// What a tier tells at the end of a step, besides the results of its jobs.
#[derive(Debug, Default)]
pub struct News {
    /// Keys that it removed by itself, not for a job.
    pub removed: Vec<Box<[u8]>>,
    /// Ways in which it broke the contract since it was asked last.
    pub faults: Vec<Fault>,
}

/// A tier behind the primary one. Every method returns at once: transfers run on the tier's own
/// threads. Methods are called without any lock of the manager, from several threads.
///
/// A tier may panic, answer nonsense, or never finish a job: the manager counts it, takes the
/// answer as a miss, and its breaker keeps the tier out of the way. It can not hold a request up.
/// What it must not do is touch a slot after it let go of the slot's job.
pub trait SecondaryTier: Send + Sync {
    /// What it keeps chunks on.
    fn medium(&self) -> Medium;
    /// Where.
    fn locality(&self) -> Locality {
        Locality::Local
    }
    /// Says for each of `keys[wanted[i]]` whether it is here, in `presence[i]`, for `request`.
    /// A tier that has to ask elsewhere says [`Presence::Retry`] until it knows.
    fn lookup(
        &self,
        request: RequestId,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    );
    /// Takes chunks from their slots. The slots are pinned until the job resolves.
    fn submit_store(&self, job: StoreJob);
    /// Brings chunks into their slots, which are the job's alone until it resolves.
    fn submit_load(&self, job: LoadJob);
    /// Marks keys as used.
    fn touch(&self, keys: &KeyBatch);
    /// Called once a step: a tier that polls for completions does so now, and tells its news.
    fn end_step(&self, _news: &mut News) {}
    /// Called at the end of the step after a request ended, when its last job was submitted; jobs
    /// may still run. An engine of several threads may submit one at the same moment.
    fn finish_request(&self, _request: RequestId) {}
    /// How full it is.
    fn usage(&self) -> Usage;
    /// What else it counted since it was opened, by name.
    fn details(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// Drops what is queued, ends what runs, and joins the threads, but for threads that do not
    /// come back within seconds: those keep what they use alive. Idempotent.
    fn shutdown(&self);
}
