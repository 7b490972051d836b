//! `Moves` and `HostCopier`: ids and buffers of Python as checked moves and the rows of a copier.

use kvtier_core::copy::{self, Bounds, Group, Piece, Rows, Way};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::error::{OrRaise, raise, wrong_type};
use crate::region::Region;

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct Moves {
    inner: copy::Moves,
}

impl Moves {
    fn column(&self, value: impl Fn(&copy::Move) -> i64) -> Vec<i64> {
        self.inner.list().iter().map(value).collect()
    }
}

#[pymethods]
impl Moves {
    #[new]
    #[pyo3(signature = (block_ids, slots, *, to_slots, num_blocks, num_slots, blocks_per_chunk, first = 0))]
    fn new(
        block_ids: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        to_slots: bool,
        num_blocks: usize,
        num_slots: u32,
        blocks_per_chunk: u32,
        first: u32,
    ) -> PyResult<Self> {
        let bounds = Bounds { blocks: num_blocks, slots: num_slots, blocks_per_chunk };
        let way = if to_slots { Way::Store } else { Way::Load };
        let (blocks, slots) = (ids("block_ids", block_ids)?, ids("slots", slots)?);
        let made = copy::Moves::new(blocks.as_slice()?, slots.as_slice()?, first, bounds, way);
        Ok(Self { inner: made.or_raise(block_ids.py())? })
    }

    fn __len__(&self) -> usize {
        self.inner.list().len()
    }

    #[getter]
    fn to_slots(&self) -> bool {
        self.inner.way() == Way::Store
    }

    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.column(|step| step.block.cast_signed() as i64).into_pyarray(py)
    }

    #[getter]
    fn slots<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.column(|step| i64::from(step.slot)).into_pyarray(py)
    }

    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.column(|step| i64::from(step.position)).into_pyarray(py)
    }
}

/// `(block_bytes, [(tensor, offset, bytes, slot_offset, turns, turn), ...])`.
type GivenGroup = (usize, Vec<(usize, usize, usize, usize, u64, u64)>);

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct HostCopier {
    // Before the buffers, which it points into: fields are dropped in order.
    inner: copy::HostCopier,
    /// Keep the tensors' memory alive.
    _rows: Vec<PyUntypedBuffer>,
}

#[pymethods]
impl HostCopier {
    #[new]
    #[pyo3(signature = (region, rows, groups, *, blocks_per_chunk, threads = 0))]
    fn new(
        py: Python<'_>,
        region: &Region,
        rows: &Bound<'_, PyAny>,
        groups: Vec<GivenGroup>,
        blocks_per_chunk: u32,
        threads: usize,
    ) -> PyResult<Self> {
        let given = PyList::empty(py);
        for row in rows.try_iter()? {
            given.append(row?)?;
        }
        let buffers =
            given.iter().map(|row| PyUntypedBuffer::get(&row)).collect::<PyResult<Vec<_>>>()?;
        let rows = buffers
            .iter()
            .enumerate()
            .map(|(number, buffer)| {
                describe(buffer).ok_or_else(|| {
                    let message = format!(
                        "tensor {number} of shape {:?} and {} bytes an item is not writable int8 or \
                         uint8 of shape (num_blocks, bytes) with contiguous rows",
                        buffer.shape(),
                        buffer.item_size()
                    );
                    raise(py, "TransferError", message)
                })
            })
            .collect::<PyResult<Vec<_>>>()?;
        let groups = groups.into_iter().map(group).collect();
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().min(8)),
            threads => threads,
        };
        let region = region.shared().clone();
        // SAFETY: the buffers are writable, of these shapes, and live as long as the copier.
        let inner =
            unsafe { copy::HostCopier::new(region, rows, groups, blocks_per_chunk, threads) }
                .or_raise(py)?;
        Ok(Self { inner, _rows: buffers })
    }

    fn run(&self, py: Python<'_>, group: usize, moves: &Moves) -> PyResult<usize> {
        // SAFETY: the caller owns the destination and keeps the source unchanged: the contract of
        // the call in `_kvtier.pyi`.
        py.detach(|| unsafe { self.inner.run(group, &moves.inner) }).or_raise(py)
    }
}

fn group((block_bytes, pieces): GivenGroup) -> Group {
    let pieces = pieces
        .into_iter()
        .map(|(tensor, offset, bytes, slot_offset, turns, turn)| Piece {
            tensor,
            offset,
            bytes,
            slot_offset,
            turns,
            turn,
        })
        .collect();
    Group { block_bytes, pieces }
}

fn describe(buffer: &PyUntypedBuffer) -> Option<Rows> {
    let (&[blocks, bytes], &[stride, step]) = (buffer.shape(), buffer.strides()) else {
        return None;
    };
    let usable = buffer.item_size() == 1 && step == 1 && !buffer.readonly();
    usable.then_some(Rows {
        start: buffer.buf_ptr().cast(),
        blocks,
        bytes,
        stride: usize::try_from(stride).ok()?,
    })
}

fn ids<'py>(name: &str, given: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray1<'py, i64>> {
    let expected = "a C-contiguous int64 array of one dimension";
    let array: PyReadonlyArray1<'py, i64> =
        given.extract().map_err(|_| wrong_type(name, expected, given))?;
    array.as_slice().map_err(|_| wrong_type(name, expected, given))?;
    Ok(array)
}
