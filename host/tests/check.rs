//! The contract checker: what breaks each rule, what the report says, what each policy makes of it, and what is no breach.

mod common;

use std::ffi::{CString, c_void};
use std::io::Read;
use std::process::{Child, Output};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::low_latency::{LlBuffers, LlCase, complete, ll_handle};
use common::*;
use nvte_ep_bindings::*;
use nvte_ep_host::rule::Rule;
use nvte_ep_host::settings::{POLICY_VARIABLE, Policy};
use nvte_ep_host::surface::cuda_driver::cuDeviceGetAttribute;
use nvte_ep_host::surface::cuda_driver_memory::cuPointerGetAttributes;
use nvte_ep_host::surface::host_ext::{
    nvte_ep_host_check_last, nvte_ep_host_check_reports, nvte_ep_host_set_pageable_memory,
};

const RULE: &str = "NVTE_EP_HOST_TEST_RULE";
const TOKENS: usize = 8;
const ROWS: usize = 64;
const HIDDEN: usize = 32;

/// How a rule is broken.
struct Provocation {
    rule: Rule,
    ranks: usize,
    /// Run by every rank; asserts the codes that the calls give under the policy.
    run: fn(&Rank, Policy),
    /// What the report of rank 0 begins with, behind the rank: call, argument, what was found.
    found: &'static str,
}

fn reports(rule: Rule) -> u64 {
    let name = CString::new(rule.name()).unwrap();
    // SAFETY: a string.
    unsafe { nvte_ep_host_check_reports(name.as_ptr()) }
}

fn last_report() -> String {
    // SAFETY: no preconditions.
    text(unsafe { nvte_ep_host_check_last() })
}

/// The end of each report of a rule.
fn ending(rule: Rule) -> String {
    format!(": rule {}: {} (on a GPU: {})", rule.name(), rule.sentence(), rule.on_gpu())
}

fn stream_code(stream: cudaStream_t) -> u32 {
    // SAFETY: no preconditions.
    unsafe { cudaStreamSynchronize(stream) }
}

/// Checks the code of a call after whose breach the work can go on.
fn judged(policy: Policy, code: u32) {
    assert_eq!(code, if policy == Policy::Error { ncclInvalidUsage } else { ncclSuccess }, "{}", nccl_error());
}

/// A group with a handle, the tensors of a step, and what a step does with them.
struct Bench<'a> {
    rank: &'a Rank,
    group: ncclEpGroup_t,
    handle: TestHandle,
    topk: Buffer<i64>,
    total: Buffer<i64>,
    tokens: Buffer<u16>,
    rows: Buffer<u16>,
    result: Buffer<u16>,
}

impl<'a> Bench<'a> {
    fn new(rank: &'a Rank) -> Self {
        Self::with(rank, |_| {})
    }

    /// 8 tokens a rank, top-1 of 4 experts; token t goes to expert t % 4.
    fn with(rank: &'a Rank, change: impl Fn(&mut ncclEpGroupConfig_t)) -> Self {
        let mut config = group_config(4, TOKENS, ROWS, HIDDEN * 2);
        change(&mut config);
        let group = rank.create_group(&config).unwrap();
        let stream = rank.stream;
        let topk: Vec<i64> = (0..TOKENS as i64).map(|token| token % 4).collect();
        let tokens: Vec<u16> = (0..TOKENS * HIDDEN).map(|i| i as u16).collect();
        let bench = Self {
            rank,
            group,
            handle: TestHandle::new(rank, group, 1, 1),
            topk: Buffer::of(&topk, stream),
            total: Buffer::of(&[-1], stream),
            tokens: Buffer::of(&tokens, stream),
            rows: Buffer::of(&vec![0; ROWS * HIDDEN], stream),
            result: Buffer::of(&vec![0; TOKENS * HIDDEN], stream),
        };
        rank.sync();
        bench
    }

    fn update(&self) -> u32 {
        self.update_of(Desc::of(&self.topk, ncclInt64, &[TOKENS, 1]), self.rank.stream)
    }

    fn update_of(&self, mut topk: Desc, stream: cudaStream_t) -> u32 {
        let mut total = Desc::of(&self.total, ncclInt64, &[1]);
        let info = ep_struct!(ncclEpLayoutInfo_t { recv_total_counter: total.ptr() });
        // SAFETY: the structures are ours and valid; the memory is what the test is about.
        unsafe { ncclEpUpdateHandle(self.handle.handle, topk.ptr(), &raw const info, stream) }
    }

    fn sent(&self) -> Desc {
        Desc::of(&self.tokens, ncclBfloat16, &[TOKENS, HIDDEN])
    }

    fn received(&self) -> Desc {
        Desc::of(&self.rows, ncclBfloat16, &[ROWS, HIDDEN])
    }

    fn dispatch(&self) -> u32 {
        self.dispatch_of(self.sent(), self.received(), self.rank.stream)
    }

    fn dispatch_of(&self, mut sent: Desc, mut received: Desc, stream: cudaStream_t) -> u32 {
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: sent.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: received.ptr() });
        let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
        let (i, o, c) = (&raw const inputs, &raw const outputs, &raw const config);
        // SAFETY: the structures are ours and valid; the memory is what the test is about.
        unsafe { ncclEpDispatch(self.handle.handle, i, o, ptr::null(), c, stream) }
    }

    fn combine(&self) -> u32 {
        self.combine_of(self.received(), self.rank.stream)
    }

    fn combine_of(&self, mut rows: Desc, stream: cudaStream_t) -> u32 {
        let mut result = Desc::of(&self.result, ncclBfloat16, &[TOKENS, HIDDEN]);
        let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr() });
        let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: result.ptr() });
        let (i, o) = (&raw const inputs, &raw const outputs);
        // SAFETY: the structures are ours and valid; the memory is what the test is about.
        unsafe { ncclEpCombine(self.handle.handle, i, o, ptr::null(), stream) }
    }

    fn destroy_group(&self) -> u32 {
        // SAFETY: no preconditions.
        unsafe { ncclEpGroupDestroy(self.group) }
    }

    /// The received total of the last update: with one rank, the tokens that have an expert.
    fn received_total(&self) -> i64 {
        self.total.get()[0]
    }

    /// Leaves everything to the end of the process, which may come after an error.
    fn forget(self) {
        std::mem::forget(self);
    }
}

fn new_stream() -> cudaStream_t {
    let mut stream = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaStreamCreateWithFlags(&raw mut stream, cudaStreamNonBlocking) });
    stream
}

/// Holds a rank that does not take part until its parent lets go.
fn stay_away() -> ! {
    let mut rest = String::new();
    std::io::stdin().read_to_string(&mut rest).unwrap();
    std::process::exit(0);
}

fn config_differs(rank: &Rank, _: Policy) {
    let mut config = group_config(4, TOKENS, ROWS, 64);
    config.num_topk = 1 + rank.rank as u32;
    assert_eq!(rank.create_group(&config).unwrap_err().0, ncclInvalidArgument);
}

fn unique_id_again(_: &Rank, _: Policy) {
    let id = unique_id();
    let join = || {
        let mut comm = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        (unsafe { ncclCommInitRank(&raw mut comm, 1, id, 0) }, comm)
    };
    let (code, first) = join();
    nccl_ok(code);
    assert_eq!(join().0, ncclInvalidUsage);
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclCommDestroy(first) });
    assert_eq!(join().0, ncclInvalidUsage);
}

fn rank_device(_: &Rank, _: Policy) {
    let id = unique_id();
    let codes: Vec<u32> = std::thread::scope(|scope| {
        let join = |rank| {
            // SAFETY: no preconditions.
            ok(unsafe { cudaSetDevice(0) });
            let mut comm = ptr::null_mut();
            // SAFETY: the result pointer is ours.
            unsafe { ncclCommInitRank(&raw mut comm, 2, id, rank) }
        };
        let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank)));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    // Each finds it, or learns it from the other.
    assert!(codes.iter().all(|code| [ncclInvalidUsage, ncclRemoteError].contains(code)), "{codes:?}");
}

