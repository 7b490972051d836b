//! Accounting for jobs: cascades, results, deadlines.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::figures::{Direction, EventKind};
use super::step::{Outgoing, Ready};
use super::{Inner, Manager, RequestId, TierMask};
use crate::index::{Pin, Slot, Token};
use crate::key::KeyBatch;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::tier::{Chunks, Failure, JobId, JobResult, Outcome, Shed};

/// A job that a tier works on.
pub(super) struct Running {
    pub(super) tier: usize,
    pub(super) direction: Direction,
    pub(super) chunks: Arc<Chunks>,
    pub(super) cancelled: Arc<AtomicBool>,
    submitted: Instant,
    deadline: Instant,
    overdue: bool,
    /// Given up to make room for newer stores.
    shed: bool,
    /// Its keys are not in the index any more, or others are: only the slots are its own.
    pub(super) detached: bool,
}

impl Manager {
    /// Pins the chunks once a tier and makes one store job a tier, as far as the tiers can take
    /// it.
    pub(super) fn cascade(
        &self,
        inner: &mut Inner,
        request: RequestId,
        keys: &KeyBatch,
        tokens: Vec<Token>,
        tiers: TierMask,
    ) -> Outgoing {
        let mut outgoing = Outgoing::default();
        if self.tiers.is_empty() || tokens.is_empty() {
            return outgoing;
        }
        let bytes = (tokens.len() * self.region.slot_bytes()) as u64;
        let now = self.clock.now();
        let slots = tokens.iter().map(|&token| inner.index.slot(token)).collect();
        let chunks = Arc::new(Chunks::new(keys.clone(), tokens, slots));
        for number in (0..self.tiers.len()).filter(|number| tiers & 1 << number != 0) {
            if !self.takes_store(inner, number, chunks.len() as u64, bytes, now) {
                continue;
            }
            for &token in &chunks.tokens {
                // Cannot fail: it is ready, and there are fewer tiers than a counter holds.
                let pinned = inner.index.pin(token, Pin::Job);
                debug_assert!(pinned.is_ok(), "{pinned:?}");
            }
            let deadline = now + self.tiers[number].limits.store_deadline;
            let ready = inner.start(
                (number, Direction::Store),
                request,
                Arc::clone(&chunks),
                (now, deadline),
            );
            let tier = &mut inner.tiers[number];
            tier.figures.queued_bytes += bytes;
            tier.live_bytes += bytes;
            tier.stores.push_back(ready.id);
            tier.pressure.began(now);
            outgoing.jobs.push(ready);
        }
        outgoing
    }

    /// Whether a tier gets a store of `bytes` now; counts it if not, and makes room for it among
    /// older ones if that is wanted.
    fn takes_store(
        &self,
        inner: &mut Inner,
        number: usize,
        chunks: u64,
        bytes: u64,
        now: Instant,
    ) -> bool {
        let most = self.tiers[number].max_queued_bytes;
        let (admitted, change) =
            inner.tiers[number].breakers[Direction::Store as usize].admits(now);
        inner.breaker_is(number, Direction::Store, change);
        let tier = &mut inner.tiers[number];
        if !admitted {
            tier.figures.refused += chunks;
            return false;
        }
        let under = tier.pressure.is_under();
        let full = |queued: u64, most: u64| queued > 0 && (under || queued + bytes > most);
        // An idle tier takes a batch of any size, or a large one would never be stored.
        if !full(tier.live_bytes, most) {
            return true;
        }
        // Stores that were given up keep their slots until the tier comes to them: a tier that
        // stands still must not hold ever more.
        let held = tier.figures.queued_bytes;
        if self.tiers[number].limits.shed == Shed::Newest || held + bytes > most.saturating_mul(2) {
            tier.figures.sheds += chunks;
            return false;
        }
        while full(tier.live_bytes, most) {
            let Some(job) = tier.stores.pop_front().and_then(|id| inner.jobs.get_mut(&id)) else {
                break;
            };
            job.shed = true;
            job.cancelled.store(true, Ordering::Relaxed);
            tier.live_bytes -= (job.chunks.len() * self.region.slot_bytes()) as u64;
        }
        true
    }

    /// Takes the results that have arrived, and counts the faults of the tiers.
    pub(super) fn apply_results(&self, inner: &mut Inner) {
        for result in self.results.take() {
            if let Some(job) = inner.jobs.remove(&result.job) {
                inner.revision += 1;
                if let Some(spans) = &self.spans {
                    spans.job_ended((job.tier, job.direction), result.job, &result);
                }
                let moved = inner.tiers[job.tier].moved(job.direction);
                moved.in_flight -= 1;
                moved.bytes += result.bytes;
                moved.seconds += result.busy.as_secs_f64();
                inner.judge(&job, &result);
                match job.direction {
                    Direction::Store => self.apply_store(inner, &job, &result),
                    Direction::Load => inner.apply_load(&job, &result),
                }
            }
        }
        for (number, tier) in self.tiers.iter().enumerate() {
            for (fault, noted) in tier.faults.iter().enumerate() {
                // A load costs nothing, a swap would fetch the line for writing.
                if noted.load(Ordering::Relaxed) > 0 {
                    let times = noted.swap(0, Ordering::Relaxed);
                    inner.count_faults(number, fault, times, self.clock.now());
                }
            }
        }
    }

