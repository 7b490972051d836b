//! A file tier by its contract: jobs in, results out, whatever happens to the files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::facts::{CHECKPOINT_FILE, JOURNAL_FILE};
use super::format::HEADER_BYTES;
use super::headers::HEADERS_FILE;
use super::identity::IDENTITY_FILE;
use super::*;
use crate::clock::Clock;
use crate::index::PolicyKind;
use crate::region::{Region, RegionKind};
use crate::tier::{Chunks, DirectKind, Failure, IoKind, JobParts, Outcome, Results};

const CHUNK: usize = 8192;
const NAMESPACE: &str = "{\"model\":\"a\"}";

fn key(number: u8) -> [u8; 8] {
    [number; 8]
}

fn chunk(number: u8) -> Vec<u8> {
    (0..CHUNK).map(|at| number ^ at as u8 ^ (at >> 8) as u8).collect()
}

/// A tier, and a primary region to move chunks from and to.
pub(super) struct Bench {
    pub(super) tier: FileTier,
    region: Arc<Region>,
    results: Arc<Results>,
}

impl Bench {
    pub(super) fn new(tier: FileTier) -> Self {
        Self {
            tier,
            region: Region::new(16, CHUNK, RegionKind::Memfd).expect("small"),
            results: Arc::new(Results::new(Clock::system())),
        }
    }

    fn parts(&self, numbers: &[u8]) -> JobParts {
        let mut keys = KeyBatch::empty(8);
        for &number in numbers {
            keys.push(&key(number)).expect("8 bytes");
        }
        let slots: Vec<u32> = (0..numbers.len() as u32).collect();
        JobParts {
            id: 1,
            request: 1,
            chunks: Arc::new(Chunks::new(keys, slots.clone(), slots)),
            region: Arc::clone(&self.region),
            results: Arc::clone(&self.results),
            cancelled: Arc::default(),
        }
    }

    fn result(&self) -> crate::tier::JobResult {
        let deadline = Instant::now() + std::time::Duration::from_secs(60);
        assert!(self.results.wait_until(deadline), "a job is lost");
        self.results.take().pop_front().expect("one job at a time")
    }

    pub(super) fn submit_store(&self, numbers: &[u8]) {
        for (slot, &number) in numbers.iter().enumerate() {
            // SAFETY: one job at a time: nobody has the region.
            unsafe { self.region.slot_mut(slot as u32) }.copy_from_slice(&chunk(number));
        }
        // SAFETY: the slots are written again only after the job's result was taken.
        self.tier.submit_store(unsafe { StoreJob::new(self.parts(numbers)) });
    }

    /// Waits until the job that was submitted has ended, however.
    pub(super) fn wait_for_job(&self) {
        self.result();
    }

    /// Stores chunks; what became of each, and which keys had to go.
    pub(super) fn store(&self, numbers: &[u8]) -> (Vec<Outcome>, Vec<u8>) {
        self.submit_store(numbers);
        let result = self.result();
        (result.outcomes, result.evicted.iter().map(|key| key[0]).collect())
    }

    /// Loads chunks. What counts as loaded has the bytes that were stored.
    pub(super) fn load(&self, numbers: &[u8]) -> Vec<Outcome> {
        for slot in 0..numbers.len() as u32 {
            // SAFETY: as in `submit_store`.
            unsafe { self.region.slot_mut(slot) }.fill(0xAA);
        }
        // SAFETY: nobody touches the slots until the result was taken.
        self.tier.submit_load(unsafe { LoadJob::new(self.parts(numbers)) });
        let outcomes = self.result().outcomes;
        for (slot, (&number, outcome)) in numbers.iter().zip(&outcomes).enumerate() {
            if outcome.is_ok() {
                // SAFETY: the job has ended.
                let bytes = unsafe { self.region.slot(slot as u32) };
                assert!(bytes == chunk(number), "wrong bytes for chunk {number}");
            }
        }
        outcomes
    }

    pub(super) fn has(&self, number: u8) -> bool {
        let mut keys = KeyBatch::empty(8);
        keys.push(&key(number)).expect("8 bytes");
        let mut presence = [Presence::Miss];
        self.tier.lookup(1, &keys, &[0], &mut presence);
        presence[0] == Presence::Hit
    }

    pub(super) fn touch(&self, number: u8) {
        let mut keys = KeyBatch::empty(8);
        keys.push(&key(number)).expect("8 bytes");
        self.tier.touch(&keys);
    }

    pub(super) fn close(self) {
        self.tier.shutdown();
        self.tier.store.index.lock().validate().expect("no slot lost");
    }
}

