//! `nvte-ep plan`: what a group takes and sends, from its configuration alone.
//!
//! Memory is [`nvte_ep_core::memory`]'s. Traffic is what a uniform routing amounts to on average: each token names `top_k`
//! different experts, every choice as likely as any other. A token goes once to each other NVLink domain that it has an expert
//! in, from there, and within its own domain, once to each rank that it has an expert on. So does its result, the other way.

use crate::Outcome;
use crate::args::positive;
use crate::element::Dtype;
use crate::report::Table;
use clap::Args;
use nvte_ep_core::config::{Dialect, GroupConfig, GroupRequest, LayerConfig};
use nvte_ep_core::memory::{GroupMemory, handle_bytes};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;

/// The arguments of `plan`.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Ranks of the group; several numbers, a line each.
    #[arg(short = 'n', long, value_name = "N,..", value_delimiter = ',', default_value = "4")]
    pub ranks: Vec<usize>,
    /// Ranks of an NVLink domain: the GPUs of a machine, or of an NVL72 rack.
    #[arg(long, value_name = "D", default_value_t = 8)]
    pub ranks_per_domain: usize,
    /// Tokens of a rank.
    #[arg(long, value_name = "T", default_value_t = 512)]
    pub tokens: usize,
    /// Elements of a token.
    #[arg(long, value_name = "H", default_value_t = 1024)]
    pub hidden: usize,
    /// Experts of a token.
    #[arg(long, value_name = "K", default_value_t = 4)]
    pub top_k: usize,
    /// Experts over all ranks.
    #[arg(long, value_name = "E", default_value_t = 16)]
    pub experts: usize,
    /// Data type of tokens.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    pub dtype: Dtype,
    /// Receive rows as a multiple of the mean, T * K [default: as many as any routing needs].
    #[arg(long, value_name = "F", value_parser = positive_number)]
    pub capacity_factor: Option<f64>,
    /// A zero-copy group.
    #[arg(long)]
    pub zero_copy: bool,
    /// Multiprocessors of a device.
    #[arg(long, value_name = "N", default_value_t = 132)]
    pub sms: u32,
    /// What a GPU's NVLinks carry in one direction, in gigabytes a second: the least time of a call is told.
    #[arg(long, value_name = "GB/S", value_parser = positive_number)]
    pub link_gb_per_s: Option<f64>,
    /// What a GPU's network adapter carries in one direction, in gigabytes a second.
    #[arg(long, value_name = "GB/S", value_parser = positive_number)]
    pub rail_gb_per_s: Option<f64>,
    /// Print machine-readable results.
    #[arg(long)]
    pub json: bool,
}

fn positive_number(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| "it must be a number above 0".to_owned())
}

/// What one number of ranks takes; bytes are those of a rank.
#[derive(Debug, Serialize, PartialEq)]
struct Plan {
    ranks: usize,
    domains: usize,
    experts_per_rank: usize,
    /// Rows that a rank receives on average, without padding.
    mean_rows: usize,
    /// Rows of its receive buffers.
    capacity: usize,
    /// NCCL EP's buffers, all of them.
    group_bytes: u64,
    /// Of these, what is for other domains.
    network_bytes: u64,
    /// A layer's handle memory.
    handle_bytes: u64,
    /// One receive buffer of tokens, which the program allocates.
    receive_bytes: u64,
    dispatch: Traffic,
    combine: Traffic,
}

/// Bytes that a rank sends in one call, on average.
#[derive(Debug, Serialize, PartialEq)]
struct Traffic {
    nvlink_bytes: u64,
    rail_bytes: u64,
    /// The least time over links of the given speed; none where it is not given.
    nvlink_ms: Option<f64>,
    rail_ms: Option<f64>,
}

/// All that `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    schema: u32,
    version: &'a str,
    tokens: usize,
    hidden: usize,
    top_k: usize,
    experts: usize,
    dtype: &'a str,
    zero_copy: bool,
    ranks_per_domain: usize,
    plans: Vec<Plan>,
    notes: Vec<String>,
}

/// Prints the plan.
pub fn run(args: &PlanArgs) -> Outcome<ExitCode> {
    let text = text(args)?;
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("cannot write to standard output: {error}"))?;
    Ok(ExitCode::SUCCESS)
}

