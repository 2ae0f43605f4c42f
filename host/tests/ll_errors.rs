//! What low-latency mode refuses: the code and the words of each error.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

mod common;

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::low_latency::*;
use common::*;
use nvte_ep_bindings::*;

fn case() -> LlCase {
    LlCase::new(1, 8, 2, &[3], |_, token, k| ((token + k * 3) % 8) as i64)
}

/// The error's text is one for the process, so the tests of this file take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused(code: u32, expected: u32, words: &str) {
    let text = nccl_error();
    assert!(code == expected && text.contains(words), "{code}, {text:?}, not {words:?}");
}

/// What a dispatch gives.
struct Dispatch {
    inputs: ncclEpDispatchInputs_t,
    outputs: ncclEpDispatchOutputs_t,
    info: ncclEpLayoutInfo_t,
    config: ncclEpDispatchConfig_t,
    /// The tensors of a step that breaks no rule.
    given: LlBuffers,
    /// Memory, and descriptors over it, for what a change puts in.
    memory: Buffer<u8>,
    spare: Vec<Desc>,
}

impl Dispatch {
    fn new(rank: &Rank, case: &LlCase) -> Self {
        let mut given = LlBuffers::new(rank, case);
        given.set(rank, case, 1);
        let mut outputs = ep_struct!(ncclEpDispatchOutputs_t { tokens: given.received_desc.ptr() });
        if case.recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4 {
            outputs.scales = given.scales_desc.ptr();
        }
        let mut inputs = ep_struct!(ncclEpDispatchInputs_t { tokens: given.tokens_desc.ptr() });
        let mut info = ep_struct!(ncclEpLayoutInfo_t {});
        if case.layout == NCCL_EP_LAYOUT_RANK_MAJOR {
            inputs.topk_weights = given.own_weights_desc.ptr();
            outputs.topk_weights = given.weights_desc.ptr();
            outputs.topk_idx = given.experts_desc.ptr();
        } else {
            info.expert_counters = given.counts_desc.ptr();
        }
        Self {
            inputs,
            outputs,
            info,
            config: ep_struct!(ncclEpDispatchConfig_t { quant_recipe: case.recipe }),
            memory: Buffer::of(&vec![1; 1 << 18], rank.stream),
            spare: Vec::new(),
            given,
        }
    }

    /// A tensor of another kind; bytes behind the start of its memory make it misaligned.
    fn tensor(&mut self, datatype: ncclDataType_t, sizes: &[usize], offset: usize) -> *mut ncclEpTensor_t {
        self.spare.push(Desc::new(self.memory.pointer.wrapping_add(offset).cast(), datatype, sizes));
        self.spare.last_mut().unwrap().ptr()
    }

    fn call(&self, handle: ncclEpHandle_t, stream: cudaStream_t) -> u32 {
        let (i, o) = (&raw const self.inputs, &raw const self.outputs);
        // SAFETY: the structures and their tensors are there.
        unsafe { ncclEpDispatch(handle, i, o, &raw const self.info, &raw const self.config, stream) }
    }
}

