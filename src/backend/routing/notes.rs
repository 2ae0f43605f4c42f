//! What the host knows about one piece of handle memory, and whether a call may use that. The caller's copies, and graphs, change
//! handle memory without the host. The header says what the memory really holds, but to read it the host waits for the stream. So
//! [`decide`] chooses for every call: use what is known, read the header, or refuse. It is a function of its arguments alone; the
//! model in `model_tests` checks it over random programs.
#![forbid(unsafe_code)]

use crate::config::{LayerConfig, Relocation};
use crate::ops::Prepared;
use crate::progress::Call;

/// What identifies a layer's routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HandleKey {
    /// The id that register_layer gave out.
    Registered(u64),
    /// The address of the handle memory.
    Address(u64),
}

/// A routing: the layer that it is for, and what its prepare left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) struct Routing {
    pub(in crate::backend) layer: LayerConfig,
    pub(in crate::backend) prepared: Prepared,
}

impl Routing {
    /// Whether this can be the same as `other`; a total that one of them does not have says nothing.
    pub(in crate::backend) fn is_same(self, other: Self) -> bool {
        let totals = self.prepared.recv_total.zip(other.prepared.recv_total);
        let plain = |routing: Self| (routing.layer, routing.prepared.num_tokens, routing.prepared.index_dtype);
        plain(self) == plain(other) && totals.is_none_or(|(own, others)| own == others)
    }
}

/// How far the rows of a micro-batch have come, where calls tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// No row is on its way, or nobody knows.
    None,
    /// Dispatched and not combined.
    Dispatched,
    /// Dispatched, and then the handle was prepared again: their routing is gone.
    Orphaned,
    /// A graph dispatches over this memory, and nobody tells when it is launched.
    ByGraph,
}

/// What the calls of this process have left in one piece of handle memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend) struct Note {
    /// Whose routing it is: registered layers may share memory.
    key: HandleKey,
    /// What was prepared last, or read from the header since. None if the exchange failed.
    routing: Option<Routing>,
    /// The allocation that it was in, where that was asked.
    allocation: Option<u64>,
    /// The latest call of a step that used it, in the order of a step.
    latest: u8,
    rows: Rows,
}

/// The place of a call in a step.
const fn position(call: Call) -> u8 {
    match call {
        Call::Dispatch => 1,
        Call::Combine => 2,
        Call::CombineBwd => 3,
        Call::DispatchBwd => 4,
        _ => 0,
    }
}

impl Note {
    pub(super) const fn new(key: HandleKey) -> Self {
        Self { key, routing: None, allocation: None, latest: 0, rows: Rows::None }
    }

    pub(super) const fn key(&self) -> HandleKey {
        self.key
    }

    pub(super) const fn routing(&self) -> Option<Routing> {
        self.routing
    }

    /// `key` is about to prepare the memory: the routing in it is lost from now on.
    #[inline]
    pub(super) fn start_prepare(&mut self, key: HandleKey) {
        let rows = match self.rows {
            Rows::Dispatched | Rows::Orphaned if self.key == key => Rows::Orphaned,
            Rows::ByGraph => Rows::ByGraph,
            _ => Rows::None,
        };
        *self = Self { rows, ..Self::new(key) };
    }

    /// The exchange is queued.
    #[inline]
    pub(super) fn prepared(&mut self, routing: Routing, allocation: Option<u64>) {
        (self.routing, self.allocation) = (Some(routing), allocation);
    }

    /// A graph dispatches over the memory: it was captured before this note was made.
    pub(super) fn dispatched_by_graph(&mut self) {
        self.rows = Rows::ByGraph;
    }

    /// The header says that `routing` is there, for a call of `key`. True if that is news: its bytes came from elsewhere.
    pub(super) fn found(&mut self, key: HandleKey, routing: Routing, allocation: Option<u64>) -> bool {
        let news = self.key != key || !self.routing.is_some_and(|known| known.is_same(routing));
        if news {
            let rows = if self.rows == Rows::ByGraph { Rows::ByGraph } else { Rows::None };
            *self = Self { routing: Some(routing), rows, ..Self::new(key) };
        }
        if let Some(total) = routing.prepared.recv_total {
            self.note_total(total);
        }
        self.allocation = allocation;
        news
    }

