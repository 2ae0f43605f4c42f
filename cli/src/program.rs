//! `nvte-ep launch`: starts any program once a rank, as mpirun and torchrun do on one machine.

use crate::Outcome;
use crate::args::{LaunchArgs, LaunchRuntime};
use crate::launch::{Echo, Rank, ending, next_signal, on_signals, plural_ranks, start_rank};
use crate::rendezvous::{private_directory, remove};
use nvte_ep_core::sys::own_directories;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Names a directory of the run's own, in which ranks may leave files for each other.
pub const DIRECTORY_VARIABLE: &str = "NVTE_EP_LAUNCH_DIRECTORY";
/// Between SIGTERM and SIGKILL.
const AFTER_TERM: Duration = Duration::from_secs(2);
/// Exit code where the time was up, that of timeout(1).
const TIME_OUT: u8 = 124;
/// Signals that are passed on to the ranks; all but the last two also end the run.
const SIGNALS: [i32; 6] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// Why the ranks that still run have to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// This rank failed first.
    Failure(usize),
    Signal(i32),
    TimeOut,
}

/// Starts the ranks, watches over them and returns the exit code.
pub fn run(args: &LaunchArgs) -> Outcome<ExitCode> {
    on_signals(&SIGNALS);
    let directory = private_directory()?;
    let mut ranks = Vec::new();
    let outcome = start(args, &directory, &mut ranks).and_then(|()| watch(args, &mut ranks));
    ranks.iter_mut().for_each(Rank::kill_group);
    ranks.iter().for_each(Rank::drain);
    remove(&directory);
    Ok(report(&ranks, outcome?))
}

