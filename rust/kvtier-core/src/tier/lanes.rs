//! The order of work: loads before stores, and no store starves.
//!
//! A load goes first if there is one; after [`LOADS_IN_A_ROW`] loads with stores waiting, one
//! store does.

use std::collections::VecDeque;

/// Loads that may pass a waiting store.
pub(super) const LOADS_IN_A_ROW: u32 = 8;

/// Which way a piece of work moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Into the primary tier: a request waits for it.
    Load,
    /// Out of it.
    Store,
}

/// Two queues, and whose turn it is.
#[derive(Debug)]
pub(super) struct Lanes<T> {
    loads: VecDeque<T>,
    stores: VecDeque<T>,
    loads_in_a_row: u32,
}

impl<T> Default for Lanes<T> {
    fn default() -> Self {
        Self { loads: VecDeque::new(), stores: VecDeque::new(), loads_in_a_row: 0 }
    }
}

impl<T> Lanes<T> {
    /// Queues work.
    pub(super) fn extend(&mut self, lane: Lane, work: impl Iterator<Item = T>) {
        match lane {
            Lane::Load => self.loads.extend(work),
            Lane::Store => self.stores.extend(work),
        }
    }

    /// Takes what is next.
    pub(super) fn pop(&mut self) -> Option<T> {
        let store_first = self.loads.is_empty()
            || (self.loads_in_a_row >= LOADS_IN_A_ROW && !self.stores.is_empty());
        if store_first {
            self.loads_in_a_row = 0;
            self.stores.pop_front()
        } else {
            self.loads_in_a_row += 1;
            self.loads.pop_front()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_go_first_and_stores_do_not_starve() {
        let mut lanes = Lanes::default();
        lanes.extend(Lane::Store, 100..102);
        lanes.extend(Lane::Load, 0..12);
        let order: Vec<u32> = std::iter::from_fn(|| lanes.pop()).collect();
        assert_eq!(order, [0, 1, 2, 3, 4, 5, 6, 7, 100, 8, 9, 10, 11, 101]);
    }
}
