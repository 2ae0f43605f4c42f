//! Logging, to stderr. A C++ program installs no `tracing` subscriber, so the one below is installed here, unless a Rust
//! program around us has installed its own.
//!
//! It is not tracing-subscriber's: messages come from destructors that run at the end of a thread or of the process too,
//! where a buffer of the thread would be gone. A line is made first and written in one piece, so that lines of several
//! ranks do not mix.

use crate::env::LOG;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Where nothing is said of the level, messages of one kind, which are those of one place in the code, are at least so far
/// apart.
const BETWEEN: Duration = Duration::from_secs(60);

/// Events that stand on stderr already.
const REPORTED: &str = "nvte_ep::reported";

/// Installs the subscriber that `NVTE_EP_LOG` asks for, once.
pub(crate) fn start() {
    static START: std::sync::Once = std::sync::Once::new();
    START.call_once(|| {
        let value = std::env::var(LOG.name).ok().filter(|value| !value.is_empty());
        let level = value.as_deref().map(str::parse::<LevelFilter>);
        let lines = match level {
            None => Lines::new(LevelFilter::WARN, Some(BETWEEN), to_stderr),
            Some(Ok(level)) => Lines::new(level, None, to_stderr),
            Some(Err(_)) => {
                let value = value.unwrap_or_default();
                let text = "takes off, error, warn, info, debug or trace";
                to_stderr(&format!("nvte_ep: {} {text}; {value:?} is read as info\n", LOG.name));
                Lines::new(LevelFilter::INFO, None, to_stderr)
            }
        };
        // An error means that the program has a subscriber: then that one serves.
        let _ = tracing::subscriber::set_global_default(lines);
    });
}

/// Says `text` on stderr, whatever the level of the log: for what must not be silent, as an end that nobody asked for or a
/// promise that is not kept.
pub(crate) fn report(text: &str) {
    to_stderr(&format!("nvte_ep: {text}\n"));
    // For a subscriber of the program's.
    tracing::error!(target: REPORTED, "{text}");
}

fn to_stderr(line: &str) {
    // A closed stderr is no reason to fail.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// What was written of one kind of message.
#[derive(Debug)]
struct Kind {
    written: Instant,
    left_out: u64,
}

/// Writes each event as a line.
#[derive(Debug)]
struct Lines {
    level: LevelFilter,
    between: Option<Duration>,
    write: fn(&str),
    kinds: Mutex<FxHashMap<Identifier, Kind>>,
}

impl Lines {
    fn new(level: LevelFilter, between: Option<Duration>, write: fn(&str)) -> Self {
        Self { level, between, write, kinds: Mutex::default() }
    }

    /// How many messages of this kind were left out before this one; none if this one is to be left out too.
    fn admit(&self, kind: Identifier) -> Option<u64> {
        let Some(between) = self.between else { return Some(0) };
        let mut kinds = self.kinds.lock();
        let Some(known) = kinds.get_mut(&kind) else {
            kinds.insert(kind, Kind { written: Instant::now(), left_out: 0 });
            return Some(0);
        };
        if known.written.elapsed() < between {
            known.left_out += 1;
            return None;
        }
        known.written = Instant::now();
        Some(std::mem::take(&mut known.left_out))
    }

    fn line(&self, metadata: &Metadata<'_>, left_out: u64, record: impl FnOnce(&mut Line)) {
        let level = match *metadata.level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let mut line = Line { message: String::new(), fields: String::new() };
        record(&mut line);
        let Line { message, fields } = line;
        let mut text = format!("nvte_ep: {level}: {message}");
        if !fields.is_empty() {
            let _ = write!(text, " [{}]", fields.trim_start());
        }
        if left_out > 0 {
            let _ = write!(text, " ({left_out} more of this kind since the last one)");
        }
        text.push('\n');
        (self.write)(&text);
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level && metadata.target() != REPORTED
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.line(span.metadata(), 0, |line| {
            line.message.push_str(span.metadata().name());
            span.record(line);
        });
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        if let Some(left_out) = self.admit(event.metadata().callsite()) {
            self.line(event.metadata(), left_out, |line| event.record(line));
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    thread_local! {
        static WRITTEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn keep(line: &str) {
        WRITTEN.with_borrow_mut(|lines| lines.push(line.to_owned()));
    }

    fn with(level: LevelFilter, between: Option<Duration>, body: impl FnOnce()) -> Vec<String> {
        tracing::subscriber::with_default(Lines::new(level, between, keep), body);
        WRITTEN.take()
    }

    fn warn(number: u32) {
        tracing::warn!(target: "nvte_ep", device = 3, "number {number}");
    }

    #[test]
    fn each_message_is_one_line_written_at_once() {
        let lines = with(LevelFilter::WARN, None, || {
            warn(1);
            warn(2);
            tracing::error!(target: "nvte_ep", "it failed");
            tracing::info!(target: "nvte_ep", "not this");
            tracing::error!(target: REPORTED, "nor this, which stands there already");
        });
        assert_eq!(
            lines,
            [
                "nvte_ep: warning: number 1 [device=3]\n",
                "nvte_ep: warning: number 2 [device=3]\n",
                "nvte_ep: error: it failed\n"
            ]
        );
        let lines = with(LevelFilter::TRACE, None, || {
            let _call = tracing::trace_span!(target: "nvte_ep", "call", function = "nvte_ep_dispatch").entered();
        });
        assert_eq!(lines, ["nvte_ep: trace: call [function=\"nvte_ep_dispatch\"]\n"]);
    }

    #[test]
    fn of_each_kind_one_is_written_in_a_while() {
        let between = Duration::from_millis(200);
        let lines = with(LevelFilter::WARN, Some(between), || {
            (1..=5).for_each(warn);
            tracing::warn!(target: "nvte_ep", "of another kind");
            std::thread::sleep(between);
            warn(6);
        });
        assert_eq!(
            lines,
            [
                "nvte_ep: warning: number 1 [device=3]\n",
                "nvte_ep: warning: of another kind\n",
                "nvte_ep: warning: number 6 [device=3] (4 more of this kind since the last one)\n"
            ]
        );
    }
}
