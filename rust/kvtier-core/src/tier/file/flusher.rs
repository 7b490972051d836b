//! The thread that brings a store to the disk now and then, so that nothing else has to.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::facts::Facts;
use super::store::Store;
use crate::sync::{Condvar, Mutex};
use crate::tier::crew::{Crew, PATIENCE};

#[derive(Default)]
struct Bell {
    closed: Mutex<bool>,
    rung: Condvar,
}

pub(super) struct Flusher {
    bell: Arc<Bell>,
    crew: Crew,
}

impl Flusher {
    /// Starts flushing every `interval`.
    pub(super) fn start(
        store: Arc<Store>,
        mut facts: Facts,
        interval: Duration,
    ) -> std::io::Result<Self> {
        let flusher = Self { bell: Arc::default(), crew: Crew::default() };
        let bell = Arc::clone(&flusher.bell);
        flusher.crew.start("kvtier-file-flush".to_owned(), move || {
            loop {
                let closed = bell.wait(Instant::now() + interval);
                if let Err(error) = store.sync().and_then(|()| facts.flush(&store.slots)) {
                    log::warn!("what was stored is not safe from a power loss yet: {error}");
                }
                if closed {
                    return;
                }
            }
        })?;
        Ok(flusher)
    }

    /// Flushes for the last time; false if the disk does not come back.
    pub(super) fn close(&self) -> bool {
        *self.bell.closed.lock() = true;
        self.bell.rung.notify_all();
        self.crew.end_within(PATIENCE)
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.close();
    }
}

impl Bell {
    /// Waits until it rings, or `end`; says whether it rang.
    fn wait(&self, end: Instant) -> bool {
        let mut closed = self.closed.lock();
        while !*closed {
            if self.rung.wait_until(&mut closed, end).timed_out() {
                break;
            }
        }
        *closed
    }
}
