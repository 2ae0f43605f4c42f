//! The contract checker: rules whose breach makes a GPU abort, hang or compute garbage, each a report with a name here.
//!
//! A fault that [`Fault::breaks`] a rule becomes a report where it leaves the library: [`annotate`] adds the rank, the call
//! and the rule, and counts it. Breaches that the work cannot go on after are errors always; about the others, which
//! [`breach`] takes, the environment decides.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use nvte_ep_bindings::{cudaErrorAssert, cudaErrorInvalidValue, ncclInvalidArgument, ncclInvalidUsage};
use parking_lot::Mutex;

use crate::fault::{self, Fault, Outcome};
use crate::float::DefaultEnvironment;
use crate::memory::{self, Span};
use crate::settings::{self, Policy};
use crate::{caller, comm, device, inject};

/// Reports of a rule that are printed where the program goes on; the others are only counted.
const PRINTED: u64 = 16;
/// Fewer unwritten bytes than these may be a value that somebody wrote.
const UNWRITTEN_BYTES: usize = 16;

/// What a GPU does on a breach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnGpu {
    /// The process ends.
    Abort,
    /// Kernels fault or trap, and the context is lost.
    Trap,
    /// Ranks wait for ever.
    Hang,
    /// Memory of others is read or written.
    Corrupt,
    /// Results are wrong and nothing says so.
    SilentlyWrong,
    /// The call fails, and what was being captured is lost.
    CaptureLost,
    /// The call fails.
    Refused,
}

impl fmt::Display for OnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Abort => "abort",
            Self::Trap => "trap",
            Self::Hang => "hang",
            Self::Corrupt => "corrupt memory",
            Self::SilentlyWrong => "silently wrong",
            Self::CaptureLost => "capture lost",
            Self::Refused => "refused",
        })
    }
}

/// What a breach of a rule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// An error: the work cannot go on.
    Error,
    /// What the [`Policy`] says.
    Policy,
    /// A warning, unless the policy is off: programs that do it work on GPUs.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "an error",
            Self::Policy => "an error, or as set",
            Self::Warning => "a warning",
        })
    }
}

macro_rules! rules {
    ($($rule:ident $name:literal $on_gpu:ident $after:ident $sentence:literal;)*) => {
        /// The rules.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Rule {
            $(#[doc = $sentence] $rule,)*
        }

        impl Rule {
            /// Every rule.
            pub const ALL: &'static [Rule] = &[$(Rule::$rule),*];

            /// Its name in reports.
            pub fn name(self) -> &'static str {
                match self { $(Rule::$rule => $name,)* }
            }

            /// What has to hold.
            pub fn sentence(self) -> &'static str {
                match self { $(Rule::$rule => $sentence,)* }
            }

            /// What a GPU does on a breach.
            pub fn on_gpu(self) -> OnGpu {
                match self { $(Rule::$rule => OnGpu::$on_gpu,)* }
            }

            /// What a breach is.
            pub fn severity(self) -> Severity {
                match self { $(Rule::$rule => Severity::$after,)* }
            }

            /// Whether the work can go on after a breach.
            pub fn recoverable(self) -> bool {
                self.severity() != Severity::Error
            }
        }
    };
}

