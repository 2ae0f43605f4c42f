//! The creation of a low-latency group, all ranks together.

use super::live::{Group, Live};
use crate::backend::agreement::Kind;
use crate::backend::communicator::Communicator;
use crate::backend::engine::low_latency::{Candidate, Machine};
use crate::backend::fork;
use crate::backend::joint;
use crate::backend::registry::Slot;
use crate::backend::residency::Residency;
use crate::backend::watchdog;
use crate::config::{LlConfig, LlRequest};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::preflight::{self, RankLocation};
use lru::LruCache;
use rustc_hash::FxBuildHasher;
use std::num::NonZero;

/// Handles that are kept unless `NVTE_EP_HANDLE_CACHE_SIZE` says otherwise.
const HANDLES: usize = 8192;

/// The numbers that must be equal on all ranks, by name.
fn agreed(config: &LlConfig, options: &Options, nccl: i32) -> Vec<(String, u64)> {
    let LlConfig { ep_size: _, num_experts, max_tokens_per_rank, hidden_dim, num_topk, max_num_sms, max_token_dtype } =
        *config;
    let fields = [
        ("num_experts", num_experts.into()),
        ("max_tokens_per_rank", max_tokens_per_rank.into()),
        ("hidden_dim", hidden_dim.into()),
        ("num_topk", num_topk.into()),
        ("max_num_sms", max_num_sms.unwrap_or(0).into()),
        ("max_token_dtype", max_token_dtype as u64),
    ];
    let fields = fields.into_iter().map(|(name, value)| (format!("config->{name}"), value));
    let scale = ("option undocumented_scale".to_owned(), options.undocumented_scale.into());
    fields.chain([scale]).chain(joint::versions(nccl)).chain(preflight::agreed_variables()).collect()
}

/// Creates the low-latency group of the calling thread's current device over `comm`. Collective.
///
/// # Errors
/// A bad request, an unfit machine, ranks that disagree (then every rank gets the same text), or what NCCL EP reports.
///
/// # Safety
/// `comm` is null, or a live communicator that outlives the group.
pub unsafe fn ll_initialize(comm: Communicator, request: LlRequest, options: &Options) -> Result<()> {
    crate::log::start();
    fork::require_parent()?;
    let mark = fork::Mark::new()?;
    let env = Env::from_process()?;
    options.check_low_latency()?;
    let config = LlConfig::try_from(request)?;
    // SAFETY: the caller vouches for `comm`.
    let joint::Start { base, env, device, comm_facts } =
        unsafe { joint::Start::new(comm, config.ep_size, env, options) }?;
    let mut group = Slot::of(device).low_latency.lock();
    if group.is_some() {
        return Err(Error::State(format!(
            "device {device} has a low-latency group already: call nvte_ep_ext_ll_shutdown before initializing again"
        )));
    }
    let (facts, nccl) = (base.cuda.device_facts(device)?, base.nccl.version()?);
    let machine = Machine { base, env, device, facts, comm, comm_facts, nccl };
    // SAFETY: as above, and the communicator's device is current.
    *group = Some(unsafe { Live::create(machine, &config, options) }?);
    mark.publish();
    let LlConfig { ep_size, num_experts, max_tokens_per_rank, hidden_dim, num_topk, .. } = config;
    tracing::info!(
        target: "nvte_ep",
        device,
        rank = comm_facts.rank,
        ep_size,
        num_experts,
        max_tokens_per_rank,
        hidden_dim,
        num_topk,
        "low-latency group created, over NCCL EP"
    );
    Ok(())
}

impl Live {
    /// # Safety
    /// The machine's communicator is live, outlives the group, and its device is current.
    unsafe fn create(machine: Machine, config: &LlConfig, options: &Options) -> Result<Self> {
        let (base, device) = (machine.base, machine.device);
        let ready = Candidate::find(&machine)
            .and_then(|candidate| Ok((candidate, watchdog::Means::new(base, device, machine.env.timeout)?)));
        let asked = joint::Request {
            base,
            comm: machine.comm,
            comm_facts: machine.comm_facts,
            kind: Kind::LlRankInfo,
            timeout: machine.env.timeout,
            waits: ["all ranks to call nvte_ep_ext_ll_initialize", "all ranks to go on with nvte_ep_ext_ll_initialize"],
            agreed: agreed(config, options, machine.nccl),
        };
        let fit = |places: &[RankLocation]| preflight::ll_fit(config, options, places);
        // SAFETY: passed on.
        let joined = unsafe { joint::join(asked, ready, Candidate::location(&machine), fit) }?;
        let joint::Joined { ready: (candidate, means), fit: sms, places: _, progress, mut rendezvous } = joined;
        // SAFETY: passed on.
        let engine = unsafe { candidate.create(&machine, config, sms) };
        let engine = engine.and_then(|engine| Ok((engine.handle_bytes(config.num_topk)?, engine)));
        let (handle_bytes, engine) = match engine {
            Ok(created) => created,
            Err(error) => {
                rendezvous.close_after_failure();
                return Err(error);
            }
        };
        let watchdog = means.watch(progress, machine.env.shutdown_timeout, None);
        rendezvous.watch(watchdog.share());
        let limit = machine.env.handle_cache_size.limit(HANDLES).and_then(NonZero::new);
        let group = Group {
            base,
            env: machine.env,
            engine,
            rendezvous,
            handles: limit.map_or_else(
                || LruCache::unbounded_with_hasher(FxBuildHasher),
                |limit| LruCache::with_hasher(limit, FxBuildHasher),
            ),
            handle_bytes,
            staged: None,
            left: Vec::new(),
            residency: Residency::new(device),
            stream: None,
        };
        Ok(Self { watchdog, group })
    }
}
