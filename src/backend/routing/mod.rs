//! What handle memory holds: `header` is what it says of itself, `handles` what the host knows of it.

pub(super) mod handles;
pub(super) mod header;
