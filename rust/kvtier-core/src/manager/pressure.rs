//! Whether a tier keeps up with the stores it is given.
//!
//! The measure is the seconds it takes for a MiB while it has stores to work on, whatever the
//! length of its queue: the time since its last store ended, or since it got work after none,
//! over what ended now. Batches below a MiB count as one, since there the fixed costs of a job
//! are what is measured. The average is exponential, and begins to count after a few samples.
//!
//! Under pressure a tier gets a store only when it has none: the samples go on, so it comes back
//! by itself, and no timer is needed.

use std::time::Instant;

const MIB: f64 = (1 << 20) as f64;
/// Weight of the newest sample.
const ALPHA: f64 = 0.15;
/// Samples before the average counts.
const WARM_UP: u32 = 8;

/// See the module.
#[derive(Debug)]
pub(super) struct Pressure {
    high_water: f64,
    low_water: f64,
    seconds_per_mib: f64,
    samples: u32,
    /// Since when the tier works on what it has now.
    since: Option<Instant>,
    under: bool,
}

impl Pressure {
    pub(super) fn new(high_water: f64, low_water: f64) -> Self {
        let seconds_per_mib = 0.0;
        Self { high_water, low_water, seconds_per_mib, samples: 0, since: None, under: false }
    }

    /// A store was given to the tier.
    pub(super) fn began(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// A store ended that moved `bytes`; `idle` if it was the last one. One that moved nothing
    /// says nothing of the speed: failures are the breaker's.
    pub(super) fn ended(&mut self, bytes: u64, at: Instant, idle: bool) {
        let since = std::mem::replace(&mut self.since, (!idle).then_some(at));
        let Some(since) = since.filter(|_| bytes > 0) else {
            return;
        };
        let took = at.saturating_duration_since(since).as_secs_f64();
        let sample = took / (bytes as f64 / MIB).max(1.0);
        self.samples = self.samples.saturating_add(1);
        let weight = ALPHA.max(1.0 / f64::from(self.samples.min(WARM_UP)));
        self.seconds_per_mib += weight * (sample - self.seconds_per_mib);
        if self.samples >= WARM_UP {
            let mark = if self.under { self.low_water } else { self.high_water };
            self.under = self.seconds_per_mib > mark;
        }
    }

    /// Whether the tier does not keep up.
    pub(super) fn is_under(&self) -> bool {
        self.under
    }

    /// The average.
    pub(super) fn seconds_per_mib(&self) -> f64 {
        self.seconds_per_mib
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn run(pressure: &mut Pressure, now: &mut Instant, seconds_per_mib: f64, mib: u64, jobs: u32) {
        for _ in 0..jobs {
            pressure.began(*now);
            *now += Duration::from_secs_f64(seconds_per_mib * mib as f64);
            pressure.ended(mib << 20, *now, true);
            // What passes without work is not the tier's.
            *now += Duration::from_secs(9);
        }
    }

    #[test]
    fn it_rises_above_the_high_mark_and_falls_below_the_low_one() {
        let (mut pressure, mut now) = (Pressure::new(0.05, 0.02), Instant::now());
        run(&mut pressure, &mut now, 0.03, 4, 50);
        assert!(!pressure.is_under(), "between the marks, from below");
        run(&mut pressure, &mut now, 0.08, 4, 50);
        assert!(pressure.is_under());
        run(&mut pressure, &mut now, 0.03, 4, 50);
        assert!(pressure.is_under(), "between the marks, from above");
        run(&mut pressure, &mut now, 0.01, 4, 50);
        assert!(!pressure.is_under());
        assert!((pressure.seconds_per_mib() - 0.01).abs() < 1e-3);
    }

    #[test]
    fn the_length_of_the_queue_is_not_the_tiers_speed() {
        let (mut pressure, mut now) = (Pressure::new(0.05, 0.02), Instant::now());
        pressure.began(now);
        for left in (0..50).rev() {
            // All were queued at the same moment; one ends every 10 ms.
            now += Duration::from_millis(10);
            pressure.ended(1 << 20, now, left == 0);
        }
        assert!((pressure.seconds_per_mib() - 0.01).abs() < 1e-6);
    }

    #[test]
    fn a_few_slow_stores_at_the_start_and_small_ones_mean_nothing() {
        let (mut pressure, mut now) = (Pressure::new(0.05, 0.02), Instant::now());
        run(&mut pressure, &mut now, 1.0, 1, WARM_UP - 1);
        assert!(!pressure.is_under());
        let mut pressure = Pressure::new(0.05, 0.02);
        for _ in 0..50 {
            pressure.began(now);
            now += Duration::from_millis(1);
            pressure.ended(4096, now, true);
        }
        assert!(!pressure.is_under(), "1 ms for 4 KiB would be 0.26 s a MiB");
    }
}
