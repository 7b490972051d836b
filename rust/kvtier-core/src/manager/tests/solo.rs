//! A tier behind a primary tier that somebody else manages.

use super::*;

const DEADLINE: Duration = Duration::from_secs(5);

/// A tier over a region of `SLOTS` slots, on a clock of the test's.
fn solo(tier: Box<dyn SecondaryTier>, limits: TierLimits) -> (SoloTier, Arc<Region>, Clock) {
    let region = Region::new(SLOTS, 4096, RegionKind::Anonymous).expect("small");
    let clock = Clock::simulated();
    let slot = TierSlot { name: "solo".into(), tier, limits };
    (SoloTier::new(Arc::clone(&region), slot, 8, true, clock.clone()), region, clock)
}

fn held_solo(has: bool, limits: TierLimits) -> (SoloTier, Arc<HeldTier>, Clock) {
    let tier = held(has);
    let (solo, _, clock) = solo(Box::new(Arc::clone(&tier)), limits);
    (solo, tier, clock)
}

/// Submits a job of keys, each at the slot of its number.
fn submit(solo: &SoloTier, direction: Direction, id: u64, numbers: &[u8]) -> Result<(), SoloError> {
    let slots = numbers.iter().map(|&number| u32::from(number)).collect();
    // SAFETY: no test touches a slot of a job that runs.
    unsafe { solo.submit(direction, id, 1, keys(numbers), slots) }
}

/// The jobs that ended, and how many of their chunks were moved.
fn ended(solo: &SoloTier) -> Vec<(u64, usize)> {
    let moved = |job: Ended| job.outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    solo.finished().into_iter().map(|job| (job.job, moved(job))).collect()
}

fn look_up(solo: &SoloTier, number: u8) -> Presence {
    solo.lookup(1, &[number; 8]).expect("open")
}

#[test]
fn chunks_go_to_a_tier_and_come_back_into_other_slots() {
    let (solo, region, _) = solo(memory_tier(8), TierLimits::default());
    // SAFETY: before the job.
    unsafe { region.slot_mut(1) }.fill(7);
    submit(&solo, Direction::Store, 10, &[1]).expect("free");
    let far = Instant::now() + Duration::from_secs(30);
    assert!(solo.wait_until(far));
    assert_eq!(ended(&solo), [(10, 1)]);
    assert_eq!((look_up(&solo, 1), look_up(&solo, 2)), (Presence::Hit, Presence::Miss));
    // SAFETY: nobody else uses slot 3.
    unsafe { solo.submit(Direction::Load, 11, 1, keys(&[1]), vec![3]) }.expect("free");
    assert!(solo.wait_until(far));
    let [job] = &solo.finished()[..] else { panic!("one job ended") };
    assert_eq!((job.job, job.bytes), (11, 4096));
    // SAFETY: the job has ended.
    assert!(unsafe { region.slot(3) }.iter().all(|&byte| byte == 7));
    let events = solo.take_events();
    assert!(events.iter().any(|event| event.kind == EventKind::Stored), "{events:?}");
    assert_eq!(solo.shutdown(), 0);
    assert!(matches!(solo.lookup(1, &[1; 8]), Err(SoloError::Closed)));
}

#[test]
fn a_job_that_can_not_be_is_refused_and_never_reaches_the_tier() {
    let (solo, tier, _) = held_solo(true, TierLimits::default());
    submit(&solo, Direction::Load, 1, &[0]).expect("fine");
    assert!(matches!(submit(&solo, Direction::Load, 1, &[1]), Err(SoloError::Job(1))));
    for slots in [vec![], vec![1, 2], vec![SLOTS]] {
        // SAFETY: refused.
        let refused = unsafe { solo.submit(Direction::Load, 2, 1, keys(&[1]), slots) };
        assert!(matches!(refused, Err(SoloError::Slots { keys: 1, .. })));
    }
    // SAFETY: refused.
    let twice = unsafe { solo.submit(Direction::Load, 2, 1, keys(&[1, 2]), vec![3, 3]) };
    assert!(matches!(twice, Err(SoloError::Slots { keys: 2, .. })));
    assert_eq!(tier.loads.lock().len(), 1);
    let error = solo.lookup(1, b"short").expect_err("5 bytes");
    assert!(error.to_string().contains("5 bytes"), "{error}");
}

