//! The per-step operations: their arguments by name, and every rule that can be checked before anything is enqueued.
//!
//! NCCL EP (0.1.0) asserts, throws, reads out of bounds or returns an error after its kernels ran where these rules are
//! broken; `check` therefore comes first and touches neither memory nor communication. Shapes: T = tokens of this rank
//! in this step, H = hidden size, K = top_k, C = max_recv_tokens_per_rank. Receive-side tensors may have more than C
//! rows; the rows from C on are neither read nor written. In eager mode C is what the caller allocated, at least the
//! step's total.
#![forbid(unsafe_code)]

use crate::config::{Dialect, GroupConfig, LayerConfig, RecvCapacity, Transfer};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::progress::{Call, Step};
use crate::tensor::{Shape, TensorView};

/// What the last prepare of a layer left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prepared {
    /// T of that step.
    pub num_tokens: usize,
    /// Data type of its `topk_idx`.
    pub index_dtype: DType,
    /// Rows that this rank receives, padding included; none where the host has not read it, which only eager mode does.
    pub recv_total: Option<u64>,
}

/// Arguments of prepare.
#[derive(Debug, Clone, Copy)]
pub struct Prepare {
    /// `[T, K]` int64 or int32; an index that is no expert routes nowhere.
    pub topk_idx: TensorView,
    /// `[local experts]` int32 or int64; receives the padded row count of every local expert's slab.
    pub token_counts: Option<TensorView>,
    /// `[1]`, dtype of `token_counts`; receives the sum of all slabs' rows, before any drop.
    pub total: Option<TensorView>,
}

/// Arguments of dispatch.
#[derive(Debug, Clone, Copy)]
pub struct Dispatch {
    /// `[T, K]`, as given to prepare; its contents are not read again.
    pub topk_idx: Option<TensorView>,
    /// `[T, H]`.
    pub tokens: TensorView,
    /// `[T, K]` float32; none = only rows move.
    pub topk_weights: Option<TensorView>,
    /// `[C, H]`; receives the rows.
    pub recv_tokens: TensorView,
    /// `[C]` float32; receives each row's weight. Present exactly if `topk_weights` is.
    pub recv_topk_weights: Option<TensorView>,
}

/// Arguments of combine.
#[derive(Debug, Clone, Copy)]
pub struct Combine {
    /// `[C, H]`.
    pub expert_out: TensorView,
    /// `[T, H]`; receives the sum over each token's rows.
    pub result: TensorView,
}

/// Arguments of the gradient of dispatch.
#[derive(Debug, Clone, Copy)]
pub struct DispatchBwd {
    /// `[C, H]`: gradient of `recv_tokens`.
    pub grad: TensorView,
    /// `[C]` float32: gradient of `recv_topk_weights`; none = rows only.
    pub g_recv_topk_weights: Option<TensorView>,
    /// `[T, H]`; receives the gradient of `tokens`.
    pub grad_tokens: TensorView,
    /// `[T, K]` float32; receives the gradient of `topk_weights`. Present exactly if `g_recv_topk_weights` is.
    pub grad_topk_weights: Option<TensorView>,
}

/// Arguments of the gradient of combine.
#[derive(Debug, Clone, Copy)]
pub struct CombineBwd {
    /// `[T, H]`: gradient of `result`; may be MXFP8.
    pub grad: TensorView,
    /// `[C, H]`; receives the gradient of `expert_out`, zeroes in the padding.
    pub grad_expert_out: TensorView,
}

/// A call's tensors that may lie in symmetric memory.
pub(crate) trait Payloads {
    /// The call.
    const CALL: Call;
    /// What the call is, for the comparison with the other ranks'.
    fn step(&self, layer: &LayerConfig) -> Step;
    /// All of them; first the rows that peers reach in zero-copy groups. The others are this rank's alone.
    fn payloads(&mut self) -> [Option<&mut TensorView>; 4];
}

impl Payloads for Dispatch {
    const CALL: Call = Call::Dispatch;

    fn step(&self, layer: &LayerConfig) -> Step {
        step(Self::CALL, layer, &self.tokens, self.topk_weights.is_some())
    }

    fn payloads(&mut self) -> [Option<&mut TensorView>; 4] {
        let (weights, recv_weights) = (self.topk_weights.as_mut(), self.recv_topk_weights.as_mut());
        [Some(&mut self.recv_tokens), Some(&mut self.tokens), weights, recv_weights]
    }
}

impl Payloads for Combine {
    const CALL: Call = Call::Combine;

    fn step(&self, layer: &LayerConfig) -> Step {
        step(Self::CALL, layer, &self.result, false)
    }

    fn payloads(&mut self) -> [Option<&mut TensorView>; 4] {
        [Some(&mut self.expert_out), Some(&mut self.result), None, None]
    }
}

impl Payloads for DispatchBwd {
    const CALL: Call = Call::DispatchBwd;

    fn step(&self, layer: &LayerConfig) -> Step {
        step(Self::CALL, layer, &self.grad_tokens, self.grad_topk_weights.is_some())
    }

    fn payloads(&mut self) -> [Option<&mut TensorView>; 4] {
        let (recv_weights, weights) = (self.g_recv_topk_weights.as_mut(), self.grad_topk_weights.as_mut());
        [Some(&mut self.grad), Some(&mut self.grad_tokens), recv_weights, weights]
    }
}

impl Payloads for CombineBwd {
    const CALL: Call = Call::CombineBwd;

    fn step(&self, layer: &LayerConfig) -> Step {
        step(Self::CALL, layer, &self.grad, false)
    }

    fn payloads(&mut self) -> [Option<&mut TensorView>; 4] {
        [Some(&mut self.grad_expert_out), Some(&mut self.grad), None, None]
    }
}

#[inline]
fn step(call: Call, layer: &LayerConfig, rows: &TensorView, weights: bool) -> Step {
    let size = rows.shape.sizes().last().copied().unwrap_or(0);
    Step { call, top_k: layer.top_k, size, dtype: Some(rows.dtype), weights }
}

