//! From settings to a manager: which tiers are ours, which are Python's, and how those begin.

use std::sync::Arc;

use kvtier_core::manager::{self, ManagerError, ManagerOptions, TierSlot};
use kvtier_core::region::Region;
use kvtier_core::tier::{Locality, Medium, SecondaryTier, TierConfig, TierError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyType};

use super::shared::{Shared, Wants};
use super::{PyTier, TierPort};
use crate::convert::named;
use crate::error::{OrRaise, raise};
use crate::region;

/// One entry of `tiers`, as `kvtier.tiers.registry` resolved it.
#[derive(FromPyObject)]
struct Planned {
    /// What the core reads of it.
    fields: Py<PyAny>,
    /// What makes the tier, if that is Python.
    tier: Option<PlannedTier>,
}

#[derive(FromPyObject)]
struct PlannedTier {
    kind: String,
    tier_class: Py<PyType>,
    settings: Py<PyDict>,
    overridden: Vec<String>,
}

/// A manager with its tiers opened.
pub(crate) fn open_manager(
    py: Python<'_>,
    region: Arc<Region>,
    options: &ManagerOptions,
    tiers: Option<&Bound<'_, PyAny>>,
    namespace: &str,
) -> PyResult<manager::Manager> {
    let place = Place { region: Arc::clone(&region), key_bytes: options.key_bytes, namespace };
    open(py, tiers, &place, |configs, open_one| {
        manager::Manager::open(region, options, configs, open_one)
    })
}

/// One tier of `region`, opened, for a manager that is not ours.
pub(crate) fn open_solo(
    py: Python<'_>,
    tier: &Bound<'_, PyAny>,
    region: &Arc<Region>,
    key_bytes: usize,
    namespace: &str,
    make: impl FnOnce(TierSlot) -> manager::SoloTier + Send,
) -> PyResult<manager::SoloTier> {
    let place = Place { region: Arc::clone(region), key_bytes, namespace };
    let tiers = PyList::new(py, [tier])?;
    open(py, Some(tiers.as_any()), &place, |configs, open_one| {
        // One was given, and every one given is in the list.
        let config = &configs[0];
        let (name, limits) = (config.name.clone(), config.limits.clone());
        match open_one(0, config) {
            Ok(tier) => Ok(make(TierSlot { name, tier, limits })),
            Err(source) => Err(ManagerError::Tier { name, source }),
        }
    })
}

/// Opens one of the tiers, by its position.
type OpenOne<'a> =
    dyn FnMut(usize, &TierConfig) -> Result<Box<dyn SecondaryTier>, TierError> + Send + 'a;

/// Reads the settings of tiers, and has `make` open them and what they are for.
fn open<T: Send>(
    py: Python<'_>,
    tiers: Option<&Bound<'_, PyAny>>,
    place: &Place<'_>,
    make: impl FnOnce(&[TierConfig], &mut OpenOne<'_>) -> Result<T, ManagerError> + Send,
) -> PyResult<T> {
    py.import("kvtier._logs")?.call_method0("start")?;
    let planned: Vec<Planned> = match tiers {
        Some(tiers) => {
            py.import("kvtier.tiers.registry")?.call_method1("plan", (tiers,))?.extract()?
        }
        None => Vec::new(),
    };
    let fields = PyList::new(py, planned.iter().map(|planned| &planned.fields))?;
    let foreign: Vec<String> =
        planned.iter().filter_map(|planned| Some(planned.tier.as_ref()?.kind.clone())).collect();
    let configs = TierConfig::parse_all(&to_json(&fields)?, &foreign).or_raise(py)?;
    let mut raised = None;
    let opened = py.detach(|| {
        make(&configs, &mut |position, config| {
            // The tier itself, or the one inside it.
            let foreign = &mut |config: &TierConfig| {
                let Some(tier) = &planned[position].tier else {
                    return Err(TierError::Foreign(config.name.clone()));
                };
                Python::attach(|py| start(py, tier, config, place)).map_err(|error| {
                    let refused = TierError::Refused(error.to_string());
                    raised = Some(error);
                    refused
                })
            };
            config.open(place.region.slot_bytes(), place.key_bytes, place.namespace, foreign)
        })
    });
    match raised {
        Some(error) => Err(error),
        None => opened.or_raise(py),
    }
}

/// What a tier is made for.
struct Place<'a> {
    region: Arc<Region>,
    key_bytes: usize,
    namespace: &'a str,
}

/// Starts the tier's thread, which makes the tier.
fn start(
    py: Python<'_>,
    tier: &PlannedTier,
    config: &TierConfig,
    place: &Place<'_>,
) -> PyResult<Box<dyn SecondaryTier>> {
    let class = tier.tier_class.bind(py);
    let word = |name: &str| class.getattr(name)?.extract::<String>();
    let medium = named(py, "medium", &word("medium")?, &Medium::ALL)?;
    let locality = named(py, "locality", &word("locality")?, &Locality::ALL)?;
    let wants = |method: &str| tier.overridden.iter().any(|name| name == method);
    let wants = Wants {
        touch: wants("touch"),
        discard: wants("discard"),
        finish_request: wants("finish_request"),
    };
    let patience = config.limits.load_deadline;
    let shared = Arc::new(Shared::new(&config.name, place.key_bytes, patience, wants));
    let port = TierPort::new(Arc::clone(&shared));
    py.import("kvtier.tiers.thread")?.call_method1(
        "start",
        (
            port,
            class,
            &config.name,
            place.region.slot_bytes(),
            place.key_bytes,
            place.namespace,
            region::Region::view(py, &place.region)?,
            &tier.settings,
        ),
    )?;
    Ok(Box::new(PyTier { shared, medium, locality }))
}

/// Settings given as Python objects, as JSON; paths become strings.
fn to_json(tiers: &Bound<'_, PyList>) -> PyResult<String> {
    let py = tiers.py();
    let options = PyDict::new(py);
    options.set_item("default", py.import("kvtier.config")?.getattr("jsonable")?)?;
    let text = py.import("json")?.getattr("dumps")?.call((tiers,), Some(&options));
    text.and_then(|text| text.extract())
        .map_err(|error| raise(py, "ConfigError", format!("tiers: {}", error.value(py))))
}