type Change = (&'static str, fn(&mut Dispatch));

/// Each change alone is refused in these words; without one the dispatch works.
fn refuse_each(case: &LlCase, changes: &[Change]) {
    with_ll_group(case, |rank, group| {
        let handle = ll_handle(rank, group, case);
        let mut good = Dispatch::new(rank, case);
        good.given.update(&handle, rank.stream);
        for (words, change) in changes {
            let mut bad = Dispatch::new(rank, case);
            change(&mut bad);
            refused(bad.call(handle.handle, rank.stream), ncclInvalidArgument, &format!("ncclEpDispatch: {words}"));
        }
        nccl_ok(good.call(handle.handle, rank.stream));
        rank.sync();
        handle.destroy();
    });
}

#[test]
fn dispatches() {
    let _turn = turn();
    refuse_each(
        &case(),
        &[
            ("ncclEpDispatchInputs_t.magic", |d| d.inputs.magic = 1),
            ("inputs.tokens is missing", |d| d.inputs.tokens = ptr::null_mut()),
            ("inputs.tokens must be 2D", |d| d.inputs.tokens = d.tensor(ncclBfloat16, &[3, 16, 16], 0)),
            ("inputs.tokens has more than max_dispatch_tokens_per_rank = 3 rows", |d| {
                d.inputs.tokens = d.tensor(ncclBfloat16, &[4, 512], 0);
            }),
            ("inputs.tokens must have the 3 rows of UpdateHandle's topk_idx", |d| {
                d.inputs.tokens = d.tensor(ncclBfloat16, &[2, 512], 0);
            }),
            ("inputs.tokens must be bfloat16, float16 or float32", |d| {
                d.inputs.tokens = d.tensor(ncclInt32, &[3, 512], 0);
            }),
            ("outputs.tokens must be [8, 3, 512], got bfloat16 [8, 4, 512]", |d| {
                d.outputs.tokens = d.tensor(ncclBfloat16, &[8, 4, 512], 0);
            }),
            ("outputs.tokens must be [8, 3, 512], got bfloat16 [24, 512]", |d| {
                d.outputs.tokens = d.tensor(ncclBfloat16, &[24, 512], 0);
            }),
            ("outputs.tokens must have the type and width of inputs.tokens", |d| {
                d.outputs.tokens = d.tensor(ncclFloat16, &[8, 3, 512], 0);
            }),
            ("inputs.tokens must have a positive multiple of 256 columns in low-latency mode", |d| {
                d.inputs.tokens = d.tensor(ncclBfloat16, &[3, 384], 0);
                d.outputs.tokens = d.tensor(ncclBfloat16, &[8, 3, 384], 0);
            }),
            ("inputs.tokens must have a positive multiple of 128 columns in low-latency mode", |d| {
                d.inputs.tokens = d.tensor(ncclFloat32, &[3, 192], 0);
                d.outputs.tokens = d.tensor(ncclFloat32, &[8, 3, 192], 0);
            }),
            ("inputs.tokens has rows of 4096 bytes, max_token_bytes is 2048", |d| {
                d.inputs.tokens = d.tensor(ncclBfloat16, &[3, 2048], 0);
                d.outputs.tokens = d.tensor(ncclBfloat16, &[8, 3, 2048], 0);
            }),
            ("outputs.tokens must start at a multiple of 16 bytes", |d| {
                d.outputs.tokens = d.tensor(ncclBfloat16, &[8, 3, 512], 8);
            }),
            ("inputs.topk_weights is given with the expert-major layout", |d| {
                d.inputs.topk_weights = d.given.own_weights_desc.ptr();
            }),
            ("outputs.topk_weights is given with the expert-major layout", |d| {
                d.outputs.topk_weights = d.given.weights_desc.ptr();
            }),
            ("outputs.topk_idx is given with the expert-major layout", |d| {
                d.outputs.topk_idx = d.given.experts_desc.ptr();
            }),
            ("layout_info.expert_counters is missing", |d| d.info.expert_counters = ptr::null_mut()),
            ("layout_info.expert_counters must be int32", |d| d.info.expert_counters = d.tensor(ncclInt64, &[8], 0)),
            ("layout_info.expert_counters must be [8]", |d| d.info.expert_counters = d.tensor(ncclInt32, &[9], 0)),
            ("layout_info.src_rank_counters is given with the expert-major layout", |d| {
                d.info.src_rank_counters = d.given.counts_desc.ptr();
            }),
            ("layout_info.expert_offsets is given in low-latency mode", |d| {
                d.info.expert_offsets = d.given.counts_desc.ptr();
            }),
            ("layout_info.recv_total_counter is given in low-latency mode", |d| {
                d.info.recv_total_counter = d.given.counts_desc.ptr();
            }),
            ("inputs.scales is given without a quant_recipe", |d| d.inputs.scales = d.given.scales_desc.ptr()),
            ("outputs.scales is given without a quant_recipe", |d| d.outputs.scales = d.given.scales_desc.ptr()),
            ("quant_recipe 7 is unknown", |d| d.config.quant_recipe = 7),
            ("pass_direction 4 is unknown", |d| d.config.pass_direction = 4),
        ],
    );
}

#[test]
fn dispatches_of_quantised_rows() {
    let _turn = turn();
    fn forward(d: &mut Dispatch, scales: &[usize], received: &[usize]) {
        d.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
        d.inputs.scales = d.tensor(ncclFloat32, scales, 0);
        d.outputs.scales = d.tensor(ncclFloat32, received, 0);
    }
    refuse_each(
        &case(),
        &[
            ("inputs.scales is missing", |d| d.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD),
            ("outputs.scales must be [8, 3, 8]", |d| forward(d, &[3, 8], &[8, 3, 4])),
            ("inputs.scales must have as many rows as the tokens, 3", |d| forward(d, &[2, 8], &[8, 3, 8])),
            ("inputs.scales must have rows of a positive multiple of 16 bytes", |d| forward(d, &[3, 6], &[8, 3, 6])),
            ("round_scales is 1, quant_recipe FWD needs 0", |d| {
                forward(d, &[3, 8], &[8, 3, 8]);
                d.config.round_scales = 1;
            }),
            ("inputs.tokens has rows of 2064 bytes, scales included, max_token_bytes is 2048", |d| {
                forward(d, &[3, 260], &[8, 3, 260]);
            }),
        ],
    );
    let quantised = LlCase { recipe: NCCL_EP_DISP_QUANT_DS_FP8E3M4, hidden: 512, ..case() };
    refuse_each(
        &quantised,
        &[
            ("inputs.scales is given with the quant_recipe that computes scales", |d| {
                d.inputs.scales = d.given.scales_desc.ptr();
            }),
            ("inputs.tokens must be bfloat16 with a positive multiple of 512 columns to be quantised", |d| {
                d.inputs.tokens = d.tensor(ncclFloat16, &[3, 512], 0);
            }),
            ("inputs.tokens must be bfloat16 with a positive multiple of 512 columns to be quantised", |d| {
                d.inputs.tokens = d.tensor(ncclBfloat16, &[3, 768], 0);
                d.outputs.tokens = d.tensor(ncclFloat8e4m3, &[8, 3, 768], 0);
            }),
            ("outputs.scales is missing", |d| d.outputs.scales = ptr::null_mut()),
            ("outputs.scales must be [8, 3, 4]", |d| d.outputs.scales = d.tensor(ncclFloat32, &[8, 3, 8], 0)),
            ("outputs.scales must be float32", |d| d.outputs.scales = d.tensor(ncclInt32, &[8, 3, 4], 0)),
            ("outputs.tokens must be float8_e4m3", |d| {
                d.outputs.tokens = d.tensor(ncclFloat8e5m2, &[8, 3, 512], 0);
            }),
        ],
    );
}

#[test]
fn rank_major_dispatches() {
    let _turn = turn();
    refuse_each(
        &LlCase { layout: NCCL_EP_LAYOUT_RANK_MAJOR, ..case() },
        &[
            ("inputs.topk_weights is missing", |d| d.inputs.topk_weights = ptr::null_mut()),
            ("inputs.topk_weights must be [3, 2]", |d| d.inputs.topk_weights = d.tensor(ncclFloat32, &[3, 1], 0)),
            ("outputs.topk_weights is missing", |d| d.outputs.topk_weights = ptr::null_mut()),
            ("outputs.topk_weights must be [1, 3, 2]", |d| d.outputs.topk_weights = d.tensor(ncclFloat32, &[3, 2], 0)),
            ("outputs.topk_idx must be int32", |d| d.outputs.topk_idx = d.tensor(ncclInt64, &[1, 3, 2], 0)),
            ("layout_info.expert_counters is given with the rank-major layout", |d| {
                d.info.expert_counters = d.given.counts_desc.ptr();
            }),
            ("layout_info.recv_topk_idx_kind 5 is unknown", |d| d.info.recv_topk_idx_kind = 5),
            ("layout_info.src_rank_counters must be [1]", |d| d.info.src_rank_counters = d.tensor(ncclInt32, &[2], 0)),
        ],
    );
}

#[test]
fn combines() {
    let _turn = turn();
    let case = case();
    type Change = (
        &'static str,
        fn(
            &mut ncclEpCombineInputs_t,
            &mut ncclEpCombineOutputs_t,
            &mut dyn FnMut(ncclDataType_t, &[usize]) -> *mut ncclEpTensor_t,
        ),
    );
    let changes: &[Change] = &[
        ("inputs.tokens is missing", |i, _, _| i.tokens = ptr::null_mut()),
        ("inputs.scales is given in low-latency mode", |i, _, _| i.scales = i.tokens),
        ("inputs.topk_weights is given in low-latency mode", |i, _, _| i.topk_weights = i.tokens),
        ("outputs.topk_weights is missing", |_, o, _| o.topk_weights = ptr::null_mut()),
        ("outputs.topk_weights must be float32", |_, o, new| o.topk_weights = new(ncclBfloat16, &[3, 2])),
        ("outputs.topk_weights must be [3, 2]", |_, o, new| o.topk_weights = new(ncclFloat32, &[3, 3])),
        ("inputs.tokens must be bfloat16, float16 or float32", |i, _, new| i.tokens = new(ncclInt8, &[8, 3, 512])),
        ("inputs.tokens must be [8, 3, 512]", |i, _, new| i.tokens = new(ncclBfloat16, &[8, 2, 512])),
        ("outputs.tokens must have the type of inputs.tokens and the 3 rows", |_, o, new| {
            o.tokens = new(ncclFloat16, &[3, 512])
        }),
        ("outputs.tokens must have the type of inputs.tokens and the 3 rows", |_, o, new| {
            o.tokens = new(ncclBfloat16, &[2, 512])
        }),
        ("inputs.tokens must have a positive multiple of 512 columns", |i, o, new| {
            (i.tokens, o.tokens) = (new(ncclBfloat16, &[8, 3, 256]), new(ncclBfloat16, &[3, 256]));
        }),
        ("inputs.tokens has rows of 4096 bytes, the group's max_token_bytes is 2048", |i, o, new| {
            (i.tokens, o.tokens) = (new(ncclBfloat16, &[8, 3, 2048]), new(ncclBfloat16, &[3, 2048]));
        }),
    ];
    with_ll_group(&case, |rank, group| {
        let handle = ll_handle(rank, group, &case);
        let mut buffers = LlBuffers::new(rank, &case);
        let memory = Buffer::of(&vec![1u8; 1 << 18], rank.stream);
        for (words, change) in changes {
            buffers.update(&handle, rank.stream);
            let mut spare = Vec::new();
            let mut new = |datatype, sizes: &[usize]| {
                spare.push(Desc::of(&memory, datatype, sizes));
                spare.last_mut().unwrap().ptr()
            };
            let mut inputs = ep_struct!(ncclEpCombineInputs_t { tokens: buffers.expert_out_desc.ptr() });
            let mut outputs = ep_struct!(ncclEpCombineOutputs_t {
                tokens: buffers.result_desc.ptr(),
                topk_weights: buffers.own_weights_desc.ptr(),
            });
            change(&mut inputs, &mut outputs, &mut new);
            let (i, o) = (&raw const inputs, &raw const outputs);
            // SAFETY: all pointers are ours and valid.
            let code = unsafe { ncclEpCombine(handle.handle, i, o, ptr::null(), rank.stream) };
            refused(code, ncclInvalidArgument, &format!("ncclEpCombine: {words}"));
        }
        buffers.step(rank, &case, &handle, 1, Staged::default());
        handle.destroy();
    });
    let rank_major = LlCase { layout: NCCL_EP_LAYOUT_RANK_MAJOR, ..case };
    with_ll_group(&rank_major, |rank, group| {
        let handle = ll_handle(rank, group, &rank_major);
        let mut buffers = LlBuffers::new(rank, &rank_major);
        buffers.update(&handle, rank.stream);
        let as_expert_major = LlCase { layout: NCCL_EP_LAYOUT_EXPERT_MAJOR, ..rank_major.clone() };
        let code = buffers.combine(&as_expert_major, &handle, rank.stream, false);
        refused(code, ncclInvalidArgument, "outputs.topk_weights is given with the rank-major layout");
        handle.destroy();
    });
}

fn init(group: ncclEpGroup_t, layout: ncclEpLayout_t, top_k: i32, memory: Option<&mut Desc>) -> (u32, ncclEpHandle_t) {
    let mut handle = ptr::null_mut();
    let memory = memory.map_or(ptr::null_mut(), Desc::ptr);
    // SAFETY: all pointers are ours and valid.
    (unsafe { ncclEpInitHandle(&raw mut handle, group, layout, ptr::null(), top_k, memory) }, handle)
}

#[test]
fn groups_and_handles() {
    let _turn = turn();
    const EXPERT_MAJOR: ncclEpLayout_t = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    run_ranks(1, |rank| {
        let good = case().config();
        let mut bad = good;
        bad.enable_mask = 1;
        let (code, text) = rank.create_group(&bad).unwrap_err();
        assert_eq!((code, text.contains("enable_mask: not supported by the host runtime")), (ncclInvalidUsage, true));

        let destroy = |group| {
            // SAFETY: no preconditions.
            nccl_ok(unsafe { ncclEpGroupDestroy(group) });
        };
        let group = rank.create_group(&ncclEpGroupConfig_t { num_topk: 4, ..good }).unwrap();
        for (layout, words) in [
            (NCCL_EP_LAYOUT_UNSET, "the layout is not set"),
            (NCCL_EP_LAYOUT_FLAT, "low-latency mode has no flat layout"),
            (9, "layout 9 is unknown"),
        ] {
            refused(init(group, layout, 2, None).0, ncclInvalidArgument, &format!("ncclEpInitHandle: {words}"));
            let mut size = 0;
            // SAFETY: the result pointer is ours.
            let code = unsafe { ncclEpHandleMemSize(group, layout, ptr::null(), &raw mut size, 2) };
            refused(code, ncclInvalidArgument, &format!("ncclEpHandleMemSize: {words}"));
        }
        refused(init(group, EXPERT_MAJOR, 0, None).0, ncclInvalidArgument, "num_topk must be positive");
        refused(init(group, EXPERT_MAJOR, 5, None).0, ncclInvalidUsage, "num_topk 5 is larger than the group's 4");
        // 1 rank, 8 experts, 3 tokens, top-2: 4 x (1 + 3 x 3) bytes, and 8 x 8.
        let mut size = 0;
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclEpHandleMemSize(group, EXPERT_MAJOR, ptr::null(), &raw mut size, 2) });
        assert_eq!(size, 512);
        let memory = Buffer::<u8>::new(512, rank.stream);
        let mut short = Desc::of(&memory, ncclUint8, &[511]);
        refused(
            init(group, EXPERT_MAJOR, 2, Some(&mut short)).0,
            ncclInvalidArgument,
            "must be uint8 of at least [512]",
        );
        destroy(group);

        // A multiple of 256 bytes is not enough for every shape.
        let odd = ncclEpGroupConfig_t { max_token_bytes: 2560, max_dispatch_tokens_per_rank: 1, ..good };
        let group = rank.create_group(&odd).unwrap();
        let words = "the buffer's part of max_dispatch_tokens_per_rank x num_topk x a slot has 2600 bytes, not a multiple of 16";
        refused(init(group, EXPERT_MAJOR, 1, None).0, ncclInvalidArgument, words);
        destroy(group);

        // 3 tokens of 2048 bytes, top-2: slots of 8 x 3 and 2 x 3 rows of 2080 bytes, twice, and the signals.
        let needed = 2 * (8 * 3 + 2 * 3) * 2080 + 2 * 128;
        for (bytes, fits) in [(needed - 1, false), (needed, true)] {
            let group = rank.create_group(&ncclEpGroupConfig_t { rdma_buffer_size: bytes, ..good }).unwrap();
            let (code, handle) = init(group, EXPERT_MAJOR, 2, None);
            if fits {
                nccl_ok(code);
                // SAFETY: no preconditions.
                nccl_ok(unsafe { ncclEpHandleDestroy(handle) });
            } else {
                let words = format!("the handle needs a buffer of {needed} bytes, rdma_buffer_size is {bytes}");
                refused(code, ncclInvalidUsage, &words);
            }
            destroy(group);
        }
    });
}

