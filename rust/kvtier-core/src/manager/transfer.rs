//! The engine's side: loads and stores between GPU and primary tier.

use std::collections::HashSet;

use super::figures::EventKind;
use super::step::Outgoing;
use super::{FROM_ENGINE, Inner, Manager, ManagerError, RequestId, TierMask, requester};
use crate::index::{Chain, Index, IndexError, Pin, Slot, State, Token, Writer};
use crate::key::{HexKey, KeyBatch};

/// What `prepare_store` reserved.
#[derive(Debug, PartialEq, Eq)]
pub struct PreparedStore {
    /// Positions, in the batch, of the keys to write, ascending.
    pub indices: Vec<u32>,
    /// The slot of each.
    pub slots: Vec<Slot>,
    /// Keys that left the primary tier for it.
    pub evicted: KeyBatch,
}

impl Manager {
    /// Pins every key and gives its slot, in order; all or none.
    ///
    /// # Errors
    /// [`IndexError`] naming the key that is absent, not ready, or given twice.
    pub fn prepare_load(
        &self,
        request: RequestId,
        keys: &KeyBatch,
    ) -> Result<Vec<Slot>, ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        let tokens = inner.index.find_all(keys)?;
        for (pinned, &token) in tokens.iter().enumerate() {
            if let Err(error) = inner.index.pin(token, Pin::Load) {
                for &token in &tokens[..pinned] {
                    // Pinned just above, under this lock.
                    let _ = inner.index.unpin(token, Pin::Load);
                }
                return Err(error.into());
            }
        }
        for &token in tokens.iter().rev() {
            inner.index.touch(token, requester(request));
        }
        if !tokens.is_empty() {
            inner.promises_end(request);
            let state = inner.request(request, self.request_level);
            state.remember(keys.iter());
            state.loading.extend_from_slice(&tokens);
            let mut chain = std::mem::take(&mut state.chain);
            keys.iter().zip(&tokens).for_each(|(key, &token)| chain.follow(key, token));
            chain.keep(&inner.index);
            inner.request(request, self.request_level).chain = chain;
        }
        Ok(tokens.iter().map(|&token| inner.index.slot(token)).collect())
    }

    /// Gives the pins of `prepare_load` back; all or none.
    ///
    /// # Errors
    /// [`IndexError`] naming the key that has no pin of this request to give back.
    pub fn complete_load(&self, request: RequestId, keys: &KeyBatch) -> Result<(), ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        if keys.is_empty() {
            return Ok(());
        }
        let Some(state) = inner.requests.get_mut(&request) else {
            return Err(IndexError::NotPinned(keys.get(0).into()).into());
        };
        let tokens = given_back(&mut inner.index, &state.loading, keys, IndexError::NotPinned)?;
        strike(&mut state.loading, &tokens);
        for &token in tokens.iter().rev() {
            inner.index.unpin(token, Pin::Load)?;
        }
        inner.primary.loaded_chunks += tokens.len() as u64;
        inner.end_if_done(request);
        Ok(())
    }

    /// Drops known keys, evicts what is needed and reserves a slot for every other key. `None`,
    /// and nothing changed, when the room cannot be made now. Keys of the call are not evicted.
    ///
    /// Known keys go to the tiers that get all chunks of this request: at once, or, as long as
    /// they are being written, when they are ready.
    ///
    /// # Errors
    /// [`IndexError::Duplicate`].
    pub fn prepare_store(
        &self,
        request: RequestId,
        keys: &KeyBatch,
    ) -> Result<Option<PreparedStore>, ManagerError> {
        let mut outgoing = Outgoing::default();
        let prepared = {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            // Pins that came back may make the room.
            self.apply_results(inner);
            let prepared = self.reserve(inner, request, keys)?;
            if let Some(prepared) = &prepared {
                outgoing = self.offer_known(inner, request, keys, &prepared.indices);
            }
            prepared
        };
        self.send(outgoing);
        Ok(prepared)
    }

    fn reserve(
        &self,
        inner: &mut Inner,
        request: RequestId,
        keys: &KeyBatch,
    ) -> Result<Option<PreparedStore>, ManagerError> {
        let offered = inner.offered(keys)?;
        inner.index.begin_call();
        let numbered = offered.admitted.iter().map(|&at| (at, keys.get(at as usize)));
        let mut chain = match inner.requests.get_mut(&request) {
            Some(state) => std::mem::take(&mut state.chain),
            None => Chain::default(),
        };
        let reserved = inner.index.reserve(numbered, Writer::Store, requester(request), &mut chain);
        let made = matches!(&reserved, Ok(Some(reserved)) if !reserved.indices.is_empty());
        if made {
            inner.request(request, self.request_level).chain = chain;
        } else if let Some(state) = inner.requests.get_mut(&request) {
            state.chain = chain;
        }
        let Some(reserved) = reserved? else {
            inner.primary.stores_refused += 1;
            return Ok(None);
        };
        for &fingerprint in &offered.absent {
            inner.admission.offer(fingerprint);
        }
        inner.primary.not_admitted += (keys.len() - offered.admitted.len()) as u64;
        inner.primary.evictions += reserved.evicted.len() as u64;
        inner.events.push(EventKind::Removed, None, reserved.evicted.iter());
        for &slot in &reserved.slots {
            inner.origins[slot as usize] = FROM_ENGINE;
        }
        if made {
            inner.promises_end(request);
            let state = inner.request(request, self.request_level);
            state.remember(reserved.indices.iter().map(|&at| keys.get(at as usize)));
            state.storing.extend_from_slice(&reserved.tokens);
        }
        Ok(Some(PreparedStore {
            indices: reserved.indices,
            slots: reserved.slots,
            evicted: reserved.evicted,
        }))
    }

    /// Offers the keys that were known, all but the `new` ones, to the tiers that get all chunks
    /// of the request.
    fn offer_known(
        &self,
        inner: &mut Inner,
        request: RequestId,
        keys: &KeyBatch,
        new: &[u32],
    ) -> Outgoing {
        let state = inner.requests.get(&request);
        let tiers = state.map_or(self.request_level, |state| state.gets_all);
        if tiers == 0 || new.len() == keys.len() {
            return Outgoing::default();
        }
        let mut new = new.iter().peekable();
        let mut known = KeyBatch::with_capacity(keys.len(), keys.key_bytes());
        for (position, key) in keys.iter().enumerate() {
            if new.next_if(|&&at| at as usize == position).is_none() {
                // Of the same batch, so of the same length.
                let _ = known.push(key);
            }
        }
        self.offer_resident(inner, request, &known, tiers)
    }

    /// Offers keys to tiers: those that are ready now, those that are being written later.
    pub(super) fn offer_resident(
        &self,
        inner: &mut Inner,
        request: RequestId,
        keys: &KeyBatch,
        tiers: TierMask,
    ) -> Outgoing {
        let mut ready = KeyBatch::with_capacity(keys.len(), keys.key_bytes());
        let mut tokens = Vec::with_capacity(keys.len());
        let mut parked = KeyBatch::empty(keys.key_bytes());
        inner.index.find_batch(keys, |position, token| {
            let Some(token) = token else {
                return;
            };
            let key = keys.get(position);
            // Both get keys of the same length.
            let _ = if inner.index.state(token) == State::Ready {
                tokens.push(token);
                ready.push(key)
            } else {
                parked.push(key)
            };
        });
        if !parked.is_empty() {
            let state = inner.request(request, self.request_level);
            if state.parked.is_empty() {
                state.parked = parked;
                inner.parked.push(request);
            } else {
                state.parked.append(&parked);
            }
        }
        self.cascade(inner, request, &ready, tokens, tiers)
    }

    /// Makes prepared keys ready and cascades them to every tier; with `ok` false, drops them.
    ///
    /// # Errors
    /// [`IndexError`] naming the key that this request is not storing, or that was given twice.
    pub fn complete_store(
        &self,
        request: RequestId,
        keys: &KeyBatch,
        ok: bool,
    ) -> Result<(), ManagerError> {
        let outgoing = {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            if keys.is_empty() {
                return Ok(());
            }
            let state = inner.requests.get_mut(&request);
            let held = state.as_ref().map_or(&[][..], |state| &state.storing);
            let tokens = given_back(&mut inner.index, held, keys, IndexError::NotPrepared)?;
            if let Some(state) = state {
                strike(&mut state.storing, &tokens);
            }
            for &token in tokens.iter().rev() {
                if ok {
                    inner.index.commit(token);
                } else {
                    inner.index.abort(token);
                }
            }
            let outgoing = if ok {
                inner.primary.stored_chunks += tokens.len() as u64;
                inner.events.push(EventKind::Stored, None, keys.iter());
                self.cascade(inner, request, keys, tokens, TierMask::MAX)
            } else {
                Outgoing::default()
            };
            inner.end_if_done(request);
            outgoing
        };
        self.send(outgoing);
        Ok(())
    }
}

