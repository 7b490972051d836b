//! The invariants: after every event, of every answer, and when all is quiet.

use std::collections::{BTreeMap, BTreeSet};

use kvtier_core::index::Slot;
use kvtier_core::manager::{
    BreakerState, Direction, Event, EventKind, Lookup, ManagerError, Snapshot,
};
use kvtier_core::tier::{Failure, JobId, RequestId, Shed};

use crate::content::{CHUNK_BYTES, Key};
use crate::engine::Request;
use crate::ledger::Use;
use crate::stage::State;
use crate::tally::Feature;
use crate::world::{Violated, World};

/// The largest part of a load that a half-open breaker lets through in a step.
const PROBE_CHUNKS: usize = 8;

/// What the engine did since the manager was made, in the manager's own figures.
#[derive(Debug)]
pub(crate) struct Counts {
    pub(crate) asked: u64,
    pub(crate) stored: u64,
    pub(crate) loaded: u64,
    pub(crate) stores_refused: u64,
    /// Chunks offered to each tier.
    pub(crate) offers: Vec<u64>,
    /// Chunks of load jobs.
    promotions: u64,
    /// Resident chunks that a reset made the manager forget.
    pub(crate) forgotten: u64,
}

impl Counts {
    pub(crate) fn new(tiers: usize) -> Self {
        Self {
            asked: 0,
            stored: 0,
            loaded: 0,
            stores_refused: 0,
            offers: vec![0; tiers],
            promotions: 0,
            forgotten: 0,
        }
    }

    /// A chunk is offered to tiers.
    fn offer(&mut self, tiers: u64) {
        for (number, offers) in self.offers.iter_mut().enumerate() {
            *offers += tiers >> number & 1;
        }
    }

    /// Counts what a store offers of known keys to tiers that get all chunks of a request.
    pub(crate) fn known_are_offered(
        &mut self,
        state: &mut State,
        id: RequestId,
        known: impl Iterator<Item = Key>,
        tiers: u64,
    ) {
        for key in known.filter(|_| tiers != 0) {
            if state.ledger.resident.contains(&key) {
                self.offer(tiers);
            } else if state.ledger.is_coming(key) {
                let (_, parked) = state.ledger.parked.entry(id).or_insert((tiers, Vec::new()));
                parked.push(key);
            }
        }
    }

    /// Counts what was parked and is written now; what was not written in the end is dropped.
    fn parked_are_offered(&mut self, state: &mut State) {
        for (id, (tiers, keys)) in std::mem::take(&mut state.ledger.parked) {
            let left: Vec<Key> =
                keys.iter().copied().filter(|&key| state.ledger.is_coming(key)).collect();
            for _ in keys.iter().filter(|&key| state.ledger.resident.contains(key)) {
                state.tally.count(Feature::Parked);
                self.offer(tiers);
            }
            if !left.is_empty() {
                state.ledger.parked.insert(id, (tiers, left));
            }
        }
    }
}

/// What the manager told until the last event.
pub(crate) struct Seen {
    /// State of the breakers of each tier, by direction.
    pub(crate) breakers: Vec<[BreakerState; 2]>,
    /// As events told it, since the last check too; and which changed since.
    told: Vec<[BreakerState; 2]>,
    changed: Vec<[bool; 2]>,
    /// Whether a reset held promotions back that were queued under a closed breaker.
    queued_before: bool,
    /// Stores that a half-open breaker let through.
    probes: Vec<Vec<JobId>>,
    /// Chunks told removed from the primary tier.
    pub(crate) evicted: u64,
    stored: Vec<u64>,
    removed: Vec<u64>,
}

impl Seen {
    pub(crate) fn new(tiers: usize) -> Self {
        Self {
            breakers: vec![[BreakerState::Closed; 2]; tiers],
            told: vec![[BreakerState::Closed; 2]; tiers],
            changed: vec![[false; 2]; tiers],
            queued_before: false,
            probes: vec![Vec::new(); tiers],
            evicted: 0,
            stored: vec![0; tiers],
            removed: vec![0; tiers],
        }
    }

