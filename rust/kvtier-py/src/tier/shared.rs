//! What a Python tier's thread shares with the engine: queued calls, jobs that are out, answers.
//!
//! One lock, a leaf, held for bookkeeping only: never while Python runs, a chunk is copied or
//! compared, a line is logged, or a job is dropped. The engine's side ([`PyTier`](super::PyTier))
//! only queues and reads; the tier's thread takes [`Call`]s, makes them, and comes back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use kvtier_core::key::KeyBatch;
use kvtier_core::log_limit::LogLimit;
use kvtier_core::tier::{Fault, JobId, News, Presence, RequestId, Usage};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::answers::Answers;
use super::job::{AnyJob, Lent};
use super::out::{Outstanding, Settled};
use super::report::Report;
use crate::fork::Home;

/// Keys of `touch`, and ends of requests, that wait at most; more are passed over.
const MOST_HINTS: usize = 1 << 16;
/// Keys that the tier removed and the engine did not fetch yet; more are left with the tier.
const MOST_REMOVED: usize = 1 << 16;
/// Faults of a kind that one step tells; the others come with the next ones.
const MOST_FAULTS: u32 = 1 << 10;
/// How long `close` waits for a call that runs.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the tier's thread is to do next.
pub(super) enum Call {
    Poll,
    Lookup(KeyBatch),
    Submit(AnyJob),
    Touch(KeyBatch),
    Discard(KeyBatch),
    FinishRequest(RequestId),
}

/// Which optional methods a tier has: the others are not called.
#[derive(Clone, Copy)]
pub(super) struct Wants {
    pub(super) touch: bool,
    pub(super) discard: bool,
    pub(super) finish_request: bool,
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum Phase {
    Open,
    /// `finished` is asked once more, then the thread ends.
    Closing,
    LastPoll,
    Ended,
}

struct State {
    phase: Phase,
    thread: Option<ThreadId>,
    answers: Answers,
    /// Before all else: no look-up may find what turned out bad.
    discards: VecDeque<KeyBatch>,
    loads: VecDeque<Call>,
    /// Everything else, in the order it came.
    others: VecDeque<Call>,
    hints: usize,
    out: Outstanding,
    turn: usize,
    /// When the call that the tier is in began, and how often it was found to take too long.
    call: Option<(Instant, u32)>,
    /// `close` waited in vain, and does not again.
    left_behind: bool,
    removed: Vec<Box<[u8]>>,
    faults: [u32; Fault::ALL.len()],
    usage: Usage,
}

/// See the module.
pub(super) struct Shared {
    name: String,
    key_bytes: usize,
    /// A call that takes longer is a fault.
    patience: Duration,
    wants: Wants,
    home: Home,
    log: LogLimit,
    state: Mutex<State>,
    /// The tier's thread waits for something to do.
    wake: Condvar,
    /// `close` waits for the thread's end.
    ended: Condvar,
}

impl Shared {
    pub(super) fn new(name: &str, key_bytes: usize, patience: Duration, wants: Wants) -> Self {
        Self {
            name: name.to_owned(),
            key_bytes,
            patience,
            wants,
            home: Home::here(),
            log: LogLimit::default(),
            state: Mutex::new(State {
                phase: Phase::Open,
                thread: None,
                answers: Answers::new(key_bytes),
                discards: VecDeque::new(),
                loads: VecDeque::new(),
                others: VecDeque::new(),
                hints: 0,
                out: Outstanding::new(),
                turn: 0,
                call: None,
                left_behind: false,
                removed: Vec::new(),
                faults: [0; Fault::ALL.len()],
                usage: Usage::default(),
            }),
            wake: Condvar::new(),
            ended: Condvar::new(),
        }
    }

    pub(super) fn is_home(&self) -> bool {
        self.home.is_here()
    }

    pub(super) fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    pub(super) fn wants(&self) -> Wants {
        self.wants
    }

    /// Counts a fault; `end_step` tells it. Logged once a second at most.
    pub(super) fn fault(&self, fault: Fault, explain: impl FnOnce() -> String) {
        {
            let count = &mut self.state.lock().faults[fault as usize];
            *count = count.saturating_add(1);
        }
        self.warn(explain);
    }

    fn warn(&self, explain: impl FnOnce() -> String) {
        if let Some(line) = self.log.line(|| format!("tier {:?}: {}", self.name, explain())) {
            log::warn!("{line}");
        }
    }
}

/// The engine's side: every call returns at once.
impl Shared {
    pub(super) fn lookup(&self, keys: &KeyBatch, wanted: &[u32], presence: &mut [Presence]) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.phase != Phase::Open || state.blocked_for(now) > self.patience {
            return presence.fill(Presence::Miss);
        }
        for (&at, presence) in wanted.iter().zip(presence) {
            *presence = state.answers.get(keys.get(at as usize), now);
        }
        drop(state);
        self.wake.notify_one();
    }

