//! The file tier: chunks in preallocated segments of one directory, bounded, verified, found
//! again at restart. `docs/file-format.md` states the bytes, the order of writes, and what a
//! crash can lose.
//!
//! | file | answers |
//! |---|---|
//! | `config` | what can be set? |
//! | `format`, `layout` | which bytes, and where? |
//! | `identity`, `owner` | whose store is it, and who has it open? |
//! | `segments`, `headers`, `facts` | one module a kind of file |
//! | `slots` | what is remembered of a slot in memory? |
//! | `store` | the three kinds of files and the index, kept in step |
//! | `recovery` | what was there? |
//! | `operation` | what happens before and after a chunk's transfer? |
//! | `flusher` | when does it reach the disk? |
//! | `audit` | is it all as it should be? |
//!
//! Memory: the index of the policy (about 80 bytes a chunk with LRU) and 28 bytes a slot.

mod audit;
mod config;
mod facts;
mod flusher;
mod format;
mod headers;
mod identity;
mod layout;
mod operation;
mod owner;
mod recovery;
mod segments;
mod slots;
mod space;
mod store;

use std::path::Path;
use std::sync::Arc;

pub use audit::{Audit, Distribution, Finding, Inspection, inspect};
pub use config::FileSettings;

use super::io::{self, Engine, Operation};
use super::lanes::Lane;
use super::{LoadJob, Medium, Presence, RequestId, SecondaryTier, StoreJob, TierError, Usage};
use crate::key::KeyBatch;
use crate::region::SLOT_ALIGNMENT;
use flusher::Flusher;
use operation::{LoadChunk, StoreChunk};
use store::{Chunk, Owned, Store};

/// A [`SecondaryTier`] on files.
pub struct FileTier {
    store: Arc<Store>,
    engine: Box<dyn Engine>,
    flusher: Flusher,
}

impl FileTier {
    /// Opens the store of `settings`, or makes it, for chunks of `chunk_bytes`, keys of `key_bytes` and a
    /// namespace.
    ///
    /// # Errors
    /// [`TierError`]: a capacity below one chunk or above what the device has, a directory that
    /// cannot be made or written, that another process owns, that is of another format version,
    /// or that holds another identity.
    pub fn open(
        settings: &FileSettings,
        chunk_bytes: usize,
        key_bytes: usize,
        namespace: &str,
    ) -> Result<Self, TierError> {
        if !chunk_bytes.is_multiple_of(SLOT_ALIGNMENT) || chunk_bytes == 0 {
            return Err(TierError::Setting(format!(
                "chunks of {chunk_bytes} bytes: the file tier takes multiples of {SLOT_ALIGNMENT}, \
                 which the slots of a region are"
            )));
        }
        let chunk = Chunk { bytes: chunk_bytes, key_bytes, namespace };
        let owned = Owned::take(settings, &chunk)?;
        let io::Chosen { engine, direct, description } =
            io::start(settings.io, settings.direct, settings.threads, &settings.path)?;
        let tier = Self::with_engine(owned, settings, engine, direct)?;
        log::info!("file tier {}: {description}", settings.path.display());
        Ok(tier)
    }

    fn with_engine(
        owned: Owned,
        settings: &FileSettings,
        engine: Box<dyn Engine>,
        direct: bool,
    ) -> Result<Self, TierError> {
        let (store, facts) = Store::open(owned, settings, direct)?;
        let flusher = Flusher::start(Arc::clone(&store), facts, settings.flush_interval)
            .map_err(|source| store.failed("starting a thread for", source))?;
        Ok(Self { store, engine, flusher })
    }
}

impl SecondaryTier for FileTier {
    fn medium(&self) -> Medium {
        Medium::File
    }

    fn directory(&self) -> Option<&Path> {
        Some(self.store.directory())
    }

    fn lookup(
        &self,
        _request: RequestId,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) {
        self.store.lookup(keys, wanted, presence);
    }

    fn submit_store(&self, job: StoreJob) {
        let mut chunks = (0..job.len())
            .map(|index| Box::new(StoreChunk::new(&self.store, &job, index)) as Box<dyn Operation>);
        self.engine.submit(Lane::Store, &mut chunks);
    }

    fn submit_load(&self, job: LoadJob) {
        let mut chunks = (0..job.len())
            .map(|index| Box::new(LoadChunk::new(&self.store, &job, index)) as Box<dyn Operation>);
        self.engine.submit(Lane::Load, &mut chunks);
    }

    fn touch(&self, keys: &KeyBatch) {
        self.store.touch(keys);
    }

    fn usage(&self) -> Usage {
        self.store.usage()
    }

    fn shutdown(&self) {
        // What is stuck in the disk still uses the store: it stays open, and owned.
        let idle = self.engine.close();
        if self.flusher.close() && idle {
            self.store.release();
        }
    }
}

#[cfg(test)]
mod bench;
#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod tests;