    /// What a breaker must let through, and what not.
    fn check_breakers(&mut self, state: &State, snapshot: &Snapshot) -> Result<(), String> {
        for (number, tier) in snapshot.tiers.iter().enumerate() {
            let now = [tier.figures.loads.breaker, tier.figures.stores.breaker];
            if now != self.told[number] {
                return Err(format!("tier {number}: breakers {now:?} are not as events told"));
            }
            let before = self.breakers[number];
            let did = &state.tiers[number];
            let [loads, stores] = [Direction::Load, Direction::Store].map(|direction| {
                let at = direction as usize;
                (before[at], now[at], self.changed[number][at])
            });
            if loads == (BreakerState::Open, BreakerState::Open, false) && did.asked {
                return Err(format!("tier {number} is asked although its breaker is open"));
            }
            if stores == (BreakerState::Open, BreakerState::Open, false) && !did.stores.is_empty() {
                return Err(format!("tier {number} gets a store although its breaker is open"));
            }
            let half_open = (BreakerState::HalfOpen, BreakerState::HalfOpen, false);
            // What was queued before it opened goes out too, after a reset held it back.
            if loads == half_open && !self.queued_before && did.load_chunks > PROBE_CHUNKS {
                return Err(format!("tier {number}, half open, loads {} chunks", did.load_chunks));
            }
            let probes = &mut self.probes[number];
            if stores.1 == BreakerState::HalfOpen {
                probes.retain(|&job| state.tiers[number].holds_job(job, state.ledger.life));
                probes.extend(&did.stores);
                if probes.len() > 1 {
                    return Err(format!("tier {number}, half open, has stores {probes:?}"));
                }
            } else {
                probes.clear();
            }
        }
        Ok(())
    }

    /// Keeps what the next event is compared with.
    fn remember(&mut self, state: &mut State, snapshot: &Snapshot, resetting: bool) {
        for (number, tier) in snapshot.tiers.iter().enumerate() {
            let figures = &tier.figures;
            self.breakers[number] = [figures.loads.breaker, figures.stores.breaker];
            self.changed[number] = [false; 2];
            state.tiers[number].begin_event();
        }
        self.queued_before &= resetting;
        self.queued_before |= resetting && !state.ledger.queued.is_empty();
    }
}

impl World {
    /// What holds after every event.
    pub(crate) fn check(&mut self) -> Result<(), Violated> {
        self.replay_events();
        let valid = self.manager.validate();
        let snapshot = self.manager.stats();
        let mut state = self.stage.lock();
        state.tally.events += 1;
        state.check(valid);
        let checked = self.check_figures(&state, &snapshot);
        state.check(checked);
        let checked = self.seen.check_breakers(&state, &snapshot);
        state.check(checked);
        self.seen.remember(&mut state, &snapshot, self.resetting);
        match state.violation {
            None => Ok(()),
            Some(_) => Err(Violated),
        }
    }

    /// Takes the events, which tell what is resident, and what breakers do.
    pub(crate) fn replay_events(&mut self) {
        let Ok(events) = self.manager.take_events() else {
            return;
        };
        let mut state = self.stage.lock();
        for Event { kind, tier, keys } in events {
            let number = keys.len() as u64;
            match (kind, tier) {
                (EventKind::Stored, None) => keys.iter().for_each(|key| {
                    if !state.ledger.resident.insert(Key::of(key)) {
                        state.violate(format!("{:?} is told stored twice", Key::of(key)));
                    }
                }),
                (EventKind::Removed, None) => {
                    self.seen.evicted += number;
                    for key in &keys {
                        if !state.ledger.resident.remove(&Key::of(key)) {
                            state.violate(format!("{:?} is told removed twice", Key::of(key)));
                        }
                    }
                }
                (EventKind::Stored, Some(tier)) => self.seen.stored[tier] += number,
                (EventKind::Removed, Some(tier)) => self.seen.removed[tier] += number,
                (EventKind::Breaker(direction, now), Some(tier)) => {
                    state.note(|| format!("tier {tier}: breaker of {direction:?} is {now:?}"));
                    if now == BreakerState::Closed {
                        state.tally.count(Feature::BreakerClosed);
                    }
                    self.seen.told[tier][direction as usize] = now;
                    self.seen.changed[tier][direction as usize] = true;
                }
                (EventKind::Breaker(..), None) => state.violate("a breaker of no tier".into()),
            }
        }
    }

