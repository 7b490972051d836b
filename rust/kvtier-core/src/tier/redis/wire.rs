//! One connection to a server, and its protocol (RESP 2).
//!
//! The crate `redis` packs commands and reads small replies. A chunk goes another way: the crate
//! copies every value it sends or receives once more, which costs more than the kernel's own copy
//! (`docs/network.md` has the figures). So a value is written from the slot with one `writev`, and
//! read into the slot with `read`, past a few KiB that came with the reply's head.
//!
//! Every wait for the server has a bound, `stall`: one that sends nothing for so long hangs. A
//! connection whose exchange was not finished, for whatever reason, is not used again.

use std::io::{Error, ErrorKind, IoSlice};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::failed::Failed;
use crate::tier::network::NetworkError;

/// Bytes read ahead; what of a value lands here is copied once more.
const READ_AHEAD: usize = 4096;
/// The longest small reply: a cluster's map has some 100 bytes a range of slots.
const LONGEST_REPLY: usize = 16 << 20;

/// A byte stream to a server: TCP, or TLS over it.
pub(super) trait Transport: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Transport for T {}

/// See the module.
pub(super) struct Wire {
    stream: Box<dyn Transport>,
    node: String,
    stall: Duration,
    /// Received and not read: `buffer[start..]`.
    buffer: Vec<u8>,
    start: usize,
}

impl Wire {
    pub(super) fn new(stream: Box<dyn Transport>, node: String, stall: Duration) -> Self {
        Self { stream, node, stall, buffer: Vec::with_capacity(READ_AHEAD), start: 0 }
    }

    /// Sends a command and reads its reply; for what is small.
    pub(super) async fn ask(&mut self, command: &Cmd) -> Result<Value, Failed> {
        self.send(&mut [IoSlice::new(&command.get_packed_command())]).await?;
        self.reply().await
    }

    /// Sends bytes from where they lie.
    pub(super) async fn send(&mut self, mut slices: &mut [IoSlice<'_>]) -> Result<(), Failed> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            let sent = timeout(self.stall, self.stream.write_vectored(slices)).await;
            match sent {
                Ok(Ok(0)) => return Err(self.broken(ErrorKind::WriteZero.into())),
                Ok(Ok(sent)) => IoSlice::advance_slices(&mut slices, sent),
                Ok(Err(error)) => return Err(self.broken(error)),
                Err(_) => return Err(self.silent("sending")),
            }
        }
        match timeout(self.stall, self.stream.flush()).await {
            Ok(flushed) => flushed.map_err(|error| self.broken(error)),
            Err(_) => Err(self.silent("sending")),
        }
    }

    /// Reads one reply of any kind; an error of the server is one here.
    pub(super) async fn reply(&mut self) -> Result<Value, Failed> {
        let mut at = self.start;
        let mut left = 1_u64;
        // Finds the end of the reply; the crate reads what lies before it.
        while left > 0 {
            let line_end = self.line_end(at).await?;
            let line = &self.buffer[at..line_end - 2];
            let (&kind, text) = line.split_first().ok_or_else(|| self.confused("an empty line"))?;
            left -= 1;
            let length = || std::str::from_utf8(text).ok()?.parse::<i64>().ok();
            let mut next = line_end;
            match kind {
                b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => {}
                b'$' | b'=' | b'!' => {
                    let length = length().ok_or_else(|| self.confused("a value without length"))?;
                    if let Ok(length) = usize::try_from(length) {
                        next = line_end.saturating_add(length).saturating_add(2);
                        self.have(next).await?;
                    }
                }
                b'*' | b'~' | b'>' | b'%' => {
                    let length = length().ok_or_else(|| self.confused("a list without length"))?;
                    let items = u64::try_from(length).unwrap_or(0);
                    left = left.saturating_add(items.saturating_mul(1 + u64::from(kind == b'%')));
                }
                _ => return Err(self.confused("a reply of no known kind")),
            }
            at = next;
        }
        let parsed = redis::parse_redis_value(&self.buffer[self.start..at]);
        self.start = at;
        match parsed {
            Ok(Value::ServerError(error)) => Err(Failed::of_server(&self.node, &error)),
            Ok(value) => Ok(value),
            Err(error) => Err(self.confused(error.category())),
        }
    }

