//! Follow whichever policy does best: small shadows of all of them run beside the live one.
//!
//! Every candidate has a [`shadow`]: the policy itself, on a sample of the chunks and a memory
//! smaller by the same factor, that counts the prefix hits it would have had. When another's
//! shadow has been ahead by [`AHEAD`], and by twice what chance would do, the live policy is
//! replaced by that one: it is told of all residents in the order in which the old one would have
//! evicted them, with their parents, so nothing resident is lost; and what its shadow has learned
//! it knows from the beginning.
//!
//! # Sample
//! A chunk is sampled by bits of its fingerprint, not by the root of its chain: where all chats
//! share a system prompt there is one root. Chains stay together in that the parent of a sampled
//! chunk is its nearest sampled ancestor. A hit counts as a prefix hit while no sampled chunk
//! before it in its request is missed, whether the request is told head first (as new chunks are)
//! or tail first (as used ones are).
//!
//! # Invariants
//! - `tokens` has a tag exactly for the tokens that are admitted; one that is not evictable is
//!   being written or pinned, and its mark says which.
//!
//! # Cost
//! 12 bytes a token beside the live policy's, one call to the live policy an operation, and for
//! one access in 2^shift one to each candidate. A shadow has between 1,024 and 2,047 slots, or
//! one 256th of the index's where that is more. All shadows together stay below 2% of the memory
//! of an index of half a million entries or more; for a smaller one they take about 400 KiB,
//! nearly all of it the tables and ghosts of `gittins`. A switch is O(tokens).

mod shadow;
#[cfg(test)]
mod tests;

use super::policy::{Policy, PolicyKind, Removal};
use super::{NIL, Token};
use shadow::{Shadow, Step, Tag};

/// Who is followed; the first one to begin with. LIRS is not among them: in a miniature its ranks
/// say too little of the large cache's, and following it cost more than it gave (0.6 points at
/// 5,000 blocks of the conversation trace).
const CANDIDATES: &[PolicyKind] =
    &[PolicyKind::Gittins, PolicyKind::Lru, PolicyKind::Arc, PolicyKind::S3Fifo];
/// Slots of a shadow, at least: some forty requests of chats.
const SLOTS_MIN: usize = 1 << 10;
/// The largest factor between the index and a shadow, as a power of two.
const SHIFT_MAX: u32 = 8;
/// How far another has to be ahead, in hits an access: half a point, which a wrong choice may
/// cost, less as much again for the time that it takes to see it.
const AHEAD: f32 = 0.0025;
/// A shadow's capacities' worth of accesses after which a hit counts half.
const MEMORY: f32 = 8.0;

#[derive(Debug, Clone, Copy)]
struct Chunk {
    /// The tag, and the mark; zero if there is none.
    tag: u32,
    parent: Token,
    /// The parent's tag, to tell whether it still is the parent.
    parent_tag: Tag,
}

impl Chunk {
    const NONE: Self = Self { tag: 0, parent: NIL, parent_tag: 0 };
    /// It is being written.
    const WRITING: u32 = 1 << 31;

    fn tag(self) -> Tag {
        self.tag & !Self::WRITING
    }
}

/// The chain of sampled chunks that is being read.
#[derive(Debug, Clone, Copy)]
struct Reading {
    /// What precedes its first.
    above: Tag,
    last: Tag,
}

/// The policy; see the module.
pub(super) struct Auto {
    capacity: usize,
    candidates: &'static [PolicyKind],
    live: Box<dyn Policy>,
    /// Which of the candidates is live.
    chosen: usize,
    chunks: Vec<Chunk>,
    shadows: Vec<Shadow>,
    /// One chunk in 2^shift is sampled.
    shift: u32,
    slots: usize,
    reading: Reading,
    /// Sampled accesses since the last decision.
    undecided: usize,
}

impl Auto {
    pub(super) fn new(capacity: usize) -> Self {
        Self::over(CANDIDATES, capacity)
    }

