//! Counts what the index takes from the allocator: the promise of bytes an entry.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvtier_core::index::{ANYONE, Chain, Index, PolicyKind, Writer};

/// Bytes that live on the heap. A global because an allocator has no other place; the one test of
/// this file is alone in its process.
static LIVE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; only sizes are counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ENTRIES: u32 = 200_000;
const KEY_BYTES: usize = 36;

fn store(index: &mut Index, first: u64) {
    let keys: Vec<[u8; KEY_BYTES]> = (first..first + 1000)
        .map(|number| {
            let mut key = [0; KEY_BYTES];
            key[..8].copy_from_slice(&number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
            key
        })
        .collect();
    index.begin_call();
    let numbered = (0..).zip(keys.iter().map(<[u8; KEY_BYTES]>::as_slice));
    let reserved = index
        .reserve(numbered, Writer::Store, ANYONE, &mut Chain::default())
        .expect("distinct")
        .expect("room");
    for &token in reserved.tokens.iter().rev() {
        index.commit(token);
    }
}

#[test]
fn a_full_index_of_every_policy_takes_at_most_its_bytes_an_entry() {
    for &(name, policy) in PolicyKind::ALL {
        let before = LIVE.load(Ordering::Relaxed);
        let mut index = Index::new(ENTRIES, KEY_BYTES, policy).expect("small");
        // Twice over: ghosts and free lists are full too.
        for first in (0..2 * u64::from(ENTRIES)).step_by(1000) {
            store(&mut index, first);
        }
        let taken = LIVE.load(Ordering::Relaxed) - before;
        assert_eq!(index.len(), ENTRIES as usize);
        let entry = taken as f64 / f64::from(ENTRIES);
        println!("{name}: {entry:.1} bytes an entry");
        let counted = index.heap_bytes() as f64 / f64::from(ENTRIES);
        assert!(
            (entry - counted).abs() < 1.0,
            "{name}: heap_bytes says {counted:.1}, not {entry:.1}"
        );
        assert!(entry <= policy.most_bytes_per_entry() as f64, "{name}: {entry:.1}");
    }
}
