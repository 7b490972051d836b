//! Answers "what would this policy have hit with that much memory?" from a trace of requests.
//!
//! A trace is in the Mooncake format: one JSON object a line with `timestamp`, `input_length`,
//! `output_length` and `hash_ids`, the ids of the request's blocks, chained over the prefix. A
//! replay drives the production [`Index`], block after block, as the manager would: what is
//! resident is used, what is not is stored, the head of the prefix last.
//!
//! - *Block hits*: accesses that found their block.
//! - *Prefix hits*: of these, those before the first miss of their request. Only they save work.
//! - The *optimum* is Belady's, with the choice not to keep a block at all: no policy that does
//!   not know the future has more block hits.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::BufRead;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::index::{Chain, Index, IndexError, PolicyKind, State, Writer};

/// Requests, as the blocks that each one reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    blocks: Vec<u64>,
    /// Where each request ends in `blocks`.
    ends: Vec<usize>,
}

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A line that is not a request.
    #[error("line {line} is no request of a Mooncake trace: {source}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The file could not be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

#[derive(Deserialize)]
struct Line {
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads a trace; empty lines are passed over.
    ///
    /// # Errors
    /// [`TraceError`] naming the line.
    pub fn read(from: impl BufRead) -> Result<Self, TraceError> {
        let mut trace = Self::default();
        for (number, line) in from.split(b'\n').enumerate() {
            let line = line?;
            if line.trim_ascii().is_empty() {
                continue;
            }
            let request: Line = serde_json::from_slice(&line)
                .map_err(|source| TraceError::Line { line: number + 1, source })?;
            trace.push(&request.hash_ids);
        }
        Ok(trace)
    }

    /// Appends a request. A block that it names twice counts once.
    pub fn push(&mut self, blocks: &[u64]) {
        let start = self.blocks.len();
        let mut seen = BTreeSet::new();
        self.blocks.extend(blocks.iter().filter(|&block| seen.insert(block)));
        if self.blocks.len() > start {
            self.ends.push(self.blocks.len());
        }
    }

    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.ends.len()
    }

    /// Number of block accesses.
    pub fn accesses(&self) -> usize {
        self.blocks.len()
    }

    /// Number of different blocks: a memory of so many evicts nothing.
    pub fn distinct(&self) -> usize {
        self.blocks.iter().collect::<HashSet<_>>().len()
    }

    /// The blocks of each request.
    pub fn iter(&self) -> impl Iterator<Item = &[u64]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.blocks[start..end])
    }
}

/// What a replay found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests replayed.
    pub requests: u64,
    /// Block accesses.
    pub accesses: u64,
    /// Accesses that found their block.
    pub block_hits: u64,
    /// Of these, those before the first miss of their request.
    pub prefix_hits: u64,
    /// Blocks evicted.
    pub evictions: u64,
    /// How long it took.
    pub elapsed: Duration,
}

/// Replays a trace against an index of `capacity` blocks.
///
/// # Errors
/// [`IndexError::Capacity`].
pub fn replay(trace: &Trace, policy: PolicyKind, capacity: u32) -> Result<Outcome, IndexError> {
    replay_while(trace, policy, capacity, || true)
}

/// As [`replay`], asking `go_on` before every request; the outcome is that of the requests until
/// it said no.
///
/// # Errors
/// [`IndexError::Capacity`].
pub fn replay_while(
    trace: &Trace,
    policy: PolicyKind,
    capacity: u32,
    mut go_on: impl FnMut() -> bool,
) -> Result<Outcome, IndexError> {
    let mut index = Index::new(capacity, size_of::<u64>(), policy)?;
    let mut outcome = Outcome::default();
    let start = Instant::now();
    for (number, blocks) in trace.iter().enumerate().take_while(|_| go_on()) {
        step(&mut index, number as u32 + 1, blocks, &mut outcome)?;
    }
    outcome.elapsed = start.elapsed();
    Ok(outcome)
}

/// One request: counts its hits, then uses what is resident and stores what is not.
fn step(
    index: &mut Index,
    request: u32,
    blocks: &[u64],
    outcome: &mut Outcome,
) -> Result<(), IndexError> {
    let keys: Vec<[u8; 8]> = blocks.iter().map(|block| block.to_le_bytes()).collect();
    let mut whole = true;
    for key in &keys {
        let hit = index.find(key).is_some_and(|token| index.state(token) == State::Ready);
        whole &= hit;
        outcome.block_hits += u64::from(hit);
        outcome.prefix_hits += u64::from(whole);
    }
    outcome.requests += 1;
    outcome.accesses += blocks.len() as u64;
    // A request longer than the whole memory keeps its head.
    let kept = &keys[..keys.len().min(index.capacity() as usize)];
    index.begin_call();
    let numbered = (0..).zip(kept.iter().map(<[u8; 8]>::as_slice));
    // Nothing is pinned here, so there is room for a capacity's worth of keys.
    if let Some(reserved) =
        index.reserve(numbered, Writer::Store, request, &mut Chain::default())?
    {
        outcome.evictions += reserved.evicted.len() as u64;
    }
    for key in kept.iter().rev() {
        if let Some(token) = index.find(key) {
            match index.state(token) {
                State::Ready => index.touch(token, request),
                State::Writing(_) => index.commit(token),
            }
        }
    }
    Ok(())
}

