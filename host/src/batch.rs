//! `ncclGroupStart` and `ncclGroupEnd`: what is called between them is done when the group ends.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use nvte_ep_bindings::{ncclInternalError, ncclInvalidUsage};

use crate::channel::Channel;
use crate::channel::pairs::Transfer;
use crate::check;
use crate::fault::{self, Fault, Outcome};
use crate::line::{Line, Operation};
use crate::memory::Span;
use crate::queue::Stream;
use crate::rule::Rule;

/// A collective set-up call; it writes its result through the caller's pointer.
type SetUp = Box<dyn FnOnce() -> Outcome<()> + Send>;

/// Work of a communicator on a stream.
struct Pending {
    line: Line,
    stream: Arc<Stream>,
    work: Work,
}

enum Work {
    Collective { spans: Vec<Span>, run: Operation },
    Transfer(Transfer),
}

/// What waits for the end of the calling thread's group.
#[derive(Default)]
struct Batch {
    depth: u32,
    set_ups: Vec<SetUp>,
    pending: Vec<Pending>,
}

thread_local! {
    // Without a destructor: programs shut groups down at exit, when those of the main thread have run.
    static BATCH: ManuallyDrop<RefCell<Batch>> = ManuallyDrop::default();
}

fn with_batch<T>(body: impl FnOnce(&mut Batch) -> T) -> T {
    BATCH.with(|batch| body(&mut batch.borrow_mut()))
}

fn is_open() -> bool {
    with_batch(|batch| batch.depth > 0)
}

/// Fails inside a group: what the call queues would run before what the group holds back, or wait for it.
pub fn refuse(function: &str) -> Outcome<()> {
    if !is_open() {
        return Ok(());
    }
    let text = format!("{function}: called between ncclGroupStart and ncclGroupEnd: call it before or after the group");
    Err(Fault::nccl(ncclInvalidUsage, text).breaks(Rule::InsideGroup))
}

/// Does a collective set-up now, or when the group of the calling thread ends.
pub fn now_or_at_end(job: impl FnOnce() -> Outcome<()> + Send + 'static) -> Outcome<()> {
    if !is_open() {
        return job();
    }
    with_batch(|batch| batch.set_ups.push(Box::new(job)));
    Ok(())
}

/// Drops the set-ups that wait.
pub fn forget_set_ups() {
    with_batch(|batch| batch.set_ups.clear());
}

/// Enqueues a collective now, or when the group of the calling thread ends.
pub fn enqueue(line: &Line, stream: &Arc<Stream>, spans: &[Span], run: Operation) -> Outcome<()> {
    let (line, stream) = (line.clone(), Arc::clone(stream));
    add(Pending { line, stream, work: Work::Collective { spans: spans.to_vec(), run } })
}

/// Enqueues a transfer now, or with those that the group of the calling thread holds, side by side.
pub fn transfer(line: &Line, stream: &Arc<Stream>, transfer: Transfer) -> Outcome<()> {
    add(Pending { line: line.clone(), stream: Arc::clone(stream), work: Work::Transfer(transfer) })
}

fn add(pending: Pending) -> Outcome<()> {
    if !is_open() {
        return run_all(vec![pending]);
    }
    with_batch(|batch| batch.pending.push(pending));
    Ok(())
}

/// `ncclGroupStart`.
pub fn start() {
    with_batch(|batch| batch.depth += 1);
}

/// `ncclGroupEnd`: communicators and windows of the group are set up at the same time, each on a thread of its own; then the
/// collectives of each communicator are enqueued, and behind them its transfers as one operation.
pub fn end() -> Outcome<()> {
    let depth = with_batch(|batch| {
        batch.depth = batch
            .depth
            .checked_sub(1)
            .ok_or_else(|| Fault::nccl(ncclInvalidUsage, "ncclGroupEnd: no ncclGroupStart before it"))?;
        Ok(batch.depth)
    })?;
    if depth > 0 {
        return Ok(());
    }
    let Batch { set_ups, pending, .. } = with_batch(std::mem::take);
    let results: Vec<Outcome<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            set_ups.into_iter().map(|job| scope.spawn(|| fault::contain(job).map_err(check::annotate))).collect();
        threads
            .into_iter()
            .map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Fault::nccl(ncclInternalError, "ncclGroupEnd: a thread panicked")))
            })
            .collect()
    });
    results.into_iter().rev().find(Result::is_err).unwrap_or(Ok(()))?;
    run_all(pending)
}

/// Enqueues what a group held.
fn run_all(mut pending: Vec<Pending>) -> Outcome<()> {
    while let Some(first) = pending.first() {
        let line = first.line.clone();
        let (own, others): (Vec<_>, Vec<_>) = pending.into_iter().partition(|there| there.line.is(&line));
        pending = others;
        run_line(&line, own)?;
    }
    Ok(())
}

/// Enqueues what a group held of one communicator.
fn run_line(line: &Line, pending: Vec<Pending>) -> Outcome<()> {
    let mut transfers = Vec::new();
    for Pending { stream, work, .. } in pending {
        match work {
            Work::Collective { spans, run } => {
                line.enqueue(&stream, |s| &s.collectives, &spans, move |channel: &mut Channel| run(channel))?;
            }
            Work::Transfer(transfer) => transfers.push((stream, transfer)),
        }
    }
    let Some(stream) = transfers.first().map(|(stream, _)| Arc::clone(stream)) else { return Ok(()) };
    if transfers.iter().any(|(there, _)| !Arc::ptr_eq(there, &stream)) {
        let text = "ncclGroupEnd: ncclSend and ncclRecv of one communicator on several streams are not supported by the \
                    host runtime: use one stream in a group";
        return Err(Fault::nccl(ncclInvalidUsage, text));
    }
    let batch: Vec<Transfer> = transfers.into_iter().map(|(_, transfer)| transfer).collect();
    let spans: Vec<Span> = batch.iter().map(|transfer| transfer.span).collect();
    line.enqueue(&stream, |s| &s.collectives, &spans, move |channel| channel.transfer(&batch))
}