fn inside_group(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclGroupStart() });
    let config = group_config(4, TOKENS, ROWS, 64);
    assert_eq!(rank.create_group(&config).unwrap_err().0, ncclInvalidUsage);
    let first = last_report();
    assert!(
        first.starts_with("rank 0, ncclEpCreateGroup: called between ncclGroupStart and ncclGroupEnd: "),
        "{first}"
    );
    assert_eq!(bench.update(), ncclInvalidUsage);
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclGroupEnd() });
    nccl_ok(bench.update());
    rank.sync();
    assert_eq!(bench.received_total(), 8);
}

fn call_order(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    nccl_ok(bench.update());
    nccl_ok(if rank.rank == 0 { bench.dispatch() } else { bench.combine() });
    assert_eq!(stream_code(rank.stream), cudaErrorLaunchFailure);
    bench.forget();
}

fn missing_rank(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    if rank.rank == 1 {
        stay_away();
    }
    nccl_ok(bench.update());
    assert_eq!(stream_code(rank.stream), cudaErrorLaunchTimeout);
    bench.forget();
}

/// Captures an update.
fn captured_update(bench: &Bench) -> cudaGraphExec_t {
    let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
    let stream = bench.rank.stream;
    // SAFETY: the bench is kept until the process ends.
    ok(unsafe { cudaStreamBeginCapture(stream, 1) });
    nccl_ok(bench.update());
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaStreamEndCapture(stream, &raw mut graph) });
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaGraphInstantiate(&raw mut exec, graph, 0) });
    exec
}

fn launch(exec: cudaGraphExec_t, stream: cudaStream_t) {
    // SAFETY: what was captured is kept until the process ends.
    ok(unsafe { cudaGraphLaunch(exec, stream) });
}

fn replay_count(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    let exec = captured_update(&bench);
    launch(exec, rank.stream);
    rank.sync();
    if rank.rank == 1 {
        stay_away();
    }
    launch(exec, rank.stream);
    assert_eq!(stream_code(rank.stream), cudaErrorLaunchTimeout);
    bench.forget();
}

fn argument_value(rank: &Rank, _: Policy) {
    let config = ncclEpGroupConfig_t { overflow_policy: 7, ..group_config(4, TOKENS, ROWS, 64) };
    assert_eq!(rank.create_group(&config).unwrap_err().0, ncclInvalidArgument);
}

fn tensor_shape(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    let narrow = Desc::of(&bench.topk, ncclInt64, &[4, 2]);
    assert_eq!(bench.update_of(narrow, rank.stream), ncclInvalidArgument);
}

fn row_limit(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    let topk = Buffer::of(&[0i64; TOKENS + 1], rank.stream);
    let long = Desc::of(&topk, ncclInt64, &[TOKENS + 1, 1]);
    assert_eq!(bench.update_of(long, rank.stream), ncclInvalidArgument);
}

fn receive_overflow(rank: &Rank, _: Policy) {
    let bench = Bench::with(rank, |config| config.max_recv_tokens_per_rank = 12);
    bench.topk.set(&[0; TOKENS]);
    nccl_ok(bench.update());
    // Rank 1 has room.
    assert_eq!(stream_code(rank.stream), if rank.rank == 0 { cudaErrorLaunchFailure } else { 0 });
    bench.forget();
}

fn expert_index(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    bench.topk.set(&[0, 1, 4]);
    nccl_ok(bench.update());
    assert_eq!(stream_code(rank.stream), cudaErrorAssert);
    bench.forget();
}

fn routing_changed(rank: &Rank, policy: Policy) {
    let bench = Bench::new(rank);
    nccl_ok(bench.update());
    forward(&bench);
    // The next micro-batch in the same handle memory.
    bench.topk.set(&[3, 2, 1, 0, 3, 2, 1, 0]);
    nccl_ok(bench.update());
    nccl_ok(bench.combine());
    assert_eq!(stream_code(rank.stream), if policy == Policy::Error { cudaErrorAssert } else { 0 });
    bench.forget();
}

fn combine_rows(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    nccl_ok(bench.update());
    let few = Desc::of(&bench.rows, ncclBfloat16, &[TOKENS - 1, HIDDEN]);
    nccl_ok(bench.combine_of(few, rank.stream));
    assert_eq!(stream_code(rank.stream), cudaErrorIllegalAddress);
    bench.forget();
}

fn handle_memory(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    nccl_ok(bench.dispatch());
    assert_eq!(stream_code(rank.stream), cudaErrorIllegalAddress);
    bench.forget();
}

fn alignment(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    nccl_ok(bench.update());
    let shifted = bench.tokens.pointer.wrapping_add(4).cast::<c_void>();
    let sent = Desc::new(shifted, ncclBfloat16, &[TOKENS - 1, HIDDEN]);
    assert_eq!(bench.dispatch_of(sent, bench.received(), rank.stream), ncclInvalidArgument);
}

fn memory_bounds(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    let short = Buffer::of(&[0i64; TOKENS - 1], rank.stream);
    let topk = Desc::of(&short, ncclInt64, &[TOKENS, 1]);
    assert_eq!(bench.update_of(topk, rank.stream), ncclInvalidArgument);
}

fn freed_memory(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    // SAFETY: the handle must not use the memory any more, which is what is tested.
    ok(unsafe { cudaFree(bench.handle.memory.pointer.cast()) });
    assert_eq!(bench.update(), ncclUnhandledCudaError);
    assert_eq!(reports(Rule::FreedMemory), 1);
    let gone = bench.tokens.pointer.cast::<c_void>();
    bench.forget();
    let bench = Bench::new(rank);
    nccl_ok(bench.update());
    // SAFETY: as above.
    ok(unsafe { cudaFree(gone) });
    let sent = Desc::new(gone, ncclBfloat16, &[TOKENS, HIDDEN]);
    assert_eq!(bench.dispatch_of(sent, bench.received(), rank.stream), ncclInvalidArgument);
    let last = last_report();
    assert!(last.starts_with("rank 0, ncclEpDispatch: inputs.tokens: 0x"), "{last}");
    assert!(last.contains(" is in 512 bytes that have been freed: rule freed-memory"), "{last}");
    rank.sync();
    bench.forget();
}

fn device_memory(rank: &Rank, policy: Policy) {
    let bench = Bench::new(rank);
    let mut pageable = [0i64, 1, -1, 3, 0, 1, 2, 3];
    let topk = Desc::new(pageable.as_mut_ptr().cast(), ncclInt64, &[TOKENS, 1]);
    judged(policy, bench.update_of(topk, rank.stream));
    // Where the work went on, the indices were read.
    assert_eq!(bench.received_total(), if policy == Policy::Error { -1 } else { 7 });
}

fn other_device(rank: &Rank, policy: Policy) {
    let bench = Bench::new(rank);
    // SAFETY: no preconditions.
    ok(unsafe { cudaSetDevice(1) });
    let foreign = new_stream();
    let topk = Buffer::of(&[0i64; TOKENS], foreign);
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamSynchronize(foreign) });
    // SAFETY: no preconditions.
    ok(unsafe { cudaSetDevice(0) });
    let elsewhere = || Desc::of(&topk, ncclInt64, &[TOKENS, 1]);
    judged(policy, bench.update_of(elsewhere(), rank.stream));
    assert_eq!(bench.received_total(), if policy == Policy::Error { -1 } else { 8 });
    let own = Desc::of(&bench.topk, ncclInt64, &[TOKENS, 1]);
    judged(policy, bench.update_of(own, foreign));
    if policy != Policy::Off {
        let last = last_report();
        let words = "rank 0, ncclEpUpdateHandle: stream is one of device 1, the communicator is on device 0: rule";
        assert!(last.starts_with(words), "{last}");
    }
    ok(stream_code(foreign));
    let data = topk.pointer.cast::<c_void>();
    // SAFETY: the buffer has 8 elements.
    let code = unsafe { ncclAllReduce(data, data, 4, ncclInt64, ncclSum, rank.comm, foreign) };
    judged(policy, code);
    ok(stream_code(foreign));
}

