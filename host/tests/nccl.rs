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
    let first = take_devices(3);
    let mut comms = [ptr::null_mut(); 3];
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclGroupStart() });
    for (rank, comm) in comms.iter_mut().enumerate() {
        // SAFETY: no preconditions.
        ok(unsafe { cudaSetDevice(first + rank as i32) });
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
    let first = take_devices(2);
    let mut comms = [ptr::null_mut(); 2];
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclGroupStart() });
    for (rank, comm) in comms.iter_mut().enumerate() {
        // SAFETY: no preconditions.
        ok(unsafe { cudaSetDevice(first + rank as i32) });
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

/// What is called in a group is done when the group ends, the outermost one: collectives in their order, then the transfers.
#[test]
fn work_of_a_group_waits_for_its_end() {
    run_ranks(2, |rank| {
        let (sum, all) = (Buffer::of(&[rank.rank as i32 + 1; 4], rank.stream), Buffer::of(&[-1i32; 8], rank.stream));
        let there = Buffer::of(&[-1i32; 4], rank.stream);
        let (data, peer) = (sum.pointer.cast::<std::ffi::c_void>(), 1 - rank.rank as i32);
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclGroupStart() });
        // SAFETY: the buffers have as many elements as is said.
        nccl_ok(unsafe { ncclSend(data, 4, ncclInt32, peer, rank.comm, rank.stream) });
        // SAFETY: as above.
        nccl_ok(unsafe { ncclRecv(there.pointer.cast(), 4, ncclInt32, peer, rank.comm, rank.stream) });
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclGroupStart() });
        // SAFETY: as above.
        nccl_ok(unsafe { ncclAllReduce(data, data, 4, ncclInt32, ncclSum, rank.comm, rank.stream) });
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclGroupEnd() });
        // SAFETY: as above.
        nccl_ok(unsafe { ncclAllGather(data, all.pointer.cast(), 4, ncclInt32, rank.comm, rank.stream) });
        // An argument is judged at the call.
        // SAFETY: refused.
        assert_eq!(unsafe { ncclAllReduce(data, data, 4, 99, ncclSum, rank.comm, rank.stream) }, ncclInvalidArgument);
        rank.sync();
        assert_eq!((sum.get(), all.get(), there.get()), (vec![rank.rank as i32 + 1; 4], vec![-1; 8], vec![-1; 4]));
        // SAFETY: the buffers are still there.
        nccl_ok(unsafe { ncclGroupEnd() });
        assert_eq!((sum.get(), all.get(), there.get()), (vec![3; 4], vec![3; 8], vec![3; 4]));
    });
}

#[test]
fn ranks_share_a_device_where_nccl_lets_them() {
    let id = hex(&unique_id());
    let child = spawn_rank_with("two_ranks_on_a_device", &id, 0, 2, 60_000, &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")]);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "run by ranks_share_a_device_where_nccl_lets_them"]
fn two_ranks_on_a_device() {
    let id = unique_id();
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || Rank::join(id, rank, 2, 0).leave()));
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
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
        let user_pointer = |window| {
            let mut found = ptr::null_mut();
            // SAFETY: the result pointer is ours.
            let code = unsafe { ncclWinGetUserPtr(rank.comm, window, &raw mut found) };
            (code, found)
        };
        assert_eq!(user_pointer(window), (ncclSuccess, memory));
        assert_eq!(user_pointer(ptr::null_mut()), (ncclInvalidArgument, ptr::null_mut()));
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommWindowDeregister(rank.comm, window) });
        assert_eq!(user_pointer(window).0, ncclInvalidArgument);
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

fn group<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclGroupStart() });
    let result = work();
    // SAFETY: what the calls of the group got is still valid.
    nccl_ok(unsafe { ncclGroupEnd() });
    result
}

fn send<T: Copy>(rank: &Rank, buffer: &Buffer<T>, datatype: u32, peer: usize) {
    // SAFETY: the buffer has that many elements.
    nccl_ok(unsafe { ncclSend(buffer.pointer.cast(), buffer.len, datatype, peer as i32, rank.comm, rank.stream) });
}

fn receive<T: Copy>(rank: &Rank, buffer: &Buffer<T>, datatype: u32, peer: usize) {
    // SAFETY: the buffer has that many elements.
    nccl_ok(unsafe { ncclRecv(buffer.pointer.cast(), buffer.len, datatype, peer as i32, rank.comm, rank.stream) });
}

