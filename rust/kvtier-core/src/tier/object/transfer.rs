//! One chunk, from its slot to its object and back.

use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::{join_all, try_join_all};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload,
};
use tokio::time::timeout_at;

use super::Shared;
use super::cause::{Cause, is_missing, is_past_the_end, is_unsupported};
use crate::checksum::Checksum;
use crate::log_limit::limited;
use crate::sync::atomic::Ordering;
use crate::tier::network::{BadCopy, Counted, ENVELOPE_BYTES, Envelope, NetworkError, Retries};
use crate::tier::{Failure, LoadJob, StoreJob, TierError};

/// What is left to remove a bad copy in, or the parts of a store that failed.
const CLEAN_UP: Duration = Duration::from_secs(2);

/// Brings a chunk, or fails it before `deadline`.
pub(super) async fn load_chunk(shared: &Shared, job: &LoadJob, index: usize, deadline: Instant) {
    if job.is_cancelled() {
        return job.fail(index, Failure::Lost, Duration::ZERO);
    }
    let start = Instant::now();
    let key = job.key(index);
    let work = async {
        let _place = shared.loads.take(shared.layout.object_bytes()).await;
        let mut tries = Tries::until(shared, deadline);
        loop {
            match get(shared, job, index).await {
                Ok(stored) => return Ok(stored),
                Err(cause) => tries.again(cause).await?,
            }
        }
    };
    let delivered = match shared.before(deadline, "GET", work).await {
        Ok(stored) => job
            .deliver(index, stored, start.elapsed())
            .map_err(|_| TierError::BadCopy { key: key.into(), bad: BadCopy::Checksum }),
        Err(error) => {
            job.fail(index, Failure::from(&error), start.elapsed());
            Err(error)
        }
    };
    if let Err(error) = delivered {
        limited!(shared.log, warn, "tier {:?}: load failed: {error}", shared.name);
        shared.count(&error);
        match error {
            TierError::Missing(_) => shared.inventory.gone(key),
            TierError::BadCopy { .. } if shared.remove(key).await => job.dropped(index),
            _ => {}
        }
    }
}

/// Takes a chunk, or fails it before `deadline`.
pub(super) async fn store_chunk(shared: &Shared, job: &StoreJob, index: usize, deadline: Instant) {
    if job.is_cancelled() {
        return job.report(index, Err(Failure::Lost), Duration::ZERO, None);
    }
    let start = Instant::now();
    let key = job.key(index);
    let work = async {
        if shared.inventory.is_present(key) {
            return Ok(());
        }
        let _place = shared.stores.take(shared.layout.object_bytes()).await;
        let mut tries = Tries::until(shared, deadline);
        loop {
            match put(shared, job, index).await {
                Ok(()) => return Ok(()),
                Err(cause) => tries.again(cause).await?,
            }
        }
    };
    let outcome = match shared.before(deadline, "PUT", work).await {
        Ok(()) => {
            shared.inventory.stored(key);
            Ok(())
        }
        Err(error) => {
            limited!(shared.log, warn, "tier {:?}: store failed: {error}", shared.name);
            shared.count(&error);
            Err(Failure::from(&error))
        }
    };
    job.report(index, outcome, start.elapsed(), None);
}

/// Tries until it works, what is wrong lasts, or there is no time left.
pub(super) struct Tries<'a> {
    shared: &'a Shared,
    retries: Retries,
}

impl<'a> Tries<'a> {
    pub(super) fn until(shared: &'a Shared, deadline: Instant) -> Self {
        Self { shared, retries: Retries::until(deadline) }
    }

