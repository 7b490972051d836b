//! ARC: the paper's figure 4, and the same for several newcomers at once.

use crate::{Model, oldest, take};

/// ARC for several newcomers at once; keys that are being written have a seat in T1 or T2.
#[derive(Default)]
pub(crate) struct Arc {
    c: usize,
    p: f64,
    t1: Vec<u8>,
    t2: Vec<u8>,
    b1: Vec<u8>,
    b2: Vec<u8>,
    last: u8,
    last_from_b2: bool,
}

impl Arc {
    /// For so many slots.
    pub(crate) fn new(c: usize) -> Self {
        Self { c, ..Self::default() }
    }

    fn bound(&mut self) {
        while self.t1.len() + self.b1.len() > self.c && !self.b1.is_empty() {
            self.b1.remove(0);
        }
        let l1 = (self.t1.len() + self.b1.len()).min(self.c);
        while l1 + self.t2.len() + self.b2.len() > 2 * self.c && !self.b2.is_empty() {
            self.b2.remove(0);
        }
    }
}

impl Model for Arc {
    fn resident(&self, key: u8) -> bool {
        self.t1.contains(&key) || self.t2.contains(&key)
    }

    fn admit(&mut self, key: u8) {
        let (b1, b2) = (self.b1.len() as f64, self.b2.len() as f64);
        self.last = key;
        self.last_from_b2 = false;
        if take(&mut self.b1, key) {
            self.p = (self.p + (b2 / b1).max(1.0)).min(self.c as f64);
            self.t2.push(key);
        } else if take(&mut self.b2, key) {
            self.p = (self.p - (b1 / b2).max(1.0)).max(0.0);
            self.last_from_b2 = true;
            self.t2.push(key);
        } else {
            self.t1.push(key);
        }
        self.bound();
    }

    fn evict(&mut self, count: usize, spare: &[u8]) -> Vec<u8> {
        let mut chosen = Vec::new();
        let (mut t1, mut t2) = (self.t1.clone(), self.t2.clone());
        for _ in 0..count {
            let size = t1.iter().filter(|&&key| key != self.last).count() as f64;
            let over = if self.last_from_b2 { size >= self.p } else { size > self.p };
            let (a, b) = (oldest(&t1, spare), oldest(&t2, spare));
            let victim = if over { a.or(b) } else { b.or(a) }.expect("there are enough");
            take(&mut t1, victim);
            take(&mut t2, victim);
            chosen.push(victim);
        }
        for &key in &chosen {
            if take(&mut self.t1, key) {
                self.b1.push(key);
            } else if take(&mut self.t2, key) {
                self.b2.push(key);
            }
            self.bound();
        }
        chosen
    }

    fn insert(&mut self, key: u8) {
        self.touch(key, true);
    }

    fn touch(&mut self, key: u8, repeat: bool) {
        if take(&mut self.t1, key) {
            if repeat { &mut self.t1 } else { &mut self.t2 }.push(key);
        } else if take(&mut self.t2, key) {
            self.t2.push(key);
        }
    }

    fn forget(&mut self, key: u8) {
        take(&mut self.t1, key);
        take(&mut self.t2, key);
    }
}

/// ARC for one key at a time: figure 4 of the paper, case by case.
#[derive(Default)]
pub(crate) struct ArcOfThePaper {
    c: usize,
    p: f64,
    t1: Vec<u8>,
    t2: Vec<u8>,
    b1: Vec<u8>,
    b2: Vec<u8>,
}

impl ArcOfThePaper {
    /// For so many slots.
    pub(crate) fn new(c: usize) -> Self {
        Self { c, ..Self::default() }
    }

    fn replace(&mut self, key: u8) -> u8 {
        let t1 = self.t1.len() as f64;
        if !self.t1.is_empty() && (t1 > self.p || (self.b2.contains(&key) && t1 >= self.p)) {
            let victim = self.t1.remove(0);
            self.b1.push(victim);
            victim
        } else {
            let victim = self.t2.remove(0);
            self.b2.push(victim);
            victim
        }
    }

    /// What the access evicts.
    pub(crate) fn access(&mut self, key: u8) -> Option<u8> {
        let (b1, b2) = (self.b1.len() as f64, self.b2.len() as f64);
        let mut victim = None;
        // Case I.
        if take(&mut self.t1, key) || take(&mut self.t2, key) {
            self.t2.push(key);
        // Case II.
        } else if self.b1.contains(&key) {
            self.p = (self.p + (b2 / b1).max(1.0)).min(self.c as f64);
            victim = Some(self.replace(key));
            take(&mut self.b1, key);
            self.t2.push(key);
        // Case III.
        } else if self.b2.contains(&key) {
            self.p = (self.p - (b1 / b2).max(1.0)).max(0.0);
            victim = Some(self.replace(key));
            take(&mut self.b2, key);
            self.t2.push(key);
        // Case IV.
        } else {
            let l1 = self.t1.len() + self.b1.len();
            let all = l1 + self.t2.len() + self.b2.len();
            if l1 == self.c {
                if self.t1.len() < self.c {
                    self.b1.remove(0);
                    victim = Some(self.replace(key));
                } else {
                    victim = Some(self.t1.remove(0));
                }
            } else if all >= self.c {
                if all == 2 * self.c {
                    self.b2.remove(0);
                }
                victim = Some(self.replace(key));
            }
            self.t1.push(key);
        }
        victim
    }
}
