//! What a tier knows of the keys on its servers, so that a look-up never waits for them.
//!
//! A key is known to be *present* or *absent* for a while (others store and evict there too), or
//! it is *being asked*. [`Known::lookup`] answers from that at once: HIT, MISS, or RETRY for what
//! is being asked, and hands the keys of the call that nothing is known of to one [`Question`],
//! which the tier asks in the background, in one round trip a server.
//!
//! # Invariants
//! - A key is in one question at a time, unless its entry was pushed out meanwhile.
//! - A question always ends: what it was not answered when it is dropped is absent for a while.
//! - A key is told RETRY for [`KnownSettings::patience`] at most, then MISS until the answer is
//!   here. So a server that hangs costs a request its patience and no more, and a late answer
//!   still serves the next request.
//! - What the tier itself [notes](Known::note) of a key counts more than an answer that was asked
//!   for before.
//!
//! A wrong belief costs a promotion that fails or a chunk computed again, never wrong bytes; so
//! keys are kept as 64-bit fingerprints.
//!
//! Complexity: a hash look-up a key. Memory: 18 to 37 bytes an entry, [`KnownSettings::entries`]
//! at most; two generations, of which the older is dropped when the younger has half of them.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::fast::{FixedState, RandomState};

use crate::clock::Clock;
use crate::key::KeyBatch;
use crate::sync::Mutex;
use crate::tier::Presence;

/// How much is kept, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct KnownSettings {
    /// Keys of which something is known, at most.
    pub entries: usize,
    /// Keys that are asked at once, at most; above it the answer is MISS.
    pub asking: usize,
    /// For how long a key counts as present.
    pub present_for: Duration,
    /// For how long as absent: short, since another process may store it any moment.
    pub absent_for: Duration,
    /// How long a key is told RETRY.
    pub patience: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Known {
    settings: KnownSettings,
    clock: Clock,
    born: Instant,
    hasher: RandomState,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    young: HashMap<u64, Entry, FixedState>,
    old: HashMap<u64, Entry, FixedState>,
    asking: usize,
}

/// Two bits of state under milliseconds since the table was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry(u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Until then.
    Present = 0,
    /// Until then.
    Absent = 1,
    /// Since then.
    Asked = 2,
}

impl Entry {
    fn new(state: State, at: u64) -> Self {
        Self(at << 2 | state as u64)
    }

    fn state(self) -> State {
        match self.0 & 3 {
            0 => State::Present,
            1 => State::Absent,
            _ => State::Asked,
        }
    }

    fn at(self) -> u64 {
        self.0 >> 2
    }
}

impl Table {
    fn get(&self, print: u64) -> Option<Entry> {
        self.young.get(&print).or_else(|| self.old.get(&print)).copied()
    }

    fn set(&mut self, print: u64, entry: Entry, entries: usize) {
        if self.young.len() >= entries / 2 && !self.young.contains_key(&print) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(print, entry);
    }
}

impl Known {
    /// Nothing is known yet.
    pub fn new(settings: KnownSettings, clock: Clock) -> Arc<Self> {
        Arc::new(Self {
            settings,
            born: clock.now(),
            clock,
            hasher: RandomState::default(),
            table: Mutex::default(),
        })
    }

    /// Answers for each of `keys[wanted[i]]` in `presence[i]`, and gives back the question for
    /// those of which nothing is known.
    pub fn lookup(
        self: &Arc<Self>,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) -> Option<Question> {
        let now = self.now();
        let asked = Entry::new(State::Asked, now);
        let patience = milliseconds(self.settings.patience);
        let mut question: Option<Question> = None;
        let mut table = self.table.lock();
        for (answer, &position) in presence.iter_mut().zip(wanted) {
            let key = keys.get(position as usize);
            let print = self.hasher.hash_one(key);
            *answer = match table.get(print).map(|entry| (entry.state(), entry.at())) {
                Some((State::Present, until)) if now < until => Presence::Hit,
                Some((State::Absent, until)) if now < until => Presence::Miss,
                Some((State::Asked, since)) if now < since + patience => Presence::Retry,
                Some((State::Asked, _)) => Presence::Miss,
                _ if table.asking >= self.settings.asking => Presence::Miss,
                _ => {
                    table.set(print, asked, self.settings.entries);
                    table.asking += 1;
                    let question = question
                        .get_or_insert_with(|| Question::new(self, asked, keys.key_bytes()));
                    // Of the batch's own length.
                    let _ = question.keys.push(key);
                    question.open.push(Some(print));
                    Presence::Retry
                }
            };
        }
        question
    }

