//! Keys and numbers across the boundary, in batches.

use std::time::{Duration, Instant};

use kvtier_core::key::KeyBatch;
use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString};

use crate::error::{OrRaise, raise, wrong_type};

const KEYS: &str = "a sequence of bytes, or a C-contiguous uint8 array of shape (n, key_bytes)";

/// The keys of a call, copied: the interpreter is left while the core works on them.
pub(crate) fn keys(given: &Bound<'_, PyAny>, key_bytes: usize) -> PyResult<KeyBatch> {
    let py = given.py();
    if let Ok(list) = given.cast::<PyList>() {
        let mut batch = KeyBatch::with_capacity(list.len(), key_bytes);
        for key in list.iter() {
            push(&mut batch, &key)?;
        }
        return Ok(batch);
    }
    if let Ok(array) = given.extract::<PyReadonlyArray2<'_, u8>>() {
        let width = array.shape()[1];
        if width != key_bytes {
            let message = format!(
                "keys of {width} bytes in an array of shape {:?}, but this index has keys of \
                 {key_bytes} bytes",
                array.shape()
            );
            return Err(raise(py, "KeyLengthError", message));
        }
        let flat = array.as_slice().map_err(|_| wrong_type("keys", KEYS, given))?;
        return KeyBatch::from_flat(flat.to_vec(), key_bytes).or_raise(py);
    }
    // One key in place of many is the mistake to expect: its items would be numbers.
    let single = given.is_instance_of::<PyBytes>()
        || given.is_instance_of::<PyByteArray>()
        || given.is_instance_of::<PyString>();
    if single {
        return Err(wrong_type("keys", KEYS, given));
    }
    let items = given.try_iter().map_err(|_| wrong_type("keys", KEYS, given))?;
    let mut batch = KeyBatch::with_capacity(given.len().unwrap_or(0), key_bytes);
    for key in items {
        push(&mut batch, &key?)?;
    }
    Ok(batch)
}

fn push(batch: &mut KeyBatch, key: &Bound<'_, PyAny>) -> PyResult<()> {
    let bytes = key.cast::<PyBytes>().map_err(|_| wrong_type("key", "bytes", key))?;
    batch.push(bytes.as_bytes()).or_raise(key.py())
}

/// Keys as `list[bytes]`.
pub(crate) fn key_list<'py, 'k>(
    py: Python<'py>,
    keys: impl ExactSizeIterator<Item = &'k [u8]>,
) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, keys.map(|key| PyBytes::new(py, key)))
}

/// The moment `timeout` seconds from now. More than a year is a year.
pub(crate) fn deadline(py: Python<'_>, timeout: f64) -> PyResult<Instant> {
    const YEAR: f64 = 365.0 * 86_400.0;
    let length =
        Duration::try_from_secs_f64(if timeout > YEAR { YEAR } else { timeout }).map_err(|_| {
            let message = format!("timeout = {timeout} is no number of seconds from 0 up");
            raise(py, "ConfigError", message)
        })?;
    Ok(Instant::now() + length)
}

/// The value of a name.
pub(crate) fn named<T: Copy>(
    py: Python<'_>,
    field: &str,
    name: &str,
    all: &[(&str, T)],
) -> PyResult<T> {
    all.iter().find(|(known, _)| *known == name).map(|&(_, value)| value).ok_or_else(|| {
        let known: Vec<&str> = all.iter().map(|(known, _)| *known).collect();
        let message = format!("{field} = {name:?} is not one of {}", known.join(", "));
        raise(py, "ConfigError", message)
    })
}
