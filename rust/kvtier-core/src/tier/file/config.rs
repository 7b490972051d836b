//! The settings of a file tier.
//!
//! | field | meaning | default |
//! |---|---|---|
//! | `path` | directory, made if absent | required |
//! | `capacity_bytes` | bytes that everything in it may take | required |
//! | `policy` | which chunks go first, by a name of [`PolicyKind::ALL`] | `"lru"` |
//! | `io` | `"auto"`, `"uring"`, `"threads"` or `"mmap"` | `"auto"` |
//! | `direct` | `"auto"`, `true` or `false`: past the page cache | `"auto"` |
//! | `threads` | threads where io_uring is not used, 1 to 64 | 2 |
//! | `flush_interval_s` | what a power loss may lose, 0.01 to 3600 | 5 |
//! | `min_free_bytes` | free bytes of the device that it leaves alone when it grows | 0 |

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Deserializer, de::Error};

use crate::index::PolicyKind;
use crate::tier::io::{DirectKind, IoKind};

/// A file tier's settings; the table of the module says what each does.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSettings {
    /// The directory.
    pub path: PathBuf,
    /// Bytes that everything in it may take.
    pub capacity_bytes: u64,
    /// Which chunks go first.
    #[serde(default, deserialize_with = "policy")]
    pub policy: PolicyKind,
    /// Which engine moves the bytes.
    #[serde(default)]
    pub io: IoKind,
    /// Whether past the page cache.
    #[serde(default)]
    pub direct: DirectKind,
    /// Worker threads, where the engine has any.
    #[serde(default = "default_threads")]
    pub threads: usize,
    /// After which what was stored survives a power loss.
    #[serde(
        default = "default_interval",
        deserialize_with = "interval",
        rename = "flush_interval_s"
    )]
    pub flush_interval: Duration,
    /// Free bytes of the device that growing leaves alone.
    #[serde(default)]
    pub min_free_bytes: u64,
}

impl FileSettings {
    /// The defaults for a directory and a capacity.
    pub fn new(path: impl Into<PathBuf>, capacity_bytes: u64) -> Self {
        Self {
            path: path.into(),
            capacity_bytes,
            policy: PolicyKind::default(),
            io: IoKind::default(),
            direct: DirectKind::default(),
            threads: default_threads(),
            flush_interval: default_interval(),
            min_free_bytes: 0,
        }
    }
}

fn default_threads() -> usize {
    2
}

fn default_interval() -> Duration {
    Duration::from_secs(5)
}

fn policy<'de, D: Deserializer<'de>>(from: D) -> Result<PolicyKind, D::Error> {
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

fn interval<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let seconds = f64::deserialize(from)?;
    if (0.01..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(D::Error::custom(format!("flush_interval_s = {seconds} is not between 0.01 and 3600")))
    }
}
