//! The operations of low-latency groups. Shapes: T = tokens of this rank in this step, H = hidden size, K = experts per token, L =
//! local experts, S = ep_size * max_tokens_per_rank rows of an expert's slab. NCCL EP takes no other shapes, and aborts over them.

use super::args::{Arguments, MOST_TENSORS};
use super::mxfp8::scales_of;
use crate::config::{LL_DTYPES, LL_ELEMENTS, LlConfig};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::progress::{Call, Step};
use crate::tensor::TensorView;

/// Values that share a scale where dispatch quantizes.
const BLOCK: usize = 128;
/// Values that share a scale in MXFP8.
const MXFP8_BLOCK: usize = 32;

/// Arguments of dispatch.
#[derive(Debug, Clone, Copy)]
pub struct LlDispatch {
    /// `[T, K]` int64 or int32; the kernels of combine read it again.
    pub topk_idx: TensorView,
    /// `[T, H]`.
    pub tokens: TensorView,
    /// `[L, S, H]`; receives each expert's rows, from the first on.
    pub recv_tokens: TensorView,
    /// `[L]` int32; receives the number of each expert's rows.
    pub counts: TensorView,
}

/// Arguments of combine.
#[derive(Debug, Clone, Copy)]
pub struct LlCombine {
    /// `[T, K]`, as given to dispatch.
    pub topk_idx: TensorView,
    /// `[T, K]` float32, applied to the rows.
    pub topk_weights: TensorView,
    /// `[L, S, H]`.
    pub expert_out: TensorView,
    /// `[T, H]`; receives the weighted sum over each token's rows.
    pub result: TensorView,
}

/// What a dispatch left for its combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LlDispatched {
    /// T.
    pub num_tokens: usize,
    /// K.
    pub top_k: u32,
    /// Data type of `topk_idx`.
    pub index_dtype: DType,
}

impl Arguments for LlDispatch {
    const CALL: Call = Call::LlDispatch;
    const WRITTEN: [bool; MOST_TENSORS] = [false, false, true, true];
    const WRITES_HANDLE: bool = true;

    fn tensors(&mut self) -> [Option<&mut TensorView>; MOST_TENSORS] {
        let Self { topk_idx, tokens, recv_tokens, counts } = self;
        [Some(topk_idx), Some(tokens), Some(recv_tokens), Some(counts)]
    }
}

impl Arguments for LlCombine {
    const CALL: Call = Call::LlCombine;
    const WRITTEN: [bool; MOST_TENSORS] = [false, false, false, true];

    fn tensors(&mut self) -> [Option<&mut TensorView>; MOST_TENSORS] {
        let Self { topk_idx, topk_weights, expert_out, result } = self;
        [Some(topk_idx), Some(topk_weights), Some(expert_out), Some(result)]
    }
}

impl LlDispatch {
    /// Checks every rule.
    ///
    /// # Errors
    /// The first broken one.
    pub fn check(&self, group: &LlConfig) -> Result<LlDispatched> {
        let (rows, top_k) = self.topk_idx.matrix("[T, top_k]")?;
        self.topk_idx.require_dtype(&[DType::Int64, DType::Int32])?;
        if !(1..=group.num_topk as usize).contains(&top_k) {
            let required = format!("must have 1 to num_topk columns, {}", group.num_topk);
            return Err(Error::argument(self.topk_idx.name, required, top_k));
        }
        if rows > group.max_tokens_per_rank as usize {
            let required = format!("must have at most max_tokens_per_rank rows, {}", group.max_tokens_per_rank);
            return Err(Error::argument(self.topk_idx.name, required, rows));
        }
        self.topk_idx.require_element_storage()?;
        let (token_rows, width) = self.tokens.matrix("[T, hidden_dim]")?;
        require_rows(&self.tokens, token_rows, rows, &self.topk_idx)?;
        require_slabs(&self.recv_tokens, width, group)?;
        match (&self.tokens.scales, &self.recv_tokens.scales) {
            (None, None) => {
                require_plain_row(&self.tokens, width, group)?;
                self.recv_tokens.require_dtype_of(&self.tokens)?;
            }
            (None, Some(_)) => self.require_quantized(width, group)?,
            (Some(_), _) => self.require_mxfp8(width, group)?,
        }
        self.tokens.require_row_storage()?;
        self.recv_tokens.require_row_storage()?;
        let length = self.counts.vector("[local experts]")?;
        self.counts.require_dtype(&[DType::Int32])?;
        if length != group.local_experts() as usize {
            let required = format!("must have an entry for each of the {} local experts", group.local_experts());
            return Err(Error::argument(self.counts.name, required, length));
        }
        self.counts.require_element_storage()?;
        Ok(LlDispatched { num_tokens: rows, top_k: top_k as u32, index_dtype: self.topk_idx.dtype })
    }

