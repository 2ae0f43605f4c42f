//! Stream capture and graphs: what is recorded, what a replay does, and what is refused meanwhile.

mod common;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use common::reference::*;
use common::*;
use nvte_ep_bindings::*;
use nvte_ep_host::surface::cuda_driver_stream as driver;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

fn new_stream(flags: u32) -> cudaStream_t {
    let mut stream = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaStreamCreateWithFlags(&raw mut stream, flags) });
    stream
}

fn new_event() -> cudaEvent_t {
    let mut event = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaEventCreate(&raw mut event) });
    event
}

fn use_own_device() {
    // SAFETY: no preconditions.
    ok(unsafe { cudaSetDevice(take_devices(1)) });
}

fn begin(stream: cudaStream_t, mode: u32) {
    // SAFETY: tests keep what they capture until they have destroyed the graph.
    ok(unsafe { cudaStreamBeginCapture(stream, mode) });
}

fn end(stream: cudaStream_t) -> (u32, cudaGraph_t) {
    let mut graph = ptr::dangling_mut();
    // SAFETY: the result pointer is ours.
    let code = unsafe { cudaStreamEndCapture(stream, &raw mut graph) };
    assert_eq!(code == 0, !graph.is_null(), "code {code}");
    (code, graph)
}

fn instantiate(graph: cudaGraph_t) -> cudaGraphExec_t {
    let mut exec = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaGraphInstantiate(&raw mut exec, graph, 0) });
    exec
}

/// Ends the capture and makes the graph launchable; the graph itself is not needed any more.
fn finish(stream: cudaStream_t) -> cudaGraphExec_t {
    let (code, graph) = end(stream);
    ok(code);
    let exec = instantiate(graph);
    // SAFETY: no preconditions.
    ok(unsafe { cudaGraphDestroy(graph) });
    exec
}

fn launch(exec: cudaGraphExec_t, stream: cudaStream_t) {
    // SAFETY: the tests keep the memory of their graphs.
    ok(unsafe { cudaGraphLaunch(exec, stream) });
}

fn destroy(exec: cudaGraphExec_t) {
    // SAFETY: no preconditions.
    ok(unsafe { cudaGraphExecDestroy(exec) });
}

fn sync(stream: cudaStream_t) {
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamSynchronize(stream) });
}

fn status(stream: cudaStream_t) -> u32 {
    let mut status = 9;
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaStreamIsCapturing(stream, &raw mut status) });
    status
}

/// Copies from device to device.
fn copy<T: Copy>(to: &Buffer<T>, from: &Buffer<T>, stream: cudaStream_t) {
    let bytes = to.len * size_of::<T>();
    // SAFETY: both buffers have that many bytes.
    ok(unsafe { cudaMemcpyAsync(to.pointer.cast(), from.pointer.cast(), bytes, cudaMemcpyDeviceToDevice, stream) });
}

/// Modes of the ranks where these are threads of one process: a global capture would forbid what the others do.
const MODES: [u32; 2] = [THREAD_LOCAL, RELAXED];

/// Buffers of a step with fixed addresses, as a captured one needs.
struct Step<'a> {
    session: Session<'a>,
    handle: TestHandle,
    topk: Buffer<i64>,
    counters: Buffer<i64>,
    input: Buffer<u8>,
    own: Buffer<f32>,
    rows: Buffer<u8>,
    there: Buffer<f32>,
    result: Buffer<u8>,
}

impl<'a> Step<'a> {
    fn new(session: Session<'a>) -> Self {
        let (case, stream) = (session.case, session.rank.stream);
        let tokens = case.tokens(session.rank.rank);
        Self {
            handle: TestHandle::new(session.rank, session.group, case.top_k, case.alignment),
            topk: Buffer::new(tokens * case.top_k, stream),
            counters: Buffer::new(case.local(), stream),
            input: Buffer::new(tokens * case.row_bytes(), stream),
            own: Buffer::new(tokens * case.top_k, stream),
            rows: Buffer::new(case.capacity * case.row_bytes(), stream),
            there: Buffer::new(case.capacity, stream),
            result: Buffer::new(tokens * case.row_bytes(), stream),
            session,
        }
    }

    /// Prepare, dispatch, and combine of the received rows as they are.
    fn enqueue(&self, stream: cudaStream_t) {
        let case = self.session.case;
        let tokens = case.tokens(self.session.rank.rank);
        let handle = self.handle.handle;
        let mut topk = Desc::of(&self.topk, ncclInt64, &[tokens, case.top_k]);
        let mut counters = Desc::of(&self.counters, ncclInt64, &[case.local()]);
        let info = ep_struct!(ncclEpLayoutInfo_t { expert_counters: counters.ptr() });
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpUpdateHandle(handle, topk.ptr(), &raw const info, stream) });
        let mut input = Desc::of(&self.input, case.datatype, &[tokens, case.hidden]);
        let mut own = Desc::of(&self.own, ncclFloat32, &[tokens, case.top_k]);
        let mut rows = Desc::of(&self.rows, case.datatype, &[case.capacity, case.hidden]);
        let mut there = Desc::of(&self.there, ncclFloat32, &[case.capacity]);
        let mut result = Desc::of(&self.result, case.datatype, &[tokens, case.hidden]);
        let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: input.ptr(), topk_weights: own.ptr() });
        let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: rows.ptr(), topk_weights: there.ptr() });
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe {
            ncclEpDispatch(handle, &raw const inputs, &raw const outputs, ptr::null(), ptr::null(), stream)
        });
        let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: rows.ptr() });
        let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: result.ptr() });
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpCombine(handle, &raw const inputs, &raw const outputs, ptr::null(), stream) });
    }

    /// Writes the inputs of a round: other routing, tokens and weights each time, with stale outputs.
    fn load(&self, round: &Case, seed: u64) {
        let rank = self.session.rank;
        self.topk.set(&round.topk[rank.rank]);
        self.input.set(&round.rows(seed + rank.rank as u64, round.tokens(rank.rank)));
        let weights: Vec<f32> = (0..self.own.len).map(|i| weight(rank.rank, i) + seed as f32).collect();
        self.own.set(&weights);
        self.rows.set(&vec![0xA5; self.rows.len]);
        self.there.set(&vec![-7.0; self.there.len]);
        self.result.set(&vec![0xEE; self.result.len]);
        self.counters.set(&vec![-1; self.counters.len]);
        rank.sync();
    }

    fn verify(&self, round: &Case, seed: u64) {
        let rank = self.session.rank.rank;
        let received = |r: usize| {
            let mut rows = vec![0xA5; round.capacity * round.row_bytes()];
            let map = expected(round, r);
            for (slot, origin) in map.rows.iter().enumerate() {
                let row = &mut rows[slot * round.row_bytes()..][..round.row_bytes()];
                row.fill(0);
                if let Some(origin) = origin {
                    let sent = round.rows(seed + origin.rank as u64, round.tokens(origin.rank));
                    row.copy_from_slice(&sent[origin.token * round.row_bytes()..][..round.row_bytes()]);
                }
            }
            rows
        };
        let map = expected(round, rank);
        assert_eq!(self.counters.get(), map.padded);
        assert_eq!(self.rows.get(), received(rank), "received rows of rank {rank}, seed {seed}");
        let mut weights = vec![-7f32; round.capacity];
        for (slot, origin) in map.rows.iter().enumerate() {
            weights[slot] = origin.map_or(0.0, |origin| {
                let positions = origin.token * round.top_k..(origin.token + 1) * round.top_k;
                let last = positions.rev().find(|p| round.topk[origin.rank][*p] == origin.expert as i64).unwrap();
                weight(origin.rank, last) + seed as f32
            });
        }
        assert_eq!(self.there.get(), weights, "received weights of rank {rank}, seed {seed}");
        let all: Vec<Vec<u8>> = (0..round.ranks).map(received).collect();
        assert_eq!(self.result.get(), combined(round, rank, &all), "combined rows of rank {rank}, seed {seed}");
    }
}

