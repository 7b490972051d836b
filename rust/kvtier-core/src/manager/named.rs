//! Figures by name: the one list of what a tier shows, which `Manager.stats()` and the
//! [page](crate::page) both follow.
//!
//! A new figure is a field in `figures.rs` and a line here; who shows figures shows it then.

use super::figures::{Moved, PrimaryFigures, TierSnapshot};
use super::histogram::Histogram;
use crate::tier::{BreakerState, Failure, Fault};

/// The value of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Figure<'a> {
    /// A number of things.
    Count(u64),
    /// An amount.
    Amount(f64),
    /// Yes or no.
    Flag(bool),
    /// One of several names.
    Choice {
        /// Which.
        at: usize,
        /// The names.
        of: &'a [&'a str],
    },
    /// A number of things of each name.
    Counts {
        /// How many.
        counts: &'a [u64],
        /// The names, one a count.
        of: &'a [&'a str],
    },
    /// How often something took how long.
    Latency {
        /// By bucket.
        counts: &'a [u64],
        /// Seconds in all.
        sum: f64,
    },
}

/// What is told of each figure: its name and its value.
pub type Tell<'a> = dyn FnMut(&str, Figure<'_>) + 'a;

const FAILURES: [&str; Failure::ALL.len()] = names(&Failure::ALL);
const FAULTS: [&str; Fault::ALL.len()] = names(&Fault::ALL);
const BREAKER_STATES: [&str; BreakerState::ALL.len()] = names(&BreakerState::ALL);

const fn names<K, const N: usize>(all: &[(&'static str, K); N]) -> [&'static str; N] {
    let mut names = [""; N];
    let mut at = 0;
    while at < N {
        names[at] = all[at].0;
        at += 1;
    }
    names
}

/// Tells fields that are counts under their own names.
macro_rules! counts {
    ($tell:expr, $from:expr; $($name:ident),+ $(,)?) => {
        $($tell(stringify!($name), Figure::Count($from.$name));)+
    };
}

/// Tells the figures of a direction under names that begin with it.
macro_rules! moved {
    ($tell:expr, $direction:literal, $moved:expr) => {{
        let moved: &Moved = $moved;
        let Histogram { counts, sum } = &moved.latency;
        $tell(concat!($direction, "s"), Figure::Count(moved.chunks));
        $tell(concat!($direction, "_bytes"), Figure::Count(moved.bytes));
        $tell(concat!($direction, "_seconds"), Figure::Amount(moved.seconds));
        let failures = Figure::Counts { counts: &moved.failures, of: &FAILURES };
        $tell(concat!($direction, "_failures"), failures);
        $tell(concat!($direction, "s_in_flight"), Figure::Count(moved.in_flight));
        $tell(concat!($direction, "s_overdue"), Figure::Count(moved.overdue));
        $tell(concat!($direction, "_latency"), Figure::Latency { counts, sum: *sum });
        let breaker = Figure::Choice { at: moved.breaker as usize, of: &BREAKER_STATES };
        $tell(concat!($direction, "_breaker"), breaker);
        $tell(concat!($direction, "_breaker_opened"), Figure::Count(moved.breaker_opened));
    }};
}

impl PrimaryFigures {
    /// Tells every figure, always in the same order.
    pub fn each(&self, tell: &mut Tell<'_>) {
        counts!(tell, self;
            slots, ready, writing, pinned, detached, requests, steps, hits, hits_pending, misses,
            retries, evictions, stored_chunks, loaded_chunks, stores_refused, promotions_refused,
            not_admitted);
    }
}

impl TierSnapshot {
    /// Tells every figure, of one tier always the same ones in the same order.
    pub fn each(&self, tell: &mut Tell<'_>) {
        let figures = &self.figures;
        counts!(tell, figures.usage; capacity_bytes, used_bytes, chunks);
        counts!(tell, figures;
            lookups, hits, lookups_overdue, evictions, sheds, refused, queued_bytes, quarantined);
        tell("store_seconds_per_mib", Figure::Amount(figures.store_seconds_per_mib));
        tell("under_pressure", Figure::Flag(figures.under_pressure));
        tell("faults", Figure::Counts { counts: &figures.faults, of: &FAULTS });
        let (of, counts): (Vec<_>, Vec<_>) = self.details.iter().copied().unzip();
        tell("details", Figure::Counts { counts: &counts, of: &of });
        moved!(tell, "load", &figures.loads);
        moved!(tell, "store", &figures.stores);
    }
}
