//! A small process that outlives its parent: when the parent is killed, so that it cannot clean up itself, the guard kills
//! the ranks' process groups and removes the run's directory.

use crate::Outcome;
use crate::directory;
use rustix::process::{Pid, Signal};
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Set in the guard: the run's directory.
pub const GUARD_VARIABLE: &str = "NVTE_EP_LAUNCH_GUARD";
/// What the parent writes at its regular end.
const DONE: &str = "done";

/// The guard, as its parent sees it.
#[derive(Debug)]
pub struct Guard {
    child: Child,
}

impl Guard {
    /// Starts it.
    pub fn start(directory: &Path) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(GUARD_VARIABLE, directory).stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        Ok(Self { child: command.spawn().map_err(|error| format!("cannot start the guard process: {error}"))? })
    }

    fn write(&mut self, line: &str) {
        if let Some(pipe) = &mut self.child.stdin {
            // Fails only if somebody has killed the guard; the run goes on without it.
            drop(pipe.write_all(format!("{line}\n").as_bytes()));
        }
    }

    /// From now on it watches over this process group too.
    pub fn watch(&mut self, group: Pid) {
        self.write(&group.as_raw_nonzero().to_string());
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.write(DONE);
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}

/// The guard process: reads the process groups until its parent is done, or dead.
pub fn main(directory: PathBuf) {
    crate::process::on_signals(&[Signal::INT, Signal::TERM, Signal::HUP]);
    let mut groups = Vec::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        if line == DONE {
            return;
        }
        groups.extend(line.parse().ok().and_then(Pid::from_raw));
    }
    for group in groups {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    directory::remove(&directory);
}
