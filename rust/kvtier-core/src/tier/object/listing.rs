//! The task that lists the namespace when the inventory wants it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};

use super::Shared;
use super::cause::Cause;
use super::layout::SHARDS;
use super::transfer::Tries;
use crate::clock::Clock;
use crate::log_limit::limited;
use crate::tier::network::{Counted, NodeBreaker};
use crate::tier::{TierError, TierLimits};

/// Shards that are listed side by side.
const SIDE_BY_SIDE: usize = 4;
/// How long a shard is tried again: a listing of many pages is not to be lost for one of them.
const PATIENCE: Duration = Duration::from_secs(10);

/// Lists whenever it is wanted, until it is dropped. After one that failed it pauses, longer each
/// time; what waits for it is absent meanwhile.
pub(super) async fn keep(shared: Arc<Shared>) {
    let limits = TierLimits { breaker_failures: 1, ..shared.limits.clone() };
    let breaker = NodeBreaker::new(&limits, Clock::system());
    loop {
        shared.inventory.wanted().await;
        let Some(attempt) = breaker.admit() else {
            shared.counters.count(Counted::SkippedNode);
            shared.inventory.end_listing(None);
            continue;
        };
        let began = shared.inventory.begin_listing();
        shared.counters.count(Counted::Questions);
        match list(&shared).await {
            Ok(()) => {
                attempt.succeeded();
                shared.inventory.end_listing(Some(began));
            }
            Err(error) => {
                attempt.failed();
                limited!(shared.log, warn, "tier {:?}: listing failed: {error}", shared.name);
                shared.count(&error);
                shared.inventory.end_listing(None);
            }
        }
    }
}

async fn list(shared: &Shared) -> Result<(), TierError> {
    let deadline = Instant::now() + PATIENCE;
    stream::iter(SHARDS.chars().map(|digit| list_shard(shared, digit, deadline)))
        .buffer_unordered(SIDE_BY_SIDE)
        .try_collect()
        .await
}

async fn list_shard(shared: &Shared, digit: char, deadline: Instant) -> Result<(), TierError> {
    let mut tries = Tries::until(shared, deadline);
    loop {
        match read_shard(shared, digit).await {
            Ok(()) => return Ok(()),
            Err(cause) => tries.again(cause).await?,
        }
    }
}

async fn read_shard(shared: &Shared, digit: char) -> Result<(), Cause> {
    let mut objects = shared.store.list(Some(&shared.layout.shard(digit)));
    shared.counters.count(Counted::RoundTrips);
    while let Some(object) = objects.next().await {
        let object = object.map_err(|error| Cause::of(&error, &shared.node, "LIST"))?;
        let Some(key) = shared.layout.key(&object.location) else {
            continue;
        };
        if object.size == shared.layout.object_bytes() {
            shared.inventory.named(&key);
        } else {
            // Written over by the next store of this key.
            shared.inventory.hide(&key);
        }
    }
    Ok(())
}
