//! The engine of kvtier, without Python.
//!
//! kvtier keeps the KV cache of LLM inference in tiers: GPU blocks, a primary tier in host
//! memory, and any number of secondary tiers. This crate decides what is where and moves it:
//!
//! | module | question it answers |
//! |---|---|
//! | [`key`] | which chunk? |
//! | [`index`] | which keys are resident, which one may go? |
//! | [`region`] | where are the bytes of the primary tier? |
//! | [`checksum`] | are they still the bytes that were stored? |
//! | [`clock`] | what time is it? |
//! | [`log_limit`] | may this line be logged now? |
//! | [`tier`] | what is behind the primary tier, and how do chunks get there and back? |
//! | [`manager`] | what moves when? |
//! | [`page`] | what does somebody see who looks from outside? |
//! | [`trace`] | what moved when, for a picture? |
//! | [`replay`] | what would another policy or size have hit? |
//! | [`copy`] | paged tensors in host memory to slots and back |
//!
//! # Lock order
//!
//! The manager's lock first, then the lock of its result queue. All others (a tier's index, a
//! worker queue, a job's tally) are leaves, taken alone. No lock is held across I/O, a copy of
//! chunk bytes, a call into a tier, or a call into Python. The turn to write a stats page is tried,
//! never waited for.

pub mod checksum;
pub mod clock;
pub mod copy;
pub mod index;
pub mod key;
pub mod log_limit;
pub mod manager;
pub mod page;
pub mod region;
pub mod replay;
mod sync;
pub mod tier;
pub mod trace;
