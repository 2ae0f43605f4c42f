//! A pipeline schedule, one forward, one backward (1F1B): two micro-batches are in flight at a time. Each has a handle and
//! memory of its own from its forward to its backward. To prepare a handle again before that does not compile.

mod common;

use common::{HIDDEN, LOCAL_EXPERTS, Outcome, Place, TOKENS, TOP_K};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use nvte_ep::{
    Combine, CombineBwd, Dispatch, DispatchBwd, Group, HandleMemory, LayerConfig, Prepare, Prepared, Rows, RowsMut,
};
use std::collections::VecDeque;
use std::sync::Arc;

const IN_FLIGHT: usize = 2;
const MICRO_BATCHES: usize = 4;

/// What a micro-batch keeps until its backward.
struct Forward<'h, 'g> {
    batch: usize,
    step: Prepared<'h, 'g>,
    /// The rows that came to this rank's experts; their gradients then take the place.
    received: CudaSlice<f32>,
}

struct Stage {
    place: Place,
    stream: Arc<CudaStream>,
    capacity: usize,
    wrong: usize,
}

impl Stage {
    fn forward<'h, 'g>(&mut self, batch: usize, handle: &'h mut HandleMemory<'g>) -> Outcome<Forward<'h, 'g>> {
        let stream = &self.stream;
        let experts = stream.clone_htod(&common::experts(&self.place, batch))?; // every micro-batch has its own routing
        let tokens = stream.clone_htod(&common::rows(&self.place, batch))?;
        let mut counts = stream.alloc_zeros::<i32>(LOCAL_EXPERTS)?;
        let mut received = stream.alloc_zeros::<f32>(self.capacity * HIDDEN)?;
        let mut result = stream.alloc_zeros::<f32>(TOKENS * HIDDEN)?;
        let step = handle.prepare(Prepare { topk_idx: &experts, token_counts: &mut counts, total: None }, stream)?;
        let dispatch = Dispatch {
            tokens: Rows::new(&tokens, HIDDEN),
            recv_tokens: RowsMut::new(&mut received, HIDDEN),
            weights: None,
        };
        step.dispatch(dispatch, stream)?;
        let combine = Combine { expert_out: Rows::new(&received, HIDDEN), result: RowsMut::new(&mut result, HIDDEN) };
        step.combine(combine, stream)?;
        self.wrong += common::wrong(&stream.clone_dtoh(&result)?, &common::rows(&self.place, batch), 2.0);
        Ok(Forward { batch, step, received })
    }

    /// Gives the handle back, for the next forward.
    fn backward<'h, 'g>(&mut self, forward: Forward<'h, 'g>) -> Outcome<&'h mut HandleMemory<'g>> {
        let Forward { batch, step, mut received } = forward;
        let stream = &self.stream;
        let grad = stream.clone_htod(&common::rows(&self.place, 10 + batch))?;
        let mut grad_tokens = stream.alloc_zeros::<f32>(TOKENS * HIDDEN)?;
        let combine_bwd =
            CombineBwd { grad: Rows::new(&grad, HIDDEN), grad_expert_out: RowsMut::new(&mut received, HIDDEN) };
        step.combine_bwd(combine_bwd, stream)?;
        let dispatch_bwd = DispatchBwd {
            grad: Rows::new(&received, HIDDEN),
            grad_tokens: RowsMut::new(&mut grad_tokens, HIDDEN),
            weights: None,
        };
        step.dispatch_bwd(dispatch_bwd, stream)?;
        self.wrong += common::wrong(&stream.clone_dtoh(&grad_tokens)?, &common::rows(&self.place, 10 + batch), 2.0);
        Ok(step.finish())
    }
}

fn main() -> Outcome<()> {
    let place = Place::of_this_process();
    let device = CudaContext::new(place.local_rank % CudaContext::device_count()? as usize)?;
    let capacity = place.size * TOKENS * TOP_K;
    let group = Group::builder(place.meet()?)
        .num_experts((LOCAL_EXPERTS * place.size) as u32)
        .max_tokens_per_rank(TOKENS as u32)
        .max_recv_tokens_per_rank(capacity as u32)
        .hidden_dim(HIDDEN as u32)
        .max_token_dtype::<f32>()
        .build()?;
    let layer = group.layer(LayerConfig { top_k: TOP_K as u32, alignment: 1 })?;
    let mut handles = (0..IN_FLIGHT).map(|_| layer.handle()).collect::<nvte_ep::Result<Vec<_>>>()?;

    let mut stage = Stage { place, stream: device.new_stream()?, capacity, wrong: 0 };
    let mut in_flight = VecDeque::new();
    for (batch, handle) in handles.iter_mut().enumerate() {
        in_flight.push_back(stage.forward(batch, handle)?);
    }
    let mut next = IN_FLIGHT;
    while let Some(oldest) = in_flight.pop_front() {
        let handle = stage.backward(oldest)?;
        if next < MICRO_BATCHES {
            in_flight.push_back(stage.forward(next, handle)?);
            next += 1;
        }
    }
    stage.stream.synchronize()?;
    drop(in_flight);
    drop(handles);
    group.shutdown()?;
    common::report(&place, stage.wrong)
}