    fn check_figures(&self, state: &State, snapshot: &Snapshot) -> Result<(), String> {
        let primary = &snapshot.primary;
        let counted = (
            primary.hits + primary.hits_pending + primary.misses + primary.retries,
            primary.stored_chunks,
            primary.loaded_chunks,
            primary.stores_refused,
            primary.ready,
            primary.evictions + self.counts.forgotten,
        );
        let wanted = (
            self.counts.asked,
            self.counts.stored,
            self.counts.loaded,
            self.counts.stores_refused,
            state.ledger.resident.len() as u64,
            self.seen.evicted,
        );
        if counted != wanted {
            return Err(format!(
                "(asked, stored, loaded, refused, ready, evicted) are {wanted:?}, the figures say \
                 {counted:?}"
            ));
        }
        for (number, tier) in snapshot.tiers.iter().enumerate() {
            let figures = &tier.figures;
            let told = (self.seen.stored[number], self.seen.removed[number]);
            if told != (figures.stores.chunks, figures.evictions) {
                return Err(format!("tier {number}: events say {told:?}, figures {figures:?}"));
            }
            let limits = &self.settings.tiers[number].limits;
            let half = u64::from(self.settings.slots) * CHUNK_BYTES as u64 / 2;
            let most = limits.max_queued_bytes.unwrap_or(half);
            // An idle tier takes one batch of any size.
            let live = most.max(state.tiers[number].largest_store);
            let bound = if limits.shed == Shed::Oldest { live + 2 * most } else { live };
            if figures.queued_bytes > bound {
                let queued = figures.queued_bytes;
                return Err(format!("tier {number} has {queued} bytes queued, {bound} at most"));
            }
        }
        Ok(())
    }

    /// Checks answers against what must be so, and notes the promotions they promise.
    pub(crate) fn check_answers(&mut self, id: RequestId, keys: &[Key], answers: &[Lookup]) {
        self.replay_events();
        let mut state = self.stage.lock();
        state.note(|| format!("request {id} asks for {keys:?}: {answers:?}"));
        let ledger = &mut state.ledger;
        let mut wrong = None;
        for (&key, &answer) in keys.iter().zip(answers) {
            let resident = ledger.resident.contains(&key);
            let right = match answer {
                Lookup::Hit => resident,
                Lookup::Miss | Lookup::Retry => !resident && !ledger.is_coming(key),
                // A tier was asked, so it is not on its way for another reason.
                Lookup::HitPending if ledger.said_hit.contains(&key) => {
                    let coming = ledger.is_coming(key);
                    ledger.queued.insert(key, id);
                    !resident && !coming
                }
                Lookup::HitPending => !resident && ledger.may_be_coming(key),
            };
            if !right {
                wrong.get_or_insert((key, answer));
            }
        }
        if let Some((key, answer)) = wrong {
            let coming = state.ledger.is_coming(key);
            state.violate(format!("{key:?} is told to be {answer:?}, coming: {coming}"));
        }
    }

    /// Closes a step: queued promotions go out, each once, and what is late is a miss.
    pub(crate) fn end_step(&mut self) {
        let mut state = self.stage.lock();
        state.note(|| "the step ends".into());
        state.ledger.promoted.clear();
        let now = state.now;
        state.ledger.results_are_taken();
        state.ledger.deadlines_passed(now);
        drop(state);
        self.manager.end_step().expect("open");
        self.replay_events();
        let mut state = self.stage.lock();
        self.counts.parked_are_offered(&mut state);
        let mut promoted = std::mem::take(&mut state.ledger.promoted);
        promoted.sort_unstable();
        self.counts.promotions += promoted.len() as u64;
        self.requests.iter_mut().for_each(Request::step_ended);
        // Nothing is promoted until the engine says that a reset is flushed.
        let due =
            if self.resetting { BTreeMap::new() } else { std::mem::take(&mut state.ledger.queued) };
        let queued: Vec<Key> = due.into_keys().collect();
        if promoted != queued {
            state.violate(format!("{queued:?} were to be promoted, {promoted:?} are"));
        }
    }

    /// What holds when every tier has let go of everything and no request is there.
    pub(crate) fn check_quiet(&mut self) -> Result<(), Violated> {
        let snapshot = self.manager.stats();
        let mut state = self.stage.lock();
        let checked = self.quiet(&state, &snapshot);
        state.check(checked);
        match state.violation {
            None => Ok(()),
            Some(_) => Err(Violated),
        }
    }

