//! The part of the manager that deals with jobs: cascades, steps, deadlines, the end.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use super::figures::EventKind;
use super::{Direction, Inner, Manager, ManagerError, Promotion, RequestId, Running};
use crate::index::{Pin, Token};
use crate::key::KeyBatch;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::tier::{Chunks, JobId, JobResult, LoadJob, Outcome, StoreJob};

/// A job that is accounted for and waits to be handed to its tier, without the lock.
pub(super) struct Ready {
    id: JobId,
    tier: usize,
    direction: Direction,
    chunks: Arc<Chunks>,
    cancelled: Arc<AtomicBool>,
}

impl Manager {
    /// Closes a step of the engine: takes the results of jobs, turns late ones into misses, and
    /// submits the queued promotions, one job per (tier, request).
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn end_step(&self) -> Result<(), ManagerError> {
        let jobs = {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            self.apply_results(inner);
            apply_deadlines(inner, Instant::now());
            self.flush_promotions(inner)
        };
        self.submit(jobs);
        Ok(())
    }

    /// Waits until a job has ended, or until `deadline`, whichever is first; false if none ended.
    /// Returns at once when no job is under way. Applies nothing.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn wait_until(&self, deadline: Instant) -> Result<bool, ManagerError> {
        {
            let mut inner = self.inner.lock();
            if inner.open()?.jobs.is_empty() {
                return Ok(false);
            }
        }
        Ok(self.results.wait_until(deadline))
    }

    /// Whether a promotion is queued or a job under way.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn is_busy(&self) -> Result<bool, ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        Ok(!inner.promotions.is_empty() || !inner.jobs.is_empty())
    }

    /// Drops what is queued, waits for workers that touch a slot, closes the tiers. Every tier is
    /// attempted, whatever another one does. Idempotent.
    pub fn shutdown(&self) {
        {
            let mut inner = self.inner.lock();
            if std::mem::replace(&mut inner.closed, true) {
                return;
            }
            for promotion in std::mem::take(&mut inner.promotions) {
                inner.index.abort(promotion.token);
            }
            inner.jobs.values().for_each(|job| job.cancelled.store(true, Ordering::Relaxed));
        }
        for slot in &self.tiers {
            if catch_unwind(AssertUnwindSafe(|| slot.tier.shutdown())).is_err() {
                log::error!("tier {:?} panicked while it was shut down", slot.name);
            }
        }
        self.apply_results(&mut self.inner.lock());
    }

    /// Pins the chunks once a tier and makes one store job a tier. A tier with too much under
    /// way is passed over.
    pub(super) fn cascade(
        &self,
        inner: &mut Inner,
        keys: &KeyBatch,
        tokens: Vec<Token>,
    ) -> Vec<Ready> {
        if self.tiers.is_empty() || tokens.is_empty() {
            return Vec::new();
        }
        let bytes = (tokens.len() * self.region.slot_bytes()) as u64;
        let slots = tokens.iter().map(|&token| inner.index.slot(token)).collect();
        let chunks = Arc::new(Chunks::new(keys.clone(), tokens, slots));
        let mut jobs = Vec::with_capacity(self.tiers.len());
        for (number, slot) in self.tiers.iter().enumerate() {
            let figures = &mut inner.tiers[number];
            // An idle tier takes a batch of any size, or a large one would never be stored.
            if figures.queued_bytes > 0 && figures.queued_bytes + bytes > slot.max_queued_bytes {
                figures.sheds += chunks.len() as u64;
                continue;
            }
            figures.queued_bytes += bytes;
            for &token in &chunks.tokens {
                // Cannot fail: it was committed under this lock, and there are fewer tiers than
                // a counter holds.
                let pinned = inner.index.pin(token, Pin::Job);
                debug_assert!(pinned.is_ok(), "{pinned:?}");
            }
            let deadline = Instant::now() + slot.store_deadline;
            jobs.push(inner.start(number, Direction::Store, Arc::clone(&chunks), deadline));
        }
        jobs
    }

    /// Makes one load job for each (tier, request) that has promotions queued.
    fn flush_promotions(&self, inner: &mut Inner) -> Vec<Ready> {
        if inner.promotions.is_empty() {
            return Vec::new();
        }
        let mut order: Vec<(usize, RequestId)> = Vec::new();
        let mut groups: HashMap<(usize, RequestId), Vec<Token>> = HashMap::new();
        for Promotion { tier, request, token } in std::mem::take(&mut inner.promotions) {
            let group = groups.entry((tier, request)).or_insert_with(|| {
                order.push((tier, request));
                Vec::new()
            });
            group.push(token);
        }
        let mut jobs = Vec::with_capacity(order.len());
        for (tier, request) in order {
            let tokens = groups.remove(&(tier, request)).unwrap_or_default();
            let mut keys = KeyBatch::with_capacity(tokens.len(), inner.index.key_bytes());
            for &token in &tokens {
                // A key of the index has the length of every other.
                let _ = keys.push(inner.index.key(token));
            }
            let slots = tokens.iter().map(|&token| inner.index.slot(token)).collect();
            let chunks = Arc::new(Chunks::new(keys, tokens, slots));
            let deadline = Instant::now() + self.tiers[tier].load_deadline;
            jobs.push(inner.start(tier, Direction::Load, chunks, deadline));
        }
        jobs
    }

    /// Hands jobs to their tiers; called without the lock. A tier that panics loses the job,
    /// which then reports itself as lost.
    pub(super) fn submit(&self, jobs: Vec<Ready>) {
        for job in jobs {
            let tier = &self.tiers[job.tier].tier;
            let region = Arc::clone(&self.region);
            let results = Arc::clone(&self.results);
            let handed = catch_unwind(AssertUnwindSafe(|| match job.direction {
                // SAFETY: `cascade` pinned the slots, and the pins come back with the result.
                Direction::Store => tier.submit_store(unsafe {
                    StoreJob::new(job.id, job.chunks, region, results, job.cancelled)
                }),
                // SAFETY: the slots are in state writing for this job alone, or detached if it is
                // late, until `apply_results` took its result. Reserved slots are distinct.
                Direction::Load => tier.submit_load(unsafe {
                    LoadJob::new(job.id, job.chunks, region, results, job.cancelled)
                }),
            }));
            if handed.is_err() {
                log::error!("tier {:?} panicked while it took a job", self.tiers[job.tier].name);
            }
        }
    }

    /// Takes the results that have arrived.
    pub(super) fn apply_results(&self, inner: &mut Inner) {
        for result in self.results.take() {
            if let Some(job) = inner.jobs.remove(&result.job) {
                inner.tiers[job.tier].in_flight -= 1;
                match job.direction {
                    Direction::Store => self.apply_store(inner, &job, &result),
                    Direction::Load => apply_load(inner, &job, &result),
                }
            }
        }
    }

    fn apply_store(&self, inner: &mut Inner, job: &Running, result: &JobResult) {
        for &token in job.chunks.tokens.iter().rev() {
            let unpinned = inner.index.unpin(token, Pin::Job);
            debug_assert!(unpinned.is_ok(), "{unpinned:?}");
        }
        let figures = &mut inner.tiers[job.tier];
        figures.queued_bytes -= (job.chunks.len() * self.region.slot_bytes()) as u64;
        figures.stores += count(&result.outcomes, &mut figures.store_failures);
        figures.store_bytes += result.bytes;
        figures.store_seconds += result.busy.as_secs_f64();
        figures.evictions += result.evicted.len() as u64;
        let tier = Some(job.tier);
        inner.events.push(EventKind::Removed, tier, result.evicted.iter());
        inner.events.push(EventKind::Stored, tier, moved(job, result));
    }
}

