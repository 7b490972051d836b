//! I/O engines: whole slots between the primary region and a file, behind one face.
//!
//! An engine is given *operations*. It asks each, on its own thread and as soon as there is room
//! for it, for its [`Transfer`] (`begin`), moves the bytes straight between the region and the
//! file, however many system calls that takes, and tells the operation (`end`). Loads go before
//! stores ([`Lanes`](super::lanes::Lanes)). What is queued when the engine closes is dropped,
//! which resolves its job.
//!
//! | engine | how | when |
//! |---|---|---|
//! | [`Uring`](uring::Uring) | io_uring, one reactor thread, batched, registered buffers | where the kernel allows it |
//! | [`Threads`](threads::Threads) | `pread`/`pwrite` on a few threads | where it does not |
//! | the same, reading [`Mapped`](mmap::Mapped) | `memcpy` out of the page cache | on demand |

#[cfg(test)]
mod faults;
mod mmap;
mod registered;
mod threads;
mod uring;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use memmap2::Mmap;
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;

use super::TierError;
use super::lanes::Lane;
use crate::index::Slot;
use crate::region::{Region, SLOT_ALIGNMENT};

#[cfg(test)]
pub(super) use faults::{Fault, Script};
pub(super) use threads::{Calls, Threads};
pub(super) use uring::Uring;

/// Which engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoKind {
    /// io_uring where the kernel allows it, threads where not.
    #[default]
    Auto,
    /// io_uring.
    Uring,
    /// `pread` and `pwrite` on a few threads.
    Threads,
    /// As threads, but reads are copies out of the page cache. A file that somebody else cuts
    /// short, or a disk that fails, may end the process by SIGBUS.
    Mmap,
}

/// Whether transfers go past the page cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "serde_json::Value")]
pub enum DirectKind {
    /// Where the file system allows it; never with [`IoKind::Mmap`].
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl TryFrom<serde_json::Value> for DirectKind {
    type Error = String;
    fn try_from(value: serde_json::Value) -> Result<Self, String> {
        match value {
            serde_json::Value::Bool(true) => Ok(Self::Always),
            serde_json::Value::Bool(false) => Ok(Self::Never),
            serde_json::Value::String(text) if text == "auto" => Ok(Self::Auto),
            other => Err(format!("direct = {other} is none of \"auto\", true and false")),
        }
    }
}

/// A file that engines transfer from and to.
#[derive(Debug)]
pub(super) struct DataFile {
    pub(super) file: File,
    /// Whether it was opened with `O_DIRECT`.
    pub(super) direct: bool,
    /// Its length when it is full: what a map of it covers.
    pub(super) full_bytes: u64,
    map: OnceLock<Mmap>,
}

impl DataFile {
    /// Opens a file, and makes it if it is absent.
    pub(super) fn open(path: &Path, direct: bool, full_bytes: u64) -> io::Result<Self> {
        let mut flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        if direct {
            flags |= OFlags::DIRECT;
        }
        let file = File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))?);
        Ok(Self { file, direct, full_bytes, map: OnceLock::new() })
    }
}

/// Whether files in `directory` can be read and written past the page cache: by doing it.
fn probe_direct(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let path = directory.join("direct-probe");
    let probe = DataFile::open(&path, true, SLOT_ALIGNMENT as u64);
    // It has an owner by its descriptor; a name it needs no more.
    let _ = std::fs::remove_file(&path);
    let file = probe?.file;
    let mut page = memmap2::MmapMut::map_anon(SLOT_ALIGNMENT)?;
    match file.write_all_at(&page, 0) {
        // It got as far as asking for room.
        Err(error) if error.kind() == ErrorKind::StorageFull => Ok(()),
        Err(error) => Err(error),
        Ok(()) => file.read_exact_at(&mut page, 0),
    }
}

/// One slot of a region, to or from one place of a file.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) file: Arc<DataFile>,
    pub(super) lane: Lane,
    region: Arc<Region>,
    slot: Slot,
    offset: u64,
    moved: usize,
    retries: u32,
}

/// How often in a row the system may ask for patience.
const MAX_RETRIES: u32 = 100;

impl Transfer {
    /// A transfer of a whole slot, as far as it has not moved yet.
    ///
    /// # Safety
    /// Until the transfer is dropped, a slot that is stored is not written, and a slot that is
    /// loaded is touched by nobody else.
    pub(super) unsafe fn new(
        lane: Lane,
        file: Arc<DataFile>,
        offset: u64,
        region: Arc<Region>,
        slot: Slot,
    ) -> Self {
        Self { file, lane, region, slot, offset, moved: 0, retries: 0 }
    }

