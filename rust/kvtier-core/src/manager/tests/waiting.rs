//! No request waits for ever, whatever a tier does.

use super::*;

/// A manager whose time the test decides.
fn timed(tiers: Vec<TierSlot>) -> (Manager, Clock) {
    let clock = Clock::simulated();
    (timed_manager(SLOTS, tiers, &clock), clock)
}

#[test]
fn a_request_of_many_lookups_a_step_is_given_up_in_time() {
    /// Never knows whether it has chunk 1, and has no other.
    struct Unsure;
    impl SecondaryTier for Unsure {
        fn medium(&self) -> Medium {
            Medium::Network
        }
        fn lookup(&self, _: RequestId, keys: &KeyBatch, wanted: &[u32], presence: &mut [Presence]) {
            for (&at, presence) in wanted.iter().zip(presence) {
                if keys.get(at as usize)[0] == 1 {
                    *presence = Presence::Retry;
                }
            }
        }
        fn submit_store(&self, _: StoreJob) {}
        fn submit_load(&self, _: LoadJob) {}
        fn touch(&self, _: &KeyBatch) {}
        fn usage(&self) -> Usage {
            Usage::default()
        }
        fn shutdown(&self) {}
    }
    let (manager, clock) = timed(vec![slot("unsure", Box::new(Unsure))]);
    let step = |numbers: [u8; 2]| {
        let answers = numbers.map(|number| manager.lookup_key(2, &[number; 8]).expect("open"));
        manager.end_step().expect("open");
        clock.advance(Duration::from_millis(400));
        answers
    };
    for _ in 0..2 {
        for _ in 0..3 {
            assert_eq!(step([2, 1]), [Lookup::Miss, Lookup::Retry]);
        }
        assert_eq!(step([1, 2]), [Lookup::Miss; 2], "after 1.2 s, with a deadline of 1 s");
        assert_eq!(step([3, 2]), [Lookup::Miss; 2], "answered in full: a next wait is another");
    }
    assert_eq!(manager.stats().tiers[0].figures.lookups_overdue, 2);
}

#[test]
fn a_chunk_that_did_not_come_is_asked_of_the_next_tier_and_then_missing() {
    let tiers = [held(true), held(true)];
    let (manager, clock) = timed(vec![
        slot("first", Box::new(Arc::clone(&tiers[0]))),
        slot("second", Box::new(Arc::clone(&tiers[1]))),
    ]);
    assert_eq!(look(&manager, &[1]), [Lookup::HitPending]);
    manager.end_step().expect("open");
    tiers[0].loads.lock().clear();
    assert_eq!(look(&manager, &[1]), [Lookup::HitPending]);
    manager.end_step().expect("open");
    assert_eq!(tiers[1].loads.lock().len(), 1, "of the second one");
    // It hangs.
    clock.advance(Duration::from_secs(60));
    manager.end_step().expect("open");
    assert_eq!(look(&manager, &[1, 2]), [Lookup::HitPending, Lookup::HitPending], "first again");
    manager.end_step().expect("open");
    tiers[0].loads.lock().clear();
    assert_eq!(look(&manager, &[1]), [Lookup::Miss], "for longer now");
    // A new copy is trusted.
    store(&manager, &[1]);
    for job in tiers[0].stores.lock().drain(..) {
        job.report(0, Ok(()), Duration::ZERO, None);
    }
    tiers[1].stores.lock().clear();
    manager.reset().expect("open");
    manager.reset_flushed().expect("open");
    assert_eq!(manager.lookup(3, &keys(&[1]), false).expect("open"), [Lookup::HitPending]);
    manager.validate().expect("invariants hold");
}

#[test]
fn a_request_that_looks_up_more_than_fits_ends() {
    let tier = held(true);
    let (manager, _) = timed(vec![slot("held", Box::new(Arc::clone(&tier)))]);
    let wanted: Vec<u8> = (1..=SLOTS as u8 + 2).collect();
    for _ in 0..3 * SLOTS {
        let answers = wanted.iter().map(|&number| look(&manager, &[number])[0]);
        let answers: Vec<Lookup> = answers.collect();
        if !answers.contains(&Lookup::HitPending) {
            assert!(answers.contains(&Lookup::Hit), "{answers:?}");
            return;
        }
        manager.end_step().expect("open");
        while !tier.loads.lock().is_empty() {
            tier.deliver();
        }
    }
    panic!("it is promised for ever what makes room for the rest of it");
}