fn unwritten_memory(rank: &Rank, policy: Policy) {
    let bench = Bench::new(rank);
    // Token 1 has no expert, so nobody reads its row.
    bench.topk.set(&[0, -1, 2, 3, 0, 1, 2, 3]);
    let fresh = Buffer::<u16>::new(TOKENS * HIDDEN, rank.stream);
    let row = |row: usize| fresh.pointer.wrapping_add(row * HIDDEN).cast::<c_void>();
    for written in [0, 2, 3, 5, 6, 7] {
        // SAFETY: the row lies in the buffer.
        ok(unsafe { cudaMemsetAsync(row(written), 1, HIDDEN * 2, rank.stream) });
    }
    nccl_ok(bench.update());
    nccl_ok(bench.dispatch_of(Desc::of(&fresh, ncclBfloat16, &[TOKENS, HIDDEN]), bench.received(), rank.stream));
    assert_eq!(stream_code(rank.stream), if policy == Policy::Error { cudaErrorAssert } else { 0 });
    if policy != Policy::Error {
        // Expert 0 has tokens 0 and 4: what token 4's row held travelled.
        let unwritten = &fresh.get()[4 * HIDDEN..5 * HIDDEN];
        assert!(unwritten.iter().all(|value| value >> 8 == 0xCB), "{unwritten:x?}");
        assert_eq!(bench.rows.get()[..2 * HIDDEN], [&[0x0101; HIDDEN], unwritten].concat());
    }
    std::mem::forget(fresh);
    bench.forget();
}

fn window_missing(rank: &Rank, _: Policy) {
    let bench = Bench::with(rank, |config| config.zero_copy = NCCL_EP_ZERO_COPY_ON);
    nccl_ok(bench.update());
    assert_eq!(bench.dispatch(), ncclInvalidArgument);
}

fn window_bounds(rank: &Rank, _: Policy) {
    let bench = Bench::with(rank, |config| config.zero_copy = NCCL_EP_ZERO_COPY_ON);
    let memory = WindowMemory::new(rank, ROWS * HIDDEN * 2);
    nccl_ok(bench.update());
    let beyond = memory.desc(32, ncclBfloat16, &[ROWS, HIDDEN], false);
    assert_eq!(bench.dispatch_of(bench.sent(), beyond, rank.stream), ncclInvalidArgument);
    rank.sync();
    memory.free();
}

fn window_lifetime(rank: &Rank, policy: Policy) {
    let memory = WindowMemory::new(rank, 4096);
    // SAFETY: nobody uses the memory; its window must not be forgotten, which is what is tested.
    let code = unsafe { ncclMemFree(memory.base.cast()) };
    judged(policy, code);
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclCommWindowDeregister(rank.comm, memory.window) });
    // SAFETY: nobody uses the memory.
    let code = unsafe { ncclMemFree(memory.base.cast()) };
    assert_eq!(code, if policy == Policy::Error { ncclSuccess } else { ncclInvalidArgument }, "freed once");
}

fn stream_order(rank: &Rank, policy: Policy) {
    let bench = Bench::new(rank);
    let other = new_stream();
    nccl_ok(bench.update());
    judged(policy, bench.dispatch_of(bench.sent(), bench.received(), other));
    ok(stream_code(rank.stream));
    ok(stream_code(other));
    let first = if policy == Policy::Error { 0 } else { 1 };
    // Row 2 is token 1, the first one of expert 1.
    assert_eq!(bench.rows.get()[2 * HIDDEN + 1], first * (HIDDEN as u16 + 1));
}

fn one_thread(rank: &Rank, policy: Policy) {
    type Job = Box<dyn FnOnce() -> u32 + Send>;
    static JOB: Mutex<Option<Job>> = Mutex::new(None);
    static CODE: AtomicU32 = AtomicU32::new(99);
    unsafe extern "C-unwind" fn allocate(out: *mut *mut c_void, bytes: usize, _: *mut c_void) -> u32 {
        // Another thread, while this one is in ncclEpInitHandle.
        let job = JOB.lock().unwrap().take().unwrap();
        CODE.store(std::thread::spawn(job).join().unwrap(), Ordering::SeqCst);
        // SAFETY: the library's word.
        unsafe { cudaMalloc(out, bytes) }
    }
    unsafe extern "C-unwind" fn free(memory: *mut c_void, _: *mut c_void) -> u32 {
        // SAFETY: the library's word.
        unsafe { cudaFree(memory) }
    }
    let bench = Bench::with(rank, |config| {
        config.alloc.alloc_fn = Some(allocate);
        config.alloc.free_fn = Some(free);
    });
    let address = &raw const bench as usize;
    // SAFETY: the bench outlives the job, which is done when the next call returns.
    *JOB.lock().unwrap() = Some(Box::new(move || unsafe { &*(address as *const Bench) }.update()));
    let mut handle = ptr::null_mut();
    let layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclEpInitHandle(&raw mut handle, bench.group, layout, ptr::null(), 1, ptr::null()) });
    judged(policy, CODE.load(Ordering::SeqCst));
    assert_eq!(bench.received_total(), if policy == Policy::Error { -1 } else { 8 });
    // One after the other is no breach.
    nccl_ok(bench.update());
    rank.sync();
}

fn live_handles(rank: &Rank, policy: Policy) {
    let bench = Bench::new(rank);
    nccl_ok(bench.update());
    judged(policy, bench.destroy_group());
    if policy == Policy::Error {
        // The group is still there, and now it may go.
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpHandleDestroy(bench.handle.handle) });
        nccl_ok(bench.destroy_group());
    }
    let bench = Bench::new(rank);
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclCommDestroy(rank.comm) });
    judged(policy, bench.update());
    rank.sync();
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclEpHandleDestroy(bench.handle.handle) });
    judged(policy, bench.destroy_group());
    if policy != Policy::Off {
        let last = last_report();
        let words = "ncclEpGroupDestroy: the communicator of ep_group has been destroyed before it: rule live-handles";
        assert!(last.starts_with(&format!("rank 0, {words}")), "{last}");
        assert_eq!(reports(Rule::LiveHandles), 3);
    }
}

fn peers_busy(rank: &Rank, policy: Policy) {
    const MANY: usize = 1024;
    const TOP_K: usize = 8;
    let capacity = 2 * MANY * TOP_K;
    // All rows go to rank 1, eight times: rank 0 is done long before it, if the machine lets it run.
    for attempt in 0.. {
        assert!(attempt < 100, "rank 0 never overtook rank 1");
        let group = rank.create_group(&group_config(16, MANY, capacity, 1024)).unwrap();
        let handle = TestHandle::new(rank, group, TOP_K, 1);
        let topk: Vec<i64> = (0..MANY * TOP_K).map(|i| 8 + (i % TOP_K) as i64).collect();
        let topk = Buffer::of(&topk, rank.stream);
        let tokens = Buffer::of(&vec![1f32; MANY * 256], rank.stream);
        let rows = Buffer::of(&vec![0f32; capacity * 256], rank.stream);
        let mut topk_desc = Desc::of(&topk, ncclInt64, &[MANY, TOP_K]);
        let mut sent = Desc::of(&tokens, ncclFloat32, &[MANY, 256]);
        let mut received = Desc::of(&rows, ncclFloat32, &[capacity, 256]);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk_desc.ptr(), ptr::null(), rank.stream) });
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: sent.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: received.ptr() });
        let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
        let (i, o, c) = (&raw const inputs, &raw const outputs, &raw const config);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpDispatch(handle.handle, i, o, ptr::null(), c, rank.stream) });
        rank.sync();
        handle.destroy();
        let mut code = ncclSuccess;
        if rank.rank == 0 {
            // SAFETY: no preconditions.
            code = unsafe { ncclEpGroupDestroy(group) };
        }
        // Rank 1 comes here when it is done; whether rank 0 was caught is for both to know.
        let caught = rank.rank == 0 && reports(Rule::PeersBusy) > 0;
        let all = Buffer::of(&[f32::from(caught)], rank.stream);
        let data = all.pointer.cast::<c_void>();
        // SAFETY: the buffer has one element.
        nccl_ok(unsafe { ncclAllReduce(data, data, 1, ncclFloat32, ncclSum, rank.comm, rank.stream) });
        let caught = all.get()[0] > 0.0;
        // A warning: nothing of the host runtime is at stake.
        nccl_ok(code);
        if rank.rank == 1 {
            // SAFETY: no preconditions.
            nccl_ok(unsafe { ncclEpGroupDestroy(group) });
        }
        if caught || policy == Policy::Off {
            break;
        }
    }
}

