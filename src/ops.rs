//! The per-step operations: their arguments by name, and every rule that can be checked before anything is enqueued.
//!
//! NCCL EP (0.1.0) asserts, throws, reads out of bounds or returns an error after its kernels ran where these rules are
//! broken; `check` therefore comes first and touches neither memory nor communication. Shapes: T = tokens of this rank
//! in this step, H = hidden size, K = top_k, C = max_recv_tokens_per_rank. Receive-side tensors may have more than C
//! rows; the rows from C on are neither read nor written.
#![forbid(unsafe_code)]

use crate::config::{GroupConfig, LayerConfig, SlabAlignment, Transfer};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::TensorView;

/// What the last prepare of a layer left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prepared {
    /// T of that step.
    pub num_tokens: usize,
    /// Data type of its `topk_idx`.
    pub index_dtype: DType,
}

/// Arguments of prepare.
#[derive(Debug, Clone, Copy)]
pub struct Prepare {
    /// [T, K] int64 or int32; a negative index routes nowhere.
    pub topk_idx: TensorView,
    /// [local experts] int32 or int64; receives the padded row count of every local expert's slab.
    pub token_counts: TensorView,
    /// Must be the registered alignment.
    pub alignment: SlabAlignment,
}

/// Arguments of dispatch.
#[derive(Debug, Clone, Copy)]
pub struct Dispatch {
    /// [T, K], as given to prepare; its contents are not read again.
    pub topk_idx: Option<TensorView>,
    /// [T, H].
    pub tokens: TensorView,
    /// [T, K] float32; none = only rows move.
    pub topk_weights: Option<TensorView>,
    /// [C, H]; receives the rows.
    pub recv_tokens: TensorView,
    /// [C] float32; receives each row's weight. Present exactly if `topk_weights` is.
    pub recv_topk_weights: Option<TensorView>,
}

/// Arguments of combine.
#[derive(Debug, Clone, Copy)]
pub struct Combine {
    /// [C, H].
    pub expert_out: TensorView,
    /// [T, H]; receives the sum over each token's rows.
    pub result: TensorView,
}

/// Arguments of the gradient of dispatch.
#[derive(Debug, Clone, Copy)]
pub struct DispatchBwd {
    /// [C, H]: gradient of `recv_tokens`.
    pub grad: TensorView,
    /// [C] float32: gradient of `recv_topk_weights`.
    pub g_recv_topk_weights: TensorView,
    /// [T, H]; receives the gradient of `tokens`.
    pub grad_tokens: TensorView,
    /// [T, K] float32; receives the gradient of `topk_weights`.
    pub grad_topk_weights: TensorView,
}

/// Arguments of the gradient of combine.
#[derive(Debug, Clone, Copy)]
pub struct CombineBwd {
    /// [T, H]: gradient of `result`.
    pub grad: TensorView,
    /// [C, H]; receives the gradient of `expert_out`, zeroes in the padding.
    pub grad_expert_out: TensorView,
}

impl Prepare {
    /// Checks every rule.
    ///
    /// # Errors
    /// The first broken one.
    pub fn check(&self, group: &GroupConfig, layer: &LayerConfig) -> Result<Prepared> {
        if self.alignment != layer.alignment {
            return Err(Error::argument(
                "dispatch_output_per_expert_alignment",
                format!("must equal the registered {}", layer.alignment.tokens()),
                self.alignment.tokens(),
            )
            .with_remedy("register another layer for another alignment"));
        }
        let (rows, columns) = self.topk_idx.matrix("[T, top_k]")?;
        self.topk_idx.require_dtype(&[DType::Int64, DType::Int32])?;
        require_top_k(&self.topk_idx, columns, layer)?;
        if rows > group.max_tokens_per_rank as usize {
            let required = format!("must have at most max_tokens_per_rank rows, {}", group.max_tokens_per_rank);
            return Err(Error::argument(self.topk_idx.name, required, rows));
        }
        self.topk_idx.require_element_storage()?;
        let counts = &self.token_counts;
        let length = counts.vector("[num_local_experts]")?;
        counts.require_dtype(&[DType::Int32, DType::Int64])?;
        if length < group.local_experts() as usize {
            let required = format!("must have an entry for each of the {} local experts", group.local_experts());
            return Err(Error::argument(counts.name, required, length));
        }
        counts.require_element_storage()?;
        Ok(Prepared { num_tokens: rows, index_dtype: self.topk_idx.dtype })
    }
}

