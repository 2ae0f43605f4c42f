//! Steps on two ranks, each a process of this program, compared with a plain reference.

use nvte_ep::*;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

include!("support/alone.rs");

const RANKS: usize = 2;
const T: usize = 12;
const H: usize = 64;
const K: usize = 2;
const LOCAL: usize = 4;
const E: usize = LOCAL * RANKS;
const ALIGNMENT: usize = 4;
const C: usize = RANKS * T * K + LOCAL * (ALIGNMENT - 1);
const RANK: &str = "NVTE_EP_TEST_RANK";
const FOLDER: &str = "NVTE_EP_TEST_FOLDER";

/// Runs the test `name` again as each rank; true in the process that did.
fn as_ranks(name: &str) -> bool {
    if std::env::var_os(RANK).is_some() {
        return false;
    }
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
        command.env(RANK, rank.to_string()).env(FOLDER, folder.path());
        command.env("NVTE_EP_HOST_DEVICES", RANKS.to_string());
        command.spawn().unwrap()
    };
    wait((0..RANKS).map(start).collect());
    true
}

fn wait(mut ranks: Vec<Child>) {
    let start = Instant::now();
    let ended = |rank: &mut Child| rank.try_wait().unwrap();
    while ranks.iter_mut().any(|rank| ended(rank).is_none()) {
        let failed = ranks.iter_mut().any(|rank| ended(rank).is_some_and(|status| !status.success()));
        if failed || start.elapsed() > Duration::from_secs(60) {
            ranks.iter_mut().for_each(|rank| rank.kill().unwrap());
            panic!("a rank failed or did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(ranks.iter_mut().all(|rank| ended(rank).unwrap().success()));
}

fn rank() -> usize {
    std::env::var(RANK).unwrap().parse().unwrap()
}

fn meet() -> Communicator {
    let folder = std::env::var_os(FOLDER).unwrap();
    let file = Path::new(&folder).join("id");
    if rank() == 0 {
        let id = UniqueId::new().unwrap();
        std::fs::write(file.with_extension("new"), id.as_bytes()).unwrap();
        std::fs::rename(file.with_extension("new"), &file).unwrap();
        return Communicator::new(id, 0, RANKS).unwrap();
    }
    while !file.exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let id = UniqueId::from_bytes(std::fs::read(file).unwrap().try_into().unwrap());
    Communicator::new(id, rank(), RANKS).unwrap()
}

fn builder() -> GroupBuilder {
    Group::builder(meet())
        .num_experts(E as u32)
        .max_tokens_per_rank(T as u32)
        .hidden_dim(H as u32)
        .max_token_dtype::<f32>()
}

const LAYER: LayerConfig = LayerConfig { top_k: K as u32, alignment: ALIGNMENT };

/// Numbers without a pattern, the same on every rank.
fn noise(seed: usize) -> usize {
    let mut x = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x ^ (x >> 27)) as usize >> 8
}

/// Two experts of each token; one token in six is routed nowhere at its second place.
fn experts(rank: usize, batch: usize) -> Vec<i64> {
    let token = |t: usize| {
        let seed = (batch * RANKS + rank) * T + t;
        let first = noise(seed) % E;
        let second = (first + 1 + noise(seed + 1000) % (E - 1)) % E;
        [first as i64, if t.is_multiple_of(6) { -1 } else { second as i64 }]
    };
    (0..T).flat_map(token).collect()
}

fn weights(rank: usize) -> Vec<f32> {
    (0..T * K).map(|i| (1 + noise(rank * 7000 + i) % 15) as f32 / 16.0).collect()
}

fn rows(rank: usize, batch: usize) -> Vec<f32> {
    (0..T * H).map(|i| (noise((batch * RANKS + rank) * 100_000 + i) % 31) as f32 - 15.0).collect()
}

/// What expert `e` does to a row of weight `w`.
fn factor(e: i64, w: f32) -> f32 {
    (e + 1) as f32 * w
}

/// The sum over each token's experts of the row times their factors; what a rank's step gives, computed on the spot.
fn expected(rows: &[f32], rank: usize, batch: usize) -> Vec<f32> {
    let (experts, weights) = (experts(rank, batch), weights(rank));
    let sum = |i: usize| -> f32 {
        let own = (0..K).map(|k| i / H * K + k).filter(|at| experts[*at] >= 0);
        own.map(|at| rows[i] * factor(experts[at], weights[at])).sum()
    };
    (0..T * H).map(sum).collect()
}

fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= 1e-4 * expected.abs().max(1.0), "{what}[{i}]: {got}, not {expected}");
    }
}

