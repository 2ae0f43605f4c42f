//! A rank as a process: started in a process group of its own, its output marked and kept, its end recorded.

use crate::Outcome;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use std::collections::VecDeque;
use std::fmt;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How many of a rank's last lines are kept.
const LINES: usize = 20;

type Lines = Arc<Mutex<VecDeque<String>>>;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

impl Ending {
    /// Whether it is the end of a program that is content.
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Code(0))
    }

    /// The exit code by which a shell tells of it.
    pub fn exit_code(self) -> u8 {
        let (Self::Code(code) | Self::Signal(code)) = self;
        let code = if matches!(self, Self::Signal(_)) { 128 + code } else { code };
        u8::try_from(code).unwrap_or(1)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}

/// A started process and what it has started.
pub struct Rank {
    child: Child,
    pid: Pid,
    /// How and when it ended, once it has.
    pub ended: Option<(Ending, Instant)>,
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
    /// Starts a rank that is killed when this process ends; `echo` says where its output and its errors go.
    pub fn start(rank: usize, mut command: Command, echo: [Echo; 2]) -> Outcome<Self> {
        let parent = rustix::process::getpid();
        // A group of its own, so that a signal reaches what the program starts, and the terminal's does not come twice.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
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
                Some(std::thread::spawn(move || pass_on(rank, stream, &lines, echo)))
            })
            .collect();
        Ok(Self { pid: Pid::from_child(&child), child, ended: None, lines, readers })
    }

    /// Its process ID, which is that of its process group too.
    pub const fn pid(&self) -> Pid {
        self.pid
    }

    /// How it ended, if it has.
    pub fn ending(&self) -> Option<Ending> {
        self.ended.map(|(ending, _)| ending)
    }

    /// Sees whether it has ended. The ended process is not reaped before [`Rank::end`], so that its number, and with it
    /// that of its group, belongs to nobody else.
    pub fn look(&mut self) -> std::io::Result<()> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if let Some(status) = rustix::process::waitid(WaitId::Pid(self.pid), options)? {
            let ending =
                status.exit_status().map(Ending::Code).or_else(|| status.terminating_signal().map(Ending::Signal));
            self.ended = ending.map(|ending| (ending, Instant::now()));
        }
        Ok(())
    }

    /// Sends a signal to it and what it has started.
    pub fn signal(&self, signal: Signal) {
        // Fails where the whole group has ended already.
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }

    /// Ends it and what it has started, and waits for its end.
    pub fn end(&mut self) {
        self.signal(Signal::KILL);
        if self.ended.is_none() {
            let _ = rustix::process::waitid(WaitId::Pid(self.pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            drop(self.look());
        }
        drop(self.child.wait());
    }

    /// Waits for the rest of its output, which ends with the process, unless it left one behind that holds the pipe.
    pub fn drain(&self) {
        let start = Instant::now();
        while self.readers.iter().any(|r| !r.is_finished()) && start.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its last lines.
    pub fn last_lines(&self) -> Vec<String> {
        self.lines.lock().map(|lines| lines.iter().cloned().collect()).unwrap_or_default()
    }
}

/// In the started process: asks to be killed when the parent's starting thread ends, however it ends.
fn die_with(parent: Pid) -> std::io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() != Some(parent) {
        return Err(std::io::ErrorKind::NotFound.into());
    }
    Ok(())
}

/// Why a line of a rank could not be written to standard output or standard error. A reader that has closed the pipe is
/// no error.
static LOST_OUTPUT: OnceLock<String> = OnceLock::new();

/// Why output of a rank was lost, if it was.
pub fn lost_output() -> Option<&'static str> {
    LOST_OUTPUT.get().map(String::as_str)
}

/// Reads a rank's stream to its end and passes it on, line by line. A carriage return ends a line too, so that progress
/// bars are seen while they move.
fn pass_on(rank: usize, mut stream: Box<dyn Read + Send>, lines: &Lines, echo: Echo) {
    let mut buffer = vec![0; 1 << 16];
    let mut line = Vec::new();
    let finish = |line: &mut Vec<u8>, end: u8| {
        write_line(rank, line, end, echo);
        if let Ok(mut lines) = lines.lock() {
            if lines.len() == LINES {
                lines.pop_front();
            }
            lines.push_back(String::from_utf8_lossy(line).into_owned());
        }
        line.clear();
    };
    while let Ok(bytes @ 1..) = stream.read(&mut buffer) {
        let piece = &buffer[..bytes];
        for (at, &byte) in piece.iter().enumerate() {
            match byte {
                b'\n' => finish(&mut line, b'\n'),
                // "\r\n" is one end of a line.
                b'\r' if piece.get(at + 1) == Some(&b'\n') => {}
                b'\r' => finish(&mut line, b'\r'),
                _ => line.push(byte),
            }
        }
    }
    if !line.is_empty() {
        finish(&mut line, b'\n');
    }
}

