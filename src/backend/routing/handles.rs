//! Which handle serves which key: created once, found again at every step, rebuilt when its memory or layer changed, the
//! least recently used ones given up beyond a limit. No NCCL calls.
#![forbid(unsafe_code)]

use crate::config::{LayerConfig, Relocation};
use crate::error::{Error, Result};
use crate::ops::Prepared;
use lru::LruCache;
use rustc_hash::{FxBuildHasher, FxHashMap};

/// What identifies a layer's routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HandleKey {
    /// The id that register_layer gave out.
    Registered(u64),
    /// The address of the handle memory.
    Address(u64),
}

/// One handle and what is known of it.
#[derive(Debug)]
pub struct Entry<H> {
    /// The handle.
    pub handle: H,
    /// Address of the memory it was built over.
    pub memory: u64,
    /// The layer it was built for.
    pub layer: LayerConfig,
    /// The last prepare; none before the first.
    pub prepared: Option<Prepared>,
    /// The token count that the handle goes by: of its last prepare, captured or not. None where its first use tells.
    pub tokens: Option<usize>,
    /// Whether what is here now may be another's: the gradient of dispatch has been queued since the last prepare, which is the
    /// last that a step does, or the bytes were seen to be another layer's.
    pub maybe_stale: bool,
}

impl<H> Entry<H> {
    #[cold]
    fn elsewhere(&self, memory: u64) -> Error {
        let required = format!("must be the memory of this layer's earlier calls, at {:#x}", self.memory);
        Error::argument("handle.mem", required, format!("{memory:#x}"))
            .with_remedy("keep it, or initialize with allow_handle_mem_reloc = 1")
    }
}

/// What a look-up found.
#[derive(Debug, PartialEq, Eq)]
pub enum Lookup {
    /// A handle over this very memory, for this very layer.
    Ready,
    /// No handle yet, or one of a layer that used this address before.
    Missing,
    /// A handle over other memory, and the policy says to rebuild it.
    Moved,
}

/// A captured prepare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Captured {
    /// Whose.
    pub key: HandleKey,
    /// Its layer.
    pub layer: LayerConfig,
    /// What it leaves.
    pub prepared: Prepared,
}

/// Handles by key.
#[derive(Debug)]
pub struct HandleCache<H> {
    entries: LruCache<HandleKey, Entry<H>, FxBuildHasher>,
    /// Which key prepared a piece of memory last: registered layers may share one. Of no other key over that memory is
    /// there an entry that says `prepared`.
    owners: FxHashMap<u64, HandleKey>,
    /// Memory that a captured prepare writes, whose graph may be launched at any time: only the memory itself knows what it
    /// holds. With what that prepare leaves, for calls that are captured, until a call prepares the memory.
    captured: FxHashMap<u64, Option<Captured>>,
    relocation: Relocation,
    limit: Option<usize>,
}

impl<H> HandleCache<H> {
    /// An empty cache that holds `limit` handles.
    #[must_use]
    pub fn new(relocation: Relocation, limit: Option<usize>) -> Self {
        Self {
            entries: LruCache::unbounded_with_hasher(FxBuildHasher),
            owners: FxHashMap::default(),
            captured: FxHashMap::default(),
            relocation,
            limit,
        }
    }

    /// Whether `key` is the most recently used: the steps of one call ask for the same key, which then is not looked up again.
    #[inline]
    fn is_latest(&self, key: HandleKey) -> bool {
        self.entries.peek_mru().is_some_and(|(latest, _)| *latest == key)
    }

    #[inline]
    fn peek(&self, key: HandleKey) -> Option<&Entry<H>> {
        match self.entries.peek_mru() {
            Some((latest, entry)) if *latest == key => Some(entry),
            _ => self.entries.peek(&key),
        }
    }

