//! One process owns a store: `LOCK`, held with flock, names it.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::space::{io_error, open_or_make, write_error};
use crate::tier::TierError;

const LOCK_FILE: &str = "LOCK";

/// Makes this process the owner of the store in `directory`, as long as the file is open.
///
/// # Errors
/// [`TierError::Locked`] with the owner's pid.
pub(super) fn own(directory: &Path) -> Result<File, TierError> {
    let path = directory.join(LOCK_FILE);
    let file = open_or_make(&path)?;
    locked(file.try_lock(), &file, directory, &path)?;
    // Over what is there: a full disk need not give a byte for it.
    file.write_all_at(format!("{:<16}", std::process::id()).as_bytes(), 0)
        .map_err(|source| write_error("writing", &path, source))?;
    Ok(file)
}

/// Keeps owners away as long as the file is open, without writing anything; `None` if there
/// never was an owner.
///
/// # Errors
/// [`TierError::Locked`] with the owner's pid.
pub(super) fn keep_out(directory: &Path) -> Result<Option<File>, TierError> {
    let path = directory.join(LOCK_FILE);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(io_error("opening", &path, source)),
    };
    locked(file.try_lock_shared(), &file, directory, &path)?;
    Ok(Some(file))
}

fn locked(
    result: Result<(), TryLockError>,
    file: &File,
    directory: &Path,
    path: &Path,
) -> Result<(), TierError> {
    match result {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            Err(TierError::Locked { owner: pid_in(file), path: directory.to_owned() })
        }
        Err(TryLockError::Error(source)) => Err(io_error("locking", path, source)),
    }
}

/// Only for messages: the lock itself is what counts.
fn pid_in(mut file: &File) -> String {
    let mut text = String::new();
    let _ = file.read_to_string(&mut text);
    let pid = text.trim();
    if pid.is_empty() { "unknown" } else { pid }.to_owned()
}
