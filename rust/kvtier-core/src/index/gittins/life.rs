//! What the policy keeps of a token: twenty bytes.

use super::super::{NIL, Token};
use super::class::Class;

/// Where a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Its key is not here.
    Absent,
    /// Being written, or pinned.
    Busy,
    /// Evictable, with resident children.
    Parked,
    /// An evictable leaf, in the cell of this bucket.
    Leaf(u8),
    /// Chosen as a victim.
    Leaving,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Life {
    /// When the last use was.
    pub(super) used: u32,
    pub(super) parent: Token,
    pub(super) children: u32,
    /// Of the parent, when the link was made.
    pub(super) parent_generation: u16,
    pub(super) generation: u16,
    pub(super) depth: u16,
    pub(super) class: Class,
    pub(super) place: u8,
}

impl Life {
    const ABSENT: u8 = 28;
    pub(super) const BUSY: u8 = 29;
    const PARKED: u8 = 30;
    const LEAVING: u8 = 31;
    /// It is followed by another chunk: no tail.
    pub(super) const FOLLOWED: u8 = 64;
    /// It is followed since its last use.
    pub(super) const FOLLOWED_SINCE: u8 = 128;
    const FLAGS: u8 = Self::FOLLOWED | Self::FOLLOWED_SINCE;

    pub(super) const NONE: Self = Self {
        used: 0,
        parent: NIL,
        children: 0,
        parent_generation: 0,
        generation: 0,
        depth: 0,
        class: Class::NONE,
        place: Self::ABSENT,
    };

    pub(super) fn place(&self) -> Place {
        match self.place & !Self::FLAGS {
            Self::ABSENT => Place::Absent,
            Self::BUSY => Place::Busy,
            Self::PARKED => Place::Parked,
            Self::LEAVING => Place::Leaving,
            bucket => Place::Leaf(bucket),
        }
    }

    pub(super) fn set_place(&mut self, place: Place) {
        let place = match place {
            Place::Absent => Self::ABSENT,
            Place::Busy => Self::BUSY,
            Place::Parked => Self::PARKED,
            Place::Leaving => Self::LEAVING,
            Place::Leaf(bucket) => bucket,
        };
        self.place = self.place & Self::FLAGS | place;
    }

    /// The class that it is counted and ranked in.
    pub(super) fn kind(&self) -> Class {
        if self.place & Self::FOLLOWED != 0 { self.class } else { self.class.of_tail() }
    }
}
