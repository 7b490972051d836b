//! The threads of a tier that speaks to servers: an asynchronous runtime of its own.
//!
//! Nothing is started before the first [`spawn`](Runtime::spawn): a tier that nobody uses has no
//! threads, and opening one never does I/O. In a process that `fork` made the threads do not
//! exist and the runtime's locks may be held for ever: it is refused there, and left as it is
//! when it goes.
//!
//! Cost: a `spawn` is one lock, one `getpid` and one allocation.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime as Threads};

use super::NetworkError;
use crate::sync::Mutex;
use crate::tier::crew::PATIENCE;

/// See the module.
pub struct Runtime {
    name: String,
    threads: usize,
    owner: u32,
    state: Mutex<State>,
}

enum State {
    Idle,
    Running(Threads),
    Closed,
}

impl Runtime {
    /// A runtime that will have `threads` threads, for the tier `name`.
    pub fn new(name: &str, threads: usize) -> Self {
        Self {
            name: name.to_owned(),
            threads: threads.max(1),
            owner: std::process::id(),
            state: Mutex::new(State::Idle),
        }
    }

    /// Starts `work`, and the threads if it is the first.
    ///
    /// # Errors
    /// [`NetworkError::Forked`], [`NetworkError::Closed`], [`NetworkError::Threads`]; `work` is
    /// then dropped.
    pub fn spawn(
        &self,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), NetworkError> {
        if std::process::id() != self.owner {
            return Err(NetworkError::Forked(self.name.clone()));
        }
        let mut state = self.state.lock();
        if let State::Idle = *state {
            *state = State::Running(self.start()?);
        }
        match &*state {
            State::Running(threads) => drop(threads.spawn(work)),
            State::Idle | State::Closed => {
                // Outside the lock: what `work` owns may be a job, which reports when it goes.
                drop(state);
                return Err(NetworkError::Closed(self.name.clone()));
            }
        }
        Ok(())
    }

    fn start(&self) -> Result<Threads, NetworkError> {
        Builder::new_multi_thread()
            .worker_threads(self.threads)
            .max_blocking_threads(4)
            .thread_name(format!("kvtier-{}", self.name))
            .enable_all()
            .build()
            .map_err(|source| NetworkError::Threads { tier: self.name.clone(), source })
    }

    /// Drops all work where it waits, and joins the threads; those that do not come back within
    /// seconds are left behind. Not to be called by the work itself. Idempotent.
    pub fn close(&self) {
        self.close_within(PATIENCE);
    }

    fn close_within(&self, patience: Duration) {
        if std::process::id() != self.owner {
            // Its lock may be held by a thread that is not here.
            return;
        }
        let before = std::mem::replace(&mut *self.state.lock(), State::Closed);
        if let State::Running(threads) = before {
            threads.shutdown_timeout(patience);
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.close();
        if std::process::id() != self.owner {
            // To join threads that are not here would be to wait for ever.
            std::mem::forget(std::mem::replace(self.state.get_mut(), State::Closed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Instant;

    /// Counted by name: other tests have threads of their own.
    fn threads_named(name: &str) -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
        let named = |task: &std::io::Result<std::fs::DirEntry>| {
            let path = task.as_ref().expect("entry").path().join("comm");
            std::fs::read_to_string(path).is_ok_and(|comm| comm.trim() == name)
        };
        tasks.filter(named).count()
    }

    #[test]
    fn nothing_runs_before_the_first_use_and_nothing_after_close() {
        let runtime = Runtime::new("lazy", 2);
        assert_eq!(threads_named("kvtier-lazy"), 0);
        let (done, heard) = mpsc::channel();
        runtime.spawn(async move { done.send(()).expect("listening") }).expect("starts");
        heard.recv().expect("ran");
        // The thread that ran it has its name; the other may be about to get it.
        assert!((1..=2).contains(&threads_named("kvtier-lazy")));
        runtime.close();
        assert_eq!(threads_named("kvtier-lazy"), 0);
        let error = runtime.spawn(async {}).expect_err("closed");
        assert!(matches!(error, NetworkError::Closed(_)), "{error}");
    }

    #[test]
    fn close_drops_what_waits() {
        let runtime = Runtime::new("waits", 1);
        let (alive, dropped) = mpsc::channel::<()>();
        runtime
            .spawn(async move {
                let _alive = alive;
                std::future::pending::<()>().await;
            })
            .expect("starts");
        runtime.close();
        assert!(dropped.recv().is_err(), "and told nothing");
    }

    #[test]
    fn work_that_hangs_does_not_hold_close_up() {
        let runtime = Runtime::new("hangs", 1);
        let (begun, running) = mpsc::channel();
        let (gate, opened) = mpsc::channel::<()>();
        runtime
            .spawn(async move {
                begun.send(()).expect("listening");
                // What no task should do: block its thread. Ends when the test does.
                let _ = opened.recv();
            })
            .expect("starts");
        running.recv().expect("began");
        let start = Instant::now();
        runtime.close_within(Duration::from_millis(1));
        assert!(start.elapsed() < PATIENCE);
        drop(gate);
    }

    #[test]
    fn a_fork_refuses_it_and_can_drop_it() {
        let runtime = Runtime::new("forked", 1);
        runtime.spawn(async {}).expect("starts");
        // SAFETY: the child only spawns (which is refused before any lock), drops, and leaves by
        // `_exit`, so it touches no lock that another thread may have held.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = matches!(runtime.spawn(async {}), Err(NetworkError::Forked(_)));
            drop(runtime);
            // SAFETY: ends the child at once, without running the test harness in it.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above, and writes to a local.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "refused, and dropped without hanging");
        runtime.spawn(async {}).expect("the parent goes on");
    }
}
