//! The command line and the rules it has to obey before anything starts.

use crate::bench::traffic::Kind;
use crate::bench::{Case, RowType};
use crate::element::Dtype;
use crate::examples;
use crate::nodes::NodeArgs;
use crate::plan::PlanArgs;
use crate::plot::Format;
use crate::routing::Problem;
use crate::shapes::ShapeArgs;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// Expert-parallel dispatch and combine: run it and check it.
#[derive(Debug, Parser)]
#[command(name = "nvte-ep", version, after_help = examples::ALL)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one, and clap makes it")]
pub enum Command {
    #[command(flatten)]
    Job(Job),
    /// Start a program once a rank, without MPI: by default on the host runtime, which needs no GPU.
    ///
    /// Each rank finds its place in the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    /// MASTER_PORT) and of Open MPI (OMPI_COMM_WORLD_RANK and so on), and in NVTE_EP_LAUNCH_DIRECTORY a directory of the run's
    /// own. Its lines are printed with its rank before them; its standard input is /dev/null. Signals are passed on. When a
    /// rank fails, the others have a grace time to end by themselves; the exit code is that of the first one that failed,
    /// 128 + the signal that ended it, or 124 where the time was up. What the ranks have started ends with the run.
    ///
    /// With --nnodes a launcher on each machine starts its own ranks, when all have met at --rdzv; the first failure on any of
    /// them ends all. NVTE_EP_LAUNCH_DIRECTORY is not set then. Nothing is started on other machines: Slurm, Kubernetes or you do.
    #[command(after_help = examples::LAUNCH)]
    Launch(LaunchArgs),
    /// Look at what this machine has for expert parallelism, and say what is missing and what to do about it.
    ///
    /// Exit code 0: usable; 1: not, and the report says why.
    #[command(after_help = examples::DOCTOR)]
    Doctor(DoctorArgs),
    /// Compute what a group takes and sends on each rank, without a GPU: receive rows, device memory, bytes over NVLink and rails.
    ///
    /// Memory is that of NCCL EP 0.1.0 (docs/memory.md). Traffic is the mean over uniform routings: a token goes once to each
    /// other NVLink domain that it has an expert in, and in a domain once to each rank that it has an expert on.
    #[command(after_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Draw what bench and run have printed with --json: time of each call, ratios to another library, bandwidth over tokens,
    /// how many rows each expert gets, and received rows with padding of each rank.
    ///
    /// Prints the files that it has written.
    #[command(after_help = examples::PLOT)]
    Plot(PlotArgs),
}

/// The subcommands whose ranks are the command itself.
#[derive(Debug, Subcommand)]
pub enum Job {
    /// Run a mixture-of-experts layer, forward and backward, and check every output against a reference.
    ///
    /// Starts its own ranks; under mpirun, torchrun (--no-python) or srun it is one of theirs. The routing is skewed
    /// and uneven, with masked entries. Exit code 0: all checks passed; 1: something differed or failed; 2: the
    /// arguments cannot be run.
    #[command(after_help = examples::RUN)]
    Run(RunArgs),
    /// Time every call on the device and on the host: staged against zero-copy groups, one library against another, over sweeps
    /// of shapes, with the device memory that a group takes.
    ///
    /// Medians and 99 % quantiles over the iterations, of the slowest rank; all ranks begin each call together. Every rank has
    /// as many tokens, and the receive buffers fit the routing. GB/s are rows x bytes of a row, of the rank that receives most
    /// rows, without padding; "of copy" is their share of what the device copies from memory to memory with all ranks at once.
    /// Memory is what the driver says was allocated by making the group and running steps, beside what the library predicts; not
    /// measured on the host runtime. The groups of one library have to give the same bits. Exit codes as of run.
    #[command(after_help = examples::BENCH)]
    Bench(BenchArgs),
    /// Compile NCCL EP's kernels for the shapes of a job into its cache, before the job needs them.
    ///
    /// Starts as many ranks as the job has, as kernels differ with their number, and runs two steps of each shape, forward and
    /// backward: kernels are compiled in the first one. Another warmup of the same user on this machine is waited for. The cache is
    /// NCCL EP's (NCCL_EP_JIT_CACHE_DIR, docs/environment.md). Exit codes as of run.
    #[command(after_help = examples::WARMUP)]
    Warmup(WarmupArgs),
}

