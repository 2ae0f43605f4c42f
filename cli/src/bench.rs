//! Staged against zero-copy groups on one rank: times, device memory, and whether both give the same bits.

use crate::Outcome;
use crate::args::TransferArg;
use crate::device::{Device, Memory};
use crate::digest::Digest;
use crate::library::{Library, NO_WINDOW, Tensor};
use crate::parallel;
use crate::progress::Progress;
use crate::rendezvous::Rendezvous;
use crate::report::{BENCH_CALLS, DigestLine, ModeMemory, ModeReport, RankReport, median};
use crate::session::{Session, Setup, mapped_file};
use half::bf16;
use nvte_ep_core::env::RuntimeKind;
use nvte_ep_core::ffi::comm_window::NVTECommWindow;
use nvte_ep_core::ffi::ext::{NVTEEpExtMemoryUsage, NVTEEpExtRecvTotals};
use nvte_ep_core::ffi::register_layer::{NVTEEpGroupConfig, NVTEEpHandle, NVTEEpLayerConfig};
use nvte_ep_core::ffi::types::{kNVTEBFloat16, kNVTEByte, kNVTEFloat8E4M3, kNVTEFloat32, kNVTEInt32, kNVTEInt64};
use nvte_ep_core::sys::catch_foreign;
use std::ffi::c_int;

/// Iterations that are not timed: the first ones compile and load kernels.
const WARM_UP: usize = 3;

/// Values that share a scale in MXFP8.
const BLOCK: usize = 32;

/// Bytes of an output that are on the host at a time.
const CHUNK_BYTES: usize = 32 << 20;

/// How payloads travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Through the library's buffers.
    Staged,
    /// Between windows.
    ZeroCopy,
}

impl Transfer {
    const fn name(self) -> &'static str {
        match self {
            Self::Staged => "staged",
            Self::ZeroCopy => "zero-copy",
        }
    }
}

/// What to time, in order.
pub const fn transfers(arg: TransferArg) -> &'static [Transfer] {
    match arg {
        TransferArg::Both => &[Transfer::Staged, Transfer::ZeroCopy],
        TransferArg::Staged => &[Transfer::Staged],
        TransferArg::ZeroCopy => &[Transfer::ZeroCopy],
    }
}

/// Whether a rank timed all and got the same outputs each time.
pub fn same(rank: &RankReport, arg: TransferArg) -> bool {
    let whole = rank.modes.len() == transfers(arg).len() && rank.modes.iter().all(|mode| !mode.digests.is_empty());
    whole && rank.modes.windows(2).all(|pair| pair[0].digests == pair[1].digests)
}

/// Memory that peers may reach, and where that is.
#[derive(Clone, Copy)]
struct Placed {
    memory: Memory,
    window: NVTECommWindow,
}

/// What stays the same for all groups.
struct Inputs {
    topk_idx: Memory,
    topk_weights: Memory,
    tokens: Memory,
    /// As MXFP8 the first bytes of `tokens`, with these as scales.
    scales: Memory,
    grad_result: Memory,
    counts: Memory,
    recv_weights: Memory,
    grad_recv_weights: Memory,
    result: Memory,
    grad_tokens: Memory,
    grad_weights: Memory,
}

/// The payloads that a rank exchanges with its peers: written by dispatch, read by combine, and the scales.
struct Exchanged {
    written: Placed,
    read: Placed,
    scales: Placed,
}

struct Bench<'a> {
    setup: &'a Setup<'a>,
    session: &'a Session,
    progress: &'a Progress,
    inputs: Inputs,
    capacity: usize,
}

/// Runs the rank; `report` holds what was reached, also when an error ends the run.
pub fn run(
    setup: &Setup,
    transfer: TransferArg,
    rendezvous: &Rendezvous,
    progress: &Progress,
    report: &mut RankReport,
) -> Outcome<()> {
    let session = Session::join(setup, rendezvous, progress, report)?;
    progress.at(0, "preparing inputs");
    let problem = setup.problem;
    let demand = problem.uniform_demand().max(problem.tokens);
    // Whatever the alignment, slabs end within the buffers.
    let capacity = demand.next_multiple_of(128);
    report.capacity = capacity;
    let bench = Bench { setup, session: &session, progress, inputs: Inputs::new(setup, &session, capacity)?, capacity };
    // What the first group of a process makes NCCL allocate for good is not a group's.
    bench.initialize(Transfer::Staged)?;
    session.shutdown()?;
    for &transfer in transfers(transfer) {
        let mode = bench.mode(transfer)?;
        report.modes.push(mode);
        report.nccl_ep_path = mapped_file("libnccl_ep");
    }
    session.leave()
}

