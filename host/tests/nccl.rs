//! Collectives, groups, windows and counters.

mod common;

use std::ptr;

use common::*;
use half::{bf16, f16};
use nvte_ep_bindings::*;
use nvte_ep_host::channel::PIECE_BYTES;
use nvte_ep_host::surface::host_ext::{nvte_ep_host_stats, nvte_ep_host_version};

#[test]
fn gather_and_broadcast() {
    run_ranks(4, |rank| {
        for round in 0..5u32 {
            // In place, as NCCL defines it: the own part is where it belongs in the result.
            let count = 1000 * (round as usize + 1);
            let mut values = vec![0u32; count * 4];
            values[rank.rank * count..][..count].fill(100 * round + rank.rank as u32);
            let buffer = Buffer::of(&values, rank.stream);
            let own = buffer.pointer.wrapping_add(rank.rank * count);
            // SAFETY: the buffer has four parts of `count` elements.
            nccl_ok(unsafe {
                ncclAllGather(own.cast(), buffer.pointer.cast(), count, ncclUint32, rank.comm, rank.stream)
            });
            let expected: Vec<u32> = (0..4).flat_map(|r| vec![100 * round + r; count]).collect();
            assert_eq!(buffer.get(), expected);

            let root = round as usize % 4;
            let buffer = Buffer::of(&[rank.rank as i64 + 7; 3], rank.stream);
            let source = if rank.rank == root { buffer.pointer.cast() } else { ptr::null() };
            // SAFETY: the buffer has 3 elements; only the root's source is read.
            nccl_ok(unsafe {
                ncclBroadcast(source, buffer.pointer.cast(), 3, ncclInt64, root as i32, rank.comm, rank.stream)
            });
            assert_eq!(buffer.get(), [root as i64 + 7; 3]);
        }
    });
}

#[test]
fn collectives_in_several_pieces() {
    let count = PIECE_BYTES / 4 * 2 + 5;
    run_ranks(2, |rank| {
        let of = |rank: usize| move |i: usize| (i * (3 + 4 * rank) + rank) as u32;
        let own: Vec<u32> = (0..count).map(of(rank.rank)).collect();
        let own = Buffer::of(&own, rank.stream);
        let all = Buffer::<u32>::new(2 * count, rank.stream);
        let (send, receive) = (own.pointer.cast(), all.pointer.cast());
        // SAFETY: the buffers have `count` elements, and that many for each rank.
        nccl_ok(unsafe { ncclAllGather(send, receive, count, ncclUint32, rank.comm, rank.stream) });
        assert!(all.get().into_iter().eq((0..2).flat_map(|rank| (0..count).map(of(rank)))));
        // SAFETY: both buffers have `count` elements.
        nccl_ok(unsafe { ncclAllReduce(send, receive, count, ncclUint32, ncclSum, rank.comm, rank.stream) });
        assert!(all.get().into_iter().take(count).eq((0..count).map(|i| (i * 10 + 1) as u32)));
        // SAFETY: both buffers have `count` elements.
        nccl_ok(unsafe { ncclBroadcast(send, receive, count, ncclUint32, 1, rank.comm, rank.stream) });
        assert!(all.get().into_iter().take(count).eq((0..count).map(of(1))));
    });
}

fn reduce<T: Copy + Default>(rank: &Rank, values: &[T], datatype: u32, op: u32) -> Vec<T> {
    let send = Buffer::of(values, rank.stream);
    let receive = Buffer::<T>::new(values.len(), rank.stream);
    // SAFETY: both buffers have that many elements.
    nccl_ok(unsafe {
        ncclAllReduce(send.pointer.cast(), receive.pointer.cast(), values.len(), datatype, op, rank.comm, rank.stream)
    });
    receive.get()
}

#[test]
fn reductions() {
    run_ranks(3, |rank| {
        let r = rank.rank as i32;
        assert_eq!(reduce(rank, &[r, 10 - r], ncclInt32, ncclSum), [3, 27]);
        assert_eq!(reduce(rank, &[r + 1], ncclInt32, ncclProd), [6]);
        assert_eq!(reduce(rank, &[r as i8 - 1], ncclInt8, ncclMin), [-1]);
        assert_eq!(reduce(rank, &[r as u8], ncclUint8, ncclMax), [2]);
        assert_eq!(reduce(rank, &[r as u64 * 3], ncclUint64, ncclAvg), [3]);
        assert_eq!(reduce(rank, &[i64::from(r) << 40], ncclInt64, ncclSum), [3 << 40]);
        assert_eq!(reduce(rank, &[r as f32 + 0.5], ncclFloat32, ncclSum), [4.5]);
        assert_eq!(reduce(rank, &[f64::from(r)], ncclFloat64, ncclAvg), [1.0]);
        // 2048 + 1 + 1 in half: exact in FP32 and rounded once.
        let half = f16::from_f32([2048.0, 1.0, 1.0][rank.rank]);
        assert_eq!(reduce(rank, &[half.to_bits()], ncclFloat16, ncclSum), [f16::from_f32(2050.0).to_bits()]);
        let brain = bf16::from_f32([256.0, 1.0, 1.0][rank.rank]);
        assert_eq!(reduce(rank, &[brain.to_bits()], ncclBfloat16, ncclSum), [bf16::from_f32(258.0).to_bits()]);
    });
}

