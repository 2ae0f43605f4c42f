//! The routing in a call's handle memory: from the host's note, or else from the routing header in the memory.

use super::live::{Group, HandleRef, Layer, RecvTotals};
use super::routing::handles::elsewhere;
use super::routing::header::{Header, TOTAL_OFFSET, WORDS};
use super::routing::notes::{self, Decision, HandleKey, Question, Refusal, Routing};
use crate::config::{RecvCapacity, Relocation};
use crate::error::{Error, Result};
use crate::memory::HEADER_BYTES;
use crate::ops::Prepared;
use crate::progress::Call;
use crate::sys::cuda::{Stream, StreamState};
use crate::tensor::TensorView;
use std::time::Duration;

impl Group {
    /// The layer of `handle` and what its last prepare left, for `call`: as the host knows it, or as the memory's header says.
    #[inline]
    pub(super) fn routing_of(
        &mut self,
        call: Call,
        handle: &HandleRef,
        stream: (Stream, StreamState),
    ) -> Result<(Layer, Prepared)> {
        let memory = handle.mem.data;
        let registered = match handle.key {
            HandleKey::Registered(id) => Some(self.registered_layer(id)?),
            HandleKey::Address(_) => None,
        };
        self.require_memory(&handle.mem, registered.map_or(HEADER_BYTES, |layer| layer.mem_bytes()))?;
        let (capturing, ambiguous) = (stream.1 == StreamState::Capturing, self.is_ambiguous(handle.key));
        let allocation = self.allocation_of(handle)?;
        let (note, question) = self.handles.question(call, handle.key, memory);
        let question = Question { capturing, ambiguous, allocation, ..question };
        let (routing, doubted) = match notes::decide(note, &question) {
            Decision::Use(routing) => (routing, false),
            Decision::Read(Some(known)) => (known, true),
            Decision::Read(None) => {
                let header = Header(self.read_words(memory, stream.0, None)?);
                let found = header.read(self.epoch).map(|(layer, prepared)| Routing { layer, prepared });
                let fits = |found: &Routing| registered.is_none_or(|layer| layer.config == found.layer);
                let found = found.filter(fits).ok_or_else(|| not_prepared(handle))?;
                self.handles.found(handle.key, memory, found, allocation);
                (found, false)
            }
            Decision::Refuse(refusal) => return Err(refused(refusal, handle)),
        };
        let (layer, fits) = match registered {
            Some(layer) if layer.config == routing.layer => (layer, Ok(())),
            Some(_) => return Err(not_prepared(handle)),
            None => {
                let layer = self.layer_of(routing.layer)?;
                (layer, self.require_memory(&handle.mem, layer.mem_bytes()))
            }
        };
        // Of memory that is too small for what is known, a smaller layer may have taken the place.
        if fits.is_err() || doubted {
            let found = self.revalidate(handle, (&layer, routing.prepared), stream);
            return found.map_or_else(|| fits.map(|()| (layer, routing.prepared)), Ok);
        }
        Ok((layer, routing.prepared))
    }

    /// Whether what is known of handle memory may pass for what is there now, though other bytes were moved there: layers of
    /// several configurations differ in more than a call's arguments tell, and so do totals.
    #[inline]
    pub(super) fn is_ambiguous(&self, key: HandleKey) -> bool {
        let several = matches!(key, HandleKey::Address(_)) && self.layer_configs.len() > 1;
        self.config.relocation == Relocation::Rebuild && (self.config.recv_capacity == RecvCapacity::Eager || several)
    }

