//! [`decide`] against a model that knows the truth: random programs that prepare, use, copy, free, reuse, capture and replay.

use super::handles::Handles;
use super::notes::{Captured, Decision, HandleKey, Question, Refusal, Routing, decide};
use crate::config::{LayerConfig, Relocation};
use crate::dtype::DType;
use crate::ops::Prepared;
use crate::progress::Call;

const SEQUENCES: u64 = 100_000;
const PLACES: usize = 6;
/// The first so many places are slices of one allocation, which a caching allocator never gives back.
const IN_ARENA: usize = 4;
const STEP: [Call; 4] = [Call::Dispatch, Call::Combine, Call::CombineBwd, Call::DispatchBwd];

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

fn routing(layer: usize, tokens: usize) -> Routing {
    let layer = LayerConfig::parse("layer", 1 << layer, 1).unwrap();
    Routing { layer, prepared: Prepared { num_tokens: tokens, index_dtype: DType::Int64, recv_total: None } }
}

/// What really is in one place.
#[derive(Debug, Clone, Copy)]
struct Place {
    holds: Option<Routing>,
    /// Whether the bytes came by a copy.
    copied: bool,
    allocation: u64,
    /// The calls of this step that were made here, where no bytes came or went: positions in a step.
    latest: usize,
    /// Dispatched and not combined; and prepared again after that.
    open: bool,
    orphaned: bool,
    by_graph: bool,
    /// Whether a graph dispatches here: launches are seen by nobody, so a combine may be of one.
    dispatched_by_graph: bool,
}

/// What a program of a sequence may do.
#[derive(Debug, Clone, Copy)]
struct Rules {
    layers: usize,
    copies: bool,
    graphs: bool,
    any_order: bool,
    /// Whether all layer configurations are known before the first step.
    registered: bool,
    limit: Option<usize>,
}

#[derive(Debug, Default)]
struct Seen {
    used: u64,
    read: u64,
    refused: u64,
    holes: u64,
}

struct World {
    rules: Rules,
    random: Random,
    places: [Place; PLACES],
    graphs: Vec<(usize, Routing)>,
    handles: Handles<u64>,
    layers_seen: Vec<LayerConfig>,
    has_copied: bool,
    has_freed: bool,
    next: u64,
}

const fn address(place: usize) -> u64 {
    0x1000 * (place as u64 + 1)
}

const fn key(place: usize) -> HandleKey {
    HandleKey::Address(address(place))
}

impl World {
    fn new(seed: u64, rules: Rules) -> Self {
        let place = Place {
            holds: None,
            copied: false,
            allocation: 0,
            latest: 0,
            open: false,
            orphaned: false,
            by_graph: false,
            dispatched_by_graph: false,
        };
        let mut places = [place; PLACES];
        for (index, place) in places.iter_mut().enumerate().skip(IN_ARENA) {
            place.allocation = index as u64;
        }
        Self {
            rules,
            random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
            places,
            graphs: Vec::new(),
            handles: Handles::new(Relocation::Rebuild, rules.limit),
            layers_seen: (0..if rules.registered { rules.layers } else { 0 }).map(|n| routing(n, 8).layer).collect(),
            has_copied: false,
            has_freed: false,
            next: 100,
        }
    }

    fn ambiguous(&self) -> bool {
        self.layers_seen.len() > 1
    }

    fn allocation(&self, place: usize) -> Option<u64> {
        self.ambiguous().then_some(self.places[place].allocation)
    }

    fn open(&mut self, place: usize, routing: Routing, tokens: Option<usize>) {
        if !self.handles.ready(key(place), address(place), &routing.layer, tokens) {
            self.next += 1;
            self.handles.put(key(place), address(place), routing.layer, tokens, self.next);
            let _ = self.handles.take_gone().count();
        }
        assert!(self.handles.handle(address(place)).is_some());
    }

    fn any_routing(&mut self) -> Routing {
        let (layer, tokens) = (self.random.below(self.rules.layers), 8 + self.random.below(2));
        let routing = routing(layer, tokens);
        if !self.layers_seen.contains(&routing.layer) {
            self.layers_seen.push(routing.layer);
        }
        routing
    }