    /// Waits for the next try, unless `cause` says that there is to be none.
    pub(super) async fn again(&mut self, cause: Cause) -> Result<(), TierError> {
        let pause = self.retries.pause(Instant::now()).filter(|_| cause.passing);
        let Some(pause) = pause else {
            return Err(cause.error);
        };
        // The last one is counted by whoever is told.
        self.shared.count(&cause.error);
        self.shared.counters.count(Counted::Retries);
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

impl Shared {
    /// Gives up at `deadline`.
    async fn before<T>(
        &self,
        deadline: Instant,
        what: &'static str,
        work: impl Future<Output = Result<T, TierError>>,
    ) -> Result<T, TierError> {
        timeout_at(deadline.into(), work).await.unwrap_or_else(|_| {
            Err(NetworkError::TimedOut { node: self.node.clone(), what }.into())
        })
    }

    /// Hides a bad copy and removes it; false if that did not work.
    async fn remove(&self, key: &[u8]) -> bool {
        self.inventory.hide(key);
        let path = self.layout.path(key);
        let removal = async { Ok(self.store.delete(&path).await) };
        let error = match self.before(Instant::now() + CLEAN_UP, "DELETE", removal).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) if is_missing(&error) => None,
            Ok(Err(error)) => Some(Cause::of(&error, &self.node, "DELETE").error),
            Err(error) => Some(error),
        };
        if let Some(error) = error {
            limited!(self.log, warn, "tier {:?}: a bad copy stays: {error}", self.name);
            self.count(&error);
            return false;
        }
        self.counters.count(Counted::Removed);
        self.inventory.removed(key);
        true
    }
}

/// One try to bring a chunk into its slot. Gives the checksum it was stored with.
async fn get(shared: &Shared, job: &LoadJob, index: usize) -> Result<Checksum, Cause> {
    let (layout, key) = (&shared.layout, job.key(index));
    let path = layout.path(key);
    // SAFETY: the task of this chunk is the only one that asks for its place, one try at a time,
    // and the place goes with the try, before the chunk is delivered.
    let mut rest: &mut [u8] = unsafe { job.place(index) };
    let mut header = [0; ENVELOPE_BYTES];
    let mut parts = Vec::new();
    let mut front: &mut [u8] = &mut header;
    let mut at = 0;
    while at < layout.object_bytes() {
        let end = (at + shared.part_bytes).min(layout.object_bytes());
        let (part, others) = rest.split_at_mut((end - at) as usize - front.len());
        parts.push(fill(shared, &path, at..end, [std::mem::take(&mut front), part]));
        (rest, at) = (others, end);
    }
    // All of them: an object that is too short is told best by the part that says how long it is.
    let done = join_all(parts).await;
    let bad = |cause: &Cause| matches!(cause.error, TierError::BadCopy { .. });
    let mut failed: Vec<Cause> = done.into_iter().filter_map(Result::err).collect();
    let worst = failed.iter().position(bad).unwrap_or(0);
    if worst < failed.len() {
        let cause = failed.swap_remove(worst);
        return Err(match cause.error {
            TierError::BadCopy { bad, .. } => Cause::lasting(bad_copy(key, bad)),
            TierError::Missing(_) => Cause::lasting(TierError::Missing(key.into())),
            _ => cause,
        });
    }
    match Envelope::decode(&header, layout.namespace, key, layout.chunk_bytes) {
        Ok(envelope) => Ok(envelope.checksum),
        Err(bad) => Err(Cause::lasting(bad_copy(key, bad))),
    }
}

/// Receives a range of an object into two places, one behind the other.
async fn fill(
    shared: &Shared,
    path: &Path,
    range: Range<u64>,
    places: [&mut [u8]; 2],
) -> Result<(), Cause> {
    let whole = shared.layout.object_bytes();
    let length = |found| BadCopy::Length { found, expected: whole };
    // Whose chunk it is, the caller knows.
    let bad = |bad| Cause::lasting(bad_copy(&[], bad));
    // All of an object is asked for without a range: the answer says how long it is.
    let part = (range != (0..whole)).then(|| range.clone().into());
    let options = GetOptions { range: part, ..GetOptions::default() };
    let result = shared.store.get_opts(path, options).await.map_err(|error| {
        if is_missing(&error) {
            Cause::lasting(TierError::Missing((&[][..]).into()))
        } else if is_past_the_end(&error) {
            bad(length(range.start))
        } else {
            Cause::of(&error, &shared.node, "GET")
        }
    })?;
    if result.meta.size != whole {
        return Err(bad(length(result.meta.size)));
    }
    let cut = || {
        let source = std::io::ErrorKind::UnexpectedEof.into();
        NetworkError::Unreachable { what: "GET", node: shared.node.clone(), source }
    };
    let mut places = places.into_iter();
    let mut place: &mut [u8] = &mut [];
    let mut stream = result.into_stream();
    while let Some(bytes) = stream.next().await {
        let mut bytes = bytes.map_err(|error| Cause::of(&error, &shared.node, "GET"))?;
        while !bytes.is_empty() {
            if place.is_empty() {
                let Some(next) = places.next() else {
                    return Err(Cause::passing(cut()));
                };
                place = next;
            }
            let now = bytes.split_to(bytes.len().min(place.len()));
            let (here, behind) = place.split_at_mut(now.len());
            here.copy_from_slice(&now);
            place = behind;
        }
    }
    if place.is_empty() && places.all(|place| place.is_empty()) {
        Ok(())
    } else {
        Err(Cause::passing(cut()))
    }
}