rules! {
    ConfigDiffers "config-differs" Hang Error "all ranks give the same number of ranks and the same configuration";
    UniqueId "unique-id" Hang Error "a unique id makes one communicator, with each rank once";
    RankDevice "rank-device" Refused Error "the ranks of a communicator are on different devices";
    InsideGroup "inside-group" Hang Error "EP groups are created, and handles updated, outside ncclGroupStart and ncclGroupEnd";
    CallOrder "call-order" Hang Error "all ranks enter the same calls in the same order, with arguments that agree";
    MissingRank "missing-rank" Hang Error "every rank takes part in every collective call";
    ReplayCount "replay-count" Hang Error "all ranks replay a captured graph equally often";
    ArgumentValue "argument-value" Abort Error "arguments have values that their function takes";
    TensorShape "tensor-shape" Abort Error "a tensor has the dimensions, the length and the type that its function asks for";
    RowLimit "row-limit" Corrupt Error "tokens and their rows stay within the limits that the group was created with";
    ReceiveOverflow "receive-overflow" Trap Error "with the policy TRAP no rank receives more rows than max_recv_tokens_per_rank";
    ExpertIndex "expert-index" Corrupt Error "an index names one of num_experts experts or is negative";
    RoutingChanged "routing-changed" SilentlyWrong Policy "a combine uses the routing of the dispatch before it, forward and backward";
    CombineRows "combine-rows" Trap Error "combine is given all rows that the routing uses";
    HandleMemory "handle-memory" Corrupt Error "handle_mem holds what UpdateHandle wrote for the tokens at hand";
    Alignment "alignment" Trap Error "memory, and its offset in a window, start at a multiple of 16 bytes and of the element";
    MemoryBounds "memory-bounds" Corrupt Error "a tensor lies inside one allocation";
    FreedMemory "freed-memory" Corrupt Error "memory stays allocated while a tensor, a handle or a graph uses it";
    DeviceMemory "device-memory" Trap Policy "a tensor lies in device or pinned memory of CUDA or NCCL";
    OtherDevice "other-device" Trap Policy "memory and streams belong to the device of the communicator";
    UnwrittenMemory "unwritten-memory" SilentlyWrong Policy "what an operation reads has been written";
    WindowMissing "window-missing" Corrupt Error "with zero_copy ON the tensors that peers touch lie in symmetric windows of the group's communicator";
    WindowBounds "window-bounds" Corrupt Error "a window lies inside its allocation, page-aligned, and a tensor inside its window";
    WindowLifetime "window-lifetime" Corrupt Policy "a window stays registered while operations use it, and its memory allocated until then";
    StreamOrder "stream-order" Corrupt Policy "operations of a group on several streams are ordered by events or waits";
    OneThread "one-thread" Corrupt Policy "a group and its handles are used by one thread at a time";
    LiveHandles "live-handles" Corrupt Policy "handles are destroyed before their group, groups before their communicator";
    PeersBusy "peers-busy" Corrupt Warning "a group is destroyed after all ranks have finished its operations";
    DestroyedObject "destroyed-object" Corrupt Error "communicators, groups and handles are not used after they are destroyed";
    CaptureUnsafe "capture-unsafe" CaptureLost Error "nothing allocates, frees or waits while a stream is captured";
}

/// A breach, as it is printed.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    /// What is broken.
    pub rule: Rule,
    /// By whom: the rank where the call is about a communicator, else the device.
    pub who: Who,
    /// The function that was called; empty for queued work, which names itself.
    pub call: &'a str,
    /// The argument, what was required of it and what was found.
    pub found: &'a str,
    /// NCCL EP's names of function and argument, where the others are a caller's ([`caller`]).
    pub of_nccl_ep: Option<&'a str>,
}

/// Who broke a rule.
#[derive(Clone, Copy, Debug)]
pub enum Who {
    /// A rank.
    Rank(usize),
    /// A device that no communicator uses.
    Device(i32),
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.who {
            Who::Rank(rank) => write!(f, "rank {rank}, ")?,
            Who::Device(ordinal) => write!(f, "device {ordinal}, ")?,
        }
        if !self.call.is_empty() && !self.found.starts_with(self.call) {
            write!(f, "{}: ", self.call)?;
        }
        let Self { rule, found, .. } = self;
        write!(f, "{found}: rule {}: {} (on a GPU: {}", rule.name(), rule.sentence(), rule.on_gpu())?;
        self.of_nccl_ep.map_or(Ok(()), |names| write!(f, "; NCCL EP's name: {names}"))?;
        f.write_str(")")
    }
}

/// Whether breaches after which the work can go on are looked for.
pub fn is_on() -> bool {
    settings::policy() != Policy::Off
}