#[test]
fn a_group_creates_several_communicators_from_one_thread() {
    let id = unique_id();
    let mut comms = [ptr::null_mut(); 3];
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclGroupStart() });
    for (rank, comm) in comms.iter_mut().enumerate() {
        // SAFETY: the result pointers live beyond the end of the group.
        nccl_ok(unsafe { ncclCommInitRank(&raw mut *comm, 3, id, rank as i32) });
    }
    // SAFETY: the result pointers are still valid.
    nccl_ok(unsafe { ncclGroupEnd() });
    for (rank, comm) in comms.into_iter().enumerate() {
        let (mut count, mut user_rank) = (0, 0);
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclCommCount(comm, &raw mut count) });
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclCommUserRank(comm, &raw mut user_rank) });
        assert_eq!((count, user_rank), (3, rank as i32));
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommDestroy(comm) });
        // SAFETY: no preconditions; a second time is refused.
        assert_eq!(unsafe { ncclCommDestroy(comm) }, ncclInvalidArgument);
    }
    // SAFETY: no preconditions.
    assert_eq!(unsafe { ncclGroupEnd() }, ncclInvalidUsage);
}

#[test]
fn a_group_registers_windows_of_several_communicators_from_one_thread() {
    let id = unique_id();
    let mut comms = [ptr::null_mut(); 2];
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclGroupStart() });
    for (rank, comm) in comms.iter_mut().enumerate() {
        // SAFETY: the result pointers live beyond the end of the group.
        nccl_ok(unsafe { ncclCommInitRank(&raw mut *comm, 2, id, rank as i32) });
    }
    // SAFETY: the result pointers are still valid.
    nccl_ok(unsafe { ncclGroupEnd() });
    let mut memory = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclMemAlloc(&raw mut memory, 8192) });
    let mut windows = [ptr::null_mut(); 2];
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclGroupStart() });
    for (rank, (comm, window)) in comms.iter().zip(&mut windows).enumerate() {
        let base = memory.wrapping_byte_add(4096 * rank);
        // SAFETY: the result pointers live beyond the end of the group.
        nccl_ok(unsafe { ncclCommWindowRegister(*comm, base, 4096, &raw mut *window, 1) });
        assert!(window.is_null(), "registered before the group ends");
    }
    // SAFETY: the result pointers are still valid.
    nccl_ok(unsafe { ncclGroupEnd() });
    for (comm, window) in comms.into_iter().zip(windows) {
        // SAFETY: no preconditions; an unknown window would be refused.
        nccl_ok(unsafe { ncclCommWindowDeregister(comm, window) });
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommDestroy(comm) });
    }
    // SAFETY: nobody uses the memory any more.
    nccl_ok(unsafe { ncclMemFree(memory) });
}