/// The factor of each received row: its expert is that of its slab.
fn factors(counts: &[i32], recv_weights: &[f32]) -> Vec<f32> {
    let slabs = counts.iter().enumerate().flat_map(|(e, rows)| std::iter::repeat_n(e, *rows as usize));
    let own = |(row, e): (usize, usize)| factor((rank() * LOCAL + e) as i64, recv_weights[row]);
    slabs.enumerate().map(own).collect()
}

/// The experts: each row times its factor, in place.
fn experts_work(values: &mut [f32], factors: &[f32]) {
    values.chunks_mut(H).zip(factors).for_each(|(row, factor)| row.iter_mut().for_each(|value| *value *= factor));
}

/// A step forward and backward of one micro-batch, with buffers of any kind for the receive side.
struct Step<'a, S> {
    device: &'a Alone,
    batch: usize,
    recv: S,
    rows_in_recv: usize,
    get: fn(&S, usize) -> Vec<f32>,
    put: fn(&S, &[f32]),
}

impl<S: DeviceSliceMut<Element = f32>> Step<'_, S> {
    fn run(&mut self, handle: &mut HandleMemory) {
        let (device, batch, capacity, stream) = (self.device, self.batch, self.rows_in_recv, Stream::DEFAULT);
        let topk_idx = device.filled(&experts(rank(), batch));
        let (topk_weights, tokens) = (device.filled(&weights(rank())), device.filled(&rows(rank(), batch)));
        let (mut counts, mut total) = (device.zeros::<i32>(LOCAL), device.zeros::<i32>(1));
        let mut recv_weights = device.zeros::<f32>(capacity);
        let (mut result, mut grad_tokens) = (device.zeros::<f32>(T * H), device.zeros::<f32>(T * H));
        let mut grad_weights = device.zeros::<f32>(T * K);

        let prepare = Prepare { topk_idx: &*topk_idx, token_counts: &mut *counts, total: Some(&mut *total) };
        let dispatch = Dispatch {
            tokens: Rows::new(&*tokens, H),
            recv_tokens: RowsMut::new(&mut self.recv, H),
            weights: Some(Weights { topk_weights: &*topk_weights, recv_topk_weights: &mut *recv_weights }),
        };
        let step = handle.prepare_and_dispatch(prepare, dispatch, stream).unwrap();
        let totals = step.recv_totals(stream).unwrap();
        let (counts, total) = (counts.get(LOCAL), total.get(1)[0]);
        assert_eq!((counts.iter().sum::<i32>(), totals.needed), (total, total as u64));
        assert!(counts.iter().all(|count| (*count as usize).is_multiple_of(ALIGNMENT)) && totals.dropped == 0);

        let received_weights = recv_weights.get(total as usize);
        let factors = factors(&counts, &received_weights);
        let received = (self.get)(&self.recv, total as usize * H);
        let mut out = received.clone();
        experts_work(&mut out, &factors);
        (self.put)(&self.recv, &out);
        let combine = Combine { expert_out: Rows::new(&self.recv, H), result: RowsMut::new(&mut *result, H) };
        step.combine(combine, stream).unwrap();
        assert_close("result", &result.get(T * H), &expected(&rows(rank(), batch), rank(), batch));

        // The loss is the sum over grad * result.
        let gradients = rows(rank(), batch + 50);
        let grad = device.filled(&gradients);
        let combine_bwd = CombineBwd { grad: Rows::new(&*grad, H), grad_expert_out: RowsMut::new(&mut self.recv, H) };
        step.combine_bwd(combine_bwd, stream).unwrap();
        let mut grad_out = (self.get)(&self.recv, total as usize * H);
        // A row's weight times its expert's number times the row: its gradient by the weight.
        let dot = |row: usize| -> f32 {
            let own = row * H..(row + 1) * H;
            received[own.clone()].iter().zip(&grad_out[own]).map(|(a, b)| a * b).sum()
        };
        let expert = |row: usize| factors[row] / received_weights[row].max(f32::MIN_POSITIVE);
        let by_weight: Vec<f32> =
            (0..total as usize).map(|row| if factors[row] == 0.0 { 0.0 } else { dot(row) * expert(row) }).collect();
        experts_work(&mut grad_out, &factors);
        (self.put)(&self.recv, &grad_out);
        recv_weights.put(&by_weight);
        let dispatch_bwd = DispatchBwd {
            grad: Rows::new(&self.recv, H),
            grad_tokens: RowsMut::new(&mut *grad_tokens, H),
            weights: Some(WeightGrads { g_recv_topk_weights: &*recv_weights, grad_topk_weights: &mut *grad_weights }),
        };
        step.dispatch_bwd(dispatch_bwd, stream).unwrap();
        assert_close("grad_tokens", &grad_tokens.get(T * H), &expected(&gradients, rank(), batch));
        let (experts, tokens) = (experts(rank(), batch), rows(rank(), batch));
        let by_weight = |at: usize| -> f32 {
            let own = at / K * H..(at / K + 1) * H;
            let dot: f32 = tokens[own.clone()].iter().zip(&gradients[own]).map(|(a, b)| a * b).sum();
            if experts[at] < 0 { 0.0 } else { dot * (experts[at] + 1) as f32 }
        };
        let expected: Vec<f32> = (0..T * K).map(by_weight).collect();
        assert_close("grad_topk_weights", &grad_weights.get(T * K), &expected);
    }
}