impl Inner {
    /// Accounts for a job.
    fn start(
        &mut self,
        tier: usize,
        direction: Direction,
        chunks: Arc<Chunks>,
        deadline: Instant,
    ) -> Ready {
        let id = self.next_job;
        self.next_job += 1;
        let cancelled = Arc::new(AtomicBool::new(false));
        self.tiers[tier].in_flight += 1;
        self.next_deadline = Some(self.next_deadline.map_or(deadline, |next| next.min(deadline)));
        self.jobs.insert(
            id,
            Running {
                tier,
                direction,
                chunks: Arc::clone(&chunks),
                deadline,
                cancelled: Arc::clone(&cancelled),
                overdue: false,
            },
        );
        Ready { id, tier, direction, chunks, cancelled }
    }
}

fn apply_load(inner: &mut Inner, job: &Running, result: &JobResult) {
    if job.overdue {
        // The keys became misses at the deadline; now nobody writes the slots any more.
        job.chunks.slots.iter().for_each(|&slot| inner.index.reclaim(slot));
    } else {
        for (&token, outcome) in job.chunks.tokens.iter().zip(&result.outcomes).rev() {
            match outcome {
                Ok(()) => inner.index.commit(token),
                Err(_) => inner.index.abort(token),
            }
        }
        inner.events.push(EventKind::Stored, None, moved(job, result));
    }
    let figures = &mut inner.tiers[job.tier];
    figures.loads += count(&result.outcomes, &mut figures.load_failures);
    figures.load_bytes += result.bytes;
    figures.load_seconds += result.busy.as_secs_f64();
}

/// Turns late loads into misses, and stops what late jobs have not begun.
fn apply_deadlines(inner: &mut Inner, now: Instant) {
    if inner.next_deadline.is_none_or(|next| now < next) {
        return;
    }
    inner.next_deadline = None;
    for job in inner.jobs.values_mut().filter(|job| !job.overdue) {
        if now < job.deadline {
            let next = inner.next_deadline.map_or(job.deadline, |next| next.min(job.deadline));
            inner.next_deadline = Some(next);
            continue;
        }
        job.overdue = true;
        job.cancelled.store(true, Ordering::Relaxed);
        inner.tiers[job.tier].overdue += 1;
        if job.direction == Direction::Load {
            for &token in &job.chunks.tokens {
                inner.index.detach(token);
            }
        }
    }
}

/// Counts what went well; adds what did not to its cause.
fn count(outcomes: &[Outcome], failures: &mut [u64]) -> u64 {
    let mut good = 0;
    for outcome in outcomes {
        match outcome {
            Ok(()) => good += 1,
            Err(failure) => failures[*failure as usize] += 1,
        }
    }
    good
}

/// The keys of a job that were moved.
fn moved<'a>(job: &'a Running, result: &'a JobResult) -> impl Iterator<Item = &'a [u8]> {
    let done = job.chunks.keys.iter().zip(&result.outcomes);
    done.filter(|(_, outcome)| outcome.is_ok()).map(|(key, _)| key)
}
