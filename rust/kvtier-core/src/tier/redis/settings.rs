//! The settings of the redis tier.
//!
//! | field | meaning | default |
//! |---|---|---|
//! | `url` | `redis://[user[:password]@]host[:port][/database]`, `rediss://` with TLS | this or `nodes` |
//! | `nodes` | `host:port` of servers to begin with; any of a cluster | this or `url` |
//! | `username`, `password` | of an ACL user; a password alone is `requirepass`'s | those of `url` |
//! | `database` | number, stand-alone servers only | that of `url`, or 0 |
//! | `tls` | whether to speak TLS | as `url` says |
//! | `tls_ca` | PEM file with the certificates to trust | the system's |
//! | `prefix` | first part of all keys on the server | `"kvtier"` |
//! | `ttl_s` | seconds after which the server drops a chunk | never |
//! | `connections` | connections a node for loads, as many for stores; look-ups have two more | 4 |
//! | `threads` | threads of the tier | 2 |
//! | `part_bytes` | chunks above this are split into several values | 4 MiB |
//! | `max_in_flight_bytes` | bytes of all transfers under way | 256 MiB |
//! | `connect_timeout_s` | seconds for a connection to be made | 1 |
//! | `response_timeout_s` | seconds without a byte after which a node counts as hanging | 1 |
//! | `hedge_after_s` | seconds after which a read is sent to a replica as well; 0 never does | 0.05 |
//! | `present_for_s`, `absent_for_s` | seconds that a look-up's answer is remembered | 60, 1 |
//! | `known_keys` | keys that are remembered, 18 to 37 bytes each | 1,000,000 |

use std::path::PathBuf;
use std::time::Duration;

use redis::{ConnectionAddr, IntoConnectionInfo};
use serde::Deserialize;

use super::endpoint::Endpoint;
use crate::tier::TierError;
use crate::tier::network::Secret;

/// See the module.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "the table of the module explains every field")]
pub struct RedisSettings {
    pub url: Option<Secret>,
    pub nodes: Vec<String>,
    pub username: Option<String>,
    pub password: Option<Secret>,
    pub database: Option<u32>,
    pub tls: Option<bool>,
    pub tls_ca: Option<PathBuf>,
    pub prefix: String,
    pub ttl_s: Option<u32>,
    pub connections: usize,
    pub threads: usize,
    pub part_bytes: usize,
    pub max_in_flight_bytes: u64,
    pub connect_timeout_s: f64,
    pub response_timeout_s: f64,
    pub hedge_after_s: f64,
    pub present_for_s: f64,
    pub absent_for_s: f64,
    pub known_keys: usize,
}

impl Default for RedisSettings {
    fn default() -> Self {
        Self {
            url: None,
            nodes: Vec::new(),
            username: None,
            password: None,
            database: None,
            tls: None,
            tls_ca: None,
            prefix: "kvtier".to_owned(),
            ttl_s: None,
            connections: 4,
            threads: 2,
            part_bytes: 4 << 20,
            max_in_flight_bytes: 256 << 20,
            connect_timeout_s: 1.0,
            response_timeout_s: 1.0,
            hedge_after_s: 0.05,
            present_for_s: 60.0,
            absent_for_s: 1.0,
            known_keys: 1_000_000,
        }
    }
}

/// Where the servers are, and who asks.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) seeds: Vec<Endpoint>,
    pub(super) tls: bool,
    pub(super) username: Option<String>,
    pub(super) password: Option<Secret>,
    pub(super) database: u32,
}

impl RedisSettings {
    /// Reads a JSON object of the fields.
    ///
    /// # Errors
    /// [`TierError::Setting`] for what can not be.
    pub fn parse(json: &str) -> Result<Self, TierError> {
        let settings = serde_json::from_str::<Self>(json).map_err(|error| error.to_string());
        let checked = settings.and_then(|settings| settings.check().map(|()| settings));
        checked.map_err(TierError::Setting)
    }

    /// Refuses what can not be.
    ///
    /// # Errors
    /// The field, its value and what is allowed; never the URL, which may hold a password.
    pub(in crate::tier) fn check(&self) -> Result<(), String> {
        self.target()?;
        let counts = [
            ("connections", self.connections, 1, 64),
            ("threads", self.threads, 1, 64),
            ("part_bytes", self.part_bytes, 4096, 512 << 20),
            ("known_keys", self.known_keys, 1024, 1 << 30),
        ];
        for (name, given, least, most) in counts {
            if !(least..=most).contains(&given) {
                return Err(format!("{name} = {given} is not between {least} and {most}"));
            }
        }
        if self.max_in_flight_bytes < 1 << 20 {
            let given = self.max_in_flight_bytes;
            return Err(format!("max_in_flight_bytes = {given} is less than 1 MiB"));
        }
        if self.ttl_s == Some(0) {
            return Err("ttl_s = 0 would drop every chunk: leave it out for no expiry".to_owned());
        }
        for (name, given, may_be_zero) in [
            ("connect_timeout_s", self.connect_timeout_s, false),
            ("response_timeout_s", self.response_timeout_s, false),
            ("hedge_after_s", self.hedge_after_s, true),
            ("present_for_s", self.present_for_s, false),
            ("absent_for_s", self.absent_for_s, false),
        ] {
            let fits = given <= 86_400.0 && (given > 0.0 || (may_be_zero && given == 0.0));
            if !fits {
                return Err(format!("{name} = {given} is no number of seconds up to a day"));
            }
        }
        let plain = |byte: u8| byte.is_ascii_graphic() && !b"{}*?[]\\".contains(&byte);
        if self.prefix.is_empty() || self.prefix.len() > 128 || !self.prefix.bytes().all(plain) {
            return Err(format!(
                "prefix = {:?}: use 1 to 128 letters, digits and signs but for {{ }} * ? [ ] \\",
                self.prefix
            ));
        }
        Ok(())
    }

