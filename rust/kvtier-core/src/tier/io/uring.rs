//! io_uring: one reactor thread feeds the ring and takes its completions.
//!
//! The reactor hands everything that is ready to the kernel in one system call, and waits for
//! completions in the same call. An eventfd that it polls through the ring wakes it for new
//! operations. It runs `begin` and `end` of the operations too, checksums included: one core
//! checks faster than disks deliver.
//!
//! # Registered buffers
//!
//! The kernel pins and looks up the pages of registered memory once and not for each transfer.
//! The region of the first transfer is registered piece by piece, each when it is used first, so
//! that neither start-up nor a lightly used region pays for all of it. Where the kernel refuses
//! (a limit on locked memory, mostly), transfers go on without.
//!
//! # What the kernel may still touch
//!
//! A transfer that was submitted holds its region, and its operation its job, until its
//! completion was seen. If the ring breaks, what is in flight is leaked: memory that the kernel
//! might write is never given back.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, types};
use rustix::event::{EventfdFlags, eventfd};

use super::registered::Registered;
use super::{Engine, Operation, Transfer};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::tier::crew::{Crew, PATIENCE};
use crate::tier::lanes::{Lane, Lanes};

/// Transfers in the ring at once.
const DEPTH: usize = 32;
/// Operations begun, and completions taken, at once: their checksums must not keep the disk
/// waiting.
const AT_ONCE: usize = 8;
/// The most bytes of one request; the rest follows.
const MAX_BYTES: usize = 1 << 30;
/// Marks the completion of the eventfd's poll.
const WAKE: u64 = u64::MAX;

struct Queue {
    waiting: Lanes<Box<dyn Operation>>,
    closed: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: File,
    /// Whether a wake-up was written that the reactor has not taken.
    woken: AtomicBool,
}

impl Shared {
    fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            // Only fails when the counter is full, which is a wake-up as well.
            let _ = (&self.wake).write(&1_u64.to_ne_bytes());
        }
    }
}

/// The engine.
pub(in crate::tier) struct Uring {
    shared: Arc<Shared>,
    crew: Crew,
}

impl Uring {
    /// Makes a ring and starts its reactor.
    ///
    /// # Errors
    /// Where io_uring is forbidden (`EPERM`) or unknown (`ENOSYS`), or too old for what we need.
    pub(in crate::tier) fn start() -> io::Result<Self> {
        let reactor = Reactor::new()?;
        Self::run(reactor)
    }

    /// As `start`, with completions that a script changes.
    #[cfg(test)]
    pub(in crate::tier) fn start_with(script: Arc<super::Script>) -> io::Result<Self> {
        let mut reactor = Reactor::new()?;
        reactor.script = script;
        Self::run(reactor)
    }

    fn run(reactor: Reactor) -> io::Result<Self> {
        let shared = Arc::clone(&reactor.shared);
        let crew = Crew::default();
        crew.start("kvtier-file-io".to_owned(), move || reactor.run())?;
        Ok(Self { shared, crew })
    }
}

impl Engine for Uring {
    fn submit(&self, lane: Lane, operations: &mut dyn Iterator<Item = Box<dyn Operation>>) {
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            drop(queue);
            operations.for_each(drop);
            return;
        }
        queue.waiting.extend(lane, operations);
        drop(queue);
        self.shared.wake();
    }

    fn close(&self) -> bool {
        let queued = {
            let mut queue = self.shared.queue.lock();
            queue.closed = true;
            std::mem::take(&mut queue.waiting)
        };
        // Outside the lock: dropping an operation resolves its job.
        drop(queued);
        self.shared.wake();
        self.crew.end_within(PATIENCE)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.close();
    }
}

struct InFlight {
    // Dropped in this order: the operation ends after its transfer.
    transfer: Transfer,
    operation: Box<dyn Operation>,
}

/// What a reactor does next.
#[derive(PartialEq, Eq)]
enum Next {
    /// Begin more operations, there may be some.
    More,
    /// Wait for a completion.
    Wait,
    /// End, after the last completion: the engine was closed.
    End,
}

struct Reactor {
    ring: IoUring,
    shared: Arc<Shared>,
    in_flight: Vec<Option<InFlight>>,
    free: Vec<usize>,
    /// Transfers that take one more request.
    again: VecDeque<usize>,
    registered: Registered,
    listening: bool,
    #[cfg(test)]
    script: Arc<super::Script>,
}

