//! How long calls take, and what a group takes of a device: staged against zero-copy groups, one library against another, over
//! sweeps of shapes.

mod calls;
mod case;
mod contestant;
mod graph;
pub mod report;
pub mod traffic;

use crate::Outcome;
use crate::args::{BenchArgs, TransferArg};
use crate::device::{Communicator, Device, Memory};
use crate::digest::Digest;
use crate::element::Element;
use crate::parallel;
use crate::progress::Progress;
use crate::rendezvous::Rendezvous;
use crate::report::{DigestLine, RankReport, median};
use crate::routing::Routing;
use crate::session::{Location, Setup, mapped_file, named_library};
use calls::{Calls, STEP};
use case::BLOCK;
pub use case::{Case, RowType};
use contestant::{Contestant, GroupShape, Handle, Variables, Window};
use graph::Graphs;
use half::{bf16, f16};
use nvte_ep_core::env::RuntimeKind;
use nvte_ep_core::ffi::ext::NVTEEpExtMemoryUsage;
use nvte_ep_core::ffi::types::kNVTEByte;
use nvte_ep_core::sys::catch_foreign;
use report::{CaseTimes, GroupMemory, GroupTimes, TIMED};
use std::ffi::c_int;
use std::time::Instant;
use traffic::{Recorded, Traffic};

/// Iterations that are not timed: the first ones compile and load kernels.
const WARM_UP: usize = 3;

/// Bytes of an output that are on the host at a time.
const CHUNK_BYTES: usize = 32 << 20;

/// Copies that the ceiling of a device's memory is the median of.
const COPIES: usize = 7;

/// How payloads travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transfer {
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

/// Memory that peers may reach, and where that is.
#[derive(Clone, Copy)]
struct Placed {
    memory: Memory,
    window: Window,
}

/// The payloads that a rank exchanges with its peers: written by dispatch, read by combine.
struct Exchanged {
    written: Placed,
    read: Placed,
    scales: Memory,
}

/// What stays the same for all groups of a case.
struct Inputs {
    topk_idx: Memory,
    topk_weights: Memory,
    tokens: Memory,
    /// Of the first bytes of `tokens` as MXFP8.
    scales: Memory,
    grad_result: Memory,
    counts: Memory,
    recv_weights: Memory,
    grad_recv_weights: Memory,
    result: Memory,
    grad_tokens: Memory,
    grad_weights: Memory,
}

/// All of a rank's run.
struct Bench<'a> {
    setup: &'a Setup<'a>,
    args: &'a BenchArgs,
    location: &'a Location,
    progress: &'a Progress,
    variables: Variables,
    graphs: Option<Graphs>,
}

/// Runs the rank; `report` holds what was reached, also when an error ends the run. Without iterations two steps of each group are
/// run and nothing else.
pub fn run(
    setup: &Setup,
    args: &BenchArgs,
    rendezvous: &Rendezvous,
    progress: &Progress,
    report: &mut RankReport,
) -> Outcome<()> {
    progress.at(0, "loading libraries");
    let recorded = args.routing_file.as_deref().map(Recorded::read).transpose()?;
    let cases = args.cases(setup.problem.ranks)?;
    let own = Contestant::load(named_library())?;
    let against = args.against.clone().map(|path| Contestant::load(Some(path))).transpose()?;
    report.library = own.version.clone().unwrap_or_else(|| "another library".into());
    let location = Location::join(setup, &own.path, rendezvous, progress, report)?;
    let graphs = if args.graph { Some(Graphs::of(&location.device)?) } else { None };
    let bench = Bench { setup, args, location: &location, progress, variables: Variables::of_the_process(), graphs };
    let groups = groups(args.transfer, &own, against.as_ref())?;
    for (number, case) in cases.iter().enumerate() {
        let routings = traffic::routings(&case.problem, case.routing, recorded.as_ref())?;
        let run = Run::new(&bench, number, case, &routings)?;
        report.cases.push(run.times(&groups)?);
        run.end()?;
        report.nccl_ep_path = mapped_file("libnccl_ep");
    }
    location.communicator.leave()
}

/// A kind of group that is timed.
struct GroupKind<'a> {
    library: &'a Contestant,
    transfer: Transfer,
    against: bool,
}

