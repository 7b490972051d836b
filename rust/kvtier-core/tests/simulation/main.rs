//! The manager, simulated: `make simulate FIRST=0 SEEDS=100000`.
//!
//! One seed decides everything in one thread: the time, what the engine does, and how the tiers
//! fail. A seed replays exactly, so a failing one is a bug report: the test prints the invariant,
//! the last events, and the command that runs it again.
//!
//! | file | what |
//! |---|---|
//! | `settings.rs` | what a seed draws: sizes, limits, odds of each fault |
//! | `world.rs` | the run: chaos, then everything must end, then everything must heal |
//! | `engine.rs`, `tier.rs` | the two sides of the manager |
//! | `ledger.rs`, `checks.rs` | what must be so, and that it is |
//! | `content.rs`, `stage.rs`, `tally.rs` | keys and their bytes, what all share, what was exercised |
//!
//! The bugs of `mutations/` are planted by `make mutations`, one at a time; each must be found.

mod checks;
mod content;
mod engine;
mod ledger;
mod settings;
mod stage;
mod tally;
mod tier;
mod world;

use std::fmt::Write;
use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tally::{Feature, Tally};

/// A seed that failed, and why.
struct Failed {
    seed: u64,
    message: String,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number"))
    })
}

/// Runs a seed; a panic of the core is a violation too.
fn run(seed: u64, traced: bool) -> world::Ended {
    let ended = catch_unwind(AssertUnwindSafe(|| world::run(seed, traced)));
    ended.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
        world::Ended {
            tally: Tally::default(),
            violation: Some(format!("panicked: {}", text.unwrap_or_default())),
            trace: Vec::new(),
        }
    })
}

/// Runs seeds on all cores until one fails; the lowest one that did.
fn run_all(first: u64, seeds: u64) -> (Tally, Option<Failed>) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, end) = (AtomicU64::new(first), first + seeds);
    let shows = seeds > 1000 && std::io::stderr().is_terminal();
    let work = || {
        let mut tally = Tally::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return (tally, None);
            }
            if shows && (seed - first).is_multiple_of(1000) {
                eprint!("\r{} of {seeds} seeds", seed - first);
            }
            let ended = run(seed, false);
            tally.merge(&ended.tally);
            if let Some(message) = ended.violation {
                next.store(end, Ordering::Relaxed);
                return (tally, Some(Failed { seed, message }));
            }
        }
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("panics are caught")).collect()
    });
    if shows {
        eprint!("\r\x1b[K");
    }
    let mut tally = Tally::default();
    for (part, _) in &results {
        tally.merge(part);
    }
    (tally, results.into_iter().filter_map(|(_, failed)| failed).min_by_key(|failed| failed.seed))
}

#[test]
fn every_seed_keeps_every_invariant() {
    let (first, seeds) = (number("FIRST", 0), number("SEEDS", 500));
    let start = Instant::now();
    let (tally, failed) = run_all(first, seeds);
    if let Some(Failed { seed, message }) = failed {
        let mut report = run(seed, true).trace;
        report.push(format!("seed {seed}: {message}"));
        report.push(format!("replay it: make simulate FIRST={seed} SEEDS=1"));
        panic!("\n{}", report.join("\n"));
    }
    let seconds = start.elapsed().as_secs_f64();
    let mut summary = format!("{seeds} seeds, {} events, {seconds:.1} s\n", tally.events);
    for &(feature, text) in Feature::ALL {
        writeln!(summary, "{:>12}  {text}", tally.of(feature)).expect("a string takes it");
    }
    print!("{summary}");
    let never = Feature::ALL.iter().filter(|&&(feature, _)| tally.of(feature) == 0);
    let never: Vec<_> = never.map(|(_, text)| text).collect();
    assert!(seeds < 500 || never.is_empty(), "never exercised: {never:?}");
}

#[test]
fn a_seed_replays_exactly() {
    for seed in 0..20 {
        let [one, other] = [(); 2].map(|()| run(seed, true));
        assert_eq!(one.trace, other.trace, "seed {seed}");
        assert_eq!(one.tally.events, other.tally.events, "seed {seed}");
    }
}
