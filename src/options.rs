//! What a group can be told beyond its configuration structure: named options with text values, for every ABI.
#![forbid(unsafe_code)]

use crate::config::{GroupRequest, Overflow};
use crate::error::{Error, Result};
use std::time::Duration;

/// Which engine moves the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineChoice {
    /// As `NVTE_EP_BACKEND` says, or else the one that fits the machine.
    Auto,
    /// NCCL EP's high-throughput mode.
    NcclEp,
    /// Our own kernels.
    Native,
}

impl EngineChoice {
    /// The name of an engine in the option `backend` and in `NVTE_EP_BACKEND`.
    #[must_use]
    pub fn name(self) -> &'static str {
        BACKEND.iter().find(|(_, choice)| *choice == self).map_or("", |(name, _)| name)
    }

    /// The engine of that name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        BACKEND.iter().find(|(known, _)| *known == name).map(|(_, choice)| *choice)
    }
}

/// A limit for waiting; none = for ever.
pub type Limit = Option<Duration>;

/// Smallest segment of the symmetric pool unless `symm_segment_bytes` says otherwise.
const SEGMENT_BYTES: u64 = 64 << 20;

/// Options of a group, all at their defaults first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// What happens to rows beyond the capacity, where it is said.
    pub overflow: Option<Overflow>,
    /// Whether the caller sizes the receive buffers of each step, where it is said.
    pub eager: Option<bool>,
    /// Most experts per token of any layer, where it is said.
    pub num_topk: Option<u32>,
    /// Multiprocessors of dispatch; none = the group's cap.
    pub dispatch_sms: Option<u32>,
    /// Multiprocessors of combine; none = the group's cap.
    pub combine_sms: Option<u32>,
    /// Multiprocessors of prepare's kernels; none = automatic.
    pub preprocess_sms: Option<u32>,
    /// How long initialize and the symmetric pool wait for other ranks; none = as the environment says.
    pub timeout: Option<Limit>,
    /// How long shutdown waits; none = as the environment says.
    pub shutdown_timeout: Option<Limit>,
    /// What moves the rows.
    pub backend: EngineChoice,
    /// Whether slots must come in the documented order, where it is said.
    pub deterministic: Option<bool>,
    /// Smallest segment that the symmetric pool registers.
    pub symm_segment_bytes: u64,
    /// Whether there may be more NVLink domains, or ranks of one, than NCCL EP documents.
    pub undocumented_scale: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            overflow: None,
            eager: None,
            num_topk: None,
            dispatch_sms: None,
            combine_sms: None,
            preprocess_sms: None,
            timeout: None,
            shutdown_timeout: None,
            backend: EngineChoice::Auto,
            deterministic: None,
            symm_segment_bytes: SEGMENT_BYTES,
            undocumented_scale: false,
        }
    }
}

/// One option: how it is set and read back. What it means is documented in `nvte_ep_ext.h`, at
/// `nvte_ep_ext_options_set`.
struct Key {
    name: &'static str,
    set: fn(&mut Options, &str, &str) -> Result<()>,
    get: fn(&Options) -> String,
}

/// What an option reads as that was not set.
const UNSET: &str = "default";

fn refuse(key: &str, required: &str, value: &str) -> Error {
    Error::argument("value", format!("must be {required} for the option \"{key}\""), format!("\"{value}\""))
}

/// The choice that `value` names.
fn choice<T: Copy>(key: &str, value: &str, choices: &[(&str, T)]) -> Result<T> {
    choices.iter().find(|(name, _)| *name == value).map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        refuse(key, &names.join(" or "), value)
    })
}

fn count(key: &str, value: &str) -> Result<u32> {
    let parsed = value.parse::<u32>().ok().filter(|value| (1..=i32::MAX as u32).contains(value));
    parsed.ok_or_else(|| refuse(key, "a decimal number of 1 or more", value))
}

fn limit(key: &str, value: &str) -> Result<Limit> {
    let milliseconds: u64 =
        value.parse().map_err(|_| refuse(key, "a number of milliseconds, 0 (for ever) or more,", value))?;
    Ok((milliseconds > 0).then(|| Duration::from_millis(milliseconds)))
}

