//! Every environment variable that the library reads: name, default, meaning, parse. Read once, at initialize.

use crate::error::{Error, Result};
use crate::options::EngineChoice;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Where the work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeKind {
    /// CUDA, NCCL and NCCL EP on a GPU.
    Cuda,
    /// `libnvte_ep_host.so`: the same interfaces on host memory.
    Host,
}

impl RuntimeKind {
    /// The value of `NVTE_EP_RUNTIME` that selects it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
        }
    }
}

/// One environment variable, for documentation.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What holds when it is unset.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

const RUNTIME: Variable = Variable {
    name: "NVTE_EP_RUNTIME",
    default: "cuda",
    meaning: "cuda, or host for the host runtime (no GPU needed)",
};
const HOST_LIB: Variable = Variable {
    name: "NVTE_EP_HOST_LIB",
    default: "the one that the program is linked to, then libnvte_ep_host.so beside our own library, then libnvte_ep_host.so.1 on the loader's search path",
    meaning: "path of the host runtime",
};
const NCCL_LIB: Variable = Variable {
    name: "NVTE_EP_NCCL_LIB",
    default: "the NCCL already in the process, then $NCCL_HOME, the loader's search path, the usual places",
    meaning: "path of NCCL; it has to be the one that made the communicator",
};
/// `NCCL_HOME`, which NCCL's own tools read too.
pub(crate) const NCCL_HOME: Variable = Variable {
    name: "NCCL_HOME",
    default: "/opt/nvidia/nccl, /usr/local/nccl and /usr, after the loader's search path",
    meaning: "the prefix of NCCL, with lib or lib64 and include",
};
const NCCL_EP_LIB: Variable = Variable {
    name: "NVTE_EP_NCCL_EP_LIB",
    default: "$NCCL_EP_HOME, $NCCL_HOME, beside our own library, the loader's search path, Python wheels, the usual places",
    meaning: "path of NCCL EP",
};
/// `NCCL_EP_HOME`, which NCCL EP reads too.
pub(crate) const NCCL_EP_HOME: Variable = Variable {
    name: "NCCL_EP_HOME",
    default: "unset",
    meaning: "the prefix of NCCL EP, with lib or lib64 and include/nccl_ep",
};
const HANDLE_CACHE_SIZE: Variable = Variable {
    name: "NVTE_EP_HANDLE_CACHE_SIZE",
    default: "8192 for libnvte_ep, 4096 for TransformerEngine's ABI",
    meaning: "how many layers may be registered on a group, or how many handle memories are kept open; negative = no limit",
};
const BACKEND: Variable = Variable {
    name: "NVTE_EP_BACKEND",
    default: "auto",
    meaning: "what moves the rows: nccl_ep, native (docs/native_engine.md), or auto, which is nccl_ep today; the option backend comes first",
};
const TIMEOUT_MS: Variable = Variable {
    name: "NVTE_EP_TIMEOUT_MS",
    default: "600000",
    meaning: "milliseconds that a call may wait for the other ranks, on the host or on the device (docs/robustness.md); 0 = for ever",
};
const SHUTDOWN_TIMEOUT_MS: Variable = Variable {
    name: "NVTE_EP_SHUTDOWN_TIMEOUT_MS",
    default: "30000",
    meaning: "milliseconds that shutdown waits for queued work and the other ranks, and that a program has to notice its \
              group's end; 0 = for ever",
};
/// `NVTE_EP_LOG`, which `log` reads.
pub(crate) const LOG: Variable = Variable {
    name: "NVTE_EP_LOG",
    default: "warn, and of each kind of message at most one a minute",
    meaning: "log to stderr: off, error, warn, info, debug or trace",
};
/// `NVTE_EP_LOG_FORMAT`, which `log` reads.
pub(crate) const LOG_FORMAT: Variable = Variable {
    name: "NVTE_EP_LOG_FORMAT",
    default: "text",
    meaning: "what a line of the log looks like: text, keyvalue (key=value after key=value), or json (an object a line)",
};
/// `NVTX_INJECTION64_PATH`, which profilers set and NVTX reads.
pub(crate) const NVTX_INJECTION: Variable = Variable {
    name: "NVTX_INJECTION64_PATH",
    default: "unset",
    meaning: "path of a profiler's library, which is then told of every call as an NVTX range",
};

/// All of them.
pub const VARIABLES: &[Variable] = &[
    RUNTIME,
    HOST_LIB,
    NCCL_LIB,
    NCCL_HOME,
    NCCL_EP_LIB,
    NCCL_EP_HOME,
    BACKEND,
    HANDLE_CACHE_SIZE,
    TIMEOUT_MS,
    SHUTDOWN_TIMEOUT_MS,
    LOG,
    LOG_FORMAT,
    NVTX_INJECTION,
];

