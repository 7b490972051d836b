//! S3-FIFO with its queues as lists.

use crate::{KEYS, Model, oldest, take};

/// S3-FIFO; keys that are being written count towards their queue.
#[derive(Default)]
pub(crate) struct S3Fifo {
    c: usize,
    small: Vec<u8>,
    main: Vec<u8>,
    ghosts: Vec<u8>,
    writing_small: Vec<u8>,
    writing_main: Vec<u8>,
    uses: Vec<u8>,
    last: Option<u8>,
}

impl S3Fifo {
    /// For so many slots.
    pub(crate) fn new(c: usize) -> Self {
        Self { c, uses: vec![0; KEYS.into()], ..Self::default() }
    }

    fn small_share(&self) -> usize {
        (self.c / 10).max(1)
    }

    /// Keys in a queue, written or not, without the last newcomer.
    fn size(&self, queue: &[u8], writing: &[u8]) -> usize {
        queue.len() + writing.iter().filter(|&&key| Some(key) != self.last).count()
    }

    fn evict_small(&mut self, spare: &[u8]) -> Option<u8> {
        let key = oldest(&self.small, spare)?;
        take(&mut self.small, key);
        if self.uses[key as usize] <= 1 {
            self.ghosts.push(key);
            return Some(key);
        }
        self.uses[key as usize] = 0;
        self.main.push(key);
        if self.size(&self.main, &self.writing_main) > self.c - self.small_share() {
            return None;
        }
        self.evict_small(spare)
    }

    fn evict_main(&mut self, spare: &[u8]) -> Option<u8> {
        let key = oldest(&self.main, spare)?;
        take(&mut self.main, key);
        if self.uses[key as usize] == 0 {
            return Some(key);
        }
        self.uses[key as usize] -= 1;
        self.main.push(key);
        self.evict_main(spare)
    }

    fn evict_one(&mut self, spare: &[u8]) -> u8 {
        let small = self.size(&self.small, &self.writing_small);
        let victim = if small >= self.small_share() { self.evict_small(spare) } else { None };
        victim
            .or_else(|| self.evict_main(spare))
            .or_else(|| self.evict_small(spare))
            .expect("there are enough")
    }
}

impl Model for S3Fifo {
    fn resident(&self, key: u8) -> bool {
        [&self.small, &self.main, &self.writing_small, &self.writing_main]
            .iter()
            .any(|list| list.contains(&key))
    }

    fn admit(&mut self, key: u8) {
        self.last = Some(key);
        self.uses[key as usize] = 0;
        if take(&mut self.ghosts, key) {
            self.writing_main.push(key);
        } else {
            self.writing_small.push(key);
        }
    }

    fn evict(&mut self, count: usize, spare: &[u8]) -> Vec<u8> {
        let chosen = (0..count).map(|_| self.evict_one(spare)).collect();
        while self.ghosts.len() > self.c - self.small_share() {
            self.ghosts.remove(0);
        }
        chosen
    }

    fn insert(&mut self, key: u8) {
        if take(&mut self.writing_small, key) {
            self.small.push(key);
        }
        if take(&mut self.writing_main, key) {
            self.main.push(key);
        }
    }

    fn touch(&mut self, key: u8, repeat: bool) {
        let uses = &mut self.uses[key as usize];
        *uses = (*uses + u8::from(!repeat)).min(3);
    }

    fn forget(&mut self, key: u8) {
        for list in
            [&mut self.small, &mut self.main, &mut self.writing_small, &mut self.writing_main]
        {
            take(list, key);
        }
    }
}