/// What is timed, in order.
fn groups<'a>(arg: TransferArg, own: &'a Contestant, against: Option<&'a Contestant>) -> Outcome<Vec<GroupKind<'a>>> {
    let transfers: &[Transfer] = match arg {
        TransferArg::Both => &[Transfer::Staged, Transfer::ZeroCopy],
        TransferArg::Staged => &[Transfer::Staged],
        TransferArg::ZeroCopy => &[Transfer::ZeroCopy],
    };
    let mut groups = Vec::new();
    for (library, against) in [(Some(own), false), (against, true)] {
        let Some(library) = library else { continue };
        for &transfer in transfers {
            if transfer == Transfer::ZeroCopy && library.extensions.is_none() {
                if arg == TransferArg::ZeroCopy {
                    let path = library.path.display();
                    return Err(format!("--transfer zero-copy takes nvte_ep_ext_symm_alloc, which {path} lacks").into());
                }
                continue;
            }
            groups.push(GroupKind { library, transfer, against });
        }
    }
    Ok(groups)
}

fn int(value: usize) -> Outcome<c_int> {
    c_int::try_from(value).map_err(|_| format!("{value} does not fit a C int").into())
}

/// Uploads the rows that `fill` makes.
fn upload<E: Element>(
    setup: &Setup,
    device: &Device,
    memory: &Memory,
    (rows, hidden): (usize, usize),
    fill: impl Fn(usize, &mut [E]) + Sync,
) -> Outcome<()> {
    let mut values = vec![E::default(); rows * hidden];
    parallel::each(setup.threads, &mut values, hidden, fill);
    device.upload(memory, 0, &values)
}

/// One case on one rank.
struct Run<'a> {
    bench: &'a Bench<'a>,
    number: usize,
    case: &'a Case,
    traffic: Traffic,
    capacity: usize,
    inputs: Inputs,
}

impl<'a> Run<'a> {
    fn new(bench: &'a Bench<'a>, number: usize, case: &'a Case, routings: &[Routing]) -> Outcome<Self> {
        bench.progress.at(0, "preparing inputs");
        let (problem, device, rank) = (&case.problem, &bench.location.device, bench.setup.rank);
        let traffic = Traffic::of(problem, routings);
        // Whatever the alignment, slabs end within the buffers.
        let capacity = traffic.demand().max(problem.tokens).next_multiple_of(128);
        let (tokens, hidden, entries) = (problem.tokens, problem.hidden, problem.tokens * problem.top_k);
        let row = case.dtype.combined_bytes(hidden);
        let inputs = Inputs {
            topk_idx: device.allocate(entries * 8)?,
            topk_weights: device.allocate(entries * 4)?,
            tokens: device.allocate(tokens * row)?,
            scales: device.allocate(tokens * hidden / BLOCK)?,
            grad_result: device.allocate(tokens * row)?,
            counts: device.allocate(problem.local_experts() * 4)?,
            recv_weights: device.allocate(capacity * 4)?,
            grad_recv_weights: device.allocate(capacity * 4)?,
            result: device.allocate(tokens * row)?,
            grad_tokens: device.allocate(tokens * row)?,
            grad_weights: device.allocate(entries * 4)?,
        };
        let routing = &routings[rank];
        let indices: Vec<i64> = routing.experts.iter().map(|&expert| i64::from(expert)).collect();
        device.upload(&inputs.topk_idx, 0, &indices)?;
        device.upload(&inputs.topk_weights, 0, &routing.weights)?;
        let scales: Vec<u8> = (0..tokens * hidden / BLOCK).map(|i| (i * 7 + rank) as u8).collect();
        device.upload(&inputs.scales, 0, &scales)?;
        macro_rules! rows {
            ($element:ty) => {{
                let shape = (tokens, hidden);
                let token = |row: usize, out: &mut [$element]| problem.token(0, rank, row, out);
                upload::<$element>(bench.setup, device, &inputs.tokens, shape, token)?;
                let gradient = |row: usize, out: &mut [$element]| problem.gradient(0, rank, row, out);
                upload::<$element>(bench.setup, device, &inputs.grad_result, shape, gradient)?;
            }};
        }
        match case.dtype {
            RowType::Bf16 | RowType::Mxfp8 => rows!(bf16),
            RowType::F16 => rows!(f16),
            RowType::F32 => rows!(f32),
        }
        Ok(Self { bench, number, case, traffic, capacity, inputs })
    }

    /// Frees the inputs.
    fn end(self) -> Outcome<()> {
        let Inputs { topk_idx, topk_weights, tokens, scales, grad_result, counts, .. } = self.inputs;
        let Inputs { recv_weights, grad_recv_weights, result, grad_tokens, grad_weights, .. } = self.inputs;
        let given = [topk_idx, topk_weights, tokens, scales, grad_result];
        let written = [counts, recv_weights, grad_recv_weights, result, grad_tokens, grad_weights];
        given.into_iter().chain(written).try_for_each(|memory| self.bench.location.device.free(memory))
    }

