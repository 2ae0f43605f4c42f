//! The kernels of the native engine (`kernels/native/`), compiled for the CPU by `build.rs`. A launch runs on its stream's worker
//! thread: every role of every block is a coroutine, and the coroutines take turns, so that a launch of any number of blocks costs
//! no threads.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock, Once};
use std::time::Duration;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use nvte_ep_bindings::{CUDA_ERROR_INVALID_VALUE, cudaErrorIllegalAddress, cudaErrorMemoryAllocation};

use parking_lot::Mutex;

use crate::fault::{Fault, Outcome};
use crate::graph::{self, Action};
use crate::memory::{self, Span};
use crate::order;
use crate::queue::{Ordered, Point, Run, Stream};
use crate::tensor_check;

/// `Span` in native/kernels.cc.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawSpan {
    address: *const c_void,
    bytes: u64,
    row_bytes: u64,
    name: *const c_char,
}

unsafe extern "C" {
    static nvte_ep_native_most_spans: u32;
    fn nvte_ep_native_hooks(on_wait: extern "C" fn(), on_change: extern "C" fn());
    fn nvte_ep_native_argument_bytes(kernel: u32) -> u64;
    fn nvte_ep_native_blocks(kernel: u32, arguments: *const u64) -> u32;
    fn nvte_ep_native_segment(kernel: u32, arguments: *const u64) -> *const u8;
    fn nvte_ep_native_roles(kernel: u32, arguments: *const u64) -> u32;
    fn nvte_ep_native_shared_bytes(kernel: u32, arguments: *const u64) -> u64;
    fn nvte_ep_native_spans(kernel: u32, arguments: *const u64, prepared: bool, out: *mut RawSpan) -> u32;
    fn nvte_ep_native_begin(kernel: u32, arguments: *const u64, memory: *mut u8);
    fn nvte_ep_native_role(kernel: u32, arguments: *const u64, block: u32, role: u32, memory: *mut u8);
    fn nvte_ep_native_end(kernel: u32, arguments: *const u64, block: u32);
}

/// `cuLaunchKernel`'s array of pointers to arguments.
#[derive(Clone, Copy)]
pub struct Arguments(pub *const *const c_void);

/// Enough for the role that holds the sums of the widest piece, 64 KiB.
const STACK_BYTES: usize = 256 * 1024;
/// Rounds of all roles in which nothing happened, after which the thread sleeps rather than only lets others run.
const IDLE_ROUNDS: u32 = 100;

thread_local! {
    /// The turn of the role that runs.
    static TURN: Cell<Option<NonNull<Yielder<(), ()>>>> = const { Cell::new(None) };
    /// Whether a role has changed what others see.
    static CHANGED: Cell<bool> = const { Cell::new(false) };
    /// What launches of this thread's stream use again.
    static KEPT: RefCell<Kept> = const { RefCell::new(Kept { stacks: Vec::new(), shared: None }) };
}

#[derive(Default)]
struct Kept {
    stacks: Vec<DefaultStack>,
    shared: Option<Shared>,
}

/// Shared memory of a launch's blocks.
struct Shared {
    base: NonNull<u8>,
    layout: Layout,
}

impl Shared {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 256).expect("blocks have less than 2^18 bytes each");
        // SAFETY: the layout has a size.
        let base = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, layout }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// A role waits: the next one's turn.
extern "C" fn wait() {
    let turn = TURN.get().expect("a role runs");
    // SAFETY: set by the coroutine that calls this, which lives.
    unsafe { turn.as_ref() }.suspend(());
    TURN.set(Some(turn));
}

extern "C" fn change() {
    CHANGED.set(true);
}

/// The launches of one group, which its caller has to order: they share counters and windows. By the number of the allocation that
/// holds the group's segment.
static GROUPS: LazyLock<Mutex<HashMap<u64, LastLaunch>>> = LazyLock::new(Mutex::default);

struct LastLaunch {
    /// Address of the segment.
    segment: usize,
    ordered: Ordered,
    point: Option<Point>,
}

