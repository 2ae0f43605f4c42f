//! What happens when a rank is missing, dies, differs or overflows. Ranks are processes: errors are for good.

mod common;

use std::ptr;
use std::time::{Duration, Instant};

use common::*;
use nvte_ep_bindings::*;

fn all_reduce(rank: &Rank, buffer: &Buffer<f32>, count: usize) -> u32 {
    let data = buffer.pointer.cast();
    // SAFETY: the buffer has more than `count` elements.
    unsafe { ncclAllReduce(data, data.cast(), count, ncclFloat32, ncclSum, rank.comm, rank.stream) }
}

fn async_error(rank: &Rank) -> u32 {
    let mut code = 0;
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclCommGetAsyncError(rank.comm, &raw mut code) });
    code
}

/// Waits for the stream's error and checks that it sticks.
fn expect_sticky(rank: &Rank, code: u32, words: &[&str]) {
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamSynchronize(rank.stream) }, code, "{}", sticky_text());
    let text = sticky_text();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
    assert_eq!(describe(code), text);
    let mut memory = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaMalloc(&raw mut memory, 16) }, code);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaDeviceSynchronize() }, code);
    for _ in 0..2 {
        // SAFETY: no preconditions.
        assert_eq!(unsafe { cudaGetLastError() }, code);
    }
}

#[test]
fn a_missing_peer_is_named_after_the_time_out() {
    let id = unique_id();
    let waiting = spawn_rank("missing_peer", &id, 0, 2, 600);
    let mut absent = spawn_rank("missing_peer", &id, 1, 2, 600);
    let output = waiting.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stdout));
    let words = "operation 2: rank 1 did not arrive within 600 ms";
    assert_eq!(text.matches(words).count(), 1, "printed once: {text}");
    drop(absent.stdin.take());
    assert!(absent.wait_with_output().unwrap().status.success());
}

#[test]
#[ignore = "run by a_missing_peer_is_named_after_the_time_out"]
fn missing_peer() {
    let rank = join_as_process();
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    nccl_ok(all_reduce(&rank, &buffer, 8));
    rank.sync();
    if rank.rank == 1 {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        std::process::exit(0);
    }
    nccl_ok(all_reduce(&rank, &buffer, 8));
    let what = "ncclAllReduce(count=8, datatype=float32, op=Sum), operation 2: rank 1 did not arrive within 600 ms";
    expect_sticky(&rank, cudaErrorLaunchTimeout, &[what]);
    assert_eq!(async_error(&rank), ncclSystemError);
    assert_eq!(all_reduce(&rank, &buffer, 8), ncclUnhandledCudaError);
    std::mem::forget(buffer);
}

#[test]
fn transfers_that_do_not_meet_are_named() {
    let texts = run_processes("transfers", 3, 700, &[]);
    let words = "ncclRecv(count=3, datatype=float32) from rank 2: rank 2 did not come to meet it within 700 ms";
    assert!(texts[0].contains(words), "{}", texts[0]);
}

#[test]
#[ignore = "run by transfers_that_do_not_meet_are_named"]
fn transfers() {
    let rank = join_as_process();
    let mut half = ptr::null_mut();
    // Ranks 1 and 2 meet with different counts, rank 0 waits in vain for rank 2.
    let color = i32::from(rank.rank == 0);
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclCommSplit(rank.comm, color, 0, &raw mut half, ptr::null_mut()) });
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    let data = buffer.pointer.cast();
    match rank.rank {
        0 => {
            // SAFETY: the buffer has more elements.
            nccl_ok(unsafe { ncclRecv(data, 3, ncclFloat32, 2, rank.comm, rank.stream) });
            let words = "ncclRecv(count=3, datatype=float32) from rank 2: rank 2 did not come to meet it";
            expect_sticky(&rank, cudaErrorLaunchTimeout, &["communicator of 3 ranks", words]);
        }
        1 => {
            // SAFETY: the buffer has more elements.
            nccl_ok(unsafe { ncclSend(data, 4, ncclFloat32, 1, half, rank.stream) });
            let words = "ncclSend(count=4, datatype=float32) to rank 1: rank 1 failed";
            expect_sticky(&rank, cudaErrorLaunchFailure, &["communicator of 2 ranks", words]);
        }
        _ => {
            // SAFETY: the buffer has more elements.
            nccl_ok(unsafe { ncclRecv(data, 5, ncclFloat32, 0, half, rank.stream) });
            let words = "(count=5, datatype=float32) from rank 0, but rank 0 sends count=4, datatype=float32";
            expect_sticky(&rank, cudaErrorLaunchFailure, &["rank 1 called ncclRecv", words]);
            // Rank 0 still waits, and would notice the end of this process.
            std::thread::sleep(Duration::from_millis(1500));
        }
    }
    std::mem::forget(buffer);
}

