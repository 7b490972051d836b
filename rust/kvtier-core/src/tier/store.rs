//! A tier out of a place for chunks: [`ChunkStore`] is the place, [`StoreTier`] the threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lanes::Lane;
use super::workers::Workers;
use super::{
    Failure, LoadJob, Medium, Presence, RequestId, SecondaryTier, StoreJob, TierError, Usage,
};
use crate::checksum::Checksum;
use crate::key::KeyBatch;
use crate::log_limit::{LogLimit, limited};

/// A bounded place for chunks of one size. Called from several threads at once; `put` and `get`
/// may block on the medium.
pub trait ChunkStore: Send + Sync + 'static {
    /// What it is on.
    fn medium(&self) -> Medium;
    /// Says for each of `keys[wanted[i]]` whether it is here. Memory only, no I/O.
    fn lookup(&self, keys: &KeyBatch, wanted: &[u32], presence: &mut [Presence]);
    /// Keeps a chunk, evicting as needed; returns the keys that had to go. A key that is here
    /// already counts as used, and nothing is written.
    ///
    /// # Errors
    /// [`TierError`]; the store then has what it had, less what it evicted.
    fn put(
        &self,
        key: &[u8],
        bytes: &[u8],
        checksum: impl FnOnce() -> Checksum,
    ) -> Result<KeyBatch, TierError>;
    /// Brings a chunk to `place` and says with which checksum it was stored. Does not compare:
    /// [`LoadJob::deliver`] does.
    ///
    /// # Errors
    /// [`TierError`]; `place` then holds any bytes.
    fn get(&self, key: &[u8], place: &mut [u8]) -> Result<Checksum, TierError>;
    /// Removes a copy that turned out bad; false if it is not here, or somebody still reads it.
    fn discard(&self, key: &[u8]) -> bool;
    /// Marks keys as used.
    fn touch(&self, keys: &KeyBatch);
    /// How full it is.
    fn usage(&self) -> Usage;
    /// Gives the medium back; nothing is running any more.
    fn close(&self);
}

/// A [`SecondaryTier`] that moves chunks with threads of its own, one task a chunk.
pub struct StoreTier<S> {
    front: Arc<Front<S>>,
    workers: Workers,
}

/// What the workers share.
struct Front<S> {
    store: S,
    log: LogLimit,
}

impl<S: ChunkStore> StoreTier<S> {
    /// Puts `threads` threads in front of `store`.
    ///
    /// # Errors
    /// When the threads cannot be started.
    pub fn start(store: S, threads: usize) -> std::io::Result<Self> {
        Ok(Self {
            workers: Workers::start(store.medium().as_str(), threads)?,
            front: Arc::new(Front { store, log: LogLimit::default() }),
        })
    }
}

impl<S: ChunkStore> SecondaryTier for StoreTier<S> {
    fn medium(&self) -> Medium {
        self.front.store.medium()
    }

    fn lookup(
        &self,
        _request: RequestId,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) {
        self.front.store.lookup(keys, wanted, presence);
    }

    fn submit_store(&self, job: StoreJob) {
        let tasks = (0..job.len()).map(|index| {
            let (front, job) = (Arc::clone(&self.front), job.clone());
            Box::new(move || store_chunk(&front.store, &front.log, &job, index))
                as Box<dyn FnOnce() + Send>
        });
        self.workers.queue(Lane::Store, tasks);
    }

    fn submit_load(&self, job: LoadJob) {
        let tasks = (0..job.len()).map(|index| {
            let (front, job) = (Arc::clone(&self.front), job.clone());
            Box::new(move || load_chunk(&front.store, &front.log, &job, index))
                as Box<dyn FnOnce() + Send>
        });
        self.workers.queue(Lane::Load, tasks);
    }

    fn touch(&self, keys: &KeyBatch) {
        self.front.store.touch(keys);
    }

    fn usage(&self) -> Usage {
        self.front.store.usage()
    }

    fn shutdown(&self) {
        // A worker that is stuck in the medium still uses the store: it stays open, and owned.
        if self.workers.close() {
            self.front.store.close();
        }
    }
}

fn store_chunk<S: ChunkStore>(store: &S, log: &LogLimit, job: &StoreJob, index: usize) {
    if job.is_cancelled() {
        return job.report(index, Err(Failure::Lost), Duration::ZERO, None);
    }
    let start = Instant::now();
    let (outcome, evicted) =
        match store.put(job.key(index), job.bytes(index), || job.checksum(index)) {
            Ok(evicted) => (Ok(()), Some(evicted)),
            Err(error) => {
                limited!(log, warn, "store failed: {error}");
                (Err(Failure::from(&error)), None)
            }
        };
    job.report(index, outcome, start.elapsed(), evicted.as_ref());
}

fn load_chunk<S: ChunkStore>(store: &S, log: &LogLimit, job: &LoadJob, index: usize) {
    if job.is_cancelled() {
        return job.fail(index, Failure::Lost, Duration::ZERO);
    }
    let start = Instant::now();
    // SAFETY: this task is the only one for this chunk, and `place` ends with the call.
    let got = store.get(job.key(index), unsafe { job.place(index) });
    let delivered = match got {
        Ok(stored) => job.deliver(index, stored, start.elapsed()),
        Err(error) => {
            job.fail(index, Failure::from(&error), start.elapsed());
            Err(error)
        }
    };
    if let Err(error) = delivered {
        limited!(log, warn, "load failed: {error}");
        let bad = matches!(error, TierError::Corrupt { .. } | TierError::Missing(_));
        if bad && store.discard(job.key(index)) {
            job.dropped(index);
        }
    }
}