impl Inner {
    /// Which keys of a batch the admission threshold lets pass; all, without one.
    fn offered(&self, keys: &KeyBatch) -> Result<Offered, IndexError> {
        let mut offered = Offered { admitted: Vec::with_capacity(keys.len()), absent: Vec::new() };
        if self.admission.is_open() {
            offered.admitted.extend(0..keys.len() as u32);
            return Ok(offered);
        }
        // Keys that do not pass are not named to the index, which would find one that comes twice.
        let mut absent = HashSet::new();
        let mut duplicate = None;
        self.index.find_batch(keys, |position, token| {
            let key = keys.get(position);
            let mut admitted = true;
            if token.is_none() {
                if !absent.insert(key) {
                    duplicate.get_or_insert(key);
                }
                let fingerprint = self.index.fingerprint_of(key);
                admitted = self.admission.admits(fingerprint);
                offered.absent.push(fingerprint);
            }
            if admitted {
                offered.admitted.push(position as u32);
            }
        });
        match duplicate {
            Some(key) => Err(IndexError::Duplicate(key.into())),
            None => Ok(offered),
        }
    }
}

/// What a threshold makes of a batch of keys.
struct Offered {
    /// Positions of keys that are resident or were offered often enough.
    admitted: Vec<u32>,
    /// Fingerprints of keys that are not resident; only kept with a threshold.
    absent: Vec<u64>,
}

