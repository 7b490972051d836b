//! A circuit breaker: the manager has one for each direction of a tier, since a full disk can still
//! be read; a tier behind a network has one for each node.
//!
//! ```text
//! closed --(failures in a row)--> open --(pause over)--> half open --(probe good)--> closed
//!                                  ^------(probe bad: pause doubles)-----'
//! ```
//!
//! Half open, one job at a time is let through, the probe. Jobs that began before the breaker
//! opened and end badly after it do not count again; one that ends well closes it.

use std::time::{Duration, Instant};

use crate::tier::{Failure, JobId, JobResult, Outcome, TierLimits};

/// What a breaker lets through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum BreakerState {
    /// Everything.
    #[default]
    Closed = 0,
    /// Nothing.
    Open = 1,
    /// One job, to see whether the tier works again.
    HalfOpen = 2,
}

impl BreakerState {
    /// Every state, by its name in figures and events.
    pub const ALL: [(&str, Self); 3] =
        [("closed", Self::Closed), ("open", Self::Open), ("half_open", Self::HalfOpen)];

    /// The name in figures and events.
    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

#[derive(Debug)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant },
    HalfOpen { probe: Option<JobId> },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Breaker {
    state: State,
    threshold: u32,
    pause: Duration,
    first_pause: Duration,
    max_pause: Duration,
}

impl Breaker {
    pub(crate) fn new(limits: &TierLimits) -> Self {
        Self {
            state: State::Closed { failures: 0 },
            threshold: limits.breaker_failures,
            pause: limits.breaker_pause,
            first_pause: limits.breaker_pause,
            max_pause: limits.breaker_max_pause,
        }
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.state {
            State::Closed { .. } => BreakerState::Closed,
            State::Open { .. } => BreakerState::Open,
            State::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Whether everything is let through, without asking for the time.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// Whether a job may start now. The new state, when the pause is over.
    pub(crate) fn admits(&mut self, now: Instant) -> (bool, Option<BreakerState>) {
        match self.state {
            State::Closed { .. } => (true, None),
            State::Open { until } if now < until => (false, None),
            State::Open { .. } => {
                self.state = State::HalfOpen { probe: None };
                (true, Some(BreakerState::HalfOpen))
            }
            State::HalfOpen { probe } => (probe.is_none(), None),
        }
    }

    /// A job ended in time: tells how, unless it was `withdrawn`. The new state, if it is another.
    pub(crate) fn judge(&mut self, result: &JobResult, withdrawn: bool) -> Option<BreakerState> {
        let gone = |outcome: &Outcome| *outcome == Err(Failure::Missing);
        if result.outcomes.iter().any(Result::is_ok) {
            self.succeeded()
        } else if withdrawn || result.outcomes.iter().all(gone) {
            self.withdrawn(result.job);
            None
        } else {
            self.failed(Some(result.job), result.ended)
        }
    }

    /// A job began.
    pub(crate) fn began(&mut self, job: JobId) {
        if let State::HalfOpen { probe } = &mut self.state {
            probe.get_or_insert(job);
        }
    }

    /// A job ended well. The new state, if it is another.
    pub(crate) fn succeeded(&mut self) -> Option<BreakerState> {
        let was_closed = self.is_closed();
        self.state = State::Closed { failures: 0 };
        self.pause = self.first_pause;
        (!was_closed).then_some(BreakerState::Closed)
    }

    /// A job failed, or (`None`) the tier broke the contract. The new state, if it is another.
    pub(crate) fn failed(&mut self, job: Option<JobId>, now: Instant) -> Option<BreakerState> {
        match &mut self.state {
            State::Closed { failures } => {
                *failures = failures.saturating_add(1);
                if self.threshold == 0 || *failures < self.threshold {
                    return None;
                }
            }
            State::HalfOpen { probe } if job.is_none() || *probe == job => {
                self.pause = (self.pause * 2).min(self.max_pause);
            }
            State::HalfOpen { .. } | State::Open { .. } => return None,
        }
        self.state = State::Open { until: now + self.pause };
        Some(BreakerState::Open)
    }

    /// A job ended without a verdict: nobody waits for it, or what it asked for was gone.
    pub(crate) fn withdrawn(&mut self, job: JobId) {
        if let State::HalfOpen { probe } = &mut self.state
            && *probe == Some(job)
        {
            *probe = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn breaker() -> Breaker {
        Breaker::new(&TierLimits {
            breaker_failures: 3,
            breaker_pause: SECOND,
            breaker_max_pause: 3 * SECOND,
            ..TierLimits::default()
        })
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_success_between_them_starts_over() {
        let (mut breaker, now) = (breaker(), Instant::now());
        assert_eq!(breaker.failed(Some(1), now), None);
        assert_eq!(breaker.failed(Some(2), now), None);
        assert_eq!(breaker.succeeded(), None);
        assert_eq!(breaker.failed(Some(3), now), None);
        assert_eq!(breaker.failed(Some(4), now), None);
        assert_eq!(breaker.failed(None, now), Some(BreakerState::Open));
        assert_eq!(breaker.failed(Some(5), now), None, "began before it opened");
        assert_eq!(breaker.admits(now), (false, None));
    }

    #[test]
    fn one_probe_at_a_time_and_the_pause_doubles_up_to_its_bound() {
        let (mut breaker, mut now) = (breaker(), Instant::now());
        (0..3)
            .for_each(|job| assert_ne!(breaker.failed(Some(job), now), Some(BreakerState::Closed)));
        for pause in [1, 2, 3, 3] {
            let early = now + Duration::from_nanos(pause * 1_000_000_000 - 1);
            assert_eq!(breaker.admits(early), (false, None), "after less than {pause} s");
            now += Duration::from_secs(pause);
            assert_eq!(breaker.admits(now), (true, Some(BreakerState::HalfOpen)));
            assert_eq!(breaker.admits(now), (true, None), "no probe yet");
            breaker.began(10);
            assert_eq!(breaker.admits(now), (false, None), "one at a time");
            assert_eq!(breaker.failed(Some(2), now), None, "not the probe");
            assert_eq!(breaker.failed(Some(10), now), Some(BreakerState::Open));
        }
        now += 3 * SECOND;
        breaker.admits(now);
        breaker.began(11);
        breaker.withdrawn(11);
        assert_eq!(breaker.admits(now), (true, None), "the next job is the probe");
        assert_eq!(breaker.succeeded(), Some(BreakerState::Closed));
        (0..2).for_each(|job| assert_eq!(breaker.failed(Some(job), now), None));
        assert_eq!(breaker.failed(None, now), Some(BreakerState::Open));
        assert_eq!(breaker.admits(now + SECOND).1, Some(BreakerState::HalfOpen), "first pause");
    }

    #[test]
    fn a_threshold_of_zero_never_opens() {
        let mut breaker =
            Breaker::new(&TierLimits { breaker_failures: 0, ..TierLimits::default() });
        let now = Instant::now();
        (0..100).for_each(|job| assert_eq!(breaker.failed(Some(job), now), None));
        assert!(breaker.is_closed());
    }
}
