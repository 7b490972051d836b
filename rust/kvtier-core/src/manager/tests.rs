use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::index::State;
use crate::region::RegionKind;
use crate::tier::{
    Failure, Fault, LoadJob, Locality, Medium, MemoryStore, News, Presence, Shed, StoreJob,
    StoreTier, Usage,
};

mod requests;
mod resets;
mod solo;
mod trouble;
mod waiting;

const SLOTS: u32 = 4;

fn options() -> ManagerOptions {
    ManagerOptions {
        key_bytes: 8,
        policy: PolicyKind::Lru,
        store_threshold: 1,
        events: true,
        clock: Clock::system(),
    }
}

/// A tier that has everything or nothing, and keeps its jobs until a test takes them.
struct HeldTier {
    answer: Mutex<Presence>,
    loads: Mutex<Vec<LoadJob>>,
    stores: Mutex<Vec<StoreJob>>,
    /// Keys that it was asked for.
    asked: Mutex<usize>,
    /// Requests that ended, with the number of stores it had been given by then.
    ended: Mutex<Vec<(RequestId, usize)>>,
    news: Mutex<News>,
}

impl HeldTier {
    /// Brings the chunks of the oldest load, each filled with its key's number.
    fn deliver(&self) {
        let job = self.loads.lock().remove(0);
        for index in 0..job.len() {
            let number = job.key(index)[0];
            // SAFETY: this test is the job's only worker.
            unsafe { job.place(index) }.fill(number);
            let stored = crate::checksum::Checksum::of_chunk(&[number; 8], &[number; 4096]);
            job.deliver(index, stored, Duration::ZERO).expect("right");
        }
    }

    /// Ends the oldest store, its chunks kept or not.
    fn end_store(&self, outcome: Result<(), Failure>) {
        let job = self.stores.lock().remove(0);
        (0..job.len()).for_each(|index| job.report(index, outcome, Duration::ZERO, None));
    }

    /// Ends the oldest load with a failure.
    fn fail_load(&self, failure: Failure) {
        let job = self.loads.lock().remove(0);
        (0..job.len()).for_each(|index| job.fail(index, failure, Duration::ZERO));
    }
}

impl SecondaryTier for Arc<HeldTier> {
    fn medium(&self) -> Medium {
        Medium::Memory
    }
    fn lookup(&self, _: RequestId, _: &KeyBatch, _: &[u32], presence: &mut [Presence]) {
        *self.asked.lock() += presence.len();
        presence.fill(*self.answer.lock());
    }
    fn end_step(&self, news: &mut News) {
        *news = std::mem::take(&mut *self.news.lock());
    }
    fn finish_request(&self, request: RequestId) {
        self.ended.lock().push((request, self.stores.lock().len()));
    }
    fn submit_store(&self, job: StoreJob) {
        self.stores.lock().push(job);
    }
    fn submit_load(&self, job: LoadJob) {
        self.loads.lock().push(job);
    }
    fn touch(&self, _: &KeyBatch) {}
    fn usage(&self) -> Usage {
        Usage::default()
    }
    fn shutdown(&self) {
        let jobs =
            (std::mem::take(&mut *self.loads.lock()), std::mem::take(&mut *self.stores.lock()));
        drop(jobs);
    }
}

fn held(has: bool) -> Arc<HeldTier> {
    Arc::new(HeldTier {
        answer: Mutex::new(if has { Presence::Hit } else { Presence::Miss }),
        loads: Mutex::default(),
        stores: Mutex::default(),
        asked: Mutex::default(),
        ended: Mutex::default(),
        news: Mutex::default(),
    })
}

fn slot(name: &str, tier: Box<dyn SecondaryTier>) -> TierSlot {
    TierSlot {
        name: name.into(),
        tier,
        limits: TierLimits {
            load_deadline: Duration::from_secs(60),
            store_deadline: Duration::from_secs(60),
            max_queued_bytes: Some(u64::MAX),
            load_share: 1.0,
            ..TierLimits::default()
        },
    }
}

fn manager(tiers: Vec<TierSlot>) -> Manager {
    timed_manager(SLOTS, tiers, &Clock::system())
}

