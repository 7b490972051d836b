use super::super::{Chain, Index, PolicyKind, Writer};
use super::hazard::{AGES, Ages, Curve, gittins};
use super::*;

/// The rank straight from its definition: over all horizons, on a grid of single accesses.
fn brute_force(ages: Ages, hazard: &Curve, from: usize) -> f64 {
    let mut chances = Vec::new();
    for (bucket, &hazard) in hazard.iter().enumerate().skip(from) {
        // In the first bucket half of the way is behind it.
        let parts = if bucket == from { 2 } else { 1 };
        let width = ages.width(bucket) / parts;
        // Reuse is spread evenly over a bucket.
        chances.push((width, f64::from(hazard) / f64::from(parts * width)));
    }
    let (mut alive, mut hit, mut time, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
    for (width, each) in chances {
        let entered = alive;
        for _ in 0..width {
            hit += entered * each;
            time += alive - entered * each / 2.0;
            alive -= entered * each;
        }
        best = best.max(hit / time);
    }
    best
}

#[test]
fn the_rank_of_reuse_at_one_of_two_times() {
    let ages = Ages::new(1 << 12);
    let mut hazard = [0.0; AGES];
    hazard[4] = 0.25;
    hazard[12] = 0.5;
    let ranks = gittins(ages, &hazard);
    for (from, &rank) in ranks.iter().enumerate() {
        let wanted = brute_force(ages, &hazard, from);
        assert!((f64::from(rank) - wanted).abs() <= 1e-3 * wanted, "{from}: {rank}, not {wanted}");
    }
    // Worth more the nearer the time, nothing when both have passed.
    assert!(ranks[0] < ranks[3] && ranks[3] < ranks[4]);
    assert!(ranks[5] < ranks[11] && ranks[11] < ranks[12]);
    assert!(ranks[13..].iter().all(|&rank| rank == 0.0));
}

#[test]
fn the_rank_of_any_hazard_is_the_best_ratio() {
    let ages = Ages::new(1 << 12);
    let mut seed = 7_u32;
    for _ in 0..20 {
        let hazard: Curve = std::array::from_fn(|_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as f32 / 512.0
        });
        for (from, &rank) in gittins(ages, &hazard).iter().enumerate() {
            let wanted = brute_force(ages, &hazard, from);
            assert!((f64::from(rank) - wanted).abs() <= 1e-3 * wanted, "{from}: {rank} {wanted}");
        }
    }
}

#[test]
fn buckets_are_half_octaves() {
    for capacity in [1, 5, 64, 1000, 1 << 20] {
        let ages = Ages::new(capacity);
        let mut start = 0;
        for bucket in 0..AGES {
            assert_eq!(ages.bucket(start), bucket, "capacity {capacity}");
            start += ages.width(bucket);
        }
        assert_eq!(ages.bucket(u32::MAX), AGES - 1);
    }
}

#[test]
fn what_was_learned_is_the_hazard() {
    let ages = Ages::new(1 << 12);
    let mut hazards = Hazards::new(ages, f32::INFINITY);
    let class = Class::new(History::Twice(3), 9);
    // Of a million lives, half are hit in bucket 10; of the rest, half are given up in 12.
    for _ in 0..500_000 {
        hazards.hit(class, 10);
    }
    for _ in 0..250_000 {
        hazards.lost(class, 12);
        hazards.going(class, 14);
    }
    hazards.close_census(1);
    let mut ranks = Vec::new();
    hazards.ranks(&mut ranks);
    let curve = &ranks[class.index() * AGES..][..AGES];
    let mut wanted = [0.0; AGES];
    wanted[10] = 0.5;
    for (from, &rank) in curve.iter().enumerate().take(11) {
        let (rank, wanted) = (f64::from(rank), brute_force(ages, &wanted, from));
        assert!((rank - wanted).abs() < 0.01 * wanted, "{from}: {rank}, not {wanted}");
    }
    assert!(curve[11] < 0.02 * curve[10]);
}

#[test]
fn without_evidence_it_is_lru() {
    let policy = Gittins::new(1 << 12);
    for class in Class::all() {
        let curve = &policy.ranks[class.index() * AGES..][..AGES];
        assert!(curve.windows(2).all(|pair| pair[0] >= pair[1]), "{curve:?}");
    }
}

#[test]
fn classes_pack_and_unpack() {
    for class in Class::all() {
        let depth = 1 << (2 * (class.uses_depth() % 5));
        assert_eq!(Class::new(class.history(), depth), class);
        assert_eq!(Class::from_index(class.index() as u8), class);
        assert!(
            class.history_index() < Class::HISTORIES && class.uses_depth() < Class::USES_DEPTHS
        );
    }
}

