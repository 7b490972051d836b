//! A file tier to test: jobs in, results out, and ways to harm its files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use super::*;
use crate::clock::Clock;
use crate::region::{Region, RegionKind};
use crate::tier::{Chunks, DirectKind, IoKind, JobParts, Outcome, Results};

pub(super) const CHUNK: usize = 8192;
pub(super) const NAMESPACE: &str = "{\"model\":\"a\"}";

pub(super) fn key(number: u8) -> [u8; 8] {
    [number; 8]
}

pub(super) fn chunk(number: u8) -> Vec<u8> {
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

pub(super) fn open_with(settings: &FileSettings) -> Bench {
    Bench::new(FileTier::open(settings, CHUNK, 8, NAMESPACE).expect("opens"))
}

pub(super) fn open(path: &Path, chunks: u64) -> Bench {
    open_with(&settings(path, chunks))
}

pub(super) fn refused(settings: &FileSettings, namespace: &str) -> TierError {
    FileTier::open(settings, CHUNK, 8, namespace).err().expect("refused")
}

/// Flips bits of a byte of a file.
pub(super) fn flip(path: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(path).expect("there");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("long enough");
    file.write_all_at(&[byte[0] ^ 4], offset).expect("written");
}

/// The engines that work on this machine.
pub(super) fn engines() -> Vec<(IoKind, DirectKind)> {
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

pub(super) fn cut(path: &Path, bytes: u64) {
    File::options().write(true).open(path).expect("there").set_len(bytes).expect("cut");
}

pub(super) fn write_at(path: &Path, offset: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).expect("there");
    file.write_all_at(bytes, offset).expect("written");
}

/// A closed store with chunks 0, 1 and 2 in its slots 0, 1 and 2.
pub(super) fn closed_store(path: &Path) {
    let bench = open(path, 4);
    for number in 0..3 {
        bench.store(&[number]);
    }
    bench.close();
}

pub(super) fn check(path: &Path, repair: bool) -> Vec<Finding> {
    let mut audit = Audit::open(path, repair).expect("a store");
    let mut findings = audit.check_files().expect("readable");
    findings.extend(audit.check(audit.total()).expect("readable"));
    findings
}