    fn prepare(&mut self, place: usize) {
        let routing = self.any_routing();
        self.open(place, routing, None);
        self.handles.start_prepare(key(place), address(place));
        self.handles.prepared(address(place), routing, self.allocation(place));
        let at = &mut self.places[place];
        let orphaned = at.open || at.orphaned;
        *at = Place { holds: Some(routing), copied: false, latest: 0, open: false, orphaned, ..*at };
    }

    fn decide(&self, place: usize, call: Call, capturing: bool) -> Decision {
        let (note, question) = self.handles.question(call, key(place), address(place));
        let (ambiguous, allocation) = (self.ambiguous(), self.allocation(place));
        decide(note, &Question { capturing, ambiguous, allocation, ..question })
    }

    /// A call that is right for what the place really holds.
    fn call(&mut self, place: usize, call: Call, seen: &mut Seen) {
        let position = STEP.iter().position(|c| *c == call).unwrap() + 1;
        let (at, decision) = (self.places[place], self.decide(place, call, false));
        let unmoved = !self.has_copied && !self.has_freed;
        let (orphan, known) = (
            call == Call::Combine && at.orphaned,
            self.rules.limit.is_none() && !at.by_graph && !at.dispatched_by_graph,
        );
        let refused = decision == Decision::Refuse(Refusal::OtherRouting);
        let told = orphan && !(at.dispatched_by_graph && self.rules.limit.is_none());
        assert!(told || !refused, "{call:?} is refused over {at:?}");
        assert!(refused || !(orphan && unmoved && known), "{call:?} combines what is gone: {at:?}");
        let Some(truth) = at.holds else { return };
        let found = match decision {
            Decision::Use(known) if known.is_same(truth) => {
                seen.used += 1;
                false
            }
            // The tensors have another number of rows than is known, so the call's check reads the header.
            Decision::Use(known) if known.prepared.num_tokens != truth.prepared.num_tokens => true,
            Decision::Use(known) => {
                // What no host can see: bytes of another layer, copied into the same allocation, in a program that was never seen
                // to copy, and the call is the next of what was there.
                seen.holes += 1;
                let (_, question) = self.handles.question(call, key(place), address(place));
                let unseen = at.copied && self.ambiguous() && !question.moves;
                assert!(unseen, "{call:?} went by {known:?} over {at:?}");
                return;
            }
            Decision::Read(_) => {
                seen.read += 1;
                let expected = !unmoved || at.by_graph || self.rules.limit.is_some() || self.ambiguous();
                assert!(expected, "{call:?} needlessly reads {at:?}");
                true
            }
            Decision::Refuse(Refusal::OtherRouting) => {
                seen.refused += 1;
                return;
            }
            Decision::Refuse(refusal) => panic!("{call:?} over {at:?} was refused: {refusal:?}"),
        };
        if found {
            self.handles.found(key(place), address(place), truth, self.allocation(place));
        }
        self.open(place, truth, Some(truth.prepared.num_tokens));
        self.handles.used(address(place), call, false);
        let at = &mut self.places[place];
        at.latest = at.latest.max(position);
        match call {
            Call::Dispatch => (at.open, at.orphaned) = (true, false),
            Call::Combine => (at.open, at.orphaned) = (false, false),
            _ => {}
        }
    }

    fn captured_call(&mut self, place: usize, call: Call) {
        let at = self.places[place];
        match self.decide(place, call, true) {
            Decision::Use(known) => {
                let by_graph = self.graphs.iter().any(|(graph, routing)| *graph == place && routing.is_same(known));
                let untouched = !self.has_copied && !self.has_freed && !at.by_graph;
                assert!(!untouched || at.holds.is_some_and(|truth| truth.is_same(known)), "{known:?} of {at:?}");
                assert!(by_graph || !untouched || at.holds.is_some());
                self.open(place, known, Some(known.prepared.num_tokens));
                self.handles.used(address(place), call, true);
                self.places[place].dispatched_by_graph |= call == Call::Dispatch;
            }
            Decision::Refuse(Refusal::Unreadable) => {
                assert!(
                    at.holds.is_none()
                        || self.has_copied
                        || self.has_freed
                        || self.rules.limit.is_some()
                        || at.by_graph
                );
            }
            other => panic!("a captured {call:?}: {other:?}"),
        }
    }

