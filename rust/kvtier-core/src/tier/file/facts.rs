//! How chunks were used, on disk: a checkpoint that is written in place, and a journal that
//! makes good what a power loss tears in it. `docs/file-format.md` has the whole story.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::format::{FACTS_PER_PAGE, Fact, FactPage, PAGE, fact_page, read_fact_page};
use super::headers::read_up_to;
use super::layout::Layout;
use super::slots::Slots;
use super::space::{allocate, io_error, open_or_make, write_error};
use crate::checksum::Checksum;
use crate::index::Slot;
use crate::tier::TierError;

pub(super) const CHECKPOINT_FILE: &str = "checkpoint";
pub(super) const JOURNAL_FILE: &str = "journal";

/// One of the two files.
struct PageFile {
    file: File,
    path: PathBuf,
}

impl PageFile {
    fn open(path: PathBuf, pages: u64) -> Result<Self, TierError> {
        let file = open_or_make(&path)?;
        allocate(&file, pages * PAGE as u64)
            .map_err(|source| write_error("allocating", &path, source))?;
        Ok(Self { file, path })
    }

    fn write(&self, page: u64, bytes: &[u8; PAGE]) -> Result<(), TierError> {
        self.file
            .write_all_at(bytes, page * PAGE as u64)
            .map_err(|source| io_error("writing", &self.path, source))
    }

    fn sync(&self) -> Result<(), TierError> {
        self.file.sync_data().map_err(|source| io_error("syncing", &self.path, source))
    }
}

/// Shows every page of facts in a file that was ever written.
pub(super) fn sweep_pages(
    file: &File,
    namespace: Checksum,
    mut see: impl FnMut(u64, FactPage),
) -> std::io::Result<()> {
    const PAGES: usize = 256;
    let mut buffer = vec![0; PAGES * PAGE];
    let mut number = 0;
    loop {
        let read = read_up_to(file, &mut buffer, number * PAGE as u64)?;
        for bytes in buffer[..read].chunks(PAGE) {
            // A file that was cut ends with part of a page.
            let page =
                bytes.try_into().map_or(FactPage::Bad, |page| read_fact_page(page, namespace));
            if page != FactPage::Blank {
                see(number, page);
            }
            number += 1;
        }
        if read < buffer.len() {
            return Ok(());
        }
    }
}

/// What reading the two files found.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct PagesFound {
    pub(super) good: u64,
    pub(super) bad: u64,
}

pub(super) struct Facts {
    checkpoint: PageFile,
    journal: PageFile,
    layout: Layout,
    namespace: Checksum,
    /// Where the journal goes on.
    next_page: u64,
    /// Up to which tick uses are in the journal, or in the checkpoint.
    flushed: u64,
    /// Up to which tick uses are in the checkpoint.
    checkpointed: u64,
}

impl Facts {
    /// Opens both files, and lets `slots` learn what they say. A file that can not be used is one
    /// without facts.
    pub(super) fn open(
        directory: &Path,
        layout: Layout,
        namespace: Checksum,
        slots: &Slots,
    ) -> Result<(Self, PagesFound), TierError> {
        let open = |name, pages| PageFile::open(directory.join(name), pages);
        let checkpoint = open(CHECKPOINT_FILE, layout.checkpoint_pages())?;
        let journal = open(JOURNAL_FILE, layout.journal_pages())?;
        let mut found = PagesFound::default();
        let mut next_page = 0;
        let files: [(&PageFile, &mut u64); 2] = [(&checkpoint, &mut 0), (&journal, &mut next_page)];
        for (file, next) in files {
            let read = sweep_pages(&file.file, namespace, |number, page| match page {
                FactPage::Facts(facts) => {
                    found.good += 1;
                    *next = number + 1;
                    for fact in &facts {
                        slots.learn(fact);
                    }
                }
                FactPage::Bad | FactPage::Blank => found.bad += 1,
            });
            if let Err(error) = read {
                log::warn!("{}: the order of accesses is lost: {error}", file.path.display());
            }
        }
        let flushed = slots.tick();
        let facts =
            Self { checkpoint, journal, layout, namespace, next_page, flushed, checkpointed: 0 };
        Ok((facts, found))
    }

    /// Writes down what changed since the last time, and brings it to the disk.
    pub(super) fn flush(&mut self, slots: &Slots) -> Result<(), TierError> {
        let now = slots.tick();
        let changed: Vec<Fact> =
            (0..slots.len()).filter_map(|slot| changed_since(slots, slot, self.flushed)).collect();
        if changed.is_empty() {
            return Ok(());
        }
        let pages = changed.len().div_ceil(FACTS_PER_PAGE) as u64;
        if self.next_page + pages > self.layout.journal_pages() {
            self.write_checkpoint(slots)?;
            self.checkpointed = now;
            self.next_page = 0;
        } else {
            for facts in changed.chunks(FACTS_PER_PAGE) {
                self.journal.write(self.next_page, &fact_page(facts, self.namespace))?;
                self.next_page += 1;
            }
            self.journal.sync()?;
        }
        self.flushed = now;
        Ok(())
    }

    /// Writes the pages of the checkpoint that changed.
    fn write_checkpoint(&self, slots: &Slots) -> Result<(), TierError> {
        for page in 0..self.layout.checkpoint_pages() {
            let first = page as u32 * FACTS_PER_PAGE as u32;
            let of_page = first..(first + FACTS_PER_PAGE as u32).min(slots.len());
            let mut changes =
                of_page.clone().filter_map(|slot| changed_since(slots, slot, self.checkpointed));
            if changes.next().is_some() {
                let facts: Vec<Fact> = of_page.filter_map(|slot| slots.fact(slot)).collect();
                self.checkpoint.write(page, &fact_page(&facts, self.namespace))?;
            }
        }
        self.checkpoint.sync()
    }
}

/// What is to be remembered of a slot that was used after `tick`.
fn changed_since(slots: &Slots, slot: Slot, tick: u64) -> Option<Fact> {
    if slots.used(slot) > tick { slots.fact(slot) } else { None }
}
