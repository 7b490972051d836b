//! The table of headers: the index on disk. Written into the page cache; the flusher syncs it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use zerocopy::{FromBytes, IntoBytes};

use super::format::{HEADER_BYTES, Header};
use super::layout::Layout;
use super::space::{allocate, io_error, open_or_make, write_error};
use crate::index::Slot;
use crate::tier::TierError;

pub(super) const HEADERS_FILE: &str = "headers";
/// Headers read at once.
const SWEEP: usize = 8192;

/// The file `headers`.
pub(super) struct Headers {
    file: File,
    path: PathBuf,
}

impl Headers {
    /// Opens the table, with room for all slots; makes it if it is not there.
    pub(super) fn open(directory: &Path, layout: &Layout) -> Result<Self, TierError> {
        let path = directory.join(HEADERS_FILE);
        let file = open_or_make(&path)?;
        allocate(&file, layout.headers_bytes())
            .map_err(|source| write_error("allocating", &path, source))?;
        Ok(Self { file, path })
    }

    pub(super) fn write(&self, slot: Slot, header: &Header) -> Result<(), TierError> {
        self.put(slot, header.as_bytes())
    }

    /// Says that a slot is free.
    pub(super) fn clear(&self, slot: Slot) -> Result<(), TierError> {
        self.put(slot, &[0; HEADER_BYTES])
    }

    fn put(&self, slot: Slot, bytes: &[u8]) -> Result<(), TierError> {
        self.file
            .write_all_at(bytes, u64::from(slot) * HEADER_BYTES as u64)
            .map_err(|source| io_error("writing", &self.path, source))
    }

    pub(super) fn sync(&self) -> Result<(), TierError> {
        self.file.sync_data().map_err(|source| io_error("syncing", &self.path, source))
    }

    /// Shows every header that does not say free, in the order of slots.
    pub(super) fn sweep(&self, mut see: impl FnMut(Slot, &Header)) -> Result<(), TierError> {
        sweep(&self.file, &mut see).map_err(|source| io_error("reading", &self.path, source))
    }
}

/// Shows every header of a table that does not say free, in the order of slots.
pub(super) fn sweep(file: &File, mut see: impl FnMut(Slot, &Header)) -> io::Result<()> {
    let mut buffer = vec![0; SWEEP * HEADER_BYTES];
    let (mut offset, mut slot) = (0, 0);
    loop {
        let read = read_up_to(file, &mut buffer, offset)?;
        for bytes in buffer[..read].chunks_exact(HEADER_BYTES) {
            if let Ok(header) = Header::ref_from_bytes(bytes)
                && !header.is_free()
            {
                see(slot, header);
            }
            slot += 1;
        }
        if read < buffer.len() {
            return Ok(());
        }
        offset += read as u64;
    }
}

/// Fills a buffer, or reads to the end of the file.
pub(super) fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
