//! One server: its connections and its breaker.
//!
//! A node has three pools of connections, so that no kind of work waits behind another: look-ups,
//! loads, stores. Work waits for its [`Turn`], then takes a [`Lease`]; one that ended its exchange
//! gives the connection back, any other drops it, as nobody knows what would be read from it next.
//!
//! Work is never a breaker's probe: a node that hangs would hang it. When the pause of a node that
//! was switched off is over, a PING of its own connection asks whether it is back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

use super::connect::{Connector, Use};
use super::endpoint::Endpoint;
use super::failed::Failed;
use super::wire::Wire;
use crate::clock::Clock;
use crate::log_limit::{LogLimit, limited};
use crate::sync::Mutex;
use crate::tier::network::{Attempt, Counted, Counters, NetworkError, NodeBreaker};
use crate::tier::{BreakerState, TierLimits};

/// Connections for look-ups: two, so that a second question does not wait for the first.
const LOOKUP_CONNECTIONS: usize = 2;

/// What work on a node is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// A question.
    Lookup,
    /// A chunk to read.
    Load,
    /// A chunk to write, or to remove.
    Store,
}

/// See the module.
pub(super) struct Node {
    pub(super) endpoint: Endpoint,
    parts: Arc<NodeParts>,
    breaker: NodeBreaker,
    probing: AtomicBool,
    pools: [Pool; 3],
}

/// What the nodes of a tier have in common.
pub(super) struct NodeParts {
    pub(super) connector: Connector,
    pub(super) connections: usize,
    pub(super) limits: TierLimits,
    pub(super) counters: Arc<Counters>,
    pub(super) log: LogLimit,
}

impl NodeParts {
    /// Counts what failed by its cause, and logs it. That work is refused by a node that is
    /// switched off is not logged: what failed before and what its probes find out says more.
    pub(super) fn failed(&self, error: &NetworkError) {
        self.counters.failed(error);
        if !matches!(error, NetworkError::SwitchedOff { .. }) {
            limited!(self.log, warn, "{error}");
        }
    }
}

struct Pool {
    free: Semaphore,
    idle: Mutex<Vec<Wire>>,
}

impl Pool {
    fn new(connections: usize) -> Self {
        Self { free: Semaphore::new(connections), idle: Mutex::default() }
    }
}

/// A place among those that may have a connection for their work.
pub(super) struct Turn<'a> {
    node: &'a Arc<Node>,
    work: Work,
    pool: &'a Pool,
    permit: Option<SemaphorePermit<'a>>,
}

impl<'a> Turn<'a> {
    /// A connection, one that is idle or a new one.
    ///
    /// # Errors
    /// At once if the node is switched off; else if it can not be connected to.
    pub(super) async fn lease(self) -> Result<Lease<'a>, Failed> {
        let Self { node, work, pool, permit } = self;
        // After the wait: the node may have been switched off meanwhile.
        let Some(attempt) = node.admit() else {
            return Err(NetworkError::SwitchedOff { node: node.endpoint.to_string() }.into());
        };
        let idle = pool.idle.lock().pop();
        let used_before = idle.is_some();
        let mut wire = if let Some(wire) = idle {
            wire
        } else {
            node.parts.counters.count(Counted::Connects);
            let purpose = if work == Work::Store { Use::Write } else { Use::Read };
            match node.parts.connector.connect(&node.endpoint, purpose).await {
                Ok(wire) => wire,
                Err(error) => {
                    if attempt.failed() {
                        node.switched_off();
                    }
                    return Err(error);
                }
            }
        };
        wire.begin();
        Ok(Lease { wire, node, pool, attempt, used_before, _permit: permit })
    }
}

/// Leave to ask a node, and a connection to do it. Dropped without an [end](Lease::end), the
/// connection is closed, and the node's breaker learns nothing.
pub(super) struct Lease<'a> {
    pub(super) wire: Wire,
    node: &'a Arc<Node>,
    pool: &'a Pool,
    attempt: Attempt<'a>,
    /// Whether the connection was used before: the server may have closed it meanwhile.
    used_before: bool,
    /// Given back last, when the connection is in the pool again.
    _permit: Option<SemaphorePermit<'a>>,
}

