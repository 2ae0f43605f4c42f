//! The `nvte-ep` command.
//!
//! `run` takes a mixture-of-experts layer through libnvte_ep.so on several ranks and checks every output; `bench` times
//! staged against zero-copy groups; [`mod@launch`] starts any program on several ranks; [`doctor`] says what is missing here.
//! [`args`]: the command line. [`runtime`]: CUDA or host. [`process`], [`supervise`], [`guard`]: ranks that this command
//! starts. [`launched`]: ranks that mpirun and others start. [`rendezvous`], [`directory`]: how ranks meet. [`library`],
//! [`device`]: what they call. [`session`]: a rank's libraries and communicator. [`step`], [`mod@bench`]: what
//! a rank does. [`routing`]: its inputs. [`experts`]: the experts.
//! [`mod@reference`], [`emulate`], [`compare`]: what should come out. [`report`], [`digest`]: what is printed.

mod args;
mod bench;
mod compare;
mod device;
mod digest;
mod directory;
mod doctor;
mod element;
mod emulate;
mod experts;
mod guard;
mod launch;
mod launched;
mod library;
mod parallel;
mod process;
mod progress;
mod reference;
mod rendezvous;
mod report;
mod routing;
mod runtime;
mod session;
mod step;
mod supervise;

use args::{Cli, Command, Job};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use element::Dtype;
use half::{bf16, f16};
use launched::LaunchedRank;
use nvte_ep_core::env::RuntimeKind;
use nvte_ep_core::error::Error;
use progress::Progress;
use rendezvous::Rendezvous;
use report::{RankReport, RunReport};
use routing::Problem;
use runtime::{Choice, Plan};
use std::fmt;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervise::{Start, Ticket};

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
    process::keep_ended_children();
    if let Some(directory) = std::env::var_os(guard::GUARD_VARIABLE) {
        guard::main(directory.into());
        return ExitCode::SUCCESS;
    }
    if std::env::var_os(doctor::PROBE_VARIABLE).is_some() {
        doctor::probe_main();
        return ExitCode::SUCCESS;
    }
    if std::env::var_os(runtime::PROBE_VARIABLE).is_some() {
        runtime::probe_main();
        return ExitCode::SUCCESS;
    }
    let cli = Cli::try_parse_from(args::normalized(std::env::args_os())).unwrap_or_else(|error| end_by_clap(&error));
    let variable = std::env::var(runtime::RUNTIME_VARIABLE).ok();
    let command = match cli.command {
        Command::Job(job) => job,
        Command::Launch(args) => {
            let runtime = runtime::asked_for(args.runtime, variable.as_deref(), RuntimeKind::Host);
            let runtime = runtime.unwrap_or_else(|error| refuse("launch", &error));
            return finish("launch", launch::run(&args, runtime));
        }
        Command::Doctor(args) => {
            let runtime = runtime::asked_for(args.runtime, variable.as_deref(), RuntimeKind::Cuda);
            let runtime = runtime.unwrap_or_else(|error| refuse("doctor", &error));
            return finish("doctor", doctor::run(&args, runtime));
        }
    };
    let outcome = match std::env::var(supervise::TICKET_VARIABLE) {
        Ok(ticket) => started_rank(&command, &ticket),
        Err(_) => match launched::detect(|name| std::env::var(name).ok()) {
            Ok(Some(launched)) => launched_rank(&command, &launched),
            Ok(None) => parent(&command),
            Err(error) => refuse(command.name(), &error),
        },
    };
    finish(command.name(), outcome)
}

/// The exit code of a subcommand, after its error is printed.
fn finish(subcommand: &str, outcome: Outcome<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        eprintln!("nvte-ep {subcommand}: {error}");
        ExitCode::FAILURE
    })
}

/// Ends with what clap has to say, help and the version included; with an error where that cannot be written.
fn end_by_clap(error: &clap::Error) -> ! {
    if let (false, Err(lost)) = (error.use_stderr(), error.print().and_then(|()| std::io::stdout().flush())) {
        eprintln!("nvte-ep: cannot write to standard output: {lost}");
        std::process::exit(1);
    }
    std::process::exit(error.exit_code());
}

