//! The creation of a group, all ranks together.

use super::agreement::Kind;
use super::communicator::Communicator;
use super::engine::{Candidate, Choice, EngineKind, Fit, Machine};
use super::fork;
use super::joint;
use super::live::{Group, Live};
use super::registry::Slot;
use super::residency::Residency;
use super::routing::handles::Handles;
use super::stats::Stats;
use super::symm::Symm;
use super::watchdog;
use crate::config::{GroupConfig, GroupRequest, RecvCapacity, Transfer};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::preflight::{self, RankLocation};
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The numbers that must be equal on all ranks, by name.
fn agreed(kind: EngineKind, machine: &Machine<'_>) -> Vec<(String, u64)> {
    let Machine { config, options, nccl, .. } = machine;
    let recv_capacity = match config.recv_capacity {
        RecvCapacity::Eager => 0,
        RecvCapacity::Fixed(rows) => rows.into(),
    };
    let fields = [
        ("num_experts", config.num_experts.into()),
        ("max_tokens_per_rank", config.max_tokens_per_rank.into()),
        ("max_recv_tokens_per_rank", recv_capacity),
        ("hidden_dim", config.hidden_dim.into()),
        (config.dialect.sm_field, config.max_num_sms.unwrap_or(0).into()),
        ("max_token_dtype", config.max_token_dtype as u64),
        ("zero_copy", config.transfer as u64),
    ];
    // Fields in one ABI and options in the other.
    let by_dialect = [
        (config.dialect.num_topk.to_owned(), config.num_topk.unwrap_or(0).into()),
        (config.dialect.overflow.to_owned(), config.overflow as u64),
    ];
    // Those that have become fields of the configuration are compared as such.
    let options = [
        ("dispatch_sms", options.dispatch_sms.unwrap_or(0).into()),
        ("combine_sms", options.combine_sms.unwrap_or(0).into()),
        ("preprocess_sms", options.preprocess_sms.unwrap_or(0).into()),
        ("backend", kind as u64),
        ("deterministic", options.deterministic.map_or(2, u64::from)),
        ("symm_segment_bytes", options.symm_segment_bytes),
        ("undocumented_scale", options.undocumented_scale.into()),
    ];
    let options = options.into_iter().map(|(name, value)| (format!("option {name}"), value));
    let fields = fields.into_iter().map(|(name, value)| (format!("group_config.{name}"), value));
    let variables = preflight::agreed_variables();
    fields.chain(by_dialect).chain(options).chain(joint::versions(*nccl)).chain(variables).collect()
}

/// Creates the EP group of the calling thread's current device over `comm`. Collective.
///
/// # Errors
/// A bad request, an unfit machine, ranks that disagree (then every rank gets the same text), or what NCCL EP reports.
///
/// # Safety
/// `comm` is null, or a live communicator that outlives [`crate::backend::shutdown`].
pub unsafe fn initialize(comm: Communicator, request: GroupRequest, options: &Options) -> Result<()> {
    crate::log::start();
    fork::require_parent()?;
    let mark = fork::Mark::new()?;
    let env = Env::from_process()?;
    let request = options.apply(request)?;
    let choice = Choice::of(options, &env, request)?;
    // SAFETY: the caller vouches for `comm`.
    let joint::Start { base, env, device, comm_facts } =
        unsafe { joint::Start::new(comm, choice.config.ep_size, env, options) }?;
    // Held over the whole creation: a second initialize, or a shutdown, of this device waits for its outcome.
    let mut group = Slot::of(device).group.lock();
    if group.is_some() {
        return Err(Error::AlreadyInitialized { device });
    }
    let (facts, nccl) = (base.cuda.device_facts(device)?, base.nccl.version()?);
    let Choice { kind, config, reason, .. } = choice.settle(request, &facts, &comm_facts, nccl)?;
    tracing::info!(target: "nvte_ep", engine = kind.limits().name, reason, "engine");
    let machine = Machine { base, env, device, facts, comm, comm_facts, nccl, config, options };
    // SAFETY: as above, and the communicator's device is current.
    *group = Some(unsafe { Live::create(kind, machine) }?);
    mark.publish();
    let GroupConfig { ep_size, num_experts, max_tokens_per_rank, hidden_dim, max_token_dtype, .. } = config;
    let max_recv_tokens_per_rank = match config.recv_capacity {
        RecvCapacity::Fixed(rows) => rows,
        RecvCapacity::Eager => 0,
    };
    tracing::info!(
        target: "nvte_ep",
        device,
        rank = comm_facts.rank,
        ep_size,
        num_experts,
        max_tokens_per_rank,
        max_recv_tokens_per_rank,
        hidden_dim,
        max_token_dtype = %max_token_dtype,
        zero_copy = config.transfer == Transfer::ZeroCopy,
        native = kind == EngineKind::Native,
        "EP group created"
    );
    Ok(())
}

impl Live {
    /// # Safety
    /// The machine's communicator is live, outlives the group, and its device is current.
    unsafe fn create(kind: EngineKind, machine: Machine<'_>) -> Result<Self> {
        let Machine { base, device, comm, comm_facts, config, options, .. } = machine;
        // A rank that cannot go on says so to all of them, rather than leave them waiting for it.
        let ready = Candidate::find(kind, &machine)
            .and_then(|candidate| Ok((candidate, watchdog::Means::new(base, device, machine.env.timeout)?)));
        let place = Candidate::location(kind, &machine, ready.as_ref().ok().map(|(candidate, _)| candidate));
        let asked = joint::Request {
            base,
            comm,
            comm_facts,
            kind: Kind::RankInfo,
            timeout: machine.env.timeout,
            waits: ["all ranks to call nvte_ep_initialize", "all ranks to go on with nvte_ep_initialize"],
            agreed: agreed(kind, &machine),
        };
        let fit = |places: &[RankLocation]| Fit::of(kind, &config, options, places);
        // SAFETY: passed on.
        let joined = unsafe { joint::join(asked, ready, place, fit) }?;
        let joint::Joined { ready: (candidate, means), fit, places, progress, mut rendezvous } = joined;
        let env = &machine.env;
        // SAFETY: the caller vouches for the communicator and the current device.
        let engine = match unsafe { candidate.create(&machine, fit, &places, place) } {
            Ok(engine) => engine,
            Err(error) => {
                rendezvous.close_after_failure();
                return Err(error);
            }
        };
        let handles = Handles::new(config.relocation, env.handle_cache_size.limit(config.dialect.default_handle_limit));
        let watchdog = means.watch(progress, env.shutdown_timeout, engine.abort());
        rendezvous.watch(watchdog.share());
        static EPOCH: AtomicU64 = AtomicU64::new(0);
        let group = Group {
            symm: Symm::new(base, comm, device, options.symm_segment_bytes, env.timeout),
            base,
            env: machine.env,
            config,
            engine,
            rendezvous,
            layers: FxHashMap::default(),
            layer_configs: Vec::new(),
            handles,
            epoch: EPOCH.fetch_add(1, Ordering::Relaxed),
            residency: Residency::new(device),
            stream: None,
            stats: Stats::default(),
        };
        Ok(Live { watchdog, group })
    }
}