/// Queues `run` behind the group's launch before it.
fn push(segment: usize, stream: &Arc<Stream>, after: Vec<Point>, run: Run) -> Outcome<Point> {
    let number = memory::find(segment).map_or(0, |allocation| allocation.id);
    let mut groups = GROUPS.lock();
    if !groups.contains_key(&number) {
        // Those whose segment is gone end here.
        groups.retain(|number, last| {
            let live = memory::find(last.segment).is_some_and(|allocation| allocation.id == *number);
            if !live {
                order::close(last.ordered.group);
            }
            live
        });
    }
    let last = groups.entry(number).or_insert_with(|| LastLaunch {
        segment,
        ordered: Ordered { group: order::open(), operation: 0 },
        point: None,
    });
    let next = Ordered { operation: last.ordered.operation + 1, ..last.ordered };
    let point = stream.push_ordered(after, last.point.as_ref(), Some(next), run)?;
    (last.ordered, last.point) = (next, Some(point.clone()));
    Ok(point)
}

/// One launch, which a graph may replay.
struct Launch {
    kernel: u32,
    name: &'static str,
    /// In words, as the structures are aligned.
    arguments: Vec<u64>,
    blocks: u32,
}

/// Queues a launch of the kernel `kernel`, by its number in native/kernels.cc.
///
/// # Safety
///
/// `arguments` holds the kernel's one structure, and memory that this names stays valid until the stream has got there.
pub unsafe fn launch(
    kernel: u32,
    name: &'static str,
    arguments: Arguments,
    blocks: u32,
    stream: &Arc<Stream>,
) -> Outcome<()> {
    static HOOKS: Once = Once::new();
    // SAFETY: functions of this library, set before any kernel runs.
    HOOKS.call_once(|| unsafe { nvte_ep_native_hooks(wait, change) });
    // SAFETY: takes a number.
    let bytes = unsafe { nvte_ep_native_argument_bytes(kernel) } as usize;
    let mut copy = vec![0u64; bytes.div_ceil(8)];
    // SAFETY: the caller passes one argument.
    let structure = unsafe { arguments.0.read() };
    // SAFETY: a structure of so many bytes, by the caller's word; the copy has as many.
    unsafe { std::ptr::copy_nonoverlapping(structure.cast::<u8>(), copy.as_mut_ptr().cast::<u8>(), bytes) };
    let launch = Launch { kernel, name, arguments: copy, blocks };
    // SAFETY: a copy of what the caller passed.
    let expected = unsafe { nvte_ep_native_blocks(kernel, launch.arguments.as_ptr()) };
    if blocks != expected {
        let text = format!("{name}: launched with {blocks} blocks, but its group has {expected}");
        return Err(Fault::cuda(CUDA_ERROR_INVALID_VALUE, text));
    }
    let spans: Vec<Span> = launch.spans(false)?.into_iter().map(|(span, _)| span).collect();
    // SAFETY: as above.
    let segment = unsafe { nvte_ep_native_segment(kernel, launch.arguments.as_ptr()) } as usize;
    let run: Run = Arc::new(move |sticky: Option<&Fault>| if sticky.is_none() { launch.run() } else { Ok(()) });
    let action = || {
        let run = Arc::clone(&run);
        let enqueue = Arc::new(move |stream: &Arc<Stream>, after| push(segment, stream, after, Arc::clone(&run)));
        Action { enqueue, spans, breaker: None, memory: None }
    };
    if graph::record(stream, action)? {
        return Ok(());
    }
    push(segment, stream, Vec::new(), run).map(drop)
}

