//! What can be set: the host runtime's variables of the environment, read once ([`crate::inject`] reads its own), and what a
//! program says by a call.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::domains;

/// Time in milliseconds that a rank waits for its peers.
pub const TIMEOUT_VARIABLE: &str = "NVTE_EP_HOST_TIMEOUT_MS";
/// Number of devices that a process sees. Several are for programs whose ranks are threads: one device each, as with GPUs.
pub const DEVICES_VARIABLE: &str = "NVTE_EP_HOST_DEVICES";
/// The [`Policy`].
pub const POLICY_VARIABLE: &str = "NVTE_EP_HOST_CHECK";
/// Seed of the order in which an expert's rows lie after a low-latency dispatch.
pub const SHUFFLE_VARIABLE: &str = "NVTE_EP_HOST_LL_SHUFFLE";

/// What happens on a breach of the contract after which the work can go on, unless it is only a warning
/// ([`crate::rule::Severity`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// It is not looked for.
    Off,
    /// It is printed and counted.
    Warn,
    /// It is an error of the call, or of the queued work.
    Error,
}

/// What nvte-ep's own variable says of the time that a step may take.
const LIBRARY_TIMEOUT_VARIABLE: &str = "NVTE_EP_TIMEOUT_MS";
/// The library's default, which a step must not end before.
const DEFAULT_TIMEOUT_MS: u64 = 600_000;
/// More devices than anybody has ranks for.
const MOST_DEVICES: u64 = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Settings {
    timeout: Duration,
    devices: u64,
    policy: Policy,
    shuffle: Option<u64>,
}

static SETTINGS: LazyLock<Result<Settings, String>> = LazyLock::new(|| read(|name| std::env::var_os(name)));

/// Reads the variables.
fn read(get: impl Fn(&str) -> Option<std::ffi::OsString>) -> Result<Settings, String> {
    let text =
        |name: &str| get(name).map(|value| value.to_string_lossy().trim().to_owned()).filter(|it| !it.is_empty());
    let number = |name: &str, most: u64| {
        let Some(value) = text(name) else { return Ok(None) };
        let parsed = value.parse().ok().filter(|number| (1..=most).contains(number));
        parsed.map(Some).ok_or_else(|| format!("{name} must be a number from 1 to {most}, got {value:?}"))
    };
    // 0 is no limit. What is no number the library refuses itself.
    let library = text(LIBRARY_TIMEOUT_VARIABLE)
        .and_then(|value| value.parse().ok())
        .map(|it| if it == 0 { MOST_MS } else { it });
    let default = library.unwrap_or(0).clamp(DEFAULT_TIMEOUT_MS, MOST_MS);
    let timeout = Duration::from_millis(number(TIMEOUT_VARIABLE, MOST_MS)?.unwrap_or(default));
    let devices = number(DEVICES_VARIABLE, MOST_DEVICES)?.unwrap_or(1);
    let shuffle = number(SHUFFLE_VARIABLE, u64::MAX)?;
    let policy = match text(POLICY_VARIABLE).as_deref() {
        Some("off") => Policy::Off,
        Some("warn") => Policy::Warn,
        Some("error") | None => Policy::Error,
        Some(other) => return Err(format!("{POLICY_VARIABLE} must be off, warn or error, got {other:?}")),
    };
    Ok(Settings { timeout, devices, policy, shuffle })
}

/// Whether the devices reach pageable memory, as those do whose kernel shares its page tables with GPUs.
static PAGEABLE: AtomicBool = AtomicBool::new(false);

/// Says whether the devices reach pageable memory.
pub fn set_pageable_memory(on: bool) {
    PAGEABLE.store(on, Ordering::Relaxed);
}

/// Whether the devices reach pageable memory.
pub fn pageable_memory() -> bool {
    PAGEABLE.load(Ordering::Relaxed)
}

/// A hundred years.
const MOST_MS: u64 = 100 * 366 * 86_400_000;