    fn quiet(&self, state: &State, snapshot: &Snapshot) -> Result<(), String> {
        let primary = &snapshot.primary;
        let left = (primary.pinned, primary.writing, primary.detached, primary.requests);
        if left != (0, 0, 0, 0) {
            return Err(format!("(pinned, writing, detached, requests) are {left:?} in the end"));
        }
        if !state.ledger.is_idle() {
            return Err("a slot is used in the end".into());
        }
        let mut promoted = 0;
        for (number, tier) in snapshot.tiers.iter().enumerate() {
            let figures = &tier.figures;
            let left = (
                figures.loads.in_flight + figures.stores.in_flight,
                figures.queued_bytes,
                figures.quarantined,
            );
            if left != (0, 0, 0) {
                return Err(format!("tier {number}: (jobs, bytes, late) are {left:?} in the end"));
            }
            promoted += figures.loads.chunks + figures.loads.failures.iter().sum::<u64>();
            // Every chunk offered was stored, failed, was shed, or was refused.
            let accounted = figures.stores.chunks
                + figures.stores.failures.iter().sum::<u64>()
                + figures.sheds
                + figures.refused;
            if accounted != self.counts.offers[number] {
                return Err(format!(
                    "tier {number} was offered {} chunks, {accounted} are accounted for: {figures:?}",
                    self.counts.offers[number]
                ));
            }
            let seen = &state.tiers[number].seen;
            let told = &state.tiers[number].told;
            if let Some(id) = seen.difference(told).next() {
                return Err(format!("tier {number} is not told that request {id} has ended"));
            }
        }
        if promoted != self.counts.promotions {
            let started = self.counts.promotions;
            return Err(format!("{started} promotions were started, {promoted} ended"));
        }
        Ok(())
    }

    /// Shuts the manager down: what no tier hangs on comes back.
    pub(crate) fn shutdown(&mut self) -> Result<(), Violated> {
        self.replay_events();
        self.manager.shutdown();
        self.manager.shutdown();
        let refused = matches!(self.manager.end_step(), Err(ManagerError::Closed));
        let valid = self.manager.validate();
        let snapshot = self.manager.stats();
        let mut state = self.stage.lock();
        state.check(valid);
        if !refused {
            state.violate("a call after the shutdown was not refused".into());
        }
        let life = state.ledger.life;
        if !state.tiers.iter().any(|tier| tier.holds_jobs_of(life)) {
            let open = |void| self.transfers.iter().filter(move |open| open.void == void);
            let pinned = open(false).filter(|open| open.how == Use::Read);
            let wanted = (
                distinct(pinned.flat_map(|open| &open.slots)),
                state.ledger.storing.len() as u64,
                distinct(open(true).flat_map(|open| &open.slots)),
            );
            let primary = &snapshot.primary;
            let found = (primary.pinned, primary.writing, primary.detached);
            if found != wanted {
                state.violate(format!(
                    "(pinned, writing, detached) are {found:?} after the shutdown, the engine has \
                     {wanted:?}"
                ));
            }
        }
        tally_figures(&mut state, &snapshot);
        match state.violation {
            None => Ok(()),
            Some(_) => Err(Violated),
        }
    }
}

fn distinct<'a>(slots: impl Iterator<Item = &'a Slot>) -> u64 {
    slots.collect::<BTreeSet<_>>().len() as u64
}

/// Counts what the manager did in its life.
fn tally_figures(state: &mut State, snapshot: &Snapshot) {
    let primary = &snapshot.primary;
    let tally = &mut state.tally;
    tally.add(Feature::Evicted, primary.evictions);
    tally.add(Feature::NoRoomToStore, primary.stores_refused);
    tally.add(Feature::NoRoomToPromote, primary.promotions_refused);
    tally.add(Feature::NotAdmitted, primary.not_admitted);
    for tier in &snapshot.tiers {
        let figures = &tier.figures;
        tally.add(Feature::Promoted, figures.loads.chunks);
        tally.add(Feature::LateLoad, figures.loads.overdue);
        tally.add(Feature::LateStore, figures.stores.overdue);
        tally.add(Feature::LateLookup, figures.lookups_overdue);
        tally.add(Feature::CorruptLoad, figures.loads.failed(Failure::Corrupt));
        tally.add(Feature::Shed, figures.sheds);
        tally.add(Feature::Refused, figures.refused);
        let opened = figures.loads.breaker_opened + figures.stores.breaker_opened;
        tally.add(Feature::BreakerOpened, opened);
    }
}