/// The routing of a round; the numbers of tokens stay.
fn round(case: &Case, number: usize) -> Case {
    let experts = case.experts;
    let tokens: Vec<usize> = (0..case.ranks).map(|rank| case.tokens(rank)).collect();
    let mut round = Case::new(case.ranks, experts, case.top_k, &tokens, |rank, token, k| {
        (rank * number + token * (number + 1) + k * 3 + number) as i64 % (experts as i64 + 1) - 1
    });
    round.alignment = case.alignment;
    round.datatype = case.datatype;
    round.capacity = case.capacity;
    round
}

fn step_case() -> Case {
    let mut case = Case::new(2, 8, 3, &[6, 4], spread(8));
    case.alignment = 4;
    case
}

#[test]
fn a_captured_step_is_replayed_with_changed_inputs() {
    let case = step_case();
    with_group(&case, |session| {
        let rank = session.rank;
        let step = Step::new(Session { case: &case, ..*session });
        begin(rank.stream, MODES[rank.rank]);
        step.enqueue(rank.stream);
        assert_eq!(status(rank.stream), cudaStreamCaptureStatusActive);
        let exec = finish(rank.stream);
        assert_eq!(status(rank.stream), cudaStreamCaptureStatusNone);
        for number in 0..10 {
            let round = round(&case, number);
            step.load(&round, 100 * number as u64);
            launch(exec, rank.stream);
            sync(rank.stream);
            step.verify(&round, 100 * number as u64);
        }
        // The same step outside the graph, between two launches of it.
        let other = round(&case, 17);
        step.load(&other, 5);
        step.enqueue(rank.stream);
        step.verify(&other, 5);
        launch(exec, rank.stream);
        launch(exec, rank.stream);
        step.verify(&other, 5);
        destroy(exec);
        step.handle.destroy();
    });
}

#[test]
fn a_hundred_cycles_of_capture_and_replay() {
    let case = Case::new(2, 4, 2, &[3, 2], spread(4));
    with_group(&case, |session| {
        let rank = session.rank;
        let step = Step::new(Session { case: &case, ..*session });
        for cycle in 0..100 {
            let round = round(&case, cycle);
            step.load(&round, cycle as u64);
            begin(rank.stream, THREAD_LOCAL);
            step.enqueue(rank.stream);
            let exec = finish(rank.stream);
            for _ in 0..10 {
                launch(exec, rank.stream);
            }
            // The launches are still going on.
            destroy(exec);
            step.verify(&round, cycle as u64);
        }
        step.handle.destroy();
    });
}

#[test]
fn warmed_up_captured_and_replayed_on_three_streams() {
    let case = step_case();
    with_group(&case, |session| {
        let rank = session.rank;
        let (second, third) = (new_stream(cudaStreamNonBlocking), new_stream(0));
        let step = Step::new(Session { case: &case, ..*session });
        step.load(&case, 1);
        step.enqueue(rank.stream);
        step.verify(&case, 1);
        begin(second, THREAD_LOCAL);
        step.enqueue(second);
        let exec = finish(second);
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamDestroy(second) });
        for number in 0..3 {
            let round = round(&case, number);
            step.load(&round, 7 + number as u64);
            launch(exec, third);
            sync(third);
            step.verify(&round, 7 + number as u64);
        }
        destroy(exec);
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamDestroy(third) });
        step.handle.destroy();
    });
}

#[test]
fn ranks_as_processes_replay_graphs() {
    run_processes("process_graph", 3, 60_000, &[]);
}

#[test]
#[ignore = "run by ranks_as_processes_replay_graphs"]
fn process_graph() {
    let mut case = Case::new(3, 12, 2, &[5, 0, 9], spread(12));
    case.alignment = 8;
    let rank = join_as_process();
    let config = group_config(case.experts, case.max_tokens, case.capacity, case.row_bytes());
    let group = rank.create_group(&config).unwrap();
    let step = Step::new(Session { case: &case, rank: &rank, group });
    // Alone in its process a rank may capture in the strictest mode.
    begin(rank.stream, GLOBAL);
    step.enqueue(rank.stream);
    let exec = finish(rank.stream);
    for number in 0..10 {
        let round = round(&case, number);
        step.load(&round, number as u64);
        launch(exec, rank.stream);
        step.verify(&round, number as u64);
    }
    destroy(exec);
    step.handle.destroy();
    rank.destroy_group(group);
}