/// Fails with what is wrong with a variable.
pub fn readable() -> Result<(), String> {
    SETTINGS.as_ref().map(drop).map_err(Clone::clone)?;
    domains::readable()
}

/// Time that a rank waits for its peers.
pub fn timeout() -> Duration {
    SETTINGS.as_ref().map_or(Duration::from_millis(DEFAULT_TIMEOUT_MS), |settings| settings.timeout)
}

/// A time limit, with the variable that sets it.
pub fn name_timeout(timeout: Duration) -> String {
    format!("{} ms ({TIMEOUT_VARIABLE})", timeout.as_millis())
}

/// Number of devices.
pub fn devices() -> i32 {
    SETTINGS.as_ref().map_or(1, |settings| settings.devices as i32)
}

/// What a breach of the contract is; no call is served where the variable cannot be read.
pub fn policy() -> Policy {
    SETTINGS.as_ref().map_or(Policy::Error, |settings| settings.policy)
}

/// The seed by which rows of low-latency mode are shuffled; without it they are in order.
pub fn shuffle() -> Option<u64> {
    SETTINGS.as_ref().map_or(None, |settings| settings.shuffle)
}

/// Whether several ranks of a communicator may be on one device, as NCCL's own variable says.
pub fn ranks_share_devices() -> bool {
    std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value.trim().parse().is_ok_and(|on: i64| on != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of(values: &[(&str, &str)]) -> Result<Settings, String> {
        let find = |name: &str| values.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        read(find)
    }

    #[test]
    fn the_limit_is_not_shorter_than_the_librarys_unless_set() {
        let timeout = |values: &[(&str, &str)]| read_of(values).unwrap().timeout.as_millis();
        assert_eq!(timeout(&[]), 600_000);
        assert_eq!(timeout(&[("NVTE_EP_TIMEOUT_MS", "3000")]), 600_000);
        assert_eq!(timeout(&[("NVTE_EP_TIMEOUT_MS", "900000")]), 900_000);
        assert_eq!(timeout(&[("NVTE_EP_TIMEOUT_MS", "0")]), MOST_MS.into());
        assert_eq!(timeout(&[("NVTE_EP_TIMEOUT_MS", "900000"), ("NVTE_EP_HOST_TIMEOUT_MS", "2500")]), 2500);
    }

    #[test]
    fn policies_have_a_name_each() {
        let values = [("off", Policy::Off), ("warn", Policy::Warn), ("error", Policy::Error), ("", Policy::Error)];
        for (value, policy) in values {
            assert_eq!(read_of(&[("NVTE_EP_HOST_CHECK", value)]).unwrap().policy, policy);
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        for (name, value, most) in [
            ("NVTE_EP_HOST_TIMEOUT_MS", "0", MOST_MS),
            ("NVTE_EP_HOST_TIMEOUT_MS", "10s", MOST_MS),
            ("NVTE_EP_HOST_DEVICES", "-1", 1024),
            ("NVTE_EP_HOST_DEVICES", "1025", 1024),
            ("NVTE_EP_HOST_LL_SHUFFLE", "0", u64::MAX),
        ] {
            let text = format!("{name} must be a number from 1 to {most}, got {value:?}");
            assert_eq!(read_of(&[(name, value)]), Err(text));
        }
        let text = "NVTE_EP_HOST_CHECK must be off, warn or error, got \"Warn\"";
        assert_eq!(read_of(&[("NVTE_EP_HOST_CHECK", "Warn")]), Err(text.to_owned()));
        assert_eq!(read_of(&[("NVTE_EP_HOST_DEVICES", " 3 ")]).unwrap().devices, 3);
        assert_eq!(read_of(&[("NVTE_EP_HOST_DEVICES", "")]).unwrap().devices, 1);
        assert_eq!(read_of(&[("NVTE_EP_HOST_LL_SHUFFLE", "12")]).unwrap().shuffle, Some(12));
    }
}
