//! Evict what is least worth waiting for: the Gittins index over learned reuse hazards.
//!
//! Every use of a chunk begins a *life* of a [`class`]: what is known of it then. How lives of a
//! class go on, the chance of a hit at each age, is learned while they are lived, inside and, as
//! ghosts, outside ([`hazard`]). The rank of a class at an age is its Gittins index: the greatest,
//! over horizons, of the chance of a hit within the horizon over the expected time of waiting for
//! it. Time is counted in block accesses: admissions, and uses that are no repeats.
//!
//! Only leaves go: a chunk with a resident child in its prefix chain would make the child
//! worthless. If no leaf is free to go, the one that has been none for longest goes.
//!
//! # How it works
//! - Evictable leaves are in [`cells`], a list per class and age bucket, so an eviction takes the
//!   back of the lowest cell. Evictable chunks that are no leaves are *parked* in one list.
//! - Every access looks at a few chunks and ghosts, so that a census of all is complete once every
//!   eighth of the capacity (or [`PERIOD`], whichever is more): then ranks are computed anew,
//!   cells sorted, and chunks that have grown older moved on to the next bucket.
//!
//! # Invariants
//! - A leaf that may go is in the cell of its class and bucket, a parked one in `parked`, every
//!   other token in no list.
//! - `children` counts the tokens whose parent is this one, in this generation. A token that left
//!   while it had children is of another generation when it comes back, so they are orphans then,
//!   and nobody's (unless 65,536 such departures pass while they stay).
//!
//! # Cost
//! Every operation is O(1) amortised: a victim is the back of the first occupied cell, and the
//! estimate (a tenth of a millisecond) is shared by at least [`PERIOD`] accesses. 28 bytes a
//! token; ghosts add 24 a slot (two of twelve bytes; 192 KiB at least) once something is evicted;
//! tables take 160 KiB, whatever the capacity. The clock is 32 bits of accesses: a chunk that is
//! left alone for four billion of them looks young once more.

mod cells;
mod class;
mod ghosts;
mod hazard;
mod life;
#[cfg(test)]
mod tests;

use super::list::{Links, List};
use super::policy::{Policy, Removal};
use super::{NIL, Token};
use cells::{Cells, cell};
use class::{Class, Gaps, History};
use ghosts::Ghosts;
use hazard::{AGES, Ages, Hazards};
use life::{Life, Place};

/// Ghosts a slot.
const GHOSTS: usize = 2;
/// Ghosts at least: a small index would else never see a chat's next turn.
const GHOSTS_MIN: usize = 1 << 14;
/// Accesses between two estimates, at least: they cost about as much as that many evictions.
const PERIOD: usize = 1 << 10;
/// Accesses between two looks at who has grown older, at least: less than one request has.
const MIGRATION: usize = 1 << 3;
/// Capacities' worth of accesses after which what was learned counts half: long against a stay,
/// short against a day.
const MEMORY: usize = 16;
/// Accesses after which it does, at least: some thousand requests.
const MEMORY_MIN: usize = 1 << 17;

/// The policy; see the module.
#[derive(Debug)]
pub(super) struct Gittins {
    now: u32,
    links: Links,
    lives: Vec<Life>,
    cells: Cells,
    parked: List,
    evictable: usize,
    ages: Ages,
    gaps: Gaps,
    hazards: Hazards,
    ghosts: Ghosts,
    ranks: Vec<f32>,
    /// Accesses between two estimates.
    period: usize,
    /// Accesses between two looks at who has grown older.
    migration: u32,
    /// How far the census is: tokens, then places of ghosts.
    counted: usize,
    census_began: u32,
    /// Protected tokens, while victims are chosen.
    aside: Vec<Token>,
}

impl Gittins {
    /// For an index of `capacity` slots.
    pub(super) fn new(capacity: usize) -> Self {
        Self::of_sample(capacity, 0)
    }

