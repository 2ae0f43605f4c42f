//! One rank's run: a mixture-of-experts layer, forward and backward, through libnvte_ep.so, every output checked.

use crate::Outcome;
use crate::compare::Comparison;
use crate::device::{Communicator, Device, Memory};
use crate::digest::Digest;
use crate::element::{Element, Plain, bytes_of};
use crate::emulate::{self, Pass};
use crate::experts::Experts;
use crate::library::{Library, NO_WINDOW, Tensor};
use crate::parallel;
use crate::progress::Progress;
use crate::reference::{Reference, Rows, Truth, WeightGradients};
use crate::rendezvous::Rendezvous;
use crate::report::{DigestLine, RankReport, StepReport};
use crate::session::{Session, Setup, mapped_file};
use nvte_ep_core::ffi::register_layer::{NVTEEpGroupConfig, NVTEEpHandle, NVTEEpLayerConfig};
use nvte_ep_core::ffi::types::{kNVTEByte, kNVTEFloat32, kNVTEInt32, kNVTEInt64};
use nvte_ep_core::sys::catch_foreign;
use std::ffi::c_int;

/// Bytes of a received buffer that are on the host at a time.
const CHUNK_BYTES: usize = 32 << 20;

/// Runs the rank; `report` holds what was reached, also when an error ends the run. `digest`: whether to hash the outputs.
pub fn run<E: Element>(
    setup: &Setup,
    digest: bool,
    rendezvous: &Rendezvous,
    progress: &Progress,
    report: &mut RankReport,
) -> Outcome<()> {
    let session = Session::join(setup, rendezvous, progress, report)?;
    let Session { library, device, communicator } = &session;
    let mut layer = Layer::<E>::new(setup, digest, library, device, communicator, progress, report)?;
    report.nccl_ep_path = mapped_file("libnccl_ep");
    for step in 0..setup.problem.steps {
        let (done, digests) = layer.step(step)?;
        report.steps.push(done);
        report.digests.extend(digests);
        report.outputs = layer.checks.all();
    }
    drop(layer);
    progress.at(setup.problem.steps, "shutting down");
    session.shutdown()?;
    session.leave()
}

/// All comparisons of a rank.
struct Checks {
    counts: Comparison,
    recv_tokens: Comparison,
    recv_weights: Comparison,
    result: Comparison,
    result_bits: Comparison,
    grad_expert_out: Comparison,
    grad_tokens: Comparison,
    grad_tokens_bits: Comparison,
    grad_weights: Comparison,
    grad_weights_bits: Comparison,
}

impl Checks {
    fn new() -> Self {
        let sums = "f64 reference, rounding bound";
        let bits = "bit by bit, the library's order of sums";
        Self {
            counts: Comparison::new("counts", "exactly"),
            recv_tokens: Comparison::new("recv_tokens", "bit by bit, slot order and zeroed padding"),
            recv_weights: Comparison::new("recv_topk_weights", "bit by bit, padding zero"),
            result: Comparison::new("result", sums),
            result_bits: Comparison::new("result (bits)", bits),
            grad_expert_out: Comparison::new("grad_expert_out", "bit by bit, slot order and zeroed padding"),
            grad_tokens: Comparison::new("grad_tokens", sums),
            grad_tokens_bits: Comparison::new("grad_tokens (bits)", bits),
            grad_weights: Comparison::new("grad_topk_weights", sums),
            grad_weights_bits: Comparison::new("grad_topk_weights (bits)", "bit by bit"),
        }
    }

    fn all(&self) -> Vec<Comparison> {
        [
            &self.counts,
            &self.recv_tokens,
            &self.recv_weights,
            &self.result,
            &self.result_bits,
            &self.grad_expert_out,
            &self.grad_tokens,
            &self.grad_tokens_bits,
            &self.grad_weights,
            &self.grad_weights_bits,
        ]
        .map(Clone::clone)
        .to_vec()
    }
}

/// The device memory of the layer.
struct Buffers {
    handle: Memory,
    counts: Memory,
    topk_idx: Memory,
    topk_weights: Memory,
    tokens: Memory,
    recv_tokens: Memory,
    recv_weights: Memory,
    expert_out: Memory,
    result: Memory,
    grad_result: Memory,
    grad_expert_out: Memory,
    grad_recv: Memory,
    grad_recv_weights: Memory,
    grad_tokens: Memory,
    grad_weights: Memory,
}