/// A manager of `slots` slots on a clock of the test's.
fn timed_manager(slots: u32, tiers: Vec<TierSlot>, clock: &Clock) -> Manager {
    let region = Region::new(slots, 4096, RegionKind::Anonymous).expect("small");
    let options = ManagerOptions { clock: clock.clone(), ..options() };
    Manager::new(region, &options, tiers).expect("good key length")
}

/// A held tier behind a manager of `slots` slots, with limits of the test's.
fn one_tier(slots: u32, has: bool, limits: TierLimits) -> (Manager, Arc<HeldTier>, Clock) {
    let (tier, clock) = (held(has), Clock::simulated());
    let slot = TierSlot { name: "held".into(), tier: Box::new(Arc::clone(&tier)), limits };
    (timed_manager(slots, vec![slot], &clock), tier, clock)
}

/// A manager of four slots without events, and a memory tier of one thread behind it: for whoever
/// looks at a manager from outside.
pub(crate) fn with_memory_tier(name: &str, chunks: u64, limits: TierLimits) -> Manager {
    let store = MemoryStore::new(chunks * 4096, 4096, 8).expect("small");
    let tier = Box::new(StoreTier::start(store, 1).expect("threads"));
    let region = Region::new(SLOTS, 4096, RegionKind::Anonymous).expect("small");
    let options = ManagerOptions { events: false, ..options() };
    let slot = TierSlot { name: name.into(), tier, limits };
    Manager::new(region, &options, vec![slot]).expect("valid")
}

fn end_step(manager: &Manager) {
    manager.end_step().expect("open");
    manager.validate().expect("invariants hold");
}

fn memory_tier(chunks: u64) -> Box<dyn SecondaryTier> {
    let store = MemoryStore::new(chunks * 4096, 4096, 8).expect("small");
    Box::new(StoreTier::start(store, 2).expect("threads"))
}

fn keys(numbers: &[u8]) -> KeyBatch {
    let flat = numbers.iter().flat_map(|&number| [number; 8]).collect();
    KeyBatch::from_flat(flat, 8).expect("whole keys")
}

/// Stores keys, each slot filled with its key's number.
fn store(manager: &Manager, numbers: &[u8]) -> PreparedStore {
    let prepared = manager.prepare_store(1, &keys(numbers)).expect("open").expect("room");
    let new: Vec<u8> = prepared.indices.iter().map(|&at| numbers[at as usize]).collect();
    for (&slot, &number) in prepared.slots.iter().zip(&new) {
        // SAFETY: `prepare_store` gave the slot to this test.
        unsafe { manager.region().slot_mut(slot) }.fill(number);
    }
    manager.complete_store(1, &keys(&new), true).expect("prepared");
    prepared
}

/// Ends steps until nothing is under way.
fn settle(manager: &Manager) {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        manager.end_step().expect("open");
        if !manager.is_busy().expect("open") {
            break;
        }
        assert!(Instant::now() < end, "jobs do not end");
        manager.wait_until(end).expect("open");
    }
    manager.validate().expect("invariants hold");
}

fn look(manager: &Manager, numbers: &[u8]) -> Vec<Lookup> {
    manager.lookup(2, &keys(numbers), false).expect("open")
}

#[test]
fn evicted_chunks_come_back_from_a_tier_with_their_bytes() {
    let manager = manager(vec![slot("memory", memory_tier(16))]);
    store(&manager, &[1, 2, 3, 4]);
    settle(&manager);
    let prepared = store(&manager, &[5, 6]);
    // The tail of a request goes before its head.
    assert_eq!(prepared.evicted, keys(&[4, 3]));
    settle(&manager);
    assert_eq!(look(&manager, &[1, 3, 9]), [Lookup::Hit, Lookup::HitPending, Lookup::Miss]);
    assert_eq!(look(&manager, &[3]), [Lookup::HitPending], "queued once");
    settle(&manager);
    assert_eq!(look(&manager, &[3]), [Lookup::Hit]);
    let origin = |number: u8| manager.promoted_from(&[number; 8]).expect("open");
    assert_eq!([origin(1), origin(3), origin(9)], [None, Some("memory"), None]);
    let slots = manager.prepare_load(2, &keys(&[3])).expect("ready");
    // SAFETY: pinned.
    assert!(unsafe { manager.region().slot(slots[0]) }.iter().all(|&byte| byte == 3));
    manager.complete_load(2, &keys(&[3])).expect("pinned");
    let stats = manager.stats();
    assert_eq!((stats.tiers[0].figures.stores.chunks, stats.tiers[0].figures.loads.chunks), (6, 1));
    assert_eq!(stats.primary.pinned, 0);
    store(&manager, &[7, 8, 9, 10]);
    assert_eq!([7, 8, 9, 10].map(origin), [None; 4], "whatever was in their slots before");
}