#[test]
fn a_killed_peer_is_noticed_soon() {
    let start = Instant::now();
    run_processes("killed_peer", 3, 60_000, &[1]);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
#[ignore = "run by a_killed_peer_is_noticed_soon"]
fn killed_peer() {
    let rank = join_as_process();
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    nccl_ok(all_reduce(&rank, &buffer, 8));
    rank.sync();
    if rank.rank == 1 {
        // SAFETY: ends this process, which holds nothing that others need.
        unsafe { libc::raise(libc::SIGKILL) };
    }
    nccl_ok(all_reduce(&rank, &buffer, 8));
    expect_sticky(&rank, cudaErrorLaunchFailure, &["the process of rank 1 (pid ", "has ended"]);
    assert_eq!(async_error(&rank), ncclRemoteError);
    std::mem::forget(buffer);
}

#[test]
fn operations_that_differ_are_both_named() {
    run_processes("mismatch", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by operations_that_differ_are_both_named"]
fn mismatch() {
    let rank = join_as_process();
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    nccl_ok(all_reduce(&rank, &buffer, 4 + rank.rank));
    expect_sticky(
        &rank,
        cudaErrorLaunchFailure,
        &["ncclAllReduce(count=4, datatype=float32, op=Sum)", "ncclAllReduce(count=5, datatype=float32, op=Sum)"],
    );
    std::mem::forget(buffer);
}

/// Rank 0 owns experts 0 and 1; every token of both ranks goes to expert 0.
fn update_all_to_expert(rank: &Rank, expert: i64, capacity: usize) {
    let group = rank.create_group(&group_config(4, 8, capacity, 64)).unwrap();
    let handle = TestHandle::new(rank, group, 1, 16);
    let indices = Buffer::of(&[expert; 8], rank.stream);
    let mut topk = Desc::of(&indices, ncclInt64, &[8, 1]);
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
    // SAFETY: no preconditions.
    let code = unsafe { cudaStreamSynchronize(rank.stream) };
    if code == 0 {
        // SAFETY: all pointers are ours and valid.
        let code = unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) };
        assert!(code == ncclSuccess || code == ncclUnhandledCudaError);
    }
    std::mem::forget((handle, indices));
}

#[test]
fn receive_overflow_traps_and_peers_learn_of_it() {
    run_processes("overflow", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by receive_overflow_traps_and_peers_learn_of_it"]
fn overflow() {
    let rank = join_as_process();
    update_all_to_expert(&rank, 0, 12);
    let text = "receive buffer overflow on rank 0: 16 rows (16 distinct tokens) are needed, \
                max_recv_tokens_per_rank is 12";
    if rank.rank == 0 {
        expect_sticky(&rank, cudaErrorLaunchFailure, &[text]);
        assert_eq!(async_error(&rank), ncclSystemError);
    } else {
        expect_sticky(&rank, cudaErrorLaunchFailure, &["rank 0 failed", text]);
        assert_eq!(async_error(&rank), ncclRemoteError);
    }
}

#[test]
fn an_index_beyond_the_experts_is_an_error() {
    run_processes("bad_index", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by an_index_beyond_the_experts_is_an_error"]
fn bad_index() {
    let rank = join_as_process();
    update_all_to_expert(&rank, if rank.rank == 0 { 0 } else { (1 << 40) + 3 }, 64);
    let text = "topk_idx[0, 0] is 1099511627779, but there are 4 experts";
    if rank.rank == 1 {
        expect_sticky(&rank, cudaErrorAssert, &[text]);
    } else {
        expect_sticky(&rank, cudaErrorLaunchFailure, &["rank 1 failed", text]);
    }
}

#[test]
fn an_abort_frees_the_own_device_and_tells_the_peers() {
    run_processes("abort", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by an_abort_frees_the_own_device_and_tells_the_peers"]
fn abort() {
    let rank = join_as_process();
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    nccl_ok(all_reduce(&rank, &buffer, 8));
    rank.sync();
    // SAFETY: cannot fail. Both ranks have the test's process as their parent.
    let aborted = std::env::temp_dir().join(format!("nvte_ep_host_aborted_{}", unsafe { libc::getppid() }));
    if rank.rank == 0 {
        // Rank 1 enters its next one only after the abort.
        nccl_ok(all_reduce(&rank, &buffer, 8));
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommAbort(rank.comm) });
        rank.sync();
        assert_eq!(sticky_text(), "");
        std::fs::write(&aborted, "").unwrap();
    } else {
        let start = Instant::now();
        while !aborted.exists() {
            assert!(start.elapsed() < Duration::from_secs(30), "rank 0 did not abort");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::fs::remove_file(&aborted).unwrap();
        // Rank 0 had arrived at the first of these before it aborted; it never comes to the second.
        nccl_ok(all_reduce(&rank, &buffer, 8));
        nccl_ok(all_reduce(&rank, &buffer, 8));
        // SAFETY: no preconditions.
        assert_eq!(unsafe { cudaStreamSynchronize(rank.stream) }, cudaErrorLaunchFailure);
        assert!(sticky_text().contains("rank 0 aborted the communicator"), "{}", sticky_text());
        std::mem::forget(buffer);
    }
}

#[test]
fn processes_end_with_work_in_their_streams() {
    let start = Instant::now();
    run_processes("exit_with_work", 2, 60_000, &[]);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
#[ignore = "run by processes_end_with_work_in_their_streams"]
fn exit_with_work() {
    unsafe extern "C" fn sleep_long(_: *mut std::ffi::c_void) {
        std::thread::sleep(Duration::from_secs(3600));
    }
    let rank = join_as_process();
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    // SAFETY: the function ignores its argument.
    ok(unsafe { cudaLaunchHostFunc(rank.stream, Some(sleep_long), ptr::null_mut()) });
    nccl_ok(all_reduce(&rank, &buffer, 8));
    std::mem::forget(buffer);
}

#[test]
fn a_rendezvous_without_all_ranks_names_the_missing() {
    let id = unique_id();
    let child = spawn_rank("lonely", &id, 1, 3, 500);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("ranks 0, 2 did not arrive within 500 ms"), "{text}");
}

#[test]
#[ignore = "run by a_rendezvous_without_all_ranks_names_the_missing"]
fn lonely() {
    let joined = std::panic::catch_unwind(join_as_process);
    assert!(joined.is_err());
}

/// Enqueues a backward dispatch of 8 tokens, or the combine of its result.
fn enqueue(rank: &Rank, group_capacity: usize, handle: &TestHandle, dispatch: bool) -> u32 {
    let tokens = Buffer::of(&[0u16; 8 * 32], rank.stream);
    let rows = Buffer::of(&vec![0u16; group_capacity * 32], rank.stream);
    let mut tokens_desc = Desc::of(&tokens, ncclBfloat16, &[8, 32]);
    let mut rows_desc = Desc::of(&rows, ncclBfloat16, &[group_capacity, 32]);
    let code = if dispatch {
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: tokens_desc.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: rows_desc.ptr() });
        let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
        let handle = handle.handle;
        // SAFETY: all pointers are ours and valid.
        unsafe {
            ncclEpDispatch(handle, &raw const inputs, &raw const outputs, ptr::null(), &raw const config, rank.stream)
        }
    } else {
        let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows_desc.ptr() });
        let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: tokens_desc.ptr() });
        // SAFETY: all pointers are ours and valid.
        unsafe { ncclEpCombine(handle.handle, &raw const inputs, &raw const outputs, ptr::null(), rank.stream) }
    };
    std::mem::forget((tokens, rows));
    code
}

