//! What would make the libraries below abort, exit or hang, looked at before they are asked.

mod cache;
mod compiler;
pub(crate) mod domains;
mod location;
pub mod report;
mod variables;

pub(crate) use location::{RankLocation, resident_sms, room_for};

use crate::config::{GroupConfig, LlConfig};
use crate::env::{NCCL_EP_HOME, NCCL_HOME, RuntimeKind, process};
use crate::error::{Error, Result};
use crate::memory::ll_group_bytes;
use crate::options::Options;
use crate::sys::nccl::{CommFacts, version_text};
use crate::sys::{Base, NCCL_PREFIXES, NcclEpLibrary, ancestors, cuda::DeviceFacts, loaded_nccls, site_packages};
use domains::{MachineName, Surroundings};
use location::{resident_cap, sm_cap};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// Lowest NCCL whose device interface NCCL EP 0.1 works with.
const MIN_NCCL: i32 = 23004;

/// # Errors
/// A device older than Hopper.
pub(crate) fn device(device: i32, facts: &DeviceFacts) -> Result<()> {
    let (major, minor) = facts.compute_capability;
    if major >= 9 {
        return Ok(());
    }
    Err(Error::Preflight {
        problem: format!("device {device} ({}) has compute capability {major}.{minor}", facts.name),
        remedy: "expert parallelism needs 9.0 (Hopper) or later; NVTE_EP_RUNTIME=host runs without a GPU".into(),
    })
}

/// # Errors
/// An NCCL that is too old.
pub(crate) fn nccl_version(code: i32) -> Result<()> {
    if code >= MIN_NCCL {
        return Ok(());
    }
    Err(Error::Preflight {
        problem: format!("NCCL {} is in use, and {} or later is needed", version_text(code), version_text(MIN_NCCL)),
        remedy: "update it (pip install -U nvidia-nccl-cu13) or set NVTE_EP_NCCL_LIB to a newer one".into(),
    })
}

/// The error of a communicator that NCCL does not recognise, with what that comes from: a communicator works only with the
/// NCCL that made it.
pub(crate) fn foreign_communicator(base: &Base, error: Error) -> Error {
    let invalid = i64::from(nvte_ep_bindings::ncclInvalidArgument);
    let Error::Library { code, .. } = &error else { return error };
    if base.runtime == RuntimeKind::Host || *code != invalid {
        return error;
    }
    let Ok(running) = base.nccl.version() else { return error };
    not_the_makers(running, base.nccl_path.as_deref(), &loaded_nccls(), &error)
}

/// `used` is the file of the NCCL in use, of version `running`, and `loaded` are all of the process.
fn not_the_makers(running: i32, used: Option<&Path>, loaded: &[(PathBuf, i32)], error: &Error) -> Error {
    let name = |path: &Path, version| format!("NCCL {} ({})", version_text(version), path.display());
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let used = used.unwrap_or(Path::new("of unknown file"));
    let others: Vec<_> = loaded.iter().filter(|(path, _)| real(path) != real(used)).collect();
    let also = match others.as_slice() {
        [] => "no other NCCL is in the process as a library of its own; a program may contain one".to_owned(),
        others => {
            let names: Vec<String> = others.iter().map(|(path, version)| name(path, *version)).collect();
            format!("in the process is also {}", names.join(" and "))
        }
    };
    Error::Preflight {
        problem: format!("{} does not know ep_comm as a communicator of its own; {also}; {error}", name(used, running)),
        remedy: "pass a communicator that was made by the NCCL in use and not destroyed, or set NVTE_EP_NCCL_LIB to the file \
                 of the NCCL that made it (2.30.4 or later)"
            .into(),
    }
}

/// # Errors
/// A communicator of another size, or of another device than the current one.
pub(crate) fn communicator(comm: &CommFacts, ep_size: u32, device: i32) -> Result<()> {
    if u32::try_from(comm.size) != Ok(ep_size) {
        return Err(Error::argument(
            "ep_comm",
            format!("must span exactly group_config.ep_size ranks, {ep_size}"),
            format!("a communicator of {}", comm.size),
        )
        .with_remedy(if i64::from(comm.size) > i64::from(ep_size) {
            "pass the expert-parallel sub-communicator (ncclCommSplit)"
        } else {
            "start as many ranks as ep_size says, or set ep_size to the number of ranks"
        }));
    }
    if comm.device != device {
        return Err(Error::argument(
            "ep_comm",
            format!("must be on the calling thread's current device, {device}"),
            format!("a communicator on device {}", comm.device),
        )
        .with_remedy("call cudaSetDevice first"));
    }
    Ok(())
}