#[test]
fn a_step_in_which_nothing_happens_leaves_the_revision_and_all_figures() {
    let manager = manager(vec![slot("memory", memory_tier(16))]);
    let mut seen = vec![manager.revision()];
    let mut changed = |manager: &Manager| {
        seen.push(manager.revision());
        let [.., before, now] = seen[..] else { unreachable!() };
        before != now
    };
    store(&manager, &[1, 2, 3, 4]);
    assert!(changed(&manager));
    settle(&manager);
    assert!(changed(&manager), "the tier's job ended");
    let figures = manager.stats();
    (0..3).for_each(|_| end_step(&manager));
    manager.take_events().expect("open");
    assert!(!changed(&manager));
    let mut after = manager.stats();
    assert_eq!(after.primary.steps, figures.primary.steps + 3, "steps are counted all the same");
    (after.number, after.primary.steps) = (figures.number, figures.primary.steps);
    assert_eq!(after, figures);
    look(&manager, &[9]);
    assert!(changed(&manager), "a key was looked up");
}

#[test]
fn a_prefix_lookup_promotes_nothing_behind_the_first_miss() {
    let manager = manager(vec![slot("memory", memory_tier(16))]);
    store(&manager, &[1, 2, 3, 4]);
    settle(&manager);
    store(&manager, &[5, 6, 7, 8]);
    settle(&manager);
    let answers = manager.lookup(2, &keys(&[1, 2, 9, 3]), true).expect("open");
    assert_eq!(answers, [Lookup::HitPending, Lookup::HitPending]);
    assert_eq!(manager.stats().tiers[0].figures.hits, 2);
}

#[test]
fn a_single_lookup_is_a_batch_of_one() {
    for tiers in [Vec::new(), vec![slot("memory", memory_tier(16))]] {
        let manager = manager(tiers);
        store(&manager, &[1, 2, 3, 4]);
        settle(&manager);
        store(&manager, &[5]);
        settle(&manager);
        for number in [1, 4, 4, 9] {
            let before = manager.stats().primary;
            let one = manager.lookup_key(2, &[number; 8]).expect("open");
            assert_eq!(look(&manager, &[number])[0], one);
            let after = manager.stats().primary;
            let seen =
                |figures: PrimaryFigures| figures.hits + figures.hits_pending + figures.misses;
            assert_eq!(seen(after), seen(before) + 2);
        }
        let error = manager.lookup_key(2, b"short").expect_err("refused");
        assert!(error.to_string().contains("5 bytes"), "{error}");
    }
}

#[test]
fn one_load_job_a_tier_and_request() {
    let tier = held(true);
    let manager = manager(vec![slot("held", Box::new(Arc::clone(&tier)))]);
    look(&manager, &[1, 2]);
    manager.lookup(3, &keys(&[3]), false).expect("open");
    look(&manager, &[4]);
    assert!(tier.loads.lock().is_empty(), "nothing before the end of the step");
    manager.end_step().expect("open");
    let sizes: Vec<usize> = tier.loads.lock().iter().map(|job| job.len()).collect();
    assert_eq!(sizes, [3, 1]);
}