impl Dispatch {
    /// Checks every rule; the result has its receive-side tensors cut to C rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(mut self, group: &GroupConfig, layer: &LayerConfig, prepared: Prepared) -> Result<Self> {
        let width = require_source_rows(&self.tokens, group, prepared)?;
        if let Some(topk_idx) = &self.topk_idx {
            let (rows, columns) = topk_idx.matrix("[T, top_k]")?;
            require_top_k(topk_idx, columns, layer)?;
            require_prepared_rows(topk_idx, rows, prepared)?;
            if topk_idx.dtype != prepared.index_dtype {
                let required = format!("must have the dtype given to nvte_ep_prepare, {}", prepared.index_dtype);
                return Err(Error::argument(topk_idx.name, required, topk_idx.dtype));
            }
        }
        require_recv_rows(&mut self.recv_tokens, width, group, Written::Yes)?;
        self.recv_tokens.require_dtype_of(&self.tokens)?;
        match (&self.topk_weights, &mut self.recv_topk_weights) {
            (None, None) => {}
            (Some(weights), Some(recv_weights)) => {
                if self.topk_idx.is_none() {
                    return Err(Error::argument("topk_idx", "must be given with topk_weights", "a null tensor"));
                }
                require_weights(weights, layer, prepared)?;
                require_recv_weights(recv_weights, group)?;
            }
            (Some(_), None) => {
                let required = "must be given when topk_weights is";
                return Err(Error::argument("recv_topk_weights", required, "a null tensor"));
            }
            (None, Some(_)) => {
                let required = "must be given when recv_topk_weights is";
                return Err(Error::argument("topk_weights", required, "a null tensor"));
            }
        }
        Ok(self)
    }
}

impl Combine {
    /// Checks every rule; the result has its receive-side tensors cut to C rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(mut self, group: &GroupConfig, prepared: Prepared) -> Result<Self> {
        let width = require_source_rows(&self.result, group, prepared)?;
        require_recv_rows(&mut self.expert_out, width, group, Written::No)?;
        self.result.require_dtype_of(&self.expert_out)?;
        Ok(self)
    }
}

impl DispatchBwd {
    /// Checks every rule; the result has its receive-side tensors cut to C rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(mut self, group: &GroupConfig, layer: &LayerConfig, prepared: Prepared) -> Result<Self> {
        let width = require_source_rows(&self.grad_tokens, group, prepared)?;
        require_recv_rows(&mut self.grad, width, group, Written::No)?;
        self.grad_tokens.require_dtype_of(&self.grad)?;
        require_recv_weights(&mut self.g_recv_topk_weights, group)?;
        require_weights(&self.grad_topk_weights, layer, prepared)?;
        Ok(self)
    }
}

impl CombineBwd {
    /// Checks every rule; the result has its receive-side tensors cut to C rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(mut self, group: &GroupConfig, prepared: Prepared) -> Result<Self> {
        let width = require_source_rows(&self.grad, group, prepared)?;
        require_recv_rows(&mut self.grad_expert_out, width, group, Written::Yes)?;
        self.grad_expert_out.require_dtype_of(&self.grad)?;
        Ok(self)
    }
}

fn require_top_k(tensor: &TensorView, columns: usize, layer: &LayerConfig) -> Result<()> {
    if columns == layer.top_k as usize {
        return Ok(());
    }
    let required = format!("must have the registered top_k, {}, columns", layer.top_k);
    Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
}

