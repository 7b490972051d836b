//! Low inter-reference recency (LIRS): keep what comes back soonest.
//!
//! S. Jiang and X. Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy
//! to Improve Buffer Cache Performance", SIGMETRICS 2002. Almost the whole capacity is for *LIR*
//! tokens, whose last two uses were close together; one in a hundred is for *HIR* ones, which
//! wait in a queue (Q) to be evicted, and leave a ghost. The stack (S) holds everything that was
//! used since the LIR token whose last use is oldest. What is used while it is in the stack,
//! resident or ghost, becomes LIR, and the oldest LIR token becomes HIR instead.
//!
//! # The stack is not a list here
//! Every use has a number, and a token's or ghost's *stamp* is that of its last use. The paper
//! prunes from the bottom of the stack all that lies below the oldest LIR token; so a HIR token
//! is in the stack exactly if its stamp is above the `bottom`, the greatest stamp that the oldest
//! LIR token ever had. HIR tokens leave the queue in order of their stamps as far as they are in
//! the stack, so ghosts are in stack order by order of departure, and both pruning and the bound
//! on ghosts (twice the capacity; the paper has none) take them from the old end. Where a victim
//! was chosen past a protected token its ghost may be out of order, which its stamp tells.
//!
//! # Here
//! Newcomers are LIR while all residents would fit among the LIR. A token that is being written
//! or is pinned is in no list; after a pin it is as recent as can be. One call may need more
//! victims than the queue has: the oldest LIR tokens follow. Newcomers of a call cannot be
//! evicted for each other, so the queue then grows past its share, at the cost of LIR tokens,
//! until uses of HIR tokens restore it.
//!
//! # Invariants
//! - LIR tokens are in order of their stamps; there are no more than their share, except for
//!   pinned ones.
//! - The oldest LIR token's stamp is the bottom; the oldest ghost's is above it.
//!
//! Every operation is O(1) amortised, victims O(victims + protected). Memory a token: 8 (links)
//! + 8 (stamp) + 1 (rank), and 30 to 35 a ghost, of which there are at most two for a token.

use super::Token;
use super::ghosts::Ghosts;
use super::list::{Links, List};
use super::policy::{Policy, Removal, grow_to};

/// Ghosts, at most, for each slot.
const GHOSTS_PER_SLOT: usize = 2;
/// One slot of so many is for HIR tokens.
const SLOTS_PER_HIR: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rank {
    /// Not resident.
    None,
    Lir,
    Hir,
}

/// LIR tokens and the queue of HIR ones, newest in front.
#[derive(Debug)]
pub(super) struct Lirs {
    capacity: usize,
    /// LIR tokens, at most.
    share: usize,
    links: Links,
    stamps: Vec<u64>,
    ranks: Vec<Rank>,
    lir: List,
    queue: List,
    /// Tokens with a rank.
    residents: usize,
    /// LIR tokens that were inserted, pinned ones too.
    ranked_lir: usize,
    /// A ghost's mark is its stamp.
    ghosts: Ghosts<u64>,
    ghost_order: List,
    /// Number of the last use.
    clock: u64,
    bottom: u64,
}

impl Lirs {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            share: capacity - (capacity / SLOTS_PER_HIR).max(1),
            links: Links::default(),
            stamps: Vec::new(),
            ranks: Vec::new(),
            lir: List::default(),
            queue: List::default(),
            residents: 0,
            ranked_lir: 0,
            ghosts: Ghosts::new(GHOSTS_PER_SLOT * capacity),
            ghost_order: List::default(),
            clock: 0,
            bottom: 0,
        }
    }

    /// Puts an unlinked token in front of its list, with the stamp of a use.
    fn link(&mut self, token: Token) {
        self.clock += 1;
        self.stamps[token as usize] = self.clock;
        let list = if self.is_lir(token) { &mut self.lir } else { &mut self.queue };
        list.push_front(&mut self.links, token);
    }

    fn unlink(&mut self, token: Token) {
        let list = if self.is_lir(token) { &mut self.lir } else { &mut self.queue };
        list.remove(&mut self.links, token);
    }

    fn is_lir(&self, token: Token) -> bool {
        self.ranks[token as usize] == Rank::Lir
    }

    fn leave(&mut self, token: Token) {
        self.ranks[token as usize] = Rank::None;
        self.residents -= 1;
    }

    /// Restores the share of LIR tokens and the bottom of the stack.
    fn settle(&mut self) {
        while self.ranked_lir > self.share
            && let Some(oldest) = self.lir.back()
        {
            self.unlink(oldest);
            self.ranks[oldest as usize] = Rank::Hir;
            self.ranked_lir -= 1;
            self.bottom = self.bottom.max(self.stamps[oldest as usize]);
            // It keeps its stamp: it is out of the stack until its next use.
            self.queue.push_front(&mut self.links, oldest);
        }
        if let Some(oldest) = self.lir.back() {
            self.bottom = self.bottom.max(self.stamps[oldest as usize]);
        }
        while let Some(oldest) = self.ghost_order.back()
            && self.ghosts.mark(oldest) <= self.bottom
        {
            self.ghosts.remove(&mut self.ghost_order, oldest);
        }
    }
}

