//! The command line and the rules it has to obey before anything starts.

use crate::element::Dtype;
use crate::routing::Problem;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;

/// Expert-parallel dispatch and combine: run it and check it.
#[derive(Debug, Parser)]
#[command(name = "nvte-ep", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
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
    Launch(LaunchArgs),
    /// Look at what this machine has for expert parallelism, and say what is missing and what to do about it.
    ///
    /// Exit code 0: usable; 1: not, and the report says why.
    Doctor(DoctorArgs),
}

/// The subcommands whose ranks are the command itself.
#[derive(Debug, Subcommand)]
pub enum Job {
    /// Run a mixture-of-experts layer, forward and backward, and check every output against a reference.
    ///
    /// Starts its own ranks; under mpirun, torchrun (--no-python) or srun it is one of theirs. The routing is skewed
    /// and uneven, with masked entries. Exit code 0: all checks passed; 1: something differed or failed; 2: the
    /// arguments cannot be run.
    Run(RunArgs),
    /// Time staged against zero-copy groups, in bfloat16 and MXFP8, with the device memory that each takes, and check that
    /// both give the same bits.
    ///
    /// Medians over the iterations, of the slowest rank. The routing is uniform, the receive buffers fit it. Memory is
    /// what the driver says was allocated by making the group and running steps, beside what the library predicts; not
    /// measured on the host runtime. Exit codes as of run.
    Bench(BenchArgs),
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
    /// Every expert's received rows are padded to a multiple of this many; 0 or 1 = no padding.
    #[arg(long, value_name = "A", default_value_t = 16)]
    pub align: usize,
    /// Seed of routing, tokens, gradients and experts.
    #[arg(long, value_name = "X", default_value_t = 1)]
    pub seed: u64,
    /// Where to run.
    #[arg(long, value_enum, default_value_t = RuntimeArg::Auto)]
    pub runtime: RuntimeArg,
    /// Streaming multiprocessors that a rank's communication may use [default: the library's choice, shared out where
    /// ranks share a GPU].
    #[arg(long, value_name = "N")]
    pub max_sms: Option<usize>,
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

/// The arguments of `bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// The shared ones.
    #[command(flatten)]
    pub shared: SharedArgs,
    /// Timed iterations, after three that are not.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub iterations: usize,
    /// Which groups.
    #[arg(long, value_enum, default_value_t = TransferArg::Both)]
    pub transfer: TransferArg,
}

impl Job {
    /// Its name on the command line.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Run(_) => "run",
            Self::Bench(_) => "bench",
        }
    }

    /// What all have.
    pub const fn shared(&self) -> &SharedArgs {
        match self {
            Self::Run(args) => &args.shared,
            Self::Bench(args) => &args.shared,
        }
    }

    /// The layer and its steps, if the arguments agree with each other; else what to change.
    pub fn problem(&self, ranks: usize) -> Result<Problem, String> {
        match self {
            Self::Run(args) => args.problem(ranks),
            Self::Bench(args) => args.problem(ranks),
        }
    }
}

/// Ranks where neither the command line nor a launcher says.
pub const DEFAULT_RANKS: usize = 4;

/// A year: longer limits are a mistake, and far beyond them sums of times overflow.
const MOST_SECONDS: u64 = 365 * 24 * 3600;

fn positive(name: &str, value: usize, limit: usize) -> Result<(), String> {
    if (1..=limit).contains(&value) {
        return Ok(());
    }
    Err(format!("{name} must be 1 to {limit}, got {value}"))
}

impl RunArgs {
    fn problem(&self, ranks: usize) -> Result<Problem, String> {
        positive("--steps", self.steps, 1_000_000)?;
        positive("--expert-dim", self.expert_dim, 1024)?;
        let problem = self.shared.problem(ranks, self.dtype)?;
        Ok(Problem { steps: self.steps, expert_dim: self.expert_dim, ..problem })
    }
}

/// Elements of a row that is moved in MXFP8 are a multiple of this: its scales are a multiple of 16 bytes.
const MXFP8_UNIT: usize = 512;

