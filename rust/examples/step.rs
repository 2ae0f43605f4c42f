//! A step forward and backward, with memory and streams of cudarc. Nothing here is unsafe.

mod common;

use common::{HIDDEN, LOCAL_EXPERTS, Outcome, Place, TOKENS, TOP_K};
use cudarc::driver::CudaContext;
use nvte_ep::{
    Combine, CombineBwd, Dispatch, DispatchBwd, Group, LayerConfig, Prepare, Rows, RowsMut, WeightGrads, Weights,
};

fn main() -> Outcome<()> {
    let place = Place::of_this_process();
    let device = CudaContext::new(place.local_rank % CudaContext::device_count()? as usize)?;
    let stream = device.new_stream()?;
    let capacity = place.size * TOKENS * TOP_K; // rows that hold any routing
    // [step]
    let group = Group::builder(place.meet()?)
        .num_experts((LOCAL_EXPERTS * place.size) as u32)
        .max_tokens_per_rank(TOKENS as u32)
        .max_recv_tokens_per_rank(capacity as u32)
        .hidden_dim(HIDDEN as u32)
        .max_token_dtype::<f32>()
        .build()?;
    let layer = group.layer(LayerConfig { top_k: TOP_K as u32, alignment: 1 })?;
    let mut handle = layer.handle()?;

    let experts = stream.clone_htod(&common::experts(&place, 0))?;
    let tokens = stream.clone_htod(&common::rows(&place, 0))?;
    let weights = stream.clone_htod(&vec![0.5f32; TOKENS * TOP_K])?;
    let mut counts = stream.alloc_zeros::<i32>(LOCAL_EXPERTS)?;
    let mut received = stream.alloc_zeros::<f32>(capacity * HIDDEN)?;
    let mut received_weights = stream.alloc_zeros::<f32>(capacity)?;
    let mut result = stream.alloc_zeros::<f32>(TOKENS * HIDDEN)?;

    let step = handle.prepare(Prepare { topk_idx: &experts, token_counts: &mut counts, total: None }, &stream)?;
    let dispatch = Dispatch {
        tokens: Rows::new(&tokens, HIDDEN),
        recv_tokens: RowsMut::new(&mut received, HIDDEN),
        weights: Some(Weights { topk_weights: &weights, recv_topk_weights: &mut received_weights }),
    };
    step.dispatch(dispatch, &stream)?;
    // Here the experts work, each on its slab of `received`, counts[e] rows long.
    let combine = Combine { expert_out: Rows::new(&received, HIDDEN), result: RowsMut::new(&mut result, HIDDEN) };
    step.combine(combine, &stream)?;

    // The gradient of the result goes to all rows of a token, and back through dispatch.
    let grad = stream.clone_htod(&common::rows(&place, 1))?;
    let mut grad_rows = stream.alloc_zeros::<f32>(capacity * HIDDEN)?;
    let mut grad_tokens = stream.alloc_zeros::<f32>(TOKENS * HIDDEN)?;
    let mut grad_weights = stream.alloc_zeros::<f32>(TOKENS * TOP_K)?;
    let combine_bwd =
        CombineBwd { grad: Rows::new(&grad, HIDDEN), grad_expert_out: RowsMut::new(&mut grad_rows, HIDDEN) };
    step.combine_bwd(combine_bwd, &stream)?;
    // The gradient of the received weights is what the experts make; here the weights themselves.
    let dispatch_bwd = DispatchBwd {
        grad: Rows::new(&grad_rows, HIDDEN),
        grad_tokens: RowsMut::new(&mut grad_tokens, HIDDEN),
        weights: Some(WeightGrads { g_recv_topk_weights: &received_weights, grad_topk_weights: &mut grad_weights }),
    };
    step.dispatch_bwd(dispatch_bwd, &stream)?;
    // [step]

    let wrong = common::wrong(&stream.clone_dtoh(&result)?, &common::rows(&place, 0), 2.0)
        + common::wrong(&stream.clone_dtoh(&grad_tokens)?, &common::rows(&place, 1), 2.0)
        + common::wrong(&stream.clone_dtoh(&grad_weights)?, &stream.clone_dtoh(&weights)?, 1.0);
    stream.synchronize()?;
    drop(handle);
    group.shutdown()?;
    common::report(&place, wrong)
}
