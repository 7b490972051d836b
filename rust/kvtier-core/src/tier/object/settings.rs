//! Where the objects are, who may read them, and how much is done at once.
//!
//! | field | meaning | default |
//! |---|---|---|
//! | `url` | `s3://BUCKET/PREFIX`, `gs://...`, `az://...`, `file:///DIRECTORY` | required |
//! | `endpoint` | of S3, another server than Amazon's | Amazon's |
//! | `region` | of S3 | `AWS_REGION`, or us-east-1 |
//! | `access_key_id`, `secret_access_key`, `session_token` | of S3 | environment, or the machine's role |
//! | `allow_http` | without encryption | false |
//! | `conditional_put` | store only what is absent | true |
//! | `part_bytes` | above it an object is moved in parts, 5 MiB at least | 8 MiB |
//! | `connections` | chunks under way at once in each direction, 1 to 1024 | 32 |
//! | `max_in_flight_bytes` | bytes under way at once in each direction | 256 MiB |
//! | `listing_interval_s` | age at which a listing says nothing any more of what is absent | 30 |
//! | `known_keys` | keys of which something is known, at most | 1,000,000 |
//! | `connect_timeout_s` | to connect | 1 |
//! | `idle_timeout_s` | without a byte, then a request is given up | 3 |
//! | `threads` | 1 to 64 | 2 |

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, ObjectStoreScheme, RetryConfig};
use serde::Deserialize;
use url::Url;

use crate::tier::network::Secret;
use crate::tier::{Locality, TierError};

/// S3 takes no smaller part, but for the last one.
const LEAST_PART_BYTES: u64 = 5 << 20;

/// The fields of a tier of type `"object"`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectSettings {
    /// `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or `file:///DIRECTORY`.
    pub url: String,
    /// Of S3, another server than Amazon's: `https://HOST:PORT`.
    pub endpoint: Option<String>,
    /// Of S3.
    pub region: Option<String>,
    /// Of S3; what is not given is taken from the environment, or from the machine's role.
    pub access_key_id: Option<String>,
    /// Of S3.
    pub secret_access_key: Option<Secret>,
    /// Of S3, for credentials that expire.
    pub session_token: Option<Secret>,
    /// Allows `http://`, which anybody on the way can read.
    #[serde(default)]
    pub allow_http: bool,
    /// Stores only if the key is absent. A server that does not know how is noticed.
    #[serde(default = "yes")]
    pub conditional_put: bool,
    /// Objects above this are moved in parts of it, side by side.
    #[serde(default = "part_bytes")]
    pub part_bytes: u64,
    /// Chunks under way at once, in each direction.
    #[serde(default = "connections")]
    pub connections: usize,
    /// Bytes under way at once, in each direction.
    #[serde(default = "in_flight_bytes")]
    pub max_in_flight_bytes: u64,
    /// Seconds after which a listing of the bucket is too old to say that a key is absent.
    #[serde(default = "listing_interval_s")]
    pub listing_interval_s: f64,
    /// Keys of which something is known, at most.
    #[serde(default = "known_keys")]
    pub known_keys: usize,
    /// Seconds to connect.
    #[serde(default = "connect_timeout_s")]
    pub connect_timeout_s: f64,
    /// Seconds without a byte after which a request is given up.
    #[serde(default = "idle_timeout_s")]
    pub idle_timeout_s: f64,
    /// Threads that do it.
    #[serde(default = "threads")]
    pub threads: usize,
}

fn yes() -> bool {
    true
}
fn part_bytes() -> u64 {
    8 << 20
}
fn connections() -> usize {
    32
}
fn in_flight_bytes() -> u64 {
    256 << 20
}
fn listing_interval_s() -> f64 {
    30.0
}
fn known_keys() -> usize {
    1_000_000
}
fn connect_timeout_s() -> f64 {
    1.0
}
fn idle_timeout_s() -> f64 {
    3.0
}
fn threads() -> usize {
    2
}

/// A store, and what is told of it.
pub(super) struct Opened {
    pub(super) store: Arc<dyn ObjectStore>,
    /// In front of every key.
    pub(super) prefix: Path,
    pub(super) locality: Locality,
    /// What messages call it: no secret in it.
    pub(super) name: String,
}

