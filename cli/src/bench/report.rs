//! What `bench` found: of each rank, and of all of them as a table, as JSON and as CSV.

use super::Case;
use crate::report::{DigestLine, Head, RankReport, Table, failures, median, plural};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// What is timed, in order. A step is the first five, one behind the other.
pub const TIMED: [&str; 7] =
    ["prepare", "dispatch", "combine", "combine_bwd", "dispatch_bwd", "prepare + dispatch", "step"];

/// One case as one rank saw it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CaseTimes {
    /// Rows of the receive buffers.
    pub capacity: usize,
    /// Gigabytes a second that the device copied.
    pub copy_gb_per_s: f64,
    /// Each kind of group.
    pub groups: Vec<GroupTimes>,
}

/// One kind of group as one rank saw it, over all rounds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct GroupTimes {
    /// "staged" or "zero-copy".
    pub transfer: String,
    /// Whether it is of the library of --against.
    pub against: bool,
    /// What the library says it is.
    pub library: Option<String>,
    /// Its file.
    pub library_path: String,
    /// Seconds of each initialize.
    pub initialize_s: Vec<f64>,
    /// Seconds of each first step, in which kernels are compiled and loaded.
    pub first_step_s: Vec<f64>,
    /// Seconds of each second step, in which there is nothing left to compile.
    pub second_step_s: Vec<f64>,
    /// Microseconds on the device of each of [`TIMED`] in each iteration.
    pub device_us: Vec<Vec<f64>>,
    /// And those of the calling thread.
    pub host_us: Vec<Vec<f64>>,
    /// Device memory; none of a library that does not tell.
    pub memory: Option<GroupMemory>,
    /// Hash of every output.
    pub digests: Vec<DigestLine>,
    /// Variables of NCCL EP that the library set for the process, which were set back.
    pub set_variables: Vec<String>,
}

impl GroupTimes {
    /// Adds another round.
    pub fn add(&mut self, more: Self) {
        self.initialize_s.extend(more.initialize_s);
        self.first_step_s.extend(more.first_step_s);
        self.second_step_s.extend(more.second_step_s);
        let pairs = self.device_us.iter_mut().zip(more.device_us).chain(self.host_us.iter_mut().zip(more.host_us));
        pairs.for_each(|(all, more)| all.extend(more));
    }
}

/// Bytes of device memory of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GroupMemory {
    /// NCCL EP's staging, by `nvte_ep_ext_memory_usage`.
    pub staging: u64,
    /// Its routing map and workspace.
    pub scratch: u64,
    /// The layer's handle memory.
    pub handle: u64,
    /// The symmetric pool.
    pub symmetric: u64,
    /// All of these: what making the group and the layer should take.
    pub predicted: u64,
    /// What it took by the driver; none where that cannot be told.
    pub measured: Option<u64>,
    /// The exchanged payloads, which lie in the pool or, staged, in the caller's memory.
    pub payloads: u64,
}

/// Microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Time {
    /// The median, of the slowest rank.
    pub median: f64,
    /// The 99 % quantile, of the slowest rank.
    pub p99: f64,
}

impl Time {
    fn of_slowest<'a>(ranks: impl Iterator<Item = &'a Vec<f64>> + Clone) -> Self {
        let most = |of: fn(&[f64]) -> f64| ranks.clone().map(|times| of(times)).fold(0.0, f64::max);
        Self { median: most(median), p99: most(p99) }
    }
}

fn p99(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (sorted.len() * 99).div_ceil(100);
    sorted.get(place.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// One call of one kind of group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallResult {
    /// The call.
    pub call: String,
    /// On the device.
    pub device_us: Time,
    /// Of the calling thread.
    pub host_us: Time,
    /// Bytes of rows that the rank with most rows receives or gives back; none for a call that moves indices alone.
    pub bytes: Option<u64>,
    /// These bytes over the median of the device.
    pub gb_per_s: Option<f64>,
    /// Of what the device copies.
    pub of_copy_ceiling: Option<f64>,
    /// Of the link that --link-gb-per-s gives: what the rank that sends most rows to others sends, over the median.
    pub of_link: Option<f64>,
    /// This library's median over that of --against with the same transfer, on the device.
    pub device_ratio: Option<f64>,
    /// And on the host.
    pub host_ratio: Option<f64>,
}

/// One kind of group over all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupResult {
    /// "staged" or "zero-copy".
    pub transfer: String,
    /// Whether it is of the library of --against.
    pub against: bool,
    /// What the library says it is.
    pub library: Option<String>,
    /// Its file.
    pub library_path: String,
    /// Seconds of the slowest first initialize.
    pub initialize_s: f64,
    /// Seconds of the slowest first step.
    pub first_step_s: f64,
    /// The calls.
    pub calls: Vec<CallResult>,
    /// Device memory of the rank that takes most.
    pub memory: Option<GroupMemory>,
    /// Variables of NCCL EP that the library set for the process; they did not reach the other.
    pub set_variables: Vec<String>,
}

