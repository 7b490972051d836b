//! The model, the operations on it and on an index, and how both must agree. The fuzz target uses
//! this file too.

use kvtier_core::index::{Chain, Index, IndexError, Pin, PolicyKind, State, Writer};
use kvtier_core::key::KeyBatch;

pub(crate) const KEYS: u8 = 9;
/// Requests that go on at the same time, each with its chain; `ANYONE` is the first.
pub(crate) const REQUESTS: usize = 3;

/// One call on an index.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Reserve(Vec<u8>, usize),
    Commit(u8),
    Abort(u8),
    Detach(u8),
    Reclaim,
    Pin(u8, bool),
    Unpin(u8, bool),
    Touch(u8, usize),
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    key: u8,
    ready: bool,
    load_pins: u32,
    job_pins: u32,
}

impl Entry {
    fn evictable(&self) -> bool {
        self.ready && self.load_pins + self.job_pins == 0
    }
}

/// New keys; those that may be evicted, least recently used first; and how many must.
type Moved = (Vec<u8>, Vec<u8>, usize);

/// Entries, least recently used first; only the order of evictable ones means anything.
struct Model {
    capacity: usize,
    ordered: bool,
    entries: Vec<Entry>,
    detached: Vec<u32>,
}

impl Model {
    /// A model of an index; `ordered` if the index must evict in the model's order.
    fn new(capacity: usize, ordered: bool) -> Self {
        Self { capacity, ordered, entries: Vec::new(), detached: Vec::new() }
    }

    fn at(&self, key: u8) -> Option<usize> {
        self.entries.iter().position(|entry| entry.key == key)
    }

    fn use_now(&mut self, at: usize) {
        let entry = self.entries.remove(at);
        self.entries.push(entry);
    }

    /// What moves, `Ok(None)` without room, the key that came twice as error.
    fn room(&self, keys: &[u8]) -> Result<Option<Moved>, u8> {
        if let Some(at) = (1..keys.len()).find(|&at| keys[..at].contains(&keys[at])) {
            return Err(keys[at]);
        }
        let new: Vec<u8> = keys.iter().copied().filter(|&key| self.at(key).is_none()).collect();
        let taken = self.entries.len() + self.detached.len() + new.len();
        let missing = taken.saturating_sub(self.capacity);
        let candidates: Vec<u8> = self
            .entries
            .iter()
            .filter(|entry| entry.evictable() && !keys.contains(&entry.key))
            .map(|entry| entry.key)
            .collect();
        Ok((missing <= candidates.len()).then_some((new, candidates, missing)))
    }

    fn reserve(&mut self, new: &[u8], evicted: &[u8]) {
        self.entries.retain(|entry| !evicted.contains(&entry.key));
        self.entries.extend(new.iter().map(|&key| Entry {
            key,
            ready: false,
            load_pins: 0,
            job_pins: 0,
        }));
    }
}

/// Keys of two groups, so that a chain has more than one link.
pub(crate) fn bytes(key: u8) -> [u8; 8] {
    [key, key, key, key, 0, 0, 0, key % 2]
}

pub(crate) fn batch(keys: &[u8]) -> KeyBatch {
    KeyBatch::from_flat(keys.iter().flat_map(|&key| bytes(key)).collect(), 8).expect("whole keys")
}

