//! Moving chunks: from a slot to a server, and back.
//!
//! A chunk is one value, its [`Envelope`] in front, or if it is larger than `part_bytes` several:
//! the envelope and the first part under the chunk's own name, the others under names with the
//! writer's number. The first part is written last and only if there is none: until then the chunk
//! is not there, and no reader ever sees the parts of two writers together.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

use redis::Value;

use super::client::{Client, Route, Trying};
use super::failed::Failed;
use super::names::Names;
use super::node::{Lease, Node, Turn, Work};
use super::wire::Wire;
use crate::checksum::Checksum;
use crate::log_limit::limited;
use crate::tier::network::{BadCopy, Counted, ENVELOPE_BYTES, Envelope, NetworkError};
use crate::tier::{Failure, LoadJob, StoreJob, TierError};

/// A value whose beginning was read.
struct Opened<'a> {
    lease: Lease<'a>,
    length: u64,
    envelope: [u8; ENVELOPE_BYTES],
}

impl Client {
    /// Brings one chunk of a job and reports it.
    pub(super) async fn load_chunk(&self, job: &LoadJob, index: usize, begun: Instant) {
        let deadline = begun + self.limits.load_deadline.mul_f64(0.9);
        let loaded = tokio::time::timeout_at(deadline.into(), self.load(job, index, deadline));
        let loaded = loaded.await.unwrap_or_else(|_| Err(self.late("a load").into()));
        let busy = begun.elapsed();
        let delivered = match loaded {
            Ok(checksum) => job.deliver(index, checksum, busy).inspect_err(|_| {
                self.counters.bad(BadCopy::Checksum);
            }),
            Err(error) => {
                job.fail(index, Failure::from(&error), busy);
                Err(error)
            }
        };
        let key = job.key(index);
        if let Err(error @ (TierError::BadCopy { .. } | TierError::Corrupt { .. })) = &delivered {
            limited!(self.parts.log, warn, "{error}");
            // The job ends with this task: what hangs here must not make it late.
            let end = begun + self.limits.load_deadline.mul_f64(0.95);
            let removed = tokio::time::timeout_at(end.into(), self.remove(key, end)).await;
            if removed == Ok(true) {
                job.dropped(index);
            }
        }
        self.known.note(key, delivered.is_ok());
    }

    /// Sends one chunk of a job and reports it.
    pub(super) async fn store_chunk(&self, job: &StoreJob, index: usize, begun: Instant) {
        let deadline = begun + self.limits.store_deadline.mul_f64(0.9);
        let stored = tokio::time::timeout_at(deadline.into(), self.store(job, index, deadline));
        let stored = stored.await.unwrap_or_else(|_| Err(self.late("a store").into()));
        if stored.is_ok() {
            self.known.note(job.key(index), true);
        }
        let outcome = stored.map_err(|error| Failure::from(&error));
        job.report(index, outcome, begun.elapsed(), None);
    }

    fn late(&self, what: &'static str) -> NetworkError {
        let error = NetworkError::TimedOut { node: "the server".to_owned(), what };
        self.parts.failed(&error);
        error
    }

    async fn load(
        &self,
        job: &LoadJob,
        index: usize,
        deadline: Instant,
    ) -> Result<Checksum, TierError> {
        let key = job.key(index);
        let name = self.names.of(key);
        let mut trying = Trying::until(deadline);
        loop {
            if job.is_cancelled() {
                return Err(TierError::Missing(key.into()));
            }
            let fetched = match self.route(&name, &mut trying).await {
                Ok(route) => self.fetch(&route, &name, job, index).await,
                Err(error) => Err(error),
            };
            match fetched {
                Ok(checksum) => return Ok(checksum),
                Err(failed) => self.go_on(&mut trying, failed, key).await?,
            }
        }
    }

    async fn fetch(
        &self,
        route: &Route,
        name: &str,
        job: &LoadJob,
        index: usize,
    ) -> Result<Checksum, Failed> {
        let shard = &route.shard;
        // In this order: work that waits for a node that hangs has taken nothing from others'.
        let turn = shard.master.turn(Work::Load).await;
        let _share = self.budget.take(self.chunk_bytes as u64).await;
        let first = self.open(turn, route.asking, name);
        let second = |replica| self.open_at(replica, name);
        let Opened { mut lease, length, envelope } = self.hedged(shard, first, second).await?;
        // SAFETY: this task is the only one for this chunk, the exchanges that could write into
        // the place are over when `fetch` is, and it ends before the chunk is delivered.
        let place = unsafe { job.place(index) };
        let received =
            self.receive(&mut lease, name, job.key(index), length, &envelope, place).await;
        lease.end(received)
    }

