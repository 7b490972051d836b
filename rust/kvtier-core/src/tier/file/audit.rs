//! Is a store as it should be (`kvtier verify`), and what is in it (`kvtier inspect`)?
//!
//! Both read the files of `docs/file-format.md` by themselves: they work on what a tier would
//! refuse or mend, and change nothing that they are not asked to.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::Value;
use zerocopy::FromBytes;

use super::facts::{CHECKPOINT_FILE, JOURNAL_FILE, sweep_pages};
use super::format::{FORMAT, FactPage, HEADER_BYTES, Header, PAGE};
use super::headers::{HEADERS_FILE, read_up_to, sweep};
use super::identity::{IDENTITY_FILE, Identity};
use super::layout::Layout;
use super::owner::{keep_out, own};
use super::recovery::Valid;
use super::segments::{lengths, segment_name};
use super::slots::Slots;
use super::space::{io_error, write_error};
use crate::checksum::Checksum;
use crate::index::Slot;
use crate::tier::TierError;

/// The files of a store, as they lie there.
struct Files {
    directory: PathBuf,
    identity: Identity,
    layout: Layout,
    /// Slots that each segment has.
    segments: Vec<u32>,
}

impl Files {
    fn read(directory: &Path) -> Result<Self, TierError> {
        let identity = Identity::read(directory)?.ok_or_else(|| {
            io_error("opening", &directory.join(IDENTITY_FILE), ErrorKind::NotFound.into())
        })?;
        let slot_bytes = identity.chunk_bytes;
        let segment_slots = identity.slots_per_segment;
        let own_bytes = identity.text().len() as u64;
        let layout = (slot_bytes > 0 && segment_slots > 0)
            .then(|| Layout::within(identity.capacity_bytes, slot_bytes, segment_slots, own_bytes));
        let layout = layout.flatten().ok_or_else(|| TierError::Unreadable {
            path: directory.join(IDENTITY_FILE),
            why: "its sizes do not fit".to_owned(),
        })?;
        let lengths = lengths(directory)?;
        let slots = |segment| {
            let bytes: u64 = lengths.get(&segment).copied().unwrap_or(0);
            u32::try_from(bytes / slot_bytes).unwrap_or(u32::MAX).min(layout.slots_of(segment))
        };
        let segments = (0..layout.segments()).map(slots).collect();
        Ok(Self { directory: directory.to_owned(), identity, layout, segments })
    }

    fn valid(&self) -> Valid<'_> {
        Valid {
            layout: self.layout,
            namespace: self.identity.namespace_checksum(),
            key_bytes: self.identity.key_bytes,
            chunk_bytes: self.identity.chunk_bytes,
            segments: &self.segments,
        }
    }

    /// Opens a file of the store; `None` if it is missing.
    fn open(&self, name: &str, write: bool) -> Result<Option<File>, TierError> {
        let path = self.directory.join(name);
        match File::options().read(true).write(write).open(&path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) if write => Err(write_error("opening", &path, source)),
            Err(source) => Err(io_error("opening", &path, source)),
        }
    }

    fn error(&self, name: &str, source: std::io::Error) -> TierError {
        io_error("reading", &self.directory.join(name), source)
    }
}

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Whose chunk, where that can be told.
    pub key: Option<Box<[u8]>>,
    /// Which file, and where in it.
    pub place: String,
    /// Which part is bad.
    pub what: &'static str,
    /// Whether it was dropped.
    pub repaired: bool,
}

/// A check of a whole store, step by step.
pub struct Audit {
    files: Files,
    headers: Option<File>,
    /// Slots whose headers do not say free.
    slots: Vec<Slot>,
    next: usize,
    segment: Option<(u32, File)>,
    payload: Vec<u8>,
    repair: bool,
    /// Keeps owners away.
    _lock: Option<File>,
}

impl Audit {
    /// Opens a store for checking. Nobody may have it open; with `repair` this process owns it,
    /// and what is found is dropped.
    ///
    /// # Errors
    /// [`TierError`] when there is no store, another format version, a damaged identity, or an
    /// owner.
    pub fn open(directory: &Path, repair: bool) -> Result<Self, TierError> {
        // Before the lock, which would be made.
        Files::read(directory)?;
        let lock = if repair { Some(own(directory)?) } else { keep_out(directory)? };
        let files = Files::read(directory)?;
        let headers = files.open(HEADERS_FILE, repair)?;
        let mut slots = Vec::new();
        if let Some(file) = &headers {
            sweep(file, |slot, _| slots.push(slot))
                .map_err(|source| files.error(HEADERS_FILE, source))?;
        }
        let payload = vec![0; files.layout.slot_bytes as usize];
        Ok(Self { files, headers, slots, next: 0, segment: None, payload, repair, _lock: lock })
    }

