//! The rules of this module one by one, each with what was found, so that one missing piece hides none of the others.

use super::{cache, compiler, cuda_headers, device, device_headers, nccl_headers, nccl_version, variables};
use crate::env::{Env, RuntimeKind, process};
use crate::error::{Error, Result};
use crate::sys::cuda::Cuda;
use crate::sys::nccl::{Nccl, version_text};
use crate::sys::nccl_ep::NcclEp;
use crate::sys::{
    NcclEpLibrary, driver_library, file_of, host_library, incomplete, loaded_nccls, nccl_candidates, nccl_ep_library,
    nccl_library, site_packages,
};
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Fine,
    /// Works, but is worth a look.
    Warning,
    /// `nvte_ep_initialize` or the first step would fail.
    Problem,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at, in one word.
    pub check: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What to change; empty where nothing has to be.
    pub remedy: String,
}

impl Finding {
    /// All is well.
    pub fn fine(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, level: Level::Fine, found: found.into(), remedy: String::new() }
    }

    /// Worth a look.
    pub fn warning(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, level: Level::Warning, found: found.into(), remedy: remedy.into() }
    }

    /// Nothing will work.
    pub fn problem(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check, level: Level::Problem, found: found.into(), remedy: remedy.into() }
    }

    fn of(check: &'static str, error: Error) -> Self {
        match error {
            Error::Preflight { problem, remedy } => Self::problem(check, problem, remedy),
            Error::Load { library, tried, remedy } => {
                Self::problem(check, format!("{library} could not be loaded. Tried: {}", tried.join("; ")), remedy)
            }
            other => Self::problem(check, other.to_string(), ""),
        }
    }

    fn outcome<T>(check: &'static str, outcome: Result<T>, fine: impl FnOnce(T) -> String) -> Self {
        match outcome {
            Ok(value) => Self::fine(check, fine(value)),
            Err(error) => Self::of(check, error),
        }
    }
}

/// Looks at everything that `nvte_ep_initialize` and the first step need on this machine. Loads the libraries, so it belongs
/// into a process of its own.
#[must_use]
pub fn report(env: &Env) -> Vec<Finding> {
    let mut findings = Vec::new();
    match env.runtime {
        RuntimeKind::Host => findings.push(Finding::outcome("host-runtime", host_runtime(env), |path| path)),
        RuntimeKind::Cuda => {
            let Some(sms) = driver(&mut findings) else { return findings };
            let nccl = nccl(env, &mut findings);
            let nccl_ep = nccl_ep(env, nccl.as_ref(), &mut findings);
            compiler(nccl.as_ref(), nccl_ep.as_deref(), &mut findings);
            findings.push(Finding::outcome("variables", variables::check(&process, sms), |()| {
                "NCCL EP's variables have values that it takes".into()
            }));
        }
    }
    findings
}

fn host_runtime(env: &Env) -> Result<String> {
    let library = host_library(env)?;
    let cuda = Cuda::from_library(&library).map_err(|error| incomplete("the host runtime", &error))?;
    let path =
        file_of(cuda.cuInit as *const c_void).map_or_else(|| "of unknown file".into(), |p| p.display().to_string());
    Ok(format!("{path}: runs without a GPU, for tests"))
}

/// The driver and its devices; the multiprocessors of the smallest, a large number where there is none. Nothing where the
/// driver is the host runtime: the other libraries are it too, then.
fn driver(findings: &mut Vec<Finding>) -> Option<u32> {
    let unknown = Some(c_int::MAX as u32);
    let library = match driver_library() {
        Ok(library) => library,
        Err(error) => {
            let is_missing = matches!(error, Error::Load { .. });
            findings.push(Finding::of("driver", error));
            return if is_missing { unknown } else { None };
        }
    };
    let cuda = match Cuda::from_library(&library) {
        Ok(cuda) => cuda,
        Err(error) => {
            findings.push(Finding::of("driver", incomplete("the CUDA driver", &error)));
            return unknown;
        }
    };
    let count = match cuda.device_count() {
        Ok(count @ 1..) => count,
        found => {
            let found = found.err().map_or_else(|| "it finds no GPU".into(), |error| error.to_string());
            let remedy = "see whether nvidia-smi shows a GPU, and whether CUDA_VISIBLE_DEVICES hides it; NVTE_EP_RUNTIME=host \
                          runs without a GPU";
            findings.push(Finding::problem("driver", format!("the CUDA driver is there, but {found}"), remedy));
            return unknown;
        }
    };
    findings.push(Finding::fine(
        "driver",
        format!("the CUDA driver finds {count} device{}", if count == 1 { "" } else { "s" }),
    ));
    let mut sms = c_int::MAX as u32;
    for number in 0..count {
        let facts = cuda.device_facts(number).and_then(|facts| device(number, &facts).map(|()| facts));
        findings.push(Finding::outcome("device", facts, |facts| {
            let (major, minor) = facts.compute_capability;
            sms = sms.min(facts.sm_count as u32);
            format!("{number}: {}, compute capability {major}.{minor}, {} multiprocessors", facts.name, facts.sm_count)
        }));
    }
    if count > 1 {
        findings.extend(peers(&library, count));
    }
    Some(sms)
}

/// Which devices reach each other's memory.
fn peers(library: &libloading::Library, count: c_int) -> Option<Finding> {
    // SAFETY: the driver declares it so.
    let reaches =
        unsafe { library.get::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>(b"cuDeviceCanAccessPeer\0") };
    let reaches = reaches.ok()?;
    let mut apart = Vec::new();
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            let mut yes = 0;
            // SAFETY: `yes` is a live int, and the devices exist.
            let code = unsafe { reaches(&raw mut yes, from, to) };
            if code != 0 || yes == 0 {
                apart.push(format!("{from} -> {to}"));
            }
        }
    }
    Some(if apart.is_empty() {
        Finding::fine("peers", format!("all {count} devices reach each other's memory"))
    } else {
        Finding::warning(
            "peers",
            format!("these devices do not reach each other's memory: {}", apart.join(", ")),
            "put the ranks of a group on devices that do (NVLink, or PCIe peer access: nvidia-smi topo -p2p r)",
        )
    })
}

