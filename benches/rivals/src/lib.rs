//! Nothing but a place for the benchmark in `benches/rivals.rs`.