    pub(super) fn target(&self) -> Result<Target, String> {
        let mut target = match &self.url {
            Some(url) => parse_url(url)?,
            None => Target {
                seeds: Vec::new(),
                tls: false,
                username: None,
                password: None,
                database: 0,
            },
        };
        for node in &self.nodes {
            target.seeds.push(node.parse().map_err(|why| format!("nodes: {node:?} {why}"))?);
        }
        if target.seeds.is_empty() {
            return Err("missing field `url` (or `nodes`, a list of \"host:port\")".to_owned());
        }
        target.tls = self.tls.unwrap_or(target.tls);
        target.username = self.username.clone().or(target.username);
        target.password = self.password.clone().or(target.password);
        target.database = self.database.unwrap_or(target.database);
        if target.username.is_some() && target.password.is_none() {
            return Err("username is given without a password".to_owned());
        }
        Ok(target)
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.connect_timeout_s)
    }

    pub(super) fn response_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.response_timeout_s)
    }

    pub(super) fn hedge_after(&self) -> Option<Duration> {
        (self.hedge_after_s > 0.0).then(|| Duration::from_secs_f64(self.hedge_after_s))
    }
}

/// What a URL says. The crate's parser knows no TLS without its own connections, so the scheme is
/// read here and the rest by it; its messages name no value.
fn parse_url(url: &Secret) -> Result<Target, String> {
    let expected = "url is no redis://[user[:password]@]host[:port][/database], nor one with \
                    rediss:// for TLS";
    let (scheme, rest) = url.expose().split_once("://").ok_or(expected)?;
    let tls = match scheme {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        _ => return Err(expected.to_owned()),
    };
    let info = format!("redis://{rest}")
        .into_connection_info()
        .map_err(|error| format!("{expected} ({})", error.category()))?;
    let ConnectionAddr::Tcp(host, port) = info.addr() else {
        return Err(expected.to_owned());
    };
    let redis = info.redis_settings();
    Ok(Target {
        seeds: vec![Endpoint { host: host.clone(), port: *port }],
        tls,
        username: redis.username().map(str::to_owned),
        password: redis.password().map(Secret::new),
        database: u32::try_from(redis.db()).map_err(|_| expected)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(value: Value) -> Result<Target, String> {
        let settings: RedisSettings =
            serde_json::from_value(value).map_err(|error| error.to_string())?;
        settings.check()?;
        settings.target()
    }

    #[test]
    fn a_url_says_it_all_and_fields_count_more() {
        let target = read(json!({"url": "rediss://me:p%40ss@cache.local:7000/3"})).expect("fine");
        assert_eq!(target.seeds[0].to_string(), "cache.local:7000");
        assert!(target.tls);
        assert_eq!(target.username.as_deref(), Some("me"));
        assert_eq!(target.password.expect("given").expose(), "p@ss");
        assert_eq!(target.database, 3);
        let target = read(json!({"url": "redis://[::1]", "nodes": ["a:1", "[fe80::1]:2"],
                                 "password": "other", "database": 0}))
        .expect("fine");
        let seeds: Vec<String> = target.seeds.iter().map(Endpoint::to_string).collect();
        assert_eq!(seeds, ["[::1]:6379", "a:1", "[fe80::1]:2"]);
        assert_eq!((target.tls, target.database), (false, 0));
    }

    #[test]
    fn every_mistake_names_the_field_and_none_shows_a_secret() {
        let url = "redis://localhost";
        for (value, part) in [
            (json!({}), "missing field `url`"),
            (json!({"url": "http://u:hunter2@localhost"}), "url is no redis://"),
            (json!({"url": "redis://u:hunter2@localhost/x"}), "url is no redis://"),
            (json!({"url": "redis://u:hunter2@local host"}), "url is no redis://"),
            (json!({"url": url, "nodes": ["localhost"]}), "\"localhost\" has no port"),
            (json!({"url": url, "username": "me"}), "without a password"),
            (json!({"url": url, "password": 271_828}), "text"),
            (json!({"url": url, "ttl_s": 0}), "ttl_s = 0"),
            (json!({"url": url, "connections": 0}), "connections = 0"),
            (json!({"url": url, "part_bytes": 1}), "part_bytes = 1"),
            (json!({"url": url, "response_timeout_s": 0}), "response_timeout_s = 0"),
            (json!({"url": url, "prefix": "a{b}"}), "prefix = "),
            (json!({"url": url, "prefx": "a"}), "unknown field `prefx`"),
        ] {
            let error = read(value).expect_err(part);
            assert!(error.contains(part), "{error}");
            assert!(!error.contains("hunter2") && !error.contains("271828"), "{error}");
        }
    }
}