fn int(value: usize) -> Outcome<c_int> {
    c_int::try_from(value).map_err(|_| format!("{value} does not fit a C int").into())
}

impl Inputs {
    fn new(setup: &Setup, session: &Session, capacity: usize) -> Outcome<Self> {
        let (problem, device) = (setup.problem, &session.device);
        let (tokens, hidden, entries) = (problem.tokens, problem.hidden, problem.tokens * problem.top_k);
        let inputs = Self {
            topk_idx: device.allocate(entries * 8)?,
            topk_weights: device.allocate(entries * 4)?,
            tokens: device.allocate(tokens * hidden * 2)?,
            scales: device.allocate(tokens * hidden / BLOCK)?,
            grad_result: device.allocate(tokens * hidden * 2)?,
            counts: device.allocate(problem.local_experts() * 4)?,
            recv_weights: device.allocate(capacity * 4)?,
            grad_recv_weights: device.allocate(capacity * 4)?,
            result: device.allocate(tokens * hidden * 2)?,
            grad_tokens: device.allocate(tokens * hidden * 2)?,
            grad_weights: device.allocate(entries * 4)?,
        };
        let routing = problem.uniform(setup.rank);
        let indices: Vec<i64> = routing.experts.iter().map(|&expert| i64::from(expert)).collect();
        device.upload(&inputs.topk_idx, 0, &indices)?;
        device.upload(&inputs.topk_weights, 0, &routing.weights)?;
        let mut rows = vec![bf16::ZERO; tokens * hidden];
        parallel::each(setup.threads, &mut rows, hidden, |row, out| problem.token(0, setup.rank, row, out));
        device.upload(&inputs.tokens, 0, &rows)?;
        parallel::each(setup.threads, &mut rows, hidden, |row, out| problem.gradient(0, setup.rank, row, out));
        device.upload(&inputs.grad_result, 0, &rows)?;
        let scales: Vec<u8> = (0..tokens * hidden / BLOCK).map(|i| (i * 7 + setup.rank) as u8).collect();
        device.upload(&inputs.scales, 0, &scales)?;
        Ok(inputs)
    }
}

