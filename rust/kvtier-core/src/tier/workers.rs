//! The threads of a tier: loads before stores, and no store starves.
//!
//! Workers take a load if there is one; after [`LOADS_IN_A_ROW`] loads with stores waiting, one
//! store goes first. A panic in a task is caught: the task's job is dropped, which reports its
//! chunk as lost, and the worker goes on.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, JoinHandle, Mutex, spawn};

const LOADS_IN_A_ROW: u32 = 8;
/// How long `close` waits for a task that runs.
const PATIENCE: Duration = Duration::from_secs(5);

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    loads: VecDeque<Task>,
    stores: VecDeque<Task>,
    loads_in_a_row: u32,
    closed: bool,
    /// Workers that have not ended.
    running: usize,
}

impl Queue {
    fn pop(&mut self) -> Option<Task> {
        let store_first = self.loads.is_empty()
            || (self.loads_in_a_row >= LOADS_IN_A_ROW && !self.stores.is_empty());
        if store_first {
            self.loads_in_a_row = 0;
            self.stores.pop_front()
        } else {
            self.loads_in_a_row += 1;
            self.loads.pop_front()
        }
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    ended: Condvar,
}

impl Shared {
    /// Waits until every worker has ended; false if one has not by `deadline`.
    fn wait_for_all(&self, deadline: Instant) -> bool {
        let mut queue = self.queue.lock();
        while queue.running > 0 {
            if self.ended.wait_until(&mut queue, deadline).timed_out() {
                return queue.running == 0;
            }
        }
        true
    }
}

/// A tier's threads.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    owner: u32,
}

impl Workers {
    /// Starts `threads` threads that call themselves `name`.
    pub(super) fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let workers =
            Self { shared: Arc::default(), threads: Mutex::default(), owner: std::process::id() };
        for number in 0..threads.max(1) {
            let shared = Arc::clone(&workers.shared);
            workers.shared.queue.lock().running += 1;
            let thread = spawn(format!("kvtier-{name}-{number}"), move || work(&shared))?;
            workers.threads.lock().push(thread);
        }
        Ok(workers)
    }

    /// Queues tasks; drops them after `close`.
    pub(super) fn queue(&self, load: bool, tasks: impl Iterator<Item = Task>) {
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            drop(queue);
            tasks.for_each(drop);
            return;
        }
        if load {
            queue.loads.extend(tasks);
        } else {
            queue.stores.extend(tasks);
        }
        drop(queue);
        self.shared.wake.notify_all();
    }

    /// Drops what is queued, waits for what runs, joins; false if a worker is still stuck in its
    /// task after [`PATIENCE`]. Such a one is left to itself: what it uses lives as long as it
    /// does. Idempotent. In a process made by `fork` the threads do not exist: nothing is joined.
    pub(super) fn close(&self) -> bool {
        self.close_within(PATIENCE)
    }

    fn close_within(&self, patience: Duration) -> bool {
        let (loads, stores) = {
            let mut queue = self.shared.queue.lock();
            queue.closed = true;
            (std::mem::take(&mut queue.loads), std::mem::take(&mut queue.stores))
        };
        // Outside the lock: dropping a task reports its job.
        drop((loads, stores));
        self.shared.wake.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        if std::process::id() != self.owner {
            threads.into_iter().for_each(std::mem::forget);
            return true;
        }
        // The second time there is nobody to wait for.
        let patience = if threads.is_empty() { Duration::ZERO } else { patience };
        if !self.shared.wait_for_all(Instant::now() + patience) {
            log::error!("a tier's worker does not come back from its medium; it is left behind");
            return false;
        }
        for thread in threads {
            // A worker catches the panics of its tasks; it has none of its own to report.
            let _ = thread.join();
        }
        true
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.close();
    }
}

fn work(shared: &Shared) {
    loop {
        let task = {
            let mut queue = shared.queue.lock();
            loop {
                if let Some(task) = queue.pop() {
                    break task;
                }
                if queue.closed {
                    queue.running -= 1;
                    drop(queue);
                    shared.ended.notify_all();
                    return;
                }
                shared.wake.wait(&mut queue);
            }
        };
        if catch_unwind(AssertUnwindSafe(task)).is_err() {
            log::error!("a tier's worker panicked; its chunk counts as lost");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn boxed(task: impl FnOnce() + Send + 'static) -> Task {
        Box::new(task)
    }

    #[test]
    fn loads_go_first_and_stores_do_not_starve() {
        let workers = Workers::start("test", 1).expect("thread");
        let (done, order) = mpsc::channel();
        let (gate, opened) = mpsc::channel::<()>();
        // Holds the only worker until everything is queued.
        workers.queue(true, std::iter::once(boxed(move || opened.recv().expect("gate"))));
        let send = |what: &'static str| {
            let done = done.clone();
            boxed(move || done.send(what).expect("listening"))
        };
        workers.queue(false, (0..2).map(|_| send("store")));
        workers.queue(true, (0..10).map(|_| send("load")));
        gate.send(()).expect("worker waits");
        let order: Vec<_> = order.iter().take(12).collect();
        let first = order.iter().position(|&what| what == "store").expect("stores ran");
        assert_eq!(first, LOADS_IN_A_ROW as usize - 1, "{order:?}");
    }

    #[test]
    fn a_panic_does_not_end_the_worker() {
        let workers = Workers::start("test", 1).expect("thread");
        let (done, heard) = mpsc::channel();
        workers.queue(true, std::iter::once(boxed(|| panic!("planted"))));
        workers.queue(true, std::iter::once(boxed(move || done.send(()).expect("listening"))));
        heard.recv().expect("the worker lives");
    }

    #[test]
    fn a_worker_that_is_stuck_does_not_hold_close_up() {
        let workers = Workers::start("test", 2).expect("threads");
        let (begun, running) = mpsc::channel();
        let (gate, opened) = mpsc::channel::<()>();
        workers.queue(
            true,
            std::iter::once(boxed(move || {
                begun.send(()).expect("listening");
                // Ends when the test does.
                let _ = opened.recv();
            })),
        );
        running.recv().expect("a worker took it");
        assert!(!workers.close_within(Duration::from_millis(1)));
        assert!(!workers.close(), "and does not wait again");
        drop(gate);
    }

    #[test]
    fn after_close_tasks_are_dropped() {
        let workers = Workers::start("test", 1).expect("thread");
        workers.close();
        let (done, heard) = mpsc::channel::<()>();
        workers.queue(false, std::iter::once(boxed(move || drop(done))));
        assert!(heard.recv().is_err());
    }
}