fn bytes(key: &str, value: &str) -> Result<u64> {
    let parsed = value.parse::<u64>().ok().filter(|value| (1..=1 << 50).contains(value));
    parsed.ok_or_else(|| refuse(key, "a number of bytes of 1 or more", value))
}

const ON_OFF: [(&str, bool); 2] = [("on", true), ("off", false)];
const OVERFLOW: [(&str, Overflow); 2] = [("trap", Overflow::Trap), ("drop", Overflow::Drop)];
const BACKEND: [(&str, EngineChoice); 3] =
    [("auto", EngineChoice::Auto), ("nccl_ep", EngineChoice::NcclEp), ("native", EngineChoice::Native)];

fn name_of<T: Copy + PartialEq>(value: Option<T>, choices: &[(&str, T)]) -> String {
    let named = choices.iter().find(|(_, choice)| Some(*choice) == value);
    named.map_or(UNSET, |(name, _)| name).to_owned()
}

fn number(value: Option<u32>) -> String {
    value.map_or_else(|| UNSET.to_owned(), |value| value.to_string())
}

fn milliseconds(value: Option<Limit>) -> String {
    value.map_or_else(|| UNSET.to_owned(), |limit| limit.unwrap_or_default().as_millis().to_string())
}

const KEYS: &[Key] = &[
    Key {
        name: "overflow",
        set: |o, k, v| choice(k, v, &OVERFLOW).map(|v| o.overflow = Some(v)),
        get: |o| name_of(o.overflow, &OVERFLOW),
    },
    Key {
        name: "eager",
        set: |o, k, v| choice(k, v, &ON_OFF).map(|v| o.eager = Some(v)),
        get: |o| name_of(o.eager, &ON_OFF),
    },
    Key { name: "num_topk", set: |o, k, v| count(k, v).map(|v| o.num_topk = Some(v)), get: |o| number(o.num_topk) },
    Key {
        name: "dispatch_sms",
        set: |o, k, v| count(k, v).map(|v| o.dispatch_sms = Some(v)),
        get: |o| number(o.dispatch_sms),
    },
    Key {
        name: "combine_sms",
        set: |o, k, v| count(k, v).map(|v| o.combine_sms = Some(v)),
        get: |o| number(o.combine_sms),
    },
    Key {
        name: "preprocess_sms",
        set: |o, k, v| count(k, v).map(|v| o.preprocess_sms = Some(v)),
        get: |o| number(o.preprocess_sms),
    },
    Key {
        name: "timeout_ms",
        set: |o, k, v| limit(k, v).map(|v| o.timeout = Some(v)),
        get: |o| milliseconds(o.timeout),
    },
    Key {
        name: "shutdown_timeout_ms",
        set: |o, k, v| limit(k, v).map(|v| o.shutdown_timeout = Some(v)),
        get: |o| milliseconds(o.shutdown_timeout),
    },
    Key {
        name: "backend",
        set: |o, k, v| choice(k, v, &BACKEND).map(|v| o.backend = v),
        get: |o| name_of(Some(o.backend), &BACKEND),
    },
    Key {
        name: "deterministic",
        set: |o, k, v| choice(k, v, &ON_OFF).map(|v| o.deterministic = Some(v)),
        get: |o| name_of(o.deterministic, &ON_OFF),
    },
    Key {
        name: "symm_segment_bytes",
        set: |o, k, v| bytes(k, v).map(|v| o.symm_segment_bytes = v),
        get: |o| o.symm_segment_bytes.to_string(),
    },
    Key {
        name: "undocumented_scale",
        set: |o, k, v| choice(k, v, &ON_OFF).map(|v| o.undocumented_scale = v),
        get: |o| name_of(Some(o.undocumented_scale), &ON_OFF),
    },
];

fn key(name: &str) -> Result<&'static Key> {
    KEYS.iter().find(|key| key.name == name).ok_or_else(|| {
        let names: Vec<&str> = Options::names().collect();
        Error::argument("key", format!("must be one of {}", names.join(", ")), format!("\"{name}\""))
    })
}