impl Bench<'_> {
    fn library(&self) -> &Library {
        &self.session.library
    }

    fn device(&self) -> &Device {
        &self.session.device
    }

    fn initialize(&self, transfer: Transfer) -> Outcome<()> {
        let problem = self.setup.problem;
        let config = NVTEEpGroupConfig {
            ep_size: int(problem.ranks)?,
            num_experts: int(problem.experts)?,
            max_tokens_per_rank: int(problem.tokens)?,
            max_recv_tokens_per_rank: int(self.capacity)?,
            hidden_dim: int(problem.hidden)?,
            max_num_sms: int(self.setup.max_sms)?,
            allow_handle_mem_reloc: 0,
            max_token_dtype: kNVTEBFloat16,
            zero_copy: c_int::from(transfer == Transfer::ZeroCopy),
        };
        let (initialize, comm) = (self.library().functions.nvte_ep_initialize, self.session.communicator.raw.cast());
        // SAFETY: the communicator is live and outlives the group; the configuration is passed by value.
        Ok(catch_foreign("nvte_ep_initialize", || unsafe { initialize(comm, config) })?)
    }

    /// Free bytes of the device while no rank allocates.
    fn free_bytes(&self) -> Outcome<usize> {
        let communicator = &self.session.communicator;
        communicator.barrier(self.device())?;
        let (free, _) = self.device().base.cuda.memory_info()?;
        communicator.barrier(self.device())?;
        Ok(free)
    }

    /// Memory for the exchanged payloads, made alike on every rank.
    fn exchanged(&self, transfer: Transfer) -> Outcome<Exchanged> {
        let rows = self.capacity * self.setup.problem.hidden;
        let place = |bytes: usize| -> Outcome<Placed> {
            if transfer == Transfer::Staged {
                return Ok(Placed { memory: self.device().allocate(bytes)?, window: NO_WINDOW });
            }
            let (mut address, mut window) = (std::ptr::null_mut(), NO_WINDOW);
            let alloc = self.library().functions.nvte_ep_ext_symm_alloc;
            let (out, handle, offset) = (&raw mut address, &raw mut window.window, &raw mut window.offset);
            // SAFETY: all three are live; every rank makes this call.
            catch_foreign("nvte_ep_ext_symm_alloc", || unsafe { alloc(bytes, out, handle, offset) })?;
            Ok(Placed { memory: Memory::of(address.expose_provenance() as u64, bytes), window })
        };
        Ok(Exchanged { written: place(rows * 2)?, read: place(rows * 2)?, scales: place(rows / BLOCK)? })
    }

    fn mode(&self, transfer: Transfer) -> Outcome<ModeReport> {
        let (problem, library, device) = (self.setup.problem, self.library(), self.device());
        self.progress.at(0, transfer.name());
        // The caller's own memory does not count as the group's.
        let staged = if transfer == Transfer::Staged { Some(self.exchanged(transfer)?) } else { None };
        let before = self.free_bytes()?;
        self.initialize(transfer)?;
        let config = NVTEEpLayerConfig {
            num_local_experts: int(problem.local_experts())?,
            top_k: int(problem.top_k)?,
            dispatch_output_per_expert_alignment: problem.align,
        };
        let mut handle_bytes = 0;
        let (register, out) = (library.functions.nvte_ep_register_layer, &raw mut handle_bytes);
        // SAFETY: `out` points to a live size_t.
        let id = catch_foreign("nvte_ep_register_layer", || unsafe { register(config, out) })?;
        let handle_memory = device.allocate(handle_bytes)?;
        let exchanged = match staged {
            Some(exchanged) => exchanged,
            None => self.exchanged(transfer)?,
        };
        let handle_tensor = library.tensor(handle_memory.address, kNVTEByte, &[handle_bytes])?;
        let calls = Calls::new(self, &exchanged, NVTEEpHandle { id, mem: handle_tensor.raw })?;
        let digests = self.outputs(&calls, &exchanged)?;
        let after = self.free_bytes()?;
        let milliseconds = self.times(&calls)?;
        let mut usage = NVTEEpExtMemoryUsage::default();
        let (report, out) = (library.functions.nvte_ep_ext_memory_usage, &raw mut usage);
        // SAFETY: `out` points to a live structure that says its size.
        catch_foreign("nvte_ep_ext_memory_usage", || unsafe { report(out) })?;
        drop(calls);
        drop(handle_tensor);
        self.session.shutdown()?;
        let payloads = [exchanged.written, exchanged.read, exchanged.scales].iter().map(|p| p.memory.bytes()).sum();
        let memory = ModeMemory {
            staging: usage.staging,
            scratch: usage.routing_map + usage.workspace + usage.library,
            handle: usage.handle_memory,
            symmetric: usage.symm_reserved,
            predicted: usage.total + usage.handle_memory,
            measured: self.measured(before, after)?,
            payloads,
        };
        Ok(ModeReport { transfer: transfer.name().into(), milliseconds, memory, digests })
    }

    /// What one rank took of the device in between, where ranks of one device take the same.
    fn measured(&self, before: usize, after: usize) -> Outcome<Option<u64>> {
        let device = self.device();
        if device.base.runtime == RuntimeKind::Host {
            // Its device memory is the machine's, where others come and go.
            return Ok(None);
        }
        let devices = device.base.cuda.device_count()?;
        let sharing = (0..self.setup.problem.ranks).filter(|rank| *rank as i32 % devices == device.ordinal).count();
        Ok(Some((before.saturating_sub(after) / sharing.max(1)) as u64))
    }

    /// Hashes of what every call gives, from fresh inputs.
    fn outputs(&self, calls: &Calls, exchanged: &Exchanged) -> Outcome<Vec<DigestLine>> {
        let (problem, device, inputs) = (self.setup.problem, self.device(), &self.inputs);
        let (hidden, top_k, tokens) = (problem.hidden, problem.top_k, problem.tokens);
        let (written, read, scales) = (exchanged.written.memory, exchanged.read.memory, exchanged.scales.memory);
        let mut lines = Vec::new();
        let mut hash = |output: &str, memory: &Memory, rows: usize, width: usize| -> Outcome<()> {
            let mut digest = Digest::new();
            let chunk = (CHUNK_BYTES / width).max(1);
            for first in (0..rows).step_by(chunk) {
                let mut bytes = vec![0u8; chunk.min(rows - first) * width];
                device.download(memory, first * width, &mut bytes)?;
                digest.rows(self.setup.threads, &bytes, width);
            }
            lines.push(DigestLine { step: 0, output: output.into(), rows, hash: digest.finish() });
            Ok(())
        };
        for output in [&written, &read, &scales, &inputs.recv_weights, &inputs.result, &inputs.grad_weights] {
            device.poison(output)?;
        }
        self.run(calls, 0)?;
        let received = calls.received(self)?;
        hash("counts", &inputs.counts, problem.local_experts(), 4)?;
        self.run(calls, 1)?;
        hash("recv_tokens", &written, received, hidden * 2)?;
        hash("recv_topk_weights", &inputs.recv_weights, received, 4)?;
        // The experts do nothing. Combine may change its input, so each call gets a copy.
        device.copy(&read, &written, written.bytes() as usize)?;
        self.run(calls, 2)?;
        hash("result", &inputs.result, tokens, hidden * 2)?;
        device.copy(&read, &written, written.bytes() as usize)?;
        device.copy(&inputs.grad_recv_weights, &inputs.recv_weights, self.capacity * 4)?;
        self.run(calls, 4)?;
        hash("grad_tokens", &inputs.grad_tokens, tokens, hidden * 2)?;
        hash("grad_topk_weights", &inputs.grad_weights, tokens, top_k * 4)?;
        self.run(calls, 3)?;
        hash("grad_expert_out", &written, received, hidden * 2)?;
        for (call, name) in [(5, "recv_tokens, MXFP8"), (6, "grad_expert_out, MXFP8")] {
            self.run(calls, call)?;
            hash(name, &written, received, hidden)?;
            hash(&format!("{name}, scales"), &scales, received, hidden / BLOCK)?;
        }
        Ok(lines)
    }

    fn run(&self, calls: &Calls, call: usize) -> Outcome<()> {
        self.progress.at(0, BENCH_CALLS[call]);
        calls.run(self, call)?;
        self.device().synchronize()
    }

    /// Median milliseconds of each call, all ranks beginning together.
    fn times(&self, calls: &Calls) -> Outcome<Vec<f64>> {
        let mut all = vec![Vec::new(); BENCH_CALLS.len()];
        for iteration in 0..WARM_UP + self.setup.problem.steps {
            for (call, times) in all.iter_mut().enumerate() {
                self.progress.at(iteration.saturating_sub(WARM_UP), BENCH_CALLS[call]);
                self.session.communicator.barrier(self.device())?;
                let time = self.device().timed(|| calls.run(self, call))?;
                if iteration >= WARM_UP {
                    times.push(time);
                }
            }
        }
        Ok(all.iter().map(|times| median(times)).collect())
    }
}

