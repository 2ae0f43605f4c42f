//! How the ranks of one machine meet: small files in a directory that only this user may enter.
//!
//! Every file is written under another name and renamed, so a reader sees it whole or not at all. A directory named
//! after a launcher's job may hold files of an earlier job that had the same name, so nobody trusts a file for being
//! there: each rank offers a random word of its own, rank 0 answers with the unique id and the words it saw, and a rank
//! takes only an answer that holds its word; rank 0 goes on only when every rank has returned rank 0's own word.

use crate::Outcome;
use crate::device::ID_BYTES;
use crate::directory::remove;
use crate::report::RankReport;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A random word of 128 bits, in hexadecimal.
fn random_word() -> Outcome<String> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| format!("no random bytes: {error}"))?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// Rank 0's answer.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// Rank 0's word, which names this run.
    run: String,
    /// The unique id.
    id: Vec<u8>,
    /// The words of ranks 1 and up, as far as they have come.
    words: Vec<Option<String>>,
}

/// One rank's view of the directory.
#[derive(Debug)]
pub struct Rendezvous {
    directory: PathBuf,
    rank: usize,
    size: usize,
    /// How long to wait for the others.
    limit: Duration,
    /// Whether the directory belongs to a launcher's job, so that nobody but the ranks removes it.
    shared: bool,
    /// The run's name, once known; part of the names of what is written after the exchange.
    run: OnceLock<String>,
}

const POLL: Duration = Duration::from_millis(5);

impl Rendezvous {
    /// In a directory that was made for this run: it holds nothing else.
    pub fn fresh(directory: PathBuf, rank: usize, size: usize, limit: Duration) -> Self {
        Self { directory, rank, size, limit, shared: false, run: OnceLock::from("run".to_owned()) }
    }

