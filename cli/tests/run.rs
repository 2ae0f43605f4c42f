//! The built command: arguments, and whole runs over the host runtime.

use std::process::{Command, Output, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_nvte-ep");
const PASSED: &str = "all checks passed";

/// Variables that would change what a run does.
const FOREIGN: [&str; 12] = [
    "NVTE_EP_HOST_DOMAINS",
    "NVTE_EP_HOST_FAULT",
    "NCCL_LSA_TEAM_SIZE",
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

/// The reference sums token by token, in the order of NCCL EP over several domains.
#[test]
fn simulated_machines_pass_bit_by_bit() {
    for (machines, more) in [("2", ["--dtype=bf16", "--ranks=4"]), ("1", ["--dtype=f32", "--ranks=4"])] {
        let arguments: Vec<&str> = SMALL.iter().chain(&more).copied().collect();
        let output = command(&arguments).env("NVTE_EP_HOST_DOMAINS", machines).output().unwrap();
        let printed = text(&output.stdout);
        assert!(output.status.success() && printed.contains(PASSED), "{printed}{}", text(&output.stderr));
    }
}

#[test]
fn what_cuts_simulated_machines_is_named_by_every_rank() {
    let machines = |value| ("NVTE_EP_HOST_DOMAINS", value);
    let cases: [(&[(&str, &str)], &str); 4] = [
        (
            &[machines("cyclic:2")],
            "needs all ranks of a machine in one: the ranks of a machine do not follow each other",
        ),
        (
            &[machines("1+3")],
            "the machines have 1 and 3 ranks, and domains are of one size (rank: machine, domain; 0: sim",
        ),
        (
            &[machines("2"), ("NVTE_EP_HOST_FAULT", "missing=gin,rank=2")],
            "no GPU-initiated network (GIN) between them on rank 2",
        ),
        (
            &[("NCCL_LSA_TEAM_SIZE", "2")],
            "domains on 1 machine, and NCCL EP needs all ranks of a machine in one: NCCL_LSA_TEAM_SIZE=2",
        ),
    ];
    for (variables, reason) in cases {
        let arguments: Vec<&str> = SMALL.iter().chain(&["--ranks=4"]).copied().collect();
        let output = command(&arguments).envs(variables.iter().copied()).output().unwrap();
        let printed = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{printed}");
        assert!(
            printed.contains("ranks 0, 1, 2, 3 failed: nvte_ep_initialize: ") && printed.contains(reason),
            "{printed}"
        );
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
    let log = [("NVTE_EP_LOG", "info"), ("NVTE_EP_LOG_FORMAT", "json")];
    let output = command(&small(&["--json", "--verbose"])).envs(log).output().unwrap();
    let lines = text(&output.stderr);
    let created =
        lines.lines().find_map(|line| line.strip_prefix("[rank 1] ").filter(|line| line.contains("EP group created")));
    let created: serde_json::Value = serde_json::from_str(created.unwrap()).unwrap();
    assert_eq!(
        (&created["level"], &created["ep_size"], &created["zero_copy"]),
        (&"info".into(), &2.into(), &false.into())
    );
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

const BENCH: [&str; 5] = ["--runtime=host", "--tokens=16", "--experts=8", "--iterations=2", "--timeout=100"];

fn bench(arguments: &[&str]) -> Output {
    subcommand("bench", &BENCH).args(arguments).output().unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn bench_times_both_kinds_of_groups_and_finds_the_same_bits() {
    let report = json(&bench(&["--ranks=2", "--hidden=512", "--dtype=bf16,mxfp8", "--link-gb-per-s=450", "--json"]));
    assert_eq!((&report["passed"], &report["schema"]), (&true.into(), &1.into()));
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2);
    for (case, dtype, combined) in [(&cases[0], "bf16", 1024), (&cases[1], "mxfp8", 1024)] {
        assert_eq!(case["case"]["dtype"], dtype);
        assert_eq!(case["different"].as_array().unwrap().len(), 0);
        let capacity = case["capacity"].as_u64().unwrap();
        assert!(capacity >= 16 * 2 * 4 / 2 && capacity.is_multiple_of(128), "{capacity}");
        let received: Vec<u64> =
            case["received"].as_array().unwrap().iter().map(|rows| rows.as_u64().unwrap()).collect();
        assert_eq!(received.iter().sum::<u64>(), 2 * 16 * 4);
        let groups = case["groups"].as_array().unwrap();
        assert_eq!([&groups[0]["transfer"], &groups[1]["transfer"]], ["staged", "zero-copy"]);
        for group in groups {
            let calls = group["calls"].as_array().unwrap();
            assert_eq!(calls.len(), 7);
            for call in calls {
                let time = |of: &str, which: &str| call[of][which].as_f64().unwrap();
                for of in ["device_us", "host_us"] {
                    assert!(time(of, "median") > 0.0 && time(of, "p99") >= time(of, "median"), "{call}");
                }
            }
            let most = received.iter().max().unwrap();
            assert_eq!(calls[2]["bytes"].as_u64(), Some(most * combined), "combine");
            assert_eq!(
                calls[1]["bytes"].as_u64(),
                Some(most * if dtype == "bf16" { 1024 } else { 512 + 16 }),
                "dispatch"
            );
            assert!(calls[0]["bytes"].is_null() && calls[1]["of_link"].as_f64().unwrap() > 0.0);
            let memory = |part: &str| group["memory"][part].as_u64().unwrap();
            let parts = ["staging", "scratch", "handle", "symmetric"].map(memory);
            assert_eq!(memory("predicted"), parts.iter().sum::<u64>());
            assert_eq!(memory("payloads"), capacity * 512 * 4 + capacity * 16);
            assert!(group["memory"]["measured"].is_null(), "the host runtime has no device memory of its own");
        }
        assert_eq!(groups[0]["memory"]["symmetric"], 0);
        assert_eq!(groups[1]["memory"]["symmetric"], 64 << 20);
    }
}

#[test]
fn bench_sweeps_and_prints_a_line_for_each_call() {
    let output = bench(&[
        "--hidden=64",
        "--ranks=1,2",
        "--routing=hot,zipf",
        "--rounds=1",
        "--transfer=staged",
        "--graph",
        "--csv",
    ]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 1 + 2 * 2 * 7);
    assert!(lines.iter().all(|line| line.split(',').count() == lines[0].split(',').count()), "{printed}");
    assert!(lines[1].starts_with("1,16,64,4,8,16,bf16,hot,,true,staged,false,"), "{printed}");
    assert!(lines[28].starts_with("2,16,64,4,8,16,bf16,zipf,,true,staged,false,"), "{printed}");
}

/// The other library is this one in another file, so that all it gives has to be the same.
#[test]
fn bench_times_one_library_against_another() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.so");
    let built = std::path::Path::new(PROGRAM).parent().unwrap();
    let own = [built.join("deps/libnvte_ep.so"), built.join("libnvte_ep.so")].into_iter().find(|path| path.exists());
    std::fs::copy(own.unwrap(), &other).unwrap();
    let mut command = subcommand("bench", &BENCH);
    command.args(["--ranks=2", "--hidden=64", "--transfer=staged", "--rounds=2", "--json", "--against"]).arg(&other);
    let report = json(&command.env("NVTE_EP_HOST_LIB", built.join("deps/libnvte_ep_host.so")).output().unwrap());
    let case = &report["cases"][0];
    assert_eq!(case["different_from_other"].as_array().unwrap().len(), 0, "{case}");
    let [own, against] = [0, 1].map(|group| &case["groups"][group]);
    assert_eq!([&own["against"], &against["against"]], [&false, &true]);
    assert_eq!(against["library_path"].as_str(), other.to_str());
    for call in 0..7 {
        let median = |group: &serde_json::Value| group["calls"][call]["device_us"]["median"].as_f64().unwrap();
        let ratio = own["calls"][call]["device_ratio"].as_f64().unwrap();
        assert!((ratio - median(own) / median(against)).abs() < 1e-9);
        assert!(against["calls"][call]["device_ratio"].is_null());
    }
}

#[test]
fn bench_takes_recorded_indices_and_refuses_what_is_no_library() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("indices");
    std::fs::write(&file, "7,6,5,-1\n0,1,2,3\n").unwrap();
    let file = format!("--routing-file={}", file.display());
    let report = json(&bench(&["--ranks=2", "--hidden=64", "--transfer=staged", "--routing=file", &file, "--json"]));
    assert_eq!(report["cases"][0]["expert_rows"], serde_json::json!([16, 16, 16, 16, 0, 16, 16, 16]));
    let output = bench(&["--ranks=1", "--against=/nonexistent/lib.so"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("/nonexistent/lib.so"), "{}", text(&output.stdout));
}

#[test]
fn plot_draws_what_the_commands_report() {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("of.json");
    let run = run(&small(&["--json", "--plot", folder.path().to_str().unwrap()]));
    std::fs::write(&report, &run.stdout).unwrap();
    let plot = |file: &std::path::Path| {
        subcommand("plot", &["--format=svg,png", "-o"]).arg(folder.path()).arg(file).output().unwrap()
    };
    let output = plot(&report);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let names = ["of_load.svg", "of_load.png", "of_rows.svg", "of_rows.png"];
    let files = names.map(|name| folder.path().join(name));
    assert_eq!(text(&output.stdout), files.each_ref().map(|file| format!("{}\n", file.display())).concat());
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    assert_eq!(read("load.svg"), read("of_load.svg"), "--plot draws the same");
    assert!(files.iter().all(|file| file.metadata().unwrap().len() > 1000));
    std::fs::write(&report, "{}").unwrap();
    let output = plot(&report);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("of.json: neither `nvte-ep bench --json`"), "{}", text(&output.stderr));
}

#[test]
fn warmup_runs_two_steps_of_each_shape() {
    let folder = tempfile::tempdir().unwrap();
    let shapes = folder.path().join("shapes.toml");
    std::fs::write(&shapes, "[[shape]]\nhidden = 64\n[[shape]]\nhidden = 128\n").unwrap();
    let arguments = ["--runtime=host", "--ranks=2", "--tokens=16", "--experts=8", "--transfer=both"];
    let warmup = |more: &[&str]| subcommand("warmup", &arguments).args(more).output().unwrap();
    let report = json(&warmup(&["--json", "--shapes", shapes.to_str().unwrap()]));
    let groups = report["groups"].as_array().unwrap();
    let of = |group: &serde_json::Value| (group["case"]["hidden"].as_u64().unwrap(), group["transfer"].clone());
    let (staged, zero_copy) = ("staged".into(), "zero-copy".into());
    let all = [(64, staged), (64, zero_copy)];
    assert_eq!(groups[..2].iter().map(of).collect::<Vec<_>>(), all);
    assert_eq!((groups.len(), &report["passed"]), (4, &true.into()));
    for time in ["initialize_s", "first_step_s", "second_step_s"] {
        assert!(groups.iter().all(|group| group[time].as_f64().unwrap() > 0.0), "{report}");
    }
    let output = warmup(&["--hidden=20"]);
    assert_eq!(output.status.code(), Some(2));
    std::fs::write(&shapes, "[[shape]]\ntokens = 16\nhidden = 20\n").unwrap();
    let output = warmup(&["--shapes", shapes.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains("shapes.toml, line 3: hidden must be a multiple of 8"), "{error}");
}

#[test]
fn a_warmup_waits_for_another_one_and_not_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    // SAFETY: takes nothing.
    let user = unsafe { libc::geteuid() };
    let lock = std::fs::File::create(folder.path().join(format!("nvte-ep-warmup-{user}.lock"))).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut command = subcommand("warmup", &["--runtime=host", "--ranks=1", "--timeout=1"]);
    let output = command.env("TMPDIR", folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("waiting for another warmup") && error.contains("for 1 s (--timeout)"), "{error}");
}

/// The profiler is tests/count_ranges.c.
#[test]
fn a_profiler_sees_a_range_of_every_call() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("count_ranges.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/count_ranges.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source, "-o"]);
    let compiled = compiler.arg(&library).output().unwrap();
    assert!(compiled.status.success(), "{}", text(&compiled.stderr));
    let ranges = folder.path().join("ranges");
    let mut profiled = command(&small(&[]));
    profiled.env("NVTX_INJECTION64_PATH", &library).env("RANGES", &ranges);
    assert_eq!(profiled.output().unwrap().status.code(), Some(0));
    let found = std::fs::read_to_string(&ranges).unwrap();
    let count = |line: &str| found.lines().filter(|found| *found == line).count();
    // Of two ranks and three steps.
    for (name, calls) in [
        ("nvte_ep_initialize", 2),
        ("nvte_ep_prepare", 6),
        ("nvte_ep_dispatch", 6),
        ("nvte_ep_combine", 6),
        ("nvte_ep_combine_bwd", 6),
        ("nvte_ep_dispatch_bwd", 6),
        ("nvte_ep_shutdown", 2),
    ] {
        assert_eq!(count(name), calls, "{name}: {found}");
    }
    assert!(found.lines().all(|line| line == "end" || line.starts_with("nvte_ep_")), "{found}");
    assert_eq!(2 * count("end"), found.lines().count());

    // A library that is none is told, and changes nothing.
    let output = command(&small(&["--verbose"])).env("NVTX_INJECTION64_PATH", "/nonexistent.so").output().unwrap();
    let printed = text(&output.stderr) + &text(&output.stdout);
    assert!(output.status.success() && printed.contains("NVTX_INJECTION64_PATH has no ranges"), "{printed}");
}
