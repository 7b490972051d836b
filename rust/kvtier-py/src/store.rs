//! Looking into what tiers keep: `inspect_store`, `StoreAudit`, `ObjectAudit`, `RedisAudit`.

use std::path::PathBuf;
use std::sync::Mutex;

use kvtier_core::tier::{self, Audit, Distribution, Finding, ObjectSettings, RedisSettings};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::OrRaise;

/// See `_kvtier.pyi`.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // what Python gives for a path is a new value
pub(crate) fn inspect_store(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let found = py.detach(|| tier::inspect(&path)).or_raise(py)?;
    let namespace = py.import("json")?.getattr("loads")?.call1((found.namespace.to_string(),))?;
    let dict = PyDict::new(py);
    dict.set_item("format", found.format)?;
    dict.set_item("namespace", namespace)?;
    dict.set_item("chunk_bytes", found.chunk_bytes)?;
    dict.set_item("key_bytes", found.key_bytes)?;
    dict.set_item("capacity_bytes", found.capacity_bytes)?;
    dict.set_item("allocated_bytes", found.allocated_bytes)?;
    dict.set_item("used_bytes", found.used_bytes)?;
    dict.set_item("slots", found.slots)?;
    dict.set_item("chunks", found.chunks)?;
    dict.set_item("damaged_headers", found.damaged_headers)?;
    dict.set_item("damaged_pages", found.damaged_pages)?;
    dict.set_item("oldest", found.oldest)?;
    dict.set_item("newest", found.newest)?;
    dict.set_item("ages_s", distribution(py, &found.ages)?)?;
    dict.set_item("hits", distribution(py, &found.hits)?)?;
    dict.set_item("owner", found.owner)?;
    Ok(dict)
}

fn distribution<'py>(py: Python<'py>, counted: &Distribution) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bounds", counted.bounds)?;
    dict.set_item("counts", &counted.counts)?;
    Ok(dict)
}

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct StoreAudit {
    inner: Mutex<Option<Audit>>,
    total: usize,
}

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct RedisAudit {
    inner: Mutex<tier::RedisAudit>,
}

#[pymethods]
impl RedisAudit {
    #[new]
    #[pyo3(signature = (settings, *, sample = None, repair = false))]
    fn new(py: Python<'_>, settings: &str, sample: Option<u64>, repair: bool) -> PyResult<Self> {
        let settings = RedisSettings::parse(settings).or_raise(py)?;
        let audit = py.detach(|| tier::RedisAudit::open(&settings, sample, repair)).or_raise(py)?;
        Ok(Self { inner: Mutex::new(audit) })
    }

    fn check<'py>(&self, py: Python<'py>) -> PyResult<Option<(u64, Vec<Found<'py>>)>> {
        let checked = py.detach(|| self.lock().check()).or_raise(py)?;
        Ok(checked.map(|checked| (checked.chunks, found(py, checked.bad))))
    }
}

impl RedisAudit {
    fn lock(&self) -> std::sync::MutexGuard<'_, tier::RedisAudit> {
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

type Found<'py> = (Option<Bound<'py, PyBytes>>, String, &'static str, bool);

fn found(py: Python<'_>, findings: Vec<Finding>) -> Vec<Found<'_>> {
    findings
        .into_iter()
        .map(|Finding { key, place, what, repaired }| {
            (key.map(|key| PyBytes::new(py, &key)), place, what, repaired)
        })
        .collect()
}

impl StoreAudit {
    fn step<'py>(
        &self,
        py: Python<'py>,
        step: impl FnOnce(&mut Audit) -> Result<Vec<Finding>, tier::TierError> + Send,
    ) -> PyResult<Vec<Found<'py>>> {
        let findings = py.detach(|| {
            let mut audit = self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            audit.as_mut().map(step)
        });
        let findings = findings
            .ok_or_else(|| PyRuntimeError::new_err("this audit was closed"))?
            .or_raise(py)?;
        Ok(found(py, findings))
    }
}

#[pymethods]
impl StoreAudit {
    #[new]
    #[pyo3(signature = (path, *, repair = false))]
    #[allow(clippy::needless_pass_by_value)] // what Python gives for a path is a new value
    fn new(py: Python<'_>, path: PathBuf, repair: bool) -> PyResult<Self> {
        let audit = py.detach(|| Audit::open(&path, repair)).or_raise(py)?;
        Ok(Self { total: audit.total(), inner: Mutex::new(Some(audit)) })
    }

    #[getter]
    fn total(&self) -> usize {
        self.total
    }

    fn check_files<'py>(&self, py: Python<'py>) -> PyResult<Vec<Found<'py>>> {
        self.step(py, |audit| audit.check_files())
    }

    fn check<'py>(&self, py: Python<'py>, count: usize) -> PyResult<Vec<Found<'py>>> {
        self.step(py, |audit| audit.check(count))
    }

    fn close(&self) {
        *self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = None;
    }
}

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct ObjectAudit {
    inner: Mutex<tier::ObjectAudit>,
    objects: u64,
    sample: usize,
}

#[pymethods]
impl ObjectAudit {
    #[new]
    #[pyo3(signature = (settings, *, sample, seed = 0, repair = false))]
    fn new(
        py: Python<'_>,
        settings: &str,
        sample: usize,
        seed: u64,
        repair: bool,
    ) -> PyResult<Self> {
        let audit = py
            .detach(|| {
                let settings = ObjectSettings::parse(settings)?;
                tier::ObjectAudit::open(&settings, sample, seed, repair)
            })
            .or_raise(py)?;
        Ok(Self { objects: audit.objects(), sample: audit.left(), inner: Mutex::new(audit) })
    }

    #[getter]
    fn objects(&self) -> u64 {
        self.objects
    }

    #[getter]
    fn sample(&self) -> usize {
        self.sample
    }

    fn check<'py>(&self, py: Python<'py>, count: usize) -> PyResult<Vec<Found<'py>>> {
        let checked = py.detach(|| {
            self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner).check(count)
        });
        Ok(found(py, checked.or_raise(py)?))
    }
}
