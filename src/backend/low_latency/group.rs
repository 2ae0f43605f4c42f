//! The operations of a low-latency group, in the order of every call: the group is alive, the stream is its device's, nothing is
//! staged, the arguments fit, their memory is where it has to be, and only then work is queued.

use super::current::LlGroup;
use super::live::{Entry, Group, Live, LlMemoryUsage, Staged};
use crate::backend::engine::low_latency::{Group as Engine, Handle, Held};
use crate::backend::watchdog::Watchdog;
use crate::error::Result;
use crate::memory::ll_group_bytes;
use crate::ops::{LlCombine, LlDispatch, LlDispatched, ll_step};
use crate::progress::{Call, Step};
use crate::sys::cuda::{Stream, StreamState};
use crate::tensor::TensorView;

impl LlGroup {
    fn watched<T>(&self, body: impl FnOnce(&mut Group, &mut Watchdog) -> Result<T>) -> Result<T> {
        let mut locked = self.lock()?;
        let Live { watchdog, group } = &mut *locked;
        watchdog.require_alive()?;
        body(group, watchdog)
    }

    /// Bytes of handle memory; host only.
    ///
    /// # Errors
    /// There is no group.
    pub fn handle_mem_size(&self) -> Result<usize> {
        Ok(self.lock()?.group.handle_bytes)
    }

    /// Sends each token's row to the ranks of its experts; with `send_only` the first half of it. Collective, queued on `stream`.
    ///
    /// # Errors
    /// A broken rule, before anything is enqueued, or what NCCL EP reports.
    pub fn dispatch(&self, mem: &TensorView, call: &mut LlDispatch, send_only: bool, stream: Stream) -> Result<()> {
        self.watched(|group, watchdog| {
            let state = group.enter(stream)?;
            group.require_none_staged()?;
            group.require_memory(mem)?;
            let dispatched = call.check(group.engine.config())?;
            group.require_places(mem, call)?;
            group.open(mem, dispatched.top_k)?;
            let step = ll_step(Call::LlDispatch, dispatched.top_k, &call.recv_tokens);
            let run = |engine: &Engine, handle: &mut Handle| engine.dispatch(handle, call, send_only, stream);
            group.queue(watchdog, mem, (step, Some(dispatched)), send_only, (stream, state), run)
        })
    }

    /// Sums each token's rows, weighted, back on its own rank; with `send_only` the first half of it.
    ///
    /// # Errors
    /// As [`LlGroup::dispatch`]; or nothing was dispatched.
    pub fn combine(&self, mem: &TensorView, call: &mut LlCombine, send_only: bool, stream: Stream) -> Result<()> {
        self.watched(|group, watchdog| {
            let state = group.enter(stream)?;
            group.require_none_staged()?;
            group.require_memory(mem)?;
            let dispatched = group.dispatched(mem)?;
            call.check(group.engine.config(), &dispatched)?;
            group.require_places(mem, call)?;
            let step = ll_step(Call::LlCombine, dispatched.top_k, &call.result);
            let run = |engine: &Engine, handle: &mut Handle| engine.combine(handle, call, send_only, stream);
            group.queue(watchdog, mem, (step, None), send_only, (stream, state), run)
        })
    }

    /// The second half of the operation that was called with `send_only`.
    ///
    /// # Errors
    /// There is none; or it was called with another handle or stream.
    pub fn complete(&self, mem: &TensorView, stream: Stream) -> Result<()> {
        self.watched(|group, watchdog| {
            let state = group.enter(stream)?;
            let staged = group.staged(mem, stream, state)?;
            let step = Step { call: Call::LlComplete, ..staged.step };
            let entry = group.handles.peek(&mem.data).expect("a staged operation's handle stays open");
            let done = watchdog.queue(step, stream, state, || group.engine.complete(&entry.handle, stream));
            let Staged { held, dispatched, .. } = group.staged.take().expect("it was looked at above");
            if let Err(error) = done {
                group.left.push(held);
                return Err(error);
            }
            group.note(mem, dispatched);
            Ok(())
        })
    }

    /// Device memory of the group; host only.
    ///
    /// # Errors
    /// There is no group.
    pub fn memory_usage(&self) -> Result<LlMemoryUsage> {
        let locked = self.lock()?;
        let group = &locked.group;
        let [buffers, workspace] = ll_group_bytes(group.engine.config());
        let open_handles = group.handles.len() as u64;
        let handles = open_handles * group.handle_bytes as u64;
        Ok(LlMemoryUsage { buffers, workspace, library: group.rendezvous.bytes(), handles, open_handles })
    }
}

impl Group {
    /// Queues a call over open handle memory, once it came out of its checks; `dispatched` is what it leaves for combine.
    fn queue(
        &mut self,
        watchdog: &mut Watchdog,
        mem: &TensorView,
        (step, dispatched): (Step, Option<LlDispatched>),
        send_only: bool,
        (stream, state): (Stream, StreamState),
        run: impl FnOnce(&Engine, &mut Handle) -> Result<Held>,
    ) -> Result<()> {
        let Self { engine, handles, .. } = self;
        let Entry { handle, dispatched: left, .. } = handles.get_mut(&mem.data).expect("opened before");
        // There is nothing to combine before all of a dispatch was queued.
        if dispatched.is_some() {
            *left = None;
        }
        let mut held = None;
        watchdog.queue(step, stream, state, || run(engine, handle).map(|call| held = Some(call)))?;
        match held {
            Some(held) if send_only => {
                self.staged = Some(Staged { step, memory: mem.data, stream, state, held, dispatched });
            }
            // A whole operation's descriptors are NCCL EP's no more.
            _ => self.note(mem, dispatched),
        }
        Ok(())
    }

    /// Notes what a dispatch left.
    fn note(&mut self, mem: &TensorView, dispatched: Option<LlDispatched>) {
        if let Some(entry) = self.handles.get_mut(&mem.data)
            && dispatched.is_some()
        {
            entry.dispatched = dispatched;
        }
    }
}