/// The runtime of a program that is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LaunchRuntime {
    /// The host runtime, in place of the CUDA and NCCL libraries too that the program is linked to.
    Host,
    /// The machine's own CUDA and NCCL.
    Cuda,
}

/// The command line with mpirun's `-np N` written as `--ranks N`: to clap it would be `-n p`. What follows the program's name,
/// or `--`, is the program's.
pub fn normalized(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let command = Cli::command();
    let Some(subcommand) = arguments.get(1).and_then(|name| command.find_subcommand(name)) else { return arguments };
    let takes_value = |token: &str| {
        token == "-np"
            || subcommand.get_arguments().filter(|argument| argument.get_action().takes_values()).any(|argument| {
                argument.get_short().is_some_and(|short| token == format!("-{short}"))
                    || argument.get_long().is_some_and(|long| token == format!("--{long}"))
                    || argument
                        .get_all_aliases()
                        .is_some_and(|all| all.iter().any(|alias| token == format!("--{alias}")))
            })
    };
    let mut at = 2;
    while let Some(token) = arguments.get(at).and_then(|token| token.to_str()).filter(|token| token.starts_with('-')) {
        if token == "--" {
            break;
        }
        let step = if takes_value(token) { 2 } else { 1 };
        if token == "-np" {
            arguments[at] = "--ranks".into();
        }
        at += step;
    }
    arguments
}

fn ranks(text: &str) -> Result<usize, String> {
    let ranks = text.parse().ok().filter(|ranks| (1..=1024).contains(ranks));
    ranks.ok_or_else(|| "the number of ranks must be 1 to 1024".to_owned())
}

/// The arguments of `launch`.
#[derive(Debug, Clone, Args)]
pub struct LaunchArgs {
    /// Ranks to start.
    #[arg(short = 'n', long, value_name = "N", value_parser = ranks, default_value_t = DEFAULT_RANKS)]
    #[arg(visible_aliases = ["np", "nproc-per-node"], alias = "nproc_per_node")]
    pub ranks: usize,
    /// Where the program runs [default: NVTE_EP_RUNTIME if set; else host].
    #[arg(long, value_enum)]
    pub runtime: Option<LaunchRuntime>,
    /// Seconds that the other ranks have when one has failed, or a signal has come, before they are ended.
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(..=MOST_SECONDS))]
    pub grace: u64,
    /// Seconds after which all ranks are ended.
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=MOST_SECONDS))]
    pub timeout: Option<u64>,
    /// Which of several machines this is.
    #[command(flatten)]
    pub nodes: NodeArgs,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// The arguments of `doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// For which runtime [default: NVTE_EP_RUNTIME if set; else cuda].
    #[arg(long, value_enum)]
    pub runtime: Option<LaunchRuntime>,
    /// Also run a step, of two ranks where they find room.
    #[arg(long)]
    pub run: bool,
    /// Print machine-readable results; docs/doctor.md has their form.
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `plot`.
#[derive(Debug, Clone, Args)]
pub struct PlotArgs {
    /// What bench --json or run --json printed.
    #[arg(required = true, value_name = "REPORT")]
    pub reports: Vec<PathBuf>,
    /// Folder for the pictures.
    #[arg(short, long, value_name = "DIR", default_value = ".")]
    pub output: PathBuf,
    /// How they are written.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "svg")]
    pub format: Vec<Format>,
}