#[test]
fn collectives_in_graphs_meet_those_outside() {
    run_ranks(3, |rank| {
        let own = rank.rank as i32 + 1;
        let value = Buffer::of(&[0i32; 4], rank.stream);
        let gathered = Buffer::of(&[0i32; 12], rank.stream);
        let all_reduce = || {
            let data = value.pointer.cast();
            // SAFETY: the buffer has 4 elements.
            nccl_ok(unsafe { ncclAllReduce(data, data.cast(), 4, ncclInt32, ncclSum, rank.comm, rank.stream) });
        };
        rank.sync();
        begin(rank.stream, THREAD_LOCAL);
        all_reduce();
        // SAFETY: the buffers have 4 and 12 elements.
        nccl_ok(unsafe {
            ncclAllGather(value.pointer.cast(), gathered.pointer.cast(), 4, ncclInt32, rank.comm, rank.stream)
        });
        // SAFETY: the buffer has 4 elements.
        nccl_ok(unsafe {
            ncclBroadcast(gathered.pointer.cast(), value.pointer.cast(), 4, ncclInt32, 1, rank.comm, rank.stream)
        });
        let exec = finish(rank.stream);
        assert_eq!(value.get(), [0; 4], "nothing ran during the capture");
        for round in 0..5 {
            value.set(&[own + round; 4]);
            launch(exec, rank.stream);
            assert_eq!(value.get(), [6 + 3 * round; 4]);
            assert_eq!(gathered.get(), [6 + 3 * round; 12]);
            all_reduce();
            launch(exec, rank.stream);
            assert_eq!(value.get(), [9 * (6 + 3 * round); 4]);
        }
        destroy(exec);
    });
}

#[test]
fn copies_fills_and_host_functions_are_recorded() {
    unsafe extern "C" fn count(data: *mut c_void) {
        // SAFETY: the counter is static.
        unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
    }
    static COUNT: AtomicU32 = AtomicU32::new(0);
    use_own_device();
    let stream = new_stream(0);
    let (buffer, copied) = (Buffer::of(&[9u8; 8], stream), Buffer::of(&[8u8; 8], stream));
    let mut source = [1u8; 4];
    let mut target = [0u8; 8];
    sync(stream);
    begin(stream, RELAXED);
    // SAFETY: the ranges have that many bytes.
    ok(unsafe { cudaMemsetAsync(buffer.pointer.cast(), 3, 8, stream) });
    // SAFETY: the source lives until the graph is destroyed.
    ok(unsafe { cudaMemcpyAsync(buffer.pointer.cast(), source.as_ptr().cast(), 4, cudaMemcpyHostToDevice, stream) });
    copy(&copied, &buffer, stream);
    // SAFETY: the counter is static.
    ok(unsafe { cudaLaunchHostFunc(stream, Some(count), (&raw const COUNT).cast_mut().cast()) });
    // SAFETY: the target lives until the graph is destroyed.
    ok(unsafe {
        cudaMemcpyAsync(target.as_mut_ptr().cast(), copied.pointer.cast(), 8, cudaMemcpyDeviceToHost, stream)
    });
    let exec = finish(stream);
    assert_eq!((buffer.get(), copied.get(), COUNT.load(Ordering::SeqCst)), (vec![9; 8], vec![8; 8], 0));
    for round in 1..4u8 {
        // Pageable memory is read when the graph runs.
        // SAFETY: the array is ours and no graph is running.
        unsafe { (&raw mut source).write_volatile([round * 10; 4]) };
        launch(exec, stream);
        sync(stream);
        // SAFETY: the graph has ended.
        let seen = unsafe { (&raw const target).read_volatile() };
        let expected = [[round * 10; 4], [3; 4]].concat();
        assert_eq!((&seen[..], buffer.get(), copied.get()), (&expected[..], expected.clone(), expected.clone()));
        assert_eq!(COUNT.load(Ordering::SeqCst), u32::from(round));
    }
    destroy(exec);
}

/// Where two branches meet: each waits for the other one.
#[derive(Default)]
struct Meeting {
    arrived: std::sync::Mutex<u32>,
    bell: std::sync::Condvar,
    missed: AtomicU32,
}

impl Meeting {
    fn enqueue(&self, stream: cudaStream_t) {
        unsafe extern "C" fn meet(data: *mut c_void) {
            // SAFETY: the meeting outlives the stream's work.
            let meeting = unsafe { &*data.cast::<Meeting>() };
            let mut arrived = meeting.arrived.lock().unwrap();
            *arrived += 1;
            let both = arrived.next_multiple_of(2);
            meeting.bell.notify_all();
            let patience = std::time::Duration::from_secs(5);
            let (_arrived, timed_out) =
                meeting.bell.wait_timeout_while(arrived, patience, |there| *there < both).unwrap();
            meeting.missed.fetch_add(u32::from(timed_out.timed_out()), Ordering::SeqCst);
        }
        // SAFETY: the meeting outlives the stream's work.
        ok(unsafe { cudaLaunchHostFunc(stream, Some(meet), (&raw const *self).cast_mut().cast()) });
    }
}

fn record(event: cudaEvent_t, stream: cudaStream_t) -> u32 {
    // SAFETY: no preconditions.
    unsafe { cudaEventRecord(event, stream) }
}

fn wait(stream: cudaStream_t, event: cudaEvent_t) -> u32 {
    // SAFETY: no preconditions.
    unsafe { cudaStreamWaitEvent(stream, event, 0) }
}

fn fill(buffer: &Buffer<u8>, value: i32, stream: cudaStream_t) -> u32 {
    // SAFETY: the buffer has that many bytes.
    unsafe { cudaMemsetAsync(buffer.pointer.cast(), value, buffer.len, stream) }
}