impl Prepare {
    /// What the call is, for the comparison with the other ranks'.
    pub(crate) fn step(&self, layer: &LayerConfig) -> Step {
        Step { call: Call::Prepare, top_k: layer.top_k, size: 0, dtype: None, weights: false }
    }

    /// Checks every rule.
    ///
    /// # Errors
    /// The first broken one.
    pub fn check(&self, group: &GroupConfig, layer: &LayerConfig) -> Result<Prepared> {
        let (rows, columns) = self.topk_idx.matrix("[T, top_k]")?;
        self.topk_idx.require_dtype(&[DType::Int64, DType::Int32])?;
        require_top_k(&self.topk_idx, columns, layer)?;
        if rows > group.max_tokens_per_rank as usize {
            let required = format!("must have at most max_tokens_per_rank rows, {}", group.max_tokens_per_rank);
            return Err(Error::argument(self.topk_idx.name, required, rows));
        }
        self.topk_idx.require_element_storage()?;
        if let Some(counts) = &self.token_counts {
            let length = counts.vector("[num_local_experts]")?;
            counts.require_dtype(&[DType::Int32, DType::Int64])?;
            if length < group.local_experts() as usize {
                let required = format!("must have an entry for each of the {} local experts", group.local_experts());
                return Err(Error::argument(counts.name, required, length));
            }
            counts.require_element_storage()?;
        }
        if let Some(total) = &self.total {
            if total.vector("[1]")? == 0 {
                return Err(Error::argument(total.name, "must have an entry", 0));
            }
            total.require_dtype(&[DType::Int32, DType::Int64])?;
            if let Some(counts) = &self.token_counts {
                total.require_dtype_of(counts)?;
            }
            total.require_element_storage()?;
        }
        Ok(Prepared { num_tokens: rows, index_dtype: self.topk_idx.dtype, recv_total: None })
    }
}

impl Dispatch {
    /// Checks every rule and cuts the receive-side tensors to C rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(&mut self, group: &GroupConfig, layer: &LayerConfig, prepared: Prepared) -> Result<()> {
        let width = match self.tokens.scales {
            None => require_source_rows(&self.tokens, group, &prepared)?,
            Some(_) => require_mxfp8_source(&self.tokens, group, &prepared)?,
        };
        if let Some(topk_idx) = &self.topk_idx {
            let (rows, columns) = topk_idx.matrix("[T, top_k]")?;
            require_top_k(topk_idx, columns, layer)?;
            require_prepared_rows(topk_idx, rows, &prepared)?;
            if topk_idx.dtype != prepared.index_dtype {
                let required = format!("must have the dtype given to nvte_ep_prepare, {}", prepared.index_dtype);
                return Err(Error::argument(topk_idx.name, required, topk_idx.dtype));
            }
        }
        require_recv_rows(&mut self.recv_tokens, width, group, &prepared, Side::Written)?;
        self.recv_tokens.require_dtype_of(&self.tokens)?;
        require_same_scaling(&self.tokens, &mut self.recv_tokens, group)?;
        if self.topk_weights.is_some() {
            stand_in_for_nothing(&mut self.recv_topk_weights, "recv_topk_weights", &self.recv_tokens);
        }
        match (&self.topk_weights, &mut self.recv_topk_weights) {
            (None, None) => {}
            (Some(weights), Some(recv_weights)) => {
                if self.topk_idx.is_none() {
                    return Err(Error::argument("topk_idx", "must be given with topk_weights", "a null tensor"));
                }
                require_weights(weights, layer, &prepared)?;
                require_recv_weights(recv_weights, &self.recv_tokens, group)?;
            }
            (Some(_), None) => return Err(missing("recv_topk_weights", "topk_weights")),
            (None, Some(_)) => return Err(missing("topk_weights", "recv_topk_weights")),
        }
        Ok(())
    }
}

/// A rank that receives nothing in eager mode passes weights of no entries, which may look like no tensor at all.
#[inline]
fn stand_in_for_nothing(weights: &mut Option<TensorView>, name: &'static str, rows_of: &TensorView) {
    if weights.is_none() && rows_of.shape.sizes().first() == Some(&0) {
        let shape = Shape::vector(0);
        *weights = Some(TensorView { name, dtype: DType::Float32, shape, data: 0, window: None, scales: None });
    }
}

/// One of a pair of optional tensors without the other.
fn missing(argument: &'static str, other: &str) -> Error {
    Error::argument(argument, format!("must be given when {other} is"), "a null tensor")
}

impl Combine {
    /// Checks every rule and cuts the receive-side tensors to C rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(&mut self, group: &GroupConfig, prepared: Prepared) -> Result<()> {
        let width = require_source_rows(&self.result, group, &prepared)?;
        require_plain(&self.expert_out)?;
        require_recv_rows(&mut self.expert_out, width, group, &prepared, Side::Read)?;
        self.result.require_dtype_of(&self.expert_out)?;
        Ok(())
    }
}

impl DispatchBwd {
    /// Checks every rule and cuts the receive-side tensors to C rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(&mut self, group: &GroupConfig, layer: &LayerConfig, prepared: Prepared) -> Result<()> {
        let width = require_source_rows(&self.grad_tokens, group, &prepared)?;
        require_plain(&self.grad)?;
        require_recv_rows(&mut self.grad, width, group, &prepared, Side::Read)?;
        self.grad_tokens.require_dtype_of(&self.grad)?;
        // The backward kernels clear and fill as many staging rows as grad has, unchecked (nccl_ep 0.1.0).
        if group.recv_capacity == RecvCapacity::Eager && self.grad.shape.sizes()[0] as u64 > group.internal_rows() {
            let most = group.internal_rows();
            let required =
                format!("must have at most ep_size * max_tokens_per_rank * num_topk rows, {most}, in eager mode");
            return Err(Error::argument(self.grad.name, required, format!("{:?}", self.grad.shape)).with_remedy(
                "the padding takes the step beyond that: initialize with a larger num_topk, or lower the alignment",
            ));
        }
        if self.grad_topk_weights.is_some() {
            stand_in_for_nothing(&mut self.g_recv_topk_weights, "g_recv_topk_weights", &self.grad);
        }
        match (&mut self.g_recv_topk_weights, &self.grad_topk_weights) {
            (None, None) => {}
            (Some(recv_weights), Some(weights)) => {
                require_recv_weights(recv_weights, &self.grad, group)?;
                require_weights(weights, layer, &prepared)?;
            }
            (Some(_), None) => return Err(missing("grad_topk_weights", "g_recv_topk_weights")),
            (None, Some(_)) => return Err(missing("g_recv_topk_weights", "grad_topk_weights")),
        }
        Ok(())
    }
}

