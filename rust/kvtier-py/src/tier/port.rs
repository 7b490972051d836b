//! What a tier's thread drives its tier with: `kvtier/tiers/thread.py` has the loop.

use std::sync::Arc;

use kvtier_core::key::KeyBatch;
use kvtier_core::manager::Lookup;
use kvtier_core::tier::{Fault, Presence, Usage};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::job::TierJob;
use super::report::{bad_value, items, take};
use super::shared::{Call, Shared};
use crate::convert::key_list;

/// See `_kvtier.pyi`.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub(crate) struct TierPort {
    shared: Arc<Shared>,
    /// Keys of the look-up that the tier is in.
    asked: Mutex<Option<KeyBatch>>,
}

impl TierPort {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, asked: Mutex::new(None) }
    }

    /// Takes what `lookup` said of the keys it was asked for; without a word they are misses.
    fn answered(&self, said: impl FnOnce(&KeyBatch) -> Vec<Presence>) {
        let asked = self.asked.lock().take();
        if let Some(keys) = asked {
            let mut said = said(&keys);
            said.resize(keys.len(), Presence::Miss);
            self.shared.answer(&keys, &said);
        }
    }
}

#[pymethods]
impl TierPort {
    fn begins(&self) {
        self.shared.begins();
    }

    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<(&'static str, Bound<'py, PyAny>)>> {
        // Of a look-up that raised.
        self.answered(|_| Vec::new());
        let Some(call) = py.detach(|| self.shared.next()) else {
            return Ok(None);
        };
        let list = |keys: &KeyBatch| key_list(py, keys.iter()).map(Bound::into_any);
        Ok(Some(match call {
            Call::Poll => ("finished", py.None().into_bound(py)),
            Call::Lookup(keys) => {
                let asked = list(&keys)?;
                *self.asked.lock() = Some(keys);
                ("lookup", asked)
            }
            Call::Submit(job) => {
                let (given, lent) = TierJob::new(py, &job, &self.shared)?;
                let method = job.method();
                self.shared.goes_out(job, lent);
                (method, Bound::new(py, given)?.into_any())
            }
            Call::Touch(keys) => ("touch", list(&keys)?),
            Call::Discard(keys) => ("discard", list(&keys)?),
            Call::FinishRequest(request) => {
                ("finish_request", request.into_pyobject(py)?.into_any())
            }
        }))
    }

    fn answer(&self, said: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut presence = Vec::new();
        for said in items(&self.shared, "lookup gave", "HIT, MISS or RETRY for each key", said)? {
            let said = said?;
            let number = said.extract::<u8>().ok();
            let known = match number {
                Some(number) if number == Lookup::Hit as u8 => Presence::Hit,
                Some(number) if number == Lookup::Retry as u8 => Presence::Retry,
                Some(number) if number == Lookup::Miss as u8 => Presence::Miss,
                _ => {
                    bad_value(&self.shared, "lookup's answer is", "HIT, MISS or RETRY", &said);
                    Presence::Miss
                }
            };
            presence.push(known);
            let expected = self.asked.lock().as_ref().map_or(0, KeyBatch::len);
            if presence.len() > expected {
                break;
            }
        }
        self.answered(|keys| {
            if presence.len() == keys.len() {
                return presence;
            }
            self.shared.fault(Fault::BadValue, || {
                let found = if presence.len() > keys.len() { "more" } else { "fewer" };
                format!("lookup gave {found} answers than the {} keys asked for", keys.len())
            });
            // Which answer belongs to which key can not be told.
            Vec::new()
        });
        Ok(())
    }

    /// Whether there was any.
    fn report(&self, results: &Bound<'_, PyAny>) -> PyResult<bool> {
        let mut left = self.shared.most_results();
        let mut any = false;
        for result in items(&self.shared, "finished gave", "results", results)? {
            take(&self.shared, &result?)?;
            any = true;
            left -= 1;
            if left == 0 {
                self.shared.fault(Fault::BadValue, || "finished gives results without end".into());
                break;
            }
        }
        self.shared.polled();
        Ok(any)
    }

    /// Whether there was any.
    fn removed(&self, keys: &Bound<'_, PyAny>) -> PyResult<bool> {
        let mut removed = Vec::new();
        for key in items(&self.shared, "take_removed gave", "keys", keys)? {
            let key = key?;
            match key.cast::<PyBytes>() {
                Ok(bytes) if bytes.as_bytes().len() == self.shared.key_bytes() => {
                    removed.push(bytes.as_bytes().into());
                }
                _ => bad_value(&self.shared, "a removed key is", "bytes of the key's length", &key),
            }
            if removed.len() >= self.shared.room_for_removed() {
                break;
            }
        }
        let any = !removed.is_empty();
        self.shared.removed(removed);
        Ok(any)
    }

    fn usage(&self, usage: &Bound<'_, PyAny>) {
        match usage.extract::<(u64, u64, u64)>() {
            Ok((capacity_bytes, used_bytes, chunks)) => {
                self.shared.has_usage(Usage { capacity_bytes, used_bytes, chunks });
            }
            Err(_) => bad_value(&self.shared, "usage gave", "a TierUsage", usage),
        }
    }

    fn raised(&self, method: &str, error: &Bound<'_, PyAny>) {
        self.shared.fault(Fault::Raised, || {
            let py = error.py();
            let lines = py
                .import("traceback")
                .and_then(|module| module.call_method1("format_exception", (error,)))
                .and_then(|lines| lines.extract::<Vec<String>>());
            let text = lines.map_or_else(|error| error.to_string(), |lines| lines.concat());
            format!("{method} raised: {}", text.trim_end())
        });
    }

    fn notify(&self) {
        self.shared.notify();
    }

    fn ends(&self, py: Python<'_>) {
        py.detach(|| self.shared.ends());
    }

    fn begin_close(&self, py: Python<'_>) {
        if self.shared.is_home() {
            py.detach(|| self.shared.begin_close());
        }
    }

    fn close(&self, py: Python<'_>) {
        if self.shared.is_home() {
            py.detach(|| self.shared.close());
        }
    }
}
