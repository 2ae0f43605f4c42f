//! The built command: arguments, and whole runs over the host runtime.

use std::process::{Command, Output, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_nvte-ep");
const PASSED: &str = "all checks passed";

/// Variables that would change what a run does.
const FOREIGN: [&str; 9] = [
    "NVTE_EP_RUNTIME",
    "NVTE_EP_LIB",
    "NVTE_EP_HOST_LIB",
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_STEP_ID",
    "NVTE_EP_RUN_TICKET",
    "NVTE_EP_RUN_PROBE",
];

fn command(arguments: &[&str]) -> Command {
    subcommand("run", arguments)
}

fn subcommand(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg(name).args(arguments).stdin(Stdio::null());
    for name in FOREIGN {
        command.env_remove(name);
    }
    command
}

fn run(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const SMALL: [&str; 6] = ["--runtime=host", "--tokens=40", "--hidden=64", "--experts=8", "--top-k=2", "--steps=3"];

fn small<'a>(more: &[&'a str]) -> Vec<&'a str> {
    SMALL.iter().chain(&["--ranks=2"]).chain(more).copied().collect()
}

#[test]
fn bad_arguments_end_with_2_before_anything_starts() {
    for (arguments, message) in [
        (&["--ranks", "3"][..], "--experts must be a multiple of the 3 ranks, got 16"),
        (&["--hidden", "20"], "--hidden must be a multiple of 8"),
        (&["--top-k", "17"], "--top-k must be at most the 16 experts, got 17"),
        (&["--dtype", "int8"], "invalid value 'int8'"),
        (&["--no-such-option"], "unexpected argument"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let error = text(&output.stderr);
        assert!(error.starts_with("error: ") && error.contains(message), "{error}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_library_that_is_not_there_is_told_and_ends_with_1() {
    let output = command(&small(&[])).env("NVTE_EP_LIB", "/nonexistent/libnvte_ep.so").output().unwrap();
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("ranks 0, 1 failed: libnvte_ep.so could not be loaded"), "{printed}");
    assert!(printed.ends_with("checks failed\n"));
}

#[test]
fn an_ignored_sigchld_changes_nothing() {
    let mut command = command(&small(&[]));
    let ignore = || {
        // SAFETY: sets no handler.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        Ok(())
    };
    // SAFETY: between fork and exec only a signal is set.
    unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, ignore) };
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn results_that_cannot_be_written_are_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = command(&small(&[])).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let output = output.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("nvte-ep run: cannot write to standard output: No space left"));
}

#[test]
fn every_type_passes() {
    for more in [&["--dtype", "bf16"][..], &["--dtype", "f16", "--align", "0"], &["--dtype", "f32", "--align", "8"]] {
        let output = run(&small(more));
        let printed = text(&output.stdout);
        assert!(output.status.success(), "{printed}{}", text(&output.stderr));
        assert!(printed.ends_with(&format!("\n{PASSED}\n")), "{printed}");
        for part in ["runtime    host: asked for by --runtime host", "grad_topk_weights (bits)", "dispatch_bwd"] {
            assert!(printed.contains(part), "{part} is not in\n{printed}");
        }
    }
}

#[test]
fn digests_repeat_and_follow_the_seed() {
    let digests = |seed| {
        let printed = text(&run(&small(&["--digest", "--seed", seed])).stdout);
        printed.lines().filter(|line| line.starts_with("digest ")).map(str::to_owned).collect::<Vec<_>>()
    };
    let first = digests("5");
    assert_eq!(first.len(), 3 * 2 * 7);
    assert_eq!(first, digests("5"));
    assert_ne!(first, digests("6"));
}

#[test]
fn machine_readable_results() {
    let output = run(&small(&["--json"]));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["passed"], true);
    assert_eq!(report["ranks"].as_array().map(Vec::len), Some(2));
    assert_eq!(report["ranks"][1]["steps"][2]["milliseconds"].as_array().map(Vec::len), Some(5));
    assert!(report["ranks"][0]["outputs"].as_array().unwrap().iter().all(|output| output["wrong"] == 0));
}

#[test]
fn ranks_of_a_launcher_meet_and_one_prints() {
    let job = format!("test-{}", std::process::id());
    let start = |rank: &str| {
        command(&SMALL)
            .env("OMPI_COMM_WORLD_RANK", rank)
            .env("OMPI_COMM_WORLD_SIZE", "2")
            .env("OMPI_COMM_WORLD_LOCAL_RANK", rank)
            .env("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
            .env("PMIX_NAMESPACE", &job)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    // Twice, as the second run finds the same job name again.
    for _ in 0..2 {
        let [first, second] = ["0", "1"].map(start).map(|child| child.wait_with_output().unwrap());
        assert!(first.status.success() && second.status.success(), "{}", text(&second.stderr));
        assert!(text(&first.stdout).ends_with(&format!("\n{PASSED}\n")));
        assert!(second.stdout.is_empty());
    }
}

#[test]
fn time_runs_out() {
    let large = ["--runtime", "host", "--ranks", "2", "--tokens", "8192", "--hidden", "4096", "--timeout", "1"];
    let output = run(&large);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("time ran out after 1 s"), "{printed}");
}

/// A run of two ranks of which rank 1 has a fault.
fn faulty(rules: &str) -> (Option<i32>, String) {
    faulty_within("1500", rules)
}

/// The same with another limit, in milliseconds, of the host runtime's waits.
fn faulty_within(limit: &str, rules: &str) -> (Option<i32>, String) {
    let output = command(&small(&["--timeout=60"]))
        .env("NVTE_EP_HOST_FAULT", rules)
        .env("NVTE_EP_HOST_TIMEOUT_MS", limit)
        .output()
        .unwrap();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn a_rank_that_dies_in_dispatch_is_named_by_its_peer() {
    let start = std::time::Instant::now();
    let (code, printed) = faulty("rank=1,call=ncclEpDispatch,nth=2,do=kill");
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("rank 0 failed: cuStreamSynchronize returned 719"), "{printed}");
    assert!(printed.contains("the process of rank 1 (pid "), "{printed}");
    assert!(printed.contains("was ended by signal 9"), "{printed}");
    assert!(start.elapsed().as_secs() < 30);
}

#[test]
fn a_rank_that_stops_in_dispatch_is_named_after_the_time_out() {
    let (code, printed) = faulty("rank=1,call=ncclEpDispatch,nth=2,do=stop");
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("rank 1 did not arrive within 1500 ms"), "{printed}");
}

