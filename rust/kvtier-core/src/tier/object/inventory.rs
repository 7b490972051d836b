//! What is known of the bucket, so that a look-up costs no request.
//!
//! A listing of the whole namespace says what is there. It is made in the background, when a
//! look-up comes and the last one is older than half of `interval`; until it is older than
//! `interval`, what neither it nor this tier's own stores named is absent. So another process's
//! chunk is seen one interval after it was stored at the latest, and an idle engine lists nothing.
//!
//! A copy that turned out bad is *hidden*: no look-up finds it, and a listing does not bring it
//! back, until it was removed or stored anew.
//!
//! Memory: that of [`Known`], and the keys hidden, [`MOST_HIDDEN`] at most.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::clock::Clock;
use crate::key::KeyBatch;
use crate::sync::Mutex;
use crate::tier::Presence;
use crate::tier::network::{Known, KnownSettings, Question};

/// How long a key counts as absent: to find it so once more costs nothing.
const ABSENT: Duration = Duration::from_millis(500);
/// Keys that wait for a listing at once.
const MOST_ASKING: usize = 1 << 16;
const MOST_HIDDEN: usize = 1 << 16;

/// See the module.
pub(super) struct Inventory {
    known: Arc<Known>,
    interval: Duration,
    clock: Clock,
    state: Mutex<State>,
    wanted: Notify,
}

#[derive(Default)]
struct State {
    /// When the last whole listing began.
    listed: Option<Instant>,
    /// Look-ups that wait for the next one.
    waiting: Vec<Question>,
    /// Bad copies, and whether they are gone by now.
    hidden: HashMap<Box<[u8]>, bool>,
}

impl Inventory {
    /// Nothing is known. A look-up is told RETRY for `patience` at most.
    pub(super) fn new(
        entries: usize,
        interval: Duration,
        patience: Duration,
        clock: Clock,
    ) -> Self {
        let settings = KnownSettings {
            entries,
            asking: MOST_ASKING,
            // What a listing named is named by the next one, or forgotten.
            present_for: interval * 3,
            absent_for: ABSENT,
            patience,
        };
        Self {
            known: Known::new(settings, clock.clone()),
            interval,
            clock,
            state: Mutex::default(),
            wanted: Notify::new(),
        }
    }

    /// Answers what can be answered now. Says whether a listing is wanted.
    pub(super) fn lookup(
        &self,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) -> bool {
        let question = self.known.lookup(keys, wanted, presence);
        let age = {
            let mut state = self.state.lock();
            let now = self.clock.now();
            let age = state.listed.map(|listed| now.saturating_duration_since(listed));
            let Some(question) = question else {
                drop(state);
                return self.want(age.is_some_and(|age| age > self.interval / 2));
            };
            let Some(age) = age.filter(|&age| age <= self.interval) else {
                state.waiting.push(question);
                drop(state);
                return self.want(true);
            };
            drop(state);
            // What the listing did not name is absent, which a dropped question is.
            drop(question);
            age
        };
        drop(self.known.lookup(keys, wanted, presence));
        self.want(age > self.interval / 2)
    }

    fn want(&self, listing: bool) -> bool {
        if listing {
            self.wanted.notify_one();
        }
        listing
    }

    /// Waits until a listing is wanted.
    pub(super) async fn wanted(&self) {
        loop {
            self.wanted.notified().await;
            // Many look-ups ask for the same one.
            let listed = self.state.lock().listed;
            let now = self.clock.now();
            if listed.is_none_or(|at| now.saturating_duration_since(at) > self.interval / 2) {
                return;
            }
        }
    }

    /// A listing begins.
    pub(super) fn begin_listing(&self) -> Instant {
        // What is gone by now can not be named by a listing that begins now.
        self.state.lock().hidden.retain(|_, gone| !*gone);
        self.clock.now()
    }

    /// A listing named a key.
    pub(super) fn named(&self, key: &[u8]) {
        if !self.is_hidden(key) {
            self.known.note(key, true);
        }
    }

