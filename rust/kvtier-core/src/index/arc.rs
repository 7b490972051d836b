//! Adaptive replacement (ARC): balances what was used once against what was used again.
//!
//! N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
//! Tokens used once are in the *recent* half (the paper's T1), others in the *frequent* half
//! (T2); each half has ghosts (B1, B2), each list is in order of use. A newcomer with a ghost
//! moves the target size of the recent half (p) towards the half whose ghost it was, and enters
//! the frequent half.
//!
//! # Several newcomers at once
//! The index admits all newcomers of a call, then asks for victims, then evicts them, and
//! commits the newcomers later, one by one. So a newcomer adapts the target and takes its seat
//! in a half when it is admitted, and REPLACE is the paper's for the last newcomer, with the
//! others seated already. With one newcomer a call this is the paper's algorithm to the letter.
//! A token that is being written or is pinned keeps its seat, but is in no list; after a pin it
//! comes back in front.
//!
//! # Invariants
//! - Between calls |T1| + |B1| <= c and |T1| + |T2| + |B1| + |B2| <= 2c, seats counted.
//! - The target is within 0 and c.
//!
//! Every operation is O(1), victims O(victims + protected). Memory a token: 8 (links) + 1 (half),
//! and 23 to 28 a ghost, of which there are at most as many as tokens once the index is full.

use super::Token;
use super::ghosts::Ghosts;
use super::list::{Links, List};
use super::policy::{Policy, Removal, grow_to};

/// Where a token sits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Seat {
    #[default]
    None,
    Recent,
    Frequent,
}

/// One half: its evictable tokens and its ghosts, newest in front.
#[derive(Debug, Default)]
struct Half {
    list: List,
    ghosts: List,
    /// Seats taken: evictable tokens, pinned ones, and those being written.
    seats: usize,
}

impl Half {
    /// Seats and ghosts.
    fn extent(&self) -> usize {
        self.seats + self.ghosts.len()
    }
}

/// What a newcomer was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Newcomer {
    Unknown,
    RecentGhost,
    FrequentGhost,
}

/// Two halves and the target between them.
#[derive(Debug)]
pub(super) struct Arc {
    capacity: usize,
    /// Size to aim at for the recent half.
    target: f64,
    links: Links,
    seats: Vec<Seat>,
    recent: Half,
    frequent: Half,
    /// A ghost's mark is the half that it left.
    ghosts: Ghosts<Seat>,
    /// The last newcomer, for REPLACE.
    last: Newcomer,
}

impl Arc {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            target: 0.0,
            links: Links::default(),
            seats: Vec::new(),
            recent: Half::default(),
            frequent: Half::default(),
            ghosts: Ghosts::new(capacity),
            last: Newcomer::Unknown,
        }
    }

    /// Puts an unlinked token in front of its half.
    fn link(&mut self, token: Token) {
        let half = match self.seats[token as usize] {
            Seat::None => return,
            Seat::Recent => &mut self.recent,
            Seat::Frequent => &mut self.frequent,
        };
        half.list.push_front(&mut self.links, token);
    }

    /// Takes a token out of its half's list; it keeps its seat.
    fn unlink(&mut self, token: Token) {
        let half = match self.seats[token as usize] {
            Seat::None => return,
            Seat::Recent => &mut self.recent,
            Seat::Frequent => &mut self.frequent,
        };
        half.list.remove(&mut self.links, token);
    }

    /// Gives a token another seat, or none.
    fn seat(&mut self, token: Token, seat: Seat) {
        let before = std::mem::replace(&mut self.seats[token as usize], seat);
        self.recent.seats += usize::from(seat == Seat::Recent);
        self.frequent.seats += usize::from(seat == Seat::Frequent);
        self.recent.seats -= usize::from(before == Seat::Recent);
        self.frequent.seats -= usize::from(before == Seat::Frequent);
    }

    /// Forgets ghosts that the paper's bounds leave no room for. Seats past them are about to be
    /// left by victims.
    fn trim(&mut self) {
        let room = self.capacity.saturating_sub(self.recent.seats);
        self.ghosts.truncate(&mut self.recent.ghosts, room);
        let recent = self.recent.extent().min(self.capacity);
        let room = (2 * self.capacity).saturating_sub(recent + self.frequent.seats);
        self.ghosts.truncate(&mut self.frequent.ghosts, room);
    }
}

/// The paper's step of adaptation.
fn learning_rate(other: usize, own: usize) -> f64 {
    (other as f64 / own as f64).max(1.0)
}

impl Policy for Arc {
    fn grow(&mut self, tokens: usize) {
        self.links.grow(tokens);
        grow_to(&mut self.seats, tokens, Seat::None);
    }

