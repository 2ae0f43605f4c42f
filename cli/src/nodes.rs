//! The launchers of several machines, one on each: they meet before their ranks start, and tell each other how those end.
//!
//! Launcher 0 listens; a line of JSON is a message. It sends what one of them says of a failure to all others, and the word that
//! all are done. A launcher whose connection ends before that has failed, with its ranks.

use crate::Outcome;
use crate::process::{next_signal, say};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Which of several machines this is.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Machines, with a launcher and as many ranks on each.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "rdzv")]
    pub nnodes: usize,
    /// Number of this machine, from 0.
    #[arg(long, value_name = "I", default_value_t = 0, requires = "nnodes")]
    pub node_rank: usize,
    /// Where machine 0 listens, for the other launchers to find it; port 0 is a free one, which is printed.
    #[arg(long, value_name = "HOST:PORT", requires = "nnodes")]
    pub rdzv: Option<String>,
    /// Seconds to wait for the launchers of the other machines.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub rdzv_timeout: u64,
}

/// Between two looks at the others.
const PAUSE: Duration = Duration::from_millis(10);
/// For the first line of whoever connects.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// No message is longer.
const LONGEST: u64 = 4096;

/// What a launcher says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    version: String,
    node: usize,
    nodes: usize,
    ranks: usize,
    /// Whether the ranks are on the host runtime, and so of this running system.
    host: Option<u64>,
}

/// Why a launcher's ranks end before their time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What happened, in words.
    pub text: String,
    /// The exit code for it.
    pub code: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Message {
    Hello(Hello),
    /// Of launcher 0: all are here, and ranks may meet at this port.
    Start(u16),
    /// Of launcher 0: this cannot be.
    Refused(String),
    Failed(Failure),
    /// All ranks of the sender have ended well; of launcher 0: those of all.
    Done,
}

/// The other launchers, once all have met.
#[derive(Debug)]
pub struct Nodes {
    node: usize,
    /// By number; those of others but 0 only launcher 0 has.
    streams: Vec<Option<TcpStream>>,
    events: Receiver<(usize, Option<Message>)>,
    /// Who is done.
    done: Vec<bool>,
    /// What the others' failure was, the first one that was heard of.
    pub failed: Option<Failure>,
    /// Whether the own failure was told.
    told: bool,
    /// For the ranks: where to meet.
    pub address: String,
    /// The same, the port.
    pub port: u16,
}

fn send(stream: &TcpStream, message: &Message) -> std::io::Result<()> {
    let line = serde_json::to_string(message)? + "\n";
    let mut stream = stream;
    stream.write_all(line.as_bytes())
}

/// The next message; nothing where there is none any more.
fn receive(reader: &mut impl BufRead) -> Option<Message> {
    let mut line = String::new();
    reader.by_ref().take(LONGEST).read_line(&mut line).ok()?;
    serde_json::from_str(&line).ok()
}

fn listen(number: usize, stream: &TcpStream, events: Sender<(usize, Option<Message>)>) -> std::io::Result<()> {
    stream.set_read_timeout(None)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    std::thread::spawn(move || {
        loop {
            let message = receive(&mut reader);
            let last = message.is_none();
            if events.send((number, message)).is_err() || last {
                return;
            }
        }
    });
    Ok(())
}

/// How long, and whether a signal has come in the meantime.
struct Wait {
    deadline: Instant,
    seconds: u64,
}

impl Wait {
    fn check(&self, missing: &str) -> Outcome<()> {
        if let Some(signal) = next_signal() {
            return Err(format!("ended by signal {} while waiting for {missing}", signal.as_raw()).into());
        }
        if Instant::now() > self.deadline {
            return Err(format!("waited {} s (--rdzv-timeout) for {missing}", self.seconds).into());
        }
        std::thread::sleep(PAUSE);
        Ok(())
    }
}