    /// For `capacity` slots that see one chunk in 2^`shift`: least sizes and times are smaller
    /// by that too, so it learns when an index of all would.
    pub(super) fn of_sample(capacity: usize, shift: u32) -> Self {
        let ages = Ages::new(capacity);
        let half_life = (MEMORY * capacity).max(MEMORY_MIN >> shift) as f32;
        let mut policy = Self {
            now: 0,
            links: Links::default(),
            lives: Vec::new(),
            cells: Cells::new(),
            parked: List::default(),
            evictable: 0,
            ages,
            gaps: Gaps::new(capacity),
            hazards: Hazards::new(ages, half_life),
            ghosts: Ghosts::new((GHOSTS * capacity).max(GHOSTS_MIN >> shift)),
            ranks: Vec::new(),
            period: (capacity / 8).max(PERIOD >> shift),
            migration: (capacity / 64).max(MIGRATION >> shift).max(1) as u32,
            counted: 0,
            census_began: 0,
            aside: Vec::new(),
        };
        policy.estimate();
        policy
    }

    fn life(&self, token: Token) -> &Life {
        &self.lives[token as usize]
    }

    fn life_mut(&mut self, token: Token) -> &mut Life {
        &mut self.lives[token as usize]
    }

    /// Time since the last use.
    fn age(&self, token: Token) -> u32 {
        self.now.wrapping_sub(self.life(token).used)
    }

    /// One access more; the census goes on.
    fn tick(&mut self) {
        self.now = self.now.wrapping_add(1);
        let all = self.lives.len() + self.ghosts.len();
        let end = (self.counted + all.div_ceil(self.period)).min(all);
        for at in self.counted..end {
            let (used, class) = if let Some(life) = self.lives.get(at) {
                if matches!(life.place(), Place::Absent | Place::Leaving) {
                    continue;
                }
                (life.used, life.kind())
            } else if let Some(ghost) = self.ghosts.at(at - self.lives.len()) {
                (ghost.used, ghost.class())
            } else {
                continue;
            };
            self.hazards.going(class, self.ages.bucket(self.now.wrapping_sub(used)));
        }
        self.counted = end;
        if self.now.is_multiple_of(self.migration) {
            self.grow_older();
        }
        if end == all && self.now.wrapping_sub(self.census_began) as usize >= self.period {
            self.hazards.close_census(self.now.wrapping_sub(self.census_began));
            self.census_began = self.now;
            self.counted = 0;
            self.estimate();
        }
    }

    /// Computes the ranks.
    fn estimate(&mut self) {
        self.hazards.ranks(&mut self.ranks);
        self.cells.sort(&self.ranks);
    }

    /// Moves leaves to the bucket of their age. A cell is in the order of age but for chunks that
    /// came to it late, so the first that is not due ends its turn.
    fn grow_older(&mut self) {
        for word in 0..self.cells.words() {
            let mut at = None;
            while let Some((bit, cell)) = self.cells.next_occupied(word, at) {
                at = Some(bit);
                while let Some(token) = self.cells.list(cell).back() {
                    if self.ages.bucket(self.age(token)) <= cell % AGES {
                        break;
                    }
                    self.unlist(token);
                    self.list(token, false);
                }
            }
        }
    }

    /// Puts an evictable token where it belongs.
    fn list(&mut self, token: Token, oldest: bool) {
        let bucket = self.ages.bucket(self.age(token));
        let life = &mut self.lives[token as usize];
        if life.children > 0 {
            life.set_place(Place::Parked);
            self.parked.push_front(&mut self.links, token);
        } else {
            life.set_place(Place::Leaf(bucket as u8));
            let cell = cell(life.kind().index(), bucket);
            self.cells.push(&mut self.links, cell, token, oldest);
        }
        self.evictable += 1;
    }

    /// Takes a token out of its list, if it is in one; whether it was.
    fn unlist(&mut self, token: Token) -> bool {
        let life = &mut self.lives[token as usize];
        match life.place() {
            Place::Parked => self.parked.remove(&mut self.links, token),
            Place::Leaf(bucket) => {
                let cell = cell(life.kind().index(), bucket as usize);
                self.cells.remove(&mut self.links, cell, token);
            }
            Place::Absent | Place::Busy | Place::Leaving => return false,
        }
        life.set_place(Place::Busy);
        self.evictable -= 1;
        true
    }

    /// Lists a token again after what decides on its place has changed.
    fn relist(&mut self, token: Token, oldest: bool) {
        if self.unlist(token) {
            self.list(token, oldest);
        }
    }

