//! Faults that a test asks for: a rank that is slow, stops, dies, or whose n-th call of a function fails.
//!
//! The environment variable [`VARIABLE`] holds rules, separated by semicolons; a rule is a list of `key=value`, separated by
//! commas:
//!
//! | key | value |
//! | --- | --- |
//! | `call` | exported function at whose entry something happens |
//! | `do` | `delay`, `stop` (SIGSTOP), `kill` (SIGKILL), `abort` (SIGABRT), `exit`, `fail` |
//! | `rank` | the only rank that it happens on; without it, every one |
//! | `nth` | the call of that function in which it happens, the first one by default |
//! | `ms` | milliseconds of a delay |
//! | `code` | of `exit` the status (1), of `fail` what the function returns (`cudaErrorUnknown`, `ncclInternalError`) |
//! | `missing` | in place of `call` and `do`: `nvcc`, NCCL EP finds no compiler; `gin`, there is no network between domains |

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nvte_ep_bindings::{cudaErrorInvalidValue, cudaErrorUnknown, ncclInternalError, ncclInvalidUsage};

use crate::acting;
use crate::fault::{self, Fault, Outcome};

/// The environment variable with the rules.
pub const VARIABLE: &str = "NVTE_EP_HOST_FAULT";

/// Exported functions that no rule can name: they cannot fail, or are another name of a function that can be named.
const OUT_OF_REACH: &[&str] = &[
    "cuDriverGetVersion",
    "cuEventElapsedTime_v2",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cudaGetErrorName",
    "cudaGetErrorString",
    "cudaGetLastError",
    "cudaGraphInstantiateWithFlags",
    "cudaPeekAtLastError",
    "ncclGetErrorString",
    "ncclGetLastError",
];

/// Variables by which launchers tell a process its rank, for calls before it has a communicator.
const RANK_VARIABLES: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Delay(u64),
    Signal(i32),
    Exit(i32),
    Fail(Option<u32>),
}

/// What a machine can lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The compiler.
    Nvcc,
    /// The network that kernels reach other domains over.
    Gin,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Event {
    Missing(Missing),
    /// In the n-th call of a function.
    Call(String, u64, Action),
}

#[derive(Debug)]
struct Rule {
    text: String,
    rank: Option<usize>,
    event: Event,
    calls: AtomicU64,
}

static RULES: LazyLock<Result<Vec<Rule>, String>> = LazyLock::new(|| {
    let rules = match std::env::var(VARIABLE) {
        Ok(text) => parse(&text),
        Err(std::env::VarError::NotPresent) => Ok(Vec::new()),
        Err(error) => Err(format!("{VARIABLE}: {error}")),
    };
    rules.inspect_err(|text| fault::report(text))
});

fn own_rank() -> Option<usize> {
    acting::first_rank().or_else(|| RANK_VARIABLES.iter().find_map(|name| std::env::var(name).ok()?.parse().ok()))
}

impl Rule {
    fn is_for_us(&self) -> bool {
        self.rank.is_none_or(|rank| own_rank() == Some(rank))
    }
}

/// Whether the rules hide something from this rank.
pub fn is_missing(what: Missing) -> bool {
    let hides = |rule: &Rule| rule.event == Event::Missing(what) && rule.is_for_us();
    RULES.as_ref().is_ok_and(|rules| rules.iter().any(hides))
}

/// What an exported function does first; `Body` is the type of its closure, which names it.
pub fn at_entry<Body>(_: &Body) -> Outcome<()> {
    let rules = RULES.as_ref().map_err(|text| Fault::both(cudaErrorInvalidValue, ncclInvalidUsage, text.clone()))?;
    if rules.is_empty() {
        return Ok(());
    }
    let Some(function) = acting::function_of(std::any::type_name::<Body>()) else { return Ok(()) };
    for rule in rules {
        let Event::Call(call, nth, action) = &rule.event else { continue };
        if call != function || !rule.is_for_us() || rule.calls.fetch_add(1, Ordering::Relaxed) + 1 != *nth {
            continue;
        }
        happen(rule, function, *action)?;
    }
    Ok(())
}

