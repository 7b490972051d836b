//! Tiers as data: a JSON object a tier, checked before anything is opened.
//!
//! | field | tiers | meaning | default |
//! |---|---|---|---|
//! | `type` | all | `"memory"` or `"file"` | required |
//! | `capacity_bytes` | all | bytes the tier may take | required |
//! | `path` | file | directory | required |
//! | `name` | all | name in figures and events | the type |
//! | `threads` | all | worker threads, 1 to 64 | 2 |
//! | `load_deadline_s` | all | after which a load is a miss | 5 |
//! | `store_deadline_s` | all | after which a store is given up | 30 |
//! | `max_queued_bytes` | all | bytes of stores under way, above which new ones are shed | half the region |

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{FileStore, FileStoreConfig, MemoryStore, SecondaryTier, StoreTier, TierError};

/// A tier's description that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{tier}: {why}")]
pub struct TierConfigError {
    /// Which one: its position and what is known of its type.
    pub tier: String,
    /// What is wrong, and what is allowed.
    pub why: String,
}

/// One tier's settings.
#[derive(Debug, Clone)]
pub struct TierConfig {
    /// Its name in figures and events.
    pub name: String,
    /// Where its chunks go.
    pub place: Place,
    /// Worker threads.
    pub threads: usize,
    /// After which a load counts as a miss.
    pub load_deadline: Duration,
    /// After which a store is given up.
    pub store_deadline: Duration,
    /// Bytes of stores under way above which new ones are shed; half the region if not given.
    pub max_queued_bytes: Option<u64>,
}

/// Where a tier's chunks go.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub enum Place {
    /// Host memory.
    Memory {
        /// Bytes it may take.
        capacity_bytes: u64,
    },
    /// Files of a directory.
    File {
        /// The directory.
        path: PathBuf,
        /// Bytes it may take.
        capacity_bytes: u64,
    },
}

/// The settings that every tier has.
#[derive(Deserialize)]
#[serde(default)]
struct Common {
    name: Option<String>,
    threads: usize,
    load_deadline_s: f64,
    store_deadline_s: f64,
    max_queued_bytes: Option<u64>,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            name: None,
            threads: 2,
            load_deadline_s: 5.0,
            store_deadline_s: 30.0,
            max_queued_bytes: None,
        }
    }
}

const COMMON: [&str; 5] =
    ["name", "threads", "load_deadline_s", "store_deadline_s", "max_queued_bytes"];

impl TierConfig {
    /// Reads a JSON array of tiers.
    ///
    /// # Errors
    /// [`TierConfigError`] naming the tier, the field, and what is allowed.
    pub fn parse_all(json: &str) -> Result<Vec<Self>, TierConfigError> {
        let tiers: Vec<Map<String, Value>> =
            serde_json::from_str(json).map_err(|error| TierConfigError {
                tier: "tiers".into(),
                why: format!("expected a list of objects: {error}"),
            })?;
        let tiers = tiers
            .into_iter()
            .enumerate()
            .map(|(position, fields)| {
                let kind = fields.get("type").and_then(Value::as_str).unwrap_or("without type");
                let tier = format!("tier {position} ({kind})");
                Self::parse(fields).map_err(|why| TierConfigError { tier, why })
            })
            .collect::<Result<Vec<_>, _>>()?;
        for (position, tier) in tiers.iter().enumerate() {
            let taken = tiers[..position].iter().any(|other| other.name == tier.name);
            if taken || tier.name == "primary" {
                return Err(TierConfigError {
                    tier: format!("tier {position}"),
                    why: format!("the name {:?} is taken: give it another `name`", tier.name),
                });
            }
        }
        Ok(tiers)
    }