fn step_over<'a>(device: &'a Alone, batch: usize, rows: usize) -> Step<'a, RawSliceOf> {
    let recv = RawSliceOf(device.zeros::<f32>(rows * H));
    Step {
        device,
        batch,
        recv,
        rows_in_recv: rows,
        get: |recv, len| recv.0.get(len),
        put: |recv, values| recv.0.put(values),
    }
}

/// Memory of the test as an argument of its own type: the traits are open.
struct RawSliceOf(Memory<f32>);

// SAFETY: the memory lives as long as the step.
unsafe impl DeviceSlice for RawSliceOf {
    type Element = f32;
    fn len(&self) -> usize {
        self.0.len()
    }
    fn lend<'a>(&'a self, _: &Stream<'a>) -> Lent<'a> {
        Lent::at(self.0.address())
    }
}

// SAFETY: as above.
unsafe impl DeviceSliceMut for RawSliceOf {
    fn lend_mut<'a>(&'a mut self, _: &Stream<'a>) -> Lent<'a> {
        Lent::at(self.0.address())
    }
}

#[test]
fn staged_steps() {
    if as_ranks("staged_steps") {
        return;
    }
    let device = Alone::on(rank() as i32);
    let group = builder().max_recv_tokens_per_rank(C as u32).build().unwrap();
    let layer = group.layer(LAYER).unwrap();
    let mut handle = layer.handle().unwrap();
    (0..3).for_each(|batch| step_over(&device, batch, C).run(&mut handle));
    let usage = group.memory_usage().unwrap();
    assert_eq!((usage.handles, usage.handle_memory), (1, layer.handle_bytes() as u64));
    assert_eq!(usage.backend, Backend::NcclEp);
    let rows = CallStats { count: 3, bytes: (3 * T * H * 4) as u64 };
    let stats = group.stats().unwrap();
    assert_eq!(stats.prepare, CallStats { count: 3, bytes: (3 * T * K * 8) as u64 });
    assert_eq!([stats.dispatch, stats.combine, stats.combine_bwd, stats.dispatch_bwd], [rows; 4]);
    assert_eq!((stats.handles_opened, stats.handles_closed, stats.errors, stats.invalid_indices), (1, 0, 0, 0));
    assert_eq!((stats.handles_bound, stats.handles_rebuilt), (1, 0));
    let nccl_ep = stats.nccl_ep.unwrap();
    assert!(stats.nccl.version > 23_000 && nccl_ep.version > 0, "{stats:?}");
    assert!([stats.nccl, nccl_ep].iter().all(|library| library.path.unwrap().ends_with("libnvte_ep_host.so")));
    let (one, mut counts) = (device.filled(&[E as i64, -1]), device.zeros::<i32>(LOCAL));
    drop(
        handle.prepare(Prepare { topk_idx: &*one, token_counts: &mut *counts, total: None }, Stream::DEFAULT).unwrap(),
    );
    device.wait();
    assert_eq!((group.stats().unwrap().prepare.count, group.stats().unwrap().invalid_indices), (4, 1));
    let wrong = Prepare { topk_idx: &*device.filled(&[0i64; 3]), token_counts: &mut *counts, total: None };
    assert!(handle.prepare(wrong, Stream::DEFAULT).is_err());
    assert_eq!(group.stats().unwrap().errors, 1);
    drop(handle);
    assert_eq!((group.stats().unwrap().handles_closed, group.stats().unwrap().handles_bound), (1, 0));
    assert_eq!(group.memory_usage().unwrap().handles, 0, "a handle's registration ends with it");
    group.shutdown().unwrap();
}

