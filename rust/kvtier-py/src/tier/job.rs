//! A job as a Python tier sees it, and the views of its slots.
//!
//! ```text
//! TierJob --> Handle --> Hold -------------------> the core's job
//!               `-> memoryviews --> Chunk --> Hold
//! Lent - - - - - - - - - ^ (weakly)
//! ```
//!
//! A [`Hold`] is shared by the job and by every [`Chunk`], the owner of a view's bytes. When the
//! last of them is gone, nothing of Python can touch the slots any more, and only then the core's
//! job can resolve: so a slot can not be written after it was given to somebody else, nor after
//! its checksum was compared.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use kvtier_core::checksum::Checksum;
use kvtier_core::tier::{Job, LoadJob, StoreJob};
use parking_lot::Mutex;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMemoryView, PyWeakrefMethods, PyWeakrefReference};

use super::shared::Shared;
use crate::convert::key_list;

/// A job of the core, of either kind.
#[derive(Clone)]
pub(super) enum AnyJob {
    Store(StoreJob),
    Load(LoadJob),
}

impl Deref for AnyJob {
    type Target = Job;
    fn deref(&self) -> &Job {
        match self {
            Self::Store(job) => job,
            Self::Load(job) => job,
        }
    }
}

impl AnyJob {
    /// Name of the tier's method that takes it.
    pub(super) fn method(&self) -> &'static str {
        match self {
            Self::Store(_) => "submit_store",
            Self::Load(_) => "submit_load",
        }
    }
}

/// Keeps a job's slots for as long as something of Python may touch them.
pub(super) struct Hold {
    job: ManuallyDrop<AnyJob>,
    shared: Arc<Shared>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // In a process made by fork the locks can not be trusted: the copy leaks.
        if self.shared.is_home() {
            let id = self.job.id();
            // SAFETY: dropped once, here, and never used again.
            unsafe { ManuallyDrop::drop(&mut self.job) };
            self.shared.let_go(id);
        }
    }
}

/// What a [`TierJob`] holds of its job until it was reported.
struct Handle {
    hold: Arc<Hold>,
    chunks: Py<PyList>,
}

/// What was lent to the tier, and is taken back when it has reported the job. Keeps none of it.
pub(super) struct Lent {
    views: Vec<Py<PyWeakrefReference>>,
    handle: Weak<Mutex<Option<Handle>>>,
}

impl Lent {
    /// Releases the views that were given to the tier; those that it made itself, by slicing or
    /// with numpy, stay until it drops them.
    pub(super) fn take_back(&self, py: Python<'_>) -> PyResult<()> {
        for view in &self.views {
            let Some(view) = view.bind(py).upgrade() else {
                continue;
            };
            match view.call_method0("release") {
                // Something still looks through it.
                Err(error) if error.is_instance_of::<PyBufferError>(py) => {}
                done => drop(done?),
            }
        }
        let handle = self.handle.upgrade().and_then(|handle| handle.lock().take());
        handle.map_or(Ok(()), |handle| handle.chunks.call_method0(py, "clear").map(drop))
    }
}

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct TierJob {
    #[pyo3(get)]
    id: u64,
    #[pyo3(get)]
    request: u64,
    #[pyo3(get)]
    keys: Py<PyList>,
    #[pyo3(get)]
    chunks: Py<PyList>,
    #[pyo3(get)]
    checksums: Py<PyList>,
    #[pyo3(get)]
    slots: Py<PyList>,
    handle: Arc<Mutex<Option<Handle>>>,
}

#[pymethods]
impl TierJob {
    #[getter]
    fn cancelled(&self) -> bool {
        // What was reported is not waited for either.
        self.handle.lock().as_ref().is_none_or(|handle| handle.hold.job.is_cancelled())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!(
            "TierJob(id={}, request={}, keys={})",
            self.id,
            self.request,
            self.keys.bind(py).len()
        )
    }
}

impl TierJob {
    /// The job for Python, and what was lent with it.
    pub(super) fn new(
        py: Python<'_>,
        job: &AnyJob,
        shared: &Arc<Shared>,
    ) -> PyResult<(Self, Arc<Lent>)> {
        let (id, request) = (job.id(), job.request());
        let hold =
            Arc::new(Hold { job: ManuallyDrop::new(job.clone()), shared: Arc::clone(shared) });
        let list = PyList::empty(py);
        let mut views = Vec::with_capacity(job.len());
        for index in 0..job.len() {
            let chunk = Bound::new(py, Chunk { index, hold: Arc::clone(&hold) })?;
            let view = PyMemoryView::from(chunk.as_any())?;
            views.push(PyWeakrefReference::new(&view)?.unbind());
            list.append(view)?;
        }
        let checksums = match job {
            AnyJob::Store(job) => PyList::new(py, (0..job.len()).map(|at| job.checksum(at).0))?,
            AnyJob::Load(_) => PyList::empty(py),
        };
        let checksums = checksums.unbind();
        let slots = PyList::new(py, &job.chunks().slots)?.unbind();
        let keys = key_list(py, job.chunks().keys.iter())?.unbind();
        let chunks = list.unbind();
        let handle = Handle { hold, chunks: chunks.clone_ref(py) };
        let handle = Arc::new(Mutex::new(Some(handle)));
        let lent = Arc::new(Lent { views, handle: Arc::downgrade(&handle) });
        Ok((Self { id, request, keys, chunks, checksums, slots, handle }, lent))
    }
}

/// See `_kvtier.pyi`.
#[pyfunction]
pub(crate) fn chunk_checksum(key: &[u8], chunk: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = chunk.py();
    let buffer = PyBuffer::<u8>::get(chunk)?;
    let start = buffer.as_slice_ptr().ok_or_else(|| {
        PyBufferError::new_err("expected the bytes of a chunk, contiguous, of one byte each")
    })?;
    let bytes = ReadPtr(start);
    Ok(py.detach(move || {
        let bytes = bytes;
        // SAFETY: `buffer` keeps the memory; who asks for its checksum lets nobody write it.
        Checksum::of_chunk(key, unsafe { bytes.0.as_ref() }).0
    }))
}

/// Bytes that are read without the interpreter.
struct ReadPtr(NonNull<[u8]>);

// SAFETY: it is only read, by one thread, while the buffer that it is of lives.
unsafe impl Send for ReadPtr {}

/// Owner of the bytes of one view; a tier only meets it as `memoryview.obj`.
#[pyclass(frozen, module = "kvtier._kvtier")]
struct Chunk {
    index: usize,
    hold: Arc<Hold>,
}

#[pymethods]
impl Chunk {
    /// # Safety
    /// Called by the interpreter with a `Py_buffer` to fill.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let job = &this.hold.job;
        let readonly = matches!(**job, AnyJob::Store(_));
        if readonly && flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("a chunk that is stored can only be read"));
        }
        let region = job.region();
        let start = region.slot_ptr(job.chunks().slots[this.index]).cast::<c_void>();
        let bytes = region.slot_bytes().cast_signed();
        // SAFETY: `view` is the interpreter's to fill. The slot is the job's, to read (store) or
        // to write (load), until the job resolves, and `slf`, which the view owns, keeps it from
        // that. One dimension of bytes, filled in by the interpreter's own function.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, c_int::from(readonly), flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
