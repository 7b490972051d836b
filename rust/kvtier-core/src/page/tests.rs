use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use tempfile::TempDir;

use super::*;
use crate::key::KeyBatch;
use crate::manager::tests::with_memory_tier;
use crate::manager::{Figure, Manager, Snapshot};
use crate::tier::TierLimits;

const CHUNK: usize = 4096;

fn directory() -> TempDir {
    tempfile::tempdir_in(DEFAULT_DIRECTORY).expect("shared memory")
}

fn manager() -> Manager {
    with_memory_tier("behind \"it\"", 4, TierLimits::default())
}

/// A page that this test publishes on.
fn page(directory: &Path) -> (Page, Snapshot, Description) {
    let mut snapshot = manager().stats();
    let description = Description::of(&snapshot, CHUNK);
    let page = Page::create(directory, &description).expect("created");
    snapshot.number += 1;
    page.publish(&snapshot);
    (page, snapshot, description)
}

fn only_reading(directory: &Path) -> Reading {
    let Listing { mut readings, refused } = read_all(directory).expect("listed");
    assert!(refused.is_empty(), "{refused:?}");
    assert_eq!(readings.len(), 1);
    readings.remove(0)
}

fn refusal(directory: &Path) -> PageError {
    let Listing { readings, mut refused } = read_all(directory).expect("listed");
    assert!(readings.is_empty(), "{readings:?}");
    assert_eq!(refused.len(), 1);
    refused.remove(0)
}

fn told(each: impl FnOnce(&mut crate::manager::Tell<'_>)) -> Vec<String> {
    let mut told = Vec::new();
    each(&mut |name, figure| told.push(format!("{name}: {figure:?}")));
    told
}

#[test]
fn a_reader_sees_what_the_manager_counts() {
    let directory = directory();
    let mut manager = manager();
    manager.open_page(directory.path()).expect("opened");
    let keys = KeyBatch::from_flat(vec![7; 8], 8).expect("a key");
    assert!(manager.prepare_store(1, &keys).expect("open").is_some());
    manager.complete_store(1, &keys, true).expect("prepared");
    while manager.is_busy().expect("open") {
        manager.wait_until(std::time::Instant::now() + Duration::from_secs(60)).expect("open");
        manager.end_step().expect("open");
    }
    let (reading, stats) = (only_reading(directory.path()), manager.stats());
    assert_eq!(stats.tiers[0].figures.stores.chunks, 1);
    assert_eq!(stats.tiers[0].figures.stores.latency.count(), 1);
    assert_eq!(told(|tell| reading.each(None, tell)), told(|tell| stats.primary.each(tell)));
    let tier = &stats.tiers[0];
    assert_eq!(told(|tell| reading.each(Some(0), tell)), told(|tell| tier.each(tell)));
    let Description { owner, tiers, slot_bytes, .. } = &reading.description;
    assert_eq!((*owner, *slot_bytes), (Owner::here(), CHUNK as u64));
    assert_eq!((&*tiers[0].name, &*tiers[0].medium), ("behind \"it\"", "memory"));
    manager.shutdown();
    assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 0, "gone with it");
}

#[test]
fn figures_are_never_torn_and_never_go_back() {
    let directory = directory();
    let (page, snapshot, _) = page(directory.path());
    let over = Arc::new(AtomicBool::new(false));
    let reader = thread::spawn({
        let (path, over) = (directory.path().to_owned(), Arc::clone(&over));
        move || {
            let (mut last, mut readings) = (0, 0);
            while !over.load(Ordering::Relaxed) || readings == 0 {
                let Listing { readings: mut found, .. } = read_all(&path).expect("listed");
                // None, when it was overtaken again and again.
                let Some(reading) = found.pop() else { continue };
                let mut told = Vec::new();
                reading.each(None, &mut |_, figure| match figure {
                    Figure::Count(count) => told.push(count),
                    other => panic!("{other:?}"),
                });
                let (slots, hits) = (told[0], told[told.len() - 1]);
                assert_eq!(slots, hits, "torn");
                assert!(last <= slots, "{slots} after {last}");
                last = slots;
                readings += 1;
            }
        }
    });
    for number in 2..20_000 {
        let mut snapshot = snapshot.clone();
        snapshot.number = number;
        (snapshot.primary.slots, snapshot.primary.not_admitted) = (number, number);
        page.publish(&snapshot);
    }
    over.store(true, Ordering::Relaxed);
    reader.join().expect("no torn figures");
}