    /// What is there for `key` over `memory` as a handle of `layer`, for a call about `tokens` tokens, none if the call is a
    /// prepare.
    ///
    /// # Errors
    /// The key's handle lies over other memory and the policy refuses that.
    #[inline]
    pub fn lookup(&self, key: HandleKey, memory: u64, layer: &LayerConfig, tokens: Option<usize>) -> Result<Lookup> {
        let other = |entry: &Entry<H>| tokens.zip(entry.tokens).is_some_and(|(wanted, known)| wanted != known);
        match self.peek(key) {
            // A graph prepared the memory, or a call after a graph.
            Some(entry) if entry.memory == memory && other(entry) => Ok(Lookup::Missing),
            Some(entry) if entry.memory == memory && entry.layer == *layer => Ok(Lookup::Ready),
            Some(entry) if entry.memory == memory => Ok(Lookup::Missing),
            None => Ok(Lookup::Missing),
            Some(_) if self.relocation == Relocation::Rebuild => Ok(Lookup::Moved),
            Some(entry) => Err(entry.elsewhere(memory)),
        }
    }

    /// What the last prepare of `key` left in `memory`: nothing if the key's handle lies elsewhere, or if another key
    /// prepared that memory since.
    #[inline]
    pub fn prepared(&self, key: HandleKey, memory: u64) -> Option<Prepared> {
        let entry = self.peek(key)?;
        entry.prepared.filter(|_| entry.memory == memory)
    }

    /// Notes that `key` prepares `memory`: what another key prepared there is lost.
    fn own(&mut self, memory: u64, key: HandleKey) {
        let former = self.owners.insert(memory, key).filter(|former| *former != key);
        let entry = former.and_then(|former| self.entries.peek_mut(&former));
        if let Some(entry) = entry.filter(|entry| entry.memory == memory) {
            entry.prepared = None;
        }
    }

    /// The entry of `key`, which is about to prepare its memory: that memory's routing is lost from now on.
    pub fn start_prepare(&mut self, key: HandleKey) -> Option<&mut Entry<H>> {
        let memory = self.get_mut(key)?.memory;
        self.own(memory, key);
        if let Some(captured) = self.captured.get_mut(&memory) {
            *captured = None;
        }
        let entry = self.get_mut(key)?;
        (entry.prepared, entry.maybe_stale) = (None, false);
        Some(entry)
    }

    /// Notes that the bytes in `memory`, where `key` is, are others than before: a `layer` that was `prepared` elsewhere.
    pub fn moved_here(&mut self, key: HandleKey, memory: u64, layer: &LayerConfig, prepared: Prepared) {
        self.own(memory, key);
        if let Some(entry) = self.get_mut(key) {
            entry.maybe_stale = entry.layer != *layer;
            if !entry.maybe_stale {
                entry.prepared = Some(prepared);
            }
        }
    }

    /// Notes that `memory`, as `key` finds it, holds a `layer`: what is captured from now on does not go by a graph that
    /// prepared it for another one.
    pub fn found_here(&mut self, key: HandleKey, memory: u64, layer: &LayerConfig) {
        let captured = self.captured.get_mut(&memory);
        if let Some(captured) = captured.filter(|c| c.is_some_and(|c| c.key != key || c.layer != *layer)) {
            *captured = None;
        }
    }

    /// Notes a prepare of `memory` by a stream that captures: nothing has happened yet.
    pub fn note_captured(&mut self, memory: u64, captured: Captured) {
        self.captured.insert(memory, Some(captured));
    }

    /// Whether a captured prepare may write `memory`.
    pub fn is_captured(&self, memory: u64) -> bool {
        self.captured.contains_key(&memory)
    }

    /// The captured prepare of `memory`, if no call has prepared it since.
    pub fn captured(&self, memory: u64) -> Option<Captured> {
        self.captured.get(&memory).copied().flatten()
    }

    /// The entry of `key`, which becomes the most recently used.
    #[inline]
    pub fn get_mut(&mut self, key: HandleKey) -> Option<&mut Entry<H>> {
        if self.is_latest(key) {
            return self.entries.iter_mut().next().map(|(_, entry)| entry);
        }
        self.entries.get_mut(&key)
    }

