//! Where each library is looked for, and in which order (docs/environment.md lists it for users).

use super::{Base, cuda, nccl, nccl_ep as ep};
use crate::env::{Env, NCCL_EP_HOME, NCCL_HOME, RuntimeKind, Variable, process};
use crate::error::{Error, Result};
use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

/// A library that stays loaded for the life of the process. It is no memory of ours: a leak checker finds nothing.
pub(crate) type Kept = ManuallyDrop<Library>;

/// Never unloads what was opened.
pub(crate) fn keep(opened: UnixLibrary) -> Kept {
    ManuallyDrop::new(opened.into())
}

/// `nvte_ep_host_set_caller` of nvte_ep_host.h.
pub type SetCaller = unsafe extern "C" fn(*const c_char);

/// NCCL EP and where it came from, which tells where its device headers are.
#[derive(Debug)]
pub struct NcclEpLibrary {
    /// Its functions.
    pub functions: ep::NcclEp,
    /// The file it was loaded from; none when the loader does not tell.
    pub path: Option<PathBuf>,
    /// On the host runtime: whether NCCL EP would find a compiler.
    pub host_compiler: Option<unsafe extern "C" fn() -> c_int>,
    /// On the host runtime: says for which function of ours NCCL EP is called.
    pub host_set_caller: Option<SetCaller>,
}

impl NcclEpLibrary {
    /// Why this library may have refused to make a group on NCCL `running`, if it is one that compares NCCL versions:
    /// its file tells, which is read only for this text. `None` for builds without that gate.
    pub(crate) fn version_gate(&self, running: i32) -> Option<String> {
        let path = self.path.as_deref()?;
        gate_text(&std::fs::read(path).ok()?, path, running)
    }
}

impl NcclEpLibrary {
    /// Whether the library knows the environment variable `name`, which its file tells.
    pub(crate) fn reads_variable(&self, name: &str) -> bool {
        let file = self.path.as_deref().and_then(|path| std::fs::read(path).ok());
        file.is_some_and(|file| place_of(name.as_bytes(), &file).is_some())
    }
}

/// Where a file of megabytes has `text`.
fn place_of(text: &[u8], file: &[u8]) -> Option<usize> {
    // SAFETY: reads so many bytes of both.
    let found = unsafe { libc::memmem(file.as_ptr().cast(), file.len(), text.as_ptr().cast(), text.len()) };
    (!found.is_null()).then(|| found as usize - file.as_ptr() as usize)
}

/// The gate's own message format and the banner are in the file's read-only data (seen in the library of
/// TransformerEngine 2.20.2's wheel; the one of nccl-extensions 0.1.0 has no gate). Its version code is no help: both
/// report 0.2.0.
fn gate_text(file: &[u8], path: &Path, running: i32) -> Option<String> {
    place_of(b"and runtime NCCL %d.%d.%d are incompatible", file)?;
    let banner = b"NCCL EP version ";
    let version = place_of(banner, file).map_or("of unknown version".into(), |at| {
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
        one_host_runtime(&loaded_host_runtimes())?;
        let table = nccl::Nccl::from_library(&host).map_err(|e| incomplete(HOST, &e))?;
        return Ok(Base {
            runtime: RuntimeKind::Host,
            cuda: cuda::Cuda::from_library(&host).map_err(|e| incomplete(HOST, &e))?,
            nccl_path: file_of(table.ncclGetVersion as *const c_void),
            nccl: table,
            // SAFETY: the host runtime declares it so (nvte_ep_host.h). An older one may lack it.
            host_machine: unsafe { host.get(b"nvte_ep_host_machine\0") }.ok().map(|function| *function),
        });
    }
    let driver = driver_library()?;
    let nccl = nccl_library(env)?;
    let table = nccl::Nccl::from_library(&nccl).map_err(|e| incomplete("NCCL", &e))?;
    Ok(Base {
        runtime: RuntimeKind::Cuda,
        cuda: cuda::Cuda::from_library(&driver).map_err(|e| incomplete("the CUDA driver", &e))?,
        nccl_path: file_of(table.ncclGetVersion as *const c_void),
        nccl: table,
        host_machine: None,
    })
}

pub(super) fn nccl_ep(base: &Base, env: &Env) -> Result<NcclEpLibrary> {
    let library = if base.runtime == RuntimeKind::Host {
        host_library(env)?
    } else {
        nccl_ep_library(base.nccl_path.as_deref(), env)?
    };
    let functions = ep::NcclEp::from_library(&library).map_err(|e| incomplete("NCCL EP", &e))?;
    let (mut host_compiler, mut host_set_caller) = (None, None);
    if base.runtime == RuntimeKind::Host {
        // SAFETY: the host runtime declares it so (nvte_ep_host.h). An older one may lack it.
        let compiler = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"nvte_ep_host_compiler\0") };
        host_compiler = compiler.ok().map(|function| *function);
        // SAFETY: as above.
        let set_caller = unsafe { library.get::<SetCaller>(b"nvte_ep_host_set_caller\0") };
        host_set_caller = set_caller.ok().map(|function| *function);
    }
    let path = file_of(functions.ncclEpDispatch as *const c_void);
    Ok(NcclEpLibrary { path, functions, host_compiler, host_set_caller })
}

