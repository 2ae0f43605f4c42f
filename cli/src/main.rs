//! The `nvte-ep` command.
//!
//! `run` takes a mixture-of-experts layer through libnvte_ep.so on several ranks and checks every output; `bench` times
//! staged against zero-copy groups; [`mod@launch`] starts any program on several ranks, [`nodes`] on several machines; [`doctor`] says what is missing here.
//! [`args`]: the command line. [`runtime`]: CUDA or host. [`process`], [`supervise`], [`guard`]: ranks that this command
//! starts. [`launched`]: ranks that mpirun and others start. [`rendezvous`], [`directory`]: how ranks meet. [`library`],
//! [`device`]: what they call. [`session`]: a rank's libraries and communicator. [`step`], [`mod@bench`]: what
//! a rank does. [`routing`]: its inputs. [`experts`]: the experts.
//! [`mod@reference`], [`emulate`], [`compare`]: what should come out. [`report`], [`digest`]: what is printed. [`mod@plot`]: pictures
//! of it. [`plan`]: what a group takes, computed. [`warmup`]: kernels compiled before a job.

#![deny(clippy::print_stderr, reason = "eprintln! panics where stderr is full or closed; process::say does not")]

mod args;
mod bench;
mod compare;
mod device;
mod digest;
mod directory;
mod doctor;
mod element;
mod emulate;
mod examples;
mod experts;
mod guard;
mod launch;
mod launched;
mod library;
mod nodes;
mod parallel;
mod plan;
mod plot;
mod process;
mod progress;
mod reference;
mod rendezvous;
mod report;
mod routing;
mod runtime;
mod session;
mod shapes;
mod step;
mod supervise;
mod warmup;

use args::{BenchArgs, Cli, Command, Job, RunArgs, WarmupArgs};
use bench::report::{BenchReport, CaseResult, CaseTimes, Machine, SCHEMA};
use bench::traffic::{self, Recorded, Traffic};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use element::Dtype;
use half::{bf16, f16};
use launched::LaunchedRank;
use nvte_ep_core::env::RuntimeKind;
use nvte_ep_core::error::Error;
use process::say;
use progress::Progress;
use rendezvous::Rendezvous;
use report::{Head, RankReport, RunReport};
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
        Command::Job(mut job) => {
            job.load().unwrap_or_else(|error| refuse(job.name(), &error));
            job
        }
        Command::Launch(args) => {
            let runtime = runtime::asked_for(args.runtime, variable.as_deref(), RuntimeKind::Host);
            let runtime = runtime.unwrap_or_else(|error| refuse("launch", &error));
            args.nodes.check().unwrap_or_else(|error| refuse("launch", &error));
            return finish("launch", launch::run(&args, runtime));
        }
        Command::Doctor(args) => {
            let runtime = runtime::asked_for(args.runtime, variable.as_deref(), RuntimeKind::Cuda);
            let runtime = runtime.unwrap_or_else(|error| refuse("doctor", &error));
            return finish("doctor", doctor::run(&args, runtime));
        }
        Command::Plan(args) => return finish("plan", plan::run(&args)),
        Command::Plot(args) => return finish("plot", plot::run(&args)),
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
        say(format_args!("nvte-ep {subcommand}: {error}"));
        ExitCode::FAILURE
    })
}

