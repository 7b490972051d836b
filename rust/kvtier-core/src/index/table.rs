//! The hash table of the index: from a key's hash to its token, and nothing else.
//!
//! Linear probing over one flat array; a bucket is 32 bits of hash and the token, so a probe
//! touches one cache line, and neither deletion nor growth ever reads a key. Deletion shifts
//! back what follows: there are no tombstones, hence no clean-up that would stop an engine's
//! step once in a while. Sized for its capacity at once, within reason, at two thirds full: 12 bytes an entry, and
//! runs of buckets stay short.
//! The pages of buckets that were never used are never touched.

use super::Token;

/// A bucket: the tag in the upper half, the token plus one in the lower. Zero is free.
type Bucket = u64;

const FREE: Bucket = 0;

/// Entries that a table has room for at once, however large it may become: 192 MiB of address
/// space. Growing past it copies from front to back, both tables being in the order of tags.
const PRESIZED: usize = 1 << 24;

/// Tokens by hash.
#[derive(Debug)]
pub(super) struct Table {
    buckets: Vec<Bucket>,
    len: usize,
}

/// The half of a hash that the table keeps.
fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32
}

fn bucket(hash: u64, token: Token) -> Bucket {
    u64::from(tag(hash)) << 32 | u64::from(token + 1)
}

fn tag_of(bucket: Bucket) -> u32 {
    (bucket >> 32) as u32
}

fn token_of(bucket: Bucket) -> Token {
    bucket as u32 - 1
}

/// By how much a slab of `len` places grows that ends at `most`: doubling to the end would leave
/// half of its memory unused.
pub(super) fn step(len: usize, most: usize) -> usize {
    if len < most { len.max(256).min(most - len) } else { 1024 }
}

/// Buckets for so many entries.
fn buckets_for(entries: usize) -> usize {
    entries + entries / 2 + 8
}

impl Table {
    /// A table for `capacity` entries; up to [`PRESIZED`] it never grows.
    pub(super) fn new(capacity: usize) -> Self {
        Self { buckets: vec![FREE; buckets_for(capacity.min(PRESIZED))], len: 0 }
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    /// Where an entry with this tag would like to be: the tag scaled to the number of buckets.
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.buckets.len() as u64) >> 32) as usize
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    /// Asks the processor to fetch the bucket of a hash: a batch asks for all of them before it
    /// looks at the first, so it waits for memory once and not key by key.
    pub(super) fn prefetch(&self, hash: u64) {
        let home = self.home(tag(hash));
        #[cfg(target_arch = "x86_64")]
        if let Some(bucket) = self.buckets.get(home) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch changes nothing but the cache, and SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(bucket).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = home;
    }

    /// The token whose hash this is and that `is_it`.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(Token) -> bool) -> Option<Token> {
        let tag = tag(hash);
        let mut at = self.home(tag);
        loop {
            let bucket = self.buckets[at];
            if bucket == FREE {
                return None;
            }
            if tag_of(bucket) == tag && is_it(token_of(bucket)) {
                return Some(token_of(bucket));
            }
            at = self.after(at);
        }
    }

    /// Adds a token that is not there.
    pub(super) fn insert(&mut self, hash: u64, token: Token) {
        if buckets_for(self.len + 1) > self.buckets.len() + self.buckets.len() / 8 {
            self.grow();
        }
        self.place(bucket(hash, token));
        self.len += 1;
    }

    fn place(&mut self, bucket: Bucket) {
        let mut at = self.home(tag_of(bucket));
        while self.buckets[at] != FREE {
            at = self.after(at);
        }
        self.buckets[at] = bucket;
    }

    /// Only past what the table was made for; reads no key.
    fn grow(&mut self) {
        let larger = vec![FREE; buckets_for(self.len + (self.len / 2).max(16))];
        for bucket in std::mem::replace(&mut self.buckets, larger) {
            if bucket != FREE {
                self.place(bucket);
            }
        }
    }

    /// Takes a token out that is there.
    pub(super) fn remove(&mut self, hash: u64, token: Token) {
        let wanted = bucket(hash, token);
        let mut hole = self.home(tag(hash));
        while self.buckets[hole] != wanted {
            debug_assert_ne!(self.buckets[hole], FREE, "token {token} is not in the table");
            if self.buckets[hole] == FREE {
                return;
            }
            hole = self.after(hole);
        }
        self.len -= 1;
        // What follows moves back, unless that would put it before its home.
        let count = self.buckets.len();
        let distance =
            |from: usize, to: usize| if to >= from { to - from } else { to + count - from };
        let mut at = self.after(hole);
        while self.buckets[at] != FREE {
            let wished = self.home(tag_of(self.buckets[at]));
            if distance(wished, at) >= distance(hole, at) {
                self.buckets[hole] = self.buckets[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.buckets[hole] = FREE;
    }

    /// Every token.
    pub(super) fn iter(&self) -> impl Iterator<Item = Token> {
        self.buckets.iter().filter(|&&bucket| bucket != FREE).map(|&bucket| token_of(bucket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;
    use std::collections::HashMap;

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500,
            rng_seed: RngSeed::Fixed(7),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Few tags, so that runs are long, wrap around, and share homes.
        #[test]
        fn agrees_with_a_map(operations in vec((0..24_u32, 0..6_u64), 1..200)) {
            let mut table = Table::new(8);
            let mut model = HashMap::new();
            for (token, tag) in operations {
                let hash = (tag * 0x2AAA_AAAA) << 32;
                if let Some(hash) = model.remove(&token) {
                    table.remove(hash, token);
                } else {
                    table.insert(hash, token);
                    model.insert(token, hash);
                }
                prop_assert_eq!(table.len(), model.len());
                prop_assert_eq!(table.iter().count(), model.len());
                for token in 0..24 {
                    for tag in 0..6 {
                        let hash = (tag * 0x2AAA_AAAA) << 32;
                        let found = table.find(hash, |other| other == token);
                        prop_assert_eq!(found.is_some(), model.get(&token) == Some(&hash));
                    }
                }
            }
        }
    }
}