#[test]
fn an_older_snapshot_is_not_published_over_a_newer_one() {
    let directory = directory();
    let (page, mut snapshot, _) = page(directory.path());
    (snapshot.number, snapshot.primary.hits) = (9, 90);
    page.publish(&snapshot);
    (snapshot.number, snapshot.primary.hits) = (8, 80);
    page.publish(&snapshot);
    let hits = told(|tell| only_reading(directory.path()).each(None, tell));
    assert!(hits.contains(&"hits: Count(90)".to_owned()), "{hits:?}");
}

#[test]
fn figures_that_did_not_change_are_due_only_when_the_page_is_old() {
    let directory = directory();
    let (page, mut snapshot, _) = page(directory.path());
    assert!(page.is_due(snapshot.revision + 1));
    // On a machine that is busy enough it is old at once, but not every time.
    let fresh = (0..1000).any(|_| {
        snapshot.number += 1;
        page.publish(&snapshot);
        !page.is_due(snapshot.revision)
    });
    assert!(fresh);
    let old = Instant::now() + Duration::from_secs(60);
    while !page.is_due(snapshot.revision) {
        assert!(Instant::now() < old, "nothing is published any more");
        thread::yield_now();
    }
}

#[test]
fn a_record_that_was_not_written_to_its_end_leaves_the_one_before() {
    let directory = directory();
    let (page, mut snapshot, _) = page(directory.path());
    (snapshot.number, snapshot.primary.hits) = (2, 20);
    page.publish(&snapshot);
    let bytes = fs::read(page.path()).expect("readable");
    let newest = bytes.len() - page_record_bytes(&bytes);
    for torn in [newest, newest + 8, newest + 16, bytes.len() - 1] {
        let mut torn_bytes = bytes.clone();
        torn_bytes[torn] ^= 1;
        fs::write(page.path(), &torn_bytes).expect("writable");
        let hits = told(|tell| only_reading(directory.path()).each(None, tell));
        assert!(hits.contains(&"hits: Count(0)".to_owned()), "byte {torn}: {hits:?}");
    }
}

/// Of a page, as its header has it.
fn page_record_bytes(bytes: &[u8]) -> usize {
    (to_words(bytes)[4] as usize + RECORD_WORDS) * WORD
}

#[test]
fn a_page_cut_off_anywhere_is_refused_and_its_writer_goes_on() {
    let directory = directory();
    let (page, mut snapshot, _) = page(directory.path());
    let bytes = fs::read(page.path()).expect("readable");
    for length in (0..bytes.len()).step_by(97).chain([39, 40, 41, bytes.len() - 1]) {
        fs::write(page.path(), &bytes[..length]).expect("writable");
        assert!(
            matches!(refusal(directory.path()), PageError::Damaged { .. }),
            "cut off at {length}"
        );
    }
    snapshot.number += 1;
    page.publish(&snapshot);
    fs::write(page.path(), &bytes).expect("writable");
    only_reading(directory.path());
}

#[test]
fn damage_anywhere_in_front_of_the_records_is_refused() {
    let directory = directory();
    let (page, ..) = page(directory.path());
    let bytes = fs::read(page.path()).expect("readable");
    let records = bytes.len() - 2 * page_record_bytes(&bytes);
    for at in (0..records).step_by(13) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x40;
        fs::write(page.path(), &damaged).expect("writable");
        refusal(directory.path());
    }
}