    /// The parent, if it is still the chunk that this one followed.
    fn parent(&self, token: Token) -> Option<Token> {
        let life = self.life(token);
        let parent = self.lives.get(life.parent as usize)?;
        (parent.generation == life.parent_generation).then_some(life.parent)
    }

    /// Ends the stay of a token: its parent has a child less, its children have none.
    fn leave(&mut self, token: Token) {
        if let Some(parent) = self.parent(token) {
            let life = self.life_mut(parent);
            life.children = life.children.saturating_sub(1);
            if life.children == 0 {
                // Its child was the oldest of its cell, and is of about the same age.
                self.relist(parent, true);
            }
        }
        let life = self.life_mut(token);
        life.parent = NIL;
        if life.children > 0 {
            life.children = 0;
            life.generation = life.generation.wrapping_add(1);
        }
        life.set_place(Place::Absent);
    }

    /// The class of a chunk used again `gap` after a life of class `before`.
    fn again(&self, before: Class, gap: u32, depth: u16) -> Class {
        let gap = self.gaps.octave(gap);
        let history = match before.history() {
            History::New | History::Continued { .. } | History::Tail(false) => History::Twice(gap),
            History::Twice(_) | History::Often(_) | History::Tail(true) => History::Often(gap),
        };
        Class::new(history, depth)
    }

    /// What a chunk that was never seen before inherits from the one it follows.
    fn inherited(&self, parent: Token) -> History {
        let Some(life) = self.lives.get(parent as usize) else { return History::New };
        let age = self.age(parent);
        let waited = match life.class.history() {
            History::Twice(gap) | History::Often(gap) | History::Continued(gap) => Some(gap),
            History::New | History::Tail(_) => None,
        };
        if self.same_request(parent) {
            waited.map_or(History::New, History::Continued)
        } else if self.ages.bucket(age) == 0 {
            // Perhaps the same request too, in an engine that runs many at a time.
            History::Continued(self.gaps.octave(age).max(waited.unwrap_or(0)))
        } else {
            History::Continued(self.gaps.octave(age))
        }
    }

    /// Whether a chunk was surely used by the request that now goes on with it: since its last
    /// use there was only time for that request's own prefix.
    fn same_request(&self, token: Token) -> bool {
        self.age(token) <= u32::from(self.life(token).depth) + 1
    }

    /// A child of `parent` is coming.
    fn follow(&mut self, parent: Token) {
        // A parent of this request is no tail, and never was; one that waited was a tail until
        // now, and ends its life as one when it is touched.
        let same = self.same_request(parent);
        let listed = self.unlist(parent);
        let life = self.life_mut(parent);
        life.children += 1;
        life.place |= if same { Life::FOLLOWED } else { Life::FOLLOWED_SINCE };
        if listed {
            self.list(parent, false);
        }
    }
}

impl Policy for Gittins {
    fn grow(&mut self, tokens: usize) {
        self.links.grow(tokens);
        self.lives.resize(tokens.max(self.lives.len()), Life::NONE);
    }

    fn admit(&mut self, token: Token, fingerprint: u64, parent: Token) {
        self.tick();
        let before = self.lives.get(parent as usize);
        let depth = before.map_or(0, |life| life.depth).saturating_add(1);
        let parent_generation = before.map_or(0, |life| life.generation);
        let (mut class, mut flags) = (Class::new(self.inherited(parent), depth), 0);
        if let Some(ghost) = self.ghosts.take(fingerprint) {
            let gap = self.now.wrapping_sub(ghost.used);
            self.hazards.hit(ghost.class(), self.ages.bucket(gap));
            class = self.again(ghost.class(), gap, depth);
            if !matches!(ghost.class().history(), History::Tail(_)) {
                flags = Life::FOLLOWED;
            }
        }
        let life = Life {
            used: self.now,
            parent,
            children: 0,
            parent_generation,
            generation: self.life(token).generation,
            depth,
            class,
            place: Life::BUSY | flags,
        };
        *self.life_mut(token) = life;
        if parent != NIL {
            self.follow(parent);
        }
    }

    fn cancel(&mut self, token: Token) {
        self.leave(token);
    }

    fn insert(&mut self, token: Token) {
        self.list(token, false);
    }

