//! Throwing leaves no memory behind. In a process of its own, since resident memory is the process's.

use nvte_ep_core::error::{Error, Result, with_code};
use nvte_ep_core::ffi::guard;
use nvte_ep_core::sys::catch_foreign;

unsafe extern "C-unwind" fn refuses() {
    guard("nvte_ep_test", || -> Result<()> { Err(Error::argument("tokens", "must be 2D", "1D")) });
}

fn throw() {
    // SAFETY: takes nothing.
    let result = catch_foreign("refuses", || unsafe { refuses() });
    let text = with_code("nvte_ep_test: tokens must be 2D, got 1D".to_owned());
    assert_eq!(result, Err(Error::Foreign { call: "refuses", text }));
}

#[test]
fn a_hundred_thousand_throws_leave_nothing_behind() {
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
        statm.split(' ').nth(1).expect("resident pages").parse::<usize>().expect("a number") * 4096
    };
    (0..1000).for_each(|_| throw());
    let before = resident();
    (0..100_000).for_each(|_| throw());
    let growth = resident().saturating_sub(before);
    assert!(growth < 1 << 20, "resident memory grew by {growth} bytes");
}
