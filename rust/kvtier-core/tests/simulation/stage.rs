//! What the engine and the tiers of one run share: chance, time, the ledger, and the trace.
//!
//! One thread runs all of it. The lock is there because a tier must be `Sync`; it is never held
//! across a call into the manager, which would call into a tier that wants it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fastrand::Rng;
use kvtier_core::clock::Clock;
use parking_lot::{Mutex, MutexGuard};

use crate::ledger::Ledger;
use crate::tally::{Feature, Tally};
use crate::tier::TierState;

/// Lines that are kept for the report of a failing seed.
const TRACE_LINES: usize = 60;

pub(crate) struct Stage {
    pub(crate) clock: Clock,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) rng: Rng,
    pub(crate) now: Instant,
    start: Instant,
    pub(crate) tally: Tally,
    pub(crate) ledger: Ledger,
    pub(crate) tiers: Vec<TierState>,
    trace: Option<VecDeque<String>>,
    /// The first invariant that did not hold. Kept, since the manager catches a tier's panic.
    pub(crate) violation: Option<String>,
}

impl Stage {
    pub(crate) fn new(rng: Rng, ledger: Ledger, tiers: Vec<TierState>, traced: bool) -> Self {
        let clock = Clock::simulated();
        let now = clock.now();
        let state = State {
            rng,
            now,
            start: now,
            tally: Tally::default(),
            ledger,
            tiers,
            trace: traced.then(VecDeque::new),
            violation: None,
        };
        Self { clock, state: Mutex::new(state) }
    }

    /// To be held for a few lines, never over a call of the manager.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.lock().now = self.clock.now();
    }
}

impl State {
    /// Notes that an invariant does not hold; the run ends after the event.
    pub(crate) fn violate(&mut self, message: String) {
        self.note(|| format!("VIOLATED: {message}"));
        self.violation.get_or_insert(message);
    }

    /// Notes what the ledger refused.
    pub(crate) fn check(&mut self, result: Result<(), String>) {
        if let Err(message) = result {
            self.violate(message);
        }
    }

    /// Adds a line to the trace, which is only written when a seed is replayed.
    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        let Some(trace) = &mut self.trace else {
            return;
        };
        if trace.len() == TRACE_LINES {
            trace.pop_front();
        }
        let passed = self.now.duration_since(self.start);
        trace.push_back(format!("{:>9.3} ms  {}", passed.as_secs_f64() * 1e3, line()));
    }

    pub(crate) fn take_trace(&mut self) -> Vec<String> {
        self.trace.take().map(Into::into).unwrap_or_default()
    }

    /// Whether a fault of a tier happens now; counted if so.
    pub(crate) fn happens(&mut self, tier: usize, fault: Feature) -> bool {
        let odds = self.tiers[tier].odds[fault as usize];
        let happens = odds > 0 && self.rng.u16(0..odds) == 0;
        if happens {
            self.tally.count(fault);
        }
        happens
    }
}
