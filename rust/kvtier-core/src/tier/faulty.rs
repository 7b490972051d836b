//! A tier that goes wrong on purpose, around one that does not: for tests of engines and tiers.
//!
//! Jobs go to the inner tier as jobs of our own over the same slots. What comes back is passed
//! on late, in another order, in part, with flipped bytes, or not at all. What happens to a job
//! is drawn from the seed and the job's number, whatever the threads do, so a run is repeated by
//! its seed.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::fast::FixedState;
use serde::Deserialize;

use super::{
    Failure, Job, JobId, JobParts, JobResult, LoadJob, Locality, Medium, News, Presence, RequestId,
    Results, SecondaryTier, StoreJob, Usage,
};
use crate::checksum::Checksum;
use crate::clock::Clock;
use crate::key::KeyBatch;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Condvar, JoinHandle, Mutex, spawn};

/// What goes wrong, how often. Rates are from 0, never, to 1, always.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// What all else is drawn from.
    pub seed: u64,
    /// Seconds that every job takes longer.
    pub latency_s: f64,
    /// Draws the latency of each job between nothing and twice as much, so that jobs end in
    /// another order than they began.
    pub reorder: bool,
    /// Rate of jobs that are dropped without a report.
    pub loss: f64,
    /// Rate of chunks that fail, in jobs that go well otherwise.
    pub partial: f64,
    /// Rate of chunks that come back with a flipped bit.
    pub corrupt: f64,
    /// Rate of stores that find no room.
    pub full: f64,
    /// Rate of jobs that do not end before the tier is shut down.
    pub hang: f64,
    /// Rate of calls that panic.
    pub panic: f64,
    /// Rate of keys that the tier does not know of yet.
    pub retry: f64,
    /// Rate of keys that the tier says it has, though it has not.
    pub lie: f64,
    /// Number of jobs after which it has nothing, takes nothing, and answers nothing.
    pub crash_after: Option<u64>,
}

impl Faults {
    /// Checks the rates.
    ///
    /// # Errors
    /// The field that is no rate, or no number of seconds.
    pub(super) fn check(&self) -> Result<(), String> {
        let rates = [
            ("loss", self.loss),
            ("partial", self.partial),
            ("corrupt", self.corrupt),
            ("full", self.full),
            ("hang", self.hang),
            ("panic", self.panic),
            ("retry", self.retry),
            ("lie", self.lie),
        ];
        for (name, rate) in rates {
            if !(0.0..=1.0).contains(&rate) {
                return Err(format!("faults: {name} = {rate} is not between 0 and 1"));
            }
        }
        if !(0.0..=3600.0).contains(&self.latency_s) {
            let latency = self.latency_s;
            return Err(format!("faults: latency_s = {latency} is not between 0 and 3600"));
        }
        Ok(())
    }

    /// A number from 0 to 1 that depends on nothing but the seed, what it is for, and which.
    fn draw(&self, what: &str, which: u64, part: u64) -> f64 {
        let mut hasher = FixedState::with_seed(self.seed).build_hasher();
        hasher.write(what.as_bytes());
        hasher.write_u64(which);
        hasher.write_u64(part);
        (hasher.finish() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn latency(&self, job: JobId) -> Duration {
        let factor = if self.reorder { 2.0 * self.draw("latency", job, 0) } else { 1.0 };
        Duration::from_secs_f64(self.latency_s * factor)
    }
}

/// A job of the outside, until it is passed on.
enum Held {
    Load(LoadJob),
    Store(StoreJob),
}

#[derive(Default)]
struct Queue {
    /// What the inner tier works on, by the number of our own job.
    inside: HashMap<JobId, Held>,
    /// What ended there, and when it is passed on.
    ended: Vec<(Instant, JobId, Held, JobResult)>,
    /// What never is.
    hanging: Vec<Held>,
    closed: bool,
}

/// What the tier and its thread share.
struct Shared {
    faults: Faults,
    results: Arc<Results>,
    queue: Mutex<Queue>,
    wake: Condvar,
}

/// A tier around another; see the module.
pub struct FaultyTier {
    inner: Box<dyn SecondaryTier>,
    shared: Arc<Shared>,
    jobs: AtomicU64,
    calls: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// How often the thread looks for what the inner tier has ended.
const TICK: Duration = Duration::from_millis(1);

impl FaultyTier {
    /// Puts faults in front of a tier.
    ///
    /// # Errors
    /// When its thread cannot be started.
    pub fn start(inner: Box<dyn SecondaryTier>, faults: Faults) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            faults,
            results: Arc::new(Results::new(Clock::system())),
            queue: Mutex::default(),
            wake: Condvar::default(),
        });
        let theirs = Arc::clone(&shared);
        let thread = spawn("kvtier-faulty".into(), move || theirs.run())?;
        Ok(Self {
            inner,
            shared,
            jobs: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            thread: Mutex::new(Some(thread)),
        })
    }

