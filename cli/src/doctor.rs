//! `nvte-ep doctor`: what this machine has for expert parallelism, what is missing, and what to do about it.
//!
//! The libraries are loaded and looked at in a process of its own, by the rules of `nvte_ep_initialize`
//! ([`nvte_ep_core::diagnose`]): a library that ends its process does not end the report. Here is added what belongs to the
//! machine rather than to the libraries.

use crate::Outcome;
use crate::args::DoctorArgs;
use nvte_ep_core::diagnose::{self, Finding, Level};
use nvte_ep_core::env::{Env, RuntimeKind};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

/// Set in the process that loads the libraries.
pub const PROBE_VARIABLE: &str = "NVTE_EP_DOCTOR_PROBE";
const ANSWER: &str = "nvte-ep doctor: ";
/// Version of the JSON.
const SCHEMA: u32 = 1;

/// A finding as it is printed and passed on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Check {
    check: String,
    level: String,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl From<Finding> for Check {
    fn from(finding: Finding) -> Self {
        let level = match finding.level {
            Level::Fine => "ok",
            Level::Warning => "warning",
            Level::Problem => "problem",
        };
        let remedy = Some(finding.remedy).filter(|remedy| !remedy.is_empty());
        Self { check: finding.check.into(), level: level.into(), found: finding.found, remedy }
    }
}

/// All that is printed with `--json`.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    version: &'static str,
    runtime: &'static str,
    usable: bool,
    checks: Vec<Check>,
}

/// The process that loads the libraries: prints what it finds.
pub fn probe_main() {
    let findings = match Env::from_process() {
        Ok(env) => diagnose::report(&env),
        Err(error) => vec![Finding::problem("environment", error.to_string(), "")],
    };
    let checks: Vec<Check> = findings.into_iter().map(Check::from).collect();
    if let Ok(text) = serde_json::to_string(&checks) {
        println!("{ANSWER}{text}");
    }
}

