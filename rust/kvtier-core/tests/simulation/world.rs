//! One run: a manager, its tiers and an engine, all driven by one seed in one thread.
//!
//! Chaos first, event after event. Then no request arrives any more, and those that are there must
//! end although the tiers go on failing. Then the tiers are healthy: everything must come back,
//! and every breaker must close. The invariants of `checks.rs` hold after every event.

use std::sync::Arc;

use fastrand::Rng;
use kvtier_core::manager::{
    BreakerState, Lookup, Manager, ManagerOptions, RequestOptions, TierMatcher, TierSlot,
};
use kvtier_core::region::{Region, RegionKind};
use kvtier_core::tier::RequestId;

use crate::checks::{Counts, Seen};
use crate::content::{CHUNK_BYTES, KEY_BYTES, Key, batch};
use crate::engine::{Request, Transfer};
use crate::ledger::Ledger;
use crate::settings::{Action, MILLISECOND, Settings};
use crate::stage::Stage;
use crate::tally::{Feature, Tally};
use crate::tier::{SimulatedTier, TierState};

/// Steps in which every request must end once none arrives any more: several times the deadlines
/// of all tiers.
const DRAIN_STEPS: u32 = 600;
/// Steps in which healthy tiers must have returned everything.
const HEAL_STEPS: u32 = 300;

pub(crate) struct World {
    pub(crate) settings: Settings,
    pub(crate) stage: Arc<Stage>,
    pub(crate) manager: Manager,
    pub(crate) region: Arc<Region>,
    pub(crate) requests: Vec<Request>,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) next_request: RequestId,
    pub(crate) resetting: bool,
    pub(crate) counts: Counts,
    pub(crate) seen: Seen,
}

/// How a run ended.
pub(crate) struct Ended {
    pub(crate) tally: Tally,
    /// The invariant that did not hold.
    pub(crate) violation: Option<String>,
    /// The last events, if the run was traced.
    pub(crate) trace: Vec<String>,
}

/// Runs a seed.
pub(crate) fn run(seed: u64, traced: bool) -> Ended {
    let mut rng = Rng::with_seed(seed);
    let settings = Settings::draw(&mut rng);
    let tiers = settings.tiers.iter().map(|tier| TierState::new(tier, rng.u64(..))).collect();
    let ledger = Ledger::new(settings.slots);
    let stage = Arc::new(Stage::new(rng, ledger, tiers, traced));
    let (manager, region) = boot(&settings, &stage);
    let tiers = settings.tiers.len();
    let mut world = World {
        settings,
        stage,
        manager,
        region,
        requests: Vec::new(),
        transfers: Vec::new(),
        next_request: 1,
        resetting: false,
        counts: Counts::new(tiers),
        seen: Seen::new(tiers),
    };
    // The first violation ends the run: what follows from it says nothing.
    let _ = world.chaos().and_then(|()| world.drain()).and_then(|()| world.heal());
    let mut end = world.stage.lock();
    let violation = end.violation.take();
    Ended { tally: end.tally, violation, trace: end.take_trace() }
}

fn boot(settings: &Settings, stage: &Arc<Stage>) -> (Manager, Arc<Region>) {
    let region = Region::new(settings.slots, CHUNK_BYTES, RegionKind::Anonymous).expect("small");
    let options = ManagerOptions {
        key_bytes: KEY_BYTES,
        policy: settings.policy,
        store_threshold: settings.store_threshold,
        events: true,
        clock: stage.clock.clone(),
    };
    let tiers = settings.tiers.iter().enumerate().map(|(number, tier)| TierSlot {
        name: tier.name.into(),
        tier: Box::new(SimulatedTier {
            stage: Arc::clone(stage),
            number,
            medium: tier.medium,
            locality: tier.locality,
        }),
        limits: tier.limits.clone(),
    });
    let manager = Manager::new(Arc::clone(&region), &options, tiers.collect());
    (manager.expect("good key length"), region)
}

/// An invariant does not hold; the stage knows which.
pub(crate) struct Violated;

impl World {
    fn chaos(&mut self) -> Result<(), Violated> {
        for _ in 0..self.settings.events {
            self.event()?;
        }
        Ok(())
    }