    /// Puts a new handle in place and returns those that it replaces or that are beyond the limit now. `prepared` is
    /// what its memory holds already.
    pub fn insert(
        &mut self,
        key: HandleKey,
        memory: u64,
        layer: LayerConfig,
        prepared: Option<Prepared>,
        handle: H,
    ) -> Vec<H> {
        let mut gone: Vec<(HandleKey, Entry<H>)> =
            self.entries.pop(&key).map(|entry| (key, entry)).into_iter().collect();
        while self.limit.is_some_and(|limit| self.entries.len() >= limit) {
            gone.extend(self.entries.pop_lru());
        }
        for (key, entry) in &gone {
            if self.owners.get(&entry.memory) == Some(key) {
                self.owners.remove(&entry.memory);
            }
        }
        if prepared.is_some() {
            self.own(memory, key);
        }
        let tokens = prepared.map(|prepared| prepared.num_tokens);
        self.entries.put(key, Entry { handle, memory, layer, prepared, tokens, maybe_stale: false });
        gone.into_iter().map(|(_, entry)| entry.handle).collect()
    }

    /// Remembers the step's total of whoever prepared `memory` last, if that is known.
    pub fn note_total(&mut self, memory: u64, total: u64) {
        let owner = self.owners.get(&memory).and_then(|key| self.entries.peek_mut(key));
        if let Some(prepared) = owner.filter(|entry| entry.memory == memory).and_then(|entry| entry.prepared.as_mut()) {
            prepared.recv_total = Some(total);
        }
    }

    /// The layers of all handles.
    pub fn layers(&self) -> impl Iterator<Item = LayerConfig> {
        self.entries.iter().map(|(_, entry)| entry.layer)
    }

