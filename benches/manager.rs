//! What does it cost to be seen? The end of a step with one memory tier, with nothing to do.
//!
//! `bare` is a manager that nobody can see, with tracing off; `page` one with a stats page. What an
//! engine does in a step takes milliseconds.

use std::path::Path;

use criterion::{Criterion, criterion_group, criterion_main};
use kvtier_core::clock::Clock;
use kvtier_core::index::PolicyKind;
use kvtier_core::manager::{Manager, ManagerOptions, TierSlot};
use kvtier_core::page::DEFAULT_DIRECTORY;
use kvtier_core::region::{Region, RegionKind};
use kvtier_core::tier::{MemoryStore, StoreTier, TierLimits};

const CHUNK: usize = 4096;

fn manager() -> Manager {
    let region = Region::new(64, CHUNK, RegionKind::Anonymous).expect("small");
    let options = ManagerOptions {
        key_bytes: 36,
        policy: PolicyKind::Lru,
        store_threshold: 1,
        events: false,
        clock: Clock::system(),
    };
    let store = MemoryStore::new(64 * CHUNK as u64, CHUNK, 36).expect("small");
    let tier = TierSlot {
        name: "memory".into(),
        tier: Box::new(StoreTier::start(store, 1).expect("threads")),
        limits: TierLimits::default(),
    };
    Manager::new(region, &options, vec![tier]).expect("valid")
}

fn end_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("end_step");
    let bare = manager();
    let mut shown = manager();
    shown.open_page(Path::new(DEFAULT_DIRECTORY)).expect("shared memory");
    group.bench_function("bare", |bencher| bencher.iter(|| bare.end_step().expect("open")));
    group.bench_function("page", |bencher| bencher.iter(|| shown.end_step().expect("open")));
    group.finish();
}

criterion_group!(benches, end_step);
criterion_main!(benches);