impl NodeArgs {
    /// # Errors
    /// Numbers that contradict each other.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=1024).contains(&self.nnodes) {
            return Err(format!("--nnodes must be 1 to 1024, got {}", self.nnodes));
        }
        if self.node_rank >= self.nnodes {
            return Err(format!("--node-rank must be below --nnodes, {}, got {}", self.nnodes, self.node_rank));
        }
        let place = self.rdzv.as_deref().map(|place| place.rsplit_once(':').map(|(_, port)| port.parse::<u16>()));
        match place {
            None | Some(Some(Ok(_))) => Ok(()),
            Some(_) => Err("--rdzv must be HOST:PORT".into()),
        }
    }

    /// Waits for the launchers of all machines; none where there is one machine. `host`: which running system the ranks have to be
    /// on, if it matters.
    pub fn meet(&self, ranks: usize, host: Option<u64>) -> Outcome<Option<Nodes>> {
        let (2.., Some(place)) = (self.nnodes, self.rdzv.as_deref()) else { return Ok(None) };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = Hello { version, node: self.node_rank, nodes: self.nnodes, ranks, host };
        let seconds = self.rdzv_timeout;
        let wait = Wait { deadline: Instant::now() + Duration::from_secs(seconds), seconds };
        let nodes = if self.node_rank == 0 { gather(place, &hello, &wait) } else { join(place, &hello, &wait) };
        nodes.map(Some).map_err(|error| format!("{place}: {error}").into())
    }
}

/// Why a launcher does not belong to those of `own`.
fn misfit(own: &Hello, other: &Hello, streams: &[Option<TcpStream>]) -> Option<String> {
    let differs = |what: &str, own: &dyn std::fmt::Display, other_value: &dyn std::fmt::Display| {
        Some(format!("machine {} has {what} {other_value}, and machine 0 has {own}", other.node))
    };
    if own.version != other.version {
        return differs("nvte-ep", &own.version, &other.version);
    }
    if own.nodes != other.nodes {
        return differs("--nnodes", &own.nodes, &other.nodes);
    }
    if own.ranks != other.ranks {
        return differs("--ranks", &own.ranks, &other.ranks);
    }
    if own.host != other.host {
        let text = "is another machine, or of another --runtime, and the host runtime works on one: add --runtime cuda";
        return Some(format!("machine {} {text}", other.node));
    }
    match streams.get(other.node) {
        Some(None) if other.node > 0 => None,
        Some(_) => Some(format!("--node-rank {} is there twice", other.node)),
        None => Some(format!("--node-rank {} is not below --nnodes", other.node)),
    }
}

fn gather(place: &str, own: &Hello, wait: &Wait) -> Outcome<Nodes> {
    let listener = TcpListener::bind(place)?;
    listener.set_nonblocking(true)?;
    say(format_args!("nvte-ep launch: waiting for {} more machines at {}", own.nodes - 1, listener.local_addr()?));
    let mut streams: Vec<Option<TcpStream>> = (0..own.nodes).map(|_| None).collect();
    while streams[1..].iter().any(Option::is_none) {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::ConnectionAborted].contains(&error.kind()) => {
                let missing: Vec<usize> = (1..own.nodes).filter(|node| streams[*node].is_none()).collect();
                wait.check(&format!("the launchers of machines {missing:?}"))?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(HELLO_LIMIT))?;
        let Some(Message::Hello(other)) = receive(&mut BufReader::new(&stream)) else {
            say(format_args!("nvte-ep launch: {from} is no launcher of this version"));
            continue;
        };
        if let Some(text) = misfit(own, &other, &streams) {
            let refused = Message::Refused(text.clone());
            streams.iter().flatten().chain([&stream]).for_each(|stream| drop(send(stream, &refused)));
            return Err(text.into());
        }
        streams[other.node] = Some(stream);
    }
    let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
    let port = TcpListener::bind((host, 0))?.local_addr()?.port();
    let (sender, events) = channel();
    for (number, stream) in streams.iter().enumerate().filter_map(|(number, stream)| Some((number, stream.as_ref()?))) {
        send(stream, &Message::Start(port))?;
        listen(number, stream, sender.clone())?;
    }
    Ok(Nodes::new(own, host, port, streams, events))
}