/// Room for so many chunks.
pub(super) fn settings(path: &Path, chunks: u64) -> FileSettings {
    let identity_bytes = 300;
    let slot_bytes = CHUNK as u64;
    let layout = layout::Layout { slot_bytes, segment_slots: 1 << 15, slots: chunks as u32 };
    let capacity = layout.fixed_bytes(identity_bytes) + chunks * slot_bytes;
    FileSettings::new(path, capacity)
}

fn open_with(settings: &FileSettings) -> Bench {
    Bench::new(FileTier::open(settings, CHUNK, 8, NAMESPACE).expect("opens"))
}

fn open(path: &Path, chunks: u64) -> Bench {
    open_with(&settings(path, chunks))
}

fn refused(settings: &FileSettings, namespace: &str) -> TierError {
    FileTier::open(settings, CHUNK, 8, namespace).err().expect("refused")
}

/// Flips bits of a byte of a file.
fn flip(path: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(path).expect("there");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("long enough");
    file.write_all_at(&[byte[0] ^ 4], offset).expect("written");
}

/// The engines that work on this machine.
fn engines() -> Vec<(IoKind, DirectKind)> {
    let mut engines = vec![
        (IoKind::Threads, DirectKind::Auto),
        (IoKind::Threads, DirectKind::Never),
        (IoKind::Mmap, DirectKind::Auto),
    ];
    match io::Uring::start() {
        Ok(_) => {
            engines.extend([(IoKind::Uring, DirectKind::Auto), (IoKind::Uring, DirectKind::Never)]);
        }
        Err(error) => eprintln!("io_uring is not tested, this machine has none: {error}"),
    }
    engines
}

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
    for round in 0..4 {
        // A journal of one page: every second flush is a checkpoint.
        let bench = open(directory.path(), 4);
        bench.store(&[round]);
        bench.close();
    }
    fs::remove_file(directory.path().join(JOURNAL_FILE)).expect("there");
    let bench = open(directory.path(), 4);
    bench.load(&[0]);
    bench.close();
    fs::remove_file(directory.path().join(JOURNAL_FILE)).expect("there");
    let inspection = inspect(directory.path()).expect("readable");
    assert_eq!(inspection.chunks, 4);
    let bench = open(directory.path(), 4);
    assert_eq!((0..4).filter(|&number| bench.has(number)).count(), 4);
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
fn damage_while_it_runs_is_a_miss_and_never_bytes() {
    type Damage = fn(&Path);
    let kinds: [(&str, Damage, Failure); 4] = [
        ("flip", |path| flip(path, 77), Failure::Corrupt),
        ("cut", |path| cut(path, 100), Failure::Corrupt),
        ("empty", |path| cut(path, 0), Failure::Corrupt),
        ("zeros", |path| write_at(path, 0, &vec![0; CHUNK]), Failure::Corrupt),
    ];
    for (io, direct) in engines() {
        for (kind, damage, failure) in kinds {
            let directory = tempfile::tempdir().expect("temporary");
            let settings = FileSettings { io, direct, ..settings(directory.path(), 1) };
            let bench = open_with(&settings);
            bench.store(&[5]);
            damage(&directory.path().join("segment-00000"));
            assert_eq!(bench.load(&[5]), [Err(failure)], "{kind} {io:?}");
            assert!(!bench.has(5), "{kind} {io:?}");
            assert_eq!(bench.store(&[5]).0, [Ok(())], "{kind} {io:?}");
            assert_eq!(bench.load(&[5]), [Ok(())], "{kind} {io:?}");
            bench.close();
        }
    }
}

fn cut(path: &Path, bytes: u64) {
    File::options().write(true).open(path).expect("there").set_len(bytes).expect("cut");
}

fn write_at(path: &Path, offset: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).expect("there");
    file.write_all_at(bytes, offset).expect("written");
}

/// A closed store with chunks 0, 1 and 2 in its slots 0, 1 and 2.
fn closed_store(path: &Path) {
    let bench = open(path, 4);
    for number in 0..3 {
        bench.store(&[number]);
    }
    bench.close();
}

fn check(path: &Path, repair: bool) -> Vec<Finding> {
    let mut audit = Audit::open(path, repair).expect("a store");
    let mut findings = audit.check_files().expect("readable");
    findings.extend(audit.check(audit.total()).expect("readable"));
    findings
}