    /// The listing that began at `began` is whole; or, `None`, it failed.
    pub(super) fn end_listing(&self, began: Option<Instant>) {
        let mut state = self.state.lock();
        if began.is_some() {
            state.listed = began;
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for mut question in waiting {
            let all: Vec<u32> = (0..question.keys().len() as u32).collect();
            let here: Vec<bool> =
                question.keys().iter().map(|key| self.known.is_present(key)).collect();
            question.answer(&all, |at| here[at]);
        }
    }

    /// A key was stored.
    pub(super) fn stored(&self, key: &[u8]) {
        self.state.lock().hidden.remove(key);
        self.known.note(key, true);
    }

    /// A key is not there.
    pub(super) fn gone(&self, key: &[u8]) {
        self.known.note(key, false);
    }

    /// The copy of a key is bad, and is removed by whoever found that out.
    pub(super) fn hide(&self, key: &[u8]) {
        let mut state = self.state.lock();
        if state.hidden.len() >= MOST_HIDDEN {
            state.hidden.clear();
        }
        state.hidden.insert(key.into(), false);
        drop(state);
        self.known.note(key, false);
    }

    /// A bad copy is gone.
    pub(super) fn removed(&self, key: &[u8]) {
        if let Some(gone) = self.state.lock().hidden.get_mut(key) {
            *gone = true;
        }
    }

    /// Whether a bad copy may be in the way of a key.
    pub(super) fn is_hidden(&self, key: &[u8]) -> bool {
        self.state.lock().hidden.contains_key(key)
    }

    /// Whether a key is known to be there.
    pub(super) fn is_present(&self, key: &[u8]) -> bool {
        self.known.is_present(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);
    const PATIENCE: Duration = Duration::from_millis(20);

    struct Bench {
        inventory: Inventory,
        clock: Clock,
    }

    fn bench() -> Bench {
        let clock = Clock::simulated();
        Bench { inventory: Inventory::new(1024, INTERVAL, PATIENCE, clock.clone()), clock }
    }

    impl Bench {
        /// What is said of each key, and whether a listing is wanted.
        fn lookup(&self, keys: &[u8]) -> (Vec<Presence>, bool) {
            let mut batch = KeyBatch::empty(8);
            for &key in keys {
                batch.push(&[key; 8]).expect("8 bytes");
            }
            let wanted: Vec<u32> = (0..keys.len() as u32).collect();
            let mut presence = vec![Presence::Retry; keys.len()];
            let listing = self.inventory.lookup(&batch, &wanted, &mut presence);
            (presence, listing)
        }

        fn list(&self, names: &[u8]) {
            let began = self.inventory.begin_listing();
            for &name in names {
                self.inventory.named(&[name; 8]);
            }
            self.inventory.end_listing(Some(began));
        }
    }

    #[test]
    fn before_the_first_listing_a_look_up_waits_and_then_agrees_with_it() {
        let bench = bench();
        assert_eq!(bench.lookup(&[1, 2]), (vec![Presence::Retry; 2], true));
        bench.list(&[1]);
        assert_eq!(bench.lookup(&[1, 2]), (vec![Presence::Hit, Presence::Miss], false));
    }

    #[test]
    fn a_listing_that_does_not_come_costs_the_patience_and_no_more() {
        let bench = bench();
        assert_eq!(bench.lookup(&[1]).0, [Presence::Retry]);
        bench.clock.advance(PATIENCE);
        assert_eq!(bench.lookup(&[1]).0, [Presence::Miss]);
        bench.inventory.end_listing(None);
        assert_eq!(bench.lookup(&[1]).0, [Presence::Miss], "absent, for a while");
        bench.clock.advance(ABSENT);
        assert_eq!(bench.lookup(&[1]), (vec![Presence::Retry], true), "and asked for again");
    }

    #[test]
    fn what_no_listing_named_is_absent_at_once_until_the_listing_is_old() {
        let bench = bench();
        bench.list(&[1]);
        assert_eq!(bench.lookup(&[2]), (vec![Presence::Miss], false));
        bench.clock.advance(INTERVAL / 2 + ABSENT);
        assert_eq!(bench.lookup(&[2]), (vec![Presence::Miss], true), "a new one is made meanwhile");
        bench.clock.advance(INTERVAL / 2);
        assert_eq!(bench.lookup(&[1, 2]), (vec![Presence::Hit, Presence::Retry], true));
        bench.list(&[1, 2]);
        assert_eq!(bench.lookup(&[1, 2]), (vec![Presence::Hit; 2], false));
    }

    #[test]
    fn what_expired_in_the_bucket_is_forgotten() {
        let bench = bench();
        bench.list(&[1]);
        for _ in 0..4 {
            bench.clock.advance(INTERVAL);
            bench.list(&[]);
        }
        assert_eq!(bench.lookup(&[1]).0, [Presence::Miss]);
    }

    #[test]
    fn a_bad_copy_is_hidden_until_it_is_gone_or_stored_anew() {
        let bench = bench();
        let key = &[1; 8];
        bench.list(&[1, 2]);
        bench.inventory.hide(key);
        assert_eq!(bench.lookup(&[1, 2]).0, [Presence::Miss, Presence::Hit]);
        bench.list(&[1]);
        assert_eq!(bench.lookup(&[1]).0, [Presence::Miss], "a listing does not bring it back");
        assert!(bench.inventory.is_hidden(key));

        let began = bench.inventory.begin_listing();
        bench.inventory.removed(key);
        bench.inventory.named(key);
        bench.inventory.end_listing(Some(began));
        assert_eq!(bench.lookup(&[1]).0, [Presence::Miss], "named before it was removed");

        bench.list(&[1]);
        assert_eq!(bench.lookup(&[1]).0, [Presence::Hit], "somebody stored it since");

        bench.inventory.hide(key);
        bench.inventory.stored(key);
        assert!(!bench.inventory.is_hidden(key));
        assert_eq!(bench.lookup(&[1]).0, [Presence::Hit]);
    }
}