/// Ends with a message in the manner of clap, exit code 2.
fn refuse(subcommand: &str, error: &str) -> ! {
    let mut all = Cli::command();
    all.build();
    let named = all.find_subcommand_mut(subcommand).map(|named| named.error(ErrorKind::ValueValidation, error));
    named.map_or_else(|| std::process::exit(2), |error| error.exit())
}

/// The layer, the runtime and what it takes, or a refusal.
fn prepare(command: &Job, ranks: usize) -> (Problem, Choice, Plan) {
    let shared = command.shared();
    let problem = command.problem(ranks).unwrap_or_else(|error| refuse(command.name(), &error));
    let variable = std::env::var(runtime::RUNTIME_VARIABLE).ok();
    let choice = runtime::choose(shared.runtime, variable.as_deref(), runtime::probe)
        .unwrap_or_else(|error| refuse(command.name(), &error));
    let plan = runtime::plan(&choice, ranks, shared.max_sms, runtime::mps_runs())
        .unwrap_or_else(|error| refuse(command.name(), &error));
    (problem, choice, plan)
}

/// The variables that ranks get: the runtime's name, and the plan's unless the user set them.
fn variables(choice: &Choice, plan: &Plan) -> Vec<(String, String)> {
    let unset = plan.variables.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let runtime = ("NVTE_EP_RUNTIME", choice.kind.name());
    std::iter::once(&runtime).chain(unset).map(|(name, value)| ((*name).into(), (*value).into())).collect()
}

