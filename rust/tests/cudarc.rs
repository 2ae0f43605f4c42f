//! Memory, streams and graphs of cudarc, over the host runtime.
#![cfg(feature = "cudarc")]

use cudarc::driver::{CudaContext, sys};
use nvte_ep::*;
use std::process::Command;

const T: usize = 8;
const H: usize = 64;
const C: usize = 2 * T;

/// cudarc has the loader find the driver, so the test `name` runs in a process where that finds the host runtime. True in
/// the process that started it.
fn elsewhere(name: &str) -> bool {
    if std::env::var_os("NVTE_EP_HOST_LIB").is_some() {
        return false;
    }
    let program = std::env::current_exe().unwrap();
    let (folder, host) = (tempfile::tempdir().unwrap(), program.with_file_name("libnvte_ep_host.so"));
    std::os::unix::fs::symlink(&host, folder.path().join("libcuda.so.1")).unwrap();
    let mut command = Command::new(program);
    command.args([name, "--exact", "--nocapture"]);
    command.env("NVTE_EP_RUNTIME", "host").env("NVTE_EP_HOST_LIB", host).env("LD_LIBRARY_PATH", folder.path());
    assert!(command.status().unwrap().success());
    true
}

fn group() -> Group {
    let comm = Communicator::new(UniqueId::new().unwrap(), 0, 1).unwrap();
    let builder = Group::builder(comm).num_experts(4).max_tokens_per_rank(T as u32).hidden_dim(H as u32);
    builder.max_recv_tokens_per_rank(C as u32).max_token_dtype::<f32>().build().unwrap()
}

const LAYER: LayerConfig = LayerConfig { top_k: 2, alignment: 1 };

#[test]
fn its_memory_wants_its_streams() {
    if elsewhere("its_memory_wants_its_streams") {
        return;
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let group = group();
    let mut handle = group.layer(LAYER).unwrap().handle().unwrap();
    let topk_idx = stream.clone_htod(&[0i64, 1].repeat(T)).unwrap();
    let mut counts = stream.alloc_zeros::<i32>(4).unwrap();
    let prepare = Prepare { topk_idx: &topk_idx, token_counts: &mut counts, total: None };
    let error = handle.prepare(prepare, Stream::DEFAULT).unwrap_err();
    assert_eq!((error.argument(), error.kind()), (Some("stream"), ErrorKind::InvalidArgument));
    assert!(error.to_string().contains("must be a stream of cudarc"), "{error}");
    // Parts of an allocation are arguments too, and work on another stream is waited for.
    let other = stream.context().new_stream().unwrap();
    let all = other.clone_htod(&[7i64, 7].into_iter().chain([0, 1].repeat(T)).collect::<Vec<_>>()).unwrap();
    let part = all.slice(2..);
    let _ = handle.prepare(Prepare { topk_idx: &part, token_counts: &mut counts, total: None }, &stream).unwrap();
    assert_eq!(other.clone_dtoh(&counts).unwrap(), [T as i32, T as i32, 0, 0]);
}

#[test]
fn a_graph_holds_a_step_and_its_routing_is_taken_up_after_a_launch() {
    if elsewhere("a_graph_holds_a_step_and_its_routing_is_taken_up_after_a_launch") {
        return;
    }
    let device = CudaContext::new(0).unwrap();
    // A captured stream cannot wait for events that were recorded outside of the capture.
    // SAFETY: one stream uses the memory.
    unsafe { device.disable_event_tracking() };
    let stream = device.new_stream().unwrap();
    let group = group();
    let mut handle = group.layer(LAYER).unwrap().handle().unwrap();
    let mut topk_idx = stream.clone_htod(&[0i64, 1].repeat(T)).unwrap();
    let mut tokens = stream.clone_htod(&vec![1f32; T * H]).unwrap();
    let mut counts = stream.alloc_zeros::<i32>(4).unwrap();
    let mut recv = stream.alloc_zeros::<f32>(C * H).unwrap();
    let mut result = stream.alloc_zeros::<f32>(T * H).unwrap();
    let mut step = |handle: &mut HandleMemory| {
        let prepare = Prepare { topk_idx: &topk_idx, token_counts: &mut counts, total: None };
        let step = handle.prepare(prepare, &stream).unwrap();
        let (sent, received) = (Rows::new(&tokens, H), RowsMut::new(&mut recv, H));
        step.dispatch(Dispatch { tokens: sent, recv_tokens: received, weights: None }, &stream).unwrap();
        let (expert_out, sums) = (Rows::new(&recv, H), RowsMut::new(&mut result, H));
        step.combine(Combine { expert_out, result: sums }, &stream).unwrap();
    };
    step(&mut handle);
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    step(&mut handle);
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("calls were captured");
    stream.memcpy_htod(&[2i64, 3].repeat(T), &mut topk_idx).unwrap();
    stream.memcpy_htod(&vec![3f32; T * H], &mut tokens).unwrap();
    graph.launch().unwrap();
    assert_eq!(stream.clone_dtoh(&counts).unwrap(), [0, 0, T as i32, T as i32]);
    assert_eq!(stream.clone_dtoh(&result).unwrap(), vec![6f32; T * H]);

    let step = handle.resume(&topk_idx).unwrap();
    let mut grad_rows = stream.alloc_zeros::<f32>(C * H).unwrap();
    let (grad, grad_expert_out) = (Rows::new(&tokens, H), RowsMut::new(&mut grad_rows, H));
    step.combine_bwd(CombineBwd { grad, grad_expert_out }, &stream).unwrap();
    assert_eq!(stream.clone_dtoh(&grad_rows).unwrap(), vec![3f32; C * H]);
    stream.synchronize().unwrap();
}

#[cfg(feature = "half")]
#[test]
fn tokens_of_the_crate_half() {
    use half::bf16;
    if elsewhere("tokens_of_the_crate_half") {
        return;
    }
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let group = group();
    let mut handle = group.layer(LAYER).unwrap().handle().unwrap();
    let topk_idx = stream.clone_htod(&[0i32, 3].repeat(T)).unwrap();
    let values: Vec<bf16> = (0..T * H).map(|i| bf16::from_f32((i % 100) as f32)).collect();
    let tokens = stream.clone_htod(&values).unwrap();
    let mut counts = stream.alloc_zeros::<i32>(4).unwrap();
    let mut recv = stream.alloc_zeros::<bf16>(C * H).unwrap();
    let mut result = stream.alloc_zeros::<bf16>(T * H).unwrap();
    let prepare = Prepare { topk_idx: &topk_idx, token_counts: &mut counts, total: None };
    let (sent, received) = (Rows::new(&tokens, H), RowsMut::new(&mut recv, H));
    let dispatch = Dispatch { tokens: sent, recv_tokens: received, weights: None };
    let step = handle.prepare_and_dispatch(prepare, dispatch, &stream).unwrap();
    let (expert_out, sums) = (Rows::new(&recv, H), RowsMut::new(&mut result, H));
    step.combine(Combine { expert_out, result: sums }, &stream).unwrap();
    let twice: Vec<bf16> = values.iter().map(|value| bf16::from_f32(2.0 * value.to_f32())).collect();
    assert_eq!(stream.clone_dtoh(&result).unwrap(), twice);
    stream.synchronize().unwrap();
}
