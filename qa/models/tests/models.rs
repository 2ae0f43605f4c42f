//! Runs each model.

#[test]
fn notes_are_never_mixed() {
    nvte_ep_models::notes_are_never_mixed();
}

#[test]
fn giving_up_is_the_last_word() {
    nvte_ep_models::giving_up_is_the_last_word();
}

#[test]
fn what_is_seen_of_a_call_is_its_own() {
    nvte_ep_models::what_is_seen_of_a_call_is_its_own();
}