    /// Headers to check: those that do not say that their slot is free.
    pub fn total(&self) -> usize {
        self.slots.len()
    }

    /// Checks the pages of facts, and that no file is missing.
    ///
    /// # Errors
    /// [`TierError::Io`] when a file can not be read, or repaired.
    pub fn check_files(&self) -> Result<Vec<Finding>, TierError> {
        let mut findings = Vec::new();
        if self.headers.is_none() {
            findings.push(Finding {
                key: None,
                place: HEADERS_FILE.to_owned(),
                what: "missing",
                repaired: false,
            });
        }
        let namespace = self.files.identity.namespace_checksum();
        for name in [CHECKPOINT_FILE, JOURNAL_FILE] {
            // A store without one has lost its order of accesses, and nothing else.
            let Some(file) = self.files.open(name, self.repair)? else {
                findings.push(Finding {
                    key: None,
                    place: name.to_owned(),
                    what: "missing",
                    repaired: false,
                });
                continue;
            };
            let mut bad = Vec::new();
            sweep_pages(&file, namespace, |number, page| {
                if page == FactPage::Bad {
                    bad.push(number);
                }
            })
            .map_err(|source| self.files.error(name, source))?;
            for page in bad {
                if self.repair {
                    file.write_all_at(&[0; PAGE], page * PAGE as u64)
                        .map_err(|source| self.files.error(name, source))?;
                }
                findings.push(Finding {
                    key: None,
                    place: format!("{name} page {page}"),
                    what: "page",
                    repaired: self.repair,
                });
            }
        }
        Ok(findings)
    }

    /// Checks up to `count` more headers and their payloads.
    ///
    /// # Errors
    /// [`TierError::Io`] when a file can not be repaired, or the table of headers not be read.
    pub fn check(&mut self, count: usize) -> Result<Vec<Finding>, TierError> {
        let end = self.next.saturating_add(count).min(self.slots.len());
        let mut findings = Vec::new();
        for at in self.next..end {
            let slot = self.slots[at];
            if let Some((what, key)) = self.check_slot(slot)? {
                if self.repair {
                    self.drop_header(slot)?;
                }
                let (segment, _) = self.files.layout.place(slot);
                findings.push(Finding {
                    key,
                    place: format!("slot {slot} in {}", segment_name(segment)),
                    what,
                    repaired: self.repair,
                });
            }
        }
        self.next = end;
        Ok(findings)
    }

    /// What is wrong with a slot, and whose it is.
    #[expect(clippy::type_complexity, reason = "two parts of one finding")]
    fn check_slot(
        &mut self,
        slot: Slot,
    ) -> Result<Option<(&'static str, Option<Box<[u8]>>)>, TierError> {
        let mut bytes = [0; HEADER_BYTES];
        let Some(headers) = &self.headers else {
            return Ok(None);
        };
        read_up_to(headers, &mut bytes, u64::from(slot) * HEADER_BYTES as u64)
            .map_err(|source| self.files.error(HEADERS_FILE, source))?;
        let header = Header::ref_from_bytes(&bytes).ok();
        let told = header.and_then(Header::told);
        let key = told.map(|told| Box::from(told.key));
        if let Some(what) = self.files.valid().refuse(slot, told.as_ref()) {
            return Ok(Some((what, key)));
        }
        let expected = told.map(|told| told.payload);
        let found = told.and_then(|told| self.chunk_checksum(slot, told.key));
        Ok((expected != found).then_some(("payload", key)))
    }

    /// The checksum that what lies in a slot has as the chunk of `key`; `None` where it can not be
    /// read.
    fn chunk_checksum(&mut self, slot: Slot, key: &[u8]) -> Option<Checksum> {
        let (segment, offset) = self.files.layout.place(slot);
        if self.segment.as_ref().is_none_or(|(open, _)| *open != segment) {
            let file = File::open(self.files.directory.join(segment_name(segment))).ok()?;
            self.segment = Some((segment, file));
        }
        let (_, file) = self.segment.as_ref()?;
        file.read_exact_at(&mut self.payload, offset).ok()?;
        Some(Checksum::of_chunk(key, &self.payload))
    }

    fn drop_header(&self, slot: Slot) -> Result<(), TierError> {
        let path = self.files.directory.join(HEADERS_FILE);
        let Some(headers) = &self.headers else {
            return Ok(());
        };
        headers
            .write_all_at(&[0; HEADER_BYTES], u64::from(slot) * HEADER_BYTES as u64)
            .map_err(|source| write_error("writing", &path, source))
    }
}

/// Counts by upper bound: `bounds[i]` is the largest value that `counts[i]` counts; the last
/// count has all that is larger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distribution {
    /// Upper bounds.
    pub bounds: &'static [u64],
    /// One more than bounds.
    pub counts: Vec<u64>,
}

