//! Errors of the core become the classes of `kvtier.errors`.

use kvtier_core::copy::{CopyError, MoveError};
use kvtier_core::index::{IndexError, UnknownPolicy};
use kvtier_core::key::KeyError;
use kvtier_core::manager::{ManagerError, SoloError};
use kvtier_core::page::PageError;
use kvtier_core::region::RegionError;
use kvtier_core::tier::{TierConfigError, TierError};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// An error of a class of `kvtier.errors`.
pub(crate) fn raise(py: Python<'_>, class: &str, message: String) -> PyErr {
    let made = py
        .import("kvtier.errors")
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call1((message,)));
    match made {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

/// Names the class of `kvtier.errors` that an error of the core becomes.
pub(crate) trait PythonClass: std::error::Error {
    fn class(&self) -> &'static str;
}

impl PythonClass for KeyError {
    fn class(&self) -> &'static str {
        match self {
            Self::Unsupported(_) => "ConfigError",
            _ => "KeyLengthError",
        }
    }
}

impl PythonClass for IndexError {
    fn class(&self) -> &'static str {
        match self {
            Self::Key(error) => error.class(),
            Self::Capacity(_) => "ConfigError",
            Self::Unknown(_) => "UnknownKeyError",
            Self::NotReady(_) => "KeyNotReadyError",
            Self::Duplicate(_) => "DuplicateKeyError",
            Self::PinOverflow(_) => "PinOverflowError",
            _ => "KeyStateError",
        }
    }
}

impl PythonClass for RegionError {
    fn class(&self) -> &'static str {
        match self {
            Self::Shape { .. } | Self::Unaligned { .. } => "ConfigError",
            _ => "RegionError",
        }
    }
}

impl PythonClass for TierError {
    fn class(&self) -> &'static str {
        match self {
            Self::Identity { .. } => "StoreIdentityError",
            Self::Locked { .. } => "StoreLockedError",
            Self::Format { .. } => "StoreFormatError",
            Self::Unreadable { .. } => "StoreDamagedError",
            Self::ReadOnly { .. } => "StoreReadOnlyError",
            Self::Capacity { .. }
            | Self::DeviceTooSmall { .. }
            | Self::Setting(_)
            | Self::Unsupported { .. } => "ConfigError",
            Self::Region(error) => error.class(),
            Self::Index(error) => error.class(),
            _ => "TierError",
        }
    }
}

impl PythonClass for ManagerError {
    fn class(&self) -> &'static str {
        match self {
            Self::Index(error) => error.class(),
            Self::Tier { source, .. } => source.class(),
            Self::UnknownTier { .. } | Self::TooManyTiers(_) => "ConfigError",
            Self::Closed => "ClosedError",
            _ => "KvTierError",
        }
    }
}

impl PythonClass for SoloError {
    fn class(&self) -> &'static str {
        match self {
            Self::Key(error) => error.class(),
            Self::Closed => "ClosedError",
            _ => "TierError",
        }
    }
}

impl PythonClass for PageError {
    fn class(&self) -> &'static str {
        "StatsPageError"
    }
}

impl PythonClass for CopyError {
    fn class(&self) -> &'static str {
        "TransferError"
    }
}

impl PythonClass for MoveError {
    fn class(&self) -> &'static str {
        "TransferError"
    }
}

impl PythonClass for TierConfigError {
    fn class(&self) -> &'static str {
        "ConfigError"
    }
}

impl PythonClass for UnknownPolicy {
    fn class(&self) -> &'static str {
        "ConfigError"
    }
}

/// `?` for errors of the core.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: PythonClass> OrRaise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, error.class(), error.to_string()))
    }
}

/// A `TypeError` that says what was expected and what came.
pub(crate) fn wrong_type(what: &str, expected: &str, found: &Bound<'_, PyAny>) -> PyErr {
    let found = found.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("{what}: expected {expected}, found {found}"))
}
