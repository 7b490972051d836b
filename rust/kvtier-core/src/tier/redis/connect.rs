//! Making connections: TCP, TLS over it, who we are, which database.

use std::io::{Error, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::aws_lc_rs::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::endpoint::Endpoint;
use super::failed::Failed;
use super::settings::{RedisSettings, Target};
use super::wire::{Transport, Wire};
use crate::tier::TierError;
use crate::tier::network::{NetworkError, Secret};

/// How to connect to any node of a tier.
pub(super) struct Connector {
    tls: Option<TlsConnector>,
    username: Option<String>,
    password: Option<Secret>,
    database: u32,
    connect_timeout: Duration,
    response_timeout: Duration,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Loads and look-ups: of a replica as well.
    Read,
    /// Stores, and questions about the cluster.
    Write,
}

impl Connector {
    /// Reads the certificates; connects to nothing.
    pub(super) fn new(settings: &RedisSettings, target: &Target) -> Result<Self, TierError> {
        let tls = target.tls.then(|| tls_connector(settings.tls_ca.as_deref())).transpose()?;
        Ok(Self {
            tls,
            username: target.username.clone(),
            password: target.password.clone(),
            database: target.database,
            connect_timeout: settings.connect_timeout(),
            response_timeout: settings.response_timeout(),
        })
    }

    /// A connection that is ready for commands.
    pub(super) async fn connect(&self, to: &Endpoint, purpose: Use) -> Result<Wire, Failed> {
        let node = to.to_string();
        let stream = match timeout(self.connect_timeout, self.open(to)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(source)) => {
                let what = "connecting to";
                return Err(NetworkError::Unreachable { what, node, source }.into());
            }
            Err(_) => return Err(NetworkError::TimedOut { node, what: "connecting" }.into()),
        };
        let mut wire = Wire::new(stream, node, self.response_timeout);
        if let Some(password) = &self.password {
            let mut auth = redis::cmd("AUTH");
            if let Some(username) = &self.username {
                auth.arg(username);
            }
            wire.ask(auth.arg(password.expose())).await?;
        }
        if self.database > 0 {
            wire.ask(redis::cmd("SELECT").arg(self.database)).await?;
        }
        if purpose == Use::Read {
            // So that a replica of a cluster answers; a stand-alone server does not know it.
            match wire.ask(&redis::cmd("READONLY")).await {
                Ok(_) | Err(Failed::Network(NetworkError::Refused { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(wire)
    }

    async fn open(&self, to: &Endpoint) -> std::io::Result<Box<dyn Transport>> {
        let stream = TcpStream::connect((&*to.host, to.port)).await?;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else {
            return Ok(Box::new(stream));
        };
        let name = ServerName::try_from(to.host.clone())
            .map_err(|error| Error::new(ErrorKind::InvalidInput, error))?;
        Ok(Box::new(tls.connect(name, stream).await?))
    }
}

fn tls_connector(ca: Option<&Path>) -> Result<TlsConnector, TierError> {
    let mut roots = RootCertStore::empty();
    if let Some(path) = ca {
        let unreadable =
            |why: String| TierError::Setting(format!("tls_ca = {}: {why}", path.display()));
        let certificates =
            CertificateDer::pem_file_iter(path).map_err(|error| unreadable(error.to_string()))?;
        for certificate in certificates {
            certificate
                .map_err(|error| unreadable(error.to_string()))
                .and_then(|one| roots.add(one).map_err(|error| unreadable(error.to_string())))?;
        }
        if roots.is_empty() {
            return Err(unreadable("has no certificate in it".to_owned()));
        }
    } else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(TierError::Setting(
                "tls: this machine has no certificates to trust: name some with tls_ca".to_owned(),
            ));
        }
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| TierError::Setting(format!("tls: {error}")))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}
