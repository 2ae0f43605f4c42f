//! Logging, to stderr. A C++ program installs no `tracing` subscriber, so the one below is installed here, unless a Rust
//! program around us has installed its own.
//!
//! It is not tracing-subscriber's: messages come from destructors that run at the end of a thread or of the process too,
//! where a buffer of the thread would be gone. A line is made first and written in one piece, so that lines of several
//! ranks do not mix.

use crate::env::{LOG, LOG_FORMAT};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};
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

/// What a line looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// For people.
    Text,
    /// `key=value` after `key=value`.
    KeyValue,
    /// An object a line.
    Json,
}

impl Format {
    /// That of `NVTE_EP_LOG_FORMAT`.
    fn of_the_process() -> Self {
        static FORMAT: OnceLock<Format> = OnceLock::new();
        *FORMAT.get_or_init(|| {
            let value = std::env::var(LOG_FORMAT.name).unwrap_or_default();
            match value.as_str() {
                "" | "text" => Self::Text,
                "keyvalue" => Self::KeyValue,
                "json" => Self::Json,
                other => {
                    misread(LOG_FORMAT.name, "takes text, keyvalue or json", other, "text");
                    Self::Text
                }
            }
        })
    }
}

/// Installs the subscriber that `NVTE_EP_LOG` asks for, once.
pub(crate) fn start() {
    static START: std::sync::Once = std::sync::Once::new();
    START.call_once(|| {
        let value = std::env::var(LOG.name).ok().filter(|value| !value.is_empty());
        let level = value.as_deref().map(str::parse::<LevelFilter>);
        let lines = match level {
            None => Lines::new(LevelFilter::WARN, Some(BETWEEN), Format::of_the_process(), to_stderr),
            Some(Ok(level)) => Lines::new(level, None, Format::of_the_process(), to_stderr),
            Some(Err(_)) => {
                misread(LOG.name, "takes off, error, warn, info, debug or trace", &value.unwrap_or_default(), "info");
                Lines::new(LevelFilter::INFO, None, Format::of_the_process(), to_stderr)
            }
        };
        // An error means that the program has a subscriber: then that one serves.
        let _ = tracing::subscriber::set_global_default(lines);
    });
}

/// Says `text` on stderr, whatever the level of the log: for what must not be silent, as an end that nobody asked for or a
/// promise that is not kept.
pub(crate) fn report(text: &str) {
    match Format::of_the_process() {
        Format::Text => to_stderr(&format!("nvte_ep: {text}\n")),
        format => to_stderr(&Line::of_message(text).in_format(format, "error", 0)),
    }
    // For a subscriber of the program's.
    tracing::error!(target: REPORTED, "{text}");
}

/// Says that a variable's value is none, and what is taken instead.
fn misread(name: &str, choices: &str, value: &str, instead: &str) {
    to_stderr(&format!("nvte_ep: {name} {choices}; {value:?} is read as {instead}\n"));
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
    format: Format,
    write: fn(&str),
    kinds: Mutex<FxHashMap<Identifier, Kind>>,
}