/// Identifies this machine's running system to the other ranks: the first half of the kernel's random number for it.
#[must_use]
pub fn host_id() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    boot_number(&text).unwrap_or(0)
}

fn boot_number(text: &str) -> Option<u64> {
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u64::from_str_radix(digits.get(..16)?, 16).ok()
}

type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// What NCCL EP's run-time compiler needs and how it is told: names and values of environment variables.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct JitSettings(Vec<(&'static str, PathBuf)>);

/// Finds compiler, headers and cache for NCCL EP, which aborts in the first step where one is missing. `limit` is the
/// group's, for all ranks to come.
///
/// # Errors
/// The missing piece, where it was looked for and how to provide it.
pub(crate) fn jit(
    base: &Base,
    library: &NcclEpLibrary,
    nccl_version: i32,
    limit: Option<Duration>,
) -> Result<JitSettings> {
    // The other ranks wait as long, and are to hear of it.
    let limit = limit.map(|limit| limit / 2);
    jit_from(base.nccl_path.as_deref(), library.path.as_deref(), nccl_version, limit, &process)
}

fn jit_from(
    nccl: Option<&Path>,
    nccl_ep: Option<&Path>,
    version: i32,
    limit: Option<Duration>,
    env: Lookup<'_>,
) -> Result<JitSettings> {
    let nvcc = compiler::find_nvcc(env, limit)?;
    let sites = site_packages(nccl);
    let sources = device_headers(nccl_ep, &sites, env)?;
    let nccl_headers = nccl_headers(nccl, &sites, version, env)?;
    let cuda_headers = cuda_headers(Some(&nvcc), env)?;
    Ok(JitSettings(vec![
        ("NCCL_EP_JIT_NVCC", nvcc),
        ("NCCL_EP_JIT_SOURCE_DIR", sources),
        ("NCCL_EP_JIT_BUILD_INCLUDE_DIR", nccl_headers),
        ("NCCL_EP_JIT_CUDA_INCLUDE_DIR", cuda_headers),
        (cache::VARIABLE, cache::directory(env)?),
    ]))
}

/// lib/libnccl_ep.so beside include/; or in the nccl-extensions wheel nccl/ep/lib/cu13/libnccl_ep.so beside
/// nccl/ep/include; or in TransformerEngine's wheel wheel_lib/libnccl_ep.so beside wheel_lib/nccl_ep/include.
fn device_headers(nccl_ep: Option<&Path>, sites: &[PathBuf], env: Lookup<'_>) -> Result<PathBuf> {
    let homes = env(NCCL_EP_HOME.name).map(PathBuf::from).into_iter();
    let in_te = ancestors(nccl_ep, 1).into_iter().map(|folder| folder.join("nccl_ep"));
    let homes = homes.chain(ancestors(nccl_ep, 2)).chain(ancestors(nccl_ep, 3)).chain(in_te);
    let homes = homes.chain(sites.iter().map(|site| site.join("nccl/ep")));
    find(
        "NCCL EP's device headers",
        "NCCL_EP_JIT_SOURCE_DIR",
        env,
        homes.map(|home| home.join("include/nccl_ep")),
        &["device/ht_ep.cuh", "common.hpp", "../nccl_ep.h"],
        "install the nccl-extensions wheel, or set NCCL_EP_HOME to a folder that has include/nccl_ep",
    )
}

fn nccl_headers(nccl: Option<&Path>, sites: &[PathBuf], version: i32, env: Lookup<'_>) -> Result<PathBuf> {
    let named = env(NCCL_HOME.name).map(PathBuf::from);
    if let Some(text) = named.as_deref().and_then(|home| unfit_headers(home, version)) {
        tracing::warn!(target: "nvte_ep", "{text}; looking elsewhere");
    }
    let homes = named.into_iter().chain(ancestors(nccl, 2));
    let homes = homes.chain(sites.iter().map(|site| site.join("nvidia/nccl")));
    let homes = homes.chain(NCCL_PREFIXES.map(PathBuf::from)).map(|home| home.join("include"));
    let folder = find(
        "NCCL's headers",
        "NCCL_EP_JIT_BUILD_INCLUDE_DIR",
        env,
        homes.filter(|path| header_version(path).is_some_and(|v| v == version)),
        &["nccl.h", "nccl_device.h"],
        &format!("install those of NCCL {}, the running one, or set NCCL_HOME to its folder", version_text(version)),
    )?;
    if let Some(found) = header_version(&folder).filter(|found| *found != version) {
        return Err(Error::Preflight {
            problem: format!(
                "NCCL {} is running, but the headers for NCCL EP's compiler in {} are of {}",
                version_text(version),
                folder.display(),
                version_text(found)
            ),
            remedy: "set NCCL_EP_JIT_BUILD_INCLUDE_DIR to headers of the running version".into(),
        });
    }
    Ok(folder)
}

