use std::collections::HashMap;
use std::thread;

use serde_json::Value;

use super::*;
use crate::key::KeyBatch;
use crate::manager::tests::with_memory_tier;
use crate::manager::{Lookup, Manager};
use crate::tier::TierLimits;

/// The events in a file, whose end is open.
fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("readable");
    let whole = format!("{}]", text.trim_end().trim_end_matches(','));
    serde_json::from_str(&whole).expect("JSON")
}

fn file() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("made");
    let path = directory.path().join("trace.json");
    (directory, path)
}

fn microseconds(event: &Value, field: &str) -> f64 {
    event[field].as_f64().expect("a number")
}

fn note(trace: &Trace, name: &str) {
    let now = Instant::now();
    trace.span(1, &Name::new(name), now, now, &[]);
}

fn manager() -> Manager {
    with_memory_tier("behind \"it\"", 8, TierLimits { load_share: 1.0, ..TierLimits::default() })
}

fn settle(manager: &Manager) {
    loop {
        manager.end_step().expect("open");
        if !manager.is_busy().expect("open") {
            return;
        }
        manager.wait_until(Instant::now() + Duration::from_secs(60)).expect("open");
    }
}

/// Steps, their parts and jobs of a manager that stores and promotes.
#[test]
fn steps_nest_and_jobs_match_the_counters() {
    let (_directory, path) = file();
    let mut manager = manager();
    manager.open_trace(Trace::open(&path).expect("made"));
    for number in 0..8 {
        let keys = KeyBatch::from_flat(vec![number; 8], 8).expect("a key");
        assert!(manager.prepare_store(u64::from(number), &keys).expect("open").is_some());
        manager.complete_store(u64::from(number), &keys, true).expect("prepared");
        settle(&manager);
    }
    let early = KeyBatch::from_flat([[0; 8], [1; 8]].concat(), 8).expect("keys");
    let answers = manager.lookup(9, &early, false).expect("open");
    assert_eq!(answers, [Lookup::HitPending; 2]);
    settle(&manager);
    let stats = manager.stats();
    manager.shutdown();
    drop(manager);

    let events = events(&path);
    let of = |name: &str, phase: &str| -> Vec<&Value> {
        events.iter().filter(|event| event["name"] == name && event["ph"] == phase).collect()
    };
    let steps = of("step", "X");
    assert_eq!(steps.len() as u64, stats.primary.steps);
    for part in ["news", "account", "submit"] {
        let parts = of(part, "X");
        assert_eq!(parts.len(), steps.len());
        for (part, step) in parts.iter().zip(&steps) {
            let (began, took) = (microseconds(part, "ts"), microseconds(part, "dur"));
            let (from, length) = (microseconds(step, "ts"), microseconds(step, "dur"));
            assert!(from <= began && began + took <= from + length + 0.002, "{part} in {step}");
            assert_eq!(part["tid"], step["tid"]);
        }
    }
    let tier = &stats.tiers[0].figures;
    for (direction, moved) in [("load", &tier.loads), ("store", &tier.stores)] {
        let name = format!("behind \"it\" {direction}");
        let begins: HashMap<u64, &Value> = of(&name, "b")
            .into_iter()
            .map(|event| (event["id"].as_u64().expect("a number"), event))
            .collect();
        let ended = of(&name, "e");
        assert!(!ended.is_empty() && ended.len() == begins.len());
        assert_eq!(ended.len() as u64, moved.latency.count());
        let sum = |field: &str| -> u64 {
            ended.iter().map(|event| event["args"][field].as_u64().expect("a number")).sum()
        };
        assert_eq!((sum("moved"), sum("failed"), sum("bytes")), (moved.chunks, 0, moved.bytes));
        for end in ended {
            let begin = begins[&end["id"].as_u64().expect("a number")];
            assert!(microseconds(begin, "ts") <= microseconds(end, "ts"));
        }
    }
}

#[test]
fn writers_share_a_file_and_lines_stay_whole() {
    let (_directory, path) = file();
    thread::scope(|scope| {
        for writer in 0..4 {
            let path = &path;
            scope.spawn(move || {
                let trace = Trace::open(path).expect("made");
                for _ in 0..200 {
                    (0..=writer).for_each(|_| note(&trace, &format!("of {writer}")));
                    trace.flush();
                }
            });
        }
    });
    let events = events(&path);
    for writer in 0..4 {
        let name = format!("of {writer}");
        let count = events.iter().filter(|event| event["name"] == *name).count();
        assert_eq!(count, 200 * (writer + 1));
    }
}

#[test]
fn what_is_there_is_added_to_if_it_is_a_trace() {
    let (_directory, path) = file();
    for name in ["first", "second"] {
        note(&Trace::open(&path).expect("made or a trace"), name);
    }
    let names: Vec<Value> = events(&path).iter().map(|event| event["name"].clone()).collect();
    assert_eq!(names, ["first", "second"]);
    std::fs::write(&path, "what I wrote").expect("written");
    let error = Trace::open(&path).expect_err("not ours");
    assert!(matches!(error, TraceError::NoTrace { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&path).expect("there"), "what I wrote");
}

#[test]
fn the_events_in_memory_are_bounded_and_the_rest_is_counted() {
    let (_directory, path) = file();
    let trace = Trace::open(&path).expect("made");
    (0..MAX_EVENTS + 3).for_each(|_| note(&trace, "one"));
    trace.flush();
    let events = events(&path);
    assert_eq!(events.len(), MAX_EVENTS + 1);
    assert_eq!(events[MAX_EVENTS]["args"]["count"], 3);
}

#[test]
fn the_file_is_bounded() {
    let (_directory, path) = file();
    let trace = Trace::with_limit(&path, 1000).expect("made");
    for _ in 0..100 {
        note(&trace, "one");
        trace.flush();
    }
    let length = std::fs::metadata(&path).expect("there").len();
    assert!((900..=1002).contains(&length), "{length}");
    assert!(events(&path).len() > 5);
}

#[test]
fn a_file_that_can_not_be_written_ends_the_trace() {
    let error = Trace::open(Path::new("/proc/version/trace.json")).expect_err("not a directory");
    assert!(matches!(error, TraceError::Io { .. }), "{error}");
    // Opens, and has no room for a byte.
    let trace = Trace {
        path: "/dev/full".into(),
        file: OpenOptions::new().append(true).open("/dev/full").expect("Linux"),
        origin: (Instant::now(), 0),
        events: Mutex::default(),
        left: AtomicU64::new(1000),
    };
    note(&trace, "lost");
    trace.flush();
    assert_eq!(trace.left.load(Ordering::Relaxed), 0);
    note(&trace, "lost");
    trace.flush();
}