    async fn open_at<'a>(&self, node: &'a Arc<Node>, name: &str) -> Result<Opened<'a>, Failed> {
        self.open(node.turn(Work::Load).await, false, name).await
    }

    /// Asks a node for a chunk's value, and reads how it begins.
    async fn open<'a>(
        &self,
        turn: Turn<'a>,
        asking: bool,
        name: &str,
    ) -> Result<Opened<'a>, Failed> {
        let mut lease = turn.lease().await?;
        let mut envelope = [0; ENVELOPE_BYTES];
        let head = async {
            let wire = &mut lease.wire;
            if asking {
                wire.ask(&redis::cmd("ASKING")).await?;
            }
            wire.send(&mut [IoSlice::new(&get(name))]).await?;
            let length = wire.value_head().await?.ok_or(Failed::Gone)?;
            if length < ENVELOPE_BYTES as u64 {
                return Err(Failed::Bad(BadCopy::Header));
            }
            wire.fill(&mut envelope).await?;
            Ok(length)
        };
        match head.await {
            Ok(length) => Ok(Opened { lease, length, envelope }),
            Err(error) => lease.end(Err(error)),
        }
    }

    /// Checks what a value says of itself, and reads the rest of it into `place`.
    async fn receive(
        &self,
        lease: &mut Lease<'_>,
        name: &str,
        key: &[u8],
        length: u64,
        envelope: &[u8; ENVELOPE_BYTES],
        place: &mut [u8],
    ) -> Result<Checksum, Failed> {
        let envelope = Envelope::decode(envelope, self.namespace, key, self.chunk_bytes);
        let envelope = envelope.map_err(Failed::Bad)?;
        let found = length - ENVELOPE_BYTES as u64;
        lease.wire.receive_parts(name, &envelope, found, place).await?;
        Ok(envelope.checksum)
    }

    async fn store(
        &self,
        job: &StoreJob,
        index: usize,
        deadline: Instant,
    ) -> Result<(), TierError> {
        let key = job.key(index);
        if self.known.is_present(key) {
            return Ok(());
        }
        let name = self.names.of(key);
        // The same for all tries, so that they leave one set of parts behind.
        let writer = fastrand::u64(1..);
        let mut trying = Trying::until(deadline);
        loop {
            if job.is_cancelled() {
                return Err(TierError::Missing(key.into()));
            }
            let sent = match self.route(&name, &mut trying).await {
                Ok(route) => self.send(&route, &name, writer, job, index).await,
                Err(error) => Err(error),
            };
            match sent {
                Ok(()) => return Ok(()),
                Err(failed) => self.go_on(&mut trying, failed, key).await?,
            }
        }
    }

    async fn send(
        &self,
        route: &Route,
        name: &str,
        writer: u64,
        job: &StoreJob,
        index: usize,
    ) -> Result<(), Failed> {
        // Before it has a connection, which would idle meanwhile.
        job.checksum(index);
        let turn = route.shard.master.turn(Work::Store).await;
        let _share = self.budget.take(self.chunk_bytes as u64).await;
        let mut lease = turn.lease().await?;
        let sent = self.send_parts(&mut lease, route.asking, name, writer, job, index).await;
        lease.end(sent)
    }

    async fn send_parts(
        &self,
        lease: &mut Lease<'_>,
        asking: bool,
        name: &str,
        writer: u64,
        job: &StoreJob,
        index: usize,
    ) -> Result<(), Failed> {
        let bytes = job.bytes(index);
        let parts: Vec<&[u8]> = bytes.chunks(self.part_bytes).collect();
        let envelope = Envelope {
            checksum: job.checksum(index),
            parts: parts.len() as u32,
            writer: if parts.len() > 1 { writer } else { 0 },
        };
        let envelope = envelope.encode(self.namespace, job.key(index), self.chunk_bytes);
        let names: Vec<String> =
            (1..parts.len() as u32).map(|part| Names::of_part(name, writer, part)).collect();
        for (name, part) in names.iter().zip(&parts[1..]) {
            self.set(lease, asking, name, &[part], false).await?;
        }
        let is_new = self.set(lease, asking, name, &[&envelope, parts[0]], true).await?;
        if !is_new && !names.is_empty() {
            // Somebody else was faster; these are nobody's.
            lease.wire.ask(redis::cmd("UNLINK").arg(&names)).await?;
        }
        Ok(())
    }

    /// Sets a value out of several pieces; with `if_absent`, says whether it was.
    async fn set(
        &self,
        lease: &mut Lease<'_>,
        asking: bool,
        name: &str,
        pieces: &[&[u8]],
        if_absent: bool,
    ) -> Result<bool, Failed> {
        if asking {
            lease.wire.ask(&redis::cmd("ASKING")).await?;
        }
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        let arguments = 3 + usize::from(if_absent) + 2 * usize::from(self.ttl_s.is_some());
        let head =
            format!("*{arguments}\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${length}\r\n", name.len());
        let condition = if if_absent { "$2\r\nNX\r\n" } else { "" };
        let expiry = self.ttl_s.map_or_else(String::new, |seconds| {
            let seconds = seconds.to_string();
            format!("$2\r\nEX\r\n${}\r\n{seconds}\r\n", seconds.len())
        });
        let tail = format!("\r\n{condition}{expiry}");
        let mut slices = vec![IoSlice::new(head.as_bytes())];
        slices.extend(pieces.iter().map(|piece| IoSlice::new(piece)));
        slices.push(IoSlice::new(tail.as_bytes()));
        lease.wire.send(&mut slices).await?;
        match lease.wire.reply().await? {
            Value::Okay => Ok(true),
            Value::Nil => Ok(false),
            other => Err(lease.wire.confused(&format!("{other:?} as the answer to SET"))),
        }
    }

    /// Removes a copy that turned out bad; whether that could be done.
    async fn remove(&self, key: &[u8], deadline: Instant) -> bool {
        let name = self.names.of(key);
        let mut trying = Trying::until(deadline);
        loop {
            let removed = match self.route(&name, &mut trying).await {
                Ok(route) => self.unlink(&route, &name).await,
                Err(error) => Err(error),
            };
            match removed {
                Ok(()) => {
                    self.counters.count(Counted::Removed);
                    return true;
                }
                Err(failed) => {
                    if self.go_on(&mut trying, failed, key).await.is_err() {
                        return false;
                    }
                }
            }
        }
    }

    async fn unlink(&self, route: &Route, name: &str) -> Result<(), Failed> {
        let mut lease = route.shard.master.lease(Work::Store).await?;
        let removed = async {
            if route.asking {
                lease.wire.ask(&redis::cmd("ASKING")).await?;
            }
            lease.wire.ask(redis::cmd("UNLINK").arg(name)).await
        };
        let removed = removed.await.map(drop);
        lease.end(removed)
    }
}