    fn crashed(&self) -> bool {
        let jobs = self.jobs.load(Ordering::Relaxed);
        self.shared.faults.crash_after.is_some_and(|after| jobs >= after)
    }

    fn maybe_panic(&self) {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let faults = &self.shared.faults;
        if faults.panic > 0.0 && faults.draw("panic", call, 0) < faults.panic {
            // Without the hook: it is wanted, and nobody's bug.
            resume_unwind(Box::new("a fault that was asked for"));
        }
    }

    /// Takes a job in; what is to be given to the inner tier, if anything.
    fn admit(&self, outer: Held) -> Option<JobParts> {
        let faults = &self.shared.faults;
        let id = self.jobs.fetch_add(1, Ordering::Relaxed);
        if faults.crash_after.is_some_and(|after| id >= after)
            || faults.draw("loss", id, 0) < faults.loss
        {
            return None;
        }
        if faults.draw("hang", id, 0) < faults.hang {
            self.shared.queue.lock().hanging.push(outer);
            return None;
        }
        let job: &Job = match &outer {
            Held::Load(job) => job,
            Held::Store(job) => job,
        };
        let parts = JobParts {
            id,
            request: job.request(),
            chunks: Arc::clone(job.chunks()),
            region: Arc::clone(job.region()),
            results: Arc::clone(&self.shared.results),
            cancelled: Arc::clone(job.cancelled()),
        };
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            return None;
        }
        queue.inside.insert(id, outer);
        drop(queue);
        self.shared.wake.notify_all();
        Some(parts)
    }
}

impl SecondaryTier for FaultyTier {
    fn medium(&self) -> Medium {
        self.inner.medium()
    }

    fn locality(&self) -> Locality {
        self.inner.locality()
    }

    fn directory(&self) -> Option<&Path> {
        self.inner.directory()
    }

    fn lookup(
        &self,
        request: RequestId,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) {
        self.maybe_panic();
        if self.crashed() {
            return;
        }
        self.inner.lookup(request, keys, wanted, presence);
        let faults = &self.shared.faults;
        let call = self.calls.load(Ordering::Relaxed);
        for (at, answer) in presence.iter_mut().enumerate() {
            if faults.draw("retry", call, at as u64) < faults.retry {
                *answer = Presence::Retry;
            } else if faults.draw("lie", call, at as u64) < faults.lie {
                *answer = Presence::Hit;
            }
        }
    }

    fn submit_store(&self, job: StoreJob) {
        self.maybe_panic();
        let faults = &self.shared.faults;
        if faults.draw("full", self.jobs.load(Ordering::Relaxed), 0) < faults.full {
            self.jobs.fetch_add(1, Ordering::Relaxed);
            for index in 0..job.len() {
                job.report(index, Err(Failure::Full), Duration::ZERO, None);
            }
            return;
        }
        if let Some(parts) = self.admit(Held::Store(job)) {
            // SAFETY: the outer job is kept until this one's result was taken, and its slots are
            // pinned as long.
            self.inner.submit_store(unsafe { StoreJob::new(parts) });
        }
    }

