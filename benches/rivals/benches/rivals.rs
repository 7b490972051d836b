//! Is kvtier's LRU index as fast as other caches at their own game?
//!
//! 100,000 entries, keys of 36 bytes, the same keys for all, in one thread. Criterion prints the
//! time of one key.
//!
//! - `touch`: find a resident key and make it the most recently used. `hashbrown` finds only: the
//!   floor. `quick_cache` marks (it is a clock), `moka` records and sorts later.
//! - `insert`: a key that is absent goes in and the policy's victim leaves. kvtier reserves a slot
//!   and commits it, batches of 128 as its callers do, prefix chain and victims' keys included.
//!
//! `quick_cache`, `moka` and `foyer` pay for locks that an [`Index`] leaves to its owner; `unsync`
//! is `quick_cache` without.

use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use foldhash::fast::FixedState;
use kvtier_core::index::{ANYONE, Chain, Index, PolicyKind, Writer};

const ENTRIES: usize = 100_000;
const BATCH: usize = 128;
const KEY_BYTES: usize = 36;

type Key = [u8; KEY_BYTES];

/// A key that looks like a block hash and is the same in every run.
fn key(number: usize) -> Key {
    let mut key = [0; KEY_BYTES];
    let mut state = number as u64;
    for part in key.chunks_mut(8) {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        part.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes()[..part.len()]);
    }
    key
}

/// Batches of resident keys, spread over the table, over and over.
struct Resident {
    keys: Vec<Key>,
    at: usize,
}

impl Resident {
    fn new() -> Self {
        // A step that shares no factor with the number of entries visits all of them.
        let keys = (0..ENTRIES).map(|turn| key(turn * 7_919 % ENTRIES)).collect();
        Self { keys, at: 0 }
    }

    fn next(&mut self) -> &[Key] {
        if self.at + BATCH > self.keys.len() {
            self.at = 0;
        }
        self.at += BATCH;
        &self.keys[self.at - BATCH..self.at]
    }
}

/// Batches of keys that no one has seen.
struct Fresh(usize);

impl Fresh {
    fn next(&mut self) -> Vec<Key> {
        self.0 += BATCH;
        (self.0 - BATCH..self.0).map(key).collect()
    }
}

fn touch(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut one: impl FnMut(&Key) -> bool) {
    let mut resident = Resident::new();
    assert!(resident.next().iter().all(&mut one), "{name} lost a key");
    group.bench_function(name, |bencher| {
        bencher.iter(|| resident.next().iter().filter(|key| one(black_box(key))).count());
    });
}

fn insert(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut all: impl FnMut(Vec<Key>)) {
    // Where one stops the next does not go on: each begins with a full cache of the same keys.
    let mut fresh = Fresh(ENTRIES);
    group.bench_function(name, |bencher| {
        bencher.iter_batched(|| fresh.next(), &mut all, criterion::BatchSize::SmallInput);
    });
}

fn store(index: &mut Index, keys: &[Key]) {
    index.begin_call();
    let numbered = (0..).zip(keys.iter().map(Key::as_slice));
    let reserved = index
        .reserve(numbered, Writer::Store, ANYONE, &mut Chain::default())
        .expect("distinct")
        .expect("room");
    for &token in reserved.tokens.iter().rev() {
        index.commit(token);
    }
}

fn kvtier() -> Index {
    let mut index = Index::new(ENTRIES as u32, KEY_BYTES, PolicyKind::Lru).expect("small");
    let keys: Vec<Key> = (0..ENTRIES).map(key).collect();
    keys.chunks(BATCH).for_each(|keys| store(&mut index, keys));
    index
}

/// Room for every entry in every shard: what is measured is a touch, not an eviction.
const ROOM: usize = 2 * ENTRIES;

fn moka(capacity: usize) -> moka::sync::Cache<Key, u32, FixedState> {
    let cache = moka::sync::Cache::builder()
        .max_capacity(capacity as u64)
        .eviction_policy(moka::policy::EvictionPolicy::lru())
        .build_with_hasher(FixedState::default());
    (0..ENTRIES).for_each(|number| cache.insert(key(number), number as u32));
    cache.run_pending_tasks();
    cache
}

