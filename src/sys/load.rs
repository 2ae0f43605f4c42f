//! Where each library is looked for, and in which order (docs/environment.md lists it for users).

use super::{Base, cuda, nccl, nccl_ep as ep};
use crate::env::{Env, RuntimeKind};
use crate::error::{Error, Result};
use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::path::{Path, PathBuf};

/// NCCL EP and where it came from, which tells where its device headers are.
#[derive(Debug)]
pub struct NcclEpLibrary {
    /// Its functions.
    pub functions: ep::NcclEp,
    /// The file it was loaded from; none when the loader does not tell.
    pub path: Option<PathBuf>,
    /// On the host runtime: whether NCCL EP would find a compiler.
    pub host_compiler: Option<unsafe extern "C" fn() -> c_int>,
}

impl NcclEpLibrary {
    /// Why this library may have refused to make a group on NCCL `running`, if it is one that compares NCCL versions:
    /// its file tells, which is read only for this text. `None` for builds without that gate.
    pub(crate) fn version_gate(&self, running: i32) -> Option<String> {
        let path = self.path.as_deref()?;
        gate_text(&std::fs::read(path).ok()?, path, running)
    }
}

/// The gate's own message format and the banner are in the file's read-only data (seen in the library of
/// TransformerEngine 2.20.2's wheel; the one of nccl-extensions 0.1.0 has no gate). Its version code is no help: both
/// report 0.2.0.
fn gate_text(file: &[u8], path: &Path, running: i32) -> Option<String> {
    let find = |text: &[u8]| file.windows(text.len()).position(|window| window == text);
    find(b"and runtime NCCL %d.%d.%d are incompatible")?;
    let banner = b"NCCL EP version ";
    let version = find(banner).map_or("of unknown version".into(), |at| {
        let rest = &file[at + banner.len()..];
        String::from_utf8_lossy(&rest[..rest.iter().position(|byte| *byte < b' ').unwrap_or(0)]).into_owned()
    });
    Some(format!(
        "NCCL EP {version} ({}) takes only the NCCL that it was built with or a later one (2.32.3 for the library in \
         transformer-engine 2.20.2), and NCCL {} is running; update NCCL (pip install -U nvidia-nccl-cu13), or set \
         NVTE_EP_NCCL_EP_LIB to the library of nccl-extensions 0.1.0, which takes 2.30.4 and later",
        path.display(),
        nccl::version_text(running)
    ))
}

pub(super) fn base(env: &Env) -> Result<Base> {
    if env.runtime == RuntimeKind::Host {
        let host = host_library(env)?;
        return Ok(Base {
            runtime: RuntimeKind::Host,
            cuda: cuda::Cuda::from_library(host).map_err(|e| incomplete(HOST, &e))?,
            nccl: nccl::Nccl::from_library(host).map_err(|e| incomplete(HOST, &e))?,
            nccl_path: None,
        });
    }
    let remedy = "install the NVIDIA driver, or set NVTE_EP_RUNTIME=host to run without a GPU";
    let driver = open_first("the CUDA driver", remedy, ["libcuda.so.1".into()])?;
    let nccl = nccl_library(env)?;
    let table = nccl::Nccl::from_library(nccl).map_err(|e| incomplete("NCCL", &e))?;
    Ok(Base {
        runtime: RuntimeKind::Cuda,
        cuda: cuda::Cuda::from_library(driver).map_err(|e| incomplete("the CUDA driver", &e))?,
        nccl_path: file_of(table.ncclGetVersion as *const c_void),
        nccl: table,
    })
}

