//! What a Python tier said about keys: asked on its thread, answered from here.
//!
//! A key is asked for once, whoever wants it. Its answer is kept until it was used and a second
//! has passed, so that the look-ups of one request agree; until a job or the tier itself tells
//! something newer; or until newer keys push it out. Memory: at most two generations of
//! [`GENERATION`] answers, 40 bytes each, and [`MOST_BATCHES`] batches of keys to ask for. Every
//! call is O(1) a key.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use kvtier_core::key::KeyBatch;
use kvtier_core::tier::Presence;

/// Keys after which the older half of the answers is dropped.
const GENERATION: usize = 1 << 15;
/// Keys of one call of the tier's `lookup`.
const BATCH: usize = 1 << 12;
/// Batches that wait to be asked for; further keys are misses.
const MOST_BATCHES: usize = 8;
/// How long an answer holds once it was used.
const LIFE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy)]
enum Entry {
    Asked,
    Answered { presence: Presence, used: Option<Instant> },
}

/// By fingerprints of keys: that two keys share one, once in 2^64, costs a miss.
type Generation = HashMap<u64, Entry, RandomState>;

/// See the module.
pub(super) struct Answers {
    young: Generation,
    old: Generation,
    hasher: RandomState,
    to_ask: VecDeque<KeyBatch>,
    key_bytes: usize,
}

impl Answers {
    pub(super) fn new(key_bytes: usize) -> Self {
        let (young, old) = (Generation::default(), Generation::default());
        Self { young, old, hasher: RandomState::default(), to_ask: VecDeque::new(), key_bytes }
    }

    pub(super) fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// What is known of a key; asks for one that nothing is known of.
    pub(super) fn get(&mut self, key: &[u8], now: Instant) -> Presence {
        let fingerprint = self.hasher.hash_one(key);
        let known = match self.young.get_mut(&fingerprint) {
            None => self.old.get_mut(&fingerprint),
            known => known,
        };
        match known {
            Some(Entry::Asked) => return Presence::Retry,
            Some(Entry::Answered { presence, used }) => {
                let first = *used.get_or_insert(now);
                if now.saturating_duration_since(first) < LIFE {
                    return *presence;
                }
            }
            None => {}
        }
        if !self.ask(key) {
            return Presence::Miss;
        }
        self.keep(fingerprint, Entry::Asked);
        Presence::Retry
    }

    /// Queues a key; false if too many are.
    fn ask(&mut self, key: &[u8]) -> bool {
        if self.to_ask.back().is_none_or(|batch| batch.len() >= BATCH) {
            if self.to_ask.len() >= MOST_BATCHES {
                return false;
            }
            self.to_ask.push_back(KeyBatch::empty(self.key_bytes));
        }
        // Every key of a manager has the same length.
        self.to_ask.back_mut().is_some_and(|batch| batch.push(key).is_ok())
    }

    /// The next keys to ask the tier for.
    pub(super) fn take_asked(&mut self) -> Option<KeyBatch> {
        self.to_ask.pop_front()
    }

    /// Keeps what the tier said of `keys`; of keys that it does not know yet, nothing.
    pub(super) fn put(&mut self, keys: &KeyBatch, said: &[Presence]) {
        for (key, &presence) in keys.iter().zip(said) {
            if presence == Presence::Retry {
                self.forget(key);
            } else {
                self.keep(self.hasher.hash_one(key), Entry::Answered { presence, used: None });
            }
        }
    }

    /// What was said of a key is not true any more.
    pub(super) fn forget(&mut self, key: &[u8]) {
        let fingerprint = self.hasher.hash_one(key);
        self.young.remove(&fingerprint);
        self.old.remove(&fingerprint);
    }

    fn keep(&mut self, fingerprint: u64, entry: Entry) {
        if self.young.len() >= GENERATION {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
        }
        self.young.insert(fingerprint, entry);
    }
}