    fn over(candidates: &'static [PolicyKind], capacity: usize) -> Self {
        let shift = (capacity / SLOTS_MIN).max(1).ilog2().min(SHIFT_MAX);
        let slots = (capacity >> shift).max(1);
        Self {
            capacity,
            candidates,
            live: candidates[0].build(capacity),
            chosen: 0,
            chunks: Vec::new(),
            shadows: candidates.iter().map(|&kind| Shadow::new(kind, slots, shift)).collect(),
            shift,
            slots,
            reading: Reading { above: 0, last: 0 },
            undecided: 0,
        }
    }

    fn sampled(&self, tag: Tag) -> bool {
        tag & ((1 << self.shift) - 1) == 0
    }

    fn chunk(&self, token: Token) -> Chunk {
        self.chunks[token as usize]
    }

    /// The parent, if it is still the chunk that this one followed.
    fn parent(&self, token: Token) -> Option<Token> {
        let chunk = self.chunk(token);
        let parent = self.chunks.get(chunk.parent as usize)?;
        (parent.tag() == chunk.parent_tag).then_some(chunk.parent)
    }

    /// The tag of the nearest sampled ancestor, or zero.
    fn above(&self, token: Token) -> Tag {
        let mut at = token;
        // A chain of tokens is no longer than there are tokens.
        for _ in 0..self.chunks.len() {
            let Some(parent) = self.parent(at) else { return 0 };
            let tag = self.chunk(parent).tag();
            if self.sampled(tag) {
                return tag;
            }
            at = parent;
        }
        0
    }

    /// Counts an access to a sampled chunk, for every shadow.
    fn count(&mut self, tag: Tag, above: Tag) {
        let step = if self.reading.above == tag {
            self.reading.above = above;
            Step::Up
        } else if above != 0 && self.reading.last == above {
            self.reading.last = tag;
            Step::Down
        } else {
            self.reading = Reading { above, last: tag };
            Step::Away
        };
        for shadow in &mut self.shadows {
            shadow.count(tag, step);
        }
        self.undecided += 1;
        if self.undecided >= self.slots {
            self.undecided = 0;
            self.decide();
        }
    }

    /// Once a shadow's capacity of accesses: is another policy better?
    fn decide(&mut self) {
        let live = self.shadows[self.chosen].hits;
        for shadow in &mut self.shadows {
            shadow.compare(live, (-1.0 / MEMORY).exp2());
        }
        let best = (0..self.shadows.len())
            .max_by(|&a, &b| self.shadows[a].ahead.total_cmp(&self.shadows[b].ahead));
        // As if what is remembered were full from the beginning: little evidence has to be strong.
        let window = MEMORY / std::f32::consts::LN_2 * self.slots as f32;
        if let Some(best) = best.filter(|&best| self.shadows[best].is_ahead(AHEAD * window)) {
            self.follow(best);
            self.shadows.iter_mut().for_each(Shadow::start_anew);
        }
    }

    /// Hands all tokens over to another policy: first to go first, each after those before it in
    /// its prefix; those that are pinned or being written last, as the newest.
    fn follow(&mut self, chosen: usize) {
        let mut order = Vec::new();
        self.live.victims(self.live.evictable(), &|_| false, &mut order);
        let mut evictable = vec![false; self.chunks.len()];
        for &token in &order {
            evictable[token as usize] = true;
        }
        let busy = |token: &Token| self.chunk(*token).tag != 0 && !evictable[*token as usize];
        let all = (0..self.chunks.len() as Token).filter(busy);
        let mut next: Box<dyn Policy> = self.candidates[chosen].build(self.capacity);
        next.learn(&self.shadows[chosen].lessons());
        next.grow(self.chunks.len());
        let mut reached = vec![false; self.chunks.len()];
        let mut admitted = vec![false; self.chunks.len()];
        let mut path = Vec::new();
        for token in order.iter().copied().chain(all) {
            let mut at = Some(token).filter(|&token| !reached[token as usize]);
            while let Some(token) = at {
                reached[token as usize] = true;
                path.push(token);
                at = self.parent(token).filter(|&parent| !reached[parent as usize]);
            }
            while let Some(token) = path.pop() {
                // Parents that are given wrongly may form a ring, which is cut here.
                let parent = self.parent(token).filter(|&parent| admitted[parent as usize]);
                admitted[token as usize] = true;
                let tag = u64::from(self.chunk(token).tag());
                next.admit(token, tag, parent.unwrap_or(NIL));
            }
        }
        for &token in &order {
            next.insert(token);
        }
        for token in (0..self.chunks.len() as Token).filter(busy) {
            if self.chunk(token).tag & Chunk::WRITING == 0 {
                next.insert(token);
                next.acquire(token);
            }
        }
        self.live = next;
        self.chosen = chosen;
    }
}