    fn touch(&mut self, token: Token, repeat: bool) {
        let listed = self.unlist(token);
        if !repeat {
            self.tick();
            let gap = self.age(token);
            let life = *self.life(token);
            self.hazards.hit(life.kind(), self.ages.bucket(gap));
            let class = self.again(life.class, gap, life.depth);
            let life = self.life_mut(token);
            life.class = class;
            if life.place & Life::FOLLOWED_SINCE != 0 {
                life.place |= Life::FOLLOWED;
            }
        }
        let now = self.now;
        self.life_mut(token).used = now;
        if listed {
            self.list(token, false);
        }
    }

    fn acquire(&mut self, token: Token) {
        self.unlist(token);
    }

    fn release(&mut self, token: Token) {
        self.list(token, false);
    }

    fn remove(&mut self, token: Token, fingerprint: u64, removal: Removal) {
        if self.unlist(token) {
            self.leave(token);
        }
        let life = *self.life(token);
        if removal == Removal::Evicted
            && let Some(lost) = self.ghosts.put(fingerprint, life.used, life.kind(), self.now)
        {
            let bucket = self.ages.bucket(self.now.wrapping_sub(lost.used));
            self.hazards.lost(lost.class(), bucket);
        }
        self.life_mut(token).set_place(Place::Absent);
    }

    fn victims(
        &mut self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    ) {
        let mut aside = std::mem::take(&mut self.aside);
        let wanted = victims.len() + count;
        while victims.len() < wanted {
            let leaf = self.cells.lowest().and_then(|cell| self.cells.list(cell).back());
            let Some(token) = leaf.or_else(|| self.parked.back()) else { break };
            self.unlist(token);
            if protected(token) {
                aside.push(token);
                continue;
            }
            self.leave(token);
            self.life_mut(token).set_place(Place::Leaving);
            victims.push(token);
        }
        for &token in aside.iter().rev() {
            self.list(token, true);
        }
        aside.clear();
        self.aside = aside;
    }

    fn lessons(&self) -> Vec<f32> {
        self.hazards.lessons().collect()
    }

    fn learn(&mut self, lessons: &[f32]) {
        self.hazards.learn(lessons);
        self.estimate();
    }

    fn evictable(&self) -> usize {
        self.evictable
    }

    fn holds(&self, token: Token) -> bool {
        matches!(self.life(token).place(), Place::Parked | Place::Leaf(_))
    }

    fn heap_bytes(&self) -> usize {
        self.links.heap_bytes()
            + self.lives.capacity() * size_of::<Life>()
            + self.cells.heap_bytes()
            + self.hazards.heap_bytes()
            + self.ghosts.heap_bytes()
            + self.ranks.capacity() * size_of::<f32>()
            + self.aside.capacity() * size_of::<Token>()
    }

    fn validate(&self) -> Result<(), String> {
        let in_cells = self.cells.validate(&self.links)?;
        self.parked.validate(&self.links)?;
        if in_cells + self.parked.len() != self.evictable {
            return Err(format!(
                "{in_cells} in cells and {} parked are not {}",
                self.parked.len(),
                self.evictable
            ));
        }
        let mut children = vec![0; self.lives.len()];
        for token in 0..self.lives.len() as Token {
            let here = !matches!(self.life(token).place(), Place::Absent | Place::Leaving);
            if let Some(parent) = self.parent(token).filter(|_| here) {
                children[parent as usize] += 1;
            }
        }
        for (token, (life, &children)) in self.lives.iter().zip(&children).enumerate() {
            if life.children != children {
                return Err(format!(
                    "token {token} has {children} children, not {}",
                    life.children
                ));
            }
            let listed = self.links.is_linked(token as Token);
            let right = match life.place() {
                Place::Leaf(bucket) => listed && children == 0 && (bucket as usize) < AGES,
                Place::Parked => listed && children > 0,
                Place::Absent => !listed && children == 0 && life.parent == NIL,
                Place::Busy => !listed,
                Place::Leaving => false,
            };
            if !right {
                return Err(format!("token {token} is not where {life:?} belongs"));
            }
        }
        for token in self.parked.iter_back(&self.links) {
            if self.life(token).place() != Place::Parked {
                return Err(format!("token {token} is parked and does not know"));
            }
        }
        Ok(())
    }
}
