use std::sync::mpsc::{Sender, channel};

use super::*;
use crate::region::RegionKind;

const SLOT: usize = 16_384;

/// Reports how its transfer ended.
struct Move {
    transfer: Option<Transfer>,
    ended: Sender<io::Result<()>>,
}

impl Operation for Move {
    fn begin(&mut self) -> Option<Transfer> {
        self.transfer.take()
    }
    fn end(&mut self, outcome: io::Result<()>) {
        self.ended.send(outcome).expect("listening");
    }
}

struct Bench {
    region: Arc<Region>,
    file: Arc<DataFile>,
    _directory: tempfile::TempDir,
}

impl Bench {
    fn new(direct: bool) -> Self {
        let directory = tempfile::tempdir().expect("temporary");
        let path = directory.path().join("data");
        let file = DataFile::open(&path, direct, 8 * SLOT as u64).expect("made");
        file.file.set_len(8 * SLOT as u64).expect("room");
        Self {
            region: Region::new(8, SLOT, RegionKind::Memfd).expect("small"),
            file: Arc::new(file),
            _directory: directory,
        }
    }

    fn transfer(&self, lane: Lane, place: u64, slot: Slot) -> Transfer {
        let (file, region) = (Arc::clone(&self.file), Arc::clone(&self.region));
        // SAFETY: these tests touch slots between transfers only.
        unsafe { Transfer::new(lane, file, place * SLOT as u64, region, slot) }
    }

    fn moves(&self, engine: &dyn Engine, lane: Lane, moves: &[(u64, Slot)]) -> Vec<io::Result<()>> {
        let (ended, outcomes) = channel();
        let mut operations = moves.iter().map(|&(place, slot)| {
            let transfer = Some(self.transfer(lane, place, slot));
            Box::new(Move { transfer, ended: ended.clone() }) as Box<dyn Operation>
        });
        engine.submit(lane, &mut operations);
        drop(ended);
        outcomes.iter().take(moves.len()).collect()
    }

    fn fill(&self, slot: Slot, byte: u8) {
        // SAFETY: no transfer runs.
        unsafe { self.region.slot_mut(slot) }.fill(byte);
    }

    fn is_filled(&self, slot: Slot, byte: u8) -> bool {
        // SAFETY: no transfer runs.
        unsafe { self.region.slot(slot) }.iter().all(|&found| found == byte)
    }
}

/// Every engine of this machine, with a script of faults.
fn engines() -> Vec<(&'static str, Arc<Script>, Box<dyn Engine>)> {
    let script = Arc::<Script>::default();
    let threads = Threads::start(Arc::clone(&script) as Arc<dyn Calls>, 1).expect("thread");
    let mut engines: Vec<(_, _, Box<dyn Engine>)> = vec![("threads", script, Box::new(threads))];
    let script = Arc::<Script>::default();
    match Uring::start_with(Arc::clone(&script)) {
        Ok(uring) => engines.push(("io_uring", script, Box::new(uring))),
        Err(error) => eprintln!("io_uring is not tested, this machine has none: {error}"),
    }
    engines
}

fn all_good(outcomes: &[io::Result<()>]) -> bool {
    outcomes.iter().all(io::Result::is_ok)
}

#[test]
fn short_and_interrupted_calls_are_gone_on_with() {
    for direct in [false, true] {
        for (name, script, engine) in engines() {
            let bench = Bench::new(direct);
            bench.fill(1, 7);
            let faults = || {
                let mut faults =
                    vec![Fault::Short(5000), Fault::Short(4096), Fault::Error(libc::EINTR)];
                faults.extend((0..50).map(|_| Fault::Error(libc::EAGAIN)));
                faults
            };
            script.plan(Lane::Store, faults());
            assert!(all_good(&bench.moves(&*engine, Lane::Store, &[(3, 1)])), "{name} {direct}");
            script.plan(Lane::Load, faults());
            assert!(all_good(&bench.moves(&*engine, Lane::Load, &[(3, 5)])), "{name} {direct}");
            assert!(bench.is_filled(5, 7), "{name} {direct}");
            assert_eq!((script.forget(Lane::Load), script.forget(Lane::Store)), (0, 0));
        }
    }
}

