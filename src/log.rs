//! Logging. A C++ program installs no `tracing` subscriber, so one is installed here, only when `NVTE_EP_LOG` is set and
//! only if a Rust program around us has not installed its own.

use crate::env::LOG;
use std::io::Write;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;

/// Installs the subscriber that `NVTE_EP_LOG` asks for, once.
pub(crate) fn start() {
    static START: std::sync::Once = std::sync::Once::new();
    START.call_once(|| {
        let Some(value) = std::env::var(LOG.name).ok().filter(|value| !value.is_empty()) else { return };
        let level = value.parse::<LevelFilter>().unwrap_or_else(|_| {
            // Not eprintln: a closed stderr is no reason to panic.
            let text = "takes error, warn, info, debug or trace";
            let _ = writeln!(std::io::stderr(), "nvte_ep: {} {text}; {value:?} is read as info", LOG.name);
            LevelFilter::INFO
        });
        let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_filter(level);
        // An error means that the host program has a subscriber: then that one serves.
        let _ = tracing_subscriber::registry().with(layer).try_init();
    });
}