/// The most block hits that any choice of what to keep could have had with `capacity` blocks:
/// Belady's rule, with the choice to pass a block by.
pub fn optimum(trace: &Trace, capacity: usize) -> u64 {
    optimum_while(trace, capacity, || true)
}

/// As [`optimum`], asking `go_on` before every access; counts the hits until it said no.
pub fn optimum_while(trace: &Trace, capacity: usize, mut go_on: impl FnMut() -> bool) -> u64 {
    let never = trace.blocks.len();
    let mut next = vec![never; trace.blocks.len()];
    let mut seen = HashMap::new();
    for (at, &block) in trace.blocks.iter().enumerate().rev().take_while(|_| go_on()) {
        if let Some(later) = seen.insert(block, at) {
            next[at] = later;
        }
    }
    // Resident blocks by their next use: since every access is at one place, the next use names
    // the block.
    let mut resident = BTreeSet::new();
    let mut hits = 0;
    for (at, &again) in next.iter().enumerate().take_while(|_| go_on()) {
        hits += u64::from(resident.remove(&at));
        if again == never {
            continue;
        }
        resident.insert(again);
        if resident.len() > capacity {
            resident.pop_last();
        }
    }
    hits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(requests: &[&[u64]]) -> Trace {
        let mut trace = Trace::default();
        for blocks in requests {
            trace.push(blocks);
        }
        trace
    }

    fn hits(requests: &[&[u64]], capacity: u32) -> (u64, u64) {
        let outcome = replay(&trace(requests), PolicyKind::Lru, capacity).expect("small");
        (outcome.block_hits, outcome.prefix_hits)
    }

    #[test]
    fn a_hit_behind_a_miss_saves_nothing() {
        assert_eq!(hits(&[&[1, 2, 3], &[1, 2, 4]], 8), (2, 2));
        assert_eq!(hits(&[&[1, 2, 3], &[9, 2, 3]], 8), (2, 0));
    }

    #[test]
    fn the_tail_of_a_request_is_evicted_before_its_head() {
        // Blocks 3 and 4 go for 5 and 6; the head of the first request is still there.
        assert_eq!(hits(&[&[1, 2, 3, 4], &[5, 6], &[1, 2, 3, 4]], 4), (2, 2));
    }

    #[test]
    fn a_request_longer_than_the_memory_keeps_its_head() {
        assert_eq!(hits(&[&[1, 2, 3, 4], &[1, 2, 3, 4]], 2), (2, 2));
    }

    #[test]
    fn the_optimum_of_a_textbook_example() {
        // With one slot: keep 1 over 2 (used sooner), then 3.
        assert_eq!(optimum(&trace(&[&[1], &[2], &[1], &[3], &[3], &[2]]), 1), 2);
        assert_eq!(optimum(&trace(&[&[1], &[2], &[1], &[3], &[3], &[2]]), 2), 3);
        assert_eq!(optimum(&trace(&[&[1], &[2]]), 0), 0);
    }

    #[test]
    fn lines_that_are_no_request_are_named() {
        let text =
            "{\"timestamp\":0,\"input_length\":3,\"output_length\":1,\"hash_ids\":[5,6]}\n\n";
        let read = Trace::read(text.as_bytes()).expect("good");
        assert_eq!((read.requests(), read.accesses()), (1, 2));
        let error = Trace::read(format!("{text}[1]\n").as_bytes()).expect_err("bad");
        assert!(error.to_string().starts_with("line 3 is no request"), "{error}");
        let error = Trace::read(&b"\n{\xff"[..]).expect_err("no UTF-8");
        assert!(error.to_string().starts_with("line 2 is no request"), "{error}");
    }

    #[test]
    fn a_replay_that_is_told_to_stop_stops() {
        let trace = trace(&[&[1, 2], &[1, 2], &[1, 2]]);
        assert_eq!(trace.distinct(), 2);
        let mut left = 2;
        let mut go_on = || {
            left -= 1;
            left >= 0
        };
        let outcome = replay_while(&trace, PolicyKind::Lru, 4, &mut go_on).expect("small");
        assert_eq!((outcome.requests, outcome.block_hits), (2, 2));
        assert_eq!(optimum_while(&trace, 4, &mut go_on), 0);
    }
}