    fn apply_store(&self, inner: &mut Inner, job: &Running, result: &JobResult) {
        if job.detached {
            job.chunks.slots.iter().for_each(|&slot| inner.let_go(slot));
        } else {
            for &token in job.chunks.tokens.iter().rev() {
                let unpinned = inner.index.unpin(token, Pin::Job);
                debug_assert!(unpinned.is_ok(), "{unpinned:?}");
            }
        }
        let bytes = (job.chunks.len() * self.region.slot_bytes()) as u64;
        let tier = &mut inner.tiers[job.tier];
        tier.figures.queued_bytes -= bytes;
        if !job.shed {
            tier.live_bytes -= bytes;
            // The oldest ends first, as a rule.
            if let Some(at) = tier.stores.iter().position(|&id| id == result.job) {
                tier.stores.remove(at);
            }
        }
        let idle = tier.figures.stores.in_flight == 0;
        tier.pressure.ended(result.bytes, result.ended, idle);
        let mut failures = [0; Failure::ALL.len()];
        tier.figures.stores.chunks += count(&result.outcomes, &mut failures);
        if job.shed {
            tier.figures.sheds += failures.iter().sum::<u64>();
        } else {
            add(&mut tier.figures.stores.failures, failures);
        }
        tier.figures.evictions += result.evicted.len() as u64;
        if !tier.doubts.is_empty() {
            moved(job, result).for_each(|key| tier.doubts.trust(inner.index.fingerprint_of(key)));
        }
        let number = Some(job.tier);
        inner.events.push(EventKind::Removed, number, result.evicted.iter());
        inner.events.push(EventKind::Stored, number, moved(job, result));
    }

    /// Turns late loads into misses, and stops what late jobs have not begun.
    pub(super) fn apply_deadlines(&self, inner: &mut Inner) {
        let Some(next) = inner.next_deadline else {
            return;
        };
        let now = self.clock.now();
        if now < next {
            return;
        }
        inner.next_deadline = None;
        let mut late = Vec::new();
        for (&id, job) in inner.jobs.iter_mut().filter(|(_, job)| !job.overdue) {
            if now < job.deadline {
                let next = inner.next_deadline.map_or(job.deadline, |next| next.min(job.deadline));
                inner.next_deadline = Some(next);
            } else {
                late.push(id);
            }
        }
        // In the order they began, so that a run can be repeated.
        late.sort_unstable();
        for id in late {
            inner.overdue(id, now);
        }
    }
}

impl Inner {
    /// Accounts for a job of `place`: a tier and a direction.
    pub(super) fn start(
        &mut self,
        place: (usize, Direction),
        request: RequestId,
        chunks: Arc<Chunks>,
        (submitted, deadline): (Instant, Instant),
    ) -> Ready {
        let (tier, direction) = place;
        self.revision += 1;
        let id = self.next_job;
        self.next_job += 1;
        let cancelled = Arc::new(AtomicBool::new(false));
        self.tiers[tier].moved(direction).in_flight += 1;
        self.tiers[tier].breakers[direction as usize].began(id);
        self.next_deadline = Some(self.next_deadline.map_or(deadline, |next| next.min(deadline)));
        self.jobs.insert(
            id,
            Running {
                tier,
                direction,
                chunks: Arc::clone(&chunks),
                cancelled: Arc::clone(&cancelled),
                submitted,
                deadline,
                overdue: false,
                shed: false,
                detached: false,
            },
        );
        Ready { id, request, tier, direction, chunks, cancelled }
    }

    /// Tells the breaker how a job ended, and notes how long it took.
    fn judge(&mut self, job: &Running, result: &JobResult) {
        let breaker = &mut self.tiers[job.tier].breakers[job.direction as usize];
        if job.overdue {
            // Judged when it became late.
            return;
        }
        let withdrawn = job.shed || job.cancelled.load(Ordering::Relaxed);
        let change = breaker.judge(result, withdrawn);
        let took = result.ended.saturating_duration_since(job.submitted);
        self.tiers[job.tier].moved(job.direction).latency.add(took);
        self.breaker_is(job.tier, job.direction, change);
    }

    fn apply_load(&mut self, job: &Running, result: &JobResult) {
        if !job.overdue && !job.cancelled.load(Ordering::Relaxed) {
            let doubts = &mut self.tiers[job.tier].doubts;
            for (key, outcome) in job.chunks.keys.iter().zip(&result.outcomes) {
                match outcome {
                    Ok(()) if doubts.is_empty() => {}
                    Ok(()) => doubts.trust(self.index.fingerprint_of(key)),
                    Err(_) => doubts.failed(self.index.fingerprint_of(key), result.ended),
                }
            }
        }
        if job.detached {
            // The keys became misses before; now nobody writes the slots any more.
            job.chunks.slots.iter().for_each(|&slot| self.let_go(slot));
        } else {
            for (&token, outcome) in job.chunks.tokens.iter().zip(&result.outcomes).rev() {
                match outcome {
                    Ok(()) => self.index.commit(token),
                    Err(_) => self.index.abort(token),
                }
            }
            self.events.push(EventKind::Stored, None, moved(job, result));
        }
        self.tiers[job.tier].loading -= job.chunks.len() as u64;
        self.events.push(EventKind::Removed, Some(job.tier), result.evicted.iter());
        let figures = &mut self.tiers[job.tier].figures;
        if job.overdue {
            figures.quarantined -= job.chunks.len() as u64;
        }
        let mut failures = [0; Failure::ALL.len()];
        figures.loads.chunks += count(&result.outcomes, &mut failures);
        add(&mut figures.loads.failures, failures);
    }

