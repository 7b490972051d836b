//! Forgetting the primary tier under an engine that runs: after new weights, before a sleep.
//!
//! [`Manager::reset`] never waits. Every key is forgotten at once; a slot that the engine or a
//! job holds is detached, and comes back when they let go: jobs with their results, the engine
//! with [`Manager::reset_flushed`], by which it says that no transfer from before the reset runs
//! any more. Until then promotions are held back: look-ups answer [`Lookup::HitPending`], and the
//! jobs follow.
//!
//! What the engine prepared before a reset is void: its completion is refused as that of a key
//! that is not resident. Secondary tiers keep what they have. Stores to them go on, since what
//! they read stays as it is.
//!
//! [`Lookup::HitPending`]: super::Lookup::HitPending

use super::figures::EventKind;
use super::{Inner, Manager, ManagerError};
use crate::index::{State, Writer};
use crate::sync::atomic::Ordering;

impl Manager {
    /// Forgets every key of the primary tier; see the module. Requests go on, with nothing held.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn reset(&self) -> Result<(), ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        self.apply_results(inner);
        inner.drop_promotions();
        for job in inner.jobs.values_mut() {
            if job.direction == super::Direction::Load {
                job.cancelled.store(true, Ordering::Relaxed);
            }
            job.detached |= true;
        }
        inner.forget_keys();
        inner.parked.clear();
        let mut requests: Vec<_> = inner.requests.keys().copied().collect();
        requests.sort_unstable();
        for request in requests {
            if let Some(state) = inner.requests.get_mut(&request) {
                state.forget();
            }
            inner.end_if_done(request);
        }
        inner.resetting = true;
        Ok(())
    }

    /// Says that no transfer of the engine from before [`Manager::reset`] runs any more: the
    /// slots it held are free, and promotions go on. Without a reset before it, does nothing.
    ///
    /// # Errors
    /// [`ManagerError::Closed`].
    pub fn reset_flushed(&self) -> Result<(), ManagerError> {
        let mut inner = self.inner.lock();
        let inner = inner.open()?;
        inner.resetting = false;
        for slot in std::mem::take(&mut inner.engine_held) {
            inner.let_go(slot);
        }
        Ok(())
    }
}

impl Inner {
    /// Empties the index. Slots stay taken as long as somebody holds them.
    fn forget_keys(&mut self) {
        self.events.push(EventKind::Removed, None, self.index.ready_keys());
        let (more_holders, engine_held) = (&mut self.more_holders, &mut self.engine_held);
        self.index.clear(|held| {
            // The engine as a whole is one holder, however many pins it has.
            let engine = held.load_pins > 0 || held.state == State::Writing(Writer::Store);
            let promotion = held.state == State::Writing(Writer::Promotion);
            if engine {
                engine_held.push(held.slot);
            }
            let holders = u32::from(held.job_pins) + u32::from(engine) + u32::from(promotion);
            if holders > 1 {
                more_holders.insert(held.slot, holders - 1);
            }
        });
    }
}
