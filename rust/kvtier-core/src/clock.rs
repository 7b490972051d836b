//! What time it is: the system's, or a simulation's.
//!
//! Deadlines, breakers and back-pressure ask a clock instead of the system, so that a simulation
//! decides when they act, and a seed replays it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicU64, Ordering};

/// A source of time. Clones show the same time.
#[derive(Debug, Clone, Default)]
pub struct Clock(Option<Simulated>);

#[derive(Debug, Clone)]
struct Simulated {
    start: Instant,
    nanoseconds: Arc<AtomicU64>,
}

impl Clock {
    /// The system's monotonic clock.
    pub fn system() -> Self {
        Self(None)
    }

    /// A clock that stands still until it is [advanced](Clock::advance).
    pub fn simulated() -> Self {
        Self(Some(Simulated { start: Instant::now(), nanoseconds: Arc::default() }))
    }

    /// The time.
    pub fn now(&self) -> Instant {
        match &self.0 {
            None => Instant::now(),
            Some(simulated) => {
                let passed = simulated.nanoseconds.load(Ordering::Relaxed);
                simulated.start + Duration::from_nanos(passed)
            }
        }
    }

    /// Lets time pass on a simulated clock; the system's does so by itself.
    pub fn advance(&self, by: Duration) {
        if let Some(simulated) = &self.0 {
            let nanoseconds = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
            simulated.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        }
    }
}