/// The variables that name a library, a program or a folder, of all that the library reads. A program with more rights than
/// its user (setuid, file capabilities) would load and run what the user names there, so in it they count as unset, as
/// LD_LIBRARY_PATH does.
const NAMES_FILES: [&str; 19] = [
    HOST_LIB.name,
    NCCL_LIB.name,
    NCCL_HOME.name,
    NCCL_EP_LIB.name,
    NCCL_EP_HOME.name,
    NVTX_INJECTION.name,
    "NCCL_EP_JIT_NVCC",
    "NCCL_EP_JIT_SOURCE_DIR",
    "NCCL_EP_JIT_BUILD_INCLUDE_DIR",
    "NCCL_EP_JIT_CUDA_INCLUDE_DIR",
    "NCCL_EP_JIT_CACHE_DIR",
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "TMPDIR",
];

/// A variable of the process; an empty one counts as unset, and so does one that a program with more rights than its user
/// must not heed.
pub(crate) fn process(name: &str) -> Option<OsString> {
    // SAFETY: looks a number up.
    let more_rights = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    let heeded = !more_rights || !NAMES_FILES.contains(&name);
    std::env::var_os(name).filter(|value| heeded && !value.is_empty())
}

/// How many handles are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheSize {
    /// As many as the ABI says.
    Default,
    /// At most so many.
    Limit(usize),
    /// Any number.
    Unlimited,
}

impl CacheSize {
    /// The limit, with the ABI's `default`.
    #[must_use]
    pub const fn limit(self, default: usize) -> Option<usize> {
        match self {
            Self::Default => Some(default),
            Self::Limit(limit) => Some(limit),
            Self::Unlimited => None,
        }
    }
}

/// The parsed environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Env {
    /// `NVTE_EP_RUNTIME`.
    pub runtime: RuntimeKind,
    /// `NVTE_EP_HOST_LIB`.
    pub host_lib: Option<PathBuf>,
    /// `NVTE_EP_NCCL_LIB`.
    pub nccl_lib: Option<PathBuf>,
    /// `NCCL_HOME`.
    pub nccl_home: Option<PathBuf>,
    /// `NVTE_EP_NCCL_EP_LIB`.
    pub nccl_ep_lib: Option<PathBuf>,
    /// `NCCL_EP_HOME`.
    pub nccl_ep_home: Option<PathBuf>,
    /// `NVTE_EP_BACKEND`.
    pub backend: EngineChoice,
    /// `NVTE_EP_HANDLE_CACHE_SIZE`.
    pub handle_cache_size: CacheSize,
    /// `NVTE_EP_TIMEOUT_MS`; none = no limit.
    pub timeout: Option<Duration>,
    /// `NVTE_EP_SHUTDOWN_TIMEOUT_MS`; none = no limit.
    pub shutdown_timeout: Option<Duration>,
}