type Foyer = foyer_memory::Cache<Key, u32, FixedState>;

fn foyer(capacity: usize) -> Foyer {
    let cache: Foyer = foyer_memory::CacheBuilder::new(capacity)
        .with_shards(1)
        .with_eviction_config(foyer_memory::LruConfig { high_priority_pool_ratio: 0.0 })
        .with_hash_builder(FixedState::default())
        .build();
    for number in 0..ENTRIES {
        cache.insert(key(number), number as u32);
    }
    cache
}

type QuickSync = quick_cache::sync::Cache<Key, u32, quick_cache::UnitWeighter, FixedState>;
type QuickUnsync = quick_cache::unsync::Cache<Key, u32, quick_cache::UnitWeighter, FixedState>;

fn quick_sync(capacity: usize) -> QuickSync {
    let cache = QuickSync::with(
        capacity,
        capacity as u64,
        quick_cache::UnitWeighter,
        FixedState::default(),
        quick_cache::sync::DefaultLifecycle::default(),
    );
    (0..ENTRIES).for_each(|number| cache.insert(key(number), number as u32));
    cache
}

fn quick_unsync(capacity: usize) -> QuickUnsync {
    let mut cache = QuickUnsync::with(
        capacity,
        capacity as u64,
        quick_cache::UnitWeighter,
        FixedState::default(),
        quick_cache::unsync::DefaultLifecycle::default(),
    );
    (0..ENTRIES).for_each(|number| cache.insert(key(number), number as u32));
    cache
}

fn hashlink() -> hashlink::LruCache<Key, u32, FixedState> {
    let mut cache = hashlink::LruCache::with_hasher(ENTRIES, FixedState::default());
    for number in 0..ENTRIES {
        cache.insert(key(number), number as u32);
    }
    cache
}

fn touches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("touch");
    group.throughput(Throughput::Elements(BATCH as u64));
    let table: hashbrown::HashMap<Key, u32, FixedState> =
        (0..ENTRIES).map(|number| (key(number), number as u32)).collect();
    touch(&mut group, "hashbrown (find only)", |key| table.get(key).is_some());
    let mut index = kvtier();
    touch(&mut group, "kvtier", |key| {
        let token = index.find(key);
        token.inspect(|&token| index.touch(token, ANYONE)).is_some()
    });
    let mut cache = hashlink();
    touch(&mut group, "hashlink", |key| cache.get(key).is_some());
    let cache = quick_unsync(ROOM);
    touch(&mut group, "quick_cache unsync", |key| cache.get(key).is_some());
    let cache = quick_sync(ROOM);
    touch(&mut group, "quick_cache sync", |key| cache.get(key).is_some());
    let cache = foyer(ROOM);
    touch(&mut group, "foyer-memory", |key| cache.get(key).is_some());
    let cache = moka(ROOM);
    touch(&mut group, "moka", |key| cache.get(key).is_some());
    group.finish();
}

fn inserts(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("insert");
    group.throughput(Throughput::Elements(BATCH as u64));
    let mut index = kvtier();
    insert(&mut group, "kvtier", |keys| store(&mut index, &keys));
    let mut cache = hashlink();
    insert(&mut group, "hashlink", |keys| {
        for key in keys {
            cache.insert(key, 0);
        }
    });
    let mut cache = quick_unsync(ENTRIES);
    insert(&mut group, "quick_cache unsync", |keys| {
        keys.into_iter().for_each(|key| cache.insert(key, 0));
    });
    let cache = quick_sync(ENTRIES);
    insert(&mut group, "quick_cache sync", |keys| {
        keys.into_iter().for_each(|key| cache.insert(key, 0));
    });
    let cache = foyer(ENTRIES);
    insert(&mut group, "foyer-memory", |keys| {
        for key in keys {
            cache.insert(key, 0);
        }
    });
    let cache = moka(ENTRIES);
    insert(&mut group, "moka", |keys| keys.into_iter().for_each(|key| cache.insert(key, 0)));
    group.finish();
}

criterion_group!(rivals, touches, inserts);
criterion_main!(rivals);
