//! Policies on a real trace against an independent simulator.
//!
//! The simulator takes blocks one by one, leaf first; the index takes a request's newcomers in
//! one call and never evicts one of them for another, so figures differ a little.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::LazyLock;

use kvtier_core::index::PolicyKind;
use kvtier_core::replay::{Trace, optimum, replay};

const TRACE: &str = "../../../shared/traces/conversation_trace.jsonl";
const CAPACITIES: [u32; 6] = [1_000, 5_000, 10_000, 30_000, 50_000, 100_000];
const TOLERANCE: f64 = 0.005;

/// The trace, read once for all tests.
fn trace() -> Option<&'static Trace> {
    static READ: LazyLock<Option<Trace>> = LazyLock::new(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TRACE);
        let Ok(file) = File::open(&path) else {
            println!("SKIPPED: there is no trace at {}", path.display());
            return None;
        };
        Some(Trace::read(BufReader::new(file)).expect("a trace"))
    });
    READ.as_ref()
}

/// Compares rates of hits at each capacity.
fn compare(wanted: [f64; 6], hits: impl Fn(&Trace, u32) -> u64) {
    let Some(trace) = trace() else { return };
    let mut wrong = Vec::new();
    for (capacity, wanted) in CAPACITIES.into_iter().zip(wanted) {
        let rate = hits(trace, capacity) as f64 / trace.accesses() as f64;
        if (rate - wanted).abs() > TOLERANCE {
            wrong.push(format!("at {capacity}: {rate:.4}, reference {wanted:.4}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn compare_policy(kind: PolicyKind, prefix_hits: [f64; 6]) {
    compare(prefix_hits, |trace, capacity| {
        replay(trace, kind, capacity).expect("a capacity").prefix_hits
    });
}

#[test]
fn lru() {
    compare_policy(PolicyKind::Lru, [0.0445, 0.1118, 0.2116, 0.3257, 0.3546, 0.3637]);
}

#[test]
fn arc() {
    compare_policy(PolicyKind::Arc, [0.0529, 0.1131, 0.2226, 0.3111, 0.3437, 0.3631]);
}

#[test]
fn lirs() {
    compare_policy(PolicyKind::Lirs, [0.0695, 0.1685, 0.2104, 0.2462, 0.2644, 0.3075]);
}

#[test]
fn s3fifo() {
    compare_policy(PolicyKind::S3Fifo, [0.0556, 0.1382, 0.1953, 0.3043, 0.3490, 0.3624]);
}

#[test]
fn the_optimum_in_block_hits() {
    let wanted = [0.1907, 0.3412, 0.3664, 0.3664, 0.3664, 0.3664];
    compare(wanted, |trace, capacity| optimum(trace, capacity as usize));
}