#[test]
fn a_promotion_keeps_what_arrived_and_a_wrong_checksum_is_a_miss() {
    let tier = held(true);
    let manager = manager(vec![slot("held", Box::new(Arc::clone(&tier)))]);
    look(&manager, &[1, 2, 3]);
    manager.end_step().expect("open");
    let job = tier.loads.lock().pop().expect("submitted");
    for (index, number) in [(0, 1), (1, 2)] {
        // SAFETY: this test is the job's only worker.
        unsafe { job.place(index) }.fill(number);
    }
    let stored = crate::checksum::Checksum::of_chunk(&[1; 8], &[1; 4096]);
    job.deliver(0, stored, Duration::ZERO).expect("right");
    job.deliver(1, crate::checksum::Checksum(0), Duration::ZERO).expect_err("wrong");
    drop(job);
    manager.end_step().expect("open");
    manager.validate().expect("invariants hold");
    let state = |number: u8| {
        let inner = manager.inner.lock();
        inner.index.find(&[number; 8]).map(|token| inner.index.state(token))
    };
    assert_eq!((state(1), state(2), state(3)), (Some(State::Ready), None, None));
    let failures = manager.stats().tiers[0].figures.loads.failures;
    assert_eq!(failures[Failure::Corrupt as usize], 1);
    assert_eq!(failures[Failure::Lost as usize], 1, "never reported");
}

#[test]
fn a_late_load_is_a_miss_at_once_and_its_slot_comes_back_later() {
    let tier = held(true);
    let mut held = slot("held", Box::new(Arc::clone(&tier)));
    held.limits.load_deadline = Duration::ZERO;
    let manager = manager(vec![held]);
    look(&manager, &[1, 2, 3, 4]);
    manager.end_step().expect("open");
    manager.end_step().expect("open");
    manager.validate().expect("invariants hold");
    assert_eq!(manager.stats().primary.detached, 4);
    assert_eq!(manager.stats().tiers[0].figures.loads.overdue, 1);
    assert_eq!(manager.prepare_store(1, &keys(&[9])).expect("open"), None, "no slot is reused");
    let job = tier.loads.lock().pop().expect("submitted");
    assert!(job.is_cancelled());
    drop(job);
    manager.end_step().expect("open");
    manager.validate().expect("invariants hold");
    assert_eq!(manager.stats().primary.detached, 0);
    assert!(manager.prepare_store(1, &keys(&[9])).expect("open").is_some());
}

#[test]
fn cascading_chunks_are_pinned_once_a_tier_until_the_job_ends() {
    let tiers = [held(false), held(false)];
    let manager = manager(vec![
        slot("a", Box::new(Arc::clone(&tiers[0]))),
        slot("b", Box::new(Arc::clone(&tiers[1]))),
    ]);
    store(&manager, &[1, 2, 3, 4]);
    assert_eq!(manager.stats().primary.pinned, 4);
    assert_eq!(manager.prepare_store(1, &keys(&[5])).expect("open"), None);
    tiers[0].stores.lock().clear();
    assert_eq!(manager.prepare_store(1, &keys(&[5])).expect("open"), None);
    tiers[1].stores.lock().clear();
    // Results are taken before the decision, not only at the end of the step.
    let prepared = manager.prepare_store(1, &keys(&[5])).expect("open").expect("room");
    assert_eq!(prepared.evicted, keys(&[4]));
    assert_eq!(manager.stats().primary.stores_refused, 2);
    manager.validate().expect("invariants hold");
}

#[test]
fn a_slow_tier_is_passed_over_and_the_others_are_not() {
    let tiers = [held(false), held(false)];
    let mut slow = slot("slow", Box::new(Arc::clone(&tiers[0])));
    slow.limits.max_queued_bytes = Some(2 * 4096);
    let manager = manager(vec![slow, slot("fast", Box::new(Arc::clone(&tiers[1])))]);
    for number in 1..=3 {
        store(&manager, &[number]);
    }
    assert_eq!(tiers[0].stores.lock().len(), 2);
    assert_eq!(tiers[1].stores.lock().len(), 3);
    assert_eq!(manager.stats().tiers[0].figures.sheds, 1);
}