fn destroyed_object(rank: &Rank, _: Policy) {
    let bench = Bench::new(rank);
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclEpHandleDestroy(bench.handle.handle) });
    assert_eq!(bench.update(), ncclInvalidArgument);
    nccl_ok(bench.destroy_group());
    let mut size = 0;
    let layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    // SAFETY: the result pointer is ours.
    let code = unsafe { ncclEpHandleMemSize(bench.group, layout, ptr::null(), &raw mut size, 1) };
    assert_eq!((code, reports(Rule::DestroyedObject)), (ncclInvalidArgument, 2));
}

fn capture_unsafe(rank: &Rank, _: Policy) {
    let mut memory = ptr::null_mut();
    // SAFETY: nothing is captured.
    ok(unsafe { cudaStreamBeginCapture(rank.stream, 0) });
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaMalloc(&raw mut memory, 64) }, cudaErrorStreamCaptureUnsupported);
    let mut graph = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    let code = unsafe { cudaStreamEndCapture(rank.stream, &raw mut graph) };
    assert_eq!(code, cudaErrorStreamCaptureInvalidated);
}

/// A group in low-latency mode, with a handle and the tensors of a step.
struct LlBench<'a> {
    rank: &'a Rank,
    case: LlCase,
    group: ncclEpGroup_t,
    handle: TestHandle,
    buffers: LlBuffers,
}

impl<'a> LlBench<'a> {
    /// 4 tokens, each for the first `top_k` of 4 experts.
    fn new(rank: &'a Rank, top_k: usize, pick: fn(usize) -> i64) -> Self {
        let case = LlCase::new(1, 4, top_k, &[4], |_, _, k| pick(k));
        let group = rank.create_group(&case.config()).unwrap();
        let handle = ll_handle(rank, group, &case);
        let mut buffers = LlBuffers::new(rank, &case);
        buffers.set(rank, &case, 3);
        buffers.update(&handle, rank.stream);
        rank.sync();
        Self { rank, case, group, handle, buffers }
    }

    fn dispatch(&mut self, staged: bool) -> u32 {
        self.buffers.dispatch(&self.case, &self.handle, self.rank.stream, staged)
    }

    fn combine(&mut self, staged: bool) -> u32 {
        self.buffers.combine(&self.case, &self.handle, self.rank.stream, staged)
    }

    fn complete(&self) -> u32 {
        complete(&self.handle, self.rank.stream)
    }

    fn destroy(self) {
        self.rank.sync();
        self.handle.destroy();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(self.group) });
    }
}

fn staged_operation(rank: &Rank, _: Policy) {
    let mut bench = LlBench::new(rank, 1, |_| 0);
    let other = ll_handle(rank, bench.group, &bench.case);
    nccl_ok(bench.dispatch(true));
    assert_eq!(bench.dispatch(false), ncclInvalidUsage);
    assert_eq!(bench.combine(true), ncclInvalidUsage);
    assert_eq!(complete(&other, rank.stream), ncclInvalidUsage);
    let topk = bench.buffers.topk_desc.ptr();
    // SAFETY: all pointers are ours and valid.
    let code = unsafe { ncclEpUpdateHandle(other.handle, topk, ptr::null(), rank.stream) };
    assert_eq!(code, ncclInvalidUsage);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { ncclEpHandleDestroy(bench.handle.handle) }, ncclInvalidUsage);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { ncclEpGroupDestroy(bench.group) }, ncclInvalidUsage);
    nccl_ok(bench.complete());
    assert_eq!(bench.complete(), ncclInvalidUsage);
    assert_eq!(reports(Rule::StagedOperation), 7);
    other.destroy();
    bench.destroy();
}

fn staged_tensors(rank: &Rank, _: Policy) {
    let mut bench = LlBench::new(rank, 1, |_| 0);
    nccl_ok(bench.dispatch(true));
    let data = bench.buffers.received_desc.tensor.data;
    bench.buffers.received_desc.tensor.data = bench.buffers.expert_out.pointer.cast();
    assert_eq!(bench.complete(), ncclInvalidUsage);
    bench.buffers.received_desc.tensor.data = data;
    nccl_ok(bench.complete());
    bench.destroy();
}

fn staged_stream(rank: &Rank, policy: Policy) {
    let mut bench = LlBench::new(rank, 1, |_| 0);
    let other = new_stream();
    nccl_ok(bench.dispatch(true));
    judged(policy, complete(&bench.handle, other));
    if policy == Policy::Error {
        nccl_ok(bench.complete());
    }
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamDestroy(other) });
    bench.destroy();
}

fn dispatch_first(rank: &Rank, _: Policy) {
    let mut bench = LlBench::new(rank, 1, |_| 0);
    nccl_ok(bench.combine(false));
    assert_eq!(stream_code(rank.stream), cudaErrorIllegalAddress);
    std::mem::forget(bench);
}

fn slab_overflow(rank: &Rank, _: Policy) {
    let mut bench = LlBench::new(rank, 2, |_| 1);
    nccl_ok(bench.dispatch(false));
    assert_eq!(stream_code(rank.stream), cudaErrorIllegalAddress);
    std::mem::forget(bench);
}

fn buffer_growth(rank: &Rank, _: Policy) {
    let mut bench = LlBench::new(rank, 1, |_| 0);
    let init = |group| {
        let (mut handle, layout) = (ptr::null_mut(), NCCL_EP_LAYOUT_EXPERT_MAJOR);
        // SAFETY: the result pointer is ours.
        (unsafe { ncclEpInitHandle(&raw mut handle, group, layout, ptr::null(), 4, ptr::null()) }, handle)
    };
    nccl_ok(bench.dispatch(true));
    assert_eq!(init(bench.group).0, ncclInvalidUsage);
    nccl_ok(bench.complete());
    // A graph keeps the address of the buffer that it was captured with.
    let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the bench is kept until the process ends.
    ok(unsafe { cudaStreamBeginCapture(rank.stream, 1) });
    nccl_ok(bench.dispatch(false));
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaStreamEndCapture(rank.stream, &raw mut graph) });
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaGraphInstantiate(&raw mut exec, graph, 0) });
    launch(exec, rank.stream);
    rank.sync();
    nccl_ok(init(bench.group).0);
    launch(exec, rank.stream);
    assert_eq!(stream_code(rank.stream), cudaErrorIllegalAddress);
    std::mem::forget(bench);
}

macro_rules! provocations {
    ($($run:ident $rule:ident $ranks:literal $found:literal;)*) => {
        const PROVOCATIONS: &[Provocation] =
            &[$(Provocation { rule: Rule::$rule, ranks: $ranks, run: $run, found: $found },)*];

        mod rule {
            $(
                #[test]
                fn $run() {
                    super::provoke(super::Rule::$rule);
                }
            )*
        }
    };
}

