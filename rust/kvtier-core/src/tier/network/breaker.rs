//! The breaker of one node: the manager's breaker, for attempts of a tier instead of jobs.
//!
//! A node that fails several times in a row is left alone for a pause that doubles, then one
//! attempt probes it. Keys of other nodes are not touched by that; without it, each look-up and
//! load of this node's keys would wait for a timeout first.

use crate::clock::Clock;
use crate::sync::Mutex;
use crate::tier::breaker::{Breaker, BreakerState};
use crate::tier::{JobId, TierLimits};

/// See the module. Its limits are those of the tier: `breaker_failures` and the pauses.
#[derive(Debug)]
pub struct NodeBreaker {
    state: Mutex<Numbered>,
    clock: Clock,
}

#[derive(Debug)]
struct Numbered {
    breaker: Breaker,
    /// Of attempts so far: the breaker tells its probe from others by number.
    attempts: JobId,
}

/// Leave to ask a node. Dropped without a verdict, it counts neither for nor against the node.
#[must_use = "say how it ended"]
#[derive(Debug)]
pub struct Attempt<'a> {
    node: &'a NodeBreaker,
    number: JobId,
}

impl NodeBreaker {
    /// A closed breaker.
    pub fn new(limits: &TierLimits, clock: Clock) -> Self {
        Self { state: Mutex::new(Numbered { breaker: Breaker::new(limits), attempts: 0 }), clock }
    }

    /// Whether the node may be asked now.
    pub fn admit(&self) -> Option<Attempt<'_>> {
        let mut state = self.state.lock();
        let admitted = state.breaker.is_closed() || state.breaker.admits(self.clock.now()).0;
        if !admitted {
            return None;
        }
        state.attempts += 1;
        let number = state.attempts;
        state.breaker.began(number);
        Some(Attempt { node: self, number })
    }

    /// What it lets through.
    pub fn state(&self) -> BreakerState {
        self.state.lock().breaker.state()
    }
}

impl Attempt<'_> {
    /// The node answered, if only to say that it has nothing.
    pub fn succeeded(self) {
        self.node.state.lock().breaker.succeeded();
    }

    /// It did not, or not in time. Says whether that switched the node off.
    pub fn failed(self) -> bool {
        let now = self.node.clock.now();
        let mut state = self.node.state.lock();
        state.breaker.failed(Some(self.number), now) == Some(BreakerState::Open)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        // Nothing to withdraw after a verdict.
        self.node.state.lock().breaker.withdrawn(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_node_is_left_alone_and_one_attempt_probes_it() {
        let clock = Clock::simulated();
        let limits = TierLimits {
            breaker_failures: 2,
            breaker_pause: Duration::from_secs(1),
            ..TierLimits::default()
        };
        let node = NodeBreaker::new(&limits, clock.clone());
        assert!(!node.admit().expect("closed").failed());
        assert!(node.admit().expect("closed").failed());
        assert!(node.admit().is_none());
        clock.advance(Duration::from_secs(1));
        let probe = node.admit().expect("pause is over");
        assert!(node.admit().is_none(), "one at a time");
        drop(probe);
        let probe = node.admit().expect("the last one gave no verdict");
        probe.succeeded();
        assert_eq!(node.state(), BreakerState::Closed);
        assert!(!node.admit().expect("closed").failed(), "counts from the start again");
    }
}
