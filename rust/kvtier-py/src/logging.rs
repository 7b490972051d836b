//! Warnings and errors of the core, on their way to Python's `logging`.
//!
//! A line is queued by whoever logs it, and a thread of Python (`kvtier/_logs.py`) hands it to
//! the logger "kvtier": so no worker, and nobody who holds a lock, ever waits for a handler or
//! for the interpreter. Bounded: when [`MOST_LINES`] wait, further ones are counted and dropped.

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

use crate::fork::Home;

/// Lines that wait for the thread at most.
const MOST_LINES: usize = 1 << 10;

/// The lines of this process. What `log` calls has no other place to find them; a queue is made
/// once in a process (and again in a fork of it that makes a manager), and never freed.
static LINES: AtomicPtr<Lines> = AtomicPtr::new(ptr::null_mut());

struct Lines {
    home: Home,
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<(Level, String)>,
    passed_over: u64,
    closed: bool,
}

impl Lines {
    /// Those of this process, if there are.
    fn here() -> Option<&'static Self> {
        // SAFETY: null, or a `Box` that `LogLines::open` leaked and nobody ever frees.
        let lines = unsafe { LINES.load(Ordering::Acquire).as_ref() };
        lines.filter(|lines| lines.home.is_here())
    }
}

struct Bridge;

impl Log for Bridge {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record<'_>) {
        let Some(lines) = Lines::here().filter(|_| self.enabled(record.metadata())) else {
            return;
        };
        let text = record.args().to_string();
        let mut waiting = lines.waiting.lock();
        if waiting.closed {
            return;
        }
        if waiting.lines.len() < MOST_LINES {
            waiting.lines.push_back((record.level(), text));
        } else {
            waiting.passed_over += 1;
        }
        drop(waiting);
        lines.arrived.notify_one();
    }

    fn flush(&self) {}
}

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct LogLines(&'static Lines);

#[pymethods]
impl LogLines {
    /// The lines of this process; `None` if somebody has them already.
    #[staticmethod]
    fn open() -> Option<Self> {
        if Lines::here().is_some() {
            return None;
        }
        let lines: &'static Lines = Box::leak(Box::new(Lines {
            home: Home::here(),
            waiting: Mutex::default(),
            arrived: Condvar::new(),
        }));
        LINES.store(ptr::from_ref(lines).cast_mut(), Ordering::Release);
        // Refused where it was set before: by this very function, before a fork.
        let _ = log::set_logger(&Bridge);
        log::set_max_level(LevelFilter::Warn);
        Some(Self(lines))
    }

    /// Waits for a line: its level, as a number of `logging`, and its text. `None` after `close`,
    /// when all were given out.
    fn next(&self, py: Python<'_>) -> Option<(u8, String)> {
        py.detach(|| {
            let mut waiting = self.0.waiting.lock();
            loop {
                if let Some((level, text)) = waiting.lines.pop_front() {
                    return Some((if level == Level::Error { 40 } else { 30 }, text));
                }
                if waiting.passed_over > 0 {
                    let count = std::mem::take(&mut waiting.passed_over);
                    return Some((30, format!("{count} lines were dropped: too many to log")));
                }
                if waiting.closed {
                    return None;
                }
                self.0.arrived.wait(&mut waiting);
            }
        })
    }

    /// Takes no more lines.
    fn close(&self) {
        // The locks of another process can not be trusted.
        if !self.0.home.is_here() {
            return;
        }
        self.0.waiting.lock().closed = true;
        self.0.arrived.notify_one();
    }
}
