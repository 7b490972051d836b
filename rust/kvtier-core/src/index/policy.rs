//! What an eviction policy is told, and what it answers.
//!
//! A policy keeps an order over the *evictable* tokens: ready, and without a pin. Tokens that
//! are pinned or being written are not in its lists at all, so choosing a victim never scans
//! over them. A policy is one file: implement [`Policy`], and either add a variant to
//! [`PolicyKind`] or hand it to [`Index::with_policy`](super::Index::with_policy).
//!
//! # A token's life
//!
//! ```text
//! admit ─┬─ insert ─ (touch | acquire (touch)* release)* ─ remove     evictable between calls
//!        └─ cancel                                                    its write failed
//! ```
//!
//! Several tokens are admitted before victims are chosen for all of them, so a policy whose
//! choice depends on the newcomer (ARC) sees the newcomers first. After `remove` or `cancel` the
//! token may begin a new life with another key.
//!
//! A *fingerprint* is 64 bits of hash of the key: what a policy keeps of a key that left (a
//! ghost). Two keys with one fingerprint cost a wrong guess once in 2^64, never a wrong byte.

use std::str::FromStr;

use super::Token;
use super::arc::Arc;
use super::auto::Auto;
use super::gittins::Gittins;
use super::lirs::Lirs;
use super::lru::Lru;
use super::s3fifo::S3Fifo;

/// How a token leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The policy chose it: worth a ghost.
    Evicted,
    /// It was taken out for another reason: the policy forgets it.
    Dropped,
}

/// An order over evictable tokens; see the module for what may follow what.
pub trait Policy: Send {
    /// Makes room for tokens `0..tokens`.
    fn grow(&mut self, tokens: usize);
    /// A key that was absent is being written. `parent` is the entry of the chunk before it in
    /// the prefix, or [`NIL`](super::NIL); it may leave before the token does.
    fn admit(&mut self, token: Token, fingerprint: u64, parent: Token);
    /// The write failed.
    fn cancel(&mut self, token: Token);
    /// The write is good: the token is evictable.
    fn insert(&mut self, token: Token);
    /// The key was used; it may be pinned at the moment. A `repeat` is one more use by the
    /// request that used it last: recency, but no evidence that others want it.
    fn touch(&mut self, token: Token, repeat: bool);
    /// The first pin: the token leaves the evictable ones.
    fn acquire(&mut self, token: Token);
    /// The last pin is gone: the token is evictable again.
    fn release(&mut self, token: Token);
    /// An evictable token's key leaves the index.
    fn remove(&mut self, token: Token, fingerprint: u64, removal: Removal);
    /// Appends the `count` tokens to evict first, none of them protected. There are as many;
    /// the index removes all of them next.
    fn victims(
        &mut self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    );
    /// What it has learned of the traffic, in figures that only its own kind understands.
    fn lessons(&self) -> Vec<f32> {
        Vec::new()
    }
    /// Begins with what another of its kind learned, of an index of another capacity perhaps.
    fn learn(&mut self, _lessons: &[f32]) {}
    /// The number of evictable tokens.
    fn evictable(&self) -> usize;
    /// Whether the token is evictable.
    fn holds(&self, token: Token) -> bool;
    /// Bytes on the heap, ghosts included.
    fn heap_bytes(&self) -> usize;
    /// Walks every invariant.
    ///
    /// # Errors
    /// What is wrong.
    fn validate(&self) -> Result<(), String>;
}

/// Makes room for tokens `0..tokens` in what a policy keeps of each: exactly, since the index
/// asks in steps already.
pub(super) fn grow_to<T: Clone>(values: &mut Vec<T>, tokens: usize, value: T) {
    if tokens > values.len() {
        values.reserve_exact(tokens - values.len());
        values.resize(tokens, value);
    }
}

/// The policies there are, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PolicyKind {
    /// Least recently used: evict what was used longest ago.
    #[default]
    Lru,
    /// ARC: balances what was used once against what was used again.
    Arc,
    /// LIRS: keep what comes back soonest, judged by the gap between uses.
    Lirs,
    /// S3-FIFO: newcomers prove themselves in a small queue.
    S3Fifo,
    /// Gittins: evict what is least worth waiting for.
    Gittins,
    /// Follow whichever of the others does best.
    Auto,
}

impl PolicyKind {
    /// Every policy, by the name it is chosen by.
    pub const ALL: &[(&str, Self)] = &[
        ("lru", Self::Lru),
        ("arc", Self::Arc),
        ("lirs", Self::Lirs),
        ("s3fifo", Self::S3Fifo),
        ("gittins", Self::Gittins),
        ("auto", Self::Auto),
    ];

    /// Bytes an entry of a full index with keys of 36 bytes, all included, that a policy of this
    /// kind never exceeds.
    pub fn most_bytes_per_entry(self) -> usize {
        match self {
            Self::Lru => 80,
            Self::Arc | Self::S3Fifo => 112,
            Self::Lirs | Self::Gittins => 170,
            Self::Auto => 200,
        }
    }

    /// A policy of this kind for `capacity` slots of an index of which it sees only one chunk in
    /// 2^`shift`: the capacity is smaller by that already.
    pub(super) fn build_sample(self, capacity: usize, shift: u32) -> Box<dyn Policy> {
        match self {
            Self::Gittins => Box::new(Gittins::of_sample(capacity, shift)),
            other => other.build(capacity),
        }
    }

    /// A policy of this kind for an index of `capacity` slots.
    pub(super) fn build(self, capacity: usize) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(Lru::default()),
            Self::Arc => Box::new(Arc::new(capacity)),
            Self::Lirs => Box::new(Lirs::new(capacity)),
            Self::S3Fifo => Box::new(S3Fifo::new(capacity)),
            Self::Auto => Box::new(Auto::new(capacity)),
            Self::Gittins => Box::new(Gittins::new(capacity)),
        }
    }
}

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}: use one of {names}", names = names())]
pub struct UnknownPolicy(pub String);

fn names() -> String {
    PolicyKind::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = PolicyKind::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, kind)| *kind).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
