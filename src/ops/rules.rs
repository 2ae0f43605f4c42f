//! Every rule about the arguments that can be checked before anything is enqueued.
//!
//! NCCL EP (0.1.0) asserts, throws, reads out of bounds or returns an error after its kernels ran where these rules are
//! broken; `check` therefore comes first and touches neither memory nor communication. Receive-side tensors may have more
//! than C rows; the rows from C on are neither read nor written. In eager mode C is what the caller allocated, at least the
//! step's total.
#![forbid(unsafe_code)]

use super::args::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare, Prepared};
use super::mxfp8::{require_mxfp8_source, require_same_scaling};
use super::rows::{
    Side, require_plain, require_prepared_rows, require_recv_rows, require_recv_weights, require_source_rows,
    require_top_k, require_weights,
};
use crate::config::{GroupConfig, LayerConfig, RecvCapacity};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Shape, TensorView};

impl Prepare {
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
                let remedy =
                    format!("a rank has num_experts / ep_size experts, {} / {}", group.num_experts, group.ep_size);
                return Err(Error::argument(counts.name, required, length).with_remedy(remedy));
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
        let bounded = group.limits.bounded_eager_gradient && group.recv_capacity == RecvCapacity::Eager;
        if bounded && self.grad.shape.sizes()[0] as u64 > group.internal_rows() {
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
