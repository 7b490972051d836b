//! Tiers that fail, stall, lie, or cannot keep up.

use super::*;

fn limits() -> TierLimits {
    TierLimits {
        breaker_failures: 2,
        breaker_pause: Duration::from_secs(1),
        breaker_max_pause: Duration::from_secs(4),
        load_deadline: Duration::from_secs(5),
        store_deadline: Duration::from_secs(30),
        ..TierLimits::default()
    }
}

/// Looks one key up and submits its promotion.
fn promote(manager: &Manager, number: u8) -> Lookup {
    let answer = look(manager, &[number])[0];
    end_step(manager);
    answer
}

fn breaker_events(manager: &Manager) -> Vec<(Direction, BreakerState)> {
    let events = manager.take_events().expect("open");
    let changes = events.iter().filter_map(|event| match event.kind {
        EventKind::Breaker(direction, state) => Some((direction, state)),
        _ => None,
    });
    changes.collect()
}

#[test]
fn failing_loads_open_the_breaker_and_one_good_probe_closes_it() {
    let (manager, tier, clock) = one_tier(16, true, limits());
    for number in 1..=2 {
        assert_eq!(promote(&manager, number), Lookup::HitPending);
        tier.fail_load(Failure::Io);
        end_step(&manager);
    }
    let asked = *tier.asked.lock();
    assert_eq!(promote(&manager, 3), Lookup::Miss);
    assert_eq!(*tier.asked.lock(), asked, "an open breaker asks nothing");
    clock.advance(Duration::from_secs(1));
    let probe = look(&manager, &[11, 12, 3, 4, 5, 6, 7, 8, 9, 10]);
    let pending = probe.iter().filter(|&&answer| answer == Lookup::HitPending).count();
    assert_eq!(pending, 8, "a probe is small: {probe:?}");
    end_step(&manager);
    assert_eq!(promote(&manager, 13), Lookup::Miss, "one probe at a time");
    tier.deliver();
    end_step(&manager);
    assert_eq!(look(&manager, &[11, 8]), [Lookup::Hit, Lookup::Hit]);
    assert_eq!(promote(&manager, 13), Lookup::HitPending);
    let states = [BreakerState::Open, BreakerState::HalfOpen, BreakerState::Closed];
    assert_eq!(breaker_events(&manager), states.map(|state| (Direction::Load, state)));
    assert_eq!(manager.stats().tiers[0].figures.loads.breaker_opened, 1);
}

#[test]
fn a_full_tier_gets_no_stores_but_still_serves_loads() {
    let (manager, tier, clock) = one_tier(16, true, limits());
    for number in 1..=2 {
        store(&manager, &[number]);
        tier.end_store(Err(Failure::Full));
        end_step(&manager);
    }
    store(&manager, &[3]);
    let figures = manager.stats().tiers[0].figures.clone();
    assert_eq!((figures.stores.breaker, figures.refused), (BreakerState::Open, 1));
    assert_eq!(figures.loads.breaker, BreakerState::Closed);
    assert_eq!(promote(&manager, 9), Lookup::HitPending);
    // Each failed probe doubles the pause.
    for pause in [1, 2, 4, 4] {
        clock.advance(Duration::from_secs(pause));
        store(&manager, &[10 + pause as u8]);
        if pause < 4 {
            assert_eq!(tier.stores.lock().len(), 1, "after {pause} s");
            tier.end_store(Err(Failure::Full));
            end_step(&manager);
        } else {
            break;
        }
    }
    tier.end_store(Ok(()));
    end_step(&manager);
    assert_eq!(manager.stats().tiers[0].figures.stores.breaker, BreakerState::Closed);
}

#[test]
fn chunks_that_are_gone_are_no_failure_of_the_tier() {
    let (manager, tier, _) = one_tier(16, true, limits());
    for number in 1..=5 {
        promote(&manager, number);
        tier.fail_load(Failure::Missing);
        end_step(&manager);
    }
    let figures = manager.stats().tiers[0].figures.clone();
    assert_eq!(figures.loads.breaker, BreakerState::Closed);
    assert_eq!(figures.loads.failed(Failure::Missing), 5);
}

