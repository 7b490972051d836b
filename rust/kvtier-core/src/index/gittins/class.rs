//! What is known of a chunk when it is used: its class.
//!
//! - *History*: how often it was used, up to three times, and the octave of the gap between its
//!   last two uses. A chunk used once has no gap of its own: what counts is whether its request
//!   began a chain or went on with one, and then how long that one had waited. That is a chat's
//!   pace, told by the chunk that the new one follows.
//! - *Depth*: how far it is from the head of its prefix, which at the end of a request is the
//!   request's length.
//! - The *tail*: the last chunk of a request has a history of its own. It is cut where the prompt
//!   ended, so a chat that goes on usually fills it up and never asks for it again.

/// Octaves of gap: the first is below an eighth of the capacity, the last open.
pub(super) const GAPS: u8 = 8;
/// Octaves of gap below the capacity that are told apart.
const GAPS_BELOW: u32 = 3;
/// Depths that are told apart, each four times the one before.
const DEPTHS: u8 = 5;
const TAILS: u8 = 2;
const CONTINUED: u8 = 1;
const TWICE: u8 = CONTINUED + GAPS;
const OFTEN: u8 = TWICE + GAPS;
const TAIL: u8 = OFTEN + GAPS;
const HISTORIES: u8 = TAIL + TAILS;
/// Classes in all.
pub(super) const CLASSES: usize = HISTORIES as usize * DEPTHS as usize;

/// Gaps to octaves, for one capacity.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gaps {
    first: u32,
}

impl Gaps {
    pub(super) fn new(capacity: usize) -> Self {
        Self { first: capacity.max(1).ilog2().saturating_sub(GAPS_BELOW) }
    }

    /// The octave of a gap.
    pub(super) fn octave(self, gap: u32) -> u8 {
        let octave = gap.max(1).ilog2() + 1;
        (octave.saturating_sub(self.first) as u8).min(GAPS - 1)
    }
}

/// How often a chunk was used, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum History {
    /// Used once, by a request whose first chunk it was, or followed.
    New,
    /// Used once, by a request that went on with a chain that had waited so long.
    Continued(u8),
    /// Used twice.
    Twice(u8),
    /// Used more often.
    Often(u8),
    /// The last chunk of a request; used before or not.
    Tail(bool),
}

/// A class, packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Class(u8);

impl Class {
    /// Histories in all.
    pub(super) const HISTORIES: usize = HISTORIES as usize;
    /// Histories, whatever the gap.
    pub(super) const USES: usize = 5;
    /// Pairs of these and a depth.
    pub(super) const USES_DEPTHS: usize = Self::USES * DEPTHS as usize;
    /// A chunk in no class yet.
    pub(super) const NONE: Self = Self(0);

    pub(super) fn new(history: History, depth: u16) -> Self {
        let history = match history {
            History::New => 0,
            History::Continued(gap) => CONTINUED + gap,
            History::Twice(gap) => TWICE + gap,
            History::Often(gap) => OFTEN + gap,
            History::Tail(again) => TAIL + u8::from(again),
        };
        let depth = (depth.max(1).ilog2() / 2) as u8;
        Self(history * DEPTHS + depth.min(DEPTHS - 1))
    }

    /// The class of a tail with this history.
    pub(super) fn of_tail(self) -> Self {
        let again = match self.history() {
            History::New | History::Continued(_) | History::Tail(false) => 0,
            History::Twice(_) | History::Often(_) | History::Tail(true) => 1,
        };
        Self((TAIL + again) * DEPTHS + self.0 % DEPTHS)
    }

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }

    pub(super) fn from_index(index: u8) -> Self {
        Self(index)
    }

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }

    pub(super) fn history(self) -> History {
        let history = self.0 / DEPTHS;
        match history {
            0 => History::New,
            CONTINUED..TWICE => History::Continued(history - CONTINUED),
            TWICE..OFTEN => History::Twice(history - TWICE),
            OFTEN..TAIL => History::Often(history - OFTEN),
            _ => History::Tail(history > TAIL),
        }
    }

    /// The number of its history.
    pub(super) fn history_index(self) -> usize {
        (self.0 / DEPTHS) as usize
    }

    /// The number of its history, whatever the gap.
    pub(super) fn uses(self) -> usize {
        match self.history() {
            History::New => 0,
            History::Continued(_) => 1,
            History::Twice(_) => 2,
            History::Often(_) => 3,
            History::Tail(_) => 4,
        }
    }

    /// The number of its uses and depth.
    pub(super) fn uses_depth(self) -> usize {
        self.uses() * DEPTHS as usize + (self.0 % DEPTHS) as usize
    }

    /// The histories with as many uses, an octave of gap away.
    pub(super) fn neighbours(self) -> impl Iterator<Item = usize> {
        let gap = match self.history() {
            History::Continued(gap) | History::Twice(gap) | History::Often(gap) => Some(gap),
            History::New | History::Tail(_) => None,
        };
        let below = gap.filter(|&gap| gap > 0).map(|_| self.history_index() - 1);
        let above = gap.filter(|&gap| gap + 1 < GAPS).map(|_| self.history_index() + 1);
        below.into_iter().chain(above)
    }
}
