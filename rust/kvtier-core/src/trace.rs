//! A trace of what moves when, for Perfetto (<https://ui.perfetto.dev>) and `chrome://tracing`.
//!
//! [`FILE_VARIABLE`] names the file; without it there is no trace, and what would be traced costs
//! one comparison. The file is a JSON array of events (the "Trace Event Format"), one a line. Its
//! end is left open, as the format allows, so it is valid however the process ends.
//!
//! Several writers share one file, whether in one process or in many: a scheduler and its workers are
//! seen on one time line. Each appends whole lines, many with one `write`, so lines do not mix.
//! A file that is there is added to.
//!
//! # Promises
//! - Bounded: a writer holds [`MAX_EVENTS`] in memory, and the trace tells how many it dropped; it
//!   writes [`MAX_BYTES`] at most, and then logs that it ends.
//! - An event is noted in memory, under a leaf lock. Files are written by [`Trace::flush`] only, without a
//!   lock; a manager does so at the end of a step.
//! - A file that can not be written ends the trace with a warning, and nothing else.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The environment variable with the file to write.
pub const FILE_VARIABLE: &str = "KVTIER_TRACE";
/// Events that a writer holds until they are flushed.
pub const MAX_EVENTS: usize = 1 << 14;
/// Bytes that a writer adds to the file: some 400,000 events.
pub const MAX_BYTES: u64 = 64 << 20;

/// Arguments that an event has at most.
const MAX_ARGUMENTS: usize = 4;

/// Why a trace can not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A file of something else, which is left alone.
    #[error("{path} is no trace: name a new file in {FILE_VARIABLE}", path = path.display())]
    NoTrace {
        /// The file.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
}

/// A name, as JSON has it: escaped once, shared by all its events.
#[derive(Debug, Clone)]
pub struct Name(Arc<str>);

impl Name {
    /// A name to be shown.
    pub fn new(name: &str) -> Self {
        Self(serde_json::Value::from(name).to_string().into())
    }
}

