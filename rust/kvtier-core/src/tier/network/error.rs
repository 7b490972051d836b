//! What goes wrong between a tier and its servers.

/// An exchange with a server that failed. Says which node, never with which password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// Used in a process that `fork` made.
    #[error(
        "the tier {0:?} was opened before fork: start worker processes with \"spawn\" and open the \
         tier there"
    )]
    Forked(String),
    /// Used after it was closed.
    #[error("the tier {0:?} is shut down")]
    Closed(String),
    /// Its threads could not be started.
    #[error("starting the threads of the tier {tier:?}: {source}")]
    Threads {
        /// Its name.
        tier: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// No connection to a node, or it broke.
    #[error("{what} {node}: {source}")]
    Unreachable {
        /// What was tried.
        what: &'static str,
        /// Which node.
        node: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// No answer in time.
    #[error("{node} did not answer in time ({what})")]
    TimedOut {
        /// Which node.
        node: String,
        /// What it was asked for.
        what: &'static str,
    },
    /// Its breaker is open.
    #[error("{node} failed not long ago and is left alone for a while")]
    SwitchedOff {
        /// Which node.
        node: String,
    },
    /// It answered with an error.
    #[error("{node} refuses: {message}")]
    Refused {
        /// Which node.
        node: String,
        /// What it said.
        message: String,
    },
    /// It asks for fewer requests.
    #[error("{node} is asked too often, and says to slow down")]
    SlowDown {
        /// Which node.
        node: String,
    },
    /// It does not let us.
    #[error("{node} refuses these credentials: {message}")]
    Denied {
        /// Which node.
        node: String,
        /// What it said.
        message: String,
    },
    /// There is no such bucket.
    #[error("{node}: there is no such bucket; make it, or correct the url")]
    NoBucket {
        /// Which node.
        node: String,
    },
    /// Its clock and ours are too far apart.
    #[error("{node} refuses the time of this machine: set its clock")]
    ClockSkew {
        /// Which node.
        node: String,
    },
    /// It has no room.
    #[error("{node} is full: {message}")]
    Full {
        /// Which node.
        node: String,
        /// What it said.
        message: String,
    },
    /// It answered what no server of its kind answers.
    #[error("{node} does not keep the protocol: {why}")]
    Protocol {
        /// Which node.
        node: String,
        /// What is wrong.
        why: String,
    },
}