/// Which runtime the run asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RuntimeArg {
    /// NVTE_EP_RUNTIME if set; else cuda where there is a fit GPU; else host.
    Auto,
    /// GPUs, through CUDA, NCCL and NCCL EP.
    Cuda,
    /// The host runtime: no GPU needed.
    Host,
}

/// What every subcommand that starts ranks takes.
#[derive(Debug, Clone, Args)]
pub struct SharedArgs {
    /// Every expert's received rows are padded to a multiple of this many; 0 or 1 = no padding.
    #[arg(long, value_name = "A", default_value_t = 16)]
    pub align: usize,
    /// Seed of routing, tokens, gradients and experts.
    #[arg(long, value_name = "X", default_value_t = 1)]
    pub seed: u64,
    /// Where to run.
    #[arg(long, value_enum, default_value_t = RuntimeArg::Auto)]
    pub runtime: RuntimeArg,
    /// Print machine-readable results instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Seconds after which the whole run is ended as failed.
    #[arg(long, value_name = "S", default_value_t = 600)]
    pub timeout: u64,
    /// Pass on what the ranks print themselves (started ranks only).
    #[arg(long, short)]
    pub verbose: bool,
}

/// The arguments of `run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Ranks to start [default: 4; under a launcher, as many as it started].
    #[arg(short = 'n', long, value_name = "N", visible_aliases = ["np", "nproc-per-node"], alias = "nproc_per_node")]
    pub ranks: Option<usize>,
    /// Most tokens a rank sends in one step.
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
    /// Streaming multiprocessors that a rank's communication may use [default: the library's choice, shared out where
    /// ranks share a GPU].
    #[arg(long, value_name = "N")]
    pub max_sms: Option<usize>,
    /// The shared ones.
    #[command(flatten)]
    pub shared: SharedArgs,
    /// Data type of tokens.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    pub dtype: Dtype,
    /// Steps, each with a routing of its own.
    #[arg(long, value_name = "S", default_value_t = 3)]
    pub steps: usize,
    /// Inner dimension of the experts, y = B (A x).
    #[arg(long, value_name = "F", default_value_t = 16)]
    pub expert_dim: usize,
    /// Also print a hash of every output, by step and rank, to compare runs bit by bit.
    #[arg(long)]
    pub digest: bool,
    /// Also draw the pictures that plot draws, as SVG, into this folder.
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
}

/// Which groups are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransferArg {
    /// One after the other.
    Both,
    /// Staged ones only.
    Staged,
    /// Zero-copy ones only.
    ZeroCopy,
}

/// The arguments of `bench`. Those that take a list make a case of every combination.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Ranks to start; several numbers, one run each [default: 4; under a launcher, as many as it started].
    #[arg(short = 'n', long, value_name = "N,..", value_delimiter = ',')]
    #[arg(visible_aliases = ["np", "nproc-per-node"], alias = "nproc_per_node")]
    pub ranks: Vec<usize>,
    /// The shapes.
    #[command(flatten)]
    pub shapes: ShapeArgs,
    /// Shapes in their place, of a file.
    #[arg(skip)]
    pub listed: Vec<ShapeArgs>,
    /// Who sends to whom.
    #[arg(long, value_enum, value_name = "KIND,..", value_delimiter = ',', default_value = "uniform")]
    pub routing: Vec<Kind>,
    /// Recorded indices for --routing file: a line a token, the experts' numbers between commas or blanks.
    #[arg(long, value_name = "FILE")]
    pub routing_file: Option<PathBuf>,
    /// Timed iterations of a round, after three that are not.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub iterations: usize,
    /// Rounds, in which the groups take turns, each made anew [default: 1; with --against 3].
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,
    /// Which groups.
    #[arg(long, value_enum, default_value_t = TransferArg::Both)]
    pub transfer: TransferArg,
    /// Time replays of CUDA graphs, one for each call, instead of the calls.
    #[arg(long)]
    pub graph: bool,
    /// Another library with nvte_ep_* functions, of either ABI, to be timed by turns with this one.
    #[arg(long, value_name = "LIB")]
    pub against: Option<PathBuf>,
    /// What a GPU's links carry in one direction, in gigabytes a second: what is sent to other ranks is told as a share of it.
    #[arg(long, value_name = "GB/S")]
    pub link_gb_per_s: Option<f64>,
    /// Print a line of comma-separated values for each case, group and call.
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
    /// Also draw the pictures that plot draws, as SVG, into this folder.
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// The shared ones.
    #[command(flatten)]
    pub shared: SharedArgs,
}