    fn submit_load(&self, job: LoadJob) {
        self.maybe_panic();
        if let Some(parts) = self.admit(Held::Load(job)) {
            // SAFETY: the outer job owns the slots and is kept, untouched, until this one's
            // result was taken.
            self.inner.submit_load(unsafe { LoadJob::new(parts) });
        }
    }

    fn touch(&self, keys: &KeyBatch) {
        self.maybe_panic();
        self.inner.touch(keys);
    }

    fn end_step(&self, news: &mut News) {
        self.maybe_panic();
        self.inner.end_step(news);
    }

    fn finish_request(&self, request: RequestId) {
        self.inner.finish_request(request);
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }

    fn details(&self) -> Vec<(&'static str, u64)> {
        self.inner.details()
    }

    fn shutdown(&self) {
        // The inner tier first: afterwards nobody works on a slot of ours.
        self.inner.shutdown();
        let held = {
            let mut queue = self.shared.queue.lock();
            queue.closed = true;
            (std::mem::take(&mut queue.inside), std::mem::take(&mut queue.hanging))
        };
        // Outside the lock: dropping a job reports it.
        drop(held);
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            // It runs nothing that can panic or block.
            let _ = thread.join();
        }
    }
}

impl Drop for FaultyTier {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    fn run(&self) {
        let mut queue = self.queue.lock();
        while !queue.closed {
            for result in self.results.take() {
                if let Some(outer) = queue.inside.remove(&result.job) {
                    let due = Instant::now() + self.faults.latency(result.job);
                    queue.ended.push((due, result.job, outer, result));
                }
            }
            let now = Instant::now();
            let due: Vec<_> = queue.ended.extract_if(.., |(due, ..)| *due <= now).collect();
            if !due.is_empty() {
                drop(queue);
                for (_, id, outer, result) in due {
                    self.pass_on(id, &outer, &result);
                }
                queue = self.queue.lock();
            } else if queue.inside.is_empty() && queue.ended.is_empty() {
                self.wake.wait(&mut queue);
            } else {
                self.wake.wait_until(&mut queue, now + TICK);
            }
        }
        let ended = std::mem::take(&mut queue.ended);
        drop(queue);
        drop(ended);
    }

    /// Reports to the outside what the inner tier reported, less what goes wrong.
    fn pass_on(&self, id: JobId, outer: &Held, result: &JobResult) {
        let faults = &self.faults;
        let chunks = result.outcomes.len().max(1) as u32;
        let busy = result.busy / chunks;
        for (index, &outcome) in result.outcomes.iter().enumerate() {
            let part = index as u64;
            let failed = faults.draw("partial", id, part) < faults.partial;
            let outcome = if failed { outcome.and(Err(Failure::Io)) } else { outcome };
            match (outer, outcome) {
                (Held::Store(job), outcome) => {
                    let evicted = (index == 0).then_some(&result.evicted);
                    job.report(index, outcome, busy, evicted);
                }
                (Held::Load(job), Err(failure)) => {
                    job.fail(index, failure, busy);
                    if result.evicted.iter().any(|key| key == job.key(index)) {
                        job.dropped(index);
                    }
                }
                (Held::Load(job), Ok(())) => {
                    // SAFETY: the inner job's result was taken, so nobody else touches the slot;
                    // the borrow ends before `deliver`.
                    let place = unsafe { job.place(index) };
                    let stored = Checksum::of_chunk(job.key(index), place);
                    if faults.draw("corrupt", id, part) < faults.corrupt {
                        let at = faults.draw("place", id, part) * place.len() as f64;
                        // A number below 1, times the length: a place.
                        #[expect(clippy::cast_sign_loss, reason = "not below 0")]
                        let at = at as usize;
                        place[at] ^= 1;
                    }
                    // What it says is in the outcome already.
                    let _ = job.deliver(index, stored, busy);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "faulty_tests.rs"]
mod tests;