/// Two callers with these (rank, ranks) meet; gives their results.
fn meet(callers: [(i32, i32); 2]) -> Vec<u32> {
    let id = unique_id();
    let first = take_devices(2);
    std::thread::scope(|scope| {
        let threads: Vec<_> = callers
            .into_iter()
            .enumerate()
            .map(|(index, (rank, ranks))| {
                scope.spawn(move || {
                    // SAFETY: no preconditions.
                    ok(unsafe { cudaSetDevice(first + index as i32) });
                    let mut comm = ptr::null_mut();
                    // SAFETY: the result pointer is ours.
                    unsafe { ncclCommInitRank(&raw mut comm, ranks, id, rank) }
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn callers_that_do_not_fit_together_fail_at_once() {
    let start = std::time::Instant::now();
    let mut codes = meet([(0, 2), (1, 3)]);
    codes.sort_unstable();
    assert_eq!(codes, [ncclInvalidArgument, ncclRemoteError]);
    let mut codes = meet([(0, 2), (0, 2)]);
    codes.sort_unstable();
    assert_eq!(codes, [ncclInvalidUsage, ncclRemoteError]);
    assert_eq!(meet([(5, 2), (-1, 2)]), [ncclInvalidArgument; 2]);
    assert!(start.elapsed().as_secs() < 20);
}

#[test]
fn windows_need_aligned_memory_of_ncclmemalloc() {
    run_ranks(1, |rank| {
        let mut memory = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclMemAlloc(&raw mut memory, 8192) });
        let register = |base, bytes| {
            let mut window = ptr::null_mut();
            // SAFETY: the result pointer is ours; bad ranges are refused.
            let code = unsafe { ncclCommWindowRegister(rank.comm, base, bytes, &raw mut window, 1) };
            (code, window)
        };
        assert_eq!(register(memory.wrapping_byte_add(16), 64).0, ncclInvalidArgument);
        assert_eq!(register(memory, 8193).0, ncclInvalidArgument);
        let other = Buffer::<u8>::new(8192, rank.stream);
        assert_eq!(register(other.pointer.cast(), 64).0, ncclInvalidArgument);
        let (code, window) = register(memory, 8192);
        nccl_ok(code);
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommWindowDeregister(rank.comm, window) });
        // SAFETY: no preconditions; a second time is refused.
        assert_eq!(unsafe { ncclCommWindowDeregister(rank.comm, window) }, ncclInvalidArgument);
        // SAFETY: nobody uses the memory.
        nccl_ok(unsafe { ncclMemFree(memory) });
    });
}

#[test]
fn counters_count() {
    run_processes("counters", 2, 60_000, &[]);
}

fn stats() -> nvte_ep_host_stats {
    let mut stats = nvte_ep_host_stats { struct_size: size_of::<nvte_ep_host_stats>(), ..Default::default() };
    // SAFETY: the structure is ours and has the size that it says.
    assert_eq!(unsafe { nvte_ep_host_stats(&raw mut stats) }, 0);
    stats
}

#[test]
#[ignore = "run by counters_count"]
fn counters() {
    let before = stats();
    assert_eq!(before, nvte_ep_host_stats { struct_size: before.struct_size, ..Default::default() });
    let rank = join_as_process();
    assert_eq!((stats().comms_created, stats().streams_live), (1, 1));
    let group = rank.create_group(&group_config(4, 8, 64, 64)).unwrap();
    assert_eq!(stats().collectives, 0, "collectives of the library itself do not count");
    let handle = TestHandle::new(&rank, group, 1, 1);
    let indices = Buffer::of(&[0i32; 8], rank.stream);
    assert_eq!(stats().device_allocations_live, 2);
    assert_eq!(stats().device_bytes_live, handle.memory.len as u64 + 32);
    let mut topk = Desc::of(&indices, ncclInt32, &[8, 1]);
    for _ in 0..3 {
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
    }
    assert_eq!(reduce(&rank, &[1i32], ncclInt32, ncclSum), [2]);
    drop(handle.destroy());
    drop(indices);
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    rank.leave();
    let expected = nvte_ep_host_stats {
        struct_size: size_of::<nvte_ep_host_stats>(),
        groups_created: 1,
        groups_destroyed: 1,
        handles_created: 1,
        handles_destroyed: 1,
        updates: 3,
        comms_created: 1,
        comms_destroyed: 1,
        collectives: 1,
        ..Default::default()
    };
    assert_eq!(stats(), expected);
    // A caller compiled against fewer counters gets only those.
    let mut short = nvte_ep_host_stats { struct_size: 24, handles_created: 99, ..Default::default() };
    // SAFETY: the structure is ours and larger than it says.
    assert_eq!(unsafe { nvte_ep_host_stats(&raw mut short) }, 0);
    assert_eq!((short.groups_destroyed, short.handles_created), (1, 99));
    // SAFETY: the function has no preconditions.
    let version = text(unsafe { nvte_ep_host_version() });
    assert!(version.ends_with(env!("CARGO_PKG_VERSION")));
}

#[test]
fn collectives_of_a_communicator_keep_their_order_across_streams() {
    unsafe extern "C" fn nap(_: *mut std::ffi::c_void) {
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    run_ranks(2, |rank| {
        let mut other = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaStreamCreateWithFlags(&raw mut other, cudaStreamNonBlocking) });
        let first = Buffer::of(&[1i32], rank.stream);
        let second = Buffer::of(&[2i32; 2], rank.stream);
        rank.sync();
        if rank.rank == 0 {
            // SAFETY: the function ignores its argument.
            ok(unsafe { cudaLaunchHostFunc(rank.stream, Some(nap), ptr::null_mut()) });
        }
        for (buffer, stream) in [(&first, rank.stream), (&second, other)] {
            let data = buffer.pointer.cast();
            // SAFETY: the buffer has that many elements.
            nccl_ok(unsafe { ncclAllReduce(data, data.cast(), buffer.len, ncclInt32, ncclSum, rank.comm, stream) });
        }
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamSynchronize(other) });
        assert_eq!((first.get(), second.get()), (vec![2], vec![4; 2]));
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamDestroy(other) });
    });
}