/// A registered layer and everything to run and check it.
struct Layer<'a, E> {
    setup: &'a Setup<'a>,
    digest: bool,
    library: &'a Library,
    device: &'a Device,
    communicator: &'a Communicator,
    progress: &'a Progress,
    buffers: Buffers,
    handle: NVTEEpHandle,
    /// Keeps the handle's tensor alive.
    _handle_tensor: Tensor<'a>,
    capacity: usize,
    experts: Experts,
    reference: Reference<'a>,
    checks: Checks,
    element: std::marker::PhantomData<E>,
}

/// What the forward pass leaves for the backward pass.
struct Received {
    /// Local expert of every received row.
    experts: Vec<usize>,
    /// Weight of every received row; zero for padding.
    weights: Vec<f32>,
    /// A x of every received row.
    inner: Vec<f64>,
}

impl<'a, E: Element> Layer<'a, E> {
    fn new(
        setup: &'a Setup<'a>,
        digest: bool,
        library: &'a Library,
        device: &'a Device,
        communicator: &'a Communicator,
        progress: &'a Progress,
        report: &mut RankReport,
    ) -> Outcome<Self> {
        let problem = setup.problem;
        progress.at(0, "computing experts and reference");
        let capacity = problem.capacity(setup.threads);
        report.capacity = capacity;
        let int = |value: usize| c_int::try_from(value).map_err(|_| format!("{value} does not fit a C int"));
        let group = NVTEEpGroupConfig {
            ep_size: int(problem.ranks)?,
            num_experts: int(problem.experts)?,
            max_tokens_per_rank: int(problem.tokens)?,
            max_recv_tokens_per_rank: int(capacity)?,
            hidden_dim: int(problem.hidden)?,
            max_num_sms: int(setup.max_sms)?,
            allow_handle_mem_reloc: 0,
            max_token_dtype: E::DTYPE.code(),
            zero_copy: 0,
        };
        let experts = Experts::new(problem, setup.threads);
        let mut reference = Reference::new(problem, setup.rank, setup.threads);
        reference.domain = communicator.domain()?;
        progress.at(0, "nvte_ep_initialize");
        let (initialize, comm) = (library.functions.nvte_ep_initialize, communicator.raw.cast());
        // SAFETY: the communicator is live and outlives the group; the configuration is passed by value.
        catch_foreign("nvte_ep_initialize", || unsafe { initialize(comm, group) })?;
        let config = NVTEEpLayerConfig {
            num_local_experts: int(problem.local_experts())?,
            top_k: int(problem.top_k)?,
            dispatch_output_per_expert_alignment: problem.align,
        };
        let mut handle_bytes = 0;
        let (register, out) = (library.functions.nvte_ep_register_layer, &raw mut handle_bytes);
        // SAFETY: `out` points to a live size_t.
        let id = catch_foreign("nvte_ep_register_layer", || unsafe { register(config, out) })?;
        let (row, width) = (problem.hidden * size_of::<E>(), problem.top_k);
        let (sent, received) = (problem.tokens * row, capacity * row);
        let buffers = Buffers {
            handle: device.allocate(handle_bytes)?,
            counts: device.allocate(problem.local_experts() * 4)?,
            topk_idx: device.allocate(problem.tokens * width * 8)?,
            topk_weights: device.allocate(problem.tokens * width * 4)?,
            tokens: device.allocate(sent)?,
            recv_tokens: device.allocate(received)?,
            recv_weights: device.allocate(capacity * 4)?,
            expert_out: device.allocate(received)?,
            result: device.allocate(sent)?,
            grad_result: device.allocate(sent)?,
            grad_expert_out: device.allocate(received)?,
            grad_recv: device.allocate(received)?,
            grad_recv_weights: device.allocate(capacity * 4)?,
            grad_tokens: device.allocate(sent)?,
            grad_weights: device.allocate(problem.tokens * width * 4)?,
        };
        let handle_tensor = library.tensors.tensor(buffers.handle.address, kNVTEByte, &[handle_bytes])?;
        Ok(Self {
            setup,
            digest,
            library,
            device,
            communicator,
            progress,
            handle: NVTEEpHandle { id, mem: handle_tensor.raw },
            _handle_tensor: handle_tensor,
            buffers,
            capacity,
            experts,
            reference,
            checks: Checks::new(),
            element: std::marker::PhantomData,
        })
    }