impl Options {
    /// The names of all options.
    pub fn names() -> impl Iterator<Item = &'static str> {
        KEYS.iter().map(|key| key.name)
    }

    /// Sets the option `name`.
    ///
    /// # Errors
    /// An unknown name, or a value that the option does not take; the text lists what is valid.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        (key(name)?.set)(self, name, value)
    }

    /// The option `name` as [`Options::set`] takes it, or "default".
    ///
    /// # Errors
    /// An unknown name.
    pub fn get(&self, name: &str) -> Result<String> {
        Ok((key(name)?.get)(self))
    }

    /// # Errors
    /// An option that low-latency groups have no use for, or another engine than theirs.
    pub fn check_low_latency(&self) -> Result<()> {
        if self.backend == EngineChoice::Native {
            let required = "must be nccl_ep or auto for a low-latency group";
            return Err(Error::argument("option backend", required, "native")
                .with_remedy("the native engine has no low-latency mode: such groups always run over NCCL EP"));
        }
        const USED: [&str; 4] = ["timeout_ms", "shutdown_timeout_ms", "backend", "undocumented_scale"];
        for name in Self::names().filter(|name| !USED.contains(name)) {
            let found = self.get(name)?;
            if found != Self::default().get(name)? {
                let required = "must not be set for a low-latency group, which has no such choice";
                return Err(Error::argument(format!("option {name}"), required, format!("\"{found}\"")));
            }
        }
        Ok(())
    }

    /// `request` with what the options say of it.
    ///
    /// # Errors
    /// An option that contradicts a field of the request.
    pub fn apply(&self, mut request: GroupRequest) -> Result<GroupRequest> {
        let contradiction = |name: &str, required: String, found: String| {
            Err(Error::argument(format!("option {name}"), format!("must agree with {required}"), found))
        };
        match self.overflow {
            Some(Overflow::Drop) => request.drop_on_overflow = 1,
            Some(Overflow::Trap) if request.drop_on_overflow != 0 => {
                return contradiction("overflow", "group_config.drop_on_overflow, 1".into(), "\"trap\"".into());
            }
            Some(Overflow::Trap) | None => {}
        }
        if let Some(num_topk) = self.num_topk {
            if request.num_topk != 0 && i64::from(request.num_topk) != i64::from(num_topk) {
                let found = num_topk.to_string();
                return contradiction("num_topk", format!("group_config.num_topk, {}", request.num_topk), found);
            }
            request.num_topk = num_topk as i32;
        }
        match (self.eager, request.max_recv_tokens_per_rank) {
            (Some(true), 0) => request.dialect.eager = true,
            (Some(true), rows) => {
                return Err(Error::argument(
                    "group_config.max_recv_tokens_per_rank",
                    "must be 0 with the option eager = on",
                    rows,
                ));
            }
            (Some(false), _) => request.dialect.eager = false,
            (None, _) => {}
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::REQUEST;
    use crate::config::{Dialect, GroupConfig, RecvCapacity};

    fn options(pairs: &[(&str, &str)]) -> Options {
        let mut options = Options::default();
        pairs.iter().for_each(|(name, value)| options.set(name, value).unwrap());
        options
    }

    #[test]
    fn what_is_set_is_read_back_and_nothing_else_changes() {
        let values = [
            ("overflow", "drop"),
            ("eager", "on"),
            ("num_topk", "8"),
            ("dispatch_sms", "24"),
            ("combine_sms", "16"),
            ("preprocess_sms", "32"),
            ("timeout_ms", "0"),
            ("shutdown_timeout_ms", "1500"),
            ("backend", "nccl_ep"),
            ("deterministic", "off"),
            ("symm_segment_bytes", "4294967296"),
            ("undocumented_scale", "on"),
        ];
        assert!(Options::names().eq(values.iter().map(|(name, _)| *name)), "every option is tested");
        for (name, value) in values {
            let set = options(&[(name, value)]);
            for other in Options::names() {
                let expected = if other == name { value.into() } else { Options::default().get(other).unwrap() };
                assert_eq!(set.get(other).unwrap(), expected, "{other} after {name} was set");
            }
        }
    }

    #[test]
    fn unknown_names_and_values_are_refused_with_the_valid_ones() {
        let mut options = Options::default();
        let text = options.set("overflw", "drop").unwrap_err().to_string();
        assert!(text.starts_with("key must be one of overflow, eager, num_topk, "), "{text}");
        assert!(text.ends_with("got \"overflw\""), "{text}");
        assert_eq!(options.get("").unwrap_err().to_string().split(", got ").nth(1), Some("\"\""));
        for (name, value, text) in [
            ("overflow", "dropp", "value must be \"trap\" or \"drop\" for the option \"overflow\", got \"dropp\""),
            ("eager", "1", "value must be \"on\" or \"off\" for the option \"eager\", got \"1\""),
            ("num_topk", "0", "value must be a decimal number of 1 or more for the option \"num_topk\", got \"0\""),
            ("combine_sms", "-3", "got \"-3\""),
            ("dispatch_sms", "4294967296", "got \"4294967296\""),
            ("timeout_ms", "1s", "must be a number of milliseconds, 0 (for ever) or more,"),
            (
                "backend",
                "naive",
                "value must be \"auto\" or \"nccl_ep\" or \"native\" for the option \"backend\", got \"naive\"",
            ),
            ("symm_segment_bytes", "64M", "value must be a number of bytes of 1 or more"),
        ] {
            let found = options.set(name, value).unwrap_err().to_string();
            assert!(found.contains(text), "{found}");
        }
        assert_eq!(options, Options::default(), "a refused value changes nothing");
    }

    #[test]
    fn options_reach_the_configuration() {
        let drop = options(&[("overflow", "drop"), ("num_topk", "2")]);
        let config = GroupConfig::try_from(drop.apply(REQUEST).unwrap()).unwrap();
        assert_eq!((config.overflow, config.num_topk), (Overflow::Drop, Some(2)));
        let eager = options(&[("eager", "on"), ("num_topk", "2")]);
        let request = GroupRequest { max_recv_tokens_per_rank: 0, ..REQUEST };
        let config = GroupConfig::try_from(eager.apply(request).unwrap()).unwrap();
        assert_eq!(config.recv_capacity, RecvCapacity::Eager);
        let text = eager.apply(REQUEST).unwrap_err().to_string();
        assert_eq!(text, "group_config.max_recv_tokens_per_rank must be 0 with the option eager = on, got 512");
        let off = options(&[("eager", "off")]);
        let te = GroupRequest { dialect: Dialect::TE, ..request };
        assert!(GroupConfig::try_from(off.apply(te).unwrap()).is_err(), "0 rows ask for nothing any more");
    }

    #[test]
    fn low_latency_groups_have_few_options() {
        let check = |name, value| options(&[(name, value)]).check_low_latency().map_err(|error| error.to_string());
        for (name, value) in [("timeout_ms", "1"), ("shutdown_timeout_ms", "1"), ("backend", "nccl_ep")] {
            assert_eq!(check(name, value), Ok(()));
        }
        assert_eq!(
            check("backend", "native").unwrap_err(),
            "option backend must be nccl_ep or auto for a low-latency group, got native; the native engine has no \
             low-latency mode: such groups always run over NCCL EP"
        );
        assert_eq!(
            check("overflow", "drop").unwrap_err(),
            "option overflow must not be set for a low-latency group, which has no such choice, got \"drop\""
        );
    }

    #[test]
    fn contradictions_are_refused() {
        let request = GroupRequest { drop_on_overflow: 1, num_topk: 4, dialect: Dialect::TE, ..REQUEST };
        let text = options(&[("overflow", "trap")]).apply(request).unwrap_err().to_string();
        assert_eq!(text, "option overflow must agree with group_config.drop_on_overflow, 1, got \"trap\"");
        let text = options(&[("num_topk", "2")]).apply(request).unwrap_err().to_string();
        assert_eq!(text, "option num_topk must agree with group_config.num_topk, 4, got 2");
        options(&[("num_topk", "4"), ("overflow", "drop")]).apply(request).unwrap();
    }
}
