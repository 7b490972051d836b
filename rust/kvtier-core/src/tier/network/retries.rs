//! When something that failed may be tried again: after a random pause that grows, and only if
//! there is time left before its job's deadline. Random, so that the clients of a node that comes
//! back do not come back all at once.

use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug, Clone)]
pub struct Retries {
    deadline: Instant,
    pause: Duration,
}

impl Retries {
    /// For work that must be over at `deadline`.
    pub fn until(deadline: Instant) -> Self {
        Self { deadline, pause: FIRST_PAUSE }
    }

    /// How long to wait before the next try; `None` when it would begin too late.
    pub fn pause(&mut self, now: Instant) -> Option<Duration> {
        let pause = self.pause.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        (now + pause < self.deadline).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_jitter_and_end_at_the_deadline() {
        fastrand::seed(7);
        let start = Instant::now();
        let deadline = start + Duration::from_secs(10);
        let (mut retries, mut now, mut bound) = (Retries::until(deadline), start, FIRST_PAUSE);
        let mut tries = 0;
        while let Some(pause) = retries.pause(now) {
            assert!(pause >= bound / 2 && pause <= bound, "{pause:?} of {bound:?}");
            (now, bound, tries) = (now + pause, (bound * 2).min(LONGEST_PAUSE), tries + 1);
        }
        assert!(now < deadline && now + LONGEST_PAUSE >= deadline);
        assert!((16..30).contains(&tries), "{tries}");
    }

    #[test]
    fn past_the_deadline_there_is_no_try() {
        let now = Instant::now();
        assert_eq!(Retries::until(now).pause(now), None);
    }
}