    fn step(&mut self, step: usize) -> Outcome<(StepReport, Vec<DigestLine>)> {
        let problem = self.setup.problem;
        let (truth, rows) = (self.reference.truth(step), problem.tokens_of(step, self.setup.rank));
        self.progress.at(step, "uploading inputs");
        self.upload_inputs(&truth)?;
        let mut log = StepLog { step, digest: self.digest, threads: self.setup.threads, ..StepLog::default() };
        let counts = self.forward(&truth, rows, &mut log)?;
        let received = self.run_experts(&truth, &counts, &mut log)?;
        let expected_weight_gradients = self.combine(&truth, rows, &mut log)?;
        self.backward(&truth, rows, &received, &expected_weight_gradients, &mut log)?;
        let routing = &truth.routing[self.setup.rank];
        let padding = truth.layout.padding();
        let report = StepReport {
            tokens: rows,
            entries: routing.live(),
            received: truth.layout.slots.len() - padding,
            padding,
            counts,
            milliseconds: log.milliseconds,
        };
        Ok((report, log.digests))
    }

    fn upload_inputs(&self, truth: &Truth) -> Outcome<()> {
        let (problem, buffers) = (self.setup.problem, &self.buffers);
        let routing = &truth.routing[self.setup.rank];
        for outputs in [
            &buffers.counts,
            &buffers.recv_tokens,
            &buffers.recv_weights,
            &buffers.expert_out,
            &buffers.result,
            &buffers.grad_expert_out,
            &buffers.grad_recv,
            &buffers.grad_recv_weights,
            &buffers.grad_tokens,
            &buffers.grad_weights,
        ] {
            self.device.poison(outputs)?;
        }
        let indices: Vec<i64> = routing.experts.iter().map(|&expert| i64::from(expert)).collect();
        self.device.upload(&buffers.topk_idx, 0, &indices)?;
        self.device.upload(&buffers.topk_weights, 0, &routing.weights)?;
        let mut rows = vec![E::default(); routing.rows * problem.hidden];
        let (step, rank) = (truth.step, self.setup.rank);
        parallel::each(self.setup.threads, &mut rows, problem.hidden, |row, out| problem.token(step, rank, row, out));
        self.device.upload(&buffers.tokens, 0, &rows)?;
        parallel::each(self.setup.threads, &mut rows, problem.hidden, |row, out| {
            problem.gradient(step, rank, row, out);
        });
        self.device.upload(&buffers.grad_result, 0, &rows)
    }

    /// Times one call on the stream, begun by all ranks together.
    fn call(&self, log: &mut StepLog, name: &'static str, call: impl Fn() + Copy) -> Outcome<()> {
        self.progress.at(log.step, name);
        self.communicator.barrier(self.device)?;
        let elapsed = self.device.timed(|| Ok(catch_foreign(name, call)?));
        log.milliseconds.push(elapsed.map_err(|error| format!("{error} (in step {})", log.step))?);
        Ok(())
    }

