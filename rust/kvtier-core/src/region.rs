//! The primary region: one mapping of shape `(slots, slot_bytes)` that holds the chunks.
//!
//! A region is a `memfd` by default: another process of the same user attaches through
//! [`Region::name`], and because nothing has a place in a file system, nothing is left behind
//! when the processes end, even by SIGKILL. Whoever uses the mapping holds an `Arc<Region>`:
//! managers, jobs under way, copiers, views of Python. It is unmapped with the last of them.
//! Memory that somebody else mapped can be a region too ([`Region::lent`]): it goes back to its
//! owner with the last of them.
//!
//! # Who may touch which bytes
//!
//! A slot is plain shared memory; the index decides who may touch it. A slot in state *writing*
//! has one writer and no reader; a slot that is *ready* has readers only, each with a pin. The
//! two accessors below are `unsafe` because that promise is the caller's.

use std::any::Any;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, memfd_create};

/// Slots start at multiples of this many bytes; direct I/O and page tables want it.
pub const SLOT_ALIGNMENT: usize = 4096;

/// Why a region could not be made or attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// A region without slots or bytes, or one past the address space.
    #[error("a region of {slots} slots of {slot_bytes} bytes is not possible: {why}")]
    Shape {
        /// Slots asked for.
        slots: u64,
        /// Bytes a slot.
        slot_bytes: u64,
        /// What is wrong.
        why: &'static str,
    },
    /// Memory of somebody else that does not begin and go on in whole pages.
    #[error(
        "memory of {bytes} bytes at {address:#x} in rows of {slot_bytes} bytes can not be a region: \
         rows of whole pages of {SLOT_ALIGNMENT} bytes are needed"
    )]
    Unaligned {
        /// Where it begins.
        address: usize,
        /// Bytes a row.
        slot_bytes: usize,
        /// Bytes in all.
        bytes: usize,
    },
    /// More than the machine has free.
    #[error(
        "a region of {wanted} bytes asked for, but this machine has {available} bytes of memory \
         available: use fewer slots"
    )]
    NoMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that could be had.
        available: u64,
    },
    /// A name that is not one of ours.
    #[error("{0:?} is no name of a region (expected memfd:PID:FD:SLOTS:SLOT_BYTES)")]
    BadName(String),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: String,
        /// What it said.
        source: std::io::Error,
    },
}

/// What backs a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// A memory file: other processes can attach by name.
    Memfd,
    /// Anonymous memory of this process.
    Anonymous,
}