impl Policy for Auto {
    fn grow(&mut self, tokens: usize) {
        self.live.grow(tokens);
        self.chunks.resize(tokens.max(self.chunks.len()), Chunk::NONE);
    }

    fn admit(&mut self, token: Token, fingerprint: u64, parent: Token) {
        let tag = ((fingerprint >> 33) as u32).max(1);
        let parent_tag = self.chunks.get(parent as usize).map_or(0, |chunk| chunk.tag());
        self.chunks[token as usize] = Chunk { tag: tag | Chunk::WRITING, parent, parent_tag };
        self.live.admit(token, fingerprint, parent);
        if self.sampled(tag) {
            let above = self.above(token);
            self.count(tag, above);
            for shadow in &mut self.shadows {
                shadow.admit(tag, above);
            }
        }
    }

    fn cancel(&mut self, token: Token) {
        let tag = self.chunk(token).tag();
        self.chunks[token as usize] = Chunk::NONE;
        self.live.cancel(token);
        if self.sampled(tag) {
            for shadow in &mut self.shadows {
                shadow.cancel(tag);
            }
        }
    }

    fn insert(&mut self, token: Token) {
        let tag = self.chunk(token).tag();
        self.chunks[token as usize].tag = tag;
        self.live.insert(token);
        if self.sampled(tag) {
            for shadow in &mut self.shadows {
                shadow.insert(tag);
            }
        }
    }

    fn touch(&mut self, token: Token, repeat: bool) {
        self.live.touch(token, repeat);
        let tag = self.chunk(token).tag();
        if self.sampled(tag) {
            let above = self.above(token);
            if !repeat {
                self.count(tag, above);
            }
            for shadow in &mut self.shadows {
                shadow.touch(tag, above, repeat);
            }
        }
    }

    fn acquire(&mut self, token: Token) {
        self.live.acquire(token);
    }

    fn release(&mut self, token: Token) {
        self.live.release(token);
    }

    fn remove(&mut self, token: Token, fingerprint: u64, removal: Removal) {
        self.chunks[token as usize] = Chunk::NONE;
        self.live.remove(token, fingerprint, removal);
    }

    fn victims(
        &mut self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    ) {
        self.live.victims(count, protected, victims);
    }

    fn evictable(&self) -> usize {
        self.live.evictable()
    }

    fn holds(&self, token: Token) -> bool {
        self.live.holds(token)
    }

    fn heap_bytes(&self) -> usize {
        self.live.heap_bytes()
            + self.chunks.capacity() * size_of::<Chunk>()
            + self.shadows.capacity() * size_of::<Shadow>()
            + self.shadows.iter().map(Shadow::heap_bytes).sum::<usize>()
    }

    fn validate(&self) -> Result<(), String> {
        self.live.validate()?;
        for shadow in &self.shadows {
            shadow.validate()?;
        }
        for (token, chunk) in self.chunks.iter().enumerate() {
            if self.live.holds(token as Token) && (chunk.tag == 0 || chunk.tag != chunk.tag()) {
                return Err(format!("token {token} is evictable and marked {:#x}", chunk.tag));
            }
        }
        Ok(())
    }
}