    /// The allocation that handle memory is in, where that tells something of it.
    #[inline]
    pub(super) fn allocation_of(&self, handle: &HandleRef) -> Result<Option<u64>> {
        match handle.key {
            HandleKey::Address(memory) if self.is_ambiguous(handle.key) => {
                self.base.cuda.allocation_id(memory).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// What the memory of a call holds, if that is not what is `known` of it and does not fit, or may not: the bytes of other
    /// handle memory may have been moved to where some was, in one allocation of a caching allocator. Nothing if the memory
    /// cannot be read soon: a refusal waits for no other rank. In a capture: what is known besides.
    #[cold]
    pub(super) fn revalidate(
        &mut self,
        handle: &HandleRef,
        known: (&Layer, Prepared),
        (stream, state): (Stream, StreamState),
    ) -> Option<(Layer, Prepared)> {
        let memory = handle.mem.data;
        let known = Routing { layer: known.0.config, prepared: known.1 };
        let found = match state {
            // Nothing can be read. A captured call may go by a graph's prepare or by what a call prepared or found there.
            StreamState::Capturing => self.handles.routing(handle.key, memory)?,
            StreamState::Working if self.config.relocation == Relocation::Refuse => return None,
            // A wait for it would break the captures of streams that it waits for.
            StreamState::Working if stream.is_legacy() && self.base.cuda.is_capturing(stream).is_err() => {
                return None;
            }
            StreamState::Working => {
                let soon = Some(Duration::from_secs(1));
                let [first, second, low, high] = self.read_words(memory, stream, soon).ok()?;
                let (layer, prepared) = Header([first, second]).read(self.epoch)?;
                let eager = self.config.recv_capacity == RecvCapacity::Eager;
                let recv_total = eager.then_some(u64::from(high) << 32 | u64::from(low));
                Routing { layer, prepared: Prepared { recv_total, ..prepared } }
            }
        };
        let layer = match handle.key {
            HandleKey::Registered(_) if known.layer != found.layer => return None,
            _ => self.layer_of(found.layer).ok()?,
        };
        self.require_memory(&handle.mem, layer.mem_bytes()).ok()?;
        if state == StreamState::Working {
            let allocation = self.allocation_of(handle).ok()?;
            self.handles.found(handle.key, memory, found, allocation);
        }
        (!known.is_same(found)).then_some((layer, found.prepared))
    }

    /// Reads words of handle memory behind what is queued on `stream`, unless `limit` is over or the group comes to its end
    /// before.
    fn read_words<const N: usize>(&self, address: u64, stream: Stream, limit: Option<Duration>) -> Result<[u32; N]> {
        let ended = || self.rendezvous.ended();
        // SAFETY: `Stream::bind` vouches for the handle memory; a caller saw that the stream does not capture.
        unsafe { self.base.cuda.read_words(address, stream, limit, &ended) }
    }

    /// `prepared` with the total that eager mode's receive buffers have to hold: waits for the prepare, once a step.
    pub(super) fn with_total(
        &mut self,
        handle: &HandleRef,
        prepared: Prepared,
        (stream, state): (Stream, StreamState),
    ) -> Result<Prepared> {
        require_no_capture(state)?;
        if prepared.recv_total.is_some() {
            return Ok(prepared);
        }
        let [low, high] = self.read_words(handle.mem.data + TOTAL_OFFSET as u64, stream, None)?;
        let total = u64::from(high) << 32 | u64::from(low);
        self.handles.note_total(handle.mem.data, total);
        Ok(Prepared { recv_total: Some(total), ..prepared })
    }

    /// What the last prepare over `mem` found; waits for it.
    pub(super) fn recv_totals(&mut self, mem: &TensorView, stream: Stream) -> Result<RecvTotals> {
        self.require_memory(mem, HEADER_BYTES)?;
        if self.enter(stream).map_err(|error| self.engine.explain(error))? == StreamState::Capturing {
            return Err(Error::State(
                "the totals are on the device and cannot be waited for while the stream captures a graph: call it after \
                 the graph was launched"
                    .into(),
            ));
        }
        let words: [u32; WORDS] =
            self.read_words(mem.data, stream, None).map_err(|error| self.engine.explain(error))?;
        let [first, second, low, high, counts @ ..] = words;
        if Header([first, second]).read(self.epoch).is_none() {
            let name = mem.name;
            return Err(Error::State(format!("{name} holds no routing of this group: call nvte_ep_prepare first")));
        }
        let needed = u64::from(high) << 32 | u64::from(low);
        // The step's other calls need not read it again.
        self.handles.note_total(mem.data, needed);
        let received = match self.config.recv_capacity {
            RecvCapacity::Fixed(rows) => needed.min(rows.into()),
            RecvCapacity::Eager => needed,
        };
        let invalid_indices = counts[..self.engine.counts()].iter().copied().map(u64::from).sum();
        self.stats.dropped_rows += needed - received;
        Ok(RecvTotals { needed, received, dropped: needed - received, invalid_indices })
    }
}

/// Which handle a text is about.
fn name_of(handle: &HandleRef) -> String {
    match handle.key {
        HandleKey::Registered(id) => format!("the layer of handle.id {id}"),
        HandleKey::Address(address) => format!("the {} at {address:#x}", handle.mem.name),
    }
}

/// A call that needs a routing over memory that holds none of this layer.
#[cold]
fn not_prepared(handle: &HandleRef) -> Error {
    let what = name_of(handle);
    let since = "if it was, its memory was prepared for another layer since, or does not hold that any more: layers must not share \
                 handle memory";
    Error::State(format!("{what} was not prepared: call nvte_ep_prepare first ({since})"))
}

#[cold]
fn refused(refusal: Refusal, handle: &HandleRef) -> Error {
    match refusal {
        Refusal::NotPrepared => not_prepared(handle),
        Refusal::Elsewhere(at) => elsewhere(at, handle.mem.data),
        Refusal::Unreadable => Error::State(
            "handle memory that is new to the library cannot be looked into while the stream captures a graph: make \
             this call, or nvte_ep_prepare, once before the capture"
                .into(),
        ),
        Refusal::OtherRouting => {
            let what = name_of(handle);
            Error::State(format!(
                "{what} was prepared again after nvte_ep_dispatch, and its rows can only be combined by the routing that \
                 dispatched them: combine before the next nvte_ep_prepare, or give each micro-batch a handle of its own"
            ))
        }
    }
}

/// Eager mode has the host read each step's total, which a graph cannot.
pub(super) fn require_no_capture(state: StreamState) -> Result<()> {
    if state == StreamState::Working {
        return Ok(());
    }
    Err(Error::State(
        "the stream captures a graph, and in eager mode the host reads every step's total: initialize with \
         max_recv_tokens_per_rank > 0 to capture"
            .into(),
    ))
}