/// One case over all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    /// What was asked for.
    pub case: Case,
    /// Rows of the receive buffers.
    pub capacity: usize,
    /// Rows of each expert, without padding.
    pub expert_rows: Vec<usize>,
    /// Rows that each rank receives, without padding.
    pub received: Vec<usize>,
    /// Rows of padding of each rank.
    pub padding: Vec<usize>,
    /// Rows that each rank sends to others.
    pub sent: Vec<usize>,
    /// Gigabytes a second that the slowest rank's device copied, all ranks at once.
    pub copy_gb_per_s: f64,
    /// The kinds of groups.
    pub groups: Vec<GroupResult>,
    /// Outputs that are not the same bits in all groups of one library.
    pub different: Vec<String>,
    /// Outputs that are not the same bits in the two libraries, which may sum in another order.
    pub different_from_other: Vec<String>,
}

/// All of a bench.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// Version of this form.
    pub schema: u32,
    /// The command line.
    pub command: Vec<String>,
    /// This program's version.
    pub version: String,
    /// Where it ran.
    pub machine: Machine,
    /// Whether calls were replayed from graphs.
    pub graph: bool,
    /// Iterations of a round.
    pub iterations: usize,
    /// Rounds, in which the libraries take turns.
    pub rounds: usize,
    /// Whether every case gave what it should.
    pub passed: bool,
    /// What failed.
    pub errors: Vec<String>,
    /// The cases that were timed.
    pub cases: Vec<CaseResult>,
}

/// Version of the JSON.
pub const SCHEMA: u32 = 1;

/// The machine.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Machine {
    /// `cuda` or `host`.
    pub runtime: String,
    /// The devices.
    pub devices: Vec<String>,
    /// The driver, where there is one.
    pub driver: Option<String>,
    /// The processor.
    pub processor: Option<String>,
    /// NCCL's version.
    pub nccl: String,
    /// NCCL EP's file.
    pub nccl_ep_path: Option<String>,
}

/// A line of a file that begins so, behind its colon.
fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

impl Machine {
    /// That of the ranks, and of this process.
    pub fn of(runtime: &str, ranks: &[RankReport]) -> Self {
        let mut devices: Vec<String> = ranks.iter().map(|rank| rank.device.clone()).filter(|d| !d.is_empty()).collect();
        devices.dedup();
        Self {
            runtime: runtime.into(),
            devices,
            driver: field("/proc/driver/nvidia/version", "NVRM version").filter(|_| runtime == "cuda"),
            processor: field("/proc/cpuinfo", "model name"),
            nccl: ranks.first().map_or_else(String::new, |rank| rank.nccl.clone()),
            nccl_ep_path: ranks.iter().find_map(|rank| rank.nccl_ep_path.clone()),
        }
    }
}

/// Rows that a call moves to the rank with most of them, or back, and bytes of one.
fn moved(call: usize, case: &Case, rows: usize) -> Option<u64> {
    let hidden = case.problem.hidden;
    let (dispatched, combined) = (case.dtype.dispatched_bytes(hidden), case.dtype.combined_bytes(hidden));
    let row = match call {
        1 | 3 | 5 => dispatched,
        2 | 4 => combined,
        6 => 2 * (dispatched + combined),
        _ => return None,
    };
    Some((rows * row) as u64)
}