    /// Notes that a key was stored or found there, or that it was removed or not found.
    pub fn note(&self, key: &[u8], present: bool) {
        let entry = self.entry(present);
        self.table.lock().set(self.hasher.hash_one(key), entry, self.settings.entries);
    }

    /// Whether a key is known to be present.
    pub fn is_present(&self, key: &[u8]) -> bool {
        let entry = self.table.lock().get(self.hasher.hash_one(key));
        entry.is_some_and(|entry| entry.state() == State::Present && self.now() < entry.at())
    }

    /// Keys that are being asked.
    pub fn asking(&self) -> usize {
        self.table.lock().asking
    }

    fn entry(&self, present: bool) -> Entry {
        let (state, lasts) = if present {
            (State::Present, self.settings.present_for)
        } else {
            (State::Absent, self.settings.absent_for)
        };
        Entry::new(state, self.now() + milliseconds(lasts))
    }

    fn now(&self) -> u64 {
        milliseconds(self.clock.now().saturating_duration_since(self.born))
    }
}

/// Rounded up, so that no time given is none.
fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u64::MAX >> 2).min(u64::MAX >> 4)
}

/// Keys to ask the servers for; see the module.
#[derive(Debug)]
pub struct Question {
    known: Arc<Known>,
    asked: Entry,
    keys: KeyBatch,
    /// Fingerprints of those that are not answered.
    open: Vec<Option<u64>>,
}

impl Question {
    fn new(known: &Arc<Known>, asked: Entry, key_bytes: usize) -> Self {
        let keys = KeyBatch::empty(key_bytes);
        Self { known: Arc::clone(known), asked, keys, open: Vec::new() }
    }

    /// What is asked.
    pub fn keys(&self) -> &KeyBatch {
        &self.keys
    }

    /// Answers for `keys()[positions[i]]` with `present(i)`, in any order, each once.
    pub fn answer(&mut self, positions: &[u32], mut present: impl FnMut(usize) -> bool) {
        let (here, gone) = (self.known.entry(true), self.known.entry(false));
        let mut table = self.known.table.lock();
        for (at, &position) in positions.iter().enumerate() {
            let print = self.open.get_mut(position as usize).and_then(Option::take);
            let entry = if present(at) { here } else { gone };
            self.known.settle(&mut table, self.asked, print, entry);
        }
    }
}