#[test]
fn while_a_load_is_late_nobody_else_begins_to_wait() {
    let (solo, tier, clock) =
        held_solo(true, TierLimits { load_deadline: DEADLINE, ..TierLimits::default() });
    submit(&solo, Direction::Load, 1, &[0]).expect("free");
    assert_eq!(look_up(&solo, 1), Presence::Hit);
    clock.advance(DEADLINE);
    assert_eq!(look_up(&solo, 1), Presence::Miss);
    assert!(ended(&solo).is_empty(), "its slot is still the tier's");
    assert!(tier.loads.lock()[0].is_cancelled());
    tier.deliver();
    assert_eq!(ended(&solo), [(1, 1)]);
    assert_eq!(look_up(&solo, 1), Presence::Hit);
}

#[test]
fn a_chunk_that_did_not_come_is_not_said_to_be_there_again() {
    let (solo, tier, clock) =
        held_solo(true, TierLimits { load_deadline: DEADLINE, ..TierLimits::default() });
    submit(&solo, Direction::Load, 1, &[0]).expect("free");
    tier.fail_load(Failure::Corrupt);
    assert_eq!(ended(&solo), [(1, 0)]);
    assert_eq!((look_up(&solo, 0), look_up(&solo, 1)), (Presence::Miss, Presence::Hit));
    submit(&solo, Direction::Store, 2, &[0]).expect("free");
    tier.end_store(Ok(()));
    ended(&solo);
    assert_eq!(look_up(&solo, 0), Presence::Hit, "stored anew");
    clock.advance(DEADLINE);
}

#[test]
fn a_tier_that_keeps_failing_is_switched_off_and_probed() {
    let limits = TierLimits { breaker_failures: 2, ..TierLimits::default() };
    let (solo, tier, clock) = held_solo(true, limits);
    for id in 0..2 {
        submit(&solo, Direction::Store, id, &[0]).expect("free");
        tier.end_store(Err(Failure::Io));
        assert_eq!(ended(&solo), [(id, 0)]);
    }
    submit(&solo, Direction::Store, 7, &[0]).expect("refused jobs end");
    assert_eq!(ended(&solo), [(7, 0)]);
    assert!(tier.stores.lock().is_empty(), "the tier did not get it");
    assert_eq!(look_up(&solo, 1), Presence::Hit, "loads have a breaker of their own");
    clock.advance(TierLimits::default().breaker_pause);
    submit(&solo, Direction::Store, 8, &[0]).expect("free");
    tier.end_store(Ok(()));
    assert_eq!(ended(&solo), [(8, 1)]);
}

#[test]
fn stores_above_the_bound_end_at_once() {
    let limits = TierLimits { max_queued_bytes: Some(2 * 4096), ..TierLimits::default() };
    let (solo, tier, _) = held_solo(true, limits);
    submit(&solo, Direction::Store, 1, &[0, 1, 2]).expect("an idle tier takes any");
    submit(&solo, Direction::Store, 2, &[3]).expect("ends at once");
    assert_eq!(ended(&solo), [(2, 0)]);
    tier.end_store(Ok(()));
    submit(&solo, Direction::Store, 3, &[3]).expect("free");
    assert_eq!(tier.stores.lock().len(), 1);
}

#[test]
fn a_tier_that_does_not_answer_in_time_has_nothing() {
    let (solo, tier, clock) = held_solo(true, TierLimits::default());
    *tier.answer.lock() = Presence::Retry;
    assert_eq!(look_up(&solo, 0), Presence::Retry);
    clock.advance(TierLimits::default().lookup_deadline);
    assert_eq!(look_up(&solo, 0), Presence::Miss);
    solo.finish_request(1);
    assert_eq!(look_up(&solo, 0), Presence::Retry, "the next request waits anew");
}

#[test]
fn shutdown_says_what_it_did_not_get_back() {
    let (solo, tier, _) = held_solo(true, TierLimits::default());
    submit(&solo, Direction::Load, 1, &[0]).expect("free");
    let stuck = tier.loads.lock().remove(0);
    assert_eq!(solo.shutdown(), 1);
    drop(stuck);
    assert_eq!(solo.shutdown(), 0);
}