    fn parse(mut fields: Map<String, Value>) -> Result<Self, String> {
        let common: Map<String, Value> =
            COMMON.iter().filter_map(|&name| fields.remove_entry(name)).collect();
        let common: Common = serde_json::from_value(Value::Object(common))
            .map_err(|error| format!("one of {}: {error}", COMMON.join(", ")))?;
        let place: Place = serde_json::from_value(Value::Object(fields))
            .map_err(|error| format!("{error} (every tier also takes {})", COMMON.join(", ")))?;
        if !(1..=64).contains(&common.threads) {
            return Err(format!("threads = {} is not between 1 and 64", common.threads));
        }
        let deadline = |field: &str, seconds: f64| {
            Duration::try_from_secs_f64(seconds)
                .ok()
                .filter(|duration| !duration.is_zero() && duration.as_secs() < 86_400)
                .ok_or_else(|| format!("{field} = {seconds} is no number of seconds up to a day"))
        };
        let kind = match place {
            Place::Memory { .. } => "memory",
            Place::File { .. } => "file",
        };
        Ok(Self {
            name: common.name.unwrap_or_else(|| kind.to_owned()),
            place,
            threads: common.threads,
            load_deadline: deadline("load_deadline_s", common.load_deadline_s)?,
            store_deadline: deadline("store_deadline_s", common.store_deadline_s)?,
            max_queued_bytes: common.max_queued_bytes,
        })
    }

    /// Opens the tier for chunks of `chunk_bytes`, keys of `key_bytes` and a namespace.
    ///
    /// # Errors
    /// [`TierError`].
    pub fn open(
        &self,
        chunk_bytes: usize,
        key_bytes: usize,
        namespace: &str,
    ) -> Result<Box<dyn SecondaryTier>, TierError> {
        let threads = |source| TierError::Io {
            what: "starting threads for",
            path: PathBuf::from(&self.name),
            source,
        };
        match &self.place {
            Place::Memory { capacity_bytes } => {
                let store = MemoryStore::new(*capacity_bytes, chunk_bytes, key_bytes)?;
                Ok(Box::new(StoreTier::start(store, self.threads).map_err(threads)?))
            }
            Place::File { path, capacity_bytes } => {
                let store = FileStore::open(&FileStoreConfig {
                    path: path.clone(),
                    capacity_bytes: *capacity_bytes,
                    chunk_bytes,
                    key_bytes,
                    namespace: namespace.to_owned(),
                    writers: self.threads,
                })?;
                Ok(Box::new(StoreTier::start(store, self.threads).map_err(threads)?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str) -> String {
        TierConfig::parse_all(json).expect_err("not usable").to_string()
    }

    #[test]
    fn defaults_and_names() {
        let tiers = TierConfig::parse_all(
            r#"[{"type":"memory","capacity_bytes":1},
                {"type":"file","path":"/x","capacity_bytes":2,"name":"disk","threads":3}]"#,
        )
        .expect("both are fine");
        assert_eq!((&*tiers[0].name, tiers[0].threads), ("memory", 2));
        assert_eq!((&*tiers[1].name, tiers[1].threads), ("disk", 3));
        assert_eq!(tiers[1].load_deadline, Duration::from_secs(5));
    }

    #[test]
    fn every_mistake_names_the_tier_the_field_and_what_is_allowed() {
        let cases = [
            (r#"{"type":"file"}"#, "tiers: expected a list"),
            (r#"[{"capacity_bytes":1}]"#, "tier 0 (without type): missing field `type`"),
            (r#"[{"type":"tape"}]"#, "expected `memory` or `file`"),
            (r#"[{"type":"file","capacity_bytes":1}]"#, "missing field `path`"),
            (r#"[{"type":"memory","capacity_bytes":-1}]"#, "tier 0 (memory): invalid value"),
            (r#"[{"type":"memory","capacity_bytes":1,"size":2}]"#, "unknown field `size`"),
            (r#"[{"type":"memory","capacity_bytes":1,"threads":0}]"#, "threads = 0"),
            (r#"[{"type":"memory","capacity_bytes":1,"threads":"2"}]"#, "invalid type: string"),
            (r#"[{"type":"memory","capacity_bytes":1,"load_deadline_s":-1}]"#, "load_deadline_s"),
            (
                r#"[{"type":"memory","capacity_bytes":1},{"type":"memory","capacity_bytes":1}]"#,
                "the name \"memory\" is taken",
            ),
            (
                r#"[{"type":"memory","capacity_bytes":1,"name":"primary"}]"#,
                "the name \"primary\" is taken",
            ),
        ];
        for (json, part) in cases {
            let message = refused(json);
            assert!(message.contains(part), "{json}: {message}");
        }
    }
}
