//! Is the checksum faster than the media it guards? Beside `memcpy` of the same bytes.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvtier_core::checksum::Checksum;
use std::hint::black_box;

fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("checksum");
    for size in [64 << 10, 1 << 20] {
        let bytes: Vec<u8> = (0..size).map(|at: usize| (at * 31) as u8).collect();
        let mut copy = vec![0; size];
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(format!("crc64 {} KiB", size >> 10), |bencher| {
            bencher.iter(|| Checksum::of(black_box(&bytes)));
        });
        group.bench_function(format!("memcpy {} KiB", size >> 10), |bencher| {
            bencher.iter(|| copy.copy_from_slice(black_box(&bytes)));
        });
    }
    group.finish();
}

criterion_group!(checksum, benches);
criterion_main!(checksum);
