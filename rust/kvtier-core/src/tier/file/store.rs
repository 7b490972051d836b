//! The chunks of one directory: index, headers and segments, kept in step.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::config::FileSettings;
use super::facts::{CHECKPOINT_FILE, Facts, JOURNAL_FILE};
use super::format::{Header, PAGE, Told};
use super::headers::{HEADERS_FILE, Headers};
use super::identity::Identity;
use super::layout::Layout;
use super::owner::own;
use super::recovery::{Valid, recover};
use super::segments::{Segments, lengths, segment_name};
use super::slots::Slots;
use super::space::{free_bytes, io_error, write_error};
use crate::checksum::Checksum;
use crate::index::{ANYONE, Index, Pin, Slot, Token};
use crate::key::KeyBatch;
use crate::log_limit::LogLimit;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::tier::io::DataFile;
use crate::tier::memory::{self, Reservation, detach_unpinned};
use crate::tier::{Medium, Presence, TierError, Usage};

/// The shape of the chunks, and whose they are.
#[derive(Debug, Clone)]
pub(super) struct Chunk<'a> {
    pub(super) bytes: usize,
    pub(super) key_bytes: usize,
    pub(super) namespace: &'a str,
}

/// See the module. Shared by the tier, its operations and its flusher.
pub(super) struct Store {
    directory: PathBuf,
    layout: Layout,
    namespace: Checksum,
    capacity_bytes: u64,
    pub(super) index: Mutex<Index>,
    pub(super) slots: Slots,
    headers: Headers,
    segments: Segments,
    pub(super) log: LogLimit,
    /// Holds the lock until `release`.
    owner: Mutex<Option<File>>,
    opened: Instant,
    /// Nanoseconds from `opened` to the end of the last operation.
    last_end: AtomicU64,
}

/// A store that this process owns, before it is known what is in it.
pub(super) struct Owned {
    layout: Layout,
    identity: Identity,
    owner: File,
}

impl Owned {
    /// Takes the directory of `settings` over; makes it and its identity if there is none.
    ///
    /// # Errors
    /// [`TierError`]; nothing was changed then, but for a directory that may have been made.
    pub(super) fn take(settings: &FileSettings, chunk: &Chunk<'_>) -> Result<Self, TierError> {
        let (path, capacity_bytes) = (&settings.path, settings.capacity_bytes);
        let slot_bytes = (chunk.bytes as u64).next_multiple_of(PAGE as u64);
        let mut identity = Identity {
            chunk_bytes: chunk.bytes as u64,
            key_bytes: chunk.key_bytes,
            slots_per_segment: Layout::segment_slots(capacity_bytes, slot_bytes),
            capacity_bytes,
            namespace: chunk.namespace.to_owned(),
        };
        // Before anything is made, so that a refusal leaves nothing behind.
        let layout = |identity: &Identity| {
            let bytes = identity.text().len() as u64;
            Layout::within(capacity_bytes, slot_bytes, identity.slots_per_segment, bytes)
                .ok_or_else(|| TierError::Capacity {
                    medium: Medium::File.as_str(),
                    given: capacity_bytes,
                    needed: Layout::needed(slot_bytes, bytes),
                })
        };
        layout(&identity)?;
        let found = Identity::read(path)?;
        if found.is_none() {
            let available = free_bytes(path)?;
            if capacity_bytes > available {
                return Err(TierError::DeviceTooSmall {
                    path: path.clone(),
                    wanted: capacity_bytes,
                    available,
                });
            }
            fs::create_dir_all(path)
                .map_err(|source| write_error("making directory", path, source))?;
        }
        let owner = own(path)?;
        // Read once more: another process may have made the store meanwhile.
        if let Some(found) = Identity::read(path)? {
            identity.check(&found, path)?;
            identity.slots_per_segment = found.slots_per_segment.max(1);
            if identity != found {
                identity.write(path)?;
            }
        } else {
            // What is here without an identity is nobody's.
            remove_leftovers(path)?;
            identity.write(path)?;
        }
        Ok(Self { layout: layout(&identity)?, identity, owner })
    }
}

