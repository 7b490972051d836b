//! The engine: requests that arrive, look up, load, store, and end, each in its own way.

use std::time::Instant;

use kvtier_core::index::Slot;
use kvtier_core::manager::{Lookup, ManagerError, RequestOptions, TierMatcher};
use kvtier_core::tier::RequestId;

use crate::content::{Key, batch};
use crate::ledger::Use;
use crate::settings::MILLISECOND;
use crate::tally::Feature;
use crate::world::World;

/// How a request looks its keys up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Prefix,
    Plain,
    OneByOne,
}

/// A request that the engine has not finished.
pub(crate) struct Request {
    pub(crate) id: RequestId,
    /// Its keys, group by group.
    groups: Vec<Vec<Key>>,
    way: Way,
    /// Not scheduled yet: it waits for what it looks up.
    pub(crate) waiting: bool,
    /// Since when it is told to ask again in every step in which it asks.
    retry_since: Option<Instant>,
    /// Whether it asked in this step, and was told to ask again.
    asked: bool,
    retried: bool,
    /// How many of its keys it offered to store.
    offered: usize,
    /// The tiers that get all its chunks.
    gets_all: u64,
}

impl Request {
    /// All its keys in the order they are computed.
    fn keys(&self) -> Vec<Key> {
        let chunks = self.groups.iter().map(Vec::len).max().unwrap_or(0);
        let by_chunk = (0..chunks).flat_map(|at| self.groups.iter().filter_map(move |g| g.get(at)));
        by_chunk.copied().collect()
    }

    pub(crate) fn step_ended(&mut self) {
        if self.asked && !self.retried {
            self.retry_since = None;
        }
        (self.asked, self.retried) = (false, false);
    }
}

/// Chunks that the engine moves between the GPU and slots.
pub(crate) struct Transfer {
    request: RequestId,
    keys: Vec<Key>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) how: Use,
    done: Instant,
    /// Began before a reset: nobody may be told when it ends.
    pub(crate) void: bool,
}

impl World {
    /// A request arrives, with a prefix that others have too, and a continuation.
    pub(crate) fn arrive(&mut self) {
        let mut state = self.stage.lock();
        let rng = &mut state.rng;
        let settings = &self.settings;
        let chunks = rng.u8(1..=settings.chunks);
        let shared = rng.u8(0..=chunks);
        let prefix = rng.u8(0..settings.shared);
        let own = settings.shared + rng.u8(0..settings.private);
        let groups = (0..settings.groups).map(|group| {
            // Groups past the first have a window: only the last chunks count.
            let first = if group == 0 { 0 } else { chunks.saturating_sub(2) };
            let key = |chunk| {
                let sequence = if chunk < shared { prefix } else { own };
                Key { sequence, chunk, group }
            };
            (first..chunks).map(key).collect()
        });
        let groups = groups.collect();
        let way = [Way::Prefix, Way::Plain, Way::OneByOne][rng.usize(0..3)];
        let options = (rng.u8(0..4) == 0).then(|| self.draw_options(rng));
        let id = self.next_request;
        self.next_request += 1;
        state.tally.count(Feature::Request);
        let mut gets_all = settings.request_level();
        if let Some((options, allowed, more)) = &options {
            state.tally.count(Feature::Options);
            state.note(|| format!("request {id} has {options:?}"));
            state.ledger.allowed.insert(id, *allowed);
            gets_all |= more;
        }
        drop(state);
        if let Some((options, ..)) = &options {
            self.manager.begin_request(id, options).expect("tiers that there are");
        }
        self.requests.push(Request {
            id,
            groups,
            way,
            waiting: true,
            retry_since: None,
            asked: false,
            retried: false,
            offered: 0,
            gets_all,
        });
    }

