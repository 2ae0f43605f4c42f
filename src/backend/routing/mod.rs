//! Which routing a call means. `header` is the routing header in handle memory; `notes` is what the host knows about handle
//! memory, and decides whether a call may use that; `handles` keeps notes and engine handles by address.

pub(super) mod handles;
pub(super) mod header;
#[cfg(test)]
mod model_tests;
pub(super) mod notes;