/// The main thread of rank 0 is in a synchronization that does not return; without the library's watch it would stay there
/// as long as the host runtime waits, and on a GPU for ever.
#[test]
fn a_process_that_waits_in_vain_is_ended() {
    let start = std::time::Instant::now();
    let output = command(&small(&["--timeout=100"]))
        .env("NVTE_EP_HOST_FAULT", "rank=1,call=ncclEpDispatch,nth=2,do=stop")
        .env("NVTE_EP_HOST_TIMEOUT_MS", "90000")
        .env("NVTE_EP_TIMEOUT_MS", "1000")
        .env("NVTE_EP_SHUTDOWN_TIMEOUT_MS", "500")
        .output()
        .unwrap();
    let printed = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("rank 1 has entered the call and not come out of it"), "{printed}");
    assert!(printed.contains("the process ends here"), "{printed}");
    assert!(printed.contains("was ended by signal 6"), "{printed}");
    assert!(start.elapsed().as_secs() < 60);
}

#[test]
fn a_call_that_fails_ends_both_ranks_with_words() {
    let (code, printed) = faulty("rank=1,call=ncclEpCombine,do=fail,code=3");
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("ncclEpCombine: rank 1: asked for by NVTE_EP_HOST_FAULT"), "{printed}");
}

#[test]
fn without_nvcc_initialize_refuses_on_every_rank() {
    let (code, printed) = faulty_within("60000", "rank=1,missing=nvcc");
    assert_eq!(code, Some(1), "{printed}");
    let words = "ranks 0, 1 failed: nvte_ep_initialize: rank 1 cannot take part: NCCL EP compiles its kernels at run time \
                 and needs nvcc (hidden by NVTE_EP_HOST_FAULT)";
    assert!(printed.contains(words), "{printed}");
    assert!(!printed.contains("signal"), "{printed}");
}

#[test]
fn faults_that_cannot_be_read_are_refused() {
    let (code, printed) = faulty("rank=1,call=ncclEpDispatch,do=vanish");
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("do must be delay, stop, kill, abort, exit or fail, got \"vanish\""), "{printed}");
}

#[test]
fn bench_times_both_kinds_of_groups_and_finds_the_same_bits() {
    let arguments = ["--runtime=host", "--ranks=2", "--tokens=40", "--hidden=512", "--experts=8", "--top-k=4"];
    let output = subcommand("bench", &arguments).args(["--iterations=2", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["passed"], true);
    let capacity = report["ranks"][0]["capacity"].as_u64().unwrap();
    assert!(capacity >= 40 * 2 * 4 / 2 && capacity.is_multiple_of(128), "{capacity}");
    for rank in 0..2 {
        let modes = report["ranks"][rank]["modes"].as_array().unwrap();
        assert_eq!([&modes[0]["transfer"], &modes[1]["transfer"]], ["staged", "zero-copy"]);
        assert_eq!(modes[0]["digests"], modes[1]["digests"]);
        let outputs = modes[0]["digests"].as_array().unwrap();
        assert_eq!(outputs.len(), 11);
        assert!(outputs.iter().all(|output| output["rows"].as_u64().unwrap() > 0));
        for mode in modes {
            assert!(mode["milliseconds"].as_array().unwrap().iter().all(|time| time.as_f64().unwrap() > 0.0));
            let memory = |part: &str| mode["memory"][part].as_u64().unwrap();
            let parts = ["staging", "scratch", "handle", "symmetric"].map(memory);
            assert_eq!(memory("predicted"), parts.iter().sum::<u64>());
            assert_eq!(memory("payloads"), capacity * 512 * 4 + capacity * 16);
            assert!(mode["memory"]["measured"].is_null(), "the host runtime has no device memory of its own");
        }
        assert_eq!(modes[0]["memory"]["symmetric"], 0);
        assert_eq!(modes[1]["memory"]["symmetric"], 64 << 20);
    }
    let output = subcommand("bench", &arguments).args(["--iterations=1", "--transfer=staged"]).output().unwrap();
    let printed = text(&output.stdout);
    assert!(output.status.success() && printed.ends_with(&format!("{PASSED}\n")), "{printed}");
    assert!(printed.contains("dispatch, MXFP8") && printed.contains("not measured"), "{printed}");
    assert!(!printed.contains("zero-copy"), "{printed}");
}
