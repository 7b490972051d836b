//! The payload files: opened, grown step by step, synced.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::layout::Layout;
use super::space::{allocate, free_bytes, io_error, write_error};
use crate::index::Slot;
use crate::log_limit::{LogLimit, limited};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex};
use crate::tier::TierError;
use crate::tier::io::DataFile;

/// How long a store that could not grow waits before it tries again.
const PAUSE: Duration = Duration::from_secs(1);

/// The name of a segment's file.
pub(super) fn segment_name(segment: u32) -> String {
    format!("segment-{segment:05}")
}

struct Growth {
    /// Slots that are allocated: all below this one.
    limit: u32,
    /// Whether somebody is at it.
    running: bool,
    /// Not before this.
    next: Option<Instant>,
}

pub(super) struct Segments {
    directory: PathBuf,
    layout: Layout,
    direct: bool,
    min_free_bytes: u64,
    files: Box<[OnceLock<Arc<DataFile>>]>,
    /// Written to since the last sync.
    dirty: Box<[AtomicBool]>,
    /// A file was made since the last sync.
    new_file: AtomicBool,
    growth: Mutex<Growth>,
    grown: Condvar,
    log: LogLimit,
}

impl Segments {
    /// Opens the segments that are there; says for each how many slots it had. Segments past
    /// the layout are removed, and one that is longer is cut.
    pub(super) fn open(
        directory: &Path,
        layout: Layout,
        direct: bool,
        min_free_bytes: u64,
    ) -> Result<(Self, Vec<u32>), TierError> {
        let lengths = lengths(directory)?;
        let count = layout.segments();
        let store = Self {
            directory: directory.to_owned(),
            layout,
            direct,
            min_free_bytes,
            files: (0..count).map(|_| OnceLock::new()).collect(),
            dirty: (0..count).map(|_| AtomicBool::new(false)).collect(),
            new_file: AtomicBool::new(false),
            growth: Mutex::new(Growth { limit: 0, running: false, next: None }),
            grown: Condvar::default(),
            log: LogLimit::default(),
        };
        for (&segment, _) in lengths.range(count..) {
            let path = store.path(segment);
            fs::remove_file(&path).map_err(|source| write_error("removing", &path, source))?;
        }
        let last = lengths.range(..count).next_back().map_or(0, |(&segment, _)| segment + 1);
        let mut found = Vec::new();
        for segment in 0..last {
            let full = layout.slots_of(segment);
            let length = lengths.get(&segment).copied().unwrap_or(0);
            let had = u32::try_from(length / layout.slot_bytes).unwrap_or(u32::MAX).min(full);
            // What lies before another segment was whole once: it is mended.
            let slots = if segment + 1 < last { full } else { had };
            let path = store.path(segment);
            let allocated = store
                .file(segment)
                .and_then(|file| allocate(&file.file, u64::from(slots) * layout.slot_bytes));
            match allocated {
                Ok(()) => {}
                Err(error) if is_full(&error) => {
                    log::warn!("{}: no room to mend it: {error}", path.display());
                    break;
                }
                Err(source) => return Err(write_error("allocating", &path, source)),
            }
            found.push(had);
            let before = segment * layout.segment_slots;
            store.growth.lock().limit = before + slots;
        }
        Ok((store, found))
    }

    fn path(&self, segment: u32) -> PathBuf {
        self.directory.join(segment_name(segment))
    }

    /// Slots that may be used: all below this one.
    pub(super) fn limit(&self) -> u32 {
        self.growth.lock().limit
    }

    /// Where a slot's payload is. The slot is below the limit.
    pub(super) fn place(&self, slot: Slot) -> io::Result<(Arc<DataFile>, u64)> {
        let (segment, offset) = self.layout.place(slot);
        Ok((self.file(segment)?, offset))
    }

