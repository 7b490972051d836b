//! LIRS with the stack as a list.

use crate::{Model, take};

/// LIRS with the stack as a list. What is in the stack and not resident is a ghost.
#[derive(Default)]
pub(crate) struct Lirs {
    c: usize,
    stack: Vec<u8>,
    queue: Vec<u8>,
    /// Inserted LIR keys.
    lir: Vec<u8>,
    /// Admitted keys, and whether they will be LIR.
    writing: Vec<(u8, bool)>,
}

impl Lirs {
    /// For so many slots.
    pub(crate) fn new(c: usize) -> Self {
        Self { c, ..Self::default() }
    }

    fn share(&self) -> usize {
        self.c - (self.c / 100).max(1)
    }

    fn prune(&mut self) {
        if !self.lir.is_empty() {
            while !self.lir.contains(&self.stack[0]) {
                self.stack.remove(0);
            }
        }
    }

    fn put_on_top(&mut self, key: u8) {
        take(&mut self.stack, key);
        self.stack.push(key);
    }

    fn promote(&mut self, key: u8) {
        self.put_on_top(key);
        self.lir.push(key);
        if self.lir.len() > self.share() {
            self.prune();
            let bottom = self.stack.remove(0);
            take(&mut self.lir, bottom);
            self.queue.push(bottom);
        }
    }

    fn bound(&mut self) {
        let ghosts: Vec<u8> =
            self.stack.iter().copied().filter(|&key| !self.resident(key)).collect();
        if ghosts.len() > 2 * self.c {
            take(&mut self.stack, ghosts[0]);
        }
    }
}

impl Model for Lirs {
    fn resident(&self, key: u8) -> bool {
        self.lir.contains(&key)
            || self.queue.contains(&key)
            || self.writing.iter().any(|&(writing, _)| writing == key)
    }

    fn admit(&mut self, key: u8) {
        let ghost = take(&mut self.stack, key);
        let residents = self.lir.len() + self.queue.len() + self.writing.len() + 1;
        self.writing.push((key, ghost || residents <= self.share()));
    }

    fn evict(&mut self, count: usize, spare: &[u8]) -> Vec<u8> {
        let in_stack = |key: &&u8| self.lir.contains(key);
        let bottom_up: Vec<u8> = self.stack.iter().filter(in_stack).copied().collect();
        let order = self.queue.iter().copied().chain(bottom_up);
        let chosen: Vec<u8> = order.filter(|key| !spare.contains(key)).take(count).collect();
        for &key in &chosen {
            if take(&mut self.lir, key) {
                take(&mut self.stack, key);
            }
            take(&mut self.queue, key);
            self.prune();
            self.bound();
        }
        chosen
    }

    fn insert(&mut self, key: u8) {
        let at = self.writing.iter().position(|&(writing, _)| writing == key).expect("admitted");
        if self.writing.remove(at).1 {
            self.promote(key);
        } else {
            self.put_on_top(key);
            self.queue.push(key);
        }
        self.prune();
    }

    fn touch(&mut self, key: u8, repeat: bool) {
        let known = self.stack.contains(&key);
        if self.lir.contains(&key) {
            self.put_on_top(key);
        } else if known && !repeat {
            take(&mut self.queue, key);
            self.promote(key);
        } else {
            self.put_on_top(key);
            take(&mut self.queue, key);
            self.queue.push(key);
        }
        self.prune();
    }

    fn forget(&mut self, key: u8) {
        if self.writing.iter().any(|&(writing, _)| writing == key) {
            self.writing.retain(|&(writing, _)| writing != key);
            return;
        }
        take(&mut self.lir, key);
        take(&mut self.queue, key);
        take(&mut self.stack, key);
        self.prune();
    }
}