impl Launch {
    /// The caller's memory that the launch uses, with its raw form. `prepared`: the handle memory can be read.
    fn spans(&self, prepared: bool) -> Outcome<Vec<(Span, RawSpan)>> {
        // SAFETY: a constant.
        let most = unsafe { nvte_ep_native_most_spans } as usize;
        let mut raw = Vec::with_capacity(most);
        // SAFETY: room for the most that there are; the arguments are the kernel's, and their handle memory is live by the
        // contract of `launch`.
        let count = unsafe { nvte_ep_native_spans(self.kernel, self.arguments.as_ptr(), prepared, raw.as_mut_ptr()) };
        // SAFETY: so many were written.
        unsafe { raw.set_len(count as usize) };
        raw.into_iter()
            .map(|raw| {
                // SAFETY: the contract of `launch`.
                let span = unsafe { Span::new(raw.address, raw.bytes as usize) };
                span.map(|span| (span, raw)).map_err(|fault| {
                    let text = format!("{}: {}: {}", self.name, name_of(&raw), fault.text);
                    Fault::cuda(cudaErrorIllegalAddress, text)
                })
            })
            .collect()
    }

    /// Runs all blocks on this thread.
    fn run(&self) -> Outcome<()> {
        // Of the handle memory too, before it is read.
        for (span, _) in self.spans(false)? {
            span.check_live()?;
        }
        for (span, raw) in self.spans(true)? {
            if raw.row_bytes != 0 {
                let name = format!("{}: {}", self.name, name_of(&raw));
                tensor_check::written(&name, &span, raw.row_bytes as usize, 0..(raw.bytes / raw.row_bytes) as usize)?;
            }
        }
        KEPT.with_borrow_mut(|kept| self.run_roles(kept))
    }

    fn run_roles(&self, kept: &mut Kept) -> Outcome<()> {
        let (kernel, arguments) = (self.kernel, self.arguments.as_ptr());
        // SAFETY: the arguments are the kernel's.
        let roles = unsafe { nvte_ep_native_roles(kernel, arguments) };
        // SAFETY: as above.
        let bytes = unsafe { nvte_ep_native_shared_bytes(kernel, arguments) } as usize;
        let each = bytes.next_multiple_of(256);
        let all = each * self.blocks as usize;
        let shared = match kept.shared.take() {
            Some(shared) if shared.layout.size() >= all => shared,
            _ => Shared::new(all),
        };
        let mut running: Vec<Coroutine<(), (), ()>> = Vec::with_capacity((roles * self.blocks) as usize);
        for block in 0..self.blocks {
            let memory = shared.base.as_ptr().wrapping_add(each * block as usize);
            // SAFETY: the block's own memory, of the size that its kernel asks for.
            unsafe { nvte_ep_native_begin(kernel, arguments, memory) };
            for role in 0..roles {
                let stack = kept.stacks.pop().map_or_else(|| DefaultStack::new(STACK_BYTES), Ok).map_err(|error| {
                    Fault::cuda(cudaErrorMemoryAllocation, format!("{}: no stack for a role: {error}", self.name))
                })?;
                running.push(Coroutine::with_stack(stack, move |turn: &Yielder<(), ()>, ()| {
                    TURN.set(Some(NonNull::from(turn)));
                    // SAFETY: as for `begin`, which came before; every role of every block runs once.
                    unsafe { nvte_ep_native_role(kernel, arguments, block, role, memory) };
                }));
            }
        }
        let mut idle = 0;
        while !running.is_empty() {
            CHANGED.set(false);
            let before = running.len();
            let mut still = Vec::with_capacity(before);
            for mut role in running {
                match role.resume(()) {
                    CoroutineResult::Yield(()) => still.push(role),
                    CoroutineResult::Return(()) => kept.stacks.push(role.into_stack()),
                }
            }
            running = still;
            if CHANGED.get() || running.len() < before {
                idle = 0;
                continue;
            }
            // All of them wait for other ranks.
            idle += 1;
            if idle < IDLE_ROUNDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        for block in 0..self.blocks {
            // SAFETY: all roles of the block have ended.
            unsafe { nvte_ep_native_end(kernel, arguments, block) };
        }
        kept.shared = Some(shared);
        Ok(())
    }
}

fn name_of(raw: &RawSpan) -> std::borrow::Cow<'static, str> {
    // SAFETY: a literal of native/kernels.cc.
    unsafe { CStr::from_ptr(raw.name) }.to_string_lossy()
}
