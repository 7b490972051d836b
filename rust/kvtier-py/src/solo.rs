//! `SoloTier`: one tier over memory of somebody else's manager.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use kvtier_core::clock::Clock;
use kvtier_core::manager::{self, Direction, Lookup, SoloError};
use kvtier_core::region::Region;
use kvtier_core::tier::Presence;
use parking_lot::Mutex;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::convert::{self, deadline, key_list};
use crate::error::{OrRaise, raise};
use crate::fork::Home;
use crate::manager::{SIGNAL_CHECK, event_word};
use crate::tier::open_solo;

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct SoloTier {
    /// Gone once it was shut down and no job uses the memory any more.
    inner: Mutex<Option<Arc<manager::SoloTier>>>,
    medium: &'static str,
    locality: &'static str,
    home: Home,
}

/// A job that ended: its number, the positions of chunks that were not moved, bytes, seconds.
type Ended = (u64, Vec<usize>, u64, f64);

impl SoloTier {
    fn inner(&self, py: Python<'_>) -> PyResult<Arc<manager::SoloTier>> {
        self.home.check(py, "tier")?;
        self.inner.lock().clone().ok_or(SoloError::Closed).or_raise(py)
    }

    fn submit(
        &self,
        direction: Direction,
        job: u64,
        request: u64,
        keys: &Bound<'_, PyAny>,
        slots: Vec<u32>,
    ) -> PyResult<()> {
        let py = keys.py();
        let inner = self.inner(py)?;
        let keys = convert::keys(keys, inner.key_bytes())?;
        // SAFETY: the caller in Python, a manager that keeps pins of its own, promises by calling
        // this that the slots are the job's until `finished` gave its end (`_kvtier.pyi`).
        py.detach(|| unsafe { inner.submit(direction, job, request, keys, slots) }).or_raise(py)
    }
}

#[pymethods]
impl SoloTier {
    #[new]
    #[pyo3(signature = (memory, tier, *, key_bytes, namespace = "", events = false))]
    fn new(
        memory: &Bound<'_, PyAny>,
        tier: &Bound<'_, PyAny>,
        key_bytes: usize,
        namespace: &str,
        events: bool,
    ) -> PyResult<Self> {
        let py = memory.py();
        let region = lent(memory)?;
        let inner = open_solo(py, tier, &region, key_bytes, namespace, |slot| {
            manager::SoloTier::new(Arc::clone(&region), slot, key_bytes, events, Clock::system())
        })?;
        let (medium, locality) = (inner.medium().as_str(), inner.locality().as_str());
        let inner = Mutex::new(Some(Arc::new(inner)));
        Ok(Self { inner, medium, locality, home: Home::here() })
    }

    #[getter]
    fn medium(&self) -> &'static str {
        self.medium
    }

    #[getter]
    fn locality(&self) -> &'static str {
        self.locality
    }

    fn lookup_key(&self, py: Python<'_>, request: u64, key: &[u8]) -> PyResult<u8> {
        let answer = match self.inner(py)?.lookup(request, key).or_raise(py)? {
            Presence::Miss => Lookup::Miss,
            Presence::Hit => Lookup::Hit,
            Presence::Retry => Lookup::Retry,
        };
        Ok(answer as u8)
    }

    fn submit_store(
        &self,
        job: u64,
        request: u64,
        keys: &Bound<'_, PyAny>,
        slots: Vec<u32>,
    ) -> PyResult<()> {
        self.submit(Direction::Store, job, request, keys, slots)
    }

    fn submit_load(
        &self,
        job: u64,
        request: u64,
        keys: &Bound<'_, PyAny>,
        slots: Vec<u32>,
    ) -> PyResult<()> {
        self.submit(Direction::Load, job, request, keys, slots)
    }

    fn finished(&self, py: Python<'_>) -> PyResult<Vec<Ended>> {
        let inner = self.inner(py)?;
        let ended = py.detach(|| inner.finished());
        let lost = |job: &manager::Ended| {
            let outcomes = job.outcomes.iter().enumerate();
            outcomes.filter(|(_, outcome)| outcome.is_err()).map(|(at, _)| at).collect()
        };
        Ok(ended
            .iter()
            .map(|job| (job.job, lost(job), job.bytes, job.busy.as_secs_f64()))
            .collect())
    }

    fn touch(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = keys.py();
        let inner = self.inner(py)?;
        let keys = convert::keys(keys, inner.key_bytes())?;
        py.detach(|| inner.touch(&keys));
        Ok(())
    }

    fn finish_request(&self, py: Python<'_>, request: u64) -> PyResult<()> {
        self.inner(py)?.finish_request(request);
        Ok(())
    }

    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let inner = self.inner(py)?;
        let end = deadline(py, timeout)?;
        loop {
            let slice = end.min(Instant::now() + SIGNAL_CHECK);
            if py.detach(|| inner.wait_until(slice)) {
                return Ok(true);
            }
            if slice == end {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for event in self.inner(py)?.take_events() {
            let keys = key_list(py, event.keys.iter().map(AsRef::as_ref))?;
            list.append((event_word(event.kind), keys))?;
        }
        Ok(list)
    }

    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check(py, "tier")?;
        let Some(inner) = self.inner.lock().clone() else {
            return Ok(());
        };
        let running = py.detach(|| inner.shutdown());
        if running == 0 {
            // The memory goes back to its owner.
            self.inner.lock().take();
            return Ok(());
        }
        let message = format!(
            "{running} jobs did not come back from the tier: keep its memory, they may still use it"
        );
        Err(raise(py, "TierError", message))
    }
}

impl Drop for SoloTier {
    fn drop(&mut self) {
        // After fork there is nothing to join and the locks cannot be trusted: the copy leaks.
        let inner = self.inner.get_mut().take();
        if self.home.is_here() {
            Python::attach(|py| py.detach(|| drop(inner)));
        } else {
            std::mem::forget(inner);
        }
    }
}

/// A region over a buffer of shape (slots, slot bytes), which lives as long as the region.
fn lent(memory: &Bound<'_, PyAny>) -> PyResult<Arc<Region>> {
    let py = memory.py();
    let buffer = PyUntypedBuffer::get(memory)?;
    let &[slots, row] = buffer.shape() else {
        let found = buffer.dimensions();
        let message = format!("expected memory of shape (slots, slot bytes), found {found} axes");
        return Err(PyBufferError::new_err(message));
    };
    if buffer.readonly() || !buffer.is_c_contiguous() || buffer.item_size() != 1 {
        return Err(PyBufferError::new_err("expected memory of bytes, contiguous and writable"));
    }
    let start = NonNull::new(buffer.buf_ptr().cast())
        .ok_or_else(|| PyBufferError::new_err("expected memory, found none"))?;
    let slots = u32::try_from(slots).map_err(|_| {
        raise(py, "ConfigError", format!("{slots} slots are too many: use larger chunks"))
    })?;
    // SAFETY: the buffer keeps its memory mapped, and was asked for writable.
    unsafe { Region::lent(start, slots, row, Box::new(buffer)) }.or_raise(py)
}