pub(super) fn nccl_ep(base: &Base, env: &Env) -> Result<NcclEpLibrary> {
    let library = if base.runtime == RuntimeKind::Host {
        host_library(env)?
    } else {
        let remedy = "install NCCL EP (pip install nccl-extensions) or set NVTE_EP_NCCL_EP_LIB to libnccl_ep.so";
        open_first("NCCL EP", remedy, nccl_ep_candidates(base, env))?
    };
    let functions = ep::NcclEp::from_library(library).map_err(|e| incomplete("NCCL EP", &e))?;
    let host_compiler = match base.runtime {
        // SAFETY: the host runtime declares it so (nvte_ep_host.h). An older one may lack it.
        RuntimeKind::Host => unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"nvte_ep_host_compiler\0") }.ok(),
        RuntimeKind::Cuda => None,
    };
    let host_compiler = host_compiler.map(|function| *function);
    Ok(NcclEpLibrary { path: file_of(functions.ncclEpDispatch as *const c_void), functions, host_compiler })
}

const HOST: &str = "the host runtime";

fn host_library(env: &Env) -> Result<&'static Library> {
    let name = "libnvte_ep_host.so";
    let candidates = match &env.host_lib {
        Some(path) => vec![path.clone()],
        None => own_directories()
            .into_iter()
            .map(|directory| directory.join(name))
            .chain([PathBuf::from(format!("{name}.1"))])
            .collect(),
    };
    open_first(HOST, "build it (cargo build --release) or set NVTE_EP_HOST_LIB to its path", candidates)
}

/// NCCL: the named file, else what the process has, else the loader's. Never a plain `libnccl.so`, which can be another
/// NCCL than the one that made the communicator.
fn nccl_library(env: &Env) -> Result<&'static Library> {
    let remedy = "install NCCL 2.30.4 or later (pip install nvidia-nccl-cu13) or set NVTE_EP_NCCL_LIB to its path";
    if let Some(path) = &env.nccl_lib {
        return open_first("NCCL", remedy, [path.clone()]);
    }
    let process: Library = UnixLibrary::this().into();
    // SAFETY: only the symbol's presence is asked for; it is not called.
    if unsafe { process.get::<*const c_void>(b"ncclCommCount\0") }.is_ok() {
        return Ok(Box::leak(Box::new(process)));
    }
    open_first("NCCL", remedy, ["libnccl.so.2".into()])
}

/// The places of design decision 4, in order.
fn nccl_ep_candidates(base: &Base, env: &Env) -> Vec<PathBuf> {
    if let Some(path) = &env.nccl_ep_lib {
        return vec![path.clone()];
    }
    let names = ["libnccl_ep.so.0", "libnccl_ep.so"];
    let mut candidates = Vec::new();
    if let Some(home) = std::env::var_os("NCCL_EP_HOME").filter(|home| !home.is_empty()) {
        for folder in ["lib", "lib64"] {
            candidates.extend(names.map(|name| Path::new(&home).join(folder).join(name)));
        }
    }
    for own in own_directories() {
        candidates.extend(names.map(|name| own.join(name)));
    }
    // Files that are not there say nothing; bare names go to the loader, which reports its own search.
    candidates.retain(|path| path.exists());
    candidates.extend(names.map(PathBuf::from));
    for site in site_packages(base.nccl_path.as_deref()) {
        for cuda in ["cu13", "cu12"] {
            candidates.push(site.join("nccl/ep/lib").join(cuda).join("libnccl_ep.so"));
        }
        candidates.push(site.join("transformer_engine/wheel_lib/libnccl_ep.so"));
    }
    candidates.retain(|path| path.components().count() == 1 || path.exists());
    candidates
}

/// Site-packages folders of the active Python environment: the one that the running NCCL came from, those on
/// `PYTHONPATH`, and the virtual or conda environment's.
pub(crate) fn site_packages(nccl: Option<&Path>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut add = |path: PathBuf| {
        if path.is_dir() && !found.contains(&path) {
            found.push(path);
        }
    };
    // .../site-packages/nvidia/nccl/lib/libnccl.so.2
    ancestors(nccl, 4).into_iter().for_each(&mut add);
    if let Some(paths) = std::env::var_os("PYTHONPATH") {
        std::env::split_paths(&paths).for_each(&mut add);
    }
    for root in ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os) {
        let Ok(entries) = Path::new(&root).join("lib").read_dir() else { continue };
        for entry in entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("python3")) {
            add(entry.path().join("site-packages"));
        }
    }
    found
}