#[test]
fn what_was_not_prepared_cannot_be_completed() {
    let tier = held(true);
    let manager = manager(vec![slot("held", Box::new(Arc::clone(&tier)))]);
    let refused = |result: Result<(), ManagerError>| {
        let error = result.expect_err("refused").to_string();
        manager.validate().expect("nothing changed");
        error
    };
    assert!(refused(manager.complete_store(1, &keys(&[1]), true)).contains("not resident"));
    look(&manager, &[7]);
    assert!(refused(manager.complete_store(2, &keys(&[7]), true)).contains("not being stored"));
    assert!(manager.prepare_load(2, &keys(&[7])).is_err(), "still being written");
    store(&manager, &[1, 2]);
    assert!(refused(manager.complete_store(1, &keys(&[1]), true)).contains("not being stored"));
    assert!(refused(manager.complete_load(1, &keys(&[1]))).contains("no pin"), "a job has one");
    manager.prepare_load(2, &keys(&[1])).expect("ready");
    assert!(refused(manager.complete_load(3, &keys(&[1]))).contains("no pin"), "another request");
    assert!(manager.prepare_load(2, &keys(&[1, 1])).is_err());
    assert!(manager.prepare_store(1, &keys(&[8, 8])).is_err());
    assert!(manager.prepare_load(2, &keys(&[1, 9])).is_err());
    manager.validate().expect("nothing changed");
    manager.complete_load(2, &keys(&[1])).expect("pinned once");
    assert!(refused(manager.complete_load(2, &keys(&[1]))).contains("no pin"));
}

#[test]
fn a_request_with_an_open_store_cannot_complete_what_is_ready_or_promoted() {
    let tier = held(true);
    let manager = manager(vec![slot("held", Box::new(Arc::clone(&tier)))]);
    store(&manager, &[1]);
    look(&manager, &[2]);
    manager.prepare_store(1, &keys(&[3])).expect("open").expect("room");
    for other in [1, 2] {
        let error = manager.complete_store(1, &keys(&[other]), true).expect_err("refused");
        assert!(error.to_string().contains("not being stored"), "{error}");
    }
    manager.complete_store(1, &keys(&[3]), true).expect("prepared");
    manager.validate().expect("invariants hold");
}

#[test]
fn a_request_cannot_complete_what_another_one_stores() {
    let manager = manager(Vec::new());
    manager.prepare_store(1, &keys(&[1, 2])).expect("open").expect("room");
    manager.prepare_store(2, &keys(&[3, 4])).expect("open").expect("room");
    for wrong in [&[3][..], &[1, 3], &[2, 1, 4]] {
        let error = manager.complete_store(1, &keys(wrong), true).expect_err("refused");
        assert!(error.to_string().contains("not being stored"), "{error}");
    }
    assert_eq!(manager.stats().primary.writing, 4, "nothing changed");
    manager.complete_store(1, &keys(&[2, 1]), true).expect("its own, in any order");
    manager.complete_store(2, &keys(&[4]), true).expect("in parts");
    manager.complete_store(2, &keys(&[3]), true).expect("the rest");
    manager.validate().expect("invariants hold");
}

#[test]
fn without_tiers_too_the_tail_of_a_call_goes_before_its_head() {
    let manager = manager(Vec::new());
    store(&manager, &[1, 2, 3, 4]);
    let prepared = manager.prepare_store(9, &keys(&[5, 6])).expect("open").expect("room");
    assert_eq!(prepared.evicted, keys(&[4, 3]));
}

#[test]
fn with_a_threshold_a_chunk_is_stored_at_its_second_offer() {
    let region = Region::new(SLOTS, 4096, RegionKind::Anonymous).expect("small");
    let options = ManagerOptions { store_threshold: 2, ..options() };
    let manager = Manager::new(region, &options, Vec::new()).expect("good key length");
    let offer = |numbers: &[u8]| {
        let prepared = manager.prepare_store(1, &keys(numbers)).expect("open").expect("room");
        let new: Vec<u8> = prepared.indices.iter().map(|&at| numbers[at as usize]).collect();
        manager.complete_store(1, &keys(&new), true).expect("prepared");
        new
    };
    assert!(offer(&[1, 2]).is_empty());
    assert_eq!(offer(&[2, 3]), [2]);
    assert_eq!(offer(&[1, 2, 3]), [1, 3]);
    assert_eq!(manager.stats().primary.not_admitted, 3);
    manager.validate().expect("invariants hold");
}

