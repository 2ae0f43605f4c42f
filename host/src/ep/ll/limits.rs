//! Sizes and limits of low-latency mode: the buffer that ranks send through, handle memory, and what its kernels can do.

use nvte_ep_bindings::{ncclEpPassDir_t, ncclInvalidUsage, ncclUnhandledCudaError};

use crate::device::SM_COUNT;
use crate::ep::desc::{self, Tensor, invalid};
use crate::fault::{Fault, Outcome};
use crate::rule::Rule;

/// Most experts for each multiprocessor.
const MAX_WARP_GROUPS: usize = 14;
/// Warps of a block.
const WARPS: usize = 32;
/// Largest top-k.
const MAX_TOP_K: usize = 31;
/// Expert numbers travel as 16 bits.
const MAX_EXPERTS: usize = 1 << 16;
/// Bytes of a row that a warp sums.
const BYTES_OF_WARP: usize = 1024;

/// Columns that combine's rows are a multiple of: a slot has 4 bytes for each 128 of them, and consists of units of 16 bytes.
pub const COLUMNS_OF_SLOT: usize = 512;

/// What the sizes depend on.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Ranks of the group.
    pub ranks: usize,
    /// Experts of the group.
    pub experts: usize,
    /// `max_dispatch_tokens_per_rank`.
    pub max_tokens: usize,
    /// `max_token_bytes`.
    pub max_token_bytes: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Whether the layout is rank-major.
    pub rank_major: bool,
}

impl Shape {
    /// Bytes of the buffer that a group needs for a handle, two banks and their signals. Parts that kernels could not address
    /// are an error.
    pub fn buffer_bytes(&self, function: &str) -> Outcome<usize> {
        let Self { ranks, experts, max_tokens, max_token_bytes, top_k, rank_major } = *self;
        let header = (4 + top_k * if rank_major { 8 } else { 2 }).next_multiple_of(16);
        let message = header + max_token_bytes;
        let slot = max_token_bytes + 4 * (max_token_bytes / 256);
        let senders = if rank_major { ranks } else { experts };
        let parts = [
            ("max_dispatch_tokens_per_rank x a message", max_tokens * message),
            ("ranks x max_dispatch_tokens_per_rank x a message", ranks * max_tokens * message),
            ("max_dispatch_tokens_per_rank x a slot of every sender", senders * max_tokens * slot),
            ("max_dispatch_tokens_per_rank x num_topk x a slot", max_tokens * top_k * slot),
        ];
        if let Some((name, bytes)) = parts.iter().find(|(_, bytes)| !bytes.is_multiple_of(16)) {
            return Err(invalid(format!(
                "{function}: the buffer's part of {name} has {bytes} bytes, not a multiple of 16 (max_token_bytes \
                 {max_token_bytes}, num_topk {top_k}): choose a max_token_bytes that is a multiple of 1024"
            )));
        }
        let [sent, received, to_combine, combined] = parts.map(|(_, bytes)| bytes);
        Ok(2 * (sent + received).max(to_combine + combined) + 2 * (4 * experts).next_multiple_of(128))
    }

    /// Bytes of the part of handle memory that says where received rows came from.
    pub fn source_bytes(&self) -> usize {
        (self.ranks * (1 + (self.top_k + 1) * self.max_tokens) * 4).next_multiple_of(256)
    }

    /// Bytes of handle memory.
    pub fn handle_bytes(&self) -> usize {
        self.source_bytes() + (self.experts * 8).next_multiple_of(256)
    }

    /// Fails where the kernels do not start.
    pub fn check_launch(&self, sms: usize, function: &str) -> Outcome<()> {
        let Self { experts, top_k, .. } = *self;
        let usage = |text: String| Err(Fault::nccl(ncclInvalidUsage, format!("{function}: {text}")));
        let groups = experts.div_ceil(sms);
        if groups > MAX_WARP_GROUPS {
            return usage(format!(
                "num_experts {experts} need at least {} multiprocessors, the group has {sms} (max_num_sms, \
                 NCCL_EP_COMM_SMS)",
                experts.div_ceil(MAX_WARP_GROUPS)
            ));
        }
        let warps = groups * (WARPS / groups);
        if top_k > MAX_TOP_K || top_k + 1 > warps {
            return usage(format!("num_topk {top_k} is larger than {}", MAX_TOP_K.min(warps - 1)));
        }
        if experts > MAX_EXPERTS {
            return usage(format!("num_experts {experts} is larger than {MAX_EXPERTS}"));
        }
        if experts.div_ceil(groups) < 2 {
            let text = format!("{function}: num_experts {experts}: the kernels need more than one block");
            return Err(Fault::nccl(ncclUnhandledCudaError, text).breaks(Rule::ArgumentValue));
        }
        Ok(())
    }
}

