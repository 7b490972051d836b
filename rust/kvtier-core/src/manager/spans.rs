//! What a manager tells a [trace](crate::trace): its steps with their parts, and its jobs.
//!
//! Steps are spans on the track of their thread, with three parts inside: asking the tiers for
//! news, accounting, and handing out jobs. A job is a span of its own from its submission to its
//! end, named by its tier and direction, since jobs overlap.

use std::time::Instant;

use super::figures::Direction;
use super::step::Ready;
use super::{JobId, Tier};
use crate::clock::Clock;
use crate::tier::JobResult;
use crate::trace::{Name, Trace};

/// A manager's side of a trace.
pub(super) struct Spans {
    trace: Trace,
    clock: Clock,
    /// What is added to the numbers of its jobs: other managers have jobs of the same numbers.
    first_job: u64,
    step: Name,
    parts: [Name; 3],
    /// Names of jobs, by tier and direction.
    jobs: Vec<[Name; 2]>,
}

/// The parts of a step, in order.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// Every tier's `end_step`.
    News = 0,
    /// Under the lock.
    Account = 1,
    /// Jobs are handed out.
    Submit = 2,
}

impl Spans {
    pub(super) fn new(trace: Trace, clock: &Clock, tiers: &[Tier]) -> Self {
        let job = |tier: &Tier, direction: Direction| {
            Name::new(&format!("{} {}", tier.name, direction.as_str()))
        };
        Self {
            first_job: trace.number() << 40,
            trace,
            clock: clock.clone(),
            step: Name::new("step"),
            parts: ["news", "account", "submit"].map(Name::new),
            jobs: tiers
                .iter()
                .map(|tier| [job(tier, Direction::Load), job(tier, Direction::Store)])
                .collect(),
        }
    }

    /// A step begins.
    pub(super) fn step(&self) -> Step<'_> {
        let now = self.clock.now();
        let track = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        Step { spans: self, track: track.into(), began: now, part_began: now }
    }

    /// A job is about to be submitted.
    pub(super) fn job_began(&self, job: &Ready) {
        let name = &self.jobs[job.tier][job.direction as usize];
        let arguments = [("request", job.request), ("chunks", job.chunks.len() as u64)];
        self.trace.begin(self.first_job + job.id, name, self.clock.now(), &arguments);
    }

    /// The result of a job was taken.
    pub(super) fn job_ended(&self, place: (usize, Direction), job: JobId, result: &JobResult) {
        let name = &self.jobs[place.0][place.1 as usize];
        let good = result.outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        let arguments = [
            ("moved", good as u64),
            ("failed", (result.outcomes.len() - good) as u64),
            ("bytes", result.bytes),
            ("worker_us", result.busy.as_micros() as u64),
        ];
        self.trace.end(self.first_job + job, name, result.ended, &arguments);
    }

    pub(super) fn flush(&self) {
        self.trace.flush();
    }
}

/// A step that is being traced.
pub(super) struct Step<'a> {
    spans: &'a Spans,
    track: u64,
    began: Instant,
    part_began: Instant,
}

impl Step<'_> {
    /// A part is over, and the next one begins.
    pub(super) fn done(&mut self, part: Part) {
        let now = self.spans.clock.now();
        let name = &self.spans.parts[part as usize];
        self.spans.trace.span(self.track, name, self.part_began, now, &[]);
        self.part_began = now;
    }

    /// The step is over.
    pub(super) fn end(self, number: u64) {
        let Self { spans, track, began, part_began } = self;
        spans.trace.span(track, &spans.step, began, part_began, &[("step", number)]);
        spans.flush();
    }
}