#[test]
fn branches_run_beside_each_other_and_join() {
    use_own_device();
    let (first, second, runner) = (new_stream(1), new_stream(1), new_stream(1));
    let [a, b, sum] = [0, 0, 0].map(|value: u8| Buffer::of(&[value; 4], runner));
    sync(runner);
    let (fork, join) = (new_event(), new_event());
    // One branch after the other would miss its meeting.
    let meeting = Meeting::default();
    begin(first, THREAD_LOCAL);
    ok(fill(&sum, 1, first));
    ok(record(fork, first));
    ok(wait(second, fork));
    assert_eq!(status(second), cudaStreamCaptureStatusActive);
    meeting.enqueue(second);
    copy(&b, &sum, second);
    ok(fill(&a, 7, first));
    meeting.enqueue(first);
    ok(record(join, second));
    ok(wait(first, join));
    copy(&sum, &b, first);
    ok(fill(&b, 9, first));
    let exec = finish(first);
    assert_eq!(status(second), cudaStreamCaptureStatusNone);
    for _ in 0..20 {
        for buffer in [&a, &b, &sum] {
            ok(fill(buffer, 0, runner));
        }
        launch(exec, runner);
        assert_eq!((a.get(), b.get(), sum.get()), (vec![7; 4], vec![9; 4], vec![1; 4]));
    }
    destroy(exec);
    assert_eq!(meeting.missed.load(Ordering::SeqCst), 0, "the branches ran one after the other");
    // The streams are free again.
    ok(fill(&a, 2, second));
    sync(second);
    assert_eq!(a.get(), [2; 4]);
}

#[test]
fn a_launch_ends_when_all_branches_have() {
    unsafe extern "C" fn nap(_: *mut c_void) {
        std::thread::sleep(std::time::Duration::from_millis(30));
    }
    use_own_device();
    let (first, second, runner) = (new_stream(1), new_stream(1), new_stream(1));
    let buffer = Buffer::of(&[0u8; 4], runner);
    sync(runner);
    let (fork, join) = (new_event(), new_event());
    begin(first, THREAD_LOCAL);
    ok(record(fork, first));
    ok(wait(second, fork));
    // SAFETY: the function ignores its argument.
    ok(unsafe { cudaLaunchHostFunc(second, Some(nap), ptr::null_mut()) });
    ok(fill(&buffer, 5, second));
    ok(record(join, second));
    // Nothing follows in the first stream, and nothing precedes in the second.
    ok(wait(first, join));
    let exec = finish(first);
    for value in 0..3 {
        ok(fill(&buffer, value, runner));
        launch(exec, runner);
        assert_eq!(buffer.get(), [5; 4]);
    }
    destroy(exec);
}

#[test]
fn joins_and_ends_that_do_not_fit_are_refused() {
    use_own_device();
    let buffer = Buffer::of(&[0u8; 4], new_stream(1));
    let forked = || {
        let (first, second, event) = (new_stream(1), new_stream(1), new_event());
        begin(first, THREAD_LOCAL);
        ok(fill(&buffer, 1, first));
        ok(record(event, first));
        ok(wait(second, event));
        (first, second)
    };
    let (first, second) = forked();
    assert_eq!(end(second).0, cudaErrorStreamCaptureUnmatched);
    assert_eq!((status(first), status(second)), (2, 2));
    assert_eq!(end(first).0, cudaErrorStreamCaptureInvalidated);
    assert_eq!((status(first), status(second)), (0, 0));

    let (first, second) = forked();
    ok(fill(&buffer, 2, second));
    assert_eq!(end(first).0, cudaErrorStreamCaptureUnjoined);
    assert_eq!((status(first), status(second)), (0, 0));
    ok(fill(&buffer, 2, second));

    // Without work of its own a stream need not join.
    let (first, second) = forked();
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamBeginCapture(second, GLOBAL) }, cudaErrorIllegalState);
    ok(end(first).0);

    let (first, second) = forked();
    let event = new_event();
    ok(fill(&buffer, 2, second));
    ok(record(event, second));
    ok(wait(first, event));
    ok(fill(&buffer, 3, second));
    assert_eq!(end(first).0, cudaErrorStreamCaptureUnjoined, "work behind the join");

    let (first, second) = (new_stream(1), new_stream(1));
    begin(first, THREAD_LOCAL);
    begin(second, THREAD_LOCAL);
    ok(record(event, first));
    assert_eq!(wait(second, event), cudaErrorStreamCaptureMerge);
    assert_eq!((end(first).0, end(second).0), (901, 901));

    // An event of an ended capture stands for nothing, until it is recorded again.
    let (first, other) = (new_stream(1), new_stream(1));
    begin(first, THREAD_LOCAL);
    ok(record(event, first));
    ok(end(first).0);
    assert_eq!(wait(other, event), cudaErrorInvalidValue);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaEventQuery(event) }, cudaErrorInvalidValue);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaEventSynchronize(event) }, cudaErrorInvalidValue);
    ok(record(event, other));
    // SAFETY: no preconditions.
    ok(unsafe { cudaEventSynchronize(event) });

    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamBeginCapture(ptr::null_mut(), RELAXED) }, cudaErrorStreamCaptureUnsupported);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamBeginCapture(new_stream(1), 7) }, cudaErrorInvalidValue);
}

/// What a call gives during a capture: its code, and whether the capture survives it.
type Refusal = (u32, bool);
const FINE: Refusal = (0, true);

