//! The file tier: chunks in files of one directory, bounded, verified, found again at restart.
//!
//! A chunk is written to a temporary file and renamed over its slot's file, so a reader sees the
//! old chunk or the new one, whole. Nothing is synced: after a power loss a file may be torn,
//! and its checksum says so. At open, every header is read and the index rebuilt, in the order
//! of the files' times. `format.rs` states the bytes.
//!
//! One process owns a directory, by `flock`. `capacity_bytes` bounds the chunk files including
//! those being written; the few kilobytes of identity and directories come on top.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::format::{FORMAT, HEADER_BYTES, Header};
use super::memory::{Reservation, detach_unpinned, lookup, pin, reserve};
use super::store::ChunkStore;
use super::{Medium, Presence, TierError, Usage};
use crate::checksum::Checksum;
use crate::index::{ANYONE, Index, MAX_CAPACITY, Pin, PolicyKind};
use crate::key::KeyBatch;
use crate::sync::Mutex;

/// What a [`FileStore`] needs to know.
#[derive(Debug, Clone)]
pub struct FileStoreConfig {
    /// The directory; made if absent.
    pub path: PathBuf,
    /// Bytes the chunk files may take.
    pub capacity_bytes: u64,
    /// Bytes a chunk.
    pub chunk_bytes: usize,
    /// Bytes a key.
    pub key_bytes: usize,
    /// Whose data it is: canonical JSON of everything that changes the bytes.
    pub namespace: String,
    /// How many chunks are written at once at most.
    pub writers: usize,
}

/// Written to `kvtier.json`; what differs is another store.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    format: u32,
    chunk_bytes: usize,
    key_bytes: usize,
    namespace: String,
}

/// Chunks in files, evicted least recently used.
pub struct FileStore {
    path: PathBuf,
    capacity_bytes: u64,
    file_bytes: u64,
    chunk_bytes: usize,
    namespace: Checksum,
    index: Mutex<Index>,
    /// Holds the lock until `close`.
    lock: Mutex<Option<File>>,
}

impl FileStore {
    /// Opens the store, or makes it.
    ///
    /// # Errors
    /// [`TierError`]: a capacity below one chunk or above what the device has, a directory that
    /// cannot be made or written, that another process owns, or that holds another identity.
    pub fn open(config: &FileStoreConfig) -> Result<Self, TierError> {
        let file_bytes = (HEADER_BYTES + config.chunk_bytes.next_multiple_of(HEADER_BYTES)) as u64;
        // Each writer holds one temporary file besides the slots' files.
        let temporary = config.writers.max(1) as u64;
        let files = config.capacity_bytes / file_bytes;
        if files <= temporary {
            return Err(TierError::Capacity {
                medium: Medium::File.as_str(),
                given: config.capacity_bytes,
                needed: (temporary + 1) * file_bytes,
            });
        }
        let slots = (files - temporary).min(u64::from(MAX_CAPACITY)) as u32;
        let path = config.path.clone();
        let is_new = !path.join(IDENTITY_FILE).exists();
        if is_new {
            // Before anything is made, so that a refusal leaves nothing behind.
            check_room(&path, config.capacity_bytes, 0)?;
        }
        make_directory(&path)?;
        let lock = lock_directory(&path)?;
        let identity = Identity {
            format: FORMAT,
            chunk_bytes: config.chunk_bytes,
            key_bytes: config.key_bytes,
            namespace: config.namespace.clone(),
        };
        check_identity(&path, &identity)?;
        remove_temporary_files(&path)?;
        let store = Self {
            capacity_bytes: config.capacity_bytes,
            file_bytes,
            chunk_bytes: config.chunk_bytes,
            namespace: Checksum::of(config.namespace.as_bytes()),
            index: Mutex::new(Index::new(slots, config.key_bytes, PolicyKind::Lru)?),
            lock: Mutex::new(Some(lock)),
            path,
        };
        let found = store.scan()?;
        check_room(&store.path, config.capacity_bytes, found.len() as u64 * file_bytes)?;
        store.adopt(&found)?;
        if is_new {
            write_identity(&store.path, &identity)?;
        }
        Ok(store)
    }

    fn chunk_path(&self, slot: u32) -> PathBuf {
        self.path.join(format!("chunks/{:02x}/{slot}.kv", slot % 256))
    }

    fn temporary_path(&self, slot: u32) -> PathBuf {
        self.path.join(format!("tmp/{slot}.kv"))
    }

    /// Every chunk file with a good header, oldest first. Removes those without.
    fn scan(&self) -> Result<Vec<Found>, TierError> {
        let mut found = Vec::new();
        for directory in read_directory(&self.path.join("chunks"))? {
            for path in read_directory(&directory)? {
                let slot = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
                let slot = slot.filter(|&slot| path == self.chunk_path(slot));
                let header =
                    self.read_header(&path).map_err(|source| io_error("reading", &path, source))?;
                match slot.zip(header) {
                    Some((slot, (header, time))) => {
                        found.push(Found { key: header.key().into(), time, slot, path });
                    }
                    // Torn by a crash, or not ours to serve: a miss, and its room is wanted.
                    None => remove_file(&path)?,
                }
            }
        }
        found.sort_by_key(|file| file.time);
        Ok(found)
    }

