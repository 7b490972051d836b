//! Does the index cost what its hash table costs, and does it stay so as it grows?
//!
//! Each figure is one verb over a batch of 128 keys of 36 bytes in a full index, with 100,000 and
//! with 10 million entries; `lookup` beside a bare `hashbrown` table of the same keys. Divide by
//! 128 for the cost of a key.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use hashbrown::HashMap;
use kvtier_core::index::{ANYONE, Chain, Index, Pin, PolicyKind, Writer};
use kvtier_core::key::KeyBatch;
use std::hint::black_box;

const BATCH: u64 = 128;
const KEY_BYTES: usize = 36;

/// `SplitMix64`.
fn mix(state: u64) -> u64 {
    let mut mixed = state.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// A key that looks like a block hash of group 0 and is the same in every run.
fn key(number: u64) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    for (at, part) in key[..32].chunks_mut(8).enumerate() {
        part.copy_from_slice(&mix(4 * number + at as u64 + 1).to_le_bytes());
    }
    key
}

fn batch(first: u64) -> KeyBatch {
    KeyBatch::from_flat((first..first + BATCH).flat_map(key).collect(), KEY_BYTES).expect("whole")
}

fn store(index: &mut Index, keys: &KeyBatch) {
    index.begin_call();
    let numbered = (0..).zip(keys.iter());
    let reserved = index
        .reserve(numbered, Writer::Store, ANYONE, &mut Chain::default())
        .expect("distinct")
        .expect("room");
    for &token in reserved.tokens.iter().rev() {
        index.commit(token);
    }
}

fn full_index(policy: PolicyKind, entries: u32) -> Index {
    let mut index = Index::new(entries, KEY_BYTES, policy).expect("small");
    for first in (0..u64::from(entries)).step_by(BATCH as usize) {
        store(&mut index, &batch(first));
    }
    index
}

fn verbs(criterion: &mut Criterion, entries: u32, name: &str) {
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(BATCH));
    // Batches from all over the index; the first ones made room for the last of `full_index`.
    let batches = u64::from(entries) / BATCH;
    let wanted: Vec<KeyBatch> =
        (0..2000).map(|at| batch((8 + mix(at) % (batches - 16)) * BATCH)).collect();
    let mut turn = wanted.iter().cycle();
    let mut next = move || turn.next().expect("endless");

    let mut index = full_index(PolicyKind::Lru, entries);
    group.bench_function("lookup", |bencher| {
        bencher.iter(|| {
            let mut found = 0;
            index.find_batch(black_box(next()), |_, token| found += u32::from(token.is_some()));
            found
        });
    });
    group.bench_function("load cycle", |bencher| {
        bencher.iter(|| {
            let tokens = index.find_all(next()).expect("resident");
            for &token in &tokens {
                index.pin(token, Pin::Load).expect("ready");
            }
            for &token in tokens.iter().rev() {
                index.unpin(token, Pin::Load).expect("pinned");
            }
        });
    });
    let mut number = u64::from(entries);
    let mut fresh = move || {
        number += BATCH;
        batch(number)
    };
    group.bench_function("store cycle with eviction", |bencher| {
        bencher.iter_batched(&mut fresh, |keys| store(&mut index, &keys), BatchSize::SmallInput);
    });
    drop(index);

    let table: HashMap<[u8; KEY_BYTES], u32, foldhash::fast::FixedState> =
        (0..entries).map(|number| (key(u64::from(number)), number)).collect();
    group.bench_function("lookup, bare hashbrown", |bencher| {
        bencher.iter(|| {
            let keys = black_box(next());
            keys.iter().filter(|key| table.get(*key).is_some()).count()
        });
    });
    group.finish();
}

/// What an eviction costs under each policy: a store cycle with as many evictions as keys.
fn policies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("store cycle with eviction");
    group.throughput(Throughput::Elements(BATCH));
    for &(name, policy) in PolicyKind::ALL {
        let mut index = full_index(policy, 100_000);
        let mut number = 100_000;
        let mut fresh = move || {
            number += BATCH;
            batch(number)
        };
        group.bench_function(name, |bencher| {
            bencher.iter_batched(
                &mut fresh,
                |keys| store(&mut index, &keys),
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

fn benches(criterion: &mut Criterion) {
    verbs(criterion, 100_000, "100 thousand entries");
    verbs(criterion, 10_000_000, "10 million entries");
    policies(criterion);
}

criterion_group!(index, benches);
criterion_main!(index);
