//! A tier as the manager knows it, and calls into it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::TierSlot;
use super::doubts::Doubts;
use super::figures::{Direction, Moved, TierFigures};
use super::pressure::Pressure;
use crate::log_limit::{LogLimit, limited};
use crate::region::Region;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::tier::breaker::Breaker;
use crate::tier::{Fault, JobId, Locality, Medium, SecondaryTier, TierLimits};

/// A tier as the manager knows it; what changes is in [`TierState`].
pub(super) struct Tier {
    pub(super) name: String,
    pub(super) medium: Medium,
    pub(super) locality: Locality,
    pub(super) limits: TierLimits,
    pub(super) max_queued_bytes: u64,
    /// Slots that its loads may hold.
    pub(super) max_loading: u64,
    pub(super) inner: Box<dyn SecondaryTier>,
    /// Ways in which it broke the contract since the last step; counted without the lock.
    pub(super) faults: [AtomicU32; Fault::ALL.len()],
    pub(super) log: LogLimit,
}

/// What the manager remembers of a tier.
pub(super) struct TierState {
    pub(super) figures: TierFigures,
    pub(super) breakers: [Breaker; 2],
    pub(super) doubts: Doubts,
    pub(super) pressure: Pressure,
    /// Promotions queued for the end of the step.
    pub(super) promotions: u64,
    /// Chunks of its loads under way, late ones too.
    pub(super) loading: u64,
    /// Stores under way that nobody withdrew, oldest first, and their bytes.
    pub(super) stores: VecDeque<JobId>,
    pub(super) live_bytes: u64,
}

impl Tier {
    pub(super) fn new(slot: TierSlot, region: &Region) -> Self {
        let TierSlot { name, tier, limits } = slot;
        let half_of_region = region.bytes() as u64 / 2;
        #[expect(clippy::cast_sign_loss, reason = "a share is above 0")]
        let max_loading = (f64::from(region.slots()) * limits.load_share) as u64;
        Self {
            max_loading: max_loading.max(1),
            medium: tier.medium(),
            locality: tier.locality(),
            max_queued_bytes: limits.max_queued_bytes.unwrap_or(half_of_region),
            name,
            limits,
            inner: tier,
            faults: Default::default(),
            log: LogLimit::default(),
        }
    }

    /// Calls into the tier, without the lock. A panic is caught and counted: `None`.
    pub(super) fn call<T>(
        &self,
        what: &'static str,
        call: impl FnOnce(&dyn SecondaryTier) -> T,
    ) -> Option<T> {
        let answer = catch_unwind(AssertUnwindSafe(|| call(&*self.inner)));
        if answer.is_err() {
            self.note(Fault::Raised);
            limited!(self.log, error, "tier {:?} panicked in {what}", self.name);
        }
        answer.ok()
    }

    /// Notes a fault; the next step counts it.
    pub(super) fn note(&self, fault: Fault) {
        self.faults[fault as usize].fetch_add(1, Ordering::Relaxed);
    }
}

impl TierState {
    pub(super) fn moved(&mut self, direction: Direction) -> &mut Moved {
        match direction {
            Direction::Load => &mut self.figures.loads,
            Direction::Store => &mut self.figures.stores,
        }
    }

    pub(super) fn new(limits: &TierLimits) -> Self {
        Self {
            figures: TierFigures::default(),
            breakers: [Breaker::new(limits), Breaker::new(limits)],
            doubts: Doubts::new(limits.load_deadline),
            pressure: Pressure::new(limits.high_water, limits.low_water),
            promotions: 0,
            loading: 0,
            stores: VecDeque::new(),
            live_bytes: 0,
        }
    }

    /// The counters, with what is not counted but is so.
    pub(super) fn current_figures(&self) -> TierFigures {
        let mut figures = self.figures.clone();
        figures.loads.breaker = self.breakers[Direction::Load as usize].state();
        figures.stores.breaker = self.breakers[Direction::Store as usize].state();
        figures.store_seconds_per_mib = self.pressure.seconds_per_mib();
        figures.under_pressure = self.pressure.is_under();
        figures
    }
}
