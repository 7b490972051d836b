//! A snapshot of the manager's figures as dicts; `kvtier.config` types and explains them.

use kvtier_core::manager::{Direction, Histogram, Moved, Snapshot, TierSnapshot};
use kvtier_core::tier::{Failure, Fault};
use pyo3::prelude::*;
use pyo3::types::PyDict;

macro_rules! set {
    ($dict:expr, $from:expr; $($name:ident),+ $(,)?) => {
        $($dict.set_item(pyo3::intern!($dict.py(), stringify!($name)), $from.$name)?;)+
    };
}

/// `{"primary": PrimaryStats, "tiers": {name: TierStats}}`.
pub(crate) fn stats_dict<'py>(
    py: Python<'py>,
    snapshot: &Snapshot,
) -> PyResult<Bound<'py, PyDict>> {
    let primary = PyDict::new(py);
    set!(primary, snapshot.primary;
        slots, ready, writing, pinned, detached, requests, hits, hits_pending, misses, retries,
        evictions, stored_chunks, loaded_chunks, stores_refused, promotions_refused,
        not_admitted);
    let tiers = PyDict::new(py);
    for tier in &snapshot.tiers {
        tiers.set_item(&tier.name, tier_dict(py, tier)?)?;
    }
    let stats = PyDict::new(py);
    stats.set_item("primary", primary)?;
    stats.set_item("tiers", tiers)?;
    Ok(stats)
}

fn tier_dict<'py>(py: Python<'py>, tier: &TierSnapshot) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let figures = &tier.figures;
    dict.set_item("medium", tier.medium.as_str())?;
    dict.set_item("locality", tier.locality.as_str())?;
    set!(dict, figures.usage; capacity_bytes, used_bytes, chunks);
    set!(dict, figures;
        lookups, hits, lookups_overdue, evictions, sheds, refused, queued_bytes, quarantined,
        store_seconds_per_mib, under_pressure);
    dict.set_item("faults", counts(py, &Fault::ALL, &figures.faults)?)?;
    let details = PyDict::new(py);
    for (name, count) in &tier.details {
        details.set_item(name, count)?;
    }
    dict.set_item("details", details)?;
    for (direction, moved) in
        [(Direction::Load, &figures.loads), (Direction::Store, &figures.stores)]
    {
        set_moved(&dict, direction.as_str(), moved)?;
    }
    Ok(dict)
}

/// The figures of a direction, under names that begin with it.
fn set_moved(dict: &Bound<'_, PyDict>, name: &str, moved: &Moved) -> PyResult<()> {
    let py = dict.py();
    dict.set_item(format!("{name}s"), moved.chunks)?;
    dict.set_item(format!("{name}_bytes"), moved.bytes)?;
    dict.set_item(format!("{name}_seconds"), moved.seconds)?;
    dict.set_item(format!("{name}_failures"), counts(py, &Failure::ALL, &moved.failures)?)?;
    dict.set_item(format!("{name}s_in_flight"), moved.in_flight)?;
    dict.set_item(format!("{name}s_overdue"), moved.overdue)?;
    dict.set_item(format!("{name}_latency"), histogram(py, &moved.latency)?)?;
    dict.set_item(format!("{name}_breaker"), moved.breaker.as_str())?;
    dict.set_item(format!("{name}_breaker_opened"), moved.breaker_opened)
}

fn counts<'py, K>(
    py: Python<'py>,
    names: &[(&str, K)],
    counts: &[u64],
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for ((name, _), count) in names.iter().zip(counts) {
        dict.set_item(name, count)?;
    }
    Ok(dict)
}

fn histogram<'py>(py: Python<'py>, histogram: &Histogram) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("counts", histogram.counts.to_vec())?;
    dict.set_item("sum", histogram.sum)?;
    Ok(dict)
}
