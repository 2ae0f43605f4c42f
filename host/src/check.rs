//! The contract checker: a breach of a [`Rule`] becomes a report.
//!
//! A fault that [`Fault::breaks`] a rule becomes a report where it leaves the library: [`annotate`] adds the rank, the call
//! and the rule, and counts it. Breaches that the work cannot go on after are errors always; about the others, which
//! [`breach`] takes, the environment decides.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use nvte_ep_bindings::{cudaErrorAssert, ncclInvalidUsage};
use parking_lot::Mutex;

use crate::fault::{self, Fault, Outcome};
use crate::rule::{Rule, Severity};
use crate::settings::{self, Policy};
use crate::{acting, caller};

/// Reports of a rule that are printed where the program goes on; the others are only counted.
const PRINTED: u64 = 16;

/// A breach, as it is printed.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    /// What is broken.
    pub rule: Rule,
    /// By whom: the rank where the call is about a communicator, else the device.
    pub who: Who,
    /// The function that was called; empty for queued work, which names itself.
    pub call: &'a str,
    /// The argument, what was required of it and what was found.
    pub found: &'a str,
    /// NCCL EP's names of function and argument, where the others are a caller's ([`caller`]).
    pub of_nccl_ep: Option<&'a str>,
}

/// Who broke a rule.
#[derive(Clone, Copy, Debug)]
pub enum Who {
    /// A rank.
    Rank(usize),
    /// A device that no communicator uses.
    Device(i32),
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.who {
            Who::Rank(rank) => write!(f, "rank {rank}, ")?,
            Who::Device(ordinal) => write!(f, "device {ordinal}, ")?,
        }
        if !self.call.is_empty() && !self.found.starts_with(self.call) {
            write!(f, "{}: ", self.call)?;
        }
        let Self { rule, found, .. } = self;
        write!(f, "{found}: rule {}: {} (on a GPU: {}", rule.name(), rule.sentence(), rule.on_gpu())?;
        self.of_nccl_ep.map_or(Ok(()), |names| write!(f, "; NCCL EP's name: {names}"))?;
        f.write_str(")")
    }
}

/// Whether breaches after which the work can go on are looked for.
pub fn is_on() -> bool {
    settings::policy() != Policy::Off
}

/// How often each rule was broken.
static COUNTS: [AtomicU64; Rule::ALL.len()] = [const { AtomicU64::new(0) }; Rule::ALL.len()];

impl Rule {
    /// Reports of the rule in this process.
    pub fn reports(self) -> u64 {
        COUNTS[self as usize].load(Ordering::Relaxed)
    }
}

/// Text of the last report of this process.
static LAST: Mutex<String> = Mutex::new(String::new());

/// The last report of this process, or "".
pub fn last_report() -> String {
    LAST.lock().clone()
}

/// Makes a fault that breaks a rule a report, once; leaves others as they are.
pub fn annotate(mut fault: Fault) -> Fault {
    let Some(rule) = fault.rule.filter(|_| !fault.annotated) else { return fault };
    let who = acting::rank().map_or_else(|| Who::Device(acting::device()), Who::Rank);
    let (call, found) = (acting::call(), &fault.text);
    fault.text = match caller::current() {
        None => Report { rule, who, call, found, of_nccl_ep: None }.to_string(),
        Some(caller) => {
            let (found, names) = caller.translate(call, found);
            Report { rule, who, call: "", found: &found, of_nccl_ep: names.as_deref() }.to_string()
        }
    };
    fault.annotated = true;
    COUNTS[rule as usize].fetch_add(1, Ordering::Relaxed);
    LAST.lock().clone_from(&fault.text);
    fault
}

/// A breach after which the work can go on: an error if the policy says so.
pub fn breach(rule: Rule, found: impl Into<String>) -> Outcome<()> {
    debug_assert!(rule.recoverable(), "{rule:?}");
    if !is_on() {
        return Ok(());
    }
    let fault = breached(rule, found);
    if settings::policy() == Policy::Error && rule.severity() == Severity::Policy {
        return Err(fault);
    }
    print(fault);
    Ok(())
}

/// A breach that is only a warning, unless the policy is off.
pub fn warn(rule: Rule, found: impl Into<String>) {
    if is_on() {
        print(breached(rule, found));
    }
}

fn breached(rule: Rule, found: impl Into<String>) -> Fault {
    Fault::both(cudaErrorAssert, ncclInvalidUsage, found).breaks(rule)
}

/// Prints and counts a breach.
fn print(fault: Fault) {
    let Some(rule) = fault.rule else { return };
    let report = annotate(fault);
    match rule.reports() {
        ..=PRINTED => fault::report(&report.text),
        count if count == PRINTED + 1 => {
            fault::report(&format!("further breaches of rule {} are counted, not printed", rule.name()));
        }
        _ => {}
    }
}

/// Checks that a stream belongs to the device of the communicator.
pub fn stream_device(stream: i32, device: i32) -> Outcome<()> {
    if stream == device {
        return Ok(());
    }
    let text = format!("stream is one of device {stream}, the communicator is on device {device}");
    breach(Rule::OtherDevice, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_rank_call_argument_and_rule() {
        let report = Report {
            rule: Rule::ExpertIndex,
            who: Who::Rank(3),
            call: "ncclEpUpdateHandle",
            found: "ncclEpUpdateHandle: topk_idx[0, 1] is 9, but there are 8 experts",
            of_nccl_ep: None,
        };
        let text = "rank 3, ncclEpUpdateHandle: topk_idx[0, 1] is 9, but there are 8 experts: rule expert-index: an index \
                    names one of num_experts experts or is negative (on a GPU: corrupt memory)";
        assert_eq!(report.to_string(), text);
        let other = Report { call: "cudaMalloc", found: "an allocation", who: Who::Device(0), ..report };
        assert!(other.to_string().starts_with("device 0, cudaMalloc: an allocation: rule"), "{other}");
    }
}