thread_local! {
    static CALL: Cell<&'static str> = const { Cell::new("") };
    static RANK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The exported function that the calling thread is in.
#[derive(Debug)]
pub struct Call {
    outermost: Option<DefaultEnvironment>,
}

impl Call {
    /// Enters the function whose body `work` is; inside another one (a caller's allocator) nothing changes.
    pub fn enter<W>(work: &W) -> Self {
        let outermost = CALL.get().is_empty();
        if outermost {
            CALL.set(inject::function_of(std::any::type_name_of_val(work)).unwrap_or_default());
            RANK.set(None);
        }
        Self { outermost: outermost.then(DefaultEnvironment::enter) }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.outermost.is_some() {
            CALL.set("");
        }
    }
}

/// Notes as which rank the calling thread acts.
pub fn act_as(rank: usize) {
    RANK.set(Some(rank));
}

/// How often each rule was broken.
static COUNTS: [AtomicU64; Rule::ALL.len()] = [const { AtomicU64::new(0) }; Rule::ALL.len()];

impl Rule {
    /// Reports of the rule in this process.
    pub fn reports(self) -> u64 {
        COUNTS[self as usize].load(Ordering::Relaxed)
    }
}

/// Text of the last report of this process.
static LAST: Mutex<String> = Mutex::new(String::new());

/// The last report of this process, or "".
pub fn last_report() -> String {
    LAST.lock().clone()
}

/// Makes a fault that breaks a rule a report, once; leaves others as they are.
pub fn annotate(mut fault: Fault) -> Fault {
    let Some(rule) = fault.rule.filter(|_| !fault.annotated) else { return fault };
    let ordinal = device::selected().ordinal;
    let who = RANK.get().or_else(|| comm::rank_on(ordinal)).map_or(Who::Device(ordinal), Who::Rank);
    let (call, found) = (CALL.get(), &fault.text);
    fault.text = match caller::current() {
        None => Report { rule, who, call, found, of_nccl_ep: None }.to_string(),
        Some(caller) => {
            let (found, names) = caller.translate(call, found);
            Report { rule, who, call: "", found: &found, of_nccl_ep: names.as_deref() }.to_string()
        }
    };
    fault.annotated = true;
    COUNTS[rule as usize].fetch_add(1, Ordering::Relaxed);
    LAST.lock().clone_from(&fault.text);
    fault
}

/// A breach after which the work can go on: an error if the policy says so.
pub fn breach(rule: Rule, found: impl Into<String>) -> Outcome<()> {
    debug_assert!(rule.recoverable(), "{rule:?}");
    if !is_on() {
        return Ok(());
    }
    let fault = breached(rule, found);
    if settings::policy() == Policy::Error && rule.severity() == Severity::Policy {
        return Err(fault);
    }
    print(fault);
    Ok(())
}

/// A breach that is only a warning, unless the policy is off.
pub fn warn(rule: Rule, found: impl Into<String>) {
    if is_on() {
        print(breached(rule, found));
    }
}

fn breached(rule: Rule, found: impl Into<String>) -> Fault {
    Fault::both(cudaErrorAssert, ncclInvalidUsage, found).breaks(rule)
}

/// Prints and counts a breach.
fn print(fault: Fault) {
    let Some(rule) = fault.rule else { return };
    let report = annotate(fault);
    match rule.reports() {
        ..=PRINTED => fault::report(&report.text),
        count if count == PRINTED + 1 => {
            fault::report(&format!("further breaches of rule {} are counted, not printed", rule.name()));
        }
        _ => {}
    }
}

/// Checks where a tensor's memory is; `name` is its function and argument.
pub fn tensor_memory(name: &str, span: &Span, device: i32) -> Outcome<()> {
    let (address, bytes) = (span.address(), span.byte_len());
    if bytes == 0 {
        return Ok(());
    }
    match memory::find(address) {
        Some(there) if there.kind.on_device() && there.device != device => {
            let text = format!(
                "{name}: {address:#x} is memory of device {}, the communicator is on device {device}",
                there.device
            );
            breach(Rule::OtherDevice, text)
        }
        Some(_) => Ok(()),
        None => match memory::freed(address) {
            Some(there) => {
                let text = format!("{name}: {address:#x} is in {} bytes that have been freed", there.bytes);
                Err(Fault::both(cudaErrorInvalidValue, ncclInvalidArgument, text).breaks(Rule::FreedMemory))
            }
            None if settings::pageable_memory() => Ok(()),
            None => {
                let text = format!("{name}: {bytes} bytes at {address:#x} are pageable host memory");
                breach(Rule::DeviceMemory, text)
            }
        },
    }
}

/// Checks that a stream belongs to the device of the communicator.
pub fn stream_device(stream: i32, device: i32) -> Outcome<()> {
    if stream == device {
        return Ok(());
    }
    let text = format!("stream is one of device {stream}, the communicator is on device {device}");
    breach(Rule::OtherDevice, text)
}

/// Checks that rows which an operation reads have been written since their memory was allocated.
///
/// Only rows that hold what their allocation was filled with count, and only where they make up 16 bytes or all that is
/// read.
pub fn written(name: &str, span: &Span, row_bytes: usize, rows: impl IntoIterator<Item = usize>) -> Outcome<()> {
    unwritten(name, span, row_bytes, rows).map_or(Ok(()), |found| breach(Rule::UnwrittenMemory, found))
}

/// As [`written`], but only a warning.
pub fn should_be_written(name: &str, span: &Span, row_bytes: usize, rows: impl IntoIterator<Item = usize>) {
    if let Some(found) = unwritten(name, span, row_bytes, rows) {
        warn(Rule::UnwrittenMemory, found);
    }
}

/// What [`written`] finds.
fn unwritten(name: &str, span: &Span, row_bytes: usize, rows: impl IntoIterator<Item = usize>) -> Option<String> {
    if row_bytes == 0 || !is_on() {
        return None;
    }
    let allocation = memory::find(span.address()).filter(|there| there.kind.on_device())?;
    let (mut first, mut run, mut all) = (None, 0usize, true);
    for row in rows {
        let offset = row * row_bytes;
        if !allocation.is_unwritten(span.address() + offset, span.view(offset, row_bytes)) {
            (first, run, all) = (None, 0, false);
            continue;
        }
        first.get_or_insert(row);
        run += row_bytes;
        if run >= UNWRITTEN_BYTES {
            all = true;
            break;
        }
    }
    first.filter(|_| all).map(|row| format!("{name}: row {row} is read, but nobody has written it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_rules_are_unique() {
        for (index, rule) in Rule::ALL.iter().enumerate() {
            assert_eq!(*rule as usize, index);
            assert!(Rule::ALL[..index].iter().all(|other| other.name() != rule.name()), "{}", rule.name());
        }
    }

    #[test]
    fn a_report_names_rank_call_argument_and_rule() {
        let report = Report {
            rule: Rule::ExpertIndex,
            who: Who::Rank(3),
            call: "ncclEpUpdateHandle",
            found: "ncclEpUpdateHandle: topk_idx[0, 1] is 9, but there are 8 experts",
            of_nccl_ep: None,
        };
        let text = "rank 3, ncclEpUpdateHandle: topk_idx[0, 1] is 9, but there are 8 experts: rule expert-index: an index \
                    names one of num_experts experts or is negative (on a GPU: corrupt memory)";
        assert_eq!(report.to_string(), text);
        let other = Report { call: "cudaMalloc", found: "an allocation", who: Who::Device(0), ..report };
        assert!(other.to_string().starts_with("device 0, cudaMalloc: an allocation: rule"), "{other}");
    }

    #[test]
    fn only_whole_rows_of_poison_are_unwritten() {
        let memory = memory::allocate(64, memory::Kind::Device, 0).unwrap();
        // SAFETY: the memory has 64 bytes, and only this test knows it.
        let span = unsafe { Span::new(memory, 64) }.unwrap();
        let judged = |row_bytes: usize, rows: &[usize]| {
            let found = written("f: a", &span, row_bytes, rows.iter().copied());
            found.map_err(|fault| fault.text)
        };
        let unwritten = |row: usize| Err(format!("f: a: row {row} is read, but nobody has written it"));
        assert_eq!(judged(16, &[2]), unwritten(2));
        assert_eq!(judged(16, &[]), Ok(()));
        assert_eq!(judged(4, &[7]), unwritten(7));
        span.fill(0, 1, 0);
        span.fill(32, 1, 0);
        assert_eq!(judged(16, &[0, 2]), Ok(()));
        assert_eq!(judged(16, &[0, 1]), unwritten(1));
        // Rows of 4 bytes: 1, 2 and 3 are 12 bytes beside a written one.
        assert_eq!(judged(4, &[0, 1, 2, 3]), Ok(()));
        assert_eq!(judged(4, &[0, 1, 2, 3, 4]), unwritten(1));
        assert_eq!(judged(4, &[8, 9]), Ok(()));
        assert_eq!(judged(4, &[9]), unwritten(9));
        memory::release(memory::forget(memory as usize, memory::Kind::on_device).unwrap());
    }
}
