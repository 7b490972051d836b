//! The stats page: a manager's figures, for whoever looks from outside.
//!
//! Every manager has a small file in shared memory, `kvtier-UID-PID-NUMBER.stats`, and writes its
//! figures there at the end of a step that changed them. `kvtier top` and `kvtier exporter` read the
//! pages of all processes; the engine has no thread and no socket for it.
//!
//! # Layout 1
//! Little-endian words of 8 bytes, but for the description:
//!
//! ```text
//! "KVTSTATS"  layout  bytes of the description  its checksum  words of figures in a record
//! the description: JSON, padded with spaces to whole words
//! record 0:  number  nanoseconds since 1970  figures ...  checksum of what is before it
//! record 1:  the same
//! ```
//!
//! The description ([`Description`]) names every figure in order, with its kind. So a reader
//! needs not know which figures a writer of another version has; one of another layout is
//! refused.
//!
//! # Promises
//! - Publishing is one `pwrite` into memory that was allocated before, and never waits: for no
//!   reader, since a reader takes no lock that it needs, and for no other thread, since one that
//!   finds another at it leaves it to that one. Whatever happens to the file, its writer only
//!   gets an error: nothing is mapped, so a page that somebody truncates raises no signal.
//! - A reader never gets torn figures: the two records are written in turn, each with a checksum
//!   behind it, so the last whole one is there while the next one is written, and stays when the
//!   writer dies at it.
//! - A page is complete, and locked by its owner, before it has a name.
//! - A page is its owner's alone (0600), and a reader takes nobody else's; root takes all.
//! - A page whose owner is gone is removed by the next reader, or by the next manager that opens
//!   one. The kernel knows who is gone: the lock ends with the owner, in whatever container. A
//!   child that `fork` made holds it too, so an owner that can be asked for by its pid is.
//!
//! # Cost
//! `benches/manager.rs` measures it: with one tier a step in which a figure changed takes 1.5 to 7
//! microseconds longer, most of it the system call. One in which none did publishes only what is
//! 100 ms old, so that readers see that the engine lives. A page takes 1.3 KB of `/dev/shm`, and 3 KB more a tier.

mod description;
mod owner;
mod reader;
mod writer;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use description::{Description, TierDescription};
pub use owner::Owner;
pub use reader::{Listing, Reading, read_all};
pub use writer::Page;

/// Where pages are, unless [`DIRECTORY_VARIABLE`] says otherwise.
pub const DEFAULT_DIRECTORY: &str = "/dev/shm";

/// The environment variable with the directory of pages; empty, there are none.
pub const DIRECTORY_VARIABLE: &str = "KVTIER_STATS_DIR";

/// The directory of pages as the environment has it; `None` if there are to be none.
pub fn directory() -> Option<PathBuf> {
    let named = std::env::var_os(DIRECTORY_VARIABLE);
    let named = named.unwrap_or_else(|| OsString::from(DEFAULT_DIRECTORY));
    (!named.is_empty()).then(|| named.into())
}

/// Why a page could not be opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// A directory on a disk, for which a step might have to wait.
    #[error(
        "{path} is not in memory: name a directory of a tmpfs in {DIRECTORY_VARIABLE}, or leave it \
         empty to have no stats pages", path = path.display()
    )]
    NotMemory {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A page of another layout.
    #[error(
        "{path} has layout {found}, this version of kvtier reads {expected}: use the kvtier that \
         its process uses", path = path.display()
    )]
    Layout {
        /// The page.
        path: PathBuf,
        /// Its layout.
        found: u64,
        /// Ours.
        expected: u64,
    },
    /// Less than there should be, or something else.
    #[error("{path} is damaged: {why}", path = path.display())]
    Damaged {
        /// The page.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

impl PageError {
    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}

const MAGIC: u64 = u64::from_le_bytes(*b"KVTSTATS");
const LAYOUT: u64 = 1;
/// Words before the description.
const HEADER_WORDS: usize = 5;
/// Words of a record that are no figures: number, time, checksum.
const RECORD_WORDS: usize = 3;
const WORD: usize = size_of::<u64>();
/// A page of more bytes than this is none.
const MAX_BYTES: u64 = 4 << 20;

/// Names of pages.
struct Name {
    user: u32,
    pid: u32,
    number: u32,
}

impl Name {
    fn parse(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix("kvtier-")?.strip_suffix(".stats")?.split('-');
        let mut number = || parts.next()?.parse::<u32>().ok();
        let name = Self { user: number()?, pid: number()?, number: number()? };
        parts.next().is_none().then_some(name)
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "kvtier-{}-{}-{}.stats", self.user, self.pid, self.number)
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    // A checksum follows, as a rule.
    let mut bytes = Vec::with_capacity((words.len() + 1) * WORD);
    for word in words {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The whole words of `bytes`.
fn to_words(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<WORD>();
    words.iter().map(|&word| u64::from_le_bytes(word)).collect()
}

#[cfg(test)]
mod tests;
