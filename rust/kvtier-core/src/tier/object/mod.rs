//! The object tier: chunks in a bucket of S3 or a store that speaks its protocol, of Google's or
//! Microsoft's, or in a directory that several machines mount.
//!
//! One object a chunk. Look-ups are answered from an [`Inventory`], which a listing fills in the
//! background; no look-up costs a request. Loads and stores are tasks of a [`Runtime`] of the
//! tier's own, one a chunk, bounded by connections and by bytes in each direction, so that neither
//! waits for the other. A request is tried again, with jitter, while its job's deadline allows it.
//!
//! A store is *if absent*: a key is a hash of what it names, so what is there is the same chunk.
//! Capacity and age are left to the rules of the bucket.
//!
//! | file | what |
//! |---|---|
//! | `settings.rs` | the fields, and the client they make |
//! | `layout.rs` | what an object is called |
//! | `inventory.rs` | what is known to be there |
//! | `listing.rs` | the task that lists |
//! | `transfer.rs` | one chunk, there and back |
//! | `cause.rs` | what an error means |
//! | `audit.rs` | `kvtier verify` |
//!
//! Cost: stores send the slot's own bytes; loads copy each byte once, from the buffer it was
//! received into.

mod audit;
mod cause;
mod inventory;
mod layout;
mod listing;
mod settings;
mod transfer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::ObjectStore;
use tokio::sync::{Semaphore, SemaphorePermit};

pub use audit::ObjectAudit;
pub use settings::ObjectSettings;

use self::inventory::Inventory;
use self::layout::Layout;
use self::settings::Opened;
use self::transfer::{load_chunk, store_chunk};
use super::network::{Budget, Counted, Counters, Runtime, Share};
use super::{
    LoadJob, Locality, Medium, Presence, RequestId, SecondaryTier, StoreJob, TierError, TierLimits,
    Usage,
};
use crate::clock::Clock;
use crate::key::KeyBatch;
use crate::log_limit::{LogLimit, limited};
use crate::sync::atomic::{AtomicBool, Ordering};

/// The part of a deadline of the manager's that a job has: it answers before it is given up.
const IN_TIME: f64 = 0.9;

/// A [`SecondaryTier`] over a bucket; see the module.
pub struct ObjectTier {
    shared: Arc<Shared>,
    runtime: Runtime,
    locality: Locality,
    listing: AtomicBool,
}

/// What its tasks share.
struct Shared {
    name: String,
    /// What messages call the bucket.
    node: String,
    store: Arc<dyn ObjectStore>,
    layout: Layout,
    inventory: Inventory,
    loads: Gate,
    stores: Gate,
    part_bytes: u64,
    /// Whether the server stores only what is absent, as far as is known.
    conditional_put: AtomicBool,
    limits: TierLimits,
    counters: Counters,
    log: LogLimit,
}

/// How much is under way in one direction at once.
struct Gate {
    connections: Semaphore,
    bytes: Budget,
}

impl Gate {
    /// Waits for a turn.
    async fn take(&self, bytes: u64) -> (Option<SemaphorePermit<'_>>, Share) {
        // The semaphore is never closed.
        (self.connections.acquire().await.ok(), self.bytes.take(bytes).await)
    }
}

impl Shared {
    /// Counts a failure by its cause.
    fn count(&self, error: &TierError) {
        match error {
            TierError::Network(error) => self.counters.failed(error),
            TierError::BadCopy { bad, .. } => self.counters.bad(*bad),
            TierError::Missing(_) => self.counters.count(Counted::Gone),
            _ => {}
        }
    }
}

impl ObjectTier {
    /// Opens the tier. Nobody is asked and no thread begins before its first use.
    ///
    /// # Errors
    /// [`TierError::Setting`].
    pub fn open(
        settings: &ObjectSettings,
        name: &str,
        limits: &TierLimits,
        chunk_bytes: usize,
        key_bytes: usize,
        namespace: &str,
    ) -> Result<Self, TierError> {
        let Opened { store, prefix, locality, name: node } = settings.open()?;
        let gate = || Gate {
            connections: Semaphore::new(settings.connections),
            bytes: Budget::new(settings.max_in_flight_bytes),
        };
        let shared = Shared {
            name: name.to_owned(),
            node,
            store,
            layout: Layout::new(&prefix, namespace, chunk_bytes, key_bytes),
            inventory: Inventory::new(
                settings.known_keys,
                Duration::from_secs_f64(settings.listing_interval_s),
                limits.lookup_deadline,
                Clock::system(),
            ),
            loads: gate(),
            stores: gate(),
            part_bytes: settings.part_bytes,
            conditional_put: AtomicBool::new(settings.conditional_put),
            limits: limits.clone(),
            counters: Counters::default(),
            log: LogLimit::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            runtime: Runtime::new(name, settings.threads),
            locality,
            listing: AtomicBool::new(false),
        })
    }

    /// Starts work; if that can not be, what it owns is dropped, and its chunk is lost.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Err(error) = self.runtime.spawn(work) {
            limited!(self.shared.log, warn, "tier {:?}: {error}", self.shared.name);
        }
    }
}

impl SecondaryTier for ObjectTier {
    fn medium(&self) -> Medium {
        Medium::Network
    }

    fn locality(&self) -> Locality {
        self.locality
    }

    fn lookup(
        &self,
        _request: RequestId,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) {
        let listing = self.shared.inventory.lookup(keys, wanted, presence);
        if listing && !self.listing.swap(true, Ordering::Relaxed) {
            self.spawn(listing::keep(Arc::clone(&self.shared)));
        }
    }

    fn submit_store(&self, job: StoreJob) {
        let deadline = Instant::now() + self.shared.limits.store_deadline.mul_f64(IN_TIME);
        for index in 0..job.len() {
            let (shared, job) = (Arc::clone(&self.shared), job.clone());
            self.spawn(async move { store_chunk(&shared, &job, index, deadline).await });
        }
    }

    fn submit_load(&self, job: LoadJob) {
        let deadline = Instant::now() + self.shared.limits.load_deadline.mul_f64(IN_TIME);
        for index in 0..job.len() {
            let (shared, job) = (Arc::clone(&self.shared), job.clone());
            self.spawn(async move { load_chunk(&shared, &job, index, deadline).await });
        }
    }

    fn touch(&self, _keys: &KeyBatch) {
        // What goes first is for the bucket's rules to say.
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.shared.counters.all()
    }

    fn shutdown(&self) {
        self.runtime.close();
    }
}
