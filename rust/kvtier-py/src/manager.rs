//! `Manager`: one method a verb.

use std::borrow::Cow;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use kvtier_core::clock::Clock;
use kvtier_core::key::KeyBatch;
use kvtier_core::manager::{
    self, EventKind, ManagerError, ManagerOptions, RequestOptions, TierMatcher,
};
use kvtier_core::tier::{Locality, Medium};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::convert::{deadline, key_list, keys, named};
use crate::error::{OrRaise, raise};
use crate::fork::Home;
use crate::region::Region;
use crate::stats::stats_dict;
use crate::tier::open_manager;

/// Calls with fewer keys finish sooner than leaving the interpreter and coming back pays for.
const DETACH_FROM_KEYS: usize = 32;
/// How often a waiting call looks whether the user pressed Ctrl-C.
pub(crate) const SIGNAL_CHECK: Duration = Duration::from_millis(50);

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct Manager {
    inner: ManuallyDrop<manager::Manager>,
    region: Py<Region>,
    key_bytes: usize,
    home: Home,
}

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct PreparedStore {
    #[pyo3(get)]
    indices: Py<PyArray1<u32>>,
    #[pyo3(get)]
    slots: Py<PyArray1<u32>>,
    evicted: KeyBatch,
}

#[pymethods]
impl PreparedStore {
    /// Made when it is asked for: most engines never do.
    #[getter]
    fn evicted<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        key_list(py, self.evicted.iter())
    }
}

impl Manager {
    fn inner(&self, py: Python<'_>) -> PyResult<&manager::Manager> {
        self.home.check(py, "manager")?;
        Ok(&self.inner)
    }

    /// Runs a verb over keys, off the interpreter when there are many.
    fn verb<T: Send>(
        &self,
        py: Python<'_>,
        given: &Bound<'_, PyAny>,
        run: impl FnOnce(&manager::Manager, &KeyBatch) -> Result<T, ManagerError> + Send,
    ) -> PyResult<T> {
        let inner = self.inner(py)?;
        let keys = keys(given, self.key_bytes)?;
        if keys.len() < DETACH_FROM_KEYS {
            run(inner, &keys)
        } else {
            py.detach(|| run(inner, &keys))
        }
        .or_raise(py)
    }

    fn answers<'py>(
        &self,
        request: u64,
        given: &Bound<'py, PyAny>,
        prefix: bool,
    ) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let py = given.py();
        let answers = self.verb(py, given, |inner, keys| inner.lookup(request, keys, prefix))?;
        let answers = answers.into_iter().map(|answer| answer as u8).collect();
        Ok(PyArray1::from_vec(py, answers))
    }
}