    /// In a directory that may hold files of earlier runs.
    pub fn shared(directory: PathBuf, rank: usize, size: usize, limit: Duration) -> Self {
        Self { directory, rank, size, limit, shared: true, run: OnceLock::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn write(&self, name: &str, text: &str) -> Outcome<()> {
        let target = self.path(name);
        let partial = self.path(&format!(".{name}-{}", std::process::id()));
        let written = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, &target));
        Ok(written.map_err(|error| format!("cannot write {}: {error}", target.display()))?)
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.path(name)).ok()
    }

    fn wait<T>(&self, what: &str, mut look: impl FnMut() -> Outcome<Option<T>>) -> Outcome<T> {
        let start = Instant::now();
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if start.elapsed() > self.limit {
                let (seconds, directory) = (self.limit.as_secs(), self.directory.display());
                return Err(format!("waited {seconds} s for {what} in {directory}").into());
            }
            std::thread::sleep(POLL);
        }
    }

    /// Rank 0 makes the unique id, the others get it.
    pub fn exchange(&self, make: impl FnOnce() -> Outcome<[u8; ID_BYTES]>) -> Outcome<[u8; ID_BYTES]> {
        let word = random_word()?;
        if self.rank > 0 {
            self.write(&format!("word-{}", self.rank), &word)?;
            let (run, id) = self.wait("rank 0", || {
                let answer = self.read("answer").and_then(|text| serde_json::from_str::<Answer>(&text).ok());
                Ok(answer.and_then(|answer| {
                    let mine = answer.words.get(self.rank - 1).is_some_and(|seen| seen.as_deref() == Some(&word));
                    if mine { Some((answer.run, answer.id.try_into().ok()?)) } else { None }
                }))
            })?;
            self.write(&format!("seen-{}", self.rank), &run)?;
            let _ = self.run.set(run);
            return Ok(id);
        }
        let id = make()?;
        let mut last: Option<Vec<Option<String>>> = None;
        self.wait("the other ranks", || {
            let words: Vec<_> = (1..self.size).map(|rank| self.read(&format!("word-{rank}"))).collect();
            if last.as_ref() != Some(&words) {
                let answer = Answer { run: word.clone(), id: id.to_vec(), words: words.clone() };
                self.write("answer", &serde_json::to_string(&answer)?)?;
                last = Some(words);
            }
            let all = (1..self.size).all(|rank| self.read(&format!("seen-{rank}")).as_deref() == Some(&word));
            Ok(all.then_some(()))
        })?;
        let _ = self.run.set(word);
        Ok(id)
    }

    fn named(&self, what: &str) -> Option<String> {
        self.run.get().map(|run| format!("{what}-{run}"))
    }

    /// Leaves this rank's report for whoever prints. Before ranks of a shared directory have met, nobody would find it.
    pub fn publish(&self, report: &RankReport) -> Outcome<()> {
        if let Some(name) = self.named(&format!("result-{}", self.rank)) {
            self.write(&name, &serde_json::to_string(report)?)?;
        }
        match (&report.error, self.named("failed")) {
            (Some(error), Some(name)) => self.write(&name, &format!("rank {} failed: {error}", self.rank)),
            _ => Ok(()),
        }
    }

    /// The message of a rank that failed.
    pub fn failure(&self) -> Option<String> {
        self.read(&self.named("failed")?)
    }

    /// The report that `rank` published.
    pub fn report(&self, rank: usize) -> Option<RankReport> {
        serde_json::from_str(&self.read(&self.named(&format!("result-{rank}"))?)?).ok()
    }

    /// Waits for the reports of all ranks.
    pub fn collect(&self) -> Outcome<Vec<RankReport>> {
        (0..self.size).map(|rank| self.wait(&format!("the report of rank {rank}"), || Ok(self.report(rank)))).collect()
    }

    /// The end after a failure under a launcher: leaves the other ranks, which look ten times a second, the time to read
    /// of it, and removes the directory. Started ranks leave that to their parent.
    pub fn abandon(&self) {
        if self.shared {
            std::thread::sleep(Duration::from_millis(300));
            remove(&self.directory);
        }
    }

    /// The end under a launcher: rank 0 tells whether all is well and removes the directory, the others learn it, so
    /// that no rank ends, and has its launcher end the others, before rank 0 has printed.
    pub fn conclude(&self, passed: Option<bool>) -> Outcome<bool> {
        let Some(done) = self.named("done") else { return Ok(false) };
        if let Some(passed) = passed {
            self.write(&done, if passed { "passed" } else { "failed" })?;
            let start = Instant::now();
            let gone = |rank| self.named(&format!("gone-{rank}")).is_some_and(|name| self.path(&name).exists());
            while !(1..self.size).all(gone) && start.elapsed() < Duration::from_secs(3) {
                std::thread::sleep(POLL);
            }
            remove(&self.directory);
            return Ok(passed);
        }
        let passed = self.wait("rank 0's verdict", || Ok(self.read(&done)))? == "passed";
        if let Some(name) = self.named(&format!("gone-{}", self.rank)) {
            self.write(&name, "")?;
        }
        Ok(passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn ranks(directory: &Path, size: usize) -> Vec<Rendezvous> {
        let limit = Duration::from_secs(20);
        (0..size).map(|rank| Rendezvous::shared(directory.to_path_buf(), rank, size, limit)).collect()
    }

    #[test]
    fn all_ranks_get_the_id_of_this_run_whatever_lies_around() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        for round in 0..3u8 {
            // Files of the round before are still there, and some are replaced by rubbish.
            std::fs::write(directory.join("word-2"), "stale").unwrap();
            if round == 1 {
                std::fs::write(directory.join("answer"), "{").unwrap();
            }
            let all = ranks(directory, 3);
            std::thread::scope(|scope| {
                let others: Vec<_> = all[1..]
                    .iter()
                    .map(|rendezvous| {
                        scope.spawn(move || {
                            std::thread::sleep(Duration::from_millis(30 * rendezvous.rank as u64));
                            rendezvous.exchange(|| Err("only rank 0 makes the id".into())).unwrap()
                        })
                    })
                    .collect();
                let id = all[0].exchange(|| Ok([round; ID_BYTES])).unwrap();
                assert!(others.into_iter().all(|other| other.join().unwrap() == id));
                assert_eq!(id, [round; ID_BYTES]);
            });
            for rendezvous in &all {
                assert!(rendezvous.report(0).is_none() && rendezvous.failure().is_none());
            }
            for (rank, rendezvous) in all.iter().enumerate() {
                let error = (rank == 1).then(|| "broken".to_owned());
                rendezvous.publish(&RankReport { rank, error, ..RankReport::default() }).unwrap();
            }
            assert_eq!(all[2].failure().as_deref(), Some("rank 1 failed: broken"));
            let reports = all[0].collect().unwrap();
            assert_eq!(reports.iter().map(|report| report.rank).collect::<Vec<_>>(), [0, 1, 2]);
        }
    }

    #[test]
    fn waiting_ends() {
        let directory = tempfile::tempdir().unwrap();
        let alone = Rendezvous::shared(directory.path().to_owned(), 0, 2, Duration::from_millis(30));
        assert!(alone.exchange(|| Ok([0; ID_BYTES])).unwrap_err().to_string().contains("the other ranks"));
    }
}
