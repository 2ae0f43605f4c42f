//! Ranks: of an external launcher, or started and watched over by this process.

use crate::Outcome;
use crate::progress;
use crate::rendezvous::{Meeting, private_directory, remove};
use crate::report::RankReport;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A rank that an external launcher started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The launcher.
    pub launcher: &'static str,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Number of this rank on its machine.
    pub local_rank: usize,
    /// What names the job, the same for all its ranks.
    pub job: String,
}

/// The variables by which a launcher tells a process its place.
struct Launcher {
    name: &'static str,
    /// Rank, number of ranks; both are there for a process of this launcher.
    place: [&'static str; 2],
    /// Variables that have to be there too, or the process is not one of its ranks.
    needs: &'static [&'static str],
    local_rank: &'static [&'static str],
    /// Number of ranks on this machine.
    local_size: &'static [&'static str],
    /// Number of machines.
    hosts: &'static [&'static str],
    /// What names the job; those that are there count.
    job: &'static [&'static str],
}

/// In order: torchrun may be started by srun or mpirun, mpirun by srun; the innermost counts.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        place: ["RANK", "WORLD_SIZE"],
        needs: &["LOCAL_RANK"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        hosts: &["GROUP_WORLD_SIZE"],
        job: &["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    },
    Launcher {
        name: "mpirun",
        place: ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        needs: &[],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        hosts: &[],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"],
    },
    Launcher {
        name: "srun",
        place: ["SLURM_PROCID", "SLURM_NTASKS"],
        // A batch script has a rank too, but no step: there the command starts its own ranks.
        needs: &["SLURM_STEP_ID"],
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
        hosts: &["SLURM_STEP_NUM_NODES", "SLURM_NNODES"],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
    Launcher {
        name: "mpirun",
        place: ["PMI_RANK", "PMI_SIZE"],
        needs: &[],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        hosts: &[],
        job: &["PMI_JOBID", "PMI_ID_NAMESPACE", "HYDI_CONTROL_FD", "PMI_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

/// The place that a launcher gave this process, from its environment; none when nobody did.
///
/// An error for ranks on several machines and for variables that make no sense.
pub fn detect(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Place>, String> {
    let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
    let number = |name: &str| {
        get(name)
            .map(|value| value.parse::<usize>().map_err(|_| format!("{name} must be a number, got {value}")))
            .transpose()
    };
    let first = |names: &[&str]| names.iter().find_map(|name| number(name).transpose()).transpose();
    for launcher in &LAUNCHERS {
        let (Some(rank), Some(size)) = (number(launcher.place[0])?, number(launcher.place[1])?) else { continue };
        if launcher.needs.iter().any(|name| get(name).is_none()) {
            continue;
        }
        if rank >= size {
            let [rank_name, size_name] = launcher.place;
            return Err(format!("{rank_name} must be below {size_name} = {size}, got {rank}"));
        }
        let local_size = first(launcher.local_size)?.unwrap_or(size);
        let hosts = first(launcher.hosts)?.unwrap_or(1);
        if local_size != size || hosts > 1 {
            let name = launcher.name;
            return Err(format!(
                "{name} spread the {size} ranks over several machines, but nvte-ep run works on one machine: start it \
                 with all ranks on one"
            ));
        }
        let local_rank = first(launcher.local_rank)?.unwrap_or(rank);
        let job = launcher.job.iter().filter_map(|name| get(name));
        let job = std::iter::once(launcher.name.to_owned()).chain(job).collect::<Vec<_>>().join("-");
        return Ok(Some(Place { launcher: launcher.name, rank, size, local_rank, job }));
    }
    Ok(None)
}

/// Holds a started rank's [`Ticket`].
pub const TICKET_VARIABLE: &str = "NVTE_EP_RUN_TICKET";

/// What a started rank is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Its rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Where to meet.
    pub directory: PathBuf,
    /// SM cap; 0 = the library's choice.
    pub max_sms: usize,
}

/// Name of the file in which rank 0 writes where it is.
pub const PROGRESS_FILE: &str = "progress";

/// What the ranks are started with.
#[derive(Debug)]
pub struct Start {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of steps, for the progress bar.
    pub steps: usize,
    /// SM cap.
    pub max_sms: usize,
    /// Variables to set.
    pub variables: Vec<(String, String)>,
    /// Limit of the whole run.
    pub timeout: Duration,
    /// Pass on what the ranks print.
    pub verbose: bool,
}

/// The ranks end this long before their parent ends them, so that each can say where it was.
const GRACE: Duration = Duration::from_secs(3);
/// How long the others may go on when a rank has failed, to report what they saw of it.
const AFTER_FAILURE: Duration = Duration::from_secs(2);

/// Last lines of a rank's output that are kept.
const LINES: usize = 20;

type Lines = Arc<Mutex<VecDeque<String>>>;

/// A started process.
pub struct Rank {
    child: Child,
    /// How it ended, once it has.
    pub ended: Option<ExitStatus>,
    lines: Lines,
    readers: Vec<std::thread::JoinHandle<()>>,
}

/// Where a rank's output goes besides being kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Echo {
    /// Nowhere.
    Silent,
    /// To our own standard output.
    Stdout,
    /// To our own standard error.
    Stderr,
}

impl Rank {
    /// Sees whether it has ended.
    pub fn look(&mut self) -> std::io::Result<()> {
        self.ended = self.child.try_wait()?;
        Ok(())
    }

    /// Sends a signal to it and what it has started, where it leads a process group.
    pub fn signal_group(&self, signal: i32) {
        if self.ended.is_none() {
            // SAFETY: takes numbers. The process has not been waited for, so the group is its own.
            unsafe { libc::kill(-self.child.id().cast_signed(), signal) };
        }
    }

    /// Ends it and what it has started, where it leads a process group.
    pub fn kill_group(&mut self) {
        self.signal_group(libc::SIGKILL);
        self.kill();
    }

    /// Waits for the rest of its output, which ends with the process, unless it left one behind that holds the pipe.
    pub fn drain(&self) {
        let patience = Instant::now();
        while self.readers.iter().any(|r| !r.is_finished()) && patience.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill(&mut self) {
        if self.ended.is_none() {
            // Fails only if the rank has ended by itself.
            drop(self.child.kill());
            self.ended = self.child.wait().ok();
        }
    }
}

/// Set by the signal handler: a bit for each signal that has come.
static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    SIGNALS.fetch_or(1 << signal, Ordering::Relaxed);
}

/// Collects these signals for [`next_signal`].
pub fn on_signals(signals: &[i32]) {
    for signal in signals {
        // SAFETY: the handler only stores a number.
        unsafe { libc::signal(*signal, on_signal as *const () as libc::sighandler_t) };
    }
}

/// A signal that has come and was not asked for yet.
pub fn next_signal() -> Option<i32> {
    let signal = SIGNALS.load(Ordering::Relaxed).trailing_zeros();
    (signal < 64).then(|| {
        SIGNALS.fetch_and(!(1 << signal), Ordering::Relaxed);
        signal.cast_signed()
    })
}

/// Starts this program once a rank, watches over the ranks and returns their reports, or the signal that ended the run.
pub fn supervise(start: &Start) -> Outcome<Result<Vec<RankReport>, i32>> {
    on_signals(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP]);
    let directory = private_directory()?;
    let mut ranks = Vec::new();
    let outcome = start_all(start, &directory, &mut ranks).and_then(|()| watch(start, &directory, &mut ranks));
    ranks.iter_mut().for_each(Rank::kill);
    remove(&directory);
    outcome
}

fn start_all(start: &Start, directory: &std::path::Path, ranks: &mut Vec<Rank>) -> Outcome<()> {
    let program = std::env::current_exe()?;
    let echo = if start.verbose { Echo::Stderr } else { Echo::Silent };
    for rank in 0..start.ranks {
        let ticket = Ticket { rank, size: start.ranks, directory: directory.to_path_buf(), max_sms: start.max_sms };
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .envs(start.variables.iter().map(|(name, value)| (name, value)))
            .env(TICKET_VARIABLE, serde_json::to_string(&ticket)?)
            .stdin(Stdio::null());
        ranks.push(start_rank(rank, command, [echo; 2])?);
    }
    Ok(())
}

/// Starts a rank that ends with this process; `echo` says where its output and its errors go.
pub fn start_rank(rank: usize, mut command: Command, echo: [Echo; 2]) -> Outcome<Rank> {
    let parent = std::process::id();
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: between fork and exec only system calls that are safe there are made.
    unsafe { command.pre_exec(move || die_with(parent)) };
    let mut child = command.spawn().map_err(|error| format!("cannot start rank {rank}: {error}"))?;
    let lines = Lines::default();
    let streams: [Option<Box<dyn Read + Send>>; 2] =
        [child.stdout.take().map(|s| Box::new(s) as _), child.stderr.take().map(|s| Box::new(s) as _)];
    let readers = streams
        .into_iter()
        .zip(echo)
        .filter_map(|(stream, echo)| {
            let (stream, lines) = (stream?, Arc::clone(&lines));
            Some(std::thread::spawn(move || keep_lines(rank, stream, &lines, echo)))
        })
        .collect();
    Ok(Rank { child, ended: None, lines, readers })
}

/// In the started process: asks to be killed when the parent's starting thread ends, however it ends.
fn die_with(parent: u32) -> std::io::Result<()> {
    // SAFETY: takes numbers.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: takes nothing.
    if unsafe { libc::getppid() }.cast_unsigned() != parent {
        return Err(std::io::ErrorKind::NotFound.into());
    }
    Ok(())
}

fn keep_lines(rank: usize, stream: Box<dyn Read + Send>, lines: &Lines, echo: Echo) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        line.clear();
        // A closed output is no reason to stop reading: the rank would wait.
        drop(match echo {
            Echo::Silent => Ok(()),
            Echo::Stdout => writeln!(std::io::stdout(), "[rank {rank}] {text}"),
            Echo::Stderr => writeln!(std::io::stderr(), "[rank {rank}] {text}"),
        });
        if let Ok(mut lines) = lines.lock() {
            if lines.len() == LINES {
                lines.pop_front();
            }
            lines.push_back(text);
        }
    }
}

fn watch(start: &Start, directory: &std::path::Path, ranks: &mut [Rank]) -> Outcome<Result<Vec<RankReport>, i32>> {
    let begin = Instant::now();
    let bar = progress::bar(start.steps);
    let mut failed: Option<(usize, Instant)> = None;
    let mut out_of_time = false;
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        if let Some(signal) = next_signal() {
            bar.finish_and_clear();
            return Ok(Err(signal));
        }
        for (number, rank) in ranks.iter_mut().enumerate().filter(|(_, rank)| rank.ended.is_none()) {
            rank.look()?;
            if failed.is_none() && rank.ended.is_some_and(|status| !status.success()) {
                failed = Some((number, Instant::now()));
            }
        }
        out_of_time = begin.elapsed() > start.timeout + GRACE;
        if out_of_time || failed.is_some_and(|(_, when)| when.elapsed() > AFTER_FAILURE) {
            break;
        }
        if let Ok(text) = std::fs::read_to_string(directory.join(PROGRESS_FILE)) {
            progress::show(&bar, &text);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bar.finish_and_clear();
    let meeting = Meeting::fresh(directory.to_path_buf(), 0, start.ranks, Duration::ZERO);
    let mut reports = Vec::new();
    for (number, rank) in ranks.iter_mut().enumerate() {
        let by_itself = rank.ended.is_some();
        rank.kill();
        if by_itself {
            rank.drain();
        }
        let status = rank.ended;
        let mut report = meeting.report(number).unwrap_or_else(|| RankReport { rank: number, ..Default::default() });
        let complete = by_itself && status.is_some_and(|status| status.success());
        if report.error.is_none() && !(complete && report.outputs.iter().any(|output| output.elements > 0)) {
            report.error = Some(match failed {
                _ if by_itself => format!("{} without a report", ending(status)),
                _ if out_of_time => "still ran when the time was up; it was killed".to_owned(),
                Some((first, _)) => format!("was ended because rank {first} failed"),
                None => "was ended".to_owned(),
            });
        }
        if let (Some(error), true, Ok(lines)) = (&mut report.error, by_itself, rank.lines.lock()) {
            // What the rank said of its end is in its report already.
            let first = error.lines().next().unwrap_or_default();
            let lines: Vec<&str> = lines
                .iter()
                .map(String::as_str)
                .filter(|line| !error.contains(line.trim()) && !line.contains(first))
                .collect();
            if !lines.is_empty() {
                *error += &format!("\n  its last output:\n    {}", lines.join("\n    "));
            }
        }
        reports.push(report);
    }
    Ok(Ok(reports))
}

/// "rank 3" or "ranks 1, 3".
pub fn plural_ranks(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// How a process ended.
pub fn ending(status: Option<ExitStatus>) -> String {
    match status {
        Some(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("ended with exit code {code}"),
            (None, Some(signal)) => format!("was ended by signal {signal}"),
            (None, None) => "ended".into(),
        },
        None => "ended".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(pairs: &[(&str, &str)]) -> Result<Option<Place>, String> {
        detect(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn nobody() {
        assert_eq!(place(&[]), Ok(None));
        assert_eq!(place(&[("RANK", "0"), ("WORLD_SIZE", "2")]), Ok(None), "not torchrun without LOCAL_RANK");
        let batch_script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "5")];
        assert_eq!(place(&batch_script), Ok(None));
        assert_eq!(place(&[("PMI_RANK", ""), ("PMI_SIZE", "2")]), Ok(None));
    }

    #[test]
    fn each_launcher() {
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("PMIX_NAMESPACE", "prterun-host-77@1"),
            ("PMIX_RANK", "3"),
        ];
        let expected =
            Place { launcher: "mpirun", rank: 3, size: 4, local_rank: 3, job: "mpirun-prterun-host-77@1".into() };
        assert_eq!(place(&open_mpi), Ok(Some(expected)));
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_STEP_ID", "0"),
        ];
        let found = place(&torchrun).unwrap().unwrap();
        assert_eq!((found.launcher, found.rank, found.job.as_str()), ("torchrun", 1, "torchrun-29500-none"));
        let srun = [
            ("SLURM_PROCID", "2"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "2"),
            ("SLURM_JOB_ID", "12"),
            ("SLURM_STEP_ID", "3"),
            ("SLURM_NNODES", "1"),
        ];
        let found = place(&srun).unwrap().unwrap();
        assert_eq!((found.launcher, found.rank, found.size, found.job.as_str()), ("srun", 2, 4, "srun-12-3"));
        let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        assert_eq!(place(&hydra).unwrap().unwrap().local_rank, 1);
    }

    #[test]
    fn several_machines_and_nonsense_are_refused() {
        let two_hosts = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert!(place(&two_hosts).unwrap_err().contains("works on one machine"));
        let nodes = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_ID", "0"), ("SLURM_NNODES", "2")];
        assert!(place(&nodes).unwrap_err().contains("srun spread the 4 ranks over several machines"));
        assert_eq!(place(&[("PMI_RANK", "x"), ("PMI_SIZE", "2")]).unwrap_err(), "PMI_RANK must be a number, got x");
        let beyond = [("PMI_RANK", "2"), ("PMI_SIZE", "2")];
        assert_eq!(place(&beyond).unwrap_err(), "PMI_RANK must be below PMI_SIZE = 2, got 2");
    }

    #[test]
    fn last_lines_are_kept() {
        let text: String = (0..50).map(|i| format!("line {i}\n")).collect();
        let lines = Lines::default();
        keep_lines(0, Box::new(std::io::Cursor::new(text)), &lines, Echo::Silent);
        let lines = lines.lock().unwrap();
        assert_eq!((lines.len(), lines[0].as_str(), lines[LINES - 1].as_str()), (LINES, "line 30", "line 49"));
    }
}
