//! `nvte-ep launch`: starts any program once a rank, as mpirun and torchrun do.

use crate::Outcome;
use crate::args::LaunchArgs;
use crate::directory::PrivateDirectory;
use crate::guard::Guard;
use crate::nodes::{Failure, Nodes};
use crate::process::{Echo, Ending, Rank, lost_output, next_signal, on_signals, say};
use crate::supervise::plural_ranks;
use nvte_ep_core::diagnose::host_id;
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
    /// A rank of another machine failed, or its launcher.
    Elsewhere,
}

/// Starts the ranks, watches over them and returns the exit code. `runtime`: what the ranks shall use.
pub fn run(args: &LaunchArgs, runtime: RuntimeKind) -> Outcome<ExitCode> {
    on_signals(&SIGNALS);
    let directory = PrivateDirectory::new()?;
    let mut guard = Guard::start(directory.path())?;
    let host = (runtime == RuntimeKind::Host).then(host_id);
    let mut nodes = args.nodes.meet(args.ranks, host)?;
    let mut ranks = Vec::new();
    let outcome = start(args, runtime, directory.path(), nodes.as_ref(), &mut guard, &mut ranks)
        .and_then(|()| watch(args, &mut ranks, nodes.as_mut()));
    if let (Err(error), Some(nodes)) = (&outcome, &mut nodes) {
        nodes.tell_failure(format!("the launcher of machine {} failed: {error}", args.nodes.node_rank), 1);
    }
    ranks.iter_mut().for_each(Rank::end);
    ranks.iter().for_each(Rank::drain);
    let code = report(args, &ranks, outcome?, nodes.and_then(|nodes| nodes.failed));
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
    nodes: Option<&Nodes>,
    guard: &mut Guard,
    ranks: &mut Vec<Rank>,
) -> Outcome<()> {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    let port = port.map_err(|error| format!("cannot find a free port for MASTER_PORT: {error}"))?.port().to_string();
    let runtime = match runtime {
        RuntimeKind::Host => host_variables(directory, args)?,
        RuntimeKind::Cuda => vec![("NVTE_EP_RUNTIME", "cuda".into())],
    };
    let (address, port) = nodes.map_or(("127.0.0.1", port), |nodes| (nodes.address.as_str(), nodes.port.to_string()));
    let (local_size, size) = (args.ranks.to_string(), (args.ranks * args.nodes.nnodes).to_string());
    let (group, groups) = (args.nodes.node_rank.to_string(), args.nodes.nnodes.to_string());
    for local in 0..args.ranks {
        let rank = first_rank(args) + local;
        let (number, local) = (rank.to_string(), local.to_string());
        let mut command = Command::new(&args.program[0]);
        command
            .args(&args.program[1..])
            .envs(["RANK", "OMPI_COMM_WORLD_RANK"].map(|name| (name, &number)))
            .envs(["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"].map(|name| (name, &local)))
            .envs(["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"].map(|name| (name, &size)))
            .envs(["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"].map(|name| (name, &local_size)))
            .envs([("GROUP_RANK", &group), ("GROUP_WORLD_SIZE", &groups)])
            .env("MASTER_ADDR", address)
            .env("MASTER_PORT", &port)
            .envs(runtime.iter().map(|(name, value)| (name, value)));
        // The ranks of other machines do not see it.
        if nodes.is_none() {
            command.env(DIRECTORY_VARIABLE, directory);
        }
        let started = Rank::start(rank, command, [Echo::Stdout, Echo::Stderr]);
        let rank = started.map_err(|error| format!("{error} ({})", args.program[0].display()))?;
        guard.watch(rank.pid());
        ranks.push(rank);
    }
    Ok(())
}