fn join(place: &str, own: &Hello, wait: &Wait) -> Outcome<Nodes> {
    let stream = loop {
        // Machine 0 may come later.
        match TcpStream::connect(place) {
            Ok(stream) => break stream,
            Err(error) => wait.check(&format!("the launcher of machine 0 ({error})"))?,
        }
    };
    send(&stream, &Message::Hello(own.clone()))?;
    let (sender, events) = channel();
    listen(0, &stream, sender)?;
    let port = loop {
        match events.try_recv() {
            Ok((_, Some(Message::Start(port)))) => break port,
            Ok((_, Some(Message::Refused(text)))) => return Err(text.into()),
            Ok(_) => return Err("machine 0 gave up, or is no launcher of this version".into()),
            Err(_) => wait.check("the launchers of the other machines")?,
        }
    };
    let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
    Ok(Nodes::new(own, host, port, vec![Some(stream)], events))
}

impl Nodes {
    fn new(
        own: &Hello,
        host: &str,
        port: u16,
        streams: Vec<Option<TcpStream>>,
        events: Receiver<(usize, Option<Message>)>,
    ) -> Self {
        let done = vec![false; own.nodes];
        Self { node: own.node, streams, events, done, failed: None, told: false, address: host.to_owned(), port }
    }

    fn tell(&self, message: &Message, except: Option<usize>) {
        for (number, stream) in self.streams.iter().enumerate() {
            if let (Some(stream), true) = (stream, except != Some(number)) {
                // Who cannot be told is gone, and is heard of as such.
                drop(send(stream, message));
            }
        }
    }

    fn fail(&mut self, failure: Failure, from: usize) {
        if self.failed.is_none() {
            if self.node == 0 {
                self.tell(&Message::Failed(failure.clone()), Some(from));
            }
            self.failed = Some(failure);
        }
    }

    /// Tells the others, once, why the ranks of this machine end.
    pub fn tell_failure(&mut self, text: String, code: u8) {
        if !std::mem::replace(&mut self.told, true) && self.failed.is_none() {
            self.tell(&Message::Failed(Failure { text, code }), None);
        }
    }

    /// Hears what the others have said.
    pub fn poll(&mut self) {
        while let Ok((from, message)) = self.events.try_recv() {
            match message {
                Some(Message::Failed(failure)) => self.fail(failure, from),
                Some(Message::Done) if self.node == 0 => self.done[from] = true,
                Some(Message::Done) => self.done.fill(true),
                Some(_) => {}
                None if self.done[from] => {}
                None => self.fail(Failure { text: format!("the launcher of machine {from} is gone"), code: 1 }, from),
            }
        }
    }

    /// Says that the ranks of this machine have ended well; true when those of all have.
    pub fn all_done(&mut self) -> bool {
        if !std::mem::replace(&mut self.told, true) {
            if self.node == 0 {
                self.done[0] = true;
            } else {
                self.tell(&Message::Done, None);
            }
        }
        self.poll();
        let all = self.done.iter().all(|done| *done);
        if all && self.node == 0 {
            self.tell(&Message::Done, None);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(node: usize) -> Hello {
        Hello { version: "1".into(), node, nodes: 3, ranks: 8, host: None }
    }

    #[test]
    fn launchers_that_do_not_belong_together_are_told_why() {
        let free: Vec<Option<TcpStream>> = vec![None, None, None];
        let why = |other: Hello| misfit(&hello(0), &other, &free).unwrap_or_default();
        assert_eq!(why(hello(2)), "");
        assert_eq!(why(hello(3)), "--node-rank 3 is not below --nnodes");
        assert_eq!(why(hello(0)), "--node-rank 0 is there twice");
        assert_eq!(why(Hello { nodes: 2, ..hello(1) }), "machine 1 has --nnodes 2, and machine 0 has 3");
        assert_eq!(why(Hello { ranks: 4, ..hello(1) }), "machine 1 has --ranks 4, and machine 0 has 8");
        assert_eq!(why(Hello { version: "2".into(), ..hello(1) }), "machine 1 has nvte-ep 2, and machine 0 has 1");
        assert!(why(Hello { host: Some(7), ..hello(1) }).contains("the host runtime works on one"));
    }
}