    /// A call that goes by this routing is queued.
    #[inline]
    pub(super) fn used(&mut self, call: Call) {
        self.latest = self.latest.max(position(call));
        match (call, self.rows) {
            (_, Rows::ByGraph) => {}
            (Call::Dispatch, _) => self.rows = Rows::Dispatched,
            (Call::Combine, _) => self.rows = Rows::None,
            _ => {}
        }
    }

    /// A call that goes by this routing becomes part of a graph.
    #[inline]
    pub(super) fn captured(&mut self, call: Call) {
        if call == Call::Dispatch {
            self.rows = Rows::ByGraph;
        }
    }

    pub(super) fn note_total(&mut self, total: u64) {
        if let Some(routing) = &mut self.routing {
            routing.prepared.recv_total = Some(total);
        }
    }
}

/// What one call asks about its handle memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend) struct Question {
    pub(in crate::backend) call: Call,
    pub(in crate::backend) key: HandleKey,
    /// Where a registered layer was at its last call, if that is another memory.
    pub(in crate::backend) elsewhere: Option<u64>,
    /// Whether the layer is registered and was never prepared.
    pub(in crate::backend) never_prepared: bool,
    pub(in crate::backend) relocation: Relocation,
    /// Whether the call's stream captures a graph: then nothing can be read.
    pub(in crate::backend) capturing: bool,
    /// Whether a graph may write the memory, and what the last captured prepare leaves there, if no call came after it.
    pub(in crate::backend) by_graph: bool,
    pub(in crate::backend) captured: Option<Captured>,
    /// Whether routings differ in more than a call's arguments tell: layers of several configurations, totals of eager mode.
    pub(in crate::backend) ambiguous: bool,
    /// The allocation that the memory is in, asked where it is ambiguous and goes by its address.
    pub(in crate::backend) allocation: Option<u64>,
    /// Whether this program has moved routings before.
    pub(in crate::backend) moves: bool,
}

/// A captured prepare: whose, and what it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) struct Captured {
    pub(in crate::backend) key: HandleKey,
    pub(in crate::backend) routing: Routing,
}

/// What a call may go by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) enum Decision {
    /// What is known.
    Use(Routing),
    /// What the header says. If that cannot be had soon: what is known, where something is.
    Read(Option<Routing>),
    Refuse(Refusal),
}

/// Why a call is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) enum Refusal {
    /// There is no routing of this handle.
    NotPrepared,
    /// The layer's memory is another, at this address, and the group says that it has to stay.
    Elsewhere(u64),
    /// Only the header could tell, and a stream that captures cannot read it.
    Unreadable,
    /// The rows that are to be combined were dispatched by a routing that is gone.
    OtherRouting,
}

/// Every rule about which routing a call means.
#[inline]
pub(in crate::backend) fn decide(note: Option<&Note>, question: &Question) -> Decision {
    use Decision::{Read, Refuse, Use};
    let Question { call, key, capturing, ambiguous, .. } = *question;
    if question.never_prepared {
        return Refuse(Refusal::NotPrepared);
    }
    if let (true, Some(captured)) = (capturing, question.captured) {
        // The graph's own prepare, or that of the graph before it, comes last.
        return if captured.key == key { Use(captured.routing) } else { Refuse(Refusal::NotPrepared) };
    }
    let unknown = if capturing { Refuse(Refusal::Unreadable) } else { Read(None) };
    if let Some(at) = question.elsewhere {
        return if question.relocation == Relocation::Refuse { Refuse(Refusal::Elsewhere(at)) } else { unknown };
    }
    if question.by_graph && !capturing {
        return Read(None);
    }
    let Some(note) = note else { return unknown };
    let Some(routing) = note.routing.filter(|_| note.key == key) else { return Refuse(Refusal::NotPrepared) };
    if question.by_graph {
        return Use(routing);
    }
    if question.allocation.is_some() && note.allocation.is_some() && question.allocation != note.allocation {
        // The driver gave the memory out anew.
        return unknown;
    }
    if capturing {
        return Use(routing);
    }
    if call == Call::Combine && note.rows == Rows::Orphaned && !question.moves {
        return Refuse(Refusal::OtherRouting);
    }
    // Bytes that came from elsewhere differ from what is known in nothing that arguments tell. Calls that do not come next in
    // the step of what is known may be of another.
    let next = position(call) == note.latest + 1;
    let asked = note.allocation.is_some() == question.allocation.is_some();
    if ambiguous && (question.moves || !next || !asked) { Read(Some(routing)) } else { Use(routing) }
}