#[test]
fn another_layout_is_refused_by_its_number() {
    let directory = directory();
    let (page, ..) = page(directory.path());
    let mut bytes = fs::read(page.path()).expect("readable");
    bytes[8] = 9;
    fs::write(page.path(), &bytes).expect("writable");
    let error = refusal(directory.path());
    assert!(matches!(error, PageError::Layout { found: 9, expected: LAYOUT, .. }), "{error}");
    let shown = error.to_string();
    assert!(shown.contains("layout 9") && shown.contains("reads 1"), "{shown}");
}

#[test]
fn pages_of_processes_that_are_gone_are_removed() {
    let directory = directory();
    let (page, snapshot, mut description) = page(directory.path());
    // Nobody holds the copy's lock.
    let copy = page.path().with_file_name("kvtier-0-1-7.stats");
    let user = rustix::process::geteuid().as_raw();
    let copy = copy.with_file_name(format!("kvtier-{user}-1-7.stats"));
    fs::copy(page.path(), &copy).expect("copied");
    assert_eq!(read_all(directory.path()).expect("listed").readings.len(), 1);
    assert!(!copy.exists() && page.path().exists());
    // This one's lock is held, as by a child of the process that is gone.
    let mut child = Command::new("true").spawn().expect("started");
    description.owner.pid = child.id();
    child.wait().expect("ended");
    let orphan = Page::create(directory.path(), &description).expect("created");
    orphan.publish(&snapshot);
    assert!(orphan.path().exists());
    drop(Page::create(directory.path(), &description).expect("a new page sweeps"));
    assert!(!orphan.path().exists() && page.path().exists());
    // A namespace where nobody can know who has this number.
    description.owner.namespace += 1;
    let elsewhere = Page::create(directory.path(), &description).expect("created");
    elsewhere.publish(&snapshot);
    assert_eq!(read_all(directory.path()).expect("listed").readings.len(), 2);
}

#[test]
fn pages_have_names_of_their_own_and_are_for_nobody_else() {
    let directory = directory();
    let (first, _, description) = page(directory.path());
    let second = Page::create(directory.path(), &description).expect("created");
    for (page, number) in [(&first, 0), (&second, 1)] {
        let user = rustix::process::geteuid().as_raw();
        let name = format!("kvtier-{user}-{}-{number}.stats", std::process::id());
        assert_eq!(page.path().file_name().expect("a file"), &*name);
        let mode = fs::metadata(page.path()).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

#[test]
fn what_others_put_there_is_passed_over() {
    let directory = directory();
    let (page, ..) = page(directory.path());
    let user = rustix::process::geteuid().as_raw();
    let put = |name: &str| directory.path().join(name);
    // Whose name it is not; a link; a pipe, which would block; a directory; other names.
    fs::copy(page.path(), put(&format!("kvtier-{}-1-1.stats", user + 1))).expect("copied");
    symlink(page.path(), put(&format!("kvtier-{user}-1-2.stats"))).expect("linked");
    let pipe = Command::new("mkfifo").arg(put(&format!("kvtier-{user}-1-3.stats"))).status();
    assert!(pipe.expect("mkfifo").success());
    fs::create_dir(put(&format!("kvtier-{user}-1-4.stats"))).expect("made");
    for name in ["kvtier-.stats", "kvtier-1-2.stats", "kvtier-a-b-c.stats", "kvtier-1-2-3-4.stats"]
    {
        fs::write(put(name), "").expect("written");
    }
    only_reading(directory.path());
    assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 9, "nothing was removed");
}

#[test]
fn a_directory_that_is_no_memory_is_refused() {
    let (_, _, description) = page(directory().path());
    let error = Page::create(Path::new("/proc"), &description).expect_err("not a tmpfs");
    assert!(matches!(error, PageError::NotMemory { .. }), "{error}");
    let error = Page::create(Path::new("/dev/shm/not there"), &description).expect_err("missing");
    assert!(matches!(error, PageError::Io { .. }), "{error}");
}
