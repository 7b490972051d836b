//! What goes wrong in a tier.

use std::path::PathBuf;

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
    /// The bytes are not those that were stored.
    #[error("{what} of chunk {key} is damaged")]
    Corrupt {
        /// Which part.
        what: &'static str,
        /// Whose.
        key: HexKey,
    },
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
