//! Least recently used: evict what was used longest ago. Every operation is O(1); 8 bytes a token.
//!
//! A token that is pinned is out of the list and comes back in front: a pin is a use.

use super::Token;
use super::list::{Links, List};
use super::policy::{Policy, Removal};

/// The list, most recently used in front.
#[derive(Debug, Default)]
pub(super) struct Lru {
    links: Links,
    order: List,
}

impl Policy for Lru {
    fn grow(&mut self, tokens: usize) {
        self.links.grow(tokens);
    }

    fn admit(&mut self, _token: Token, _fingerprint: u64, _parent: Token) {}

    fn cancel(&mut self, _token: Token) {}

    fn insert(&mut self, token: Token) {
        self.order.push_front(&mut self.links, token);
    }

    fn touch(&mut self, token: Token, _repeat: bool) {
        if self.links.is_linked(token) {
            self.order.remove(&mut self.links, token);
            self.order.push_front(&mut self.links, token);
        }
    }

    fn acquire(&mut self, token: Token) {
        self.order.remove(&mut self.links, token);
    }

    fn release(&mut self, token: Token) {
        self.order.push_front(&mut self.links, token);
    }

    fn remove(&mut self, token: Token, _fingerprint: u64, _removal: Removal) {
        self.order.remove(&mut self.links, token);
    }

    fn victims(
        &mut self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    ) {
        let oldest = self.order.iter_back(&self.links);
        victims.extend(oldest.filter(|&token| !protected(token)).take(count));
    }

    fn evictable(&self) -> usize {
        self.order.len()
    }

    fn holds(&self, token: Token) -> bool {
        self.links.is_linked(token)
    }

    fn heap_bytes(&self) -> usize {
        self.links.heap_bytes()
    }

    fn validate(&self) -> Result<(), String> {
        self.order.validate(&self.links)
    }
}
