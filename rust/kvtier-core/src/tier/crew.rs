//! Threads that are waited for, but not for ever.
//!
//! A thread that works on a medium can hang in it. Whoever ends a [`Crew`] waits for its threads
//! up to [`PATIENCE`] and leaves behind what does not come back: such a thread keeps what it
//! uses alive. In a process made by `fork` the threads do not exist: nothing is joined.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, JoinHandle, Mutex, spawn};

/// How long an ending crew is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Running {
    threads: Mutex<usize>,
    ended: Condvar,
}

/// Counts a thread as ended when it is dropped, by a panic as well.
struct Shift(Arc<Running>);

impl Drop for Shift {
    fn drop(&mut self) {
        *self.0.threads.lock() -= 1;
        self.0.ended.notify_all();
    }
}

/// Some threads of a tier. Who owns it tells them to end before it waits for them.
pub(super) struct Crew {
    running: Arc<Running>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    owner: u32,
}

impl Default for Crew {
    fn default() -> Self {
        Self { running: Arc::default(), handles: Mutex::default(), owner: std::process::id() }
    }
}

impl Crew {
    /// Starts one more thread.
    pub(super) fn start(
        &self,
        name: String,
        work: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        *self.running.threads.lock() += 1;
        let shift = Shift(Arc::clone(&self.running));
        let handle = spawn(name, move || {
            // First in, last out: everything that the thread used is gone before it is counted.
            let _shift = shift;
            work();
        })?;
        self.handles.lock().push(handle);
        Ok(())
    }

    /// Waits until all threads have ended and joins them; false if one has not within
    /// `patience`. The second time there is nobody to wait for. Idempotent.
    pub(super) fn end_within(&self, patience: Duration) -> bool {
        let handles = std::mem::take(&mut *self.handles.lock());
        if std::process::id() != self.owner {
            handles.into_iter().for_each(std::mem::forget);
            return true;
        }
        let patience = if handles.is_empty() { Duration::ZERO } else { patience };
        if !self.wait_until(Instant::now() + patience) {
            log::error!("a tier's thread does not come back from its medium; it is left behind");
            return false;
        }
        for handle in handles {
            // A thread catches the panics of its work; it has none of its own to report.
            let _ = handle.join();
        }
        true
    }

    fn wait_until(&self, deadline: Instant) -> bool {
        let mut threads = self.running.threads.lock();
        while *threads > 0 {
            if self.running.ended.wait_until(&mut threads, deadline).timed_out() {
                return *threads == 0;
            }
        }
        true
    }
}