    /// The header and time of a chunk file; `None` if it cannot be a chunk of this store.
    fn read_header(&self, path: &Path) -> io::Result<Option<(Header, SystemTime)>> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        let mut page = [0; size_of::<Header>()];
        match (&file).read_exact(&mut page) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let whole = (HEADER_BYTES + self.chunk_bytes) as u64;
        let key_bytes = self.index.lock().key_bytes();
        Ok(Header::parse(&page, self.namespace)
            .filter(|header| {
                header.key().len() == key_bytes
                    && header.payload_bytes() == self.chunk_bytes as u64
                    && metadata.len() == whole
            })
            .zip(metadata.modified().ok()))
    }

    /// Rebuilds the index; removes files that are double or past the capacity.
    fn adopt(&self, found: &[Found]) -> Result<(), TierError> {
        let mut adopted = Vec::with_capacity(found.len());
        let files = found.iter().map(|file| (&*file.key, file.slot));
        self.index.lock().restore(files, |taken| adopted.push(taken));
        let dropped = found.iter().zip(adopted).filter(|(_, taken)| !taken);
        dropped.map(|(file, _)| &file.path).try_for_each(|path| remove_file(path))
    }

    /// Moves a slot's temporary file to its place.
    fn publish(&self, slot: u32) -> Result<(), TierError> {
        rename(&self.temporary_path(slot), &self.chunk_path(slot))
    }

    fn write(&self, slot: u32, header: &Header, payload: &[u8]) -> Result<(), TierError> {
        let path = self.temporary_path(slot);
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(&header.page())?;
            file.write_all(payload)
        });
        written
            .map_err(|source| io_error("writing", &path, source))
            .and_then(|()| self.publish(slot))
            .inspect_err(|_| {
                // Best effort: what is left here is removed at the next open.
                let _ = fs::remove_file(&path);
            })
    }

    fn read(&self, slot: u32, key: &[u8], place: &mut [u8]) -> Result<Checksum, TierError> {
        let path = self.chunk_path(slot);
        let corrupt = |what| TierError::Corrupt { what, key: key.into() };
        let failed = |source: io::Error| match source.kind() {
            ErrorKind::NotFound => TierError::Missing(key.into()),
            ErrorKind::UnexpectedEof => corrupt("file"),
            _ => io_error("reading", &path, source),
        };
        let file = File::open(&path).map_err(failed)?;
        let mut page = [0; size_of::<Header>()];
        file.read_exact_at(&mut page, 0).map_err(failed)?;
        let header = Header::parse(&page, self.namespace)
            .filter(|header| header.key() == key && header.payload_bytes() == place.len() as u64)
            .ok_or_else(|| corrupt("header"))?;
        file.read_exact_at(place, HEADER_BYTES as u64).map_err(failed)?;
        Ok(header.payload_checksum())
    }
}

impl ChunkStore for FileStore {
    fn medium(&self) -> Medium {
        Medium::File
    }

    fn lookup(&self, keys: &KeyBatch, wanted: &[u32], presence: &mut [Presence]) {
        lookup(&self.index.lock(), keys, wanted, presence);
    }

    fn put(
        &self,
        key: &[u8],
        bytes: &[u8],
        checksum: impl FnOnce() -> Checksum,
    ) -> Result<KeyBatch, TierError> {
        let Some(reservation) = reserve(&self.index, key)? else {
            return Ok(KeyBatch::empty(key.len()));
        };
        let Reservation { token, slot, evicted } = reservation;
        let header = Header::new(key, bytes.len(), checksum(), self.namespace);
        match self.write(slot, &header, bytes) {
            Ok(()) => {
                self.index.lock().commit(token);
                Ok(evicted)
            }
            Err(error) => {
                self.index.lock().abort(token);
                Err(error)
            }
        }
    }

    fn get(&self, key: &[u8], place: &mut [u8]) -> Result<Checksum, TierError> {
        let (token, slot) = pin(&self.index, key)?;
        let stored = self.read(slot, key, place);
        self.index.lock().unpin(token, Pin::Job)?;
        stored
    }

    fn discard(&self, key: &[u8]) {
        let slot = detach_unpinned(&mut self.index.lock(), key);
        if let Some(slot) = slot {
            // The slot is nobody's until it is reclaimed, so this cannot hit another's file.
            if let Err(error) = remove_file(&self.chunk_path(slot)) {
                log::warn!("a damaged chunk stays on disk until its slot is reused: {error}");
            }
            self.index.lock().reclaim(slot);
        }
    }

    fn touch(&self, keys: &KeyBatch) {
        self.index.lock().touch_batch(keys, ANYONE);
    }

    fn usage(&self) -> Usage {
        let chunks = self.index.lock().len() as u64;
        Usage { capacity_bytes: self.capacity_bytes, used_bytes: chunks * self.file_bytes, chunks }
    }

    fn close(&self) {
        *self.lock.lock() = None;
    }
}

struct Found {
    key: Box<[u8]>,
    time: SystemTime,
    slot: u32,
    path: PathBuf,
}