    /// bfloat16 rows that travel as `float8_e4m3` with a float32 scale for each 128 values.
    fn require_quantized(&self, width: usize, group: &LlConfig) -> Result<()> {
        let recv = &self.recv_tokens;
        recv.require_dtype(&[DType::Float8E4M3])?;
        if self.tokens.dtype != DType::BFloat16 {
            let required = "must be bfloat16 where recv_tokens has scales, which asks for quantized rows";
            return Err(Error::argument(self.tokens.name, required, self.tokens.dtype));
        }
        require_row(&self.tokens, width, width + 4 * (width / BLOCK), group)?;
        require_scales(recv, DType::Float32, &[sizes(recv)[0], sizes(recv)[1], width / BLOCK])
    }

    /// MXFP8 rows, which move as they are.
    fn require_mxfp8(&self, width: usize, group: &LlConfig) -> Result<()> {
        let (tokens, recv) = (&self.tokens, &self.recv_tokens);
        tokens.require_dtype(&[DType::Float8E4M3, DType::Float8E5M2])?;
        if recv.scales.is_none() {
            let required = "must have scales (NVTE_MXFP8_1D_SCALING), as tokens has";
            return Err(Error::argument(recv.name, required, "unscaled"));
        }
        recv.require_dtype_of(tokens)?;
        require_row(tokens, width, width + width / MXFP8_BLOCK, group)?;
        require_scales(tokens, DType::Float8E8M0, &[sizes(tokens)[0], width / MXFP8_BLOCK])?;
        require_scales(recv, DType::Float8E8M0, &[sizes(recv)[0], sizes(recv)[1], width / MXFP8_BLOCK])
    }
}

impl LlCombine {
    /// Checks every rule.
    ///
    /// # Errors
    /// The first broken one.
    pub fn check(&self, group: &LlConfig, dispatched: &LlDispatched) -> Result<()> {
        let LlDispatched { num_tokens, top_k, index_dtype } = *dispatched;
        let found = self.topk_idx.matrix("[T, top_k]")?;
        if found != (num_tokens, top_k as usize) || self.topk_idx.dtype != index_dtype {
            let required =
                format!("must be what nvte_ep_ext_ll_dispatch was given, [{num_tokens}, {top_k}] of {index_dtype}");
            let found = format!("{:?} of {}", self.topk_idx.shape, self.topk_idx.dtype);
            return Err(Error::argument(self.topk_idx.name, required, found));
        }
        self.topk_idx.require_element_storage()?;
        let found = self.topk_weights.matrix("[T, top_k]")?;
        self.topk_weights.require_dtype(&[DType::Float32])?;
        if found != (num_tokens, top_k as usize) {
            let required = format!("must have the shape of topk_idx, [{num_tokens}, {top_k}]");
            let found = format!("{:?}", self.topk_weights.shape);
            return Err(Error::argument(self.topk_weights.name, required, found));
        }
        self.topk_weights.require_element_storage()?;
        let (rows, width) = self.result.matrix("[T, hidden_dim]")?;
        require_rows(&self.result, rows, num_tokens, &self.topk_idx)?;
        for tensor in [&self.expert_out, &self.result] {
            if tensor.scales.is_some() {
                let required = "must be unscaled: combine sums bfloat16, float16 or float32 rows";
                return Err(Error::argument(tensor.name, required, "a tensor with scales"));
            }
        }
        require_slabs(&self.expert_out, width, group)?;
        require_plain_row(&self.result, width, group)?;
        self.expert_out.require_dtype_of(&self.result)?;
        self.expert_out.require_row_storage()?;
        self.result.require_row_storage()
    }
}

