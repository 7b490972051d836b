//! Whose page it is, and whether that process still is.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// A process, in a way that no later one is taken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Its number, in its own namespace.
    pub pid: u32,
    /// When it began, in the kernel's ticks since boot.
    pub started: u64,
    /// The namespace that numbers it.
    pub namespace: u64,
}

impl Owner {
    /// This process.
    pub fn here() -> Self {
        let pid = std::process::id();
        let started = started(pid).unwrap_or_default();
        Self { pid, started, namespace: namespace() }
    }

    /// Whether the process is gone; false if this process can not know.
    fn is_gone(&self) -> bool {
        let known = self.namespace != 0 && self.namespace == namespace() && self.started != 0;
        known && started(self.pid) != Some(self.started)
    }
}

/// Whether nobody writes this page any more. `owner` is who it names, if it could be read.
///
/// The lock tells, wherever the owner runs, but is also held by a child that the owner forked and
/// left behind: then the owner's number does.
pub(super) fn is_abandoned(file: &File, owner: Option<&Owner>) -> bool {
    file.try_lock_shared().is_ok() || owner.is_some_and(Owner::is_gone)
}

/// When a process began; `None` if there is none, or it may not be asked.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the start is field 22, counted from 1.
    let (_, behind_name) = stat.rsplit_once(')')?;
    behind_name.split_whitespace().nth(19)?.parse().ok()
}

fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
}