impl CombineBwd {
    /// Checks every rule and cuts the receive-side tensors to C rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(&mut self, group: &GroupConfig, prepared: Prepared) -> Result<()> {
        let width = match self.grad.scales {
            None => require_source_rows(&self.grad, group, &prepared)?,
            Some(_) => require_mxfp8_source(&self.grad, group, &prepared)?,
        };
        require_recv_rows(&mut self.grad_expert_out, width, group, &prepared, Side::Written)?;
        self.grad_expert_out.require_dtype_of(&self.grad)?;
        require_same_scaling(&self.grad, &mut self.grad_expert_out, group)?;
        Ok(())
    }
}

fn require_top_k(tensor: &TensorView, columns: usize, layer: &LayerConfig) -> Result<()> {
    if columns == layer.top_k as usize {
        return Ok(());
    }
    let required = format!("must have the registered top_k, {}, columns", layer.top_k);
    Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
}

fn require_prepared_rows(tensor: &TensorView, rows: usize, prepared: &Prepared) -> Result<()> {
    if rows == prepared.num_tokens {
        return Ok(());
    }
    let required = format!("must have as many rows as the prepared topk_idx, {}", prepared.num_tokens);
    Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
}

/// A tensor that is summed, or its gradient: NCCL EP combines no scaled rows.
fn require_plain(tensor: &TensorView) -> Result<()> {
    if tensor.scales.is_none() {
        return Ok(());
    }
    let required = "must be unscaled (NVTE_DELAYED_TENSOR_SCALING); scaled rows are moved, not summed";
    Err(Error::argument(tensor.name, required, "MXFP8"))
}

/// A plain `[T, H]` token tensor of this rank; returns H.
fn require_source_rows(tensor: &TensorView, group: &GroupConfig, prepared: &Prepared) -> Result<usize> {
    let (rows, width) = tensor.matrix("[T, hidden_dim]")?;
    require_plain(tensor)?;
    tensor.require_dtype(&[DType::BFloat16, DType::Float16, DType::Float32])?;
    require_prepared_rows(tensor, rows, prepared)?;
    let bytes = tensor.dtype.bytes(width);
    require_row_budget(tensor, bytes, group)?;
    // Rows move by 16-byte copies, and the combine kernels take elements by 8.
    if width == 0 || !bytes.is_multiple_of(16) || !width.is_multiple_of(8) {
        let required = "must have a row width that is a multiple of 8 elements and of 16 bytes";
        return Err(Error::argument(tensor.name, required, format!("{width} elements of {}", tensor.dtype)));
    }
    tensor.require_row_storage()?;
    Ok(width)
}

/// Values that share one scale in MXFP8.
const MXFP8_BLOCK: usize = 32;

/// A tensor's scales as a tensor of their own, under their argument's name.
#[inline]
pub(crate) fn scales_of(tensor: &TensorView) -> Option<TensorView> {
    tensor.scales.as_ref()?;
    tensor.scale_tensor(match tensor.name {
        "tokens" => "tokens.rowwise_scale_inv",
        "recv_tokens" => "recv_tokens.rowwise_scale_inv",
        "grad" => "grad.rowwise_scale_inv",
        "grad_expert_out" => "grad_expert_out.rowwise_scale_inv",
        _ => "rowwise_scale_inv",
    })
}

/// An MXFP8 `[T, H]` token tensor of this rank; returns H.
#[inline(never)]
fn require_mxfp8_source(tensor: &TensorView, group: &GroupConfig, prepared: &Prepared) -> Result<usize> {
    let (rows, width) = tensor.matrix("[T, hidden_dim]")?;
    tensor.require_dtype(&[DType::Float8E4M3, DType::Float8E5M2])?;
    require_prepared_rows(tensor, rows, prepared)?;
    // Scales travel as rows of their own, by 16-byte copies like the data.
    if width == 0 || !width.is_multiple_of(16 * MXFP8_BLOCK) {
        let required = format!("must have a row width that is a multiple of {} in MXFP8", 16 * MXFP8_BLOCK);
        let found = format!("{width} elements, so rows of {} scales", width.div_ceil(MXFP8_BLOCK));
        return Err(Error::argument(tensor.name, required, found)
            .with_remedy("scale rows move by 16-byte copies; dispatch in bfloat16 for this width"));
    }
    require_row_budget(tensor, width + width / MXFP8_BLOCK, group)?;
    tensor.require_row_storage()?;
    let scales = scales_of(tensor).expect("a caller saw the scales");
    require_scales(&scales, rows, width)?;
    Ok(width)
}

fn require_scales(scales: &TensorView, rows: usize, width: usize) -> Result<()> {
    scales.require_dtype(&[DType::Float8E8M0])?;
    let found = scales.matrix("[rows, hidden_dim / 32]")?;
    if found != (rows, width / MXFP8_BLOCK) {
        let required = format!("must have shape [{rows}, {}], unpadded and unswizzled", width / MXFP8_BLOCK);
        return Err(Error::argument(scales.name, required, format!("{:?}", scales.shape)));
    }
    scales.require_row_storage()
}

