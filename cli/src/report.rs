//! What ranks report, and how it is printed.

use crate::bench::report::CaseTimes;
use crate::compare::Comparison;
use crate::routing::Problem;
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// The timed calls, in order.
pub const CALLS: [&str; 5] = ["prepare", "dispatch", "combine", "combine_bwd", "dispatch_bwd"];

/// What one rank did in one step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepReport {
    /// Tokens sent.
    pub tokens: usize,
    /// Entries that name an expert: rows sent, over all ranks.
    pub entries: usize,
    /// Rows received, without padding.
    pub received: usize,
    /// Rows of padding.
    pub padding: usize,
    /// Rows received by each local expert, with padding, as prepare counted them.
    pub counts: Vec<i32>,
    /// Milliseconds of each of [`CALLS`].
    pub milliseconds: Vec<f64>,
}

/// One line of digests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DigestLine {
    /// The step.
    pub step: usize,
    /// The output.
    pub output: String,
    /// Rows hashed.
    pub rows: usize,
    /// The hash, in hexadecimal.
    pub hash: String,
}

/// What one rank reports.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Why it failed, if it did; the rest is then what it had got to.
    pub error: Option<String>,
    /// The device's name and number.
    pub device: String,
    /// `nvte_ep_ext_version`.
    pub library: String,
    /// The library's file.
    pub library_path: String,
    /// NCCL's version.
    pub nccl: String,
    /// The file of NCCL EP, where it can be told.
    pub nccl_ep_path: Option<String>,
    /// Rows of the receive buffers.
    pub capacity: usize,
    /// The steps.
    pub steps: Vec<StepReport>,
    /// Every output's comparison over all steps.
    pub outputs: Vec<Comparison>,
    /// Digests, where asked for.
    pub digests: Vec<DigestLine>,
    /// What `bench` timed.
    pub cases: Vec<CaseTimes>,
}

impl RankReport {
    /// Elements that differ.
    pub fn wrong(&self) -> u64 {
        self.outputs.iter().map(|output| output.wrong).sum()
    }

    fn totals(&self, of: impl Fn(&StepReport) -> usize) -> usize {
        self.steps.iter().map(of).sum()
    }
}

/// What a run was asked for, and what all its ranks report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// The layer.
    pub problem: Problem,
    /// Token type.
    pub dtype: String,
    /// `cuda` or `host`.
    pub runtime: String,
    /// Why that runtime, in words.
    pub runtime_reason: String,
    /// What else the user should know.
    pub notes: Vec<String>,
    /// SM cap of a rank; 0 = the library's choice.
    pub max_sms: usize,
    /// Whether everything was compared and equal.
    pub passed: bool,
    /// The ranks, in order.
    pub ranks: Vec<RankReport>,
}

/// The last line of a run without a difference.
pub const PASSED: &str = "all checks passed";

/// Where something ran: the first lines of a report.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// `cuda` or `host`.
    pub runtime: &'a str,
    /// Why that runtime, in words.
    pub reason: &'a str,
    /// What else the user should know.
    pub notes: &'a [String],
    /// The ranks.
    pub ranks: &'a [RankReport],
}

impl Head<'_> {
    /// The lines.
    pub fn text(&self) -> String {
        let mut text = format!("runtime    {}: {}\n", self.runtime, self.reason);
        self.notes.iter().for_each(|note| text += &format!("           {note}\n"));
        let mut devices: Vec<&str> = self.ranks.iter().map(|rank| rank.device.as_str()).collect();
        devices.retain(|device| !device.is_empty());
        devices.dedup();
        if !devices.is_empty() {
            let _ = writeln!(text, "device     {}", devices.join(", "));
        }
        if let Some(first) = self.ranks.iter().find(|rank| !rank.nccl.is_empty()) {
            let _ = writeln!(text, "library    {} ({})", first.library, first.library_path);
            let _ = write!(text, "nccl       {}", first.nccl);
            let _ = match &first.nccl_ep_path {
                Some(path) => writeln!(text, ", NCCL EP from {path}"),
                None => writeln!(text),
            };
        }
        text
    }
}

