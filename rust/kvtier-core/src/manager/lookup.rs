//! Looking keys up: the primary tier, then the others in order, and promotions of what they have.

use super::figures::{EventKind, PrimaryFigures};
use super::{Inner, Lookup, Manager, ManagerError, Promotion, RequestId, requester};
use crate::index::{Chain, State, Writer};
use crate::key::KeyBatch;
use crate::tier::Presence;

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
        {
            let mut inner = self.inner.lock();
            let inner = inner.open()?;
            inner.index.find_batch(keys, |position, token| {
                answers.push(match token {
                    Some(token) if inner.index.state(token) == State::Ready => Lookup::Hit,
                    Some(_) => Lookup::HitPending,
                    None => {
                        absent.push(position as u32);
                        Lookup::Miss
                    }
                });
            });
            if absent.is_empty() || self.tiers.is_empty() {
                finish_lookup(&mut inner.primary, &mut answers, prefix);
                return Ok(answers);
            }
        }
        let homes = self.ask_tiers(keys, &absent);
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        promote(inner, request, keys, &absent, &homes, prefix, &mut answers);
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

    /// For each of `keys[absent[i]]`: the first tier that has it, or what is known of it.
    fn ask_tiers(&self, keys: &KeyBatch, absent: &[u32]) -> Vec<Home> {
        let mut homes = vec![Home::Nowhere; absent.len()];
        let mut open: Vec<u32> = (0..absent.len() as u32).collect();
        let (mut wanted, mut presence) = (Vec::new(), Vec::new());
        for (number, slot) in self.tiers.iter().enumerate() {
            wanted.clear();
            wanted.extend(open.iter().map(|&at| absent[at as usize]));
            presence.clear();
            presence.resize(wanted.len(), Presence::Miss);
            slot.tier.lookup(keys, &wanted, &mut presence);
            let mut answers = presence.iter();
            open.retain(|&at| {
                let home = &mut homes[at as usize];
                match answers.next() {
                    Some(Presence::Hit) => *home = Home::Tier(number),
                    Some(Presence::Retry) => *home = Home::Unknown,
                    Some(Presence::Miss) | None => {}
                }
                !matches!(home, Home::Tier(_))
            });
            if open.is_empty() {
                break;
            }
        }
        homes
    }
}

/// Where a key that the primary tier lacks was found.
#[derive(Debug, Clone, Copy)]
enum Home {
    Nowhere,
    Unknown,
    Tier(usize),
}

/// Reserves slots for keys that a tier has, in order, and queues their promotions.
fn promote(
    inner: &mut Inner,
    request: RequestId,
    keys: &KeyBatch,
    absent: &[u32],
    homes: &[Home],
    prefix: bool,
    answers: &mut [Lookup],
) {
    inner.index.begin_call();
    // What this call found must not be evicted for what it promotes.
    for key in keys {
        if let Some(token) = inner.index.find(key) {
            inner.index.mark(token);
        }
    }
    let mut chain = Chain::default();
    let mut followed = 0;
    for (&position, &home) in absent.iter().zip(homes) {
        let key = keys.get(position as usize);
        // What lies between two absent keys is resident.
        for at in followed..position as usize {
            if let Some(token) = inner.index.find(keys.get(at)) {
                chain.follow(keys.get(at), token);
            }
        }
        followed = position as usize + 1;
        let answer = &mut answers[position as usize];
        *answer = match (inner.index.find(key), home) {
            // Came while the tiers were asked, or twice in this call.
            (Some(token), _) if inner.index.state(token) == State::Ready => Lookup::Hit,
            (Some(_), _) => Lookup::HitPending,
            (None, Home::Nowhere) => Lookup::Miss,
            (None, Home::Unknown) => Lookup::Retry,
            (None, Home::Tier(tier)) => {
                let one = std::iter::once((position, key));
                let requester = requester(request);
                match inner.index.reserve(one, Writer::Promotion, requester, &mut chain) {
                    Ok(Some(reserved)) => {
                        let token = reserved.tokens[0];
                        inner.primary.evictions += reserved.evicted.len() as u64;
                        inner.events.push(EventKind::Removed, None, reserved.evicted.iter());
                        inner.tiers[tier].hits += 1;
                        inner.promotions.push(Promotion { tier, request, token });
                        Lookup::HitPending
                    }
                    // No room that is not pinned or wanted by this very call.
                    Ok(None) | Err(_) => Lookup::Miss,
                }
            }
        };
        if prefix && *answer == Lookup::Miss {
            break;
        }
    }
}

/// Cuts a prefix answer and counts what is left.
fn finish_lookup(figures: &mut PrimaryFigures, answers: &mut Vec<Lookup>, prefix: bool) {
    let asked = answers.len();
    if prefix {
        let end = answers.iter().position(|&answer| answer == Lookup::Miss);
        answers.truncate(end.unwrap_or(asked));
    }
    let hits = answers.iter().filter(|&&answer| answer == Lookup::Hit).count();
    let pending = answers.iter().filter(|&&answer| answer == Lookup::HitPending).count();
    figures.hits += hits as u64;
    figures.hits_pending += pending as u64;
    figures.misses += (asked - hits - pending) as u64;
}
