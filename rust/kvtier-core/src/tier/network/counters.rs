//! What happened between a tier and its servers, counted by cause.
//!
//! The manager counts what became of chunks; these counters say why, and what it took. They are
//! the tier's `details` in `Manager.stats()`, and run since it was opened.

use super::{BadCopy, NetworkError};
use crate::sync::atomic::{AtomicU64, Ordering};

macro_rules! counted {
    ($($(#[$doc:meta])+ $variant:ident = $name:literal,)+) => {
        /// Something that is counted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Counted {
            $($(#[$doc])+ $variant,)+
        }

        impl Counted {
            /// Everything that is counted, by its name in figures.
            pub const ALL: &[(&str, Self)] = &[$(($name, Self::$variant),)+];
        }
    };
}

counted! {
    /// Questions that look-ups asked in the background.
    Questions = "questions",
    /// Keys in them.
    KeysAsked = "keys_asked",
    /// Exchanges with a node that such questions took.
    RoundTrips = "round_trips",
    /// Connections made.
    Connects = "connects",
    /// Tries after one that failed.
    Retries = "retries",
    /// Second requests, to another node, since the first was slow.
    Hedges = "hedges",
    /// Those that were answered first.
    HedgesWon = "hedges_won",
    /// Times that a node named another one for a key.
    Redirects = "redirects",
    /// Times that a node was switched off.
    NodesSwitchedOff = "nodes_switched_off",
    /// Not tried, since the node was switched off.
    SkippedNode = "skipped_node",
    /// No connection, or a broken one.
    Unreachable = "unreachable",
    /// No answer in time.
    TimedOut = "timed_out",
    /// An error as the answer.
    Refused = "refused",
    /// Requests that came too fast.
    SlowDown = "slow_down",
    /// Credentials that were refused.
    Denied = "denied",
    /// No such bucket.
    NoBucket = "no_bucket",
    /// A clock that is too far off.
    ClockSkew = "clock_skew",
    /// No room.
    Full = "full",
    /// An answer against the protocol.
    Protocol = "protocol",
    /// Chunks that were gone when they were loaded.
    Gone = "gone",
    /// Values of a wrong length.
    BadLength = "bad_length",
    /// Values without a whole envelope.
    BadHeader = "bad_header",
    /// Values of a format this version does not know.
    OtherVersion = "other_version",
    /// Values of another namespace.
    OtherNamespace = "other_namespace",
    /// Values of another chunk.
    OtherKey = "other_key",
    /// Values whose checksum does not match.
    BadChecksum = "bad_checksum",
    /// Bad values that were removed.
    Removed = "removed",
}

/// See the module.
#[derive(Debug)]
pub struct Counters(Box<[AtomicU64]>);

impl Default for Counters {
    fn default() -> Self {
        Self(Counted::ALL.iter().map(|_| AtomicU64::new(0)).collect())
    }
}

impl Counters {
    /// Counts one.
    pub fn count(&self, what: Counted) {
        self.add(what, 1);
    }

    /// Counts several.
    pub fn add(&self, what: Counted, times: u64) {
        self.0[what as usize].fetch_add(times, Ordering::Relaxed);
    }

    /// Counts an exchange that failed, by its cause.
    pub fn failed(&self, error: &NetworkError) {
        self.count(match error {
            NetworkError::Unreachable { .. } | NetworkError::Threads { .. } => Counted::Unreachable,
            NetworkError::TimedOut { .. } => Counted::TimedOut,
            NetworkError::SwitchedOff { .. } => Counted::SkippedNode,
            NetworkError::SlowDown { .. } => Counted::SlowDown,
            NetworkError::Denied { .. } => Counted::Denied,
            NetworkError::NoBucket { .. } => Counted::NoBucket,
            NetworkError::ClockSkew { .. } => Counted::ClockSkew,
            NetworkError::Full { .. } => Counted::Full,
            NetworkError::Protocol { .. } => Counted::Protocol,
            NetworkError::Refused { .. } | NetworkError::Forked(_) | NetworkError::Closed(_) => {
                Counted::Refused
            }
        });
    }

    /// Counts a value that is not the chunk it should be, by what is wrong with it.
    pub fn bad(&self, copy: BadCopy) {
        self.count(match copy {
            BadCopy::Length { .. } => Counted::BadLength,
            BadCopy::Header => Counted::BadHeader,
            BadCopy::Version(_) => Counted::OtherVersion,
            BadCopy::Namespace => Counted::OtherNamespace,
            BadCopy::Key => Counted::OtherKey,
            BadCopy::Checksum => Counted::BadChecksum,
        });
    }

    /// The count of one thing.
    pub fn get(&self, what: Counted) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }

    /// All counts, by name.
    pub fn all(&self) -> Vec<(&'static str, u64)> {
        Counted::ALL.iter().map(|&(name, what)| (name, self.get(what))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_has_a_counter_of_its_own_name() {
        let counters = Counters::default();
        counters.bad(BadCopy::Namespace);
        counters.failed(&NetworkError::TimedOut { node: "n".into(), what: "GET" });
        counters.add(Counted::KeysAsked, 512);
        for (position, (name, what)) in Counted::ALL.iter().enumerate() {
            assert_eq!(*what as usize, position, "{name}");
        }
        let counted: Vec<_> = counters.all().into_iter().filter(|&(_, count)| count > 0).collect();
        assert_eq!(counted, [("keys_asked", 512), ("timed_out", 1), ("other_namespace", 1)]);
    }
}