/// Removes the files of a store that has no identity.
fn remove_leftovers(directory: &Path) -> Result<(), TierError> {
    let segments = lengths(directory)?.into_keys().map(segment_name);
    let others = [HEADERS_FILE, CHECKPOINT_FILE, JOURNAL_FILE].map(str::to_owned);
    for name in segments.chain(others) {
        let path = directory.join(name);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(write_error("removing", &path, source));
            }
            _ => {}
        }
    }
    Ok(())
}

impl Store {
    /// Opens what is owned, and finds its chunks again.
    ///
    /// # Errors
    /// [`TierError`] of the files; the owner's lock is given back.
    pub(super) fn open(
        owned: Owned,
        settings: &FileSettings,
        direct: bool,
    ) -> Result<(Arc<Self>, Facts), TierError> {
        let Owned { layout, identity, owner } = owned;
        let path = &settings.path;
        let namespace = identity.namespace_checksum();
        let headers = Headers::open(path, &layout)?;
        let (segments, found) = Segments::open(path, layout, direct, settings.min_free_bytes)?;
        let mut index = Index::new(layout.slots, identity.key_bytes, settings.policy)?;
        index.set_limit(segments.limit());
        let slots = Slots::new(layout.slots).ok_or_else(|| {
            io_error("remembering the slots of", path, io::ErrorKind::OutOfMemory.into())
        })?;
        let valid = Valid {
            layout,
            namespace,
            key_bytes: identity.key_bytes,
            chunk_bytes: identity.chunk_bytes,
            segments: &found,
        };
        let (facts, report) = recover(path, &valid, &headers, &mut index, &slots)?;
        if report.bad_headers > 0 || report.bad_pages > 0 {
            log::warn!(
                "{}: {} chunks found; dropped {} damaged headers, skipped {} damaged pages of facts",
                path.display(),
                report.chunks,
                report.bad_headers,
                report.bad_pages
            );
        }
        let store = Self {
            directory: path.clone(),
            layout,
            namespace,
            capacity_bytes: settings.capacity_bytes,
            index: Mutex::new(index),
            slots,
            headers,
            segments,
            log: LogLimit::default(),
            owner: Mutex::new(Some(owner)),
            opened: Instant::now(),
            last_end: AtomicU64::new(0),
        };
        Ok((Arc::new(store), facts))
    }

    /// Says for each of `keys[wanted[i]]` whether it is here.
    pub(super) fn lookup(&self, keys: &KeyBatch, wanted: &[u32], presence: &mut [Presence]) {
        memory::lookup(&self.index.lock(), keys, wanted, presence);
    }

    /// Marks keys as used, the first one last.
    pub(super) fn touch(&self, keys: &KeyBatch) {
        let mut index = self.index.lock();
        for key in keys.iter().rev() {
            if let Some(token) = index.find(key) {
                index.touch(token, ANYONE);
                self.slots.touch(index.slot(token));
            }
        }
    }

    /// A slot for a new key; `None` when the key is here already, which counts as use. Grows the
    /// store before it evicts.
    pub(super) fn reserve(&self, key: &[u8]) -> Result<Option<Reservation>, TierError> {
        let mut full_at = None;
        loop {
            let limit = {
                let mut index = self.index.lock();
                let known = index.find(key);
                let limit = index.limit();
                let may_grow = limit < index.capacity() && full_at != Some(limit);
                if known.is_some() || index.free() > 0 || !may_grow {
                    if let Some(token) = known {
                        self.slots.touch(index.slot(token));
                    }
                    return memory::reserve(&mut index, key);
                }
                limit
            };
            let grown = self.segments.grow(limit);
            let mut index = self.index.lock();
            // Others may have grown it further since.
            let now = grown.max(index.limit());
            index.set_limit(now);
            full_at = (now == limit).then_some(limit);
        }
    }

