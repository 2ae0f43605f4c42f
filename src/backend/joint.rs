//! What all ranks do together before any of them creates a group: each says what it wants, what it is and whether it can; then all
//! go on, or none does.

use super::agreement::{self, Kind, RankInfo, Rendezvous};
use super::communicator::Communicator;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::preflight::{self, RankLocation};
use crate::progress::Progress;
use crate::sys::nccl::CommFacts;
use crate::sys::{self, Base};
use parking_lot::Mutex;
use std::any::Any;
use std::time::Duration;

/// What every creation of a group begins with.
pub(super) struct Start {
    pub(super) base: &'static Base,
    /// With the options' limits of time.
    pub(super) env: Env,
    /// The current device, which the communicator is of.
    pub(super) device: i32,
    pub(super) comm_facts: CommFacts,
}

impl Start {
    /// # Errors
    /// No communicator, one of another size, device or NCCL than there is, or no CUDA.
    ///
    /// # Safety
    /// `comm` is null or live.
    pub(super) unsafe fn new(comm: Communicator, ep_size: u32, mut env: Env, options: &Options) -> Result<Self> {
        if comm.0 == 0 {
            let required = format!("must be an ncclComm_t over the group's {ep_size} ranks");
            return Err(Error::argument("ep_comm", required, "NULL"));
        }
        env.timeout = options.timeout.unwrap_or(env.timeout);
        env.shutdown_timeout = options.shutdown_timeout.unwrap_or(env.shutdown_timeout);
        let base = sys::base(&env)?;
        let device = base.cuda.current_device()?;
        // SAFETY: the caller vouches for `comm`.
        let comm_facts = unsafe { base.nccl.comm_facts(comm.as_raw()) };
        let comm_facts = comm_facts.map_err(|error| preflight::foreign_communicator(base, error))?;
        preflight::communicator(&comm_facts, ep_size, device)?;
        Ok(Self { base, env, device, comm_facts })
    }
}

/// What a rank asks the others for.
pub(super) struct Request {
    pub(super) base: &'static Base,
    pub(super) comm: Communicator,
    pub(super) comm_facts: CommFacts,
    /// Which group it is about.
    pub(super) kind: Kind,
    /// How long it waits for them; none = for ever.
    pub(super) timeout: Option<Duration>,
    /// What it waits for, first and then, in the text of a time-out.
    pub(super) waits: [&'static str; 2],
    /// The numbers that must be equal on all ranks, by name.
    pub(super) agreed: Vec<(String, u64)>,
}

/// What the ranks came to.
pub(super) struct Joined<R, F> {
    /// What this rank had found before.
    pub(super) ready: R,
    /// What follows from all locations.
    pub(super) fit: F,
    /// Of each rank.
    pub(super) places: Vec<RankLocation>,
    pub(super) progress: Progress,
    pub(super) rendezvous: Rendezvous,
}

/// Meets the other ranks. A rank that is not `ready` says so to all of them, rather than leave them waiting for it.
///
/// # Errors
/// Its own error, or that of another rank; ranks that differ; what `fit` refuses; a rank that does not come. Then the same on
/// every rank, as far as it came.
///
/// # Safety
/// The communicator is live, and its device is current.
pub(super) unsafe fn join<R: Send + 'static, F>(
    request: Request,
    ready: Result<R>,
    place: RankLocation,
    fit: impl FnOnce(&[RankLocation]) -> Result<F>,
) -> Result<Joined<R, F>> {
    let Request { base, comm, comm_facts, kind, timeout, waits: [to_come, to_go_on], agreed } = request;
    let (names, equal): (Vec<_>, Vec<_>) = agreed.into_iter().unzip();
    let mut own = place.words();
    own.push(random());
    let own = RankInfo { equal, own, refusal: ready.as_ref().err().map(Error::to_string) };
    let rendezvous = Rendezvous::new(base, comm, comm_facts)?;
    // SAFETY: the caller vouches for the communicator.
    let infos = match unsafe { rendezvous.exchange(kind, &own, timeout, to_come) } {
        Ok(infos) => infos,
        Err(error) => {
            if matches!(error, Error::TimeOut { .. }) {
                // What was given up on may still use its memory, and freeing any waits for it.
                leave(ready);
            } else {
                rendezvous.close_after_failure();
            }
            return Err(error);
        }
    };
    let (keys, places): (Vec<u64>, Vec<RankLocation>) = infos
        .iter()
        .map(|info| {
            let (key, place) = info.own.split_last().expect("as many numbers as were asked for");
            (*key, RankLocation::from_words(place))
        })
        .unzip();
    let agreed = agreement::compare(&names, &infos).and_then(|()| fit(&places)).and_then(|fit| {
        // All ranks come here or none does: what was compared is the same on all of them.
        let (own, key) = (comm_facts.rank as usize, keys[0]);
        let here = places.iter().map(|there| there.host == place.host).collect();
        let progress = Progress::join(key, own, here);
        // SAFETY: the caller vouches for the communicator.
        let confirmed = unsafe { rendezvous.confirm(timeout, to_go_on) };
        Progress::close_door(key);
        confirmed.map(|()| (fit, progress))
    });
    match (ready, agreed) {
        (Ok(ready), Ok((fit, progress))) => Ok(Joined { ready, fit, places, progress, rendezvous }),
        (ready, Err(error @ Error::TimeOut { .. })) => {
            leave(ready);
            Err(error)
        }
        (ready, agreed) => {
            rendezvous.close_after_failure();
            // A rank's own error reads the same on all ranks.
            Err(agreed.err().or(ready.err()).expect("one of them failed"))
        }
    }
}

/// The versions that must be equal on all ranks, by name.
pub(super) fn versions(nccl: i32) -> [(String, u64); 2] {
    let version = |part: &str| part.parse::<u64>().expect("Cargo's versions are numbers");
    let ours = version(env!("CARGO_PKG_VERSION_MAJOR")) << 32
        | version(env!("CARGO_PKG_VERSION_MINOR")) << 16
        | version(env!("CARGO_PKG_VERSION_PATCH"));
    [("NCCL version".to_owned(), nccl as u64), ("nvte-ep version".to_owned(), ours)]
}

/// Leaves what can be neither used nor freed to the end of the process, where leak checkers see whose it is.
fn leave<R: Send + 'static>(ready: Result<R>) {
    static LEFT: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());
    LEFT.lock().push(Box::new(ready));
}

/// A number that no other process makes.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() ^ u64::from(std::process::id())
}
