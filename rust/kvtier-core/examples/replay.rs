//! `cargo run --release --example replay -- TRACE`: hit rates of every policy, for work on one.

use std::fs::File;
use std::io::BufReader;

use kvtier_core::index::PolicyKind;
use kvtier_core::replay::{Trace, optimum, replay};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let capacities = [1_000, 5_000, 10_000, 30_000, 50_000, 100_000];
    for path in std::env::args().skip(1) {
        let trace = Trace::read(BufReader::new(File::open(&path)?))?;
        println!("{path}: {} requests, {} accesses", trace.requests(), trace.accesses());
        println!("prefix hits  {capacities:?}");
        for &(name, policy) in PolicyKind::ALL {
            print!("{name:<10}");
            for capacity in capacities {
                let outcome = replay(&trace, policy, capacity)?;
                let rate = outcome.prefix_hits as f64 / outcome.accesses as f64;
                print!(" {rate:.4} ({:.2} s)", outcome.elapsed.as_secs_f64());
            }
            println!();
        }
        print!("optimum   ");
        for capacity in capacities {
            let rate = optimum(&trace, capacity as usize) as f64 / trace.accesses() as f64;
            print!(" {rate:.4}");
        }
        println!(" (block hits)");
    }
    Ok(())
}