/// Outputs of two groups that differ, with their ranks.
fn differences(ranks: &[&CaseTimes], first: usize, second: usize) -> Vec<String> {
    let mut found = Vec::new();
    for (rank, times) in ranks.iter().enumerate() {
        let (first, second) = (&times.groups[first].digests, &times.groups[second].digests);
        let pairs = first.iter().zip(second).filter(|(a, b)| a != b);
        found.extend(pairs.map(|(a, b)| format!("{} on rank {rank}: {} and {}", a.output, a.hash, b.hash)));
    }
    found
}

impl CaseResult {
    /// Of the ranks' times of one case.
    pub fn of(
        case: &Case,
        traffic: &super::traffic::Traffic,
        ranks: &[&CaseTimes],
        link_gb_per_s: Option<f64>,
    ) -> Self {
        let copy_gb_per_s = ranks.iter().map(|rank| rank.copy_gb_per_s).fold(f64::INFINITY, f64::min);
        let count = ranks.iter().map(|rank| rank.groups.len()).min().unwrap_or(0);
        let most = |rows: &[usize]| rows.iter().copied().max().unwrap_or(0);
        let (received, sent) = (most(&traffic.received), most(&traffic.sent));
        let mut groups: Vec<GroupResult> = (0..count)
            .map(|group| {
                let of = || ranks.iter().map(move |rank| &rank.groups[group]);
                let first = &ranks[0].groups[group];
                let slowest =
                    |of_group: fn(&GroupTimes) -> Option<&f64>| of().filter_map(of_group).copied().fold(0.0, f64::max);
                let result = |(call, name): (usize, &&str)| {
                    let device_us = Time::of_slowest(of().map(|times| &times.device_us[call]));
                    let bytes = moved(call, case, received);
                    let gb_per_s = bytes.map(|bytes| bytes as f64 / device_us.median.max(f64::MIN_POSITIVE) / 1e3);
                    let on_link = moved(call, case, sent).zip(link_gb_per_s);
                    CallResult {
                        call: (*name).into(),
                        device_us,
                        host_us: Time::of_slowest(of().map(|times| &times.host_us[call])),
                        bytes,
                        gb_per_s,
                        of_copy_ceiling: gb_per_s.map(|gb| gb / copy_gb_per_s),
                        of_link: on_link.map(|(bytes, link)| bytes as f64 / device_us.median / 1e3 / link),
                        device_ratio: None,
                        host_ratio: None,
                    }
                };
                GroupResult {
                    transfer: first.transfer.clone(),
                    against: first.against,
                    library: first.library.clone(),
                    library_path: first.library_path.clone(),
                    initialize_s: slowest(|times| times.initialize_s.first()),
                    first_step_s: slowest(|times| times.first_step_s.first()),
                    calls: TIMED.iter().enumerate().map(result).collect(),
                    memory: of().filter_map(|times| times.memory).max_by_key(|memory| memory.predicted),
                    set_variables: first.set_variables.clone(),
                }
            })
            .collect();
        let others = groups.clone();
        for group in groups.iter_mut().filter(|group| !group.against) {
            let Some(other) = others.iter().find(|other| other.against && other.transfer == group.transfer) else {
                continue;
            };
            for (call, other) in group.calls.iter_mut().zip(&other.calls) {
                call.device_ratio = Some(call.device_us.median / other.device_us.median);
                call.host_ratio = Some(call.host_us.median / other.host_us.median);
            }
        }
        let of_library = |against: bool| (0..count).filter(move |&group| others[group].against == against);
        let (mut different, mut different_from_other) = (Vec::new(), Vec::new());
        let first = |against: bool| of_library.clone()(against).next();
        for against in [false, true] {
            let Some(first) = first(against) else { continue };
            let rest = of_library.clone()(against).skip(1);
            different.extend(rest.flat_map(|group| differences(ranks, first, group)));
        }
        if let (Some(own), Some(other)) = (first(false), first(true)) {
            different_from_other = differences(ranks, own, other);
        }
        Self {
            case: case.clone(),
            capacity: ranks.first().map_or(0, |rank| rank.capacity),
            expert_rows: traffic.expert_rows.clone(),
            received: traffic.received.clone(),
            padding: traffic.padding.clone(),
            sent: traffic.sent.clone(),
            copy_gb_per_s,
            groups,
            different,
            different_from_other,
        }
    }