#[test]
fn everyone_sends_to_everyone_in_a_group() {
    run_ranks(4, |rank| {
        // The first round's messages are longer than a piece, and every pair's have their own length.
        for base in [PIECE_BYTES / 4, 3, 0] {
            let count = |from: usize, to: usize| base * (1 + from % 2) + from * 4 + to;
            let value = |from: usize, to: usize, i: usize| (from * 1_000_003 + to * 10_007 + i) as u32;
            let own: Vec<Buffer<u32>> = (0..4)
                .map(|to| {
                    let values: Vec<u32> = (0..count(rank.rank, to)).map(|i| value(rank.rank, to, i)).collect();
                    Buffer::of(&values, rank.stream)
                })
                .collect();
            let theirs: Vec<Buffer<u32>> =
                (0..4).map(|from| Buffer::new(count(from, rank.rank), rank.stream)).collect();
            group(|| {
                for (peer, (own, theirs)) in own.iter().zip(&theirs).enumerate() {
                    send(rank, own, ncclUint32, peer);
                    receive(rank, theirs, ncclUint32, peer);
                }
            });
            for (from, buffer) in theirs.iter().enumerate() {
                let expected = (0..count(from, rank.rank)).map(|i| value(from, rank.rank, i));
                assert!(buffer.get().into_iter().eq(expected), "rank {} from {from}", rank.rank);
            }
        }
    });
}

#[test]
fn messages_between_two_ranks_keep_their_order() {
    run_ranks(3, |rank| {
        // Rank 1 takes no part in it, and its collective with the others comes behind.
        let values: Vec<Buffer<i64>> = (0..5i64).map(|i| Buffer::of(&vec![i; i as usize + 1], rank.stream)).collect();
        match rank.rank {
            0 => values.iter().for_each(|buffer| send(rank, buffer, ncclInt64, 2)),
            2 => group(|| {
                for (i, buffer) in values.iter().enumerate() {
                    buffer.set(&vec![-1; i + 1]);
                    receive(rank, buffer, ncclInt64, 0);
                }
            }),
            _ => {}
        }
        for (i, buffer) in values.iter().enumerate() {
            assert_eq!(buffer.get(), vec![i as i64; i + 1]);
        }
        assert_eq!(reduce(rank, &[1i32], ncclInt32, ncclSum), [3]);
    });
}

#[test]
fn a_ring_without_a_group() {
    run_ranks(3, |rank| {
        let (next, last) = ((rank.rank + 1) % 3, (rank.rank + 2) % 3);
        let own = Buffer::of(&[rank.rank as f32 + 0.5; 7], rank.stream);
        let there = Buffer::of(&[0f32; 7], rank.stream);
        if rank.rank == 0 {
            send(rank, &own, ncclFloat32, next);
            receive(rank, &there, ncclFloat32, last);
        } else {
            receive(rank, &there, ncclFloat32, last);
            send(rank, &own, ncclFloat32, next);
        }
        assert_eq!(there.get(), [last as f32 + 0.5; 7]);
    });
}

#[test]
fn transfers_that_cannot_be_are_refused() {
    run_ranks(1, |rank| {
        let buffer = Buffer::of(&[1f32; 4], rank.stream);
        let data = buffer.pointer.cast();
        // SAFETY: nothing is transferred.
        let code = unsafe { ncclSend(data, 4, ncclFloat32, 1, rank.comm, rank.stream) };
        assert_eq!((code, &*nccl_error()), (ncclInvalidArgument, "ncclSend: peer 1 of 1 ranks"));
        // SAFETY: nothing is transferred.
        let code = unsafe { ncclRecv(data.cast(), 5, ncclFloat32, 0, rank.comm, rank.stream) };
        assert!(code == ncclInvalidArgument && nccl_error().starts_with("ncclRecv: recvbuff: 20 bytes at"));
        let mut other = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaStreamCreate(&raw mut other) });
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclGroupStart() });
        send(rank, &buffer, ncclFloat32, 0);
        // SAFETY: the buffer has 4 elements.
        nccl_ok(unsafe { ncclRecv(data.cast(), 4, ncclFloat32, 0, rank.comm, other) });
        // SAFETY: the buffer is still valid.
        assert_eq!(unsafe { ncclGroupEnd() }, ncclInvalidUsage);
        assert!(nccl_error().contains("use one stream in a group"), "{}", nccl_error());
        // Nothing is left of the group.
        group(|| {});
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamDestroy(other) });
    });
}

#[test]
fn reductions_to_one_rank_and_in_parts() {
    run_ranks(3, |rank| {
        let r = rank.rank as i32;
        let count = PIECE_BYTES / 4 + 3;
        let own: Vec<i32> = (0..3 * count as i32).map(|i| i * (r + 1)).collect();
        let own = Buffer::of(&own, rank.stream);
        let part = Buffer::of(&vec![-1i32; count], rank.stream);
        let (data, there) = (own.pointer.cast(), part.pointer.cast());
        // SAFETY: the buffers have three parts of `count` elements, and one.
        nccl_ok(unsafe { ncclReduceScatter(data, there, count, ncclInt32, ncclSum, rank.comm, rank.stream) });
        let first = r * count as i32;
        assert!(part.get().into_iter().eq((first..first + count as i32).map(|i| i * 6)));
        part.set(&vec![-1; count]);
        let to = if rank.rank == 2 { there } else { ptr::null_mut() };
        // SAFETY: the root's buffer has `count` elements, the others' is not used.
        nccl_ok(unsafe { ncclReduce(data, to, count, ncclInt32, ncclMax, 2, rank.comm, rank.stream) });
        let expected = (0..count as i32).map(|i| if r == 2 { i * 3 } else { -1 });
        assert!(part.get().into_iter().eq(expected));
        // SAFETY: refused before anything is used.
        let code = unsafe { ncclReduce(data, there, 1, ncclInt32, ncclSum, 3, rank.comm, rank.stream) };
        assert_eq!((code, &*nccl_error()), (ncclInvalidArgument, "ncclReduce: root 3 of 3 ranks"));
    });
}