    fn file(&self, segment: u32) -> io::Result<Arc<DataFile>> {
        let cell = &self.files[segment as usize];
        if let Some(file) = cell.get() {
            return Ok(Arc::clone(file));
        }
        let full = u64::from(self.layout.slots_of(segment)) * self.layout.slot_bytes;
        let file = DataFile::open(&self.path(segment), self.direct, full)?;
        self.new_file.store(true, Ordering::Release);
        Ok(Arc::clone(cell.get_or_init(|| Arc::new(file))))
    }

    /// A slot's payload was written.
    pub(super) fn written(&self, slot: Slot) {
        let (segment, _) = self.layout.place(slot);
        self.dirty[segment as usize].store(true, Ordering::Release);
    }

    /// Allocates some more slots past `limit`, unless that was done meanwhile; returns the new limit,
    /// which is the old one when the device has no room.
    pub(super) fn grow(&self, limit: u32) -> u32 {
        let mut growth = self.growth.lock();
        while growth.running {
            self.grown.wait(&mut growth);
        }
        let too_early = growth.next.is_some_and(|next| Instant::now() < next);
        if growth.limit > limit || growth.limit == self.layout.slots || too_early {
            return growth.limit;
        }
        let limit = growth.limit;
        growth.running = true;
        drop(growth);
        let grown = self.extend(limit);
        let mut growth = self.growth.lock();
        growth.running = false;
        match grown {
            Ok(limit) => growth.limit = limit,
            Err(_) => growth.next = Some(Instant::now() + PAUSE),
        }
        let limit = growth.limit;
        drop(growth);
        self.grown.notify_all();
        if let Err(error) = grown {
            limited!(self.log, warn, "the file tier can not grow, it evicts instead: {error}");
        }
        limit
    }

    /// Allocates the slots from `limit` on, to the end of their segment at most.
    fn extend(&self, limit: u32) -> Result<u32, TierError> {
        let (segment, offset) = self.layout.place(limit);
        let within = limit % self.layout.segment_slots;
        let more = self.layout.growth().min(self.layout.slots_of(segment) - within);
        let bytes = u64::from(more) * self.layout.slot_bytes;
        let path = self.path(segment);
        let free = free_bytes(&self.directory)?;
        if free < bytes.saturating_add(self.min_free_bytes) {
            let why = format!("{free} bytes are free, min_free_bytes = {}", self.min_free_bytes);
            return Err(io_error("growing", &path, io::Error::new(ErrorKind::StorageFull, why)));
        }
        let file = self.file(segment).map_err(|source| write_error("opening", &path, source))?;
        if let Err(source) = allocate(&file.file, offset + bytes) {
            // What was allocated beyond the old length is given back.
            let _ = file.file.set_len(offset);
            return Err(write_error("allocating", &path, source));
        }
        Ok(limit + more)
    }

    /// Brings what was written to the disk.
    pub(super) fn sync(&self) -> Result<(), TierError> {
        for (segment, dirty) in self.dirty.iter().enumerate() {
            if dirty.swap(false, Ordering::AcqRel)
                && let Some(file) = self.files[segment].get()
                && let Err(source) = file.file.sync_data()
            {
                dirty.store(true, Ordering::Release);
                return Err(io_error("syncing", &self.path(segment as u32), source));
            }
        }
        if self.new_file.swap(false, Ordering::AcqRel) {
            fs::File::open(&self.directory)
                .and_then(|directory| directory.sync_all())
                .map_err(|source| io_error("syncing", &self.directory, source))?;
        }
        Ok(())
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// The lengths of all segments in a directory.
pub(super) fn lengths(directory: &Path) -> Result<std::collections::BTreeMap<u32, u64>, TierError> {
    let listed = fs::read_dir(directory).and_then(|entries| {
        let mut lengths = std::collections::BTreeMap::new();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let segment = name.to_str().and_then(|name| {
                let number = name.strip_prefix("segment-")?.parse().ok()?;
                (segment_name(number) == name).then_some(number)
            });
            if let Some(segment) = segment {
                lengths.insert(segment, entry.metadata()?.len());
            }
        }
        Ok(lengths)
    });
    listed.map_err(|source| io_error("listing", directory, source))
}
