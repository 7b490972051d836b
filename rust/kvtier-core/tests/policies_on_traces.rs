//! Policies on traces made here, and on a recorded one where there is one: none may be far below
//! LRU anywhere, and `auto` not below any.

use std::fs::File;
use std::io::BufReader;

use kvtier_core::index::{Chain, Index, PolicyKind, Writer};
use kvtier_core::key::KeyBatch;
use kvtier_core::replay::{Trace, replay};

const CAPACITY: u64 = 1500;

/// Numbers that look random, the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % sides
    }

    /// Rank 0 most often: each octave of ranks, of so many, as often as another, which is Zipf's.
    fn zipf(&mut self, octaves: u64) -> u64 {
        let octave = self.roll(octaves);
        (1 << octave) + self.roll(1 << octave) - 1
    }
}

/// The blocks `0..count` of a chain.
fn chain(name: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |block| name << 24 | block)
}

/// Prompts of one to sixteen blocks, some popular.
fn zipf() -> Trace {
    let (mut trace, mut dice) = (Trace::default(), Dice(11));
    for _ in 0..8000 {
        let prompt = dice.zipf(12);
        trace.push(&chain(prompt, 1 + prompt % 16).collect::<Vec<_>>());
    }
    trace
}

/// Nothing comes back.
fn scan() -> Trace {
    let mut trace = Trace::default();
    for request in 0..4000 {
        trace.push(&chain(request, 16).collect::<Vec<_>>());
    }
    trace
}

/// The same prompts over and over, a tenth more than fit.
fn cycle() -> Trace {
    let mut trace = Trace::default();
    for request in 0..6000 {
        trace.push(&chain(request % (CAPACITY * 11 / 10 / 12), 12).collect::<Vec<_>>());
    }
    trace
}

/// A few system prompts, and users who ask once.
fn system_prompts() -> Trace {
    let (mut trace, mut dice) = (Trace::default(), Dice(12));
    for request in 0..6000 {
        let system = dice.zipf(6);
        let mut blocks: Vec<u64> = chain(system, 20).collect();
        blocks.extend(chain(1000 + request, 1 + dice.roll(12)));
        trace.push(&blocks);
    }
    trace
}

/// Agents that send a growing prefix again and again, and end.
fn agents() -> Trace {
    let (mut trace, mut dice) = (Trace::default(), Dice(13));
    let mut running: Vec<(u64, u64)> = (0..60).map(|agent| (agent, 4)).collect();
    for request in 0..6000 {
        let at = dice.roll(running.len() as u64) as usize;
        let (agent, length) = &mut running[at];
        trace.push(&chain(*agent, *length).collect::<Vec<_>>());
        *length += 1 + dice.roll(4);
        if dice.roll(20) == 0 {
            (*agent, *length) = (100 + request, 4);
        }
    }
    trace
}

/// Prompts that are popular now and others later.
fn shifting() -> Trace {
    let (mut trace, mut dice) = (Trace::default(), Dice(14));
    for request in 0..9000 {
        let prompt = dice.zipf(9) + request / 1500 * 1000;
        trace.push(&chain(prompt, 1 + prompt % 16).collect::<Vec<_>>());
    }
    trace
}

/// Prefix hits an access.
fn rate(trace: &Trace, policy: PolicyKind, capacity: u32) -> f64 {
    let outcome = replay(trace, policy, capacity).expect("a capacity");
    outcome.prefix_hits as f64 / outcome.accesses as f64
}

#[test]
fn on_made_traces_no_policy_of_ours_is_far_below_lru() {
    for (name, trace) in [
        ("zipf", zipf()),
        ("scan", scan()),
        ("cycle", cycle()),
        ("system prompts", system_prompts()),
        ("agents", agents()),
        ("shifting", shifting()),
    ] {
        for capacity in [CAPACITY as u32 / 5, CAPACITY as u32, CAPACITY as u32 * 4] {
            let rates: Vec<_> = PolicyKind::ALL
                .iter()
                .map(|&(policy, kind)| (policy, rate(&trace, kind, capacity)))
                .collect();
            println!("{name:<15} {capacity:>5} {rates:.4?}");
            let of = |policy| rates.iter().find(|(name, _)| *name == policy).expect("known").1;
            assert!(of("gittins") >= of("lru") - 0.01, "{name} {capacity}: {rates:?}");
            let fixed = rates.iter().filter(|(name, _)| *name != "auto");
            let best = fixed.map(|(_, rate)| *rate).fold(0.0, f64::max);
            // The aim is half a point. On traces as short as these, following the best one begins
            // late: 2.2 points on zipf are the worst.
            assert!(of("auto") >= best - 0.025, "{name} {capacity}: {rates:?}");
            let start = of("gittins").max(of("lru"));
            assert!(of("auto") >= start - 0.01, "{name} {capacity}: {rates:?}");
        }
    }
}

#[test]
fn on_the_recorded_trace_gittins_is_where_it_was() {
    let path =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/traces/conversation_trace.jsonl");
    let Ok(file) = File::open(path) else {
        println!("skipped: no {path}");
        return;
    };
    let trace = Trace::read(BufReader::new(file)).expect("a trace");
    for (capacity, floor) in [(1_000, 0.075), (5_000, 0.170), (10_000, 0.2293), (30_000, 0.327)] {
        let gittins = rate(&trace, PolicyKind::Gittins, capacity);
        assert!(gittins >= floor, "{capacity}: {gittins:.4}");
        let auto = rate(&trace, PolicyKind::Auto, capacity);
        assert!(auto >= gittins - 0.005, "{capacity}: {auto:.4}, gittins {gittins:.4}");
    }
}

/// Bytes an entry of a full index that evicts, keys of 36 bytes included.
fn bytes_an_entry(policy: PolicyKind) -> f64 {
    let capacity = 100_000_u32;
    let mut index = Index::new(capacity, 36, policy).expect("a capacity");
    for batch in 0..u64::from(capacity) * 2 / 100 {
        let mut flat = vec![0; 36 * 100];
        for (key, bytes) in (batch * 100..).zip(flat.chunks_exact_mut(36)) {
            bytes[..8].copy_from_slice(&key.to_le_bytes());
        }
        let keys = KeyBatch::from_flat(flat, 36).expect("whole keys");
        index.begin_call();
        let numbered = (0..).zip(keys.iter());
        let reserved = index
            .reserve(numbered, Writer::Store, 1, &mut Chain::default())
            .expect("no key twice")
            .expect("room");
        reserved.tokens.iter().for_each(|&token| index.commit(token));
    }
    index.heap_bytes() as f64 / f64::from(capacity)
}

#[test]
fn memory_an_entry() {
    let [lru, gittins, auto] =
        [PolicyKind::Lru, PolicyKind::Gittins, PolicyKind::Auto].map(bytes_an_entry);
    println!("bytes an entry: lru {lru:.1}, gittins {gittins:.1}, auto {auto:.1}");
    // 20 more a token in vectors that may have doubled just now, two ghosts, tables.
    assert!(gittins <= lru + 2.0 * 20.0 + 24.0 + 2.0, "{gittins:.1}, lru {lru:.1}");
    // 12 more a token, and the shadows.
    assert!(auto <= gittins + 2.0 * 12.0 + 4.0, "{auto:.1}, gittins {gittins:.1}");
}