/// Fails where rows do not have a multiple of `step` columns.
pub fn check_columns(tensor: &Tensor, columns: usize, step: usize) -> Outcome<()> {
    if columns == 0 || !columns.is_multiple_of(step) {
        return Err(tensor.wrong(format!("must have a positive multiple of {step} columns in low-latency mode")));
    }
    Ok(())
}

/// Fails for a backward pass, which this mode does not have.
pub fn check_forward(direction: ncclEpPassDir_t, function: &str) -> Outcome<()> {
    if desc::is_forward(direction, function)? {
        return Ok(());
    }
    Err(Fault::nccl(ncclInvalidUsage, format!("{function}: low-latency mode has no backward pass")))
}

/// Whether the warps of a block can sum rows of so many bytes.
pub fn can_sum(row_bytes: usize) -> bool {
    row_bytes.div_ceil(BYTES_OF_WARP) < WARPS
}

/// Multiprocessors that a group's kernels use: all, `max_num_sms`, or what NCCL EP's variable says.
pub fn sms(max_num_sms: u32) -> usize {
    let all = SM_COUNT as usize;
    let given = std::env::var("NCCL_EP_COMM_SMS").ok().and_then(|value| value.trim().parse().ok());
    let given = given.filter(|sms| (1..=all).contains(sms));
    given.unwrap_or(if max_num_sms == 0 { all } else { max_num_sms as usize })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape =
        Shape { ranks: 8, experts: 64, max_tokens: 128, max_token_bytes: 14_336, top_k: 8, rank_major: false };

    #[test]
    fn buffers_of_the_worked_examples() {
        let mib = |shape: Shape| (shape.buffer_bytes("f").unwrap() + (1 << 19)) >> 20;
        assert_eq!(mib(SHAPE), 256);
        assert_eq!(mib(Shape { experts: 256, ..SHAPE }), 938);
        assert_eq!(mib(Shape { experts: 256, ranks: 64, ..SHAPE }), 938);
        assert_eq!(mib(Shape { rank_major: true, ..SHAPE }), 57);
        assert_eq!(mib(Shape { rank_major: true, ranks: 64, ..SHAPE }), 256);
    }

    #[test]
    fn parts_that_are_no_multiple_of_16_are_refused() {
        let odd = Shape { ranks: 1, experts: 1, max_tokens: 1, max_token_bytes: 2560, top_k: 1, rank_major: false };
        let text = odd.buffer_bytes("f").unwrap_err().text;
        assert!(
            text.starts_with("f: the buffer's part of max_dispatch_tokens_per_rank x a slot of every sender"),
            "{text}"
        );
        assert!(Shape { max_tokens: 2, ..odd }.buffer_bytes("f").is_ok());
    }

    #[test]
    fn launches_need_multiprocessors_and_warps() {
        let refused = |shape: Shape, sms: usize| shape.check_launch(sms, "f").err().map(|fault| fault.text);
        let experts = |experts| Shape { experts, ..SHAPE };
        assert_eq!(refused(experts(256), 19), None);
        assert!(refused(experts(256), 18).unwrap().contains("need at least 19 multiprocessors, the group has 18"));
        let top_k = |top_k| Shape { top_k, ..SHAPE };
        assert_eq!(refused(top_k(31), 132), None);
        assert!(refused(top_k(32), 132).unwrap().ends_with("num_topk 32 is larger than 31"));
        // 14 groups of 2 warps.
        assert_eq!(refused(Shape { experts: 256, top_k: 27, ..SHAPE }, 19), None);
        let text = refused(Shape { experts: 256, top_k: 28, ..SHAPE }, 19).unwrap();
        assert!(text.ends_with("num_topk 28 is larger than 27"), "{text}");
        assert!(refused(experts(1), 132).unwrap().contains("more than one block"));
    }

    #[test]
    fn widest_rows() {
        assert!(can_sum(31 * 1024) && !can_sum(31 * 1024 + 16) && !can_sum(16_384 * 2));
    }
}