    /// Prepare and dispatch; the counts that prepare reported.
    fn forward(&mut self, truth: &Truth, rows: usize, log: &mut StepLog) -> Outcome<Vec<i32>> {
        let (problem, buffers, library) = (self.setup.problem, &self.buffers, self.library);
        let (hidden, top_k, local) = (problem.hidden, problem.top_k, problem.local_experts());
        let dtype = E::DTYPE.code();
        let topk_idx = library.tensors.tensor(buffers.topk_idx.address, kNVTEInt64, &[rows, top_k])?;
        let counts_out = library.tensors.tensor(buffers.counts.address, kNVTEInt32, &[local])?;
        let tokens = library.tensors.tensor(buffers.tokens.address, dtype, &[rows, hidden])?;
        let weights = library.tensors.tensor(buffers.topk_weights.address, kNVTEFloat32, &[rows, top_k])?;
        let recv_tokens = library.tensors.tensor(buffers.recv_tokens.address, dtype, &[self.capacity, hidden])?;
        let recv_weights = library.tensors.tensor(buffers.recv_weights.address, kNVTEFloat32, &[self.capacity])?;
        let (handle, stream, align) = (self.handle, self.device.stream(), problem.align);
        let (prepare, dispatch) = (library.functions.nvte_ep_prepare, library.functions.nvte_ep_dispatch);
        let (idx, counts_raw) = (topk_idx.raw, counts_out.raw);
        self.call(log, "nvte_ep_prepare", || {
            // SAFETY: handle, tensors and stream are live, and their memory lives as long as the process.
            unsafe { prepare(handle, idx, counts_raw, align, stream) };
        })?;
        let mut counts = vec![0i32; local];
        self.device.download(&buffers.counts, 0, &mut counts)?;
        self.reference.counts(truth, &counts, &mut self.checks.counts);
        log.hash("counts", &counts, 1);
        let [tokens, weights, recv_tokens, recv_weights] =
            [&tokens, &weights, &recv_tokens, &recv_weights].map(|t| t.raw);
        self.call(log, "nvte_ep_dispatch", || {
            // SAFETY: as above.
            unsafe {
                dispatch(
                    handle,
                    idx,
                    tokens,
                    NO_WINDOW,
                    weights,
                    NO_WINDOW,
                    recv_tokens,
                    NO_WINDOW,
                    recv_weights,
                    NO_WINDOW,
                    stream,
                )
            };
        })?;
        Ok(counts)
    }

    /// Rows that are on the host at a time.
    fn chunk_rows(&self) -> usize {
        (CHUNK_BYTES / (self.setup.problem.hidden * size_of::<E>())).max(16)
    }

    /// Checks what dispatch delivered and runs the local experts over it, weighted. Rows of padding get NaN, which
    /// combine must not read.
    fn run_experts(&mut self, truth: &Truth, counts: &[i32], log: &mut StepLog) -> Outcome<Received> {
        self.progress.at(truth.step, "experts");
        let (problem, threads) = (self.setup.problem, self.setup.threads);
        let (hidden, first_expert) = (problem.hidden, self.setup.rank * problem.local_experts());
        let mut experts = Vec::new();
        for (expert, &count) in counts.iter().enumerate() {
            // Counts that do not fit are reported already; the run goes on within the buffer, as the peers wait for it.
            let count = usize::try_from(count).unwrap_or(0).min(self.capacity - experts.len());
            experts.resize(experts.len() + count, first_expert + expert);
        }
        let total = experts.len();
        let mut weights = vec![0f32; total];
        self.device.download(&self.buffers.recv_weights, 0, &mut weights)?;
        self.reference.weights(truth, &weights, &mut self.checks.recv_weights);
        log.hash("recv_topk_weights", &weights, 1);
        let dim = self.experts.inner_len();
        let mut inner = vec![0.0; total * dim];
        let chunk = self.chunk_rows().min(total.max(1));
        let (mut rows, mut outs) = (vec![E::default(); chunk * hidden], vec![E::default(); chunk * hidden]);
        let mut digest = Digest::new();
        for first in (0..total).step_by(chunk) {
            let count = chunk.min(total - first);
            let (rows, outs) = (&mut rows[..count * hidden], &mut outs[..count * hidden]);
            let offset = first * hidden * size_of::<E>();
            self.device.download(&self.buffers.recv_tokens, offset, rows)?;
            self.reference.rows(truth, Rows::Tokens, first, rows, &mut self.checks.recv_tokens);
            log.add(&mut digest, rows, hidden);
            let inner = inner[first * dim..(first + count) * dim].chunks_mut(dim);
            let mut jobs: Vec<_> = outs.chunks_mut(hidden).zip(inner).enumerate().collect();
            parallel::each(threads, &mut jobs, 16, |_, jobs| {
                let mut scratch = self.experts.scratch();
                for (row, (out, inner)) in jobs {
                    let (at, x) = (first + *row, &rows[*row * hidden..(*row + 1) * hidden]);
                    if weights[at] == 0.0 {
                        out.fill(E::NAN);
                        continue;
                    }
                    self.experts.forward(experts[at], weights[at], x, inner, out, &mut scratch);
                }
            });
            self.device.upload(&self.buffers.expert_out, offset, outs)?;
        }
        log.finish("recv_tokens", digest, total);
        Ok(Received { experts, weights, inner })
    }

