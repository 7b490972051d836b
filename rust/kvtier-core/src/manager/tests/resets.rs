//! Forgetting the primary tier while the engine and jobs hold slots of it.

use super::*;

fn occupancy(manager: &Manager) -> (u64, u64, u64, u64) {
    manager.validate().expect("invariants hold");
    let primary = manager.stats().primary;
    (primary.ready, primary.writing, primary.pinned, primary.detached)
}

#[test]
fn what_nobody_holds_is_free_at_once_and_the_rest_when_it_is_let_go() {
    let (manager, tier, _) = one_tier(8, true, TierLimits::default());
    store(&manager, &[1, 2]);
    tier.end_store(Ok(()));
    store(&manager, &[3]);
    manager.prepare_load(2, &keys(&[2])).expect("ready");
    manager.prepare_store(3, &keys(&[4])).expect("open").expect("room");
    look(&manager, &[5]);
    end_step(&manager);
    look(&manager, &[6]);
    assert_eq!(occupancy(&manager), (3, 3, 2, 0));
    manager.take_events().expect("open");
    manager.reset().expect("open");
    // 2 and 4 are the engine's, 3 the store's, 5 the load's; 1 and the queued 6 are free.
    assert_eq!(occupancy(&manager), (0, 0, 0, 4));
    let told = manager.take_events().expect("open");
    assert_eq!((told.len(), told[0].kind, told[0].keys.len()), (1, EventKind::Removed, 3));
    for refused in
        [manager.complete_load(2, &keys(&[2])), manager.complete_store(3, &keys(&[4]), true)]
    {
        refused.expect_err("prepared before the reset");
    }
    tier.end_store(Ok(()));
    end_step(&manager);
    assert_eq!(occupancy(&manager), (0, 0, 0, 3));
    assert!(tier.loads.lock()[0].is_cancelled());
    tier.loads.lock().clear();
    end_step(&manager);
    assert_eq!(occupancy(&manager), (0, 0, 0, 2));
    manager.reset_flushed().expect("open");
    assert_eq!(occupancy(&manager), (0, 0, 0, 0));
    for request in [1, 2, 3] {
        manager.request_finished(request).expect("open");
    }
    assert_eq!(manager.stats().primary.requests, 0);
}

#[test]
fn a_slot_with_several_holders_waits_for_the_last() {
    let (manager, tier, _) = one_tier(4, false, TierLimits::default());
    store(&manager, &[1]);
    manager.prepare_load(2, &keys(&[1])).expect("ready");
    manager.prepare_load(3, &keys(&[1])).expect("ready");
    manager.reset().expect("open");
    manager.reset().expect("nothing more to forget");
    assert_eq!(occupancy(&manager).3, 1);
    manager.reset_flushed().expect("open");
    assert_eq!(occupancy(&manager).3, 1, "the tier reads it still");
    tier.end_store(Ok(()));
    end_step(&manager);
    assert_eq!(occupancy(&manager).3, 0);
}

#[test]
fn promotions_wait_until_the_engine_flushed() {
    let (manager, tier, _) = one_tier(4, true, TierLimits::default());
    manager.reset().expect("open");
    assert_eq!(look(&manager, &[1]), [Lookup::HitPending]);
    end_step(&manager);
    assert!(tier.loads.lock().is_empty());
    assert!(!manager.is_busy().expect("open"), "there is nothing to wait for");
    manager.reset_flushed().expect("open");
    end_step(&manager);
    tier.deliver();
    end_step(&manager);
    assert_eq!(look(&manager, &[1]), [Lookup::Hit]);
}

#[test]
fn requests_go_on_and_finished_ones_end() {
    let (manager, tier, clock) = one_tier(4, false, TierLimits::default());
    manager.prepare_store(1, &keys(&[1])).expect("open").expect("room");
    manager.request_finished(1).expect("open");
    manager.prepare_store(2, &keys(&[2])).expect("open").expect("room");
    manager.reset().expect("open");
    manager.reset_flushed().expect("open");
    end_step(&manager);
    assert_eq!(*tier.ended.lock(), [(1, 0)]);
    store(&manager, &[2, 3]);
    clock.advance(Duration::from_secs(60));
    end_step(&manager);
    assert_eq!(look(&manager, &[2, 3]), [Lookup::Hit, Lookup::Hit]);
}

#[test]
fn a_load_that_is_late_and_forgotten_gives_its_slots_back_once() {
    let (manager, tier, clock) = one_tier(4, true, TierLimits::default());
    look(&manager, &[1]);
    end_step(&manager);
    manager.reset().expect("open");
    manager.reset_flushed().expect("open");
    clock.advance(Duration::from_secs(60));
    end_step(&manager);
    assert_eq!(manager.stats().tiers[0].figures.quarantined, 1);
    tier.loads.lock().clear();
    end_step(&manager);
    assert_eq!(occupancy(&manager), (0, 0, 0, 0));
    assert_eq!(manager.stats().tiers[0].figures.quarantined, 0);
}

#[test]
fn tiers_are_told_no_end_while_a_reset_holds_promotions_back() {
    let tier = held(true);
    let manager = manager(vec![slot("held", Box::new(Arc::clone(&tier)))]);
    manager.reset().expect("open");
    look(&manager, &[1]);
    manager.request_finished(2).expect("open");
    manager.end_step().expect("open");
    assert!(tier.ended.lock().is_empty(), "a job of it is to come");
    manager.reset_flushed().expect("open");
    manager.end_step().expect("open");
    assert_eq!((tier.loads.lock().len(), &**tier.ended.lock()), (1, &[(2, 0)][..]));
}

#[test]
fn a_reset_tells_of_chunks_that_were_there_and_of_no_others() {
    let manager = manager(Vec::new());
    store(&manager, &[1]);
    manager.prepare_store(1, &keys(&[2])).expect("open").expect("room");
    manager.reset().expect("open");
    let told: Vec<_> = manager
        .take_events()
        .expect("open")
        .into_iter()
        .map(|event| (event.kind, event.keys.iter().map(|key| key[0]).collect()))
        .collect();
    assert_eq!(told, [(EventKind::Stored, vec![1]), (EventKind::Removed, vec![1])]);
}
