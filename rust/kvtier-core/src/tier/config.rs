//! Tiers as data: a JSON object a tier, checked before anything is opened.
//!
//! | field | tiers | meaning | default |
//! |---|---|---|---|
//! | `type` | all | `"memory"`, `"file"`, `"redis"`, `"faulty"`, or a tier made elsewhere | required |
//! | `name` | all | name in figures and events | the type |
//! | `capacity_bytes` | memory, file | bytes the tier may take | required |
//! | `threads` | memory, file | worker threads, 1 to 64 | 2 |
//! | `inner` | faulty | the tier that does the work | required |
//! | `faults` | faulty | what goes wrong: [`Faults`] | nothing |
//!
//! the fields of [`FileSettings`], [`ObjectSettings`] and [`RedisSettings`], and the
//! [limits](super::TierLimits) that every tier takes.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    Faults, FaultyTier, FileSettings, FileTier, MemoryStore, ObjectSettings, ObjectTier,
    RedisSettings, RedisTier, SecondaryTier, StoreTier, TierError, TierLimits,
};

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
    /// What the manager grants it.
    pub limits: TierLimits,
}

/// Where a tier's chunks go.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub enum Place {
    /// Host memory.
    Memory {
        /// Bytes it may take.
        capacity_bytes: u64,
        /// Worker threads.
        #[serde(default = "two")]
        threads: usize,
    },
    /// Files of a directory.
    File(FileSettings),
    /// Objects in a bucket.
    Object(ObjectSettings),
    /// Redis or Valkey.
    Redis(Box<RedisSettings>),
    /// A tier that goes wrong on purpose, around another: for tests.
    #[serde(skip)]
    Faulty {
        /// The tier that does the work; its limits and name do not count.
        inner: Box<TierConfig>,
        /// What goes wrong.
        faults: Faults,
    },
    /// A tier that somebody else makes, and whose own fields they check.
    #[serde(skip)]
    Foreign,
}

/// The fields of [`Place::Faulty`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultyFields {
    inner: Map<String, Value>,
    #[serde(default)]
    faults: Faults,
}

/// Opens a tier that is made elsewhere.
pub type OpenForeign<'a> = dyn FnMut(&TierConfig) -> Result<Box<dyn SecondaryTier>, TierError> + 'a;

impl Place {
    /// The types that are made here.
    pub const TYPES: [&str; 5] = ["memory", "file", "object", "redis", "faulty"];
    /// Those of them that are behind a network.
    const NETWORK: [&str; 2] = ["object", "redis"];
}

fn two() -> usize {
    2
}

