//! The ranks of `run` and `bench`, started and supervised by this process.

use crate::Outcome;
use crate::directory::PrivateDirectory;
use crate::guard::Guard;
use crate::process::{Echo, Ending, Rank, next_signal, on_signals};
use crate::progress;
use crate::rendezvous::Rendezvous;
use crate::report::RankReport;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

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

/// Starts this program once a rank, waits for the ranks and returns their reports, or the signal that ended the run.
pub fn supervise(start: &Start) -> Outcome<Result<Vec<RankReport>, Signal>> {
    on_signals(&[Signal::INT, Signal::TERM, Signal::HUP]);
    let directory = PrivateDirectory::new()?;
    let mut guard = Guard::start(directory.path())?;
    let mut ranks = Vec::new();
    let outcome = start_all(start, directory.path(), &mut guard, &mut ranks)
        .and_then(|()| watch(start, directory.path(), &mut ranks));
    ranks.iter_mut().for_each(Rank::end);
    outcome
}

fn start_all(start: &Start, directory: &Path, guard: &mut Guard, ranks: &mut Vec<Rank>) -> Outcome<()> {
    let program = std::env::current_exe()?;
    let echo = if start.verbose { Echo::Stderr } else { Echo::Silent };
    for rank in 0..start.ranks {
        let ticket = Ticket { rank, size: start.ranks, directory: directory.to_path_buf(), max_sms: start.max_sms };
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .envs(start.variables.iter().map(|(name, value)| (name, value)))
            .env(TICKET_VARIABLE, serde_json::to_string(&ticket)?);
        let rank = Rank::start(rank, command, [echo; 2])?;
        guard.watch(rank.pid());
        ranks.push(rank);
    }
    Ok(())
}

fn watch(start: &Start, directory: &Path, ranks: &mut [Rank]) -> Outcome<Result<Vec<RankReport>, Signal>> {
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
            if failed.is_none() && rank.ending().is_some_and(|ending| !ending.is_success()) {
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
    let rendezvous = Rendezvous::fresh(directory.to_path_buf(), 0, start.ranks, Duration::ZERO);
    let mut reports = Vec::new();
    for (number, rank) in ranks.iter_mut().enumerate() {
        let by_itself = rank.ending();
        rank.end();
        let mut report = rendezvous.report(number).unwrap_or_else(|| RankReport { rank: number, ..Default::default() });
        let substance = !report.cases.is_empty() || report.outputs.iter().any(|output| output.elements > 0);
        if report.error.is_none() && !(substance && by_itself.is_some_and(Ending::is_success)) {
            report.error = Some(match (by_itself, failed) {
                (Some(ending), _) => format!("{ending} without a report"),
                (None, _) if out_of_time => "still ran when the time was up; it was killed".to_owned(),
                (None, Some((first, _))) => format!("was ended because rank {first} failed"),
                (None, None) => "was ended".to_owned(),
            });
        }
        if let (Some(error), Some(_)) = (&mut report.error, by_itself) {
            rank.drain();
            // What the rank said of its end is in its report already.
            let first = error.lines().next().unwrap_or_default().to_owned();
            let mut lines = rank.last_lines();
            lines.retain(|line| !error.contains(line.trim()) && !line.contains(&first));
            if !lines.is_empty() {
                *error += &format!("\n  its last output:\n    {}", lines.join("\n    "));
            }
        }
        reports.push(report);
    }
    Ok(Ok(reports))
}

/// "rank 3", "ranks 1, 3" or "ranks 0-2, 5", of ranks in their order.
pub fn plural_ranks(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|before, after| before + 1 == *after);
    let list = runs.map(|run| match run {
        [first, .., last] if run.len() > 2 => format!("{first}-{last}"),
        run => run.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    });
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::plural_ranks;

    #[test]
    fn ranks_in_a_row_are_a_range() {
        let all: Vec<usize> = (0..65).collect();
        assert_eq!(plural_ranks(&all), "ranks 0-64");
        assert_eq!(plural_ranks(&[3]), "rank 3");
        assert_eq!(plural_ranks(&[0, 1]), "ranks 0, 1");
        assert_eq!(plural_ranks(&[0, 1, 2, 5, 7, 8, 9]), "ranks 0-2, 5, 7-9");
    }
}
