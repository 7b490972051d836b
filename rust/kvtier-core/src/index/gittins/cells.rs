//! Leaves that may go, in lists by class and age bucket, and the lists in the order of their
//! rank.
//!
//! Within a cell the oldest is at the back. The order of cells is computed when ranks are, and a
//! bit a cell, in that order, says whether anybody is in: the first to go is found without a look
//! at any chunk.

use super::super::Token;
use super::super::list::{Links, List};
use super::class::CLASSES;
use super::hazard::AGES;

/// Cells in all.
const CELLS: usize = CLASSES * AGES;

/// The lists.
#[derive(Debug)]
pub(super) struct Cells {
    lists: Vec<List>,
    /// Cells by rank, lowest first, and where each one is in that order.
    order: Vec<u16>,
    place: Vec<u16>,
    /// By place: whether anybody is in.
    occupied: Vec<u64>,
}

/// The cell of a class and bucket.
pub(super) const fn cell(class: usize, bucket: usize) -> usize {
    class * AGES + bucket
}

impl Cells {
    pub(super) fn new() -> Self {
        Self {
            lists: (0..CELLS).map(|_| List::default()).collect(),
            order: (0..CELLS as u16).collect(),
            place: (0..CELLS as u16).collect(),
            occupied: vec![0; CELLS.div_ceil(64)],
        }
    }

    /// Puts the cells into the order of `ranks`; of equal ones the older bucket goes first.
    pub(super) fn sort(&mut self, ranks: &[f32]) {
        let by = |cell: u16| (ranks[cell as usize], AGES - cell as usize % AGES, cell);
        self.order.sort_unstable_by(|&a, &b| {
            let (a, b) = (by(a), by(b));
            a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2)))
        });
        self.occupied.fill(0);
        for (place, &cell) in self.order.iter().enumerate() {
            self.place[cell as usize] = place as u16;
            if !self.lists[cell as usize].is_empty() {
                self.occupied[place / 64] |= 1 << (place % 64);
            }
        }
    }

    /// Puts a token in as the youngest, or the oldest, of a cell.
    pub(super) fn push(&mut self, links: &mut Links, cell: usize, token: Token, oldest: bool) {
        let list = &mut self.lists[cell];
        if oldest {
            list.push_back(links, token);
        } else {
            list.push_front(links, token);
        }
        let place = self.place[cell] as usize;
        self.occupied[place / 64] |= 1 << (place % 64);
    }

    pub(super) fn remove(&mut self, links: &mut Links, cell: usize, token: Token) {
        let list = &mut self.lists[cell];
        list.remove(links, token);
        if list.is_empty() {
            let place = self.place[cell] as usize;
            self.occupied[place / 64] &= !(1 << (place % 64));
        }
    }

    /// The occupied cell of the lowest rank.
    pub(super) fn lowest(&self) -> Option<usize> {
        let word = self.occupied.iter().position(|&word| word != 0)?;
        let place = word * 64 + self.occupied[word].trailing_zeros() as usize;
        Some(self.order[place] as usize)
    }

    /// How many words of cells there are.
    pub(super) fn words(&self) -> usize {
        self.occupied.len()
    }

    /// The cells of a word that are occupied now.
    pub(super) fn occupied(&self, word: usize) -> impl Iterator<Item = usize> + use<> {
        let order: [u16; 64] =
            std::array::from_fn(|bit| self.order.get(word * 64 + bit).copied().unwrap_or(0));
        let mut bits = self.occupied[word];
        std::iter::from_fn(move || {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits.wrapping_sub(1);
            order.get(bit).map(|&cell| cell as usize)
        })
    }

    pub(super) fn list(&self, cell: usize) -> &List {
        &self.lists[cell]
    }

    /// Occupied cells, later buckets first.
    pub(super) fn heap_bytes(&self) -> usize {
        self.lists.capacity() * size_of::<List>()
            + (self.order.capacity() + self.place.capacity()) * size_of::<u16>()
            + self.occupied.capacity() * size_of::<u64>()
    }

    /// Checks lists, order and bits against one another; the number of members in all.
    pub(super) fn validate(&self, links: &Links) -> Result<usize, String> {
        let mut members = 0;
        for (cell, list) in self.lists.iter().enumerate() {
            list.validate(links)?;
            members += list.len();
            let place = self.place[cell] as usize;
            if self.order[place] as usize != cell {
                return Err(format!("cell {cell} is not at its place {place}"));
            }
            let occupied = self.occupied[place / 64] >> (place % 64) & 1 == 1;
            if occupied == list.is_empty() {
                return Err(format!("cell {cell}: its bit says occupied: {occupied}"));
            }
        }
        Ok(members)
    }
}
