//! What a seed draws before it begins: sizes, policy, tiers with their limits and faults, and how
//! often the engine does what. Seeds differ in all of it, so that each stresses something else.

use std::time::Duration;

use fastrand::Rng;
use kvtier_core::index::PolicyKind;
use kvtier_core::tier::{Locality, Medium, Offload, Shed, TierLimits};

use crate::content::CHUNK_BYTES;
use crate::tally::{FAULTS, Feature};

pub(crate) const MILLISECOND: Duration = Duration::from_millis(1);

/// What the engine can do in an event, with its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Step,
    Work,
    Arrive,
    Look,
    Store,
    EndTransfer,
    Finish,
    Abort,
    Touch,
    Misuse,
    Wait,
    Reset,
    Restart,
}

pub(crate) struct Settings {
    pub(crate) slots: u32,
    pub(crate) policy: PolicyKind,
    pub(crate) store_threshold: u8,
    pub(crate) groups: u8,
    /// Sequences that requests share the beginning of; as many again are continued by requests.
    pub(crate) shared: u8,
    pub(crate) private: u8,
    /// The most chunks of a group of a request.
    pub(crate) chunks: u8,
    pub(crate) tiers: Vec<TierSettings>,
    /// What happens in an event; each as often as its weight.
    pub(crate) actions: Vec<Action>,
    pub(crate) events: u32,
}

pub(crate) struct TierSettings {
    pub(crate) name: &'static str,
    pub(crate) medium: Medium,
    pub(crate) locality: Locality,
    pub(crate) limits: TierLimits,
    /// Chunks it has room for.
    pub(crate) capacity: usize,
    /// One time in how many each fault happens; 0 is never.
    pub(crate) odds: [u16; FAULTS],
}

impl Settings {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let tiers = (0..rng.usize(1..=3)).map(|number| TierSettings::draw(rng, number)).collect();
        let mut actions = Vec::new();
        for (action, weights) in [
            (Action::Step, [4, 8]),
            (Action::Work, [4, 16]),
            (Action::Arrive, [2, 4]),
            (Action::Look, [4, 8]),
            (Action::Store, [4, 8]),
            (Action::EndTransfer, [4, 8]),
            (Action::Finish, [1, 3]),
            (Action::Abort, [0, 1]),
            (Action::Touch, [0, 1]),
            (Action::Misuse, [0, 1]),
            (Action::Wait, [0, 1]),
        ] {
            let weight = weights[rng.usize(0..2)];
            actions.extend(std::iter::repeat_n(action, weight));
        }
        // Seldom: what came before is gone with them.
        match rng.u8(0..16) {
            0..4 => actions.push(Action::Reset),
            4..7 => actions.push(Action::Restart),
            _ => {}
        }
        let most_slots = [10, 24][rng.usize(0..2)];
        Self {
            slots: rng.u32(4..=most_slots),
            policy: draw_policy(rng),
            store_threshold: 1 + u8::from(rng.u8(0..8) == 0),
            groups: rng.u8(1..=3),
            shared: rng.u8(1..=3),
            private: rng.u8(2..=12),
            chunks: rng.u8(2..=6),
            tiers,
            actions,
            events: rng.u32(100..=300),
        }
    }

    /// The tiers that get all chunks of every request.
    pub(crate) fn request_level(&self) -> u64 {
        let tiers = self.tiers.iter().enumerate();
        tiers
            .filter(|(_, tier)| tier.limits.offload == Offload::Request)
            .fold(0, |mask, (number, _)| mask | 1 << number)
    }
}

/// Any policy, but seldom those whose `validate` takes most of the time of a run.
fn draw_policy(rng: &mut Rng) -> PolicyKind {
    let mut draw = || PolicyKind::ALL[rng.usize(0..PolicyKind::ALL.len())].1;
    let is_light = |kind: &PolicyKind| !matches!(kind, PolicyKind::Gittins | PolicyKind::Auto);
    [draw(), draw()].into_iter().find(is_light).unwrap_or_else(draw)
}

impl TierSettings {
    fn draw(rng: &mut Rng, number: usize) -> Self {
        let mut odds = [0; FAULTS];
        let faulty = rng.u8(0..4);
        for odd in &mut odds {
            // No fault at all, or one kind in eight, four, or two.
            if faulty > 0 && rng.u8(0..(16 >> faulty)) == 0 {
                *odd = [3, 10, 30, 100][rng.usize(0..4)];
            }
        }
        let corrupts = [Feature::CorruptBytes, Feature::WrongChecksum];
        if corrupts.iter().any(|&fault| odds[fault as usize] > 0) && rng.bool() {
            odds[Feature::KeepBadCopy as usize] = 2;
        }
        let bound = [None, Some(2), Some(6), Some(16)][rng.usize(0..4)];
        let pause = rng.u32(1..=20) * MILLISECOND;
        let fast = rng.bool();
        let limits = TierLimits {
            load_deadline: rng.u32(4..=40) * MILLISECOND,
            store_deadline: rng.u32(4..=60) * MILLISECOND,
            lookup_deadline: rng.u32(2..=20) * MILLISECOND,
            load_share: [1.0, 0.5, 0.25][rng.usize(0..3)],
            max_queued_bytes: bound.map(|chunks| chunks * CHUNK_BYTES as u64),
            shed: if rng.bool() { Shed::Newest } else { Shed::Oldest },
            high_water: if fast { 0.004 } else { 10.0 },
            low_water: if fast { 0.002 } else { 10.0 },
            breaker_failures: [0, 1, 2, 4][rng.usize(0..4)],
            breaker_pause: pause,
            breaker_max_pause: pause * rng.u32(1..=4),
            offload: if rng.u8(0..4) == 0 { Offload::Request } else { Offload::Chunk },
        };
        Self {
            name: ["first", "second", "third"][number],
            // Another one for each, so that a request can be kept to a tier.
            medium: Medium::ALL[number].1,
            locality: Locality::ALL[rng.usize(0..Locality::ALL.len())].1,
            limits,
            capacity: rng.usize(4..=48),
            odds,
        }
    }
}