#[test]
fn what_does_not_move_is_an_error() {
    for (name, script, engine) in engines() {
        let bench = Bench::new(false);
        let error = |lane, faults: Vec<Fault>| {
            script.plan(lane, faults);
            let outcome = bench.moves(&*engine, lane, &[(0, 0)]).remove(0);
            script.forget(lane);
            outcome.expect_err(name).kind()
        };
        assert_eq!(error(Lane::Load, vec![Fault::Short(0)]), ErrorKind::UnexpectedEof);
        assert_eq!(error(Lane::Store, vec![Fault::Short(0)]), ErrorKind::WriteZero);
        assert_eq!(error(Lane::Store, vec![Fault::Error(libc::ENOSPC)]), ErrorKind::StorageFull);
        let storm = (0..200).map(|_| Fault::Error(libc::EINTR)).collect();
        assert_eq!(error(Lane::Load, storm), ErrorKind::Interrupted);
        let outcomes = bench.moves(&*engine, Lane::Load, &[(8, 0)]);
        let error = outcomes[0].as_ref().expect_err("past the end");
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{name}");
    }
}

#[test]
fn more_than_fits_into_the_ring_at_once() {
    for (name, _, engine) in engines() {
        let bench = Bench::new(true);
        (0..4).for_each(|slot| bench.fill(slot, slot as u8 + 1));
        let stores: Vec<_> = (0..200).map(|number| (number % 4, number as Slot % 4)).collect();
        assert!(all_good(&bench.moves(&*engine, Lane::Store, &stores)), "{name}");
        let loads: Vec<_> = (0..4).map(|place| (place, place as Slot + 4)).collect();
        assert!(all_good(&bench.moves(&*engine, Lane::Load, &loads)), "{name}");
        assert!((0..4).all(|slot| bench.is_filled(slot + 4, slot as u8 + 1)), "{name}");
        assert!(engine.close() && engine.close(), "{name}");
    }
}

#[test]
fn an_operation_that_panics_ends_alone() {
    /// Keeps a channel open.
    struct Panics(#[expect(dead_code, reason = "only dropped")] Sender<()>);
    impl Operation for Panics {
        fn begin(&mut self) -> Option<Transfer> {
            panic!("planted")
        }
        fn end(&mut self, _outcome: io::Result<()>) {}
    }
    for (name, _, engine) in engines() {
        let bench = Bench::new(false);
        let (dropped, heard) = channel();
        engine.submit(Lane::Load, &mut std::iter::once(Box::new(Panics(dropped)) as Box<_>));
        assert!(heard.recv().is_err(), "{name}: it was dropped");
        assert!(all_good(&bench.moves(&*engine, Lane::Store, &[(0, 0)])), "{name}");
    }
}

#[test]
fn after_close_operations_are_dropped() {
    for (name, _, engine) in engines() {
        let bench = Bench::new(false);
        assert!(engine.close());
        let outcomes = bench.moves(&*engine, Lane::Store, &[(0, 0)]);
        assert!(outcomes.is_empty(), "{name}");
    }
}

#[test]
fn what_was_asked_for_is_what_runs_or_an_error() {
    let directory = tempfile::tempdir().expect("temporary");
    let start = |kind, direct| start(kind, direct, 1, directory.path());
    let threads = start(IoKind::Threads, DirectKind::Never).expect("always");
    assert_eq!((threads.direct, &*threads.description), (false, "threads, through the page cache"));
    let auto = start(IoKind::Auto, DirectKind::Auto).expect("always");
    match Uring::start() {
        Ok(_) => assert!(auto.description.starts_with("io_uring, "), "{}", auto.description),
        Err(error) => {
            eprintln!("io_uring is not tested, this machine has none: {error}");
            assert!(auto.description.starts_with("threads (io_uring: "), "{}", auto.description);
            assert!(matches!(
                start(IoKind::Uring, DirectKind::Auto),
                Err(TierError::Unsupported { setting: "io = \"uring\"", .. })
            ));
        }
    }
    let refused = start(IoKind::Mmap, DirectKind::Always).err().expect("a contradiction");
    assert!(matches!(refused, TierError::Unsupported { setting: "direct = true", .. }));
    let left = std::fs::read_dir(directory.path()).expect("listed").count();
    assert_eq!(left, 0, "the probe leaves nothing behind");
    // /proc knows no direct I/O, and no new files either.
    let proc = Path::new("/proc/self");
    assert!(!super::start(IoKind::Threads, DirectKind::Auto, 1, proc).expect("falls back").direct);
    assert!(super::start(IoKind::Threads, DirectKind::Always, 1, proc).is_err());
}