fn step(index: &mut Index, model: &mut Model, chains: &mut [Chain], operation: &Operation) {
    match *operation {
        Operation::Reserve(ref keys, request) => {
            index.begin_call();
            let batch = batch(keys);
            let numbered = (0..).zip(batch.iter());
            let chain = &mut chains[request];
            let got = index.reserve(numbered, Writer::Store, request as u32, chain);
            match (got, model.room(keys)) {
                (Ok(None), Ok(None)) => {}
                (Ok(Some(reserved)), Ok(Some((new, candidates, missing)))) => {
                    let got: Vec<u8> =
                        reserved.indices.iter().map(|&at| keys[at as usize]).collect();
                    assert_eq!(got, new);
                    let mut evicted: Vec<u8> = reserved.evicted.iter().map(|key| key[0]).collect();
                    if model.ordered {
                        assert_eq!(evicted, candidates[..missing]);
                    }
                    model.reserve(&new, &evicted);
                    assert!(evicted.iter().all(|key| candidates.contains(key)), "{evicted:?}");
                    evicted.sort_unstable();
                    evicted.dedup();
                    assert_eq!(evicted.len(), missing);
                }
                (Err(IndexError::Duplicate(key)), Err(twice)) => {
                    assert_eq!(key, bytes(twice).as_slice().into());
                }
                (got, wanted) => panic!("{operation:?}: got {got:?}, model says {wanted:?}"),
            }
        }
        Operation::Commit(key) | Operation::Abort(key) => {
            let Some(at) = model.at(key).filter(|&at| !model.entries[at].ready) else {
                return;
            };
            let token = index.find(&bytes(key)).expect("the model has it");
            if matches!(operation, Operation::Commit(_)) {
                index.commit(token);
                model.entries[at].ready = true;
                model.use_now(at);
            } else {
                index.abort(token);
                model.entries.remove(at);
            }
        }
        Operation::Detach(key) => {
            let idle = |entry: &Entry| !entry.ready || entry.evictable();
            if let Some(at) = model.at(key).filter(|&at| idle(&model.entries[at])) {
                let token = index.find(&bytes(key)).expect("the model has it");
                model.detached.push(index.detach(token));
                model.entries.remove(at);
            }
        }
        Operation::Reclaim => {
            if let Some(slot) = model.detached.pop() {
                index.reclaim(slot);
            }
        }
        Operation::Pin(key, load) => {
            let Some(at) = model.at(key) else { return };
            let token = index.find(&bytes(key)).expect("the model has it");
            let pinned = index.pin(token, if load { Pin::Load } else { Pin::Job });
            let entry = &mut model.entries[at];
            assert_eq!(pinned.is_ok(), entry.ready, "{pinned:?}");
            if entry.ready {
                *(if load { &mut entry.load_pins } else { &mut entry.job_pins }) += 1;
            }
        }
        Operation::Unpin(key, load) => {
            let Some(at) = model.at(key) else { return };
            let token = index.find(&bytes(key)).expect("the model has it");
            let given_back = index.unpin(token, if load { Pin::Load } else { Pin::Job });
            let entry = &mut model.entries[at];
            let pins = if load { &mut entry.load_pins } else { &mut entry.job_pins };
            assert_eq!(given_back.is_ok(), *pins > 0, "{given_back:?}");
            if *pins > 0 {
                *pins -= 1;
                if entry.evictable() {
                    model.use_now(at);
                }
            }
        }
        Operation::Touch(key, request) => {
            if let Some(at) = model.at(key) {
                index.touch(index.find(&bytes(key)).expect("the model has it"), request as u32);
                if model.entries[at].evictable() {
                    model.use_now(at);
                }
            }
        }
    }
}

/// Runs operations on an index of some policy and on the model.
pub(crate) fn run(kind: PolicyKind, capacity: usize, operations: &[Operation]) {
    let mut index = Index::new(capacity as u32, 8, kind).expect("small");
    let mut model = Model::new(capacity, kind == PolicyKind::Lru);
    let mut chains = vec![Chain::default(); REQUESTS];
    for operation in operations {
        step(&mut index, &mut model, &mut chains, operation);
        agree(&index, &model);
    }
}

fn agree(index: &Index, model: &Model) {
    index.validate().expect("invariants hold");
    assert_eq!(index.len(), model.entries.len());
    let mut slots = Vec::new();
    for entry in &model.entries {
        let token = index.find(&bytes(entry.key)).expect("the model has it");
        assert_eq!(index.state(token) == State::Ready, entry.ready);
        assert_eq!(u32::from(index.pins(token, Pin::Load)), entry.load_pins);
        assert_eq!(u32::from(index.pins(token, Pin::Job)), entry.job_pins);
        slots.push(index.slot(token));
    }
    slots.extend(&model.detached);
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), model.entries.len() + model.detached.len(), "no slot is held twice");
}
