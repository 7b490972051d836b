//! Stats pages as dicts; `kvtier.pages` types and explains them.

use std::ffi::OsString;
use std::path::PathBuf;

use kvtier_core::manager::Tell;
use kvtier_core::page::{self, Description, Reading};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::OrRaise;
use crate::stats::Stats;

/// See `_kvtier.pyi`.
#[pyfunction]
pub(crate) fn stats_directory() -> Option<OsString> {
    page::directory().map(PathBuf::into_os_string)
}

/// See `_kvtier.pyi`.
#[pyfunction]
pub(crate) fn read_stats_pages(
    py: Python<'_>,
    directory: PathBuf,
) -> PyResult<(Bound<'_, PyList>, Vec<String>)> {
    let listing = py.detach(move || page::read_all(&directory)).or_raise(py)?;
    let pages = PyList::empty(py);
    for reading in &listing.readings {
        pages.append(page_dict(py, reading)?)?;
    }
    Ok((pages, listing.refused.iter().map(ToString::to_string).collect()))
}

fn page_dict<'py>(py: Python<'py>, reading: &Reading) -> PyResult<Bound<'py, PyDict>> {
    let Description { version, owner, opened, slot_bytes, latency_buckets, tiers, .. } =
        &reading.description;
    let stats = Stats::new(py)?;
    stats.primary(|tell| reading.each(None, tell))?;
    let directories = PyDict::new(py);
    for (number, tier) in tiers.iter().enumerate() {
        let each = |tell: &mut Tell<'_>| reading.each(Some(number), tell);
        stats.tier(&tier.name, &tier.medium, &tier.locality, each)?;
        if let Some(directory) = &tier.directory {
            directories.set_item(&tier.name, directory)?;
        }
    }
    let dict = PyDict::new(py);
    dict.set_item("path", reading.path.as_os_str())?;
    dict.set_item("uid", reading.user)?;
    dict.set_item("pid", owner.pid)?;
    dict.set_item("manager", reading.number)?;
    dict.set_item("version", version)?;
    dict.set_item("opened", opened)?;
    dict.set_item("published", reading.published as f64 / 1e9)?;
    dict.set_item("slot_bytes", slot_bytes)?;
    dict.set_item("latency_buckets", latency_buckets)?;
    dict.set_item("directories", directories)?;
    dict.set_item("stats", stats.dict)?;
    Ok(dict)
}
