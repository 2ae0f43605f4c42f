//! `nvte-ep launch`: what ranks find, how they meet, how they end.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_nvte-ep");
/// Where test binaries and the libraries built for them are.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

fn launch(arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("launch").args(arguments).stdin(Stdio::null());
    for name in ["NVTE_EP_RUNTIME", "NVTE_EP_HOST_DEVICES", "NVTE_EP_HOST_FAULT", "RANK", "OMPI_COMM_WORLD_RANK"] {
        command.env_remove(name);
    }
    command.env("NVTE_EP_HOST_LIB", built().join("libnvte_ep_host.so"));
    command
}

fn shell(ranks: &str, script: &str) -> Output {
    launch(&["-n", ranks, "--grace", "1", "--", "sh", "-c", script]).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn sorted(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn ranks_find_their_place_and_their_lines_are_marked() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_SIZE \
                  $OMPI_COMM_WORLD_LOCAL_RANK $OMPI_COMM_WORLD_LOCAL_SIZE $MASTER_ADDR $NVTE_EP_RUNTIME \
                  $NVTE_EP_HOST_DEVICES; test $MASTER_PORT -gt 0 && test -d $NVTE_EP_LAUNCH_DIRECTORY && \
                  test -e ${LD_LIBRARY_PATH%%:*}/libnccl.so.2 && echo fine >&2; printf 'no end of line'";
    let output = shell("3", script);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut expected: Vec<String> = (0..3)
        .flat_map(|r| {
            [format!("[rank {r}] {r} 3 {r} 3 {r} 3 {r} 3 127.0.0.1 host 3"), format!("[rank {r}] no end of line")]
        })
        .collect();
    expected.sort();
    assert_eq!(sorted(&output.stdout), expected);
    assert_eq!(sorted(&output.stderr), (0..3).map(|r| format!("[rank {r}] fine")).collect::<Vec<_>>());
}

#[test]
fn with_cuda_the_libraries_are_the_machines_own() {
    let script = "echo $NVTE_EP_RUNTIME ${NVTE_EP_HOST_DEVICES-none} ${LD_LIBRARY_PATH-none}";
    let mut command = launch(&["-n", "1", "--runtime", "cuda", "sh", "-c", script]);
    let output = command.env_remove("LD_LIBRARY_PATH").output().unwrap();
    assert_eq!(text(&output.stdout), "[rank 0] cuda none none\n");
}

#[test]
fn the_first_failure_ends_the_rest_and_gives_the_exit_code() {
    let start = Instant::now();
    let script = "case $RANK in 0) exit 0;; 1) sleep 0.3; exit 7;; 2) trap 'sleep 0.1; exit 9' TERM; sleep 60 & wait;; \
                  *) trap '' TERM; sleep 60 & wait; sleep 60;; esac";
    let output = shell("4", script);
    assert_eq!(output.status.code(), Some(7));
    let errors = text(&output.stderr);
    let expected = "nvte-ep launch: rank 1 of 4 failed first: it ended with exit code 7\n  rank 0 ended with exit code 0\n  \
                    rank 2 ended with exit code 9\n  rank 3 was ended by signal 9\n";
    assert_eq!(errors, expected);
    let took = start.elapsed();
    assert!(took > Duration::from_secs(1) && took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_rank_that_a_signal_ends_counts_as_128_more() {
    let output = shell("2", "if [ $RANK = 1 ]; then kill -SEGV $$; fi; sleep 0.5");
    assert_eq!(output.status.code(), Some(128 + 11));
    let errors = text(&output.stderr);
    assert!(errors.contains("rank 1 of 2 failed first: it was ended by signal 11\n  rank 0 ended with exit code 0"));
}

#[test]
fn the_time_may_be_limited() {
    let output = launch(&["-n", "2", "--timeout", "1", "sleep", "60"]).output().unwrap();
    assert_eq!(output.status.code(), Some(124));
    assert_eq!(text(&output.stderr), "nvte-ep launch: the time was up\n  ranks 0, 1 were ended by signal 15\n");
}

#[test]
fn signals_reach_the_ranks_and_what_they_have_started() {
    let script = "trap 'echo once' USR1; trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut child = launch(&["-n", "2", "sh", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let pid = child.id().to_string();
    let signal = |signal: &str| {
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    };
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let mut two = || {
        let mut two = [lines.next().unwrap().unwrap(), lines.next().unwrap().unwrap()];
        two.sort();
        two
    };
    assert_eq!(two(), ["[rank 0] ready", "[rank 1] ready"]);
    signal("-USR1");
    assert_eq!(two(), ["[rank 0] once", "[rank 1] once"]);
    signal("-TERM");
    assert_eq!(two(), ["[rank 0] bye", "[rank 1] bye"]);
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn what_cannot_be_started_is_told() {
    let output = launch(&["-n", "2", "/nonexistent/program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(
        errors.starts_with("nvte-ep launch: cannot start rank 0: ") && errors.contains("/nonexistent/program"),
        "{errors}"
    );
    for (arguments, words) in [
        (&["-n", "0", "true"][..], "the number of ranks must be 1 to 1024"),
        (&["-n", "2"], "required arguments were not provided"),
        (&["--runtime", "gpu", "true"], "invalid value 'gpu'"),
    ] {
        let output = launch(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
    let output = launch(&["true"]).env("NVTE_EP_HOST_LIB", "/nonexistent/lib.so").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("NVTE_EP_HOST_LIB: /nonexistent/lib.so: "), "{}", text(&output.stderr));
}

/// Compiles tests/meet.c against the host runtime's headers, linked to its libraries' names for programs.
fn meeting_program() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("meet");
    let compiled = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror"])
        .arg(tests.join("meet.c"))
        .arg("-o")
        .arg(&program)
        .arg("-I")
        .arg(tests.join("../../include/nvte_ep_host"))
        .arg("-L")
        .arg(built())
        .arg("-lnvte_ep_host")
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", text(&compiled.stderr));
    program
}

#[test]
fn a_c_program_meets_by_a_file_and_computes() {
    let program = meeting_program();
    let program = program.to_str().unwrap();
    let output = launch(&["-n", "4", program]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let expected: Vec<String> = (0..4).map(|r| format!("[rank {r}] rank {r} of 4: the sum is 10")).collect();
    assert_eq!(sorted(&output.stdout), expected);

    // A rank that dies is named by its peers, and by the launcher.
    let output = launch(&["-n", "3", "--grace", "20", program])
        .env("NVTE_EP_HOST_FAULT", "rank=2,call=ncclAllReduce,do=kill")
        .output()
        .unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(128 + 9), "{errors}");
    assert!(
        errors.contains("rank 2 of 3 failed first: it was ended by signal 9\n  ranks 0, 1 ended with exit code 3"),
        "{errors}"
    );
    for rank in ["[rank 0] ", "[rank 1] "] {
        let named = |line: &str| line.starts_with(rank) && line.contains("the process of rank 2 (pid ");
        assert!(errors.lines().any(named), "{errors}");
    }
}

#[test]
fn the_command_itself_runs_under_it() {
    let small = ["run", "--tokens=40", "--hidden=64", "--experts=8", "--top-k=2", "--steps=1"];
    let output = launch(&[&["-n", "2", "--", PROGRAM][..], &small].concat()).output().unwrap();
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    assert!(printed.ends_with("[rank 0] all checks passed\n"), "{printed}");
    assert!(!printed.contains("[rank 1]"), "one rank prints: {printed}");
}