    /// A job passed its deadline.
    fn overdue(&mut self, id: JobId, now: Instant) {
        let Some(job) = self.jobs.get_mut(&id) else {
            return;
        };
        self.revision += 1;
        job.overdue = true;
        job.cancelled.store(true, Ordering::Relaxed);
        let (tier, direction) = (job.tier, job.direction);
        self.tiers[tier].moved(direction).overdue += 1;
        if direction == Direction::Load {
            self.tiers[tier].figures.quarantined += job.chunks.len() as u64;
            for key in &job.chunks.keys {
                self.tiers[tier].doubts.failed(self.index.fingerprint_of(key), now);
            }
            if !std::mem::replace(&mut job.detached, true) {
                for &token in &job.chunks.tokens {
                    self.index.detach(token);
                }
            }
        }
        let change = self.tiers[tier].breakers[direction as usize].failed(Some(id), now);
        self.breaker_is(tier, direction, change);
    }

    /// Counts faults of a tier, each of them against its loads.
    fn count_faults(&mut self, number: usize, fault: usize, times: u32, now: Instant) {
        self.revision += 1;
        self.tiers[number].figures.faults[fault] += u64::from(times);
        for _ in 0..times.min(u32::from(u16::MAX)) {
            let change = self.tiers[number].breakers[Direction::Load as usize].failed(None, now);
            self.breaker_is(number, Direction::Load, change);
        }
    }

    /// Checks that detached slots are those that somebody holds.
    pub(super) fn check_holders(&self) -> Result<(), String> {
        let mut holders: HashMap<Slot, u32> = HashMap::new();
        let of_jobs = self.jobs.values().filter(|job| job.detached);
        let slots = of_jobs.flat_map(|job| &job.chunks.slots).chain(&self.engine_held);
        slots.for_each(|&slot| *holders.entry(slot).or_default() += 1);
        let detached = self.index.occupancy().detached;
        if holders.len() != detached {
            return Err(format!("{detached} slots are detached, {} are held", holders.len()));
        }
        for (&slot, &count) in &holders {
            let kept = 1 + self.more_holders.get(&slot).copied().unwrap_or(0);
            if kept != count {
                return Err(format!("slot {slot} has {count} holders, {kept} are kept"));
            }
        }
        if self.more_holders.keys().any(|slot| !holders.contains_key(slot)) {
            return Err("holders are kept of a slot that nobody holds".into());
        }
        Ok(())
    }

    /// Checks what is kept of each tier against its jobs.
    pub(super) fn check_queues(&self, slot_bytes: u64) -> Result<(), String> {
        for (number, tier) in self.tiers.iter().enumerate() {
            let bytes = |job: &Running| job.chunks.len() as u64 * slot_bytes;
            let jobs: Vec<&Running> = self.jobs.values().filter(|job| job.tier == number).collect();
            let stores = || jobs.iter().filter(|job| job.direction == Direction::Store);
            let loads = || jobs.iter().filter(|job| job.direction == Direction::Load);
            let chunks = |job: &Running| job.chunks.len() as u64;
            let counted = (
                jobs.len() as u64,
                stores().map(|job| bytes(job)).sum::<u64>(),
                stores().filter(|job| !job.shed).map(|job| bytes(job)).sum::<u64>(),
                loads().map(|job| chunks(job)).sum::<u64>(),
                loads().filter(|job| job.overdue).map(|job| chunks(job)).sum::<u64>(),
                self.promotions.iter().filter(|promotion| promotion.tier == number).count() as u64,
            );
            let figures = &tier.figures;
            let kept = (
                figures.loads.in_flight + figures.stores.in_flight,
                figures.queued_bytes,
                tier.live_bytes,
                tier.loading,
                figures.quarantined,
                tier.promotions,
            );
            if counted != kept {
                return Err(format!(
                    "tier {number}: (jobs, queued, live, loading, quarantined, promotions) are \
                     {counted:?}, kept {kept:?}"
                ));
            }
        }
        Ok(())
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

fn add<const N: usize>(to: &mut [u64; N], more: [u64; N]) {
    to.iter_mut().zip(more).for_each(|(to, more)| *to += more);
}

/// The keys of a job that were moved.
fn moved<'a>(job: &'a Running, result: &'a JobResult) -> impl Iterator<Item = &'a [u8]> {
    let done = job.chunks.keys.iter().zip(&result.outcomes);
    done.filter(|(_, outcome)| outcome.is_ok()).map(|(key, _)| key)
}