/// Calls with what an H200 (driver 580.159) answers: on the thread that captures in the three modes, on another thread
/// in the three modes.
#[allow(clippy::type_complexity, reason = "a table")]
#[allow(clippy::undocumented_unsafe_blocks, reason = "for all: handles are live, result pointers are the table's")]
fn table() -> Vec<(&'static str, bool, fn(&Fixture) -> u32, [Refusal; 6])> {
    const UNSAFE: Refusal = (900, false);
    const IMPLICIT: Refusal = (906, false);
    let by_mode = [UNSAFE, UNSAFE, FINE, UNSAFE, FINE, FINE];
    vec![
        ("stream sync", false, |f| unsafe { cudaStreamSynchronize(f.stream()) }, [UNSAFE; 6]),
        ("stream query", false, |f| unsafe { cudaStreamQuery(f.stream()) }, [UNSAFE; 6]),
        ("other stream's sync", false, |f| unsafe { cudaStreamSynchronize(f.other()) }, by_mode),
        ("other stream's query", false, |f| unsafe { cudaStreamQuery(f.other()) }, by_mode),
        ("device sync", false, |_| unsafe { cudaDeviceSynchronize() }, [UNSAFE; 6]),
        ("malloc", false, |_| unsafe { cudaMalloc(&mut ptr::null_mut(), 16) }, by_mode),
        (
            "driver malloc",
            false,
            |_| {
                ok(unsafe { cudaSetDevice(0) });
                unsafe { cuMemAlloc_v2(&mut 0, 16) }
            },
            by_mode,
        ),
        ("malloc host", false, |_| unsafe { cudaMallocHost(&mut ptr::null_mut(), 16) }, by_mode),
        ("free", false, |f| unsafe { cudaFree(f.device_memory as *mut c_void) }, by_mode),
        ("free host", false, |f| unsafe { cudaFreeHost(f.pinned as *mut c_void) }, by_mode),
        ("event query", false, |f| unsafe { cudaEventQuery(f.outside()) }, by_mode),
        ("event sync", false, |f| unsafe { cudaEventSynchronize(f.outside()) }, by_mode),
        ("copy", true, |f| f.copy(), [IMPLICIT; 6]),
        ("copy, non-blocking", false, |f| f.copy(), [FINE; 6]),
        ("NULL fill", true, |f| fill(&f.scratch.0, 1, ptr::null_mut()), [IMPLICIT; 6]),
        ("NULL fill, non-blocking", false, |f| fill(&f.scratch.0, 1, ptr::null_mut()), [FINE; 6]),
        ("NULL sync", true, |_| unsafe { cudaStreamSynchronize(ptr::null_mut()) }, [IMPLICIT; 6]),
        ("NULL sync, non-blocking", false, |_| unsafe { cudaStreamSynchronize(ptr::null_mut()) }, by_mode),
        ("NULL status", true, |_| unsafe { cudaStreamIsCapturing(ptr::null_mut(), &mut 0) }, [(906, true); 6]),
        ("NULL record", true, |_| record(new_event(), ptr::null_mut()), [IMPLICIT; 6]),
        ("NULL wait", true, |f| wait(ptr::null_mut(), f.outside()), [IMPLICIT; 6]),
        ("wait for outside", false, |f| wait(f.stream(), f.outside()), [(905, false); 6]),
        ("wait for never", false, |f| wait(f.stream(), new_event()), [FINE; 6]),
        ("begin again", false, |f| unsafe { cudaStreamBeginCapture(f.stream(), 0) }, [(401, true); 6]),
        ("new stream and event", false, |_| record(new_event(), new_stream(1)), [FINE; 6]),
        ("memory info", false, |_| unsafe { cudaMemGetInfo(&mut 0, &mut 0) }, [FINE; 6]),
        ("other stream's fill", false, |f| fill(&f.scratch.0, 1, f.other()), [FINE; 6]),
        ("captured event's query", false, |f| f.on_captured(|e| unsafe { cudaEventQuery(e) }), [(907, false); 6]),
        ("captured event's sync", false, |f| f.on_captured(|e| unsafe { cudaEventSynchronize(e) }), [(907, false); 6]),
        ("captured event's destruction", false, |f| f.on_captured(|e| unsafe { cudaEventDestroy(e) }), [FINE; 6]),
        (
            "captured event's time",
            false,
            |f| {
                let outside = f.outside() as usize;
                let mut ms = 0.0;
                let event = new_event();
                ok(record(event, f.stream()));
                unsafe { cudaEventElapsedTime(&raw mut ms, outside as cudaEvent_t, event) }
            },
            [(907, true); 6],
        ),
        ("instantiate", false, |f| f.instantiate(), by_mode),
        ("launch elsewhere", false, |f| unsafe { cudaGraphLaunch(f.exec as cudaGraphExec_t, f.other()) }, [FINE; 6]),
        ("launch", false, |f| unsafe { cudaGraphLaunch(f.exec as cudaGraphExec_t, f.stream()) }, [UNSAFE; 6]),
        ("exec destroy", false, |f| unsafe { cudaGraphExecDestroy(f.exec as cudaGraphExec_t) }, by_mode),
        ("ncclMemAlloc", false, |_| 900 * unsafe { ncclMemAlloc(&mut ptr::null_mut(), 64) }, by_mode),
    ]
}

struct Fixture {
    stream: usize,
    other: usize,
    outside: usize,
    device_memory: usize,
    pinned: usize,
    graph: usize,
    exec: usize,
    scratch: Scratch,
}

/// A buffer that other threads may fill.
struct Scratch(Buffer<u8>);
// SAFETY: the pointer is only passed to the library.
unsafe impl Sync for Scratch {}

impl Fixture {
    fn new(blocking: bool) -> Self {
        let other = new_stream(1);
        let (mut device_memory, mut pinned) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaMalloc(&raw mut device_memory, 16) });
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaMallocHost(&raw mut pinned, 16) });
        let outside = new_event();
        ok(record(outside, other));
        let scratch = Scratch(Buffer::of(&[0u8; 16], other));
        begin(other, RELAXED);
        ok(fill(&scratch.0, 1, other));
        let (code, graph) = end(other);
        ok(code);
        let exec = instantiate(graph) as usize;
        sync(other);
        let stream = new_stream(u32::from(!blocking));
        Self {
            stream: stream as usize,
            other: other as usize,
            outside: outside as usize,
            device_memory: device_memory as usize,
            pinned: pinned as usize,
            graph: graph as usize,
            exec,
            scratch,
        }
    }

    fn stream(&self) -> cudaStream_t {
        self.stream as cudaStream_t
    }

    fn other(&self) -> cudaStream_t {
        self.other as cudaStream_t
    }

    fn outside(&self) -> cudaEvent_t {
        self.outside as cudaEvent_t
    }

    fn copy(&self) -> u32 {
        let source = [1u8; 16];
        // SAFETY: both have 16 bytes.
        unsafe { cudaMemcpy(self.scratch.0.pointer.cast(), source.as_ptr().cast(), 16, cudaMemcpyHostToDevice) }
    }

    fn on_captured(&self, call: impl Fn(cudaEvent_t) -> u32) -> u32 {
        let event = new_event();
        ok(record(event, self.stream()));
        call(event)
    }

    fn instantiate(&self) -> u32 {
        let mut exec = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        unsafe { cudaGraphInstantiateWithFlags(&raw mut exec, self.graph as cudaGraph_t, 0) }
    }
}

