//! A tier that does what its seed says: keeps chunks for real, works on one chunk an event, in any
//! order, and has every fault there is.
//!
//! What it keeps survives the engine's process; the jobs it holds do not, but for those that hang:
//! they wake up later and write into the region of a process that is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::checksum::Checksum;
use kvtier_core::key::KeyBatch;
use kvtier_core::tier::{
    Failure, Fault, JobId, LoadJob, Locality, Medium, News, Presence, RequestId, SecondaryTier,
    StoreJob, TierLimits, Usage,
};

use crate::content::{CHUNK_BYTES, KEY_BYTES, Key};
use crate::ledger::{Load, Use};
use crate::settings::{MILLISECOND, TierSettings};
use crate::stage::{Stage, State};
use crate::tally::{FAULTS, Feature};

/// A chunk as the tier keeps it.
struct Kept {
    bytes: Box<[u8]>,
    checksum: Checksum,
}

enum Work {
    Store(StoreJob),
    Load(LoadJob),
}

/// A job and how far the tier is with it.
struct Held {
    work: Work,
    id: JobId,
    life: u32,
    next: usize,
    wakes: Instant,
}

impl Held {
    fn len(&self) -> usize {
        match &self.work {
            Work::Store(job) => job.len(),
            Work::Load(job) => job.len(),
        }
    }

    fn is_cancelled(&self) -> bool {
        match &self.work {
            Work::Store(job) => job.is_cancelled(),
            Work::Load(job) => job.is_cancelled(),
        }
    }
}

/// What a simulated tier is, apart from its face; kept on the [`Stage`].
pub(crate) struct TierState {
    pub(crate) odds: [u16; FAULTS],
    limits: TierLimits,
    capacity: usize,
    kept: BTreeMap<Key, Kept>,
    held: Vec<Held>,
    down_until: Option<Instant>,
    /// When the answer to a look-up is known.
    known: BTreeMap<Key, Instant>,
    /// Decides about which keys it lies and which it never knows, always in the same way.
    salt: u64,
    /// Requests that it was asked or given something for, and those that it was told have ended.
    pub(crate) seen: BTreeSet<RequestId>,
    pub(crate) told: BTreeSet<RequestId>,
    /// What the event that runs did: whether it was asked, store jobs and chunks of load jobs.
    pub(crate) asked: bool,
    pub(crate) stores: Vec<JobId>,
    pub(crate) load_chunks: usize,
    /// Bytes of the largest store it was given.
    pub(crate) largest_store: u64,
}

impl TierState {
    pub(crate) fn new(settings: &TierSettings, salt: u64) -> Self {
        Self {
            odds: settings.odds,
            limits: settings.limits.clone(),
            capacity: settings.capacity,
            kept: BTreeMap::new(),
            held: Vec::new(),
            down_until: None,
            known: BTreeMap::new(),
            salt,
            seen: BTreeSet::new(),
            told: BTreeSet::new(),
            asked: false,
            stores: Vec::new(),
            load_chunks: 0,
            largest_store: 0,
        }
    }

    pub(crate) fn begin_event(&mut self) {
        self.asked = false;
        self.stores.clear();
        self.load_chunks = 0;
    }

    /// The engine's process ended; a tier that works well holds nothing of it any more.
    pub(crate) fn next_life(&mut self) {
        self.seen.clear();
        self.told.clear();
        self.begin_event();
    }

    /// No faults from now on, and all that hangs wakes up.
    pub(crate) fn heal(&mut self, now: Instant) {
        self.odds = [0; FAULTS];
        self.capacity = usize::MAX;
        self.down_until = None;
        self.known.clear();
        self.held.iter_mut().for_each(|held| held.wakes = held.wakes.min(now));
    }

