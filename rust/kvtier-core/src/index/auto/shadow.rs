//! A small cache that holds nothing: what a policy would have hit, on a sample of the chunks.
//!
//! A chunk is in the sample by its tag, and the cache is smaller than the real one by the same
//! factor, so it hits what the real one would (Waldspurger et al., "Cache modeling and
//! optimization using miniature simulations", 2017). It is driven by the very calls that the
//! index makes, so that a request's tail is older than its head here too.

use super::super::policy::{Policy, PolicyKind, Removal};
use super::super::table::Table;
use super::super::{NIL, Token};

/// What is left of a key: 31 bits of its fingerprint, never zero.
pub(super) type Tag = u32;

/// One policy's shadow.
pub(super) struct Shadow {
    policy: Box<dyn Policy>,
    capacity: usize,
    table: Table,
    /// By token, with the state of who is not evictable.
    entries: Vec<(Tag, State)>,
    free: Vec<Token>,
    victims: Vec<Token>,
    /// Prefix hits since the last comparison.
    pub(super) hits: f32,
    /// Hits more than the live policy's shadow had, old ones counting less, and the sum of the
    /// squares that it was made of.
    pub(super) ahead: f32,
    noise: f32,
    /// Of the chain being read: hits that stay so only if what precedes them hits too.
    pending: f32,
    /// Of the chain being read: a chunk before its end was missed.
    broken: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    Writing,
    Held,
    Ready,
}

/// Where in the chain being read an access is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Before its beginning.
    Up,
    /// After its end.
    Down,
    /// In another chain.
    Away,
}

/// Spreads a tag over a fingerprint.
fn fingerprint(tag: Tag) -> u64 {
    u64::from(tag).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Shadow {
    /// One chunk in 2^`shift` is sampled.
    pub(super) fn new(kind: PolicyKind, capacity: usize, shift: u32) -> Self {
        Self {
            policy: kind.build_sample(capacity, shift),
            capacity,
            table: Table::new(capacity),
            entries: Vec::new(),
            free: Vec::new(),
            victims: Vec::new(),
            hits: 0.0,
            ahead: 0.0,
            noise: 0.0,
            pending: 0.0,
            broken: false,
        }
    }

    fn find(&self, tag: Tag) -> Option<Token> {
        self.table.find(fingerprint(tag), |token| self.entries[token as usize].0 == tag)
    }

    fn state(&mut self, token: Token) -> &mut State {
        &mut self.entries[token as usize].1
    }

    /// Compares the hits since the last comparison to those of the live policy's shadow.
    pub(super) fn compare(&mut self, live: f32, keep: f32) {
        let more = self.hits - live;
        self.ahead = keep * self.ahead + more;
        self.noise = keep * keep * self.noise + more * more;
        self.hits = 0.0;
    }

    /// Whether it is ahead by more than `least` hits, and not by chance: twice the standard
    /// deviation that the sum would have if its parts were random, which takes five parts.
    pub(super) fn is_ahead(&self, least: f32) -> bool {
        self.ahead > least && self.ahead > 2.0 * self.noise.sqrt()
    }

    /// Another policy is live.
    pub(super) fn start_anew(&mut self) {
        self.ahead = 0.0;
        self.noise = 0.0;
    }

    /// What its policy has learned.
    pub(super) fn lessons(&self) -> Vec<f32> {
        self.policy.lessons()
    }

    /// Counts an access, before it is made.
    pub(super) fn count(&mut self, tag: Tag, step: Step) {
        if step == Step::Away {
            self.pending = 0.0;
            self.broken = false;
        }
        match (self.find(tag).is_some(), step) {
            (true, Step::Down) if self.broken => {}
            (true, _) => {
                self.hits += 1.0;
                self.pending += 1.0;
            }
            (false, Step::Up | Step::Away) => {
                self.hits -= self.pending;
                self.pending = 0.0;
                self.broken = true;
            }
            (false, Step::Down) => self.broken = true,
        }
    }

    /// A chunk is being written that the index had not.
    pub(super) fn admit(&mut self, tag: Tag, parent: Tag) {
        if let Some(token) = self.find(tag) {
            // Here it is resident; it is out of reach while the index writes it, as it is there.
            if *self.state(token) == State::Ready {
                self.policy.acquire(token);
                *self.state(token) = State::Held;
            }
            return;
        }
        if self.table.len() >= self.capacity && self.policy.evictable() == 0 {
            return;
        }
        let above = self.find(parent).unwrap_or(NIL);
        let token = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, State::Absent));
            self.policy.grow(self.entries.len());
            self.entries.len() as Token - 1
        });
        self.entries[token as usize] = (tag, State::Writing);
        self.table.insert(fingerprint(tag), token);
        self.policy.admit(token, fingerprint(tag), above);
        if self.table.len() > self.capacity {
            self.evict();
        }
    }

    fn evict(&mut self) {
        let mut victims = std::mem::take(&mut self.victims);
        self.policy.victims(1, &|_| false, &mut victims);
        for token in victims.drain(..) {
            let tag = self.entries[token as usize].0;
            self.policy.remove(token, fingerprint(tag), Removal::Evicted);
            self.forget(token);
        }
        self.victims = victims;
    }

    fn forget(&mut self, token: Token) {
        let hash = fingerprint(self.entries[token as usize].0);
        self.table.remove(hash, token);
        self.entries[token as usize] = (0, State::Absent);
        self.free.push(token);
    }

    /// The write is good.
    pub(super) fn insert(&mut self, tag: Tag) {
        let Some(token) = self.find(tag) else { return };
        match *self.state(token) {
            State::Writing => self.policy.insert(token),
            State::Held => {
                self.policy.touch(token, false);
                self.policy.release(token);
            }
            State::Ready | State::Absent => return,
        }
        *self.state(token) = State::Ready;
    }

    /// The write failed.
    pub(super) fn cancel(&mut self, tag: Tag) {
        let Some(token) = self.find(tag) else { return };
        match *self.state(token) {
            State::Writing => {
                self.policy.cancel(token);
                self.forget(token);
            }
            State::Held => {
                self.policy.release(token);
                *self.state(token) = State::Ready;
            }
            State::Ready | State::Absent => {}
        }
    }

    /// A chunk was used that the index has.
    pub(super) fn touch(&mut self, tag: Tag, parent: Tag, repeat: bool) {
        match self.find(tag) {
            Some(token) if *self.state(token) == State::Ready => self.policy.touch(token, repeat),
            Some(_) => {}
            None if repeat => {}
            None => {
                self.admit(tag, parent);
                self.insert(tag);
            }
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.policy.heap_bytes()
            + self.table.heap_bytes()
            + self.entries.capacity() * size_of::<(Tag, State)>()
            + (self.free.capacity() + self.victims.capacity()) * size_of::<Token>()
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        self.policy.validate()?;
        if self.table.len() > self.capacity
            || self.table.len() + self.free.len() != self.entries.len()
        {
            return Err(format!("{} entries of {}", self.table.len(), self.capacity));
        }
        for token in self.table.iter() {
            let (tag, state) = self.entries[token as usize];
            if self.find(tag) != Some(token) {
                return Err(format!("token {token} is not found by its tag"));
            }
            if self.policy.holds(token) != (state == State::Ready) {
                return Err(format!("token {token} is {state:?} to the shadow only"));
            }
        }
        Ok(())
    }
}
