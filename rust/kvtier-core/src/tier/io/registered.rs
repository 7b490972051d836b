//! The pieces of the primary region that are registered with a ring.

use std::sync::Arc;

use io_uring::Submitter;

use super::Transfer;
use crate::region::Region;

/// The smallest piece; larger ones for regions of more than [`MOST`] of these.
const PIECE: usize = 16 << 20;
/// The most pieces that the kernel takes.
const MOST: usize = 1 << 14;

/// What is registered.
#[derive(Default)]
pub(super) enum Registered {
    /// Nothing yet.
    #[default]
    Nothing,
    /// Pieces of this region, as they were used.
    Pieces { region: Arc<Region>, slots: u32, done: Box<[bool]> },
    /// Nothing, and nothing will be.
    Refused,
}

impl Registered {
    /// The number of the piece that a transfer's memory is in, registered now if it was not.
    pub(super) fn piece(&mut self, ring: &Submitter<'_>, transfer: &Transfer) -> Option<u16> {
        if matches!(self, Self::Nothing) {
            *self = Self::prepare(ring, &transfer.region);
        }
        let Self::Pieces { region, slots, done } = self else {
            return None;
        };
        if !Arc::ptr_eq(region, &transfer.region) {
            return None;
        }
        let piece = (transfer.slot / *slots) as usize;
        if !done[piece] {
            let first = piece as u32 * *slots;
            let count = (*slots).min(region.slots() - first) as usize;
            let memory = libc::iovec {
                iov_base: region.slot_ptr(first).cast(),
                iov_len: count * region.slot_bytes(),
            };
            // SAFETY: the slots lie in the mapping, and it lives as long as the ring: both end
            // with the reactor, the ring first.
            let registered = unsafe { ring.register_buffers_update(piece as u32, &[memory], None) };
            if let Err(error) = registered {
                log::info!("transfers go without registered buffers: {error}");
                *self = Self::Refused;
                return None;
            }
            done[piece] = true;
        }
        Some(piece as u16)
    }

    fn prepare(ring: &Submitter<'_>, region: &Arc<Region>) -> Self {
        let piece = PIECE.max(region.bytes().div_ceil(MOST - 1));
        let slots = piece.div_ceil(region.slot_bytes()) as u32;
        let pieces = region.slots().div_ceil(slots);
        match ring.register_buffers_sparse(pieces) {
            Ok(()) => Self::Pieces {
                region: Arc::clone(region),
                slots,
                done: vec![false; pieces as usize].into(),
            },
            Err(error) => {
                log::info!("transfers go without registered buffers: {error}");
                Self::Refused
            }
        }
    }
}