/// Starts ranks, waits for them and prints.
fn parent(command: &Job) -> Outcome<ExitCode> {
    let shared = command.shared();
    let ranks = shared.ranks.unwrap_or(args::DEFAULT_RANKS);
    let (problem, choice, plan) = prepare(command, ranks);
    announce(&choice, &plan);
    let start = Start {
        ranks,
        steps: problem.steps,
        max_sms: plan.max_sms,
        variables: variables(&choice, &plan),
        timeout: Duration::from_secs(shared.timeout),
        verbose: shared.verbose,
    };
    match supervise::supervise(&start)? {
        Ok(reports) => print(command, problem, &choice, &plan, reports),
        Err(signal) => {
            let signal = signal.as_raw();
            eprintln!("nvte-ep {}: ended by signal {signal}", command.name());
            Ok(ExitCode::from(process::Ending::Signal(signal).exit_code()))
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
fn print(command: &Job, problem: Problem, choice: &Choice, plan: &Plan, ranks: Vec<RankReport>) -> Outcome<ExitCode> {
    let (fine, dtype): (&dyn Fn(&RankReport) -> bool, _) = match command {
        Job::Run(args) => (&|rank| rank.wrong() == 0 && rank.steps.len() == problem.steps, args.dtype),
        Job::Bench(args) => (&|rank| bench::same(rank, args.transfer), Dtype::Bf16),
    };
    let passed = ranks.len() == problem.ranks && ranks.iter().all(|rank| rank.error.is_none() && fine(rank));
    let report = RunReport {
        passed,
        dtype: dtype.name().into(),
        runtime: choice.kind.name().into(),
        runtime_reason: choice.reason.clone(),
        notes: plan.notes.clone(),
        max_sms: plan.max_sms,
        problem: problem.clone(),
        ranks,
    };
    let json = command.shared().json;
    let mut text = match command {
        _ if json => serde_json::to_string_pretty(&report)?,
        Job::Run(_) => report.text(),
        Job::Bench(_) => report.bench_text(),
    };
    if json {
        text.push('\n');
    }
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("cannot write to standard output: {error}"))?;
    Ok(if report.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A rank that [`parent`] started: leaves its report and prints nothing but errors.
fn started_rank(command: &Job, ticket: &str) -> Outcome<ExitCode> {
    let ticket: Ticket = serde_json::from_str(ticket)?;
    let problem = command.problem(ticket.size)?;
    let progress = match ticket.rank {
        0 => Progress::file(ticket.directory.join(supervise::PROGRESS_FILE)),
        _ => Progress::silent(),
    };
    let limit = Duration::from_secs(command.shared().timeout);
    let rendezvous = Rendezvous::fresh(ticket.directory, ticket.rank, ticket.size, limit);
    let rank = Rank { command, problem: &problem, rank: ticket.rank, local_rank: ticket.rank, max_sms: ticket.max_sms };
    let report = rank.run(&Arc::new(rendezvous), &Arc::new(progress))?;
    Ok(if report.error.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A rank that an external launcher started; rank 0 prints for all.
fn launched_rank(command: &Job, launched: &LaunchedRank) -> Outcome<ExitCode> {
    if command.shared().ranks.is_some_and(|ranks| ranks != launched.size) {
        refuse(
            command.name(),
            &format!("{} started {} ranks: leave --ranks out or make it the same", launched.launcher, launched.size),
        );
    }
    let (problem, choice, plan) = prepare(command, launched.size);
    for (name, value) in variables(&choice, &plan) {
        // SAFETY: this is the only thread so far.
        unsafe { std::env::set_var(name, value) };
    }
    let first = launched.rank == 0;
    if first {
        announce(&choice, &plan);
    }
    let limit = Duration::from_secs(command.shared().timeout);
    let (directory, _lock) = directory::job_directory(&launched.job)?;
    let rendezvous = Arc::new(Rendezvous::shared(directory, launched.rank, launched.size, limit));
    let progress = Arc::new(if first { Progress::shown(problem.steps) } else { Progress::silent() });
    let (rank, local_rank) = (launched.rank, launched.local_rank);
    let report =
        Rank { command, problem: &problem, rank, local_rank, max_sms: plan.max_sms }.run(&rendezvous, &progress)?;
    progress.finish();
    if let Some(error) = report.error {
        eprintln!("nvte-ep {}: rank {} failed: {error}", command.name(), launched.rank);
        rendezvous.abandon();
        return Ok(ExitCode::FAILURE);
    }
    if !first {
        let passed = rendezvous.conclude(None)?;
        return Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let code = print(command, problem, &choice, &plan, rendezvous.collect()?)?;
    rendezvous.conclude(Some(code == ExitCode::SUCCESS))?;
    Ok(code)
}

/// What every rank does, whoever started it.
struct Rank<'a> {
    command: &'a Job,
    problem: &'a Problem,
    rank: usize,
    local_rank: usize,
    max_sms: usize,
}

impl Rank<'_> {
    /// Runs the steps and leaves the report, which holds the error if there was one.
    fn run(&self, rendezvous: &Arc<Rendezvous>, progress: &Arc<Progress>) -> Outcome<RankReport> {
        let limit = Duration::from_secs(self.command.shared().timeout);
        watchdog(self.command.name(), self.rank, Arc::clone(rendezvous), Arc::clone(progress), limit);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let setup = session::Setup {
            problem: self.problem,
            rank: self.rank,
            local_rank: self.local_rank,
            max_sms: self.max_sms,
            threads: (cores / self.problem.ranks).max(1),
        };
        let mut report = RankReport { rank: self.rank, ..RankReport::default() };
        let outcome = match self.command {
            Job::Bench(args) => bench::run(&setup, args.transfer, rendezvous, progress, &mut report),
            Job::Run(args) => match args.dtype {
                Dtype::Bf16 => step::run::<bf16>(&setup, args.digest, rendezvous, progress, &mut report),
                Dtype::F16 => step::run::<f16>(&setup, args.digest, rendezvous, progress, &mut report),
                Dtype::F32 => step::run::<f32>(&setup, args.digest, rendezvous, progress, &mut report),
            },
        };
        report.error = outcome.err().map(|error| error.to_string());
        match (rendezvous.publish(&report), &report.error) {
            (Ok(()), _) => Ok(report),
            // A peer that failed first has removed the rendezvous directory; the rank's own error says more than that.
            (Err(_), Some(error)) => Err(error.clone().into()),
            (Err(error), None) => Err(error),
        }
    }
}

/// Ends this process when time runs out or another rank has failed: what it waits for will not come, and nothing else
/// could end it.
fn watchdog(command: &'static str, rank: usize, rendezvous: Arc<Rendezvous>, progress: Arc<Progress>, limit: Duration) {
    let start = Instant::now();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let other = rendezvous.failure();
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
            eprintln!("nvte-ep {command}: rank {rank}: {error}");
            let report = RankReport { rank, error: Some(error), ..RankReport::default() };
            // The process ends either way.
            drop(rendezvous.publish(&report));
            rendezvous.abandon();
            // SAFETY: ends the process at once; what runs in other threads may be stuck and is not waited for.
            unsafe { libc::_exit(1) };
        }
    });
}
