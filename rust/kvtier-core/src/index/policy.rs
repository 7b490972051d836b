//! What an eviction policy is told, and what it answers.
//!
//! A policy keeps an order over the *evictable* tokens: ready, and without a pin. Tokens that
//! are pinned or being written are not in its lists at all, so choosing a victim never scans
//! over them. A policy is one file: implement [`Policy`], add a variant to [`PolicyKind`].

use std::str::FromStr;

use super::Token;
use super::lru::Lru;

/// An order over evictable tokens.
///
/// The index promises: [`insert`](Policy::insert) comes first in a token's life;
/// [`acquire`](Policy::acquire) and [`release`](Policy::release) alternate;
/// [`remove`](Policy::remove) comes last, on an evictable token; and after it the token may
/// begin a new life with another key.
pub trait Policy: Send {
    /// Makes room for tokens `0..tokens`.
    fn grow(&mut self, tokens: usize);
    /// A new key is ready and evictable.
    fn insert(&mut self, token: Token);
    /// The key was used. It may be pinned at the moment.
    fn touch(&mut self, token: Token);
    /// The first pin: the token leaves the evictable ones.
    fn acquire(&mut self, token: Token);
    /// The last pin is gone: the token is evictable again.
    fn release(&mut self, token: Token);
    /// The key leaves the index.
    fn remove(&mut self, token: Token);
    /// Names the `count` tokens to evict first, none of them protected, and changes nothing.
    /// Returns false, with `victims` in any state, when there are not as many.
    fn victims(
        &self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    ) -> bool;
    /// The number of evictable tokens.
    fn evictable(&self) -> usize;
    /// Whether the token is evictable.
    fn holds(&self, token: Token) -> bool;
    /// Walks every invariant.
    ///
    /// # Errors
    /// What is wrong.
    fn validate(&self) -> Result<(), String>;
}

/// The policies there are, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PolicyKind {
    /// [`Lru`]: evict what was used longest ago.
    #[default]
    Lru,
}

impl PolicyKind {
    /// Every policy's name.
    pub const NAMES: &[&str] = &["lru"];

    /// A policy of this kind.
    pub(super) fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(Lru::default()),
        }
    }
}

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}: use one of {names}", names = PolicyKind::NAMES.join(", "))]
pub struct UnknownPolicy(pub String);

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        match name {
            "lru" => Ok(Self::Lru),
            _ => Err(UnknownPolicy(name.to_owned())),
        }
    }
}
