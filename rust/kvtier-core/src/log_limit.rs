//! Log lines of one source, once a second at most.

use std::time::Instant;

use crate::sync::Mutex;

/// Says which lines may be logged. What is told only by figures is never lost.
#[derive(Debug, Default)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    passed_over: u64,
}

impl LogLimit {
    /// The line to log, which says how many were passed over since the last one; `None`, and the
    /// message is not even made, when it is to be passed over itself.
    pub fn line(&self, message: impl FnOnce() -> String) -> Option<String> {
        let passed_over = self.take()?;
        let message = message();
        Some(match passed_over {
            0 => message,
            _ => format!("{message} ({passed_over} lines like it were passed over)"),
        })
    }

    fn take(&self) -> Option<u64> {
        let mut state = self.0.lock();
        let now = Instant::now();
        if state.last.is_some_and(|last| now.duration_since(last).as_secs() < 1) {
            state.passed_over += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.passed_over))
    }
}

/// Logs a line at most once a second: `limited!(limit, warn, "...", ...)`.
macro_rules! limited {
    ($limit:expr, $level:ident, $($message:tt)+) => {
        if let Some(line) = $limit.line(|| format!($($message)+)) {
            log::$level!("{line}");
        }
    };
}
pub(crate) use limited;