#[test]
fn updates_and_what_needs_one() {
    let _turn = turn();
    let case = case();
    with_ll_group(&case, |rank, group| {
        let handle = ll_handle(rank, group, &case);
        let mut buffers = LlBuffers::new(rank, &case);
        let no_update = "ncclEpUpdateHandle has not been called on this handle";
        refused(buffers.dispatch(&case, &handle, rank.stream, false), ncclInvalidArgument, no_update);
        refused(buffers.combine(&case, &handle, rank.stream, false), ncclInvalidArgument, no_update);
        let update = |topk: &mut Desc, info: *const ncclEpLayoutInfo_t| {
            // SAFETY: all pointers are ours and valid.
            unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), info, rank.stream) }
        };
        let memory = Buffer::<u8>::new(256, rank.stream);
        let info = ep_struct!(ncclEpLayoutInfo_t {});
        for (datatype, sizes, words) in [
            (ncclFloat32, [3, 2], "topk_idx must be int32 or int64"),
            (ncclInt64, [3, 1], "topk_idx must have num_topk = 2 columns"),
            (ncclInt64, [4, 2], "topk_idx has more than max_dispatch_tokens_per_rank = 3 rows"),
        ] {
            let mut topk = Desc::of(&memory, datatype, &sizes);
            refused(update(&mut topk, ptr::null()), ncclInvalidArgument, &format!("ncclEpUpdateHandle: {words}"));
        }
        let code = update(&mut Desc::of(&memory, ncclInt64, &[3, 2]), &raw const info);
        refused(code, ncclInvalidArgument, "layout_info must be null in low-latency mode");
        buffers.update(&handle, rank.stream);
        for combine in [false, true] {
            let backward = (ncclInvalidUsage, "low-latency mode has no backward pass");
            let code = if combine {
                let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: buffers.expert_out_desc.ptr() });
                let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: buffers.result_desc.ptr() });
                let config = ep_struct!(ncclEpCombineConfig_t { pass_direction: NCCL_EP_BWD_PASS });
                let (i, o, c) = (&raw const inputs, &raw const outputs, &raw const config);
                // SAFETY: all pointers are ours and valid.
                unsafe { ncclEpCombine(handle.handle, i, o, c, rank.stream) }
            } else {
                let mut call = Dispatch::new(rank, &case);
                call.config.pass_direction = NCCL_EP_BWD_PASS;
                call.call(handle.handle, rank.stream)
            };
            refused(code, backward.0, backward.1);
        }
        handle.destroy();
    });
}

