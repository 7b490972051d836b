//! What the tiers behind a network have in common.
//!
//! A tier that speaks to servers differs from one on a disk in what can go wrong: an answer can
//! come late or never, one node of many can hang, a value can be another's, and whoever shares the
//! server can remove it. The parts here contain that; a tier puts them around its protocol.
//!
//! | part | promise |
//! |---|---|
//! | [`Runtime`] | I/O runs on threads of the tier, started with its first use; never on an engine's |
//! | [`Known`] | a look-up is answered at once from what is known; what is not is asked in the background, once, for all keys of the call |
//! | [`Budget`] | the bytes of all transfers in flight have a bound |
//! | [`Retries`] | what failed is tried again with jitter, and only inside its job's deadline |
//! | [`NodeBreaker`] | a node that fails is left alone for a while, and slows no other node's keys |
//! | [`Envelope`] | a value says whose it is, and is served only if all of it is right |
//! | [`Counters`] | every cause of a failure is counted by name |
//! | [`Secret`] | passwords never reach a log line or a message |
//!
//! # How a tier uses them
//!
//! `lookup` asks [`Known::lookup`], which fills in the answers and gives back a [`Question`] for
//! the rest; the tier [spawns](Runtime::spawn) a task that asks its servers and
//! [answers](Question::answer). A question that is dropped, for whatever reason, counts as
//! answered with "absent" for a short time: a node that failed means misses, not waiting.
//!
//! `submit_load` and `submit_store` spawn a task a chunk. Each takes its bytes out of the
//! [`Budget`], asks the node's breaker for an [`Attempt`], moves the bytes between the slot and the
//! socket, checks the [`Envelope`], and reports to the job. A task that is dropped by
//! [`Runtime::close`] drops its part of the job, which reports the chunk as lost.

mod breaker;
mod budget;
mod counters;
mod envelope;
mod error;
mod known;
mod retries;
mod runtime;
mod secret;

pub use breaker::{Attempt, NodeBreaker};
pub use budget::{Budget, Share};
pub use counters::{Counted, Counters};
pub use envelope::{BadCopy, ENVELOPE_BYTES, Envelope, Inspected, NamespaceId};
pub use error::NetworkError;
pub use known::{Known, KnownSettings, Question};
pub use retries::Retries;
pub use runtime::Runtime;
pub use secret::Secret;