impl RunReport {
    /// All comparisons of all ranks, by output.
    fn outputs(&self) -> Vec<Comparison> {
        let mut all: Vec<Comparison> = Vec::new();
        for output in self.ranks.iter().flat_map(|rank| &rank.outputs) {
            match all.iter_mut().find(|known| known.output == output.output) {
                Some(known) => known.merge(output.clone()),
                None => all.push(output.clone()),
            }
        }
        all
    }

    /// The readable report, the verdict last. Of a run in which a rank failed there is nothing to tabulate.
    pub fn text(&self) -> String {
        let mut text = self.head();
        let _ = writeln!(
            text,
            "experts    y = B (A x), inner dimension {}, computed on the host's processors, not on the device",
            self.problem.expert_dim
        );
        if self.ranks.iter().any(|rank| rank.error.is_some()) {
            return text + &self.verdict();
        }
        text += &self.traffic();
        text += &self.checks();
        text += &self.times();
        text += &self.digests();
        text += &self.verdict();
        text
    }

    fn head(&self) -> String {
        let p = &self.problem;
        let padding = if p.align > 1 { format!("slabs padded to {}", p.align) } else { "no padding".into() };
        let text = format!(
            "{} rank{}, up to {} tokens each, hidden {}, top-k {} of {} experts, {padding}, {}, {} step{}, seed {}\n",
            p.ranks,
            plural(p.ranks),
            p.tokens,
            p.hidden,
            p.top_k,
            p.experts,
            self.dtype,
            p.steps,
            plural(p.steps),
            p.seed
        );
        let head =
            Head { runtime: &self.runtime, reason: &self.runtime_reason, notes: &self.notes, ranks: &self.ranks };
        let mut text = text + &head.text();
        if let Some(first) = self.ranks.iter().find(|rank| rank.capacity > 0) {
            let sms = if self.max_sms == 0 { "automatic".into() } else { self.max_sms.to_string() };
            let _ = writeln!(text, "buffers    {} receive rows a rank, SMs a rank: {sms}", first.capacity);
        }
        text
    }

    fn traffic(&self) -> String {
        let head = ["rank", "tokens", "entries", "received", "padding", "rows of local experts, first step"];
        let mut table = Table::new(&head);
        for rank in &self.ranks {
            table.row(vec![
                rank.rank.to_string(),
                rank.totals(|step| step.tokens).to_string(),
                rank.totals(|step| step.entries).to_string(),
                rank.totals(|step| step.received).to_string(),
                rank.totals(|step| step.padding).to_string(),
                rank.steps.first().map_or(String::new(), |step| compact(&step.counts)),
            ]);
        }
        let steps = self.problem.steps;
        format!("\nsent and received over {steps} step{}\n{}", plural(steps), table.text())
    }

    fn checks(&self) -> String {
        let head = ["output", "elements", "wrong", "max error", "max error/size", "of bound", "compared"];
        let mut table = Table::new(&head);
        for output in self.outputs() {
            let exact = output.max_share == 0.0 && output.max_rel == 0.0;
            let number = |value: f64| if exact && value == 0.0 { "0".into() } else { format!("{value:.2e}") };
            table.row(vec![
                output.output.clone(),
                output.elements.to_string(),
                output.wrong.to_string(),
                number(output.max_abs),
                if exact { "-".into() } else { number(output.max_rel) },
                if exact { "-".into() } else { format!("{:.0} %", output.max_share * 100.0) },
                output.rule.clone(),
            ]);
        }
        format!(
            "\nchecks over all ranks and steps (size = sum of the magnitudes that make up an element)\n{}",
            table.text()
        )
    }