impl Policy for Lirs {
    fn grow(&mut self, tokens: usize) {
        self.links.grow(tokens);
        grow_to(&mut self.stamps, tokens, 0);
        grow_to(&mut self.ranks, tokens, Rank::None);
    }

    fn admit(&mut self, token: Token, fingerprint: u64, _parent: Token) {
        self.residents += 1;
        let mut rank = if self.residents <= self.share { Rank::Lir } else { Rank::Hir };
        if let Some(ghost) = self.ghosts.find(fingerprint) {
            // Pruning may have missed it: not all ghosts are in stack order.
            if self.ghosts.mark(ghost) > self.bottom {
                rank = Rank::Lir;
            }
            self.ghosts.remove(&mut self.ghost_order, ghost);
        }
        self.ranks[token as usize] = rank;
    }

    fn cancel(&mut self, token: Token) {
        self.leave(token);
    }

    fn insert(&mut self, token: Token) {
        self.ranked_lir += usize::from(self.is_lir(token));
        self.link(token);
        self.settle();
    }

    fn touch(&mut self, token: Token, repeat: bool) {
        let evictable = self.links.is_linked(token);
        if evictable {
            self.unlink(token);
        }
        if !repeat && !self.is_lir(token) && self.stamps[token as usize] > self.bottom {
            self.ranks[token as usize] = Rank::Lir;
            self.ranked_lir += 1;
        }
        if evictable {
            self.link(token);
        }
        self.settle();
    }

    fn acquire(&mut self, token: Token) {
        self.unlink(token);
        self.settle();
    }

    fn release(&mut self, token: Token) {
        self.link(token);
        self.settle();
    }

    fn remove(&mut self, token: Token, fingerprint: u64, removal: Removal) {
        self.unlink(token);
        self.ranked_lir -= usize::from(self.is_lir(token));
        self.leave(token);
        self.settle();
        let stamp = self.stamps[token as usize];
        if removal == Removal::Evicted && stamp > self.bottom {
            self.ghosts.push(&mut self.ghost_order, fingerprint, stamp);
            self.ghosts.truncate(&mut self.ghost_order, GHOSTS_PER_SLOT * self.capacity);
        }
    }

    fn victims(
        &mut self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    ) {
        let hir = self.queue.iter_back(&self.links);
        let lir = self.lir.iter_back(&self.links);
        victims.extend(hir.chain(lir).filter(|&token| !protected(token)).take(count));
    }

    fn evictable(&self) -> usize {
        self.lir.len() + self.queue.len()
    }

    fn holds(&self, token: Token) -> bool {
        self.links.is_linked(token)
    }

    fn heap_bytes(&self) -> usize {
        self.links.heap_bytes()
            + self.stamps.capacity() * size_of::<u64>()
            + self.ranks.capacity() * size_of::<Rank>()
            + self.ghosts.heap_bytes()
    }

    fn validate(&self) -> Result<(), String> {
        for (list, rank) in [(&self.lir, Rank::Lir), (&self.queue, Rank::Hir)] {
            list.validate(&self.links)?;
            let stray = |&token: &Token| self.ranks[token as usize] != rank;
            if let Some(token) = list.iter_back(&self.links).find(stray) {
                return Err(format!("token {token} is in the list of {rank:?}, but is not"));
            }
        }
        let residents = self.ranks.iter().filter(|&&rank| rank != Rank::None).count();
        if residents != self.residents {
            return Err(format!("{residents} tokens have a rank, kept {}", self.residents));
        }
        let oldest = self.lir.back().map(|token| self.stamps[token as usize]);
        if oldest.is_some_and(|stamp| stamp != self.bottom) {
            return Err(format!(
                "the bottom is {}, the oldest LIR token's {oldest:?}",
                self.bottom
            ));
        }
        let mut before = self.bottom;
        for token in self.lir.iter_back(&self.links) {
            let stamp = self.stamps[token as usize];
            if stamp < before || stamp > self.clock {
                return Err(format!("LIR token {token} with stamp {stamp} is out of order"));
            }
            before = stamp;
        }
        if self.ranked_lir < self.lir.len()
            || (self.ranked_lir > self.share && !self.lir.is_empty())
        {
            return Err(format!(
                "{} LIR tokens, {} of them evictable, have a share of {}",
                self.ranked_lir,
                self.lir.len(),
                self.share
            ));
        }
        self.ghosts.validate(&[(&self.ghost_order, &|stamp| stamp <= self.clock)])?;
        let oldest = self.ghost_order.back().map(|ghost| self.ghosts.mark(ghost));
        if oldest.is_some_and(|stamp| stamp <= self.bottom) {
            return Err("the oldest ghost is below the stack".into());
        }
        if self.ghost_order.len() > GHOSTS_PER_SLOT * self.capacity {
            return Err(format!("{} ghosts are too many", self.ghost_order.len()));
        }
        Ok(())
    }
}
