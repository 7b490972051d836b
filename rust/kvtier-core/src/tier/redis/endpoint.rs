//! Where a node listens.

use std::fmt;
use std::str::FromStr;

/// Host and port of a node; shown as `host:port`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl FromStr for Endpoint {
    type Err = &'static str;

    /// Reads `host:port` or `[address]:port`, and as servers write them, `address:port` of IPv6.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (host, port) = text.rsplit_once(':').ok_or("has no port: use \"host:port\"")?;
        let port = port.parse().map_err(|_| "has no port: use \"host:port\"")?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = bare.unwrap_or(host).to_owned();
        if host.is_empty() {
            return Err("has no host: use \"host:port\"");
        }
        Ok(Self { host, port })
    }
}
