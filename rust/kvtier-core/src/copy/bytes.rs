//! Runs of bytes, copied through the cache or around it.
//!
//! A plain copy reads each line of the destination before it writes it, which is a third of the
//! traffic. For a transfer that is larger than a cache, streaming stores leave that out; and what
//! it writes would push the engine's own data out of the cache for nothing.
//!
//! One stream of reads does not fill a memory bus, least of all one that jumps at every page: the
//! CPU foresees no jump, and has to find each page first. So streamed runs are cut into segments
//! of a page, and [`LANES`] segments are copied side by side, a few lines of each in turn.

/// Transfers from this size on go around the cache: about what a core has of the last level.
const AROUND_CACHE_BYTES: usize = 4 << 20;
/// Shorter runs are not worth the lines at both ends that are written in part.
const MIN_STREAMED_RUN: usize = 512;
/// Segments that are copied side by side; with 8, one thread does half as much again as one
/// memcpy over memory in order.
const LANES: usize = 8;
/// No longer than a page, so that one long run fills all lanes too.
const SEGMENT_BYTES: usize = 4096;

/// Copies the runs of one transfer, or of one thread's part of it.
#[derive(Debug)]
pub(super) struct ByteCopier {
    streams: bool,
    lanes: [Segment; LANES],
    used: usize,
}

/// Part of a run that waits to be copied.
#[derive(Debug, Clone, Copy)]
struct Segment {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

const EMPTY: Segment = Segment { from: std::ptr::null(), to: std::ptr::null_mut(), bytes: 0 };

impl ByteCopier {
    /// One that fits a transfer of so many bytes, on this machine.
    pub(super) fn for_transfer(bytes: usize) -> Self {
        let streams = bytes >= AROUND_CACHE_BYTES && streaming::supported();
        Self { streams, lanes: [EMPTY; LANES], used: 0 }
    }

    /// Copies `bytes` bytes, at once or later, at the latest in [`ByteCopier::finish`].
    ///
    /// # Safety
    /// As for [`std::ptr::copy_nonoverlapping`], until `finish` has returned; also against the
    /// other runs that were given meanwhile.
    pub(super) unsafe fn copy(&mut self, from: *const u8, to: *mut u8, bytes: usize) {
        if !self.streams || bytes < MIN_STREAMED_RUN {
            // SAFETY: the caller's promise.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
            return;
        }
        // Streaming stores want whole lines.
        let head = to.align_offset(streaming::LINE);
        // SAFETY: `head` is less than a line, and so than `bytes`; the caller's promise.
        unsafe { to.copy_from_nonoverlapping(from, head) };
        for start in (head..bytes).step_by(SEGMENT_BYTES) {
            // SAFETY: `start` lies inside both runs.
            let (from, to) = unsafe { (from.add(start), to.add(start)) };
            self.lanes[self.used] = Segment { from, to, bytes: SEGMENT_BYTES.min(bytes - start) };
            self.used += 1;
            if self.used == LANES {
                // SAFETY: segments of runs that the caller still promises; they start at lines.
                unsafe { self.flush() };
            }
        }
    }

    /// Copies what is left, and makes everything visible to whoever sees what this thread
    /// writes next.
    pub(super) fn finish(mut self) {
        if self.streams {
            // SAFETY: as in `copy`, whose caller's promise holds until this returns.
            unsafe { self.flush() };
            streaming::fence();
        }
    }

    /// # Safety
    /// The used segments may be copied, and their destinations start at lines.
    unsafe fn flush(&mut self) {
        let segments = &self.lanes[..self.used];
        let even = segments.iter().map(|segment| segment.bytes).min().unwrap_or(0);
        let together = if self.used == LANES { even - even % streaming::STEP } else { 0 };
        // SAFETY: `together` is at most the length of each; the caller's promise.
        unsafe {
            if together > 0 {
                streaming::copy_side_by_side(&self.lanes, together);
            }
            for segment in segments {
                let (from, to) = (segment.from.add(together), segment.to.add(together));
                to.copy_from_nonoverlapping(from, segment.bytes - together);
            }
        }
        self.used = 0;
    }
}

#[cfg(target_arch = "x86_64")]
mod streaming {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    use super::{LANES, Segment};

    pub(super) const LINE: usize = 64;
    /// Bytes of a segment that are copied before the turn of the next one.
    pub(super) const STEP: usize = 2 * LINE;
    const WORD: usize = 32;

    pub(super) fn supported() -> bool {
        is_x86_feature_detected!("avx")
    }

    pub(super) fn fence() {
        // SAFETY: every x86-64 CPU has it.
        unsafe { _mm_sfence() }
    }

    /// # Safety
    /// `bytes`, a multiple of [`STEP`], may be copied of every segment; destinations start at
    /// lines; the CPU has AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy_side_by_side(segments: &[Segment; LANES], bytes: usize) {
        for step in (0..bytes).step_by(STEP) {
            for segment in segments {
                for at in (step..step + STEP).step_by(WORD) {
                    // SAFETY: `at` and a word behind it lie below `bytes`; a line is a multiple
                    // of a word, so the store is aligned.
                    unsafe {
                        let word = _mm256_loadu_si256(segment.from.add(at).cast());
                        _mm256_stream_si256(segment.to.add(at).cast(), word);
                    }
                }
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod streaming {
    use super::{LANES, Segment};

    pub(super) const LINE: usize = 64;
    pub(super) const STEP: usize = 2 * LINE;

    pub(super) fn supported() -> bool {
        false
    }

    pub(super) fn fence() {}

    /// # Safety
    /// Never called: nothing streams here.
    pub(super) unsafe fn copy_side_by_side(_segments: &[Segment; LANES], _bytes: usize) {}
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROOM: usize = 16 << 10;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Runs of any length at any alignment, more or fewer than there are lanes.
        #[test]
        fn every_byte_arrives_and_no_other_is_touched(
            runs in prop::collection::vec((0..64_usize, 0..64_usize, 0..9000_usize), 0..20),
            large in any::<bool>(),
        ) {
            let source: Vec<u8> = (0..ROOM * 20).map(|at| (at * 31 % 251) as u8).collect();
            let mut target = vec![0xAA_u8; source.len()];
            let mut expected = target.clone();
            let mut copier = ByteCopier::for_transfer(if large { AROUND_CACHE_BYTES } else { 1 });
            for (number, &(from, to, bytes)) in runs.iter().enumerate() {
                let (from, to) = (number * ROOM + from, number * ROOM + to);
                expected[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
                // SAFETY: both ranges lie inside their vectors, each run in a part of its own.
                unsafe {
                    copier.copy(source.as_ptr().add(from), target.as_mut_ptr().add(to), bytes);
                }
            }
            copier.finish();
            prop_assert!(target == expected);
        }
    }
}