/// In a process of its own: global captures forbid calls of every thread.
#[test]
fn calls_during_a_capture_are_answered_as_a_gpu_does() {
    let output = spawn_rank("capture_table", &unique_id(), 0, 1, 60_000).wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
#[ignore = "run by calls_during_a_capture_are_answered_as_a_gpu_does"]
fn capture_table() {
    for (name, blocking, call, expected) in table() {
        for (column, expected) in expected.into_iter().enumerate() {
            let (mode, elsewhere) = (column as u32 % 3, column >= 3);
            let fixture = Fixture::new(blocking);
            begin(fixture.stream(), mode);
            ok(fill(&fixture.scratch.0, 2, fixture.stream()));
            let code = if elsewhere {
                std::thread::scope(|scope| scope.spawn(|| call(&fixture)).join().unwrap())
            } else {
                call(&fixture)
            };
            let seen = (code, status(fixture.stream()) == cudaStreamCaptureStatusActive);
            assert_eq!(seen, expected, "{name}, mode {mode}, other thread: {elsewhere}");
            let after = fill(&fixture.scratch.0, 3, fixture.stream());
            assert_eq!(after, if expected.1 { 0 } else { 901 }, "{name}: work after it");
            let (code, graph) = end(fixture.stream());
            assert_eq!(code, if expected.1 { 0 } else { 901 }, "{name}: end after it");
            assert_eq!(status(fixture.stream()), cudaStreamCaptureStatusNone);
            sync(fixture.other());
            sync(ptr::null_mut());
            if !graph.is_null() {
                // SAFETY: no preconditions.
                ok(unsafe { cudaGraphDestroy(graph) });
            }
        }
    }
    for (mode, code) in [(GLOBAL, 908), (THREAD_LOCAL, 908), (RELAXED, 0)] {
        let stream = new_stream(1) as usize;
        begin(stream as cudaStream_t, mode);
        let elsewhere = std::thread::spawn(move || end(stream as cudaStream_t).0).join().unwrap();
        assert_eq!(elsewhere, code, "mode {mode}");
        assert_eq!(status(stream as cudaStream_t), 0);
        assert_eq!(end(stream as cudaStream_t).0, cudaErrorIllegalState);
    }
    // A thread that says so may do what is unsafe, also in its own capture.
    let fixture = Fixture::new(false);
    let mut mode = RELAXED;
    // SAFETY: the pointer is ours.
    ok(unsafe { cudaThreadExchangeStreamCaptureMode(&raw mut mode) });
    assert_eq!(mode, GLOBAL);
    for capture_mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
        begin(fixture.stream(), capture_mode);
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaMalloc(&mut ptr::null_mut(), 16) });
        sync(fixture.other());
        ok(end(fixture.stream()).0);
    }
    // SAFETY: the pointer is ours.
    ok(unsafe { driver::cuThreadExchangeStreamCaptureMode(&raw mut mode) });
    assert_eq!(mode, RELAXED);
    // Once invalid, a capture answers everything with that.
    begin(fixture.stream(), GLOBAL);
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaMalloc(&mut ptr::null_mut(), 16) }, 900);
    assert_eq!(record(new_event(), fixture.stream()), 901);
    assert_eq!(wait(fixture.stream(), new_event()), 901);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamBeginCapture(fixture.stream(), GLOBAL) }, 401);
    assert_eq!(end(fixture.stream()).0, 901);
    // A destroyed stream ends its capture.
    let stream = new_stream(1);
    begin(stream, GLOBAL);
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamDestroy(stream) });
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaMalloc(&mut ptr::null_mut(), 16) });
}

#[test]
fn the_driver_interface_captures_too() {
    use_own_device();
    let stream = new_stream(1);
    let buffer = Buffer::of(&[5u8; 4], stream);
    sync(stream);
    let (mut graph, mut exec, mut state, mut id) = (ptr::null_mut(), ptr::null_mut(), 9, 0u64);
    // SAFETY: the stream is live.
    ok(unsafe { driver::cuStreamBeginCapture_v2(stream, THREAD_LOCAL) });
    // SAFETY: the buffer has 4 bytes.
    ok(unsafe { cuMemsetD8Async(buffer.pointer as u64, 6, 4, stream) });
    // SAFETY: the result pointers are ours.
    ok(unsafe {
        driver::cuStreamGetCaptureInfo_v2(
            stream,
            &raw mut state,
            &raw mut id,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    });
    assert!(state == CU_STREAM_CAPTURE_STATUS_ACTIVE && id != 0, "{state} {id}");
    let mut nodes = 0;
    // SAFETY: the result pointers are ours.
    let code = unsafe {
        driver::cuStreamGetCaptureInfo_v3(
            stream,
            &raw mut state,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
            &raw mut nodes,
        )
    };
    assert_eq!(code, cudaErrorNotSupported);
    // SAFETY: the result pointer is ours.
    ok(unsafe { driver::cuStreamEndCapture(stream, &raw mut graph) });
    // SAFETY: the result pointer is ours.
    ok(unsafe { driver::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) });
    // SAFETY: no preconditions.
    ok(unsafe { driver::cuGraphDestroy(graph) });
    assert_eq!(buffer.get(), [5; 4]);
    // SAFETY: the graph's memory is ours.
    ok(unsafe { driver::cuGraphLaunch(exec, stream) });
    assert_eq!(buffer.get(), [6; 4]);
    // SAFETY: no preconditions.
    ok(unsafe { driver::cuGraphExecDestroy(exec) });
    // SAFETY: refused.
    let graph_gone = unsafe { driver::cuGraphDestroy(graph) };
    // SAFETY: refused.
    let exec_gone = unsafe { driver::cuGraphExecDestroy(exec) };
    // SAFETY: refused.
    let launched = unsafe { driver::cuGraphLaunch(exec, stream) };
    // SAFETY: refused.
    let made = unsafe { driver::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) };
    let gone = [graph_gone, exec_gone, launched, made];
    assert_eq!(gone, [CUDA_ERROR_INVALID_VALUE; 4]);
}