/// The CUDA driver.
pub(crate) fn driver_library() -> Result<Kept> {
    let remedy =
        "install the NVIDIA driver, or set NVTE_EP_RUNTIME=host (nvte-ep run: --runtime host) to run without a GPU";
    not_the_host_runtime("the CUDA driver", open_first("the CUDA driver", remedy, ["libcuda.so.1".into()])?, "cuInit")
}

/// NCCL EP, for the NCCL of this file: the named one, or the first that [`nccl_ep_search`] finds.
pub(crate) fn nccl_ep_library(nccl: Option<&Path>, env: &Env) -> Result<Kept> {
    let remedy = "install NCCL EP (pip install nccl-extensions) or set NVTE_EP_NCCL_EP_LIB to libnccl_ep.so";
    let search = match &env.nccl_ep_lib {
        Some(path) => [path.clone()].into(),
        None => nccl_ep_search(env, &own_directories(), &NCCL_PREFIXES, &site_packages(nccl)),
    };
    not_the_host_runtime("NCCL EP", open_first("NCCL EP", remedy, search)?, "ncclEpDispatch")
}

/// All files that [`nccl_library`] could take, in its order, with the version that each reports; loads them. `used` is the
/// one that it took, whose Python environment counts too.
pub(crate) fn nccl_candidates(env: &Env, used: Option<&Path>) -> Vec<(PathBuf, i32)> {
    let mut found: Vec<(PathBuf, i32)> = Vec::new();
    for candidate in nccl_search(env, &NCCL_PREFIXES, &site_packages(used)).candidates {
        // SAFETY: loading runs the library's constructors; these are the places of NCCL that the library itself tries.
        let Ok(opened) = (unsafe { UnixLibrary::open(Some(&candidate), RTLD_NOW | RTLD_LOCAL) }) else { continue };
        // Its threads and state cannot be unloaded.
        let library = keep(opened);
        // SAFETY: looks the symbol up; NCCL declares it so.
        let get = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0") };
        let path = get.ok().and_then(|get| file_of(*get as *const c_void));
        let version = path.as_deref().and_then(version_of);
        if let (Some(path), Some(version)) = (path, version)
            && !found.iter().any(|(there, _)| *there == path)
        {
            found.push((path, version));
        }
    }
    found
}

/// A function that the host runtime alone has.
const HOST_ONLY: &str = "nvte_ep_host_stats";

/// The file of a function of this loaded library.
fn file_of_function(library: &Library, function: &str) -> Option<PathBuf> {
    // SAFETY: looks a name up; nothing is called.
    let symbol = unsafe { library.get::<unsafe extern "C" fn()>(function.as_bytes()) }.ok()?;
    file_of(*symbol as *const c_void)
}