/// Received rows are scaled exactly if the sent ones are; cuts the receive-side scales as their data were cut.
fn require_same_scaling(tokens: &TensorView, recv: &mut TensorView, group: &GroupConfig) -> Result<()> {
    let Some(scales) = scales_of(recv) else {
        if tokens.scales.is_none() {
            return Ok(());
        }
        let required = format!("must be MXFP8 (NVTE_MXFP8_1D_SCALING), as {} is", tokens.name);
        return Err(Error::argument(recv.name, required, "unscaled"));
    };
    if tokens.scales.is_none() {
        return Err(Error::argument(recv.name, format!("must be unscaled, as {} is", tokens.name), "MXFP8"));
    }
    require_recv_scales(recv, scales, group)
}

/// The receive-side scales of a tensor that was checked and cut.
#[inline(never)]
fn require_recv_scales(recv: &mut TensorView, mut scales: TensorView, group: &GroupConfig) -> Result<()> {
    let (rows, width) = recv.matrix("[recv_T, hidden_dim]")?;
    let (scale_rows, _) = scales.matrix("[recv_T, hidden_dim / 32]")?;
    if scale_rows < rows {
        let required = format!("must have a row for each of the {rows} received rows");
        return Err(Error::argument(scales.name, required, format!("{:?}", scales.shape)));
    }
    scales.cut_rows(rows);
    require_scales(&scales, rows, width)?;
    if recv.window.is_some() != scales.window.is_some() {
        let found = if scales.window.is_some() { "one" } else { "NULL" };
        return Err(scale_window(&scales, "must be a window exactly if the rows have one", found, group));
    }
    if group.transfer == Transfer::ZeroCopy && scales.window.is_none() {
        return Err(scale_window(&scales, "must be a window, since the group is zero-copy", "NULL", group));
    }
    if let Some(kept) = &mut recv.scales {
        kept.shape = scales.shape;
    }
    Ok(())
}

/// Scales that lie, or do not lie, in a window against a rule.
fn scale_window(scales: &TensorView, required: &str, found: &str, group: &GroupConfig) -> Error {
    if group.dialect == Dialect::REGISTER_LAYER {
        // Its window structure has no place for the scales' window, which is looked up by their address.
        let required = "must lie in memory of nvte_ep_ext_symm_alloc or nvte_ep_ext_window_register exactly if \
                        the rows have a window";
        return Error::argument(scales.name, required, format!("address {:#x}", scales.data));
    }
    Error::argument(scales.window_field("window"), required, found)
}

/// No row may be longer than the staging buffers' rows.
fn require_row_budget(tensor: &TensorView, bytes: usize, group: &GroupConfig) -> Result<()> {
    let most = group.max_token_bytes();
    if bytes <= most {
        return Ok(());
    }
    let scales = if tensor.scales.is_some() { " with its scales" } else { "" };
    Err(Error::argument(
        tensor.name,
        format!(
            "must have rows of at most {most} bytes (the group's hidden_dim {} in {})",
            group.hidden_dim, group.max_token_dtype
        ),
        format!("{bytes} bytes{scales} ({:?} of {})", tensor.shape, tensor.dtype),
    )
    .with_remedy("initialize the group with the largest hidden_dim and widest max_token_dtype in use"))
}

/// Whether a receive-side tensor is written or read.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Written,
    Read,
}

/// A `[C, H]` tensor of the receiving side; cuts it to C rows.
fn require_recv_rows(
    tensor: &mut TensorView,
    width: usize,
    group: &GroupConfig,
    prepared: &Prepared,
    side: Side,
) -> Result<()> {
    let (rows, columns) = tensor.matrix("[recv_T, hidden_dim]")?;
    let kept = recv_rows(tensor, rows, group, prepared)?;
    if columns != width {
        let required = format!("must have the token rows' width, {width}");
        return Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)));
    }
    tensor.require_row_storage()?;
    if group.transfer == Transfer::ZeroCopy && tensor.window.is_none() {
        let use_ = if side == Side::Written { "written" } else { "read" };
        return Err(Error::argument(
            tensor.window_field("window"),
            format!("must be a window, since the group is zero-copy and peers' rows are {use_} in place"),
            "NULL",
        ));
    }
    tensor.cut_rows(kept);
    Ok(())
}

/// How many of a receive-side tensor's rows count.
fn recv_rows(tensor: &TensorView, rows: usize, group: &GroupConfig, prepared: &Prepared) -> Result<usize> {
    match group.recv_capacity {
        RecvCapacity::Fixed(capacity) if rows >= capacity as usize => Ok(capacity as usize),
        RecvCapacity::Fixed(capacity) => {
            let required = format!("must have at least max_recv_tokens_per_rank rows, {capacity}");
            Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
        }
        // NCCL EP of API 2 refuses this for dispatch alone; that of API 3 writes beyond the tensor, or traps.
        RecvCapacity::Eager => match prepared.recv_total {
            Some(total) if (rows as u64) < total => {
                let required = format!("must have at least the rows that this rank receives in this step, {total}");
                Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape))
                    .with_remedy("size it by nvte_ep_ext_recv_totals, or by the total that prepare reported"))
            }
            _ => Ok(rows),
        },
    }
}

/// A `[T, K]` float32 tensor of weights or their gradients.
fn require_weights(tensor: &TensorView, layer: &LayerConfig, prepared: &Prepared) -> Result<()> {
    let (rows, columns) = tensor.matrix("[T, top_k]")?;
    tensor.require_dtype(&[DType::Float32])?;
    require_prepared_rows(tensor, rows, prepared)?;
    require_top_k(tensor, columns, layer)?;
    tensor.require_element_storage()
}

