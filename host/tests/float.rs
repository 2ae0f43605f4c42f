//! The program's floating-point environment and that of the work that it queues.

mod common;

use std::ffi::{c_int, c_void};
use std::ptr;

use common::*;
use nvte_ep_bindings::*;

unsafe extern "C" {
    fn fesetround(mode: c_int) -> c_int;
    fn fegetround() -> c_int;
    fn feenableexcept(exceptions: c_int) -> c_int;
    fn fegetexcept() -> c_int;
}

#[cfg(target_arch = "x86_64")]
const UPWARD: c_int = 0x800;
#[cfg(target_arch = "aarch64")]
const UPWARD: c_int = 0x40_0000;
#[cfg(target_arch = "x86_64")]
const ALL_EXCEPT: c_int = 0x3d;
#[cfg(target_arch = "aarch64")]
const ALL_EXCEPT: c_int = 0x1f;

/// Flushes denormals to zero, as `-ffast-math` sets it for a whole program.
#[cfg(target_arch = "x86_64")]
fn flush_denormals() {
    let mut state = 0u32;
    // SAFETY: reads the calling thread's control register.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut state) };
    state |= 0x8040;
    // SAFETY: writes it.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const state) };
}

#[cfg(target_arch = "x86_64")]
fn flushes_denormals() -> bool {
    let mut state = 0u32;
    // SAFETY: reads the calling thread's control register.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut state) };
    state & 0x8040 == 0x8040
}

fn summed(rank: &Rank, values: [u32; 4]) -> Vec<u32> {
    let buffer = Buffer::of(&values, rank.stream);
    let data: *mut c_void = buffer.pointer.cast();
    // SAFETY: the buffer has four elements.
    nccl_ok(unsafe { ncclAllReduce(data, data, 4, ncclFloat32, ncclSum, rank.comm, rank.stream) });
    buffer.get()
}

#[test]
fn sums_do_not_depend_on_the_programs_environment() {
    let errors = run_processes("changed_environment", 2, 60_000, &[]);
    assert_eq!(errors.len(), 2);
}

/// In a process of its own: a trap would end it.
#[test]
#[ignore = "run by sums_do_not_depend_on_the_programs_environment"]
fn changed_environment() {
    // SAFETY: changes the calling thread's environment only.
    assert_eq!(unsafe { fesetround(UPWARD) }, 0);
    #[cfg(target_arch = "x86_64")]
    flush_denormals();
    // SAFETY: as above.
    let traps = unsafe { feenableexcept(ALL_EXCEPT) } != -1;
    let rank = join_as_process();
    // Rank 0 and rank 1: a sum that is rounded, one of denormals, one that overflows, one that is no number.
    let mine = [[0x3f80_0000, 1, f32::MAX.to_bits(), 0x7f80_0000], [0x3380_0000, 2, f32::MAX.to_bits(), 0xff80_0000]];
    for _ in 0..2 {
        let sums = summed(&rank, mine[rank.rank]);
        assert_eq!(sums[..3], [0x3f80_0000, 3, 0x7f80_0000]);
        assert_eq!(sums[3] & 0x7fc0_0000, 0x7fc0_0000);
    }
    // Work of the calling thread: a time is a quotient that is rounded.
    let mut events = [ptr::null_mut(); 2];
    for event in &mut events {
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaEventCreate(event) });
        // SAFETY: both are live.
        ok(unsafe { cudaEventRecord(*event, rank.stream) });
        rank.sync();
    }
    let mut milliseconds = -1f32;
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaEventElapsedTime(&raw mut milliseconds, events[0], events[1]) });
    // The program's own environment is as it was.
    // SAFETY: no preconditions.
    assert_eq!(unsafe { fegetround() }, UPWARD);
    #[cfg(target_arch = "x86_64")]
    assert!(flushes_denormals());
    // SAFETY: no preconditions.
    assert_eq!(unsafe { fegetexcept() }, if traps { ALL_EXCEPT } else { 0 });
    rank.leave();
}
