//! Who goes first, for a manager that keeps slots, states and pins itself.
//!
//! vLLM's manager asks a policy of its own interface; an [`Evictor`] answers with any of ours. It
//! is an [`Index`] whose slots mean nothing: the manager says what came, what may be evicted now
//! and what was used, and is told what to evict.
//!
//! A newcomer is named when its victims are gone already, not before as in an index of ours, so a
//! policy that judges by newcomers (ARC) learns of them one batch later.
//!
//! Every call is O(1) a key. Memory is the index's, and per live request the last key of each of
//! its groups.

use std::collections::HashMap;

use super::{ANYONE, Chain, Index, IndexError, Pin, PolicyKind, Requester, State, Writer};
use crate::key::KeyBatch;

/// See the module. Not synchronised: its owner holds a lock.
#[derive(Debug)]
pub struct Evictor {
    index: Index,
    /// What the next key of a request follows.
    chains: HashMap<Requester, Chain>,
}

impl Evictor {
    /// For a manager of `capacity` slots and keys of `key_bytes`.
    ///
    /// # Errors
    /// As [`Index::new`].
    pub fn new(capacity: u32, key_bytes: usize, policy: PolicyKind) -> Result<Self, IndexError> {
        Ok(Self { index: Index::new(capacity, key_bytes, policy)?, chains: HashMap::new() })
    }

    /// Bytes a key.
    pub fn key_bytes(&self) -> usize {
        self.index.key_bytes()
    }

    /// A key got a slot, and is being written; it can not be evicted until it is let go.
    ///
    /// # Errors
    /// [`IndexError::Duplicate`] for a key that is here, [`IndexError::Full`] for one too many.
    pub fn insert(&mut self, requester: Requester, key: &[u8]) -> Result<(), IndexError> {
        self.index.begin_call();
        if self.index.find(key).is_some() {
            return Err(IndexError::Duplicate(key.into()));
        }
        if self.index.free() == 0 {
            return Err(IndexError::Full(self.index.capacity()));
        }
        let chain = if requester == ANYONE {
            &mut Chain::default()
        } else {
            self.chains.entry(requester).or_default()
        };
        self.index.reserve(std::iter::once((0, key)), Writer::Store, requester, chain)?;
        Ok(())
    }

    /// Its write failed, or the manager took it out.
    ///
    /// # Errors
    /// [`IndexError::Unknown`].
    pub fn remove(&mut self, key: &[u8]) -> Result<(), IndexError> {
        let token = self.find(key)?;
        while self.index.pins(token, Pin::Load) > 0 {
            self.index.unpin(token, Pin::Load)?;
        }
        let slot = self.index.detach(token);
        self.index.reclaim(slot);
        Ok(())
    }

    /// Nobody writes or reads it any more.
    ///
    /// # Errors
    /// [`IndexError::Unknown`]; [`IndexError::NotPinned`] when it may be evicted already.
    pub fn let_go(&mut self, key: &[u8]) -> Result<(), IndexError> {
        let token = self.find(key)?;
        match self.index.state(token) {
            State::Writing(_) => {
                self.index.commit(token);
                Ok(())
            }
            State::Ready => self.index.unpin(token, Pin::Load),
        }
    }

    /// Somebody reads it.
    ///
    /// # Errors
    /// [`IndexError::Unknown`]; [`IndexError::NotReady`] for one that is being written.
    pub fn hold(&mut self, key: &[u8]) -> Result<(), IndexError> {
        let token = self.find(key)?;
        self.index.pin(token, Pin::Load)
    }

    /// Keys were used, the first one most recently; some may be unknown.
    pub fn touch(&mut self, requester: Requester, keys: &KeyBatch) {
        self.index.touch_batch(keys, requester);
    }

    /// A request has ended: no key of it comes any more.
    pub fn finish(&mut self, requester: Requester) {
        self.chains.remove(&requester);
    }

    /// Evicts `count` keys, none of those in `spared`; `None`, and nothing changed, when not as
    /// many may go.
    pub fn evict(&mut self, count: usize, spared: &KeyBatch) -> Option<KeyBatch> {
        self.index.begin_call();
        for key in spared {
            if let Some(token) = self.index.find(key) {
                self.index.mark(token);
            }
        }
        self.index.evict_unmarked(count)
    }

    /// Walks every invariant.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validate(&self) -> Result<(), String> {
        self.index.validate()
    }

    fn find(&self, key: &[u8]) -> Result<super::Token, IndexError> {
        self.index.find(key).ok_or_else(|| IndexError::Unknown(key.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(numbers: impl IntoIterator<Item = u8>) -> KeyBatch {
        let mut batch = KeyBatch::empty(8);
        numbers.into_iter().for_each(|number| batch.push(&[number; 8]).expect("8 bytes"));
        batch
    }

    /// An evictor of `capacity` keys, numbered from 0, all of which may go.
    fn full(capacity: u8, policy: PolicyKind) -> Evictor {
        let mut evictor = Evictor::new(u32::from(capacity), 8, policy).expect("possible");
        for number in 0..capacity {
            evictor.insert(1, &[number; 8]).expect("room");
            evictor.let_go(&[number; 8]).expect("written");
        }
        evictor
    }

    #[test]
    fn what_was_used_longest_ago_goes_and_the_spared_and_the_held_do_not() {
        let mut evictor = full(4, PolicyKind::Lru);
        evictor.touch(2, &keys([0]));
        evictor.hold(&[1; 8]).expect("ready");
        assert_eq!(evictor.evict(3, &keys([2])), None, "two may go");
        assert_eq!(evictor.evict(2, &keys([2])), Some(keys([3, 0])));
        evictor.let_go(&[1; 8]).expect("held");
        assert_eq!(evictor.evict(2, &keys([])), Some(keys([2, 1])));
        evictor.validate().expect("in order");
    }

    #[test]
    fn every_policy_evicts_as_many_as_it_is_asked_for_each_once() {
        for &(name, policy) in PolicyKind::ALL {
            let mut evictor = full(32, policy);
            evictor.touch(2, &keys(0..8));
            let gone = evictor.evict(20, &keys(28..32)).expect("28 may go");
            let mut seen: Vec<u8> = gone.iter().map(|key| key[0]).collect();
            seen.sort_unstable();
            seen.dedup();
            assert!(seen.len() == 20 && seen.iter().all(|&number| number < 28), "{name}: {seen:?}");
            assert_eq!(evictor.evict(9, &keys(28..32)), None, "{name}");
            evictor.validate().expect(name);
        }
    }

    #[test]
    fn a_call_out_of_turn_is_refused_and_changes_nothing() {
        let mut evictor = full(2, PolicyKind::Lru);
        let key = [1; 8];
        assert_eq!(evictor.insert(1, &key), Err(IndexError::Duplicate(key[..].into())));
        assert_eq!(evictor.insert(1, &[9; 8]), Err(IndexError::Full(2)));
        assert_eq!(evictor.let_go(&key), Err(IndexError::NotPinned(key[..].into())));
        assert_eq!(evictor.hold(&[9; 8]), Err(IndexError::Unknown([9; 8][..].into())));
        evictor.remove(&key).expect("known");
        assert_eq!(evictor.remove(&key), Err(IndexError::Unknown(key[..].into())));
        evictor.insert(1, &key).expect("room again");
        assert_eq!(evictor.hold(&key), Err(IndexError::NotReady(key[..].into())));
        assert_eq!(evictor.evict(2, &keys([])), None, "one is being written");
        evictor.remove(&key).expect("known");
        assert_eq!(evictor.evict(1, &keys([])), Some(keys([0])));
        evictor.validate().expect("in order");
    }
}