/// The calls' arguments, made once.
struct Calls<'a> {
    handle: NVTEEpHandle,
    align: usize,
    written: NVTECommWindow,
    read: NVTECommWindow,
    topk_idx: Tensor<'a>,
    counts: Tensor<'a>,
    weights: Tensor<'a>,
    tokens: Tensor<'a>,
    recv_tokens: Tensor<'a>,
    recv_weights: Tensor<'a>,
    expert_out: Tensor<'a>,
    result: Tensor<'a>,
    grad_result: Tensor<'a>,
    grad_recv_weights: Tensor<'a>,
    grad_tokens: Tensor<'a>,
    grad_weights: Tensor<'a>,
    tokens8: Tensor<'a>,
    recv_tokens8: Tensor<'a>,
}

impl<'a> Calls<'a> {
    fn new(bench: &'a Bench, exchanged: &Exchanged, handle: NVTEEpHandle) -> Outcome<Self> {
        let (problem, library, inputs) = (bench.setup.problem, bench.library(), &bench.inputs);
        let (tokens, hidden, top_k, rows) = (problem.tokens, problem.hidden, problem.top_k, bench.capacity);
        let (written, read) = (exchanged.written, exchanged.read);
        let (bf16, f32, e4m3) = (kNVTEBFloat16, kNVTEFloat32, kNVTEFloat8E4M3);
        Ok(Self {
            handle,
            align: problem.align,
            written: written.window,
            read: read.window,
            topk_idx: library.tensor(inputs.topk_idx.address, kNVTEInt64, &[tokens, top_k])?,
            counts: library.tensor(inputs.counts.address, kNVTEInt32, &[problem.local_experts()])?,
            weights: library.tensor(inputs.topk_weights.address, f32, &[tokens, top_k])?,
            tokens: library.tensor(inputs.tokens.address, bf16, &[tokens, hidden])?,
            recv_tokens: library.tensor(written.memory.address, bf16, &[rows, hidden])?,
            recv_weights: library.tensor(inputs.recv_weights.address, f32, &[rows])?,
            expert_out: library.tensor(read.memory.address, bf16, &[rows, hidden])?,
            result: library.tensor(inputs.result.address, bf16, &[tokens, hidden])?,
            grad_result: library.tensor(inputs.grad_result.address, bf16, &[tokens, hidden])?,
            grad_recv_weights: library.tensor(inputs.grad_recv_weights.address, f32, &[rows])?,
            grad_tokens: library.tensor(inputs.grad_tokens.address, bf16, &[tokens, hidden])?,
            grad_weights: library.tensor(inputs.grad_weights.address, f32, &[tokens, top_k])?,
            tokens8: library.scaled(inputs.tokens.address, e4m3, [tokens, hidden], inputs.scales.address)?,
            recv_tokens8: library.scaled(
                written.memory.address,
                e4m3,
                [rows, hidden],
                exchanged.scales.memory.address,
            )?,
        })
    }

