use super::super::gittins::Gittins;
use super::*;

/// Numbers that look random, the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % sides
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Absent,
    Writing,
    Ready,
    Pinned,
}

fn fingerprint(key: u64) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// As many tokens as slots: an index has no more, but for those of the running call.
const TOKENS: u64 = 12;

/// Makes calls in every order that the index may, `between` them what the policy's own test adds.
fn any_calls<P: Policy>(mut policy: P, seed: u64, mut between: impl FnMut(&mut P, &mut Dice)) {
    let mut dice = Dice(seed);
    let mut tokens = vec![(Is::Absent, 0); TOKENS as usize];
    policy.grow(TOKENS as usize);
    for _ in 0..400 {
        let token = dice.roll(TOKENS) as usize;
        let name = token as Token;
        let (state, key) = &mut tokens[token];
        match (*state, dice.roll(4)) {
            (Is::Absent, _) => {
                *key = dice.roll(40);
                let key = *key;
                let at = dice.roll(TOKENS) as usize;
                let parent = if tokens[at].0 == Is::Absent { NIL } else { at as Token };
                policy.admit(name, fingerprint(key), parent);
                tokens[token].0 = Is::Writing;
            }
            (Is::Writing, 0) => {
                policy.cancel(name);
                *state = Is::Absent;
            }
            (Is::Writing, _) => {
                policy.insert(name);
                *state = Is::Ready;
            }
            (Is::Ready | Is::Pinned, 0) => policy.touch(name, dice.roll(2) == 0),
            (Is::Ready, 1) => {
                policy.acquire(name);
                *state = Is::Pinned;
            }
            (Is::Pinned, _) => {
                policy.release(name);
                *state = Is::Ready;
            }
            (Is::Ready, 2) => {
                policy.remove(name, fingerprint(*key), Removal::Dropped);
                *state = Is::Absent;
            }
            (Is::Ready, _) => {
                let protected = dice.roll(1 << TOKENS);
                let free = |token: Token| protected >> token & 1 == 0;
                let held = (0..TOKENS as Token).filter(|&token| policy.holds(token) && free(token));
                let count = (dice.roll(4) as usize).min(held.count());
                let mut victims = Vec::new();
                policy.victims(count, &|token| !free(token), &mut victims);
                assert_eq!(victims.len(), count);
                for victim in victims {
                    assert!(free(victim));
                    let (state, key) = &mut tokens[victim as usize];
                    assert_eq!(std::mem::replace(state, Is::Absent), Is::Ready);
                    policy.remove(victim, fingerprint(*key), Removal::Evicted);
                }
            }
        }
        between(&mut policy, &mut dice);
        policy.validate().expect("invariants hold");
        let ready = |token: usize| tokens[token].0 == Is::Ready;
        assert!((0..TOKENS as usize).all(|token| policy.holds(token as Token) == ready(token)));
        assert_eq!(policy.evictable(), (0..TOKENS as usize).filter(|&token| ready(token)).count());
    }
}

#[test]
fn gittins_survives_calls_in_any_order() {
    for seed in 1..=20 {
        any_calls(Gittins::new(TOKENS as usize), seed, |_, _| {});
    }
}

#[test]
fn auto_survives_them_and_loses_nothing_when_it_switches() {
    for seed in 1..=8 {
        any_calls(Auto::new(TOKENS as usize), seed, |policy, dice| {
            if dice.roll(8) == 0 {
                policy.follow(dice.roll(CANDIDATES.len() as u64) as usize);
            }
        });
    }
}

/// Chunk `token` of a chain of ready ones, each with the one before it as its parent.
fn chain(policy: &mut Auto, tokens: std::ops::Range<Token>) {
    policy.grow(tokens.end as usize);
    for token in tokens.clone() {
        let parent = if token == tokens.start { NIL } else { token - 1 };
        policy.admit(token, fingerprint(u64::from(token)), parent);
    }
    for token in tokens.rev() {
        policy.insert(token);
    }
}

#[test]
fn a_switch_keeps_the_order_and_the_chains() {
    let mut policy = Auto::over(&[PolicyKind::Lru, PolicyKind::Gittins], 8);
    chain(&mut policy, 0..4);
    chain(&mut policy, 4..8);
    policy.acquire(7);
    policy.follow(1);
    policy.validate().expect("invariants hold");
    assert_eq!((policy.evictable(), policy.holds(7)), (7, false));
    // Gittins keeps 4 to 6 for the sake of 7, which is pinned.
    let mut victims = Vec::new();
    policy.victims(4, &|_| false, &mut victims);
    assert_eq!(victims, [3, 2, 1, 0]);
}

#[test]
fn it_goes_to_the_one_that_hits() {
    // Prompts go round, a few more than fit: LRU never hits.
    let mut policy = Auto::over(&[PolicyKind::Lru, PolicyKind::Gittins], 64);
    policy.grow(72);
    let mut free: Vec<Token> = (0..72).collect();
    let mut resident = std::collections::HashMap::new();
    for request in 0..4000_u64 {
        let key = request % 70;
        if let Some(&token) = resident.get(&key) {
            policy.touch(token, false);
            continue;
        }
        let token = free.pop().expect("some are free");
        policy.admit(token, fingerprint(key), NIL);
        if resident.len() == 64 {
            let mut victims = Vec::new();
            policy.victims(1, &|_| false, &mut victims);
            let (&victim, _) =
                resident.iter().find(|&(_, &token)| token == victims[0]).expect("resident");
            policy.remove(victims[0], fingerprint(victim), Removal::Evicted);
            free.extend(resident.remove(&victim));
        }
        policy.insert(token);
        resident.insert(key, token);
    }
    policy.validate().expect("invariants hold");
    assert_eq!(policy.chosen, 1);
    assert!(policy.shadows[0].ahead < -100.0);
}

#[test]
fn hits_before_a_miss_count_in_either_direction() {
    let mut shadow = Shadow::new(PolicyKind::Lru, 8, 0);
    for (tag, parent) in [(1, 0), (3, 2)] {
        shadow.admit(tag, parent);
        shadow.insert(tag);
    }
    // 1, 2, 3 from the head: 2 is missed, so 3 is of no use.
    for (tag, step) in [(1, Step::Away), (2, Step::Down), (3, Step::Down)] {
        shadow.count(tag, step);
    }
    assert!((shadow.hits - 1.0).abs() < f32::EPSILON);
    // And from the tail.
    for (tag, step) in [(3, Step::Away), (2, Step::Up), (1, Step::Up)] {
        shadow.count(tag, step);
    }
    assert!((shadow.hits - 2.0).abs() < f32::EPSILON);
}

#[test]
fn the_parent_of_a_sampled_chunk_is_the_nearest_sampled_one() {
    let mut policy = Auto::new(16 * SLOTS_MIN);
    assert_eq!((policy.shift, policy.slots), (4, SLOTS_MIN));
    policy.grow(4);
    // The tag is the upper half without a bit; its lowest four decide.
    for (token, tag, parent) in [(0, 16, NIL), (1, 17, 0), (2, 33, 1), (3, 32, 2)] {
        policy.admit(token, tag << 33, parent);
    }
    assert_eq!(policy.above(3), 16);
    assert_eq!(policy.above(0), 0);
    policy.cancel(1);
    assert_eq!(policy.above(3), 0, "the chain is broken");
}