    /// Options, the tiers that they allow, and those that get all chunks.
    fn draw_options(&self, rng: &mut fastrand::Rng) -> (RequestOptions, u64, u64) {
        let tiers = &self.settings.tiers;
        let bits = |mask: u64, number: usize| mask | 1 << number;
        let mut options = RequestOptions::default();
        let mut allowed = u64::MAX;
        if rng.bool() {
            let one = &tiers[rng.usize(0..tiers.len())];
            let by_medium = rng.bool();
            options.tiers = Some(vec![TierMatcher {
                medium: by_medium.then_some(one.medium),
                locality: (!by_medium).then_some(one.locality),
            }]);
            let matches = |number: &usize| {
                let tier = &tiers[*number];
                (by_medium && tier.medium == one.medium)
                    || (!by_medium && tier.locality == one.locality)
            };
            allowed = (0..tiers.len()).filter(matches).fold(0, bits);
        }
        let wanted: Vec<usize> = (0..tiers.len()).filter(|_| rng.u8(0..4) == 0).collect();
        options.request_level = wanted.iter().map(|&number| tiers[number].name.into()).collect();
        (options, allowed, wanted.into_iter().fold(0, bits))
    }

    /// A request that waits looks its keys up, and begins if all of them are there or nowhere.
    pub(crate) fn look(&mut self, at: usize) {
        let Request { id, way, ref groups, .. } = self.requests[at];
        let groups = groups.clone();
        let mut hits = Vec::new();
        let (mut waits, mut retries) = (false, false);
        for (group, keys) in groups.iter().enumerate() {
            // A window is looked for from its end: what is behind a miss counts too.
            let prefix = way == Way::Prefix && group == 0;
            let answers = if way == Way::OneByOne {
                keys.iter().map(|&key| self.lookup_key(id, key)).collect()
            } else {
                self.lookup(id, keys, prefix)
            };
            for (&key, answer) in keys.iter().zip(answers) {
                match answer {
                    Lookup::Hit => hits.push(key),
                    Lookup::Miss => {}
                    Lookup::HitPending => waits = true,
                    Lookup::Retry => (waits, retries) = (true, true),
                }
            }
        }
        self.is_retried_in_time(at, retries);
        let mut state = self.stage.lock();
        state.note(|| format!("request {id} looks up: waits {waits}, hits {hits:?}"));
        if waits {
            state.tally.count(Feature::Waited);
            return;
        }
        drop(state);
        self.requests[at].waiting = false;
        if !hits.is_empty() {
            self.begin_load(id, hits);
        }
    }

    /// Checks that a request is not told to ask again for longer than the deadline.
    fn is_retried_in_time(&mut self, at: usize, retries: bool) {
        let mut state = self.stage.lock();
        let (request, now) = (&mut self.requests[at], state.now);
        request.asked = true;
        request.retried |= retries;
        if !retries {
            return;
        }
        let since = *request.retry_since.get_or_insert(now);
        let tiers = self.settings.tiers.iter();
        let most = tiers.map(|tier| tier.limits.lookup_deadline).max().unwrap_or_default();
        if now >= since + most {
            let id = request.id;
            state.violate(format!("request {id} is told to ask again after {most:?}"));
        }
    }

    fn begin_load(&mut self, id: RequestId, keys: Vec<Key>) {
        let slots = match self.manager.prepare_load(id, &batch(&keys)) {
            Ok(slots) => slots,
            Err(error) => {
                return self.stage.lock().violate(format!("what was a hit is refused: {error}"));
            }
        };
        let mut state = self.stage.lock();
        let who = format!("the engine for request {id}");
        let taken = state.ledger.take(&slots, Use::Read, &who);
        state.check(taken);
        *state.ledger.loading.entry(id).or_default() += keys.len();
        let done = state.now + MILLISECOND * state.rng.u32(0..=8) / 2;
        drop(state);
        let load = Transfer { request: id, keys, slots, how: Use::Read, done, void: false };
        self.check_bytes(&load);
        self.transfers.push(load);
    }