/// Memory that somebody else mapped, and what keeps it.
struct Lent {
    start: NonNull<u8>,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the pointer is only read through `Region`, whose accessors hand the question of who may
// touch which bytes to their callers, as for a mapping of our own; the owner is both by itself.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

enum Memory {
    Mapped(MmapRaw),
    Lent(Lent),
}

/// One mapping of `slots` rows of `slot_bytes` bytes; see the module.
pub struct Region {
    memory: Memory,
    // Keeps the memory file open, so that others can attach by its number.
    file: Option<File>,
    slots: u32,
    slot_bytes: usize,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region")
            .field("slots", &self.slots)
            .field("slot_bytes", &self.slot_bytes)
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

impl Region {
    /// A region over memory that somebody else mapped: `slots` rows of `slot_bytes` from `start`.
    /// `owner` keeps it, and is dropped with the last user of the region.
    ///
    /// # Errors
    /// [`RegionError`] when rows are no whole pages, or there is none.
    ///
    /// # Safety
    /// As long as `owner` lives, the memory is mapped, readable and writable.
    pub unsafe fn lent(
        start: NonNull<u8>,
        slots: u32,
        slot_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>, RegionError> {
        let (row, bytes) = shape(slots, slot_bytes)?;
        if row != slot_bytes || !start.addr().get().is_multiple_of(SLOT_ALIGNMENT) {
            let address = start.addr().get();
            return Err(RegionError::Unaligned { address, slot_bytes, bytes });
        }
        let memory = Memory::Lent(Lent { start, _owner: owner });
        Ok(Arc::new(Self { memory, file: None, slots, slot_bytes }))
    }

    /// Makes a region of zeros. `slot_bytes` is rounded up to [`SLOT_ALIGNMENT`].
    ///
    /// # Errors
    /// [`RegionError`] when the shape is impossible or the memory can not be had.
    pub fn new(slots: u32, slot_bytes: usize, kind: RegionKind) -> Result<Arc<Self>, RegionError> {
        let (slot_bytes, bytes) = shape(slots, slot_bytes)?;
        // Shared memory is only taken at first touch, when it is too late for an error: ask now.
        if let Some(available) = available_memory()
            && bytes as u64 > available
        {
            return Err(RegionError::NoMemory { wanted: bytes as u64, available });
        }
        let os = |what: &str, source| RegionError::Os {
            what: format!("{what} of {bytes} bytes"),
            source,
        };
        let (map, file) = match kind {
            RegionKind::Anonymous => {
                let map = MmapMut::map_anon(bytes).map_err(|e| os("anonymous mapping", e))?;
                (MmapRaw::from(map), None)
            }
            RegionKind::Memfd => {
                let fd = memfd_create("kvtier", MemfdFlags::CLOEXEC)
                    .map_err(|e| os("memory file", e.into()))?;
                let file = File::from(fd);
                file.set_len(bytes as u64).map_err(|e| os("memory file", e))?;
                let map = MmapOptions::new()
                    .len(bytes)
                    .map_raw(&file)
                    .map_err(|e| os("shared mapping", e))?;
                (map, Some(file))
            }
        };
        Ok(Arc::new(Self { memory: Memory::Mapped(map), file, slots, slot_bytes }))
    }

    /// Maps the region that another process of this user made, by its [`Region::name`].
    ///
    /// # Errors
    /// [`RegionError`] when the name is not one, its process is gone, or the size differs.
    pub fn attach(name: &str) -> Result<Arc<Self>, RegionError> {
        let bad = || RegionError::BadName(name.to_owned());
        let mut parts = name.split(':');
        if parts.next() != Some("memfd") {
            return Err(bad());
        }
        let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok()).ok_or_else(bad);
        let (pid, fd, slots, row) = (number()?, number()?, number()?, number()?);
        let slots = u32::try_from(slots).map_err(|_| bad())?;
        let (slot_bytes, bytes) = shape(slots, usize::try_from(row).map_err(|_| bad())?)?;
        let path = format!("/proc/{pid}/fd/{fd}");
        let os = |source| RegionError::Os {
            what: format!("attaching to {name} through {path}"),
            source,
        };
        let file = File::options().read(true).write(true).open(&path).map_err(os)?;
        let found = file.metadata().map_err(os)?.len();
        if found != bytes as u64 {
            // Also what happens when the number was given to another file meanwhile.
            return Err(bad());
        }
        let map = MmapOptions::new().len(bytes).map_raw(&file).map_err(os)?;
        let memory = Memory::Mapped(map);
        Ok(Arc::new(Self { memory, file: Some(file), slots, slot_bytes }))
    }

    /// What another process passes to [`Region::attach`]; `None` for anonymous and lent memory. It holds
    /// as long as this process keeps the region.
    pub fn name(&self) -> Option<String> {
        self.file.as_ref().map(|file| {
            format!(
                "memfd:{}:{}:{}:{}",
                std::process::id(),
                file.as_raw_fd(),
                self.slots,
                self.slot_bytes
            )
        })
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes a slot, a multiple of [`SLOT_ALIGNMENT`].
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        self.slot_bytes * self.slots as usize
    }

    /// Start of the mapping.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        match &self.memory {
            Memory::Mapped(map) => map.as_mut_ptr(),
            Memory::Lent(lent) => lent.start.as_ptr(),
        }
    }

    /// Start of a slot.
    ///
    /// # Panics
    /// Past the last slot: slots come from the index, never from outside.
    pub fn slot_ptr(&self, slot: u32) -> *mut u8 {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        // SAFETY: the slot was checked, so the offset lies inside the mapping.
        unsafe { self.as_mut_ptr().add(slot as usize * self.slot_bytes) }
    }

    /// The bytes of a slot, for reading.
    ///
    /// # Safety
    /// Nobody may write the slot while the slice lives: the caller holds a pin on a ready slot.
    pub unsafe fn slot(&self, slot: u32) -> &[u8] {
        // SAFETY: in bounds by `slot_ptr`; not written meanwhile by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.slot_ptr(slot), self.slot_bytes) }
    }

    /// The bytes of a slot, for writing.
    ///
    /// # Safety
    /// Nobody else may touch the slot while the slice lives: the caller is the one writer of a
    /// slot in state *writing*.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the index's states, not by borrowing")]
    pub unsafe fn slot_mut(&self, slot: u32) -> &mut [u8] {
        // SAFETY: in bounds by `slot_ptr`; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.slot_ptr(slot), self.slot_bytes) }
    }

