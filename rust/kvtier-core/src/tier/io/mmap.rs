//! Reads as copies out of the page cache, for data that is in it: no system call, no waiting on
//! a lock of the kernel. Writes are `pwrite`.
//!
//! A map covers a file to the length it will have; only bytes that are there are touched. A file
//! that is cut short between the look at its length and the copy, or a disk that fails to bring
//! a page, ends the process by SIGBUS: this engine is for disks and neighbours one trusts.

use std::io::{self, ErrorKind};

use memmap2::MmapOptions;

use super::threads::{Calls, Plain};
use super::{DataFile, Transfer};
use crate::tier::lanes::Lane;

/// Loads by `memcpy`.
pub(super) struct Mapped;

impl Calls for Mapped {
    fn call(&self, transfer: &Transfer, most: usize) -> io::Result<usize> {
        if transfer.lane == Lane::Store {
            return Plain.call(transfer, most);
        }
        let file = &*transfer.file;
        let end = transfer.offset() + most as u64;
        if file.file.metadata()?.len() < end {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let map = file.mapped()?;
        let start = transfer.offset() as usize;
        let bytes = map.get(start..start + most).ok_or(ErrorKind::UnexpectedEof)?;
        // SAFETY: the transfer owns the slot it loads, by `Transfer::new`; a file's map and a
        // region do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), transfer.memory(), most) };
        Ok(most)
    }
}

impl DataFile {
    fn mapped(&self) -> io::Result<&memmap2::Mmap> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let length = usize::try_from(self.full_bytes).map_err(|_| ErrorKind::FileTooLarge)?;
        // SAFETY: the bytes of a slot change only while no load of it runs: the tier's index
        // pins what is read. Nobody else writes the file, by the store's lock.
        let map = unsafe { MmapOptions::new().len(length).map(&self.file)? };
        Ok(self.map.get_or_init(|| map))
    }
}