/// What an event says beside its name, by name.
pub type Arguments<'a> = &'a [(&'static str, u64)];

#[derive(Debug, Clone)]
struct Event {
    phase: Phase,
    name: Name,
    /// On the system's monotonic clock, in nanoseconds.
    at: u64,
    arguments: [(&'static str, u64); MAX_ARGUMENTS],
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// Something that took so many nanoseconds, on a track of things that nest.
    Span { took: u64, track: u64 },
    /// Something began that may overlap with others, with a number.
    Begin { number: u64 },
    /// It ended.
    End { number: u64 },
    /// The name of a track.
    Track { track: u64 },
}

#[derive(Debug, Default)]
struct Events {
    waiting: Vec<Event>,
    dropped: u64,
}

/// A writer of a trace; see the module.
#[derive(Debug)]
pub struct Trace {
    path: PathBuf,
    file: File,
    /// One moment, on both clocks.
    origin: (Instant, u64),
    events: Mutex<Events>,
    /// Bytes that may still be written; none after an error.
    left: AtomicU64,
}

impl Trace {
    /// A writer of the file that the environment names; `None`, and at most a warning, when there
    /// is none to be written.
    pub fn from_environment() -> Option<Self> {
        let path = std::env::var_os(FILE_VARIABLE).filter(|path| path != OsStr::new(""))?;
        Self::open(Path::new(&path))
            .inspect_err(|error| log::warn!("no trace is written: {error}"))
            .ok()
    }

    /// A writer of `path`, which is made, or added to if it is a trace.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        Self::with_limit(path, MAX_BYTES)
    }

    fn with_limit(path: &Path, bytes: u64) -> Result<Self, TraceError> {
        let io = |what| {
            let path = path.to_owned();
            move |source| TraceError::Io { what, path, source }
        };
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)
            .map_err(io("opening"))?;
        // Of several writers one begins the array.
        file.lock().map_err(io("locking"))?;
        let mut first = [0];
        match file.read(&mut first).map_err(io("reading"))? {
            0 => file.write_all(b"[\n").map_err(io("writing"))?,
            _ if first == *b"[" => {}
            _ => return Err(TraceError::NoTrace { path: path.to_owned() }),
        }
        file.unlock().map_err(io("unlocking"))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            origin: (Instant::now(), monotonic_nanoseconds()),
            events: Mutex::default(),
            left: AtomicU64::new(bytes),
        })
    }

    /// A number that no other writer of this process has while this one is open.
    pub fn number(&self) -> u64 {
        self.file.as_raw_fd().unsigned_abs().into()
    }

    /// Names a track of spans.
    pub fn name_track(&self, track: u64, name: &Name) {
        self.note(Phase::Track { track }, name, 0, &[]);
    }

    /// Notes something that took from `began` until `ended`. Spans of a track must nest.
    pub fn span(
        &self,
        track: u64,
        name: &Name,
        began: Instant,
        ended: Instant,
        arguments: Arguments<'_>,
    ) {
        let took = ended.saturating_duration_since(began);
        let at = Duration::from_nanos(self.nanoseconds(began));
        self.span_at(track, name, at, took, arguments);
    }

    /// As [`Trace::span`], with the time on the system's monotonic clock.
    pub fn span_at(
        &self,
        track: u64,
        name: &Name,
        began: Duration,
        took: Duration,
        arguments: Arguments<'_>,
    ) {
        let took = took.as_nanos() as u64;
        self.note(Phase::Span { took, track }, name, began.as_nanos() as u64, arguments);
    }

    /// Notes that something began, by a number that no other thing of its name has meanwhile.
    pub fn begin(&self, number: u64, name: &Name, at: Instant, arguments: Arguments<'_>) {
        self.note(Phase::Begin { number }, name, self.nanoseconds(at), arguments);
    }

    /// Notes that it ended.
    pub fn end(&self, number: u64, name: &Name, at: Instant, arguments: Arguments<'_>) {
        self.note(Phase::End { number }, name, self.nanoseconds(at), arguments);
    }

    fn note(&self, phase: Phase, name: &Name, at: u64, given: Arguments<'_>) {
        debug_assert!(given.len() <= MAX_ARGUMENTS);
        let mut arguments = [("", 0); MAX_ARGUMENTS];
        for (argument, &given) in arguments.iter_mut().zip(given) {
            *argument = given;
        }
        let mut events = self.events.lock();
        if events.waiting.len() < MAX_EVENTS {
            events.waiting.push(Event { phase, name: name.clone(), at, arguments });
        } else {
            events.dropped += 1;
        }
    }

    /// Writes what was noted.
    pub fn flush(&self) {
        let Events { waiting, dropped } = std::mem::take(&mut *self.events.lock());
        if waiting.is_empty() || self.left.load(Ordering::Relaxed) == 0 {
            return;
        }
        let process = std::process::id();
        let mut lines = String::with_capacity(waiting.len() * 160);
        for event in &waiting {
            event.write(process, &mut lines);
        }
        if dropped > 0 {
            let name = Name::new("events were dropped: too many in a step");
            let at = waiting[waiting.len() - 1].at;
            let phase = Phase::Span { took: 0, track: 0 };
            Event::new(phase, name, at, ("count", dropped)).write(process, &mut lines);
        }
        let length = lines.len() as u64;
        let take = |left: u64| Some(left.saturating_sub(length));
        let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        if left.is_ok_and(|left| left < length) {
            return self.ended(&format!("{MAX_BYTES} bytes were written"));
        }
        if let Err(error) = (&self.file).write_all(lines.as_bytes()) {
            self.left.store(0, Ordering::Relaxed);
            self.ended(&error.to_string());
        }
    }

    fn ended(&self, why: &str) {
        log::warn!("the trace ends here: {}: {why}", self.path.display());
    }

    fn nanoseconds(&self, at: Instant) -> u64 {
        let (instant, nanoseconds) = self.origin;
        let after = at.saturating_duration_since(instant).as_nanos() as u64;
        let before = instant.saturating_duration_since(at).as_nanos() as u64;
        (nanoseconds + after).saturating_sub(before)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.flush();
    }
}

impl Event {
    fn new(phase: Phase, name: Name, at: u64, argument: (&'static str, u64)) -> Self {
        let mut arguments = [("", 0); MAX_ARGUMENTS];
        arguments[0] = argument;
        Self { phase, name, at, arguments }
    }

    /// Appends its line.
    fn write(&self, process: u32, to: &mut String) {
        let Name(name) = &self.name;
        let at = Microseconds(self.at);
        // Writing into a string can not fail.
        let _ = match self.phase {
            Phase::Span { took, track } => write!(
                to,
                r#"{{"ph":"X","pid":{process},"tid":{track},"name":{name},"ts":{at},"dur":{},"args":{{"#,
                Microseconds(took)
            ),
            Phase::Begin { number } | Phase::End { number } => {
                let phase = if matches!(self.phase, Phase::Begin { .. }) { "b" } else { "e" };
                write!(
                    to,
                    r#"{{"ph":"{phase}","pid":{process},"tid":0,"cat":"job","id":{number},"name":{name},"ts":{at},"args":{{"#
                )
            }
            Phase::Track { track } => write!(
                to,
                r#"{{"ph":"M","pid":{process},"tid":{track},"name":"thread_name","args":{{"name":{name}"#
            ),
        };
        let given = self.arguments.iter().filter(|(name, _)| !name.is_empty());
        for (position, (name, value)) in given.enumerate() {
            let comma = if position > 0 { "," } else { "" };
            let _ = write!(to, r#"{comma}"{name}":{value}"#);
        }
        to.push_str("}},\n");
    }
}

/// Nanoseconds, shown as the format has times.
struct Microseconds(u64);

impl std::fmt::Display for Microseconds {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

fn monotonic_nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests;