    /// What was timed, in a line.
    pub fn title(&self) -> String {
        let (p, dtype) = (&self.case.problem, self.case.dtype.name());
        let padding = if p.align > 1 { format!("slabs padded to {}", p.align) } else { "no padding".into() };
        let sms = self.case.max_sms.map_or_else(|| "automatic".into(), |sms| sms.to_string());
        format!(
            "{} rank{}, {} tokens each, hidden {}, top-k {} of {} experts, {padding}, {dtype}, {} routing, SMs a rank: {sms}",
            p.ranks,
            plural(p.ranks),
            p.tokens,
            p.hidden,
            p.top_k,
            p.experts,
            self.case.routing.name(),
        )
    }

    fn text(&self) -> String {
        let mut text = format!("{}\n", self.title());
        let range = |rows: &[usize]| {
            let (least, most) = (rows.iter().min().unwrap_or(&0), rows.iter().max().unwrap_or(&0));
            if least == most { most.to_string() } else { format!("{least} to {most}") }
        };
        let (received, padding, sent) = (range(&self.received), range(&self.padding), range(&self.sent));
        let _ = writeln!(
            text,
            "rows a rank: {received} received, {padding} of padding, {sent} sent to others; buffers of {}; copies {:.1} GB/s",
            self.capacity, self.copy_gb_per_s
        );
        let ratios = self.groups.iter().any(|group| group.against);
        let link = self.groups.iter().flat_map(|group| &group.calls).any(|call| call.of_link.is_some());
        let mut head = vec!["call", "group", "device us", "p99", "host us", "p99", "GB/s", "of copy"];
        head.extend(link.then_some("of link"));
        head.extend(ratios.then_some(["device ratio", "host ratio"]).into_iter().flatten());
        let mut table = Table::new(&head);
        let number =
            |value: Option<f64>, digits: usize| value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"));
        let percent = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{:.0} %", value * 100.0));
        for call in 0..TIMED.len() {
            for group in &self.groups {
                let result = &group.calls[call];
                let mut row = vec![
                    result.call.clone(),
                    group.name(),
                    format!("{:.1}", result.device_us.median),
                    format!("{:.1}", result.device_us.p99),
                    format!("{:.1}", result.host_us.median),
                    format!("{:.1}", result.host_us.p99),
                    number(result.gb_per_s, 1),
                    percent(result.of_copy_ceiling),
                ];
                row.extend(link.then(|| percent(result.of_link)));
                row.extend(
                    ratios
                        .then(|| [number(result.device_ratio, 3), number(result.host_ratio, 3)])
                        .into_iter()
                        .flatten(),
                );
                table.row(row);
            }
        }
        text += &table.text();
        text += &self.memory_text();
        for group in &self.groups {
            let (name, begin, first) = (group.name(), group.initialize_s, group.first_step_s);
            let _ = writeln!(text, "{name}: initialize {begin:.3} s, first step {first:.3} s");
            if !group.set_variables.is_empty() {
                let names = group.set_variables.join(", ");
                let _ = writeln!(text, "{name}: set {names} for the process, which were set back");
            }
        }
        self.different.iter().for_each(|line| text += &format!("differs between groups: {line}\n"));
        self.different_from_other.iter().for_each(|line| text += &format!("differs between libraries: {line}\n"));
        if self.groups.len() > 1 && self.different.is_empty() && self.different_from_other.is_empty() {
            text += "all groups give the same bits\n";
        }
        text
    }

    fn memory_text(&self) -> String {
        let told: Vec<(&GroupResult, GroupMemory)> =
            self.groups.iter().filter_map(|group| Some((group, group.memory?))).collect();
        if told.is_empty() {
            return String::new();
        }
        let mut head = vec!["memory of a rank, MiB".to_owned()];
        head.extend(told.iter().map(|(group, _)| group.name()));
        let mut table = Table::new(&head.iter().map(String::as_str).collect::<Vec<_>>());
        type Of = fn(&GroupMemory) -> u64;
        let parts: [(&str, Of); 6] = [
            ("staging", |m| m.staging),
            ("routing map, workspace", |m| m.scratch),
            ("handle memory", |m| m.handle),
            ("symmetric pool", |m| m.symmetric),
            ("predicted", |m| m.predicted),
            ("payloads (in the pool, or the caller's)", |m| m.payloads),
        ];
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        for (title, part) in parts {
            table.row(
                std::iter::once(title.to_owned()).chain(told.iter().map(|(_, memory)| mib(part(memory)))).collect(),
            );
        }
        let measured = |memory: &GroupMemory| match memory.measured {
            Some(bytes) => {
                format!("{} ({:.1} % predicted)", mib(bytes), memory.predicted as f64 * 100.0 / bytes.max(1) as f64)
            }
            None => "not measured".into(),
        };
        table.row(
            std::iter::once("measured".to_owned()).chain(told.iter().map(|(_, memory)| measured(memory))).collect(),
        );
        format!("\n{}\n", table.text())
    }
}