/// What all ranks' calls have to have in common, of rows of `tensor` with `top_k` experts each.
pub(crate) fn ll_step(call: Call, top_k: u32, tensor: &TensorView) -> Step {
    let size = tensor.shape.sizes().last().copied().unwrap_or(0);
    Step { call, top_k, size, dtype: Some(tensor.dtype), weights: false }
}

fn sizes(tensor: &TensorView) -> &[usize] {
    tensor.shape.sizes()
}

fn require_rows(tensor: &TensorView, rows: usize, expected: usize, of: &TensorView) -> Result<()> {
    if rows == expected {
        return Ok(());
    }
    let required = format!("must have a row for each of the {expected} rows of {}", of.name);
    Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
}

/// A `[L, S, H]` tensor.
fn require_slabs(tensor: &TensorView, width: usize, group: &LlConfig) -> Result<()> {
    let expected = [group.local_experts() as usize, group.slab_rows(), width];
    if tensor.shape.ndim() == expected.len() && sizes(tensor) == expected {
        return Ok(());
    }
    let required = format!("must have shape [local experts, ep_size * max_tokens_per_rank, hidden_dim], {expected:?}");
    Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)))
}

/// Rows without scales.
fn require_plain_row(tensor: &TensorView, width: usize, group: &LlConfig) -> Result<()> {
    tensor.require_dtype(&LL_DTYPES)?;
    require_row(tensor, width, tensor.dtype.bytes(width), group)
}

/// Rows of `bytes` bytes, scales included. None is longer than a slot of the buffers: NCCL EP does not look at combine's, and writes
/// over the next one.
fn require_row(tensor: &TensorView, width: usize, bytes: usize, group: &LlConfig) -> Result<()> {
    if width == 0 || !width.is_multiple_of(LL_ELEMENTS) {
        let required = format!("must have a row width that is a multiple of {LL_ELEMENTS} elements");
        return Err(Error::argument(tensor.name, required, format!("{:?}", tensor.shape)));
    }
    let most = group.max_token_bytes();
    if bytes <= most {
        return Ok(());
    }
    let required = format!(
        "must have rows of at most {most} bytes, scales included (the group's hidden_dim {} in {})",
        group.hidden_dim, group.max_token_dtype
    );
    Err(Error::argument(tensor.name, required, format!("{bytes} bytes"))
        .with_remedy("initialize the group with the largest hidden_dim and widest max_token_dtype in use"))
}