provocations! {
    config_differs ConfigDiffers 2
        "ncclEpCreateGroup: num_topk differs between ranks: rank 1 has 2, the others have 1: rule";
    unique_id_again UniqueId 1 "ncclCommInitRank: commId made a communicator before, with rank 0 in this process: call ";
    rank_device RankDevice 1
        "ncclCommInitRank: communicator of 2 ranks: ranks 0 and 1 are both on device 0 of their process: call cudaSetDevice";
    inside_group InsideGroup 1
        "ncclEpUpdateHandle: called between ncclGroupStart and ncclGroupEnd: call it before or after the group: rule";
    call_order CallOrder 2
        "EP group of 2 ranks: ranks disagree at operation 2: rank 0 entered ncclEpDispatch(pass=BWD, hidden=32, datatype=";
    missing_rank MissingRank 2
        "EP group of 2 ranks: ncclEpUpdateHandle(num_topk=1), operation 1: rank 1 did not arrive within 2500 ms (NVTE_EP_HOST_TIMEOUT_MS): rule";
    replay_count ReplayCount 2
        "EP group of 2 ranks: ncclEpUpdateHandle(num_topk=1), operation 2 in replay 2 of its graph: rank 1 did not arrive";
    argument_value ArgumentValue 1 "ncclEpCreateGroup: overflow_policy 7 is unknown: rule";
    tensor_shape TensorShape 1
        "ncclEpUpdateHandle: topk_idx must have num_topk = 1 columns, got int64 [4, 2]: rule";
    row_limit RowLimit 1
        "ncclEpUpdateHandle: topk_idx has more than max_dispatch_tokens_per_rank = 8 rows, got int64 [9, 1]: rule";
    receive_overflow ReceiveOverflow 2
        "ncclEpUpdateHandle: receive buffer overflow on rank 0: 16 rows (16 distinct tokens) are needed, \
         max_recv_tokens_per_rank is 12: rule";
    expert_index ExpertIndex 1 "ncclEpUpdateHandle: topk_idx[2, 0] is 4, but there are 4 experts: rule";
    routing_changed RoutingChanged 1
        "ncclEpCombine: handle_mem holds the routing of operation 3, but the last dispatch over this handle_mem \
         used another one: keep a handle_mem for each micro-batch until its gradients are done: rule";
    combine_rows CombineRows 1
        "ncclEpCombine(pass=FWD, hidden=32, datatype=bfloat16, num_topk=1): inputs.tokens has 7 rows, but the routing uses \
         row 7: rule";
    handle_memory HandleMemory 1
        "ncclEpDispatch: handle_mem holds no routing (UpdateHandle never ran over this memory): rule";
    alignment Alignment 1
        "ncclEpDispatch: inputs.tokens must start at a multiple of 16 bytes, in memory and in its window, got bfloat16";
    memory_bounds MemoryBounds 1 "ncclEpUpdateHandle: topk_idx: 64 bytes at 0x";
    freed_memory FreedMemory 1 "ncclEpUpdateHandle: handle_mem: ";
    device_memory DeviceMemory 1 "ncclEpUpdateHandle: topk_idx: 64 bytes at 0x";
    other_device OtherDevice 1 "ncclEpUpdateHandle: topk_idx: 0x";
    unwritten_memory UnwrittenMemory 1
        "ncclEpDispatch: inputs.tokens: row 4 is read, but nobody has written it: rule";
    window_missing WindowMissing 1
        "ncclEpDispatch: outputs.tokens must lie in a window, as the group's zero_copy is ON, got bfloat16 [64, 32]: rule";
    window_bounds WindowBounds 1
        "ncclEpDispatch: outputs.tokens: 4096 bytes at offset 32 of a window of 4096 bytes: rule";
    window_lifetime WindowLifetime 1 "ncclMemFree: ptr 0x";
    stream_order StreamOrder 1 "ncclEpDispatch: stream 0x";
    one_thread OneThread 1 "ncclEpUpdateHandle: ep_group is in a call of another thread: rule";
    live_handles LiveHandles 1 "ncclEpGroupDestroy: ep_group has 1 handles that are not destroyed: rule";
    peers_busy PeersBusy 2 "ncclEpGroupDestroy: ep_group is still used by rank 1: rule";
    destroyed_object DestroyedObject 1 "ncclEpUpdateHandle: 0x";
    staged_operation StagedOperation 1
        "ncclEpDispatch: ncclEpDispatch with send_only is staged: call ncclEpComplete on its handle first: rule";
    staged_tensors StagedTensors 1 "ncclEpComplete: the descriptor of outputs.tokens was bfloat16 [4, 4, 512] at 0x";
    staged_stream StagedStream 1
        "ncclEpComplete: stream is another one than that of ncclEpDispatch, and the receive half runs on that one: rule";
    dispatch_first DispatchFirst 1
        "ncclEpCombine: handle_mem holds no rows of a dispatch (ncclEpDispatch never ran over this memory): rule";
    slab_overflow SlabOverflow 1
        "ncclEpDispatch: expert 1 gets 8 rows, and its slab has 4: a token names it more than once: rule";
    buffer_growth BufferGrowth 1
        "ncclEpInitHandle: the buffer has to grow while ncclEpDispatch is staged: rule";
    capture_unsafe CaptureUnsafe 1 "cudaMalloc: an allocation while a stream is captured: rule";
}

fn find(rule: Rule) -> &'static Provocation {
    PROVOCATIONS.iter().find(|provocation| provocation.rule == rule).unwrap()
}

fn spawn(id: &ncclUniqueId, rank: usize, ranks: usize, rule: &str, policy: &str) -> Child {
    let variables = [(RULE, rule), (POLICY_VARIABLE, policy), ("NVTE_EP_HOST_DEVICES", "2")];
    // Only those that wait for a rank in vain wait for that long.
    let in_vain = [Rule::MissingRank, Rule::ReplayCount].iter().any(|waits| waits.name() == rule);
    spawn_rank_with("provoked", &hex(id), rank, ranks, if in_vain { 2500 } else { 60_000 }, &variables)
}

fn passed(rank: usize, output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "rank {rank}: {}\n{out}\n{err}", output.status);
    err.into_owned()
}

/// Breaks a rule under each policy and looks for the report.
fn provoke(rule: Rule) {
    let provocation = find(rule);
    // Where the work cannot go on, the policy makes no difference.
    let policies: &[&str] = if rule.recoverable() { &["error", "warn", "off"] } else { &["error", "off"] };
    for policy in policies {
        let id = unique_id();
        let ranks = 0..provocation.ranks;
        let children: Vec<Child> = ranks.map(|rank| spawn(&id, rank, provocation.ranks, rule.name(), policy)).collect();
        // Rank 0 comes first: waiting for a rank also lets those go that stay away.
        let outputs: Vec<Output> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        let errors: Vec<String> = outputs.iter().enumerate().map(|(rank, output)| passed(rank, output)).collect();
        let start = format!("nvte_ep_host: rank 0, {}", provocation.found);
        let found = errors[0].lines().find(|line| line.starts_with(&start));
        if *policy == "off" && rule.recoverable() {
            let silent = !errors.iter().any(|error| error.contains(": rule "));
            assert!(silent, "{}: {policy}: {errors:?}", rule.name());
        } else {
            let line = found.unwrap_or_else(|| panic!("{}, {policy}: no {start:?} in {}", rule.name(), errors[0]));
            assert!(line.ends_with(&ending(rule)), "{line}");
        }
    }
}

#[test]
#[ignore = "run by the tests of the rules"]
fn provoked() {
    let name = std::env::var(RULE).unwrap();
    let rule = *Rule::ALL.iter().find(|rule| rule.name() == name).unwrap();
    let policy = match &*std::env::var(POLICY_VARIABLE).unwrap() {
        "off" => Policy::Off,
        "warn" => Policy::Warn,
        _ => Policy::Error,
    };
    let rank = join_as_process();
    (find(rule).run)(&rank, policy);
    if rank.rank == 0 {
        let counted = !rule.recoverable() || policy != Policy::Off;
        assert_eq!(reports(rule) > 0, counted, "{} reports", reports(rule));
        // SAFETY: null means all.
        let all = unsafe { nvte_ep_host_check_reports(ptr::null()) };
        assert_eq!(all, reports(rule), "only this rule is broken: {}", last_report());
        assert_eq!(last_report().ends_with(&ending(rule)), counted, "{}", last_report());
    }
}