    fn event(&mut self) -> Result<(), Violated> {
        let mut state = self.stage.lock();
        let rng = &mut state.rng;
        let action = self.settings.actions[rng.usize(0..self.settings.actions.len())];
        let tier = rng.usize(0..self.settings.tiers.len());
        let flushes = self.resetting && rng.u8(0..16) == 0;
        let ends_all = rng.u8(0..4) == 0;
        let ready = |waiting| {
            let requests = self.requests.iter().enumerate();
            requests.filter(move |(_, request)| request.waiting == waiting).map(|(at, _)| at)
        };
        let waiting = rng.choice(ready(true).collect::<Vec<_>>());
        let running = rng.choice(ready(false).collect::<Vec<_>>());
        let any = (!self.requests.is_empty()).then(|| rng.usize(0..self.requests.len()));
        let pause = MILLISECOND * rng.u32(5..=80);
        drop(state);
        match (action, waiting, running, any) {
            _ if flushes => self.flush(),
            (Action::Step, ..) => self.step(),
            (Action::Work, ..) => self.stage.lock().work(tier),
            (Action::Look, Some(at), ..) => self.look(at),
            (Action::Store, _, Some(at), _) => self.store(at),
            (Action::EndTransfer, ..) => self.end_some_transfer(),
            (Action::Finish, _, Some(at), _) => self.finish(at),
            (Action::Abort, .., Some(at)) => {
                self.stage.lock().tally.count(Feature::Aborted);
                self.finish(at);
            }
            (Action::Touch, .., Some(at)) => self.touch(at),
            (Action::Misuse, .., Some(at)) => self.misuse(at),
            (Action::Wait, ..) => self.stage.advance(pause),
            (Action::Reset, ..) if ends_all => self.reset(),
            (Action::Restart, ..) if ends_all => self.restart()?,
            _ if self.requests.len() < 6 => self.arrive(),
            _ => self.step(),
        }
        self.check()
    }

    /// Closes a step of the engine; time passes.
    fn step(&mut self) {
        self.end_step();
        let took = MILLISECOND * self.stage.lock().rng.u32(0..=8) / 4;
        self.stage.advance(took);
    }

    pub(crate) fn reset(&mut self) {
        let mut state = self.stage.lock();
        state.tally.count(Feature::Reset);
        state.note(|| "reset".into());
        state.ledger.reset();
        drop(state);
        self.replay_events();
        let evicted = self.seen.evicted;
        self.manager.reset().expect("open");
        self.resetting = true;
        self.transfers.iter_mut().for_each(|transfer| transfer.void = true);
        self.replay_events();
        let mut state = self.stage.lock();
        let left = std::mem::take(&mut state.ledger.resident);
        self.counts.forgotten += self.seen.evicted - evicted;
        if !left.is_empty() {
            state.violate(format!("a reset told nothing of {left:?}"));
        }
    }

    /// The transfers from before the reset are over, and the engine says so.
    pub(crate) fn flush(&mut self) {
        let (void, open) = self.transfers.drain(..).partition(|transfer| transfer.void);
        self.transfers = open;
        let void: Vec<Transfer> = void;
        for transfer in void {
            self.end_transfer(&transfer);
        }
        self.stage.lock().note(|| "reset is flushed".into());
        self.manager.reset_flushed().expect("open");
        self.resetting = false;
    }

    /// The engine's process ends as it stands, and another one begins over the same tiers.
    fn restart(&mut self) -> Result<(), Violated> {
        let mut state = self.stage.lock();
        state.tally.count(Feature::Restart);
        state.note(|| "the engine restarts".into());
        drop(state);
        self.shutdown()?;
        self.requests.clear();
        self.transfers.clear();
        self.resetting = false;
        self.counts = Counts::new(self.settings.tiers.len());
        self.seen = Seen::new(self.settings.tiers.len());
        let mut state = self.stage.lock();
        state.ledger.next_life();
        state.tiers.iter_mut().for_each(TierState::next_life);
        drop(state);
        (self.manager, self.region) = boot(&self.settings, &self.stage);
        Ok(())
    }

    /// Nothing arrives any more: what is there must end, whatever the tiers do.
    fn drain(&mut self) -> Result<(), Violated> {
        self.stage.lock().note(|| "no request arrives any more".into());
        if self.resetting {
            self.flush();
        }
        for _ in 0..DRAIN_STEPS {
            for at in (0..self.requests.len()).rev() {
                if self.requests[at].waiting {
                    self.look(at);
                } else if self.stage.lock().rng.bool() {
                    self.store(at);
                } else {
                    self.finish(at);
                }
                self.check()?;
            }
            for _ in 0..4 {
                self.end_some_transfer();
                self.check()?;
            }
            self.work_all(4)?;
            self.step();
            self.check()?;
            if self.requests.is_empty() && self.transfers.is_empty() {
                return Ok(());
            }
        }
        let waiting: Vec<_> = self.requests.iter().map(|request| request.id).collect();
        let message = format!("requests {waiting:?} did not end in {DRAIN_STEPS} steps");
        self.stage.lock().violate(message);
        Err(Violated)
    }