    fn admit(&mut self, token: Token, fingerprint: u64, _parent: Token) {
        self.last = Newcomer::Unknown;
        if let Some(ghost) = self.ghosts.find(fingerprint) {
            let (recent, frequent) = (self.recent.ghosts.len(), self.frequent.ghosts.len());
            if self.ghosts.mark(ghost) == Seat::Recent {
                let target = self.target + learning_rate(frequent, recent);
                self.target = target.min(self.capacity as f64);
                self.ghosts.remove(&mut self.recent.ghosts, ghost);
                self.last = Newcomer::RecentGhost;
            } else {
                let target = self.target - learning_rate(recent, frequent);
                self.target = target.max(0.0);
                self.ghosts.remove(&mut self.frequent.ghosts, ghost);
                self.last = Newcomer::FrequentGhost;
            }
        }
        let new = self.last == Newcomer::Unknown;
        self.seat(token, if new { Seat::Recent } else { Seat::Frequent });
        self.trim();
    }

    fn cancel(&mut self, token: Token) {
        self.seat(token, Seat::None);
    }

    fn insert(&mut self, token: Token) {
        self.link(token);
    }

    fn touch(&mut self, token: Token, repeat: bool) {
        let evictable = self.links.is_linked(token);
        if evictable {
            self.unlink(token);
        }
        if !repeat {
            self.seat(token, Seat::Frequent);
        }
        if evictable {
            self.link(token);
        }
    }

    fn acquire(&mut self, token: Token) {
        self.unlink(token);
    }

    fn release(&mut self, token: Token) {
        self.link(token);
    }

    fn remove(&mut self, token: Token, fingerprint: u64, removal: Removal) {
        self.unlink(token);
        let left = self.seats[token as usize];
        self.seat(token, Seat::None);
        if removal == Removal::Evicted {
            let half = if left == Seat::Recent { &mut self.recent } else { &mut self.frequent };
            self.ghosts.push(&mut half.ghosts, fingerprint, left);
            self.trim();
        }
    }

    fn victims(
        &mut self,
        count: usize,
        protected: &dyn Fn(Token) -> bool,
        victims: &mut Vec<Token>,
    ) {
        let oldest = |half: &Half| half.list.iter_back(&self.links);
        let mut recent = oldest(&self.recent).filter(|&token| !protected(token)).peekable();
        let mut frequent = oldest(&self.frequent).filter(|&token| !protected(token)).peekable();
        let newcomer = usize::from(self.last == Newcomer::Unknown);
        let mut seats = self.recent.seats.saturating_sub(newcomer);
        for _ in 0..count {
            let size = seats as f64;
            // On a tie the half whose ghost came back keeps its own.
            let over = match self.last {
                Newcomer::FrequentGhost => size >= self.target,
                _ => size > self.target,
            };
            let from_recent = (over && recent.peek().is_some()) || frequent.peek().is_none();
            let victim = if from_recent { recent.next() } else { frequent.next() };
            seats = seats.saturating_sub(usize::from(from_recent));
            victims.extend(victim);
        }
    }

    fn evictable(&self) -> usize {
        self.recent.list.len() + self.frequent.list.len()
    }

    fn holds(&self, token: Token) -> bool {
        self.links.is_linked(token)
    }

    fn heap_bytes(&self) -> usize {
        self.links.heap_bytes()
            + self.seats.capacity() * size_of::<Seat>()
            + self.ghosts.heap_bytes()
    }

    fn validate(&self) -> Result<(), String> {
        for (half, seat) in [(&self.recent, Seat::Recent), (&self.frequent, Seat::Frequent)] {
            half.list.validate(&self.links)?;
            if let Some(token) =
                half.list.iter_back(&self.links).find(|&token| self.seats[token as usize] != seat)
            {
                return Err(format!("token {token} is in the list of {seat:?} without a seat"));
            }
            let seats = self.seats.iter().filter(|&&other| other == seat).count();
            if seats != half.seats {
                return Err(format!("{seats} seats are {seat:?}, kept {}", half.seats));
            }
        }
        self.ghosts.validate(&[
            (&self.recent.ghosts, &|mark| mark == Seat::Recent),
            (&self.frequent.ghosts, &|mark| mark == Seat::Frequent),
        ])?;
        let (recent, frequent) = (self.recent.extent(), self.frequent.extent());
        if recent > self.capacity || recent + frequent > 2 * self.capacity {
            return Err(format!(
                "seats and ghosts ({recent} recent, {frequent} frequent) pass the bounds of {}",
                self.capacity
            ));
        }
        if !(0.0..=self.capacity as f64).contains(&self.target) {
            return Err(format!("a target of {} is not within the capacity", self.target));
        }
        Ok(())
    }
}
