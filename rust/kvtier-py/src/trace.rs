//! `TraceFile`: the core's writer of traces, for what Python moves.

use std::mem::ManuallyDrop;
use std::time::Duration;

use kvtier_core::trace::{Name, Trace};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::fork::Home;

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct TraceFile {
    inner: ManuallyDrop<Trace>,
    home: Home,
}

#[pymethods]
impl TraceFile {
    #[staticmethod]
    fn open(py: Python<'_>) -> Option<Self> {
        let inner = ManuallyDrop::new(py.detach(Trace::from_environment)?);
        Some(Self { inner, home: Home::here() })
    }

    #[getter]
    fn number(&self) -> u64 {
        self.inner.number()
    }

    fn name_track(&self, track: u64, name: &str) {
        if self.home.is_here() {
            self.inner.name_track(track, &Name::new(name));
        }
    }

    #[pyo3(signature = (track, name, began, seconds, *, job, bytes))]
    fn span(
        &self,
        track: u64,
        name: &str,
        began: f64,
        seconds: f64,
        job: u64,
        bytes: u64,
    ) -> PyResult<()> {
        let time = |seconds: f64| {
            Duration::try_from_secs_f64(seconds)
                .map_err(|_| PyValueError::new_err(format!("{seconds} seconds are no time")))
        };
        let (began, took) = (time(began)?, time(seconds)?);
        if self.home.is_here() {
            let arguments = [("job", job), ("bytes", bytes)];
            self.inner.span_at(track, &Name::new(name), began, took, &arguments);
        }
        Ok(())
    }

    fn flush(&self, py: Python<'_>) {
        if self.home.is_here() {
            py.detach(|| self.inner.flush());
        }
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        // After fork what was noted is the other process's, and its lock can not be trusted.
        if self.home.is_here() {
            // SAFETY: dropped once, here, and never used again.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}