#[test]
fn native_steps() {
    if as_ranks("native_steps") {
        return;
    }
    let device = Alone::on(rank() as i32);
    let group = builder().max_recv_tokens_per_rank(C as u32).backend(Backend::Native).build().unwrap();
    assert_eq!(group.memory_usage().unwrap().backend, Backend::Native);
    let mut handle = group.layer(LAYER).unwrap().handle().unwrap();
    step_over(&device, 0, C).run(&mut handle);
    drop(handle);
    group.shutdown().unwrap();
}

/// The kernel in front of NCCL EP has written the header then.
#[test]
fn an_exchange_that_fails_leaves_no_routing() {
    if as_ranks("an_exchange_that_fails_leaves_no_routing") {
        return;
    }
    // SAFETY: no other thread runs yet that reads variables.
    unsafe { std::env::set_var("NVTE_EP_HOST_FAULT", "call=ncclEpUpdateHandle,nth=2,do=fail") };
    let device = Alone::on(rank() as i32);
    let group = builder().max_recv_tokens_per_rank(C as u32).build().unwrap();
    let layer = group.layer(LAYER).unwrap();
    let memory = device.zeros::<i32>(layer.handle_bytes() / 4);
    // SAFETY: the memory is of that size, and lives longer than the handle.
    let mut handle = unsafe { layer.handle_at(memory.address()) }.unwrap();
    let (topk_idx, mut counts) = (device.filled(&experts(rank(), 0)), device.zeros::<i32>(LOCAL));
    let mut prepare = || {
        let call = Prepare { topk_idx: &*topk_idx, token_counts: &mut *counts, total: None };
        let ended = handle.prepare(call, Stream::DEFAULT).map(drop);
        device.wait();
        ended
    };
    prepare().unwrap();
    assert_ne!(memory.get(2), [0; 2]);
    assert!(prepare().unwrap_err().to_string().contains("ncclEpUpdateHandle"));
    assert_eq!(memory.get(2), [0; 2]);
}

#[test]
fn zero_copy_steps_in_symmetric_memory() {
    if as_ranks("zero_copy_steps_in_symmetric_memory") {
        return;
    }
    let device = Alone::on(rank() as i32);
    let group = builder().max_recv_tokens_per_rank(C as u32).zero_copy(true).build().unwrap();
    let mut handle = group.layer(LAYER).unwrap().handle().unwrap();
    let recv: SymmetricSlice<f32> = group.symmetric(C * H).unwrap();
    assert_eq!(group.memory_usage().unwrap().symm_in_use, (C * H * 4).next_multiple_of(256) as u64);
    let mut step = Step {
        device: &device,
        batch: 0,
        recv,
        rows_in_recv: C,
        get: |recv, len| get(loaded(), recv.address(), len),
        put: |recv, values| put(loaded(), recv.address(), values),
    };
    step.run(&mut handle);
    drop(step);
    assert_eq!(group.memory_usage().unwrap().symm_allocations, 0);
    drop(handle);
    group.shutdown().unwrap();
}

fn loaded() -> &'static nvte_ep_core::sys::Base {
    nvte_ep_core::sys::base(&nvte_ep_core::env::Env::from_process().unwrap()).unwrap()
}

#[test]
fn eager_steps() {
    if as_ranks("eager_steps") {
        return;
    }
    let device = Alone::on(rank() as i32);
    let group = builder().eager(K as u32).build().unwrap();
    let mut handle = group.layer(LAYER).unwrap().handle().unwrap();
    let (topk_idx, mut counts) = (device.filled(&experts(rank(), 0)), device.zeros::<i32>(LOCAL));
    let prepare = Prepare { topk_idx: &*topk_idx, token_counts: &mut *counts, total: None };
    let rows = handle.prepare(prepare, Stream::DEFAULT).unwrap().recv_totals(Stream::DEFAULT).unwrap().needed;
    assert!((rows as usize) < C, "fewer than any routing needs");
    step_over(&device, 0, rows as usize).run(&mut handle);
    drop(handle);
    group.shutdown().unwrap();
}

