//! A bound on the bytes in flight, so that a slow server holds back work and not memory.
//!
//! Whoever moves a chunk takes its bytes first and waits if there are none left. First come,
//! first served. Something larger than the whole budget takes all of it, and so goes alone.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes a permit of the semaphore, so that its 32-bit counts reach far enough.
const GRAIN: u64 = 4096;

/// See the module.
#[derive(Debug, Clone)]
pub struct Budget {
    grains: u32,
    free: Arc<Semaphore>,
}

/// Bytes taken out of a budget; they come back when it is dropped.
#[derive(Debug)]
#[must_use = "the bytes come back when it is dropped"]
pub struct Share(#[expect(dead_code, reason = "held to be dropped")] Option<OwnedSemaphorePermit>);

impl Budget {
    /// A budget of `bytes`, rounded down to pages, one at least.
    pub fn new(bytes: u64) -> Self {
        let most = u32::try_from(Semaphore::MAX_PERMITS).unwrap_or(u32::MAX);
        let grains = u32::try_from(bytes / GRAIN).unwrap_or(most).clamp(1, most);
        Self { grains, free: Arc::new(Semaphore::new(grains as usize)) }
    }

    /// Waits until `bytes` are free, and takes them.
    pub async fn take(&self, bytes: u64) -> Share {
        let grains = u32::try_from(bytes.div_ceil(GRAIN)).unwrap_or(u32::MAX).min(self.grains);
        // The semaphore is never closed, so there is no error to pass on.
        Share(Arc::clone(&self.free).acquire_many_owned(grains).await.ok())
    }

    /// Bytes that nobody has taken.
    pub fn free_bytes(&self) -> u64 {
        self.free.available_permits() as u64 * GRAIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    /// What a future has to say right now.
    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn no_more_is_taken_than_there_is_and_all_of_it_comes_back() {
        let budget = Budget::new(3 * GRAIN);
        let two = now(budget.take(GRAIN + 1)).expect("free");
        assert_eq!(budget.free_bytes(), GRAIN);
        assert!(now(budget.take(GRAIN + 1)).is_none(), "two more are not there");
        let one = now(budget.take(GRAIN)).expect("one is");
        drop((one, two));
        assert_eq!(budget.free_bytes(), 3 * GRAIN);
    }

    #[test]
    fn what_is_larger_than_the_budget_goes_alone() {
        let budget = Budget::new(2 * GRAIN);
        let small = now(budget.take(1)).expect("free");
        assert!(now(budget.take(u64::MAX)).is_none());
        drop(small);
        let all = now(budget.take(u64::MAX)).expect("alone");
        assert!(now(budget.take(1)).is_none());
        drop(all);
        assert_eq!(budget.free_bytes(), 2 * GRAIN);
    }
}
