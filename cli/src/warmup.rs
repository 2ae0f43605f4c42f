//! `nvte-ep warmup`: the kernels of some shapes are compiled into NCCL EP's cache before a job needs them.

use crate::Outcome;
use crate::bench::Case;
use crate::bench::report::CaseTimes;
use crate::process::say;
use crate::report::{Head, RankReport, Table, failures};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::Serialize;
use std::fs::File;
use std::time::{Duration, Instant};

/// What one kind of group took.
#[derive(Debug, Serialize)]
struct Warmed<'a> {
    case: &'a Case,
    transfer: &'a str,
    /// Seconds of the slowest rank, as all below.
    initialize_s: f64,
    first_step_s: f64,
    second_step_s: f64,
}

/// All that `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    schema: u32,
    version: &'a str,
    runtime: &'a str,
    passed: bool,
    errors: Vec<&'a str>,
    groups: Vec<Warmed<'a>>,
}

/// Waits until no other warmup of this user runs on this machine, so that each kernel is compiled once; at most `limit`.
pub fn alone(limit: Duration) -> Outcome<File> {
    let user = rustix::process::geteuid().as_raw();
    let path = std::env::temp_dir().join(format!("nvte-ep-warmup-{user}.lock"));
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|error| format!("{}: {error}", path.display()))?;
    let begin = Instant::now();
    let mut told = false;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if begin.elapsed() < limit => {}
            Err(Errno::WOULDBLOCK) => {
                let seconds = limit.as_secs();
                return Err(format!("another warmup has held {} for {seconds} s (--timeout)", path.display()).into());
            }
            Err(error) => return Err(format!("{}: {error}", path.display()).into()),
        }
        if !std::mem::replace(&mut told, true) {
            say(format_args!("waiting for another warmup, which holds {}", path.display()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What is printed, and whether every rank came to its end. `cases`: what was asked for, in order.
pub fn text(cases: &[Case], head: &Head, json: bool) -> Outcome<(String, bool)> {
    let ranks = head.ranks;
    let passed = ranks.iter().all(|rank| rank.error.is_none() && rank.cases.len() == cases.len());
    let done = ranks.iter().map(|rank| rank.cases.len()).min().unwrap_or(0);
    let groups: Vec<Warmed> = cases[..done.min(cases.len())]
        .iter()
        .enumerate()
        .flat_map(|(number, case)| groups_of(case, &ranks.iter().map(|rank| &rank.cases[number]).collect::<Vec<_>>()))
        .collect();
    if json {
        let errors = ranks.iter().filter_map(|rank| rank.error.as_deref()).collect();
        let (schema, version, runtime) = (1, env!("CARGO_PKG_VERSION"), head.runtime);
        let report = Report { schema, version, runtime, passed, errors, groups };
        return Ok((serde_json::to_string_pretty(&report)? + "\n", passed));
    }
    Ok((readable(&groups, head, ranks, passed), passed))
}

fn readable(groups: &[Warmed], head: &Head, ranks: &[RankReport], passed: bool) -> String {
    let columns =
        ["tokens", "hidden", "top-k", "experts", "type", "group", "initialize s", "first step s", "second step s"];
    let mut table = Table::new(&columns);
    for group in groups {
        let problem = &group.case.problem;
        let numbers = [problem.tokens, problem.hidden, problem.top_k, problem.experts];
        let mut row: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        row.extend([group.case.dtype.name().into(), group.transfer.to_owned()]);
        let times = [group.initialize_s, group.first_step_s, group.second_step_s];
        row.extend(times.iter().map(|seconds| format!("{seconds:.3}")));
        table.row(row);
    }
    let mut text = format!("{}\n{}", head.text(), table.text());
    text += match (passed, head.runtime) {
        (false, _) => return text + &failures(ranks),
        (true, "host") => "\nnothing was compiled: the host runtime has its kernels\n",
        (true, _) => "\nthe kernels are in the cache: a job with these shapes compiles none\n",
    };
    text
}

fn groups_of<'a>(case: &'a Case, ranks: &[&'a CaseTimes]) -> Vec<Warmed<'a>> {
    let count = ranks.iter().map(|rank| rank.groups.len()).min().unwrap_or(0);
    let warmed = |group: usize| {
        let of = |seconds: fn(&CaseTimes, usize) -> &Vec<f64>| {
            ranks.iter().flat_map(|rank| seconds(rank, group)).copied().fold(0.0, f64::max)
        };
        Warmed {
            case,
            transfer: &ranks[0].groups[group].transfer,
            initialize_s: of(|rank, group| &rank.groups[group].initialize_s),
            first_step_s: of(|rank, group| &rank.groups[group].first_step_s),
            second_step_s: of(|rank, group| &rank.groups[group].second_step_s),
        }
    };
    (0..count).map(warmed).collect()
}
