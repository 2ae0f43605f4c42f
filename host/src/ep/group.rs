//! EP groups: configuration checks and collective creation.

use std::collections::HashMap;
use std::mem::size_of;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::ThreadId;

use nvte_ep_bindings::*;
use parking_lot::Mutex;

use crate::acting;
use crate::batch;
use crate::channel::name_ranks;
use crate::check;
use crate::comm::Comm;
use crate::device::SM_COUNT;
use crate::domains;
use crate::ep::desc::invalid;
use crate::ep::ll::limits;
use crate::ep::ll::staged::LowLatency;
use crate::ep::memory_layout::{MemoryLayout, Rows};
use crate::fault::{Fault, Outcome};
use crate::graph;
use crate::inject::{self, Missing};
use crate::line::Line;
use crate::rule::Rule;
use crate::stats;

const FUNCTION: &str = "ncclEpCreateGroup";
/// Most ranks where duplicates are written.
const MAX_DUPLICATE_RANKS: usize = 128;

/// One rank of an EP group.
#[derive(Debug)]
pub struct Group {
    /// The communicator it spans.
    pub comm: Arc<Comm>,
    /// Its operations.
    pub line: Line,
    /// Ranks of a load/store domain.
    pub domain: usize,
    /// Experts of the group.
    pub experts: usize,
    /// Most tokens a rank dispatches.
    pub max_tokens: usize,
    /// Rows of the receive buffer; in eager mode a bound for them, without padding.
    pub capacity: usize,
    /// Whether the caller sizes the receive buffer after each UpdateHandle.
    pub eager: bool,
    /// Most bytes of a token row.
    pub max_token_bytes: usize,
    /// Largest top-k of a handle; 0 means not given.
    pub max_top_k: usize,
    /// Whether rows beyond the capacity are dropped.
    pub drop: bool,
    /// Whether dispatch writes into, and combine reads from, the peers' windows.
    pub zero_copy: bool,
    /// Whether a token's rows are written as duplicates of one (local dup), rather than permuted out of staging.
    pub duplicates: bool,
    /// What a group in low-latency mode has; `None` in high-throughput mode.
    pub low_latency: Option<Arc<LowLatency>>,
    /// The caller's allocator for handle memory.
    pub allocator: Option<Allocator>,
    /// Handles that are not destroyed.
    pub handles: AtomicUsize,
    destroyed: AtomicBool,
    /// The thread that is in a call about the group, and how often.
    user: Mutex<Option<(ThreadId, u32)>>,
}

/// A call about a group by the calling thread.
#[derive(Debug)]
pub struct Use<'a>(Option<&'a Group>);

impl Drop for Use<'_> {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let mut user = group.user.lock();
            *user = user.and_then(|(thread, calls)| Some((thread, calls.checked_sub(1).filter(|rest| *rest > 0)?)));
        }
    }
}

/// A caller's allocation functions.
#[derive(Clone, Copy, Debug)]
pub struct Allocator {
    /// Allocates.
    pub alloc: unsafe extern "C-unwind" fn(*mut *mut std::ffi::c_void, usize, *mut std::ffi::c_void) -> cudaError_t,
    /// Frees.
    pub free: unsafe extern "C-unwind" fn(*mut std::ffi::c_void, *mut std::ffi::c_void) -> cudaError_t,
    /// Passed to both.
    pub context: usize,
}

static GROUPS: LazyLock<Mutex<HashMap<usize, Arc<Group>>>> = LazyLock::new(Mutex::default);

/// An error for a use that NCCL EP has and this library lacks.
pub fn unsupported(what: impl std::fmt::Display) -> Fault {
    Fault::nccl(ncclInvalidUsage, format!("{what}: not supported by the host runtime"))
}

