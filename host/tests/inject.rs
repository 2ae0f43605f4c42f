//! Faults that `NVTE_EP_HOST_FAULT` asks for, as the rank itself and its peers see them.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::ptr;
use std::time::{Duration, Instant};

use common::*;
use nvte_ep_bindings::*;
use nvte_ep_host::surface::{cuda_driver_memory as driver_memory, cuda_driver_stream as driver_stream};

/// Runs rank 0 of two to its end and gives what became of both; a rank 1 that is stopped is ended.
fn run_pair(entry: &str, timeout_ms: u32, rules: &str) -> [Output; 2] {
    let id = hex(&unique_id());
    let variables = [("NVTE_EP_HOST_FAULT", rules)];
    let [first, mut second] = [0, 1].map(|rank| spawn_rank_with(entry, &id, rank, 2, timeout_ms, &variables));
    let first = first.wait_with_output().unwrap();
    if first.status.success() && rules.contains("do=stop") {
        second.kill().unwrap();
    }
    [first, second.wait_with_output().unwrap()]
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A rank of two that runs three sums, then dispatches, and writes down how far it comes.
fn steps() {
    let rank = join_as_process();
    let value = Buffer::of(&[1i32], rank.stream);
    let data = value.pointer.cast();
    for _ in 0..3 {
        // SAFETY: the buffer has one element.
        nccl_ok(unsafe { ncclAllReduce(data, data.cast(), 1, ncclInt32, ncclSum, rank.comm, rank.stream) });
        // SAFETY: no preconditions.
        let code = unsafe { cudaStreamSynchronize(rank.stream) };
        if code != 0 {
            eprintln!("ended with {code}: {}", sticky_text());
            std::mem::forget(value);
            return;
        }
    }
    eprintln!("three sums: {:?}", value.get());
    drop(value);
    rank.leave();
}

#[test]
#[ignore = "run by others"]
fn three_sums() {
    steps();
}

#[test]
fn without_rules_nothing_happens() {
    let texts = run_processes_with("three_sums", 2, 60_000, &[], &[("NVTE_EP_HOST_FAULT", "")]);
    assert!(texts.iter().all(|text| text.contains("three sums: [8]")), "{texts:?}");
}

#[test]
fn a_rank_dies_in_the_call_that_was_chosen() {
    for (how, signal) in [("kill", Some(libc::SIGKILL)), ("abort", Some(libc::SIGABRT)), ("exit,code=9", None)] {
        let [first, second] = run_pair("three_sums", 60_000, &format!("rank=1,call=ncclAllReduce,nth=3,do={how}"));
        let text = errors(&first);
        assert!(first.status.success() && text.contains("ended with 719"), "{text}");
        assert!(text.contains("operation 3: the process of rank 1 (pid "), "{text}");
        assert_eq!(second.status.signal(), signal);
        assert_eq!(second.status.code(), signal.is_none().then_some(9));
        assert!(errors(&second).contains("ncclAllReduce: rank 1: asked for by NVTE_EP_HOST_FAULT"));
    }
}

#[test]
fn a_rank_that_stops_is_named_after_the_time_out() {
    let start = Instant::now();
    let [first, second] = run_pair("three_sums", 900, "rank=1,call=ncclAllReduce,nth=2,do=stop");
    let text = errors(&first);
    assert!(text.contains("operation 2: rank 1 did not arrive within 900 ms"), "{text}");
    assert!(first.status.success() && text.contains("ended with 702"), "{text}");
    assert_eq!(second.status.signal(), Some(libc::SIGKILL));
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn calls_fail_in_each_interface() {
    let rules = "call=cudaMalloc,nth=2,do=fail,code=2;call=cuMemAlloc_v2,do=fail,code=700;call=cuStreamSynchronize,do=fail;\
                 call=cudaGraphLaunch,do=fail,code=1;call=ncclAllReduce,nth=2,do=fail,code=6;\
                 call=ncclCommCount,rank=0,do=fail;call=ncclCommUserRank,rank=1,do=fail;call=ncclEpCreateGroup,do=fail,code=5;\
                 call=cudaStreamSynchronize,nth=2,do=delay,ms=300";
    run_processes_with("calls", 1, 60_000, &[], &[("NVTE_EP_HOST_FAULT", rules)]);
}

#[test]
#[ignore = "run by calls_fail_in_each_interface"]
fn calls() {
    let rank = join_as_process();
    let mut memory = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    let codes = [0; 3].map(|_| unsafe { cudaMalloc(&raw mut memory, 16) });
    assert_eq!(codes, [0, cudaErrorMemoryAllocation, 0], "the second and no other");
    let mut address = 0;
    // SAFETY: the result pointer is ours.
    let codes = [0; 2].map(|_| unsafe { driver_memory::cuMemAlloc_v2(&raw mut address, 16) });
    assert_eq!(codes, [700, 0]);
    // SAFETY: no preconditions.
    let codes = [0; 2].map(|_| unsafe { driver_stream::cuStreamSynchronize(rank.stream) });
    assert_eq!(codes, [cudaErrorUnknown, 0]);
    // SAFETY: an unknown graph is refused, with the same code that is injected.
    let codes = [0; 2].map(|_| unsafe { cudaGraphLaunch(ptr::null_mut(), rank.stream) });
    assert_eq!(codes, [1, cudaErrorInvalidValue]);
    let sum = || {
        // SAFETY: the memory has four elements.
        unsafe { ncclAllReduce(memory, memory, 1, ncclInt32, ncclSum, rank.comm, rank.stream) }
    };
    assert_eq!([sum(), sum(), sum()], [0, ncclRemoteError, 0]);
    let mut number = -1;
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { ncclCommCount(rank.comm, &raw mut number) }, ncclInternalError);
    let text = nccl_error();
    assert_eq!(
        text,
        "ncclCommCount: rank 0: asked for by NVTE_EP_HOST_FAULT, rule \"call=ncclCommCount,rank=0,do=fail\""
    );
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclCommUserRank(rank.comm, &raw mut number) });
    assert_eq!(number, 0, "the rule is for rank 1");
    let (code, _) = rank.create_group(&group_config(4, 8, 64, 64)).unwrap_err();
    assert_eq!(code, ncclInvalidUsage);
    let start = Instant::now();
    rank.sync();
    assert!(start.elapsed() < Duration::from_millis(250));
    rank.sync();
    assert!(start.elapsed() >= Duration::from_millis(300), "{:?}", start.elapsed());
    rank.leave();
}

