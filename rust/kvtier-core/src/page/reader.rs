//! Reading pages, and removing those that nobody writes any more.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::description::Description;
use super::owner::is_abandoned;
use super::{
    HEADER_WORDS, LAYOUT, MAGIC, MAX_BYTES, Name, PageError, RECORD_WORDS, WORD, to_words,
};
use crate::checksum::Checksum;
use crate::manager::Tell;

/// How often a page is read again whose two records were both overwritten meanwhile: the reader
/// would have to lose the processor for a whole step of the engine, each time.
const ATTEMPTS: usize = 16;

/// What a page said.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    /// The page.
    pub path: PathBuf,
    /// The user that it belongs to.
    pub user: u32,
    /// Of several managers of one process, which.
    pub number: u32,
    /// When it was published, in nanoseconds since 1970.
    pub published: u64,
    /// What the page says of itself.
    pub description: Description,
    words: Vec<u64>,
}

impl Reading {
    /// Tells the figures of the primary tier, or of a secondary one by its number.
    ///
    /// # Panics
    /// For a tier that the description has not.
    pub fn each(&self, tier: Option<usize>, tell: &mut Tell<'_>) {
        self.description.each(tier, &self.words, tell);
    }
}

/// What is in a directory of pages.
#[derive(Debug, Default)]
pub struct Listing {
    /// What could be read, by pid and number.
    pub readings: Vec<Reading>,
    /// What could not be, of processes that live.
    pub refused: Vec<PageError>,
}

/// Reads all pages in `directory` that are this user's (root's are everybody's), and removes
/// those whose process is gone.
///
/// # Errors
/// [`PageError::Io`] when the directory can not be listed.
pub fn read_all(directory: &Path) -> Result<Listing, PageError> {
    let mut listing = Listing::default();
    for (path, name, file) in pages(directory)? {
        let reading = read(&path, &name, &file);
        if is_abandoned(&file, reading.as_ref().ok().map(|reading| &reading.description.owner)) {
            // Somebody else may have removed it first.
            let _ = fs::remove_file(&path);
            continue;
        }
        match reading {
            Ok(reading) => listing.readings.push(reading),
            Err(error) => listing.refused.push(error),
        }
    }
    Ok(listing)
}

/// Removes the pages in `directory` whose process is gone.
pub(super) fn sweep(directory: &Path) -> Result<(), PageError> {
    read_all(directory).map(drop)
}

/// The pages in `directory`, opened, by pid and number.
fn pages(directory: &Path) -> Result<Vec<(PathBuf, Name, File)>, PageError> {
    let user = rustix::process::geteuid();
    let entries = fs::read_dir(directory).map_err(PageError::io("listing", directory))?;
    let mut pages = Vec::new();
    for entry in entries.flatten() {
        let Some(name) = entry.file_name().to_str().and_then(Name::parse) else {
            continue;
        };
        // Follows no link and waits for no pipe: anybody can put something here.
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(entry.path());
        // One that is gone by now, or not for us, is none.
        let Some((file, metadata)) = opened.ok().and_then(|file| {
            let metadata = file.metadata().ok()?;
            Some((file, metadata))
        }) else {
            continue;
        };
        let ours = user.is_root() || name.user == user.as_raw();
        if metadata.is_file() && metadata.uid() == name.user && ours {
            pages.push((entry.path(), name, file));
        }
    }
    pages.sort_by_key(|(_, name, _)| (name.pid, name.number));
    Ok(pages)
}

fn read(path: &Path, name: &Name, file: &File) -> Result<Reading, PageError> {
    let damaged = |why: String| PageError::Damaged { path: path.to_owned(), why };
    for _ in 0..ATTEMPTS {
        let bytes = contents(path, file)?;
        let (description, records) = open(path, &bytes)?;
        let record_bytes = (description.words() + RECORD_WORDS) * WORD;
        let Some(records) = bytes.get(records..records + 2 * record_bytes) else {
            return Err(damaged(format!("it has {} bytes only", bytes.len())));
        };
        let whole = records.chunks_exact(record_bytes).filter_map(whole_record);
        if let Some(mut words) = whole.max_by_key(|record| record[0]) {
            let published = words[1];
            words.drain(..2);
            let Name { user, number, .. } = *name;
            let path = path.to_owned();
            return Ok(Reading { path, user, number, published, description, words });
        }
    }
    Err(damaged("it has no whole record".to_owned()))
}

/// The words of a record, without its checksum, if that is right.
fn whole_record(bytes: &[u8]) -> Option<Vec<u64>> {
    let (content, checksum) = bytes.split_at(bytes.len() - WORD);
    let words = to_words(content);
    // Before the first one is written there are zeros.
    let good = to_words(checksum) == [Checksum::of(content).0] && words[0] > 0;
    good.then_some(words)
}

fn contents(path: &Path, file: &File) -> Result<Vec<u8>, PageError> {
    let length = file.metadata().map_err(PageError::io("asking for", path))?.len();
    if length > MAX_BYTES {
        let why = format!("it has {length} bytes, a page has {MAX_BYTES} at most");
        return Err(PageError::Damaged { path: path.to_owned(), why });
    }
    let mut bytes = vec![0; length as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], filled as u64) {
            // Truncated since.
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(PageError::io("reading", path)(error)),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// The description in a page, and where the records behind it begin.
fn open(path: &Path, bytes: &[u8]) -> Result<(Description, usize), PageError> {
    let damaged = |why: &str| PageError::Damaged { path: path.to_owned(), why: why.to_owned() };
    let first = HEADER_WORDS * WORD;
    let header = to_words(bytes.get(..first).ok_or_else(|| damaged("it has no header"))?);
    let [magic, layout, length, checksum, words] = header[..] else {
        return Err(damaged("it has no header"));
    };
    if magic != MAGIC {
        return Err(damaged("it is no stats page"));
    }
    if layout != LAYOUT {
        return Err(PageError::Layout { path: path.to_owned(), found: layout, expected: LAYOUT });
    }
    let records = usize::try_from(length).ok().and_then(|length| first.checked_add(length));
    let text = records.and_then(|records| Some((bytes.get(first..records)?, records)));
    let (text, records) = text.ok_or_else(|| damaged("its description is cut off"))?;
    if Checksum::of(text).0 != checksum {
        return Err(damaged("the checksum of its description is wrong"));
    }
    let description: Description =
        serde_json::from_slice(text).map_err(|error| damaged(&error.to_string()))?;
    if description.words() as u64 != words || words > MAX_BYTES / WORD as u64 {
        return Err(damaged("its description is of other figures"));
    }
    Ok((description, records))
}
