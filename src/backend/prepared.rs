//! What a call's handle memory holds: what the host knows of it, or else what the memory says of itself.

use super::live::{Group, HandleRef, Layer, RecvTotals};
use super::routing::handles::HandleKey;
use super::routing::header::{Header, TOTAL_OFFSET};
use crate::config::{RecvCapacity, Relocation};
use crate::error::{Error, Result};
use crate::memory::HEADER_BYTES;
use crate::ops::Prepared;
use crate::sys::cuda::{Stream, StreamState};
use crate::tensor::TensorView;
use std::time::Duration;

impl Group {
    /// The layer of `handle` and what its last prepare left: from the registry or the cache, or, for memory that is not
    /// in the cache, from its header.
    ///
    /// # Safety
    /// The handle memory is device memory of the described extent; `stream` is a stream of the group's device.
    #[inline]
    pub(super) unsafe fn prepared_layer(
        &mut self,
        handle: &HandleRef,
        stream: (Stream, StreamState),
    ) -> Result<(Layer, Prepared)> {
        let memory = handle.mem.data;
        let registered = match handle.key {
            HandleKey::Registered(id) => Some(self.registered_layer(id)?),
            HandleKey::Address(_) => None,
        };
        self.require_memory(&handle.mem, registered.map_or(HEADER_BYTES, |layer| layer.mem_bytes()))?;
        let entry = self.handles.get_mut(handle.key);
        let known = entry.as_ref().map(|entry| (entry.layer, entry.memory));
        let maybe_stale = entry.is_some_and(|entry| entry.maybe_stale);
        let (_, state) = stream;
        let by_graph = self.handles.is_captured(memory);
        // Whether other bytes are here for certain, and whether they may be.
        let (mut other, mut doubted) = (false, false);
        if self.needs_revalidation(handle.key) {
            doubted = maybe_stale;
            if registered.is_none() {
                let id = self.base.cuda.allocation_id(memory)?;
                match self.allocations.get(&memory) {
                    Some(known) => other = *known != id,
                    // Of a time when it did not matter.
                    None => {
                        doubted = true;
                        self.allocations.insert(memory, id);
                    }
                }
            }
        }
        let (config, prepared) = match known {
            // What is captured goes by the prepare that comes last, captured or not.
            _ if by_graph && state == StreamState::Capturing && self.handles.captured(memory).is_some() => {
                let captured = self.handles.captured(memory).filter(|captured| captured.key == handle.key);
                let captured = captured.ok_or_else(|| not_prepared(handle))?;
                (captured.layer, Some(captured.prepared))
            }
            Some((config, at)) if at == memory && by_graph && state == StreamState::Capturing => {
                (config, self.handles.prepared(handle.key, memory))
            }
            // The layer's own memory, as far as this process knows.
            Some((config, at)) if at == memory && !by_graph && !other => {
                (config, self.handles.prepared(handle.key, memory))
            }
            // Registered and never prepared anywhere.
            None if registered.is_some() => return Err(not_prepared(handle)),
            // Memory that is new to the library: moved here, or given up by the cache. Or a graph may have prepared it.
            _ => {
                if let (Some(layer), Some(_)) = (registered, known) {
                    // Refused by the group's policy, if so, before anything is read.
                    self.handles.lookup(handle.key, memory, &layer.config, None)?;
                }
                // SAFETY: passed on.
                let header = unsafe { self.read_header(memory, stream) }?;
                let (config, prepared) = header.read(self.epoch).ok_or_else(|| not_prepared(handle))?;
                self.handles.found_here(handle.key, memory, &config);
                if known.is_some_and(|(_, at)| at == memory) {
                    // Captured calls go by it, where a graph's prepare is not theirs.
                    self.handles.moved_here(handle.key, memory, &config, prepared);
                }
                if other {
                    self.allocations.insert(memory, self.base.cuda.allocation_id(memory)?);
                }
                (config, Some(prepared))
            }
        };
        let prepared = prepared.ok_or_else(|| not_prepared(handle))?;
        let (layer, fits) = match registered {
            Some(layer) if layer.config == config => (layer, Ok(())),
            Some(_) => return Err(not_prepared(handle)),
            None => {
                let layer = self.layer_of(config)?;
                (layer, self.require_memory(&handle.mem, layer.mem_bytes()))
            }
        };
        // Of memory that is too small for what is known, a smaller layer may have taken the place.
        if fits.is_err() || doubted && state == StreamState::Working {
            // SAFETY: passed on.
            let found = unsafe { self.revalidate(handle, (&layer, prepared), stream) };
            return found.map_or_else(|| fits.map(|()| (layer, prepared)), Ok);
        }
        Ok((layer, prepared))
    }

    /// Whether what is known of handle memory may pass for what is there now, though other bytes were moved there: layers of
    /// several configurations differ in more than a call's arguments tell, and so do totals.
    #[inline]
    pub(super) fn needs_revalidation(&self, key: HandleKey) -> bool {
        self.config.recv_capacity == RecvCapacity::Eager
            || matches!(key, HandleKey::Address(_)) && self.layer_configs.len() > 1
    }

