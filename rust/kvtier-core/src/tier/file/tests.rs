//! A file tier by its contract: restarts, bounds, order, owners and identities.

use std::fs;
use std::path::{Path, PathBuf};

use zerocopy::{FromBytes, IntoBytes};

use super::bench::{
    CHUNK, NAMESPACE, check, closed_store, cut, engines, flip, open, open_with, refused, settings,
};
use super::facts::{CHECKPOINT_FILE, JOURNAL_FILE};
use super::format::{HEADER_BYTES, Header, Told};
use super::headers::HEADERS_FILE;
use super::identity::IDENTITY_FILE;
use super::*;
use crate::index::PolicyKind;
use crate::tier::Failure;

#[test]
fn chunks_come_back_with_every_engine_and_survive_a_restart() {
    for (io, direct) in engines() {
        let directory = tempfile::tempdir().expect("temporary");
        let settings = FileSettings { io, direct, ..settings(directory.path(), 12) };
        let bench = open_with(&settings);
        let numbers: Vec<u8> = (0..10).collect();
        assert_eq!(bench.store(&numbers), (vec![Ok(()); 10], vec![]), "{io:?}");
        assert_eq!(bench.load(&numbers), vec![Ok(()); 10], "{io:?}");
        assert_eq!(bench.load(&[11]), [Err(Failure::Missing)]);
        bench.close();
        let bench = open_with(&settings);
        assert_eq!(bench.load(&numbers), vec![Ok(()); 10], "{io:?}");
        assert_eq!(bench.tier.usage().chunks, 10);
        bench.close();
    }
}

#[test]
fn a_store_is_another_engines_as_well() {
    let directory = tempfile::tempdir().expect("temporary");
    for (number, (io, direct)) in (0..).zip(engines()) {
        let settings = FileSettings { io, direct, ..settings(directory.path(), 12) };
        let bench = open_with(&settings);
        bench.store(&[number]);
        let all: Vec<u8> = (0..=number).collect();
        assert_eq!(bench.load(&all), vec![Ok(()); all.len()], "{io:?}");
        bench.close();
    }
}

/// Bytes of everything in a directory, the directory too: as files are long, and as they take space.
fn taken(path: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let own = fs::metadata(path).expect("there");
    let mut taken = (own.len(), own.blocks() * 512);
    for entry in fs::read_dir(path).expect("listed") {
        let metadata = entry.expect("entry").metadata().expect("there");
        taken.0 += metadata.len();
        taken.1 += metadata.blocks() * 512;
    }
    taken
}

#[test]
fn the_capacity_holds_with_everything_in_it_and_the_oldest_goes() {
    let directory = tempfile::tempdir().expect("temporary");
    let settings = settings(directory.path(), 3);
    let bench = open_with(&settings);
    let (outcomes, evicted) = bench.store(&[0, 1, 2]);
    assert_eq!((outcomes, evicted), (vec![Ok(()); 3], vec![]));
    bench.load(&[0]);
    bench.touch(1);
    assert_eq!(bench.store(&[3]), (vec![Ok(())], vec![2]));
    assert_eq!(bench.store(&[4]), (vec![Ok(())], vec![0]));
    let usage = bench.tier.usage();
    assert_eq!(usage.chunks, 3);
    let (long, on_disk) = taken(directory.path());
    assert!(long <= settings.capacity_bytes && on_disk <= settings.capacity_bytes);
    // Nearly all of it is for chunks, and one byte less is one chunk less.
    bench.close();
    let smaller = FileSettings { capacity_bytes: settings.capacity_bytes - 4096, ..settings };
    let bench = open_with(&smaller);
    assert_eq!(bench.tier.store.index.lock().capacity(), 2);
    let (long, on_disk) = taken(directory.path());
    assert!(long <= smaller.capacity_bytes && on_disk <= smaller.capacity_bytes);
    bench.close();
}

#[test]
fn every_policy_chooses() {
    for &(name, policy) in PolicyKind::ALL {
        let directory = tempfile::tempdir().expect("temporary");
        let settings = FileSettings { policy, ..settings(directory.path(), 4) };
        let bench = open_with(&settings);
        for number in 0..9 {
            assert_eq!(bench.store(&[number]).0, [Ok(())], "{name}");
        }
        assert_eq!(bench.tier.usage().chunks, 4, "{name}");
        bench.close();
        let bench = open_with(&settings);
        assert_eq!(bench.tier.usage().chunks, 4, "{name}");
        assert_eq!(bench.store(&[20]).1.len(), 1, "{name}");
        bench.close();
    }
}