/// A `[C]` float32 tensor of weights or their gradients; cuts it to the rows of `rows_of`, which was cut before.
fn require_recv_weights(tensor: &mut TensorView, rows_of: &TensorView, group: &GroupConfig) -> Result<()> {
    let length = tensor.vector("[recv_T]")?;
    tensor.require_dtype(&[DType::Float32])?;
    let (rows, _) = rows_of.matrix("[recv_T, hidden_dim]")?;
    if length < rows {
        return Err(match group.recv_capacity {
            RecvCapacity::Fixed(_) => {
                let required = format!("must have at least max_recv_tokens_per_rank entries, {rows}");
                Error::argument(tensor.name, required, length)
            }
            RecvCapacity::Eager => {
                let required = format!("must have an entry for each row of {}, {rows}", rows_of.name);
                Error::argument(tensor.name, required, length)
            }
        });
    }
    tensor.cut_rows(rows);
    tensor.require_element_storage()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::REQUEST;
    use crate::config::{Dialect, GroupRequest};
    use crate::tensor::tests::view;
    use crate::tensor::{Scales, Window};

    /// 4 ranks, 16 experts, 64 tokens, 512 receive rows, hidden 512, bfloat16.
    fn group() -> GroupConfig {
        GroupConfig::try_from(REQUEST).unwrap()
    }

    fn eager() -> GroupConfig {
        let request = GroupRequest { max_recv_tokens_per_rank: 0, num_topk: 2, dialect: Dialect::TE, ..REQUEST };
        GroupConfig::try_from(request).unwrap()
    }

    fn zero_copy() -> GroupConfig {
        GroupConfig::try_from(GroupRequest { zero_copy: 1, ..REQUEST }).unwrap()
    }

    fn layer() -> LayerConfig {
        LayerConfig::parse("layer_config", 2, 8).unwrap()
    }

    const PREPARED: Prepared = Prepared { num_tokens: 10, index_dtype: DType::Int64, recv_total: None };

    fn prepare() -> Prepare {
        Prepare {
            topk_idx: view("topk_idx", DType::Int64, &[10, 2]),
            token_counts: Some(view("token_counts", DType::Int32, &[4])),
            total: None,
        }
    }

    fn dispatch() -> Dispatch {
        Dispatch {
            topk_idx: Some(view("topk_idx", DType::Int64, &[10, 2])),
            tokens: view("tokens", DType::BFloat16, &[10, 512]),
            topk_weights: Some(view("topk_weights", DType::Float32, &[10, 2])),
            recv_tokens: view("recv_tokens", DType::BFloat16, &[512, 512]),
            recv_topk_weights: Some(view("recv_topk_weights", DType::Float32, &[512])),
        }
    }

    fn combine() -> Combine {
        Combine {
            expert_out: view("expert_out", DType::BFloat16, &[512, 512]),
            result: view("result", DType::BFloat16, &[10, 512]),
        }
    }

    fn dispatch_bwd() -> DispatchBwd {
        DispatchBwd {
            grad: view("grad", DType::BFloat16, &[512, 512]),
            g_recv_topk_weights: Some(view("g_recv_topk_weights", DType::Float32, &[512])),
            grad_tokens: view("grad_tokens", DType::BFloat16, &[10, 512]),
            grad_topk_weights: Some(view("grad_topk_weights", DType::Float32, &[10, 2])),
        }
    }

    fn combine_bwd() -> CombineBwd {
        CombineBwd {
            grad: view("grad", DType::BFloat16, &[10, 512]),
            grad_expert_out: view("grad_expert_out", DType::BFloat16, &[512, 512]),
        }
    }

    /// Calls as their checks leave them.
    impl Dispatch {
        fn checked(mut self, group: &GroupConfig, layer: &LayerConfig, prepared: Prepared) -> Result<Self> {
            self.check(group, layer, prepared).map(|()| self)
        }
    }

    impl Combine {
        fn checked(mut self, group: &GroupConfig, prepared: Prepared) -> Result<Self> {
            self.check(group, prepared).map(|()| self)
        }
    }

    impl DispatchBwd {
        fn checked(mut self, group: &GroupConfig, layer: &LayerConfig, prepared: Prepared) -> Result<Self> {
            self.check(group, layer, prepared).map(|()| self)
        }
    }

    impl CombineBwd {
        fn checked(mut self, group: &GroupConfig, prepared: Prepared) -> Result<Self> {
            self.check(group, prepared).map(|()| self)
        }
    }

    /// MXFP8 data with scales of `scale_sizes`.
    fn mxfp8(name: &'static str, sizes: &[usize], scale_sizes: &[usize]) -> TensorView {
        let shape = Shape::new(scale_sizes).unwrap();
        let scales = Scales { dtype: DType::Float8E8M0, shape, data: 0x2000, window: None };
        TensorView { scales: Some(scales), ..view(name, DType::Float8E4M3, sizes) }
    }

    fn mxfp8_dispatch() -> Dispatch {
        Dispatch {
            tokens: mxfp8("tokens", &[10, 512], &[10, 16]),
            recv_tokens: mxfp8("recv_tokens", &[512, 512], &[512, 16]),
            ..dispatch()
        }
    }

    /// A change, and what the refusal's text has to contain.
    type Case<C> = (fn(&mut C), &'static str);

    /// Applies each change to a fresh `call` and expects the refusal's text to contain what stands beside it.
    fn refused<C, R>(call: impl Fn() -> C, check: impl Fn(C) -> Result<R>, cases: &[Case<C>]) {
        check(call()).map(|_| ()).unwrap();
        for (change, expected) in cases {
            let mut changed = call();
            change(&mut changed);
            let text = check(changed).map(|_| ()).unwrap_err().to_string();
            assert!(text.contains(expected), "{text:?} lacks {expected:?}");
        }
    }

    #[test]
    fn prepare_rules() {
        assert_eq!(prepare().check(&group(), &layer()).unwrap(), PREPARED);
        refused(
            prepare,
            |call| call.check(&group(), &layer()),
            &[
                (|c| c.topk_idx = view("topk_idx", DType::Int64, &[20]), "topk_idx must be 2D [T, top_k], got 1D [20]"),
                (
                    |c| c.topk_idx = view("topk_idx", DType::Int64, &[10, 3]),
                    "topk_idx must have the registered top_k, 2, columns, got [10, 3]",
                ),
                (
                    |c| c.topk_idx = view("topk_idx", DType::Int64, &[65, 2]),
                    "topk_idx must have at most max_tokens_per_rank rows, 64, got 65",
                ),
                (|c| c.topk_idx.dtype = DType::Float32, "topk_idx must have dtype int64 or int32, got float32"),
                (|c| c.topk_idx.data = 0, "topk_idx must have data"),
                (|c| c.topk_idx.data = 4, "topk_idx must start at a multiple of 8 bytes, got address 0x4"),
                (
                    |c| c.token_counts = Some(view("token_counts", DType::Int32, &[3])),
                    "token_counts must have an entry for each of the 4 local experts, got 3",
                ),
                (
                    |c| c.token_counts = Some(view("token_counts", DType::Float32, &[4])),
                    "token_counts must have dtype int32 or int64, got float32",
                ),
                (
                    |c| c.total = Some(view("total", DType::Int64, &[1])),
                    "total must have the dtype of token_counts, int32, got int64",
                ),
                (|c| c.total = Some(view("total", DType::Int32, &[0])), "total must have an entry, got 0"),
                (|c| c.total = Some(view("total", DType::Int32, &[1, 1])), "total must be 1D [1], got 2D [1, 1]"),
            ],
        );
    }

    #[test]
    fn no_tokens_and_no_data_are_fine() {
        let mut call = prepare();
        call.topk_idx = view("topk_idx", DType::Int32, &[0, 2]);
        (call.topk_idx.data, call.token_counts) = (0, None);
        let prepared = call.check(&group(), &layer()).unwrap();
        assert_eq!(prepared, Prepared { num_tokens: 0, index_dtype: DType::Int32, recv_total: None });
        let mut call = combine();
        call.result = view("result", DType::BFloat16, &[0, 512]);
        call.result.data = 0;
        call.checked(&group(), prepared).unwrap();
    }

    #[test]
    fn dispatch_rules() {
        refused(
            dispatch,
            |call| call.checked(&group(), &layer(), PREPARED),
            &[
                (
                    |c| c.tokens = view("tokens", DType::BFloat16, &[5120]),
                    "tokens must be 2D [T, hidden_dim], got 1D [5120]",
                ),
                (
                    |c| c.tokens = view("tokens", DType::BFloat16, &[1, 10, 512]),
                    "tokens must be 2D [T, hidden_dim], got 3D [1, 10, 512]",
                ),
                (
                    |c| c.tokens = view("tokens", DType::BFloat16, &[9, 512]),
                    "tokens must have as many rows as the prepared topk_idx, 10, got [9, 512]",
                ),
                (
                    |c| c.tokens = view("tokens", DType::Float32, &[10, 512]),
                    "tokens must have rows of at most 1024 bytes (the group's hidden_dim 512 in bfloat16), got 2048 bytes",
                ),
                (
                    |c| c.tokens = view("tokens", DType::BFloat16, &[10, 4]),
                    "multiple of 8 elements and of 16 bytes, got 4",
                ),
                (
                    |c| c.tokens = view("tokens", DType::BFloat16, &[10, 0]),
                    "multiple of 8 elements and of 16 bytes, got 0",
                ),
                (
                    |c| c.tokens.dtype = DType::Float8E4M3,
                    "tokens must have dtype bfloat16 or float16 or float32, got float8_e4m3",
                ),
                (|c| c.tokens.data = 0x1008, "tokens must start at a multiple of 16 bytes, got address 0x1008"),
                (
                    |c| c.recv_tokens = view("recv_tokens", DType::BFloat16, &[512 * 512]),
                    "recv_tokens must be 2D [recv_T, hidden_dim], got 1D [262144]",
                ),
                (
                    |c| c.recv_tokens = view("recv_tokens", DType::BFloat16, &[511, 512]),
                    "recv_tokens must have at least max_recv_tokens_per_rank rows, 512, got [511, 512]",
                ),
                (
                    |c| c.recv_tokens = view("recv_tokens", DType::BFloat16, &[512, 256]),
                    "recv_tokens must have the token rows' width, 512, got [512, 256]",
                ),
                (
                    |c| c.recv_tokens.dtype = DType::Float16,
                    "recv_tokens must have the dtype of tokens, bfloat16, got float16",
                ),
                (|c| c.recv_tokens.data = 0, "recv_tokens must have data"),
                (
                    |c| c.topk_weights = Some(view("topk_weights", DType::BFloat16, &[10, 2])),
                    "topk_weights must have dtype float32, got bfloat16",
                ),
                (
                    |c| c.topk_weights = Some(view("topk_weights", DType::Float32, &[10, 4])),
                    "topk_weights must have the registered top_k, 2, columns, got [10, 4]",
                ),
                (
                    |c| c.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[511])),
                    "recv_topk_weights must have at least max_recv_tokens_per_rank entries, 512, got 511",
                ),
                (
                    |c| c.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[512, 1])),
                    "recv_topk_weights must be 1D [recv_T], got 2D [512, 1]",
                ),
                (|c| c.recv_topk_weights = None, "recv_topk_weights must be given when topk_weights is"),
                (|c| c.topk_weights = None, "topk_weights must be given when recv_topk_weights is"),
                (|c| c.topk_idx = None, "topk_idx must be given with topk_weights"),
                (
                    |c| c.topk_idx = Some(view("topk_idx", DType::Int32, &[10, 2])),
                    "topk_idx must have the dtype given to nvte_ep_prepare, int64, got int32",
                ),
            ],
        );
    }

    #[test]
    fn larger_receive_buffers_are_cut() {
        let mut call = dispatch();
        call.recv_tokens = view("recv_tokens", DType::BFloat16, &[1024, 512]);
        call.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[2000]));
        let call = call.checked(&group(), &layer(), PREPARED).unwrap();
        assert_eq!(call.recv_tokens.shape.sizes(), [512, 512]);
        assert_eq!(call.recv_topk_weights.unwrap().shape.sizes(), [512]);
        let mut call = dispatch_bwd();
        call.grad = view("grad", DType::BFloat16, &[513, 512]);
        call.g_recv_topk_weights = Some(view("g_recv_topk_weights", DType::Float32, &[513]));
        let call = call.checked(&group(), &layer(), PREPARED).unwrap();
        assert_eq!(call.grad.shape.sizes(), [512, 512], "the kernels clear as many staging rows as grad has");
        assert_eq!(call.g_recv_topk_weights.unwrap().shape.sizes(), [512]);
    }

    #[test]
    fn combine_rules() {
        refused(
            combine,
            |call| call.checked(&group(), PREPARED),
            &[
                (
                    |c| c.result = view("result", DType::BFloat16, &[64, 512]),
                    "result must have as many rows as the prepared topk_idx, 10, got [64, 512]",
                ),
                (
                    |c| c.result.dtype = DType::Float16,
                    "result must have the dtype of expert_out, bfloat16, got float16",
                ),
                (
                    |c| c.expert_out = view("expert_out", DType::BFloat16, &[512, 1024]),
                    "expert_out must have the token rows' width, 512, got [512, 1024]",
                ),
                (
                    |c| c.expert_out = view("expert_out", DType::BFloat16, &[100, 512]),
                    "expert_out must have at least max_recv_tokens_per_rank rows, 512, got [100, 512]",
                ),
                (
                    |c| c.expert_out = mxfp8("expert_out", &[512, 512], &[512, 16]),
                    "expert_out must be unscaled (NVTE_DELAYED_TENSOR_SCALING); scaled rows are moved, not summed, got MXFP8",
                ),
                (|c| c.result.data = 8, "result must start at a multiple of 16 bytes"),
            ],
        );
    }

    #[test]
    fn gradient_rules() {
        refused(
            dispatch_bwd,
            |call| call.checked(&group(), &layer(), PREPARED),
            &[
                (
                    |c| c.grad_topk_weights = Some(view("grad_topk_weights", DType::Float32, &[10, 3])),
                    "grad_topk_weights must have the registered top_k, 2, columns, got [10, 3]",
                ),
                (
                    |c| c.g_recv_topk_weights = Some(view("g_recv_topk_weights", DType::Float32, &[10])),
                    "g_recv_topk_weights must have at least max_recv_tokens_per_rank entries, 512, got 10",
                ),
                (|c| c.g_recv_topk_weights = None, "g_recv_topk_weights must be given when grad_topk_weights is"),
                (|c| c.grad_topk_weights = None, "grad_topk_weights must be given when g_recv_topk_weights is"),
                (
                    |c| c.grad_tokens = view("grad_tokens", DType::Float16, &[10, 512]),
                    "grad_tokens must have the dtype of grad, bfloat16, got float16",
                ),
            ],
        );
        let call = DispatchBwd { g_recv_topk_weights: None, grad_topk_weights: None, ..dispatch_bwd() };
        call.checked(&group(), &layer(), PREPARED).unwrap();
        refused(
            combine_bwd,
            |call| call.checked(&group(), PREPARED),
            &[
                (
                    |c| c.grad = view("grad", DType::BFloat16, &[11, 512]),
                    "grad must have as many rows as the prepared topk_idx, 10, got [11, 512]",
                ),
                (
                    |c| c.grad_expert_out = mxfp8("grad_expert_out", &[512, 512], &[512, 16]),
                    "grad_expert_out must have the dtype of grad, bfloat16, got float8_e4m3",
                ),
                (
                    |c| c.grad = mxfp8("grad", &[10, 544], &[10, 17]),
                    "grad must have a row width that is a multiple of 512 in MXFP8, got 544 elements, so rows of 17 scales",
                ),
                (
                    |c| c.grad_expert_out.dtype = DType::Float32,
                    "grad_expert_out must have the dtype of grad, bfloat16, got float32",
                ),
                (
                    |c| c.grad_expert_out = view("grad_expert_out", DType::BFloat16, &[511, 512]),
                    "grad_expert_out must have at least max_recv_tokens_per_rank rows, 512, got [511, 512]",
                ),
            ],
        );
    }

    #[test]
    fn zero_copy_takes_windows() {
        let windowed = |mut tensor: TensorView| {
            (tensor.window, tensor.data) = (Window::new(9, 4096), 0);
            tensor
        };
        let text = dispatch().checked(&zero_copy(), &layer(), PREPARED).unwrap_err().to_string();
        assert!(text.starts_with("recv_tokens_win.window must be a window, since the group is zero-copy"), "{text}");
        let mut call = dispatch();
        call.recv_tokens = windowed(call.recv_tokens);
        call.checked(&zero_copy(), &layer(), PREPARED).unwrap();
        let text = combine().checked(&zero_copy(), PREPARED).unwrap_err().to_string();
        assert!(text.starts_with("expert_out_win.window must be a window"), "{text}");
        let mut call = combine();
        call.expert_out = windowed(call.expert_out);
        call.checked(&zero_copy(), PREPARED).unwrap();
    }

    #[test]
    fn mxfp8_rules() {
        refused(
            mxfp8_dispatch,
            |call| call.checked(&group(), &layer(), PREPARED),
            &[
                (
                    |c| c.recv_tokens.scales = None,
                    "recv_tokens must be MXFP8 (NVTE_MXFP8_1D_SCALING), as tokens is, got unscaled",
                ),
                (
                    |c| c.tokens = mxfp8("tokens", &[10, 512], &[12, 16]),
                    "tokens.rowwise_scale_inv must have shape [10, 16], unpadded and unswizzled, got [12, 16]",
                ),
                (
                    |c| c.recv_tokens = mxfp8("recv_tokens", &[512, 512], &[500, 16]),
                    "recv_tokens.rowwise_scale_inv must have a row for each of the 512 received rows, got [500, 16]",
                ),
                (
                    |c| c.tokens = mxfp8("tokens", &[10, 256], &[10, 8]),
                    "tokens must have a row width that is a multiple of 512 in MXFP8, got 256 elements, so rows of 8 scales",
                ),
                (
                    |c| c.tokens = mxfp8("tokens", &[10, 1024], &[10, 32]),
                    "got 1056 bytes with its scales ([10, 1024] of float8_e4m3)",
                ),
                (
                    |c| c.tokens.scales.as_mut().unwrap().dtype = DType::Float32,
                    "tokens.rowwise_scale_inv must have dtype float8_e8m0, got float32",
                ),
                (|c| c.tokens.scales.as_mut().unwrap().data = 0, "tokens.rowwise_scale_inv must have data"),
                (
                    |c| c.recv_tokens.dtype = DType::Float8E5M2,
                    "recv_tokens must have the dtype of tokens, float8_e4m3, got float8_e5m2",
                ),
                (
                    |c| c.tokens.dtype = DType::BFloat16,
                    "tokens must have dtype float8_e4m3 or float8_e5m2, got bfloat16",
                ),
            ],
        );
        let mut call = mxfp8_dispatch();
        call.recv_tokens = mxfp8("recv_tokens", &[600, 512], &[640, 16]);
        let scales = call.checked(&group(), &layer(), PREPARED).unwrap().recv_tokens.scales.unwrap();
        assert_eq!(scales.shape.sizes(), [512, 16]);
        let mut call = dispatch();
        call.recv_tokens = mxfp8("recv_tokens", &[512, 512], &[512, 16]);
        call.recv_tokens.dtype = DType::BFloat16;
        let text = call.checked(&group(), &layer(), PREPARED).unwrap_err().to_string();
        assert_eq!(text, "recv_tokens must be unscaled, as tokens is, got MXFP8");
    }

    #[test]
    fn eager_buffers_are_as_the_caller_sized_them() {
        let mut call = dispatch();
        call.recv_tokens = view("recv_tokens", DType::BFloat16, &[37, 512]);
        call.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[37]));
        let call = call.checked(&eager(), &layer(), PREPARED).unwrap();
        assert_eq!(call.recv_tokens.shape.sizes(), [37, 512]);
        let mut empty = dispatch();
        empty.recv_tokens = view("recv_tokens", DType::BFloat16, &[0, 512]);
        empty.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[0]));
        empty.recv_tokens.data = 0;
        empty.checked(&eager(), &layer(), PREPARED).unwrap();
        // The same, with weights that arrived as no tensor: still a forward pass on this rank, as on the others.
        let nothing = Dispatch { recv_topk_weights: None, ..empty };
        let nothing = nothing.checked(&eager(), &layer(), PREPARED).unwrap();
        assert_eq!(nothing.recv_topk_weights.unwrap().shape.sizes(), [0]);
        let mut call = DispatchBwd { g_recv_topk_weights: None, ..dispatch_bwd() };
        call.grad = view("grad", DType::BFloat16, &[0, 512]);
        let call = call.checked(&eager(), &layer(), PREPARED).unwrap();
        assert_eq!(call.g_recv_topk_weights.unwrap().shape.sizes(), [0]);
        // Exactly the step's total fits; one row less, in any call, does not.
        let total = |recv_total| Prepared { recv_total: Some(recv_total), ..PREPARED };
        let rows = |name| view(name, DType::BFloat16, &[37, 512]);
        let weights = Some(view("weights", DType::Float32, &[37]));
        let dispatch = Dispatch { recv_tokens: rows("recv_tokens"), recv_topk_weights: weights, ..dispatch() };
        let combine_37 = Combine { expert_out: rows("expert_out"), ..combine() };
        let dispatch_bwd_37 = DispatchBwd { grad: rows("grad"), g_recv_topk_weights: weights, ..dispatch_bwd() };
        let combine_bwd = CombineBwd { grad_expert_out: rows("grad_expert_out"), ..combine_bwd() };
        let texts = |total| {
            [
                dispatch.checked(&eager(), &layer(), total).err(),
                combine_37.checked(&eager(), total).err(),
                dispatch_bwd_37.checked(&eager(), &layer(), total).err(),
                combine_bwd.checked(&eager(), total).err(),
            ]
            .map(|error| error.map(|error| error.to_string()))
        };
        assert_eq!(texts(total(37)), [const { None }; 4]);
        let names = ["recv_tokens", "expert_out", "grad", "grad_expert_out"];
        for (text, name) in texts(total(38)).iter().zip(names) {
            let expected = format!(
                "{name} must have at least the rows that this rank receives in this step, 38, got [37, 512]; size it by \
                 nvte_ep_ext_recv_totals, or by the total that prepare reported"
            );
            assert_eq!(text.as_deref(), Some(&*expected));
        }
        let beyond = &[4 * 64 * 2 + 1, 512];
        let mut call = combine();
        call.expert_out = view("expert_out", DType::BFloat16, beyond);
        call.checked(&eager(), PREPARED).unwrap();
        let mut call = dispatch_bwd();
        call.grad = view("grad", DType::BFloat16, beyond);
        call.g_recv_topk_weights = Some(view("g_recv_topk_weights", DType::Float32, &beyond[..1]));
        let text = call.checked(&eager(), &layer(), PREPARED).unwrap_err().to_string();
        assert!(
            text.starts_with("grad must have at most ep_size * max_tokens_per_rank * num_topk rows, 512"),
            "{text}"
        );
        let mut call = dispatch_bwd();
        call.grad = view("grad", DType::BFloat16, &[37, 512]);
        call.g_recv_topk_weights = Some(view("g_recv_topk_weights", DType::Float32, &[36]));
        let text = call.checked(&eager(), &layer(), PREPARED).unwrap_err().to_string();
        assert_eq!(text, "g_recv_topk_weights must have an entry for each row of grad, 37, got 36");
    }
}
