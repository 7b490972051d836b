//! Looking keys up: the primary tier, then the others in order, and promotions of what they have.

use std::time::Instant;

use super::figures::{Direction, EventKind, PrimaryFigures};
use super::{
    BreakerState, FROM_ENGINE, Inner, Lookup, Manager, ManagerError, RequestId, TierMask, requester,
};
use crate::clock::Clock;
use crate::index::{Chain, State, Token, Writer};
use crate::key::KeyBatch;
use crate::tier::{Fault, Presence};

/// Keys that tiers are asked for at first when a prefix is looked up; twice as many each time.
const PREFIX_WINDOW: usize = 256;
/// Chunks that a half-open breaker lets through at most.
const PROBE_CHUNKS: u64 = 8;

/// A promotion that the next `end_step` submits.
pub(super) struct Promotion {
    pub(super) tier: usize,
    pub(super) request: RequestId,
    pub(super) token: Token,
}

/// Since when a request is told to ask again, and by which tiers it was given up.
///
/// A request asks in several look-ups a step, one a group or one a key: its wait is over after a
/// step in which all of them were answered, not with the first one that was.
pub(super) struct Retrying {
    since: Instant,
    given_up: TierMask,
    /// The last step in which it asked, and whether a key was unknown then.
    step: u64,
    unknown: bool,
}

