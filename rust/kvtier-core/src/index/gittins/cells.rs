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
    /// Cells by rank, lowest first: the bits of the rank, and the cell in the lowest 16.
    order: Vec<u64>,
    /// Where each one is in that order.
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
            order: (0..CELLS as u64).collect(),
            place: (0..CELLS as u16).collect(),
            occupied: vec![0; CELLS.div_ceil(64)],
        }
    }

    /// Puts the cells into the order of `ranks`, none negative; of equal ones the older bucket
    /// goes first.
    pub(super) fn sort(&mut self, ranks: &[f32]) {
        for key in &mut self.order {
            let cell = *key & 0xffff;
            let rank = u64::from(ranks[cell as usize].to_bits());
            let youth = (AGES - cell as usize % AGES) as u64;
            *key = rank << 32 | youth << 16 | cell;
        }
        self.order.sort_unstable();
        self.occupied.fill(0);
        for (place, &key) in self.order.iter().enumerate() {
            let cell = key as u16;
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
        Some(self.cell_at(place))
    }

    /// How many words of cells there are.
    pub(super) fn words(&self) -> usize {
        self.occupied.len()
    }

    /// The cells of a word that are occupied, and those of them that come to be while they are
    /// asked for.
    pub(super) fn next_occupied(
        &self,
        word: usize,
        after: Option<usize>,
    ) -> Option<(usize, usize)> {
        let seen = after.map_or(0, |bit| u64::MAX >> (63 - bit));
        let left = self.occupied[word] & !seen;
        let bit = left.trailing_zeros() as usize;
        (left != 0).then(|| (bit, self.cell_at(word * 64 + bit)))
    }

    fn cell_at(&self, place: usize) -> usize {
        self.order[place] as u16 as usize
    }

    pub(super) fn list(&self, cell: usize) -> &List {
        &self.lists[cell]
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.lists.capacity() * size_of::<List>()
            + self.place.capacity() * size_of::<u16>()
            + (self.order.capacity() + self.occupied.capacity()) * size_of::<u64>()
    }

    /// Checks lists, order and bits against one another; the number of members in all.
    pub(super) fn validate(&self, links: &Links) -> Result<usize, String> {
        let mut members = 0;
        for (cell, list) in self.lists.iter().enumerate() {
            list.validate(links)?;
            members += list.len();
            let place = self.place[cell] as usize;
            if self.cell_at(place) != cell {
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