    /// Queues one of [`BENCH_CALLS`].
    fn run(&self, bench: &Bench, call: usize) -> Outcome<()> {
        let f = &bench.library().functions;
        let (stream, handle) = (bench.device().stream(), self.handle);
        let (none, written, read) = (NO_WINDOW, self.written, self.read);
        let (idx, weights, recv_weights) = (self.topk_idx.raw, self.weights.raw, self.recv_weights.raw);
        let name = BENCH_CALLS[call];
        // SAFETY (of all below): handle, tensors, windows and stream are live, their memory lives as long as the group,
        // and every rank makes the same calls in this order.
        match call {
            0 => {
                let (prepare, counts, align) = (f.nvte_ep_prepare, self.counts.raw, self.align);
                // SAFETY: as above.
                catch_foreign(name, || unsafe { prepare(handle, idx, counts, align, stream) })?;
            }
            1 | 5 => {
                let (tokens, recv) = match call {
                    1 => (self.tokens.raw, self.recv_tokens.raw),
                    _ => (self.tokens8.raw, self.recv_tokens8.raw),
                };
                let dispatch = f.nvte_ep_dispatch;
                // SAFETY: as above.
                catch_foreign(name, || unsafe {
                    dispatch(handle, idx, tokens, none, weights, none, recv, written, recv_weights, none, stream);
                })?;
            }
            2 => {
                let (combine, rows, result) = (f.nvte_ep_combine, self.expert_out.raw, self.result.raw);
                // SAFETY: as above.
                catch_foreign(name, || unsafe { combine(handle, rows, read, result, stream) })?;
            }
            3 | 6 => {
                let (grad, rows) = match call {
                    3 => (self.grad_result.raw, self.recv_tokens.raw),
                    _ => (self.tokens8.raw, self.recv_tokens8.raw),
                };
                let combine_bwd = f.nvte_ep_combine_bwd;
                // SAFETY: as above.
                catch_foreign(name, || unsafe { combine_bwd(handle, grad, none, rows, written, stream) })?;
            }
            4 => {
                let (grad, weights) = (self.expert_out.raw, self.grad_recv_weights.raw);
                let (tokens, token_weights) = (self.grad_tokens.raw, self.grad_weights.raw);
                let dispatch_bwd = f.nvte_ep_dispatch_bwd;
                // SAFETY: as above.
                catch_foreign(name, || unsafe {
                    dispatch_bwd(handle, grad, read, weights, none, tokens, token_weights, stream);
                })?;
            }
            _ => unreachable!("there are {} calls", BENCH_CALLS.len()),
        }
        Ok(())
    }

    /// Rows that this rank receives, by the library.
    fn received(&self, bench: &Bench) -> Outcome<usize> {
        let mut totals = NVTEEpExtRecvTotals::default();
        let (read, memory, out) = (bench.library().functions.nvte_ep_ext_recv_totals, self.handle.mem, &raw mut totals);
        let stream = bench.device().stream();
        // SAFETY: handle memory and stream are live, and `out` points to a live structure that says its size.
        catch_foreign("nvte_ep_ext_recv_totals", || unsafe { read(memory, out, stream) })?;
        Ok(totals.received as usize)
    }
}