    fn times(&self) -> String {
        let later = self.problem.steps > 1;
        let mut head = vec!["rank"];
        head.extend(CALLS);
        let mut table = Table::new(&head);
        for rank in &self.ranks {
            let mut row = vec![rank.rank.to_string()];
            for call in 0..CALLS.len() {
                let of_steps: Vec<f64> = rank.steps.iter().filter_map(|s| s.milliseconds.get(call)).copied().collect();
                row.push(match of_steps.split_first() {
                    Some((first, rest)) if later => format!("{:.3} ({first:.3})", median(rest)),
                    Some((first, _)) => format!("({first:.3})"),
                    None => "-".into(),
                });
            }
            table.row(row);
        }
        let what = if later { "median after the first step (first step)" } else { "(first step)" };
        format!("\nmilliseconds a call on the stream: {what}\n{}", table.text())
    }

    fn digests(&self) -> String {
        let mut text = String::new();
        for step in 0..self.problem.steps {
            for rank in &self.ranks {
                for line in rank.digests.iter().filter(|line| line.step == step) {
                    let (rank, output, hash) = (rank.rank, &line.output, &line.hash);
                    let _ = writeln!(text, "digest step {step} rank {rank} {output} {hash} rows {}", line.rows);
                }
            }
        }
        if text.is_empty() { text } else { format!("\n{text}") }
    }

    /// The verdict: [`PASSED`], or what differed.
    fn verdict(&self) -> String {
        if self.passed { format!("\n{PASSED}\n") } else { failures(&self.ranks) }
    }
}

/// What failed and differed, at the end of a report.
pub fn failures(ranks: &[RankReport]) -> String {
    let mut text = String::from("\n");
    // Ranks that failed alike are told once.
    let mut errors: Vec<(&str, Vec<String>)> = Vec::new();
    for rank in ranks {
        let Some(error) = rank.error.as_deref() else { continue };
        match errors.iter_mut().find(|(known, _)| *known == error) {
            Some((_, ranks)) => ranks.push(rank.rank.to_string()),
            None => errors.push((error, vec![rank.rank.to_string()])),
        }
    }
    for (error, ranks) in &errors {
        let _ = writeln!(text, "rank{} {} failed: {error}", plural(ranks.len()), ranks.join(", "));
    }
    for rank in ranks {
        for output in rank.outputs.iter().filter(|output| output.wrong > 0) {
            let (name, wrong, all) = (&output.output, output.wrong, output.elements);
            let _ = writeln!(text, "{name} on rank {}: {wrong} of {all} elements differ", rank.rank);
            for m in &output.first {
                let (step, row, column) = (m.step, m.row, m.column);
                let (expected, got) = (&m.expected, &m.got);
                let _ = writeln!(text, "  step {step} row {row} column {column}: expected {expected}, got {got}");
            }
        }
    }
    text + "checks failed\n"
}

/// The end of a word that is counted.
pub fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// The middle value; of an even number the mean of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        even if even % 2 == 0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

/// Up to eight counts as they are; of more the smallest, median and largest, and how many are zero.
fn compact(counts: &[i32]) -> String {
    if counts.len() <= 8 {
        return counts.iter().map(i32::to_string).collect::<Vec<_>>().join(" ");
    }
    let as_floats: Vec<f64> = counts.iter().map(|&count| f64::from(count)).collect();
    let (least, most) = (counts.iter().min().unwrap_or(&0), counts.iter().max().unwrap_or(&0));
    let empty = counts.iter().filter(|&&count| count == 0).count();
    format!("{} experts: {least} to {most}, median {:.0}, {empty} empty", counts.len(), median(&as_floats))
}