#[test]
fn eager_dispatch_and_collective_set_up_are_refused() {
    let mut case = Case::new(1, 4, 1, &[4], |_, token, _| (token % 4) as i64);
    case.eager = true;
    with_group(&case, |session| {
        let stream = session.rank.stream;
        let step = Step::new(Session { case: &case, ..*session });
        step.load(&case, 3);
        step.enqueue(stream);
        sync(stream);
        let dispatch = || {
            let mut input = Desc::of(&step.input, case.datatype, &[4, case.hidden]);
            let mut rows = Desc::of(&step.rows, case.datatype, &[case.capacity, case.hidden]);
            let inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: input.ptr() });
            let outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: rows.ptr() });
            let config = ep_struct!(ncclEpDispatchConfig_t { pass_direction: NCCL_EP_BWD_PASS });
            let handle = step.handle.handle;
            // SAFETY: all pointers are ours and valid.
            unsafe {
                ncclEpDispatch(handle, &raw const inputs, &raw const outputs, ptr::null(), &raw const config, stream)
            }
        };
        begin(stream, THREAD_LOCAL);
        assert_eq!(dispatch(), ncclInvalidUsage);
        assert!(nccl_error().contains("eager mode"), "{}", nccl_error());
        assert_eq!(status(stream), cudaStreamCaptureStatusActive, "the capture goes on");
        let config = group_config(4, 8, 64, 64);
        let (code, text) = session.rank.create_group(&config).unwrap_err();
        assert!(code == ncclUnhandledCudaError && text.contains("while a stream"), "{code}: {text}");
        assert_eq!(status(stream), cudaStreamCaptureStatusInvalidated);
        assert_eq!(end(stream).0, cudaErrorStreamCaptureInvalidated);

        begin(stream, THREAD_LOCAL);
        // SAFETY: no preconditions.
        assert_eq!(unsafe { ncclEpGroupDestroy(session.group) }, ncclUnhandledCudaError);
        assert_eq!(end(stream).0, cudaErrorStreamCaptureInvalidated);
        // A handle over the caller's memory allocates nothing.
        let memory = Buffer::<u8>::new(step.handle.memory.len, stream);
        begin(stream, THREAD_LOCAL);
        let handle = TestHandle::over(memory, session.group, 1, 1);
        let mut owner = ptr::null_mut();
        ok(end(stream).0);
        begin(stream, THREAD_LOCAL);
        // SAFETY: the result pointer is ours.
        let code = unsafe {
            ncclEpInitHandle(&raw mut owner, session.group, NCCL_EP_LAYOUT_EXPERT_MAJOR, ptr::null(), 1, ptr::null())
        };
        assert_eq!((code, end(stream).0), (ncclUnhandledCudaError, cudaErrorStreamCaptureInvalidated));
        handle.destroy();
        nccl_ok(dispatch());
        sync(stream);
        step.handle.destroy();
    });
}

#[test]
fn a_graph_over_freed_memory_is_an_error_and_touches_nothing() {
    use_own_device();
    let stream = new_stream(1);
    let mut memory = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaMalloc(&raw mut memory, 64) });
    begin(stream, THREAD_LOCAL);
    // SAFETY: the memory has 64 bytes.
    ok(unsafe { cudaMemsetAsync(memory, 1, 64, stream) });
    let exec = finish(stream);
    launch(exec, stream);
    sync(stream);
    // SAFETY: nobody uses the memory but the graph, which must notice.
    ok(unsafe { cudaFree(memory) });
    // SAFETY: this is what is tested.
    assert_eq!(unsafe { cudaGraphLaunch(exec, stream) }, cudaErrorIllegalAddress);
    assert!(sticky_text().contains("are still used, but have been freed"), "{}", sticky_text());
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaStreamSynchronize(stream) }, cudaErrorIllegalAddress);
}

#[test]
fn peers_learn_of_a_launch_that_fails() {
    run_processes("failed_launch", 2, 60_000, &[]);
}

#[test]
#[ignore = "run by peers_learn_of_a_launch_that_fails"]
fn failed_launch() {
    let rank = join_as_process();
    let buffer = Buffer::of(&[1f32; 8], rank.stream);
    let mut own = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaMalloc(&raw mut own, 64) });
    rank.sync();
    begin(rank.stream, GLOBAL);
    let data = buffer.pointer.cast();
    // SAFETY: the buffer has 8 elements.
    nccl_ok(unsafe { ncclAllReduce(data, data.cast(), 8, ncclFloat32, ncclSum, rank.comm, rank.stream) });
    // SAFETY: the memory has 64 bytes.
    ok(unsafe { cudaMemsetAsync(own, 1, 64, rank.stream) });
    let exec = finish(rank.stream);
    launch(exec, rank.stream);
    assert_eq!(buffer.get(), [2f32; 8]);
    if rank.rank == 0 {
        // SAFETY: nobody uses the memory but the graph, which must notice.
        ok(unsafe { cudaFree(own) });
        // SAFETY: this is what is tested.
        assert_eq!(unsafe { cudaGraphLaunch(exec, rank.stream) }, cudaErrorIllegalAddress);
    } else {
        launch(exec, rank.stream);
        // SAFETY: no preconditions.
        assert_eq!(unsafe { cudaStreamSynchronize(rank.stream) }, cudaErrorLaunchFailure);
        assert!(sticky_text().contains("rank 0 failed"), "{}", sticky_text());
    }
    std::mem::forget(buffer);
}

#[test]
fn a_graph_outlives_its_group_without_harm() {
    let case = Case::new(1, 4, 1, &[4], |_, token, _| (token % 4) as i64);
    run_ranks(1, |rank| {
        let group = rank.create_group(&group_config(4, 4, case.capacity, case.row_bytes())).unwrap();
        let step = Step::new(Session { case: &case, rank, group });
        step.load(&case, 3);
        begin(rank.stream, THREAD_LOCAL);
        step.enqueue(rank.stream);
        let exec = finish(rank.stream);
        launch(exec, rank.stream);
        step.verify(&case, 3);
        let memory = step.handle.destroy();
        rank.destroy_group(group);
        // SAFETY: the graph's group is gone, which must be noticed.
        let code = unsafe { cudaGraphLaunch(exec, rank.stream) };
        assert_eq!(code, cudaErrorInvalidResourceHandle);
        drop(memory);
        destroy(exec);
    });
}

fn set_all(buffer: &Buffer<u8>, value: i32, stream: cudaStream_t) {
    // SAFETY: the buffer has that many bytes.
    ok(unsafe { cudaMemsetAsync(buffer.pointer.cast(), value, buffer.len, stream) });
}

fn update(exec: cudaGraphExec_t, graph: cudaGraph_t) -> (u32, u32) {
    let mut info = cudaGraphExecUpdateResultInfo { result: 99, ..Default::default() };
    // SAFETY: the result pointer is ours.
    let code = unsafe { cudaGraphExecUpdate(exec, graph, &raw mut info) };
    assert!(info.errorNode.is_null() && info.errorFromNode.is_null());
    (code, info.result)
}

