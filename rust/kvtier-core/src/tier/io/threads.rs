//! A few threads, each in one system call at a time.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::{Engine, Operation, Transfer};
use crate::tier::lanes::Lane;
use crate::tier::workers::Workers;

/// One system call for a transfer; blocks. The place where a test breaks disks.
pub(in crate::tier) trait Calls: Send + Sync {
    /// Moves up to `most` bytes, no more than are left; says how many.
    fn call(&self, transfer: &Transfer, most: usize) -> io::Result<usize>;
}

/// `pread` and `pwrite`.
pub(super) struct Plain;

impl Calls for Plain {
    fn call(&self, transfer: &Transfer, most: usize) -> io::Result<usize> {
        debug_assert!(most <= transfer.left());
        let file = &transfer.file.file;
        match transfer.lane {
            Lane::Load => {
                // SAFETY: the transfer owns the slot it loads, by `Transfer::new`.
                let place = unsafe { std::slice::from_raw_parts_mut(transfer.memory(), most) };
                file.read_at(place, transfer.offset())
            }
            Lane::Store => {
                // SAFETY: nobody writes a slot that is being stored, by `Transfer::new`.
                let bytes = unsafe { std::slice::from_raw_parts(transfer.memory(), most) };
                file.write_at(bytes, transfer.offset())
            }
        }
    }
}

/// An engine of threads that block.
pub(in crate::tier) struct Threads {
    workers: Workers,
    calls: Arc<dyn Calls>,
}

impl Threads {
    /// Starts `threads` threads.
    pub(in crate::tier) fn start(calls: Arc<dyn Calls>, threads: usize) -> io::Result<Self> {
        Ok(Self { workers: Workers::start("file", threads)?, calls })
    }
}

impl Engine for Threads {
    fn submit(&self, lane: Lane, operations: &mut dyn Iterator<Item = Box<dyn Operation>>) {
        let tasks = operations.map(|operation| {
            let calls = Arc::clone(&self.calls);
            Box::new(move || run(&*calls, operation)) as Box<dyn FnOnce() + Send>
        });
        self.workers.queue(lane, tasks);
    }

    fn close(&self) -> bool {
        self.workers.close()
    }
}

fn run(calls: &dyn Calls, mut operation: Box<dyn Operation>) {
    let Some(mut transfer) = operation.begin() else {
        return;
    };
    let outcome = loop {
        if let Some(outcome) = transfer.advance(calls.call(&transfer, transfer.left())) {
            break outcome;
        }
    };
    drop(transfer);
    operation.end(outcome);
}
