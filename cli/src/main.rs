//! The `nvte-ep` command.
//!
//! `run` takes a mixture-of-experts layer through libnvte_ep.so on several ranks and checks every output; `launch`,
//! [`program`], starts any program on several ranks.
//! [`args`]: the command line. [`runtime`]: CUDA or host. [`launch`], [`rendezvous`]: the ranks. [`library`],
//! [`device`]: what they call. [`step`]: what a rank does. [`routing`]: its inputs. [`experts`]: the experts.
//! [`mod@reference`], [`emulate`], [`compare`]: what should come out. [`report`], [`digest`]: what is printed.

mod args;
mod compare;
mod device;
mod digest;
mod element;
mod emulate;
mod experts;
mod launch;
mod library;
mod parallel;
mod program;
mod progress;
mod reference;
mod rendezvous;
mod report;
mod routing;
mod runtime;
mod step;

use args::{Cli, Command, RunArgs};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use element::Dtype;
use half::{bf16, f16};
use launch::{Place, Start, Ticket};
use nvte_ep_core::error::Error;
use progress::Progress;
use rendezvous::Meeting;
use report::{RankReport, RunReport};
use routing::Problem;
use runtime::{Choice, Plan};
use std::fmt;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why something could not be done, in words.
#[derive(Debug)]
pub struct Failure(String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! failure_from {
    ($($source:ty)*) => { $(
        impl From<$source> for Failure {
            fn from(source: $source) -> Self {
                Self(source.to_string())
            }
        }
    )* };
}
failure_from! { String &str std::io::Error serde_json::Error }

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            // Our library's exceptions begin with the function's name themselves.
            Error::Foreign { call, text } if text.starts_with(call) => Self(text),
            other => Self(other.to_string()),
        }
    }
}

/// What can fail with words.
pub type Outcome<T> = Result<T, Failure>;

fn main() -> ExitCode {
    if std::env::var_os(runtime::PROBE_VARIABLE).is_some() {
        runtime::probe_main();
        return ExitCode::SUCCESS;
    }
    let args = match Cli::parse().command {
        Command::Run(args) => args,
        Command::Launch(args) => {
            return program::run(&args).unwrap_or_else(|error| {
                eprintln!("nvte-ep launch: {error}");
                ExitCode::FAILURE
            });
        }
    };
    let outcome = match std::env::var(launch::TICKET_VARIABLE) {
        Ok(ticket) => started_rank(&args, &ticket),
        Err(_) => match launch::detect(|name| std::env::var(name).ok()) {
            Ok(Some(place)) => launched_rank(&args, &place),
            Ok(None) => parent(&args),
            Err(error) => refuse(&error),
        },
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("nvte-ep run: {error}");
        ExitCode::FAILURE
    })
}

/// Ends with a message in the manner of clap, exit code 2.
fn refuse(error: &str) -> ! {
    let mut command = Cli::command();
    command.build();
    let run = command.find_subcommand_mut("run").map(|run| run.error(ErrorKind::ValueValidation, error));
    run.map_or_else(|| std::process::exit(2), |error| error.exit())
}

/// The layer, the runtime and what it takes, or a refusal.
fn prepare(args: &RunArgs, ranks: usize) -> (Problem, Choice, Plan) {
    let problem = args.problem(ranks).unwrap_or_else(|error| refuse(&error));
    let variable = std::env::var("NVTE_EP_RUNTIME").ok();
    let choice =
        runtime::choose(args.runtime, variable.as_deref(), runtime::probe).unwrap_or_else(|error| refuse(&error));
    let plan = runtime::plan(&choice, ranks, args.max_sms, runtime::mps_runs()).unwrap_or_else(|error| refuse(&error));
    (problem, choice, plan)
}

/// The variables that ranks get: the runtime's name, and the plan's unless the user set them.
fn variables(choice: &Choice, plan: &Plan) -> Vec<(String, String)> {
    let unset = plan.variables.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let runtime = ("NVTE_EP_RUNTIME", choice.kind.name());
    std::iter::once(&runtime).chain(unset).map(|(name, value)| ((*name).into(), (*value).into())).collect()
}

/// Starts ranks, waits for them and prints.
fn parent(args: &RunArgs) -> Outcome<ExitCode> {
    let ranks = args.ranks.unwrap_or(args::DEFAULT_RANKS);
    let (problem, choice, plan) = prepare(args, ranks);
    announce(&choice, &plan);
    let start = Start {
        ranks,
        steps: problem.steps,
        max_sms: plan.max_sms,
        variables: variables(&choice, &plan),
        timeout: Duration::from_secs(args.timeout),
        verbose: args.verbose,
    };
    match launch::supervise(&start)? {
        Ok(reports) => print(args, problem, &choice, &plan, reports),
        Err(signal) => {
            eprintln!("nvte-ep run: ended by signal {signal}");
            Ok(ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)))
        }
    }
}

/// Tells whoever watches a terminal what is about to run; the report says it again.
fn announce(choice: &Choice, plan: &Plan) {
    if std::io::stderr().is_terminal() {
        eprintln!("{} runtime: {}", choice.kind.name(), choice.reason);
        plan.notes.iter().for_each(|note| eprintln!("{note}"));
    }
}