    const fn device(&self) -> &Device {
        &self.bench.location.device
    }

    const fn communicator(&self) -> &Communicator {
        &self.bench.location.communicator
    }

    fn at(&self, iteration: usize, what: &str) {
        let step = self.number * self.bench.args.iterations + iteration;
        self.bench.progress.at(step, what);
    }

    fn shape(&self, transfer: Transfer) -> Outcome<GroupShape> {
        let problem = &self.case.problem;
        Ok(GroupShape {
            ranks: int(problem.ranks)?,
            experts: int(problem.experts)?,
            tokens: int(problem.tokens)?,
            capacity: int(self.capacity)?,
            hidden: int(problem.hidden)?,
            max_sms: int(self.case.max_sms.unwrap_or(self.bench.setup.max_sms))?,
            dtype: self.case.dtype.combined(),
            zero_copy: transfer == Transfer::ZeroCopy,
            top_k: int(problem.top_k)?,
            align: problem.align,
            local_experts: int(problem.local_experts())?,
        })
    }

    fn initialize(&self, library: &Contestant, transfer: Transfer) -> Outcome<()> {
        self.bench.variables.restore();
        library.initialize(self.communicator().raw.cast(), &self.shape(transfer)?)
    }

    fn shutdown(&self, library: &Contestant) -> Outcome<()> {
        self.communicator().barrier(self.device())?;
        library.shutdown()
    }

    /// All groups by turns, in rounds.
    fn times(&self, groups: &[GroupKind]) -> Outcome<CaseTimes> {
        let copy_gb_per_s = self.copy_ceiling()?;
        // What the first group of a library makes NCCL allocate for good is not a group's.
        if self.number == 0 && self.bench.args.iterations > 0 {
            for kind in groups.iter().filter(|kind| kind.transfer == groups[0].transfer) {
                self.initialize(kind.library, kind.transfer)?;
                self.shutdown(kind.library)?;
            }
        }
        let mut times: Vec<GroupTimes> = Vec::new();
        for round in 0..self.bench.args.rounds() {
            for (index, kind) in groups.iter().enumerate() {
                let more = self.round(kind, round == 0)?;
                match times.get_mut(index) {
                    Some(known) => known.add(more),
                    None => times.push(more),
                }
            }
        }
        Ok(CaseTimes { capacity: self.capacity, copy_gb_per_s, groups: times })
    }

    /// Gigabytes a second that the device copies, all ranks at once.
    fn copy_ceiling(&self) -> Outcome<f64> {
        let bytes = self.capacity * self.case.dtype.combined_bytes(self.case.problem.hidden);
        let (from, to) = (self.device().allocate(bytes)?, self.device().allocate(bytes)?);
        let mut times = Vec::new();
        for _ in 0..COPIES {
            self.communicator().barrier(self.device())?;
            times.push(self.device().timed(|| self.device().copy(&to, &from, bytes))?);
        }
        self.device().free(from)?;
        self.device().free(to)?;
        Ok(bytes as f64 / median(&times) / 1e6)
    }

    /// Free bytes of the device while no rank allocates.
    fn free_bytes(&self) -> Outcome<usize> {
        self.communicator().barrier(self.device())?;
        let (free, _) = self.device().base.cuda.memory_info()?;
        self.communicator().barrier(self.device())?;
        Ok(free)
    }

    /// Memory for the exchanged payloads, made alike on every rank.
    fn exchanged(&self, kind: &GroupKind) -> Outcome<Exchanged> {
        let (hidden, rows) = (self.case.problem.hidden, self.capacity);
        let bytes = rows * self.case.dtype.combined_bytes(hidden);
        let place = |bytes: usize| -> Outcome<Placed> {
            let Some(extensions) = kind.library.extensions.as_ref().filter(|_| kind.transfer == Transfer::ZeroCopy)
            else {
                return Ok(Placed { memory: self.device().allocate(bytes)?, window: Window::NONE });
            };
            let (mut address, mut window) = (std::ptr::null_mut(), Window::NONE);
            let alloc = extensions.nvte_ep_ext_symm_alloc;
            let (out, handle, offset) = (&raw mut address, &raw mut window.window, &raw mut window.offset);
            // SAFETY: all three are live; every rank makes this call.
            catch_foreign("nvte_ep_ext_symm_alloc", || unsafe { alloc(bytes, out, handle, offset) })?;
            Ok(Placed { memory: Memory::of(address.expose_provenance() as u64, bytes), window })
        };
        let (mut written, read, scales) = (place(bytes)?, place(bytes)?, place(rows * hidden / BLOCK)?);
        (written.window.scale_window, written.window.scale_offset) = (scales.window.window, scales.window.offset);
        Ok(Exchanged { written, read, scales: scales.memory })
    }