fn start(args: &LaunchArgs, directory: &Path, ranks: &mut Vec<Rank>) -> Outcome<()> {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    let port = port.map_err(|error| format!("cannot find a free port for MASTER_PORT: {error}"))?.port().to_string();
    let runtime = match args.runtime {
        LaunchRuntime::Host => host_variables(directory, args.ranks)?,
        LaunchRuntime::Cuda => vec![("NVTE_EP_RUNTIME", "cuda".into())],
    };
    let size = args.ranks.to_string();
    for rank in 0..args.ranks {
        let number = rank.to_string();
        let mut command = Command::new(&args.program[0]);
        command
            .args(&args.program[1..])
            .envs(
                ["RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"]
                    .map(|name| (name, &number)),
            )
            .envs(
                ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"]
                    .map(|name| (name, &size)),
            )
            .envs([("GROUP_RANK", "0"), ("GROUP_WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")])
            .env("MASTER_PORT", &port)
            .env(DIRECTORY_VARIABLE, directory)
            .envs(runtime.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            // A group of its own, so that a signal reaches what the program starts, and the terminal's does not come twice.
            .process_group(0);
        let started = start_rank(rank, command, [Echo::Stdout, Echo::Stderr]);
        ranks.push(started.map_err(|error| format!("{error} ({})", args.program[0].display()))?);
    }
    Ok(())
}

/// What makes a program use the host runtime: links to it under the names of CUDA's and NCCL's libraries, before all others.
fn host_variables(directory: &Path, ranks: usize) -> Outcome<Vec<(&'static str, std::ffi::OsString)>> {
    let (library, names) = host_library()?;
    let links = directory.join("lib");
    std::fs::create_dir(&links)?;
    for name in names.iter().map(PathBuf::as_path).chain([Path::new("libnvte_ep_host.so.1")]) {
        std::os::unix::fs::symlink(&library, links.join(name))?;
    }
    let before = std::env::var_os("LD_LIBRARY_PATH").filter(|value| !value.is_empty());
    let folders = std::iter::once(links).chain(before.iter().flat_map(std::env::split_paths));
    let path = std::env::join_paths(folders).map_err(|error| format!("LD_LIBRARY_PATH: {error}"))?;
    let mut variables = vec![
        ("NVTE_EP_RUNTIME", "host".into()),
        ("NVTE_EP_HOST_LIB", library.into_os_string()),
        ("LD_LIBRARY_PATH", path),
    ];
    // Programs select the device of their local rank.
    if std::env::var_os("NVTE_EP_HOST_DEVICES").is_none() {
        variables.push(("NVTE_EP_HOST_DEVICES", ranks.to_string().into()));
    }
    Ok(variables)
}

/// The host runtime's file, and the names under which programs look for it: those of the links that were built or
/// installed with it.
fn host_library() -> Outcome<(PathBuf, Vec<PathBuf>)> {
    let find = |places: &[&str]| -> Vec<PathBuf> {
        let folders = own_directories();
        let all = folders.iter().flat_map(|folder| places.iter().map(|place| folder.join(place)));
        all.filter(|path| path.exists()).collect()
    };
    let named = std::env::var_os("NVTE_EP_HOST_LIB").filter(|value| !value.is_empty()).map(PathBuf::from);
    // Cargo leaves it in deps/ when it builds this program alone; the other one is of an earlier build then.
    let built = find(&["libnvte_ep_host.so", "deps/libnvte_ep_host.so", "../lib/libnvte_ep_host.so.1"]);
    let newest = built.into_iter().max_by_key(|path| path.metadata().and_then(|data| data.modified()).ok());
    let library = named.or(newest).ok_or(
        "the host runtime, libnvte_ep_host.so, is not beside this program: build it (cargo build --release) or set \
         NVTE_EP_HOST_LIB",
    )?;
    let library =
        std::fs::canonicalize(&library).map_err(|error| format!("NVTE_EP_HOST_LIB: {}: {error}", library.display()))?;
    let links = find(&["host_runtime", "../lib/nvte_ep/host_runtime"]).into_iter().next();
    let links = links.ok_or("the folder host_runtime is not beside this program: build it (cargo build --release)")?;
    let names = std::fs::read_dir(links)?.map(|entry| Ok(entry?.file_name().into())).collect::<std::io::Result<_>>()?;
    Ok((library, names))
}

/// Waits for all ranks; gives what ended them before their time.
fn watch(args: &LaunchArgs, ranks: &mut [Rank]) -> Outcome<Option<Cause>> {
    let begin = Instant::now();
    let limit = args.timeout.map(Duration::from_secs);
    let mut ended_by: Option<(Cause, Instant)> = None;
    let mut terminated: Option<Instant> = None;
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        while let Some(signal) = next_signal() {
            ranks.iter().for_each(|rank| rank.signal_group(signal));
            if ![libc::SIGUSR1, libc::SIGUSR2].contains(&signal) {
                ended_by.get_or_insert((Cause::Signal(signal), Instant::now()));
            }
        }
        for (number, rank) in ranks.iter_mut().enumerate().filter(|(_, rank)| rank.ended.is_none()) {
            rank.look()?;
            if rank.ended.is_some_and(|status| !status.success()) {
                ended_by.get_or_insert((Cause::Failure(number), Instant::now()));
            }
        }
        if limit.is_some_and(|limit| begin.elapsed() > limit) {
            ended_by.get_or_insert((Cause::TimeOut, Instant::now()));
        }
        if let Some((cause, when)) = ended_by {
            let patience = if cause == Cause::TimeOut { Duration::ZERO } else { Duration::from_secs(args.grace) };
            match terminated {
                None if when.elapsed() >= patience => {
                    ranks.iter().for_each(|rank| rank.signal_group(libc::SIGTERM));
                    terminated = Some(Instant::now());
                }
                Some(then) if then.elapsed() > AFTER_TERM => ranks.iter_mut().for_each(Rank::kill_group),
                _ => {}
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(ended_by.map(|(cause, _)| cause))
}

fn code_of(status: Option<ExitStatus>) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.and_then(|status| status.code().or_else(|| status.signal().map(|signal| 128 + signal)));
    code.and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0).unwrap_or(1)
}

/// Says what became of the ranks, if not all is well, and gives the exit code.
fn report(ranks: &[Rank], cause: Option<Cause>) -> ExitCode {
    let Some(cause) = cause else { return ExitCode::SUCCESS };
    let (head, code) = match cause {
        Cause::Failure(first) => {
            let status = ranks[first].ended;
            (format!("rank {first} of {} failed first: it {}", ranks.len(), ending(status)), code_of(status))
        }
        Cause::Signal(signal) => (format!("ended by signal {signal}"), u8::try_from(128 + signal).unwrap_or(1)),
        Cause::TimeOut => ("the time was up".to_owned(), TIME_OUT),
    };
    eprintln!("nvte-ep launch: {head}");
    let others = (0..ranks.len()).filter(|rank| cause != Cause::Failure(*rank));
    let mut endings: Vec<(String, Vec<usize>)> = Vec::new();
    for rank in others {
        let text = ending(ranks[rank].ended);
        match endings.iter_mut().find(|(there, _)| *there == text) {
            Some((_, list)) => list.push(rank),
            None => endings.push((text, vec![rank])),
        }
    }
    for (text, list) in endings {
        let text = if list.len() > 1 { text.replacen("was ", "were ", 1) } else { text };
        eprintln!("  {} {text}", plural_ranks(&list));
    }
    ExitCode::from(code)
}