/// The arguments of `warmup`. Those that take a list make a shape of every combination.
#[derive(Debug, Clone, Args)]
pub struct WarmupArgs {
    /// Ranks of the job [default: 4; under a launcher, as many as it started].
    #[arg(short = 'n', long, value_name = "N", visible_aliases = ["np", "nproc-per-node"], alias = "nproc_per_node")]
    pub ranks: Option<usize>,
    /// The shapes.
    #[command(flatten)]
    pub shapes: ShapeArgs,
    /// The shapes, in a TOML file: tables [[shape]] with tokens, hidden, top_k, experts, max_sms and dtype, each one value or a
    /// list. What a table leaves out is as its flag says.
    #[arg(long = "shapes", value_name = "FILE")]
    pub shapes_file: Option<PathBuf>,
    /// What stands in it.
    #[arg(skip)]
    pub listed: Vec<ShapeArgs>,
    /// Which groups.
    #[arg(long, value_enum, default_value_t = TransferArg::Staged)]
    pub transfer: TransferArg,
    /// The shared ones.
    #[command(flatten)]
    pub shared: SharedArgs,
}

impl WarmupArgs {
    /// The same as a bench that times nothing.
    pub fn as_bench(&self) -> BenchArgs {
        let Self { ranks, shapes, shapes_file: _, listed, transfer, shared } = self.clone();
        BenchArgs {
            ranks: ranks.into_iter().collect(),
            shapes,
            listed,
            routing: vec![Kind::Uniform],
            routing_file: None,
            iterations: 0,
            rounds: None,
            transfer,
            graph: false,
            against: None,
            link_gb_per_s: None,
            csv: false,
            plot: None,
            shared,
        }
    }
}

impl Job {
    /// Its name on the command line.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Run(_) => "run",
            Self::Bench(_) => "bench",
            Self::Warmup(_) => "warmup",
        }
    }

    /// What all have.
    pub const fn shared(&self) -> &SharedArgs {
        match self {
            Self::Run(args) => &args.shared,
            Self::Bench(args) => &args.shared,
            Self::Warmup(args) => &args.shared,
        }
    }

    /// The numbers of ranks that are asked for, of each a run; none where the launcher or the default decides.
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            Self::Run(args) => args.ranks.into_iter().collect(),
            Self::Bench(args) => args.ranks.clone(),
            Self::Warmup(args) => args.ranks.into_iter().collect(),
        }
    }

    /// Reads the file that the arguments name, once for all that ask for its shapes.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn load(&mut self) -> Result<(), String> {
        if let Self::Warmup(WarmupArgs { shapes, shapes_file: Some(file), listed, .. }) = self {
            *listed = shapes.read(file)?;
        }
        Ok(())
    }

    /// SM caps that are asked for.
    pub fn max_sms(&self) -> Vec<usize> {
        match self {
            Self::Run(args) => args.max_sms.into_iter().collect(),
            Self::Bench(args) => args.shapes.max_sms.clone(),
            Self::Warmup(args) => args.as_bench().lists().iter().flat_map(|lists| lists.max_sms.clone()).collect(),
        }
    }

    /// The first layer that is run and how often a step is in all, if the arguments agree with each other; else what to
    /// change.
    pub fn problem(&self, ranks: usize) -> Result<(Problem, usize), String> {
        match self {
            Self::Run(args) => args.problem(ranks).map(|problem| (problem.clone(), problem.steps)),
            Self::Bench(args) => {
                positive("--iterations", args.iterations, 1_000_000)?;
                first_of(args.cases(ranks)?, args.iterations)
            }
            Self::Warmup(args) => first_of(args.as_bench().cases(ranks)?, 1),
        }
    }
}