/// The configuration fields that must agree between ranks.
fn fields(config: &ncclEpGroupConfig_t) -> [(&'static str, u64); 14] {
    [
        ("algorithm", u64::from(config.algorithm)),
        ("num_experts", u64::from(config.num_experts)),
        ("max_dispatch_tokens_per_rank", u64::from(config.max_dispatch_tokens_per_rank)),
        ("max_recv_tokens_per_rank", u64::from(config.max_recv_tokens_per_rank)),
        ("max_token_bytes", u64::from(config.max_token_bytes)),
        ("rdma_buffer_size", config.rdma_buffer_size),
        ("num_qp_per_rank", u64::from(config.num_qp_per_rank)),
        ("num_channels", u64::from(config.num_channels)),
        ("max_num_sms", u64::from(config.max_num_sms)),
        ("enable_mask", u64::from(config.enable_mask)),
        ("timeout_ns", config.timeout_ns),
        ("zero_copy", u64::from(config.zero_copy)),
        ("overflow_policy", u64::from(config.overflow_policy)),
        ("num_topk", u64::from(config.num_topk)),
    ]
}

/// Rows that no routing exceeds, padding aside.
fn eager_capacity(config: &ncclEpGroupConfig_t, ranks: usize) -> usize {
    ranks * config.max_dispatch_tokens_per_rank as usize * config.num_topk.max(1) as usize
}

fn check(config: &ncclEpGroupConfig_t, ranks: usize) -> Outcome<()> {
    let wrong = |text: String| Err(invalid(format!("{FUNCTION}: {text}")));
    if !matches!(config.algorithm, NCCL_EP_ALGO_HIGH_THROUGHPUT | NCCL_EP_ALGO_LOW_LATENCY) {
        return wrong(format!("algorithm {} is unknown", config.algorithm));
    }
    if config.num_experts == 0 || config.max_token_bytes == 0 || config.max_dispatch_tokens_per_rank == 0 {
        return wrong("num_experts, max_token_bytes and max_dispatch_tokens_per_rank must not be 0".to_owned());
    }
    if config.alloc.alloc_fn.is_some() != config.alloc.free_fn.is_some() {
        let text = format!("{FUNCTION}: alloc_fn and free_fn must be given together");
        return Err(Fault::nccl(ncclInvalidUsage, text));
    }
    if config.max_num_sms > SM_COUNT as u32 {
        let text = format!("{FUNCTION}: max_num_sms {} of {SM_COUNT} SMs", config.max_num_sms);
        return Err(Fault::nccl(ncclInvalidUsage, text));
    }
    if config.num_topk > config.num_experts {
        return wrong(format!("num_topk {} is larger than num_experts {}", config.num_topk, config.num_experts));
    }
    if config.zero_copy > NCCL_EP_ZERO_COPY_ON {
        return wrong(format!("zero_copy {} is unknown", config.zero_copy));
    }
    if config.overflow_policy > NCCL_EP_OVERFLOW_DROP {
        return wrong(format!("overflow_policy {} is unknown", config.overflow_policy));
    }
    if !(config.num_experts as usize).is_multiple_of(ranks) {
        return wrong(format!("num_experts {} is not a multiple of the {ranks} ranks", config.num_experts));
    }
    if config.algorithm == NCCL_EP_ALGO_LOW_LATENCY {
        return if config.enable_mask == 0 { Ok(()) } else { Err(unsupported(format!("{FUNCTION}: enable_mask"))) };
    }
    check_high_throughput(config, ranks)
}

fn check_high_throughput(config: &ncclEpGroupConfig_t, ranks: usize) -> Outcome<()> {
    let wrong = |text: String| Err(invalid(format!("{FUNCTION}: {text}")));
    if !config.max_token_bytes.is_multiple_of(16) {
        return wrong(format!("max_token_bytes {} is not a multiple of 16", config.max_token_bytes));
    }
    let eager = config.max_recv_tokens_per_rank == 0;
    if eager && config.overflow_policy == NCCL_EP_OVERFLOW_DROP {
        return wrong("max_recv_tokens_per_rank 0 (eager mode) excludes the overflow policy DROP".to_owned());
    }
    if eager && u32::try_from(eager_capacity(config, ranks)).is_err() {
        return wrong(format!("eager mode needs {} rows, more than 32 bits hold", eager_capacity(config, ranks)));
    }
    if !eager && config.max_recv_tokens_per_rank < config.max_dispatch_tokens_per_rank {
        return wrong(format!(
            "max_recv_tokens_per_rank {} is less than max_dispatch_tokens_per_rank {}",
            config.max_recv_tokens_per_rank, config.max_dispatch_tokens_per_rank
        ));
    }
    Ok(())
}

/// Finds a field in which the ranks differ, and says which rank is the odd one.
fn disagreement(by_rank: &[Vec<u64>], names: &[&str]) -> Option<String> {
    (0..names.len()).find_map(|field| {
        let values: Vec<u64> = by_rank.iter().map(|values| values[field]).collect();
        let votes = |value: u64| values.iter().filter(|v| **v == value).count();
        // The most frequent value; of equally frequent ones that of the lowest rank.
        let common = values.iter().copied().rev().max_by_key(|value| votes(*value))?;
        let odd: Vec<usize> = (0..values.len()).filter(|rank| values[*rank] != common).collect();
        let first = odd.first()?;
        Some(format!(
            "{FUNCTION}: {} differs between ranks: {} has {}, the others have {common}",
            names[field],
            name_ranks(&odd),
            values[*first],
        ))
    })
}

/// An environment variable of NCCL EP that is a switch.
fn switched_on(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "on" | "true"))
}

