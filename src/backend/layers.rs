//! The layers of a group.

use super::live::{Group, HandleRef, Layer, LayerClaim};
use super::routing::notes::HandleKey;
use crate::config::LayerConfig;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};

/// What an id of a layer must be.
const KNOWN_ID: &str =
    "must be an id that nvte_ep_register_layer returned since the last nvte_ep_initialize, and not unregistered";

impl Group {
    pub(super) fn register_layer(&mut self, config: LayerConfig) -> Result<(u64, usize)> {
        let limit = self.env.handle_cache_size.limit(self.config.dialect.default_handle_limit);
        if let Some(limit) = limit.filter(|limit| self.layers.len() >= *limit) {
            return Err(Error::State(format!(
                "{limit} layers are registered, as many as NVTE_EP_HANDLE_CACHE_SIZE allows: raise it, or register each \
                 layer once and keep its id (registrations end with nvte_ep_shutdown)"
            )));
        }
        let layer = self.layer_of(config)?;
        if self.layers.try_reserve(1).is_err() {
            let bytes = 2 * self.layers.len() * size_of::<(u64, Layer)>();
            return Err(Error::OutOfMemory { what: format!("layer {}", self.layers.len() + 1), bytes });
        }
        let id = next_layer_id();
        self.layers.insert(id, layer);
        let (top_k, alignment) = (layer.config.top_k, layer.config.alignment.tokens());
        tracing::debug!(target: "nvte_ep", id, top_k, alignment, handle_bytes = layer.mem_bytes(), "layer registered");
        Ok((id, layer.mem_bytes()))
    }

    /// Ends a registration. Queued work and captured graphs use the handle memory, not the engine's handle, which is closed.
    pub(super) fn unregister_layer(&mut self, id: u64) -> Result<()> {
        if self.layers.remove(&id).is_none() {
            return Err(Error::argument("id", KNOWN_ID, id));
        }
        self.handles.forget(id);
        self.close_gone()
    }

    /// A layer that fits the group, and what its handle memory has to hold.
    #[inline]
    pub(super) fn layer_of(&mut self, config: LayerConfig) -> Result<Layer> {
        match self.layer_configs.iter().find(|layer| layer.config == config) {
            Some(layer) => Ok(*layer),
            None => self.new_layer_config(config),
        }
    }

    #[cold]
    fn new_layer_config(&mut self, config: LayerConfig) -> Result<Layer> {
        config.check_against(&self.config)?;
        let layer = Layer { config, engine_bytes: self.engine.handle_bytes(&config)? };
        self.layer_configs.push(layer);
        Ok(layer)
    }

    #[inline]
    pub(super) fn registered_layer(&self, id: u64) -> Result<Layer> {
        self.layers.get(&id).copied().ok_or_else(|| Error::argument("handle.id", KNOWN_ID, id))
    }

    /// The layer that a prepare claims, over memory that is fit for it.
    pub(super) fn claimed_layer(&mut self, handle: &HandleRef, claim: LayerClaim) -> Result<Layer> {
        let layer = match (handle.key, claim) {
            (HandleKey::Registered(id), LayerClaim::Registered(alignment)) => {
                let layer = self.registered_layer(id)?;
                if alignment != layer.config.alignment {
                    return Err(Error::argument(
                        "dispatch_output_per_expert_alignment",
                        format!("must equal the registered {}", layer.config.alignment),
                        alignment,
                    )
                    .with_remedy("register another layer for another alignment"));
                }
                layer
            }
            (_, LayerClaim::Given(config)) => self.layer_of(config)?,
            (HandleKey::Address(_), LayerClaim::Registered(_)) => {
                return Err(Error::Internal("an address with a registered layer".into()));
            }
        };
        self.require_memory(&handle.mem, layer.mem_bytes())?;
        Ok(layer)
    }
}

/// Ids are unique over the life of the process, so that an id kept across shutdown is recognised as unknown.
fn next_layer_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