fn cuda_headers(nvcc: Option<&Path>, env: Lookup<'_>) -> Result<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| env(name)).map(PathBuf::from);
    find(
        "CUDA's headers",
        "NCCL_EP_JIT_CUDA_INCLUDE_DIR",
        env,
        homes.chain(ancestors(nvcc, 2)).chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("include")),
        &["cuda_runtime.h"],
        "install the CUDA toolkit, or set CUDA_HOME to it",
    )
}

/// On the host runtime there is nothing to compile; a test may ask for what a machine without a compiler sees.
///
/// # Errors
/// nvcc, where the host runtime's NVTE_EP_HOST_FAULT hides it.
pub(crate) fn host_compiler(library: &NcclEpLibrary) -> Result<()> {
    // SAFETY: takes nothing.
    let hidden = library.host_compiler.is_some_and(|has_compiler| unsafe { has_compiler() } == 0);
    if hidden { Err(compiler::no_nvcc("hidden by NVTE_EP_HOST_FAULT")) } else { Ok(()) }
}

/// The folder that `variable` names, or the first of `candidates`, that has all of `members` in it.
fn find(
    what: &str,
    variable: &'static str,
    env: Lookup<'_>,
    candidates: impl Iterator<Item = PathBuf>,
    members: &[&str],
    remedy: &str,
) -> Result<PathBuf> {
    let mut tried = Vec::new();
    let candidates: Vec<_> = match env(variable) {
        Some(named) => vec![named.into()],
        None => candidates.collect(),
    };
    for folder in candidates {
        match members.iter().find(|member| !folder.join(member).exists()) {
            None => return Ok(folder),
            Some(missing) => tried.push(format!("{missing} is not in {}", folder.display())),
        }
    }
    let tried = if tried.is_empty() { "nowhere to look".into() } else { tried.join(", ") };
    Err(Error::Preflight {
        problem: format!("{what} were not found for NCCL EP's run-time compiler ({tried})"),
        remedy: format!("{remedy}, or set {variable}"),
    })
}

/// What is wrong with the headers of the prefix that `NCCL_HOME` names, if something is.
fn unfit_headers(home: &Path, running: i32) -> Option<String> {
    let found = match header_version(&home.join("include")) {
        Some(version) if version == running => return None,
        Some(version) => format!("the headers of NCCL {}", version_text(version)),
        None => "no include/nccl.h".into(),
    };
    let running = version_text(running);
    Some(format!("{}={} has {found}, and NCCL {running} is running", NCCL_HOME.name, home.display()))
}

/// NCCL_VERSION_CODE of the nccl.h in `folder`.
fn header_version(folder: &Path) -> Option<i32> {
    let text = std::fs::read_to_string(folder.join("nccl.h")).ok()?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("#define NCCL_VERSION_CODE"))?;
    line.trim().parse().ok()
}

impl JitSettings {
    /// Sets what the user left unset, for NCCL EP to read.
    pub(crate) fn export(self) {
        self.0.into_iter().for_each(|(name, path)| set_if_unset(name, path.as_os_str()));
    }
}

/// What this rank is and has, for the exchange.
pub(crate) fn location(
    base: &Base,
    facts: &DeviceFacts,
    comm: &CommFacts,
    library: Option<&NcclEpLibrary>,
) -> RankLocation {
    // A process has one NCCL EP, and telling takes reading its file.
    static BARRIERS_FOR_ALL: OnceLock<bool> = OnceLock::new();
    let enough_barriers = library.is_none_or(|it| *BARRIERS_FOR_ALL.get_or_init(|| it.reads_variable(DISPATCH_SMS)));
    let (host, name) = machine(base, comm);
    RankLocation {
        host,
        name,
        // On the host runtime nothing has to be resident together, so no two ranks count as sharing.
        device: match base.runtime {
            RuntimeKind::Cuda => (facts.pci.0 as u64) << 32 | (facts.pci.1 as u64) << 16 | facts.pci.2 as u64,
            RuntimeKind::Host => comm.rank as u64,
        },
        sm_count: facts.sm_count as u32,
        // A total of 0 is no answer.
        free: base.cuda.memory_info().ok().filter(|(_, total)| *total > 0).map_or(u64::MAX, |(free, _)| free as u64),
        domains: comm.links.map_or(0, |links| links.domains),
        dispatch_blocks: location::dispatch_blocks(enough_barriers),
        gin: comm.links.map_or(nvte_ep_bindings::NCCL_GIN_TYPE_NONE, |links| links.gin),
        surroundings: Surroundings::of(&process),
    }
}