impl GroupResult {
    /// The transfer, and whose it is where there are two libraries.
    pub fn name(&self) -> String {
        if self.against { format!("{}, other", self.transfer) } else { self.transfer.clone() }
    }
}

impl BenchReport {
    /// The readable report.
    pub fn text(&self, head: &Head, verdict: &str) -> String {
        let mut text = head.text();
        let how = if self.graph { "replays of graphs" } else { "calls" };
        let (iterations, rounds) = (self.iterations, self.rounds);
        let _ = writeln!(
            text,
            "times      of {how}, {iterations} iterations in {rounds} round{}, slowest rank",
            plural(rounds)
        );
        for group in self.cases.first().iter().flat_map(|case| &case.groups).filter(|group| group.against).take(1) {
            let name = group.library.as_deref().unwrap_or("another library");
            let _ = writeln!(text, "other      {name} ({})", group.library_path);
        }
        for case in &self.cases {
            text += &format!("\n{}", case.text());
        }
        text + verdict
    }

    /// A line for each case, group and call; the names of the columns come first.
    pub fn csv(&self) -> String {
        let mut text = String::from(
            "ranks,tokens,hidden,top_k,experts,align,dtype,routing,max_sms,graph,transfer,against,library,call,device_us,\
             device_us_p99,host_us,host_us_p99,bytes,gb_per_s,copy_gb_per_s,device_ratio,host_ratio\n",
        );
        for result in &self.cases {
            let (case, p) = (&result.case, &result.case.problem);
            for group in &result.groups {
                for call in &group.calls {
                    let optional = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.4}"));
                    let sms = case.max_sms.map_or_else(String::new, |sms| sms.to_string());
                    let cells = [
                        p.ranks.to_string(),
                        p.tokens.to_string(),
                        p.hidden.to_string(),
                        p.top_k.to_string(),
                        p.experts.to_string(),
                        p.align.to_string(),
                        case.dtype.name().into(),
                        case.routing.name().into(),
                        sms,
                        self.graph.to_string(),
                        group.transfer.clone(),
                        group.against.to_string(),
                        quoted(&group.library_path),
                        call.call.clone(),
                        format!("{:.3}", call.device_us.median),
                        format!("{:.3}", call.device_us.p99),
                        format!("{:.3}", call.host_us.median),
                        format!("{:.3}", call.host_us.p99),
                        call.bytes.map_or_else(String::new, |bytes| bytes.to_string()),
                        optional(call.gb_per_s),
                        format!("{:.2}", result.copy_gb_per_s),
                        optional(call.device_ratio),
                        optional(call.host_ratio),
                    ];
                    text += &(cells.join(",") + "\n");
                }
            }
        }
        text
    }
}

/// A cell of CSV that may hold anything.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