    /// One group from its begin to its end. `first`: its outputs and its memory are looked at too.
    fn round(&self, kind: &GroupKind, first: bool) -> Outcome<GroupTimes> {
        let (device, library) = (self.device(), kind.library);
        self.at(0, kind.transfer.name());
        // The caller's own memory does not count as the group's.
        let staged = if kind.transfer == Transfer::Staged { Some(self.exchanged(kind)?) } else { None };
        let before = self.free_bytes()?;
        let begin = Instant::now();
        self.initialize(library, kind.transfer)?;
        let initialize_s = begin.elapsed().as_secs_f64();
        let shape = self.shape(kind.transfer)?;
        let layer = library.layer(&shape)?;
        let handle_memory = device.allocate(layer.handle_bytes)?;
        let exchanged = match staged {
            Some(exchanged) => exchanged,
            None => self.exchanged(kind)?,
        };
        // The first step combines what nobody has written.
        device.poison(&exchanged.read.memory)?;
        device.poison(&self.inputs.grad_recv_weights)?;
        let handle_tensor = library.tensors.tensor(handle_memory.address, kNVTEByte, &[layer.handle_bytes])?;
        let calls = Calls::new(self, library, &exchanged, Handle { layer, mem: handle_tensor.raw })?;
        let step = |what: &str| -> Outcome<f64> {
            self.at(0, what);
            let begin = Instant::now();
            calls.run(STEP)?;
            device.synchronize()?;
            Ok(begin.elapsed().as_secs_f64())
        };
        let (first_step_s, second_step_s) = (step("first step")?, step("second step")?);
        let timed = self.bench.args.iterations > 0;
        let digests = if first && timed { self.outputs(&calls, &exchanged)? } else { Vec::new() };
        let after = self.free_bytes()?;
        let [device_us, host_us] = if timed { self.measure(&calls)? } else { Default::default() };
        let memory = match &library.extensions {
            Some(extensions) if first => {
                let mut usage = NVTEEpExtMemoryUsage::default();
                let (report, out) = (extensions.nvte_ep_ext_memory_usage, &raw mut usage);
                // SAFETY: `out` points to a live structure that says its size.
                catch_foreign("nvte_ep_ext_memory_usage", || unsafe { report(out) })?;
                Some(self.memory(&usage, &exchanged, self.measured(before, after)?))
            }
            _ => None,
        };
        drop(calls);
        drop(handle_tensor);
        self.shutdown(library)?;
        let set_variables = self.bench.variables.restore();
        device.free(handle_memory)?;
        if kind.transfer == Transfer::Staged {
            for memory in [exchanged.written.memory, exchanged.read.memory, exchanged.scales] {
                device.free(memory)?;
            }
        }
        Ok(GroupTimes {
            transfer: kind.transfer.name().into(),
            against: kind.against,
            library: library.version.clone(),
            library_path: library.path.display().to_string(),
            initialize_s: vec![initialize_s],
            first_step_s: vec![first_step_s],
            second_step_s: vec![second_step_s],
            device_us,
            host_us,
            memory,
            digests,
            set_variables,
        })
    }

    const fn memory(&self, usage: &NVTEEpExtMemoryUsage, exchanged: &Exchanged, measured: Option<u64>) -> GroupMemory {
        GroupMemory {
            staging: usage.staging,
            scratch: usage.routing_map + usage.workspace + usage.library,
            handle: usage.handle_memory,
            symmetric: usage.symm_reserved,
            predicted: usage.total + usage.handle_memory,
            measured,
            payloads: exchanged.written.memory.bytes() + exchanged.read.memory.bytes() + exchanged.scales.bytes(),
        }
    }

    /// What one rank took of the device in between, where ranks of one device take the same.
    fn measured(&self, before: usize, after: usize) -> Outcome<Option<u64>> {
        let device = self.device();
        if device.base.runtime == RuntimeKind::Host {
            // Its device memory is the machine's, where others come and go.
            return Ok(None);
        }
        let devices = device.base.cuda.device_count()?;
        let sharing = (0..self.case.problem.ranks).filter(|rank| *rank as i32 % devices == device.ordinal).count();
        Ok(Some((before.saturating_sub(after) / sharing.max(1)) as u64))
    }

