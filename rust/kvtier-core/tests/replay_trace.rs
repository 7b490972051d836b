//! Policies on a real trace against an independent simulator.
//!
//! The simulator takes blocks one by one, leaf first; the index takes a request's newcomers in
//! one call and never evicts one of them for another, so figures differ a little.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use kvtier_core::index::PolicyKind;
use kvtier_core::replay::{Trace, optimum, replay};

const TRACE: &str = "../../../shared/traces/conversation_trace.jsonl";
const CAPACITIES: [u32; 6] = [1_000, 5_000, 10_000, 30_000, 50_000, 100_000];
const TOLERANCE: f64 = 0.005;

/// Prefix hits at each capacity.
const REFERENCE: [(PolicyKind, [f64; 6]); 4] = [
    (PolicyKind::Lru, [0.0445, 0.1118, 0.2116, 0.3257, 0.3546, 0.3637]),
    (PolicyKind::Arc, [0.0529, 0.1131, 0.2226, 0.3111, 0.3437, 0.3631]),
    (PolicyKind::Lirs, [0.0695, 0.1685, 0.2104, 0.2462, 0.2644, 0.3075]),
    (PolicyKind::S3Fifo, [0.0556, 0.1382, 0.1953, 0.3043, 0.3490, 0.3624]),
];

/// Block hits of the optimum at each capacity.
const OPTIMUM: [f64; 6] = [0.1907, 0.3412, 0.3664, 0.3664, 0.3664, 0.3664];

#[test]
fn policies_hit_what_the_reference_hits() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TRACE);
    let Ok(file) = File::open(&path) else {
        println!("SKIPPED: there is no trace at {}", path.display());
        return;
    };
    let trace = Trace::read(BufReader::new(file)).expect("a trace");
    let accesses = trace.accesses() as f64;
    let mut wrong = Vec::new();
    let mut compare = |name: &str, capacity: u32, hits: u64, wanted: f64| {
        let rate = hits as f64 / accesses;
        if (rate - wanted).abs() > TOLERANCE {
            wrong.push(format!("{name} at {capacity}: {rate:.4}, reference {wanted:.4}"));
        }
    };
    for (kind, rates) in REFERENCE {
        for (capacity, wanted) in CAPACITIES.into_iter().zip(rates) {
            let outcome = replay(&trace, kind, capacity).expect("a capacity");
            compare(kind.name(), capacity, outcome.prefix_hits, wanted);
        }
    }
    for (capacity, wanted) in CAPACITIES.into_iter().zip(OPTIMUM) {
        compare("optimum", capacity, optimum(&trace, capacity as usize), wanted);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