impl Manager {
    /// Says where every key is, and starts promotions. With `prefix`, stops before the first
    /// [`Lookup::Miss`] and promotes nothing behind it; the answer may be shorter than the batch.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn lookup(
        &self,
        request: RequestId,
        keys: &KeyBatch,
        prefix: bool,
    ) -> Result<Vec<Lookup>, ManagerError> {
        let mut answers = Vec::with_capacity(keys.len());
        let mut absent = Vec::new();
        let (tiers, doubted) = {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            self.apply_results(inner);
            inner.index.find_batch(keys, |position, token| {
                if token.is_none() {
                    absent.push(position as u32);
                }
                answers.push(token.map_or(Lookup::Miss, |token| inner.presence(token)));
            });
            let tiers = if absent.is_empty() { 0 } else { self.askable(inner, request) };
            if tiers == 0 {
                finish_lookup(&mut inner.primary, &mut answers, prefix);
                return Ok(answers);
            }
            (tiers, inner.doubted(keys, &absent, &self.clock))
        };
        let askable = Askable { tiers, doubted };
        let asked = self.ask_tiers(request, keys, &absent, &askable, prefix);
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        for (tier, keys) in inner.tiers.iter_mut().zip(&asked.keys) {
            tier.figures.lookups += keys;
        }
        let given_up = self.give_up(inner, request, &asked.homes);
        if asked.homes.iter().any(|home| !matches!(home, Home::Nowhere)) {
            self.promote(
                inner,
                request,
                keys,
                &absent,
                &asked.homes,
                given_up,
                prefix,
                &mut answers,
            );
        }
        finish_lookup(&mut inner.primary, &mut answers, prefix);
        Ok(answers)
    }

    /// As [`Manager::lookup`] for one key, without an allocation when the primary tier has it.
    ///
    /// # Errors
    /// [`ManagerError::Closed`], and [`KeyError::Length`](crate::key::KeyError::Length).
    pub fn lookup_key(&self, request: RequestId, key: &[u8]) -> Result<Lookup, ManagerError> {
        {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            let found = inner.index.find(key);
            if let Some(token) = found {
                if inner.index.state(token) == State::Ready {
                    inner.primary.hits += 1;
                    return Ok(Lookup::Hit);
                }
                inner.primary.hits_pending += 1;
                return Ok(Lookup::HitPending);
            }
            if self.tiers.is_empty() && key.len() == inner.index.key_bytes() {
                inner.primary.misses += 1;
                return Ok(Lookup::Miss);
            }
        }
        let mut keys = KeyBatch::empty(self.key_bytes());
        keys.push(key)?;
        Ok(self.lookup(request, &keys, false)?[0])
    }

    /// The name of the tier that a resident chunk was, or is being, promoted from; `None` for one
    /// that the engine stored, or that is not resident.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn promoted_from(&self, key: &[u8]) -> Result<Option<&str>, ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.look()?;
        let slot = inner.index.find(key).map(|token| inner.index.slot(token));
        let origin = slot.map(|slot| inner.origins[slot as usize]);
        let tier = origin.filter(|&origin| origin != FROM_ENGINE);
        Ok(tier.map(|number| &*self.tiers[usize::from(number)].name))
    }

    /// The tiers that may be asked for a request: those its options allow, whose breaker lets
    /// loads through, and that do not hold too many slots already.
    fn askable(&self, inner: &mut Inner, request: RequestId) -> TierMask {
        let allowed = inner.requests.get(&request).map_or(TierMask::MAX, |state| state.may_use);
        let mut askable = 0;
        for number in (0..self.tiers.len()).filter(|number| allowed & 1 << number != 0) {
            let tier = &mut inner.tiers[number];
            let breaker = &mut tier.breakers[Direction::Load as usize];
            let (admitted, change) =
                if breaker.is_closed() { (true, None) } else { breaker.admits(self.clock.now()) };
            if admitted && tier.figures.quarantined <= self.tiers[number].max_loading / 2 {
                askable |= 1 << number;
            }
            inner.breaker_is(number, Direction::Load, change);
        }
        askable
    }

    /// For each of `keys[absent[i]]`: the first of the tiers that has it, or what is known of it.
    /// With `prefix`, the first ones only: up to one that is nowhere, and a few more.
    fn ask_tiers(
        &self,
        request: RequestId,
        keys: &KeyBatch,
        absent: &[u32],
        askable: &Askable,
        prefix: bool,
    ) -> Asked {
        let mut asked = Asked { homes: Vec::new(), keys: vec![0; self.tiers.len()] };
        let mut window = if prefix { PREFIX_WINDOW } else { absent.len() };
        while asked.homes.len() < absent.len() {
            let first = asked.homes.len();
            let next = absent.len().min(first + window);
            self.ask_window(request, keys, &absent[..next], askable, &mut asked);
            if prefix && asked.homes[first..].iter().any(|home| matches!(home, Home::Nowhere)) {
                break;
            }
            window *= 2;
        }
        asked
    }

    /// Asks the tiers in turn for those of `keys[absent[i]]` that `asked` has no home of yet, and
    /// appends what they said.
    fn ask_window(
        &self,
        request: RequestId,
        keys: &KeyBatch,
        absent: &[u32],
        askable: &Askable,
        asked: &mut Asked,
    ) {
        let mut open: Vec<usize> = (asked.homes.len()..absent.len()).collect();
        asked.homes.resize(absent.len(), Home::Nowhere);
        let (mut wanted, mut presence) = (Vec::new(), Vec::new());
        for number in (0..self.tiers.len()).filter(|number| askable.tiers & 1 << number != 0) {
            wanted.clear();
            let asks = open.iter().filter(|&&at| askable.is_trusted(number, at));
            wanted.extend(asks.map(|&at| absent[at]));
            presence.clear();
            presence.resize(wanted.len(), Presence::Miss);
            asked.keys[number] += wanted.len() as u64;
            self.tiers[number]
                .call("lookup", |tier| tier.lookup(request, keys, &wanted, &mut presence));
            let mut answers = presence.iter();
            open.retain(|&at| {
                let home = &mut asked.homes[at];
                if askable.is_trusted(number, at) {
                    match answers.next() {
                        Some(Presence::Hit) => *home = Home::Tier(number),
                        Some(Presence::Retry) => *home = Home::Unknown(number),
                        Some(Presence::Miss) | None => {}
                    }
                }
                !matches!(home, Home::Tier(_))
            });
            if open.is_empty() {
                break;
            }
        }
    }

    /// The tiers that did not tell this request for too long whether they have its keys.
    fn give_up(&self, inner: &mut Inner, request: RequestId, homes: &[Home]) -> TierMask {
        let unknown = homes.iter().fold(0, |mask: TierMask, home| match home {
            Home::Unknown(tier) => mask | 1 << tier,
            _ => mask,
        });
        let step = inner.step;
        let before = inner.retrying.get_mut(&request).filter(|before| before.step < step);
        match before {
            Some(Retrying { unknown: false, .. }) => drop(inner.retrying.remove(&request)),
            Some(before) => (before.step, before.unknown) = (step, false),
            None => {}
        }
        if unknown == 0 {
            return 0;
        }
        let now = self.clock.now();
        let begins = Retrying { since: now, given_up: 0, step, unknown: true };
        let retrying = inner.retrying.entry(request).or_insert(begins);
        retrying.unknown = true;
        let waited = now.saturating_duration_since(retrying.since);
        let late = (0..self.tiers.len())
            .filter(|&number| unknown & 1 << number != 0)
            .filter(|&number| waited >= self.tiers[number].limits.lookup_deadline)
            .fold(0, |mask: TierMask, number| mask | 1 << number);
        let newly = late & !retrying.given_up;
        retrying.given_up |= late;
        for number in (0..self.tiers.len()).filter(|number| newly & 1 << number != 0) {
            inner.tiers[number].figures.lookups_overdue += 1;
            self.tiers[number].note(Fault::Blocked);
        }
        late
    }

    /// Reserves slots for keys that a tier has, in order and as far as there is room, and queues
    /// their promotions.
    #[expect(clippy::too_many_arguments, reason = "one step of `lookup`, apart to be read apart")]
    fn promote(
        &self,
        inner: &mut Inner,
        request: RequestId,
        keys: &KeyBatch,
        absent: &[u32],
        homes: &[Home],
        given_up: TierMask,
        prefix: bool,
        answers: &mut [Lookup],
    ) {
        // Behind a key that is nowhere, nothing of a prefix matters.
        let nowhere = homes.iter().position(|home| matches!(home, Home::Nowhere));
        let last = nowhere.filter(|_| prefix).map_or(keys.len(), |at| absent[at] as usize + 1);
        inner.index.begin_call();
        let mut tokens = Vec::with_capacity(last);
        inner.index.find_many(keys.iter().take(last), |_, token| tokens.push(token));
        // What this call found must not be evicted for what it promotes.
        for &token in tokens.iter().flatten() {
            inner.index.mark(token);
        }
        let mut room = inner.index.room();
        let mut promises = inner.promises_left(request, self.region.slots());
        let mut allowance: Vec<u64> =
            (0..self.tiers.len()).map(|number| self.allowance(inner, number)).collect();
        let mut wanted: Vec<(u32, usize)> = Vec::new();
        let mut end = last;
        for (&position, &home) in absent.iter().zip(homes) {
            let at = position as usize;
            let Some(&token) = tokens.get(at) else {
                break;
            };
            answers[at] = match (token, home) {
                // Came while the tiers were asked.
                (Some(token), _) => inner.presence(token),
                (None, Home::Unknown(tier)) if given_up & 1 << tier == 0 => Lookup::Retry,
                (None, Home::Tier(tier)) if room > 0 && promises > 0 && allowance[tier] > 0 => {
                    (room, allowance[tier]) = (room - 1, allowance[tier] - 1);
                    promises -= 1;
                    wanted.push((position, tier));
                    Lookup::HitPending
                }
                (None, Home::Tier(_)) => {
                    // All room is pinned, wanted by this very call, or more than the share of the
                    // tier; or what this request was promised went to make room for the rest.
                    inner.primary.promotions_refused += 1;
                    Lookup::Miss
                }
                (None, _) => Lookup::Miss,
            };
            if prefix && answers[at] == Lookup::Miss {
                end = at;
                break;
            }
        }
        inner.reserve_promotions(request, keys, &tokens[..end], &wanted, answers);
    }

    /// How many more chunks a tier may be asked to promote now.
    fn allowance(&self, inner: &Inner, number: usize) -> u64 {
        let tier = &inner.tiers[number];
        let share = self.tiers[number].max_loading.saturating_sub(tier.promotions + tier.loading);
        match tier.breakers[Direction::Load as usize].state() {
            BreakerState::Closed => share,
            // One look-up's, so that the probe is one job.
            BreakerState::HalfOpen if tier.promotions == 0 => share.min(PROBE_CHUNKS),
            BreakerState::HalfOpen | BreakerState::Open => 0,
        }
    }
}

