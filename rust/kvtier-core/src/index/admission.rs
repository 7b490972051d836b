//! Keeps chunks out until they were offered several times.
//!
//! Most chunks of a chat are never asked for again; an admission threshold of 2 stores a chunk
//! when it is offered the second time. [`Admission`] counts offers of keys that are not
//! resident, in a table of fixed size: four counters a set, the one that was not offered for the
//! longest time gives way. What gives way starts again from nothing: the tracker forgets, it
//! never grows. 16 to 32 bytes a slot of the index, and none with a threshold of 1.

const WAYS: usize = 4;

/// A counter: the fingerprint but for its last byte, and there the number of offers.
type Counter = u64;

const OFFERS: Counter = 0xFF;

/// Offers of keys by fingerprint.
#[derive(Debug)]
pub struct Admission {
    threshold: u8,
    /// In each set, the counter that was offered last is first.
    sets: Vec<[Counter; WAYS]>,
}

impl Admission {
    /// Admits what is offered `threshold` times, for an index of `capacity` slots.
    pub fn new(threshold: u8, capacity: usize) -> Self {
        let sets = match threshold {
            0 | 1 => 0,
            _ => (2 * capacity).div_ceil(WAYS).next_power_of_two(),
        };
        Self { threshold, sets: vec![[0; WAYS]; sets] }
    }

    /// Whether everything is admitted at once.
    pub fn is_open(&self) -> bool {
        self.sets.is_empty()
    }

    /// Whether the next offer of this key is enough.
    pub fn admits(&self, fingerprint: u64) -> bool {
        self.is_open() || self.offers(fingerprint) + 1 >= self.threshold
    }

    /// Counts an offer. One that is enough starts the count anew.
    pub fn offer(&mut self, fingerprint: u64) {
        if self.is_open() {
            return;
        }
        let offers = self.offers(fingerprint) + 1;
        let count = if offers >= self.threshold { 0 } else { Counter::from(offers) };
        let at = self.set(fingerprint);
        let set = &mut self.sets[at];
        let way = set.iter().position(|&counter| same(counter, fingerprint)).unwrap_or(WAYS - 1);
        set[..=way].rotate_right(1);
        set[0] = fingerprint & !OFFERS | count;
    }

    fn offers(&self, fingerprint: u64) -> u8 {
        let set = &self.sets[self.set(fingerprint)];
        let found = set.iter().find(|&&counter| same(counter, fingerprint));
        found.map_or(0, |&counter| (counter & OFFERS) as u8)
    }

    fn set(&self, fingerprint: u64) -> usize {
        // The upper bits: the lowest ones are not part of a counter.
        (fingerprint >> 32) as usize & (self.sets.len() - 1)
    }
}

fn same(counter: Counter, fingerprint: u64) -> bool {
    counter & !OFFERS == fingerprint & !OFFERS && counter & OFFERS != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_admitted_at_its_nth_offer_and_counted_anew() {
        let mut admission = Admission::new(3, 100);
        for _ in 0..2 {
            for offer in 1..=3 {
                assert_eq!(admission.admits(0xABCD_EF00), offer == 3);
                admission.offer(0xABCD_EF00);
            }
        }
    }

    #[test]
    fn the_tracker_forgets_what_was_offered_longest_ago() {
        let mut admission = Admission::new(2, 2);
        let fingerprint = |number: u64| number << 8;
        for number in 1..=5 {
            admission.offer(fingerprint(number));
        }
        let known: Vec<u64> = (1..=5).filter(|&n| admission.admits(fingerprint(n))).collect();
        assert_eq!(known, [2, 3, 4, 5]);
        assert_eq!(admission.sets.len(), 1);
    }

    #[test]
    fn a_threshold_of_one_admits_everything_and_takes_no_memory() {
        let mut admission = Admission::new(1, 1 << 40);
        assert!(admission.is_open() && admission.admits(7));
        admission.offer(7);
    }
}