/// Ends with what clap has to say, help and the version included; with an error where that cannot be written.
fn end_by_clap(error: &clap::Error) -> ! {
    if let (false, Err(lost)) = (error.use_stderr(), error.print().and_then(|()| std::io::stdout().flush())) {
        say(format_args!("nvte-ep: cannot write to standard output: {lost}"));
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

/// The first layer, the steps in all, the runtime and what it takes, or a refusal.
fn prepare(command: &Job, ranks: usize) -> (Problem, usize, Choice, Plan) {
    let shared = command.shared();
    let (problem, steps) = command.problem(ranks).unwrap_or_else(|error| refuse(command.name(), &error));
    let variable = std::env::var(runtime::RUNTIME_VARIABLE).ok();
    let choice = runtime::choose(shared.runtime, variable.as_deref(), runtime::probe)
        .unwrap_or_else(|error| refuse(command.name(), &error));
    let caps = command.max_sms();
    let plan = |cap: Option<usize>| {
        runtime::plan(&choice, ranks, cap, runtime::mps_runs()).unwrap_or_else(|error| refuse(command.name(), &error))
    };
    let first = plan(caps.first().copied());
    caps.iter().skip(1).for_each(|&cap| drop(plan(Some(cap))));
    (problem, steps, choice, first)
}

/// The variables that ranks get: the runtime's name, and the plan's unless the user set them.
fn variables(choice: &Choice, plan: &Plan) -> Vec<(String, String)> {
    let unset = plan.variables.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let runtime = ("NVTE_EP_RUNTIME", choice.kind.name());
    std::iter::once(&runtime).chain(unset).map(|(name, value)| ((*name).into(), (*value).into())).collect()
}

/// What the ranks of one number of them reported, and what they ran with.
struct Reported {
    problem: Problem,
    choice: Choice,
    plan: Plan,
    ranks: Vec<RankReport>,
}

/// Starts ranks, waits for them and prints.
fn parent(command: &Job) -> Outcome<ExitCode> {
    let shared = command.shared();
    let mut numbers = command.ranks();
    if numbers.is_empty() {
        numbers.push(args::DEFAULT_RANKS);
    }
    // All are looked at before the first one starts.
    let prepared: Vec<_> = numbers.into_iter().map(|ranks| (ranks, prepare(command, ranks))).collect();
    let limit = Duration::from_secs(shared.timeout);
    let _alone = if matches!(command, Job::Warmup(_)) { Some(warmup::alone(limit)?) } else { None };
    let mut reported = Vec::new();
    for (ranks, (problem, steps, choice, plan)) in prepared {
        announce(&choice, &plan);
        let start = Start {
            ranks,
            steps,
            max_sms: plan.max_sms,
            variables: variables(&choice, &plan),
            timeout: limit,
            verbose: shared.verbose,
        };
        match supervise::supervise(&start)? {
            Ok(ranks) => reported.push(Reported { problem, choice, plan, ranks }),
            Err(signal) => {
                let signal = signal.as_raw();
                say(format_args!("nvte-ep {}: ended by signal {signal}", command.name()));
                return Ok(ExitCode::from(process::Ending::Signal(signal).exit_code()));
            }
        }
    }
    print(command, reported)
}

/// Tells whoever watches a terminal what is about to run; the report says it again.
fn announce(choice: &Choice, plan: &Plan) {
    if std::io::stderr().is_terminal() {
        say(format_args!("{} runtime: {}", choice.kind.name(), choice.reason));
        plan.notes.iter().for_each(say);
    }
}

/// Prints the result; success if everything passed.
fn print(command: &Job, reported: Vec<Reported>) -> Outcome<ExitCode> {
    let (text, passed) = match command {
        Job::Run(args) => run_text(args, reported)?,
        Job::Bench(args) => bench_text(args, &reported)?,
        Job::Warmup(args) => warmup_text(args, &reported)?,
    };
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("cannot write to standard output: {error}"))?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What `run` prints, and whether everything passed.
fn run_text(args: &RunArgs, reported: Vec<Reported>) -> Outcome<(String, bool)> {
    let Some(Reported { problem, choice, plan, ranks }) = reported.into_iter().next() else {
        return Ok(Default::default());
    };
    let fine = |rank: &RankReport| rank.error.is_none() && rank.wrong() == 0 && rank.steps.len() == problem.steps;
    let report = RunReport {
        passed: ranks.len() == problem.ranks && ranks.iter().all(fine),
        dtype: args.dtype.name().into(),
        runtime: choice.kind.name().into(),
        runtime_reason: choice.reason,
        notes: plan.notes,
        max_sms: plan.max_sms,
        problem,
        ranks,
    };
    let text = if args.shared.json { serde_json::to_string_pretty(&report)? + "\n" } else { report.text() };
    if let Some(folder) = &args.plot {
        plot::write(&plot::of_run(&report), folder, &[plot::Format::Svg])?;
    }
    Ok((text, report.passed))
}

/// What `warmup` prints, and whether everything passed.
fn warmup_text(args: &WarmupArgs, reported: &[Reported]) -> Outcome<(String, bool)> {
    let Some(Reported { choice, plan, ranks, .. }) = reported.first() else { return Ok(Default::default()) };
    let head = Head { runtime: choice.kind.name(), reason: &choice.reason, notes: &plan.notes, ranks };
    warmup::text(&args.as_bench().cases(ranks.len())?, &head, args.shared.json)
}

/// What `bench` prints, and whether everything passed.
fn bench_text(args: &BenchArgs, reported: &[Reported]) -> Outcome<(String, bool)> {
    let Some(first) = reported.first() else { return Ok(Default::default()) };
    let recorded = args.routing_file.as_deref().map(Recorded::read).transpose()?;
    let (mut cases, mut passed) = (Vec::new(), true);
    for Reported { ranks, .. } in reported {
        let wanted = args.cases(ranks.len())?;
        for (number, case) in wanted.iter().enumerate() {
            let times: Vec<&CaseTimes> = ranks.iter().filter_map(|rank| rank.cases.get(number)).collect();
            if times.len() == ranks.len() {
                let routings = traffic::routings(&case.problem, case.routing, recorded.as_ref())?;
                let traffic = Traffic::of(&case.problem, &routings);
                cases.push(CaseResult::of(case, &traffic, &times, args.link_gb_per_s));
            }
        }
        passed &= ranks.iter().all(|rank| rank.error.is_none() && rank.cases.len() == wanted.len());
    }
    passed &= cases.iter().all(|case| case.different.is_empty());
    let all: Vec<RankReport> = reported.iter().flat_map(|run| run.ranks.clone()).collect();
    let runtime = first.choice.kind.name();
    let report = BenchReport {
        schema: SCHEMA,
        command: std::env::args().collect(),
        version: env!("CARGO_PKG_VERSION").into(),
        machine: Machine::of(runtime, &all),
        graph: args.graph,
        iterations: args.iterations,
        rounds: args.rounds(),
        passed,
        errors: all.iter().filter_map(|rank| rank.error.clone()).collect(),
        cases,
    };
    let text = if args.shared.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else if args.csv {
        report.csv()
    } else {
        let head = Head { runtime, reason: &first.choice.reason, notes: &first.plan.notes, ranks: &all };
        report.text(&head, &bench::report::verdict(&all, passed))
    };
    if let Some(folder) = &args.plot {
        plot::write(&plot::of_bench(&report), folder, &[plot::Format::Svg])?;
    }
    if !passed && args.csv {
        say(report::failures(&all).trim_end());
    }
    Ok((text, passed))
}

/// A rank that [`parent`] started: leaves its report and prints nothing but errors.
fn started_rank(command: &Job, ticket: &str) -> Outcome<ExitCode> {
    let ticket: Ticket = serde_json::from_str(ticket)?;
    let (problem, _) = command.problem(ticket.size)?;
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
    if command.ranks().iter().any(|&ranks| ranks != launched.size) {
        refuse(
            command.name(),
            &format!("{} started {} ranks: leave --ranks out or make it the same", launched.launcher, launched.size),
        );
    }
    let (problem, steps, choice, plan) = prepare(command, launched.size);
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
    let progress = Arc::new(if first { Progress::shown(steps) } else { Progress::silent() });
    let (rank, local_rank) = (launched.rank, launched.local_rank);
    let report =
        Rank { command, problem: &problem, rank, local_rank, max_sms: plan.max_sms }.run(&rendezvous, &progress)?;
    progress.finish();
    if let Some(error) = report.error {
        say(format_args!("nvte-ep {}: rank {} failed: {error}", command.name(), launched.rank));
        rendezvous.abandon();
        return Ok(ExitCode::FAILURE);
    }
    if !first {
        let passed = rendezvous.conclude(None)?;
        return Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let ranks = rendezvous.collect()?;
    let code = print(command, vec![Reported { problem, choice, plan, ranks }])?;
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
            Job::Bench(args) => bench::run(&setup, args, rendezvous, progress, &mut report),
            Job::Warmup(args) => bench::run(&setup, &args.as_bench(), rendezvous, progress, &mut report),
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
            say(format_args!("nvte-ep {command}: rank {rank}: {error}"));
            let report = RankReport { rank, error: Some(error), ..RankReport::default() };
            // The process ends either way.
            drop(rendezvous.publish(&report));
            rendezvous.abandon();
            // SAFETY: ends the process at once; what runs in other threads may be stuck and is not waited for.
            unsafe { libc::_exit(1) };
        }
    });
}