    /// What the memory of a call holds, if that is not what is `known` of it and does not fit, or may not: the bytes of other
    /// handle memory may have been moved to where some was, in one allocation of a caching allocator. Nothing if the memory
    /// cannot be read soon: a refusal waits for no other rank. In a capture: what is known besides.
    ///
    /// # Safety
    /// As [`Group::prepared_layer`].
    #[cold]
    pub(super) unsafe fn revalidate(
        &mut self,
        handle: &HandleRef,
        known: (&Layer, Prepared),
        (stream, state): (Stream, StreamState),
    ) -> Option<(Layer, Prepared)> {
        let memory = handle.mem.data;
        let (config, found) = match state {
            // Nothing can be read. A captured call may go by a graph's prepare or by what a call prepared or found there.
            StreamState::Capturing => {
                let entry = self.handles.get_mut(handle.key).filter(|entry| entry.memory == memory)?;
                (entry.layer, entry.prepared?)
            }
            StreamState::Working if self.config.relocation == Relocation::Refuse => return None,
            // A wait for it would break the captures of streams that it waits for.
            // SAFETY: passed on.
            StreamState::Working if stream.is_legacy() && unsafe { self.base.cuda.is_capturing(stream) }.is_err() => {
                return None;
            }
            StreamState::Working => {
                let soon = Some(Duration::from_secs(1));
                // SAFETY: passed on; the stream does not capture.
                let [first, second, low, high] = unsafe { self.read_words(memory, stream, soon) }.ok()?;
                let (config, prepared) = Header([first, second]).read(self.epoch)?;
                let eager = self.config.recv_capacity == RecvCapacity::Eager;
                let recv_total = eager.then_some(u64::from(high) << 32 | u64::from(low));
                (config, Prepared { recv_total, ..prepared })
            }
        };
        let known_prepared = Prepared { recv_total: found.recv_total.and(known.1.recv_total), ..known.1 };
        if (known.0.config, known_prepared) == (config, found) {
            return None;
        }
        let layer = match handle.key {
            HandleKey::Registered(_) if known.0.config == config => *known.0,
            HandleKey::Registered(_) => return None,
            HandleKey::Address(_) => self.layer_of(config).ok()?,
        };
        self.require_memory(&handle.mem, layer.mem_bytes()).ok()?;
        if state == StreamState::Working {
            self.handles.moved_here(handle.key, memory, &config, found);
        }
        Some((layer, found))
    }

    /// # Safety
    /// As [`Group::prepared_layer`].
    #[inline(never)]
    unsafe fn read_header(&self, address: u64, (stream, state): (Stream, StreamState)) -> Result<Header> {
        if state == StreamState::Capturing {
            return Err(Error::State(
                "handle memory that is new to the library cannot be looked into while the stream captures a graph: make \
                 this call, or nvte_ep_prepare, once before the capture"
                    .into(),
            ));
        }
        // SAFETY: passed on; the stream does not capture.
        Ok(Header(unsafe { self.read_words(address, stream, None) }?))
    }

    /// Reads words of handle memory behind what is queued on `stream`, unless `limit` is over or the group comes to its end
    /// before.
    ///
    /// # Safety
    /// As [`Group::prepared_layer`]; the stream does not capture.
    unsafe fn read_words<const N: usize>(
        &self,
        address: u64,
        stream: Stream,
        limit: Option<Duration>,
    ) -> Result<[u32; N]> {
        let ended = || self.meeting.ended();
        // SAFETY: passed on.
        unsafe { self.base.cuda.read_words(address, stream, limit, &ended) }
    }

    ///
    /// # Safety
    /// As [`Group::prepared_layer`].
    pub(super) unsafe fn with_total(
        &mut self,
        handle: &HandleRef,
        prepared: Prepared,
        (stream, state): (Stream, StreamState),
    ) -> Result<Prepared> {
        require_no_capture(state)?;
        if prepared.recv_total.is_some() {
            return Ok(prepared);
        }
        // SAFETY: passed on; the stream does not capture.
        let [low, high] = unsafe { self.read_words(handle.mem.data + TOTAL_OFFSET as u64, stream, None) }?;
        let total = u64::from(high) << 32 | u64::from(low);
        self.handles.note_total(handle.mem.data, total);
        Ok(Prepared { recv_total: Some(total), ..prepared })
    }

    /// # Safety
    /// As [`Group::prepared_layer`].
    pub(super) unsafe fn recv_totals(&mut self, mem: &TensorView, stream: Stream) -> Result<RecvTotals> {
        self.require_memory(mem, HEADER_BYTES)?;
        // SAFETY: passed on.
        if unsafe { self.enter(stream) }.map_err(|error| self.engine.explain(error))? == StreamState::Capturing {
            return Err(Error::State(
                "the totals are on the device and cannot be waited for while the stream captures a graph: call it after \
                 the graph was launched"
                    .into(),
            ));
        }
        // SAFETY: passed on; the stream does not capture.
        let words = unsafe { self.read_words(mem.data, stream, None) }.map_err(|error| self.engine.explain(error))?;
        let [first, second, low, high, invalid_indices] = words;
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
        Ok(RecvTotals { needed, received, dropped: needed - received, invalid_indices: invalid_indices.into() })
    }
}

/// A call that needs a routing over memory that holds none of this layer.
#[cold]
fn not_prepared(handle: &HandleRef) -> Error {
    let what = match handle.key {
        HandleKey::Registered(id) => format!("the layer of handle.id {id}"),
        HandleKey::Address(address) => format!("the {} at {address:#x}", handle.mem.name),
    };
    let since = "or its memory was prepared for another layer since, or does not hold what was prepared";
    Error::State(format!("{what} was not prepared ({since}): call nvte_ep_prepare first"))
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