    fn act(&mut self, seen: &mut Seen) {
        let place = self.random.below(PLACES);
        match self.random.below(12) {
            0..=2 => self.prepare(place),
            3..=7 => {
                let any = self.random.below(STEP.len());
                let next = self.places[place].latest;
                let call = if self.rules.any_order || next >= STEP.len() { any } else { next };
                if self.rules.any_order || next < STEP.len() {
                    self.call(place, STEP[call], seen);
                }
            }
            8 if self.rules.copies => {
                let from = self.random.below(PLACES);
                if from != place && self.places[from].holds.is_some() {
                    self.places[place].holds = self.places[from].holds;
                    self.places[place].copied = true;
                    self.has_copied = true;
                }
            }
            9 if self.rules.copies => {
                self.places[place].holds = None;
                if place >= IN_ARENA {
                    self.next += 1;
                    self.places[place].allocation = self.next;
                    self.places[place].copied = false;
                }
                self.has_freed = true;
            }
            10 if self.rules.graphs => {
                let routing = self.any_routing();
                self.open(place, routing, None);
                self.handles.captured(address(place), Captured { key: key(place), routing });
                self.graphs.push((place, routing));
                self.places[place].by_graph = true;
            }
            11 if self.rules.graphs => {
                let call = STEP[self.random.below(STEP.len())];
                self.captured_call(place, call);
                let graphs = self.graphs.len();
                if graphs > 0 {
                    let (launched, routing) = self.graphs[self.random.below(graphs)];
                    let at = &mut self.places[launched];
                    (at.holds, at.copied) = (Some(routing), false);
                }
            }
            _ => {}
        }
    }
}

/// Runs `sequences` programs of these rules, each of forty actions.
fn run(sequences: u64, seed: u64, rules: Rules) -> Seen {
    let mut seen = Seen::default();
    for sequence in 0..sequences {
        let mut world = World::new(seed + sequence, rules);
        (0..40).for_each(|_| world.act(&mut seen));
    }
    seen
}

const PLAIN: Rules =
    Rules { layers: 2, copies: false, graphs: false, any_order: false, registered: false, limit: None };

#[test]
fn a_program_that_keeps_the_order_never_waits() {
    for layers in [1, 3] {
        let seen = run(SEQUENCES / 10, 1, Rules { layers, registered: true, ..PLAIN });
        assert!(seen.used > 50_000, "{seen:?}");
        assert_eq!((seen.read, seen.holes), (0, 0), "{seen:?}");
    }
}

#[test]
fn rows_are_combined_by_the_routing_that_dispatched_them() {
    let seen = run(SEQUENCES / 5, 2, Rules { any_order: true, ..PLAIN });
    assert!(seen.refused > 1_000 && seen.holes == 0, "{seen:?}");
}

#[test]
fn what_graphs_write_is_read() {
    let seen = run(SEQUENCES / 5, 3, Rules { graphs: true, any_order: true, ..PLAIN });
    assert!(seen.read > 10_000 && seen.holes == 0, "{seen:?}");
}

#[test]
fn what_was_given_up_is_read() {
    let seen = run(SEQUENCES / 5, 4, Rules { limit: Some(2), graphs: true, ..PLAIN });
    assert!(seen.read > 10_000 && seen.holes == 0, "{seen:?}");
}

#[test]
fn bytes_that_move_are_followed() {
    for layers in [1, 3] {
        let seen = run(SEQUENCES / 10, 5, Rules { layers, copies: true, any_order: true, ..PLAIN });
        assert!(seen.read > 1_000, "{seen:?}");
        // One layer's routings differ in nothing but what arguments tell. Of several layers' only the first move of a program can go
        // unseen, which `call` checks.
        assert!(if layers == 1 { seen.holes == 0 } else { seen.holes * 20 < SEQUENCES / 10 }, "{seen:?}");
    }
}