fn happen(rule: &Rule, function: &str, action: Action) -> Outcome<()> {
    let rank = own_rank().map_or_else(String::new, |rank| format!("rank {rank}: "));
    let text = format!("{function}: {rank}asked for by {VARIABLE}, rule \"{}\"", rule.text);
    if !matches!(action, Action::Fail(_)) {
        fault::report(&text);
    }
    match action {
        Action::Delay(milliseconds) => std::thread::sleep(Duration::from_millis(milliseconds)),
        // To the calling thread, so that it is not past this place when the signal takes effect.
        // SAFETY: sends a signal to this process, as the user asked.
        Action::Signal(signal) => drop(unsafe { libc::raise(signal) }),
        // SAFETY: ends the process, as the user asked.
        Action::Exit(status) => unsafe { libc::_exit(status) },
        Action::Fail(code) => {
            let (cuda, nccl) = code.map_or((cudaErrorUnknown, ncclInternalError), |code| (code, code));
            return Err(Fault::both(cuda, nccl, text));
        }
    }
    Ok(())
}

fn parse(text: &str) -> Result<Vec<Rule>, String> {
    let rules = text.split(';').map(str::trim).filter(|rule| !rule.is_empty());
    rules.map(|rule| parse_rule(rule).map_err(|error| format!("{VARIABLE}: rule \"{rule}\": {error}"))).collect()
}