    fn combine(&mut self, truth: &Truth, rows: usize, log: &mut StepLog) -> Outcome<WeightGradients> {
        let (buffers, library, hidden) = (&self.buffers, self.library, self.setup.problem.hidden);
        let dtype = E::DTYPE.code();
        let expert_out = library.tensors.tensor(buffers.expert_out.address, dtype, &[self.capacity, hidden])?;
        let result = library.tensors.tensor(buffers.result.address, dtype, &[rows, hidden])?;
        let (handle, stream, combine) = (self.handle, self.device.stream(), library.functions.nvte_ep_combine);
        let (expert_out, result) = (expert_out.raw, result.raw);
        self.call(log, "nvte_ep_combine", || {
            // SAFETY: handle, tensors and stream are live, and their memory lives as long as the process.
            unsafe { combine(handle, expert_out, NO_WINDOW, result, stream) };
        })?;
        let mut got = vec![E::default(); rows * hidden];
        self.device.download(&buffers.result, 0, &mut got)?;
        log.hash("result", &got, hidden);
        self.progress.at(truth.step, "checking the result");
        let expected = self.reference.result(truth, &got, &mut self.checks.result);
        let what = (self.setup.problem, &self.experts);
        let whose = (truth, self.setup.rank);
        emulate::check(what, whose, self.setup.threads, Pass::Forward, &got, &mut self.checks.result_bits);
        Ok(expected)
    }

    fn backward(
        &mut self,
        truth: &Truth,
        rows: usize,
        received: &Received,
        expected_weight_gradients: &WeightGradients,
        log: &mut StepLog,
    ) -> Outcome<()> {
        let (buffers, library, problem) = (&self.buffers, self.library, self.setup.problem);
        let (hidden, dtype) = (problem.hidden, E::DTYPE.code());
        let grad_result = library.tensors.tensor(buffers.grad_result.address, dtype, &[rows, hidden])?;
        let grad_expert_out =
            library.tensors.tensor(buffers.grad_expert_out.address, dtype, &[self.capacity, hidden])?;
        let grad_recv = library.tensors.tensor(buffers.grad_recv.address, dtype, &[self.capacity, hidden])?;
        let grad_recv_weights =
            library.tensors.tensor(buffers.grad_recv_weights.address, kNVTEFloat32, &[self.capacity])?;
        let grad_tokens = library.tensors.tensor(buffers.grad_tokens.address, dtype, &[rows, hidden])?;
        let grad_weights =
            library.tensors.tensor(buffers.grad_weights.address, kNVTEFloat32, &[rows, problem.top_k])?;
        let (handle, stream) = (self.handle, self.device.stream());
        let functions = &library.functions;
        let (combine_bwd, dispatch_bwd) = (functions.nvte_ep_combine_bwd, functions.nvte_ep_dispatch_bwd);
        let [grad_result, grad_expert_out] = [&grad_result, &grad_expert_out].map(|tensor| tensor.raw);
        self.call(log, "nvte_ep_combine_bwd", || {
            // SAFETY: handle, tensors and stream are live, and their memory lives as long as the process.
            unsafe { combine_bwd(handle, grad_result, NO_WINDOW, grad_expert_out, NO_WINDOW, stream) };
        })?;
        self.run_experts_backward(truth, received, log)?;
        let [recv, recv_weights, tokens, weights] =
            [&grad_recv, &grad_recv_weights, &grad_tokens, &grad_weights].map(|tensor| tensor.raw);
        self.call(log, "nvte_ep_dispatch_bwd", || {
            // SAFETY: as above.
            unsafe { dispatch_bwd(handle, recv, NO_WINDOW, recv_weights, NO_WINDOW, tokens, weights, stream) };
        })?;
        let mut got = vec![E::default(); rows * hidden];
        self.device.download(&self.buffers.grad_tokens, 0, &mut got)?;
        log.hash("grad_tokens", &got, hidden);
        let mut got_weights = vec![0f32; rows * problem.top_k];
        self.device.download(&self.buffers.grad_weights, 0, &mut got_weights)?;
        log.hash("grad_topk_weights", &got_weights, problem.top_k);
        self.progress.at(truth.step, "checking the gradients");
        self.reference.grad_tokens(truth, &got, &mut self.checks.grad_tokens);
        self.reference.grad_weights(truth, expected_weight_gradients, &got_weights, &mut self.checks.grad_weights);
        let (what, whose) = ((problem, &self.experts), (truth, self.setup.rank));
        let bits = &mut self.checks.grad_tokens_bits;
        let exact = emulate::check(what, whose, self.setup.threads, Pass::Backward, &got, bits);
        for (row, (exact, got)) in exact.chunks(problem.top_k).zip(got_weights.chunks(problem.top_k)).enumerate() {
            self.checks.grad_weights_bits.bits(truth.step, row, exact, got);
        }
        Ok(())
    }

