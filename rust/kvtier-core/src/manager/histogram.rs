//! Latencies, counted in buckets that double.

use std::time::Duration;

/// Number of buckets.
pub const BUCKETS: usize = 24;
/// The first bucket ends here; each next one at twice the time, the last one nowhere.
const FIRST: Duration = Duration::from_micros(8);

/// How often something took how long. Bucket `i` counts what took at most `bounds()[i]` and more
/// than the one before; 192 bytes and no allocation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Histogram {
    /// Counts by bucket.
    pub counts: [u64; BUCKETS],
    /// Seconds in all.
    pub sum: f64,
}

impl Histogram {
    /// The buckets' upper ends in seconds: 8 microseconds, then twice as long each, then none.
    pub fn bounds() -> [f64; BUCKETS] {
        let mut bounds = [f64::INFINITY; BUCKETS];
        let mut bound = FIRST.as_secs_f64();
        for slot in &mut bounds[..BUCKETS - 1] {
            *slot = bound;
            bound *= 2.0;
        }
        bounds
    }

    /// Counts one.
    pub(super) fn add(&mut self, took: Duration) {
        let units = took.as_nanos().div_ceil(FIRST.as_nanos());
        let bucket = units.max(1).next_power_of_two().trailing_zeros() as usize;
        self.counts[bucket.min(BUCKETS - 1)] += 1;
        self.sum += took.as_secs_f64();
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_in_the_bucket_whose_bounds_hold_it() {
        let bounds = Histogram::bounds();
        for nanoseconds in [0, 1, 8_000, 8_001, 16_000, 16_001, 1_000_000_000, u64::MAX / 2] {
            let took = Duration::from_nanos(nanoseconds);
            let mut histogram = Histogram::default();
            histogram.add(took);
            let bucket = histogram.counts.iter().position(|&count| count == 1).expect("counted");
            let above = if bucket == 0 { -1.0 } else { bounds[bucket - 1] };
            let seconds = took.as_secs_f64();
            assert!(above < seconds && seconds <= bounds[bucket], "{seconds} in bucket {bucket}");
            assert_eq!(histogram.count(), 1);
        }
    }
}
