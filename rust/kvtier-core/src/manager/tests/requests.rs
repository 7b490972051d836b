//! Requests with options, request-level tiers, and when tiers are told of the end.

use super::*;
use crate::tier::Offload;

fn request_level() -> TierLimits {
    TierLimits { offload: Offload::Request, ..TierLimits::default() }
}

fn stored(tier: &HeldTier) -> Vec<Vec<u8>> {
    let jobs = tier.stores.lock();
    jobs.iter().map(|job| (0..job.len()).map(|index| job.key(index)[0]).collect()).collect()
}

#[test]
fn a_request_level_tier_gets_what_was_resident_before() {
    let (manager, tier, _) = one_tier(16, false, request_level());
    store(&manager, &[1, 2]);
    manager.request_finished(1).expect("open");
    tier.stores.lock().clear();
    manager.prepare_store(2, &keys(&[1, 2, 3])).expect("open").expect("room");
    assert_eq!(stored(&tier), [[1, 2]]);
    manager.complete_store(2, &keys(&[3]), true).expect("prepared");
    assert_eq!(stored(&tier), [vec![1, 2], vec![3]]);
}

#[test]
fn a_key_that_is_being_written_waits_until_it_is_ready_or_gone() {
    let (manager, tier, _) = one_tier(16, false, request_level());
    manager.prepare_store(1, &keys(&[1, 2])).expect("open").expect("room");
    let prepared = manager.prepare_store(2, &keys(&[1, 2])).expect("open").expect("room");
    assert!(prepared.indices.is_empty());
    manager.request_finished(2).expect("open");
    end_step(&manager);
    assert!(tier.ended.lock().is_empty(), "its last store was not submitted yet");
    manager.complete_store(1, &keys(&[1]), true).expect("prepared");
    manager.complete_store(1, &keys(&[2]), false).expect("prepared");
    assert_eq!(stored(&tier), [[1]], "of the first request");
    end_step(&manager);
    assert_eq!(stored(&tier), [[1], [1]]);
    assert_eq!(*tier.ended.lock(), [(2, 2)], "told after its store");
    manager.request_finished(1).expect("open");
    end_step(&manager);
    assert_eq!(*tier.ended.lock(), [(2, 2), (1, 2)]);
    assert_eq!(manager.stats().primary.requests, 0);
}

#[test]
fn the_end_of_a_request_waits_for_its_last_cascade() {
    let (manager, tier, _) = one_tier(16, false, TierLimits::default());
    manager.prepare_store(1, &keys(&[1])).expect("open").expect("room");
    manager.request_finished(1).expect("open");
    end_step(&manager);
    assert!(tier.ended.lock().is_empty());
    manager.complete_store(1, &keys(&[1]), true).expect("prepared");
    end_step(&manager);
    assert_eq!(*tier.ended.lock(), [(1, 1)]);
}

#[test]
fn a_request_may_name_the_tiers_that_get_all_of_it() {
    let (manager, tier, _) = one_tier(16, false, TierLimits::default());
    store(&manager, &[1]);
    tier.stores.lock().clear();
    let options = RequestOptions { request_level: vec!["held".into()], ..Default::default() };
    manager.begin_request(2, &options).expect("known");
    manager.prepare_store(2, &keys(&[1])).expect("open").expect("room");
    manager.prepare_store(3, &keys(&[1])).expect("open").expect("room");
    assert_eq!(stored(&tier), [[1]]);
    let unknown = RequestOptions { request_level: vec!["tape".into()], ..Default::default() };
    let error = manager.begin_request(4, &unknown).expect_err("no such tier").to_string();
    assert_eq!(error, "there is no tier \"tape\": the tiers are held");
}

#[test]
fn look_ups_use_the_tiers_that_the_request_may_use() {
    let tiers = [held(true), held(true)];
    let manager = timed_manager(
        16,
        vec![
            slot("a", Box::new(Arc::clone(&tiers[0]))),
            slot("b", Box::new(Arc::clone(&tiers[1]))),
        ],
        &Clock::system(),
    );
    let only = |request, matchers: Vec<TierMatcher>| {
        let options = RequestOptions { tiers: Some(matchers), ..Default::default() };
        manager.begin_request(request, &options).expect("fine");
    };
    let file = TierMatcher { medium: Some(Medium::File), locality: None };
    let here = TierMatcher { medium: Some(Medium::Memory), locality: Some(Locality::Local) };
    only(1, vec![]);
    only(2, vec![file]);
    only(3, vec![file, here]);
    let answer = |request| manager.lookup(request, &keys(&[1]), false).expect("open")[0];
    assert_eq!((answer(1), answer(2)), (Lookup::Miss, Lookup::Miss));
    assert_eq!(*tiers[0].asked.lock(), 0);
    assert_eq!(answer(3), Lookup::HitPending);
    assert_eq!(answer(1), Lookup::HitPending, "what is on its way is everybody's");
    assert_eq!((*tiers[0].asked.lock(), *tiers[1].asked.lock()), (1, 0), "the first one has it");
}

#[test]
fn a_batch_promotes_as_much_as_there_is_room_for_and_a_key_twice_once() {
    let limits = TierLimits { load_share: 1.0, ..TierLimits::default() };
    let (manager, tier, _) = one_tier(4, true, limits);
    manager.prepare_store(9, &keys(&[90])).expect("open").expect("room");
    let answers = look(&manager, &[1, 1, 2, 3, 4]);
    let pending = Lookup::HitPending;
    assert_eq!(answers, [pending, pending, pending, Lookup::Miss, Lookup::Miss]);
    assert_eq!(manager.stats().primary.promotions_refused, 2);
    end_step(&manager);
    assert_eq!(tier.loads.lock()[0].len(), 2, "the second 1 took the third slot's place");
}

#[test]
fn tiers_are_told_the_end_of_a_request_that_only_looked_up() {
    let tier = held(true);
    let manager = manager(vec![slot("held", Box::new(Arc::clone(&tier)))]);
    look(&manager, &[1]);
    manager.request_finished(2).expect("open");
    manager.end_step().expect("open");
    assert_eq!((tier.loads.lock().len(), &**tier.ended.lock()), (1, &[(2, 0)][..]));
}