impl Inner {
    /// The tiers that are not to be asked for each of `keys[absent[i]]`, since they failed to
    /// bring it; nothing, as a rule.
    fn doubted(&self, keys: &KeyBatch, absent: &[u32], clock: &Clock) -> Vec<TierMask> {
        if self.tiers.iter().all(|tier| tier.doubts.is_empty()) {
            return Vec::new();
        }
        let now = clock.now();
        let doubted = |&at: &u32| {
            let chunk = self.index.fingerprint_of(keys.get(at as usize));
            let tiers = self.tiers.iter().enumerate();
            tiers
                .filter(|(_, tier)| tier.doubts.has(chunk, now))
                .fold(0, |mask: TierMask, (number, _)| mask | 1 << number)
        };
        absent.iter().map(doubted).collect()
    }

    fn presence(&self, token: Token) -> Lookup {
        match self.index.state(token) {
            State::Ready => Lookup::Hit,
            State::Writing(_) => Lookup::HitPending,
        }
    }

    /// How many chunks a request may still be promised before it loads or stores one: as many as
    /// there are slots. A request that looks up more than fits, in several calls, would else be
    /// promised for ever what its own promotions evict, as would two that evict each other's.
    fn promises_left(&self, request: RequestId, slots: u32) -> u32 {
        slots.saturating_sub(self.promised.get(&request).copied().unwrap_or(0))
    }

