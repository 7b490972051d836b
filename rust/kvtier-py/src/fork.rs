//! Handles refuse to work in a process that `fork` made: its copy has no worker threads, and its
//! locks may be held for ever. Engines start workers with `spawn`.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;

use crate::error::raise;

/// How many forks led from the first process to this one. The one global of the crate: the
/// handler that counts has no other place, and asking for the pid is a system call.
static FORKS: AtomicU32 = AtomicU32::new(0);
static REGISTER: Once = Once::new();

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process in which a handle was made.
pub(crate) struct Home(u32);

impl Home {
    /// This process.
    pub(crate) fn here() -> Self {
        REGISTER.call_once(|| {
            // SAFETY: the handler adds to an atomic, which is allowed after fork. Failing (no
            // memory for the registration) only costs the check.
            unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is still that process.
    pub(crate) fn is_here(&self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Refuses to go on anywhere else.
    pub(crate) fn check(&self, py: Python<'_>, what: &str) -> PyResult<()> {
        if self.is_here() {
            return Ok(());
        }
        Err(raise(
            py,
            "ForkError",
            format!(
                "this {what} was made before fork: start worker processes with \
                 multiprocessing's \"spawn\" method and attach to the region by name"
            ),
        ))
    }
}
