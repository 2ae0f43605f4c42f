//! Notes and engine handles by address. They are found again at every step, and made again if the layer changed; beyond a limit
//! the least recently used are closed. No calls into libraries.
#![forbid(unsafe_code)]

use super::notes::{Captured, HandleKey, Note, Question, Routing};
use crate::config::{LayerConfig, Relocation};
use crate::error::{Error, Result};
use crate::progress::Call;
use lru::LruCache;
use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};

/// So many pieces of memory that graphs prepare are remembered one by one; beyond that, any memory counts as a graph's, so
/// that every call reads the header.
const MOST_OF_GRAPHS: usize = 1 << 16;

/// An engine's handle over one piece of memory.
#[derive(Debug)]
struct Open<H> {
    handle: H,
    layer: LayerConfig,
    /// The token count that it goes by: of its last prepare, captured or not. None where its first use tells.
    tokens: Option<usize>,
}

/// One piece of handle memory.
#[derive(Debug)]
struct Entry<H> {
    note: Note,
    open: Option<Open<H>>,
}

/// All handle memory of a group, as far as it is remembered.
#[derive(Debug)]
pub(in crate::backend) struct Handles<H> {
    entries: LruCache<u64, Entry<H>, FxBuildHasher>,
    /// Registered layer -> its memory. As many as there are layers.
    places: FxHashMap<u64, u64>,
    /// Memory that a captured prepare writes, whose graph may be launched at any time. With what the last such prepare leaves,
    /// for calls that are captured, until a call prepares the memory.
    graphs: FxHashMap<u64, Option<Captured>>,
    /// Whether more graphs prepare than are remembered.
    any_by_graph: bool,
    /// Memory over which a captured call dispatches: its notes may be given up, and its graph launched later.
    dispatched: FxHashSet<u64>,
    /// Whether more such graphs were captured than are remembered.
    any_dispatched: bool,
    /// Whether a routing was found where it had not been prepared.
    moves: bool,
    /// Whether anything was given up beyond the limit.
    gave_up: bool,
    /// Handles that were given up and are to be closed.
    gone: Vec<H>,
    relocation: Relocation,
    limit: Option<usize>,
}

impl<H> Handles<H> {
    /// None yet, and at most `limit`.
    pub(in crate::backend) fn new(relocation: Relocation, limit: Option<usize>) -> Self {
        Self {
            entries: LruCache::unbounded_with_hasher(FxBuildHasher),
            places: FxHashMap::default(),
            graphs: FxHashMap::default(),
            any_by_graph: false,
            dispatched: FxHashSet::default(),
            any_dispatched: false,
            moves: false,
            gave_up: false,
            gone: Vec::new(),
            relocation,
            limit,
        }
    }

    #[inline]
    fn peek(&self, memory: u64) -> Option<&Entry<H>> {
        match self.entries.peek_mru() {
            // The parts of one call ask for the same memory, which then is not looked up again.
            Some((latest, entry)) if *latest == memory => Some(entry),
            _ => self.entries.peek(&memory),
        }
    }

    /// The entry of `memory`, which becomes the most recently used.
    #[inline]
    fn entry(&mut self, memory: u64) -> Option<&mut Entry<H>> {
        if self.entries.peek_mru().is_some_and(|(latest, _)| *latest == memory) {
            return self.entries.iter_mut().next().map(|(_, entry)| entry);
        }
        self.entries.get_mut(&memory)
    }

    /// The same, made if there is none.
    fn entry_or_new(&mut self, key: HandleKey, memory: u64) -> &mut Entry<H> {
        if let HandleKey::Registered(id) = key
            && let Some(former) = self.places.insert(id, memory).filter(|former| *former != memory)
            && self.entries.peek(&former).is_some_and(|entry| entry.note.key() == key)
        {
            // A layer has one memory at a time.
            self.gone.extend(self.entries.pop(&former).and_then(|entry| entry.open).map(|open| open.handle));
        }
        if !self.entries.contains(&memory) {
            while self.limit.is_some_and(|limit| self.entries.len() >= limit) {
                self.gave_up = true;
                let given_up = self.entries.pop_lru().and_then(|(_, entry)| entry.open);
                self.gone.extend(given_up.map(|open| open.handle));
            }
            let mut note = Note::new(key);
            if self.any_dispatched || self.dispatched.contains(&memory) {
                note.dispatched_by_graph();
            }
            self.entries.put(memory, Entry { note, open: None });
        }
        self.entry(memory).expect("there, or put there just now")
    }

