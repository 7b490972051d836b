//! Jobs that a Python tier has, and when it is asked for their results.
//!
//! A job resolves when two things happened, in either order: the tier *reported* it, and let go
//! of every view (it is *free*). A job that is free and was not reported when a later call of
//! `finished` is over is lost: nobody has its bytes, and nobody is going to report it.
//!
//! `finished` is asked when the engine ends a step or the tier notifies, and in between after
//! [`FIRST_GAP`], twice that, and so on. Invariant: a job is in `jobs` or in `settled`, or gone.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::tier::{Fault, JobId};

use super::job::{AnyJob, Lent};
use super::report::Report;

/// Reported jobs that are remembered, to tell a repeated report from an unknown job.
const REMEMBERED: usize = 256;
/// How soon `finished` is asked again while jobs are out; doubles each time in vain ...
const FIRST_GAP: Duration = Duration::from_millis(1);
/// ... up to this.
const LAST_GAP: Duration = Duration::from_millis(32);

/// A job that the tier has.
struct Out {
    job: AnyJob,
    lent: Arc<Lent>,
    since: Instant,
    report: Option<Report>,
    /// How many calls of `finished` had begun when nobody held it any more.
    free_since: Option<u64>,
}

/// A job whose end is known; without a report it is lost.
pub(super) type Settled = (AnyJob, Option<Report>);

#[derive(PartialEq, Eq)]
enum Poll {
    No,
    Running,
    /// The tier gave all it had.
    Over,
}

/// See the module.
pub(super) struct Outstanding {
    jobs: HashMap<JobId, Out>,
    settled: Vec<Settled>,
    reported: VecDeque<JobId>,
    poll: Poll,
    polls: u64,
    poll_at: Option<Instant>,
    gap: Duration,
}

impl Outstanding {
    pub(super) fn new() -> Self {
        Self {
            jobs: HashMap::new(),
            settled: Vec::new(),
            reported: VecDeque::new(),
            poll: Poll::No,
            polls: 0,
            poll_at: None,
            gap: FIRST_GAP,
        }
    }

    /// Whether the tier has none.
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// More results than the tier can have.
    pub(super) fn most_results(&self) -> usize {
        self.jobs.len() + REMEMBERED
    }

    /// The tier is handed a job.
    pub(super) fn add(&mut self, job: AnyJob, lent: Arc<Lent>) {
        let since = Instant::now();
        self.jobs.insert(job.id(), Out { job, lent, since, report: None, free_since: None });
        // A tier that moves the bytes at once has its result ready.
        self.poll_soon();
        self.gap = FIRST_GAP;
    }

    /// A job that the tier did not report yet, what was lent with it, and since when it has it; or
    /// what is wrong with the number.
    pub(super) fn find(&self, id: JobId) -> Result<(AnyJob, Arc<Lent>, Instant), Fault> {
        match self.jobs.get(&id) {
            Some(Out { job, lent, since, report: None, .. }) => {
                Ok((job.clone(), Arc::clone(lent), *since))
            }
            _ if self.reported.contains(&id) => Err(Fault::RepeatedJob),
            _ => Err(Fault::UnknownJob),
        }
    }

    /// Takes a job's report.
    pub(super) fn reported(&mut self, id: JobId, report: Report) {
        let Some(out) = self.jobs.get_mut(&id) else {
            return;
        };
        out.report = Some(report);
        if out.free_since.is_some() {
            self.settle(id);
        }
        if self.reported.len() == REMEMBERED {
            self.reported.pop_front();
        }
        self.reported.push_back(id);
        self.gap = FIRST_GAP;
    }

    /// Nothing of Python can touch the job's slots any more.
    pub(super) fn let_go(&mut self, id: JobId) {
        let Some(out) = self.jobs.get_mut(&id) else {
            return;
        };
        out.free_since = Some(self.polls);
        if out.report.is_some() {
            self.settle(id);
        } else {
            self.poll_soon();
        }
    }

    fn settle(&mut self, id: JobId) {
        if let Some(out) = self.jobs.remove(&id) {
            self.settled.push((out.job, out.report));
        }
    }

    /// A job that the tier never had is not going to it.
    pub(super) fn withdraw(&mut self, job: AnyJob) {
        self.settled.push((job, None));
    }

    /// What has settled, to be resolved without a lock.
    pub(super) fn take_settled(&mut self) -> Vec<Settled> {
        std::mem::take(&mut self.settled)
    }

    /// Takes all jobs. Those that the tier still holds are lost when it lets go of them.
    pub(super) fn take_all(&mut self) -> Vec<Settled> {
        let mut all = self.take_settled();
        let held = std::mem::take(&mut self.jobs).into_values();
        all.extend(held.map(|out| (out.job, out.report.filter(|_| out.free_since.is_some()))));
        all
    }

    /// Has `finished` asked as soon as the tier's thread is free.
    pub(super) fn poll_soon(&mut self) {
        self.poll_at = Some(Instant::now());
    }

    /// When `finished` is to be asked.
    pub(super) fn poll_at(&self) -> Option<Instant> {
        self.poll_at
    }

    /// The tier is about to be asked.
    pub(super) fn begin_poll(&mut self) {
        self.poll_at = None;
        self.polls += 1;
        self.poll = Poll::Running;
    }

    /// The tier gave all the results it had.
    pub(super) fn polled(&mut self) {
        self.poll = Poll::Over;
    }

    /// The tier came back from a call.
    pub(super) fn call_is_over(&mut self) {
        let polls = self.polls;
        let poll = std::mem::replace(&mut self.poll, Poll::No);
        if poll == Poll::Over {
            let dropped = self.jobs.extract_if(|_, out| {
                out.report.is_none() && out.free_since.is_some_and(|since| since < polls)
            });
            self.settled.extend(dropped.map(|(_, out)| (out.job, None)));
        }
        if poll != Poll::No && self.jobs.values().any(|out| out.report.is_none()) {
            let at = Instant::now() + self.gap;
            self.poll_at = Some(self.poll_at.map_or(at, |sooner| sooner.min(at)));
            self.gap = (self.gap * 2).min(LAST_GAP);
        }
    }
}