/// Bytes of a chunk that is being stored, without a copy: the slot is pinned while they live.
struct SlotBytes {
    job: StoreJob,
    index: usize,
    range: Range<usize>,
}

impl AsRef<[u8]> for SlotBytes {
    fn as_ref(&self) -> &[u8] {
        &self.job.bytes(self.index)[self.range.clone()]
    }
}

/// One try to store a chunk.
async fn put(shared: &Shared, job: &StoreJob, index: usize) -> Result<(), Cause> {
    let (layout, key) = (&shared.layout, job.key(index));
    let path = layout.path(key);
    let envelope = Envelope { checksum: job.checksum(index), parts: 1, writer: 0 };
    let header =
        Bytes::copy_from_slice(&envelope.encode(layout.namespace, key, layout.chunk_bytes));
    let slot = |range| Bytes::from_owner(SlotBytes { job: job.clone(), index, range });
    let failed = |error: Error| Cause::of(&error, &shared.node, "PUT");
    if layout.object_bytes() > shared.part_bytes {
        let part_bytes = shared.part_bytes as usize;
        let first = part_bytes - ENVELOPE_BYTES;
        let starts = (first..layout.chunk_bytes).step_by(part_bytes);
        let others = starts.map(|start| {
            PutPayload::from(slot(start..(start + part_bytes).min(layout.chunk_bytes)))
        });
        let parts = std::iter::once([header, slot(0..first)].into_iter().collect()).chain(others);
        return put_parts(shared, &path, parts).await;
    }
    let payload =
        || -> PutPayload { [header.clone(), slot(0..layout.chunk_bytes)].into_iter().collect() };
    // A bad copy is written over, not spared.
    if shared.conditional_put.load(Ordering::Relaxed) && !shared.inventory.is_hidden(key) {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match shared.store.put_opts(&path, payload(), options).await {
            Ok(_) | Err(Error::AlreadyExists { .. }) => return Ok(()),
            Err(error) if is_unsupported(&error) => {
                shared.conditional_put.store(false, Ordering::Relaxed);
                log::warn!(
                    "tier {:?}: {} can not store only what is absent: chunks are written again",
                    shared.name,
                    shared.node
                );
            }
            Err(error) => return Err(failed(error)),
        }
    }
    shared.store.put(&path, payload()).await.map(drop).map_err(failed)
}

/// Stores an object in parts, side by side; it is there when all of them are.
async fn put_parts(
    shared: &Shared,
    path: &Path,
    parts: impl Iterator<Item = PutPayload>,
) -> Result<(), Cause> {
    let options = PutMultipartOptions::default();
    let failed = |error: Error| Cause::of(&error, &shared.node, "PUT");
    let mut upload = shared.store.put_multipart_opts(path, options).await.map_err(failed)?;
    let sent: Vec<_> = parts.map(|part| upload.put_part(part)).collect();
    let done = match try_join_all(sent).await {
        Ok(_) => upload.complete().await.map(drop),
        Err(error) => Err(error),
    };
    if let Err(error) = done {
        // If that fails as well, the bucket's rule for unfinished uploads removes them.
        let _ = tokio::time::timeout(CLEAN_UP, upload.abort()).await;
        return Err(failed(error));
    }
    Ok(())
}

fn bad_copy(key: &[u8], bad: BadCopy) -> TierError {
    TierError::BadCopy { key: key.into(), bad }
}
