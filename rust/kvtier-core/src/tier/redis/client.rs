//! What the tasks of a redis tier share, and how they go on after a failure.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use super::endpoint::Endpoint;
use super::failed::Failed;
use super::names::Names;
use super::node::{Node, NodeParts};
use super::topology::{Shard, Topology};
use crate::tier::network::{Budget, Counted, Counters, Known, NamespaceId, NetworkError, Retries};
use crate::tier::{TierError, TierLimits};

/// Tries after a failure of a node, for one chunk.
const TRIES: u32 = 3;
/// Redirects that are followed at once, for one chunk.
const REDIRECTS: u32 = 8;

/// See the module.
pub(super) struct Client {
    pub(super) topology: Arc<Topology>,
    pub(super) known: Arc<Known>,
    pub(super) budget: Budget,
    pub(super) counters: Arc<Counters>,
    pub(super) parts: Arc<NodeParts>,
    pub(super) namespace: NamespaceId,
    pub(super) names: Names,
    pub(super) limits: TierLimits,
    pub(super) chunk_bytes: usize,
    pub(super) part_bytes: usize,
    pub(super) ttl_s: Option<u32>,
    pub(super) hedge_after: Option<Duration>,
}

/// Where a chunk is looked for next, and how often it may be.
pub(super) struct Trying {
    retries: Retries,
    tries: u32,
    redirects: u32,
    /// A node named this one; with whether it is for this once.
    named: Option<(Endpoint, bool)>,
}

/// Where a chunk is looked for.
pub(super) struct Route {
    pub(super) shard: Shard,
    /// Whether the node has to be told that it was named by another one.
    pub(super) asking: bool,
}

impl Trying {
    pub(super) fn until(deadline: Instant) -> Self {
        Self { retries: Retries::until(deadline), tries: 0, redirects: 0, named: None }
    }
}

impl Client {
    /// Where the chunk `name` is.
    pub(super) async fn route(&self, name: &str, trying: &mut Trying) -> Result<Route, Failed> {
        if let Some((endpoint, asking)) = trying.named.take() {
            let master = self.topology.node(&endpoint);
            return Ok(Route { shard: Shard { master, replicas: Vec::new() }, asking });
        }
        let shard = self.topology.map().await?.shard_of(name)?.clone();
        Ok(Route { shard, asking: false })
    }

    /// After a failure: returns when to try again, or gives the error to report.
    pub(super) async fn go_on(
        &self,
        trying: &mut Trying,
        failed: Failed,
        key: &[u8],
    ) -> Result<(), TierError> {
        let error = match failed {
            Failed::Gone => {
                self.counters.count(Counted::Gone);
                return Err(TierError::Missing(key.into()));
            }
            Failed::Bad(bad) => {
                self.counters.bad(bad);
                return Err(TierError::BadCopy { key: key.into(), bad });
            }
            Failed::Stale => return self.redirected(trying, None, key),
            Failed::Moved(endpoint) => {
                self.topology.refresh();
                return self.redirected(trying, Some((endpoint, false)), key);
            }
            Failed::Ask(endpoint) => return self.redirected(trying, Some((endpoint, true)), key),
            Failed::NotNow(error) | Failed::Network(error) => error,
        };
        self.parts.failed(&error);
        self.topology.refresh();
        match error {
            // Its keys are misses until it is back; waiting would not bring it back.
            NetworkError::SwitchedOff { .. } => Err(TierError::Missing(key.into())),
            NetworkError::Full { .. } => Err(error.into()),
            _ => {
                trying.tries += 1;
                let pause = trying.retries.pause(Instant::now());
                let Some(pause) = pause.filter(|_| trying.tries < TRIES) else {
                    return Err(error.into());
                };
                self.counters.count(Counted::Retries);
                sleep(pause).await;
                Ok(())
            }
        }
    }

    fn redirected(
        &self,
        trying: &mut Trying,
        to: Option<(Endpoint, bool)>,
        key: &[u8],
    ) -> Result<(), TierError> {
        if to.is_some() {
            self.counters.count(Counted::Redirects);
        }
        trying.redirects += 1;
        trying.named = to;
        if trying.redirects > REDIRECTS {
            return Err(TierError::Missing(key.into()));
        }
        Ok(())
    }

    /// What `first` brings from the shard's master; from a replica, by `second`, if the master
    /// fails, or is slow and the replica is not.
    pub(super) async fn hedged<'s, T, F>(
        &self,
        shard: &'s Shard,
        first: impl Future<Output = Result<T, Failed>>,
        second: impl FnOnce(&'s Arc<Node>) -> F,
    ) -> Result<T, Failed>
    where
        F: Future<Output = Result<T, Failed>>,
    {
        let (Some(after), Some(replica)) = (self.hedge_after, shard.replica()) else {
            return first.await;
        };
        let mut first = std::pin::pin!(first);
        match timeout(after, &mut first).await {
            Ok(Err(Failed::Network(error))) => {
                self.parts.failed(&error);
                self.topology.refresh();
                return second(replica).await;
            }
            Ok(outcome) => return outcome,
            Err(_) => self.counters.count(Counted::Hedges),
        }
        let mut second = std::pin::pin!(second(replica));
        tokio::select! {
            outcome = &mut first => match outcome {
                Err(Failed::Network(error)) => {
                    self.parts.failed(&error);
                    second.await
                }
                outcome => outcome,
            },
            outcome = &mut second => match outcome {
                Ok(found) => {
                    self.counters.count(Counted::HedgesWon);
                    shard.master.was_too_slow();
                    Ok(found)
                }
                // It may be behind: what the master says counts.
                Err(_) => first.await,
            },
        }
    }
}