/// Prints the result; success if everything passed.
fn print(args: &RunArgs, problem: Problem, choice: &Choice, plan: &Plan, ranks: Vec<RankReport>) -> Outcome<ExitCode> {
    let fine = |rank: &RankReport| rank.error.is_none() && rank.wrong() == 0 && rank.steps.len() == problem.steps;
    let report = RunReport {
        passed: ranks.len() == problem.ranks && ranks.iter().all(fine),
        dtype: args.dtype.name().into(),
        runtime: choice.kind.name().into(),
        runtime_reason: choice.reason.clone(),
        notes: plan.notes.clone(),
        max_sms: plan.max_sms,
        problem,
        ranks,
    };
    let mut text = if args.json { serde_json::to_string_pretty(&report)? } else { report.text() };
    if args.json {
        text.push('\n');
    }
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(if report.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A rank that [`parent`] started: leaves its report and prints nothing but errors.
fn started_rank(args: &RunArgs, ticket: &str) -> Outcome<ExitCode> {
    let ticket: Ticket = serde_json::from_str(ticket)?;
    let problem = args.problem(ticket.size)?;
    let progress = match ticket.rank {
        0 => Progress::file(ticket.directory.join(launch::PROGRESS_FILE)),
        _ => Progress::silent(),
    };
    let limit = Duration::from_secs(args.timeout);
    let meeting = Meeting::fresh(ticket.directory, ticket.rank, ticket.size, limit);
    let rank = Rank { args, problem: &problem, rank: ticket.rank, local_rank: ticket.rank, max_sms: ticket.max_sms };
    let report = rank.run(&Arc::new(meeting), &Arc::new(progress))?;
    Ok(if report.error.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A rank that an external launcher started; rank 0 prints for all.
fn launched_rank(args: &RunArgs, place: &Place) -> Outcome<ExitCode> {
    if args.ranks.is_some_and(|ranks| ranks != place.size) {
        refuse(&format!("{} started {} ranks: leave --ranks out or make it the same", place.launcher, place.size));
    }
    let (problem, choice, plan) = prepare(args, place.size);
    for (name, value) in variables(&choice, &plan) {
        // SAFETY: this is the only thread so far.
        unsafe { std::env::set_var(name, value) };
    }
    let first = place.rank == 0;
    if first {
        announce(&choice, &plan);
    }
    let limit = Duration::from_secs(args.timeout);
    let directory = rendezvous::job_directory(&place.job)?;
    let meeting = Arc::new(Meeting::shared(directory, place.rank, place.size, limit));
    let progress = Arc::new(if first { Progress::shown(problem.steps) } else { Progress::silent() });
    let (rank, local_rank) = (place.rank, place.local_rank);
    let report = Rank { args, problem: &problem, rank, local_rank, max_sms: plan.max_sms }.run(&meeting, &progress)?;
    progress.finish();
    if let Some(error) = report.error {
        eprintln!("nvte-ep run: rank {} failed: {error}", place.rank);
        meeting.abandon();
        return Ok(ExitCode::FAILURE);
    }
    if !first {
        let passed = meeting.conclude(None)?;
        return Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let code = print(args, problem, &choice, &plan, meeting.collect()?)?;
    meeting.conclude(Some(code == ExitCode::SUCCESS))?;
    Ok(code)
}

/// What every rank does, whoever started it.
struct Rank<'a> {
    args: &'a RunArgs,
    problem: &'a Problem,
    rank: usize,
    local_rank: usize,
    max_sms: usize,
}

impl Rank<'_> {
    /// Runs the steps and leaves the report, which holds the error if there was one.
    fn run(&self, meeting: &Arc<Meeting>, progress: &Arc<Progress>) -> Outcome<RankReport> {
        watchdog(self.rank, Arc::clone(meeting), Arc::clone(progress), Duration::from_secs(self.args.timeout));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let setup = step::Setup {
            problem: self.problem,
            rank: self.rank,
            local_rank: self.local_rank,
            max_sms: self.max_sms,
            digest: self.args.digest,
            threads: (cores / self.problem.ranks).max(1),
        };
        let mut report = RankReport { rank: self.rank, ..RankReport::default() };
        let outcome = match self.args.dtype {
            Dtype::Bf16 => step::run::<bf16>(&setup, meeting, progress, &mut report),
            Dtype::F16 => step::run::<f16>(&setup, meeting, progress, &mut report),
            Dtype::F32 => step::run::<f32>(&setup, meeting, progress, &mut report),
        };
        report.error = outcome.err().map(|error| error.to_string());
        match (meeting.publish(&report), &report.error) {
            (Ok(()), _) => Ok(report),
            // A peer that failed first has taken the meeting place away; the rank's own error says more than that.
            (Err(_), Some(error)) => Err(error.clone().into()),
            (Err(error), None) => Err(error),
        }
    }
}

/// Ends this process when time runs out or another rank has failed: what it waits for will not come, and nothing else
/// could end it.
fn watchdog(rank: usize, meeting: Arc<Meeting>, progress: Arc<Progress>, limit: Duration) {
    let start = Instant::now();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let other = meeting.failure();
            if start.elapsed() < limit && other.is_none() {
                continue;
            }
            if other.is_some() {
                // Whoever failed says so itself; leave it and this rank's own end the time for that.
                std::thread::sleep(Duration::from_secs(1));
            }
            let error = match other {
                Some(other) if start.elapsed() < limit => {
                    format!("was in {}, when {}", progress.now(), other.lines().next().unwrap_or_default())
                }
                _ => format!("time ran out after {} s in {}", limit.as_secs(), progress.now()),
            };
            eprintln!("nvte-ep run: rank {rank}: {error}");
            let report = RankReport { rank, error: Some(error), ..RankReport::default() };
            // The process ends either way.
            drop(meeting.publish(&report));
            meeting.abandon();
            // SAFETY: ends the process at once; what runs in other threads may be stuck and is not waited for.
            unsafe { libc::_exit(1) };
        }
    });
}