    pub(crate) fn holds_jobs(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether it holds a job of a process of the engine.
    pub(crate) fn holds_jobs_of(&self, life: u32) -> bool {
        self.held.iter().any(|held| held.life == life)
    }

    pub(crate) fn holds_job(&self, id: JobId, life: u32) -> bool {
        self.held.iter().any(|held| held.id == id && held.life == life)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = Key> {
        self.kept.keys().copied()
    }

    /// One key in `odds`, always the same ones.
    fn is_marked(&self, key: Key, fault: Feature) -> bool {
        let odds = u64::from(self.odds[fault as usize]);
        let number = u64::from_le_bytes(key.bytes()) ^ self.salt ^ fault as u64;
        odds > 0 && (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32).is_multiple_of(odds)
    }
}

/// The face of a simulated tier.
pub(crate) struct SimulatedTier {
    pub(crate) stage: Arc<Stage>,
    pub(crate) number: usize,
    pub(crate) medium: Medium,
    pub(crate) locality: Locality,
}

impl SimulatedTier {
    /// Panics if that fault happens now. The lock is not held, and the panic hook stays silent.
    fn may_panic(&self, method: &str) {
        let mut state = self.stage.lock();
        if state.happens(self.number, Feature::Panic) {
            state.note(|| format!("tier {} panics in {method}", self.number));
            drop(state);
            resume_unwind(Box::new("planted"));
        }
    }

    /// Takes a job, unless it is lost at once.
    fn accept(&self, held: Held) {
        let mut state = self.stage.lock();
        let (number, now) = (self.number, state.now);
        let (deadline, request) = match &held.work {
            Work::Store(job) => (state.tiers[number].limits.store_deadline, job.request()),
            Work::Load(job) => (state.tiers[number].limits.load_deadline, job.request()),
        };
        state.check_submitted(number, &held, request, now + deadline);
        let part = state.rng.u32(1..=8);
        let took = if state.happens(number, Feature::Hang) {
            deadline + deadline * part / 2
        } else if state.happens(number, Feature::Slow) {
            deadline * part / 8
        } else {
            MILLISECOND * part / 4
        };
        let down = state.tiers[number].down_until.is_some_and(|until| now < until);
        if down || state.happens(number, Feature::Lose) {
            state.let_go(number, &held);
        } else {
            state.tiers[number].held.push(Held { wakes: now + took, ..held });
        }
    }
}

impl SecondaryTier for SimulatedTier {
    fn medium(&self) -> Medium {
        self.medium
    }

    fn locality(&self) -> Locality {
        self.locality
    }

    fn lookup(
        &self,
        request: RequestId,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) {
        self.stage.lock().tiers[self.number].asked = true;
        self.may_panic("lookup");
        let mut state = self.stage.lock();
        let state = &mut *state;
        let allowed = state.ledger.allowed.get(&request).copied().unwrap_or(u64::MAX);
        if allowed & 1 << self.number == 0 {
            state.violate(format!("tier {} is asked for request {request}", self.number));
        }
        state.tiers[self.number].seen.insert(request);
        for (&at, answer) in wanted.iter().zip(presence) {
            let key = Key::of(keys.get(at as usize));
            *answer = state.presence(self.number, key);
            if *answer == Presence::Hit {
                state.ledger.said_hit.insert(key);
            }
        }
    }

    fn submit_store(&self, job: StoreJob) {
        let (id, life) = (job.id(), self.stage.lock().ledger.life);
        let wakes = self.stage.clock.now();
        self.accept(Held { work: Work::Store(job), id, life, next: 0, wakes });
        self.may_panic("submit_store");
    }

    fn submit_load(&self, job: LoadJob) {
        let (id, life) = (job.id(), self.stage.lock().ledger.life);
        let wakes = self.stage.clock.now();
        self.accept(Held { work: Work::Load(job), id, life, next: 0, wakes });
        self.may_panic("submit_load");
    }

    fn touch(&self, _keys: &KeyBatch) {
        self.may_panic("touch");
    }

    fn end_step(&self, news: &mut News) {
        self.may_panic("end_step");
        let mut state = self.stage.lock();
        if !state.tiers[self.number].kept.is_empty()
            && state.happens(self.number, Feature::EvictByItself)
            && let Some((key, _)) = state.tiers[self.number].kept.pop_first()
        {
            news.removed.push(key.bytes().into());
        }
        if state.happens(self.number, Feature::BreaksContract) {
            let fault = state.rng.usize(0..Fault::ALL.len());
            news.faults.push(Fault::ALL[fault].1);
        }
    }

    fn finish_request(&self, request: RequestId) {
        let mut state = self.stage.lock();
        let may_end = state.ledger.may_end(request);
        state.check(may_end);
        if !state.tiers[self.number].told.insert(request) {
            state.violate(format!("tier {} is told twice that {request} ended", self.number));
        }
        drop(state);
        self.may_panic("finish_request");
    }

    fn usage(&self) -> Usage {
        let seldom = self.stage.lock().rng.u8(0..16) == 0;
        if seldom {
            // It is asked after every event.
            self.may_panic("usage");
        }
        let state = self.stage.lock();
        let tier = &state.tiers[self.number];
        Usage {
            capacity_bytes: tier.capacity.saturating_mul(CHUNK_BYTES) as u64,
            used_bytes: (tier.kept.len() * CHUNK_BYTES) as u64,
            chunks: tier.kept.len() as u64,
        }
    }

    fn shutdown(&self) {
        let mut guard = self.stage.lock();
        let (state, now) = (&mut *guard, self.stage.clock.now());
        let held = std::mem::take(&mut state.tiers[self.number].held);
        for held in held {
            // What hangs does not come back in time: its thread is left alone.
            if held.wakes > now + MILLISECOND * 4 {
                state.tiers[self.number].held.push(held);
            } else {
                state.let_go(self.number, &held);
            }
        }
        drop(guard);
        self.may_panic("shutdown");
    }
}

impl State {
    /// What a tier says of a key.
    fn presence(&mut self, number: usize, key: Key) -> Presence {
        let now = self.now;
        if self.tiers[number].down_until.is_some_and(|until| now < until) {
            return Presence::Miss;
        }
        if self.tiers[number].is_marked(key, Feature::RetryForEver) {
            self.tally.count(Feature::RetryForEver);
            return Presence::Retry;
        }
        if !self.tiers[number].known.contains_key(&key)
            && self.happens(number, Feature::RetryAWhile)
        {
            let later = now + MILLISECOND * self.rng.u32(1..=20);
            self.tiers[number].known.insert(key, later);
        }
        match self.tiers[number].known.get(&key) {
            Some(&known) if now < known => return Presence::Retry,
            Some(_) => drop(self.tiers[number].known.remove(&key)),
            None => {}
        }
        if self.tiers[number].kept.contains_key(&key) {
            Presence::Hit
        } else if self.tiers[number].is_marked(key, Feature::Lie) {
            self.tally.count(Feature::Lie);
            Presence::Hit
        } else {
            Presence::Miss
        }
    }

    /// Enters a job into the ledger and checks that it may begin.
    fn check_submitted(&mut self, number: usize, held: &Held, request: RequestId, end: Instant) {
        let (job, how) = match &held.work {
            Work::Store(job) => (job.chunks(), Use::Read),
            Work::Load(job) => (job.chunks(), Use::Write),
        };
        let keys: Vec<Key> = job.keys.iter().map(Key::of).collect();
        let who = || format!("job {} of tier {number} for request {request}", held.id);
        self.note(|| format!("{}: {how:?} slots {:?} for {keys:?}", who(), job.slots));
        let taken = self.ledger.take(&job.slots, how, &who());
        self.check(taken);
        let tier = &mut self.tiers[number];
        tier.seen.insert(request);
        let told = tier.told.contains(&request);
        if how == Use::Read {
            tier.stores.push(held.id);
            tier.largest_store = tier.largest_store.max((keys.len() * CHUNK_BYTES) as u64);
        } else {
            tier.load_chunks += keys.len();
            let (now, came) = (self.now, Vec::new());
            let (tier, granted) = (number, end - now);
            let load = Load { tier, keys, came, deadline: end, granted, ended: false, late: false };
            let begun = self.ledger.load_begins(held.id, load, now);
            self.check(begun);
        }
        if told {
            self.violate(format!("{} comes after the end of the request", who()));
        }
    }

    /// A tier lets go of a job, which the caller drops.
    fn let_go(&mut self, number: usize, held: &Held) {
        self.note(|| format!("tier {number} lets go of job {}", held.id));
        if held.life != self.ledger.life {
            return;
        }
        match &held.work {
            Work::Store(job) => {
                self.ledger.give_back(&job.chunks().slots, Use::Read);
                self.ledger.may_be_good(number, job.chunks().keys.iter().map(Key::of));
            }
            Work::Load(job) => {
                self.ledger.give_back(&job.chunks().slots, Use::Write);
                self.ledger.load_ends(held.id, self.now);
            }
        }
    }

    /// A tier does a bit of its work, or crashes.
    pub(crate) fn work(&mut self, number: usize) {
        let now = self.now;
        // Seldom: it is asked often.
        if self.rng.u8(0..16) == 0 && self.happens(number, Feature::Crash) {
            self.note(|| format!("tier {number} crashes"));
            for held in std::mem::take(&mut self.tiers[number].held) {
                self.let_go(number, &held);
            }
            if self.rng.bool() {
                self.tiers[number].kept.clear();
            }
            self.tiers[number].down_until = Some(now + MILLISECOND * self.rng.u32(1..=30));
            return;
        }
        let held = &self.tiers[number].held;
        let due: Vec<usize> = (0..held.len()).filter(|&at| held[at].wakes <= now).collect();
        if due.is_empty() {
            return;
        }
        let at = due[self.rng.usize(0..due.len())];
        let mut held = self.tiers[number].held.swap_remove(at);
        let done = held.next == held.len();
        let stops = held.is_cancelled() && !self.happens(number, Feature::IgnoreCancel);
        if done || stops || self.happens(number, Feature::Lose) {
            self.let_go(number, &held);
            return;
        }
        if !self.happens(number, Feature::Skip) {
            match &held.work {
                Work::Store(job) => self.store_chunk(number, job, held.next),
                Work::Load(job) => self.load_chunk(number, job, held.next, held.life),
            }
        }
        held.next += 1;
        if held.next == held.len() {
            if !self.happens(number, Feature::LetGoLate) {
                self.let_go(number, &held);
                return;
            }
            held.wakes = now + MILLISECOND * self.rng.u32(1..=60);
        }
        self.tiers[number].held.push(held);
    }

    fn store_chunk(&mut self, number: usize, job: &StoreJob, index: usize) {
        let key = Key::of(job.key(index));
        if !key.is_in(job.bytes(index)) {
            self.violate(format!("job {}: the bytes to store are not those of {key:?}", job.id()));
        }
        for (fault, failure) in [(Feature::Io, Failure::Io), (Feature::Full, Failure::Full)] {
            if self.happens(number, fault) {
                job.report(index, Err(failure), Duration::ZERO, None);
                return;
            }
        }
        let mut kept = Kept { bytes: job.bytes(index).into(), checksum: job.checksum(index) };
        if self.happens(number, Feature::CorruptBytes) {
            kept.bytes[self.rng.usize(0..CHUNK_BYTES)] ^= 1;
        }
        if self.happens(number, Feature::WrongChecksum) {
            kept.checksum.0 ^= 1;
        }
        let tier = &mut self.tiers[number];
        tier.kept.insert(key, kept);
        let mut evicted = KeyBatch::empty(KEY_BYTES);
        if tier.kept.len() > tier.capacity {
            let others = tier.kept.keys().copied().filter(|&other| other != key);
            let others: Vec<Key> = others.collect();
            let victim = others[self.rng.usize(0..others.len())];
            tier.kept.remove(&victim);
            evicted.push(&victim.bytes()).expect("whole key");
        }
        job.report(index, Ok(()), Duration::ZERO, Some(&evicted));
    }

    fn load_chunk(&mut self, number: usize, job: &LoadJob, index: usize, life: u32) {
        let key = Key::of(job.key(index));
        // SAFETY: this thread is the only worker of the job, and `place` is gone before `deliver`.
        let place = unsafe { job.place(index) };
        if self.happens(number, Feature::Torn) {
            place[..CHUNK_BYTES / 2].fill(0xEE);
            job.fail(index, Failure::Io, Duration::ZERO);
            return;
        }
        if self.happens(number, Feature::Io) {
            job.fail(index, Failure::Io, Duration::ZERO);
            return;
        }
        let other = self.tiers[number].kept.keys().copied().find(|&other| other != key);
        let from = other.filter(|_| self.happens(number, Feature::OtherChunk)).unwrap_or(key);
        let Some(kept) = self.tiers[number].kept.get(&from) else {
            job.fail(index, Failure::Missing, Duration::ZERO);
            return;
        };
        place.copy_from_slice(&kept.bytes);
        if job.deliver(index, kept.checksum, Duration::ZERO).is_ok() {
            // A job of an earlier process may have the number of a job of this one.
            let load = self.ledger.loads.get_mut(&job.id()).filter(|_| life == self.ledger.life);
            if let Some(load) = load {
                load.came.push(key);
            }
        } else if self.tiers[number].is_marked(key, Feature::KeepBadCopy) {
            self.tally.count(Feature::KeepBadCopy);
        } else {
            self.tiers[number].kept.remove(&key);
        }
    }
}
