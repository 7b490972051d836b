//! Pins under random interleavings: `make interleavings` builds this with shuttle's locks, atomics
//! and threads, and a scheduler with a printed seed decides who runs when.
//!
//! Two engine threads and two workers share three slots and a memory tier of four chunks. However
//! they interleave: a slot that is pinned holds its key's bytes, and when all is over, nothing is
//! pinned, being written, or owed to a request.

#![cfg(kvtier_shuttle)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::clock::Clock;
use kvtier_core::index::PolicyKind;
use kvtier_core::key::KeyBatch;
use kvtier_core::manager::{Lookup, Manager, ManagerOptions, TierSlot};
use kvtier_core::region::{Region, RegionKind};
use kvtier_core::tier::{MemoryStore, StoreTier, TierLimits};
use shuttle::scheduler::{PctScheduler, RandomScheduler};

const CHUNK: usize = 4096;

fn keys(numbers: &[u8]) -> KeyBatch {
    let flat = numbers.iter().flat_map(|&number| [number; 8]).collect();
    KeyBatch::from_flat(flat, 8).expect("whole keys")
}

fn manager(policy: PolicyKind) -> Manager {
    let region = Region::new(3, CHUNK, RegionKind::Anonymous).expect("small");
    let store = MemoryStore::new(4 * CHUNK as u64, CHUNK, 8).expect("small");
    let tier = TierSlot {
        name: "memory".into(),
        tier: Box::new(StoreTier::start(store, 2).expect("threads")),
        limits: TierLimits {
            load_deadline: Duration::from_secs(3600),
            store_deadline: Duration::from_secs(3600),
            max_queued_bytes: Some(u64::MAX),
            ..TierLimits::default()
        },
    };
    let options = ManagerOptions {
        key_bytes: 8,
        policy,
        store_threshold: 1,
        events: false,
        clock: Clock::system(),
    };
    Manager::new(region, &options, vec![tier]).expect("good key length")
}

/// A short life of an engine: stores, looks up, loads what is there, and checks every byte.
fn engine(manager: &Manager, request: u64) {
    let first = request as u8 * 10;
    for turn in 0..2 {
        let numbers = [first + turn, first + turn + 1];
        if let Some(prepared) = manager.prepare_store(request, &keys(&numbers)).expect("open") {
            let new: Vec<u8> = prepared.indices.iter().map(|&at| numbers[at as usize]).collect();
            for (&slot, &number) in prepared.slots.iter().zip(&new) {
                // SAFETY: `prepare_store` gave the slot to this thread.
                unsafe { manager.region().slot_mut(slot) }.fill(number);
            }
            manager.complete_store(request, &keys(&new), true).expect("prepared");
        }
        manager.end_step().expect("open");
        // The other engine's keys too.
        for number in [first, 10, 20] {
            if manager.lookup_key(request, &[number; 8]).expect("open") != Lookup::Hit {
                continue;
            }
            let Ok(slots) = manager.prepare_load(request, &keys(&[number])) else {
                continue;
            };
            // SAFETY: pinned.
            let bytes = unsafe { manager.region().slot(slots[0]) };
            assert!(bytes.iter().all(|&byte| byte == number), "a pinned slot was rewritten");
            manager.complete_load(request, &keys(&[number])).expect("pinned");
        }
        manager.end_step().expect("open");
    }
    manager.request_finished(request).expect("open");
}

fn life(policy: PolicyKind, drain: bool) {
    let manager = Arc::new(manager(policy));
    let engines: Vec<_> = (1..=2)
        .map(|request| {
            let manager = Arc::clone(&manager);
            shuttle::thread::spawn(move || engine(&manager, request))
        })
        .collect();
    for engine in engines {
        engine.join().expect("no assertion failed");
    }
    while drain {
        manager.end_step().expect("open");
        if !manager.is_busy().expect("open") {
            break;
        }
        manager.wait_until(Instant::now() + Duration::from_secs(3600)).expect("open");
    }
    manager.shutdown();
    manager.validate().expect("invariants hold");
    let primary = manager.stats().primary;
    assert_eq!((primary.pinned, primary.writing, primary.requests), (0, 0, 0));
}

/// Runs a life under many schedules. The seed is fixed, so a run that fails fails again.
fn schedules(scheduler: impl shuttle::scheduler::Scheduler + 'static, life: fn()) {
    let mut config = shuttle::Config::default();
    // Frames of a debug build are larger than shuttle expects.
    config.stack_size = 1 << 20;
    shuttle::Runner::new(scheduler, config).run(life);
}

fn iterations() -> usize {
    std::env::var("ITERATIONS").map_or(300, |text| text.parse().expect("ITERATIONS is a number"))
}

#[test]
fn every_pin_comes_back_whoever_runs_first() {
    let random = RandomScheduler::new_from_seed(40_020, iterations());
    schedules(random, || PolicyKind::ALL.iter().for_each(|&(_, policy)| life(policy, true)));
}

#[test]
fn shutdown_under_running_jobs_returns_every_pin() {
    let preempting = PctScheduler::new_from_seed(37_853, 3, iterations());
    schedules(preempting, || life(PolicyKind::Lru, false));
}