    /// A request offers chunks that it computed.
    pub(crate) fn store(&mut self, at: usize) {
        let request = &self.requests[at];
        let (id, all, gets_all) = (request.id, request.keys(), request.gets_all);
        let most = (all.len() - request.offered).min(6);
        if most == 0 {
            return;
        }
        let mut state = self.stage.lock();
        let end = request.offered + state.rng.usize(1..=most);
        // An engine may offer what it offered before.
        let first = if state.rng.u8(0..4) == 0 { 0 } else { request.offered };
        let goes_on = state.rng.bool();
        drop(state);
        if self.offer(id, &all[first..end], gets_all) || goes_on {
            self.requests[at].offered = end;
        }
    }

    /// Offers keys, and begins to store those that are new; false without room.
    pub(crate) fn offer(&mut self, id: RequestId, keys: &[Key], gets_all: u64) -> bool {
        self.stage.lock().ledger.results_are_taken();
        let prepared = self.manager.prepare_store(id, &batch(keys)).expect("distinct keys");
        self.replay_events();
        let mut guard = self.stage.lock();
        let state = &mut *guard;
        let Some(prepared) = prepared else {
            state.note(|| format!("request {id} finds no room for {keys:?}"));
            self.counts.stores_refused += 1;
            return false;
        };
        let new: Vec<Key> = prepared.indices.iter().map(|&at| keys[at as usize]).collect();
        state.note(|| format!("request {id} stores {new:?} of {keys:?} to {:?}", prepared.slots));
        let taken = state.ledger.take(&prepared.slots, Use::Write, "the engine");
        state.check(taken);
        let known = keys.iter().copied().filter(|key| !new.contains(key));
        self.counts.known_are_offered(state, id, known, gets_all);
        state.ledger.storing.extend(new.iter().map(|&key| (key, id)));
        let done = state.now + MILLISECOND * state.rng.u32(0..=8) / 2;
        drop(guard);
        if new.is_empty() {
            return true;
        }
        let (how, slots) = (Use::Write, prepared.slots);
        for &slot in &slots {
            // SAFETY: `prepare_store` gave the slot to the engine, and this is its only thread.
            unsafe { self.region.slot_mut(slot) }.fill(0xDD);
        }
        self.transfers.push(Transfer { request: id, keys: new, slots, how, done, void: false });
        true
    }

    /// A transfer ends, if one is due.
    pub(crate) fn end_some_transfer(&mut self) {
        let mut state = self.stage.lock();
        let now = state.now;
        let due = |at: &usize| self.transfers[*at].done <= now;
        let due: Vec<usize> = (0..self.transfers.len()).filter(due).collect();
        if due.is_empty() {
            return;
        }
        let at = due[state.rng.usize(0..due.len())];
        drop(state);
        let transfer = self.transfers.swap_remove(at);
        self.end_transfer(&transfer);
    }

    pub(crate) fn end_transfer(&mut self, transfer: &Transfer) {
        if transfer.how == Use::Read {
            self.check_bytes(transfer);
        }
        if transfer.void {
            // It still wrote to its slots, whoever has them now.
            self.write(transfer);
            let mut state = self.stage.lock();
            state.tally.count(Feature::VoidTransfer);
            state.note(|| format!("a transfer of slots {:?} from before ends", transfer.slots));
            return state.ledger.give_back(&transfer.slots, transfer.how);
        }
        let mut state = self.stage.lock();
        let (split, fails) = (state.rng.usize(0..=transfer.keys.len()), state.rng.u8(0..8) == 0);
        let turned = state.rng.bool();
        drop(state);
        // In two calls as a rule, in any order; of a failed store the second part is what failed.
        let [first, second] = [0..split, split..transfer.keys.len()].map(|part| {
            let (keys, slots) = (transfer.keys[part.clone()].into(), transfer.slots[part].into());
            Transfer { keys, slots, ..*transfer }
        });
        let (first, second) = if turned { (second, first) } else { (first, second) };
        self.complete(&first, true);
        self.complete(&second, !fails);
    }

