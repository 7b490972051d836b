//! Disks that fail, fill up and hang: nothing leaks, nothing wrong is served, the rest works.

use std::process::Command;
use std::sync::mpsc::channel;

use super::bench::{Bench, settings};
use super::io::{Calls, Fault, Script, Threads, Uring};
use super::*;
use crate::tier::Failure;

/// A tier on a scripted disk, once a kind of engine.
fn on_scripts(chunks: u64, test: impl Fn(&str, &Script, Bench, &FileSettings)) {
    type Start = fn(Arc<Script>) -> std::io::Result<Box<dyn Engine>>;
    let kinds: [(&str, Start); 2] = [
        ("threads", |script| Ok(Box::new(Threads::start(script as Arc<dyn Calls>, 1)?))),
        ("io_uring", |script| Ok(Box::new(Uring::start_with(script)?))),
    ];
    for (name, start) in kinds {
        let directory = tempfile::tempdir().expect("temporary");
        let settings = settings(directory.path(), chunks);
        let script = Arc::<Script>::default();
        let engine = match start(Arc::clone(&script)) {
            Ok(engine) => engine,
            Err(error) => {
                eprintln!("{name} is not tested, this machine has none: {error}");
                continue;
            }
        };
        let chunk = Chunk { bytes: 8192, key_bytes: 8, namespace: "" };
        let owned = Owned::take(&settings, &chunk).expect("new");
        let tier = FileTier::with_engine(owned, &settings, engine, false).expect("opens");
        test(name, &script, Bench::new(tier), &settings);
    }
}

#[test]
fn a_failed_store_gives_its_slot_back_and_says_why() {
    on_scripts(3, |name, script, bench, _| {
        bench.store(&[1]);
        for (number, failure) in [(libc::EIO, Failure::Io), (libc::ENOSPC, Failure::Full)] {
            script.plan(Lane::Store, [Fault::Error(number)]);
            assert_eq!(bench.store(&[2]).0, [Err(failure)], "{name}");
            assert!(!bench.has(2), "{name}");
            bench.tier.store.index.lock().validate().expect("no slot lost");
        }
        assert_eq!(bench.store(&[2]).0, [Ok(())], "{name}");
        assert_eq!(bench.load(&[1, 2]), [Ok(()), Ok(())], "{name}");
        bench.close();
    });
}

#[test]
fn an_evicted_chunk_is_gone_even_when_its_successor_fails() {
    on_scripts(1, |name, script, bench, settings| {
        bench.store(&[1]);
        script.plan(Lane::Store, [Fault::Short(4096), Fault::Error(libc::EIO)]);
        assert_eq!(bench.store(&[2]), (vec![Err(Failure::Io)], vec![1]), "{name}");
        assert_eq!(bench.load(&[1]), [Err(Failure::Missing)], "{name}");
        bench.close();
        // Its slot is half another's: it must not come back at the next start.
        assert_eq!(inspect(&settings.path).expect("readable").chunks, 0, "{name}");
    });
}

#[test]
fn a_failed_load_keeps_the_chunk() {
    on_scripts(3, |name, script, bench, _| {
        bench.store(&[1]);
        script.plan(Lane::Load, [Fault::Error(libc::EIO)]);
        assert_eq!(bench.load(&[1]), [Err(Failure::Io)], "{name}");
        assert_eq!(bench.load(&[1]), [Ok(())], "{name}");
        bench.close();
    });
}

#[test]
fn a_panic_on_the_way_costs_its_chunk_only() {
    on_scripts(3, |name, script, bench, _| {
        if name == "io_uring" {
            return; // There is no code of a disk in its reactor that could panic.
        }
        bench.store(&[1]);
        script.plan(Lane::Store, [Fault::Panic]);
        assert_eq!(bench.store(&[2, 3]).0, [Err(Failure::Lost), Ok(())]);
        script.plan(Lane::Load, [Fault::Panic]);
        assert_eq!(bench.load(&[1, 3]), [Err(Failure::Lost), Ok(())]);
        assert_eq!(bench.load(&[1]), [Ok(())]);
        bench.close();
    });
}