#[test]
fn pins_come_back_in_any_order_and_only_those_a_request_holds() {
    let manager = manager(Vec::new());
    store(&manager, &[1, 2, 3, 4]);
    manager.request_finished(1).expect("open");
    manager.prepare_load(2, &keys(&[1, 2])).expect("ready");
    manager.prepare_load(2, &keys(&[2, 3])).expect("ready");
    manager.prepare_load(3, &keys(&[4])).expect("ready");
    for wrong in [&[4][..], &[1, 4], &[2, 2], &[1, 2, 2]] {
        manager.complete_load(2, &keys(wrong)).expect_err("not all of them are its");
    }
    manager.complete_load(2, &keys(&[3, 2])).expect("out of order");
    manager.complete_load(2, &keys(&[1, 2])).expect("the rest");
    manager.complete_load(2, &keys(&[1])).expect_err("given back");
    assert_eq!(manager.stats().primary.pinned, 1);
    manager.complete_load(3, &keys(&[4])).expect("its own");
    for request in [2, 3] {
        manager.request_finished(request).expect("open");
    }
    let primary = manager.stats().primary;
    assert_eq!((primary.pinned, primary.requests, primary.loaded_chunks), (0, 0, 5));
    manager.validate().expect("invariants hold");
}

#[test]
fn a_failed_store_leaves_no_trace() {
    let manager = manager(Vec::new());
    manager.prepare_store(1, &keys(&[1, 2])).expect("open").expect("room");
    manager.complete_store(1, &keys(&[2, 1]), false).expect("prepared");
    assert_eq!(look(&manager, &[1, 2]), [Lookup::Miss, Lookup::Miss]);
    manager.request_finished(1).expect("open");
    assert_eq!(manager.stats().primary.requests, 0);
    manager.validate().expect("invariants hold");
}

#[test]
fn a_finished_request_is_ordered_leaf_first_when_its_last_transfer_ends() {
    let manager = manager(Vec::new());
    for number in [1, 2] {
        store(&manager, &[number]);
    }
    manager.prepare_store(1, &keys(&[3])).expect("open").expect("room");
    manager.request_finished(1).expect("open");
    assert_eq!(manager.stats().primary.requests, 1, "a store is open");
    manager.complete_store(1, &keys(&[3]), true).expect("prepared");
    assert_eq!(manager.stats().primary.requests, 0);
    let prepared = manager.prepare_store(9, &keys(&[4, 5, 6])).expect("open").expect("room");
    assert_eq!(prepared.evicted, keys(&[3, 2]));
}

#[test]
fn events_name_the_tier_and_the_keys() {
    let manager = manager(vec![slot("memory", memory_tier(1))]);
    store(&manager, &[1]);
    settle(&manager);
    store(&manager, &[2]);
    settle(&manager);
    let told: Vec<_> = manager
        .take_events()
        .expect("open")
        .into_iter()
        .map(|event| (event.kind, manager.tier_name(event.tier).to_owned(), event.keys[0][0]))
        .collect();
    let (stored, removed) = (EventKind::Stored, EventKind::Removed);
    let wanted = [
        (stored, "primary", 1),
        (stored, "memory", 1),
        (stored, "primary", 2),
        (removed, "memory", 1),
        (stored, "memory", 2),
    ];
    assert_eq!(told, wanted.map(|(kind, tier, key)| (kind, tier.to_owned(), key)));
    assert!(manager.take_events().expect("open").is_empty());
}

#[test]
fn shutdown_returns_every_pin_and_refuses_what_follows() {
    let tier = held(true);
    let manager = manager(vec![slot("held", Box::new(Arc::clone(&tier)))]);
    store(&manager, &[1]);
    look(&manager, &[2]);
    manager.end_step().expect("open");
    look(&manager, &[3]);
    manager.shutdown();
    manager.shutdown();
    let stats = manager.stats();
    assert_eq!((stats.primary.pinned, stats.primary.writing, stats.primary.detached), (0, 0, 0));
    assert!(matches!(manager.end_step(), Err(ManagerError::Closed)));
    assert!(matches!(manager.prepare_store(1, &keys(&[1])), Err(ManagerError::Closed)));
    manager.validate().expect("invariants hold");
}