impl Known {
    fn settle(&self, table: &mut Table, asked: Entry, print: Option<u64>, entry: Entry) {
        let Some(print) = print else {
            return;
        };
        table.asking -= 1;
        // Else somebody noted something newer, or it was pushed out.
        if table.get(print) == Some(asked) {
            table.set(print, entry, self.settings.entries);
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        let gone = self.known.entry(false);
        let mut table = self.known.table.lock();
        for print in self.open.drain(..) {
            self.known.settle(&mut table, self.asked, print, gone);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Presence::{Hit, Miss, Retry};

    const MILLISECOND: Duration = Duration::from_millis(1);
    const SETTINGS: KnownSettings = KnownSettings {
        entries: 64,
        asking: 8,
        present_for: Duration::from_secs(10),
        absent_for: Duration::from_secs(1),
        patience: Duration::from_millis(20),
    };

    fn batch(keys: std::ops::Range<u64>) -> KeyBatch {
        let bytes = keys.flat_map(u64::to_le_bytes).collect();
        KeyBatch::from_flat(bytes, 8).expect("whole keys")
    }

    fn ask(known: &Arc<Known>, keys: &KeyBatch) -> (Vec<Presence>, Option<Question>) {
        let wanted: Vec<u32> = (0..keys.len() as u32).collect();
        let mut presence = vec![Miss; keys.len()];
        let question = known.lookup(keys, &wanted, &mut presence);
        (presence, question)
    }

    fn new() -> (Arc<Known>, Clock) {
        let clock = Clock::simulated();
        (Known::new(SETTINGS, clock.clone()), clock)
    }

    #[test]
    fn all_unknown_keys_of_a_call_are_one_question_and_are_asked_once() {
        let (known, _clock) = new();
        known.note(batch(1..2).get(0), true);
        let (presence, question) = ask(&known, &batch(0..4));
        assert_eq!(presence, [Retry, Hit, Retry, Retry]);
        let mut question = question.expect("three are unknown");
        assert_eq!(question.keys().iter().collect::<Vec<_>>().concat(), {
            let mut keys = batch(0..1);
            keys.append(&batch(2..4));
            keys.iter().collect::<Vec<_>>().concat()
        });
        let (presence, again) = ask(&known, &batch(0..4));
        assert_eq!((presence, again.is_none()), (vec![Retry, Hit, Retry, Retry], true));
        question.answer(&[2, 0], |at| at == 0);
        assert_eq!(ask(&known, &batch(0..4)).0, [Miss, Hit, Retry, Hit]);
        drop(question);
        assert_eq!(ask(&known, &batch(0..4)).0, [Miss, Hit, Miss, Hit]);
        assert_eq!(known.asking(), 0);
    }

    #[test]
    fn patience_ends_and_a_late_answer_still_counts() {
        let (known, clock) = new();
        let (_, question) = ask(&known, &batch(0..1));
        clock.advance(19 * MILLISECOND);
        assert_eq!(ask(&known, &batch(0..1)).0, [Retry]);
        clock.advance(MILLISECOND);
        let (presence, again) = ask(&known, &batch(0..1));
        assert_eq!((presence, again.is_none()), (vec![Miss], true), "and is not asked twice");
        question.expect("asked").answer(&[0], |_| true);
        assert_eq!(ask(&known, &batch(0..1)).0, [Hit]);
    }

    #[test]
    fn what_is_known_expires_and_absence_sooner() {
        let (known, clock) = new();
        let keys = batch(0..2);
        known.note(keys.get(0), true);
        known.note(keys.get(1), false);
        assert_eq!(ask(&known, &keys).0, [Hit, Miss]);
        clock.advance(SETTINGS.absent_for);
        let (presence, question) = ask(&known, &keys);
        assert_eq!(presence, [Hit, Retry]);
        drop(question);
        clock.advance(9000 * MILLISECOND);
        assert!(!known.is_present(keys.get(0)));
        assert_eq!(ask(&known, &keys).0, [Retry, Retry], "the absent one again as well");
    }

    #[test]
    fn a_store_counts_more_than_an_answer_asked_for_before_it() {
        let (known, clock) = new();
        let (_, question) = ask(&known, &batch(0..1));
        clock.advance(MILLISECOND);
        known.note(batch(0..1).get(0), true);
        question.expect("asked").answer(&[0], |_| false);
        assert_eq!(ask(&known, &batch(0..1)).0, [Hit]);
    }

    #[test]
    fn what_is_asked_and_what_is_kept_have_bounds() {
        let (known, _clock) = new();
        let (presence, question) = ask(&known, &batch(0..10));
        assert_eq!(presence.iter().filter(|&&answer| answer == Retry).count(), SETTINGS.asking);
        assert_eq!(presence[SETTINGS.asking..], [Miss, Miss]);
        drop(question);
        for key in &batch(0..10_000) {
            known.note(key, true);
        }
        let table = known.table.lock();
        assert!(table.young.len() + table.old.len() <= SETTINGS.entries);
        drop(table);
        assert!(known.is_present(batch(9_999..10_000).get(0)), "the newest are kept");
    }
}
