//! `cargo run --example clock`: an index with a policy of one's own. CONTRIBUTING.md quotes it.

use kvtier_core::index::{Links, List, Policy, Removal, Token};

/// CLOCK: in order of arrival, but a token that was used goes round once more.
#[derive(Default)]
struct Clock {
    links: Links,
    ring: List,
    used: Vec<bool>,
}

impl Policy for Clock {
    fn grow(&mut self, tokens: usize) {
        self.links.grow(tokens);
        self.used.resize(tokens, false);
    }
    fn admit(&mut self, _token: Token, _fingerprint: u64, _parent: Token) {}
    fn cancel(&mut self, _token: Token) {}
    fn insert(&mut self, token: Token) {
        self.used[token as usize] = false;
        self.ring.push_front(&mut self.links, token);
    }
    fn touch(&mut self, token: Token, repeat: bool) {
        self.used[token as usize] |= !repeat;
    }
    fn acquire(&mut self, token: Token) {
        self.ring.remove(&mut self.links, token);
    }
    fn release(&mut self, token: Token) {
        self.ring.push_front(&mut self.links, token);
    }
    fn remove(&mut self, token: Token, _fingerprint: u64, _removal: Removal) {
        if self.links.is_linked(token) {
            self.ring.remove(&mut self.links, token);
        }
    }
    fn victims(&mut self, count: usize, spare: &dyn Fn(Token) -> bool, to: &mut Vec<Token>) {
        let enough = to.len() + count;
        while let Some(token) = self.ring.back().filter(|_| to.len() < enough) {
            self.ring.remove(&mut self.links, token);
            if spare(token) || std::mem::take(&mut self.used[token as usize]) {
                self.ring.push_front(&mut self.links, token);
            } else {
                to.push(token);
            }
        }
    }
    fn evictable(&self) -> usize {
        self.ring.len()
    }
    fn holds(&self, token: Token) -> bool {
        self.links.is_linked(token)
    }
    fn heap_bytes(&self) -> usize {
        self.links.heap_bytes() + self.used.capacity()
    }
    fn validate(&self) -> Result<(), String> {
        self.ring.validate(&self.links)
    }
}
// The end of what CONTRIBUTING.md quotes.

use kvtier_core::index::{ANYONE, Chain, Index, IndexError, Writer};
use kvtier_core::key::KeyBatch;

/// Stores keys, touching those that are there; returns the keys that had to go.
fn store(index: &mut Index, keys: &[&[u8; 8]]) -> Result<KeyBatch, IndexError> {
    index.begin_call();
    let numbered = (0..).zip(keys.iter().map(|key| key.as_slice()));
    for token in keys.iter().filter_map(|key| index.find(*key)).collect::<Vec<_>>() {
        index.touch(token, ANYONE);
    }
    let reserved = index.reserve(numbered, Writer::Store, ANYONE, &mut Chain::default())?;
    let reserved = reserved.expect("nothing is pinned here");
    for &token in &reserved.tokens {
        index.commit(token);
    }
    Ok(reserved.evicted)
}

fn main() -> Result<(), IndexError> {
    let mut index = Index::with_policy(2, 8, Box::new(Clock::default()))?;
    for key in [b"chunk  1", b"chunk  2", b"chunk  1", b"chunk  3"] {
        for evicted in &store(&mut index, &[key])? {
            println!("{} goes for {}", evicted.escape_ascii(), key.escape_ascii());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(key: &[u8]) -> KeyBatch {
        KeyBatch::from_flat(key.to_vec(), 8).expect("a whole key")
    }

    #[test]
    fn what_was_used_goes_round_once_more() {
        let mut index = Index::with_policy(2, 8, Box::new(Clock::default())).expect("small");
        let mut goes = |key| store(&mut index, &[key]).expect("room");
        assert!(goes(b"chunk  1").is_empty());
        assert!(goes(b"chunk  2").is_empty());
        assert!(goes(b"chunk  1").is_empty());
        assert_eq!(goes(b"chunk  3"), one(b"chunk  2"));
        assert_eq!(goes(b"chunk  4"), one(b"chunk  1"));
        assert_eq!(store(&mut index, &[b"chunk  3", b"chunk  5"]).expect("room").len(), 1);
        assert!(index.find(b"chunk  3").is_some(), "keys of the running call stay");
        index.validate().expect("invariants hold");
    }

    #[test]
    fn contributing_quotes_this_policy() {
        let (_, here) = include_str!("clock.rs").split_once("\n\n").expect("a header");
        let (policy, _) = here.split_once("// The end of what").expect("a marker");
        assert!(policy.lines().count() < 60);
        let text = include_str!("../../../CONTRIBUTING.md");
        assert!(text.contains(&format!("```rust\n{policy}```\n")), "quote examples/clock.rs anew");
    }
}
