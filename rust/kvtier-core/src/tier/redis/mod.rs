//! The redis tier: chunks in Redis or Valkey, one server or a cluster.
//!
//! The server holds the data, evicts by its own policy, and may be shared: a chunk that is gone is
//! a miss, a value that is not the chunk is a miss and is removed. `docs/network.md` says which
//! server settings matter and what each failure looks like.
//!
//! # Invariants
//! - No call of an engine waits for a server: look-ups are answered from [`Known`], jobs are moved
//!   by tasks of the tier's [`Runtime`].
//! - A chunk is served only if its envelope names namespace and key, and its checksum is right.
//! - A chunk that is split is there only when all of its parts are.
//! - Each task ends before its job's deadline, whatever a server does.
//! - A node that fails costs other nodes nothing: it has connections, queue and breaker of its own,
//!   and work that waits for it holds no share of the [`Budget`].
//!
//! Cost: a look-up is a hash look-up a key; one that asks, one round trip a node for all keys. A
//! load or store is one exchange, or one and as many as it has further parts; no byte is copied
//! between slot and socket but by the kernel.
//!
//! | file | what |
//! |---|---|
//! | `settings.rs`, `endpoint.rs` | what is given |
//! | `connect.rs`, `wire.rs` | a connection: TLS, authentication, protocol |
//! | `node.rs` | a server: its connections and its breaker |
//! | `topology.rs` | which node has which key |
//! | `names.rs` | what chunks are called |
//! | `client.rs`, `failed.rs` | what can fail, and what follows: redirects, retries, hedges |
//! | `lookup.rs`, `transfer.rs` | the work |
//! | `audit.rs` | reading back what servers hold |

mod audit;
mod client;
mod connect;
mod endpoint;
mod failed;
mod lookup;
mod names;
mod node;
mod settings;
mod topology;
mod transfer;
mod wire;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use audit::{Checked, RedisAudit};
pub use settings::RedisSettings;

use super::network::{Budget, Counters, Known, KnownSettings, NamespaceId, Runtime};
use super::{
    LoadJob, Locality, Medium, Presence, RequestId, SecondaryTier, StoreJob, TierError, TierLimits,
    Usage,
};
use crate::clock::Clock;
use crate::key::KeyBatch;
use crate::log_limit::LogLimit;
use client::Client;
use connect::Connector;
use names::Names;
use node::NodeParts;
use topology::Topology;

/// Keys that are asked for at once, at most.
const MOST_ASKED: usize = 1 << 16;

/// See the module.
pub struct RedisTier {
    runtime: Runtime,
    client: Arc<Client>,
}

impl RedisTier {
    /// A tier for chunks of `chunk_bytes`, keys of `key_bytes` and a namespace. Connects to nothing
    /// yet: servers that are down are misses, not an error.
    ///
    /// # Errors
    /// Settings that can not be, certificates that can not be read.
    pub fn open(
        settings: &RedisSettings,
        name: &str,
        limits: &TierLimits,
        chunk_bytes: usize,
        key_bytes: usize,
        namespace: &str,
    ) -> Result<Self, TierError> {
        settings.check().map_err(TierError::Setting)?;
        let target = settings.target().map_err(TierError::Setting)?;
        let counters = Arc::new(Counters::default());
        let parts = NodeParts {
            connector: Connector::new(settings, &target)?,
            connections: settings.connections,
            limits: limits.clone(),
            counters: Arc::clone(&counters),
            log: LogLimit::default(),
        };
        let parts = Arc::new(parts);
        let known = KnownSettings {
            entries: settings.known_keys,
            asking: MOST_ASKED.min(settings.known_keys / 2),
            present_for: Duration::from_secs_f64(settings.present_for_s),
            absent_for: Duration::from_secs_f64(settings.absent_for_s),
            patience: limits.lookup_deadline,
        };
        let namespace = NamespaceId::new(namespace, chunk_bytes, key_bytes);
        Ok(Self {
            runtime: Runtime::new(name, settings.threads),
            client: Arc::new(Client {
                topology: Arc::new(Topology::new(target.seeds, Arc::clone(&parts))),
                known: Known::new(known, Clock::system()),
                budget: Budget::new(settings.max_in_flight_bytes),
                counters,
                parts,
                namespace,
                names: Names::new(&settings.prefix, namespace),
                limits: limits.clone(),
                chunk_bytes,
                part_bytes: settings.part_bytes,
                ttl_s: settings.ttl_s,
                hedge_after: settings.hedge_after(),
            }),
        })
    }

    /// Starts work; what it owns is dropped if the runtime refuses, which reports its chunks.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Err(error) = self.runtime.spawn(work) {
            self.client.parts.failed(&error);
        }
    }
}

impl SecondaryTier for RedisTier {
    fn medium(&self) -> Medium {
        Medium::Network
    }

    fn locality(&self) -> Locality {
        Locality::Remote
    }

    fn lookup(
        &self,
        _request: RequestId,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) {
        if let Some(question) = self.client.known.lookup(keys, wanted, presence) {
            self.spawn(Arc::clone(&self.client).ask(question));
        }
    }

    fn submit_store(&self, job: StoreJob) {
        let (client, begun) = (Arc::clone(&self.client), Instant::now());
        self.spawn(async move {
            for index in 0..job.len() {
                let (client, job) = (Arc::clone(&client), job.clone());
                tokio::spawn(async move { client.store_chunk(&job, index, begun).await });
            }
        });
    }

    fn submit_load(&self, job: LoadJob) {
        let (client, begun) = (Arc::clone(&self.client), Instant::now());
        self.spawn(async move {
            for index in 0..job.len() {
                let (client, job) = (Arc::clone(&client), job.clone());
                tokio::spawn(async move { client.load_chunk(&job, index, begun).await });
            }
        });
    }

    /// Nothing: a server counts a read as a use by itself, and one that is not read is not told.
    fn touch(&self, _keys: &KeyBatch) {}

    /// Nothing: the server's memory has a bound of its own, and others share it.
    fn usage(&self) -> Usage {
        Usage::default()
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.client.counters.all()
    }

    fn shutdown(&self) {
        self.runtime.close();
    }
}