/// This rank's machine: its number, and the name by which NCCL tells it from others. The host runtime may simulate some.
fn machine(base: &Base, comm: &CommFacts) -> (u64, MachineName) {
    // SAFETY: takes numbers.
    let simulated = base.host_machine.map_or(-1, |of| unsafe { of(comm.rank, comm.size) });
    if let Ok(number) = u64::try_from(simulated) {
        // Neither the machine's own number nor the same for two of them.
        return (host_id() ^ (number + 1), MachineName::new(&format!("simulated-{number}")));
    }
    let name = process("NCCL_HOSTID").map(|name| name.to_string_lossy().into_owned());
    let name = name.or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok()).unwrap_or_default();
    (host_id(), MachineName::new(name.trim()))
}

/// # Errors
/// NCCL EP's variables, or the communicator's links, are such that it would fail or hang.
pub(crate) fn surroundings(base: &Base, facts: &DeviceFacts, comm: &CommFacts) -> Result<()> {
    variables::check(&process, facts.sm_count as u32)?;
    match base.runtime {
        RuntimeKind::Cuda => location::links(comm, &process),
        // It reaches every rank, whatever is said of NCCL.
        RuntimeKind::Host => Ok(()),
    }
}

/// What of the environment must be equal on all ranks, by name.
pub(crate) fn agreed_variables() -> Vec<(String, u64)> {
    variables::agreed(&process)
}

/// The ranks' NVLink domains are such that NCCL EP can work over them; what may be slow or lossy is logged.
fn usable_domains(options: &Options, places: &[RankLocation]) -> Result<()> {
    domains::check(places, options.undocumented_scale)?;
    domains::warnings(places).iter().for_each(|text| tracing::warn!(target: "nvte_ep", "{text}"));
    Ok(())
}

/// What the configuration needs of all ranks' places: room on the devices, links, multiprocessors.
///
/// # Errors
/// The same on every rank.
pub(crate) fn fit(config: &GroupConfig, options: &Options, places: &[RankLocation]) -> Result<SmCounts> {
    usable_domains(options, places)?;
    location::device_memory(config, places)?;
    sm_counts(config, options, places, &process)
}

/// The switch for the slot order that our interface promises: rows by source rank and source row. Builds with API 3 hand
/// out slots by atomic counters otherwise (TransformerEngine 2.20.2's wheel); earlier ones know no other order.
const SCAN_MODE: &str = "NCCL_EP_HT_EM_AG_SCAN_MODE";

/// Multiprocessors that a group's kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SmCounts {
    /// Dispatch and its gradient.
    pub(crate) dispatch: u32,
    /// Combine and its gradient.
    pub(crate) combine: u32,
    /// The scan of prepare, where it is said.
    pub(crate) preprocess: Option<u32>,
}

/// The counts that configuration and options ask for, each within [`sm_cap`] or [`resident_cap`].
///
/// # Errors
/// As there.
fn sm_counts(config: &GroupConfig, options: &Options, places: &[RankLocation], env: Lookup<'_>) -> Result<SmCounts> {
    let field = format!("group_config.{}", config.dialect.sm_field);
    let cap = sm_cap(&field, config.max_num_sms, places)?;
    let resident = |name, count: Option<u32>| count.map(|count| resident_cap(name, count, places)).transpose();
    let dispatch = options.dispatch_sms.map(|count| sm_cap("option dispatch_sms", Some(count), places)).transpose()?;
    let counts = SmCounts {
        dispatch: dispatch.unwrap_or(cap),
        combine: resident("option combine_sms", options.combine_sms)?.unwrap_or(cap),
        preprocess: resident("option preprocess_sms", options.preprocess_sms)?,
    };
    location::variables_fit(env, places)?;
    Ok(counts)
}

/// What a low-latency group needs of all ranks' places; returns the multiprocessors of its kernels. Their blocks wait for each
/// other, and a rank that has its device for itself gets all of it: the kernels are short.
///
/// # Errors
/// The same on every rank.
pub(crate) fn ll_fit(config: &LlConfig, options: &Options, places: &[RankLocation]) -> Result<u32> {
    usable_domains(options, places)?;
    room_for(ll_group_bytes(config).iter().sum(), places)?;
    let given = match variables::count(variables::DISPATCH_COUNTS[1], &process)? {
        // NCCL EP takes it before the group's.
        Some(count) => resident_cap(variables::DISPATCH_COUNTS[1], count, places)?,
        None => location::most_of_device("config->max_num_sms", config.max_num_sms, places)?,
    };
    config.check_launch(given)?;
    Ok(given)
}