#[test]
fn an_updated_graph_does_the_new_work() {
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let [a, b] = [0u8, 1].map(|value| Buffer::of(&[value; 16], stream));
    let record = |fills: &[(&Buffer<u8>, i32)]| {
        begin(stream, RELAXED);
        fills.iter().for_each(|(buffer, value)| set_all(buffer, *value, stream));
        let (code, graph) = end(stream);
        ok(code);
        graph
    };
    let first = record(&[(&a, 5), (&b, 6)]);
    let exec = instantiate(first);
    let second = record(&[(&b, 7), (&a, 8)]);
    assert_eq!(update(exec, second), (cudaSuccess, cudaGraphExecUpdateSuccess));
    launch(exec, stream);
    assert_eq!((a.get(), b.get()), (vec![8; 16], vec![7; 16]));
    // Other shapes are refused, and the executable stays as it was.
    let longer = record(&[(&a, 1), (&a, 2), (&a, 3)]);
    assert_eq!(update(exec, longer), (cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdateErrorTopologyChanged));
    let other = new_stream(cudaStreamNonBlocking);
    let event = new_event();
    begin(stream, RELAXED);
    // SAFETY: no preconditions.
    ok(unsafe { cudaEventRecord(event, stream) });
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamWaitEvent(other, event, 0) });
    set_all(&a, 1, other);
    set_all(&b, 2, stream);
    // SAFETY: no preconditions.
    ok(unsafe { cudaEventRecord(event, other) });
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamWaitEvent(stream, event, 0) });
    let (code, forked) = end(stream);
    ok(code);
    let code = (cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdateErrorTopologyChanged);
    assert_eq!(update(exec, forked), code);
    set_all(&a, 0, stream);
    launch(exec, stream);
    assert_eq!((a.get(), b.get()), (vec![8; 16], vec![7; 16]));
    // The driver's function is the same, and unknown handles are refused.
    let mut info = cudaGraphExecUpdateResultInfo::default();
    // SAFETY: the result pointer is ours.
    ok(unsafe { driver::cuGraphExecUpdate_v2(exec, first, &raw mut info) });
    launch(exec, stream);
    assert_eq!((a.get(), b.get()), (vec![5; 16], vec![6; 16]));
    // SAFETY: as above.
    let code = unsafe { cudaGraphExecUpdate(exec, ptr::without_provenance_mut(64), &raw mut info) };
    assert_eq!(code, cudaErrorInvalidValue);
    destroy(exec);
    for graph in [first, second, longer, forked] {
        // SAFETY: no preconditions.
        ok(unsafe { cudaGraphDestroy(graph) });
    }
}

fn allocate(bytes: usize, stream: cudaStream_t) -> *mut c_void {
    let mut memory = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaMallocAsync(&raw mut memory, bytes, stream) });
    assert!(!memory.is_null());
    memory
}

fn free(memory: *mut c_void, stream: cudaStream_t) -> u32 {
    // SAFETY: nobody uses the memory behind this.
    unsafe { cudaFreeAsync(memory, stream) }
}

#[test]
fn memory_of_a_graph() {
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let [from, to] = [3u8, 0].map(|value| Buffer::of(&[value; 64], stream));
    let transfer = |to: *mut c_void, from: *const c_void| {
        // SAFETY: both ranges have 64 bytes while the graph runs.
        ok(unsafe { cudaMemcpyAsync(to, from, 64, cudaMemcpyDeviceToDevice, stream) });
    };
    // Allocated and freed within each launch: the memory is fresh each time.
    begin(stream, RELAXED);
    let scratch = allocate(64, stream);
    transfer(to.pointer.cast(), scratch);
    transfer(scratch, from.pointer.cast());
    assert_eq!(free(scratch, stream), cudaSuccess);
    assert_eq!(free(scratch, stream), cudaErrorInvalidValue);
    let exec = finish(stream);
    for _ in 0..3 {
        to.set(&[0; 64]);
        launch(exec, stream);
        assert!(to.get().iter().skip(1).step_by(2).all(|byte| *byte == 0xCB), "fresh memory holds poison");
    }
    assert_eq!(free(scratch, stream), cudaErrorInvalidValue);
    destroy(exec);

    // Left to the caller: to be freed before the next launch, once.
    begin(stream, RELAXED);
    let left = allocate(64, stream);
    transfer(left, from.pointer.cast());
    let (code, graph) = end(stream);
    ok(code);
    let exec = instantiate(graph);
    let mut second = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaGraphInstantiate(&raw mut second, graph, 0) }, cudaErrorInvalidValue);
    assert_eq!(update(exec, graph), (cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdateErrorNotSupported));
    for round in 0..2u8 {
        from.set(&[20 + round; 64]);
        launch(exec, stream);
        transfer(to.pointer.cast(), left);
        assert_eq!(to.get(), [20 + round; 64]);
        // SAFETY: refused, as the memory of the last launch is still there.
        assert_eq!(unsafe { cudaGraphLaunch(exec, stream) }, cudaErrorInvalidValue);
        if round == 0 {
            assert_eq!(free(left, stream), cudaSuccess);
        } else {
            // SAFETY: nobody uses the memory any more.
            ok(unsafe { cudaFree(left) });
        }
        assert_eq!(free(left, stream), cudaErrorInvalidValue);
    }
    destroy(exec);
    // With the flag a launch takes back what the last one left.
    let mut exec = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaGraphInstantiate(&raw mut exec, graph, 1) });
    launch(exec, stream);
    launch(exec, stream);
    sync(stream);
    destroy(exec);
    // SAFETY: no preconditions.
    ok(unsafe { cudaGraphDestroy(graph) });
    assert_eq!(free(left, stream), cudaErrorInvalidValue, "gone with its graph");

    // What no graph allocates cannot be freed by one.
    let memory = allocate(64, stream);
    begin(stream, RELAXED);
    assert_eq!(free(memory, stream), cudaErrorStreamCaptureUnsupported);
    assert_eq!(end(stream).0, cudaErrorStreamCaptureInvalidated);
    assert_eq!(free(memory, stream), cudaSuccess);
    sync(stream);
}