/// Whether local dup is forced.
fn forced_duplicates() -> Outcome<bool> {
    match (switched_on("NCCL_EP_HT_EM_LOCAL_DUP"), switched_on("NCCL_EP_HT_EM_NVLINK_DUP")) {
        (true, true) => {
            let text = "NCCL_EP_HT_EM_LOCAL_DUP and NCCL_EP_HT_EM_NVLINK_DUP exclude each other";
            Err(Fault::nccl(ncclInvalidUsage, format!("{FUNCTION}: {text}")))
        }
        (false, true) => Err(unsupported(format!("{FUNCTION}: NCCL_EP_HT_EM_NVLINK_DUP"))),
        (forced, false) => Ok(forced),
    }
}

impl Group {
    /// `ncclEpCreateGroup`; collective over the communicator.
    pub fn create(comm: &Arc<Comm>, config: &ncclEpGroupConfig_t) -> Outcome<ncclEpGroup_t> {
        batch::refuse(FUNCTION)?;
        graph::refuse_device_wait(comm.device, FUNCTION)?;
        check(config, comm.ranks)?;
        let zero_copy = config.zero_copy == NCCL_EP_ZERO_COPY_ON;
        let low_latency = config.algorithm == NCCL_EP_ALGO_LOW_LATENCY;
        let duplicates = !low_latency && (forced_duplicates()? || zero_copy);
        if duplicates && comm.ranks > MAX_DUPLICATE_RANKS {
            let text = format!("{FUNCTION}: zero_copy ON with {} ranks, at most {MAX_DUPLICATE_RANKS}", comm.ranks);
            return Err(invalid(text));
        }
        let domain = domains::size(comm.ranks);
        if duplicates && domain < comm.ranks {
            return Err(unsupported(format!("{FUNCTION}: zero_copy ON over several NVLink domains")));
        }
        if domain < comm.ranks && inject::is_missing(Missing::Gin) {
            let text = format!("{FUNCTION}: {} NVLink domains and no GIN between them", comm.ranks / domain);
            return Err(Fault::nccl(ncclInvalidUsage, text));
        }
        let mut fields = fields(config).to_vec();
        fields.push(("NCCL_EP_HT_EM_LOCAL_DUP", u64::from(duplicates)));
        let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        let channel = comm.line.run(|channel| {
            let bytes: Vec<u8> = fields.iter().flat_map(|(_, value)| value.to_ne_bytes()).collect();
            channel.stage(bytes.len())?.copy_from_slice(&bytes);
            channel.exchange(FUNCTION, [0; 4], bytes.len())?;
            let by_rank = (0..channel.ranks())
                .map(|rank| {
                    let words = channel.offer(rank)?.bytes.as_chunks::<{ size_of::<u64>() }>().0;
                    Ok(words.iter().map(|word| u64::from_ne_bytes(*word)).collect())
                })
                .collect::<Outcome<Vec<Vec<u64>>>>()?;
            if let Some(text) = disagreement(&by_rank, &names) {
                return Err(invalid(text).breaks(Rule::ConfigDiffers));
            }
            let label = format!("EP group of {} ranks", channel.ranks());
            let all: Vec<usize> = (0..channel.ranks()).collect();
            channel.split(FUNCTION, &all, label)
        })?;
        // Every rank is a member.
        let channel = channel.ok_or_else(|| Fault::nccl(ncclInternalError, format!("{FUNCTION}: no channel")))?;
        let allocator = match (config.alloc.alloc_fn, config.alloc.free_fn) {
            (Some(alloc), Some(free)) => Some(Allocator { alloc, free, context: config.alloc.context as usize }),
            _ => None,
        };
        let line = Line::new(channel, Arc::clone(&comm.status));
        line.expect_order();
        let group = Arc::new(Self {
            comm: Arc::clone(comm),
            line,
            domain,
            experts: config.num_experts as usize,
            max_tokens: config.max_dispatch_tokens_per_rank as usize,
            capacity: match config.max_recv_tokens_per_rank {
                0 => eager_capacity(config, comm.ranks),
                rows => rows as usize,
            },
            eager: !low_latency && config.max_recv_tokens_per_rank == 0,
            max_token_bytes: config.max_token_bytes as usize,
            max_top_k: config.num_topk as usize,
            drop: config.overflow_policy == NCCL_EP_OVERFLOW_DROP,
            zero_copy,
            duplicates,
            low_latency: low_latency.then(|| {
                let sms = limits::sms(config.max_num_sms);
                Arc::new(LowLatency::new(config.rdma_buffer_size as usize, sms))
            }),
            allocator,
            handles: AtomicUsize::new(0),
            destroyed: AtomicBool::new(false),
            user: Mutex::default(),
        });
        let handle = Arc::as_ptr(&group) as usize;
        GROUPS.lock().insert(handle, group);
        stats::count(|s| &s.groups_created);
        Ok(handle as ncclEpGroup_t)
    }