/// Uses chunks of a full store of 4 in an order, reopens, and tells in which order they go.
fn order_after_restart(damage: impl Fn(&Path)) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("temporary");
    let bench = open(directory.path(), 4);
    for number in 0..4 {
        bench.store(&[number]);
    }
    for number in [2, 0, 3, 1] {
        bench.load(&[number]);
    }
    bench.close();
    damage(directory.path());
    let bench = open(directory.path(), 4);
    let order = (10..14).flat_map(|number| bench.store(&[number]).1).collect();
    bench.close();
    order
}

#[test]
fn the_order_of_accesses_survives_and_without_it_that_of_writing() {
    assert_eq!(order_after_restart(|_| {}), [2, 0, 3, 1]);
    assert_eq!(
        order_after_restart(|path| fs::remove_file(path.join(CHECKPOINT_FILE)).expect("there")),
        [2, 0, 3, 1],
        "the journal has it"
    );
    for damage in [
        |path: &Path| fs::remove_file(path.join(JOURNAL_FILE)).expect("there"),
        |path: &Path| flip(&path.join(JOURNAL_FILE), 100),
        |path: &Path| flip(&path.join(JOURNAL_FILE), 17),
        |path: &Path| cut(&path.join(JOURNAL_FILE), 100),
    ] {
        assert_eq!(order_after_restart(damage), [0, 1, 2, 3]);
    }
}

#[test]
fn a_checkpoint_is_written_when_the_journal_is_full() {
    let directory = tempfile::tempdir().expect("temporary");
    let bench = open(directory.path(), 4);
    (0..4).for_each(|number| drop(bench.store(&[number])));
    bench.close();
    // A journal of one page, which is full: now all is in the checkpoint.
    let bench = open(directory.path(), 4);
    for number in [2, 0, 3, 1] {
        bench.load(&[number]);
    }
    bench.close();
    fs::remove_file(directory.path().join(JOURNAL_FILE)).expect("there");
    let bench = open(directory.path(), 4);
    let order: Vec<u8> = (10..14).flat_map(|number| bench.store(&[number]).1).collect();
    assert_eq!(order, [2, 0, 3, 1]);
    bench.close();
}

#[test]
fn a_clock_that_goes_backwards_changes_no_order_and_no_age_below_nothing() {
    let directory = tempfile::tempdir().expect("temporary");
    closed_store(directory.path());
    // Chunk 0 says that it was written long from now, chunk 1 in 1970.
    let path = directory.path().join(HEADERS_FILE);
    let mut table = fs::read(&path).expect("there");
    for (slot, written_at) in [(0, 1 << 60), (1, 7)] {
        let bytes = &mut table[slot * HEADER_BYTES..(slot + 1) * HEADER_BYTES];
        let header = Header::read_from_bytes(bytes).expect("its length");
        let told = Told { written_at, ..header.told().expect("whole") };
        bytes.copy_from_slice(Header::new(&told).as_bytes());
    }
    fs::write(&path, table).expect("written");
    let found = inspect(directory.path()).expect("readable");
    assert_eq!((found.oldest, found.newest), (Some(7), Some(1 << 60)));
    assert_eq!((found.ages.counts[0], found.ages.counts[found.ages.bounds.len()]), (2, 1));
    let bench = open(directory.path(), 3);
    let order: Vec<u8> = (10..13).flat_map(|number| bench.store(&[number]).1).collect();
    assert_eq!(order, [0, 1, 2]);
    bench.close();
}

#[test]
fn what_was_written_is_found_without_a_shutdown() {
    let directory = tempfile::tempdir().expect("temporary");
    let bench = open(directory.path(), 4);
    bench.store(&[1, 2, 3]);
    // As after `kill -9`: no flush, no journal, only the lock goes.
    let copy = tempfile::tempdir().expect("temporary");
    for entry in fs::read_dir(directory.path()).expect("listed") {
        let entry = entry.expect("entry");
        fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("copied");
    }
    let crashed = open(copy.path(), 4);
    assert_eq!(crashed.load(&[1, 2, 3]), [Ok(()); 3]);
    crashed.close();
    bench.close();
}

#[test]
fn another_identity_is_refused_with_both_shown() {
    let directory = tempfile::tempdir().expect("temporary");
    open(directory.path(), 2).close();
    let settings = settings(directory.path(), 2);
    let error = refused(&settings, "{\"model\":\"b\"}");
    assert!(matches!(error, TierError::Identity { .. }));
    let text = error.to_string();
    let differences = "use another directory: namespace.model is \"a\", expected \"b\"\n";
    assert!(text.contains(differences), "{text}");
    FileTier::open(&settings, CHUNK, 8, " {\"model\": \"a\"}").expect("the same JSON").shutdown();
    flip(&directory.path().join(IDENTITY_FILE), 30);
    assert!(matches!(refused(&settings, NAMESPACE), TierError::Unreadable { .. }));
    assert!(matches!(inspect(directory.path()), Err(TierError::Unreadable { .. })));
    assert!(Audit::open(directory.path(), true).is_err());
}