impl Reactor {
    fn new() -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(2 * DEPTH as u32)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::ReadFixed::CODE,
            opcode::WriteFixed::CODE,
            opcode::PollAdd::CODE,
        ];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(ErrorKind::Unsupported.into());
        }
        let wake = File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue { waiting: Lanes::default(), closed: false }),
            wake,
            woken: AtomicBool::new(false),
        });
        Ok(Self {
            ring,
            shared,
            in_flight: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH).collect(),
            again: VecDeque::new(),
            registered: Registered::default(),
            listening: false,
            #[cfg(test)]
            script: Arc::default(),
        })
    }

    fn run(mut self) {
        loop {
            while let Some(place) = self.again.pop_front() {
                self.push(place);
            }
            let next = self.begin();
            if next == Next::End && self.free.len() == DEPTH {
                return;
            }
            self.listen();
            let completions = usize::from(next != Next::More);
            match self.ring.submit_and_wait(completions) {
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)
                    ) => {}
                Err(error) => return self.break_down(&error),
            }
            self.complete();
        }
    }

    /// Begins a few operations, if there is room.
    fn begin(&mut self) -> Next {
        for _ in 0..AT_ONCE {
            let Some(&place) = self.free.last() else {
                return Next::Wait;
            };
            let mut operation = {
                let mut queue = self.shared.queue.lock();
                match queue.waiting.pop() {
                    Some(operation) => operation,
                    None if queue.closed => return Next::End,
                    None => return Next::Wait,
                }
            };
            let begun = catch_unwind(AssertUnwindSafe(|| operation.begin()));
            match begun {
                Ok(Some(transfer)) => {
                    self.free.pop();
                    self.in_flight[place] = Some(InFlight { transfer, operation });
                    self.push(place);
                }
                Ok(None) => {}
                Err(_) => log::error!("a tier's operation panicked; its chunk counts as lost"),
            }
        }
        Next::More
    }

    /// Queues the request for what is left of a transfer.
    fn push(&mut self, place: usize) {
        let Some(InFlight { transfer, .. }) = &self.in_flight[place] else {
            return;
        };
        let fd = types::Fd(transfer.file.file.as_raw_fd());
        let memory = transfer.memory();
        let bytes = transfer.left().min(MAX_BYTES) as u32;
        let offset = transfer.offset();
        let piece = self.registered.piece(&self.ring.submitter(), transfer);
        let entry = match (transfer.lane, piece) {
            (Lane::Load, Some(piece)) => {
                opcode::ReadFixed::new(fd, memory, bytes, piece).offset(offset).build()
            }
            (Lane::Store, Some(piece)) => {
                opcode::WriteFixed::new(fd, memory, bytes, piece).offset(offset).build()
            }
            (Lane::Load, None) => opcode::Read::new(fd, memory, bytes).offset(offset).build(),
            (Lane::Store, None) => opcode::Write::new(fd, memory, bytes).offset(offset).build(),
        };
        self.push_entry(&entry.user_data(place as u64));
    }

    /// Asks to be told of new operations.
    fn listen(&mut self) {
        if !std::mem::replace(&mut self.listening, true) {
            let fd = types::Fd(self.shared.wake.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
            self.push_entry(&entry.user_data(WAKE));
        }
    }

    fn push_entry(&mut self, entry: &io_uring::squeue::Entry) {
        // SAFETY: what the entry names stays until its completion was seen: a transfer lies in
        // `in_flight`, which is not dropped while the kernel has a request (see `break_down`).
        let pushed = unsafe { self.ring.submission().push(entry) };
        // The ring has room for twice the depth, and each place has one request at most.
        debug_assert!(pushed.is_ok());
    }

    fn complete(&mut self) {
        let done: Vec<(u64, i32)> = self
            .ring
            .completion()
            .take(AT_ONCE)
            .map(|entry| (entry.user_data(), entry.result()))
            .collect();
        for (place, result) in done {
            if place == WAKE {
                self.listening = false;
                // Takes the wake-up; there is one, or the poll had not ended.
                let _ = (&self.shared.wake).read(&mut [0; 8]);
                // Before the queue is looked at: what is queued from now on wakes again.
                self.shared.woken.store(false, Ordering::Release);
                continue;
            }
            let place = place as usize;
            let Some(in_flight) = &mut self.in_flight[place] else {
                continue;
            };
            #[cfg(test)]
            let result = scripted(&self.script, in_flight.transfer.lane, result);
            let said = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            let Some(outcome) = in_flight.transfer.advance(said) else {
                self.again.push_back(place);
                continue;
            };
            self.free.push(place);
            if let Some(InFlight { transfer, mut operation }) = self.in_flight[place].take() {
                drop(transfer);
                let ended = catch_unwind(AssertUnwindSafe(move || operation.end(outcome)));
                if ended.is_err() {
                    log::error!("a tier's operation panicked; its chunk counts as lost");
                }
            }
        }
    }

    /// The ring does not work any more. What is queued resolves as lost; what the kernel may
    /// still write is never given back.
    fn break_down(mut self, error: &io::Error) {
        log::error!("io_uring failed, the file tier stops: {error}");
        let queued = {
            let mut queue = self.shared.queue.lock();
            queue.closed = true;
            std::mem::take(&mut queue.waiting)
        };
        drop(queued);
        std::mem::forget(std::mem::take(&mut self.in_flight));
        std::mem::forget(self);
    }
}

/// What a completion says by the script: less than was moved, or an error in its place.
#[cfg(test)]
fn scripted(script: &super::Script, lane: Lane, result: i32) -> i32 {
    match script.next(lane) {
        Some(super::Fault::Short(bytes)) => result.min(i32::try_from(bytes).unwrap_or(i32::MAX)),
        Some(super::Fault::Error(number)) => -number,
        Some(super::Fault::Hang(hangs, gate)) => {
            let _ = hangs.send(());
            let _ = gate.recv();
            result
        }
        Some(super::Fault::Panic) | None => result,
    }
}
