use super::*;
use crate::index::PolicyKind;
use crate::manager::{Lookup, Manager, ManagerOptions, TierSlot};
use crate::region::{Region, RegionKind};
use crate::tier::{Fault, MemoryStore, StoreTier, TierLimits};

const KEYS: u8 = 40;

/// `KEYS` chunks stored, then forgotten by the primary tier.
fn manager(faults: Faults) -> Manager {
    let manager = empty_manager(faults);
    (0..KEYS).for_each(|number| store(&manager, number));
    settle(&manager);
    manager.reset().expect("open");
    manager.reset_flushed().expect("open");
    manager
}

fn store(manager: &Manager, number: u8) {
    let prepared = manager.prepare_store(1, &key(number)).expect("open").expect("room for all");
    // SAFETY: `prepare_store` gave the slot to this test.
    unsafe { manager.region().slot_mut(prepared.slots[0]) }.fill(number);
    manager.complete_store(1, &key(number), true).expect("prepared");
}

/// A memory tier with faults behind a manager of 64 slots.
fn empty_manager(faults: Faults) -> Manager {
    let region = Region::new(64, 4096, RegionKind::Anonymous).expect("small");
    let store = MemoryStore::new(64 * 4096, 4096, 8).expect("small");
    let inner = Box::new(StoreTier::start(store, 2).expect("threads"));
    let tier = TierSlot {
        name: "faulty".into(),
        tier: Box::new(FaultyTier::start(inner, faults).expect("a thread")),
        limits: TierLimits {
            max_queued_bytes: Some(u64::MAX),
            breaker_failures: 0,
            load_share: 1.0,
            ..TierLimits::default()
        },
    };
    let options = ManagerOptions {
        key_bytes: 8,
        policy: PolicyKind::Lru,
        store_threshold: 1,
        events: false,
        clock: Clock::system(),
    };
    Manager::new(region, &options, vec![tier]).expect("good key length")
}

fn key(number: u8) -> KeyBatch {
    KeyBatch::from_flat(vec![number; 8], 8).expect("whole")
}

fn settle(manager: &Manager) {
    loop {
        manager.end_step().expect("open");
        manager.validate().expect("invariants hold");
        if !manager.is_busy().expect("open") {
            return;
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        assert!(manager.wait_until(deadline).expect("open"), "jobs do not end");
    }
}

/// Which keys come back, each by a job of its own; every byte of those is checked.
fn come_back(manager: &Manager) -> Vec<u8> {
    for number in 0..KEYS {
        manager.lookup(u64::from(number) + 2, &key(number), false).expect("open");
    }
    settle(manager);
    let came = |&number: &u8| {
        if manager.lookup_key(1, &[number; 8]).expect("open") != Lookup::Hit {
            return false;
        }
        let slots = manager.prepare_load(1, &key(number)).expect("ready");
        // SAFETY: pinned.
        let bytes = unsafe { manager.region().slot(slots[0]) };
        assert!(bytes.iter().all(|&byte| byte == number), "a wrong byte was served");
        manager.complete_load(1, &key(number)).expect("pinned");
        true
    };
    (0..KEYS).filter(came).collect()
}

#[test]
fn without_faults_everything_comes_back() {
    assert_eq!(come_back(&manager(Faults::default())).len(), usize::from(KEYS));
}

#[test]
fn each_fault_does_what_it_says_and_the_same_again() {
    let seed = 7;
    let cases = [
        ("loss", Faults { seed, loss: 0.3, ..Faults::default() }),
        ("partial", Faults { seed, partial: 0.3, ..Faults::default() }),
        ("corrupt", Faults { seed, corrupt: 0.5, ..Faults::default() }),
        ("full", Faults { seed, full: 0.5, ..Faults::default() }),
        ("crash", Faults { seed, crash_after: Some(60), ..Faults::default() }),
        ("late", Faults { seed, loss: 0.3, latency_s: 0.002, reorder: true, ..Faults::default() }),
    ];
    for (name, faults) in cases {
        let first = manager(faults);
        let came = come_back(&first);
        let figures = first.stats().tiers[0].figures.clone();
        assert!((1..usize::from(KEYS)).contains(&came.len()), "{name}: {came:?}");
        let cause = match name {
            "partial" => figures.loads.failed(Failure::Io) + figures.stores.failed(Failure::Io),
            "corrupt" => figures.loads.failed(Failure::Corrupt),
            "full" => figures.stores.failed(Failure::Full),
            _ => figures.loads.failed(Failure::Lost) + figures.stores.failed(Failure::Lost),
        };
        // After its crash the tier is not even asked.
        assert!(cause > 0 || name == "crash", "{name}: {figures:?}");
        assert_eq!(come_back(&manager(faults)), came, "{name}: by the seed alone");
    }
}

#[test]
fn a_tier_that_panics_or_does_not_know_serves_the_rest() {
    let faults = Faults { seed: 3, panic: 0.2, retry: 0.2, lie: 0.2, ..Faults::default() };
    let manager = manager(faults);
    let came = come_back(&manager).len();
    assert!((1..usize::from(KEYS)).contains(&came), "{came}");
    let stats = manager.stats();
    assert!(stats.tiers[0].figures.faults[Fault::Raised as usize] > 0);
    assert!(stats.primary.retries > 0);
}

#[test]
fn what_hangs_ends_with_the_tier() {
    let manager = empty_manager(Faults { seed: 5, hang: 1.0, ..Faults::default() });
    store(&manager, 1);
    manager.end_step().expect("open");
    assert!(manager.is_busy().expect("open"));
    manager.shutdown();
    manager.validate().expect("invariants hold");
    let primary = manager.stats().primary;
    assert_eq!((primary.pinned, primary.detached), (0, 0));
}

#[test]
fn rates_are_checked() {
    let error = Faults { loss: 1.5, ..Faults::default() }.check().expect_err("no rate");
    assert_eq!(error, "faults: loss = 1.5 is not between 0 and 1");
}