#[test]
fn an_older_format_is_refused_by_name_and_left_alone() {
    let directory = tempfile::tempdir().expect("temporary");
    let old = "{\"format\":1,\"chunk_bytes\":8192,\"key_bytes\":8,\"namespace\":\"\"}";
    fs::write(directory.path().join(IDENTITY_FILE), old).expect("written");
    fs::create_dir(directory.path().join("chunks")).expect("made");
    let error = refused(&settings(directory.path(), 2), NAMESPACE);
    assert!(matches!(error, TierError::Format { found: 1, expected: 2, .. }), "{error}");
    assert!(error.to_string().contains("version 1"), "{error}");
    assert!(matches!(inspect(directory.path()), Err(TierError::Format { .. })));
    let mut names: Vec<_> = fs::read_dir(directory.path())
        .expect("listed")
        .map(|entry| entry.expect("entry").file_name())
        .collect();
    names.sort();
    // The lock was taken before the second look; it changes nothing.
    names.retain(|name| name != "LOCK");
    assert_eq!(names, ["chunks", IDENTITY_FILE]);
}

#[test]
fn a_second_owner_is_refused_with_the_pid() {
    let directory = tempfile::tempdir().expect("temporary");
    let bench = open(directory.path(), 2);
    let error = refused(&settings(directory.path(), 2), NAMESPACE);
    assert!(matches!(error, TierError::Locked { .. }));
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    assert!(matches!(Audit::open(directory.path(), false), Err(TierError::Locked { .. })));
    bench.close();
    open(directory.path(), 2).close();
}

#[test]
fn too_small_and_too_large_leave_nothing_behind() {
    let directory = tempfile::tempdir().expect("temporary");
    let path = directory.path().join("new");
    let error = refused(&FileSettings::new(&path, 40_000), NAMESPACE);
    let TierError::Capacity { needed, .. } = error else { panic!("{error}") };
    let huge = FileSettings::new(&path, u64::MAX / 2);
    assert!(matches!(refused(&huge, NAMESPACE), TierError::DeviceTooSmall { .. }));
    assert!(!path.exists());
    open_with(&FileSettings::new(&path, needed)).close();
    let odd = FileTier::open(&settings(&path, 2), 5000, 8, "").err().expect("no multiple");
    assert!(matches!(odd, TierError::Setting(_)), "{odd}");
}

#[test]
fn a_path_that_is_no_directory_is_an_error() {
    let file = tempfile::NamedTempFile::new().expect("temporary");
    let settings = settings(&file.path().join("store"), 2);
    assert!(matches!(refused(&settings, NAMESPACE), TierError::Io { .. }));
}

#[test]
fn what_a_store_without_an_identity_left_is_nobodys() {
    let directory = tempfile::tempdir().expect("temporary");
    closed_store(directory.path());
    fs::remove_file(directory.path().join(IDENTITY_FILE)).expect("there");
    let settings = settings(directory.path(), 4);
    let tier = FileTier::open(&settings, CHUNK, 8, "{\"model\":\"b\"}").expect("new");
    assert_eq!(tier.usage().chunks, 0);
    tier.shutdown();
}

#[test]
fn a_larger_capacity_grows_and_a_smaller_one_drops() {
    let directory = tempfile::tempdir().expect("temporary");
    closed_store(directory.path());
    let bench = open(directory.path(), 9);
    for number in 3..9 {
        assert_eq!(bench.store(&[number]), (vec![Ok(())], vec![]));
    }
    bench.close();
    let bench = open(directory.path(), 2);
    assert_eq!(bench.tier.usage().chunks, 2);
    assert_eq!(bench.load(&[0, 1]), [Ok(()), Ok(())]);
    bench.close();
    assert_eq!(check(directory.path(), false), []);
}

#[test]
fn descriptors_and_memory_come_back() {
    let descriptors = || {
        let own = fs::read_dir("/proc/self/fd").expect("listed");
        own.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).collect::<Vec<PathBuf>>()
    };
    let directory = tempfile::tempdir().expect("temporary");
    for (io, direct) in engines() {
        let settings = FileSettings { io, direct, ..settings(directory.path(), 3) };
        let bench = open_with(&settings);
        bench.store(&[1, 2, 3, 4]);
        bench.load(&[2, 3]);
        bench.close();
    }
    // Other tests have files too; of this store there is none.
    let left: Vec<PathBuf> =
        descriptors().into_iter().filter(|path| path.starts_with(directory.path())).collect();
    assert_eq!(left, [] as [PathBuf; 0]);
}
