//! Harm to the files, while the tier is open and while it is not: what an audit finds, and that
//! no wrong byte is served.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::bench::{
    CHUNK, check, closed_store, cut, engines, flip, open, open_with, settings, write_at,
};
use super::facts::{CHECKPOINT_FILE, JOURNAL_FILE};
use super::format::HEADER_BYTES;
use super::headers::HEADERS_FILE;
use super::*;
use crate::tier::Failure;

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