impl Wire {
    /// Reads a chunk into `place`, of whose value `found` bytes follow, the rest of the first part.
    pub(super) async fn receive_parts(
        &mut self,
        name: &str,
        envelope: &Envelope,
        found: u64,
        place: &mut [u8],
    ) -> Result<(), Failed> {
        let bad =
            |expected: usize| Failed::Bad(BadCopy::Length { found, expected: expected as u64 });
        // Whoever wrote it chose the size of its parts; all but the last have that of the first.
        let first = usize::try_from(found).ok().filter(|&first| first > 0 && first <= place.len());
        let first = first.ok_or_else(|| bad(place.len()))?;
        if place.len().div_ceil(first) != envelope.parts as usize {
            return Err(bad(place.len().div_ceil(envelope.parts as usize)));
        }
        let (begin, rest) = place.split_at_mut(first);
        self.fill(begin).await?;
        self.value_end().await?;
        if envelope.parts > 1 {
            let part = |part| get(&Names::of_part(name, envelope.writer, part));
            let commands: Vec<u8> = (1..envelope.parts).flat_map(part).collect();
            self.send(&mut [IoSlice::new(&commands)]).await?;
            for part in rest.chunks_mut(first) {
                let expected = part.len() as u64;
                // One that is gone makes the others useless.
                let found = self.value_head().await?.unwrap_or(0);
                if found != expected {
                    return Err(Failed::Bad(BadCopy::Length { found, expected }));
                }
                self.fill(part).await?;
                self.value_end().await?;
            }
        }
        Ok(())
    }
}

/// The command that reads a value.
pub(super) fn get(name: &str) -> Vec<u8> {
    format!("*2\r\n$3\r\nGET\r\n${}\r\n{name}\r\n", name.len()).into_bytes()
}