    /// What a call has to ask [`super::notes::decide`], but for what only the driver knows.
    #[inline]
    pub(in crate::backend) fn question(&self, call: Call, key: HandleKey, memory: u64) -> (Option<&Note>, Question) {
        let note = self.peek(memory).map(|entry| &entry.note);
        let (elsewhere, never_prepared) = match key {
            HandleKey::Registered(id) if !is_of(note, key) => match self.places.get(&id) {
                Some(at) => (Some(*at).filter(|at| *at != memory), false),
                None => (None, true),
            },
            _ => (None, false),
        };
        let graph = if self.graphs.is_empty() { None } else { self.graphs.get(&memory) };
        let question = Question {
            call,
            key,
            elsewhere,
            never_prepared,
            relocation: self.relocation,
            capturing: false,
            by_graph: self.any_by_graph || graph.is_some(),
            captured: graph.copied().flatten(),
            ambiguous: false,
            allocation: None,
            moves: self.moves,
        };
        (note, question)
    }

    /// What calls have left in `memory` for `key`.
    pub(in crate::backend) fn routing(&self, key: HandleKey, memory: u64) -> Option<Routing> {
        let note = &self.peek(memory)?.note;
        note.routing().filter(|_| note.key() == key)
    }

    /// # Errors
    /// The layer's memory is another, and the policy is to refuse that.
    pub(in crate::backend) fn require_place(&self, key: HandleKey, memory: u64) -> Result<()> {
        match key {
            HandleKey::Registered(id) if self.relocation == Relocation::Refuse => match self.places.get(&id) {
                Some(at) if *at != memory => Err(elsewhere(*at, memory)),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// The handle over `memory` for a `layer` and, of a call that is no prepare, for so many tokens, if it is open.
    #[inline]
    pub(in crate::backend) fn ready(
        &mut self,
        key: HandleKey,
        memory: u64,
        layer: &LayerConfig,
        tokens: Option<usize>,
    ) -> bool {
        let Some(entry) = self.entry(memory) else { return false };
        let fits = entry.open.as_ref().is_some_and(|open| {
            // A graph prepared the memory, or a call after a graph.
            let other = tokens.zip(open.tokens).is_some_and(|(wanted, known)| wanted != known);
            open.layer == *layer && !other
        });
        let is_own = is_of(Some(&entry.note), key);
        fits && match key {
            HandleKey::Registered(id) if !is_own => self.places.get(&id) == Some(&memory),
            _ => true,
        }
    }

    /// The open handle over `memory`.
    #[inline]
    pub(in crate::backend) fn handle(&self, memory: u64) -> Option<&H> {
        self.peek(memory).and_then(|entry| entry.open.as_ref()).map(|open| &open.handle)
    }

    /// Puts a new handle in place.
    pub(in crate::backend) fn put(
        &mut self,
        key: HandleKey,
        memory: u64,
        layer: LayerConfig,
        tokens: Option<usize>,
        handle: H,
    ) {
        let entry = self.entry_or_new(key, memory);
        let former = entry.open.replace(Open { handle, layer, tokens });
        self.gone.extend(former.map(|open| open.handle));
    }

    /// The registration `id` has ended: of its memory nothing is remembered but graphs, and its handle is to be closed.
    pub(in crate::backend) fn forget(&mut self, id: u64) {
        let Some(memory) = self.places.remove(&id) else { return };
        if self.entries.peek(&memory).is_some_and(|entry| entry.note.key() == HandleKey::Registered(id)) {
            self.gone.extend(self.entries.pop(&memory).and_then(|entry| entry.open).map(|open| open.handle));
        }
    }

    /// The handles that were given up since this was last asked, to be closed.
    pub(in crate::backend) fn take_gone(&mut self) -> impl Iterator<Item = H> + '_ {
        self.gone.drain(..)
    }

    /// `key` is about to prepare `memory`, by a call that is not captured.
    #[inline]
    pub(in crate::backend) fn start_prepare(&mut self, key: HandleKey, memory: u64) {
        if !self.graphs.is_empty()
            && let Some(captured) = self.graphs.get_mut(&memory)
        {
            *captured = None;
        }
        if let Some(entry) = self.entry(memory) {
            entry.note.start_prepare(key);
        }
    }

    /// The prepare of `memory` is queued.
    #[inline]
    pub(in crate::backend) fn prepared(&mut self, memory: u64, routing: Routing, allocation: Option<u64>) {
        if let Some(entry) = self.entry(memory) {
            entry.note.prepared(routing, allocation);
            entry.open.iter_mut().for_each(|open| open.tokens = Some(routing.prepared.num_tokens));
        }
    }

    /// The prepare of `memory` is captured: nothing has happened yet.
    pub(in crate::backend) fn captured(&mut self, memory: u64, captured: Captured) {
        let has_room = self.graphs.len() < MOST_OF_GRAPHS && self.graphs.try_reserve(1).is_ok();
        if has_room || self.graphs.contains_key(&memory) {
            self.graphs.insert(memory, Some(captured));
        } else {
            self.any_by_graph = true;
        }
        if let Some(open) = self.entry(memory).and_then(|entry| entry.open.as_mut()) {
            open.tokens = Some(captured.routing.prepared.num_tokens);
        }
    }

    /// The header of `memory` says that `routing` is there, for a call of `key`.
    pub(in crate::backend) fn found(&mut self, key: HandleKey, memory: u64, routing: Routing, allocation: Option<u64>) {
        let captured = self.graphs.get_mut(&memory);
        let by_graph = captured.is_some() || self.any_by_graph;
        if let Some(captured) = captured.filter(|c| c.is_some_and(|c| c.key != key || c.routing.layer != routing.layer))
        {
            // What is captured from now on does not go by a graph that prepared the memory for another layer.
            *captured = None;
        }
        let known = self.entries.contains(&memory);
        let news = self.entry_or_new(key, memory).note.found(key, routing, allocation);
        // What was given up beyond the limit is found again where it was, and what a graph prepares is not known before.
        self.moves |= news && !by_graph && (known || !self.gave_up);
    }

    /// A call that goes by the routing in `memory` is queued, or becomes part of a graph.
    #[inline]
    pub(in crate::backend) fn used(&mut self, memory: u64, call: Call, capturing: bool) {
        if capturing && call == Call::Dispatch && !self.dispatched.contains(&memory) {
            if self.dispatched.len() < MOST_OF_GRAPHS {
                self.dispatched.insert(memory);
            } else {
                self.any_dispatched = true;
            }
        }
        if let Some(entry) = self.entry(memory) {
            if capturing { entry.note.captured(call) } else { entry.note.used(call) }
        }
    }

    /// Remembers the step's total in `memory`.
    pub(in crate::backend) fn note_total(&mut self, memory: u64, total: u64) {
        if let Some(entry) = self.entries.peek_mut(&memory) {
            entry.note.note_total(total);
        }
    }

    /// The layers of all open handles.
    pub(in crate::backend) fn layers(&self) -> impl Iterator<Item = LayerConfig> {
        self.entries.iter().filter_map(|(_, entry)| entry.open.as_ref()).map(|open| open.layer)
    }

    /// All handles, for tear-down.
    pub(in crate::backend) fn into_handles(mut self) -> impl Iterator<Item = H> {
        let gone = std::mem::take(&mut self.gone);
        let open = std::iter::from_fn(move || self.entries.pop_lru());
        gone.into_iter().chain(open.filter_map(|(_, entry)| entry.open).map(|open| open.handle))
    }
}

/// Whether `note`, of some memory, is about `key`. Then the memory is that of `key`, which `places` need not be asked: a layer's
/// place is entered before its note is, and its note goes with its place.
#[inline]
fn is_of(note: Option<&Note>, key: HandleKey) -> bool {
    note.is_some_and(|note| note.key() == key)
}

/// A registered layer that comes with another memory, against the group's policy.
#[cold]
pub(in crate::backend) fn elsewhere(at: u64, memory: u64) -> Error {
    let required = format!("must be the memory of this layer's earlier calls, at {at:#x}");
    Error::argument("handle.mem", required, format!("{memory:#x}"))
        .with_remedy("keep it, or initialize with allow_handle_mem_reloc = 1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::ops::Prepared;

    const KEY: HandleKey = HandleKey::Registered(7);

    fn routing(top_k: i32, num_tokens: usize) -> Routing {
        let layer = LayerConfig::parse("layer_config", top_k, 8).unwrap();
        Routing { layer, prepared: Prepared { num_tokens, index_dtype: DType::Int64, recv_total: None } }
    }

    /// A step's prepare; returns the handles that it gave up.
    fn prepare(handles: &mut Handles<u64>, key: HandleKey, memory: u64, routing: Routing, handle: u64) -> Vec<u64> {
        if !handles.ready(key, memory, &routing.layer, None) {
            handles.put(key, memory, routing.layer, None, handle);
        }
        handles.start_prepare(key, memory);
        handles.prepared(memory, routing, None);
        handles.take_gone().collect()
    }

    #[test]
    fn opened_once_then_found() {
        let mut handles = Handles::new(Relocation::Refuse, None);
        let layer = routing(2, 5).layer;
        assert!(!handles.ready(KEY, 0x100, &layer, None));
        assert!(prepare(&mut handles, KEY, 0x100, routing(2, 5), 1).is_empty());
        assert!(handles.ready(KEY, 0x100, &layer, Some(5)) && !handles.ready(KEY, 0x100, &layer, Some(6)));
        assert!(!handles.ready(KEY, 0x100, &routing(4, 5).layer, None), "another layer");
        assert_eq!(handles.routing(KEY, 0x100), Some(routing(2, 5)));
        assert_eq!(prepare(&mut handles, KEY, 0x100, routing(4, 5), 2), [1]);
        assert_eq!((handles.handle(0x100), handles.layers().count()), (Some(&2), 1));
        assert_eq!(handles.into_handles().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn moved_memory_is_refused_or_followed() {
        let mut handles = Handles::new(Relocation::Refuse, None);
        prepare(&mut handles, KEY, 0x100, routing(2, 5), 1);
        let text = handles.require_place(KEY, 0x200).unwrap_err().to_string();
        assert!(text.starts_with("handle.mem must be the memory of this layer's earlier calls, at 0x100, got 0x200"));
        handles.require_place(KEY, 0x100).unwrap();
        handles.require_place(HandleKey::Registered(8), 0x200).unwrap();
        let mut handles = Handles::new(Relocation::Rebuild, None);
        prepare(&mut handles, KEY, 0x100, routing(2, 5), 1);
        handles.require_place(KEY, 0x200).unwrap();
        assert!(!handles.ready(KEY, 0x200, &routing(2, 5).layer, None));
        assert_eq!(prepare(&mut handles, KEY, 0x200, routing(2, 6), 2), [1], "a layer has one memory at a time");
        assert_eq!((handles.routing(KEY, 0x100), handles.routing(KEY, 0x200)), (None, Some(routing(2, 6))));
    }

    #[test]
    fn memory_belongs_to_who_prepared_it_last() {
        let (mut handles, other) = (Handles::new(Relocation::Refuse, None), HandleKey::Registered(8));
        prepare(&mut handles, KEY, 0x100, routing(2, 5), 1);
        assert_eq!(prepare(&mut handles, other, 0x100, routing(2, 5), 2), [1]);
        assert!(prepare(&mut handles, KEY, 0x100, routing(2, 5), 3).is_empty(), "one handle for both from now on");
        prepare(&mut handles, other, 0x100, routing(2, 5), 4);
        assert_eq!((handles.routing(KEY, 0x100), handles.routing(other, 0x100)), (None, Some(routing(2, 5))));
        handles.note_total(0x100, 77);
        handles.note_total(0x200, 78);
        assert_eq!(handles.routing(other, 0x100).unwrap().prepared.recv_total, Some(77));
        // A layer that is prepared elsewhere does not take the other's handle away.
        let mut handles = Handles::new(Relocation::Rebuild, None);
        prepare(&mut handles, KEY, 0x100, routing(2, 5), 1);
        prepare(&mut handles, other, 0x100, routing(2, 5), 2);
        assert!(prepare(&mut handles, KEY, 0x200, routing(2, 5), 3).is_empty());
        assert_eq!(handles.handle(0x100), Some(&2));
    }

    #[test]
    fn a_captured_prepare_has_not_happened() {
        let mut handles = Handles::new(Relocation::Refuse, None);
        prepare(&mut handles, KEY, 0x100, routing(2, 20), 1);
        let captured = Captured { key: KEY, routing: routing(2, 10) };
        handles.captured(0x100, captured);
        let question = |handles: &Handles<u64>| handles.question(Call::Dispatch, KEY, 0x100).1;
        assert_eq!((question(&handles).by_graph, question(&handles).captured), (true, Some(captured)));
        assert_eq!(handles.routing(KEY, 0x100), Some(routing(2, 20)));
        assert!(!handles.ready(KEY, 0x100, &routing(2, 20).layer, Some(20)), "the handle goes by the graph's");
        handles.found(KEY, 0x100, routing(2, 10), None);
        assert_eq!(question(&handles).captured, Some(captured));
        for (key, found) in [(KEY, routing(4, 10)), (HandleKey::Registered(8), routing(2, 10))] {
            handles.captured(0x100, captured);
            handles.found(key, 0x100, found, None);
            assert_eq!((question(&handles).by_graph, question(&handles).captured), (true, None), "another is here now");
        }
        assert!(!question(&handles).moves, "graphs move nothing");
        handles.captured(0x100, captured);
        prepare(&mut handles, KEY, 0x100, routing(2, 5), 1);
        assert_eq!((question(&handles).by_graph, question(&handles).captured), (true, None), "the call comes last");
    }

    /// A graph that dispatches is launched whenever its program likes, so that nobody can tell whose rows a combine means; also
    /// after the notes about its memory were given up.
    #[test]
    fn a_captured_dispatch_outlives_its_note() {
        use super::super::notes::{Decision, decide};
        let mut handles = Handles::new(Relocation::Rebuild, Some(1));
        let key = HandleKey::Address;
        let next_combine = |handles: &mut Handles<u64>| {
            prepare(handles, key(1), 1, routing(2, 5), 1);
            handles.used(1, Call::Dispatch, false);
            prepare(handles, key(1), 1, routing(2, 5), 1);
            let (note, question) = handles.question(Call::Combine, key(1), 1);
            decide(note, &question)
        };
        assert!(matches!(next_combine(&mut handles), Decision::Refuse(_)), "the rows' routing is gone");
        handles.used(1, Call::Dispatch, true);
        assert_eq!(prepare(&mut handles, key(2), 2, routing(2, 5), 2), [1], "given up");
        assert!(matches!(next_combine(&mut handles), Decision::Use(_)), "the rows may be the graph's");
    }

    #[test]
    fn nothing_grows_without_bound() {
        let mut handles = Handles::new(Relocation::Rebuild, Some(2));
        let key = HandleKey::Address;
        assert!(prepare(&mut handles, key(1), 1, routing(2, 5), 1).is_empty());
        assert!(prepare(&mut handles, key(2), 2, routing(2, 5), 2).is_empty());
        assert!(handles.ready(key(1), 1, &routing(2, 5).layer, None));
        assert_eq!(prepare(&mut handles, key(3), 3, routing(2, 5), 3), [2], "the least recently used");
        assert_eq!((handles.handle(2), handles.handle(1)), (None, Some(&1)));
        for memory in 0..2 * MOST_OF_GRAPHS as u64 {
            handles.captured(memory, Captured { key: key(memory), routing: routing(2, 5) });
        }
        assert!(handles.graphs.len() <= MOST_OF_GRAPHS && handles.entries.len() <= 2);
        assert!(handles.question(Call::Dispatch, key(1 << 40), 1 << 40).1.by_graph, "any memory may be a graph's");
    }
}