#[test]
fn a_disk_that_hangs_does_not_stop_a_shutdown_and_keeps_the_lock() {
    on_scripts(3, |name, script, bench, settings| {
        let (gate, opened) = channel();
        let (hangs, hanging) = channel();
        script.plan(Lane::Store, [Fault::Hang(hangs, opened)]);
        bench.submit_store(&[1, 2]);
        hanging.recv().expect("it has begun");
        bench.tier.shutdown();
        bench.tier.shutdown();
        let again = || FileTier::open(settings, 8192, 8, "");
        let refused = again().err().expect("its owner is not done");
        assert!(matches!(refused, TierError::Locked { .. }), "{name}: {refused}");
        drop(gate);
        // The last one lets go of the store: what hung has ended, and so has the tier.
        let store = Arc::downgrade(&bench.tier.store);
        bench.wait_for_job();
        drop(bench);
        while store.strong_count() > 0 {
            std::thread::yield_now();
        }
        again().expect("the lock is free").shutdown();
    });
}

#[test]
fn free_bytes_that_are_wanted_elsewhere_are_left_alone() {
    let directory = tempfile::tempdir().expect("temporary");
    let settings = settings(directory.path(), 40);
    let open = |min_free_bytes| {
        let settings = FileSettings { min_free_bytes, ..settings.clone() };
        Bench::new(FileTier::open(&settings, 8192, 8, "").expect("opens"))
    };
    let bench = open(u64::MAX);
    assert_eq!(bench.store(&[1, 2]).0, [Err(Failure::Full); 2], "there is nothing to evict");
    bench.close();
    let bench = open(0);
    (0..3).for_each(|number| assert_eq!(bench.store(&[number]).0, [Ok(())]));
    let limit = bench.tier.store.index.lock().limit();
    assert!((3..40).contains(&limit), "grows step by step");
    bench.close();
    let bench = open(u64::MAX);
    assert_eq!(bench.load(&[0, 1, 2]), [Ok(()); 3]);
    for number in 0..20 {
        assert_eq!(bench.store(&[number]).0, [Ok(())], "it evicts where it can not grow");
    }
    assert_eq!(bench.tier.usage().chunks, u64::from(limit));
    assert_eq!(bench.load(&[19]), [Ok(())]);
    bench.close();
}

/// A small file system of its own, while it lives. Only root may make one.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> Option<Self> {
        let directory = tempfile::tempdir().expect("temporary");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "kvtier-test"])
            .arg(directory.path())
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(directory)),
            other => {
                eprintln!("a full disk is not tested, mounting one failed: {other:?}");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()));
    }
}

#[test]
fn a_disk_that_another_program_fills_still_serves_and_stores() {
    let Some(disk) = SmallDisk::new("1m") else {
        return;
    };
    let settings = settings(&disk.0.path().join("store"), 60);
    let open = || Bench::new(FileTier::open(&settings, 8192, 8, "").expect("opens"));
    let bench = open();
    (0..5).for_each(|number| assert_eq!(bench.store(&[number]).0, [Ok(())]));
    let filler = disk.0.path().join("filler");
    let full = std::fs::write(&filler, vec![1; 2 << 20]).expect_err("full");
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    for number in 5..40 {
        assert_eq!(bench.store(&[number]).0, [Ok(())], "chunk {number}");
        assert_eq!(bench.load(&[number]), [Ok(())], "chunk {number}");
    }
    let held = bench.tier.usage().chunks;
    assert!((5..40).contains(&held), "{held}");
    bench.close();
    // Reopened on the full disk, it serves what it had.
    let bench = open();
    assert_eq!(bench.tier.usage().chunks, held);
    assert_eq!(bench.load(&[39]), [Ok(())]);
    bench.close();
    std::fs::remove_file(&filler).expect("there");
    let bench = open();
    (40..60).for_each(|number| assert_eq!(bench.store(&[number]), (vec![Ok(())], vec![])));
    bench.close();
}
