//! Space on the device, and errors of files.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;

use crate::tier::TierError;

/// An error of a file that was read.
pub(super) fn io_error(what: &'static str, path: &Path, source: io::Error) -> TierError {
    TierError::Io { what, path: path.to_owned(), source }
}

/// An error of a file that was written, or opened to be.
pub(super) fn write_error(what: &'static str, path: &Path, source: io::Error) -> TierError {
    match source.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            TierError::ReadOnly { path: path.to_owned(), source }
        }
        _ => io_error(what, path, source),
    }
}

/// Opens a file to read and write it, with what is in it; makes it if it is not there.
pub(super) fn open_or_make(path: &Path) -> Result<File, TierError> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(|source| write_error("opening", path, source))
}

/// Makes a file `bytes` long, with all of it allocated: writing there later can not fail for
/// lack of space. Where the file system can not promise that (network file systems), the file
/// only gets its length. What was there stays.
///
/// Also waits, on ext4 and XFS, until direct writes that are under way have ended.
pub(super) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() > bytes {
        file.set_len(bytes)?;
    }
    if bytes == 0 {
        return Ok(());
    }
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return file.set_len(bytes),
            other => return Ok(other?),
        }
    }
}

/// Bytes that are free to this user on the device of a path, or of its nearest parent that is.
pub(super) fn free_bytes(path: &Path) -> Result<u64, TierError> {
    let mut existing = path;
    while !existing.exists() {
        existing = match existing.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
    }
    let stat = statvfs(existing)
        .map_err(|error| io_error("asking for free space of", existing, error.into()))?;
    Ok(stat.f_bavail * stat.f_frsize)
}