#[test]
fn rules_that_cannot_be_read_are_refused_by_every_call() {
    let texts = run_processes_with("unreadable", 1, 60_000, &[], &[("NVTE_EP_HOST_FAULT", "call=ncclSend,do=die")]);
    let text = "NVTE_EP_HOST_FAULT: rule \"call=ncclSend,do=die\": do must be delay, stop, kill, abort, exit or fail, got \"die\"";
    assert!(texts[0].contains(text), "{}", texts[0]);
}

#[test]
#[ignore = "run by rules_that_cannot_be_read_are_refused_by_every_call"]
fn unreadable() {
    let mut count = 0;
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaGetDeviceCount(&raw mut count) }, cudaErrorInvalidValue);
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { ncclGetVersion(&raw mut count) }, ncclInvalidUsage);
    assert!(nccl_error().contains("do must be delay"), "{}", nccl_error());
    assert_eq!(count, 0);
}

#[test]
fn without_a_compiler_the_first_update_aborts() {
    let [first, second] = run_pair("update_alone", 60_000, "missing=nvcc,rank=1");
    assert!(first.status.success(), "{}", errors(&first));
    assert_eq!(second.status.signal(), Some(libc::SIGABRT));
    assert!(errors(&second).contains("ncclEpUpdateHandle: nvcc is missing"), "{}", errors(&second));
}

#[test]
#[ignore = "run by without_a_compiler_the_first_update_aborts"]
fn update_alone() {
    let rank = join_as_process();
    // SAFETY: no preconditions.
    let has_compiler = unsafe { nvte_ep_host::surface::host_ext::nvte_ep_host_compiler() };
    assert_eq!(has_compiler, i32::from(rank.rank == 0));
    let group = rank.create_group(&group_config(4, 8, 64, 64)).unwrap();
    let handle = TestHandle::new(&rank, group, 1, 1);
    let indices = Buffer::of(&[0i64; 8], rank.stream);
    let mut topk = Desc::of(&indices, ncclInt64, &[8, 1]);
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
    assert_eq!(rank.rank, 0, "rank 1 does not come so far");
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamSynchronize(rank.stream) }, cudaErrorLaunchFailure);
    assert!(sticky_text().contains("the process of rank 1 (pid "), "{}", sticky_text());
    std::mem::forget((handle, indices));
}