impl ObjectSettings {
    /// Those that a JSON object says, without `type` and what every tier has.
    ///
    /// # Errors
    /// [`TierError::Setting`].
    pub fn parse(json: &str) -> Result<Self, TierError> {
        serde_json::from_str(json).map_err(|error| TierError::Setting(error.to_string()))
    }

    /// Checks what can be checked without asking anybody.
    ///
    /// # Errors
    /// The field, its value, and what is allowed.
    pub fn check(&self) -> Result<(), String> {
        let url = self.parsed()?;
        if !matches!(url.scheme(), "s3" | "s3a") {
            let given = [
                ("endpoint", self.endpoint.is_some()),
                ("region", self.region.is_some()),
                ("access_key_id", self.access_key_id.is_some()),
                ("secret_access_key", self.secret_access_key.is_some()),
                ("session_token", self.session_token.is_some()),
            ];
            if let Some((field, _)) = given.iter().find(|(_, given)| *given) {
                return Err(format!("{field} is for s3:// only, url = {:?} is not", self.url));
            }
        }
        if self.access_key_id.is_some() != self.secret_access_key.is_some() {
            return Err("access_key_id and secret_access_key: give both or none".into());
        }
        if let Some(endpoint) = &self.endpoint {
            let parsed = Url::parse(endpoint)
                .map_err(|error| format!("endpoint = {endpoint:?} is no URL: {error}"))?;
            if !parsed.username().is_empty() || parsed.password().is_some() {
                return Err("endpoint holds a user or a password: use access_key_id and \
                            secret_access_key"
                    .into());
            }
            if parsed.scheme() == "http" && !self.allow_http {
                return Err(format!(
                    "endpoint = {endpoint:?} is not encrypted: use https://, or set allow_http"
                ));
            }
        }
        if self.part_bytes < LEAST_PART_BYTES {
            return Err(format!(
                "part_bytes = {} is less than {LEAST_PART_BYTES}, the least that S3 takes",
                self.part_bytes
            ));
        }
        for (field, value) in [
            ("listing_interval_s", self.listing_interval_s),
            ("connect_timeout_s", self.connect_timeout_s),
            ("idle_timeout_s", self.idle_timeout_s),
        ] {
            if !(0.001..=86_400.0).contains(&value) {
                return Err(format!("{field} = {value} is not between 0.001 and 86400"));
            }
        }
        for (field, value, most) in [
            ("connections", self.connections, 1024),
            ("threads", self.threads, 64),
            ("known_keys", self.known_keys, 1 << 30),
        ] {
            if !(1..=most).contains(&value) {
                return Err(format!("{field} = {value} is not between 1 and {most}"));
            }
        }
        Ok(())
    }

    /// Makes the client. Asks nobody yet.
    ///
    /// # Errors
    /// [`TierError::Setting`].
    pub(super) fn open(&self) -> Result<Opened, TierError> {
        self.check().map_err(TierError::Setting)?;
        let url = self.parsed().map_err(TierError::Setting)?;
        let refused =
            |error: object_store::Error| TierError::Setting(format!("{}: {error}", self.url));
        let (scheme, prefix) = ObjectStoreScheme::parse(&url)
            .map_err(|error| TierError::Setting(format!("url = {:?}: {error}", self.url)))?;
        let (client, retry) = (self.client(), no_retries());
        let store: Arc<dyn ObjectStore> = match scheme {
            ObjectStoreScheme::AmazonS3 => Arc::new(self.s3().build().map_err(refused)?),
            ObjectStoreScheme::GoogleCloudStorage => Arc::new(
                GoogleCloudStorageBuilder::from_env()
                    .with_url(&self.url)
                    .with_client_options(client)
                    .with_retry(retry)
                    .build()
                    .map_err(refused)?,
            ),
            ObjectStoreScheme::MicrosoftAzure => Arc::new(
                MicrosoftAzureBuilder::from_env()
                    .with_url(&self.url)
                    .with_client_options(client)
                    .with_retry(retry)
                    .build()
                    .map_err(refused)?,
            ),
            ObjectStoreScheme::Local => Arc::new(LocalFileSystem::new()),
            _ => return Err(TierError::Setting(self.unknown_scheme())),
        };
        let locality =
            if scheme == ObjectStoreScheme::Local { Locality::Local } else { Locality::Remote };
        let name = match &self.endpoint {
            Some(endpoint) => format!("{} at {endpoint}", self.url),
            None => self.url.clone(),
        };
        Ok(Opened { store, prefix, locality, name })
    }

