//! What a run exercised: a simulation that never meets a fault proves nothing.

macro_rules! features {
    ($($name:ident: $text:literal,)*) => {
        /// A fault of a tier, or a thing that the engine or the manager did.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Feature { $($name,)* }

        impl Feature {
            pub(crate) const ALL: &[(Self, &str)] = &[$((Self::$name, $text),)*];
        }
    };
}

features! {
    // Faults of tiers, each with odds of its own; see `FAULTS`.
    Slow: "tier: job takes up to its deadline",
    Hang: "tier: job hangs past its deadline",
    Lose: "tier: job dropped unreported",
    Skip: "tier: chunk never reported",
    Io: "tier: chunk failed",
    CorruptBytes: "tier: keeps damaged bytes",
    WrongChecksum: "tier: keeps a wrong checksum",
    Full: "tier: no room",
    Torn: "tier: load written in part",
    Panic: "tier: method panics",
    RetryAWhile: "tier: retry for a while",
    RetryForEver: "tier: retry for ever",
    Lie: "tier: says hit for what it lacks",
    EvictByItself: "tier: evicts by itself",
    Crash: "tier: crashes, comes back empty or full",
    IgnoreCancel: "tier: works on when cancelled",
    LetGoLate: "tier: done, but holds on to the job",
    BreaksContract: "tier: tells of a broken contract",
    OtherChunk: "tier: brings another chunk, whole",
    KeepBadCopy: "tier: keeps a copy known to be bad",
    // What the engine did.
    Request: "engine: request",
    Options: "engine: request with options",
    Stored: "engine: store completed",
    StoreFailed: "engine: store failed",
    Loaded: "engine: load completed",
    Aborted: "engine: request aborted",
    FinishedOpen: "engine: finished with transfers open",
    Waited: "engine: request told to look again",
    Touch: "engine: touch",
    Misuse: "engine: call that must be refused",
    Reset: "engine: reset",
    VoidTransfer: "engine: transfer ran through a reset",
    Restart: "engine: crash and restart",
    // What the manager did.
    Promoted: "manager: chunk promoted",
    Evicted: "manager: chunk evicted",
    NoRoomToStore: "manager: store refused, no room",
    NoRoomToPromote: "manager: promotion refused, no room",
    NotAdmitted: "manager: chunk offered too rarely",
    LateLoad: "manager: load overdue",
    LateStore: "manager: store overdue",
    LateLookup: "manager: look-up overdue",
    CorruptLoad: "manager: load with another checksum",
    Shed: "manager: store shed",
    Refused: "manager: store refused by a breaker",
    BreakerOpened: "manager: breaker opened",
    BreakerClosed: "manager: breaker closed again",
    Parked: "manager: chunk offered once it was written",
}

/// The first features are faults of tiers.
pub(crate) const FAULTS: usize = Feature::KeepBadCopy as usize + 1;

/// How often each feature was exercised, and events in all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tally {
    counts: [u64; Feature::ALL.len()],
    pub(crate) events: u64,
}

impl Default for Tally {
    fn default() -> Self {
        Self { counts: [0; Feature::ALL.len()], events: 0 }
    }
}

impl Tally {
    pub(crate) fn count(&mut self, feature: Feature) {
        self.add(feature, 1);
    }

    pub(crate) fn add(&mut self, feature: Feature, times: u64) {
        self.counts[feature as usize] += times;
    }

    pub(crate) fn of(&self, feature: Feature) -> u64 {
        self.counts[feature as usize]
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.events += other.events;
    }
}
