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

/// Octaves of gap: the first is below a sixteenth of the capacity, the last open.
pub(super) const GAPS: u8 = 10;
/// Octaves of gap below the capacity that are told apart.
const GAPS_BELOW: u32 = 4;
/// Depths that are told apart, each four times the one before.
const DEPTHS: u8 = 5;
const TAILS: u8 = 2;
/// Histories: began a chain; went on with one; two uses; three uses; tails.
const HISTORIES: u8 = 1 + 3 * GAPS + TAILS;
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
    pub(super) const HISTORIES: usize = HISTORIES as usize;
    pub(super) const USES: usize = 5;

    pub(super) fn new(history: History, depth: u16) -> Self {
        let history = match history {
            History::New => 0,
            History::Continued(gap) => 1 + gap,
            History::Twice(gap) => 1 + GAPS + gap,
            History::Often(gap) => 1 + 2 * GAPS + gap,
            History::Tail(again) => 1 + 3 * GAPS + u8::from(again),
        };
        let depth = (depth.max(1).ilog2() / 2) as u8;
        Self(history * DEPTHS + depth.min(DEPTHS - 1))
    }

    /// A chunk in no class yet.
    pub(super) const NONE: Self = Self(0);

    /// The class of a tail with this history.
    pub(super) fn of_tail(self) -> Self {
        let again = !matches!(
            self.unpack(),
            History::New | History::Continued(_) | History::Tail(false)
        );
        Self((1 + 3 * GAPS + u8::from(again)) * DEPTHS + self.0 % DEPTHS)
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

    pub(super) fn history(self) -> usize {
        (self.0 / DEPTHS) as usize
    }

    pub(super) fn unpack(self) -> History {
        let history = self.0 / DEPTHS;
        match history.checked_sub(1) {
            None => History::New,
            Some(at) => match (at / GAPS, at % GAPS) {
                (0, gap) => History::Continued(gap),
                (1, gap) => History::Twice(gap),
                (2, gap) => History::Often(gap),
                (_, again) => History::Tail(again == 1),
            },
        }
    }

    /// The count of uses, whatever the gap: the class to fall back on.
    pub(super) fn uses_index(self) -> usize {
        match self.unpack() {
            History::New => 0,
            History::Continued(_) => 1,
            History::Twice(_) => 2,
            History::Often(_) => 3,
            History::Tail(_) => 4,
        }
    }

    /// The classes an octave of gap away, at the same depth.
    pub(super) fn neighbours(self) -> impl Iterator<Item = Self> {
        let gap = match self.unpack() {
            History::Continued(gap) | History::Twice(gap) | History::Often(gap) => Some(gap),
            History::New | History::Tail(_) => None,
        };
        let below = gap.filter(|&gap| gap > 0).map(|_| Self(self.0 - DEPTHS));
        let above = gap.filter(|&gap| gap + 1 < GAPS).map(|_| Self(self.0 + DEPTHS));
        below.into_iter().chain(above)
    }
}
