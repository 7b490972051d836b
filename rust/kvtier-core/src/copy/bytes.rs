//! One run of bytes, copied through the cache or around it.
//!
//! A plain copy reads each line of the destination before it writes it, which is a third of the
//! traffic. For a transfer that is larger than a cache, streaming stores leave that out; and what
//! it writes would push the engine's own data out of the cache for nothing.

/// Transfers from this size on go around the cache: about what a core has of the last level.
const AROUND_CACHE_BYTES: usize = 4 << 20;
/// Shorter runs are not worth the lines at both ends that are written in part.
const MIN_STREAMED_RUN: usize = 512;

/// How the runs of one transfer are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copy {
    /// Through the cache.
    Plain,
    /// Around it.
    Streaming,
}

impl Copy {
    /// The way that fits a transfer of so many bytes, on this machine.
    pub(super) fn for_transfer(bytes: usize) -> Self {
        if bytes >= AROUND_CACHE_BYTES && streaming::supported() {
            Self::Streaming
        } else {
            Self::Plain
        }
    }

    /// Copies `count` bytes. `next` is where the bytes of the following copy will be read: they are
    /// asked for meanwhile, since the CPU can not foresee a jump. It need not be valid.
    ///
    /// # Safety
    /// As for [`std::ptr::copy_nonoverlapping`]. What was streamed is visible to other threads
    /// after [`Copy::finish`].
    pub(super) unsafe fn bytes(self, from: *const u8, to: *mut u8, count: usize, next: *const u8) {
        // SAFETY: the caller's promise; streaming was made only where it is supported.
        unsafe {
            if self == Self::Streaming && count >= MIN_STREAMED_RUN {
                streaming::copy(from, to, count, next);
            } else {
                to.copy_from_nonoverlapping(from, count);
            }
        }
    }

    /// Orders what this thread streamed before what it writes next.
    pub(super) fn finish(self) {
        if self == Self::Streaming {
            streaming::fence();
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod streaming {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256,
    };

    const LINE: usize = 64;
    /// How far ahead of the copy lines are asked for.
    const AHEAD: usize = 1024;

    pub(super) fn supported() -> bool {
        is_x86_feature_detected!("avx")
    }

    pub(super) fn fence() {
        // SAFETY: every x86-64 CPU has it.
        unsafe { _mm_sfence() }
    }

    /// # Safety
    /// As for `copy_nonoverlapping`, at least one line, on a CPU with AVX.
    #[target_feature(enable = "avx")]
    #[expect(clippy::cast_ptr_alignment, reason = "loads may be misaligned, stores are aligned")]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, count: usize, next: *const u8) {
        let head = to.align_offset(LINE);
        let lines = (count - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: head, lines and tail together are the `count` bytes that the caller promises;
        // `to + head` is a multiple of a line, which streaming stores need. A prefetch may name
        // any address.
        unsafe {
            to.copy_from_nonoverlapping(from, head);
            for line in 0..lines {
                let at = head + line * LINE;
                let source = from.add(at).cast::<__m256i>();
                let soon = match (at + AHEAD).checked_sub(count) {
                    None => from.wrapping_add(at + AHEAD),
                    Some(past) => next.wrapping_add(past),
                };
                _mm_prefetch::<_MM_HINT_T0>(soon.cast());
                let (low, high) =
                    (_mm256_loadu_si256(source), _mm256_loadu_si256(source.wrapping_add(1)));
                let target = to.add(at).cast::<__m256i>();
                _mm256_stream_si256(target, low);
                _mm256_stream_si256(target.wrapping_add(1), high);
            }
            to.add(tail).copy_from_nonoverlapping(from.add(tail), count - tail);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod streaming {
    pub(super) fn supported() -> bool {
        false
    }

    pub(super) fn fence() {}

    /// # Safety
    /// As for `copy_nonoverlapping`.
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, count: usize, _next: *const u8) {
        // SAFETY: the caller's promise.
        unsafe { to.copy_from_nonoverlapping(from, count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_copies_every_byte_at_every_alignment() {
        let source: Vec<u8> = (0..4096_u32).map(|at| (at * 31 % 251) as u8).collect();
        for (from, to, count) in
            [(0, 0, 512), (1, 0, 513), (0, 1, 700), (3, 5, 1000), (63, 1, 577), (7, 64, 2048)]
        {
            let mut target = vec![0xAA_u8; 4096];
            // SAFETY: both ranges lie inside their vectors.
            unsafe {
                let to = target.as_mut_ptr().add(to);
                let source = source.as_ptr();
                Copy::for_transfer(AROUND_CACHE_BYTES).bytes(source.add(from), to, count, source);
            }
            Copy::for_transfer(AROUND_CACHE_BYTES).finish();
            assert_eq!(target[to..to + count], source[from..from + count]);
            assert!(target[..to].iter().chain(&target[to + count..]).all(|&byte| byte == 0xAA));
        }
    }
}