    /// Hashes of what every call gives, from fresh inputs.
    fn outputs(&self, calls: &Calls, exchanged: &Exchanged) -> Outcome<Vec<DigestLine>> {
        let (problem, device, inputs) = (&self.case.problem, self.device(), &self.inputs);
        let (hidden, top_k, tokens) = (problem.hidden, problem.top_k, problem.tokens);
        let (written, read, scales) = (exchanged.written.memory, exchanged.read.memory, exchanged.scales);
        let received = self.traffic.received[self.bench.setup.rank] + self.traffic.padding[self.bench.setup.rank];
        let (dtype, scaled) = (self.case.dtype, self.case.dtype == RowType::Mxfp8);
        let (row, sent) = (dtype.combined_bytes(hidden), if scaled { hidden } else { dtype.combined_bytes(hidden) });
        let mut lines = Vec::new();
        let mut hash = |output: &str, memory: &Memory, rows: usize, width: usize| -> Outcome<()> {
            let mut digest = Digest::new();
            let chunk = (CHUNK_BYTES / width).max(1);
            for first in (0..rows).step_by(chunk) {
                let mut bytes = vec![0u8; chunk.min(rows - first) * width];
                device.download(memory, first * width, &mut bytes)?;
                digest.rows(self.bench.setup.threads, &bytes, width);
            }
            lines.push(DigestLine { step: 0, output: output.into(), rows, hash: digest.finish() });
            Ok(())
        };
        for output in [&written, &read, &scales, &inputs.recv_weights, &inputs.result, &inputs.grad_weights] {
            device.poison(output)?;
        }
        let run = |call: usize| -> Outcome<()> {
            self.at(0, TIMED[call]);
            calls.run(call)?;
            device.synchronize()
        };
        run(0)?;
        hash("counts", &inputs.counts, problem.local_experts(), 4)?;
        run(1)?;
        hash("recv_tokens", &written, received, sent)?;
        hash("recv_topk_weights", &inputs.recv_weights, received, 4)?;
        if scaled {
            hash("recv_tokens, scales", &scales, received, hidden / BLOCK)?;
        } else {
            // The experts do nothing. Combine may change its input, so each call gets a copy.
            device.copy(&read, &written, written.bytes() as usize)?;
            run(2)?;
            hash("result", &inputs.result, tokens, row)?;
            device.copy(&read, &written, written.bytes() as usize)?;
            device.copy(&inputs.grad_recv_weights, &inputs.recv_weights, self.capacity * 4)?;
            run(4)?;
            hash("grad_tokens", &inputs.grad_tokens, tokens, row)?;
            hash("grad_topk_weights", &inputs.grad_weights, tokens, top_k * 4)?;
        }
        run(3)?;
        hash("grad_expert_out", &written, received, sent)?;
        if scaled {
            hash("grad_expert_out, scales", &scales, received, hidden / BLOCK)?;
        }
        Ok(lines)
    }

    /// Microseconds of each call and iteration, on the device and on the host; all ranks begin together.
    fn measure(&self, calls: &Calls) -> Outcome<[Vec<Vec<f64>>; 2]> {
        let device = self.device();
        let mut captured = Vec::new();
        if let Some(graphs) = &self.bench.graphs {
            for call in 0..TIMED.len() {
                captured.push(graphs.capture(device, || calls.run(call))?);
            }
        }
        let run = |call: usize| match (&self.bench.graphs, captured.get(call)) {
            (Some(graphs), Some(&graph)) => graphs.launch(device, graph),
            _ => calls.run(call),
        };
        let mut times = [vec![Vec::new(); TIMED.len()], vec![Vec::new(); TIMED.len()]];
        for iteration in 0..WARM_UP + self.bench.args.iterations {
            for (call, name) in TIMED.iter().enumerate() {
                self.at(iteration.saturating_sub(WARM_UP), name);
                self.communicator().barrier(device)?;
                let (on_device, on_host) = device.timed_both(|| run(call))?;
                if iteration >= WARM_UP {
                    times[0][call].push(on_device * 1e3);
                    times[1][call].push(on_host * 1e3);
                }
            }
        }
        // The graphs name memory that ends with the group.
        for (graphs, graph) in
            self.bench.graphs.iter().flat_map(|graphs| captured.iter().map(move |&graph| (graphs, graph)))
        {
            graphs.end(device, graph)?;
        }
        Ok(times)
    }
}
