//! Figures as dicts; `kvtier.config` types and explains them.

use kvtier_core::manager::{Figure, Snapshot, Tell};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// `{"primary": PrimaryStats, "tiers": {name: TierStats}}`.
pub(crate) fn stats_dict<'py>(
    py: Python<'py>,
    snapshot: &Snapshot,
) -> PyResult<Bound<'py, PyDict>> {
    let stats = Stats::new(py)?;
    stats.primary(|tell| snapshot.primary.each(tell))?;
    for tier in &snapshot.tiers {
        let (medium, locality) = (tier.medium.as_str(), tier.locality.as_str());
        stats.tier(&tier.name, medium, locality, |tell| tier.each(tell))?;
    }
    Ok(stats.dict)
}

/// What `Manager.stats()` returns, as it is filled.
pub(crate) struct Stats<'py> {
    pub(crate) dict: Bound<'py, PyDict>,
    tiers: Bound<'py, PyDict>,
}

impl<'py> Stats<'py> {
    pub(crate) fn new(py: Python<'py>) -> PyResult<Self> {
        let (dict, tiers) = (PyDict::new(py), PyDict::new(py));
        dict.set_item("primary", PyDict::new(py))?;
        dict.set_item("tiers", &tiers)?;
        Ok(Self { dict, tiers })
    }

    /// Takes the figures of the primary tier, as `each` tells them.
    pub(crate) fn primary(&self, each: impl FnOnce(&mut Tell<'_>)) -> PyResult<()> {
        let primary = PyDict::new(self.dict.py());
        take(&primary, each)?;
        self.dict.set_item("primary", primary)
    }

    /// Takes those of a secondary tier.
    pub(crate) fn tier(
        &self,
        name: &str,
        medium: &str,
        locality: &str,
        each: impl FnOnce(&mut Tell<'_>),
    ) -> PyResult<()> {
        let tier = PyDict::new(self.dict.py());
        tier.set_item("medium", medium)?;
        tier.set_item("locality", locality)?;
        take(&tier, each)?;
        self.tiers.set_item(name, tier)
    }
}

fn take(dict: &Bound<'_, PyDict>, each: impl FnOnce(&mut Tell<'_>)) -> PyResult<()> {
    let mut result = Ok(());
    each(&mut |name, figure| {
        if result.is_ok() {
            result = set(dict, name, figure);
        }
    });
    result
}

fn set(dict: &Bound<'_, PyDict>, name: &str, figure: Figure<'_>) -> PyResult<()> {
    match figure {
        Figure::Count(count) => dict.set_item(name, count),
        Figure::Amount(amount) => dict.set_item(name, amount),
        Figure::Flag(flag) => dict.set_item(name, flag),
        Figure::Choice { at, of } => dict.set_item(name, of.get(at)),
        Figure::Counts { counts, of } => {
            let by_name = PyDict::new(dict.py());
            for (name, count) in of.iter().zip(counts) {
                by_name.set_item(name, count)?;
            }
            dict.set_item(name, by_name)
        }
        Figure::Latency { counts, sum } => {
            let latency = PyDict::new(dict.py());
            latency.set_item("counts", counts)?;
            latency.set_item("sum", sum)?;
            dict.set_item(name, latency)
        }
    }
}