    /// Touches every page with `threads` threads, so that no transfer pays for page faults.
    ///
    /// Only for a region that nobody uses yet: it writes a zero into every page.
    pub fn prefault(&self, threads: usize) {
        let pages = self.bytes() / SLOT_ALIGNMENT;
        let share = pages.div_ceil(threads.max(1));
        std::thread::scope(|scope| {
            for first in (0..pages).step_by(share.max(1)) {
                scope.spawn(move || {
                    for page in first..(first + share).min(pages) {
                        // SAFETY: the page lies inside the mapping, and a fresh region is all
                        // zeros that nobody reads yet.
                        unsafe {
                            self.as_mut_ptr().add(page * SLOT_ALIGNMENT).write_volatile(0);
                        }
                    }
                });
            }
        });
    }
}

/// Bytes a slot after rounding up, and bytes in all.
fn shape(slots: u32, slot_bytes: usize) -> Result<(usize, usize), RegionError> {
    let error =
        |why| RegionError::Shape { slots: u64::from(slots), slot_bytes: slot_bytes as u64, why };
    if slots == 0 || slot_bytes == 0 {
        return Err(error("it needs at least one slot of at least one byte"));
    }
    let too_large = || error("it does not fit into the address space");
    let row = slot_bytes.checked_next_multiple_of(SLOT_ALIGNMENT).ok_or_else(too_large)?;
    let bytes = row
        .checked_mul(slots as usize)
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(too_large)?;
    Ok((row, bytes))
}

/// `MemAvailable` of the kernel, in bytes; `None` where it does not say.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_mapping_sees_the_bytes_of_the_first() {
        let region = Region::new(3, 5000, RegionKind::Memfd).expect("small region");
        assert_eq!(region.slot_bytes(), 8192);
        let other = Region::attach(&region.name().expect("named")).expect("attach");
        // SAFETY: this test is the only user of both mappings.
        unsafe {
            region.slot_mut(2)[4999] = 7;
            assert_eq!(other.slot(2)[4999], 7);
        }
        drop(region);
        // SAFETY: as above; the second mapping outlives its maker.
        assert_eq!(unsafe { other.slot(2)[4999] }, 7);
    }

    #[test]
    fn impossible_shapes_are_errors() {
        for (slots, bytes) in [(0, 4096), (1, 0), (u32::MAX, usize::MAX / 2)] {
            let error = Region::new(slots, bytes, RegionKind::Anonymous).expect_err("impossible");
            assert!(matches!(error, RegionError::Shape { .. }), "{error}");
        }
        let error = Region::new(u32::MAX, 1 << 30, RegionKind::Memfd).expect_err("4 EiB");
        assert!(matches!(error, RegionError::NoMemory { .. }), "{error}");
    }

    #[test]
    fn names_of_others_are_refused() {
        for name in ["", "shm:1", "memfd:1:2:3", "memfd:x:1:1:4096", "memfd:1:1:0:4096"] {
            assert!(Region::attach(name).is_err(), "{name}");
        }
        let region = Region::new(2, 4096, RegionKind::Memfd).expect("small region");
        let lie = region.name().expect("named").replace(":2:4096", ":4:4096");
        assert!(matches!(Region::attach(&lie), Err(RegionError::BadName(_))));
    }

    #[test]
    fn lent_memory_goes_back_with_its_last_user() {
        let owner = Region::new(2, 4096, RegionKind::Anonymous).expect("small region");
        let start = NonNull::new(owner.as_mut_ptr()).expect("mapped");
        let keeps: Box<dyn Any + Send + Sync> = Box::new(Arc::clone(&owner));
        // SAFETY: `keeps` keeps the mapping.
        let lent = unsafe { Region::lent(start, 2, 4096, keeps) }.expect("whole pages");
        // SAFETY: nobody else uses either.
        unsafe {
            lent.slot_mut(1)[7] = 9;
            assert_eq!(owner.slot(1)[7], 9);
        }
        let other = Arc::clone(&lent);
        drop(lent);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(other);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn lent_memory_that_is_not_in_whole_pages_is_refused() {
        let owner = Region::new(2, 4096, RegionKind::Anonymous).expect("small region");
        let start = NonNull::new(owner.as_mut_ptr()).expect("mapped");
        // SAFETY: within the mapping, and nothing is read.
        let inside = unsafe { start.add(512) };
        for (start, slot_bytes) in [(start, 100), (inside, 4096)] {
            // SAFETY: refused, so never used.
            let refused = unsafe { Region::lent(start, 1, slot_bytes, Box::new(())) };
            let error = refused.expect_err("no whole pages");
            assert!(matches!(error, RegionError::Unaligned { .. }), "{error}");
        }
    }

    #[test]
    fn prefault_leaves_zeros() {
        let region = Region::new(3, 4096, RegionKind::Anonymous).expect("small region");
        region.prefault(2);
        // SAFETY: nobody writes.
        assert!(unsafe { region.slot(2) }.iter().all(|&byte| byte == 0));
    }
}