/// NCCL's file and version.
fn nccl(env: &Env, findings: &mut Vec<Finding>) -> Option<(PathBuf, i32)> {
    let table =
        nccl_library(env).and_then(|library| Nccl::from_library(&library).map_err(|error| incomplete("NCCL", &error)));
    let (table, version) = match table.and_then(|table| table.version().map(|version| (table, version))) {
        Ok(found) => found,
        Err(error) => {
            findings.push(Finding::of("nccl", error));
            return None;
        }
    };
    let path = file_of(table.ncclGetVersion as *const c_void)?;
    let name = |path: &Path, version| format!("{} ({})", version_text(version), path.display());
    let others: Vec<_> = nccl_candidates(env, Some(&path)).into_iter().filter(|(other, _)| *other != path).collect();
    let also = match others.as_slice() {
        [] => String::new(),
        others => {
            let names: Vec<String> = others.iter().map(|(path, version)| name(path, *version)).collect();
            format!("; found after it, and not used: {}", names.join(", "))
        }
    };
    let why = if env.nccl_lib.is_some() { "named by NVTE_EP_NCCL_LIB" } else { "the first that was found" };
    let mut finding =
        Finding::outcome("nccl", nccl_version(version), |()| format!("NCCL {}, {why}{also}", name(&path, version)));
    if finding.level == Level::Problem {
        finding.found = format!("NCCL {}, {why}: {}{also}", name(&path, version), finding.found);
        if let Some((good, _)) = others.iter().find(|(_, version)| nccl_version(*version).is_ok()) {
            finding.remedy =
                format!("set NVTE_EP_NCCL_LIB={}, or put its folder first in LD_LIBRARY_PATH", good.display());
        }
    }
    findings.push(finding);
    Some((path, version))
}

/// NCCL EP's file.
fn nccl_ep(env: &Env, nccl: Option<&(PathBuf, i32)>, findings: &mut Vec<Finding>) -> Option<PathBuf> {
    let before = loaded_nccls().len();
    let loaded = nccl_ep_library(nccl.map(|(path, _)| path.as_path()), env).and_then(|library| {
        let functions = NcclEp::from_library(&library).map_err(|error| incomplete("NCCL EP", &error))?;
        let path = file_of(functions.ncclEpDispatch as *const c_void);
        Ok(NcclEpLibrary { functions, path, host_compiler: None, host_set_caller: None })
    });
    let library = match loaded {
        Ok(library) => library,
        Err(error) => {
            findings.push(Finding::of("nccl-ep", error));
            return None;
        }
    };
    let path = library.path.clone()?;
    let gate = nccl.and_then(|(_, version)| Some((*version, library.version_gate(*version)?)));
    findings.push(match gate {
        Some((version, text)) if version < GATED_NCCL => Finding::problem(
            "nccl-ep",
            text,
            "update NCCL, or set NVTE_EP_NCCL_EP_LIB to the other library that is named here",
        ),
        _ => Finding::fine("nccl-ep", path.display().to_string()),
    });
    let loaded = loaded_nccls();
    if loaded.len() > before {
        let names: Vec<String> = loaded.iter().map(|(path, _)| path.display().to_string()).collect();
        findings.push(Finding::warning(
            "one-nccl",
            format!("NCCL EP brings an NCCL of its own into the process: {}", names.join(", ")),
            "put the folder of the NCCL that makes the communicators first in LD_LIBRARY_PATH",
        ));
    }
    Some(path)
}

/// The NCCL that the gated library of TransformerEngine 2.20.2 was built with.
const GATED_NCCL: i32 = 23203;

/// How long nvcc may take for an empty file.
const NVCC_LIMIT: Duration = Duration::from_secs(60);

/// What NCCL EP's run-time compiler needs.
fn compiler(nccl: Option<&(PathBuf, i32)>, nccl_ep: Option<&Path>, findings: &mut Vec<Finding>) {
    let sites = site_packages(nccl.map(|(path, _)| path.as_path()));
    let shown = |path: PathBuf| path.display().to_string();
    let nvcc = compiler::find_nvcc(&process, Some(NVCC_LIMIT));
    let toolkit = nvcc.as_ref().ok().cloned();
    findings.push(Finding::outcome("nvcc", nvcc, shown));
    findings.push(Finding::outcome("cuda-headers", cuda_headers(toolkit.as_deref(), &process), shown));
    if let Some((path, version)) = nccl {
        findings.push(Finding::outcome("nccl-headers", nccl_headers(Some(path), &sites, *version, &process), shown));
    }
    findings.push(Finding::outcome("nccl-ep-headers", device_headers(nccl_ep, &sites, &process), shown));
    let place = cache::place(&process);
    // Before the look at the folder removes markers.
    let markers = cache::failures(&place);
    findings.push(Finding::outcome("cache", cache::directory(&process), shown));
    if !markers.is_empty() {
        let names: Vec<String> = markers.iter().map(|marker| marker.display().to_string()).collect();
        let left = names.iter().filter(|name| Path::new(name).exists()).count();
        let found = format!("kernels failed to compile before, and are not tried again: {}", names.join(", "));
        findings.push(if left > 0 {
            Finding::problem("cache-failures", found, "remove these files, so that the kernels are compiled again")
        } else {
            Finding::warning(
                "cache-failures",
                format!("{found}; these files were removed now"),
                "run the program again",
            )
        });
    }
}
