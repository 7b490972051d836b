//! What must be so, kept beside the manager and without asking it: who uses which slot, which
//! keys are resident, and why a key may be on its way.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kvtier_core::index::Slot;
use kvtier_core::tier::{JobId, RequestId};

use crate::content::Key;

/// How somebody uses a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

#[derive(Debug, Clone, Copy, Default)]
struct Users {
    readers: u32,
    writers: u32,
}

/// A load job that the manager still takes for its keys' way into the primary tier.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) tier: usize,
    pub(crate) keys: Vec<Key>,
    /// Those that its tier brought.
    pub(crate) came: Vec<Key>,
    pub(crate) deadline: Instant,
    /// The time it had.
    pub(crate) granted: Duration,
    /// Its tier let go of it; the manager may not know yet.
    pub(crate) ended: bool,
    /// A step ended after its deadline.
    pub(crate) late: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The engine's process: what an earlier one left behind uses slots of its own region.
    pub(crate) life: u32,
    slots: Vec<Users>,
    /// Keys that are ready, by the events told.
    pub(crate) resident: BTreeSet<Key>,
    /// Keys that the engine is storing, and for whom.
    pub(crate) storing: BTreeMap<Key, RequestId>,
    /// Keys that requests have pinned and not given back.
    pub(crate) loading: BTreeMap<RequestId, usize>,
    /// Promotions that the next step must submit, each once.
    pub(crate) queued: BTreeMap<Key, RequestId>,
    pub(crate) loads: BTreeMap<JobId, Load>,
    /// Until when a tier must not be asked for a key that it did not bring.
    pub(crate) doubted: BTreeMap<(usize, Key), Instant>,
    /// What tiers said they have, in the look-up that runs.
    pub(crate) said_hit: BTreeSet<Key>,
    /// Keys of load jobs submitted in the call that runs.
    pub(crate) promoted: Vec<Key>,
    /// Tiers that get all chunks of a request, and its keys that they get once they are written.
    pub(crate) parked: BTreeMap<RequestId, (u64, Vec<Key>)>,
    /// The tiers that a request may use, where it has options.
    pub(crate) allowed: BTreeMap<RequestId, u64>,
    /// Requests that the engine finished.
    pub(crate) finished: BTreeSet<RequestId>,
}

impl Ledger {
    pub(crate) fn new(slots: u32) -> Self {
        Self { slots: vec![Users::default(); slots as usize], ..Self::default() }
    }

    /// The engine's process begins anew, with an empty region.
    pub(crate) fn next_life(&mut self) {
        *self = Self { life: self.life + 1, ..Self::new(self.slots.len() as u32) };
    }

    /// Somebody begins to use slots: writers alone, readers beside readers.
    pub(crate) fn take(&mut self, slots: &[Slot], how: Use, who: &str) -> Result<(), String> {
        for &slot in slots {
            let users = &mut self.slots[slot as usize];
            if users.writers > 0 || (how == Use::Write && users.readers > 0) {
                return Err(format!("slot {slot} is given to {who} to {how:?}, but has {users:?}"));
            }
            match how {
                Use::Read => users.readers += 1,
                Use::Write => users.writers += 1,
            }
        }
        Ok(())
    }

    /// Somebody does not use slots any more.
    pub(crate) fn give_back(&mut self, slots: &[Slot], how: Use) {
        for &slot in slots {
            let users = &mut self.slots[slot as usize];
            // A slot that was refused above was never counted.
            match how {
                Use::Read => users.readers = users.readers.saturating_sub(1),
                Use::Write => users.writers = users.writers.saturating_sub(1),
            }
        }
    }

    /// Whether nobody uses any slot.
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.iter().all(|users| users.readers == 0 && users.writers == 0)
    }

    /// The call that follows takes the results of all jobs that ended until now.
    pub(crate) fn results_are_taken(&mut self) {
        self.loads.retain(|_, load| !load.ended);
    }

    /// A load job began.
    pub(crate) fn load_begins(
        &mut self,
        id: JobId,
        load: Load,
        now: Instant,
    ) -> Result<(), String> {
        let doubted =
            |key: &&Key| self.doubted.get(&(load.tier, **key)).is_some_and(|&end| now < end);
        let early = load.keys.iter().find(doubted).copied();
        self.promoted.extend(&load.keys);
        let tier = load.tier;
        self.loads.insert(id, load);
        match early {
            Some(key) => Err(format!("tier {tier} failed to bring {key:?}, and is asked again")),
            None => Ok(()),
        }
    }

    /// A tier may have stored keys anew, so that it may be asked for them again.
    pub(crate) fn may_be_good(&mut self, tier: usize, keys: impl Iterator<Item = Key>) {
        for key in keys {
            self.doubted.remove(&(tier, key));
        }
    }

    /// The tier of a load let go of it.
    pub(crate) fn load_ends(&mut self, id: JobId, now: Instant) {
        let Some(load) = self.loads.get_mut(&id) else {
            return;
        };
        load.ended = true;
        if !load.late {
            let failed = load.keys.iter().filter(|key| !load.came.contains(key));
            self.doubted.extend(failed.map(|&key| ((load.tier, key), now + load.granted)));
        }
    }

    /// A step ends at `now`: what is late is a miss.
    pub(crate) fn deadlines_passed(&mut self, now: Instant) {
        for load in self.loads.values_mut().filter(|load| !load.ended && !load.late) {
            load.late = now >= load.deadline;
            if load.late {
                let failed = load.keys.iter();
                self.doubted.extend(failed.map(|&key| ((load.tier, key), now + load.granted)));
            }
        }
    }

    /// Whether a key is certainly being written.
    pub(crate) fn is_coming(&self, key: Key) -> bool {
        let in_time = |load: &Load| !load.ended && !load.late && load.keys.contains(&key);
        self.storing.contains_key(&key)
            || self.queued.contains_key(&key)
            || self.loads.values().any(in_time)
    }

    /// Whether a key may be in state writing: also if its job ended and nobody took the result.
    pub(crate) fn may_be_coming(&self, key: Key) -> bool {
        let ended = |load: &Load| load.ended && !load.late && load.keys.contains(&key);
        self.is_coming(key) || self.loads.values().any(ended)
    }

    /// Whether the tiers may be told that a request has ended.
    pub(crate) fn may_end(&self, request: RequestId) -> Result<(), String> {
        let coming = |keys: &[Key]| keys.iter().any(|&key| self.is_coming(key));
        let left = |(key, by): (&Key, &RequestId)| *by == request && !self.promoted.contains(key);
        let why = if !self.finished.contains(&request) {
            "the engine goes on with it"
        } else if self.parked.get(&request).is_some_and(|(_, keys)| coming(keys)) {
            "it has keys parked"
        } else if self.queued.iter().any(left) {
            "it has promotions queued"
        } else if self.storing.values().any(|&other| other == request) {
            "it is storing"
        } else if self.loading.get(&request).is_some_and(|&keys| keys > 0) {
            "it is loading"
        } else {
            return Ok(());
        };
        Err(format!("tiers are told that request {request} has ended, but {why}"))
    }

    /// The primary tier was forgotten.
    pub(crate) fn reset(&mut self) {
        self.storing.clear();
        self.loading.clear();
        self.queued.clear();
        self.loads.clear();
        self.parked.clear();
    }
}
