//! `nvte-ep launch`: starts any program once a rank, as mpirun and torchrun do on one machine.

use crate::Outcome;
use crate::args::LaunchArgs;
use crate::directory::PrivateDirectory;
use crate::guard::Guard;
use crate::process::{Echo, Ending, Rank, lost_output, next_signal, on_signals, say};
use crate::supervise::plural_ranks;
use nvte_ep_core::env::RuntimeKind;
use nvte_ep_core::sys::own_directories;
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Names a directory of the run's own, in which ranks may leave files for each other.
pub const DIRECTORY_VARIABLE: &str = "NVTE_EP_LAUNCH_DIRECTORY";
/// Between SIGTERM and SIGKILL.
const AFTER_TERM: Duration = Duration::from_secs(2);
/// Exit code where the time was up, that of timeout(1).
const TIME_OUT: u8 = 124;
/// Ranks that fail within this time of each other: whichever is seen first need not be the cause.
const TOGETHER: Duration = Duration::from_millis(250);
/// Signals that are passed on to the ranks; all but the last two also end the run.
const SIGNALS: [Signal; 6] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// Why the ranks that still run have to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// A rank failed.
    Failure,
    Signal(Signal),
    TimeOut,
}

/// Starts the ranks, watches over them and returns the exit code. `runtime`: what the ranks shall use.
pub fn run(args: &LaunchArgs, runtime: RuntimeKind) -> Outcome<ExitCode> {
    on_signals(&SIGNALS);
    let directory = PrivateDirectory::new()?;
    let mut guard = Guard::start(directory.path())?;
    let mut ranks = Vec::new();
    let outcome = start(args, runtime, directory.path(), &mut guard, &mut ranks).and_then(|()| watch(args, &mut ranks));
    ranks.iter_mut().for_each(Rank::end);
    ranks.iter().for_each(Rank::drain);
    let code = report(&ranks, outcome?);
    Ok(match lost_output() {
        Some(error) => {
            say(format_args!("nvte-ep launch: {error}"));
            if code == 0 { ExitCode::FAILURE } else { ExitCode::from(code) }
        }
        None => ExitCode::from(code),
    })
}

