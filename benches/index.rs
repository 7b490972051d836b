//! Does the index cost what its hash table costs?
//!
//! Each group measures one verb over a batch of 128 keys of 36 bytes in a full index of 100,000
//! entries; `lookup` beside a bare `hashbrown` table of the same keys. Divide by 128 for the cost
//! a key.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hashbrown::HashMap;
use kvtier_core::index::{ANYONE, Chain, Index, Pin, PolicyKind, Writer};
use kvtier_core::key::KeyBatch;
use std::hint::black_box;

const ENTRIES: u32 = 100_000;
const BATCH: usize = 128;
const KEY_BYTES: usize = 36;

/// A key that looks like a block hash and is the same in every run.
fn key(number: u64) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    let mut state = number;
    // The last four bytes are the group, 0 here.
    for part in key[..32].chunks_mut(8) {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        part.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
    key
}

fn batch(first: u64) -> KeyBatch {
    let flat = (first..first + BATCH as u64).flat_map(key).collect();
    KeyBatch::from_flat(flat, KEY_BYTES).expect("whole keys")
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

fn full_index() -> Index {
    let mut index = Index::new(ENTRIES, KEY_BYTES, PolicyKind::Lru).expect("small");
    for first in (0..u64::from(ENTRIES)).step_by(BATCH) {
        store(&mut index, &batch(first));
    }
    index
}

fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("index");
    group.throughput(Throughput::Elements(BATCH as u64));
    let wanted: Vec<KeyBatch> = (100..600).map(|number| batch(number * BATCH as u64)).collect();

    let index = full_index();
    let mut turn = wanted.iter().cycle();
    group.bench_function("lookup", |bencher| {
        bencher.iter(|| {
            let keys = turn.next().expect("endless");
            keys.iter().filter(|key| index.find(black_box(key)).is_some()).count()
        });
    });

    let table: HashMap<[u8; KEY_BYTES], u32, foldhash::fast::FixedState> =
        (0..ENTRIES).map(|number| (key(u64::from(number)), number)).collect();
    group.bench_function("lookup, bare hashbrown", |bencher| {
        bencher.iter(|| {
            let keys = turn.next().expect("endless");
            keys.iter().filter(|key| table.get(black_box(*key)).is_some()).count()
        });
    });

    let mut index = full_index();
    group.bench_function("load cycle", |bencher| {
        bencher.iter(|| {
            let tokens = index.find_all(turn.next().expect("endless")).expect("resident");
            for &token in &tokens {
                index.pin(token, Pin::Load).expect("ready");
            }
            for &token in tokens.iter().rev() {
                index.unpin(token, Pin::Load).expect("pinned");
            }
        });
    });

    let mut next = u64::from(ENTRIES);
    group.bench_function("store cycle with eviction", |bencher| {
        bencher.iter_batched(
            || {
                next += BATCH as u64;
                batch(next)
            },
            |keys| store(&mut index, &keys),
            criterion::BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(index, benches);
criterion_main!(index);