#[test]
fn damage_while_it_is_closed_is_found_by_an_audit_and_costs_only_its_chunks() {
    const HEADER: u64 = HEADER_BYTES as u64;
    // What is damaged, which chunks are not served any more, which keys an audit names and how
    // many findings it has.
    type Case = (&'static str, fn(&Path), &'static [u8], &'static [u8], usize);
    let kinds: [Case; 13] = [
        ("nothing", |_| {}, &[], &[], 0),
        ("header", |path| flip(&path.join(HEADERS_FILE), HEADER + 20), &[1], &[], 1),
        ("header's key", |path| flip(&path.join(HEADERS_FILE), 60), &[0], &[], 1),
        ("payload", |path| flip(&path.join("segment-00000"), 2 * CHUNK as u64 + 9), &[2], &[2], 1),
        (
            "segment cut",
            |path| cut(&path.join("segment-00000"), CHUNK as u64 + 1),
            &[1, 2],
            &[1, 2],
            2,
        ),
        (
            "segment gone",
            |path| fs::remove_file(path.join("segment-00000")).expect("there"),
            &[0, 1, 2],
            &[0, 1, 2],
            3,
        ),
        ("headers cut", |path| cut(&path.join(HEADERS_FILE), HEADER + 5), &[1, 2], &[], 0),
        (
            "headers gone",
            |path| fs::remove_file(path.join(HEADERS_FILE)).expect("there"),
            &[0, 1, 2],
            &[],
            1,
        ),
        (
            "a header at another slot's place",
            |path| {
                let table = fs::read(path.join(HEADERS_FILE)).expect("there");
                write_at(&path.join(HEADERS_FILE), HEADER, &table[..HEADER_BYTES]);
            },
            &[1],
            &[0],
            1,
        ),
        ("checkpoint", |path| write_at(&path.join(CHECKPOINT_FILE), 9, &[1]), &[], &[], 1),
        ("journal", |path| flip(&path.join(JOURNAL_FILE), 2000), &[], &[], 1),
        (
            "journal gone",
            |path| fs::remove_file(path.join(JOURNAL_FILE)).expect("there"),
            &[],
            &[],
            1,
        ),
        (
            "a chunk under another's header",
            |path| {
                let segment = fs::read(path.join("segment-00000")).expect("there");
                write_at(&path.join("segment-00000"), 0, &segment[CHUNK..2 * CHUNK]);
            },
            &[0],
            &[0],
            1,
        ),
    ];
    for (kind, damage, lost, named, findings) in kinds {
        let directory = tempfile::tempdir().expect("temporary");
        let path = directory.path();
        closed_store(path);
        damage(path);
        let found = check(path, false);
        assert_eq!(found.len(), findings, "{kind}: {found:?}");
        let keys: BTreeSet<u8> =
            found.iter().filter_map(|finding| Some(finding.key.as_ref()?[0])).collect();
        assert_eq!(keys, named.iter().copied().collect(), "{kind}: {found:?}");
        let bench = open(path, 4);
        for number in 0..3 {
            let served = bench.load(&[number]) == [Ok(())];
            assert_eq!(served, !lost.contains(&number), "{kind}: chunk {number}");
            assert_eq!(bench.store(&[number]).0, [Ok(())], "{kind}: chunk {number}");
            assert_eq!(bench.load(&[number]), [Ok(())], "{kind}: chunk {number}");
        }
        bench.close();
        assert_eq!(check(path, false), [], "{kind}: mended by use");
    }
}

#[test]
fn a_repair_drops_what_is_bad_and_nothing_else() {
    let directory = tempfile::tempdir().expect("temporary");
    let path = directory.path();
    closed_store(path);
    flip(&path.join("segment-00000"), 5);
    flip(&path.join(HEADERS_FILE), HEADER_BYTES as u64 + 90);
    flip(&path.join(JOURNAL_FILE), 50);
    let found = check(path, true);
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found.iter().all(|finding| finding.repaired), "{found:?}");
    assert_eq!(check(path, true), []);
    let bench = open(path, 4);
    assert_eq!((0..3).filter(|&number| bench.has(number)).collect::<Vec<_>>(), [2]);
    bench.close();
}

#[test]
fn an_inspection_tells_what_is_there_while_it_is_open_too() {
    let directory = tempfile::tempdir().expect("temporary");
    let bench = open(directory.path(), 4);
    bench.store(&[0, 1, 2]);
    (0..3).for_each(|_| drop(bench.load(&[1])));
    let while_open = inspect(directory.path()).expect("readable");
    assert_eq!(while_open.owner, Some(std::process::id().to_string()));
    assert_eq!((while_open.chunks, while_open.slots), (3, 4));
    bench.close();
    let closed = inspect(directory.path()).expect("readable");
    assert_eq!(closed.owner, None);
    assert_eq!(closed.namespace, serde_json::json!({"model": "a"}));
    assert_eq!(closed.used_bytes, 3 * CHUNK as u64);
    assert!(closed.allocated_bytes <= closed.capacity_bytes);
    assert_eq!(closed.ages.counts.iter().sum::<u64>(), 3);
    let three = closed.hits.bounds.partition_point(|&bound| bound < 3);
    assert_eq!((closed.hits.counts[0], closed.hits.counts[three]), (2, 1));
    assert!(closed.oldest <= closed.newest && closed.oldest.is_some());
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