    fn work_all(&mut self, times: u32) -> Result<(), Violated> {
        for _ in 0..times {
            for tier in 0..self.settings.tiers.len() {
                self.stage.lock().work(tier);
                self.check()?;
            }
        }
        Ok(())
    }

    /// The tiers are healthy: everything comes back, and breakers close.
    fn heal(&mut self) -> Result<(), Violated> {
        let mut state = self.stage.lock();
        state.note(|| "all tiers are healthy".into());
        let now = state.now;
        state.tiers.iter_mut().for_each(|tier| tier.heal(now));
        drop(state);
        self.settle()?;
        self.check_quiet()?;
        self.close_breakers()?;
        self.settle()?;
        self.check_quiet()?;
        self.shutdown()
    }

    /// Steps until nothing is under way.
    fn settle(&mut self) -> Result<(), Violated> {
        for _ in 0..HEAL_STEPS {
            self.work_all(4)?;
            self.step();
            self.check()?;
            let held = self.stage.lock().tiers.iter().any(TierState::holds_jobs);
            if !held && !self.manager.is_busy().expect("open") {
                // Once more: requests that ended in the last step.
                self.step();
                return self.check();
            }
        }
        self.stage.lock().violate(format!("healthy tiers are busy after {HEAL_STEPS} steps"));
        Err(Violated)
    }

    /// Gives every tier chunks and asks for them again, until its breakers have closed.
    fn close_breakers(&mut self) -> Result<(), Violated> {
        for round in 0..HEAL_STEPS {
            let is_open = |state: &[BreakerState; 2]| *state != [BreakerState::Closed; 2];
            let open: Vec<usize> = (0..self.seen.breakers.len())
                .filter(|&t| is_open(&self.seen.breakers[t]))
                .collect();
            if open.is_empty() {
                return Ok(());
            }
            // Chunks that no request had, so that they are new.
            let keys =
                [0, 1].map(|chunk| Key { sequence: u8::MAX - (round % 64) as u8, chunk, group: 0 });
            self.store_and_finish(&keys)?;
            self.settle()?;
            // Forget them here, so that they are asked for there.
            self.reset();
            self.flush();
            self.check()?;
            for tier in open {
                self.probe(tier)?;
            }
            self.settle()?;
            self.stage.advance(MILLISECOND * 20);
        }
        let open = format!("breakers of healthy tiers stay as {:?}", self.seen.breakers);
        self.stage.lock().violate(open);
        Err(Violated)
    }

    /// Asks one tier for what it has.
    fn probe(&mut self, tier: usize) -> Result<(), Violated> {
        let medium = Some(self.settings.tiers[tier].medium);
        let options = RequestOptions {
            tiers: Some(vec![TierMatcher { medium, locality: None }]),
            ..RequestOptions::default()
        };
        let id = self.next_request;
        self.next_request += 1;
        let mut state = self.stage.lock();
        state.ledger.allowed.insert(id, 1 << tier);
        let keys: Vec<Key> = state.tiers[tier].keys().take(2).collect();
        drop(state);
        self.manager.begin_request(id, &options).expect("no names");
        self.lookup(id, &keys, false);
        self.check()?;
        self.stage.lock().ledger.finished.insert(id);
        self.manager.request_finished(id).expect("open");
        self.check()
    }

    fn store_and_finish(&mut self, keys: &[Key]) -> Result<(), Violated> {
        let id = self.next_request;
        self.next_request += 1;
        // With an admission threshold, the first offer stores nothing.
        for _ in 0..2 {
            self.offer(id, keys, self.settings.request_level());
            self.check()?;
            while let Some(store) = self.transfers.pop() {
                self.end_transfer(&store);
            }
            self.check()?;
        }
        self.stage.lock().ledger.finished.insert(id);
        self.manager.request_finished(id).expect("open");
        self.check()
    }

    /// As [`Manager::lookup`], its answers checked.
    pub(crate) fn lookup(&mut self, id: RequestId, keys: &[Key], prefix: bool) -> Vec<Lookup> {
        let mut state = self.stage.lock();
        state.ledger.said_hit.clear();
        state.ledger.results_are_taken();
        drop(state);
        let answers = self.manager.lookup(id, &batch(keys), prefix).expect("open");
        self.counts.asked += keys.len() as u64;
        self.check_answers(id, keys, &answers);
        answers
    }

    /// As [`Manager::lookup_key`], its answer checked.
    pub(crate) fn lookup_key(&mut self, id: RequestId, key: Key) -> Lookup {
        self.stage.lock().ledger.said_hit.clear();
        let answer = self.manager.lookup_key(id, &key.bytes()).expect("open");
        self.counts.asked += 1;
        self.check_answers(id, &[key], &[answer]);
        answer
    }
}
