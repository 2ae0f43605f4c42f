//! The rules of one tensor, whichever operation it belongs to.
#![forbid(unsafe_code)]

use super::args::Prepared;
use crate::config::{GroupConfig, LayerConfig, RecvCapacity, Transfer};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::TensorView;

pub(super) fn require_top_k(tensor: &TensorView, columns: usize, layer: &LayerConfig) -> Result<()> {
    if columns == layer.top_k as usize {
        return Ok(());
    }
    let required = format!("must have the registered top_k, {}, columns", layer.top_k);
    Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
}

pub(super) fn require_prepared_rows(tensor: &TensorView, rows: usize, prepared: &Prepared) -> Result<()> {
    if rows == prepared.num_tokens {
        return Ok(());
    }
    let required = format!("must have as many rows as the prepared topk_idx, {}", prepared.num_tokens);
    Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
}

/// A tensor that is summed, or its gradient: NCCL EP combines no scaled rows.
pub(super) fn require_plain(tensor: &TensorView) -> Result<()> {
    if tensor.scales.is_none() {
        return Ok(());
    }
    let required = "must be unscaled (NVTE_DELAYED_TENSOR_SCALING); scaled rows are moved, not summed";
    Err(Error::argument(tensor.name, required, "MXFP8"))
}

/// A plain `[T, H]` token tensor of this rank; returns H.
pub(super) fn require_source_rows(tensor: &TensorView, group: &GroupConfig, prepared: &Prepared) -> Result<usize> {
    let (rows, width) = tensor.matrix("[T, hidden_dim]")?;
    require_plain(tensor)?;
    tensor.require_dtype(&[DType::BFloat16, DType::Float16, DType::Float32])?;
    require_prepared_rows(tensor, rows, prepared)?;
    let bytes = tensor.dtype.bytes(width);
    require_row_budget(tensor, bytes, group)?;
    let (row_bytes, elements) = (group.limits.row_bytes_multiple, group.limits.row_elements_multiple);
    // Powers of two, so that no call divides.
    if width == 0 || bytes & (row_bytes - 1) != 0 || width & (elements - 1) != 0 {
        let required =
            format!("must have a row width that is a multiple of {elements} elements and of {row_bytes} bytes");
        return Err(Error::argument(tensor.name, required, format!("{width} elements of {}", tensor.dtype)));
    }
    tensor.require_row_storage()?;
    Ok(width)
}

/// No row may be longer than the staging buffers' rows.
pub(super) fn require_row_budget(tensor: &TensorView, bytes: usize, group: &GroupConfig) -> Result<()> {
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
pub(super) enum Side {
    Written,
    Read,
}

/// A `[C, H]` tensor of the receiving side; cuts it to C rows.
pub(super) fn require_recv_rows(
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
        let remedy = format!("give both the same width; the group's hidden_dim is {}", group.hidden_dim);
        return Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)).with_remedy(remedy));
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
pub(super) fn require_weights(tensor: &TensorView, layer: &LayerConfig, prepared: &Prepared) -> Result<()> {
    let (rows, columns) = tensor.matrix("[T, top_k]")?;
    tensor.require_dtype(&[DType::Float32])?;
    require_prepared_rows(tensor, rows, prepared)?;
    require_top_k(tensor, columns, layer)?;
    tensor.require_element_storage()
}

/// A `[C]` float32 tensor of weights or their gradients; cuts it to the rows of `rows_of`, which was cut before.
pub(super) fn require_recv_weights(tensor: &mut TensorView, rows_of: &TensorView, group: &GroupConfig) -> Result<()> {
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
