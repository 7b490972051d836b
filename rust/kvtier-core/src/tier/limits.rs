//! What the manager grants a tier: deadlines, what may be queued, and when it is switched off.
//!
//! | field | meaning | default |
//! |---|---|---|
//! | `load_deadline_s` | after which a load is a miss | 5 |
//! | `store_deadline_s` | after which a store is given up | 30 |
//! | `lookup_deadline_s` | how long a request is told to ask again, then it is a miss | 1; network tiers 0.02 |
//! | `load_share` | part of the primary tier's slots that its loads may hold, above 0 to 1 | 0.5 |
//! | `max_queued_bytes` | bytes of stores under way, above which stores are shed | half the region |
//! | `shed` | which stores are shed: `"newest"` or `"oldest"` | `"newest"` |
//! | `high_water_s_per_mib` | a tier that takes longer for a MiB is under pressure ... | 0.05 |
//! | `low_water_s_per_mib` | ... until it takes less than this | 0.02 |
//! | `breaker_failures` | failed jobs in a row that switch a direction off; 0 never does | 5 |
//! | `breaker_pause_s` | after which it is probed; doubles with each failed probe | 1 |
//! | `breaker_max_pause_s` | the longest pause | 60 |
//! | `offload` | `"chunk"`: new chunks only; `"request"`: all chunks of a request | `"chunk"` |

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

/// Which stores are given up when a tier can not keep up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shed {
    /// Those that would be queued.
    #[default]
    Newest,
    /// Those queued first, as far as they have not begun.
    Oldest,
}

/// Which chunks of a request a tier is offered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// Those that the request stored.
    #[default]
    Chunk,
    /// All that the request offered, resident before or not.
    Request,
}

/// A tier's limits; the table of the module says what each does.
#[derive(Debug, Clone, PartialEq)]
pub struct TierLimits {
    /// After which a load counts as a miss.
    pub load_deadline: Duration,
    /// After which a store is given up.
    pub store_deadline: Duration,
    /// After which [`Presence::Retry`](super::Presence::Retry) counts as a miss.
    pub lookup_deadline: Duration,
    /// Part of the primary tier's slots that loads may hold, so that a tier that hangs can not
    /// take them all. One whose late loads hold more than half of that gets no more.
    pub load_share: f64,
    /// Bytes of stores under way above which stores are shed; half the region if not given.
    pub max_queued_bytes: Option<u64>,
    /// Which ones.
    pub shed: Shed,
    /// Seconds a MiB above which the tier is under pressure.
    pub high_water: f64,
    /// Seconds a MiB below which it is not any more.
    pub low_water: f64,
    /// Failed jobs in a row that open the breaker; 0 never does.
    pub breaker_failures: u32,
    /// How long it stays open at first.
    pub breaker_pause: Duration,
    /// How long at most.
    pub breaker_max_pause: Duration,
    /// Which chunks of a request it is offered.
    pub offload: Offload,
}

impl Default for TierLimits {
    fn default() -> Self {
        Self {
            load_deadline: Duration::from_secs(5),
            store_deadline: Duration::from_secs(30),
            lookup_deadline: Duration::from_secs(1),
            load_share: 0.5,
            max_queued_bytes: None,
            shed: Shed::Newest,
            high_water: 0.05,
            low_water: 0.02,
            breaker_failures: 5,
            breaker_pause: Duration::from_secs(1),
            breaker_max_pause: Duration::from_secs(60),
            offload: Offload::Chunk,
        }
    }
}

impl TierLimits {
    /// The defaults of a tier behind a network: an engine rather computes than waits for it.
    pub fn of_network() -> Self {
        Self { lookup_deadline: Duration::from_millis(20), ..Self::default() }
    }
}

/// The settings as they are written; what is absent keeps its default.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    load_deadline_s: Option<f64>,
    store_deadline_s: Option<f64>,
    lookup_deadline_s: Option<f64>,
    load_share: Option<f64>,
    max_queued_bytes: Option<u64>,
    shed: Option<Shed>,
    high_water_s_per_mib: Option<f64>,
    low_water_s_per_mib: Option<f64>,
    breaker_failures: Option<u32>,
    breaker_pause_s: Option<f64>,
    breaker_max_pause_s: Option<f64>,
    offload: Option<Offload>,
}

impl TierLimits {
    /// The names of the settings.
    pub const FIELDS: [&str; 12] = [
        "load_deadline_s",
        "store_deadline_s",
        "lookup_deadline_s",
        "load_share",
        "max_queued_bytes",
        "shed",
        "high_water_s_per_mib",
        "low_water_s_per_mib",
        "breaker_failures",
        "breaker_pause_s",
        "breaker_max_pause_s",
        "offload",
    ];

    /// Reads the settings that are given, all of them ours; the others are `default`'s.
    pub(super) fn parse(fields: Map<String, Value>, default: &Self) -> Result<Self, String> {
        let mut written = Map::new();
        for (name, value) in fields {
            // One at a time, so that an error of the type tells which.
            let one = Map::from_iter([(name.clone(), value.clone())]);
            serde_json::from_value::<Written>(Value::Object(one))
                .map_err(|error| format!("{name} = {value}: {error}"))?;
            written.insert(name, value);
        }
        let written: Written =
            serde_json::from_value(Value::Object(written)).map_err(|error| error.to_string())?;
        let limits = Self {
            load_deadline: time("load_deadline_s", written.load_deadline_s, default.load_deadline)?,
            store_deadline: time(
                "store_deadline_s",
                written.store_deadline_s,
                default.store_deadline,
            )?,
            lookup_deadline: time(
                "lookup_deadline_s",
                written.lookup_deadline_s,
                default.lookup_deadline,
            )?,
            load_share: written.load_share.unwrap_or(default.load_share),
            max_queued_bytes: written.max_queued_bytes,
            shed: written.shed.unwrap_or(default.shed),
            high_water: written.high_water_s_per_mib.unwrap_or(default.high_water),
            low_water: written.low_water_s_per_mib.unwrap_or(default.low_water),
            breaker_failures: written.breaker_failures.unwrap_or(default.breaker_failures),
            breaker_pause: time("breaker_pause_s", written.breaker_pause_s, default.breaker_pause)?,
            breaker_max_pause: time(
                "breaker_max_pause_s",
                written.breaker_max_pause_s,
                default.breaker_max_pause,
            )?,
            offload: written.offload.unwrap_or(default.offload),
        };
        let share = limits.load_share;
        if !(share > 0.0 && share <= 1.0) {
            return Err(format!("load_share = {share} is not above 0 and at most 1"));
        }
        let (low, high) = (limits.low_water, limits.high_water);
        if !(low > 0.0 && low <= high && high.is_finite()) {
            return Err(format!(
                "low_water_s_per_mib = {low} and high_water_s_per_mib = {high}: both must be above \
                 0, the low mark at most the high one"
            ));
        }
        if limits.breaker_pause > limits.breaker_max_pause {
            return Err(format!(
                "breaker_pause_s = {} is above breaker_max_pause_s = {}",
                limits.breaker_pause.as_secs_f64(),
                limits.breaker_max_pause.as_secs_f64()
            ));
        }
        Ok(limits)
    }
}

fn time(field: &str, seconds: Option<f64>, default: Duration) -> Result<Duration, String> {
    let Some(seconds) = seconds else {
        return Ok(default);
    };
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| !duration.is_zero() && duration.as_secs() < 86_400)
        .ok_or_else(|| format!("{field} = {seconds} is no number of seconds up to a day"))
}