    fn s3(&self) -> AmazonS3Builder {
        // Our own checksum is in each object: to sign its bytes as well would be to hash them twice.
        let mut builder = AmazonS3Builder::from_env()
            .with_url(&self.url)
            .with_client_options(self.client())
            .with_retry(no_retries())
            .with_unsigned_payload(true);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(region) = &self.region {
            builder = builder.with_region(region);
        }
        if let (Some(id), Some(secret)) = (&self.access_key_id, &self.secret_access_key) {
            builder = builder.with_access_key_id(id).with_secret_access_key(secret.expose());
        }
        if let Some(token) = &self.session_token {
            builder = builder.with_token(token.expose());
        }
        builder
    }

    fn client(&self) -> ClientOptions {
        ClientOptions::new()
            .with_allow_http(self.allow_http)
            .with_connect_timeout(Duration::from_secs_f64(self.connect_timeout_s))
            .with_read_timeout(Duration::from_secs_f64(self.idle_timeout_s))
            // What a request may take is the job's deadline, not a number of its own.
            .with_timeout_disabled()
    }

    fn parsed(&self) -> Result<Url, String> {
        let url = Url::parse(&self.url)
            .map_err(|error| format!("url = {:?} is no URL: {error}", self.url))?;
        if url.password().is_some() {
            // Not shown: it holds a password.
            return Err("url holds a password: use access_key_id and secret_access_key".into());
        }
        match url.scheme() {
            "s3" | "s3a" | "gs" | "az" | "abfs" | "abfss" | "file" => Ok(url),
            _ => Err(self.unknown_scheme()),
        }
    }

    fn unknown_scheme(&self) -> String {
        format!(
            "url = {:?}: expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or \
             file:///DIRECTORY",
            self.url
        )
    }
}

/// Retries are the tier's: it knows the deadline.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(fields: serde_json::Value) -> Result<ObjectSettings, String> {
        serde_json::from_value::<ObjectSettings>(fields).map_err(|error| error.to_string())
    }

    #[test]
    fn every_kind_of_store_opens_without_asking_anybody() {
        for (url, prefix, locality) in [
            ("s3://bucket/a/b", "a/b", Locality::Remote),
            ("gs://bucket", "", Locality::Remote),
            ("file:///tmp/kvtier-objects", "tmp/kvtier-objects", Locality::Local),
        ] {
            let opened = parse(json!({ "url": url })).expect("fields").open().expect("opens");
            assert_eq!((opened.prefix.as_ref(), opened.locality), (prefix, locality), "{url}");
            assert!(opened.name.starts_with(url));
        }
    }

    #[test]
    fn what_can_not_be_is_refused_by_name_and_no_secret_is_shown() {
        let url = "s3://bucket/prefix";
        let cases = [
            (json!({"url": "ftp://x/y"}), "expected s3://BUCKET/PREFIX"),
            (json!({"url": "bucket"}), "is no URL"),
            (json!({"url": "s3://u:hunter2@bucket"}), "url holds a password"),
            (json!({"url": "file:///x", "region": "r"}), "region is for s3:// only"),
            (json!({"url": url, "access_key_id": "a"}), "give both or none"),
            (json!({"url": url, "endpoint": "http://h:1"}), "set allow_http"),
            (json!({"url": url, "endpoint": "http://u:hunter2@h"}), "holds a user or a password"),
            (json!({"url": url, "part_bytes": 1}), "part_bytes = 1 is less"),
            (json!({"url": url, "connections": 0}), "connections = 0 is not between"),
            (json!({"url": url, "listing_interval_s": 0}), "listing_interval_s = 0 is not"),
            (json!({"url": url, "secret_access_key": 271_828}), "a secret must be a text"),
            (json!({"url": url, "bucket": "x"}), "unknown field `bucket`"),
            (json!({}), "missing field `url`"),
        ];
        for (fields, part) in cases {
            let error = parse(fields.clone())
                .and_then(|settings| settings.check())
                .expect_err("can not be");
            assert!(error.contains(part), "{fields}: {error}");
            assert!(!error.contains("hunter2") && !error.contains("271828"), "{error}");
        }
        let secret =
            parse(json!({"url": url, "access_key_id": "a", "secret_access_key": "hunter2"}))
                .expect("fields");
        assert!(!format!("{secret:?}").contains("hunter2"));
    }
}
