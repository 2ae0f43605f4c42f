//! `nvte-ep launch`: what ranks find, how they meet, how they end.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{OnceLock, mpsc};
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

/// Kills the process after a minute, so that a test whose program hangs fails; dropped when the test is over.
fn limited(child: &Child) -> mpsc::Sender<()> {
    let (over, wait) = mpsc::channel();
    let pid = child.id().to_string();
    std::thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(60)) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("process {pid} did not end within a minute");
            kill("-KILL", &pid);
        }
    });
    over
}

fn kill(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, "--", pid]).status().unwrap().success());
}

fn outcome(command: &mut Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _limit = limited(&child);
    child.wait_with_output().unwrap()
}

fn shell(ranks: &str, script: &str) -> Output {
    outcome(&mut launch(&["-n", ranks, "--grace", "1", "--", "sh", "-c", script]))
}

/// Waits until it holds.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether the process runs, which one that waits for its parent does not.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// A folder of this test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
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
    let output = outcome(command.env_remove("LD_LIBRARY_PATH"));
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
    let output = outcome(&mut launch(&["-n", "2", "--timeout", "1", "sleep", "60"]));
    assert_eq!(output.status.code(), Some(124));
    assert_eq!(text(&output.stderr), "nvte-ep launch: the time was up\n  ranks 0, 1 were ended by signal 15\n");
}

#[test]
fn signals_reach_the_ranks_and_what_they_have_started() {
    let script = "trap 'echo once' USR1; trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut child = launch(&["-n", "2", "sh", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let _limit = limited(&child);
    let pid = child.id().to_string();
    let signal = |signal: &str| kill(signal, &pid);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
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
    let output = outcome(&mut launch(&["-n", "2", "/nonexistent/program"]));
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
        let output = outcome(&mut launch(arguments));
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
    let output = outcome(launch(&["true"]).env("NVTE_EP_HOST_LIB", "/nonexistent/lib.so"));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("NVTE_EP_HOST_LIB: /nonexistent/lib.so: "), "{}", text(&output.stderr));
}

#[test]
fn an_ignored_sigchld_does_not_lose_how_ranks_end() {
    let mut command = launch(&["-n", "2", "--grace", "0", "sh", "-c", "exit $((RANK * 5))"]);
    // SAFETY: only sets how a signal is taken.
    unsafe { command.pre_exec(|| ignored(libc::SIGCHLD)) };
    let output = outcome(&mut command);
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
}