fn text(args: &PlanArgs) -> Outcome<String> {
    let plans = args.ranks.iter().map(|&ranks| Plan::of(args, ranks)).collect::<Outcome<Vec<_>>>()?;
    let report = Report {
        schema: 1,
        version: env!("CARGO_PKG_VERSION"),
        tokens: args.tokens,
        hidden: args.hidden,
        top_k: args.top_k,
        experts: args.experts,
        dtype: args.dtype.name(),
        zero_copy: args.zero_copy,
        ranks_per_domain: args.ranks_per_domain,
        notes: notes(&plans),
        plans,
    };
    if args.json {
        return Ok(serde_json::to_string_pretty(&report)? + "\n");
    }
    Ok(report.text(args))
}

/// The chance that none of `top_k` different experts of `experts` is among `some` of them.
fn missed(experts: usize, some: usize, top_k: usize) -> f64 {
    (0..top_k).map(|k| experts.saturating_sub(some + k) as f64 / (experts - k) as f64).product()
}

impl Plan {
    fn of(args: &PlanArgs, ranks: usize) -> Outcome<Self> {
        let PlanArgs { tokens, hidden, top_k, experts, ranks_per_domain, .. } = *args;
        for (name, value, limit) in [
            ("--ranks", ranks, 1 << 16),
            ("--ranks-per-domain", ranks_per_domain, 1 << 16),
            ("--tokens", tokens, 1 << 20),
            ("--hidden", hidden, 1 << 20),
            ("--experts", experts, 1 << 20),
            ("--top-k", top_k, 1 << 10),
        ] {
            positive(name, value, limit)?;
        }
        if !experts.is_multiple_of(ranks) {
            return Err(format!("--experts must be a multiple of the {ranks} ranks, got {experts}").into());
        }
        if ranks > ranks_per_domain && !ranks.is_multiple_of(ranks_per_domain) {
            let rule = "NVLink domains are of one size";
            return Err(format!(
                "--ranks must be a multiple of --ranks-per-domain, {ranks_per_domain} ({rule}), got {ranks}"
            )
            .into());
        }
        if top_k > experts {
            return Err(format!("--top-k must be at most the {experts} experts, got {top_k}").into());
        }
        let (domains, domain) = (ranks.div_ceil(ranks_per_domain), ranks.min(ranks_per_domain));
        let local = experts / ranks;
        // The rules count a rank's tokens by 4.
        let least = tokens.next_multiple_of(4);
        let capacity = match args.capacity_factor {
            Some(factor) => ((factor * (tokens * top_k) as f64).ceil() as usize).max(least),
            None => ranks * least * top_k.min(local),
        };
        let int = |name: &str, value: usize| {
            i32::try_from(value)
                .map_err(|_| format!("{name} is {value}, more than fits 32 bits: lower --capacity-factor"))
        };
        let config = GroupConfig::try_from(GroupRequest {
            ep_size: int("--ranks", ranks)?,
            num_experts: int("--experts", experts)?,
            max_tokens_per_rank: int("--tokens", tokens)?,
            max_recv_tokens_per_rank: int("the capacity", capacity)?,
            hidden_dim: int("--hidden", hidden)?,
            max_num_sms: 0,
            max_token_dtype: args.dtype.code(),
            zero_copy: i32::from(args.zero_copy),
            allow_handle_mem_reloc: 0,
            num_topk: 0,
            drop_on_overflow: 0,
            dialect: Dialect::REGISTER_LAYER,
        })?;
        LayerConfig::parse("layer_config", int("--top-k", top_k)?, 0)?.check_against(&config)?;
        let group = GroupMemory::of(&config, domains as u32);
        let [.., network_bytes] = GroupMemory::staging_parts(&config, domains as u32);

        let row = (hidden * args.dtype.bytes()) as f64;
        // A token takes the weights of a domain's experts along.
        let weights = (4 * experts / domains) as f64;
        let nvlink = (tokens * domains * (domain - 1)) as f64 * (1.0 - missed(experts, local, top_k));
        let rail = (tokens * (domains - 1)) as f64 * (1.0 - missed(experts, local * domain, top_k));
        let traffic = |bytes: f64| {
            let (nvlink, rail) = (nvlink * bytes, rail * bytes);
            let time = |bytes: f64, speed: Option<f64>| speed.map(|gigabytes| bytes / gigabytes / 1e6);
            Traffic {
                nvlink_bytes: nvlink.round() as u64,
                rail_bytes: rail.round() as u64,
                nvlink_ms: time(nvlink, args.link_gb_per_s),
                rail_ms: time(rail, args.rail_gb_per_s),
            }
        };
        Ok(Self {
            ranks,
            domains,
            experts_per_rank: local,
            mean_rows: tokens * top_k,
            capacity,
            group_bytes: group.total(),
            network_bytes,
            handle_bytes: handle_bytes(&config, top_k as u32, args.sms, domains as u32),
            receive_bytes: (capacity as f64 * row) as u64,
            dispatch: traffic(row + weights),
            combine: traffic(row),
        })
    }
}

