//! The rules of MXFP8: rows with a scale for every 32 values.
#![forbid(unsafe_code)]

use super::args::Prepared;
use super::rows::{require_prepared_rows, require_row_budget};
use crate::config::{Dialect, GroupConfig, Transfer};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::TensorView;

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
pub(super) fn require_mxfp8_source(tensor: &TensorView, group: &GroupConfig, prepared: &Prepared) -> Result<usize> {
    let (rows, width) = tensor.matrix("[T, hidden_dim]")?;
    tensor.require_dtype(&[DType::Float8E4M3, DType::Float8E5M2])?;
    require_prepared_rows(tensor, rows, prepared)?;
    let multiple = group.limits.mxfp8_elements_multiple;
    if width == 0 || !width.is_multiple_of(multiple) {
        let required = format!("must have a row width that is a multiple of {multiple} in MXFP8");
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
pub(super) fn require_same_scaling(tokens: &TensorView, recv: &mut TensorView, group: &GroupConfig) -> Result<()> {
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