/// The end of the report: what failed, or that nothing did.
pub fn verdict(ranks: &[RankReport], passed: bool) -> String {
    if passed { format!("\n{}\n", crate::report::PASSED) } else { failures(ranks) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench::RowType;
    use crate::bench::traffic::{Kind, Traffic, routings};
    use crate::routing::tests::problem;

    fn group(transfer: &str, against: bool, scale: f64, hash: &str) -> GroupTimes {
        let times = |scale: f64| -> Vec<Vec<f64>> {
            (1..=TIMED.len()).map(|call| [9.0, 1.0, 2.0].iter().map(|t| t * scale * call as f64).collect()).collect()
        };
        let memory = GroupMemory {
            staging: 3 << 20,
            scratch: 1 << 20,
            handle: 1 << 19,
            symmetric: 0,
            predicted: 9 << 19,
            measured: Some(5 << 20),
            payloads: 1 << 18,
        };
        GroupTimes {
            transfer: transfer.into(),
            against,
            library: (!against).then(|| "libnvte_ep 0.1.0 (register_layer ABI)".into()),
            library_path: if against { "/opt/libtransformer_engine.so".into() } else { "/lib/libnvte_ep.so".into() },
            initialize_s: vec![0.25],
            first_step_s: vec![2.0 * scale],
            second_step_s: vec![0.1],
            device_us: times(10.0 * scale),
            host_us: times(scale),
            memory: (!against).then_some(memory),
            digests: vec![DigestLine { step: 0, output: "result".into(), rows: 1, hash: hash.into() }],
            set_variables: if against { vec!["NCCL_EP_JIT_CACHE_DIR".into()] } else { Vec::new() },
        }
    }

    pub(crate) fn report(other: &str) -> (BenchReport, Vec<RankReport>) {
        let problem = problem(2, 10, 2, 4, 16);
        let case = Case { problem: problem.clone(), dtype: RowType::Bf16, routing: Kind::Hot, max_sms: Some(16) };
        let traffic = Traffic::of(&problem, &routings(&problem, Kind::Hot, None).unwrap());
        let times = |scale: f64| CaseTimes {
            capacity: 128,
            copy_gb_per_s: 0.1,
            groups: vec![
                group("staged", false, scale, "same"),
                group("zero-copy", false, 2.0 * scale, "same"),
                group("staged", true, 4.0, other),
            ],
        };
        let (slow, fast) = (times(2.0), times(1.0));
        let result = CaseResult::of(&case, &traffic, &[&slow, &fast], Some(0.1));
        let rank = |rank, cases| RankReport {
            rank,
            device: "NVIDIA H200 (0, 132 SMs)".into(),
            library: "libnvte_ep 0.1.0 (register_layer ABI)".into(),
            library_path: "/lib/libnvte_ep.so".into(),
            nccl: "2.30.7".into(),
            cases: vec![cases],
            ..RankReport::default()
        };
        let ranks = vec![rank(0, slow), rank(1, fast)];
        let report = BenchReport {
            schema: SCHEMA,
            command: vec!["nvte-ep".into(), "bench".into()],
            version: "0.1.0".into(),
            machine: Machine::of("host", &ranks),
            graph: false,
            iterations: 3,
            rounds: 3,
            passed: true,
            errors: Vec::new(),
            cases: vec![result],
        };
        (report, ranks)
    }

    #[test]
    fn the_report_for_people() {
        let (report, ranks) = report("another");
        let head = Head { runtime: "cuda", reason: "found 1 GPU", notes: &[], ranks: &ranks };
        insta::assert_snapshot!(report.text(&head, &verdict(&ranks, true)));
    }

    #[test]
    fn the_slowest_rank_counts_and_ratios_are_of_the_same_transfer() {
        let (report, _) = report("same");
        let case = &report.cases[0];
        assert!(case.different_from_other.is_empty() && case.different.is_empty());
        let [staged, zero_copy, other] = [0, 1, 2].map(|group| &case.groups[group].calls[1]);
        assert_eq!((staged.device_us.median, staged.device_us.p99), (80.0, 360.0));
        assert_eq!((staged.device_ratio, zero_copy.device_ratio, other.device_ratio), (Some(0.5), None, None));
        // 20 rows or more of 32 bytes.
        let rows = *case.received.iter().max().unwrap() as u64;
        assert_eq!((staged.bytes, staged.gb_per_s), (Some(rows * 32), Some(rows as f64 * 32.0 / 80e3)));
    }

    #[test]
    fn a_line_for_each_call_and_a_report_that_can_be_read_again() {
        let (report, _) = report("same");
        let csv = report.csv();
        assert_eq!(csv.lines().count(), 1 + 3 * 7);
        let line = "2,10,16,2,4,16,bf16,hot,16,false,staged,false,/lib/libnvte_ep.so,prepare,40.000,180.000,4.000,18.000,,,0.10,0.5000,0.5000";
        assert_eq!(csv.lines().nth(1), Some(line));
        assert_eq!(quoted("a,\"b"), "\"a,\"\"b\"");
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<BenchReport>(&text).unwrap(), report);
    }
}