fn io_error(what: &'static str, path: &Path, source: io::Error) -> TierError {
    TierError::Io { what, path: path.to_owned(), source }
}

fn rename(from: &Path, to: &Path) -> Result<(), TierError> {
    fs::rename(from, to).map_err(|source| io_error("renaming", from, source))
}

/// Removes a file that may be gone already.
fn remove_file(path: &Path) -> Result<(), TierError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(io_error("removing", path, source))
        }
        _ => Ok(()),
    }
}

fn read_directory(path: &Path) -> Result<Vec<PathBuf>, TierError> {
    fs::read_dir(path)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .map_err(|source| io_error("listing", path, source))
}

/// Refuses a capacity that the device does not have, what is `held` already included.
fn check_room(path: &Path, wanted: u64, held: u64) -> Result<(), TierError> {
    // The directory may not exist yet: ask the nearest one that does.
    let mut existing = path;
    while !existing.exists() {
        existing = match existing.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
    }
    let stat = rustix::fs::statvfs(existing)
        .map_err(|error| io_error("asking for free space of", existing, error.into()))?;
    let available = stat.f_bavail * stat.f_frsize + held;
    if wanted > available {
        return Err(TierError::DeviceTooSmall { path: path.to_owned(), wanted, available });
    }
    Ok(())
}

/// Makes the directory and what is in it; what exists is left as it is.
fn make_directory(path: &Path) -> Result<(), TierError> {
    let make = |path: &Path| {
        fs::create_dir_all(path).map_err(|source| io_error("making directory", path, source))
    };
    make(&path.join("tmp"))?;
    (0..256).try_for_each(|number| make(&path.join(format!("chunks/{number:02x}"))))
}

fn lock_directory(path: &Path) -> Result<File, TierError> {
    let path = path.join("LOCK");
    let open = |source| io_error("opening", &path, source);
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(open)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut owner = String::new();
            // Only for the message; the lock itself is what counts.
            let _ = file.read_to_string(&mut owner);
            let owner = owner.trim();
            return Err(TierError::Locked {
                owner: if owner.is_empty() { "unknown" } else { owner }.to_owned(),
                path: path.parent().unwrap_or(&path).to_owned(),
            });
        }
        Err(TryLockError::Error(source)) => return Err(io_error("locking", &path, source)),
    }
    file.set_len(0)
        .and_then(|()| write!(file, "{}", std::process::id()))
        .map_err(|source| io_error("writing", &path, source))?;
    Ok(file)
}

const IDENTITY_FILE: &str = "kvtier.json";

/// Refuses a store of another identity. A store without one is new.
fn check_identity(path: &Path, expected: &Identity) -> Result<(), TierError> {
    let file = path.join(IDENTITY_FILE);
    let text = match fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(io_error("reading", &file, source)),
    };
    let found = serde_json::from_str::<Identity>(&text);
    if found.as_ref().is_ok_and(|found| found == expected) {
        return Ok(());
    }
    let found = found.map_or(Value::String(text), |found| found.shown());
    let expected = expected.shown();
    Err(TierError::Identity {
        path: path.to_owned(),
        differences: differences(&found, &expected).join("; "),
        found: found.to_string(),
        expected: expected.to_string(),
    })
}

impl Identity {
    /// For people: the namespace as the JSON it is, if it is.
    fn shown(&self) -> Value {
        let mut shown = json!(self);
        if let Ok(namespace) = serde_json::from_str(&self.namespace) {
            shown["namespace"] = namespace;
        }
        shown
    }
}

/// What differs between two identities, field by field.
fn differences(found: &Value, expected: &Value) -> Vec<String> {
    let (mut ours, mut theirs) = (BTreeMap::new(), BTreeMap::new());
    flatten("", found, &mut ours);
    flatten("", expected, &mut theirs);
    let absent = || "nothing".to_owned();
    let fields: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    fields
        .into_iter()
        .filter(|&field| ours.get(field) != theirs.get(field))
        .map(|field| {
            let found = ours.get(field).cloned().unwrap_or_else(absent);
            let expected = theirs.get(field).cloned().unwrap_or_else(absent);
            format!("{field} is {found}, expected {expected}")
        })
        .collect()
}

/// Every leaf of a JSON value under its dotted path.
fn flatten(path: &str, value: &Value, leaves: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                flatten(&format!("{path}{dot}{name}"), value, leaves);
            }
        }
        leaf => {
            leaves.insert(path.to_owned(), leaf.to_string());
        }
    }
}

/// Writes the identity of a new store: last of all, when it is known to work.
fn write_identity(path: &Path, identity: &Identity) -> Result<(), TierError> {
    let file = path.join(IDENTITY_FILE);
    let temporary = path.join("tmp").join(IDENTITY_FILE);
    fs::write(&temporary, json!(identity).to_string())
        .map_err(|source| io_error("writing", &temporary, source))?;
    rename(&temporary, &file)
}

fn remove_temporary_files(path: &Path) -> Result<(), TierError> {
    read_directory(&path.join("tmp"))?.iter().try_for_each(|path| remove_file(path))
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