    /// Where in the file the next byte goes.
    pub(super) fn offset(&self) -> u64 {
        self.offset + self.moved as u64
    }

    /// The memory of the next byte; [`Transfer::left`] bytes from here are the transfer's.
    pub(super) fn memory(&self) -> *mut u8 {
        // SAFETY: `moved` never passes the end of the slot.
        unsafe { self.region.slot_ptr(self.slot).add(self.moved) }
    }

    /// Bytes that have not moved.
    pub(super) fn left(&self) -> usize {
        self.region.slot_bytes() - self.moved
    }

    /// Takes note of what a system call said; `None` when it takes another one.
    pub(super) fn advance(&mut self, said: io::Result<usize>) -> Option<io::Result<()>> {
        match said {
            Ok(bytes) => {
                let mut moved = self.moved + bytes.min(self.left());
                if self.file.direct && moved < self.region.slot_bytes() {
                    // Direct I/O goes on from an aligned place only.
                    moved -= moved % SLOT_ALIGNMENT;
                }
                if moved == self.moved {
                    return Some(Err(match self.lane {
                        Lane::Load => ErrorKind::UnexpectedEof.into(),
                        Lane::Store => ErrorKind::WriteZero.into(),
                    }));
                }
                self.moved = moved;
                self.retries = 0;
                (self.left() == 0).then_some(Ok(()))
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock)
                    && self.retries < MAX_RETRIES =>
            {
                self.retries += 1;
                None
            }
            Err(error) => Some(Err(error)),
        }
    }
}

/// Work of a tier around one transfer. Dropping it at any point resolves its job.
pub(super) trait Operation: Send {
    /// What to transfer; `None` when there is nothing to do, or it can not be done.
    fn begin(&mut self) -> Option<Transfer>;
    /// How the transfer ended. The engine has dropped it already.
    fn end(&mut self, outcome: io::Result<()>);
}

/// What moves bytes; see the module.
pub(super) trait Engine: Send + Sync {
    /// Queues operations; drops them after `close`.
    fn submit(&self, lane: Lane, operations: &mut dyn Iterator<Item = Box<dyn Operation>>);
    /// Drops what is queued and waits for what runs; false if something does not come back from
    /// the medium: it is left to itself, and keeps what it uses alive. Idempotent.
    fn close(&self) -> bool;
}

/// An engine, and how it does its work.
pub(super) struct Chosen {
    pub(super) engine: Box<dyn Engine>,
    pub(super) direct: bool,
    /// Both, for a line in the log.
    pub(super) description: String,
}

/// Starts the engine that is asked for, or, if that is left open, the best there is for files in
/// `directory`.
///
/// # Errors
/// [`TierError::Unsupported`] when what was asked for is not to be had.
pub(super) fn start(
    kind: IoKind,
    direct: DirectKind,
    threads: usize,
    directory: &Path,
) -> Result<Chosen, TierError> {
    let refused = |setting, why: &str| TierError::Unsupported {
        setting,
        path: directory.to_owned(),
        why: why.to_owned(),
    };
    let (direct, cached) = match (direct, kind) {
        (DirectKind::Always, IoKind::Mmap) => {
            return Err(refused("direct = true", "io = \"mmap\" reads from the page cache"));
        }
        (DirectKind::Never, _) | (_, IoKind::Mmap) => (false, "through the page cache".to_owned()),
        (wanted, _) => match probe_direct(directory) {
            Ok(()) => (true, "direct".to_owned()),
            Err(error) if wanted == DirectKind::Always => {
                return Err(refused("direct = true", &error.to_string()));
            }
            Err(error) => (false, format!("through the page cache (direct I/O: {error})")),
        },
    };
    let pool = |calls: Arc<dyn Calls>| {
        Threads::start(calls, threads).map_err(|source| TierError::Io {
            what: "starting threads for",
            path: directory.to_owned(),
            source,
        })
    };
    let (engine, name): (Box<dyn Engine>, String) = match kind {
        IoKind::Mmap => (Box::new(pool(Arc::new(mmap::Mapped))?), "mmap".to_owned()),
        IoKind::Threads => (Box::new(pool(Arc::new(threads::Plain))?), "threads".to_owned()),
        IoKind::Auto | IoKind::Uring => match Uring::start() {
            Ok(uring) => (Box::new(uring), "io_uring".to_owned()),
            Err(error) if kind == IoKind::Uring => {
                return Err(refused("io = \"uring\"", &error.to_string()));
            }
            Err(error) => {
                (Box::new(pool(Arc::new(threads::Plain))?), format!("threads (io_uring: {error})"))
            }
        },
    };
    Ok(Chosen { engine, direct, description: format!("{name}, {cached}") })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