#[test]
fn every_rule_is_provoked_once() {
    let provoked: Vec<Rule> = PROVOCATIONS.iter().map(|provocation| provocation.rule).collect();
    assert_eq!(provoked, Rule::ALL);
    // SAFETY: a string.
    assert_eq!(unsafe { nvte_ep_host_check_reports(c"no-such-rule".as_ptr()) }, u64::MAX);
}

#[test]
fn the_document_lists_the_rules() {
    let document = include_str!("../../docs/host_runtime.md");
    let listed: Vec<&str> = document
        .lines()
        .skip_while(|line| !line.starts_with("| rule |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .collect();
    let rules: Vec<String> = Rule::ALL
        .iter()
        .map(|rule| format!("| `{}` | {} | {} | {} |", rule.name(), rule.sentence(), rule.on_gpu(), rule.severity()))
        .collect();
    assert_eq!(listed, rules, "write this table:\n{}", rules.join("\n"));
}

#[test]
fn an_unknown_policy_is_refused() {
    let id = unique_id();
    let output = spawn(&id, 0, 1, "argument-value", "loud").wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(error.contains("nvte_ep_host: NVTE_EP_HOST_CHECK must be off, warn or error, got \"loud\""), "{error}");
}

#[test]
fn many_breaches_are_counted_and_a_few_printed() {
    let id = hex(&unique_id());
    let output = spawn_rank_with("many_breaches", &id, 0, 1, 60_000, &[(POLICY_VARIABLE, "warn")]);
    let error = passed(0, &output.wait_with_output().unwrap());
    assert_eq!(error.matches(": rule device-memory: ").count(), 16, "{error}");
    assert_eq!(error.matches("further breaches of rule device-memory are counted, not printed").count(), 1, "{error}");
}

#[test]
#[ignore = "run by many_breaches_are_counted_and_a_few_printed"]
fn many_breaches() {
    let rank = join_as_process();
    let bench = Bench::new(&rank);
    let mut pageable = [0i64; TOKENS];
    for _ in 0..40 {
        nccl_ok(bench.update_of(Desc::new(pageable.as_mut_ptr().cast(), ncclInt64, &[TOKENS, 1]), rank.stream));
    }
    rank.sync();
    assert_eq!(reports(Rule::DeviceMemory), 40);
}

#[test]
fn pageable_memory_may_be_said_to_be_reached() {
    let id = hex(&unique_id());
    passed(0, &spawn_rank_with("pageable", &id, 0, 1, 60_000, &[]).wait_with_output().unwrap());
}

#[test]
#[ignore = "run by pageable_memory_may_be_said_to_be_reached"]
fn pageable() {
    let rank = join_as_process();
    let bench = Bench::new(&rank);
    let mut routing = [0i64; TOKENS];
    let mut update = || bench.update_of(Desc::new(routing.as_mut_ptr().cast(), ncclInt64, &[TOKENS, 1]), rank.stream);
    let known = |address| {
        let (mut kind, mut attribute, mut bytes, mut range) =
            (0u32, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 0usize, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
        let (mut to_kind, mut to_bytes) = ((&raw mut kind).cast(), (&raw mut bytes).cast());
        // SAFETY: each attribute has a place of its type.
        ok(unsafe { cuPointerGetAttributes(1, &raw mut attribute, &raw mut to_kind, address) });
        // SAFETY: as above.
        ok(unsafe { cuPointerGetAttributes(1, &raw mut range, &raw mut to_bytes, address) });
        (kind, bytes > 0)
    };
    let reaches = || {
        let mut value = 0;
        // SAFETY: the result is ours.
        ok(unsafe { cuDeviceGetAttribute(&raw mut value, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 0) });
        value
    };
    let address = (&raw const rank as usize) as u64;
    assert_eq!((known(address), reaches()), ((0, false), 0));
    assert_eq!(update(), ncclInvalidUsage);
    // SAFETY: no preconditions.
    unsafe { nvte_ep_host_set_pageable_memory(1) };
    assert_eq!((known(address), reaches()), ((cudaMemoryTypeDevice, true), 1));
    nccl_ok(update());
    // SAFETY: no preconditions.
    unsafe { nvte_ep_host_set_pageable_memory(0) };
    assert_eq!((known(address), reaches()), ((0, false), 0));
    assert_eq!(update(), ncclInvalidUsage);
    rank.sync();
    assert_eq!(reports(Rule::DeviceMemory), 2);
}

#[test]
fn a_rank_that_destroyed_its_group_is_named_at_once() {
    let id = unique_id();
    let ranks: Vec<Child> = (0..2).map(|rank| spawn_rank("early_end", &id, rank, 2, 60_000)).collect();
    let start = std::time::Instant::now();
    let outputs: Vec<Output> = ranks.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(start.elapsed() < std::time::Duration::from_secs(30), "{:?}", start.elapsed());
    let errors: Vec<String> = outputs.iter().enumerate().map(|(rank, output)| passed(rank, output)).collect();
    let words = "rank 0, EP group of 2 ranks: ncclEpUpdateHandle(num_topk=1), operation 2: \
                 rank 1 destroyed its end after operation 1: rule missing-rank";
    assert!(errors[0].contains(words), "{}", errors[0]);
}

#[test]
#[ignore = "run by a_rank_that_destroyed_its_group_is_named_at_once"]
fn early_end() {
    let rank = join_as_process();
    let bench = Bench::new(&rank);
    nccl_ok(bench.update());
    rank.sync();
    if rank.rank == 1 {
        let Bench { handle, group, .. } = bench;
        handle.destroy();
        rank.sync();
        // Rank 0 may not be done with the first operation yet.
        // SAFETY: no preconditions.
        while unsafe { ncclEpGroupDestroy(group) } != ncclSuccess {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        stay_away();
    }
    nccl_ok(bench.update());
    assert_eq!(stream_code(rank.stream), cudaErrorLaunchFailure);
    bench.forget();
}

#[test]
fn replays_that_differ_in_number_meet_other_calls() {
    let id = unique_id();
    let ranks: Vec<Child> = (0..2).map(|rank| spawn_rank("uneven_replays", &id, rank, 2, 60_000)).collect();
    let outputs: Vec<Output> = ranks.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    for (rank, output) in outputs.iter().enumerate() {
        let error = passed(rank, output);
        let words = "entered ncclEpUpdateHandle(num_topk=1) in replay 2 of its graph, ";
        let words = if rank == 0 { words } else { "in replay 2 of its graph: rule replay-count: " };
        assert!(error.contains(words), "{error}");
    }
}

#[test]
#[ignore = "run by replays_that_differ_in_number_meet_other_calls"]
fn uneven_replays() {
    let rank = join_as_process();
    let bench = Bench::new(&rank);
    let exec = captured_update(&bench);
    launch(exec, rank.stream);
    if rank.rank == 0 {
        launch(exec, rank.stream);
    } else {
        nccl_ok(bench.dispatch());
    }
    assert_eq!(stream_code(rank.stream), cudaErrorLaunchFailure);
    assert_eq!((reports(Rule::ReplayCount), reports(Rule::CallOrder)), (1, 0));
    bench.forget();
}

/// Both ranks prepare two handles; rank 1 uses them in the other order. All counts agree, so only the routings tell.
#[test]
fn ranks_that_use_different_prepares_are_told() {
    for call in ["dispatch", "combine"] {
        let id = hex(&unique_id());
        let ranks: Vec<Child> =
            (0..2).map(|rank| spawn_rank_with("crossed_prepares", &id, rank, 2, 60_000, &[(RULE, call)])).collect();
        let outputs: Vec<Output> = ranks.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        let errors: Vec<String> = outputs.iter().enumerate().map(|(rank, output)| passed(rank, output)).collect();
        let words = "num_topk=1) with the routing of operation 1, rank 1 entered ncclEp";
        assert!(errors[0].contains(words), "{call}: {}", errors[0]);
        assert!(errors[0].contains("num_topk=1) with the routing of operation 2: rule call-order: "), "{}", errors[0]);
    }
}

#[test]
#[ignore = "run by ranks_that_use_different_prepares_are_told"]
fn crossed_prepares() {
    let rank = join_as_process();
    let first = Bench::new(&rank);
    let mut second = TestHandle::new(&rank, first.group, 1, 1);
    nccl_ok(first.update());
    let mut topk = Desc::of(&first.topk, ncclInt64, &[TOKENS, 1]);
    // SAFETY: the descriptor is ours and valid.
    nccl_ok(unsafe { ncclEpUpdateHandle(second.handle, topk.ptr(), ptr::null(), rank.stream) });
    let mut first = first;
    if rank.rank == 1 {
        std::mem::swap(&mut first.handle, &mut second);
    }
    nccl_ok(if std::env::var(RULE).unwrap() == "dispatch" { first.dispatch() } else { first.combine() });
    assert_eq!(stream_code(rank.stream), cudaErrorLaunchFailure);
    assert_eq!(reports(Rule::CallOrder), 1);
    std::mem::forget(second);
    first.forget();
}

/// What keeps a routing, or comes back to one that was dispatched, is no breach.
#[test]
fn routings_that_come_back_are_no_breach() {
    run_ranks(2, |rank| {
        let bench = Bench::new(rank);
        let prepare = |first: i64| {
            let topk: Vec<i64> = (0..TOKENS as i64).map(|token| (first + token) % 4).collect();
            bench.topk.set(&topk);
            nccl_ok(bench.update());
        };
        // A combine over rows that no dispatch brought, a step, and one whose activations are computed again.
        prepare(0);
        nccl_ok(bench.combine());
        for _ in 0..2 {
            prepare(0);
            nccl_ok(bench.dispatch());
        }
        prepare(0);
        nccl_ok(bench.combine());
        // Micro-batches that prepare again for their gradients, in the order of 1F1B.
        for micro in [1, 2, 3] {
            prepare(micro);
            forward(&bench);
            nccl_ok(bench.combine());
        }
        for micro in [1, 2, 3] {
            prepare(micro);
            nccl_ok(bench.dispatch());
        }
        rank.sync();
        let Bench { handle, group, .. } = bench;
        handle.destroy();
        rank.destroy_group(group);
    });
    assert_eq!((reports(Rule::RoutingChanged), reports(Rule::CallOrder)), (0, 0));
}

/// Between the two gradients, too, but one of them may be used alone: a warning.
#[test]
fn a_routing_that_changes_between_gradients_is_a_warning() {
    let id = hex(&unique_id());
    let child = spawn_rank_with("changed_between_gradients", &id, 0, 1, 60_000, &[(POLICY_VARIABLE, "")]);
    let error = passed(0, &child.wait_with_output().unwrap());
    let words = "rank 0, ncclEpCombine: handle_mem holds the routing of operation 3, but the last dispatch over this \
                 handle_mem used another one";
    assert!(error.contains(words), "{error}");
}

/// A handle that was prepared for other tokens before its gradients: both of them are wrong.
#[test]
fn gradients_by_another_routing_than_their_forward_pass_are_a_warning() {
    let id = hex(&unique_id());
    let child = spawn_rank_with("changed_before_gradients", &id, 0, 1, 60_000, &[(POLICY_VARIABLE, "")]);
    let error = passed(0, &child.wait_with_output().unwrap());
    let words = "rank 0, ncclEpDispatch: handle_mem holds the routing of operation 4, which no forward pass over this \
                 handle_mem used, and one that used another routing lacks its gradients";
    assert!(error.contains(words), "{error}");
}

#[test]
#[ignore = "run by gradients_by_another_routing_than_their_forward_pass_are_a_warning"]
fn changed_before_gradients() {
    let rank = join_as_process();
    let bench = Bench::new(&rank);
    nccl_ok(bench.update());
    forward(&bench);
    nccl_ok(bench.combine());
    bench.topk.set(&[3, 2, 1, 0, 3, 2, 1, 0]);
    nccl_ok(bench.update());
    // The gradient of combine.
    nccl_ok(bench.dispatch());
    rank.sync();
    assert_eq!(reports(Rule::RoutingChanged), 1);
    bench.forget();
}

#[test]
#[ignore = "run by a_routing_that_changes_between_gradients_is_a_warning"]
fn changed_between_gradients() {
    let rank = join_as_process();
    let bench = Bench::new(&rank);
    nccl_ok(bench.update());
    nccl_ok(bench.dispatch());
    bench.topk.set(&[3, 2, 1, 0, 3, 2, 1, 0]);
    nccl_ok(bench.update());
    let stream = rank.stream;
    let (by_row, by_token) = (Buffer::of(&[1f32; ROWS], stream), Buffer::of(&[0f32; TOKENS], stream));
    let (mut rows, mut result) = (bench.received(), Desc::of(&bench.result, ncclBfloat16, &[TOKENS, HIDDEN]));
    let mut by_row = Desc::of(&by_row, ncclFloat32, &[ROWS]);
    let mut by_token = Desc::of(&by_token, ncclFloat32, &[TOKENS, 1]);
    let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr(), topk_weights: by_row.ptr() });
    let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: result.ptr(), topk_weights: by_token.ptr() });
    let config = ep_struct!(ncclEpCombineConfig_t { pass_direction: NCCL_EP_BWD_PASS });
    let (i, o, c) = (&raw const inputs, &raw const outputs, &raw const config);
    // SAFETY: the structures are ours and valid.
    nccl_ok(unsafe { ncclEpCombine(bench.handle.handle, i, o, c, stream) });
    rank.sync();
    assert_eq!(reports(Rule::RoutingChanged), 1);
    bench.forget();
}

