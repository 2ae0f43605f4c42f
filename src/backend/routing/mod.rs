//! Which routing a call means. `header` is what handle memory says of itself, `notes` what the host knows of it and when a call
//! may go by that, `handles` keeps both notes and engine handles by address.

pub(super) mod handles;
pub(super) mod header;
#[cfg(test)]
mod model_tests;
pub(super) mod notes;