fn ignored(signal: i32) -> std::io::Result<()> {
    // SAFETY: sets no handler.
    if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

#[test]
fn signals_that_are_ignored_stay_ignored() {
    let mut command = launch(&["-n", "1", "sh", "-c", "echo ready; sleep 0.7; kill -HUP $$; echo done"]);
    // SAFETY: only sets how a signal is taken.
    unsafe { command.pre_exec(|| ignored(libc::SIGHUP)) };
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let _limit = limited(&child);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    out.read_line(&mut first).unwrap();
    assert_eq!(first, "[rank 0] ready\n");
    kill("-HUP", &child.id().to_string());
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "[rank 0] done\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn what_a_rank_has_started_ends_with_the_run() {
    for code in ["0", "3"] {
        let output = shell("1", &format!("sleep 49 >/dev/null 2>&1 & echo $!; exit {code}"));
        assert_eq!(output.status.code(), code.parse().ok());
        let pid = text(&output.stdout).trim().replace("[rank 0] ", "");
        until("the sleep ends", || !runs(&pid));
    }
}

#[test]
fn a_killed_launcher_leaves_nothing() {
    let temporary = folder("killed");
    let script = "sleep 49 & echo $$ $! $NVTE_EP_LAUNCH_DIRECTORY; wait";
    let mut command = launch(&["-n", "2", "sh", "-c", script]);
    let mut child = command.env("TMPDIR", &temporary).stdout(Stdio::piped()).spawn().unwrap();
    let _limit = limited(&child);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let lines: Vec<String> = (0..2).map(|_| lines.next().unwrap().unwrap()).collect();
    let words: Vec<&str> = lines.iter().flat_map(|line| line.split(' ').skip(2)).collect();
    let [first, first_sleep, directory, second, second_sleep, _] = words[..] else { panic!("{lines:?}") };
    assert!([first, first_sleep, second, second_sleep].into_iter().all(runs) && Path::new(directory).is_dir());
    kill("-KILL", &child.id().to_string());
    child.wait().unwrap();
    for pid in [first, first_sleep, second, second_sleep] {
        until("what the launcher started ends", || !runs(pid));
    }
    until("its folder is removed", || std::fs::read_dir(&temporary).unwrap().next().is_none());
}

#[test]
fn progress_lines_are_passed_on_while_they_move() {
    let script = "printf '10 %%\\r'; while ! [ -e go ]; do sleep 0.05; done; printf '20 %%\\r'; echo end";
    let here = folder("progress");
    let mut command = launch(&["-n", "1", "sh", "-c", script]);
    let mut child = command.current_dir(&here).stdout(Stdio::piped()).spawn().unwrap();
    let _limit = limited(&child);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut first = Vec::new();
    out.read_until(b'\r', &mut first).unwrap();
    assert_eq!(text(&first), "[rank 0] 10 %\r");
    std::fs::write(here.join("go"), "").unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "[rank 0] 20 %\r[rank 0] end\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn temporary_folders_of_every_kind() {
    let here = folder("temporary");
    std::fs::create_dir_all(here.join("a:b")).unwrap();
    // A relative folder, and a program that changes its own.
    let script = "cd / && test -d $NVTE_EP_LAUNCH_DIRECTORY && test -e ${LD_LIBRARY_PATH%%:*}/libnccl.so.2";
    let output_in =
        |folder: &str| outcome(launch(&["-n", "1", "--", "sh", "-c", script]).current_dir(&here).env("TMPDIR", folder));
    let relative = output_in(".");
    assert!(relative.status.success(), "{}", text(&relative.stderr));
    let colon = output_in(here.join("a:b").to_str().unwrap());
    assert_eq!(colon.status.code(), Some(1));
    let words = "the folder of temporary files (TMPDIR), ";
    let errors = text(&colon.stderr);
    assert!(errors.contains(words) && errors.contains("a:b, has a colon in its name"), "{errors}");
    assert!(!errors.contains("LD_LIBRARY_PATH: "), "{errors}");
}

#[test]
fn ranks_may_be_counted_as_with_mpirun_and_torchrun() {
    for arguments in [["-np", "2"], ["--nproc-per-node", "2"], ["--nproc_per_node", "2"]] {
        let output = outcome(&mut launch(&[&arguments[..], &["sh", "-c", "echo $WORLD_SIZE"]].concat()));
        assert_eq!(sorted(&output.stdout), ["[rank 0] 2", "[rank 1] 2"], "{}", text(&output.stderr));
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    for arguments in [&["launch", "-n", "1", "echo", "x"][..], &["--help"], &["--version"], &["run", "--help"]] {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).env("NVTE_EP_HOST_LIB", built().join("libnvte_ep_host.so"));
        let child = command.stdin(Stdio::null()).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
        let _limit = limited(&child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(text(&output.stderr).contains("cannot write to standard output: No space left"), "{arguments:?}");
    }
}

/// The exit code tells how the ranks ended, whoever reads what they said.
#[test]
fn the_exit_code_does_not_depend_on_who_reads_stderr() {
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let closed = || Stdio::from(std::io::pipe().unwrap().1);
    let code = |program: &[&str], stderr: Stdio| {
        let mut command = launch(&[&["-n", "2", "--grace", "1", "--"], program].concat());
        let child = command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
        let _limit = limited(&child);
        child.wait_with_output().unwrap().status.code()
    };
    let failing = ["sh", "-c", "echo x >&2; exit 3"];
    assert_eq!(code(&["true"], full()), Some(0));
    assert_eq!(code(&failing, full()), Some(3));
    assert_eq!(code(&failing, closed()), Some(3));
    // As with standard output: what a rank said is lost.
    assert_eq!(code(&["sh", "-c", "echo x >&2"], full()), Some(1));
    assert_eq!(code(&["/no/such/program"], closed()), Some(1));
}

#[test]
fn standard_input_is_empty() {
    let output = shell("2", "wc -c");
    assert_eq!(sorted(&output.stdout), ["[rank 0] 0", "[rank 1] 0"]);
}

#[test]
fn the_variable_chooses_the_runtime_and_nonsense_is_refused() {
    let run = |value: &str, more: &[&str]| {
        let arguments = [&["-n", "1"][..], more, &["sh", "-c", "echo $NVTE_EP_RUNTIME"]].concat();
        outcome(launch(&arguments).env("NVTE_EP_RUNTIME", value))
    };
    assert_eq!(text(&run("cuda", &[]).stdout), "[rank 0] cuda\n");
    assert_eq!(text(&run("cuda", &["--runtime", "host"]).stdout), "[rank 0] host\n");
    for more in [&[][..], &["--runtime", "host"]] {
        let output = run("cpu", more);
        assert_eq!(output.status.code(), Some(2));
        let errors = text(&output.stderr);
        assert!(errors.contains("NVTE_EP_RUNTIME must be cuda or host, got cpu"), "{errors}");
    }
}

/// Both ranks of a group refuse a configuration on which they disagree, at the same moment: neither is the first.
#[test]
fn ranks_that_fail_together_are_not_put_in_order() {
    let script = "cd $NVTE_EP_LAUNCH_DIRECTORY; : >$RANK; until [ -e 0 ] && [ -e 1 ]; do :; done; exit $((3 + RANK))";
    for _ in 0..5 {
        let output = shell("2", script);
        let errors = text(&output.stderr);
        let head = "nvte-ep launch: ranks 0, 1 of 2 failed at the same time, so their messages have to tell which is the cause\n";
        assert!(errors.starts_with(head), "{errors}");
        assert!(errors.contains("  rank 0 ended with exit code 3\n  rank 1 ended with exit code 4\n"), "{errors}");
        assert!([Some(3), Some(4)].contains(&output.status.code()), "{errors}");
    }
}

/// Compiles tests/meet.c against the host runtime's headers, linked to its libraries' names for programs.
fn meeting_program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(compiled_meeting_program)
}

fn compiled_meeting_program() -> PathBuf {
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
    let output = outcome(&mut launch(&["-n", "4", program]));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let expected: Vec<String> = (0..4).map(|r| format!("[rank {r}] rank {r} of 4: the sum is 10")).collect();
    assert_eq!(sorted(&output.stdout), expected);

    // A rank that dies is named by its peers, and by the launcher.
    let output = outcome(
        launch(&["-n", "3", "--grace", "20", program]).env("NVTE_EP_HOST_FAULT", "rank=2,call=ncclAllReduce,do=kill"),
    );
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

/// A rank that waits for its peers has the rendezvous file locked; once it is dead the lock is free, and a later run may
/// sweep the file.
#[test]
fn a_rendezvous_is_locked_while_a_rank_waits() {
    let here = folder("rendezvous");
    std::os::unix::fs::symlink(built().join("libnvte_ep_host.so"), here.join("libnvte_ep_host.so.1")).unwrap();
    let mut command = Command::new(meeting_program());
    command.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]).env("NVTE_EP_LAUNCH_DIRECTORY", &here);
    let mut child = command.env("LD_LIBRARY_PATH", &here).spawn().unwrap();
    let _limit = limited(&child);
    until("the unique id is there", || here.join("id").exists());
    let id = std::fs::read(here.join("id")).unwrap();
    let id = text(&id[..id.iter().position(|byte| *byte == 0).unwrap()]);
    let path = PathBuf::from(&id[id.find('/').unwrap()..]);
    let is_free = || {
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: the descriptor is open.
        unsafe { libc::flock(std::os::fd::AsRawFd::as_raw_fd(&file), libc::LOCK_EX | libc::LOCK_NB) == 0 }
    };
    until("the rank waits", || path.exists() && !is_free());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(is_free(), "the lock ends with its owner");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn the_command_itself_runs_under_it() {
    let small = ["run", "--tokens=40", "--hidden=64", "--experts=8", "--top-k=2", "--steps=1"];
    let output = outcome(&mut launch(&[&["-n", "2", "--", PROGRAM][..], &small].concat()));
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    assert!(printed.ends_with("[rank 0] all checks passed\n"), "{printed}");
    assert!(!printed.contains("[rank 1]"), "one rank prints: {printed}");
}

/// Launcher 0 of two machines with two ranks each, and where it listens: it waits for the other one now.
fn first_machine(script: &str) -> (Child, BufReader<std::process::ChildStderr>, String) {
    let mut command = launch(&["-n", "2", "--grace", "1", "--nnodes", "2", "--rdzv", "127.0.0.1:0", "--", "sh", "-c"]);
    let mut child = command.arg(script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    errors.read_line(&mut line).unwrap();
    let place = line.trim().strip_prefix("nvte-ep launch: waiting for 1 more machines at ").expect(&line).to_owned();
    (child, errors, place)
}

fn second_machine(place: &str, ranks: &str, script: &str) -> Command {
    let mut command = launch(&["-n", ranks, "--grace", "1", "--nnodes", "2", "--node-rank", "1", "--rdzv", place]);
    command.args(["--", "sh", "-c", script]);
    command
}

/// What both printed and how they ended, the first one's errors in place of its lines.
fn two_machines(script: &str, ranks_of_second: &str) -> ([Output; 2], String) {
    let (first, mut errors, place) = first_machine(script);
    let _limit = limited(&first);
    let second = outcome(&mut second_machine(&place, ranks_of_second, script));
    let mut told = String::new();
    errors.read_to_string(&mut told).unwrap();
    ([first.wait_with_output().unwrap(), second], told)
}

#[test]
fn ranks_of_two_machines_find_their_place() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR \
                  ${NVTE_EP_LAUNCH_DIRECTORY:-none} $NVTE_EP_HOST_DOMAINS; echo $MASTER_PORT >&2";
    let ([first, second], told) = two_machines(script, "2");
    assert!(first.status.success() && second.status.success(), "{told}{}", text(&second.stderr));
    let lines = [sorted(&first.stdout), sorted(&second.stdout)];
    assert_eq!(lines[0], ["[rank 0] 0 0 4 2 0 2 127.0.0.1 none 2", "[rank 1] 1 1 4 2 0 2 127.0.0.1 none 2"]);
    assert_eq!(lines[1], ["[rank 2] 2 0 4 2 1 2 127.0.0.1 none 2", "[rank 3] 3 1 4 2 1 2 127.0.0.1 none 2"]);
    let ports: std::collections::BTreeSet<String> = told
        .lines()
        .chain(text(&second.stderr).lines())
        .map(|line| line.rsplit(' ').next().unwrap().to_owned())
        .collect();
    assert_eq!(ports.len(), 1, "all meet at one port: {ports:?}");
}

#[test]
fn the_first_failure_ends_the_ranks_of_all_machines() {
    for (failing, own, other) in [
        ("1", "rank 1 of 4 failed first: it ended with exit code 7", "rank 1 on machine 0 failed first: it ended with"),
        ("2", "rank 2 of 4 failed first: it ended with exit code 7", "rank 2 on machine 1 failed first: it ended with"),
    ] {
        let script = format!("test $RANK != {failing} || exit 7; exec sleep 600");
        let ([first, second], told) = two_machines(&script, "2");
        assert_eq!([first.status.code(), second.status.code()], [Some(7); 2]);
        let texts = [told, text(&second.stderr)];
        let (here, there) = if failing == "1" { (&texts[0], &texts[1]) } else { (&texts[1], &texts[0]) };
        assert!(here.contains(own) && there.contains(other), "{here}\n{there}");
    }
}

#[test]
fn machines_that_differ_do_not_start() {
    let ([first, second], told) = two_machines("echo started", "3");
    assert_eq!([first.status.code(), second.status.code()], [Some(1); 2]);
    for errors in [told, text(&second.stderr)] {
        assert!(errors.contains("machine 1 has --ranks 3, and machine 0 has 2"), "{errors}");
    }
    assert!(first.stdout.is_empty() && second.stdout.is_empty());
}

#[test]
fn a_launcher_that_is_killed_is_a_failure() {
    let (first, mut errors, place) = first_machine("exec sleep 600");
    let _limit = limited(&first);
    let mut second = second_machine(&place, "2", "echo here; exec sleep 600");
    let mut second = second.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let _limit = limited(&second);
    let mut line = String::new();
    BufReader::new(second.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.ends_with("] here\n"), "{line}");
    second.kill().unwrap();
    second.wait().unwrap();
    let mut told = String::new();
    errors.read_to_string(&mut told).unwrap();
    assert_eq!(first.wait_with_output().unwrap().status.code(), Some(1));
    assert!(told.contains("the launcher of machine 1 is gone"), "{told}");
}

#[test]
fn numbers_of_machines_that_cannot_be_are_refused() {
    for (arguments, message) in [
        (&["--nnodes", "2"][..], "--rdzv <HOST:PORT>"),
        (&["--nnodes", "2", "--rdzv", "a:1", "--node-rank", "2"], "--node-rank must be below --nnodes, 2, got 2"),
        (&["--nnodes", "2", "--rdzv", "a"], "--rdzv must be HOST:PORT"),
        (&["--nnodes", "0", "--rdzv", "a:1"], "--nnodes must be 1 to 1024, got 0"),
    ] {
        let output = outcome(launch(arguments).args(["--", "true"]));
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(message), "{}", text(&output.stderr));
    }
    let alone = outcome(&mut launch(&[
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--rdzv",
        "127.0.0.1:1",
        "--rdzv-timeout",
        "1",
        "--",
        "true",
    ]));
    assert_eq!(alone.status.code(), Some(1));
    let errors = text(&alone.stderr);
    assert!(
        errors.contains("waited 1 s (--rdzv-timeout) for the launcher of machine 0 (Connection refused"),
        "{errors}"
    );
}
