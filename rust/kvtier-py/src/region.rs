//! `Region`: the mapping as a buffer of Python.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use kvtier_core::region::{self, RegionKind};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::error::{OrRaise, raise};

/// See `_kvtier.pyi`. A region is plain shared memory, so it may be used after `fork`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct Region {
    inner: Arc<region::Region>,
    /// Kept here because buffers point at them.
    shape: [isize; 2],
    strides: [isize; 2],
}

impl Region {
    fn wrap(inner: Arc<region::Region>) -> Self {
        let (slots, row) = (inner.slots() as usize, inner.slot_bytes());
        Self {
            inner,
            shape: [slots, row].map(usize::cast_signed),
            strides: [row, 1].map(usize::cast_signed),
        }
    }

    /// All of it as a `memoryview` that can only be read.
    pub(crate) fn view(py: Python<'_>, region: &Arc<region::Region>) -> PyResult<Py<PyAny>> {
        let region = Bound::new(py, Self::wrap(Arc::clone(region)))?;
        let view = PyMemoryView::from(region.as_any())?;
        Ok(view.call_method0("toreadonly")?.unbind())
    }

    pub(crate) fn shared(&self) -> &Arc<region::Region> {
        &self.inner
    }
}

#[pymethods]
impl Region {
    #[new]
    #[pyo3(signature = (slots, slot_bytes, *, kind = "memfd", prefault_threads = 0))]
    fn new(
        py: Python<'_>,
        slots: u32,
        slot_bytes: usize,
        kind: &str,
        prefault_threads: usize,
    ) -> PyResult<Self> {
        let kind = match kind {
            "memfd" => RegionKind::Memfd,
            "anonymous" => RegionKind::Anonymous,
            _ => {
                let message = format!("kind = {kind:?} is unknown: use \"memfd\" or \"anonymous\"");
                return Err(raise(py, "ConfigError", message));
            }
        };
        let made = py.detach(|| {
            let region = region::Region::new(slots, slot_bytes, kind)?;
            if prefault_threads > 0 {
                region.prefault(prefault_threads);
            }
            Ok::<_, region::RegionError>(region)
        });
        made.map(Self::wrap).or_raise(py)
    }

    #[staticmethod]
    fn attach(py: Python<'_>, name: &str) -> PyResult<Self> {
        region::Region::attach(name).map(Self::wrap).or_raise(py)
    }

    #[getter]
    fn name(&self) -> Option<String> {
        self.inner.name()
    }

    #[getter]
    fn slots(&self) -> u32 {
        self.inner.slots()
    }

    #[getter]
    fn slot_bytes(&self) -> usize {
        self.inner.slot_bytes()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.bytes()
    }

    #[getter]
    fn data_ptr(&self) -> usize {
        self.inner.as_mut_ptr() as usize
    }

    fn __repr__(&self) -> String {
        format!(
            "Region(slots={}, slot_bytes={}, name={})",
            self.inner.slots(),
            self.inner.slot_bytes(),
            self.inner.name().map_or_else(|| "None".into(), |name| format!("{name:?}"))
        )
    }

    /// # Safety
    /// Called by the interpreter with a `Py_buffer` to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no buffer to fill"));
        }
        let this = slf.get();
        let asked = |flag: c_int| flags & flag == flag;
        let (buf, len) = (this.inner.as_mut_ptr().cast::<c_void>(), this.inner.bytes());
        let shape = this.shape.as_ptr().cast_mut();
        let strides = this.strides.as_ptr().cast_mut();
        // SAFETY: `view` is the interpreter's to fill. `obj` keeps this object alive as long as
        // the buffer is, and with it the mapping, the shape and the strides, which nobody
        // writes: the class is frozen.
        unsafe {
            (*view).obj = slf.into_any().into_ptr();
            (*view).buf = buf;
            (*view).len = len.cast_signed();
            (*view).readonly = 0;
            (*view).itemsize = 1;
            (*view).format =
                if asked(ffi::PyBUF_FORMAT) { c"B".as_ptr().cast_mut() } else { ptr::null_mut() };
            let flat = !asked(ffi::PyBUF_ND);
            (*view).ndim = if flat { 1 } else { 2 };
            (*view).shape = if flat { ptr::null_mut() } else { shape };
            (*view).strides = if asked(ffi::PyBUF_STRIDES) { strides } else { ptr::null_mut() };
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = ptr::null_mut();
        }
        Ok(())
    }
}