impl Lines {
    fn new(level: LevelFilter, between: Option<Duration>, format: Format, write: fn(&str)) -> Self {
        Self { level, between, format, write, kinds: Mutex::default() }
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
        let mut line = Line::of_message("");
        record(&mut line);
        (self.write)(&line.in_format(self.format, level, left_out));
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

/// One message.
struct Line {
    message: String,
    /// Names and values, which say themselves whether they are numbers or words.
    fields: Vec<(&'static str, String, bool)>,
}

impl Line {
    fn of_message(message: &str) -> Self {
        Self { message: message.to_owned(), fields: Vec::new() }
    }

    /// A whole line, with its end.
    fn in_format(&self, format: Format, level: &str, left_out: u64) -> String {
        let Self { message, fields } = self;
        let mut text = String::new();
        if format == Format::Text {
            let _ = write!(text, "nvte_ep: {level}: {message}");
            for (number, (name, value, _)) in fields.iter().enumerate() {
                let _ = write!(text, "{}{name}={value}", if number == 0 { " [" } else { " " });
            }
            text += if fields.is_empty() { "" } else { "]" };
            if left_out > 0 {
                let _ = write!(text, " ({left_out} more of this kind since the last one)");
            }
            text.push('\n');
            return text;
        }
        let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let begin = [
            ("time", format!("{}.{:03}", seconds.as_secs(), seconds.subsec_millis()), false),
            ("level", level.to_owned(), true),
            ("target", "nvte_ep".to_owned(), true),
            ("pid", std::process::id().to_string(), false),
            ("message", message.clone(), true),
        ];
        let end = (left_out > 0).then(|| ("left_out", left_out.to_string(), false));
        let json = format == Format::Json;
        for (number, (name, value, words)) in begin.iter().chain(fields).chain(&end).enumerate() {
            match (json, number) {
                (true, 0) => text.push('{'),
                (true, _) => text.push(','),
                (false, 0) => {}
                (false, _) => text.push(' '),
            }
            let quote = *words && (json || value.is_empty() || value.contains([' ', '=', '"', '\n']));
            let _ = if json { write!(text, "\"{name}\":") } else { write!(text, "{name}=") };
            if quote { push_quoted(&mut text, value) } else { text.push_str(value) }
        }
        text += if json { "}\n" } else { "\n" };
        text
    }

    fn add(&mut self, field: &Field, value: String, words: bool) {
        match field.name() {
            "message" => self.message = value,
            name => self.fields.push((name, value, words)),
        }
    }
}

/// A string as JSON has it.
fn push_quoted(text: &mut String, value: &str) {
    text.push('"');
    for letter in value.chars() {
        match letter {
            '"' | '\\' => text.extend(['\\', letter]),
            '\n' => text.push_str("\\n"),
            control if control < ' ' => {
                let _ = write!(text, "\\u{:04x}", u32::from(control));
            }
            other => text.push(other),
        }
    }
    text.push('"');
}

impl Visit for Line {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.to_string(), false);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.to_string(), false);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.to_string(), false);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.to_owned(), true);
    }

    // What `Display` writes comes here too.
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}"), true);
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
        in_format(Format::Text, level, between, body)
    }

    fn in_format(format: Format, level: LevelFilter, between: Option<Duration>, body: impl FnOnce()) -> Vec<String> {
        tracing::subscriber::with_default(Lines::new(level, between, format, keep), body);
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
        assert_eq!(lines, ["nvte_ep: trace: call [function=nvte_ep_dispatch]\n"]);
    }

    #[test]
    fn machines_can_read_it() {
        let log = |format| {
            let lines = in_format(format, LevelFilter::INFO, None, || {
                let path = std::path::Path::new("/a b/lib.so");
                tracing::info!(target: "nvte_ep", device = 3, path = %path.display(), up = true, name = "plain", "it \"is\"\n{}", "\u{1}so");
            });
            let [line] = lines.as_slice() else { panic!("{lines:?}") };
            // The time and the process come first, and are others each time.
            let (begin, rest) = line.split_once("pid").unwrap();
            let rest = rest.trim_start_matches(|letter: char| !letter.is_alphabetic());
            (begin.to_owned(), rest.to_owned())
        };
        let (begin, rest) = log(Format::KeyValue);
        assert!(begin.starts_with("time=1") && begin.ends_with(" level=info target=nvte_ep "), "{begin}");
        let words = "message=\"it \\\"is\\\"\\n\\u0001so\" device=3 path=\"/a b/lib.so\" up=true name=plain\n";
        assert_eq!(rest, words);
        let (begin, rest) = log(Format::Json);
        assert!(
            begin.starts_with("{\"time\":1") && begin.ends_with(",\"level\":\"info\",\"target\":\"nvte_ep\",\""),
            "{begin}"
        );
        let object = "message\":\"it \\\"is\\\"\\n\\u0001so\",\"device\":3,\"path\":\"/a b/lib.so\",\"up\":true,\"name\":\"plain\"}\n";
        assert_eq!(rest, object);
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