fn parse_rule(text: &str) -> Result<Rule, String> {
    const KEYS: [&str; 7] = ["call", "do", "rank", "nth", "ms", "code", "missing"];
    let mut given: HashMap<&str, &str> = HashMap::new();
    for part in text.split(',') {
        let (key, value) = part.split_once('=').ok_or_else(|| format!("\"{}\" is not key=value", part.trim()))?;
        let (key, value) = (key.trim(), value.trim());
        if !KEYS.contains(&key) {
            return Err(format!("\"{key}\" is no key; there are {}", KEYS.join(", ")));
        }
        if given.insert(key, value).is_some() {
            return Err(format!("{key} is given twice"));
        }
    }
    let number = |key: &str, least: u64, most: u64| -> Result<Option<u64>, String> {
        let Some(value) = given.get(key) else { return Ok(None) };
        let parsed = value.parse().ok().filter(|number| (least..=most).contains(number));
        parsed.map(Some).ok_or_else(|| format!("{key} must be a number from {least} to {most}, got \"{value}\""))
    };
    let rank = number("rank", 0, 1023)?.map(|rank| rank as usize);
    let rule = |event| Rule { text: text.to_owned(), rank, event, calls: AtomicU64::new(0) };
    if let Some(what) = given.get("missing") {
        let missing = match *what {
            "nvcc" => Missing::Nvcc,
            "gin" => Missing::Gin,
            other => return Err(format!("missing must be nvcc or gin, got \"{other}\"")),
        };
        if let Some(other) = KEYS.iter().find(|key| !["missing", "rank"].contains(key) && given.contains_key(*key)) {
            return Err(format!("{other} has no meaning beside missing"));
        }
        return Ok(rule(Event::Missing(missing)));
    }
    let call = *given.get("call").ok_or("call is not given: the function at which something happens")?;
    let is_in = |list: &str| list.lines().any(|name| name == call);
    let is_served = is_in(include_str!("../exports.txt")) && !is_in(include_str!("../not_supported.txt"));
    if !is_served || call.starts_with("__cuda") || OUT_OF_REACH.contains(&call) || call.starts_with("nvte_ep_host_") {
        return Err(format!("call \"{call}\" is no function of the host runtime at which faults can happen"));
    }
    let what = *given.get("do").ok_or("do is not given: delay, stop, kill, abort, exit or fail")?;
    let milliseconds = number("ms", 1, 86_400_000)?;
    let code = number("code", if what == "fail" { 1 } else { 0 }, if what == "exit" { 255 } else { 99_999 })?;
    if milliseconds.is_some() != (what == "delay") {
        return Err(format!("ms is for do=delay, which needs it; do is {what}"));
    }
    if code.is_some() && !["exit", "fail"].contains(&what) {
        return Err(format!("code is for do=exit and do=fail; do is {what}"));
    }
    let action = match what {
        "delay" => Action::Delay(milliseconds.unwrap_or(0)),
        "stop" => Action::Signal(libc::SIGSTOP),
        "kill" => Action::Signal(libc::SIGKILL),
        "abort" => Action::Signal(libc::SIGABRT),
        "exit" => Action::Exit(code.unwrap_or(1) as i32),
        "fail" => Action::Fail(code.map(|code| code as u32)),
        other => return Err(format!("do must be delay, stop, kill, abort, exit or fail, got \"{other}\"")),
    };
    Ok(rule(Event::Call(call.to_owned(), number("nth", 1, u64::MAX)?.unwrap_or(1), action)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read() {
        let rules = parse(
            "rank=1,call=ncclEpDispatch,nth=2,do=kill; call = cudaMalloc , do = fail , code = 2;\n\
             rank=0,call=ncclSend,do=delay,ms=250;call=cuInit_,do=kill",
        );
        assert!(rules.unwrap_err().contains("call \"cuInit_\" is no function of the host runtime"));
        let rules =
            parse("rank=1,call=ncclEpDispatch,nth=2,do=kill;call=cudaMalloc,do=fail,code=2;missing=nvcc,rank=3;");
        let rules = rules.unwrap();
        let event = |rule: &Rule| (rule.rank, rule.event.clone());
        let killed = Event::Call("ncclEpDispatch".into(), 2, Action::Signal(libc::SIGKILL));
        assert_eq!(event(&rules[0]), (Some(1), killed));
        assert_eq!(event(&rules[1]), (None, Event::Call("cudaMalloc".into(), 1, Action::Fail(Some(2)))));
        assert_eq!((event(&rules[2]), rules.len()), ((Some(3), Event::Missing(Missing::Nvcc)), 3));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (text, words) in [
            ("rank=1", "call is not given"),
            ("call=ncclSend", "do is not given"),
            ("call=ncclSend,do=die", "do must be delay, stop, kill, abort, exit or fail, got \"die\""),
            ("call=ncclSend,do=kill,nth=0", "nth must be a number from 1"),
            ("call=ncclSend,do=kill,rank=one", "rank must be a number from 0 to 1023, got \"one\""),
            ("call=ncclSend,do=kill,rang=1", "\"rang\" is no key; there are call, do, rank, nth, ms, code, missing"),
            ("call=ncclSend,do=kill,do=stop", "do is given twice"),
            ("call=ncclSend,do=delay", "ms is for do=delay, which needs it"),
            ("call=ncclSend,do=kill,ms=5", "ms is for do=delay"),
            ("call=ncclSend,do=kill,code=5", "code is for do=exit and do=fail"),
            ("call=ncclSend,do=fail,code=0", "code must be a number from 1"),
            ("call=ncclSend kill", "\"call=ncclSend kill\": call \"ncclSend kill\" is no function"),
            ("now", "\"now\" is not key=value"),
            ("call=cudaGetLastError,do=fail", "call \"cudaGetLastError\" is no function"),
            ("call=cudaFuncSetAttribute,do=fail", "call \"cudaFuncSetAttribute\" is no function"),
            ("missing=gcc", "missing must be nvcc or gin, got \"gcc\""),
            ("missing=nvcc,do=kill", "do has no meaning beside missing"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with("NVTE_EP_HOST_FAULT: rule \"") && error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn functions_out_of_reach_are_exported() {
        let exports: Vec<&str> = include_str!("../exports.txt").lines().collect();
        assert!(OUT_OF_REACH.iter().all(|name| exports.contains(name)));
    }
}
