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

mod config;
mod file;
mod format;
mod job;
mod memory;
mod store;
mod workers;

use std::path::PathBuf;

pub use config::{Place, TierConfig, TierConfigError};
pub use file::{FileStore, FileStoreConfig};
pub use job::{Chunks, Failure, JobId, JobResult, LoadJob, Outcome, Results, StoreJob};
pub use memory::MemoryStore;
pub use store::{ChunkStore, StoreTier};

use crate::index::IndexError;
use crate::key::{HexKey, KeyBatch};
use crate::region::RegionError;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// Host memory.
    Memory,
    /// Files on a local device.
    File,
}

impl Medium {
    /// The name in figures and events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::File => "file",
        }
    }
}

/// How full a tier is, and what it did by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes it may take.
    pub capacity_bytes: u64,
    /// Bytes it takes.
    pub used_bytes: u64,
    /// Chunks it holds.
    pub chunks: u64,
}

/// A tier behind the primary one. Every method returns at once: transfers run on the tier's own
/// threads. Methods are called without any lock of the manager.
pub trait SecondaryTier: Send + Sync {
    /// What it keeps chunks on.
    fn medium(&self) -> Medium;
    /// Says for each of `keys[wanted[i]]` whether it is here, in `presence[i]`.
    fn lookup(&self, keys: &KeyBatch, wanted: &[u32], presence: &mut [Presence]);
    /// Takes chunks from their slots. The slots are pinned until the job resolves.
    fn submit_store(&self, job: StoreJob);
    /// Brings chunks into their slots, which are the job's alone until it resolves.
    fn submit_load(&self, job: LoadJob);
    /// Marks keys as used.
    fn touch(&self, keys: &KeyBatch);
    /// How full it is.
    fn usage(&self) -> Usage;
    /// Drops what is queued, ends what runs, and joins the threads. Idempotent.
    fn shutdown(&self);
}

/// A tier that could not be opened, or an operation of a tier that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// Reading or writing failed.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Data of somebody else.
    #[error(
        "{path} holds another namespace, use another directory: {differences}\n  found:    {found}\n  \
         expected: {expected}",
        path = path.display()
    )]
    Identity {
        /// The store.
        path: PathBuf,
        /// The fields that differ, with both values.
        differences: String,
        /// Whose it is.
        found: String,
        /// Whose it should be.
        expected: String,
    },
    /// Another process has it open.
    #[error("{path} is in use by process {owner}: one process owns a store at a time", path = path.display())]
    Locked {
        /// The store.
        path: PathBuf,
        /// The owner's pid, or what is known of it.
        owner: String,
    },
    /// Less than it needs to work at all.
    #[error(
        "capacity_bytes = {given} of the {medium} tier is less than it needs for one chunk: give it \
         at least {needed}"
    )]
    Capacity {
        /// The tier's medium.
        medium: &'static str,
        /// Bytes given.
        given: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// Less on the device than the tier may use.
    #[error(
        "capacity_bytes = {wanted} asked for, but {path} has room for {available} bytes: lower the \
         capacity or use another directory", path = path.display()
    )]
    DeviceTooSmall {
        /// The store.
        path: PathBuf,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes there are, what the store holds already included.
        available: u64,
    },
    /// The bytes are not those that were stored.
    #[error("{what} of chunk {key} is damaged")]
    Corrupt {
        /// Which part.
        what: &'static str,
        /// Whose.
        key: HexKey,
    },
    /// The chunk is not here any more.
    #[error("chunk {0} is gone")]
    Missing(HexKey),
    /// Every slot is being read or written.
    #[error("no slot can be freed for chunk {0} now")]
    Busy(HexKey),
    /// The index refused.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The memory could not be had.
    #[error(transparent)]
    Region(#[from] RegionError),
}
