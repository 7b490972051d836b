//! Least recently used: evict what was used longest ago. Every operation is O(1).
//!
//! A token that is pinned is out of the list and comes back in front: a pin is a use.

use super::Token;
use super::list::{Links, List};
use super::policy::Policy;

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

    fn insert(&mut self, token: Token) {
        self.order.push_front(&mut self.links, token);
    }

    fn touch(&mut self, token: Token) {
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

    fn remove(&mut self, token: Token) {
        self.order.remove(&mut self.links, token);
    }

    fn victims(
        &self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    ) -> bool {
        victims.extend(
            self.order.iter_back(&self.links).filter(|&token| !protected(token)).take(count),
        );
        victims.len() == count
    }

    fn evictable(&self) -> usize {
        self.order.len()
    }

    fn holds(&self, token: Token) -> bool {
        self.links.is_linked(token)
    }

    fn validate(&self) -> Result<(), String> {
        self.order.validate(&self.links)
    }
}
