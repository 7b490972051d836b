//! `HostCopier`: buffers of Python as the pages of a copier.

use kvtier_core::copy::{self, Pages};
use numpy::{PyReadonlyArray1, PyReadonlyArray2};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::error::{OrRaise, raise, wrong_type};
use crate::region::Region;

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct HostCopier {
    // Before the buffers, which it points into: fields are dropped in order.
    inner: copy::HostCopier,
    /// Keep the tensors' memory alive.
    _pages: Vec<PyUntypedBuffer>,
}

#[pymethods]
impl HostCopier {
    #[new]
    #[pyo3(signature = (region, pages, blocks_per_chunk, *, threads = 0))]
    fn new(
        py: Python<'_>,
        region: &Region,
        pages: &Bound<'_, PyAny>,
        blocks_per_chunk: usize,
        threads: usize,
    ) -> PyResult<Self> {
        let given = PyList::empty(py);
        for page in pages.try_iter()? {
            given.append(page?)?;
        }
        let buffers =
            given.iter().map(|page| PyUntypedBuffer::get(&page)).collect::<PyResult<Vec<_>>>()?;
        let pages = buffers
            .iter()
            .enumerate()
            .map(|(number, buffer)| {
                describe(buffer).ok_or_else(|| {
                    let message = format!(
                        "tensor {number} of shape {:?} and {} bytes an item is not writable int8 or \
                         uint8 of shape (num_blocks, page_bytes) with contiguous rows",
                        buffer.shape(),
                        buffer.item_size()
                    );
                    raise(py, "TransferError", message)
                })
            })
            .collect::<PyResult<Vec<_>>>()?;
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8)),
            threads => threads,
        };
        let region = region.shared().clone();
        // SAFETY: the buffers are writable, of these shapes, and live as long as the copier.
        let inner = unsafe { copy::HostCopier::new(region, pages, blocks_per_chunk, threads) }
            .or_raise(py)?;
        Ok(Self { inner, _pages: buffers })
    }

    #[getter]
    fn chunk_bytes(&self) -> usize {
        self.inner.chunk_bytes()
    }

    fn store(&self, block_ids: &Bound<'_, PyAny>, slots: &Bound<'_, PyAny>) -> PyResult<usize> {
        let py = block_ids.py();
        let (block_ids, slots) = (ids(block_ids)?, slot_ids(slots)?);
        // SAFETY: the slots are the caller's by `prepare_store`, and the blocks are not written
        // meanwhile: the contract of the call in `_kvtier.pyi`.
        py.detach(|| unsafe { self.inner.store(&block_ids, &slots) }).or_raise(py)
    }

    fn load(&self, block_ids: &Bound<'_, PyAny>, slots: &Bound<'_, PyAny>) -> PyResult<usize> {
        let py = block_ids.py();
        let (block_ids, slots) = (ids(block_ids)?, slot_ids(slots)?);
        // SAFETY: the slots are pinned by `prepare_load`, and the blocks are the caller's.
        py.detach(|| unsafe { self.inner.load(&block_ids, &slots) }).or_raise(py)
    }
}

fn describe(buffer: &PyUntypedBuffer) -> Option<Pages> {
    let (&[blocks, page_bytes], &[stride, step]) = (buffer.shape(), buffer.strides()) else {
        return None;
    };
    let usable = buffer.item_size() == 1 && step == 1 && !buffer.readonly();
    usable.then_some(Pages {
        start: buffer.buf_ptr().cast(),
        blocks,
        page_bytes,
        stride: usize::try_from(stride).ok()?,
    })
}

fn ids(given: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let expected = "a C-contiguous int64 array of shape (chunks, blocks_per_chunk)";
    let array: PyReadonlyArray2<'_, i64> =
        given.extract().map_err(|_| wrong_type("block_ids", expected, given))?;
    let flat = array.as_slice().map_err(|_| wrong_type("block_ids", expected, given))?;
    Ok(flat.to_vec())
}

fn slot_ids(given: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let expected = "a C-contiguous uint32 array of shape (chunks,)";
    let array: PyReadonlyArray1<'_, u32> =
        given.extract().map_err(|_| wrong_type("slots", expected, given))?;
    let flat = array.as_slice().map_err(|_| wrong_type("slots", expected, given))?;
    Ok(flat.to_vec())
}