/// Opens the first candidate that loads. The library stays loaded for the life of the process: its functions are kept
/// in statics and its threads and CUDA state cannot be unloaded. `RTLD_LOCAL`, since NCCL EP exports C++ internals that
/// must not meet anyone else's.
fn open_first(
    library: &'static str,
    remedy: &str,
    candidates: impl IntoIterator<Item = PathBuf>,
) -> Result<&'static Library> {
    let mut tried = Vec::new();
    for candidate in candidates {
        // SAFETY: loading runs the library's constructors; these are the vendor's libraries or those the user named.
        match unsafe { UnixLibrary::open(Some(&candidate), RTLD_NOW | RTLD_LOCAL) } {
            Ok(opened) => {
                tracing::debug!(target: "nvte_ep", library, path = %candidate.display(), "loaded");
                return Ok(Box::leak(Box::new(opened.into())));
            }
            Err(error) => tried.push(format!("{}: {}", candidate.display(), chain(&error))),
        }
    }
    Err(Error::Load { library, tried, remedy: remedy.into() })
}

fn incomplete(library: &'static str, error: &libloading::Error) -> Error {
    Error::Load {
        library,
        tried: vec![chain(error)],
        remedy: "the library found lacks a function: install a current one".into(),
    }
}

/// An error with all its sources.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// The folders of the library or program that contains this code: as it was opened, and where links lead.
#[must_use]
pub fn own_directories() -> Vec<PathBuf> {
    let own = file_of(own_directories as *const c_void);
    ancestors(own.as_deref(), 1)
}

/// The folder `levels` above a file, as the file was opened and, if links lead elsewhere, where it really lies.
pub(crate) fn ancestors(file: Option<&Path>, levels: usize) -> Vec<PathBuf> {
    let Some(file) = file else { return Vec::new() };
    let mut found: Vec<PathBuf> = Vec::new();
    for path in [Some(file.to_path_buf()), file.canonicalize().ok()].into_iter().flatten() {
        if let Some(folder) = path.ancestors().nth(levels).filter(|folder| !found.iter().any(|f| f == folder)) {
            found.push(folder.to_path_buf());
        }
    }
    found
}

/// The file that provides `symbol` in the process's global scope, if there is one.
pub(crate) fn provider_of(symbol: &CStr) -> Option<PathBuf> {
    // SAFETY: looks a name up; nothing is called.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
    if address.is_null() { None } else { file_of(address) }
}

/// The file that a function was loaded from, as it was opened.
#[must_use]
#[allow(clippy::not_unsafe_ptr_arg_deref, reason = "the address is looked up, not read")]
pub fn file_of(function: *const c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is writable; any address may be asked for.
    if unsafe { libc::dladdr(function, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: all-zero is a valid Dl_info, and dladdr filled it.
    let name = unsafe { info.assume_init() }.dli_fname;
    if name.is_null() {
        return None;
    }
    // SAFETY: dladdr's file name is a NUL-terminated string that lives as long as the object is loaded.
    let name = unsafe { CStr::from_ptr(name) };
    let path = Path::new(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name.to_bytes()));
    if path.components().count() == 1 {
        // The program itself, found on PATH: the loader knows only how it was called.
        return std::env::current_exe().ok();
    }
    std::path::absolute(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gated_library_is_told_by_its_file() {
        let path = Path::new("/site/libnccl_ep.so");
        let gate = b"..build NCCL %d.%d.%d and runtime NCCL %d.%d.%d are incompatible. %s\0..";
        let banner = b"\0NCCL EP version 0.2.0+cuda13.4\0";
        let text = gate_text(&[&gate[..], banner].concat(), path, 23007).unwrap();
        assert!(text.starts_with("NCCL EP 0.2.0+cuda13.4 (/site/libnccl_ep.so) takes only"), "{text}");
        assert!(text.contains("NCCL 2.30.7 is running") && text.contains("2.32.3"), "{text}");
        assert_eq!(gate_text(banner, path, 23007), None);
    }
}
