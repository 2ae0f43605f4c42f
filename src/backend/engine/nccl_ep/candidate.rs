//! What NCCL EP needs of a machine and of all ranks together. This is checked before NCCL EP is called, because it aborts, exits
//! or hangs if something is missing.

use super::Group;
use super::topk_idx::IndexCopier;
use crate::backend::engine::Machine;
use crate::config::GroupConfig;
use crate::env::{Env, RuntimeKind};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::preflight::{self, GroupVariables, RankLocation, SmCounts};
use crate::sys::cuda::DeviceFacts;
use crate::sys::nccl::CommFacts;
use crate::sys::{self, Base, NcclEpLibrary};
use nvte_ep_bindings as b;
use std::path::Path;

/// The loaded library, and our kernels for it.
pub(in crate::backend) struct Candidate {
    library: &'static NcclEpLibrary,
    index_copier: IndexCopier,
}

/// Multiprocessors that the ranks' devices leave to the group.
pub(in crate::backend) struct Fit(SmCounts);

impl Fit {
    pub(in crate::backend) fn of(config: &GroupConfig, options: &Options, places: &[RankLocation]) -> Result<Self> {
        preflight::fit(config, options, places).map(Self)
    }
}

impl Candidate {
    pub(in crate::backend) fn find(machine: &Machine<'_>) -> Result<Self> {
        let Machine { base, env, device, facts, comm_facts, nccl, config, options, .. } = machine;
        let needs_library = |library: &_| preflight::separate_sms(config, options, library);
        let library = find_library(base, env, (*device, facts), comm_facts, *nccl, needs_library)?;
        Ok(Self { library, index_copier: IndexCopier::load(&base.cuda, *device)? })
    }

    pub(in crate::backend) fn location(machine: &Machine<'_>, found: Option<&Self>) -> RankLocation {
        let Machine { base, facts, comm_facts, .. } = machine;
        preflight::location(base, facts, comm_facts, found.map(|found| found.library))
    }

    /// # Safety
    /// As for [`Group::create`].
    pub(in crate::backend) unsafe fn create(
        self,
        machine: &Machine<'_>,
        Fit(sms): Fit,
        places: &[RankLocation],
        own: RankLocation,
    ) -> Result<Group> {
        let Self { library, index_copier } = self;
        let variables = GroupVariables::set(machine.options, sms, machine.base.runtime, places, own);
        // SAFETY: passed on.
        let group = unsafe { Group::create(machine, library, index_copier, sms.dispatch.max(sms.combine)) };
        drop(variables);
        group.map_err(|error| explain_refusal(error, library, machine.nccl))
    }
}

/// NCCL EP, and all that it needs here to run. `more` is asked about the library before its compiler is looked for.
pub(super) fn find_library(
    base: &'static Base,
    env: &Env,
    (device, facts): (i32, &DeviceFacts),
    comm: &CommFacts,
    nccl: i32,
    more: impl FnOnce(&NcclEpLibrary) -> Result<()>,
) -> Result<&'static NcclEpLibrary> {
    preflight::device(device, facts)?;
    preflight::nccl_version(nccl)?;
    preflight::surroundings(base, facts, comm)?;
    let library = sys::nccl_ep(base, env)?;
    more(library)?;
    match base.runtime {
        RuntimeKind::Cuda => preflight::jit(base, library, nccl, env.timeout)?.export(),
        RuntimeKind::Host => preflight::host_compiler(library)?,
    }
    let (path, version) = (library.path.as_deref().unwrap_or(Path::new("")), library.functions.version()?);
    tracing::info!(target: "nvte_ep", path = %path.display(), version, "NCCL EP");
    Ok(library)
}

/// An error of the group's creation, with the reason that a library has for refusing the NCCL that runs.
pub(super) fn explain_refusal(error: Error, library: &NcclEpLibrary, nccl: i32) -> Error {
    // InvalidUsage is all that a refused NCCL version comes back as; the library's reason goes to stderr.
    let refused = matches!(&error, Error::Library { code, .. } if *code == i64::from(b::ncclInvalidUsage));
    match library.version_gate(nccl).filter(|_| refused) {
        Some(problem) => Error::Preflight { problem: error.to_string(), remedy: problem },
        None => error,
    }
}