    /// Where a reserved slot's payload goes, after its old header is gone.
    pub(super) fn open_for_writing(&self, slot: Slot) -> Result<(Arc<DataFile>, u64), TierError> {
        if self.slots.has_header(slot) {
            self.headers.clear(slot)?;
            self.slots.cleared(slot);
        }
        self.place(slot)
    }

    /// A reserved slot's payload is written: the chunk is here.
    pub(super) fn written(
        &self,
        key: &[u8],
        token: Token,
        slot: Slot,
        payload: Checksum,
    ) -> Result<(), TierError> {
        self.segments.written(slot);
        let sequence = self.slots.next_tick();
        // First: a header whose writing fails may be there all the same, and goes before the slot
        // is used again.
        self.slots.written(slot, sequence, payload);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.headers.write(
            slot,
            &Header::new(&Told {
                key,
                slot,
                sequence,
                namespace: self.namespace,
                payload_bytes: self.layout.slot_bytes,
                payload,
                written_at: now.map_or(0, |passed| passed.as_secs()),
            }),
        )?;
        self.index.lock().commit(token);
        Ok(())
    }

    /// A reserved slot's chunk will not come.
    pub(super) fn take_back(&self, token: Token) {
        self.index.lock().abort(token);
    }

    /// Pins a chunk for reading.
    pub(super) fn pin(&self, key: &[u8]) -> Result<(Token, Slot), TierError> {
        let pinned = memory::pin(&self.index, key)?;
        self.slots.hit(pinned.1);
        Ok(pinned)
    }

    /// Gives a pin back.
    pub(super) fn unpin(&self, token: Token) {
        let unpinned = self.index.lock().unpin(token, Pin::Job);
        debug_assert!(unpinned.is_ok());
    }

    /// Where a slot's payload is.
    pub(super) fn place(&self, slot: Slot) -> Result<(Arc<DataFile>, u64), TierError> {
        self.segments.place(slot).map_err(|source| self.failed("opening", source))
    }

    /// Removes a copy that turned out bad; false if it is not here, or somebody still reads it.
    pub(super) fn discard(&self, key: &[u8]) -> bool {
        let Some(slot) = detach_unpinned(&mut self.index.lock(), key) else {
            return false;
        };
        // The slot is nobody's until it is reclaimed, so this cannot hit another's header.
        match self.headers.clear(slot) {
            Ok(()) => self.slots.cleared(slot),
            Err(error) => log::warn!("a damaged chunk keeps its header until reuse: {error}"),
        }
        self.index.lock().reclaim(slot);
        true
    }

    /// The share of an operation that began at `start` and ends now in the time that the store
    /// works: operations overlap, and each is charged what passed since another one ended. So
    /// bytes over seconds is the speed of the store, whatever its depth.
    pub(super) fn share(&self, start: Instant) -> Duration {
        let now = self.opened.elapsed();
        let nanoseconds = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let last = Duration::from_nanos(self.last_end.fetch_max(nanoseconds, Ordering::Relaxed));
        now.saturating_sub(last.max(start.saturating_duration_since(self.opened)))
    }

    /// A transfer that failed.
    pub(super) fn failed(&self, what: &'static str, source: io::Error) -> TierError {
        io_error(what, &self.directory, source)
    }

    /// Brings what is complete to the disk: payloads before the headers that vouch for them.
    pub(super) fn sync(&self) -> Result<(), TierError> {
        self.segments.sync()?;
        self.headers.sync()
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn usage(&self) -> Usage {
        let chunks = self.index.lock().len() as u64;
        Usage {
            capacity_bytes: self.capacity_bytes,
            used_bytes: chunks * self.layout.slot_bytes,
            chunks,
        }
    }

    /// Lets go of the directory.
    pub(super) fn release(&self) {
        *self.owner.lock() = None;
    }
}