    /// The group that a handle names.
    pub fn resolve(handle: ncclEpGroup_t, function: &str) -> Outcome<Arc<Group>> {
        let found = GROUPS.lock().get(&(handle as usize)).cloned();
        let group = found.ok_or_else(|| {
            invalid(format!("{function}: {handle:p} is not a live EP group")).breaks(Rule::DestroyedObject)
        })?;
        acting::act_as(group.comm.rank);
        Ok(group)
    }

    /// `ncclEpGroupDestroy`: waits for this rank's device only.
    pub fn destroy(handle: ncclEpGroup_t) -> Outcome<()> {
        if handle.is_null() {
            return Ok(());
        }
        let group = Self::resolve(handle, "ncclEpGroupDestroy")?;
        let _use = group.enter("ncclEpGroupDestroy")?;
        graph::refuse_device_wait(group.comm.device, "ncclEpGroupDestroy")?;
        if let Some(low_latency) = group.low_latency.as_ref().filter(|_| group.comm.device.sticky().is_none()) {
            low_latency.refuse_staged("ncclEpGroupDestroy")?;
        }
        group.comm.device.synchronize();
        group.check_unused()?;
        // In low-latency mode the ranks meet, while they can.
        let can_meet = group.comm.device.sticky().is_none() && !group.comm.line.is_closed();
        let met = if group.low_latency.is_some() && can_meet {
            group.line.run(|channel| channel.exchange("ncclEpGroupDestroy", [0; 4], 0))
        } else {
            Ok(())
        };
        group.line.close();
        if GROUPS.lock().remove(&(handle as usize)).is_some() {
            group.destroyed.store(true, Ordering::Relaxed);
            stats::count(|s| &s.groups_destroyed);
        }
        met.and_then(|()| group.comm.device.check())
    }

