//! A page, and publishing figures on it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FallocateFlags, fallocate, fstatfs, linkat};
use rustix::io::Errno;

use super::description::{Description, words_of};
use super::{
    HEADER_WORDS, LAYOUT, MAGIC, Name, PageError, RECORD_WORDS, WORD, reader, since_1970, to_bytes,
};
use crate::checksum::Checksum;
use crate::log_limit::{LogLimit, limited};
use crate::manager::Snapshot;
use crate::sync::Mutex;

/// Names that are tried: as many managers can one process have pages of.
const MAX_PAGES: u32 = 1 << 10;
/// How old a page gets while no figure with a revision changes.
const OLDEST: Duration = Duration::from_millis(100);
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;

/// A manager's page; see the module. Dropped, it is gone.
#[derive(Debug)]
pub struct Page {
    path: PathBuf,
    file: File,
    /// Where the records begin.
    records: u64,
    record_bytes: usize,
    /// Whose turn it is to publish; never waited for.
    turn: Mutex<Turn>,
    log: LogLimit,
}

#[derive(Debug, Default)]
struct Turn {
    /// Records written.
    published: u64,
    /// The snapshot in the last one.
    snapshot: u64,
    /// The revision of its figures.
    revision: u64,
    /// When it was written.
    at: Option<Instant>,
}

impl Page {
    /// Makes a page in `directory` and removes those of processes that are gone.
    ///
    /// # Errors
    /// [`PageError`] when the directory is not in memory or the file can not be made.
    pub fn create(directory: &Path, description: &Description) -> Result<Self, PageError> {
        let failed = |what| PageError::io(what, directory);
        let folder = File::open(directory).map_err(failed("opening"))?;
        let kind = fstatfs(&folder).map_err(|error| failed("asking for")(error.into()))?.f_type;
        if ![TMPFS, RAMFS].contains(&kind) {
            return Err(PageError::NotMemory { path: directory.to_owned() });
        }
        // What can not be listed is not swept; the page can be made all the same.
        let _ = reader::sweep(directory);
        // A file without a name: should this process end here, nothing is left behind.
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
            .mode(0o600)
            .open(directory)
            .map_err(failed("making a file in"))?;
        file.try_lock().map_err(|error| failed("locking a file in")(error.into()))?;
        let header = header(description);
        let record_bytes = (description.words() + RECORD_WORDS) * WORD;
        let bytes = header.len() + 2 * record_bytes;
        // What is allocated now can be written later, however full the directory is then.
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)
            .map_err(|error| failed("allocating a file in")(error.into()))?;
        file.write_all_at(&header, 0).map_err(failed("writing a file in"))?;
        let path = named(&file, directory, description.owner.pid)?;
        Ok(Self {
            path,
            file,
            records: header.len() as u64,
            record_bytes,
            turn: Mutex::default(),
            log: LogLimit::default(),
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is something to publish: figures of another revision; or nothing was for a
    /// while, since the number of steps, and what tiers tell without a job, have no revision.
    pub fn is_due(&self, revision: u64) -> bool {
        self.turn.try_lock().is_some_and(|turn| {
            turn.revision != revision || turn.at.is_none_or(|at| at.elapsed() >= OLDEST)
        })
    }

    /// Publishes the figures, unless another thread is at it, or was with later ones: then they
    /// come with the next step.
    pub fn publish(&self, snapshot: &Snapshot) {
        let Some(mut turn) = self.turn.try_lock() else {
            return;
        };
        if snapshot.number <= turn.snapshot {
            return;
        }
        let mut words = Vec::with_capacity(self.record_bytes / WORD);
        words.extend([turn.published + 1, since_1970().as_nanos() as u64]);
        words_of(snapshot, &mut words);
        let mut bytes = to_bytes(&words);
        bytes.extend(Checksum::of(&bytes).0.to_le_bytes());
        if bytes.len() != self.record_bytes {
            limited!(self.log, error, "a tier shows other figures than when it was opened");
            return;
        }
        let at = self.records + turn.published % 2 * self.record_bytes as u64;
        match self.file.write_all_at(&bytes, at) {
            Ok(()) => {
                turn.published += 1;
                turn.snapshot = snapshot.number;
                turn.revision = snapshot.revision;
                turn.at = Some(Instant::now());
            }
            Err(error) => {
                limited!(self.log, warn, "writing {}: {error}", self.path.display());
            }
        }
    }

    /// Removes the page. Idempotent; what is published afterwards nobody sees.
    pub fn withdraw(&self) {
        // Somebody else may have removed it.
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.withdraw();
    }
}

fn header(description: &Description) -> Vec<u8> {
    // Can not fail: strings, numbers and lists of them.
    let mut text = serde_json::to_vec(description).unwrap_or_default();
    text.resize(text.len().next_multiple_of(WORD), b' ');
    let words: [u64; HEADER_WORDS] =
        [MAGIC, LAYOUT, text.len() as u64, Checksum::of(&text).0, description.words() as u64];
    let mut header = to_bytes(&words);
    header.extend(text);
    header
}

/// Gives a file without a name the first one that is free.
fn named(file: &File, directory: &Path, pid: u32) -> Result<PathBuf, PageError> {
    let user = rustix::process::geteuid().as_raw();
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    for number in 0..MAX_PAGES {
        let path = directory.join(Name { user, pid, number }.to_string());
        match linkat(CWD, &*own, CWD, &path, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => return Ok(path),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(PageError::io("naming", &path)(error.into())),
        }
    }
    let taken = io::Error::new(io::ErrorKind::AlreadyExists, "every name is taken");
    Err(PageError::io("naming a page in", directory)(taken))
}