/// A dispatch forward.
fn forward(bench: &Bench) {
    let stream = bench.rank.stream;
    let (own, there) = (Buffer::of(&[1f32; TOKENS], stream), Buffer::<f32>::new(ROWS, stream));
    let (mut sent, mut received) = (bench.sent(), bench.received());
    let mut own = Desc::of(&own, ncclFloat32, &[TOKENS, 1]);
    let mut there = Desc::of(&there, ncclFloat32, &[ROWS]);
    let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: sent.ptr(), topk_weights: own.ptr() });
    let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: received.ptr(), topk_weights: there.ptr() });
    let (i, o) = (&raw const inputs, &raw const outputs);
    // SAFETY: the structures are ours and valid.
    nccl_ok(unsafe { ncclEpDispatch(bench.handle.handle, i, o, ptr::null(), ptr::null(), stream) });
}

#[test]
fn a_window_that_is_deregistered_too_early_is_reported() {
    for policy in ["error", "warn", "off"] {
        let id = hex(&unique_id());
        let child = spawn_rank_with("early_deregistration", &id, 0, 1, 60_000, &[(POLICY_VARIABLE, policy)]);
        let error = passed(0, &child.wait_with_output().unwrap());
        let words = " was deregistered before this ran: rule window-lifetime: ";
        assert_eq!(error.contains(words), policy != "off", "{policy}: {error}");
    }
}