/// Ranks where neither the command line nor a launcher says.
pub const DEFAULT_RANKS: usize = 4;

/// A year: longer limits are a mistake, and far beyond them sums of times overflow.
const MOST_SECONDS: u64 = 365 * 24 * 3600;

/// What a count has to be.
pub fn positive(name: &str, value: usize, limit: usize) -> Result<(), String> {
    if (1..=limit).contains(&value) {
        return Ok(());
    }
    Err(format!("{name} must be 1 to {limit}, got {value}"))
}

/// The first layer of some cases, and the steps of all.
fn first_of(cases: Vec<Case>, iterations: usize) -> Result<(Problem, usize), String> {
    let steps = cases.len() * iterations;
    let first = cases.into_iter().next().ok_or("every list must name something")?;
    Ok((first.problem, steps))
}

/// What makes a layer.
struct Shape {
    ranks: usize,
    tokens: usize,
    hidden: usize,
    top_k: usize,
    experts: usize,
    max_sms: Option<usize>,
}

impl RunArgs {
    fn problem(&self, ranks: usize) -> Result<Problem, String> {
        positive("--steps", self.steps, 1_000_000)?;
        positive("--expert-dim", self.expert_dim, 1024)?;
        let Self { tokens, hidden, top_k, experts, max_sms, .. } = *self;
        let problem =
            self.shared.problem(&Shape { ranks, tokens, hidden, top_k, experts, max_sms }, self.dtype.bytes())?;
        Ok(Problem { steps: self.steps, expert_dim: self.expert_dim, ..problem })
    }
}

/// Elements of a row that is moved in MXFP8 are a multiple of this: its scales are a multiple of 16 bytes.
const MXFP8_UNIT: usize = 512;

