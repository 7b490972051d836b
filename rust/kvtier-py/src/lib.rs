//! `kvtier._kvtier`: the Rust core for Python.
//!
//! No logic here: a method converts its arguments, leaves the interpreter where the call may
//! take longer than about 10 microseconds, delegates to `kvtier-core`, and maps errors.
//! What has to be here, since it is about the interpreter: `tier` runs tiers that are written in
//! Python, `logging` hands log lines to Python.
//! `python/kvtier/_kvtier.pyi` documents every name.

mod convert;
mod copier;
mod error;
mod fork;
mod logging;
mod manager;
mod region;
mod replay;
mod stats;
mod store;
mod tier;

#[pyo3::pymodule]
mod _kvtier {
    use kvtier_core::index::PolicyKind;
    use kvtier_core::manager::{Histogram, Lookup};
    use kvtier_core::tier::Place;
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_export]
    use super::copier::{HostCopier, Moves};
    #[pymodule_export]
    use super::logging::LogLines;
    #[pymodule_export]
    use super::manager::{Manager, PreparedStore};
    #[pymodule_export]
    use super::region::Region;
    #[pymodule_export]
    use super::replay::Trace;
    #[pymodule_export]
    use super::store::{ObjectAudit, RedisAudit, StoreAudit, inspect_store};
    #[pymodule_export]
    use super::tier::{TierJob, TierPort};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("build_profile", profile)?;
        let policies = PolicyKind::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        module.add("POLICIES", PyTuple::new(module.py(), policies)?)?;
        module.add("TIER_TYPES", PyTuple::new(module.py(), Place::TYPES)?)?;
        module.add("LATENCY_BUCKETS", PyTuple::new(module.py(), Histogram::bounds())?)?;
        module.add("MISS", Lookup::Miss as u8)?;
        module.add("HIT", Lookup::Hit as u8)?;
        module.add("HIT_PENDING", Lookup::HitPending as u8)?;
        module.add("RETRY", Lookup::Retry as u8)
    }
}