#[test]
#[ignore = "run by a_window_that_is_deregistered_too_early_is_reported"]
fn early_deregistration() {
    unsafe extern "C" fn nap(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    let rank = join_as_process();
    let bench = Bench::with(&rank, |config| config.zero_copy = NCCL_EP_ZERO_COPY_ON);
    let memory = WindowMemory::new(&rank, ROWS * HIDDEN * 2);
    nccl_ok(bench.update());
    // SAFETY: the function ignores its argument.
    ok(unsafe { cudaLaunchHostFunc(rank.stream, Some(nap), ptr::null_mut()) });
    let rows = memory.desc(0, ncclBfloat16, &[ROWS, HIDDEN], false);
    nccl_ok(bench.dispatch_of(bench.sent(), rows, rank.stream));
    // SAFETY: no preconditions; the dispatch is still queued.
    nccl_ok(unsafe { ncclCommWindowDeregister(rank.comm, memory.window) });
    let failed = std::env::var(POLICY_VARIABLE).unwrap() == "error";
    assert_eq!(stream_code(rank.stream), if failed { cudaErrorAssert } else { 0 });
    bench.forget();
}

/// What orders two streams for a program.
#[test]
fn ordered_streams_are_no_breach() {
    unsafe extern "C" fn tell(data: *mut c_void) {
        // SAFETY: the flag outlives the stream's work.
        unsafe { &*data.cast::<AtomicBool>() }.store(true, Ordering::SeqCst);
    }
    run_ranks(1, |rank| {
        let bench = Bench::new(rank);
        let other = new_stream();
        let mut event = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaEventCreate(&raw mut event) });
        let record = |stream: cudaStream_t| {
            // SAFETY: no preconditions.
            ok(unsafe { cudaEventRecord(event, stream) });
        };
        let on =
            |stream: cudaStream_t| nccl_ok(bench.update_of(Desc::of(&bench.topk, ncclInt64, &[TOKENS, 1]), stream));

        on(rank.stream);
        // An event that the other stream waits for, also by way of a third stream.
        let third = new_stream();
        for (from, to) in [(rank.stream, third), (third, other)] {
            record(from);
            // SAFETY: no preconditions.
            ok(unsafe { cudaStreamWaitEvent(to, event, 0) });
        }
        on(other);
        // A wait of the host for the stream, for an event in it, for the device, for a copy.
        ok(stream_code(other));
        on(rank.stream);
        record(rank.stream);
        // SAFETY: no preconditions.
        ok(unsafe { cudaEventSynchronize(event) });
        on(other);
        // SAFETY: no preconditions.
        ok(unsafe { cudaDeviceSynchronize() });
        on(rank.stream);
        assert_eq!(bench.received_total(), 8);
        on(other);
        // A question that is answered with yes.
        // SAFETY: no preconditions.
        while unsafe { cudaStreamQuery(other) } != 0 {
            std::thread::yield_now();
        }
        on(rank.stream);
        // A host function that tells the program.
        let flag = AtomicBool::new(false);
        // SAFETY: the flag outlives the stream's work.
        ok(unsafe { cudaLaunchHostFunc(rank.stream, Some(tell), (&raw const flag).cast_mut().cast()) });
        while !flag.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        on(other);
        // The NULL stream and blocking streams, either way.
        ok(stream_code(other));
        let mut blocking = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaStreamCreate(&raw mut blocking) });
        on(blocking);
        on(ptr::null_mut());
        on(blocking);
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamDestroy(blocking) });
        // SAFETY: no preconditions.
        ok(unsafe { cudaDeviceSynchronize() });
        on(other);
        ok(stream_code(other));
        for stream in [other, third] {
            // SAFETY: no preconditions.
            ok(unsafe { cudaStreamDestroy(stream) });
        }
        let Bench { handle, group, .. } = bench;
        handle.destroy();
        rank.destroy_group(group);
    });
    assert_eq!(reports(Rule::StreamOrder), 0);
}

/// Padding, and tokens that go nowhere, need not be written.
#[test]
fn unwritten_rows_that_nobody_reads_are_no_breach() {
    run_ranks(1, |rank| {
        let mut bench = Bench::new(rank);
        let aligned = TestHandle::new(rank, bench.group, 1, 16);
        std::mem::replace(&mut bench.handle, aligned).destroy();
        bench.topk.set(&[0, -1, -1, 1, -1, -1, -1, -1]);
        nccl_ok(bench.update());
        let fresh = Buffer::<u16>::new(TOKENS * HIDDEN, rank.stream);
        let outputs = Buffer::<u16>::new(ROWS * HIDDEN, rank.stream);
        let write = |buffer: &Buffer<u16>, row: usize| {
            let row = buffer.pointer.wrapping_add(row * HIDDEN).cast();
            // SAFETY: the row lies in the buffer.
            ok(unsafe { cudaMemsetAsync(row, 0, HIDDEN * 2, rank.stream) });
        };
        write(&fresh, 0);
        write(&fresh, 3);
        nccl_ok(bench.dispatch_of(Desc::of(&fresh, ncclBfloat16, &[TOKENS, HIDDEN]), bench.received(), rank.stream));
        // Zones of 16 rows with one token each.
        write(&outputs, 0);
        write(&outputs, 16);
        nccl_ok(bench.combine_of(Desc::of(&outputs, ncclBfloat16, &[ROWS, HIDDEN]), rank.stream));
        rank.sync();
        assert_eq!(bench.result.get(), [0; TOKENS * HIDDEN]);
        let Bench { handle, group, .. } = bench;
        handle.destroy();
        rank.destroy_group(group);
    });
    assert_eq!(reports(Rule::UnwrittenMemory), 0);
}

/// Rows that hold one byte over and over, whichever it is, are written.
#[test]
fn rows_of_any_byte_are_written() {
    run_ranks(1, |rank| {
        let bench = Bench::new(rank);
        nccl_ok(bench.update());
        for byte in 0..=255 {
            let fresh = Buffer::<u16>::new(TOKENS * HIDDEN, rank.stream);
            // SAFETY: the buffer has that many bytes.
            ok(unsafe { cudaMemsetAsync(fresh.pointer.cast(), byte, TOKENS * HIDDEN * 2, rank.stream) });
            nccl_ok(bench.dispatch_of(
                Desc::of(&fresh, ncclBfloat16, &[TOKENS, HIDDEN]),
                bench.received(),
                rank.stream,
            ));
            rank.sync();
        }
        let Bench { handle, group, .. } = bench;
        handle.destroy();
        rank.destroy_group(group);
    });
    assert_eq!(reports(Rule::UnwrittenMemory), 0);
}

/// What tests of receive sizes do: in eager mode a dispatch of rows that nobody wrote, with the default policy, and the
/// group's end after a wait of this rank alone.
#[test]
fn unwritten_rows_of_eager_mode_are_a_warning() {
    let id = hex(&unique_id());
    let ranks: Vec<Child> =
        (0..2).map(|rank| spawn_rank_with("eager_rows", &id, rank, 2, 60_000, &[(POLICY_VARIABLE, "")])).collect();
    let outputs: Vec<Output> = ranks.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    for (rank, output) in outputs.iter().enumerate() {
        let error = passed(rank, output);
        let words =
            format!("rank {rank}, ncclEpDispatch: inputs.tokens: row 0 is read, but nobody has written it: rule");
        assert!(error.contains(&words), "{error}");
    }
}

#[test]
#[ignore = "run by unwritten_rows_of_eager_mode_are_a_warning"]
fn eager_rows() {
    let rank = join_as_process();
    let bench = Bench::with(&rank, |config| {
        config.max_recv_tokens_per_rank = 0;
        config.num_topk = 1;
    });
    nccl_ok(bench.update());
    let fresh = Buffer::<u16>::new(TOKENS * HIDDEN, rank.stream);
    nccl_ok(bench.dispatch_of(Desc::of(&fresh, ncclBfloat16, &[TOKENS, HIDDEN]), bench.received(), rank.stream));
    rank.sync();
    assert_eq!(reports(Rule::UnwrittenMemory), 1);
    let Bench { handle, group, .. } = bench;
    handle.destroy();
    rank.sync();
    // SAFETY: no preconditions.
    nccl_ok(unsafe { ncclEpGroupDestroy(group) });
}