fn require_prepared_rows(tensor: &TensorView, rows: usize, prepared: Prepared) -> Result<()> {
    if rows == prepared.num_tokens {
        return Ok(());
    }
    let required = format!("must have as many rows as the prepared topk_idx, {}", prepared.num_tokens);
    Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
}

/// A [T, H] token tensor of this rank; returns H.
fn require_source_rows(tensor: &TensorView, group: &GroupConfig, prepared: Prepared) -> Result<usize> {
    let (rows, width) = tensor.matrix("[T, hidden_dim]")?;
    tensor.require_dtype(&[DType::BFloat16, DType::Float16, DType::Float32])?;
    require_prepared_rows(tensor, rows, prepared)?;
    let bytes = tensor.dtype.bytes(width);
    let most = group.max_token_bytes();
    if bytes > most {
        return Err(Error::argument(
            tensor.name,
            format!(
                "must have rows of at most {most} bytes (the group's hidden_dim {} in {})",
                group.hidden_dim, group.max_token_dtype
            ),
            format!("{bytes} bytes ({width} elements of {})", tensor.dtype),
        )
        .with_remedy("initialize the group with the largest hidden_dim and widest max_token_dtype in use"));
    }
    // Rows move by 16-byte copies, and the combine kernels take elements by 8.
    if width == 0 || !bytes.is_multiple_of(16) || !width.is_multiple_of(8) {
        let required = "must have a row width that is a multiple of 8 elements and of 16 bytes";
        return Err(Error::argument(tensor.name, required, format!("{width} elements of {}", tensor.dtype)));
    }
    tensor.require_row_storage()?;
    Ok(width)
}

/// Whether a receive-side tensor is an output, for the wording.
#[derive(Clone, Copy, PartialEq)]
enum Written {
    Yes,
    No,
}

/// A [C, H] tensor of the receiving side; cuts it to C rows.
fn require_recv_rows(tensor: &mut TensorView, width: usize, group: &GroupConfig, written: Written) -> Result<()> {
    let (rows, columns) = tensor.matrix("[recv_T, hidden_dim]")?;
    let capacity = group.recv_capacity as usize;
    if rows < capacity {
        let required = format!("must have at least max_recv_tokens_per_rank rows, {capacity}");
        return Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)));
    }
    if columns != width {
        let required = format!("must have the token rows' width, {width}");
        return Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)));
    }
    tensor.require_row_storage()?;
    if group.transfer == Transfer::ZeroCopy && tensor.window.is_none() {
        let use_ = if written == Written::Yes { "written" } else { "read" };
        return Err(Error::argument(
            format!("{}_win.window", tensor.name),
            format!("must be a window, since the group is zero-copy and peers' rows are {use_} in place"),
            "NULL",
        ));
    }
    *tensor = tensor.first_rows(capacity);
    Ok(())
}

/// A [T, K] float32 tensor of weights or their gradients.
fn require_weights(tensor: &TensorView, layer: &LayerConfig, prepared: Prepared) -> Result<()> {
    let (rows, columns) = tensor.matrix("[T, top_k]")?;
    tensor.require_dtype(&[DType::Float32])?;
    require_prepared_rows(tensor, rows, prepared)?;
    require_top_k(tensor, columns, layer)?;
    tensor.require_element_storage()
}

/// A [C] float32 tensor of weights or their gradients; cuts it to C entries.
fn require_recv_weights(tensor: &mut TensorView, group: &GroupConfig) -> Result<()> {
    let length = tensor.vector("[recv_T]")?;
    tensor.require_dtype(&[DType::Float32])?;
    let capacity = group.recv_capacity as usize;
    if length < capacity {
        let required = format!("must have at least max_recv_tokens_per_rank entries, {capacity}");
        return Err(Error::argument(tensor.name, required, length));
    }
    tensor.require_element_storage()?;
    *tensor = tensor.first_rows(capacity);
    Ok(())
}
