//! How an exchange with a node can end badly, and what follows from it.

use redis::{RedisError, ServerError, ServerErrorKind};

use super::endpoint::Endpoint;
use crate::tier::TierError;
use crate::tier::network::{BadCopy, NetworkError};

/// See the module.
#[derive(Debug)]
pub(super) enum Failed {
    /// The node, or the way to it: try again, elsewhere or later.
    Network(NetworkError),
    /// The key's slot has moved for good.
    Moved(Endpoint),
    /// The key is on its way to another node: ask there, this once.
    Ask(Endpoint),
    /// The node can not serve the key now, and says so: the map may be old.
    NotNow(NetworkError),
    /// The server closed the connection while nobody used it.
    Stale,
    /// Nothing is there.
    Gone,
    /// Something else is there.
    Bad(BadCopy),
}

impl From<NetworkError> for Failed {
    fn from(error: NetworkError) -> Self {
        Self::Network(error)
    }
}

impl Failed {
    /// What an error that `node` answered means.
    pub(super) fn of_server(node: &str, error: &ServerError) -> Self {
        let message = match error.details() {
            Some(details) => format!("{} {details}", error.code()),
            None => error.code().to_owned(),
        };
        let node = node.to_owned();
        let moved_to = || {
            let error = RedisError::from(error.clone());
            let (address, _) = error.redirect_node()?;
            // A node that does not know its own name says only the port.
            let own = node.rsplit_once(':').map_or("", |(host, _)| host);
            let named = if address.starts_with(':') {
                format!("{own}{address}")
            } else {
                address.to_owned()
            };
            named.parse().ok()
        };
        match error.kind() {
            Some(ServerErrorKind::Moved) => match moved_to() {
                Some(endpoint) => Self::Moved(endpoint),
                None => Self::NotNow(NetworkError::Refused { node, message }),
            },
            Some(ServerErrorKind::Ask) => match moved_to() {
                Some(endpoint) => Self::Ask(endpoint),
                None => Self::NotNow(NetworkError::Refused { node, message }),
            },
            Some(
                ServerErrorKind::TryAgain
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::ReadOnly,
            ) => Self::NotNow(NetworkError::Refused { node, message }),
            _ if error.code() == "OOM" => Self::NotNow(NetworkError::Full { node, message }),
            _ => Self::Network(NetworkError::Refused { node, message }),
        }
    }

    /// The error to report where nothing is tried again.
    pub(super) fn into_error(self) -> TierError {
        let confused = |why: &str| NetworkError::Protocol {
            node: "the cluster".to_owned(),
            why: why.to_owned(),
        };
        match self {
            Self::Network(error) | Self::NotNow(error) => error.into(),
            Self::Moved(to) | Self::Ask(to) => confused(&format!("a key moved to {to}")).into(),
            Self::Stale => confused("it closes its connections").into(),
            Self::Gone | Self::Bad(_) => confused("a value is no chunk").into(),
        }
    }

    /// Whether the other end closed the connection.
    pub(super) fn is_a_closed_connection(&self) -> bool {
        use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        let Self::Network(NetworkError::Unreachable { source, .. }) = self else {
            return false;
        };
        matches!(source.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
    }

    /// Whether the node is at fault: what its breaker counts.
    pub(super) fn is_the_nodes(&self) -> bool {
        matches!(self, Self::Network(error) if !matches!(error, NetworkError::SwitchedOff { .. }))
    }
}