fn start(
    args: &LaunchArgs,
    runtime: RuntimeKind,
    directory: &Path,
    guard: &mut Guard,
    ranks: &mut Vec<Rank>,
) -> Outcome<()> {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    let port = port.map_err(|error| format!("cannot find a free port for MASTER_PORT: {error}"))?.port().to_string();
    let runtime = match runtime {
        RuntimeKind::Host => host_variables(directory, args.ranks)?,
        RuntimeKind::Cuda => vec![("NVTE_EP_RUNTIME", "cuda".into())],
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
            .envs(runtime.iter().map(|(name, value)| (name, value)));
        let started = Rank::start(rank, command, [Echo::Stdout, Echo::Stderr]);
        let rank = started.map_err(|error| format!("{error} ({})", args.program[0].display()))?;
        guard.watch(rank.pid());
        ranks.push(rank);
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
    if links.as_os_str().as_encoded_bytes().contains(&b':') {
        let folder = directory.parent().unwrap_or(directory).display();
        return Err(format!(
            "the folder of temporary files (TMPDIR), {folder}, has a colon in its name, which a folder in LD_LIBRARY_PATH \
             must not have: set TMPDIR to another folder"
        )
        .into());
    }
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

/// What ended the run before its time, and the ranks that failed by themselves, in the order in which that was seen.
type End = Option<(Cause, Vec<usize>)>;

/// Waits for all ranks.
fn watch(args: &LaunchArgs, ranks: &mut [Rank]) -> Outcome<End> {
    let begin = Instant::now();
    let limit = args.timeout.map(Duration::from_secs);
    let mut ended_by: Option<(Cause, Instant)> = None;
    let mut terminated: Option<Instant> = None;
    let mut failed = Vec::new();
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        while let Some(signal) = next_signal() {
            ranks.iter().for_each(|rank| rank.signal(signal));
            if ![Signal::USR1, Signal::USR2].contains(&signal) {
                ended_by.get_or_insert((Cause::Signal(signal), Instant::now()));
            }
        }
        for (number, rank) in ranks.iter_mut().enumerate().filter(|(_, rank)| rank.ended.is_none()) {
            rank.look()?;
            if rank.ending().is_some_and(|ending| !ending.is_success()) && terminated.is_none() {
                ended_by.get_or_insert((Cause::Failure, Instant::now()));
                failed.push(number);
            }
        }
        if limit.is_some_and(|limit| begin.elapsed() > limit) {
            ended_by.get_or_insert((Cause::TimeOut, Instant::now()));
        }
        if let Some((cause, when)) = ended_by {
            let grace = if cause == Cause::TimeOut { Duration::ZERO } else { Duration::from_secs(args.grace) };
            match terminated {
                None if when.elapsed() >= grace => {
                    ranks.iter().for_each(|rank| rank.signal(Signal::TERM));
                    terminated = Some(Instant::now());
                }
                Some(then) if then.elapsed() > AFTER_TERM => ranks.iter().for_each(|rank| rank.signal(Signal::KILL)),
                _ => {}
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(ended_by.map(|(cause, _)| (cause, failed)))
}

/// Of the failed ranks, those that can be the first: the one that was seen first and those that failed together with it.
/// Among these, a rank that a signal other than SIGABRT ended comes before all others: nobody ends like that because a
/// peer has failed.
fn first_failures(failed: &[(usize, Ending, Instant)]) -> Vec<(usize, Ending)> {
    let Some(first) = failed.iter().map(|(.., when)| *when).min() else { return Vec::new() };
    let together =
        failed.iter().filter(|(.., when)| *when - first <= TOGETHER).map(|(rank, ending, _)| (*rank, *ending));
    let (by_signal, others): (Vec<_>, Vec<_>) =
        together.partition(|(_, ending)| matches!(ending, Ending::Signal(signal) if *signal != libc::SIGABRT));
    if by_signal.is_empty() { others } else { by_signal }
}

/// Says what became of the ranks, if not all is well, and gives the exit code.
fn report(ranks: &[Rank], end: End) -> u8 {
    let Some((cause, failed)) = end else { return 0 };
    let failed: Vec<_> =
        failed.into_iter().filter_map(|rank| Some((rank, ranks[rank].ended?.0, ranks[rank].ended?.1))).collect();
    let first = first_failures(&failed);
    let (head, code) = match (cause, &first[..]) {
        (Cause::Signal(signal), _) => {
            let signal = signal.as_raw();
            (format!("ended by signal {signal}"), Ending::Signal(signal).exit_code())
        }
        (Cause::Failure, [(rank, ending)]) => {
            (format!("rank {rank} of {} failed first: it {ending}", ranks.len()), ending.exit_code())
        }
        (Cause::Failure, [(_, ending), ..]) => {
            let mut together: Vec<usize> = first.iter().map(|(rank, _)| *rank).collect();
            together.sort_unstable();
            let text = "failed at the same time, so their messages have to tell which is the cause";
            (format!("{} of {} {text}", plural_ranks(&together), ranks.len()), ending.exit_code())
        }
        (Cause::TimeOut, _) | (Cause::Failure, []) => ("the time was up".to_owned(), TIME_OUT),
    };
    say(format_args!("nvte-ep launch: {head}"));
    let told = if cause == Cause::Failure && first.len() == 1 { Some(first[0].0) } else { None };
    let mut endings: Vec<(Ending, Vec<usize>)> = Vec::new();
    for (rank, ending) in ranks.iter().enumerate().filter_map(|(number, rank)| Some((number, rank.ending()?))) {
        if told == Some(rank) {
            continue;
        }
        match endings.iter_mut().find(|(there, _)| *there == ending) {
            Some((_, list)) => list.push(rank),
            None => endings.push((ending, vec![rank])),
        }
    }
    for (ending, list) in endings {
        let text = ending.to_string();
        let text = if list.len() > 1 { text.replacen("was ", "were ", 1) } else { text };
        say(format_args!("  {} {text}", plural_ranks(&list)));
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_failed_first() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let first = |failed: &[(usize, Ending, Instant)]| -> Vec<usize> {
            first_failures(failed).into_iter().map(|(rank, _)| rank).collect()
        };
        let (error, abort, killed) = (Ending::Code(3), Ending::Signal(libc::SIGABRT), Ending::Signal(9));
        assert_eq!(first(&[(1, error, at(0)), (0, error, at(500))]), [1]);
        assert_eq!(first(&[(0, error, at(0)), (1, error, at(20))]), [0, 1]);
        assert_eq!(first(&[(0, abort, at(0)), (1, abort, at(20)), (2, error, at(30))]), [0, 1, 2]);
        assert_eq!(first(&[(0, error, at(0)), (2, killed, at(10)), (1, abort, at(20))]), [2]);
        assert_eq!(first(&[(0, error, at(0)), (1, killed, at(2000))]), [0]);
    }
}
