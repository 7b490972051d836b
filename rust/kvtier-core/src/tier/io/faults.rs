//! Disks that fail on demand, for tests: the next calls of a lane go as a script says.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, Sender};

use super::Transfer;
use super::threads::{Calls, Plain};
use crate::region::SLOT_ALIGNMENT;
use crate::sync::Mutex;
use crate::tier::lanes::Lane;

/// How one system call goes.
pub(in crate::tier) enum Fault {
    /// It moves so many bytes at most.
    Short(usize),
    /// It fails with this number.
    Error(i32),
    /// It panics.
    Panic,
    /// It says that it hangs, and does so until the other end of the gate is gone.
    Hang(Sender<()>, Receiver<()>),
}

/// What the next calls of each lane do; those after are good.
#[derive(Default)]
pub(in crate::tier) struct Script {
    loads: Mutex<VecDeque<Fault>>,
    stores: Mutex<VecDeque<Fault>>,
}

impl Script {
    fn lane(&self, lane: Lane) -> &Mutex<VecDeque<Fault>> {
        match lane {
            Lane::Load => &self.loads,
            Lane::Store => &self.stores,
        }
    }

    pub(in crate::tier) fn plan(&self, lane: Lane, faults: impl IntoIterator<Item = Fault>) {
        self.lane(lane).lock().extend(faults);
    }

    /// Drops what is planned; says how much that was.
    pub(in crate::tier) fn forget(&self, lane: Lane) -> usize {
        std::mem::take(&mut *self.lane(lane).lock()).len()
    }

    pub(super) fn next(&self, lane: Lane) -> Option<Fault> {
        self.lane(lane).lock().pop_front()
    }
}

impl Calls for Script {
    fn call(&self, transfer: &Transfer, most: usize) -> io::Result<usize> {
        match self.next(transfer.lane) {
            None => Plain.call(transfer, most),
            Some(Fault::Short(0)) => Ok(0),
            Some(Fault::Short(bytes)) => {
                // Direct I/O takes whole pages only; what it says is what counts.
                let pages = bytes.next_multiple_of(SLOT_ALIGNMENT).min(most);
                Plain.call(transfer, pages).map(|moved| moved.min(bytes))
            }
            Some(Fault::Error(number)) => Err(io::Error::from_raw_os_error(number)),
            Some(Fault::Panic) => panic!("planted"),
            Some(Fault::Hang(hangs, gate)) => {
                let _ = hangs.send(());
                let _ = gate.recv();
                Plain.call(transfer, most)
            }
        }
    }
}
