//! One rank's libraries, device and communicator, from the rendezvous to the end.

use crate::Outcome;
use crate::device::{Communicator, Device, unique_id};
use crate::library::{Library, PATH_VARIABLE};
use crate::progress::Progress;
use crate::rendezvous::Rendezvous;
use crate::report::RankReport;
use crate::routing::Problem;
use nvte_ep_core::env::{Env, RuntimeKind};
use nvte_ep_core::sys::{catch_foreign, nccl};
use std::path::{Path, PathBuf};

/// What a rank needs to know.
#[derive(Debug)]
pub struct Setup<'a> {
    /// The layer and its steps.
    pub problem: &'a Problem,
    /// This rank.
    pub rank: usize,
    /// Its number on this machine, which chooses the device.
    pub local_rank: usize,
    /// SM cap; 0 = the library's choice.
    pub max_sms: usize,
    /// Threads for experts and reference.
    pub threads: usize,
}

/// Where a rank is: its device and its peers.
#[derive(Debug)]
pub struct Location {
    /// The rank's device.
    pub device: Device,
    /// Over all ranks.
    pub communicator: Communicator,
}

/// What a rank works with.
#[derive(Debug)]
pub struct Session {
    /// libnvte_ep.so.
    pub library: Library,
    /// The rank's device.
    pub device: Device,
    /// Over all ranks.
    pub communicator: Communicator,
}

/// The library that the user names, if there is one.
pub fn named_library() -> Option<PathBuf> {
    std::env::var_os(PATH_VARIABLE).filter(|path| !path.is_empty()).map(Into::into)
}

impl Location {
    /// Takes the device and meets the other ranks, for a library in the file `library`; `report` learns of what is found.
    pub fn join(
        setup: &Setup,
        library: &Path,
        rendezvous: &Rendezvous,
        progress: &Progress,
        report: &mut RankReport,
    ) -> Outcome<Self> {
        let mut env = Env::from_process()?;
        report.library_path = library.display().to_string();
        if env.runtime == RuntimeKind::Host && env.host_lib.is_none() {
            // The library takes the host runtime beside itself; this program has to use the same one.
            env.host_lib =
                library.parent().map(|folder| folder.join("libnvte_ep_host.so")).filter(|path| path.exists());
        }
        let device = Device::open(&env, setup.local_rank)?;
        report.device = format!("{} ({}, {} SMs)", device.facts.name, device.ordinal, device.facts.sm_count);
        report.nccl = nccl::version_text(device.base.nccl.version()?);
        progress.at(0, "meeting the other ranks");
        let id = rendezvous.exchange(|| unique_id(device.base))?;
        progress.at(0, "joining the communicator");
        let communicator = Communicator::join(&device, id, setup.rank, setup.problem.ranks)?;
        Ok(Self { device, communicator })
    }
}

impl Session {
    /// Loads the libraries, takes the device and meets the other ranks; `report` learns of what is found.
    pub fn join(setup: &Setup, rendezvous: &Rendezvous, progress: &Progress, report: &mut RankReport) -> Outcome<Self> {
        progress.at(0, "loading libraries");
        let library = Library::load(named_library())?;
        report.library = library.extensions.version()?;
        let Location { device, communicator } = Location::join(setup, &library.path, rendezvous, progress, report)?;
        Ok(Self { library, device, communicator })
    }

    /// Ends the EP group, with all ranks.
    pub fn shutdown(&self) -> Outcome<()> {
        self.communicator.barrier(&self.device)?;
        let shutdown = self.library.functions.nvte_ep_shutdown;
        // SAFETY: takes nothing; no work is queued.
        Ok(catch_foreign("nvte_ep_shutdown", || unsafe { shutdown() })?)
    }

    /// Destroys the communicator.
    pub fn leave(self) -> Outcome<()> {
        self.communicator.leave()
    }
}

/// The file mapped into this process whose name contains `name`.
pub fn mapped_file(name: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().filter_map(|line| line.split_once('/')).map(|(_, path)| format!("/{path}"));
    path.into_iter().find(|path| path.rsplit('/').next().is_some_and(|file| file.contains(name)))
}