    /// Enters a call about the group; NCCL EP takes no lock for its callers.
    pub fn enter(&self, function: &str) -> Outcome<Use<'_>> {
        let own = std::thread::current().id();
        let mut user = self.user.lock();
        match *user {
            Some((thread, _)) if thread != own => {
                drop(user);
                let text = format!("{function}: ep_group is in a call of another thread");
                check::breach(Rule::OneThread, text).map(|()| Use(None))
            }
            _ => {
                *user = Some((own, user.map_or(1, |(_, calls)| calls + 1)));
                Ok(Use(Some(self)))
            }
        }
    }

    /// Reports what still needs the group that is about to be destroyed; after an error nobody can finish any more.
    fn check_unused(&self) -> Outcome<()> {
        if self.comm.device.sticky().is_some() {
            return Ok(());
        }
        self.check_comm("ncclEpGroupDestroy")?;
        let handles = self.handles.load(Ordering::Relaxed);
        if handles > 0 {
            let text = format!("ncclEpGroupDestroy: ep_group has {handles} handles that are not destroyed");
            check::breach(Rule::LiveHandles, text)?;
        }
        // In low-latency mode the end is collective.
        let busy = if self.low_latency.is_some() { Vec::new() } else { self.line.busy() };
        if !busy.is_empty() {
            let text = format!("ncclEpGroupDestroy: ep_group is still used by {}", name_ranks(&busy));
            check::breach(Rule::PeersBusy, text)?;
        }
        Ok(())
    }

    /// Reports a use after the communicator was destroyed.
    pub fn check_comm(&self, function: &str) -> Outcome<()> {
        if !self.comm.line.is_closed() || self.comm.device.sticky().is_some() {
            return Ok(());
        }
        let text = format!("{function}: the communicator of ep_group has been destroyed before it");
        check::breach(Rule::LiveHandles, text)
    }

    /// Fails once the group is destroyed; on a GPU that would be a use after free.
    pub fn check_alive(&self, function: &str) -> Outcome<()> {
        if self.destroyed.load(Ordering::Relaxed) {
            let text = format!("{function}: the handle's EP group has been destroyed");
            return Err(Fault::nccl(ncclInvalidUsage, text).breaks(Rule::DestroyedObject));
        }
        Ok(())
    }

    /// Rows that a handle's routing may use: in eager mode padding comes on top of the capacity.
    pub fn row_limit(&self, alignment: usize) -> usize {
        let padding = if self.eager && !self.duplicates {
            self.experts / self.comm.ranks * alignment.saturating_sub(1)
        } else {
            0
        };
        self.capacity + padding
    }

    /// Layout of the handle memory for a top-k.
    pub fn memory_layout(&self, top_k: usize, layout: Layout) -> MemoryLayout {
        let kind = match layout {
            Layout::Flat => Rows::Flat,
            Layout::ExpertMajor if self.duplicates => Rows::Duplicates,
            Layout::ExpertMajor => Rows::Permuted,
        };
        MemoryLayout::new((self.comm.ranks, self.domain), self.experts, self.max_tokens, top_k, self.capacity, kind)
    }
}

/// How received rows lie in a receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// A row for each token and local expert, zone after zone.
    ExpertMajor,
    /// A row for each token, by source rank and row.
    Flat,
}

/// The layout with this NCCL EP number, if high-throughput mode has it.
pub fn layout_of(layout: ncclEpLayout_t, function: &str) -> Outcome<Layout> {
    match layout {
        NCCL_EP_LAYOUT_EXPERT_MAJOR => Ok(Layout::ExpertMajor),
        NCCL_EP_LAYOUT_FLAT => Ok(Layout::Flat),
        NCCL_EP_LAYOUT_UNSET => Err(invalid(format!("{function}: the layout is not set"))),
        NCCL_EP_LAYOUT_RANK_MAJOR => Err(invalid(format!("{function}: high-throughput mode has no rank-major layout"))),
        other => Err(invalid(format!("{function}: layout {other} is unknown"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_odd_rank_is_named() {
        let by_rank = [vec![1, 8], vec![1, 9], vec![1, 8]];
        let text = disagreement(&by_rank, &["a", "b"]).unwrap();
        assert!(text.ends_with("b differs between ranks: rank 1 has 9, the others have 8"), "{text}");
        assert_eq!(disagreement(&by_rank[..1], &["a", "b"]), None);
    }
}
