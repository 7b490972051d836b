//! The threads of a tier that blocks on its medium: each takes a task, does it, takes the next.
//!
//! [`Lanes`] says which task is next. A panic in a task is caught: the task's job is dropped,
//! which reports its chunk as lost, and the worker goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::crew::{Crew, PATIENCE};
use super::lanes::{Lane, Lanes};
use crate::sync::{Condvar, Mutex};

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    tasks: Lanes<Task>,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

/// A tier's threads.
pub(super) struct Workers {
    shared: Arc<Shared>,
    crew: Crew,
}

impl Workers {
    /// Starts `threads` threads that call themselves `name`.
    pub(super) fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let workers = Self { shared: Arc::default(), crew: Crew::default() };
        for number in 0..threads.max(1) {
            let shared = Arc::clone(&workers.shared);
            workers.crew.start(format!("kvtier-{name}-{number}"), move || work(&shared))?;
        }
        Ok(workers)
    }

    /// Queues tasks; drops them after `close`.
    pub(super) fn queue(&self, lane: Lane, tasks: impl Iterator<Item = Task>) {
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            drop(queue);
            tasks.for_each(drop);
            return;
        }
        queue.tasks.extend(lane, tasks);
        drop(queue);
        self.shared.wake.notify_all();
    }

    /// Drops what is queued, waits for what runs, joins; false if a worker is still stuck in its
    /// task after [`PATIENCE`]. Such a one is left to itself: what it uses lives as long as it
    /// does. Idempotent.
    pub(super) fn close(&self) -> bool {
        self.close_within(PATIENCE)
    }

    fn close_within(&self, patience: Duration) -> bool {
        let queued = {
            let mut queue = self.shared.queue.lock();
            queue.closed = true;
            std::mem::take(&mut queue.tasks)
        };
        // Outside the lock: dropping a task reports its job.
        drop(queued);
        self.shared.wake.notify_all();
        self.crew.end_within(patience)
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
                if let Some(task) = queue.tasks.pop() {
                    break task;
                }
                if queue.closed {
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
    use crate::tier::lanes::LOADS_IN_A_ROW;
    use std::sync::mpsc;

    fn boxed(task: impl FnOnce() + Send + 'static) -> Task {
        Box::new(task)
    }

    #[test]
    fn tasks_run_in_the_order_of_the_lanes() {
        let workers = Workers::start("test", 1).expect("thread");
        let (done, order) = mpsc::channel();
        let (gate, opened) = mpsc::channel::<()>();
        // Holds the only worker until everything is queued.
        workers.queue(Lane::Load, std::iter::once(boxed(move || opened.recv().expect("gate"))));
        let send = |what: &'static str| {
            let done = done.clone();
            boxed(move || done.send(what).expect("listening"))
        };
        workers.queue(Lane::Store, (0..2).map(|_| send("store")));
        workers.queue(Lane::Load, (0..10).map(|_| send("load")));
        gate.send(()).expect("worker waits");
        let order: Vec<_> = order.iter().take(12).collect();
        let first = order.iter().position(|&what| what == "store").expect("stores ran");
        assert_eq!(first, LOADS_IN_A_ROW as usize - 1, "{order:?}");
    }

    #[test]
    fn a_panic_does_not_end_the_worker() {
        let workers = Workers::start("test", 1).expect("thread");
        let (done, heard) = mpsc::channel();
        workers.queue(Lane::Load, std::iter::once(boxed(|| panic!("planted"))));
        workers.queue(Lane::Load, std::iter::once(boxed(move || done.send(()).expect("heard"))));
        heard.recv().expect("the worker lives");
    }

    #[test]
    fn a_worker_that_is_stuck_does_not_hold_close_up() {
        let workers = Workers::start("test", 2).expect("threads");
        let (begun, running) = mpsc::channel();
        let (gate, opened) = mpsc::channel::<()>();
        workers.queue(
            Lane::Load,
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
        workers.queue(Lane::Store, std::iter::once(boxed(move || drop(done))));
        assert!(heard.recv().is_err());
    }
}