    fn complete(&mut self, part: &Transfer, ok: bool) {
        if part.keys.is_empty() {
            return;
        }
        if ok {
            self.write(part);
        }
        let (id, keys) = (part.request, batch(&part.keys));
        let mut state = self.stage.lock();
        state.note(|| format!("request {id} completes {:?} of {:?}, {ok}", part.how, part.keys));
        state.ledger.give_back(&part.slots, part.how);
        let number = part.keys.len() as u64;
        let result = if part.how == Use::Read {
            *state.ledger.loading.entry(id).or_default() -= part.keys.len();
            self.counts.loaded += number;
            state.tally.add(Feature::Loaded, number);
            drop(state);
            self.manager.complete_load(id, &keys)
        } else {
            state.ledger.storing.retain(|key, _| !part.keys.contains(key));
            state.tally.add(if ok { Feature::Stored } else { Feature::StoreFailed }, number);
            if ok {
                self.counts.stored += number;
                self.counts.offers.iter_mut().for_each(|offers| *offers += number);
            }
            drop(state);
            self.manager.complete_store(id, &keys, ok)
        };
        if let Err(error) = result {
            self.stage.lock().violate(format!("what was prepared cannot be completed: {error}"));
        }
    }

    /// Writes what the transfer brings, if it is a store.
    fn write(&self, transfer: &Transfer) {
        if transfer.how == Use::Write {
            for (key, &slot) in transfer.keys.iter().zip(&transfer.slots) {
                // SAFETY: the slot is this store's until the engine completes it, or says after a
                // reset that none runs any more; and this is the engine's only thread.
                key.write_to(unsafe { self.region.slot_mut(slot) });
            }
        }
    }

    fn check_bytes(&self, transfer: &Transfer) {
        for (key, &slot) in transfer.keys.iter().zip(&transfer.slots) {
            // SAFETY: pinned, and no other thread runs.
            if !key.is_in(unsafe { self.region.slot(slot) }) {
                let message = format!("slot {slot} is pinned for {key:?}, but has other bytes");
                self.stage.lock().violate(message);
            }
        }
    }

    /// A request is finished, with transfers open or not.
    pub(crate) fn finish(&mut self, at: usize) {
        let id = self.requests.swap_remove(at).id;
        let open = self.transfers.iter().any(|transfer| transfer.request == id && !transfer.void);
        let mut state = self.stage.lock();
        state.note(|| format!("request {id} is finished, transfers open: {open}"));
        state.ledger.finished.insert(id);
        if open {
            state.tally.count(Feature::FinishedOpen);
        }
        drop(state);
        self.manager.request_finished(id).expect("open");
    }

    pub(crate) fn touch(&mut self, at: usize) {
        self.stage.lock().tally.count(Feature::Touch);
        let request = &self.requests[at];
        self.manager.touch(request.id, &batch(&request.keys())).expect("open");
    }

    /// A call that must be refused and change nothing.
    pub(crate) fn misuse(&mut self, at: usize) {
        let request = &self.requests[at];
        let id = request.id;
        let mut state = self.stage.lock();
        state.tally.count(Feature::Misuse);
        let keys = request.keys();
        let key = keys[state.rng.usize(0..keys.len())];
        let call = state.rng.u8(0..4);
        let open = |how| {
            let mut mine = self.transfers.iter().filter(|open| open.request == id && !open.void);
            mine.any(|open| open.how == how && open.keys.contains(&key))
        };
        let (loads, stores) = (open(Use::Read), open(Use::Write));
        let resident = state.ledger.resident.contains(&key);
        state.note(|| format!("request {id} misuses {key:?}, call {call}"));
        drop(state);
        let refused: Result<(), ManagerError> = match call {
            0 if !loads => self.manager.complete_load(id, &batch(&[key])),
            1 if !stores => self.manager.complete_store(id, &batch(&[key]), true),
            2 if !resident => self.manager.prepare_load(id, &batch(&[key])).map(drop),
            3 => self.manager.prepare_store(id, &batch(&[key, key])).map(drop),
            _ => return,
        };
        if refused.is_ok() {
            self.stage.lock().violate(format!("call {call} with {key:?} was not refused"));
        }
    }
}
