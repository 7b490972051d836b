//! What a tier reports of a job, read from a `JobResult` and checked against the job.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvtier_core::checksum::Checksum;
use kvtier_core::key::KeyBatch;
use kvtier_core::tier::{Failure, Fault, JobId};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyMapping, PyType};

use super::job::AnyJob;
use super::shared::Shared;

/// What became of one chunk.
#[derive(Clone, Copy)]
enum Said {
    Nothing,
    Stored,
    Loaded(Checksum),
    Failed(Failure),
}

/// What a tier said of a job. It is applied when the tier let go of the bytes.
pub(super) struct Report {
    said: Vec<Said>,
    busy: Duration,
    /// Keys that the tier evicted for it.
    pub(super) evicted: KeyBatch,
}

impl Report {
    /// Tells the job. Returns the keys whose bytes are not those that were stored.
    pub(super) fn apply(&self, job: &AnyJob) -> KeyBatch {
        let mut corrupt = KeyBatch::empty(self.evicted.key_bytes());
        // The time is the job's: its first chunk carries it.
        let mut busy = self.busy;
        let mut evicted = Some(&self.evicted);
        for (index, &said) in self.said.iter().enumerate() {
            let busy = std::mem::take(&mut busy);
            match (job, said) {
                (AnyJob::Store(job), said) => {
                    let outcome = match said {
                        Said::Stored => Ok(()),
                        Said::Failed(failure) => Err(failure),
                        Said::Nothing | Said::Loaded(_) => Err(Failure::Lost),
                    };
                    job.report(index, outcome, busy, evicted.take());
                }
                (AnyJob::Load(job), Said::Loaded(stored)) => {
                    if job.deliver(index, stored, busy).is_err() {
                        // A key of the job has the length of every other.
                        let _ = corrupt.push(job.key(index));
                    }
                }
                (AnyJob::Load(job), Said::Failed(failure)) => job.fail(index, failure, busy),
                (AnyJob::Load(job), _) => job.fail(index, Failure::Lost, busy),
            }
        }
        corrupt
    }
}

/// Takes one item of what `finished` gave. What is wrong with it is counted, and the rest of it
/// holds; an error is one that the tier's own code raised.
pub(super) fn take(shared: &Shared, result: &Bound<'_, PyAny>) -> PyResult<()> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = result.py();
    if !result.is_instance(CLASS.import(py, "kvtier.tiers", "JobResult")?)? {
        bad_value(shared, "finished gave", "a JobResult", result);
        return Ok(());
    }
    let number = result.getattr("job")?;
    let Ok(id) = number.extract::<JobId>() else {
        bad_value(shared, "JobResult.job is", "a job's id", &number);
        return Ok(());
    };
    let (job, lent, since) = match shared.find(id) {
        Ok(found) => found,
        Err(fault) => {
            shared.fault(fault, || match fault {
                Fault::RepeatedJob => format!("reported job {id} again"),
                _ => format!("reported job {id}, which it does not have"),
            });
            return Ok(());
        }
    };
    let report = read(shared, result, &job, since)?;
    shared.reported(&job, report);
    lent.take_back(py)
}

fn read(
    shared: &Shared,
    result: &Bound<'_, PyAny>,
    job: &AnyJob,
    since: Instant,
) -> PyResult<Report> {
    let places: HashMap<&[u8], usize> = job.chunks().keys.iter().zip(0..).collect();
    let place = |key: &Bound<'_, PyAny>| {
        let Ok(bytes) = key.cast::<PyBytes>() else {
            bad_value(shared, "a key in a JobResult is", "bytes", key);
            return None;
        };
        let place = places.get(bytes.as_bytes()).copied();
        if place.is_none() {
            shared.fault(Fault::ForeignKey, || {
                format!("reported a key that is not one of job {}: {bytes}", job.id())
            });
        }
        place
    };
    let mut said = vec![Said::Nothing; job.len()];
    let done = result.getattr("done")?;
    match job {
        AnyJob::Store(_) => {
            for key in items(shared, "JobResult.done is", "keys", &done)? {
                if let Some(at) = place(&key?) {
                    said[at] = Said::Stored;
                }
            }
        }
        AnyJob::Load(_) => {
            for (key, checksum) in pairs(shared, "JobResult.done of a load is", &done)? {
                let Some(at) = place(&key) else {
                    continue;
                };
                match checksum.extract() {
                    Ok(checksum) => said[at] = Said::Loaded(Checksum(checksum)),
                    Err(_) => bad_value(shared, "a checksum is", "an int of 64 bits", &checksum),
                }
            }
        }
    }
    for (key, cause) in pairs(shared, "JobResult.failed is", &result.getattr("failed")?)? {
        let Some(at) = place(&key) else {
            continue;
        };
        let name = cause.extract::<String>().unwrap_or_default();
        let known = Failure::ALL.iter().find(|(known, _)| *known == name);
        if known.is_none() {
            let causes = Failure::ALL.map(|(name, _)| name).join(", ");
            bad_value(shared, "a cause of failure is", &format!("one of {causes}"), &cause);
        }
        said[at] = Said::Failed(known.map_or(Failure::Lost, |(_, failure)| *failure));
    }
    let mut evicted = KeyBatch::empty(shared.key_bytes());
    let given = result.getattr("evicted")?;
    for key in items(shared, "JobResult.evicted is", "keys", &given)? {
        let key = key?;
        if !key.cast::<PyBytes>().is_ok_and(|key| evicted.push(key.as_bytes()).is_ok()) {
            bad_value(shared, "an evicted key is", "bytes of the key's length", &key);
        }
    }
    let seconds = result.getattr("seconds")?;
    let busy = if seconds.is_none() {
        since.elapsed()
    } else {
        let length = seconds.extract().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
        length.unwrap_or_else(|| {
            bad_value(shared, "JobResult.seconds is", "a number from 0 up", &seconds);
            Duration::ZERO
        })
    };
    Ok(Report { said, busy, evicted })
}

type Items<'py> = Box<dyn Iterator<Item = PyResult<Bound<'py, PyAny>>> + 'py>;

/// The items of an iterable; of anything else, counted, none.
pub(super) fn items<'py>(
    shared: &Shared,
    what: &str,
    expected: &str,
    given: &Bound<'py, PyAny>,
) -> PyResult<Items<'py>> {
    // Iterating over bytes gives numbers: one key in place of many.
    if given.is_instance_of::<PyBytes>() || !given.hasattr("__iter__")? {
        bad_value(shared, what, expected, given);
        return Ok(Box::new(std::iter::empty()));
    }
    Ok(Box::new(given.try_iter()?))
}

/// The pairs of a mapping; of anything else, counted, none.
fn pairs<'py>(
    shared: &Shared,
    what: &str,
    given: &Bound<'py, PyAny>,
) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    let Ok(mapping) = given.cast::<PyMapping>() else {
        bad_value(shared, what, "a mapping", given);
        return Ok(Vec::new());
    };
    mapping.items()?.iter().map(|pair| pair.extract()).collect()
}

/// Counts a value of another type or range than the contract asks for.
pub(super) fn bad_value(shared: &Shared, what: &str, expected: &str, found: &Bound<'_, PyAny>) {
    shared.fault(Fault::BadValue, || {
        let kind = found.get_type();
        // `repr` may run the tier's code, or be long.
        let kind = kind.name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
        format!("{what} of type {kind}, expected {expected}")
    });
}