/// The scales of a tensor, of exactly this shape.
fn require_scales(tensor: &TensorView, dtype: DType, expected: &[usize]) -> Result<()> {
    let scales = scales_of(tensor).expect("a caller saw the scales");
    scales.require_dtype(&[dtype])?;
    if scales.shape.ndim() != expected.len() || sizes(&scales) != expected {
        let required =
            format!("must have shape {expected:?}, a row of scales for each row, unpadded and not transposed");
        return Err(Error::argument(scales.name, required, format!("{:?}", scales.shape)));
    }
    scales.require_row_storage()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::LL_REQUEST;
    use crate::tensor::tests::view;
    use crate::tensor::{Scales, Shape};

    fn group() -> LlConfig {
        LlConfig::try_from(LL_REQUEST).unwrap()
    }

    fn dispatch() -> LlDispatch {
        LlDispatch {
            topk_idx: view("topk_idx", DType::Int64, &[5, 2]),
            tokens: view("tokens", DType::BFloat16, &[5, 512]),
            recv_tokens: view("recv_tokens", DType::BFloat16, &[4, 256, 512]),
            counts: view("counts", DType::Int32, &[4]),
        }
    }

    fn scaled(name: &'static str, dtype: DType, shape: &[usize], scale: DType, scales: &[usize]) -> TensorView {
        let shape_of = |sizes| Shape::new(sizes).unwrap();
        let scales = Scales { dtype: scale, shape: shape_of(scales), data: 0x2000, window: None };
        TensorView { scales: Some(scales), ..view(name, dtype, shape) }
    }

    fn quantized() -> LlDispatch {
        let recv = scaled("recv_tokens", DType::Float8E4M3, &[4, 256, 512], DType::Float32, &[4, 256, 4]);
        LlDispatch { recv_tokens: recv, ..dispatch() }
    }

    fn mxfp8() -> LlDispatch {
        LlDispatch {
            tokens: scaled("tokens", DType::Float8E5M2, &[5, 512], DType::Float8E8M0, &[5, 16]),
            recv_tokens: scaled("recv_tokens", DType::Float8E5M2, &[4, 256, 512], DType::Float8E8M0, &[4, 256, 16]),
            ..dispatch()
        }
    }

    fn combine() -> LlCombine {
        LlCombine {
            topk_idx: view("topk_idx", DType::Int64, &[5, 2]),
            topk_weights: view("topk_weights", DType::Float32, &[5, 2]),
            expert_out: view("expert_out", DType::BFloat16, &[4, 256, 512]),
            result: view("result", DType::BFloat16, &[5, 512]),
        }
    }

    const DISPATCHED: LlDispatched = LlDispatched { num_tokens: 5, top_k: 2, index_dtype: DType::Int64 };

    #[test]
    fn valid_calls() {
        for call in [dispatch(), quantized(), mxfp8()] {
            assert_eq!(call.check(&group()), Ok(DISPATCHED));
        }
        combine().check(&group(), &DISPATCHED).unwrap();
        let empty = |name, dtype, width| TensorView { data: 0, ..view(name, dtype, &[0, width]) };
        let none = LlDispatch {
            topk_idx: empty("topk_idx", DType::Int32, 8),
            tokens: empty("tokens", DType::BFloat16, 512),
            ..dispatch()
        };
        let left = LlDispatched { num_tokens: 0, top_k: 8, index_dtype: DType::Int32 };
        assert_eq!(none.check(&group()), Ok(left));
    }

    #[test]
    fn dispatch_rules() {
        let refused = |call: LlDispatch| call.check(&group()).unwrap_err().to_string();
        for (call, expected) in [
            (
                LlDispatch { topk_idx: view("topk_idx", DType::Int64, &[5, 9]), ..dispatch() },
                "topk_idx must have 1 to num_topk columns, 8, got 9",
            ),
            (
                LlDispatch { topk_idx: view("topk_idx", DType::Int64, &[65, 2]), ..dispatch() },
                "topk_idx must have at most max_tokens_per_rank rows, 64, got 65",
            ),
            (
                LlDispatch { tokens: view("tokens", DType::BFloat16, &[4, 512]), ..dispatch() },
                "tokens must have a row for each of the 5 rows of topk_idx, got [4, 512]",
            ),
            (
                LlDispatch { recv_tokens: view("recv_tokens", DType::BFloat16, &[1024, 512]), ..dispatch() },
                "recv_tokens must have shape [local experts, ep_size * max_tokens_per_rank, hidden_dim], [4, 256, 512], got \
                 [1024, 512]",
            ),
            (
                LlDispatch { recv_tokens: view("recv_tokens", DType::Float16, &[4, 256, 512]), ..dispatch() },
                "recv_tokens must have the dtype of tokens, bfloat16, got float16",
            ),
            (
                LlDispatch {
                    tokens: view("tokens", DType::BFloat16, &[5, 256]),
                    recv_tokens: view("recv_tokens", DType::BFloat16, &[4, 256, 256]),
                    ..dispatch()
                },
                "tokens must have a row width that is a multiple of 512 elements, got [5, 256]",
            ),
            (
                LlDispatch {
                    tokens: view("tokens", DType::Float32, &[5, 512]),
                    recv_tokens: view("recv_tokens", DType::Float32, &[4, 256, 512]),
                    ..dispatch()
                },
                "tokens must have rows of at most 1024 bytes, scales included (the group's hidden_dim 512 in bfloat16), got \
                 2048 bytes; initialize the group with the largest hidden_dim and widest max_token_dtype in use",
            ),
            (
                LlDispatch { counts: view("counts", DType::Int64, &[4]), ..dispatch() },
                "counts must have dtype int32, got int64",
            ),
            (
                LlDispatch { counts: view("counts", DType::Int32, &[5]), ..dispatch() },
                "counts must have an entry for each of the 4 local experts, got 5",
            ),
            (
                LlDispatch { tokens: view("tokens", DType::Float16, &[5, 512]), ..quantized() },
                "tokens must be bfloat16 where recv_tokens has scales, which asks for quantized rows, got float16",
            ),
            (
                LlDispatch {
                    tokens: view("tokens", DType::BFloat16, &[5, 256]),
                    recv_tokens: scaled("recv_tokens", DType::Float8E4M3, &[4, 256, 256], DType::Float32, &[4, 256, 2]),
                    ..dispatch()
                },
                "tokens must have a row width that is a multiple of 512 elements, got [5, 256]",
            ),
            (
                LlDispatch {
                    recv_tokens: scaled("recv_tokens", DType::Float8E4M3, &[4, 256, 512], DType::Float32, &[4, 4, 256]),
                    ..dispatch()
                },
                "recv_tokens.rowwise_scale_inv must have shape [4, 256, 4], a row of scales for each row, unpadded and not \
                 transposed, got [4, 4, 256]",
            ),
            (
                LlDispatch { recv_tokens: view("recv_tokens", DType::Float8E5M2, &[4, 256, 512]), ..mxfp8() },
                "recv_tokens must have scales (NVTE_MXFP8_1D_SCALING), as tokens has, got unscaled",
            ),
        ] {
            assert_eq!(refused(call), expected);
        }
    }

    #[test]
    fn combine_rules() {
        let refused = |call: LlCombine| call.check(&group(), &DISPATCHED).unwrap_err().to_string();
        for (call, expected) in [
            (
                LlCombine { topk_idx: view("topk_idx", DType::Int32, &[5, 2]), ..combine() },
                "topk_idx must be what nvte_ep_ext_ll_dispatch was given, [5, 2] of int64, got [5, 2] of int32",
            ),
            (
                LlCombine { topk_weights: view("topk_weights", DType::Float32, &[5, 3]), ..combine() },
                "topk_weights must have the shape of topk_idx, [5, 2], got [5, 3]",
            ),
            (
                LlCombine { topk_weights: view("topk_weights", DType::BFloat16, &[5, 2]), ..combine() },
                "topk_weights must have dtype float32, got bfloat16",
            ),
            (
                LlCombine { result: view("result", DType::BFloat16, &[6, 512]), ..combine() },
                "result must have a row for each of the 5 rows of topk_idx, got [6, 512]",
            ),
            (
                LlCombine { expert_out: view("expert_out", DType::Float32, &[4, 256, 512]), ..combine() },
                "expert_out must have the dtype of result, bfloat16, got float32",
            ),
            (
                LlCombine { expert_out: quantized().recv_tokens, ..combine() },
                "recv_tokens must be unscaled: combine sums bfloat16, float16 or float32 rows, got a tensor with scales",
            ),
            (
                LlCombine {
                    expert_out: view("expert_out", DType::BFloat16, &[4, 256, 1024]),
                    result: view("result", DType::BFloat16, &[5, 1024]),
                    ..combine()
                },
                "result must have rows of at most 1024 bytes, scales included (the group's hidden_dim 512 in bfloat16), got \
                 2048 bytes; initialize the group with the largest hidden_dim and widest max_token_dtype in use",
            ),
        ] {
            assert_eq!(refused(call), expected);
        }
    }
}