#[test]
fn indices_stay_until_combine_has_read_them() {
    let _turn = turn();
    let case = case();
    with_ll_group(&case, |rank, group| {
        let handle = ll_handle(rank, group, &case);
        let mut buffers = LlBuffers::new(rank, &case);
        let indices = Buffer::of(&[0i64; 6], rank.stream);
        let mut topk = Desc::of(&indices, ncclInt64, &[3, 2]);
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe { ncclEpUpdateHandle(handle.handle, topk.ptr(), ptr::null(), rank.stream) });
        rank.sync();
        drop(indices);
        rank.sync();
        let words = "topk_idx of ncclEpUpdateHandle: 48 bytes at 0x";
        refused(buffers.dispatch(&case, &handle, rank.stream, false), ncclUnhandledCudaError, words);
        assert!(nccl_error().contains("are still used, but have been freed: rule freed-memory"), "{}", nccl_error());
        handle.destroy();
    });
}

/// What the kernels of a group cannot do is an error of its calls.
#[test]
fn launches() {
    let _turn = turn();
    let tries = |case: LlCase, change: fn(&mut ncclEpGroupConfig_t), expected: u32, words: &str| {
        run_ranks(1, |rank| {
            let mut config = case.config();
            change(&mut config);
            let group = rank.create_group(&config).unwrap();
            let handle = ll_handle(rank, group, &case);
            let mut buffers = LlBuffers::new(rank, &case);
            buffers.update(&handle, rank.stream);
            refused(buffers.dispatch(&case, &handle, rank.stream, false), expected, words);
            handle.destroy();
            // SAFETY: no preconditions.
            nccl_ok(unsafe { ncclEpGroupDestroy(group) });
        });
    };
    let few = "ncclEpDispatch: num_experts 64 need at least 5 multiprocessors, the group has 4 (max_num_sms, NCCL_EP_COMM_SMS)";
    let case = |experts, top_k| LlCase::new(1, experts, top_k, &[2], |_, _, _| -1);
    tries(case(64, 2), |config| config.max_num_sms = 4, ncclInvalidUsage, few);
    tries(case(64, 32), |_| {}, ncclInvalidUsage, "num_topk 32 is larger than 31");
    tries(case(1, 1), |_| {}, ncclUnhandledCudaError, "num_experts 1: the kernels need more than one block");
    let zero_copy = "zero_copy ON excludes the expert-major layout in low-latency mode";
    tries(case(8, 2), |config| config.zero_copy = NCCL_EP_ZERO_COPY_ON, ncclInvalidArgument, zero_copy);
    let windows = "outputs.tokens must lie in a window, as the group's zero_copy is ON";
    let rank_major = LlCase { layout: NCCL_EP_LAYOUT_RANK_MAJOR, ..case(8, 2) };
    tries(rank_major, |config| config.zero_copy = NCCL_EP_ZERO_COPY_ON, ncclInvalidArgument, windows);
    // Combine's sums.
    run_ranks(1, |rank| {
        let case = LlCase { hidden: 16_384, ..case(2, 1) };
        let group = rank.create_group(&case.config()).unwrap();
        let handle = ll_handle(rank, group, &case);
        let mut buffers = LlBuffers::new(rank, &case);
        buffers.update(&handle, rank.stream);
        let code = buffers.combine(&case, &handle, rank.stream, false);
        refused(
            code,
            ncclInvalidArgument,
            "inputs.tokens has rows of more than 31744 bytes, which the kernels cannot sum",
        );
        handle.destroy();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    });
}

/// A staged operation whose descriptor names only a window, which NCCL EP would read too late.
#[test]
fn staged_tensors_give_data() {
    let _turn = turn();
    let case = LlCase { layout: NCCL_EP_LAYOUT_RANK_MAJOR, ..case() };
    with_ll_group(&case, |rank, group| {
        let handle = ll_handle(rank, group, &case);
        let window = WindowMemory::new(rank, 1 << 16);
        let mut call = Dispatch::new(rank, &case);
        call.given.update(&handle, rank.stream);
        let mut received = window.desc(0, ncclBfloat16, &[1, 3, 512], false);
        call.outputs.tokens = received.ptr();
        call.config.send_only = 1;
        let words = "outputs.tokens must give data, and not only a window, in a staged operation";
        refused(call.call(handle.handle, rank.stream), ncclInvalidArgument, words);
        // A whole one may have it.
        call.config.send_only = 0;
        nccl_ok(call.call(handle.handle, rank.stream));
        rank.sync();
        assert_eq!(window.get(0, 1024), case.token(1, 0, 0));
        window.free();
        handle.destroy();
    });
}