impl BenchArgs {
    /// Rounds in which the groups take turns.
    pub fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.against.is_some() { 3 } else { 1 })
    }

    /// Every combination of the lists, if the arguments agree with each other; else what to change.
    pub fn cases(&self, ranks: usize) -> Result<Vec<Case>, String> {
        positive("--rounds", self.rounds(), 1000)?;
        if self.link_gb_per_s.is_some_and(|link| !(link > 0.0 && link.is_finite())) {
            return Err("--link-gb-per-s must be more than 0".into());
        }
        if self.routing.contains(&Kind::File) != self.routing_file.is_some() {
            return Err("--routing file and --routing-file go together".into());
        }
        let mut cases = Vec::new();
        for lists in self.lists() {
            self.combine(lists, ranks, &mut cases).map_err(|error| lists.placed(error))?;
        }
        Ok(cases)
    }

    fn lists(&self) -> &[ShapeArgs] {
        if self.listed.is_empty() { std::slice::from_ref(&self.shapes) } else { &self.listed }
    }

    /// Every combination of some lists; the last one varies fastest.
    fn combine(&self, lists: &ShapeArgs, ranks: usize, cases: &mut Vec<Case>) -> Result<(), String> {
        let ShapeArgs { tokens, hidden, top_k, experts, max_sms, dtype, .. } = lists;
        let all_sms: Vec<Option<usize>> =
            if max_sms.is_empty() { vec![None] } else { max_sms.iter().copied().map(Some).collect() };
        for &hidden in hidden {
            for &top_k in top_k {
                for &experts in experts {
                    for &max_sms in &all_sms {
                        for &dtype in dtype {
                            for &routing in &self.routing {
                                for &tokens in tokens {
                                    let shape = Shape { ranks, tokens, hidden, top_k, experts, max_sms };
                                    cases.push(self.case(&shape, dtype, routing)?);
                                }
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn case(&self, shape: &Shape, dtype: RowType, routing: Kind) -> Result<Case, String> {
        let hidden = shape.hidden;
        if dtype == RowType::Mxfp8 && !hidden.is_multiple_of(MXFP8_UNIT) {
            return Err(format!(
                "--hidden must be a multiple of {MXFP8_UNIT} for mxfp8 (its scale rows), got {hidden}"
            ));
        }
        let problem = self.shared.problem(shape, dtype.combined_bytes(1))?;
        Ok(Case { problem: Problem { steps: self.iterations, ..problem }, dtype, routing, max_sms: shape.max_sms })
    }
}

impl SharedArgs {
    fn problem(&self, shape: &Shape, element_bytes: usize) -> Result<Problem, String> {
        let Shape { ranks, tokens, hidden, top_k, experts, max_sms } = *shape;
        positive("--ranks", ranks, 1024)?;
        positive("--tokens", tokens, 1 << 20)?;
        positive("--hidden", hidden, 1 << 20)?;
        positive("--experts", experts, 1 << 16)?;
        positive("--top-k", top_k, 64)?;
        if !(1..=MOST_SECONDS).contains(&self.timeout) {
            return Err(format!("--timeout must be 1 to {MOST_SECONDS} seconds, got {}", self.timeout));
        }
        if !experts.is_multiple_of(ranks) {
            return Err(format!("--experts must be a multiple of the {ranks} ranks, got {experts}"));
        }
        if !experts.is_multiple_of(4) {
            return Err(format!("--experts must be a multiple of 4 (NCCL EP's routing map), got {experts}"));
        }
        if experts / ranks > 256 {
            let found = experts / ranks;
            return Err(format!("--experts must be at most 256 a rank (NCCL EP's limit), got {found} a rank"));
        }
        if top_k > experts {
            return Err(format!("--top-k must be at most the {experts} experts, got {top_k}"));
        }
        if !hidden.is_multiple_of(8) {
            return Err(format!("--hidden must be a multiple of 8 (combine's vector width), got {hidden}"));
        }
        let row = hidden * element_bytes;
        if !row.is_multiple_of(16) {
            return Err(format!("a token must be a multiple of 16 bytes, but --hidden {hidden} makes {row}"));
        }
        if self.align > 1 && !(self.align.is_power_of_two() && self.align <= 1 << 16) {
            return Err(format!("--align must be 0 or a power of two up to 65536, got {}", self.align));
        }
        if max_sms.is_some_and(|sms| !(1..=1024).contains(&sms)) {
            return Err("--max-sms must be 1 to 1024; leave it out for the automatic choice".into());
        }
        let (align, seed) = (self.align, self.seed);
        Ok(Problem { ranks, tokens, hidden, top_k, experts, align, steps: 1, seed, expert_dim: 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(subcommand: &str, extra: &[&str]) -> Job {
        let all = ["nvte-ep", subcommand].into_iter().chain(extra.iter().copied());
        match Cli::try_parse_from(all).unwrap().command {
            Command::Job(job) => job,
            other => panic!("{other:?}"),
        }
    }

    fn parse(extra: &[&str]) -> Job {
        job("run", extra)
    }

    #[test]
    fn definition_is_sound_and_defaults_run() {
        Cli::command().debug_assert();
        let (problem, _) = parse(&[]).problem(DEFAULT_RANKS).unwrap();
        assert_eq!((problem.tokens, problem.hidden, problem.experts, problem.steps), (512, 1024, 16, 3));
    }

    #[test]
    fn unfit_combinations_are_refused_by_name() {
        for (extra, ranks, text) in [
            (&["--experts", "16"][..], 3, "--experts must be a multiple of the 3 ranks, got 16"),
            (&["--experts", "6"], 2, "--experts must be a multiple of 4 (NCCL EP's routing map), got 6"),
            (&["--top-k", "8", "--experts", "4"], 2, "--top-k must be at most the 4 experts, got 8"),
            (&["--top-k", "65", "--experts", "128"], 2, "--top-k must be 1 to 64, got 65"),
            (&["--hidden", "12"], 2, "--hidden must be a multiple of 8 (combine's vector width), got 12"),
            (&["--align", "12"], 2, "--align must be 0 or a power of two up to 65536, got 12"),
            (&["--steps", "0"], 2, "--steps must be 1 to 1000000, got 0"),
            (&["--tokens", "0"], 2, "--tokens must be 1 to 1048576, got 0"),
            (&["--experts", "1024"], 2, "--experts must be at most 256 a rank (NCCL EP's limit), got 512 a rank"),
            (&["--max-sms", "0"], 2, "--max-sms must be 1 to 1024; leave it out for the automatic choice"),
            (&["--timeout", "0"], 2, "--timeout must be 1 to 31536000 seconds, got 0"),
            (
                &["--timeout", "18446744073709551615"],
                2,
                "--timeout must be 1 to 31536000 seconds, got 18446744073709551615",
            ),
            (&[], 0, "--ranks must be 1 to 1024, got 0"),
        ] {
            assert_eq!(parse(extra).problem(ranks).unwrap_err(), text);
        }
    }

    #[test]
    fn bench_has_rules_of_its_own() {
        let bench = |extra: &[&str]| job("bench", extra).problem(4);
        assert_eq!(bench(&[]).unwrap().1, 20);
        assert_eq!(bench(&["--hidden", "1032"]).unwrap().1, 20);
        for (extra, text) in [
            (
                &["--hidden", "1032", "--dtype", "bf16,mxfp8"][..],
                "--hidden must be a multiple of 512 for mxfp8 (its scale rows), got 1032",
            ),
            (&["--iterations", "0"], "--iterations must be 1 to 1000000, got 0"),
            (&["--rounds", "0"], "--rounds must be 1 to 1000, got 0"),
            (&["--experts", "16,18"], "--experts must be a multiple of the 4 ranks, got 18"),
            (&["--routing", "file"], "--routing file and --routing-file go together"),
            (&["--routing-file", "x"], "--routing file and --routing-file go together"),
            (&["--link-gb-per-s", "0"], "--link-gb-per-s must be more than 0"),
            (&["--max-sms", "16,0"], "--max-sms must be 1 to 1024; leave it out for the automatic choice"),
        ] {
            assert_eq!(bench(extra).unwrap_err(), text);
        }
    }

    #[test]
    fn a_sweep_has_a_case_of_every_combination() {
        let words =
            ["--tokens", "64,128", "--top-k", "2,4", "--dtype", "bf16,f32", "--max-sms", "8", "--routing", "zipf,hot"];
        let Job::Bench(args) = job("bench", &words) else { panic!() };
        let cases = args.cases(2).unwrap();
        assert_eq!(cases.len(), 16);
        let [first, second, last] = [0, 1, 15].map(|at| &cases[at]);
        assert_eq!((first.problem.tokens, second.problem.tokens, last.problem.tokens), (64, 128, 128));
        assert_eq!((first.dtype, last.dtype), (RowType::Bf16, RowType::F32));
        assert_eq!((first.routing, last.routing, last.max_sms), (Kind::Zipf, Kind::Hot, Some(8)));
        assert_eq!((args.rounds(), job("bench", &words).problem(2).unwrap().1), (1, 16 * 20));
    }

    #[test]
    fn ranks_as_mpirun_and_torchrun_call_them() {
        let launch = |words: &str| {
            let words = words.split(' ').map(OsString::from);
            match Cli::try_parse_from(normalized(words)).unwrap().command {
                Command::Launch(args) => (args.ranks, args.program),
                other => panic!("{other:?}"),
            }
        };
        for option in
            ["-n 2", "-np 2", "--np 2", "--ranks=2", "--nproc-per-node 2", "--nproc_per_node=2", "--grace 1 -np 2"]
        {
            let expected = ["program", "-np", "3"].map(OsString::from).to_vec();
            assert_eq!(launch(&format!("nvte-ep launch {option} program -np 3")), (2, expected.clone()), "{option}");
            assert_eq!(launch(&format!("nvte-ep launch {option} -- program -np 3")), (2, expected), "{option}");
        }
        let words = ["nvte-ep", "run", "--json", "-np", "2"].map(OsString::from);
        let Command::Job(job) = Cli::try_parse_from(normalized(words.into_iter())).unwrap().command else { panic!() };
        assert_eq!(job.ranks(), [2]);
    }

    #[test]
    fn nothing_else_exists() {
        assert!(Cli::try_parse_from(["nvte-ep", "surgeon"]).is_err());
        assert!(Cli::try_parse_from(["nvte-ep", "run", "--dtype", "f64"]).is_err());
    }

    /// What people read: a change of it is to be looked at. Every example is a command line that parses.
    #[test]
    fn help() {
        let mut command = Cli::command().term_width(120);
        command.build();
        let mut pages = vec![command.render_long_help().to_string()];
        pages.extend(command.get_subcommands_mut().filter(|sub| sub.get_name() != "help").map(|sub| {
            assert!(sub.get_after_help().is_some(), "{} has examples", sub.get_name());
            sub.render_long_help().to_string()
        }));
        for page in &pages {
            let (_, examples) = page.split_once("Examples:\n").unwrap();
            for line in examples.lines().flat_map(|line| line.split(';')) {
                let words: Vec<&str> = line.split_whitespace().skip_while(|word| *word != "nvte-ep").collect();
                // What stands behind a gap says what it does; behind | and > other programs begin.
                let line = line.trim_start().split("   ").next().unwrap();
                let own: Vec<&str> = line.split(['|', '>']).next().unwrap().split_whitespace().collect();
                let own = own.into_iter().skip_while(|word| *word != "nvte-ep");
                let parsed = Cli::try_parse_from(normalized(own.map(OsString::from)));
                assert!(words.is_empty() || parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
            }
        }
        insta::assert_snapshot!(pages.join(&format!("{}\n", "-".repeat(80))));
    }

    /// Man pages and completions are committed, so that packages need not run the command to have them.
    /// `NVTE_EP_WRITE=1 cargo test -p nvte-ep-cli current` rewrites them.
    #[test]
    fn man_pages_and_completions_are_current() {
        use clap_complete::Shell;
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut files = Vec::new();
        let mut command = Cli::command();
        command.build();
        // One page for the command and one for each subcommand; `help` has none.
        let all = std::iter::once(&command).chain(command.get_subcommands().filter(|sub| sub.get_name() != "help"));
        for page in all {
            let name = page.get_display_name().unwrap_or("nvte-ep").to_owned();
            let mut text = Vec::new();
            clap_mangen::Man::new(page.clone()).render(&mut text).unwrap();
            files.push((here.join(format!("man/{name}.1")), text));
        }
        for (shell, name) in [(Shell::Bash, "nvte-ep.bash"), (Shell::Zsh, "_nvte-ep"), (Shell::Fish, "nvte-ep.fish")] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "nvte-ep", &mut text);
            files.push((here.join("completions").join(name), text));
        }
        for (path, text) in files {
            if std::env::var_os("NVTE_EP_WRITE").is_some() {
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(&path, &text).unwrap();
            }
            let there = std::fs::read(&path).unwrap_or_default();
            assert!(
                there == text,
                "{} is not current: NVTE_EP_WRITE=1 cargo test -p nvte-ep-cli current",
                path.display()
            );
        }
    }
}