/// What makes a program use the host runtime: links to it under the names of CUDA's and NCCL's libraries, before all others.
fn host_variables(directory: &Path, args: &LaunchArgs) -> Outcome<Vec<(&'static str, std::ffi::OsString)>> {
    let (library, names) = host_library()?;
    let ranks = args.ranks;
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
    // Each launcher stands for a machine.
    if args.nodes.nnodes > 1 && std::env::var_os("NVTE_EP_HOST_DOMAINS").is_none() {
        variables.push(("NVTE_EP_HOST_DOMAINS", ranks.to_string().into()));
    }
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
fn watch(args: &LaunchArgs, ranks: &mut [Rank], mut nodes: Option<&mut Nodes>) -> Outcome<End> {
    let begin = Instant::now();
    let limit = args.timeout.map(Duration::from_secs);
    let mut ended_by: Option<(Cause, Instant)> = None;
    let mut terminated: Option<Instant> = None;
    let mut failed = Vec::new();
    loop {
        let running = ranks.iter().any(|rank| rank.ended.is_none());
        let over = match &mut nodes {
            None => true,
            // After a failure nobody waits for the others.
            Some(nodes) => ended_by.is_some() || (!running && nodes.all_done()),
        };
        if !running && over {
            break;
        }
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
        if let Some(nodes) = &mut nodes {
            nodes.poll();
            if nodes.failed.is_some() {
                ended_by.get_or_insert((Cause::Elsewhere, Instant::now()));
            }
            if let Some((cause, _)) = ended_by {
                let (text, code) =
                    why(args, cause, failed.first().and_then(|&local| Some((local, ranks[local].ending()?))));
                nodes.tell_failure(text, code);
            }
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

/// Number of this machine's first rank.
const fn first_rank(args: &LaunchArgs) -> usize {
    args.nodes.node_rank * args.ranks
}

/// What the other machines are told of the end of this one's ranks.
fn why(args: &LaunchArgs, cause: Cause, failed: Option<(usize, Ending)>) -> (String, u8) {
    let node = args.nodes.node_rank;
    match (cause, failed) {
        (Cause::Signal(signal), _) => {
            let signal = signal.as_raw();
            (format!("machine {node} was ended by signal {signal}"), Ending::Signal(signal).exit_code())
        }
        (Cause::Failure, Some((local, ending))) => (
            format!("rank {} on machine {node} failed first: it {ending}", first_rank(args) + local),
            ending.exit_code(),
        ),
        (Cause::TimeOut, _) => (format!("the time of machine {node} was up"), TIME_OUT),
        (Cause::Failure, None) | (Cause::Elsewhere, _) => (format!("machine {node} ended"), 1),
    }
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
fn report(args: &LaunchArgs, ranks: &[Rank], end: End, elsewhere: Option<Failure>) -> u8 {
    let Some((cause, failed)) = end else { return 0 };
    let failed: Vec<_> =
        failed.into_iter().filter_map(|rank| Some((rank, ranks[rank].ended?.0, ranks[rank].ended?.1))).collect();
    let first = first_failures(&failed);
    let (begin, size) = (first_rank(args), args.ranks * args.nodes.nnodes);
    let (head, code) = match (cause, &first[..]) {
        (Cause::Elsewhere, _) => {
            let Failure { text, code } = elsewhere.unwrap_or(Failure { text: "another machine ended".into(), code: 1 });
            (text, code)
        }
        (Cause::Signal(signal), _) => {
            let signal = signal.as_raw();
            (format!("ended by signal {signal}"), Ending::Signal(signal).exit_code())
        }
        (Cause::Failure, [(rank, ending)]) => {
            (format!("rank {} of {size} failed first: it {ending}", begin + rank), ending.exit_code())
        }
        (Cause::Failure, [(_, ending), ..]) => {
            let mut together: Vec<usize> = first.iter().map(|(rank, _)| begin + rank).collect();
            together.sort_unstable();
            let text = "failed at the same time, so their messages have to tell which is the cause";
            (format!("{} of {size} {text}", plural_ranks(&together)), ending.exit_code())
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
            Some((_, list)) => list.push(begin + rank),
            None => endings.push((ending, vec![begin + rank])),
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
