//! The end of a step, waiting for jobs, shutdown, and handing jobs to tiers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::figures::{Direction, EventKind};
use super::lookup::Promotion;
use super::spans::{Part, Spans};
use super::{Inner, Manager, ManagerError, RequestId};
use crate::index::Token;
use crate::key::KeyBatch;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::tier::{Chunks, JobId, JobParts, LoadJob, News, StoreJob};

/// A job that is accounted for and waits to be handed to its tier, without the lock.
pub(super) struct Ready {
    pub(super) id: JobId,
    pub(super) request: RequestId,
    pub(super) tier: usize,
    pub(super) direction: Direction,
    pub(super) chunks: Arc<Chunks>,
    pub(super) cancelled: Arc<AtomicBool>,
}

/// What the tiers are told when the lock is released.
#[derive(Default)]
pub(super) struct Outgoing {
    pub(super) jobs: Vec<Ready>,
    /// Requests that ended; no job of theirs comes after `jobs`.
    pub(super) ended: Vec<RequestId>,
}

impl Outgoing {
    fn append(&mut self, other: Self) {
        self.jobs.extend(other.jobs);
        self.ended.extend(other.ended);
    }
}

impl Manager {
    /// Closes a step of the engine: takes the results of jobs, turns late ones into misses, and
    /// submits the queued promotions, one job per (tier, request).
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn end_step(&self) -> Result<(), ManagerError> {
        let mut step = self.spans.as_ref().map(Spans::step);
        let mut done = |part| {
            if let Some(step) = &mut step {
                step.done(part);
            }
        };
        let mut removed = Vec::new();
        for (number, tier) in self.tiers.iter().enumerate() {
            let mut news = News::default();
            self.tiers[number].call("end_step", |tier| tier.end_step(&mut news));
            news.faults.iter().for_each(|&fault| tier.note(fault));
            if !news.removed.is_empty() {
                removed.push((number, news.removed));
            }
        }
        done(Part::News);
        let (outgoing, number, revision) = {
            let mut inner = self.inner.lock();
            let inner = inner.look()?;
            inner.step += 1;
            for (number, keys) in &removed {
                inner.revision += 1;
                inner.tiers[*number].figures.evictions += keys.len() as u64;
                let keys = keys.iter().map(AsRef::as_ref);
                inner.events.push(EventKind::Removed, Some(*number), keys);
            }
            self.apply_results(inner);
            self.apply_deadlines(inner);
            let mut outgoing = self.flush_parked(inner);
            outgoing.append(self.flush_promotions(inner));
            if !inner.resetting {
                // Promotions that are held back may be theirs.
                outgoing.ended.append(&mut inner.ended);
            }
            (outgoing, inner.step, inner.revision)
        };
        done(Part::Account);
        self.send(outgoing);
        done(Part::Submit);
        if let Some(step) = step {
            step.end(number);
        }
        if let Some(page) = &self.page
            && page.is_due(revision)
        {
            page.publish(&self.stats());
        }
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
            if inner.look()?.jobs.is_empty() {
                return Ok(false);
            }
        }
        Ok(self.results.wait_until(deadline))
    }

    /// Whether the next `end_step` has something to submit, or a job is under way.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn is_busy(&self) -> Result<bool, ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.look()?;
        let promotes = !inner.promotions.is_empty() && !inner.resetting;
        Ok(promotes || !inner.jobs.is_empty())
    }

    /// Drops what is queued, waits for workers that touch a slot, closes the tiers. Every tier is
    /// attempted, whatever another one does; the region goes with its last user. Idempotent.
    pub fn shutdown(&self) {
        {
            let mut inner = self.inner.lock();
            if std::mem::replace(&mut inner.closed, true) {
                return;
            }
            inner.drop_promotions();
            inner.jobs.values().for_each(|job| job.cancelled.store(true, Ordering::Relaxed));
        }
        for number in 0..self.tiers.len() {
            self.tiers[number].call("shutdown", |tier| tier.shutdown());
        }
        self.apply_results(&mut self.inner.lock());
        if let Some(page) = &self.page {
            page.withdraw();
        }
        if let Some(spans) = &self.spans {
            spans.flush();
        }
    }

    /// Makes one load job for each (tier, request) that has promotions queued.
    fn flush_promotions(&self, inner: &mut Inner) -> Outgoing {
        let mut outgoing = Outgoing::default();
        if inner.promotions.is_empty() || inner.resetting {
            return outgoing;
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
        let now = self.clock.now();
        for (tier, request) in order {
            let tokens = groups.remove(&(tier, request)).unwrap_or_default();
            inner.tiers[tier].promotions -= tokens.len() as u64;
            inner.tiers[tier].loading += tokens.len() as u64;
            let mut keys = KeyBatch::with_capacity(tokens.len(), inner.index.key_bytes());
            for &token in &tokens {
                // A key of the index has the length of every other.
                let _ = keys.push(inner.index.key(token));
            }
            let slots = tokens.iter().map(|&token| inner.index.slot(token)).collect();
            let chunks = Arc::new(Chunks::new(keys, tokens, slots));
            let deadline = now + self.tiers[tier].limits.load_deadline;
            let place = (tier, Direction::Load);
            outgoing.jobs.push(inner.start(place, request, chunks, (now, deadline)));
        }
        outgoing
    }

    /// Offers what was still being written when a request offered it.
    fn flush_parked(&self, inner: &mut Inner) -> Outgoing {
        let mut outgoing = Outgoing::default();
        for request in std::mem::take(&mut inner.parked) {
            let Some(state) = inner.requests.get_mut(&request) else {
                continue;
            };
            let tiers = state.gets_all;
            let empty = KeyBatch::empty(state.parked.key_bytes());
            let parked = std::mem::replace(&mut state.parked, empty);
            outgoing.append(self.offer_resident(inner, request, &parked, tiers));
            inner.end_if_done(request);
        }
        outgoing
    }

    /// Hands jobs to their tiers and tells them of ended requests; called without the lock. A
    /// tier that panics loses the job, which then reports itself as lost.
    pub(super) fn send(&self, outgoing: Outgoing) {
        for job in outgoing.jobs {
            if let Some(spans) = &self.spans {
                spans.job_began(&job);
            }
            let Ready { id, request, tier, direction, chunks, cancelled } = job;
            let region = Arc::clone(&self.region);
            let results = Arc::clone(&self.results);
            let parts = JobParts { id, request, chunks, region, results, cancelled };
            match direction {
                Direction::Store => {
                    // SAFETY: `cascade` pinned the slots, and the pins come back with the result.
                    let job = unsafe { StoreJob::new(parts) };
                    self.tiers[tier].call("submit_store", |tier| tier.submit_store(job));
                }
                Direction::Load => {
                    // SAFETY: the slots are in state writing for this job alone, or detached,
                    // until `apply_results` took its result. Reserved slots are distinct.
                    let job = unsafe { LoadJob::new(parts) };
                    self.tiers[tier].call("submit_load", |tier| tier.submit_load(job));
                }
            }
        }
        for request in outgoing.ended {
            for number in 0..self.tiers.len() {
                self.tiers[number].call("finish_request", |tier| tier.finish_request(request));
            }
        }
    }
}

impl Inner {
    /// Gives the slots of queued promotions back: no job touches them yet.
    pub(super) fn drop_promotions(&mut self) {
        for promotion in std::mem::take(&mut self.promotions) {
            self.tiers[promotion.tier].promotions -= 1;
            self.index.abort(promotion.token);
        }
    }
}