    /// A request was scheduled, or has ended: it does not wait for what it was promised.
    pub(super) fn promises_end(&mut self, request: RequestId) {
        if !self.promised.is_empty() {
            self.promised.remove(&request);
        }
    }

    /// Reserves slots for the keys at the `wanted` positions; `tokens` are the resident ones.
    fn reserve_promotions(
        &mut self,
        request: RequestId,
        keys: &KeyBatch,
        tokens: &[Option<Token>],
        wanted: &[(u32, usize)],
        answers: &mut [Lookup],
    ) {
        if wanted.is_empty() {
            return;
        }
        // Resident ones are named too: what is promoted follows them in the prefix.
        let mut next = wanted.iter().peekable();
        let named: Vec<u32> = (0..tokens.len() as u32)
            .filter(|&at| {
                let is_wanted = next.next_if(|&&(position, _)| position == at).is_some();
                is_wanted || tokens[at as usize].is_some()
            })
            .collect();
        let numbered = named.iter().map(|&at| (at, keys.get(at as usize)));
        let mut chain = Chain::default();
        let reserved =
            self.index.reserve_absent(numbered, Writer::Promotion, requester(request), &mut chain);
        let Ok(Some(reserved)) = reserved else {
            // The room was counted before; without it they are misses all the same.
            for &(at, _) in wanted {
                answers[at as usize] = Lookup::Miss;
            }
            return;
        };
        self.primary.evictions += reserved.evicted.len() as u64;
        self.events.push(EventKind::Removed, None, reserved.evicted.iter());
        *self.promised.entry(request).or_default() += reserved.tokens.len() as u32;
        let mut homes = wanted.iter();
        for (&at, &token) in reserved.indices.iter().zip(&reserved.tokens) {
            // A key that came twice was reserved once: its second position is passed over.
            if let Some(&(_, tier)) = homes.find(|&&(position, _)| position == at) {
                self.tiers[tier].figures.hits += 1;
                self.tiers[tier].promotions += 1;
                // There are at most `MAX_TIERS`.
                self.origins[self.index.slot(token) as usize] = tier as u8;
                self.promotions.push(Promotion { tier, request, token });
            }
        }
    }
}

/// Who may be asked for what.
struct Askable {
    /// The tiers.
    tiers: TierMask,
    /// Of each absent key, those that failed to bring it; empty when there are none at all.
    doubted: Vec<TierMask>,
}

impl Askable {
    /// Whether a tier is asked for the absent key at a position.
    fn is_trusted(&self, tier: usize, at: usize) -> bool {
        self.doubted.get(at).is_none_or(|tiers| tiers & 1 << tier == 0)
    }
}

/// What the tiers said.
struct Asked {
    /// Of each absent key.
    homes: Vec<Home>,
    /// Number of keys that each tier was asked for.
    keys: Vec<u64>,
}

/// Where a key that the primary tier lacks was found.
#[derive(Debug, Clone, Copy)]
enum Home {
    Nowhere,
    Unknown(usize),
    Tier(usize),
}

/// Cuts a prefix answer and counts what is left.
fn finish_lookup(figures: &mut PrimaryFigures, answers: &mut Vec<Lookup>, prefix: bool) {
    let asked = answers.len();
    if prefix {
        let end = answers.iter().position(|&answer| answer == Lookup::Miss);
        answers.truncate(end.unwrap_or(asked));
    }
    let count = |kind| answers.iter().filter(|&&answer| answer == kind).count();
    let (hits, pending) = (count(Lookup::Hit), count(Lookup::HitPending));
    let retries = count(Lookup::Retry);
    figures.hits += hits as u64;
    figures.hits_pending += pending as u64;
    figures.retries += retries as u64;
    figures.misses += (asked - hits - pending - retries) as u64;
}