#[pymethods]
impl Manager {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    #[pyo3(
        signature = (
            region, tiers = None, *, policy = "lru", key_bytes = 36, namespace = "",
            store_threshold = 1, events = false
        ),
        text_signature = "(region, tiers=(), *, policy='lru', key_bytes=36, namespace='', \
                          store_threshold=1, events=False)"
    )]
    fn new(
        py: Python<'_>,
        region: Py<Region>,
        tiers: Option<&Bound<'_, PyAny>>,
        policy: &str,
        key_bytes: usize,
        namespace: &str,
        store_threshold: u32,
        events: bool,
    ) -> PyResult<Self> {
        let policy = policy.parse().or_raise(py)?;
        let store_threshold =
            u8::try_from(store_threshold).ok().filter(|&times| times > 0).ok_or_else(|| {
                let message = format!("store_threshold = {store_threshold} is not 1 to 255");
                raise(py, "ConfigError", message)
            })?;
        let clock = Clock::system();
        let options = ManagerOptions { key_bytes, policy, store_threshold, events, clock };
        let mut inner =
            open_manager(py, region.get().shared().clone(), &options, tiers, namespace)?;
        py.detach(|| inner.show());
        Ok(Self { inner: ManuallyDrop::new(inner), region, key_bytes, home: Home::here() })
    }

    #[getter]
    fn region(&self, py: Python<'_>) -> Py<Region> {
        self.region.clone_ref(py)
    }

    #[getter]
    fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    #[pyo3(
        signature = (request, *, tiers = None, request_level = Vec::new()),
        text_signature = "($self, request, *, tiers=None, request_level=())"
    )]
    fn begin_request(
        &self,
        py: Python<'_>,
        request: u64,
        tiers: Option<Vec<Bound<'_, PyDict>>>,
        request_level: Vec<String>,
    ) -> PyResult<()> {
        let tiers = match tiers {
            Some(tiers) => Some(tiers.iter().map(matcher).collect::<PyResult<Vec<_>>>()?),
            None => None,
        };
        let options = RequestOptions { tiers, request_level };
        self.inner(py)?.begin_request(request, &options).or_raise(py)
    }

    fn lookup<'py>(
        &self,
        request: u64,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<u8>>> {
        self.answers(request, keys, false)
    }

    fn lookup_key(&self, py: Python<'_>, request: u64, key: &[u8]) -> PyResult<u8> {
        let answer = self.inner(py)?.lookup_key(request, key).or_raise(py)?;
        Ok(answer as u8)
    }

    fn promoted_from(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<&str>> {
        self.inner(py)?.promoted_from(key).or_raise(py)
    }

    fn lookup_prefix<'py>(
        &self,
        request: u64,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<u8>>> {
        self.answers(request, keys, true)
    }

    fn prepare_load<'py>(
        &self,
        request: u64,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let py = keys.py();
        let slots = self.verb(py, keys, |inner, keys| inner.prepare_load(request, keys))?;
        Ok(PyArray1::from_vec(py, slots))
    }

    fn complete_load(&self, request: u64, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        self.verb(keys.py(), keys, |inner, keys| inner.complete_load(request, keys))
    }

    fn prepare_store(
        &self,
        request: u64,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Option<PreparedStore>> {
        let py = keys.py();
        let prepared = self.verb(py, keys, |inner, keys| inner.prepare_store(request, keys))?;
        let Some(prepared) = prepared else {
            return Ok(None);
        };
        Ok(Some(PreparedStore {
            indices: PyArray1::from_vec(py, prepared.indices).unbind(),
            slots: PyArray1::from_vec(py, prepared.slots).unbind(),
            evicted: prepared.evicted,
        }))
    }

    #[pyo3(signature = (request, keys, ok = true))]
    fn complete_store(&self, request: u64, keys: &Bound<'_, PyAny>, ok: bool) -> PyResult<()> {
        self.verb(keys.py(), keys, |inner, keys| inner.complete_store(request, keys, ok))
    }

    fn touch(&self, request: u64, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        self.verb(keys.py(), keys, |inner, keys| inner.touch(request, keys))
    }

    fn request_finished(&self, py: Python<'_>, request: u64) -> PyResult<()> {
        let inner = self.inner(py)?;
        py.detach(|| inner.request_finished(request)).or_raise(py)
    }

    fn end_step(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        py.detach(|| inner.end_step()).or_raise(py)
    }

    fn is_busy(&self, py: Python<'_>) -> PyResult<bool> {
        self.inner(py)?.is_busy().or_raise(py)
    }

    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let inner = self.inner(py)?;
        let end = deadline(py, timeout)?;
        loop {
            let now = Instant::now();
            let slice = end.min(now + SIGNAL_CHECK);
            if py.detach(|| inner.wait_until(slice)).or_raise(py)? {
                return Ok(true);
            }
            if slice == end || !inner.is_busy().or_raise(py)? {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let inner = self.inner(py)?;
        let end = deadline(py, timeout)?;
        loop {
            py.detach(|| inner.end_step()).or_raise(py)?;
            if !inner.is_busy().or_raise(py)? {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= end {
                return Ok(false);
            }
            py.detach(|| inner.wait_until(end.min(now + SIGNAL_CHECK))).or_raise(py)?;
            py.check_signals()?;
        }
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        py.detach(|| inner.reset()).or_raise(py)
    }

    fn reset_flushed(&self, py: Python<'_>) -> PyResult<()> {
        self.inner(py)?.reset_flushed().or_raise(py)
    }

    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        py.detach(|| inner.shutdown());
        Ok(())
    }

    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let inner = self.inner(py)?;
        let events = inner.take_events().or_raise(py)?;
        let list = PyList::empty(py);
        for event in events {
            list.append((
                event_word(event.kind),
                inner.tier_name(event.tier),
                key_list(py, event.keys.iter().map(AsRef::as_ref))?,
            ))?;
        }
        Ok(list)
    }

    #[getter]
    fn revision(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.inner(py)?.revision())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.inner(py)?.stats();
        stats_dict(py, &snapshot)
    }

    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        py.detach(|| inner.validate()).map_err(|broken| raise(py, "InvariantError", broken))
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // After fork there is nothing to join and the locks cannot be trusted: the copy leaks.
        if self.home.is_here() {
            // SAFETY: dropped once, here, and never used again.
            let inner = unsafe { ManuallyDrop::take(&mut self.inner) };
            Python::attach(|py| py.detach(|| drop(inner)));
        }
    }
}

/// What happened, in a word.
pub(crate) fn event_word(kind: EventKind) -> Cow<'static, str> {
    match kind {
        EventKind::Stored => "stored".into(),
        EventKind::Removed => "removed".into(),
        EventKind::Breaker(direction, state) => {
            format!("{}_breaker_{}", direction.as_str(), state.as_str()).into()
        }
    }
}

/// `{"medium": ..., "locality": ...}`, both optional.
fn matcher(given: &Bound<'_, PyDict>) -> PyResult<TierMatcher> {
    let py = given.py();
    let mut matcher = TierMatcher::default();
    for (field, value) in given {
        let (field, value) = (field.extract::<String>()?, value.extract::<String>()?);
        let named_as = format!("tiers: {field}");
        match &*field {
            "medium" => matcher.medium = Some(named(py, &named_as, &value, &Medium::ALL)?),
            "locality" => matcher.locality = Some(named(py, &named_as, &value, &Locality::ALL)?),
            _ => {
                let message = format!("tiers: unknown field {field:?}: use medium or locality");
                return Err(raise(py, "ConfigError", message));
            }
        }
    }
    Ok(matcher)
}