impl Env {
    /// Reads the process's environment.
    ///
    /// # Errors
    /// A variable whose value does not parse: its name, what it takes and what it holds.
    pub fn from_process() -> Result<Self> {
        Self::from_lookup(|name| process(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Parses what `lookup` answers; an empty value counts as unset.
    ///
    /// # Errors
    /// As [`Env::from_process`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let get = |variable: &Variable| lookup(variable.name).filter(|value| !value.is_empty());
        let path = |variable: &Variable| get(variable).map(PathBuf::from);
        let integer = |variable: &Variable, required: &str| -> Result<Option<i64>> {
            get(variable)
                .map(|value| value.trim().parse().map_err(|_| Error::argument(variable.name, required, &value)))
                .transpose()
        };
        let duration = |variable: &Variable, default_ms: u64| -> Result<Option<Duration>> {
            let required = "must be a number of milliseconds, 0 or more";
            let ms = match integer(variable, required)? {
                None => default_ms,
                Some(ms) => u64::try_from(ms).map_err(|_| Error::argument(variable.name, required, ms))?,
            };
            Ok((ms > 0).then(|| Duration::from_millis(ms)))
        };
        Ok(Self {
            runtime: match get(&RUNTIME).as_deref() {
                None | Some("cuda") => RuntimeKind::Cuda,
                Some("host") => RuntimeKind::Host,
                Some(other) => return Err(Error::argument(RUNTIME.name, "must be cuda or host", other)),
            },
            host_lib: path(&HOST_LIB),
            nccl_lib: path(&NCCL_LIB),
            nccl_home: path(&NCCL_HOME),
            nccl_ep_lib: path(&NCCL_EP_LIB),
            nccl_ep_home: path(&NCCL_EP_HOME),
            backend: match get(&BACKEND).as_deref() {
                None => EngineChoice::Auto,
                Some(name) => EngineChoice::of_name(name)
                    .ok_or_else(|| Error::argument(BACKEND.name, "must be auto, nccl_ep or native", name))?,
            },
            handle_cache_size: match integer(&HANDLE_CACHE_SIZE, "must be an integer")? {
                None => CacheSize::Default,
                Some(0) => {
                    let rule = "must not be 0 (a positive number of layers, or negative for no limit)";
                    return Err(Error::argument(HANDLE_CACHE_SIZE.name, rule, 0));
                }
                Some(limit) => usize::try_from(limit).map_or(CacheSize::Unlimited, CacheSize::Limit),
            },
            timeout: duration(&TIMEOUT_MS, 600_000)?,
            shutdown_timeout: duration(&SHUTDOWN_TIMEOUT_MS, 30_000)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Env> {
        Env::from_lookup(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn defaults() {
        let env = parse(&[]).unwrap();
        assert_eq!(env.runtime, RuntimeKind::Cuda);
        assert_eq!(env.handle_cache_size.limit(8192), Some(8192));
        assert_eq!(env.timeout, Some(Duration::from_secs(600)));
        assert_eq!(env.shutdown_timeout, Some(Duration::from_secs(30)));
        assert_eq!((env.nccl_lib, env.backend), (None, EngineChoice::Auto));
    }

    #[test]
    fn empty_is_unset_and_values_are_read() {
        let env = parse(&[
            ("NVTE_EP_RUNTIME", "host"),
            ("NVTE_EP_NCCL_LIB", ""),
            ("NVTE_EP_NCCL_EP_LIB", "/x/libnccl_ep.so"),
            ("NCCL_HOME", "/opt/nccl"),
            ("NCCL_EP_HOME", ""),
            ("NVTE_EP_BACKEND", "nccl_ep"),
            ("NVTE_EP_HANDLE_CACHE_SIZE", "-1"),
            ("NVTE_EP_TIMEOUT_MS", "0"),
            ("NVTE_EP_SHUTDOWN_TIMEOUT_MS", "250"),
        ])
        .unwrap();
        assert_eq!(env.runtime, RuntimeKind::Host);
        assert_eq!(env.nccl_lib, None);
        assert_eq!(env.nccl_ep_lib, Some("/x/libnccl_ep.so".into()));
        assert_eq!(env.nccl_home, Some("/opt/nccl".into()));
        assert_eq!((env.nccl_ep_home, env.backend), (None, EngineChoice::NcclEp));
        assert_eq!(env.handle_cache_size, CacheSize::Unlimited);
        assert_eq!(env.timeout, None);
        assert_eq!(env.shutdown_timeout, Some(Duration::from_millis(250)));
    }

    /// In a copy of this program that root made another user's, with that user's rights at the start.
    #[test]
    fn a_program_with_more_rights_than_its_user_heeds_no_files() {
        use std::os::unix::fs::PermissionsExt;
        use std::process::Command;
        const INSIDE: &str = "NVTE_EP_TEST_INSIDE";
        let seen = || (NAMES_FILES.map(|name| process(name).is_some()), Env::from_process().unwrap());
        if std::env::var_os(INSIDE).is_some() {
            let (files, env) = seen();
            assert_eq!(files, [false; NAMES_FILES.len()]);
            assert_eq!((env.nccl_lib, env.timeout), (None, Some(Duration::from_millis(77))), "numbers are heeded");
            return;
        }
        // SAFETY: asks for a number.
        if unsafe { libc::geteuid() } != 0 {
            println!("not tried: takes root to make a program with other rights");
            return;
        }
        let copy = std::env::temp_dir().join(format!("nvte_ep_rights_{}", std::process::id()));
        std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        std::os::unix::fs::chown(&copy, Some(65534), Some(65534)).unwrap();
        std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o4755)).unwrap();
        let test = "env::tests::a_program_with_more_rights_than_its_user_heeds_no_files";
        let files = NAMES_FILES.map(|name| (name, "/nowhere"));
        let mut command = Command::new(&copy);
        command.args(["--exact", test]).envs(files).env("NVTE_EP_TIMEOUT_MS", "77").env(INSIDE, "1");
        let output = command.output();
        std::fs::remove_file(&copy).unwrap();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    #[test]
    fn garbage_is_refused_by_name() {
        for (name, value, text) in [
            ("NVTE_EP_RUNTIME", "gpu", "NVTE_EP_RUNTIME must be cuda or host, got gpu"),
            ("NVTE_EP_BACKEND", "nccl", "NVTE_EP_BACKEND must be auto, nccl_ep or native, got nccl"),
            ("NVTE_EP_HANDLE_CACHE_SIZE", "many", "NVTE_EP_HANDLE_CACHE_SIZE must be an integer, got many"),
            (
                "NVTE_EP_HANDLE_CACHE_SIZE",
                "0",
                "NVTE_EP_HANDLE_CACHE_SIZE must not be 0 (a positive number of layers, or negative for no limit), got 0",
            ),
            ("NVTE_EP_TIMEOUT_MS", "-5", "NVTE_EP_TIMEOUT_MS must be a number of milliseconds, 0 or more, got -5"),
        ] {
            assert_eq!(parse(&[(name, value)]).unwrap_err().to_string(), text);
        }
    }
}