    pub(super) fn submit(&self, job: AnyJob) {
        let mut state = self.state.lock();
        if state.phase != Phase::Open {
            drop(state);
            return drop(job);
        }
        match job {
            AnyJob::Load(_) => state.loads.push_back(Call::Submit(job)),
            AnyJob::Store(_) => state.others.push_back(Call::Submit(job)),
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Queues something that may be passed over when the tier is too far behind.
    pub(super) fn hint(&self, call: Call) {
        let mut state = self.state.lock();
        let weight = call.weight();
        if state.phase != Phase::Open || state.hints + weight > MOST_HINTS {
            return;
        }
        state.hints += weight;
        state.others.push_back(call);
        drop(state);
        self.wake.notify_one();
    }

    pub(super) fn end_step(&self, news: &mut News) {
        let mut state = self.state.lock();
        news.removed.append(&mut state.removed);
        for ((_, fault), count) in Fault::ALL.iter().zip(&mut state.faults) {
            let told = (*count).min(MOST_FAULTS);
            *count -= told;
            news.faults.extend(std::iter::repeat_n(*fault, told as usize));
        }
        if state.call.is_none() && state.out.is_empty() {
            return;
        }
        let now = Instant::now();
        let blocked = state.blocked_for(now);
        let mut found = false;
        if let Some((_, times)) = &mut state.call
            && blocked > self.patience * (*times + 1)
        {
            *times += 1;
            found = true;
            news.faults.push(Fault::Blocked);
        }
        let withdrawn = state.take_withdrawn();
        if !state.out.is_empty() {
            state.out.poll_soon();
        }
        drop(state);
        drop(withdrawn);
        self.wake.notify_one();
        if found {
            self.warn(|| format!("a call has not come back for {:.1} s", blocked.as_secs_f64()));
        }
    }

    pub(super) fn usage(&self) -> Usage {
        self.state.lock().usage
    }

    /// Asks the tier for news soon.
    pub(super) fn notify(&self) {
        if self.is_home() {
            self.state.lock().out.poll_soon();
            self.wake.notify_one();
        }
    }

    /// Nobody but this side holds the job any more.
    pub(super) fn let_go(&self, id: JobId) {
        self.state.lock().out.let_go(id);
        self.wake.notify_one();
    }

    /// Drops what is queued and has the thread end, without waiting for it.
    pub(super) fn begin_close(&self) {
        let mut state = self.state.lock();
        if state.phase != Phase::Open {
            return;
        }
        state.phase = Phase::Closing;
        let queued = state.take_queued();
        drop(state);
        drop(queued);
        self.wake.notify_one();
    }

    /// As `begin_close`, and waits for the thread's end. A thread that does not come back is left
    /// behind: what it uses lives as long as it does. Must be called without the interpreter,
    /// which the thread needs.
    pub(super) fn close(&self) {
        self.begin_close();
        let mut state = self.state.lock();
        // The tier itself may close its manager; it does not wait for itself.
        let may_wait = state.thread != Some(std::thread::current().id()) && !state.left_behind;
        let end = Instant::now() + PATIENCE;
        while may_wait && state.phase != Phase::Ended {
            if self.ended.wait_until(&mut state, end).timed_out() {
                break;
            }
        }
        let ended = state.phase == Phase::Ended;
        state.left_behind = !ended;
        drop(state);
        if may_wait && !ended {
            log::error!(
                "tier {:?}: a call does not come back; its thread is left behind",
                self.name
            );
        }
    }
}

/// The tier's thread.
impl Shared {
    /// The next call to make; `None` when there will be none. Resolves what has settled before.
    pub(super) fn next(&self) -> Option<Call> {
        let mut state = self.state.lock();
        state.call = None;
        state.out.call_is_over();
        let call = loop {
            let settled = state.out.take_settled();
            if !settled.is_empty() {
                MutexGuard::unlocked(&mut state, || self.resolve(settled));
                continue;
            }
            match state.pick(Instant::now()) {
                Some(Call::Submit(job)) if job.is_cancelled() => state.out.withdraw(job),
                Some(call) => break call,
                None if state.phase != Phase::Open => return None,
                None => match state.out.poll_at() {
                    Some(at) => drop(self.wake.wait_until(&mut state, at)),
                    None => self.wake.wait(&mut state),
                },
            }
        };
        state.call = Some((Instant::now(), 0));
        drop(state);
        if let Call::Submit(AnyJob::Store(job)) = &call {
            // Here, where nothing waits for the interpreter.
            for index in 0..job.len() {
                job.checksum(index);
            }
        }
        Some(call)
    }

    /// The tier is about to be handed a job.
    pub(super) fn goes_out(&self, job: AnyJob, lent: Arc<Lent>) {
        self.state.lock().out.add(job, lent);
    }

    pub(super) fn answer(&self, keys: &KeyBatch, said: &[Presence]) {
        self.state.lock().answers.put(keys, said);
    }

    /// See [`Outstanding::find`].
    pub(super) fn find(&self, id: JobId) -> Result<(AnyJob, Arc<Lent>, Instant), Fault> {
        self.state.lock().out.find(id)
    }

    /// Takes a job's report.
    pub(super) fn reported(&self, job: &AnyJob, report: Report) {
        let mut state = self.state.lock();
        for key in job.chunks().keys.iter().chain(&report.evicted) {
            state.answers.forget(key);
        }
        if matches!(job, AnyJob::Load(_)) {
            // The result of a load has no place for them.
            state.removed.extend(report.evicted.iter().map(Box::from));
        }
        state.out.reported(job.id(), report);
    }

    /// The tier gave all the results it had.
    pub(super) fn polled(&self) {
        self.state.lock().out.polled();
    }

    /// See [`Outstanding::most_results`].
    pub(super) fn most_results(&self) -> usize {
        self.state.lock().out.most_results()
    }

    /// How many keys the tier may say it removed.
    pub(super) fn room_for_removed(&self) -> usize {
        MOST_REMOVED.saturating_sub(self.state.lock().removed.len())
    }

    pub(super) fn removed(&self, keys: Vec<Box<[u8]>>) {
        let mut state = self.state.lock();
        for key in &keys {
            state.answers.forget(key);
        }
        state.removed.extend(keys);
    }

    pub(super) fn has_usage(&self, usage: Usage) {
        self.state.lock().usage = usage;
    }

    pub(super) fn begins(&self) {
        self.state.lock().thread = Some(std::thread::current().id());
    }

    /// The thread ends: what the tier still has is lost, as soon as it lets go of it.
    pub(super) fn ends(&self) {
        let mut state = self.state.lock();
        state.phase = Phase::Ended;
        state.call = None;
        let settled = state.out.take_all();
        let queued = state.take_queued();
        drop(state);
        self.resolve(settled);
        drop(queued);
        self.ended.notify_all();
    }

    /// Resolves jobs: compares what was loaded, then lets them go.
    fn resolve(&self, settled: Vec<Settled>) {
        for (job, report) in settled {
            let Some(report) = report else {
                continue;
            };
            let corrupt = report.apply(&job);
            if corrupt.is_empty() {
                continue;
            }
            self.warn(|| format!("{} damaged chunks of job {}", corrupt.len(), job.id()));
            let mut state = self.state.lock();
            corrupt.iter().for_each(|key| state.answers.forget(key));
            if self.wants.discard && state.phase == Phase::Open {
                state.discards.push_back(corrupt);
            }
        }
    }
}

impl State {
    fn blocked_for(&self, now: Instant) -> Duration {
        self.call.map_or(Duration::ZERO, |(began, _)| now.saturating_duration_since(began))
    }

    /// The next call: of each kind in turn, so that none waits for ever.
    fn pick(&mut self, now: Instant) -> Option<Call> {
        const KINDS: usize = 4;
        if let Some(keys) = self.discards.pop_front() {
            return Some(Call::Discard(keys));
        }
        for step in 0..KINDS {
            let turn = (self.turn + step) % KINDS;
            let call = match turn {
                0 => self.poll_if_due(now),
                1 => self.answers.take_asked().map(Call::Lookup),
                2 => self.loads.pop_front(),
                _ => self.others.pop_front(),
            };
            if let Some(call) = call {
                self.turn = turn + 1;
                self.hints -= call.weight();
                return Some(call);
            }
        }
        None
    }

    fn poll_if_due(&mut self, now: Instant) -> Option<Call> {
        match self.phase {
            Phase::Open if self.out.poll_at().is_none_or(|at| now < at) => return None,
            Phase::Open => {}
            Phase::Closing => self.phase = Phase::LastPoll,
            Phase::LastPoll | Phase::Ended => return None,
        }
        self.out.begin_poll();
        Some(Call::Poll)
    }

    /// All that is queued, to be dropped without the lock.
    fn take_queued(&mut self) -> [VecDeque<Call>; 2] {
        self.answers = Answers::new(self.answers.key_bytes());
        [std::mem::take(&mut self.loads), std::mem::take(&mut self.others)]
    }

    /// Queued jobs that nobody waits for any more.
    fn take_withdrawn(&mut self) -> VecDeque<Call> {
        let mut withdrawn = VecDeque::new();
        for queue in [&mut self.loads, &mut self.others] {
            let (mut gone, kept) = std::mem::take(queue).into_iter().partition(Call::is_withdrawn);
            *queue = kept;
            withdrawn.append(&mut gone);
        }
        withdrawn
    }
}

impl Call {
    /// What it takes of the room for hints.
    fn weight(&self) -> usize {
        match self {
            Self::Touch(keys) => keys.len(),
            Self::FinishRequest(_) => 1,
            _ => 0,
        }
    }

    fn is_withdrawn(&self) -> bool {
        matches!(self, Self::Submit(job) if job.is_cancelled())
    }
}