/// `library` for the CUDA runtime, unless its `function` is the host runtime's, which goes by all names.
fn not_the_host_runtime(name: &str, library: Kept, function: &str) -> Result<Kept> {
    match file_of_function(&library, function) {
        Some(file) if file_of_function(&library, HOST_ONLY).as_ref() == Some(&file) => Err(Error::Preflight {
            problem: format!(
                "{name} is the host runtime here ({}), and NVTE_EP_RUNTIME does not ask for it",
                file.display()
            ),
            remedy: "set NVTE_EP_RUNTIME=host to run without a GPU, or take that folder out of LD_LIBRARY_PATH".into(),
        }),
        _ => Ok(library),
    }
}

/// # Errors
/// The files, where the process has several copies of the host runtime.
fn one_host_runtime(loaded: &[PathBuf]) -> Result<()> {
    let [first, second, ..] = loaded else { return Ok(()) };
    Err(Error::Preflight {
        problem: format!(
            "the process has two copies of the host runtime, {} and {}, and neither knows the other's communicators, streams \
             and memory",
            first.display(),
            second.display()
        ),
        remedy: "let NVTE_EP_HOST_LIB, LD_LIBRARY_PATH and the program's own links lead to one file".into(),
    })
}

/// The files of the host runtime in the process, under whatever name.
fn loaded_host_runtimes() -> Vec<PathBuf> {
    let is_host = |file: &PathBuf| {
        // SAFETY: RTLD_NOLOAD runs nothing; it only finds what is loaded.
        let loaded = unsafe { UnixLibrary::open(Some(file), libc::RTLD_NOLOAD | RTLD_NOW) };
        // What is linked to the host runtime finds the function too, in another file.
        let found = loaded.ok().and_then(|library| file_of_function(&library.into(), HOST_ONLY));
        found.and_then(|found| found.canonicalize().ok()).as_ref() == Some(file)
    };
    mapped_files(|name| name.contains(".so")).into_iter().filter(is_host).collect()
}

const HOST: &str = "the host runtime";

pub(crate) fn host_library(env: &Env) -> Result<Kept> {
    let name = "libnvte_ep_host.so";
    let candidates = match &env.host_lib {
        Some(path) => vec![path.clone()],
        None => {
            // The one that the program is linked to, before a copy of it beside us.
            let soname = format!("{name}.1");
            // SAFETY: RTLD_NOLOAD runs nothing; it only finds what is loaded.
            let loaded = unsafe { UnixLibrary::open(Some(&soname), libc::RTLD_NOLOAD | RTLD_NOW) };
            if let Ok(loaded) = loaded {
                return Ok(keep(loaded));
            }
            let beside = own_directories().into_iter().map(|directory| directory.join(name));
            beside.chain([PathBuf::from(soname)]).collect()
        }
    };
    open_first(HOST, "build it (cargo build --release) or set NVTE_EP_HOST_LIB to its path", candidates)
}

/// NCCL: the named file, else what the process has, else the first that [`nccl_search`] finds.
pub(crate) fn nccl_library(env: &Env) -> Result<Kept> {
    let remedy = "install NCCL 2.30.4 or later (pip install nvidia-nccl-cu13) or set NVTE_EP_NCCL_LIB to its path";
    if let Some(path) = &env.nccl_lib {
        return open_first("NCCL", remedy, [path.clone()]);
    }
    let found = |library: Kept| not_the_host_runtime("NCCL", library, "ncclCommCount");
    let process = keep(UnixLibrary::this());
    // SAFETY: only the symbol's presence is asked for; it is not called.
    if unsafe { process.get::<*const c_void>(b"ncclCommCount\0") }.is_ok() {
        return found(process);
    }
    // A framework that a Python process imported keeps its NCCL to itself, so the symbol is not in the global scope. The
    // file is loaded all the same, and a second one beside it, from NCCL_HOME, could not use its communicator.
    // SAFETY: nothing is loaded, so no constructor runs.
    if let Ok(loaded) = unsafe { UnixLibrary::open(Some(NCCL), RTLD_NOW | libc::RTLD_NOLOAD) } {
        return found(keep(loaded));
    }
    let opened = open_first("NCCL", remedy, nccl_search(env, &NCCL_PREFIXES, &site_packages(None)))?;
    not_the_host_runtime("NCCL", opened, "ncclCommCount")
}