impl Lease<'_> {
    /// The exchange ended: tells the breaker how, and keeps the connection if it is in order.
    ///
    /// # Errors
    /// Those of `outcome`. A connection that the server closed while it was idle is nobody's
    /// failure: that becomes [`Failed::Stale`], to be tried again at once.
    pub(super) fn end<T>(self, outcome: Result<T, Failed>) -> Result<T, Failed> {
        let error = match outcome {
            Err(error) if error.is_the_nodes() => error,
            // A bad value was not read to its end, as a rule.
            Err(error @ Failed::Bad(_)) => return self.abandon(error),
            fine => {
                self.attempt.succeeded();
                if self.wire.is_drained() {
                    self.pool.idle.lock().push(self.wire);
                }
                return fine;
            }
        };
        if self.used_before && error.is_a_closed_connection() {
            // Its siblings were closed with it.
            self.node.drop_idle();
            return Err(Failed::Stale);
        }
        if self.attempt.failed() {
            self.node.switched_off();
        }
        Err(error)
    }

    /// The exchange was left before its end, for no fault of the node: closes the connection.
    ///
    /// # Errors
    /// Always `error`.
    pub(super) fn abandon<T>(self, error: Failed) -> Result<T, Failed> {
        self.attempt.succeeded();
        Err(error)
    }
}

impl Node {
    pub(super) fn new(endpoint: Endpoint, parts: Arc<NodeParts>) -> Arc<Self> {
        let connections = parts.connections;
        Arc::new(Self {
            endpoint,
            breaker: NodeBreaker::new(&parts.limits, Clock::system()),
            parts,
            probing: AtomicBool::new(false),
            pools: [LOOKUP_CONNECTIONS, connections, connections].map(Pool::new),
        })
    }

    /// Whether it is not switched off.
    pub(super) fn is_well(&self) -> bool {
        self.breaker.state() == BreakerState::Closed
    }

    /// Waits until it is the turn of this work.
    pub(super) async fn turn(self: &Arc<Self>, work: Work) -> Turn<'_> {
        let pool = &self.pools[work as usize];
        // Never closed, so there always is a permit in the end.
        let permit = pool.free.acquire().await.ok();
        Turn { node: self, work, pool, permit }
    }

    /// Waits for a connection.
    pub(super) async fn lease(self: &Arc<Self>, work: Work) -> Result<Lease<'_>, Failed> {
        self.turn(work).await.lease().await
    }

    /// A reply came from elsewhere first, so late that this node counts as failing.
    pub(super) fn was_too_slow(self: &Arc<Self>) {
        if let Some(attempt) = self.admit()
            && attempt.failed()
        {
            self.switched_off();
        }
    }

    fn switched_off(&self) {
        self.parts.counters.count(Counted::NodesSwitchedOff);
        self.drop_idle();
    }

    fn drop_idle(&self) {
        for pool in &self.pools {
            let idle = std::mem::take(&mut *pool.idle.lock());
            drop(idle);
        }
    }

    /// Leave for work; none while the node is switched off.
    fn admit(self: &Arc<Self>) -> Option<Attempt<'_>> {
        if self.is_well() {
            return self.breaker.admit();
        }
        if !self.probing.swap(true, Ordering::AcqRel) {
            let node = Arc::clone(self);
            tokio::spawn(async move {
                node.probe().await;
                node.probing.store(false, Ordering::Release);
            });
        }
        None
    }

    /// Asks whether it is back, if its pause is over.
    async fn probe(&self) {
        let Some(attempt) = self.breaker.admit() else {
            return;
        };
        let pong = match self.parts.connector.connect(&self.endpoint, Use::Write).await {
            Ok(mut wire) => wire.ask(&redis::cmd("PING")).await.map(drop),
            Err(error) => Err(error),
        };
        match pong {
            Ok(()) => attempt.succeeded(),
            Err(error) => {
                if let Failed::Network(error) = &error {
                    self.parts.failed(error);
                }
                attempt.failed();
            }
        }
    }
}
