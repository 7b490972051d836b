//! Reading back what servers hold, whoever wrote it: is every chunk what its header says?
//!
//! The names of a prefix are listed master by master with SCAN, a page at a time, and each chunk
//! is read whole. Servers may be in use; a chunk that goes meanwhile is passed over. Runs on the
//! thread that calls, on a runtime of its own that has no threads.
//!
//! Memory: one page of names, and one chunk.

use std::io::IoSlice;
use std::sync::Arc;

use redis::Value;
use tokio::runtime::{Builder, Runtime};

use super::connect::Connector;
use super::failed::Failed;
use super::names::Names;
use super::node::{Lease, Node, NodeParts, Work};
use super::settings::RedisSettings;
use super::topology::Topology;
use crate::checksum::Checksum;
use crate::log_limit::LogLimit;
use crate::tier::network::{BadCopy, Counters, ENVELOPE_BYTES, Envelope, NetworkError};
use crate::tier::{Finding, TierError, TierLimits};

/// Names a page of SCAN looks at.
const PAGE: usize = 256;
/// The largest value that is read: a header can say anything.
const MOST_BYTES: u64 = 1 << 32;

/// See the module.
pub struct RedisAudit {
    threads: Runtime,
    masters: Vec<Arc<Node>>,
    pattern: String,
    prefix: String,
    repair: bool,
    /// The master that is read, and where in it.
    at: usize,
    cursor: u64,
    left: u64,
}

/// What one step found.
#[derive(Debug, Default)]
pub struct Checked {
    /// Chunks that were read.
    pub chunks: u64,
    /// Those that are bad.
    pub bad: Vec<Finding>,
}

impl RedisAudit {
    /// Connects. At most `sample` chunks will be read; with `repair` bad ones are removed.
    ///
    /// # Errors
    /// Settings that can not be, servers that are not reached or refuse.
    pub fn open(
        settings: &RedisSettings,
        sample: Option<u64>,
        repair: bool,
    ) -> Result<Self, TierError> {
        let target = settings.target().map_err(TierError::Setting)?;
        let parts = Arc::new(NodeParts {
            connector: Connector::new(settings, &target)?,
            connections: 1,
            limits: TierLimits { breaker_failures: 0, ..TierLimits::default() },
            counters: Arc::new(Counters::default()),
            log: LogLimit::default(),
        });
        let threads = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| NetworkError::Threads { tier: "redis".to_owned(), source })?;
        let topology = Topology::new(target.seeds, parts);
        let map = threads.block_on(topology.map()).map_err(Failed::into_error)?;
        Ok(Self {
            threads,
            masters: map.masters().cloned().collect(),
            pattern: format!("{}:*}}", settings.prefix),
            prefix: settings.prefix.clone(),
            repair,
            at: 0,
            cursor: 0,
            left: sample.unwrap_or(u64::MAX),
        })
    }

    /// Checks the chunks of one more page; `None` after the last one.
    ///
    /// # Errors
    /// Servers that do not answer any more.
    pub fn check(&mut self) -> Result<Option<Checked>, TierError> {
        let Some(master) = self.masters.get(self.at).cloned().filter(|_| self.left > 0) else {
            return Ok(None);
        };
        let mut scan = redis::cmd("SCAN");
        scan.arg(self.cursor).arg("MATCH").arg(&self.pattern).arg("COUNT").arg(PAGE);
        let page = self.threads.block_on(ask(&master, &scan))?;
        let (cursor, names) = read_page(page).ok_or_else(|| NetworkError::Protocol {
            node: master.endpoint.to_string(),
            why: "SCAN gave no page".to_owned(),
        })?;
        let mut checked = Checked::default();
        for name in names.into_iter().take(usize::try_from(self.left).unwrap_or(usize::MAX)) {
            let outcome = self.threads.block_on(self.check_chunk(&master, &name))?;
            let Some(outcome) = outcome else {
                continue;
            };
            checked.chunks += 1;
            if let Err((key, bad)) = outcome {
                let repaired = self.repair && {
                    self.threads.block_on(ask(&master, redis::cmd("UNLINK").arg(&name))).is_ok()
                };
                checked.bad.push(Finding { key, place: name, what: bad.part(), repaired });
            }
        }
        self.left -= checked.chunks;
        self.cursor = cursor;
        if cursor == 0 {
            self.at += 1;
        }
        Ok(Some(checked))
    }

    /// Reads one chunk; `None` if it is gone.
    async fn check_chunk(
        &self,
        master: &Arc<Node>,
        name: &str,
    ) -> Result<Option<Result<(), (Option<Box<[u8]>>, BadCopy)>>, TierError> {
        loop {
            let mut lease = master.lease(Work::Load).await.map_err(Failed::into_error)?;
            let mut key = None;
            let read = self.read_chunk(&mut lease, name, &mut key).await;
            return match lease.end(read) {
                Ok(()) => Ok(Some(Ok(()))),
                Err(Failed::Bad(bad)) => Ok(Some(Err((key, bad)))),
                Err(Failed::Gone) => Ok(None),
                // A value that is no string is nobody's chunk.
                Err(Failed::Network(NetworkError::Refused { .. })) => {
                    Ok(Some(Err((None, BadCopy::Header))))
                }
                Err(Failed::Stale) => continue,
                Err(failed) => Err(failed.into_error()),
            };
        }
    }

    async fn read_chunk(
        &self,
        lease: &mut Lease<'_>,
        name: &str,
        key: &mut Option<Box<[u8]>>,
    ) -> Result<(), Failed> {
        let mut head = [0; ENVELOPE_BYTES];
        let wire = &mut lease.wire;
        wire.send(&mut [IoSlice::new(&super::transfer::get(name))]).await?;
        let length = wire.value_head().await?.ok_or(Failed::Gone)?;
        if length < ENVELOPE_BYTES as u64 {
            return Err(Failed::Bad(BadCopy::Header));
        }
        wire.fill(&mut head).await?;
        let told = Envelope::inspect(&head).map_err(Failed::Bad)?;
        *key = Some(told.key.clone().into());
        let names = Names::new(&self.prefix, told.namespace);
        if names.of(&told.key) != name {
            return Err(Failed::Bad(BadCopy::Key));
        }
        let found = length - ENVELOPE_BYTES as u64;
        let expected = told.payload_bytes;
        if found > expected || expected > MOST_BYTES {
            return Err(Failed::Bad(BadCopy::Length { found, expected }));
        }
        let mut payload = vec![0; usize::try_from(expected).unwrap_or(usize::MAX)];
        wire.receive_parts(name, &told.envelope, found, &mut payload).await?;
        let right = Checksum::of_chunk(&told.key, &payload) == told.envelope.checksum;
        if right { Ok(()) } else { Err(Failed::Bad(BadCopy::Checksum)) }
    }
}

async fn ask(node: &Arc<Node>, command: &redis::Cmd) -> Result<Value, TierError> {
    loop {
        let mut lease = node.lease(Work::Store).await.map_err(Failed::into_error)?;
        let answer = lease.wire.ask(command).await;
        match lease.end(answer) {
            Err(Failed::Stale) => {}
            answer => return answer.map_err(Failed::into_error),
        }
    }
}

/// `[cursor, [name, ...]]`
fn read_page(page: Value) -> Option<(u64, Vec<String>)> {
    let (cursor, names): (u64, Vec<String>) = redis::from_redis_value(page).ok()?;
    Some((cursor, names))
}
