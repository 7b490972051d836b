//! What a store holds, found again: headers say what, facts in which order.

use super::facts::Facts;
use super::format::Told;
use super::headers::Headers;
use super::layout::Layout;
use super::slots::Slots;
use crate::checksum::Checksum;
use crate::index::{Index, Slot};
use crate::key::KeyBatch;
use crate::tier::TierError;

/// Which headers count.
#[derive(Debug, Clone)]
pub(super) struct Valid<'a> {
    pub(super) layout: Layout,
    pub(super) namespace: Checksum,
    pub(super) key_bytes: usize,
    pub(super) chunk_bytes: u64,
    /// Slots that each segment had when it was found.
    pub(super) segments: &'a [u32],
}

impl Valid<'_> {
    /// Why the header at `slot`, which tells this, does not count.
    pub(super) fn refuse(&self, slot: Slot, told: Option<&Told<'_>>) -> Option<&'static str> {
        let Some(told) = told else {
            return Some("header");
        };
        if told.slot != slot
            || told.key.len() != self.key_bytes
            || told.payload_bytes != self.chunk_bytes
        {
            return Some("header of another place");
        }
        if told.namespace != self.namespace {
            return Some("header of another namespace");
        }
        let (segment, _) = self.layout.place(slot);
        let within = slot % self.layout.segment_slots;
        if slot >= self.layout.slots
            || self.segments.get(segment as usize).is_none_or(|&slots| within >= slots)
        {
            return Some("segment");
        }
        None
    }
}

/// What recovery found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) chunks: u64,
    /// Headers that did not count and were zeroed.
    pub(super) bad_headers: u64,
    /// Earlier copies of a chunk.
    pub(super) copies: u64,
    /// Pages of the checkpoint and the journal that were skipped.
    pub(super) bad_pages: u64,
}

/// Fills `index` and `slots`, which are empty, and zeroes headers that do not count.
pub(super) fn recover(
    directory: &std::path::Path,
    valid: &Valid<'_>,
    headers: &Headers,
    index: &mut Index,
    slots: &Slots,
) -> Result<(Facts, Report), TierError> {
    let mut keys = KeyBatch::empty(valid.key_bytes);
    let mut at = Vec::new();
    let mut bad = Vec::new();
    headers.sweep(|slot, header| {
        let told = header.told();
        match told.filter(|told| valid.refuse(slot, Some(told)).is_none()) {
            Some(told) if keys.push(told.key).is_ok() => {
                at.push(slot);
                slots.written(slot, told.sequence, told.payload);
                slots.pass_tick(told.sequence);
            }
            _ => bad.push(slot),
        }
    })?;
    let (facts, pages) = Facts::open(directory, valid.layout, valid.namespace, slots)?;
    let mut order: Vec<(u64, u32)> =
        at.iter().zip(0..).map(|(&slot, number)| (slots.used(slot), number)).collect();
    order.sort_unstable();
    let mut copies = Vec::new();
    let found = order.iter().map(|&(_, number)| (keys.get(number as usize), at[number as usize]));
    index.restore(found, |slot| copies.push(slot));
    for &slot in bad.iter().chain(&copies) {
        headers.clear(slot)?;
    }
    for &slot in &copies {
        slots.cleared(slot);
    }
    let report = Report {
        chunks: index.len() as u64,
        bad_headers: bad.len() as u64,
        copies: copies.len() as u64,
        bad_pages: pages.bad,
    };
    Ok((facts, report))
}