impl BenchArgs {
    fn problem(&self, ranks: usize) -> Result<Problem, String> {
        positive("--iterations", self.iterations, 1_000_000)?;
        if !self.shared.hidden.is_multiple_of(MXFP8_UNIT) {
            let hidden = self.shared.hidden;
            return Err(format!("--hidden must be a multiple of {MXFP8_UNIT} (MXFP8 scale rows), got {hidden}"));
        }
        Ok(Problem { steps: self.iterations, ..self.shared.problem(ranks, Dtype::Bf16)? })
    }
}

impl SharedArgs {
    fn problem(&self, ranks: usize, dtype: Dtype) -> Result<Problem, String> {
        positive("--ranks", ranks, 1024)?;
        positive("--tokens", self.tokens, 1 << 20)?;
        positive("--hidden", self.hidden, 1 << 20)?;
        positive("--experts", self.experts, 1 << 16)?;
        positive("--top-k", self.top_k, 32)?;
        if !(1..=MOST_SECONDS).contains(&self.timeout) {
            return Err(format!("--timeout must be 1 to {MOST_SECONDS} seconds, got {}", self.timeout));
        }
        if !self.experts.is_multiple_of(ranks) {
            return Err(format!("--experts must be a multiple of the {ranks} ranks, got {}", self.experts));
        }
        if !self.experts.is_multiple_of(4) {
            return Err(format!("--experts must be a multiple of 4 (NCCL EP's routing map), got {}", self.experts));
        }
        if self.experts / ranks > 256 {
            let found = self.experts / ranks;
            return Err(format!("--experts must be at most 256 a rank (NCCL EP's limit), got {found} a rank"));
        }
        if self.top_k > self.experts {
            return Err(format!("--top-k must be at most the {} experts, got {}", self.experts, self.top_k));
        }
        if !self.hidden.is_multiple_of(8) {
            return Err(format!("--hidden must be a multiple of 8 (combine's vector width), got {}", self.hidden));
        }
        let row = self.hidden * dtype.bytes();
        if !row.is_multiple_of(16) {
            return Err(format!("a token must be a multiple of 16 bytes, but --hidden {} makes {row}", self.hidden));
        }
        if self.align > 1 && !(self.align.is_power_of_two() && self.align <= 1 << 16) {
            return Err(format!("--align must be 0 or a power of two up to 65536, got {}", self.align));
        }
        if self.max_sms.is_some_and(|sms| !(1..=1024).contains(&sms)) {
            return Err("--max-sms must be 1 to 1024; leave it out for the automatic choice".into());
        }
        Ok(Problem {
            ranks,
            tokens: self.tokens,
            hidden: self.hidden,
            top_k: self.top_k,
            experts: self.experts,
            align: self.align,
            steps: 1,
            seed: self.seed,
            expert_dim: 1,
        })
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
        let problem = parse(&[]).problem(DEFAULT_RANKS).unwrap();
        assert_eq!((problem.tokens, problem.hidden, problem.experts, problem.steps), (512, 1024, 16, 3));
    }

    #[test]
    fn unfit_combinations_are_refused_by_name() {
        for (extra, ranks, text) in [
            (&["--experts", "16"][..], 3, "--experts must be a multiple of the 3 ranks, got 16"),
            (&["--experts", "6"], 2, "--experts must be a multiple of 4 (NCCL EP's routing map), got 6"),
            (&["--top-k", "8", "--experts", "4"], 2, "--top-k must be at most the 4 experts, got 8"),
            (&["--top-k", "33", "--experts", "64"], 2, "--top-k must be 1 to 32, got 33"),
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
        assert_eq!(bench(&[]).unwrap().steps, 20);
        let text = "--hidden must be a multiple of 512 (MXFP8 scale rows), got 1032";
        assert_eq!(bench(&["--hidden", "1032"]).unwrap_err(), text);
        assert_eq!(bench(&["--iterations", "0"]).unwrap_err(), "--iterations must be 1 to 1000000, got 0");
        assert!(bench(&["--experts", "18"]).unwrap_err().starts_with("--experts must be a multiple of the 4 ranks"));
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
        assert_eq!(job.shared().ranks, Some(2));
    }

    #[test]
    fn nothing_else_exists() {
        assert!(Cli::try_parse_from(["nvte-ep", "surgeon"]).is_err());
        assert!(Cli::try_parse_from(["nvte-ep", "run", "--dtype", "f64"]).is_err());
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