/// What NCCL EP does not take, or does not promise.
fn notes(plans: &[Plan]) -> Vec<String> {
    let mut notes = Vec::new();
    let beyond = |most: usize| plans.iter().find(|plan| plan.domains > most).map(|plan| plan.ranks);
    if let Some(ranks) = beyond(nvte_ep_core::limits::DOMAINS) {
        notes.push(format!(
            "{ranks} ranks and more: NCCL EP takes at most {} NVLink domains",
            nvte_ep_core::limits::DOMAINS
        ));
    }
    let documented = nvte_ep_core::limits::DOCUMENTED;
    let wide = |plan: &&Plan| plan.domains > 1 && plan.domains.max(plan.ranks / plan.domains) > documented;
    if let Some(plan) = plans.iter().find(wide) {
        let text =
            format!("{} ranks and more: NCCL EP documents {documented} domains of {documented} ranks", plan.ranks);
        notes.push(text + "; the option undocumented_scale allows more");
    }
    if plans.iter().any(|plan| plan.domains > 1) {
        notes.push("several domains: memory and traffic are from NCCL EP's source, and were not measured".into());
    }
    notes
}

impl Report<'_> {
    fn text(&self, args: &PlanArgs) -> String {
        let gib = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 30));
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        let mut memory = Table::new(&[
            "ranks",
            "domains",
            "experts/rank",
            "mean rows",
            "capacity",
            "group GiB",
            "of it network",
            "receive GiB",
            "layer MiB",
        ]);
        let timed = args.link_gb_per_s.is_some() || args.rail_gb_per_s.is_some();
        let mut head = vec!["ranks", "call", "NVLink MiB", "rail MiB"];
        if timed {
            head.extend(["NVLink ms", "rail ms", "longer"]);
        }
        let mut traffic = Table::new(&head);
        for plan in &self.plans {
            let counts = [plan.ranks, plan.domains, plan.experts_per_rank, plan.mean_rows, plan.capacity];
            let mut row: Vec<String> = counts.iter().map(ToString::to_string).collect();
            row.extend([plan.group_bytes, plan.network_bytes, plan.receive_bytes].map(gib));
            row.push(mib(plan.handle_bytes));
            memory.row(row);
            for (call, sent) in [("dispatch", &plan.dispatch), ("combine", &plan.combine)] {
                let mut row =
                    vec![plan.ranks.to_string(), call.to_owned(), mib(sent.nvlink_bytes), mib(sent.rail_bytes)];
                if timed {
                    let time = |time: Option<f64>| time.map_or("-".to_owned(), |ms| format!("{ms:.3}"));
                    row.extend([time(sent.nvlink_ms), time(sent.rail_ms)]);
                    row.push(match (sent.nvlink_ms, sent.rail_ms) {
                        (Some(nvlink), Some(rail)) => if rail > nvlink { "rail" } else { "NVLink" }.to_owned(),
                        _ => "-".to_owned(),
                    });
                }
                traffic.row(row);
            }
        }
        let transfer = if self.zero_copy { "zero-copy" } else { "staged" };
        let capacity = match args.capacity_factor {
            Some(factor) => format!("{factor} times the mean rows"),
            None => "any routing".into(),
        };
        let mut text = format!(
            "layer      {} tokens a rank, hidden {}, {}, top-k {}, {} experts; NCCL EP, {transfer}\ncapacity   {capacity}\n\
             domains    {} ranks\n\nMemory of a rank:\n{}\nSent by a rank in a call, uniform routing:\n{}",
            self.tokens,
            self.hidden,
            self.dtype,
            self.top_k,
            self.experts,
            self.ranks_per_domain,
            memory.text(),
            traffic.text()
        );
        if !self.notes.is_empty() {
            text += "\n";
            self.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn args(words: &str) -> PlanArgs {
        match Cli::try_parse_from(["nvte-ep", "plan"].into_iter().chain(words.split_whitespace())).unwrap().command {
            Command::Plan(args) => args,
            other => panic!("{other:?}"),
        }
    }

    const MODEL: &str = "--tokens 4096 --hidden 7168 --top-k 8 --experts 256";

    #[test]
    fn the_plan_for_people() {
        let words = format!("{MODEL} -n 8,16,128 --capacity-factor 2 --link-gb-per-s 450 --rail-gb-per-s 50");
        insta::assert_snapshot!(text(&args(&words)).unwrap());
    }

    #[test]
    fn the_plan_for_programs() {
        let text = text(&args(&format!("{MODEL} -n 16 --json"))).unwrap();
        insta::assert_snapshot!(text.replace(env!("CARGO_PKG_VERSION"), "[version]"));
    }

    #[test]
    fn the_documents_plans_are_the_commands() {
        let document = include_str!("../../docs/scale.md");
        let blocks: Vec<&str> = document.split("```text\n$ nvte-ep plan ").skip(1).collect();
        assert_eq!(blocks.len(), 3);
        for block in blocks {
            let (words, rest) = block.split_once('\n').unwrap();
            let printed = text(&args(words)).unwrap();
            assert!(rest.starts_with(&format!("{printed}```\n")), "docs/scale.md should have:\n{printed}");
        }
    }

    /// Against every choice of experts, counted one by one.
    #[test]
    fn traffic_is_the_mean_over_all_routings() {
        let plan = Plan::of(&args("--tokens 1 --hidden 8 --top-k 2 --experts 8 -n 4 --ranks-per-domain 2"), 4).unwrap();
        let (mut nvlink, mut rail, mut routings) = (0, 0, 0);
        for (first, second) in (0..8usize).flat_map(|a| (0..8).map(move |b| (a, b))).filter(|(a, b)| a != b) {
            // Rank 0's token; and what rank 0 hands on of the token of rank 2, its peer in the other domain.
            let ranks = [first / 2, second / 2];
            rail += usize::from(ranks.iter().any(|rank| *rank >= 2));
            nvlink += 2 * usize::from(ranks.contains(&1));
            routings += 1;
        }
        let bytes = |count: usize| (f64::from(16) * count as f64 / f64::from(routings)).round() as u64;
        assert_eq!((plan.combine.nvlink_bytes, plan.combine.rail_bytes), (bytes(nvlink), bytes(rail)));
        assert!(plan.dispatch.rail_bytes > plan.combine.rail_bytes, "weights go along");
        let alone = Plan::of(&args("--experts 8 --top-k 2 -n 1"), 1).unwrap();
        assert_eq!((alone.dispatch.nvlink_bytes, alone.dispatch.rail_bytes, alone.network_bytes), (0, 0, 0));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (words, text) in [
            (
                "-n 12 --experts 48",
                "--ranks must be a multiple of --ranks-per-domain, 8 (NVLink domains are of one size), got 12",
            ),
            ("-n 12 --experts 16", "--experts must be a multiple of the 12 ranks, got 16"),
            ("-n 0", "--ranks must be 1 to 65536, got 0"),
            ("--tokens 18446744073709551615", "--tokens must be 1 to 1048576"),
            ("--top-k 17", "--top-k must be at most the 16 experts, got 17"),
            ("-n 4 --experts 4096", "num_experts"),
            ("--hidden 20", "hidden_dim"),
            ("-n 8192 --experts 65536 --tokens 65536 --top-k 8", "the capacity is 4294967296, more than fits 32 bits"),
        ] {
            let error = super::text(&args(words)).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
