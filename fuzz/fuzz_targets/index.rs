//! Any sequence of operations on an index of any policy agrees with the model of the tests, and
//! `validate` finds nothing after each.

#![no_main]

#[path = "../../rust/kvtier-core/tests/index_model/model.rs"]
mod model;

use arbitrary::Arbitrary;
use kvtier_core::index::PolicyKind;
use libfuzzer_sys::fuzz_target;
use model::{KEYS, Operation, REQUESTS, run};

#[derive(Debug, Arbitrary)]
enum Step {
    Reserve(Vec<u8>, u8),
    Commit(u8),
    Abort(u8),
    Detach(u8),
    Reclaim,
    Pin(u8, bool),
    Unpin(u8, bool),
    Touch(u8, u8),
}

#[derive(Debug, Arbitrary)]
struct Life {
    policy: u8,
    capacity: u8,
    steps: Vec<Step>,
}

fn operation(step: Step) -> Operation {
    let key = |number: u8| number % KEYS;
    let request = |number: u8| number as usize % REQUESTS;
    match step {
        Step::Reserve(mut keys, by) => {
            keys.truncate(KEYS as usize);
            Operation::Reserve(keys.into_iter().map(key).collect(), request(by))
        }
        Step::Commit(number) => Operation::Commit(key(number)),
        Step::Abort(number) => Operation::Abort(key(number)),
        Step::Detach(number) => Operation::Detach(key(number)),
        Step::Reclaim => Operation::Reclaim,
        Step::Pin(number, load) => Operation::Pin(key(number), load),
        Step::Unpin(number, load) => Operation::Unpin(key(number), load),
        Step::Touch(number, by) => Operation::Touch(key(number), request(by)),
    }
}

fuzz_target!(|life: Life| {
    let (_, policy) = PolicyKind::ALL[life.policy as usize % PolicyKind::ALL.len()];
    let capacity = 1 + life.capacity as usize % 8;
    let operations: Vec<Operation> = life.steps.into_iter().map(operation).collect();
    run(policy, capacity, &operations);
});