#[test]
fn a_tier_that_hangs_can_not_take_all_slots() {
    let never = TierLimits { breaker_failures: 0, ..limits() };
    let (manager, tier, clock) = one_tier(16, true, never);
    let numbers: Vec<u8> = (1..=12).collect();
    let answers = look(&manager, &numbers);
    end_step(&manager);
    // Half of the slots at once, and no more while those are on their way.
    assert!(answers[..8].iter().all(|&answer| answer == Lookup::HitPending), "{answers:?}");
    assert!(answers[8..].iter().all(|&answer| answer == Lookup::Miss), "{answers:?}");
    assert_eq!(look(&manager, &[20]), [Lookup::Miss]);
    assert_eq!(manager.stats().primary.promotions_refused, 5);
    assert!(manager.prepare_store(1, &keys(&numbers[..8])).expect("open").is_some());
    clock.advance(Duration::from_secs(5));
    end_step(&manager);
    assert_eq!(manager.stats().tiers[0].figures.quarantined, 8);
    let asked = *tier.asked.lock();
    assert_eq!(look(&manager, &[20]), [Lookup::Miss]);
    assert_eq!(*tier.asked.lock(), asked, "it holds too many late ones to be asked");
    tier.loads.lock().clear();
    end_step(&manager);
    assert_eq!(manager.stats().primary.detached, 0);
    assert_eq!(look(&manager, &[20]), [Lookup::HitPending]);
}

#[test]
fn a_late_store_is_given_up_but_its_pins_stay_until_the_tier_lets_go() {
    let (manager, tier, clock) = one_tier(4, false, limits());
    store(&manager, &[1, 2, 3, 4]);
    clock.advance(Duration::from_secs(30));
    end_step(&manager);
    assert!(tier.stores.lock()[0].is_cancelled());
    assert_eq!(manager.stats().tiers[0].figures.stores.overdue, 1);
    assert_eq!(manager.prepare_store(1, &keys(&[5])).expect("open"), None);
    tier.stores.lock().clear();
    assert!(manager.prepare_store(1, &keys(&[5])).expect("open").is_some());
}

#[test]
fn a_tier_that_never_knows_is_given_up_for_the_request() {
    let (manager, tier, clock) = one_tier(16, true, limits());
    *tier.answer.lock() = Presence::Retry;
    assert_eq!(look(&manager, &[1, 2]), [Lookup::Retry, Lookup::Retry]);
    clock.advance(Duration::from_millis(999));
    assert_eq!(look(&manager, &[1]), [Lookup::Retry]);
    clock.advance(Duration::from_millis(1));
    assert_eq!(look(&manager, &[1, 2]), [Lookup::Miss, Lookup::Miss]);
    assert_eq!(manager.lookup(3, &keys(&[1]), false).expect("open"), [Lookup::Retry], "another");
    look(&manager, &[1]);
    end_step(&manager);
    let figures = manager.stats().tiers[0].figures.clone();
    assert_eq!(figures.lookups_overdue, 1, "once a request");
    assert_eq!(figures.faults[Fault::Blocked as usize], 1);
    assert_eq!(manager.stats().primary.retries, 4);
    *tier.answer.lock() = Presence::Hit;
    assert_eq!(look(&manager, &[1]), [Lookup::HitPending]);
    for request in [2, 3] {
        manager.request_finished(request).expect("open");
    }
    assert!(manager.inner.lock().retrying.is_empty());
}

#[test]
fn faults_that_a_tier_tells_of_are_counted_and_open_its_breaker() {
    let (manager, tier, _) = one_tier(16, true, limits());
    tier.news.lock().faults = vec![Fault::UnknownJob, Fault::ForeignKey];
    tier.news.lock().removed = vec![vec![7; 8].into()];
    end_step(&manager);
    let figures = manager.stats().tiers[0].figures.clone();
    assert_eq!(figures.faults.iter().sum::<u64>(), 2);
    assert_eq!((figures.loads.breaker, figures.evictions), (BreakerState::Open, 1));
    let told = manager.take_events().expect("open");
    assert_eq!((told[0].kind, told[0].tier), (EventKind::Removed, Some(0)));
    assert_eq!(promote(&manager, 1), Lookup::Miss);
}

