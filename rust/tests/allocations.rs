//! A step costs no allocation.

use nvte_ep::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

include!("support/alone.rs");

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends counts no more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() {
    const T: usize = 8;
    const H: usize = 64;
    const C: usize = 16;
    let alone = Alone::new();
    let comm = Communicator::new(UniqueId::new().unwrap(), 0, 1).unwrap();
    let group = Group::builder(comm)
        .num_experts(4)
        .max_tokens_per_rank(T as u32)
        .max_recv_tokens_per_rank(C as u32)
        .hidden_dim(H as u32)
        .max_token_dtype::<f32>()
        .build()
        .unwrap();
    let layer = group.layer(LayerConfig { top_k: 2, alignment: 1 }).unwrap();
    let mut handle = layer.handle().unwrap();
    let experts = alone.filled(&[0i64, 1].repeat(T));
    let (tokens, weights) = (alone.zeros::<f32>(T * H), alone.zeros::<f32>(T * 2));
    let (mut counts, mut total) = (alone.zeros::<i32>(4), alone.zeros::<i32>(1));
    let (mut recv, mut recv_weights) = (alone.zeros::<f32>(C * H), alone.zeros::<f32>(C));
    let (mut result, mut grad_rows) = (alone.zeros::<f32>(T * H), alone.zeros::<f32>(C * H));
    let (mut grad_tokens, mut grad_weights) = (alone.zeros::<f32>(T * H), alone.zeros::<f32>(T * 2));
    let stream = Stream::DEFAULT;
    let mut step = || -> Result<()> {
        let (topk_idx, token_counts) = (&*experts, &mut *counts);
        let step = handle.prepare(Prepare { topk_idx, token_counts, total: Some(&mut *total) }, stream)?;
        let weights = Weights { topk_weights: &*weights, recv_topk_weights: &mut *recv_weights };
        let (tokens, recv_tokens) = (Rows::new(&*tokens, H), RowsMut::new(&mut *recv, H));
        step.dispatch(Dispatch { tokens, recv_tokens, weights: Some(weights) }, stream)?;
        let (expert_out, sums) = (Rows::new(&*recv, H), RowsMut::new(&mut *result, H));
        step.combine(Combine { expert_out, result: sums }, stream)?;
        let (grad, grad_expert_out) = (Rows::new(&*result, H), RowsMut::new(&mut *grad_rows, H));
        step.combine_bwd(CombineBwd { grad, grad_expert_out }, stream)?;
        let weights = WeightGrads { g_recv_topk_weights: &*recv_weights, grad_topk_weights: &mut *grad_weights };
        let (grad, grad_tokens) = (Rows::new(&*grad_rows, H), RowsMut::new(&mut *grad_tokens, H));
        step.dispatch_bwd(DispatchBwd { grad, grad_tokens, weights: Some(weights) }, stream)
    };
    (0..3).for_each(|_| step().unwrap());
    let before = COUNT.get();
    assert!(before > 0, "allocations are counted");
    (0..20).for_each(|_| step().unwrap());
    assert_eq!(COUNT.get() - before, 0);
    alone.wait();
}