#[test]
fn a_dropped_routing_is_taken_up_again_and_mistakes_are_told() {
    if as_ranks("a_dropped_routing_is_taken_up_again_and_mistakes_are_told") {
        return;
    }
    let device = Alone::on(rank() as i32);
    let group = builder().max_recv_tokens_per_rank(C as u32).build().unwrap();
    let layer = group.layer(LAYER).unwrap();
    let mut handle = layer.handle().unwrap();
    let (topk_idx, mut counts) = (device.filled(&experts(rank(), 0)), device.zeros::<i32>(LOCAL));
    let (tokens, mut recv) = (device.filled(&rows(rank(), 0)), device.zeros::<f32>(C * H));
    let dispatch = |recv: &mut RawSlice<f32>, step: &Prepared<'_, '_>, hidden| {
        let (tokens, recv_tokens) = (Rows::new(&*tokens, hidden), RowsMut::new(recv, hidden));
        step.dispatch(Dispatch { tokens, recv_tokens, weights: None }, Stream::DEFAULT)
    };
    let unprepared = dispatch(&mut recv, &handle.resume(&*topk_idx).unwrap(), H).unwrap_err();
    assert_eq!((unprepared.kind(), unprepared.function()), (ErrorKind::WrongOrder, "nvte_ep_dispatch"));
    assert!(unprepared.to_string().ends_with(']') && unprepared.code().is_some(), "{unprepared}");

    let prepare = Prepare { topk_idx: &*topk_idx, token_counts: &mut *counts, total: None };
    let _ = handle.prepare(prepare, Stream::DEFAULT).unwrap();
    let step = handle.resume(&*topk_idx).unwrap();
    let text = dispatch(&mut recv, &step, H - 1).unwrap_err();
    assert_eq!((text.argument(), text.kind()), (Some("tokens"), ErrorKind::InvalidArgument));
    assert!(
        text.to_string().starts_with("nvte_ep_dispatch: tokens must hold whole rows of 63 elements, got 768"),
        "{text}"
    );
    let text = dispatch(&mut recv, &step, 0).unwrap_err().to_string();
    assert!(text.starts_with("nvte_ep_dispatch: tokens must have rows of one element or more, got 0"), "{text}");
    dispatch(&mut recv, &step, H).unwrap();
    device.wait();

    // The calls of a thread whose current device is another are not the group's.
    let other = 1 - rank() as i32;
    let device_of_thread = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                loaded().cuda.set_current_device(other).unwrap();
                group.memory_usage().unwrap_err().to_string()
            })
            .join()
            .unwrap()
    });
    let start = format!("nvte_ep_ext_memory_usage: the EP group is on device {}, and the calling thread's", rank());
    assert!(device_of_thread.starts_with(&start), "{device_of_thread}");
    drop(handle);
    group.shutdown().unwrap();
}

/// For each row of this rank's slabs the rank and the token that it comes from; none in the padding.
fn sources(batch: usize) -> Vec<Option<(usize, usize)>> {
    let mut rows = Vec::new();
    for e in rank() * LOCAL..(rank() + 1) * LOCAL {
        let of = |r: usize| {
            let experts = experts(r, batch);
            (0..T).filter(move |t| experts[t * K..][..K].contains(&(e as i64))).map(move |t| Some((r, t)))
        };
        rows.extend((0..RANKS).flat_map(of));
        rows.resize(rows.len().next_multiple_of(ALIGNMENT), None);
    }
    rows
}