/// Columns padded to their widest cell; numbers to the right, words to the left.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With the names of its columns.
    pub fn new(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|&name| name.into()).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// All of it.
    pub fn text(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let starts_with_digit = |cell: &String| cell.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '(');
        let right =
            |column: usize| column + 1 < columns && self.rows[1..].iter().all(|row| starts_with_digit(&row[column]));
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let (gap, width) = (if column == 0 { "" } else { "  " }, width(column));
                let _ = match right(column) {
                    true => write!(line, "{gap}{cell:>width$}"),
                    false => write!(line, "{gap}{cell:<width$}"),
                };
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::problem;

    fn report() -> RunReport {
        let mut result = Comparison::new("result", "f64 bound");
        result.bounded((0, 0, 0), 1.0, 1.0, 0.5, 1.25);
        let mut counts = Comparison::new("counts", "exact");
        counts.integer((0, 0, 0), 3, 3);
        let step = |scale: f64| StepReport {
            tokens: 10,
            entries: 19,
            received: 12,
            padding: 4,
            counts: vec![16, 0],
            milliseconds: vec![scale; 5],
        };
        let rank = |rank| RankReport {
            rank,
            device: "host".into(),
            library: "nvte_ep 0.1.0".into(),
            library_path: "libnvte_ep.so".into(),
            nccl: "2.30.7".into(),
            capacity: 64,
            steps: vec![step(9.0), step(1.0), step(3.0)],
            outputs: vec![counts.clone(), result.clone()],
            ..RankReport::default()
        };
        let mut problem = problem(2, 10, 2, 4, 16);
        problem.steps = 3;
        RunReport {
            problem,
            dtype: "bf16".into(),
            runtime: "host".into(),
            runtime_reason: "asked for".into(),
            notes: Vec::new(),
            max_sms: 0,
            passed: true,
            ranks: vec![rank(0), rank(1)],
        }
    }

    #[test]
    fn tables() {
        let text = report().text();
        assert!(text.ends_with("\n\nall checks passed\n"), "{text}");
        for line in [
            "2 ranks, up to 10 tokens each, hidden 16, top-k 2 of 4 experts, slabs padded to 16, bf16, 3 steps, seed 7",
            "rank  tokens  entries  received  padding  rows of local experts, first step",
            "   0      30       57        36       12  16 0",
            "output  elements  wrong  max error  max error/size  of bound  compared",
            "counts         2      0          0               -         -  exact",
            "result         2      0   2.50e-1         2.50e-1      50 %  f64 bound",
            "   1  2.000 (9.000)  2.000 (9.000)  2.000 (9.000)  2.000 (9.000)  2.000 (9.000)",
        ] {
            assert!(text.lines().any(|l| l.split_whitespace().eq(line.split_whitespace())), "{line}\n{text}");
        }
    }

    #[test]
    fn a_difference_is_told_with_its_place() {
        let mut report = report();
        report.passed = false;
        report.ranks[1].outputs[0].integer((2, 0, 1), 16, 15);
        let text = report.text();
        assert!(text.contains("counts on rank 1: 1 of 2 elements differ\n"), "{text}");
        assert!(text.contains("  step 2 row 0 column 1: expected 16, got 15\n"), "{text}");
        assert!(text.ends_with("checks failed\n") && !text.contains(PASSED));
        report.ranks[0].error = Some("no memory".into());
        let text = report.text();
        assert!(text.contains("rank 0 failed: no memory\n") && !text.contains("milliseconds"), "{text}");
    }

    #[test]
    fn medians_and_many_experts() {
        assert_eq!((median(&[]), median(&[3.0, 1.0, 2.0]), median(&[1.0, 2.0])), (0.0, 2.0, 1.5));
        assert_eq!(compact(&[1, 2]), "1 2");
        assert_eq!(compact(&[0, 1, 2, 3, 4, 5, 6, 7, 99]), "9 experts: 0 to 99, median 4, 1 empty");
    }

    #[test]
    fn reports_survive_the_way_between_processes() {
        let rank = report().ranks.remove(0);
        let text = serde_json::to_string(&rank).unwrap();
        assert_eq!(serde_json::from_str::<RankReport>(&text).unwrap(), rank);
    }
}