/// Writes one line, whole, with its rank before it.
fn write_line(rank: usize, line: &[u8], end: u8, echo: Echo) {
    let text = [format!("[rank {rank}] ").as_bytes(), line, &[end]].concat();
    let write = |to: &mut dyn Write| to.write_all(&text).and_then(|()| to.flush());
    let (name, written) = match echo {
        Echo::Silent => return,
        Echo::Stdout => ("standard output", write(&mut std::io::stdout().lock())),
        Echo::Stderr => ("standard error", write(&mut std::io::stderr().lock())),
    };
    // The stream is read on, or the rank would wait.
    if let Err(error) = written
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        let _ = LOST_OUTPUT.set(format!("cannot write to {name}: {error}"));
    }
}

/// Says a line on standard error. Unlike `eprintln!`, it does not panic where that is full or nobody reads it any more: the exit
/// code still tells.
pub fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Set by the signal handler: a bit for each signal that has come.
static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    SIGNALS.fetch_or(1 << signal, Ordering::Relaxed);
}

/// Collects these signals for [`next_signal`]. A signal that is ignored, as nohup ignores SIGHUP, stays ignored, here and
/// in the ranks.
pub fn on_signals(signals: &[Signal]) {
    for signal in signals {
        // SAFETY: the handler only stores a number.
        let before = unsafe { libc::signal(signal.as_raw(), on_signal as *const () as libc::sighandler_t) };
        if before == libc::SIG_IGN {
            // SAFETY: sets no handler.
            unsafe { libc::signal(signal.as_raw(), libc::SIG_IGN) };
        }
    }
}

/// Makes ended children wait for their parent also where whoever started this process ignored SIGCHLD: else they vanish,
/// and how they ended is lost.
pub fn keep_ended_children() {
    // SAFETY: sets no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// A signal that has come and was not asked for yet.
pub fn next_signal() -> Option<Signal> {
    let signal = SIGNALS.load(Ordering::Relaxed).trailing_zeros();
    SIGNALS.fetch_and(!1u64.checked_shl(signal).unwrap_or(0), Ordering::Relaxed);
    Signal::from_named_raw(signal.cast_signed())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream whose every read gives the next piece.
    struct Pieces(Vec<&'static [u8]>);

    impl Read for Pieces {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let Some(piece) = (!self.0.is_empty()).then(|| self.0.remove(0)) else { return Ok(0) };
            buffer[..piece.len()].copy_from_slice(piece);
            Ok(piece.len())
        }
    }

    fn kept(pieces: Vec<&'static [u8]>) -> Vec<String> {
        let lines = Lines::default();
        pass_on(0, Box::new(Pieces(pieces)), &lines, Echo::Silent);
        let lines = lines.lock().unwrap();
        lines.iter().cloned().collect()
    }

    #[test]
    fn last_lines_are_kept() {
        let text: String = (0..50).map(|i| format!("line {i}\n")).collect();
        let lines = Lines::default();
        pass_on(0, Box::new(std::io::Cursor::new(text)), &lines, Echo::Silent);
        let lines = lines.lock().unwrap();
        assert_eq!((lines.len(), lines[0].as_str(), lines[LINES - 1].as_str()), (LINES, "line 30", "line 49"));
    }

    #[test]
    fn lines_end_with_a_line_feed_or_a_carriage_return() {
        assert_eq!(kept(vec![b"a\r\nb\n\nc"]), ["a", "b", "", "c"]);
        assert_eq!(kept(vec![b"1 %\r2 %\r", b"3 %\r\r4 %", b" of 5\n"]), ["1 %", "2 %", "3 %", "", "4 % of 5"]);
    }

    #[test]
    fn endings_have_the_exit_codes_of_a_shell() {
        assert_eq!(Ending::Code(7).exit_code(), 7);
        assert_eq!(Ending::Signal(9).exit_code(), 137);
        assert_eq!(Ending::Signal(9).to_string(), "was ended by signal 9");
        assert!(Ending::Code(0).is_success() && !Ending::Code(1).is_success() && !Ending::Signal(15).is_success());
    }
}
