//! A chunk on its way: what happens before and after its transfer.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::store::Store;
use crate::checksum::Checksum;
use crate::index::{Slot, Token};
use crate::log_limit::limited;
use crate::tier::io::{Operation, Transfer};
use crate::tier::lanes::Lane;
use crate::tier::memory::Reservation;
use crate::tier::{Failure, LoadJob, StoreJob, TierError};

/// One chunk from the primary tier into the store.
pub(super) struct StoreChunk {
    store: Arc<Store>,
    job: StoreJob,
    index: usize,
    start: Instant,
    /// Taken back when the chunk ends in whatever other way than by `end`.
    reserved: Option<(Reservation, Checksum)>,
}

impl StoreChunk {
    pub(super) fn new(store: &Arc<Store>, job: &StoreJob, index: usize) -> Self {
        let (store, job) = (Arc::clone(store), job.clone());
        Self { store, job, index, start: Instant::now(), reserved: None }
    }

    fn prepare(&mut self) -> Result<Option<Transfer>, TierError> {
        let checksum = self.job.checksum(self.index);
        let Some(reservation) = self.store.reserve(self.job.key(self.index))? else {
            return Ok(None);
        };
        let slot = reservation.slot;
        self.reserved = Some((reservation, checksum));
        let (file, offset) = self.store.open_for_writing(slot)?;
        let (region, from) = (Arc::clone(self.job.region()), self.job.chunks().slots[self.index]);
        // SAFETY: the job keeps its slots pinned, and this operation keeps the job.
        Ok(Some(unsafe { Transfer::new(Lane::Store, file, offset, region, from) }))
    }

    /// Reports what became of it. Keys that it evicted are gone in any case.
    fn report(&mut self, outcome: Result<(), Failure>) {
        let reserved = self.reserved.take();
        if let Some((reservation, _)) = &reserved
            && outcome.is_err()
        {
            self.store.take_back(reservation.token);
        }
        let evicted = reserved.as_ref().map(|(reservation, _)| &reservation.evicted);
        self.job.report(self.index, outcome, self.store.share(self.start), evicted);
    }

    fn fail(&mut self, error: &TierError) {
        limited!(self.store.log, warn, "store failed: {error}");
        self.report(Err(Failure::from(error)));
    }
}

impl Operation for StoreChunk {
    fn begin(&mut self) -> Option<Transfer> {
        self.start = Instant::now();
        if self.job.is_cancelled() {
            self.report(Err(Failure::Lost));
            return None;
        }
        match self.prepare() {
            Ok(Some(transfer)) => return Some(transfer),
            // It is here already.
            Ok(None) => self.report(Ok(())),
            Err(error) => self.fail(&error),
        }
        None
    }

    fn end(&mut self, outcome: io::Result<()>) {
        let Some((reservation, checksum)) = &self.reserved else {
            return;
        };
        let (token, slot) = (reservation.token, reservation.slot);
        let key = self.job.key(self.index);
        let written = match outcome {
            Ok(()) => self.store.written(key, token, slot, *checksum),
            Err(source) => Err(self.store.failed("writing", source)),
        };
        match written {
            Ok(()) => self.report(Ok(())),
            Err(error) => self.fail(&error),
        }
    }
}

impl Drop for StoreChunk {
    fn drop(&mut self) {
        // Not after a report, which took it: the engine dropped the chunk half-way.
        if let Some((reservation, _)) = self.reserved.take() {
            self.store.take_back(reservation.token);
        }
    }
}

/// One chunk from the store into the primary tier.
pub(super) struct LoadChunk {
    store: Arc<Store>,
    job: LoadJob,
    index: usize,
    start: Instant,
    /// Pinned until the bytes are read, whatever ends it.
    pinned: Option<(Token, Slot)>,
}

impl LoadChunk {
    pub(super) fn new(store: &Arc<Store>, job: &LoadJob, index: usize) -> Self {
        let (store, job) = (Arc::clone(store), job.clone());
        Self { store, job, index, start: Instant::now(), pinned: None }
    }

    fn prepare(&mut self) -> Result<Transfer, TierError> {
        let pinned = self.store.pin(self.job.key(self.index))?;
        self.pinned = Some(pinned);
        let (file, offset) = self.store.place(pinned.1)?;
        let (region, to) = (Arc::clone(self.job.region()), self.job.chunks().slots[self.index]);
        // SAFETY: the slot is the job's alone, this operation is the only one for this chunk,
        // and it keeps the job.
        Ok(unsafe { Transfer::new(Lane::Load, file, offset, region, to) })
    }

    fn unpin(&mut self) {
        if let Some((token, _)) = self.pinned.take() {
            self.store.unpin(token);
        }
    }

    fn deliver(&mut self, outcome: io::Result<()>, slot: Slot) -> Result<(), TierError> {
        let stored = self.store.slots.payload(slot);
        let read = outcome.map_err(|source| match source.kind() {
            // The segment was cut.
            io::ErrorKind::UnexpectedEof => {
                TierError::Corrupt { what: "segment", key: self.job.key(self.index).into() }
            }
            _ => self.store.failed("reading", source),
        });
        // The bytes are out of the slot, or never will be.
        self.unpin();
        let busy = self.store.share(self.start);
        match read {
            Ok(()) => {
                let delivered = self.job.deliver(self.index, stored, busy);
                // The job has added the time of its checksum: it is nobody else's.
                self.store.share(self.start);
                delivered
            }
            Err(error) => {
                self.job.fail(self.index, Failure::from(&error), busy);
                Err(error)
            }
        }
    }
}

impl Operation for LoadChunk {
    fn begin(&mut self) -> Option<Transfer> {
        self.start = Instant::now();
        if self.job.is_cancelled() {
            self.job.fail(self.index, Failure::Lost, self.store.share(self.start));
            return None;
        }
        match self.prepare() {
            Ok(transfer) => Some(transfer),
            Err(error) => {
                self.unpin();
                limited!(self.store.log, warn, "load failed: {error}");
                self.job.fail(self.index, Failure::from(&error), self.store.share(self.start));
                None
            }
        }
    }

    fn end(&mut self, outcome: io::Result<()>) {
        let Some((_, slot)) = self.pinned else {
            return;
        };
        if let Err(error) = self.deliver(outcome, slot) {
            limited!(self.store.log, warn, "load failed: {error}");
            let bad = matches!(error, TierError::Corrupt { .. });
            if bad && self.store.discard(self.job.key(self.index)) {
                self.job.dropped(self.index);
            }
        }
    }
}

impl Drop for LoadChunk {
    fn drop(&mut self) {
        self.unpin();
    }
}
