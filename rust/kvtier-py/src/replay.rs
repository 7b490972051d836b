//! `Trace`: replays for Python.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvtier_core::index::{IndexError, PolicyKind};
use kvtier_core::replay::{self, TraceError};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{OrRaise, raise};
use crate::manager::SIGNAL_CHECK;

/// See `_kvtier.pyi`. Plain memory, so it may be used after `fork`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct Trace {
    inner: replay::Trace,
}

#[pymethods]
impl Trace {
    #[staticmethod]
    #[allow(clippy::needless_pass_by_value)] // what Python gives for a path is a new value
    fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let read = py.detach(|| {
            let file = File::open(&path)?;
            replay::Trace::read(BufReader::new(Interruptible { file, signals: Signals::new() }))
        });
        let inner = read.map_err(|error| match error {
            TraceError::Io(error) => unreadable(py, error, &path),
            error => raise(py, "ConfigError", format!("{}: {error}", path.display())),
        })?;
        Ok(Self { inner })
    }

    #[getter]
    fn requests(&self) -> usize {
        self.inner.requests()
    }

    #[getter]
    fn blocks(&self) -> usize {
        self.inner.accesses()
    }

    #[getter]
    fn distinct(&self, py: Python<'_>) -> usize {
        py.detach(|| self.inner.distinct())
    }

    fn replay<'py>(
        &self,
        py: Python<'py>,
        policy: &str,
        capacity: u64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let policy: PolicyKind = policy.parse().or_raise(py)?;
        let slots =
            u32::try_from(capacity).map_err(|_| IndexError::Capacity(capacity)).or_raise(py)?;
        let mut signals = Signals::new();
        let outcome = py
            .detach(|| replay::replay_while(&self.inner, policy, slots, || signals.quiet()))
            .or_raise(py)?;
        signals.raised()?;
        let dict = PyDict::new(py);
        dict.set_item("requests", outcome.requests)?;
        dict.set_item("blocks", outcome.accesses)?;
        dict.set_item("block_hits", outcome.block_hits)?;
        dict.set_item("prefix_hits", outcome.prefix_hits)?;
        dict.set_item("evictions", outcome.evictions)?;
        dict.set_item("seconds", outcome.elapsed.as_secs_f64())?;
        Ok(dict)
    }

    fn optimum(&self, py: Python<'_>, capacity: usize) -> PyResult<u64> {
        let mut signals = Signals::new();
        let hits = py.detach(|| replay::optimum_while(&self.inner, capacity, || signals.quiet()));
        signals.raised().map(|()| hits)
    }

    fn __repr__(&self) -> String {
        format!("Trace(requests={}, blocks={})", self.inner.requests(), self.inner.accesses())
    }
}

/// An `OSError` with the path in it; a Ctrl-C while reading stays what it is.
fn unreadable(py: Python<'_>, error: io::Error, path: &Path) -> PyErr {
    let Some(code) = error.raw_os_error() else {
        return error.into();
    };
    let text = py.import("os").and_then(|os| os.getattr("strerror")?.call1((code,)));
    match text {
        Ok(text) => PyOSError::new_err((code, text.unbind(), path.as_os_str().to_owned())),
        Err(error) => error,
    }
}

/// Looks for Ctrl-C now and then, from outside the interpreter.
struct Signals {
    /// Steps since the clock was read: reading it costs more than a step.
    steps: u32,
    next: Instant,
    raised: Option<PyErr>,
}

/// So many steps take far less than [`SIGNAL_CHECK`].
const STEPS: u32 = 64;

impl Signals {
    fn new() -> Self {
        Self { steps: 0, next: Instant::now() + SIGNAL_CHECK, raised: None }
    }

    /// Whether no signal handler raised.
    fn quiet(&mut self) -> bool {
        self.steps += 1;
        if self.raised.is_none() && self.steps >= STEPS {
            self.steps = 0;
            let now = Instant::now();
            if now >= self.next {
                self.next = now + SIGNAL_CHECK;
                self.look();
            }
        }
        self.raised.is_none()
    }

    /// Runs the handlers of signals that came.
    fn look(&mut self) {
        self.raised = Python::attach(|py| py.check_signals().err());
    }

    fn raised(self) -> PyResult<()> {
        self.raised.map_or(Ok(()), Err)
    }
}

/// A file whose reading Ctrl-C ends.
struct Interruptible {
    file: File,
    signals: Signals,
}

impl Read for Interruptible {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = if self.signals.quiet() { self.file.read(into) } else { Ok(0) };
        // A read that waits, from a pipe, is ended by the signal itself.
        if read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            self.signals.look();
        }
        self.signals.raised.take().map_or(read, |raised| Err(io::Error::other(raised)))
    }
}