impl TierConfig {
    /// Reads a JSON array of tiers. The types in `foreign` are made elsewhere: only the fields
    /// that all tiers have are read.
    ///
    /// # Errors
    /// [`TierConfigError`] naming the tier, the field, and what is allowed.
    pub fn parse_all(json: &str, foreign: &[String]) -> Result<Vec<Self>, TierConfigError> {
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
                Self::parse(fields, foreign).map_err(|why| TierConfigError { tier, why })
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

    fn parse(mut fields: Map<String, Value>, foreign: &[String]) -> Result<Self, String> {
        let kind = fields.get("type").and_then(Value::as_str).map(str::to_owned);
        let name = match fields.remove("name") {
            None => None,
            Some(Value::String(name)) if !name.is_empty() => Some(name),
            Some(other) => return Err(format!("name = {other} is no text")),
        };
        let limits: Map<String, Value> =
            TierLimits::FIELDS.iter().filter_map(|&name| fields.remove_entry(name)).collect();
        let is_network = kind.as_deref().is_some_and(|kind| Place::NETWORK.contains(&kind));
        let default = if is_network { TierLimits::of_network() } else { TierLimits::default() };
        let limits = TierLimits::parse(limits, &default)?;
        let is_foreign = kind.as_ref().is_some_and(|kind| foreign.contains(kind));
        if let Some(kind) = kind.as_deref().filter(|kind| !Place::TYPES.contains(kind))
            && !is_foreign
        {
            let known = Place::TYPES.map(|name| format!("`{name}`")).join(" or ");
            return Err(format!("unknown type `{kind}`, expected {known}"));
        }
        let place = if is_foreign {
            Place::Foreign
        } else if kind.as_deref() == Some("faulty") {
            fields.remove("type");
            let FaultyFields { inner, faults } =
                serde_json::from_value(Value::Object(fields)).map_err(|error| error.to_string())?;
            faults.check()?;
            let inner = Self::parse(inner, foreign).map_err(|error| format!("inner: {error}"))?;
            Place::Faulty { inner: Box::new(inner), faults }
        } else {
            serde_json::from_value(Value::Object(fields)).map_err(|error| {
                format!("{error} (every tier also takes name, {})", TierLimits::FIELDS.join(", "))
            })?
        };
        if let Place::Memory { threads, .. } | Place::File(FileSettings { threads, .. }) = &place
            && !(1..=64).contains(threads)
        {
            return Err(format!("threads = {threads} is not between 1 and 64"));
        }
        if let Place::Object(settings) = &place {
            settings.check()?;
        }
        if let Place::Redis(settings) = &place {
            settings.check()?;
        }
        // There is a type, or `place` had been refused.
        Ok(Self { name: name.or(kind).unwrap_or_default(), place, limits })
    }

    /// Opens the tier for chunks of `chunk_bytes`, keys of `key_bytes` and a namespace; has
    /// `foreign` open what is made elsewhere.
    ///
    /// # Errors
    /// [`TierError`].
    pub fn open(
        &self,
        chunk_bytes: usize,
        key_bytes: usize,
        namespace: &str,
        foreign: &mut OpenForeign<'_>,
    ) -> Result<Box<dyn SecondaryTier>, TierError> {
        let failed = |source| TierError::Io {
            what: "starting threads for",
            path: PathBuf::from(&self.name),
            source,
        };
        match &self.place {
            Place::Memory { capacity_bytes, threads } => {
                let store = MemoryStore::new(*capacity_bytes, chunk_bytes, key_bytes)?;
                Ok(Box::new(StoreTier::start(store, *threads).map_err(failed)?))
            }
            Place::File(settings) => {
                Ok(Box::new(FileTier::open(settings, chunk_bytes, key_bytes, namespace)?))
            }
            Place::Object(settings) => Ok(Box::new(ObjectTier::open(
                settings,
                &self.name,
                &self.limits,
                chunk_bytes,
                key_bytes,
                namespace,
            )?)),
            Place::Redis(settings) => Ok(Box::new(RedisTier::open(
                settings,
                &self.name,
                &self.limits,
                chunk_bytes,
                key_bytes,
                namespace,
            )?)),
            Place::Faulty { inner, faults } => {
                let inner = inner.open(chunk_bytes, key_bytes, namespace, foreign)?;
                Ok(Box::new(FaultyTier::start(inner, *faults).map_err(failed)?))
            }
            Place::Foreign => foreign(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::Shed;

    fn refused(json: &str) -> String {
        TierConfig::parse_all(json, &[]).expect_err("not usable").to_string()
    }

    #[test]
    fn defaults_and_names() {
        let tiers = TierConfig::parse_all(
            r#"[{"type":"memory","capacity_bytes":1},
                {"type":"file","path":"/x","capacity_bytes":2,"name":"disk","threads":3},
                {"type":"tape","reels":4,"shed":"oldest"}]"#,
            &["tape".into()],
        )
        .expect("all are fine");
        assert_eq!(
            tiers.iter().map(|tier| &*tier.name).collect::<Vec<_>>(),
            ["memory", "disk", "tape"]
        );
        assert!(matches!(tiers[0].place, Place::Memory { threads: 2, .. }));
        assert!(matches!(tiers[1].place, Place::File(FileSettings { threads: 3, .. })));
        assert_eq!(tiers[1].limits, TierLimits::default());
        assert_eq!(tiers[2].limits.shed, Shed::Oldest);
    }

    #[test]
    fn a_tier_behind_a_network_is_not_waited_for() {
        let json = r#"[{"type":"redis","url":"redis://localhost"},
                       {"type":"redis","nodes":["a:1"],"name":"far","lookup_deadline_s":2}]"#;
        let tiers = TierConfig::parse_all(json, &[]).expect("both are fine");
        assert_eq!(tiers[0].limits, TierLimits::of_network());
        assert_eq!(tiers[0].limits.lookup_deadline.as_millis(), 20);
        assert_eq!(tiers[1].limits.lookup_deadline.as_secs(), 2);
        let error = refused(r#"[{"type":"redis","url":"http://u:hunter2@localhost"}]"#);
        assert!(error.contains("url is no redis://") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn the_types_made_here_are_those_that_are_listed() {
        for name in Place::TYPES {
            let message = refused(&format!(r#"[{{"type":"{name}"}}]"#));
            assert!(message.contains("missing field"), "{message}");
        }
    }

    #[test]
    fn every_mistake_names_the_tier_the_field_and_what_is_allowed() {
        let cases = [
            (r#"{"type":"file"}"#, "tiers: expected a list"),
            (r#"[{"capacity_bytes":1}]"#, "tier 0 (without type): missing field `type`"),
            (r#"[{"type":"tape"}]"#, "expected `memory` or `file`"),
            (r#"[{"type":"file","capacity_bytes":1}]"#, "missing field `path`"),
            (r#"[{"type":"file","path":"/x","capacity_bytes":1,"io":"dma"}]"#, "`uring`"),
            (r#"[{"type":"file","path":"/x","capacity_bytes":1,"direct":1}]"#, "direct = 1"),
            (r#"[{"type":"file","path":"/x","capacity_bytes":1,"policy":"x"}]"#, "one of lru"),
            (r#"[{"type":"file","path":"/x","capacity_bytes":1,"threads":65}]"#, "threads = 65"),
            (r#"[{"type":"file","path":"/x","capacity_bytes":1,"depth":1}]"#, "field `depth`"),
            (
                r#"[{"type":"file","path":"/x","capacity_bytes":1,"flush_interval_s":0}]"#,
                "flush_interval_s = 0 is not between",
            ),
            (r#"[{"type":"memory","capacity_bytes":-1}]"#, "tier 0 (memory): invalid value"),
            (r#"[{"type":"memory","capacity_bytes":1,"size":2}]"#, "unknown field `size`"),
            (r#"[{"type":"memory","capacity_bytes":1,"threads":0}]"#, "threads = 0"),
            (r#"[{"type":"memory","capacity_bytes":1,"threads":"2"}]"#, "invalid type: string"),
            (r#"[{"type":"memory","capacity_bytes":1,"load_deadline_s":-1}]"#, "load_deadline_s"),
            (r#"[{"type":"memory","capacity_bytes":1,"shed":"all"}]"#, "`newest` or `oldest`"),
            (r#"[{"type":"memory","capacity_bytes":1,"low_water_s_per_mib":9}]"#, "at most the"),
            (r#"[{"type":"memory","capacity_bytes":1,"breaker_pause_s":99}]"#, "breaker_max_pause"),
            (r#"[{"type":"memory","capacity_bytes":1,"name":7}]"#, "name = 7 is no text"),
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