/// Never a plain `libnccl.so`, which can be another NCCL than the one that made the communicator.
const NCCL: &str = "libnccl.so.2";
const NCCL_EP: [&str; 2] = ["libnccl_ep.so.0", "libnccl_ep.so"];

/// Where NCCL is put by its archive, by hand and by a distribution, for machines whose loader does not know.
pub(crate) const NCCL_PREFIXES: [&str; 3] = ["/opt/nvidia/nccl", "/usr/local/nccl", "/usr"];

/// `$NCCL_HOME`; the loader's own search (`LD_LIBRARY_PATH`, ldconfig's cache); the usual places; Python wheels.
fn nccl_search(env: &Env, prefixes: &[&str], sites: &[PathBuf]) -> Search {
    let mut search = Search::default();
    search.home(&NCCL_HOME, env.nccl_home.as_deref(), &[NCCL]);
    search.loader(&[NCCL]);
    for prefix in prefixes {
        search.prefix(Path::new(prefix), &[NCCL]);
    }
    for site in sites {
        search.folder(&site.join("nvidia/nccl/lib"), &[NCCL]);
    }
    search
}

/// The places of design decision 4, in order, `$NCCL_HOME` after `$NCCL_EP_HOME` and the usual places last.
fn nccl_ep_search(env: &Env, own: &[PathBuf], prefixes: &[&str], sites: &[PathBuf]) -> Search {
    let mut search = Search::default();
    search.home(&NCCL_EP_HOME, env.nccl_ep_home.as_deref(), &NCCL_EP);
    // NCCL's prefix need not have NCCL EP, so its lack is not worth a warning here.
    env.nccl_home.iter().for_each(|home| search.prefix(home, &NCCL_EP));
    own.iter().for_each(|folder| search.folder(folder, &NCCL_EP));
    search.loader(&NCCL_EP);
    for site in sites {
        for cuda in ["cu13", "cu12"] {
            search.folder(&site.join("nccl/ep/lib").join(cuda), &["libnccl_ep.so"]);
        }
        search.folder(&site.join("transformer_engine/wheel_lib"), &["libnccl_ep.so"]);
    }
    for prefix in prefixes {
        search.prefix(Path::new(prefix), &NCCL_EP);
    }
    search
}

/// Files to try, in order, and what was wrong with the places that the user named.
#[derive(Debug, Default)]
struct Search {
    candidates: Vec<PathBuf>,
    wrong: Vec<String>,
}

impl Search {
    /// Names for the loader, which looks in its own places and reports them.
    fn loader(&mut self, names: &[&str]) {
        self.candidates.extend(names.iter().map(PathBuf::from));
    }

    /// The files of these names that are in `folder`.
    fn folder(&mut self, folder: &Path, names: &[&str]) {
        self.candidates.extend(names.iter().map(|name| folder.join(name)).filter(|path| path.exists()));
    }

    /// The files of these names that are in the library folders of `prefix`.
    fn prefix(&mut self, prefix: &Path, names: &[&str]) {
        let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
        for folder in ["lib", "lib64", &multiarch] {
            self.folder(&prefix.join(folder), names);
        }
    }

    /// As [`Search::prefix`], for the prefix that the user's `variable` names. One that has none of the files is a mistake
    /// that the user wants to hear of, even where the library is found elsewhere.
    fn home(&mut self, variable: &Variable, home: Option<&Path>, names: &[&str]) {
        let Some(home) = home else { return };
        let before = self.candidates.len();
        self.prefix(home, names);
        if self.candidates.len() == before {
            let text = format!("{}={} has no {} in lib or lib64", variable.name, home.display(), names.join(" or "));
            tracing::warn!(target: "nvte_ep", "{text}; looking elsewhere");
            self.wrong.push(text);
        }
    }
}

