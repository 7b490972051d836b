//! Doubly linked lists threaded through tokens: no node, no allocation, no pointer.
//!
//! [`Links`] holds one pair of neighbours a token; a token is in at most one list at a time. A
//! policy has as many [`List`] heads as it needs over one [`Links`]. Eight bytes a token.

use super::{NIL, Token};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Link {
    prev: Token,
    next: Token,
}

/// A link that is in no list points at itself, which no list member does.
const fn detached(token: Token) -> Link {
    Link { prev: token, next: token }
}

/// The neighbours of every token.
#[derive(Debug, Default)]
pub struct Links(Vec<Link>);

impl Links {
    /// Makes room for tokens `0..tokens`.
    pub fn grow(&mut self, tokens: usize) {
        for token in self.0.len()..tokens {
            self.0.push(detached(token as Token));
        }
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.0.capacity() * size_of::<Link>()
    }

    /// Whether `token` is in a list.
    pub fn is_linked(&self, token: Token) -> bool {
        self.0[token as usize] != detached(token)
    }
}

/// One list: its ends and its length.
#[derive(Debug)]
pub struct List {
    head: Token,
    tail: Token,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NIL, tail: NIL, len: 0 }
    }
}

impl List {
    /// Number of members.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no member.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts an unlinked token in front.
    pub fn push_front(&mut self, links: &mut Links, token: Token) {
        debug_assert!(!links.is_linked(token));
        links.0[token as usize] = Link { prev: NIL, next: self.head };
        match self.head {
            NIL => self.tail = token,
            head => links.0[head as usize].prev = token,
        }
        self.head = token;
        self.len += 1;
    }

    /// Puts an unlinked token at the back.
    pub fn push_back(&mut self, links: &mut Links, token: Token) {
        debug_assert!(!links.is_linked(token));
        links.0[token as usize] = Link { prev: self.tail, next: NIL };
        match self.tail {
            NIL => self.head = token,
            tail => links.0[tail as usize].next = token,
        }
        self.tail = token;
        self.len += 1;
    }

    /// The member in front.
    pub fn front(&self) -> Option<Token> {
        (self.head != NIL).then_some(self.head)
    }

    /// The member at the back.
    pub fn back(&self) -> Option<Token> {
        (self.tail != NIL).then_some(self.tail)
    }

    /// Takes a member out.
    pub fn remove(&mut self, links: &mut Links, token: Token) {
        debug_assert!(links.is_linked(token));
        let Link { prev, next } = std::mem::replace(&mut links.0[token as usize], detached(token));
        match prev {
            NIL => self.head = next,
            prev => links.0[prev as usize].next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => links.0[next as usize].prev = prev,
        }
        self.len -= 1;
    }

    /// The members from the back to the front.
    pub fn iter_back<'a>(&self, links: &'a Links) -> impl Iterator<Item = Token> + use<'a> {
        let mut at = self.tail;
        std::iter::from_fn(move || {
            let token = at;
            (token != NIL).then(|| {
                at = links.0[token as usize].prev;
                token
            })
        })
    }

    /// Checks that both directions agree and that the length is right.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validate(&self, links: &Links) -> Result<(), String> {
        let mut count = 0;
        let mut after = NIL;
        for token in self.iter_back(links) {
            if links.0[token as usize].next != after {
                return Err(format!("token {token}: next does not lead back to {after}"));
            }
            after = token;
            count += 1;
            if count > self.len {
                break;
            }
        }
        if count != self.len || after != self.head {
            return Err(format!("list of length {} has {count} members", self.len));
        }
        Ok(())
    }
}