fn fingerprint(token: Token) -> u64 {
    u64::from(token + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A policy with `chains` chains of `length` ready chunks each; token `chain * length + depth`.
fn chains(chains: u32, length: u32) -> Gittins {
    let mut policy = Gittins::new((chains * length) as usize);
    policy.grow((chains * length) as usize);
    for chain in 0..chains {
        let first = chain * length;
        for token in first..first + length {
            let parent = if token == first { NIL } else { token - 1 };
            policy.admit(token, fingerprint(token), parent);
        }
        for token in (first..first + length).rev() {
            policy.insert(token);
        }
        policy.validate().expect("invariants hold");
    }
    policy
}

fn evict(policy: &mut Gittins, count: usize, protected: &[Token]) -> Vec<Token> {
    let mut victims = Vec::new();
    policy.victims(count, &|token| protected.contains(&token), &mut victims);
    for &token in &victims {
        policy.remove(token, fingerprint(token), Removal::Evicted);
    }
    policy.validate().expect("invariants hold");
    victims
}

#[test]
fn a_prefix_goes_from_its_end() {
    let mut policy = chains(2, 4);
    let victims = evict(&mut policy, 8, &[]);
    for chain in [[0, 1, 2, 3], [4, 5, 6, 7]] {
        let order = chain.map(|token| victims.iter().position(|&victim| victim == token));
        assert!(order.windows(2).all(|pair| pair[0] > pair[1]), "{victims:?}");
    }
    assert_eq!(policy.evictable(), 0);
}

#[test]
fn without_a_free_leaf_an_inner_chunk_goes() {
    let mut policy = chains(1, 4);
    policy.acquire(3);
    assert_eq!(evict(&mut policy, 2, &[1]).len(), 2, "0 and 2 are left");
    policy.release(3);
    // 3 is an orphan: its parent's token may come back as something else.
    policy.admit(2, 99, NIL);
    policy.validate().expect("invariants hold");
    policy.insert(2);
    assert!(policy.holds(2) && policy.holds(3));
    assert_eq!(evict(&mut policy, 3, &[]).len(), 3);
}

#[test]
fn a_pinned_leaf_keeps_its_prefix_and_comes_back() {
    let mut policy = chains(2, 3);
    policy.acquire(2);
    assert_eq!(policy.evictable(), 5);
    assert_eq!(evict(&mut policy, 3, &[]), [5, 4, 3]);
    policy.touch(2, false);
    policy.release(2);
    assert_eq!(evict(&mut policy, 3, &[]), [2, 1, 0]);
}

#[test]
fn a_parent_whose_child_failed_is_a_leaf_again() {
    let mut policy = Gittins::new(4);
    policy.grow(2);
    policy.admit(0, 1, NIL);
    policy.insert(0);
    policy.admit(1, 2, 0);
    policy.validate().expect("invariants hold");
    assert!(matches!(policy.life(0).place(), Place::Parked));
    policy.cancel(1);
    policy.validate().expect("invariants hold");
    assert!(matches!(policy.life(0).place(), Place::Leaf(_)));
}

#[test]
fn a_ghost_brings_its_history_back() {
    let mut policy = chains(1, 2);
    evict(&mut policy, 2, &[]);
    policy.admit(0, fingerprint(0), NIL);
    assert!(matches!(policy.life(0).class.history(), History::Twice(_)));
    assert!(policy.ghosts.take(fingerprint(0)).is_none(), "it is taken");
}

#[test]
fn the_oldest_ghost_of_a_set_is_forgotten() {
    let mut ghosts = Ghosts::new(8);
    for used in 0..8 {
        assert_eq!(ghosts.put(u64::from(used), used, Class::NONE, used), None);
    }
    let lost = ghosts.put(8, 8, Class::NONE, 8).expect("full");
    assert_eq!(lost.used, 0);
    assert!(ghosts.take(0).is_none() && ghosts.take(8).is_some());
}

/// Requests in which a few chats go on in turn among new ones: what was evicted, in order.
fn run(capacity: u32) -> (Vec<Box<[u8]>>, Index) {
    let mut index = Index::new(capacity, 8, PolicyKind::Gittins).expect("small");
    let (mut evicted, mut seed) = (Vec::new(), 3_u64);
    for request in 1..400_u64 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let chat = if seed >> 63 == 0 { (seed >> 40) & 7 } else { request + 100 };
        let blocks = (seed >> 33) & 15;
        let keys: Vec<[u8; 8]> =
            (0..=blocks).map(|block| (chat << 16 | block).to_le_bytes()).collect();
        index.begin_call();
        let numbered = (0..).zip(keys.iter().map(<[u8; 8]>::as_slice));
        let reserved = index
            .reserve(numbered, Writer::Store, request as u32, &mut Chain::default())
            .expect("no key twice");
        evicted.extend(reserved.expect("room").evicted.iter().map(Box::<[u8]>::from));
        for key in keys.iter().rev() {
            let token = index.find(key).expect("just reserved");
            if index.state(token) == super::super::State::Ready {
                index.touch(token, request as u32);
            } else {
                index.commit(token);
            }
        }
        index.validate().expect("invariants hold");
    }
    (evicted, index)
}

#[test]
fn the_same_requests_have_the_same_victims() {
    let (first, index) = run(64);
    assert!(first.len() > 1000);
    assert_eq!(first, run(64).0);
    assert!(index.heap_bytes() > 64 * 28);
}