#[test]
fn a_combine_does_not_meet_a_dispatch() {
    run_processes("combine_against_dispatch", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by a_combine_does_not_meet_a_dispatch"]
fn combine_against_dispatch() {
    let rank = join_as_process();
    let group = rank.create_group(&group_config(4, 8, 64, 64)).unwrap();
    let handle = TestHandle::new(&rank, group, 1, 1);
    let indices = Buffer::of(&[0i64; 8], rank.stream);
    let mut topk = Desc::of(&indices, ncclInt64, &[8, 1]);
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
    nccl_ok(enqueue(&rank, 64, &handle, rank.rank == 0));
    let words = ["EP group of 2 ranks", "ncclEpDispatch(pass=BWD, hidden=32", "ncclEpCombine(pass=FWD, hidden=32"];
    expect_sticky(&rank, cudaErrorLaunchFailure, &words);
    std::mem::forget((handle, indices));
}

#[test]
fn memory_without_a_routing_is_an_error() {
    run_processes("unprepared_memory", 1, 60_000, &[]);
}

#[test]
#[ignore = "run by memory_without_a_routing_is_an_error"]
fn unprepared_memory() {
    let rank = join_as_process();
    let group = rank.create_group(&group_config(4, 8, 64, 64)).unwrap();
    let handle = TestHandle::new(&rank, group, 1, 1);
    nccl_ok(enqueue(&rank, 64, &handle, true));
    expect_sticky(&rank, cudaErrorIllegalAddress, &["ncclEpDispatch", "handle_mem holds no routing"]);
    // SAFETY: no preconditions; destroying still works and says that the device is gone.
    assert_eq!(unsafe { ncclEpGroupDestroy(group) }, ncclUnhandledCudaError);
    // SAFETY: no preconditions; on a GPU this would use freed memory.
    assert_eq!(unsafe { ncclEpHandleDestroy(handle.handle) }, ncclInvalidUsage);
    assert!(nccl_error().contains("EP group has been destroyed"), "{}", nccl_error());
    std::mem::forget(handle);
}

#[test]
fn a_slow_peer_is_waited_for() {
    run_processes("slow_peer", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by a_slow_peer_is_waited_for"]
fn slow_peer() {
    unsafe extern "C" fn nap(_: *mut std::ffi::c_void) {
        std::thread::sleep(Duration::from_millis(900));
    }
    let rank = join_as_process();
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    if rank.rank == 1 {
        // SAFETY: the function ignores its argument.
        ok(unsafe { cudaLaunchHostFunc(rank.stream, Some(nap), ptr::null_mut()) });
    }
    nccl_ok(all_reduce(&rank, &buffer, 8));
    assert_eq!(buffer.get(), [2f32; 8]);
    drop(buffer);
    rank.leave();
}

#[test]
fn peers_learn_of_operations_that_an_error_leaves_undone() {
    let start = Instant::now();
    run_processes("undone", 2, 60_000, &[]);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
#[ignore = "run by peers_learn_of_operations_that_an_error_leaves_undone"]
fn undone() {
    unsafe extern "C" fn nap(_: *mut std::ffi::c_void) {
        std::thread::sleep(Duration::from_millis(300));
    }
    let rank = join_as_process();
    let group = rank.create_group(&group_config(4, 8, 64, 64)).unwrap();
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    let indices = Buffer::of(&[4i64; 8], rank.stream);
    let handle = TestHandle::new(&rank, group, 1, 1);
    if rank.rank == 0 {
        // The error comes when the collective behind it is in the stream already.
        // SAFETY: the function ignores its argument.
        ok(unsafe { cudaLaunchHostFunc(rank.stream, Some(nap), ptr::null_mut()) });
        let mut topk = Desc::of(&indices, ncclInt64, &[8, 1]);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
    }
    nccl_ok(all_reduce(&rank, &buffer, 8));
    let code = if rank.rank == 0 { cudaErrorAssert } else { cudaErrorLaunchFailure };
    let words = if rank.rank == 0 {
        "topk_idx[0, 0] is 4"
    } else {
        "rank 0 failed: rank 0, ncclEpUpdateHandle: topk_idx[0, 0]"
    };
    expect_sticky(&rank, code, &[words]);
    std::mem::forget((handle, buffer, indices));
}