/// # Errors
/// Dispatch and combine are to have different numbers of multiprocessors, and the library has one number for both.
pub(crate) fn separate_sms(config: &GroupConfig, options: &Options, library: &NcclEpLibrary) -> Result<()> {
    let (dispatch, combine) = (options.dispatch_sms, options.combine_sms);
    let cap = config.max_num_sms;
    if dispatch.or(cap) == combine.or(cap) || library.reads_variable(DISPATCH_SMS) {
        return Ok(());
    }
    let name = |count: Option<u32>| count.map_or("automatic".to_owned(), |count| count.to_string());
    let required = format!("must equal combine_sms, {}", name(combine.or(cap)));
    Err(Error::argument("option dispatch_sms", required, name(dispatch.or(cap)))
        .with_remedy("this NCCL EP has one number for both; builds with API 3 (TransformerEngine 2.20.2's) have two"))
}

const DISPATCH_SMS: &str = "NCCL_EP_DISPATCH_SMS";

/// NCCL EP's variables of one group, for the time of its creation, in which the library reads them. Afterwards they are as
/// they were: another EP library of the process may read them too.
#[derive(Debug, Default)]
pub(crate) struct GroupVariables(Vec<(&'static str, Option<OsString>)>);

impl GroupVariables {
    /// Sets what options, counts and the ranks' places ask for.
    pub(crate) fn set(
        options: &Options,
        sms: SmCounts,
        runtime: RuntimeKind,
        places: &[RankLocation],
        own: RankLocation,
    ) -> Self {
        let mut all = group_values(options, sms);
        if runtime == RuntimeKind::Cuda {
            let missing = |name: &str, all: &[(&str, String)]| all.iter().all(|(known, _)| *known != name);
            for name in [variables::SHUFFLE_SMS, variables::PREPROCESS_SMS] {
                if missing(name, &all) {
                    all.extend(
                        location::local_sms(name, &process, places, &own).map(|count| (name, count.to_string())),
                    );
                }
            }
            if missing(SCAN_MODE, &all) && process(SCAN_MODE).is_none() {
                all.push((SCAN_MODE, "1".into()));
            }
        }
        let replace = |(name, value): (&'static str, String)| {
            let before = std::env::var_os(name);
            set(name, Some(value.as_ref()));
            (name, before)
        };
        Self(all.into_iter().map(replace).collect())
    }
}

/// What options and counts ask for.
fn group_values(options: &Options, sms: SmCounts) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    if sms.dispatch != sms.combine {
        all.push((DISPATCH_SMS, sms.dispatch.to_string()));
        all.push((variables::COMBINE_SMS, sms.combine.to_string()));
    }
    all.extend(sms.preprocess.map(|count| (variables::PREPROCESS_SMS, count.to_string())));
    all.extend(options.deterministic.map(|deterministic| (SCAN_MODE, u8::from(deterministic).to_string())));
    all
}

impl Drop for GroupVariables {
    fn drop(&mut self) {
        for (name, before) in self.0.drain(..) {
            set(name, before.as_deref());
        }
    }
}

fn set_if_unset(name: &str, value: &OsStr) {
    if process(name).is_none() {
        set(name, Some(value));
    }
}

fn set(name: &str, value: Option<&OsStr>) {
    match value {
        // SAFETY: done in initialize, before NCCL EP reads it. A program that changes its environment in another thread
        // at the same time has that race with every getenv of the libraries.
        Some(value) => unsafe { std::env::set_var(name, value) },
        // SAFETY: as above.
        None => unsafe { std::env::remove_var(name) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GroupRequest;
    use crate::config::tests::REQUEST;
    use std::collections::HashMap;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn versions_and_devices() {
        nccl_version(23004).unwrap();
        let text = nccl_version(22907).unwrap_err().to_string();
        assert!(text.starts_with("NCCL 2.29.7 is in use, and 2.30.4 or later is needed; update it"), "{text}");
        let mut facts = DeviceFacts { compute_capability: (9, 0), sm_count: 132, pci: (0, 1, 0), name: "A GPU".into() };
        device(0, &facts).unwrap();
        facts.compute_capability = (8, 0);
        let text = device(3, &facts).unwrap_err().to_string();
        assert!(text.starts_with("device 3 (A GPU) has compute capability 8.0; "), "{text}");
    }

    #[test]
    fn the_communicator_has_to_fit() {
        let comm = CommFacts { size: 4, rank: 1, device: 2, links: None };
        communicator(&comm, 4, 2).unwrap();
        let text = communicator(&comm, 2, 2).unwrap_err().to_string();
        assert!(text.contains("exactly group_config.ep_size ranks, 2, got a communicator of 4"), "{text}");
        let text = communicator(&comm, 4, 0).unwrap_err().to_string();
        assert!(text.contains("current device, 0, got a communicator on device 2"), "{text}");
    }

    #[test]
    fn a_machine_has_one_number_whoever_reads_it() {
        assert_eq!(boot_number("01234567-89ab-cdef-8123-456789abcdef\n"), Some(0x0123_4567_89AB_CDEF));
        assert_eq!(boot_number(""), None);
        assert_ne!(host_id(), 0);
    }

    #[test]
    fn a_communicator_of_another_nccl_names_both() {
        let error = Error::Library { call: "ncclCommCount", code: 4, text: "invalid argument".into() };
        let used = Path::new("/a/libnccl.so.2");
        let loaded = [(used.to_path_buf(), 23007), (PathBuf::from("/b/libnccl.so.2"), 22705)];
        let text = not_the_makers(23007, Some(used), &loaded, &error).to_string();
        let start = "NCCL 2.30.7 (/a/libnccl.so.2) does not know ep_comm as a communicator of its own; in the process is also \
                     NCCL 2.27.5 (/b/libnccl.so.2); ncclCommCount returned 4: invalid argument; pass a communicator";
        assert!(text.starts_with(start), "{text}");
        let text = not_the_makers(23007, Some(used), &loaded[..1], &error).to_string();
        assert!(text.contains("; no other NCCL is in the process as a library of its own;"), "{text}");
    }

    /// With a library that is NCCL as far as its name and its version go.
    #[test]
    fn nccls_of_the_process_are_found() {
        let folder = std::env::temp_dir().join(format!("nvte_ep_nccls_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (source, library) = (folder.join("nccl.c"), folder.join("libnccl.so.2"));
        std::fs::write(&source, "int ncclGetVersion(int* version) { *version = 22705; return 0; }\n").unwrap();
        let compiled =
            std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        assert!(compiled.unwrap().success());
        let found = || loaded_nccls().into_iter().find(|(path, _)| *path == library);
        assert_eq!(found(), None, "not loaded yet");
        // SAFETY: made just now; it has no constructor.
        let loaded = unsafe { libloading::Library::new(&library) }.unwrap();
        assert_eq!(found(), Some((library.clone(), 22705)));
        drop(loaded);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn counts_of_configuration_and_options() {
        let location = |host, device| location::tests::location(host, device);
        let apart: Vec<_> = (0..8).map(|device| location(1, device)).collect();
        let eight = vec![location(1, 0); 8];
        let counts = |config: &GroupConfig, options: &Options, places: &[RankLocation]| {
            sm_counts(config, options, places, &|_| None).map_err(|error| error.to_string())
        };
        let config = GroupConfig::try_from(GroupRequest { max_num_sms: 20, ..REQUEST }).unwrap();
        let options = Options { combine_sms: Some(8), preprocess_sms: Some(132), ..Options::default() };
        let expected = SmCounts { dispatch: 20, combine: 8, preprocess: Some(132) };
        assert_eq!(counts(&config, &options, &apart).unwrap(), expected);
        let text = counts(&config, &Options { preprocess_sms: Some(17), ..options }, &eight).unwrap_err();
        assert!(text.starts_with("group_config.max_num_sms must be at most 16"), "{text}");
        let config = GroupConfig::try_from(GroupRequest { max_num_sms: 16, ..REQUEST }).unwrap();
        let text = counts(&config, &Options { preprocess_sms: Some(17), ..options }, &eight).unwrap_err();
        assert!(text.starts_with("option preprocess_sms must be at most 16 where 8 ranks share one device"), "{text}");
        let many = Options { dispatch_sms: Some(40), combine_sms: Some(40), ..Options::default() };
        let text = counts(&config, &many, &apart).unwrap_err();
        assert!(text.starts_with("option dispatch_sms must be at most 34 with this NCCL EP, got 40"), "{text}");
    }

    /// The only test that changes the process's environment.
    #[test]
    fn a_groups_variables_are_set_for_its_creation_only() {
        let alone = [location::tests::location(1, 0), location::tests::location(1, 1)];
        let shared = [alone[0]; 2];
        let names = [variables::SHUFFLE_SMS, variables::PREPROCESS_SMS, SCAN_MODE, DISPATCH_SMS];
        let sms = SmCounts { dispatch: 20, combine: 20, preprocess: None };
        let during = |options: &Options, sms: SmCounts, runtime, places: &[RankLocation]| {
            let before = names.map(process);
            let variables = GroupVariables::set(options, sms, runtime, places, places[0]);
            let seen = names.map(|name| process(name).map(|value| value.into_string().unwrap()));
            drop(variables);
            assert_eq!(names.map(process), before, "nothing is left behind");
            seen.map(|value| value.unwrap_or_default())
        };
        let (options, cuda) = (Options::default(), RuntimeKind::Cuda);
        assert_eq!(during(&options, sms, cuda, &alone), ["132", "132", "1", ""], "alone: the whole device");
        assert_eq!(during(&options, sms, cuda, &shared), ["", "", "1", ""], "NCCL EP's own numbers, which are small");
        assert_eq!(during(&options, sms, RuntimeKind::Host, &alone), ["", "", "", ""]);
        let said = Options { deterministic: Some(false), ..options };
        let counts = SmCounts { dispatch: 21, combine: 20, preprocess: Some(9) };
        assert_eq!(during(&said, counts, cuda, &alone), ["132", "9", "0", "21"]);
        // As TransformerEngine leaves them behind for the whole process.
        set(names[0], Some("132".as_ref()));
        set(names[1], Some("20".as_ref()));
        assert_eq!(during(&options, sms, cuda, &alone), ["132", "20", "1", ""]);
        assert_eq!(during(&options, sms, cuda, &shared), ["66", "20", "1", ""], "more would hang the first step");
        names.iter().for_each(|name| set(name, None));
    }

    struct Installation {
        root: PathBuf,
        variables: HashMap<&'static str, OsString>,
    }

    impl Installation {
        /// A toolkit, NCCL 2.30.7 and NCCL EP below a folder of its own.
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("nvte_ep_preflight_{name}_{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            for folder in
                ["cuda/bin", "cuda/include", "nccl/include", "nccl/lib", "ep/include/nccl_ep/device", "ep/lib"]
            {
                std::fs::create_dir_all(root.join(folder)).unwrap();
            }
            std::fs::write(root.join("cuda/bin/nvcc"), "#!/bin/sh\nexit 0\n").unwrap();
            std::fs::set_permissions(root.join("cuda/bin/nvcc"), std::fs::Permissions::from_mode(0o755)).unwrap();
            std::fs::write(root.join("cuda/include/cuda_runtime.h"), "").unwrap();
            std::fs::write(root.join("nccl/include/nccl.h"), "#define NCCL_VERSION_CODE 23007\n").unwrap();
            for header in ["nccl/include/nccl_device.h", "ep/include/nccl_ep.h", "ep/include/nccl_ep/common.hpp"] {
                std::fs::write(root.join(header), "").unwrap();
            }
            std::fs::write(root.join("ep/include/nccl_ep/device/ht_ep.cuh"), "").unwrap();
            let variables = HashMap::from([
                ("CUDA_HOME", root.join("cuda").into_os_string()),
                ("TMPDIR", root.join("tmp").into_os_string()),
            ]);
            Self { root, variables }
        }

        fn jit(&self) -> Result<JitSettings> {
            let (nccl, ep) = (self.root.join("nccl/lib/libnccl.so.2"), self.root.join("ep/lib/libnccl_ep.so"));
            jit_from(Some(&nccl), Some(&ep), 23007, None, &|name| self.variables.get(name).cloned())
        }
    }

    impl Drop for Installation {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.root);
        }
    }

    #[test]
    fn everything_is_found_from_the_libraries_places() {
        let installation = Installation::new("found");
        let JitSettings(found) = installation.jit().unwrap();
        let root = &installation.root;
        assert_eq!(found[0], ("NCCL_EP_JIT_NVCC", root.join("cuda/bin/nvcc")));
        assert_eq!(found[1], ("NCCL_EP_JIT_SOURCE_DIR", root.join("ep/include/nccl_ep")));
        assert_eq!(found[2], ("NCCL_EP_JIT_BUILD_INCLUDE_DIR", root.join("nccl/include")));
        assert_eq!(found[3], ("NCCL_EP_JIT_CUDA_INCLUDE_DIR", root.join("cuda/include")));
        assert_eq!(found[4].0, "NCCL_EP_JIT_CACHE_DIR");
        assert_eq!(found[4].1.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn headers_are_found_in_both_wheels() {
        for (library, headers) in [
            ("nccl/ep/lib/cu13/libnccl_ep.so", "nccl/ep/include/nccl_ep"),
            ("transformer_engine/wheel_lib/libnccl_ep.so", "transformer_engine/wheel_lib/nccl_ep/include/nccl_ep"),
        ] {
            let installation = Installation::new(&headers.replace('/', "_"));
            let site = installation.root.join("site-packages");
            std::fs::create_dir_all(site.join(headers).parent().unwrap()).unwrap();
            std::fs::rename(installation.root.join("ep/include/nccl_ep"), site.join(headers)).unwrap();
            std::fs::write(site.join(headers).parent().unwrap().join("nccl_ep.h"), "").unwrap();
            let nccl = installation.root.join("nccl/lib/libnccl.so.2");
            let env = |name: &str| installation.variables.get(name).cloned();
            let JitSettings(found) = jit_from(Some(&nccl), Some(&site.join(library)), 23007, None, &env).unwrap();
            assert_eq!(found[1], ("NCCL_EP_JIT_SOURCE_DIR", site.join(headers)));
        }
    }

    #[test]
    fn a_missing_piece_is_named_with_its_remedy() {
        let mut installation = Installation::new("missing");
        installation.variables.insert("NCCL_EP_JIT_NVCC", "/nonexistent/nvcc".into());
        let text = installation.jit().unwrap_err().to_string();
        assert!(
            text.contains("needs nvcc (none found)") && text.contains("set NCCL_EP_JIT_NVCC or CUDA_HOME"),
            "{text}"
        );

        // Named, since a machine with a toolkit in the usual place has another one to go on with.
        let nvcc = installation.root.join("cuda/bin/nvcc");
        std::fs::write(&nvcc, "#!/bin/sh\necho no host compiler >&2\nexit 3\n").unwrap();
        installation.variables.insert("NCCL_EP_JIT_NVCC", nvcc.clone().into_os_string());
        let text = installation.jit().unwrap_err().to_string();
        assert!(text.contains("bin/nvcc: exit status: 3: no host compiler"), "{text}");
        std::fs::write(&nvcc, "#!/bin/sh\nexit 0\n").unwrap();

        let other = installation.root.join("other");
        std::fs::create_dir_all(&other).unwrap();
        std::fs::write(other.join("nccl.h"), "#define NCCL_VERSION_CODE 22907\n").unwrap();
        std::fs::write(other.join("nccl_device.h"), "").unwrap();
        installation.variables.insert("NCCL_EP_JIT_BUILD_INCLUDE_DIR", other.into_os_string());
        let text = installation.jit().unwrap_err().to_string();
        assert!(text.contains("NCCL 2.30.7 is running") && text.contains("are of 2.29.7"), "{text}");
        installation.variables.remove("NCCL_EP_JIT_BUILD_INCLUDE_DIR");

        std::fs::remove_file(installation.root.join("ep/include/nccl_ep.h")).unwrap();
        let text = installation.jit().unwrap_err().to_string();
        assert!(text.contains("NCCL EP's device headers were not found"), "{text}");
        assert!(text.contains("../nccl_ep.h is not in"), "{text}");
        assert!(text.contains("or set NCCL_EP_JIT_SOURCE_DIR"), "{text}");
    }

    #[test]
    fn an_unfit_nccl_home_is_named() {
        let installation = Installation::new("home");
        let home = installation.root.join("nccl");
        assert_eq!(unfit_headers(&home, 23007), None);
        let text = unfit_headers(&home, 23203).unwrap();
        let named = format!("NCCL_HOME={} has ", home.display());
        assert_eq!(text, named + "the headers of NCCL 2.30.7, and NCCL 2.32.3 is running");
        let text = unfit_headers(Path::new("/nowhere"), 23007).unwrap();
        assert_eq!(text, "NCCL_HOME=/nowhere has no include/nccl.h, and NCCL 2.30.7 is running");
    }

    #[test]
    fn an_unusable_cache_is_refused() {
        let mut installation = Installation::new("cache");
        let blocker = installation.root.join("file");
        std::fs::write(&blocker, "").unwrap();
        installation.variables.insert("NCCL_EP_JIT_CACHE_DIR", blocker.join("cache").into_os_string());
        let text = installation.jit().unwrap_err().to_string();
        assert!(text.contains("compile cache") && text.contains("cannot be made"), "{text}");
    }
}