    /// Reads the head of a reply that is a value, and gives its length; `None` for nil.
    pub(super) async fn value_head(&mut self) -> Result<Option<u64>, Failed> {
        let line_end = self.line_end(self.start).await?;
        let line = &self.buffer[self.start..line_end - 2];
        let Some(length) = line.strip_prefix(b"$") else {
            let value = self.reply().await?;
            return Err(self.confused(&format!("{value:?} instead of a value")));
        };
        let length = std::str::from_utf8(length).ok().and_then(|text| text.parse::<i64>().ok());
        let length = length.ok_or_else(|| self.confused("a value without length"))?;
        self.start = line_end;
        Ok(u64::try_from(length).ok())
    }

    /// Fills `place` with the next bytes of a value.
    pub(super) async fn fill(&mut self, place: &mut [u8]) -> Result<(), Failed> {
        let ahead = place.len().min(self.buffer.len() - self.start);
        place[..ahead].copy_from_slice(&self.buffer[self.start..self.start + ahead]);
        self.start += ahead;
        let mut filled = ahead;
        while filled < place.len() {
            match timeout(self.stall, self.stream.read(&mut place[filled..])).await {
                Ok(Ok(0)) => return Err(self.broken(ErrorKind::UnexpectedEof.into())),
                Ok(Ok(received)) => filled += received,
                Ok(Err(error)) => return Err(self.broken(error)),
                Err(_) => return Err(self.silent("receiving a value")),
            }
        }
        Ok(())
    }

    /// Reads what ends a value.
    pub(super) async fn value_end(&mut self) -> Result<(), Failed> {
        let mut end = [0; 2];
        self.fill(&mut end).await?;
        if &end == b"\r\n" { Ok(()) } else { Err(self.confused("a value without end")) }
    }

    /// Reads `count` replies that are numbers.
    pub(super) async fn numbers(&mut self, count: usize) -> Result<Vec<i64>, Failed> {
        let mut numbers = Vec::with_capacity(count);
        while numbers.len() < count {
            // What nearly all of them are.
            let digit = match &self.buffer[self.start..] {
                [b':', digit @ b'0'..=b'9', b'\r', b'\n', ..] => Some(digit - b'0'),
                _ => None,
            };
            if let Some(digit) = digit {
                self.start += 4;
                numbers.push(digit.into());
                continue;
            }
            match self.reply().await? {
                Value::Int(number) => numbers.push(number),
                other => return Err(self.confused(&format!("{other:?} instead of a number"))),
            }
        }
        Ok(numbers)
    }

    /// Whether everything that came was read, so that the next reply is the next command's.
    pub(super) fn is_drained(&self) -> bool {
        self.start == self.buffer.len()
    }

    /// The end of the line that begins at `at`, its end signs included.
    async fn line_end(&mut self, at: usize) -> Result<usize, Failed> {
        let mut searched = at;
        loop {
            let found = self.buffer[searched..].windows(2).position(|pair| pair == b"\r\n");
            if let Some(found) = found {
                return Ok(searched + found + 2);
            }
            searched = self.buffer.len().saturating_sub(1).max(at);
            self.receive().await?;
        }
    }

    /// Waits until `end` bytes of the buffer are there.
    async fn have(&mut self, end: usize) -> Result<(), Failed> {
        while self.buffer.len() < end {
            self.receive().await?;
        }
        Ok(())
    }

    async fn receive(&mut self) -> Result<(), Failed> {
        if self.buffer.len() >= LONGEST_REPLY {
            return Err(self.confused("a reply that is too long"));
        }
        self.buffer.reserve(READ_AHEAD);
        match timeout(self.stall, self.stream.read_buf(&mut self.buffer)).await {
            Ok(Ok(0)) => Err(self.broken(ErrorKind::UnexpectedEof.into())),
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(self.broken(error)),
            Err(_) => Err(self.silent("waiting for its answer")),
        }
    }

    /// Forgets what was read; between exchanges, so that the buffer does not grow.
    pub(super) fn begin(&mut self) {
        self.buffer.drain(..self.start);
        self.start = 0;
    }

    fn broken(&self, source: Error) -> Failed {
        let node = self.node.clone();
        NetworkError::Unreachable { what: "talking to", node, source }.into()
    }

    fn silent(&self, what: &'static str) -> Failed {
        NetworkError::TimedOut { node: self.node.clone(), what }.into()
    }

    pub(super) fn confused(&self, why: &str) -> Failed {
        NetworkError::Protocol { node: self.node.clone(), why: why.to_owned() }.into()
    }
}
