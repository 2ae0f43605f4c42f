//! Whether NCCL EP will find a compiler that works, and will learn from it: it starts nvcc in the first steps and ends the
//! process where that fails.

use super::Lookup;
use crate::error::{Error, Result};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::FromRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How often a running compiler is looked at.
const PERIOD: Duration = Duration::from_millis(5);

/// nvcc, in the order in which NCCL EP itself looks, then in the toolkit's usual place. It has to get through an empty
/// source file within `limit`, for which it needs its host compiler and its own headers too.
///
/// # Errors
/// No nvcc that does; or this process cannot learn how a child ends.
pub(super) fn find_nvcc(env: Lookup<'_>, limit: Option<Duration>) -> Result<PathBuf> {
    require_children()?;
    let named = ["NCCL_EP_JIT_NVCC", "NVCC"].iter().find_map(|name| env(name)).map(PathBuf::from);
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| env(name));
    let candidates: Vec<PathBuf> = match named {
        // A name without a folder is for the search path.
        Some(named) if named.components().count() > 1 => vec![named],
        Some(named) => on_path(env, &named),
        None => toolkits
            .map(|home| Path::new(&home).join("bin/nvcc"))
            .chain(on_path(env, Path::new("nvcc")))
            .chain([PathBuf::from("/usr/local/cuda/bin/nvcc")])
            .collect(),
    };
    let deadline = limit.map(|limit| Instant::now() + limit);
    let mut tried = Vec::new();
    for nvcc in candidates.into_iter().filter(|path| path.exists()) {
        match probe(&nvcc, deadline) {
            Ok(None) => return Ok(nvcc),
            Ok(Some(failure)) => tried.push(format!("{}: {failure}", nvcc.display())),
            Err(error) => tried.push(format!("{}: {error}", nvcc.display())),
        }
    }
    Err(no_nvcc(&if tried.is_empty() { "none found".into() } else { tried.join(", ") }))
}

pub(super) fn no_nvcc(tried: &str) -> Error {
    Error::Preflight {
        problem: format!("NCCL EP compiles its kernels at run time and needs nvcc ({tried})"),
        remedy: "install the CUDA toolkit's compiler, or set NCCL_EP_JIT_NVCC or CUDA_HOME".into(),
    }
}

fn on_path(env: Lookup<'_>, program: &Path) -> Vec<PathBuf> {
    env("PATH")
        .map(|path| std::env::split_paths(&path).map(|folder| folder.join(program)).collect())
        .unwrap_or_default()
}

/// Where SIGCHLD is ignored, the system forgets how a child ended, and NCCL EP (0.1.0: fork and waitpid) takes each compile
/// for a failed one.
fn require_children() -> Result<()> {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: only asks, into a place of the right type.
    unsafe { libc::sigaction(libc::SIGCHLD, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: zeroes are a value, and the call filled it.
    let action = unsafe { action.assume_init() };
    if action.sa_sigaction != libc::SIG_IGN && action.sa_flags & libc::SA_NOCLDWAIT == 0 {
        return Ok(());
    }
    Err(Error::Preflight {
        problem: "SIGCHLD is ignored in this process, so NCCL EP cannot learn how its compiler ended".into(),
        remedy: "call signal(SIGCHLD, SIG_DFL) before nvte_ep_initialize and leave it so; the program that started this one \
                 may have left it ignored"
            .into(),
    })
}

/// Why `nvcc` does not work, if it does not.
fn probe(nvcc: &Path, deadline: Option<Instant>) -> io::Result<Option<String>> {
    let mut said = memory_file()?;
    let start = Instant::now();
    let mut child = Command::new(nvcc)
        .args(["-E", "-x", "cu", "/dev/null", "-o", "/dev/null"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(said.try_clone()?)
        // So that its own children end with it.
        .process_group(0)
        .spawn()?;
    let Some(status) = wait(&mut child, deadline)? else {
        return Ok(Some(format!("it has not come to its end in {} ms", start.elapsed().as_millis())));
    };
    if status.success() {
        return Ok(None);
    }
    let mut text = Vec::new();
    said.rewind()?;
    said.read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    Ok(Some(format!("{status}: {}", text.lines().next().unwrap_or_default().trim())))
}

/// How the child ended; none if it has not at the deadline, and was killed.
fn wait(child: &mut Child, deadline: Option<Instant>) -> io::Result<Option<ExitStatus>> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(Some(status)),
            Ok(None) => {}
            Err(error) if error.raw_os_error() == Some(libc::ECHILD) => {
                let text =
                    "another part of this program took its exit status (a SIGCHLD handler that waits for any child)";
                return Err(io::Error::other(text));
            }
            Err(error) => return Err(error),
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            // SAFETY: sends a signal to the process group that the child leads; it has not been waited for, so its number
            // is no other's.
            unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(PERIOD);
    }
}

/// A file without a name: unlike a pipe it takes all that is written, whether or not somebody reads.
fn memory_file() -> io::Result<File> {
    // SAFETY: the name is NUL-terminated.
    let descriptor = unsafe { libc::memfd_create(c"nvte_ep".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: open, and nobody else's.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A program `nvcc` of these lines, found by `NVCC`.
    fn with_nvcc<R>(name: &str, lines: &str, ask: impl FnOnce(Lookup<'_>) -> R) -> R {
        let folder = std::env::temp_dir().join(format!("nvte_ep_compiler_{name}_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let nvcc = folder.join("nvcc");
        std::fs::write(&nvcc, format!("#!/bin/sh\n{lines}\n")).unwrap();
        std::fs::set_permissions(&nvcc, std::fs::Permissions::from_mode(0o755)).unwrap();
        let seen = ask(&|name| (name == "NVCC").then(|| nvcc.clone().into_os_string()));
        std::fs::remove_dir_all(&folder).unwrap();
        seen
    }

    #[test]
    fn a_compiler_that_hangs_is_ended_in_time() {
        let limit = Some(Duration::from_millis(300));
        let start = Instant::now();
        let found = with_nvcc("hangs", "sleep 25 & sleep 25", |env| find_nvcc(env, limit));
        let text = found.unwrap_err().to_string();
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert!(text.contains("nvcc: it has not come to its end in 3"), "{text}");
        with_nvcc("quick", "exit 0", |env| find_nvcc(env, limit)).unwrap();
    }

    #[test]
    fn what_a_compiler_says_is_no_limit() {
        let lines = "yes nvcc: it is broken | head -c 300000 >&2\nexit 3";
        let text = with_nvcc("talks", lines, |env| find_nvcc(env, None)).unwrap_err().to_string();
        assert!(text.contains("nvcc: exit status: 3: nvcc: it is broken)"), "{text}");
    }

    /// In a process of its own, since the signal is the whole process's.
    #[test]
    fn an_ignored_sigchld_is_named() {
        const INSIDE: &str = "NVTE_EP_TEST_INSIDE";
        if std::env::var_os(INSIDE).is_some() {
            let text = with_nvcc("ignored", "exit 0", |env| find_nvcc(env, None)).unwrap_err().to_string();
            assert!(text.starts_with("SIGCHLD is ignored in this process"), "{text}");
            // SAFETY: the default action.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
            with_nvcc("heeded", "exit 0", |env| find_nvcc(env, None)).unwrap();
            return;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "preflight::compiler::tests::an_ignored_sigchld_is_named"]).env(INSIDE, "1");
        let ignore = || {
            // SAFETY: a signal's number and a value for it.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
            Ok(())
        };
        // SAFETY: the closure makes one call, which is allowed between fork and exec.
        unsafe { command.pre_exec(ignore) };
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}
