//! Which handle serves which key: created once, found again at every step, rebuilt when its memory moved. No NCCL calls.
#![forbid(unsafe_code)]

use crate::config::Relocation;
use crate::error::{Error, Result};
use crate::ops::Prepared;
use std::collections::HashMap;

/// What identifies a layer's routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HandleKey {
    /// The id that register_layer gave out.
    Registered(u64),
}

/// One handle and what is known of it.
#[derive(Debug)]
pub struct Entry<H> {
    /// The handle.
    pub handle: H,
    /// Address of the memory it was built over.
    pub memory: u64,
    /// The last prepare; none before the first.
    pub prepared: Option<Prepared>,
}

/// What a look-up found.
#[derive(Debug, PartialEq, Eq)]
pub enum Lookup {
    /// A handle over this very memory.
    Ready,
    /// No handle yet.
    Missing,
    /// A handle over other memory, and the policy says to rebuild it.
    Moved,
}

/// Handles by key.
#[derive(Debug)]
pub struct HandleCache<H> {
    entries: HashMap<HandleKey, Entry<H>>,
    relocation: Relocation,
}

impl<H> HandleCache<H> {
    /// An empty cache.
    #[must_use]
    pub fn new(relocation: Relocation) -> Self {
        Self { entries: HashMap::new(), relocation }
    }

    /// What is there for `key` over `memory`.
    ///
    /// # Errors
    /// The key's handle lies over other memory and the policy refuses that.
    pub fn lookup(&self, key: HandleKey, memory: u64) -> Result<Lookup> {
        match self.entries.get(&key) {
            None => Ok(Lookup::Missing),
            Some(entry) if entry.memory == memory => Ok(Lookup::Ready),
            Some(_) if self.relocation == Relocation::Rebuild => Ok(Lookup::Moved),
            Some(entry) => Err(Error::argument(
                "handle.mem",
                format!("must be the memory of this layer's earlier calls, at {:#x}", entry.memory),
                format!("{memory:#x}"),
            )
            .with_remedy("keep it, or initialize with allow_handle_mem_reloc = 1")),
        }
    }

    /// The entry of `key`.
    pub fn get_mut(&mut self, key: HandleKey) -> Option<&mut Entry<H>> {
        self.entries.get_mut(&key)
    }

    /// Puts a new handle in place and returns the one that it replaces. What was prepared stays known: the memory's
    /// bytes move with it.
    pub fn insert(&mut self, key: HandleKey, memory: u64, handle: H) -> Option<H> {
        let old = self.entries.remove(&key);
        let prepared = old.as_ref().and_then(|entry| entry.prepared);
        self.entries.insert(key, Entry { handle, memory, prepared });
        old.map(|entry| entry.handle)
    }

    /// All handles, for tear-down.
    pub fn into_handles(self) -> impl Iterator<Item = H> {
        self.entries.into_values().map(|entry| entry.handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    const KEY: HandleKey = HandleKey::Registered(7);

    #[test]
    fn created_once_then_found() {
        let mut cache = HandleCache::new(Relocation::Refuse);
        assert_eq!(cache.lookup(KEY, 0x100).unwrap(), Lookup::Missing);
        assert_eq!(cache.insert(KEY, 0x100, "a"), None);
        assert_eq!(cache.lookup(KEY, 0x100).unwrap(), Lookup::Ready);
        assert_eq!(cache.lookup(HandleKey::Registered(8), 0x100).unwrap(), Lookup::Missing);
        assert_eq!(cache.into_handles().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn moved_memory_is_refused_or_rebuilt() {
        let mut cache = HandleCache::new(Relocation::Refuse);
        cache.insert(KEY, 0x100, 1);
        let text = cache.lookup(KEY, 0x200).unwrap_err().to_string();
        assert!(text.starts_with("handle.mem must be the memory of this layer's earlier calls, at 0x100, got 0x200"));
        assert_eq!(cache.lookup(KEY, 0x100).unwrap(), Lookup::Ready, "the refusal changes nothing");

        let mut cache = HandleCache::new(Relocation::Rebuild);
        cache.insert(KEY, 0x100, 1);
        let prepared = Prepared { num_tokens: 5, index_dtype: DType::Int64 };
        cache.get_mut(KEY).unwrap().prepared = Some(prepared);
        assert_eq!(cache.lookup(KEY, 0x200).unwrap(), Lookup::Moved);
        assert_eq!(cache.insert(KEY, 0x200, 2), Some(1), "the caller destroys the old handle");
        assert_eq!(cache.lookup(KEY, 0x200).unwrap(), Lookup::Ready);
        assert_eq!(cache.get_mut(KEY).unwrap().prepared, Some(prepared));
    }
}
