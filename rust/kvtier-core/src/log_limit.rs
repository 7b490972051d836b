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
    /// Whether a line may be logged now, and how many were passed over since the last one.
    pub fn take(&self) -> Option<u64> {
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
        if let Some(passed_over) = $limit.take() {
            let message = format!($($message)+);
            if passed_over == 0 {
                log::$level!("{message}");
            } else {
                log::$level!("{message} ({passed_over} lines like it were passed over)");
            }
        }
    };
}
pub(crate) use limited;