/// The entries of keys that a request gives back of what it holds, each marked; `refused` names
/// the first one that it does not hold.
fn given_back(
    index: &mut Index,
    held: &[Token],
    keys: &KeyBatch,
    refused: fn(HexKey) -> IndexError,
) -> Result<Vec<Token>, IndexError> {
    // As a rule they come back as they were taken, and then no key has to be looked up.
    let taken = keys.iter().zip(held).all(|(key, &token)| index.key(token) == key);
    if !taken || keys.len() > held.len() {
        let tokens = index.find_all(keys)?;
        let held: HashSet<Token> = held.iter().copied().collect();
        let foreign = tokens.iter().zip(keys).find(|(token, _)| !held.contains(token));
        return match foreign {
            Some((_, key)) => Err(refused(key.into())),
            None => Ok(tokens),
        };
    }
    index.begin_call();
    let tokens = &held[..keys.len()];
    for (&token, key) in tokens.iter().zip(keys) {
        if !index.mark(token) {
            return Err(IndexError::Duplicate(key.into()));
        }
    }
    Ok(tokens.to_vec())
}

/// Takes entries, each named once, off what a request holds: of several pins of one, one.
fn strike(held: &mut Vec<Token>, tokens: &[Token]) {
    if held.starts_with(tokens) {
        held.drain(..tokens.len());
    } else {
        let mut left: HashSet<Token> = tokens.iter().copied().collect();
        held.retain(|token| !left.remove(token));
    }
}
