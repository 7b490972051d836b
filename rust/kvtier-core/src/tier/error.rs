//! What goes wrong in a tier.

use std::path::PathBuf;

use super::network::{BadCopy, NetworkError};
use crate::index::IndexError;
use crate::key::HexKey;
use crate::region::RegionError;

/// A tier that could not be opened, or an operation of a tier that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// Reading or writing failed.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Data of somebody else.
    #[error(
        "{path} holds another namespace, use another directory: {differences}\n  found:    {found}\n  \
         expected: {expected}",
        path = path.display()
    )]
    Identity {
        /// The store.
        path: PathBuf,
        /// The fields that differ, with both values.
        differences: String,
        /// Whose it is.
        found: String,
        /// Whose it should be.
        expected: String,
    },
    /// Another process has it open.
    #[error("{path} is in use by process {owner}: one process owns a store at a time", path = path.display())]
    Locked {
        /// The store.
        path: PathBuf,
        /// The owner's pid, or what is known of it.
        owner: String,
    },
    /// Less than it needs to work at all.
    #[error(
        "capacity_bytes = {given} of the {medium} tier is less than it needs for one chunk: give it \
         at least {needed}"
    )]
    Capacity {
        /// The tier's medium.
        medium: &'static str,
        /// Bytes given.
        given: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// Less on the device than the tier may use.
    #[error(
        "capacity_bytes = {wanted} asked for, but {path} has room for {available} bytes: lower the \
         capacity or use another directory", path = path.display()
    )]
    DeviceTooSmall {
        /// The store.
        path: PathBuf,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes there are, what the store holds already included.
        available: u64,
    },
    /// A store of another version of the format.
    #[error(
        "{path} holds a store of format version {found}, this version of kvtier has format \
         {expected}: use another directory, or delete this one, it is a cache",
        path = path.display()
    )]
    Format {
        /// The store.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// Ours.
        expected: u32,
    },
    /// A store whose identity can not be read.
    #[error(
        "{path} does not say whose store it is ({why}): delete the directory, or use another one",
        path = path.display()
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A directory that can not be written.
    #[error(
        "{path} can not be written ({source}): give the process the right to, or use another \
         directory", path = path.display()
    )]
    ReadOnly {
        /// What could not be written.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A setting that this machine can not follow.
    #[error("{setting} does not work for {path} ({why}): use \"auto\"", path = path.display())]
    Unsupported {
        /// The setting and its value.
        setting: &'static str,
        /// The store.
        path: PathBuf,
        /// What stands against it.
        why: String,
    },
    /// A setting that can not be.
    #[error("{0}")]
    Setting(String),
    /// The bytes are not those that were stored.
    #[error("{what} of chunk {key} is damaged")]
    Corrupt {
        /// Which part.
        what: &'static str,
        /// Whose.
        key: HexKey,
    },
    /// What a server keeps for a chunk is not that chunk.
    #[error("the copy of chunk {key} {bad}")]
    BadCopy {
        /// Whose.
        key: HexKey,
        /// What is wrong with it.
        bad: BadCopy,
    },
    /// An exchange with a server failed.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The chunk is not here any more.
    #[error("chunk {0} is gone")]
    Missing(HexKey),
    /// Every slot is being read or written.
    #[error("no slot can be freed for chunk {0} now")]
    Busy(HexKey),
    /// A tier of a type that is made elsewhere.
    #[error("tier {0:?} is made by whoever registered its type, not here")]
    Foreign(String),
    /// A tier that is made elsewhere could not be.
    #[error("{0}")]
    Refused(String),
    /// The index refused.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The memory could not be had.
    #[error(transparent)]
    Region(#[from] RegionError),
}