    /// All handles, for tear-down.
    pub fn into_handles(mut self) -> impl Iterator<Item = H> {
        std::iter::from_fn(move || self.entries.pop_lru().map(|(_, entry)| entry.handle))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    const KEY: HandleKey = HandleKey::Registered(7);

    fn layer(top_k: i32) -> LayerConfig {
        LayerConfig::parse("layer_config", top_k, 8).unwrap()
    }

    #[test]
    fn created_once_then_found() {
        let mut cache = HandleCache::new(Relocation::Refuse, None);
        assert_eq!(cache.lookup(KEY, 0x100, &layer(2), None).unwrap(), Lookup::Missing);
        assert!(cache.insert(KEY, 0x100, layer(2), None, "a").is_empty());
        assert_eq!(cache.lookup(KEY, 0x100, &layer(2), None).unwrap(), Lookup::Ready);
        assert_eq!(cache.lookup(HandleKey::Registered(8), 0x100, &layer(2), None).unwrap(), Lookup::Missing);
        assert_eq!(cache.into_handles().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn moved_memory_is_refused_or_rebuilt() {
        let mut cache = HandleCache::new(Relocation::Refuse, None);
        cache.insert(KEY, 0x100, layer(2), None, 1);
        let text = cache.lookup(KEY, 0x200, &layer(2), None).unwrap_err().to_string();
        assert!(text.starts_with("handle.mem must be the memory of this layer's earlier calls, at 0x100, got 0x200"));
        assert_eq!(cache.lookup(KEY, 0x100, &layer(2), None).unwrap(), Lookup::Ready, "the refusal changes nothing");

        let mut cache = HandleCache::new(Relocation::Rebuild, None);
        cache.insert(KEY, 0x100, layer(2), None, 1);
        assert_eq!(cache.lookup(KEY, 0x200, &layer(2), None).unwrap(), Lookup::Moved);
        let prepared = Some(Prepared { num_tokens: 5, index_dtype: DType::Int64, recv_total: None });
        assert_eq!(cache.insert(KEY, 0x200, layer(2), prepared, 2), [1], "the caller destroys the old handle");
        assert_eq!(cache.lookup(KEY, 0x200, &layer(2), None).unwrap(), Lookup::Ready);
        assert_eq!(cache.prepared(KEY, 0x200), prepared);
        assert_eq!(cache.prepared(KEY, 0x100), None);
    }

    #[test]
    fn memory_belongs_to_who_prepared_it_last() {
        let other = HandleKey::Registered(8);
        let prepared = Some(Prepared { num_tokens: 5, index_dtype: DType::Int64, recv_total: None });
        let mut cache = HandleCache::new(Relocation::Refuse, None);
        for key in [KEY, other] {
            cache.insert(key, 0x100, layer(2), None, key);
            cache.start_prepare(key).unwrap().prepared = prepared;
        }
        assert_eq!((cache.prepared(KEY, 0x100), cache.prepared(other, 0x100)), (None, prepared));
        cache.note_total(0x100, 77);
        cache.note_total(0x200, 78);
        assert_eq!(cache.prepared(other, 0x100).unwrap().recv_total, Some(77));
        cache.start_prepare(KEY).unwrap();
        assert_eq!((cache.prepared(KEY, 0x100), cache.prepared(other, 0x100)), (None, None));
    }

    #[test]
    fn a_captured_prepare_has_not_happened() {
        let mut cache = HandleCache::new(Relocation::Refuse, None);
        cache.insert(KEY, 0x100, layer(2), None, 1);
        let eager = Prepared { num_tokens: 20, index_dtype: DType::Int64, recv_total: None };
        cache.start_prepare(KEY).unwrap().prepared = Some(eager);
        let captured = Prepared { num_tokens: 10, ..eager };
        let captured = Captured { key: KEY, layer: layer(2), prepared: captured };
        cache.note_captured(0x100, captured);
        assert!(cache.is_captured(0x100) && !cache.is_captured(0x200));
        assert_eq!((cache.prepared(KEY, 0x100), cache.captured(0x100)), (Some(eager), Some(captured)));
        cache.found_here(KEY, 0x100, &layer(2));
        assert_eq!(cache.captured(0x100), Some(captured));
        cache.start_prepare(KEY).unwrap();
        assert_eq!((cache.is_captured(0x100), cache.captured(0x100)), (true, None), "the call comes last");
        for (key, found) in [(KEY, layer(4)), (HandleKey::Registered(8), layer(2))] {
            cache.note_captured(0x100, captured);
            cache.found_here(key, 0x100, &found);
            assert_eq!((cache.is_captured(0x100), cache.captured(0x100)), (true, None), "another is here now");
        }
        let entry = cache.get_mut(KEY).unwrap();
        entry.tokens = Some(10);
        let lookup = |tokens| cache.lookup(KEY, 0x100, &layer(2), tokens).unwrap();
        assert_eq!([lookup(Some(20)), lookup(Some(10)), lookup(None)], [Lookup::Missing, Lookup::Ready, Lookup::Ready]);
    }

    #[test]
    fn an_address_used_again_for_another_layer_is_rebuilt() {
        let key = HandleKey::Address(0x100);
        let mut cache = HandleCache::new(Relocation::Rebuild, None);
        cache.insert(key, 0x100, layer(2), None, 1);
        assert_eq!(cache.lookup(key, 0x100, &layer(4), None).unwrap(), Lookup::Missing);
        assert_eq!(cache.insert(key, 0x100, layer(4), None, 2), [1]);
        assert_eq!(cache.lookup(key, 0x100, &layer(4), None).unwrap(), Lookup::Ready);
    }

    #[test]
    fn the_least_recently_used_is_given_up_beyond_the_limit() {
        let mut cache = HandleCache::new(Relocation::Rebuild, Some(2));
        let key = |n: u64| HandleKey::Address(n);
        assert!(cache.insert(key(1), 1, layer(2), None, 1).is_empty());
        assert!(cache.insert(key(2), 2, layer(2), None, 2).is_empty());
        cache.get_mut(key(1)).unwrap();
        assert_eq!(cache.insert(key(3), 3, layer(2), None, 3), [2]);
        assert_eq!(cache.lookup(key(2), 2, &layer(2), None).unwrap(), Lookup::Missing);
        assert_eq!(cache.lookup(key(1), 1, &layer(2), None).unwrap(), Lookup::Ready);
    }
}
