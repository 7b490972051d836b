//! `Evictor`: who goes first, for a manager that is not ours.

use kvtier_core::index;
use kvtier_core::index::Requester;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::convert::{self, key_list};
use crate::error::{OrRaise, raise};

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct Evictor {
    inner: Mutex<index::Evictor>,
    key_bytes: usize,
}

#[pymethods]
impl Evictor {
    #[new]
    fn new(py: Python<'_>, capacity: u32, key_bytes: usize, policy: &str) -> PyResult<Self> {
        let policy = policy.parse().or_raise(py)?;
        let inner = Mutex::new(index::Evictor::new(capacity, key_bytes, policy).or_raise(py)?);
        Ok(Self { inner, key_bytes })
    }

    #[getter]
    fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    fn insert(&self, py: Python<'_>, requester: Requester, key: &[u8]) -> PyResult<()> {
        self.inner.lock().insert(requester, key).or_raise(py)
    }

    fn remove(&self, py: Python<'_>, key: &[u8]) -> PyResult<()> {
        self.inner.lock().remove(key).or_raise(py)
    }

    fn let_go(&self, py: Python<'_>, key: &[u8]) -> PyResult<()> {
        self.inner.lock().let_go(key).or_raise(py)
    }

    fn hold(&self, py: Python<'_>, key: &[u8]) -> PyResult<()> {
        self.inner.lock().hold(key).or_raise(py)
    }

    fn touch(&self, requester: Requester, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = convert::keys(keys, self.key_bytes)?;
        self.inner.lock().touch(requester, &keys);
        Ok(())
    }

    fn finish(&self, requester: Requester) {
        self.inner.lock().finish(requester);
    }

    fn evict<'py>(
        &self,
        count: usize,
        spared: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let keys = convert::keys(spared, self.key_bytes)?;
        let evicted = self.inner.lock().evict(count, &keys);
        evicted.map(|evicted| key_list(spared.py(), evicted.iter())).transpose()
    }

    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.lock().validate().map_err(|broken| raise(py, "InvariantError", broken))
    }
}
