//! Chunks that a tier said it has, and failed to bring.
//!
//! Without a memory of them a request could wait for ever: it is told to look again, the chunk
//! does not come, the tier says again that it has it, and so on. The breaker does not end that: a
//! chunk that is missing is not held against a tier, and one that brings all others is in order.
//!
//! So a chunk that did not come is not asked of its tier again for a while, and for twice as long
//! each time that it fails again. Look-ups go on with the next tier. Since the pauses grow and the
//! waits do not, a request finds all of its chunks there or missing after a bounded time, whatever
//! the tiers do. A chunk that came, or was stored there anew, is trusted again.
//!
//! Memory: 40 bytes a chunk that failed not long ago; look-ups cost nothing while there is none.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Doubts are swept when there are this many, then at twice as many as were left.
const SWEEP: usize = 1024;

/// The doubts about one tier, by fingerprints of keys; see the module.
#[derive(Debug)]
pub(super) struct Doubts {
    first_pause: Duration,
    chunks: HashMap<u64, Doubt>,
    sweep_at: usize,
}

#[derive(Debug)]
struct Doubt {
    until: Instant,
    pause: Duration,
}

impl Doubts {
    pub(super) fn new(first_pause: Duration) -> Self {
        Self { first_pause, chunks: HashMap::new(), sweep_at: SWEEP }
    }

    /// Whether nothing is in doubt.
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Whether the tier is not to be asked for a chunk now.
    pub(super) fn has(&self, chunk: u64, now: Instant) -> bool {
        self.chunks.get(&chunk).is_some_and(|doubt| now < doubt.until)
    }

    /// The tier failed to bring a chunk.
    pub(super) fn failed(&mut self, chunk: u64, now: Instant) {
        let pause = self.chunks.get(&chunk).map(|doubt| doubt.pause.saturating_mul(2));
        let pause = pause.unwrap_or(self.first_pause);
        // One that can not be told ends no more.
        let until = now.checked_add(pause).unwrap_or(now + self.first_pause);
        self.chunks.insert(chunk, Doubt { until, pause });
        if self.chunks.len() >= self.sweep_at {
            // It is remembered for as long again as it lasted: a second failure lasts longer.
            self.chunks.retain(|_, doubt| now.saturating_duration_since(doubt.until) < doubt.pause);
            self.sweep_at = SWEEP.max(2 * self.chunks.len());
        }
    }

    /// The tier brought a chunk, or stored it anew.
    pub(super) fn trust(&mut self, chunk: u64) {
        self.chunks.remove(&chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn each_failure_in_a_row_doubts_for_twice_as_long() {
        let (mut doubts, mut now) = (Doubts::new(SECOND), Instant::now());
        assert!(doubts.is_empty() && !doubts.has(7, now));
        for seconds in [1, 2, 4] {
            doubts.failed(7, now);
            assert!(!doubts.has(8, now), "another chunk");
            let almost = Duration::from_nanos(seconds * 1_000_000_000 - 1);
            assert!(doubts.has(7, now + almost));
            now += Duration::from_secs(seconds);
            assert!(!doubts.has(7, now));
        }
        doubts.trust(7);
        doubts.failed(7, now);
        assert!(!doubts.has(7, now + SECOND), "from the first pause again");
    }

    #[test]
    fn what_failed_long_ago_takes_no_memory() {
        let (mut doubts, now) = (Doubts::new(SECOND), Instant::now());
        (0..SWEEP as u64 - 1).for_each(|chunk| doubts.failed(chunk, now));
        doubts.failed(u64::MAX, now + 2 * SECOND);
        assert_eq!(doubts.chunks.len(), 1);
    }
}