impl<Paths: IntoIterator<Item = PathBuf>> From<Paths> for Search {
    fn from(paths: Paths) -> Self {
        Self { candidates: paths.into_iter().collect(), wrong: Vec::new() }
    }
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
    if let Some(paths) = process("PYTHONPATH") {
        std::env::split_paths(&paths).for_each(&mut add);
    }
    for root in ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| process(name)) {
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
fn open_first(library: &'static str, remedy: &str, search: impl Into<Search>) -> Result<Kept> {
    let Search { candidates, wrong: mut tried } = search.into();
    for candidate in candidates {
        // SAFETY: loading runs the library's constructors; these are the vendor's libraries or those the user named.
        match unsafe { UnixLibrary::open(Some(&candidate), RTLD_NOW | RTLD_LOCAL) } {
            Ok(opened) => {
                tracing::debug!(target: "nvte_ep", library, path = %candidate.display(), "loaded");
                return Ok(keep(opened));
            }
            Err(error) => tried.push(format!("{}: {}", candidate.display(), chain(&error))),
        }
    }
    Err(Error::Load { library, tried, remedy: remedy.into() })
}

pub(crate) fn incomplete(library: &'static str, error: &libloading::Error) -> Error {
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

/// The NCCLs in the process, with the version that each reports. A communicator works with the one that made it only, and a
/// process may have several: a framework's, one of a Python wheel, the system's.
pub(crate) fn loaded_nccls() -> Vec<(PathBuf, i32)> {
    let files = mapped_files(|name| name.starts_with("libnccl.so"));
    files.into_iter().filter_map(|file| version_of(&file).map(|version| (file, version))).collect()
}

/// The files in the process's memory whose name `counts`, each once.
fn mapped_files(counts: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = Vec::new();
    for line in std::fs::read_to_string("/proc/self/maps").unwrap_or_default().lines() {
        // Behind address, rights, offset, device and inode.
        let Some(start) = line.find('/') else { continue };
        let path = Path::new(&line[start..]);
        let is_one = path.file_name().is_some_and(|name| counts(&name.to_string_lossy()));
        if is_one && !files.iter().any(|file| file == path) {
            files.push(path.to_path_buf());
        }
    }
    files
}

/// The version that the loaded library `file` reports.
fn version_of(file: &Path) -> Option<i32> {
    // SAFETY: RTLD_NOLOAD runs nothing; it only finds what is loaded.
    let library = unsafe { UnixLibrary::open(Some(file), libc::RTLD_NOLOAD | RTLD_NOW) }.ok()?;
    // SAFETY: NCCL declares it so.
    let get = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0") }.ok()?;
    let mut version = 0;
    // SAFETY: `version` is a live int; NCCL's function works without a device.
    let code = unsafe { get(&raw mut version) };
    (code == 0).then_some(version)
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

    /// A folder with empty files, for the searches.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[&str]) -> Self {
            let root = std::env::temp_dir().join(format!("nvte_ep_load_{name}_{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            std::fs::create_dir_all(&root).unwrap();
            for file in files {
                let path = root.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, "").unwrap();
            }
            Self(root)
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.join(path)
        }

        fn env(&self, pairs: &[(&str, &str)]) -> Env {
            Env::from_lookup(|name| {
                let (_, path) = pairs.iter().find(|(n, _)| *n == name)?;
                Some(self.at(path).to_str().unwrap().to_owned())
            })
            .unwrap()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn nccl_is_looked_for_in_order() {
        let tree = Tree::new(
            "nccl",
            &[
                "home/lib64/libnccl.so.2",
                "usual/lib/libnccl.so.2",
                "site/nvidia/nccl/lib/libnccl.so.2",
                "plain/lib/libnccl.so",
            ],
        );
        let usual = tree.at("usual");
        let prefixes = [tree.at("none").to_str().unwrap().to_owned(), usual.to_str().unwrap().to_owned()];
        let prefixes = [prefixes[0].as_str(), prefixes[1].as_str()];
        let sites = [tree.at("site")];
        let search = nccl_search(&tree.env(&[("NCCL_HOME", "home")]), &prefixes, &sites);
        let everywhere = [
            tree.at("home/lib64/libnccl.so.2"),
            "libnccl.so.2".into(),
            tree.at("usual/lib/libnccl.so.2"),
            tree.at("site/nvidia/nccl/lib/libnccl.so.2"),
        ];
        assert_eq!(search.candidates, everywhere);
        assert!(search.wrong.is_empty());

        // A plain libnccl.so is no NCCL for us, so a prefix that has only that is wrong, and is named.
        let search = nccl_search(&tree.env(&[("NCCL_HOME", "plain")]), &prefixes, &sites);
        assert_eq!(search.candidates, everywhere[1..]);
        let text = format!("NCCL_HOME={} has no libnccl.so.2 in lib or lib64", tree.at("plain").display());
        assert_eq!(search.wrong, [text]);
        assert!(nccl_search(&tree.env(&[]), &[], &[]).wrong.is_empty());
    }

    #[test]
    fn nccl_ep_is_looked_for_in_order() {
        let tree = Tree::new(
            "nccl_ep",
            &[
                "ep/lib/libnccl_ep.so.0",
                "nccl/lib/libnccl_ep.so",
                "own/libnccl_ep.so",
                "site/nccl/ep/lib/cu13/libnccl_ep.so",
                "site/transformer_engine/wheel_lib/libnccl_ep.so",
                "usual/lib64/libnccl_ep.so.0",
            ],
        );
        let usual = tree.at("usual");
        let (own, sites) = ([tree.at("own")], [tree.at("site")]);
        let env = tree.env(&[("NCCL_EP_HOME", "ep"), ("NCCL_HOME", "nccl")]);
        let search = nccl_ep_search(&env, &own, &[usual.to_str().unwrap()], &sites);
        let everywhere = [
            tree.at("ep/lib/libnccl_ep.so.0"),
            tree.at("nccl/lib/libnccl_ep.so"),
            tree.at("own/libnccl_ep.so"),
            "libnccl_ep.so.0".into(),
            "libnccl_ep.so".into(),
            tree.at("site/nccl/ep/lib/cu13/libnccl_ep.so"),
            tree.at("site/transformer_engine/wheel_lib/libnccl_ep.so"),
            tree.at("usual/lib64/libnccl_ep.so.0"),
        ];
        assert_eq!(search.candidates, everywhere);

        let search = nccl_ep_search(&tree.env(&[("NCCL_EP_HOME", "own"), ("NCCL_HOME", "own")]), &[], &[], &[]);
        assert_eq!(search.wrong.len(), 1, "NCCL's prefix need not have NCCL EP: {:?}", search.wrong);
        assert!(search.wrong[0].starts_with("NCCL_EP_HOME="), "{:?}", search.wrong);
    }

    #[test]
    fn a_wrong_home_is_named_where_nothing_is_found() {
        let mut search = Search::default();
        search.home(&NCCL_HOME, Some(Path::new("/nowhere")), &["libnvte_ep_no_such.so.7"]);
        search.loader(&["libnvte_ep_no_such.so.7"]);
        let text = open_first("NCCL", "do this", search).unwrap_err().to_string();
        let home = text.find("NCCL_HOME=/nowhere has no libnvte_ep_no_such.so.7 in lib or lib64").expect(&text);
        let loader = text.find("libnvte_ep_no_such.so.7: ").expect(&text);
        assert!(home < loader && text.starts_with("NCCL could not be loaded; do this. "), "{text}");
    }
}