    /// Checks what combine's backward pass delivered and runs the local experts' backward pass over it. Rows of padding
    /// get NaN, which dispatch's backward pass must not read.
    fn run_experts_backward(&mut self, truth: &Truth, received: &Received, log: &mut StepLog) -> Outcome<()> {
        self.progress.at(truth.step, "experts, backward");
        let (hidden, dim) = (self.setup.problem.hidden, self.experts.inner_len());
        let total = received.experts.len();
        let chunk = self.chunk_rows().min(total.max(1));
        let (mut grads, mut outs) = (vec![E::default(); chunk * hidden], vec![E::default(); chunk * hidden]);
        let mut weight_grads = vec![f32::NAN; total];
        let mut digest = Digest::new();
        for first in (0..total).step_by(chunk) {
            let count = chunk.min(total - first);
            let (grads, outs) = (&mut grads[..count * hidden], &mut outs[..count * hidden]);
            let offset = first * hidden * size_of::<E>();
            self.device.download(&self.buffers.grad_expert_out, offset, grads)?;
            self.reference.rows(truth, Rows::Gradients, first, grads, &mut self.checks.grad_expert_out);
            log.add(&mut digest, grads, hidden);
            let weight_grads = weight_grads[first..first + count].iter_mut();
            let mut jobs: Vec<_> = outs.chunks_mut(hidden).zip(weight_grads).enumerate().collect();
            parallel::each(self.setup.threads, &mut jobs, 16, |_, jobs| {
                let mut scratch = self.experts.scratch();
                for (row, (out, weight_grad)) in jobs {
                    let (at, grad) = (first + *row, &grads[*row * hidden..(*row + 1) * hidden]);
                    let (expert, weight) = (received.experts[at], received.weights[at]);
                    if weight == 0.0 {
                        out.fill(E::NAN);
                        continue;
                    }
                    let inner = &received.inner[at * dim..(at + 1) * dim];
                    **weight_grad = self.experts.backward(expert, weight, grad, inner, out, &mut scratch);
                }
            });
            self.device.upload(&self.buffers.grad_recv, offset, outs)?;
        }
        log.finish("grad_expert_out", digest, total);
        self.device.upload(&self.buffers.grad_recv_weights, 0, &weight_grads)
    }
}

/// What a step leaves for the report.
#[derive(Debug, Default)]
struct StepLog {
    step: usize,
    digest: bool,
    threads: usize,
    milliseconds: Vec<f64>,
    digests: Vec<DigestLine>,
}

impl StepLog {
    /// Hashes a whole output, where digests are wanted.
    fn hash<T: Plain>(&mut self, output: &str, data: &[T], width: usize) {
        let mut digest = Digest::new();
        self.add(&mut digest, data, width);
        self.finish(output, digest, data.len() / width);
    }

    /// Adds rows of `width` elements to a hash.
    fn add<T: Plain>(&self, digest: &mut Digest, data: &[T], width: usize) {
        if self.digest {
            digest.rows(self.threads, bytes_of(data), width * size_of::<T>());
        }
    }

    /// Ends a hash.
    fn finish(&mut self, output: &str, digest: Digest, rows: usize) {
        if self.digest {
            let hash = digest.finish();
            self.digests.push(DigestLine { step: self.step, output: output.into(), rows, hash });
        }
    }
}