#[test]
fn scaled_rows_arrive_with_their_scales() {
    if as_ranks("scaled_rows_arrive_with_their_scales") {
        return;
    }
    const WIDE: usize = 512;
    let device = Alone::on(rank() as i32);
    let group = builder().max_recv_tokens_per_rank(C as u32).hidden_dim(WIDE as u32).build().unwrap();
    let mut handle = group.layer(LAYER).unwrap().handle().unwrap();
    let byte = |r: usize, i: usize| (noise(r * 77_777 + i) % 120) as u8;
    let data: Vec<_> = (0..T * WIDE).map(|i| Float8E4M3(byte(rank(), i))).collect();
    let scales: Vec<_> = (0..T * WIDE / 32).map(|i| Float8E8M0(byte(rank() + 9, i))).collect();
    let (data, scales) = (device.filled(&data), device.filled(&scales));
    let (mut recv, mut recv_scales) = (device.zeros::<Float8E4M3>(C * WIDE), device.zeros::<Float8E8M0>(C * WIDE / 32));
    let (topk_idx, mut counts) = (device.filled(&experts(rank(), 0)), device.zeros::<i64>(LOCAL));
    let prepare = Prepare { topk_idx: &*topk_idx, token_counts: &mut *counts, total: None };
    let step = handle.prepare(prepare, Stream::DEFAULT).unwrap();
    let unscaled = Dispatch {
        tokens: Rows::new(&*data, WIDE).with_scales(&*scales),
        recv_tokens: RowsMut::new(&mut *recv, WIDE),
        weights: None,
    };
    let error = step.dispatch(unscaled, Stream::DEFAULT).unwrap_err();
    assert_eq!(error.argument(), Some("recv_tokens"), "{error}");
    let dispatch = Dispatch {
        tokens: Rows::new(&*data, WIDE).with_scales(&*scales),
        recv_tokens: RowsMut::new(&mut *recv, WIDE).with_scales(&mut *recv_scales),
        weights: None,
    };
    step.dispatch(dispatch, Stream::DEFAULT).unwrap();
    let (recv, recv_scales) = (recv.get(C * WIDE), recv_scales.get(C * WIDE / 32));
    let sources = sources(0);
    assert!(sources.iter().flatten().count() > T, "many rows are compared");
    for (row, source) in sources.into_iter().enumerate() {
        let Some((from, token)) = source else { continue };
        assert!((0..WIDE).all(|i| recv[row * WIDE + i].0 == byte(from, token * WIDE + i)), "row {row}");
        let width = WIDE / 32;
        assert!((0..width).all(|i| recv_scales[row * width + i].0 == byte(from + 9, token * width + i)), "row {row}");
    }
    drop(handle);
    group.shutdown().unwrap();
}

#[test]
fn registered_memory_is_symmetric_until_it_is_not() {
    if as_ranks("registered_memory_is_symmetric_until_it_is_not") {
        return;
    }
    let device = Alone::on(rank() as i32);
    let group = builder().max_recv_tokens_per_rank(C as u32).zero_copy(true).build().unwrap();
    let mut handle = group.layer(LAYER).unwrap().handle().unwrap();
    let mut pointer = std::ptr::null_mut();
    let alloc = loaded().nccl.ncclMemAlloc.unwrap();
    // SAFETY: `pointer` is live.
    assert_eq!(unsafe { alloc(&raw mut pointer, C * H * 4) }, 0);
    let address = pointer.expose_provenance() as u64;
    // SAFETY: the memory is NCCL's, of this size, and freed after its registration.
    let recv = unsafe { group.register::<f32>(address, C * H) }.unwrap();
    assert_eq!(group.memory_usage().unwrap().registered, 1);
    let mut step = Step {
        device: &device,
        batch: 1,
        recv,
        rows_in_recv: C,
        get: |recv, len| get(loaded(), recv.address(), len),
        put: |recv, values| put(loaded(), recv.address(), values),
    };
    step.run(&mut handle);
    step.recv.deregister().unwrap();
    assert_eq!(group.memory_usage().unwrap().registered, 0);
    // SAFETY: the window over it is gone.
    assert_eq!(unsafe { loaded().nccl.ncclMemFree.unwrap()(pointer) }, 0);
    drop(handle);
    group.shutdown().unwrap();
}

/// The examples, on two ranks, with memory and streams of cudarc.
#[cfg(feature = "cudarc")]
#[test]
fn examples() {
    let built = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    for example in ["step", "pipeline"] {
        let folder = tempfile::tempdir().unwrap();
        // cudarc looks for the driver by its own name.
        let host = built.join("libnvte_ep_host.so");
        std::os::unix::fs::symlink(&host, folder.path().join("libcuda.so.1")).unwrap();
        let start = |rank: usize| {
            let mut command = Command::new(built.parent().unwrap().join("examples").join(example));
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
            command.env("WORLD_SIZE", RANKS.to_string()).env("NVTE_EP_HOST_DEVICES", RANKS.to_string());
            command.env("NVTE_EP_EXAMPLE_RENDEZVOUS", folder.path().join("id"));
            command.env("NVTE_EP_RUNTIME", "host").env("NVTE_EP_HOST_LIB", &host);
            command.env("LD_LIBRARY_PATH", folder.path()).spawn().unwrap()
        };
        wait((0..RANKS).map(start).collect());
    }
}
