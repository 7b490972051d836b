//! What a live request holds, which tiers it may use, and its end.

use std::collections::hash_map::Entry;

use super::{Inner, Manager, ManagerError, RequestId, Tier, TierMask, requester};
use crate::index::{Chain, Token};
use crate::key::KeyBatch;
use crate::tier::{Locality, Medium};

/// Tiers of this medium and locality; `None` is any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierMatcher {
    /// What they keep chunks on.
    pub medium: Option<Medium>,
    /// Where.
    pub locality: Option<Locality>,
}

/// How a request is served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestOptions {
    /// Tiers that may serve its look-ups: those that any of these match. `None` is all tiers.
    pub tiers: Option<Vec<TierMatcher>>,
    /// Names of tiers that get all chunks of it, besides those that get all chunks of every
    /// request.
    pub request_level: Vec<String>,
}

/// What a live request did, for when it ends.
pub(super) struct Request {
    /// Tiers that may serve it.
    pub(super) may_use: TierMask,
    /// Tiers that get all of its chunks.
    pub(super) gets_all: TierMask,
    /// Keys that it loaded or stored, in order.
    used: KeyBatch,
    /// Its last chunk of each group: what the next one follows.
    pub(super) chain: Chain,
    /// What `prepare_load` pinned for it and it has not given back, in order.
    pub(super) loading: Vec<Token>,
    /// What `prepare_store` reserved for it and it has not completed, in order.
    pub(super) storing: Vec<Token>,
    /// Keys that its tiers get when they are written.
    pub(super) parked: KeyBatch,
    finished: bool,
}

impl Request {
    fn new(key_bytes: usize, request_level: TierMask) -> Self {
        Self {
            may_use: TierMask::MAX,
            gets_all: request_level,
            used: KeyBatch::empty(key_bytes),
            chain: Chain::default(),
            loading: Vec::new(),
            storing: Vec::new(),
            parked: KeyBatch::empty(key_bytes),
            finished: false,
        }
    }

    pub(super) fn remember<'k>(&mut self, keys: impl Iterator<Item = &'k [u8]>) {
        for key in keys {
            // Every key of an index has its length.
            let _ = self.used.push(key);
        }
    }

    /// A request's prefix grows: a longer one takes the shorter one in.
    pub(super) fn extend_used(&mut self, keys: &KeyBatch) {
        if self.used.len() < keys.len() {
            self.used.clone_from(keys);
        }
    }

    /// Forgets what it held: a reset took it.
    pub(super) fn forget(&mut self) {
        self.used.clear();
        self.chain = Chain::default();
        self.loading.clear();
        self.storing.clear();
        self.parked.clear();
    }
}

impl Inner {
    /// The state of a request, made at its first transfer.
    pub(super) fn request(&mut self, id: RequestId, request_level: TierMask) -> &mut Request {
        let key_bytes = self.index.key_bytes();
        self.requests.entry(id).or_insert_with(|| Request::new(key_bytes, request_level))
    }

    /// Ends a request that is finished and has nothing open: orders what it used. Its tiers are
    /// told after the step, when its last job was submitted.
    pub(super) fn end_if_done(&mut self, id: RequestId) {
        if let Entry::Occupied(request) = self.requests.entry(id) {
            let state = request.get();
            let done = state.loading.is_empty() && state.storing.is_empty();
            if state.finished && done && state.parked.is_empty() {
                self.index.touch_batch(&request.remove().used, requester(id));
                self.ended.push(id);
            }
        }
    }
}

impl Manager {
    /// Begins a request that is served in a way of its own. Without this call it may use all
    /// tiers, and begins with its first transfer.
    ///
    /// # Errors
    /// [`ManagerError::UnknownTier`].
    pub fn begin_request(
        &self,
        request: RequestId,
        options: &RequestOptions,
    ) -> Result<(), ManagerError> {
        let mut request_level = self.request_level;
        for name in &options.request_level {
            let number = self.tiers.iter().position(|tier| tier.name == *name);
            let Some(number) = number else {
                let known: Vec<&str> = self.tiers.iter().map(|tier| &*tier.name).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return Err(ManagerError::UnknownTier { name: name.clone(), known });
            };
            request_level |= 1 << number;
        }
        let allowed = |tier: &Tier| {
            options.tiers.as_ref().is_none_or(|matchers| {
                matchers.iter().any(|matcher| {
                    matcher.medium.is_none_or(|medium| medium == tier.medium)
                        && matcher.locality.is_none_or(|locality| locality == tier.locality)
                })
            })
        };
        let numbers = 0..self.tiers.len();
        let tiers = numbers
            .filter(|&number| allowed(&self.tiers[number]))
            .fold(0, |mask: TierMask, number| mask | 1 << number);
        let mut inner = self.inner.lock();
        let state = inner.open()?.request(request, request_level);
        (state.may_use, state.gets_all) = (tiers, request_level);
        Ok(())
    }

    /// Ends a request: what it used is ordered leaf-first. A request that is not known is fine.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn request_finished(&self, request: RequestId) -> Result<(), ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        inner.retrying.remove(&request);
        inner.promises_end(request);
        match inner.requests.get_mut(&request) {
            Some(state) => {
                state.finished = true;
                inner.end_if_done(request);
            }
            // It only looked up, but a tier may remember it for that.
            None => inner.ended.push(request),
        }
        Ok(())
    }
}
