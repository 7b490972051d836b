//! Tiers written in Python, behind the contract of the core.
//!
//! Everything of one tier that is Python runs on one thread of its own. The engine's calls queue
//! a command or read what that thread left, and return: nothing that Python does can block the
//! engine, hold a lock of the manager, or make another tier wait. The interpreter is held only
//! while the tier's code runs; waiting and comparing checksums are done without.
//!
//! | file | what |
//! |---|---|
//! | `shared.rs` | what the thread shares with the engine |
//! | `answers.rs` | look-ups: asked there, answered here |
//! | `out.rs` | jobs that the tier has, and when it is asked for their results |
//! | `job.rs` | a job as Python sees it; who may touch its slots, and until when |
//! | `report.rs` | what the tier says of a job |
//! | `port.rs` | what the thread's loop, `kvtier/tiers/thread.py`, calls |
//! | `open.rs` | from settings to tiers |
//!
//! The loop is Python on a thread of Python because an interpreter that ends stops its daemon
//! threads by unwinding them, and only frames of Rust that are at the top survive that.

mod answers;
mod job;
mod open;
mod out;
mod port;
mod report;
mod shared;

use std::sync::Arc;

use kvtier_core::key::KeyBatch;
use kvtier_core::tier::{
    LoadJob, Locality, Medium, News, Presence, RequestId, SecondaryTier, StoreJob, Usage,
};

pub(crate) use job::{TierJob, chunk_checksum};
pub(crate) use open::{open_manager, open_solo};
pub(crate) use port::TierPort;

use job::AnyJob;
use shared::{Call, Shared};

/// The engine's side of a tier that is written in Python.
struct PyTier {
    shared: Arc<Shared>,
    medium: Medium,
    locality: Locality,
}

impl SecondaryTier for PyTier {
    fn medium(&self) -> Medium {
        self.medium
    }

    fn locality(&self) -> Locality {
        self.locality
    }

    fn lookup(
        &self,
        _request: RequestId,
        keys: &KeyBatch,
        wanted: &[u32],
        presence: &mut [Presence],
    ) {
        self.shared.lookup(keys, wanted, presence);
    }

    fn submit_store(&self, job: StoreJob) {
        self.shared.submit(AnyJob::Store(job));
    }

    fn submit_load(&self, job: LoadJob) {
        self.shared.submit(AnyJob::Load(job));
    }

    fn touch(&self, keys: &KeyBatch) {
        if self.shared.wants().touch {
            self.shared.hint(Call::Touch(keys.clone()));
        }
    }

    fn end_step(&self, news: &mut News) {
        self.shared.end_step(news);
    }

    fn finish_request(&self, request: RequestId) {
        if self.shared.wants().finish_request {
            self.shared.hint(Call::FinishRequest(request));
        }
    }

    fn usage(&self) -> Usage {
        self.shared.usage()
    }

    fn shutdown(&self) {
        self.shared.close();
    }
}