fn size_and_rank(comm: ncclComm_t) -> (i32, i32) {
    let (mut count, mut rank) = (0, 0);
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclCommCount(comm, &raw mut count) });
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclCommUserRank(comm, &raw mut rank) });
    (count, rank)
}

#[test]
fn splits_by_color_and_key() {
    run_ranks(5, |rank| {
        let r = rank.rank as i32;
        // Even ranks in reverse order, odd ranks in theirs, and rank 4 in none.
        let (color, key) = if r == 4 { (NCCL_SPLIT_NOCOLOR, 0) } else { (r % 2, if r % 2 == 0 { -r } else { 0 }) };
        let mut comm = ptr::dangling_mut();
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclCommSplit(rank.comm, color, key, &raw mut comm, ptr::null_mut()) });
        if r == 4 {
            assert!(comm.is_null());
        } else {
            let expected = if r % 2 == 0 { 1 - r / 2 } else { r / 2 };
            assert_eq!(size_and_rank(comm), (2, expected));
            let half = Rank { rank: expected as usize, ranks: 2, comm, stream: rank.stream };
            assert_eq!(reduce(&half, &[1 << r], ncclInt32, ncclSum), [if r % 2 == 0 { 0b101 } else { 0b1010 }]);
            // SAFETY: no preconditions.
            nccl_ok(unsafe { ncclCommDestroy(comm) });
        }
        assert_eq!(reduce(rank, &[1i32], ncclInt32, ncclSum), [5], "the communicator itself goes on");
        // SAFETY: the result pointer is ours.
        let code = unsafe { ncclCommSplit(rank.comm, -5, 0, &raw mut comm, ptr::null_mut()) };
        assert_eq!(code, ncclInvalidArgument);
        assert!(nccl_error().contains("color -5 is negative"), "{}", nccl_error());
    });
}

#[test]
fn all_devices_of_a_process_with_their_properties() {
    let first = take_devices(2);
    let mut comms = [ptr::null_mut(); 2];
    let devices = [first + 1, first];
    // SAFETY: no preconditions.
    ok(unsafe { cudaSetDevice(first) });
    // SAFETY: the results are ours, and the list has two ordinals.
    nccl_ok(unsafe { ncclCommInitAll(comms.as_mut_ptr(), 2, devices.as_ptr()) });
    let mut current = -1;
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaGetDevice(&raw mut current) });
    assert_eq!(current, first);
    let mut halves = [ptr::null_mut(); 2];
    group(|| {
        for (rank, (comm, half)) in comms.iter().zip(&mut halves).enumerate() {
            // SAFETY: the result pointers live beyond the end of the group.
            nccl_ok(unsafe { ncclCommSplit(*comm, 7, -(rank as i32), &raw mut *half, ptr::null_mut()) });
        }
    });
    for rank in 0..2 {
        let mut properties = ncclCommProperties_t {
            size: size_of::<ncclCommProperties_t>(),
            magic: NCCL_API_MAGIC,
            version: NCCL_VERSION_CODE,
            ..Default::default()
        };
        // SAFETY: the structure is ours and as long as it says.
        nccl_ok(unsafe { ncclCommQueryProperties(comms[rank], &raw mut properties) });
        let (rank, ranks) = (rank as i32, 2);
        assert_eq!((properties.rank, properties.nRanks, properties.cudaDev), (rank, ranks, devices[rank as usize]));
        assert_eq!((properties.deviceApiSupport, properties.nLsaTeams), (true, 1));
        assert_eq!((properties.multimemSupport, properties.ginType), (false, NCCL_GIN_TYPE_NONE));
        properties.magic = 1;
        // SAFETY: as above.
        let code = unsafe { ncclCommQueryProperties(comms[rank as usize], &raw mut properties) };
        assert_eq!(code, ncclInvalidArgument);
        let text = nccl_error();
        assert_eq!(text, "ncclCommQueryProperties: props.magic is 0x1, not 0xcafebeef: start from its initializer");
        assert_eq!(size_and_rank(halves[rank as usize]), (2, 1 - rank));
    }
    for comm in comms.into_iter().chain(halves) {
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommDestroy(comm) });
    }
    // SAFETY: the results are ours; device 4000 is refused.
    assert_eq!(unsafe { ncclCommInitAll(comms.as_mut_ptr(), 2, [first, 4000].as_ptr()) }, ncclUnhandledCudaError);
    // SAFETY: no group is open any more.
    assert_eq!(unsafe { ncclGroupEnd() }, ncclInvalidUsage);
}