#[test]
fn a_tier_that_panics_everywhere_is_contained() {
    struct Panics;
    impl SecondaryTier for Panics {
        fn medium(&self) -> Medium {
            Medium::Memory
        }
        fn lookup(&self, _: RequestId, _: &KeyBatch, _: &[u32], _: &mut [Presence]) {
            panic!("planted");
        }
        fn submit_store(&self, _: StoreJob) {
            panic!("planted");
        }
        fn submit_load(&self, _: LoadJob) {
            panic!("planted");
        }
        fn touch(&self, _: &KeyBatch) {
            panic!("planted");
        }
        fn end_step(&self, _: &mut News) {
            panic!("planted");
        }
        fn finish_request(&self, _: RequestId) {
            panic!("planted");
        }
        fn usage(&self) -> Usage {
            panic!("planted");
        }
        fn shutdown(&self) {
            panic!("planted");
        }
    }
    let bad = TierSlot {
        name: "bad".into(),
        tier: Box::new(Panics),
        limits: TierLimits { breaker_failures: 0, ..limits() },
    };
    let manager = timed_manager(SLOTS, vec![bad], &Clock::system());
    store(&manager, &[1]);
    assert_eq!(look(&manager, &[2]), [Lookup::Miss]);
    manager.touch(1, &keys(&[1])).expect("open");
    manager.request_finished(1).expect("open");
    settle(&manager);
    end_step(&manager);
    let stats = manager.stats();
    assert_eq!(stats.primary.pinned, 0);
    assert_eq!(stats.tiers[0].figures.stores.failed(Failure::Lost), 1);
    // Submit, look-up, touch, two steps and the request's end; `stats` is counted next time.
    assert!(stats.tiers[0].figures.faults[Fault::Raised as usize] >= 6);
    manager.shutdown();
}

#[test]
fn newest_or_oldest_stores_are_shed_when_the_queue_is_full() {
    for (shed, left) in [(Shed::Newest, [1, 2]), (Shed::Oldest, [3, 4])] {
        let most = Some(2 * 4096);
        let (manager, tier, _) =
            one_tier(16, false, TierLimits { shed, max_queued_bytes: most, ..limits() });
        for number in 1..=4 {
            store(&manager, &[number]);
        }
        let live: Vec<u8> = tier
            .stores
            .lock()
            .iter()
            .filter(|job| !job.is_cancelled())
            .map(|job| job.key(0)[0])
            .collect();
        assert_eq!(live, left, "{shed:?}");
        // Those given up hold their slots still: a tier that stands still gets no more of them.
        store(&manager, &[5]);
        let queued = manager.stats().tiers[0].figures.queued_bytes;
        assert_eq!(queued, if shed == Shed::Newest { 2 } else { 4 } * 4096);
        // A tier skips what was given up; each such chunk counts as shed, once.
        for job in tier.stores.lock().drain(..) {
            if !job.is_cancelled() {
                job.report(0, Ok(()), Duration::ZERO, None);
            }
        }
        end_step(&manager);
        let stats = manager.stats();
        let figures = &stats.tiers[0].figures;
        assert_eq!((figures.sheds, figures.stores.chunks, figures.queued_bytes), (3, 2, 0));
        assert_eq!(figures.stores.failures.iter().sum::<u64>(), 0, "shed, not failed");
        assert_eq!(stats.primary.pinned, 0);
    }
}

#[test]
fn a_slow_tier_gets_one_store_at_a_time_until_it_is_fast_again() {
    let (manager, tier, clock) = one_tier(64, false, limits());
    let mut number = 0;
    let mut round = |seconds: f64| {
        number += 1;
        store(&manager, &[number]);
        clock.advance(Duration::from_secs_f64(seconds));
        tier.end_store(Ok(()));
        end_step(&manager);
    };
    (0..20).for_each(|_| round(0.2));
    assert!(manager.stats().tiers[0].figures.under_pressure);
    store(&manager, &[100]);
    store(&manager, &[101]);
    assert_eq!(tier.stores.lock().len(), 1);
    assert_eq!(manager.stats().tiers[0].figures.sheds, 1);
    tier.end_store(Ok(()));
    end_step(&manager);
    (0..40).for_each(|_| round(0.001));
    store(&manager, &[102]);
    store(&manager, &[103]);
    assert_eq!(tier.stores.lock().len(), 2);
}

#[test]
fn latencies_run_from_submission_to_the_end() {
    let (manager, tier, clock) = one_tier(16, true, limits());
    promote(&manager, 1);
    clock.advance(Duration::from_secs(2));
    tier.deliver();
    clock.advance(Duration::from_secs(1));
    end_step(&manager);
    let latency = manager.stats().tiers[0].figures.loads.latency;
    assert_eq!((latency.count(), latency.sum), (1, 2.0));
}