fn probe(runtime: RuntimeKind) -> Outcome<Vec<Check>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(PROBE_VARIABLE, "1").env("NVTE_EP_RUNTIME", runtime.name()).stdin(Stdio::null());
    let output =
        command.output().map_err(|error| format!("cannot start the process that loads the libraries: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let answer = text.lines().rev().find_map(|line| line.strip_prefix(ANSWER));
    if let Some(Ok(checks)) = answer.map(serde_json::from_str) {
        return Ok(checks);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    let found = format!("a library ended the process that loaded it ({}): {last}", output.status);
    Ok(vec![Finding::problem("libraries", found, "the last line says which; install another version of it").into()])
}

/// Looks at everything, prints it, and gives exit code 0 where steps can run, else 1. `runtime`: for which runtime.
pub fn run(args: &DoctorArgs, runtime: RuntimeKind) -> Outcome<ExitCode> {
    let mut checks = probe(runtime)?;
    checks.extend(machine().into_iter().map(Check::from));
    if args.run {
        checks.push(if is_usable(&checks) {
            trial(runtime)?.into()
        } else {
            Finding::warning("run", "not tried, because of the problems above", "").into()
        });
    }
    let report = Report {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        runtime: runtime.name(),
        usable: is_usable(&checks),
        checks,
    };
    let text = if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { text(&report) };
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("cannot write to standard output: {error}"))?;
    Ok(if report.usable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn is_usable(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.level != "problem")
}

/// The report for people.
fn text(report: &Report) -> String {
    let width = report.checks.iter().map(|check| check.check.len()).max().unwrap_or(0);
    let mut text = format!("nvte-ep {}, runtime {}\n\n", report.version, report.runtime);
    for check in &report.checks {
        text += &format!("{:7}  {:width$}  {}\n", check.level, check.check, check.found);
        if let Some(remedy) = &check.remedy {
            text += &format!("{:7}  {:width$}  -> {remedy}\n", "", "");
        }
    }
    let problems = report.checks.iter().filter(|check| check.level == "problem").count();
    text += &match problems {
        0 => "\nusable\n".to_owned(),
        1 => "\nnot usable: 1 problem\n".to_owned(),
        more => format!("\nnot usable: {more} problems\n"),
    };
    text
}

/// NCCL keeps some 10 MB there for each connection that does not go over NVLink; 64 MB, what containers have by default, holds
/// few of them.
const SHARED_MEMORY: (u64, u64) = (16 << 20, 256 << 20);
/// NCCL pins its buffers; where pinned memory is limited, this is too little.
const LOCKED_MEMORY: u64 = 64 << 20;

/// What belongs to the machine.
fn machine() -> Vec<Finding> {
    let mut findings = vec![shared_memory(free_bytes(Path::new("/dev/shm"))), locked_memory(locked_limit())];
    if let Some(limit) = memory_limit() {
        findings.push(Finding::fine("cgroup", format!("this container may use {} of memory", mebibytes(limit))));
    }
    let mps = crate::runtime::mps_runs();
    findings.push(Finding::fine(
        "mps",
        if mps { "the MPS daemon runs: ranks may share a GPU" } else { "no MPS daemon: one rank a GPU" },
    ));
    let channels = Path::new("/dev/nvidia-caps-imex-channels");
    if channels.exists() {
        findings.push(Finding::fine(
            "imex",
            "there are IMEX channels: memory can be shared between machines of one NVLink domain",
        ));
    }
    findings
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn shared_memory(free: Option<u64>) -> Finding {
    let remedy = "enlarge it: --shm-size=1g for Docker, or mount -o remount,size=1g /dev/shm";
    let (least, enough) = SHARED_MEMORY;
    match free {
        None => Finding::problem(
            "shared-memory",
            "/dev/shm is not there, and NCCL's ranks meet in it",
            "mount a tmpfs there",
        ),
        Some(free) if free < least => Finding::problem(
            "shared-memory",
            format!("/dev/shm has {} free, too little for NCCL", mebibytes(free)),
            remedy,
        ),
        Some(free) if free < enough => Finding::warning(
            "shared-memory",
            format!("/dev/shm has {} free, enough for few ranks", mebibytes(free)),
            remedy,
        ),
        Some(free) => Finding::fine("shared-memory", format!("/dev/shm has {} free", mebibytes(free))),
    }
}

fn locked_memory(limit: Option<u64>) -> Finding {
    match limit {
        Some(limit) if limit < LOCKED_MEMORY => Finding::warning(
            "locked-memory",
            format!("a process may lock {} of memory; transfers over InfiniBand pin more", mebibytes(limit)),
            "raise it: ulimit -l unlimited, or --ulimit memlock=-1 for Docker",
        ),
        Some(limit) => Finding::fine("locked-memory", format!("a process may lock {} of memory", mebibytes(limit))),
        None => Finding::fine("locked-memory", "not limited"),
    }
}

fn free_bytes(folder: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(folder).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

fn locked_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// The memory limit of the control group, where there is one.
fn memory_limit() -> Option<u64> {
    let files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let text = files.iter().find_map(|file| std::fs::read_to_string(file).ok())?;
    // Version 1 writes a number near 2^63 where there is no limit, version 2 "max".
    text.trim().parse().ok().filter(|limit| *limit < 1 << 60)
}

/// A step of two ranks, or of one where there is one GPU that ranks cannot share, with everything compared.
fn trial(runtime: RuntimeKind) -> Outcome<Finding> {
    let gpus = match runtime {
        RuntimeKind::Host => 2,
        RuntimeKind::Cuda => crate::runtime::probe().map_or(1, |gpus| gpus.len()),
    };
    let ranks = if gpus > 1 || crate::runtime::mps_runs() { "2" } else { "1" };
    let arguments =
        ["run", "--ranks", ranks, "--runtime", runtime.name(), "--tokens", "64", "--steps", "1", "--experts", "8"];
    let output = Command::new(std::env::current_exe()?).args(arguments).stdin(Stdio::null()).output()?;
    let command = format!("nvte-ep {}", arguments.join(" "));
    if output.status.success() {
        return Ok(Finding::fine("run", format!("{command}: all checks passed")));
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let why = printed.lines().chain(errors.lines()).find(|line| line.contains("failed") || line.starts_with("error"));
    Ok(Finding::problem("run", format!("{command}: {}", why.unwrap_or("failed")), "run that command: it says more"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_the_machine() {
        let level = |finding: Finding| (finding.level, finding.remedy.is_empty());
        assert_eq!(level(shared_memory(None)), (Level::Problem, false));
        assert_eq!(level(shared_memory(Some(1 << 20))), (Level::Problem, false));
        assert_eq!(level(shared_memory(Some(64 << 20))), (Level::Warning, false));
        assert_eq!(level(shared_memory(Some(1 << 30))), (Level::Fine, true));
        assert_eq!(level(locked_memory(Some(8 << 20))), (Level::Warning, false));
        assert_eq!(level(locked_memory(None)), (Level::Fine, true));
    }

    #[test]
    fn the_report_for_people() {
        let checks = [
            Finding::fine("driver", "the CUDA driver finds 1 device"),
            Finding::problem("nccl", "NCCL 2.27.5 is in use", "update it"),
        ];
        let checks: Vec<Check> = checks.into_iter().map(Check::from).collect();
        let report = Report { schema: SCHEMA, version: "1.2.3", runtime: "cuda", usable: is_usable(&checks), checks };
        let expected = "nvte-ep 1.2.3, runtime cuda\n\n\
                        ok       driver  the CUDA driver finds 1 device\n\
                        problem  nccl    NCCL 2.27.5 is in use\n                 -> update it\n\n\
                        not usable: 1 problem\n";
        assert_eq!(text(&report), expected);
    }
}