impl Distribution {
    fn new(bounds: &'static [u64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1] }
    }

    fn count(&mut self, value: u64) {
        let at = self.bounds.partition_point(|&bound| bound < value);
        self.counts[at] += 1;
    }
}

/// A minute, ten, an hour, six, a day, a week, four.
const AGES: &[u64] = &[60, 600, 3600, 21_600, 86_400, 604_800, 2_419_200];
const HITS: &[u64] = &[0, 1, 2, 4, 8, 16, 64, 256];

/// What is in a store.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// Version of the format.
    pub format: u32,
    /// Whose data it is: JSON if it is that, else a text.
    pub namespace: Value,
    /// Bytes a chunk.
    pub chunk_bytes: u64,
    /// Bytes a key.
    pub key_bytes: usize,
    /// Bytes that it might take when it was opened last.
    pub capacity_bytes: u64,
    /// Bytes of its files.
    pub allocated_bytes: u64,
    /// Bytes of its chunks.
    pub used_bytes: u64,
    /// Chunks that fit.
    pub slots: u64,
    /// Chunks that are there; their payloads were not read.
    pub chunks: u64,
    /// Headers that do not count.
    pub damaged_headers: u64,
    /// Pages of facts that do not count.
    pub damaged_pages: u64,
    /// When the oldest chunk was written, in seconds since 1970.
    pub oldest: Option<u64>,
    /// When the newest one was.
    pub newest: Option<u64>,
    /// Seconds since chunks were written.
    pub ages: Distribution,
    /// How often chunks were loaded.
    pub hits: Distribution,
    /// The pid of the process that has it open.
    pub owner: Option<String>,
}

/// Looks into a store, which somebody may have open: then what changes meanwhile may be missed.
///
/// # Errors
/// [`TierError`] when there is no store, another format version, or a damaged identity.
pub fn inspect(directory: &Path) -> Result<Inspection, TierError> {
    let files = Files::read(directory)?;
    let owner = match keep_out(directory) {
        Ok(_) => None,
        Err(TierError::Locked { owner, .. }) => Some(owner),
        Err(error) => return Err(error),
    };
    let slots = Slots::new(files.layout.slots).ok_or_else(|| {
        io_error("remembering the slots of", directory, ErrorKind::OutOfMemory.into())
    })?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.map_or(0, |passed| passed.as_secs());
    let valid = files.valid();
    let (mut chunks, mut damaged_headers, mut damaged_pages) = (0, 0, 0);
    let (mut oldest, mut newest) = (None::<u64>, None::<u64>);
    let mut ages = Distribution::new(AGES);
    if let Some(file) = files.open(HEADERS_FILE, false)? {
        sweep(&file, |slot, header| {
            let told = header.told();
            let Some(told) = told.filter(|told| valid.refuse(slot, Some(told)).is_none()) else {
                damaged_headers += 1;
                return;
            };
            chunks += 1;
            slots.written(slot, told.sequence, told.payload);
            let at = told.written_at;
            oldest = Some(oldest.map_or(at, |oldest| oldest.min(at)));
            newest = Some(newest.map_or(at, |newest| newest.max(at)));
            // A clock that went back makes no chunk younger than new.
            ages.count(now.saturating_sub(at));
        })
        .map_err(|source| files.error(HEADERS_FILE, source))?;
    }
    for name in [CHECKPOINT_FILE, JOURNAL_FILE] {
        if let Some(file) = files.open(name, false)? {
            sweep_pages(&file, valid.namespace, |_, page| match page {
                FactPage::Facts(facts) => {
                    for fact in &facts {
                        slots.learn(fact);
                    }
                }
                FactPage::Bad | FactPage::Blank => damaged_pages += 1,
            })
            .map_err(|source| files.error(name, source))?;
        }
    }
    let mut hits = Distribution::new(HITS);
    (0..slots.len())
        .filter_map(|slot| slots.fact(slot))
        .for_each(|fact| hits.count(u64::from(fact.hits.get())));
    Ok(Inspection {
        format: FORMAT,
        namespace: files.identity.namespace_value(),
        chunk_bytes: files.identity.chunk_bytes,
        key_bytes: files.identity.key_bytes,
        capacity_bytes: files.identity.capacity_bytes,
        allocated_bytes: file_bytes(directory)?,
        used_bytes: chunks * files.layout.slot_bytes,
        slots: u64::from(files.layout.slots),
        chunks,
        damaged_headers,
        damaged_pages,
        oldest,
        newest,
        ages,
        hits,
        owner,
    })
}

/// Bytes of all files in a directory.
fn file_bytes(directory: &Path) -> Result<u64, TierError> {
    std::fs::read_dir(directory)
        .and_then(|entries| entries.map(|entry| Ok(entry?.metadata()?.len())).sum())
        .map_err(|source| io_error("listing", directory, source))
}
