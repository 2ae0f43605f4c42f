//! Dispatch of quantised tokens with their scales: bytes arrive as they were sent, and every rule is named.

#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

mod common;

use std::ptr;

use common::reference::*;
use common::*;
use nvte_ep_bindings::*;

/// Two packed FP4 values, a type that NCCL EP adds to NCCL's.
const FLOAT4X2: ncclDataType_t = 12;

fn element(datatype: ncclDataType_t) -> usize {
    match datatype {
        ncclFloat32 => 4,
        ncclFloat16 | ncclBfloat16 => 2,
        _ => 1,
    }
}

/// Bytes of every value, those of NaNs and infinities included.
fn bytes_of(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| noise(seed, i).to_bits() as u8 ^ (i * 31 + seed) as u8).collect()
}

/// One kind of rows: its type, columns, and bytes of a row.
#[derive(Clone, Copy)]
struct Kind {
    datatype: ncclDataType_t,
    columns: usize,
}

impl Kind {
    fn row_bytes(self) -> usize {
        self.columns * element(self.datatype)
    }
}

/// Dispatches and compares every byte of the received tokens, scales and weights.
fn dispatch(session: &Session, handle: &TestHandle, kinds: [Kind; 2], forward: bool) {
    let (case, rank) = (session.case, session.rank);
    let tokens = case.tokens(rank.rank);
    let sent =
        |r: usize, lane: usize| bytes_of(50 + 10 * r as u64 + lane as u64, case.tokens(r) * kinds[lane].row_bytes());
    let inputs: Vec<Buffer<u8>> = (0..2).map(|lane| Buffer::of(&sent(rank.rank, lane), rank.stream)).collect();
    let outputs: Vec<Buffer<u8>> =
        kinds.iter().map(|kind| Buffer::of(&vec![0xA5; case.capacity * kind.row_bytes()], rank.stream)).collect();
    let own: Vec<f32> = (0..tokens * case.top_k).map(|i| weight(rank.rank, i)).collect();
    let own = Buffer::of(&own, rank.stream);
    let there = Buffer::of(&vec![-7f32; case.capacity], rank.stream);
    let mut sent_descs: Vec<Desc> =
        (0..2).map(|lane| Desc::of(&inputs[lane], kinds[lane].datatype, &[tokens, kinds[lane].columns])).collect();
    let mut received_descs: Vec<Desc> = (0..2)
        .map(|lane| Desc::of(&outputs[lane], kinds[lane].datatype, &[case.capacity, kinds[lane].columns]))
        .collect();
    let mut own_desc = Desc::of(&own, ncclFloat32, &[tokens, case.top_k]);
    let mut there_desc = Desc::of(&there, ncclFloat32, &[case.capacity]);
    let optional = |pointer: *mut ncclEpTensor_t| if forward { pointer } else { ptr::null_mut() };
    let inputs = ep_struct!(ncclEpDispatchInputs_t {
        tokens: sent_descs[0].ptr(),
        scales: sent_descs[1].ptr(),
        topk_weights: optional(own_desc.ptr()),
    });
    let outputs_struct = ep_struct!(ncclEpDispatchOutputs_t {
        tokens: received_descs[0].ptr(),
        scales: received_descs[1].ptr(),
        topk_weights: optional(there_desc.ptr()),
    });
    let config = ep_struct!(ncclEpDispatchConfig_t {
        pass_direction: if forward { NCCL_EP_FWD_PASS } else { NCCL_EP_BWD_PASS },
        quant_recipe: NCCL_EP_DISP_QUANT_FWD,
    });
    // SAFETY: all pointers are ours and valid.
    nccl_ok(unsafe {
        ncclEpDispatch(
            handle.handle,
            &raw const inputs,
            &raw const outputs_struct,
            ptr::null(),
            &raw const config,
            rank.stream,
        )
    });

    let map = expected(case, rank.rank);
    let survivors = survivors(case, rank.rank);
    let written = if case.drop { case.capacity } else { map.rows.len() };
    for (lane, kind) in kinds.iter().enumerate() {
        let bytes = kind.row_bytes();
        let mut rows = vec![0xA5; case.capacity * bytes];
        rows[..written * bytes].fill(0);
        for (slot, origin) in map.rows.iter().enumerate().take(case.capacity) {
            let Some(origin) = origin.filter(|o| survivors.contains(&(o.rank, o.token))) else { continue };
            let row = &sent(origin.rank, lane)[origin.token * bytes..][..bytes];
            rows[slot * bytes..][..bytes].copy_from_slice(row);
        }
        assert_eq!(outputs[lane].get(), rows, "lane {lane} of rank {}, type {}", rank.rank, kind.datatype);
    }
    let mut weights = vec![-7f32; case.capacity];
    if forward {
        weights[..written].fill(0.0);
        for (slot, origin) in map.rows.iter().enumerate().take(case.capacity) {
            let Some(origin) = origin.filter(|o| survivors.contains(&(o.rank, o.token))) else { continue };
            let positions = origin.token * case.top_k..(origin.token + 1) * case.top_k;
            let last = positions.rev().find(|p| case.topk[origin.rank][*p] == origin.expert as i64).unwrap();
            weights[slot] = weight(origin.rank, last);
        }
    }
    assert_eq!(there.get(), weights, "weights of rank {}", rank.rank);
}

fn with_budget(case: &Case, token_bytes: usize, work: impl Fn(&Session, &TestHandle) + Sync) {
    run_ranks(case.ranks, |rank| {
        let mut config = group_config(case.experts, case.max_tokens, case.capacity, token_bytes);
        config.overflow_policy = if case.drop { NCCL_EP_OVERFLOW_DROP } else { 0 };
        let group = rank.create_group(&config).unwrap();
        let handle = TestHandle::new(rank, group, case.top_k, case.alignment);
        let session = Session { case, rank, group };
        session.update(&handle);
        work(&session, &handle);
        handle.destroy();
        rank.destroy_group(group);
    });
}

#[test]
fn every_pair_of_types_arrives_byte_for_byte() {
    let mut case = Case::new(2, 8, 3, &[7, 5], |rank, token, k| ((rank + token * 3 + k) % 8) as i64);
    case.alignment = 8;
    with_budget(&case, 1024, |session, handle| {
        for datatype in [ncclFloat32, ncclFloat16, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, FLOAT4X2] {
            for scales in [ncclFloat32, ncclFloat16, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclUint8] {
                for forward in [true, false] {
                    let kinds = [Kind { datatype, columns: 48 }, Kind { datatype: scales, columns: 16 }];
                    dispatch(session, handle, kinds, forward);
                }
            }
        }
    });
}

#[test]
fn drops_hit_tokens_and_scales_alike() {
    let mut case = Case::new(2, 4, 2, &[6, 6], |_, token, k| ((token % 2) + 2 * k) as i64);
    case.drop = true;
    for (capacity, alignment) in [(10, 8), (8, 4), (6, 1)] {
        case.capacity = capacity;
        case.alignment = alignment;
        let kinds = [Kind { datatype: ncclFloat8e4m3, columns: 64 }, Kind { datatype: ncclFloat32, columns: 4 }];
        with_budget(&case, 80, |session, handle| {
            dispatch(session, handle, kinds, true);
            dispatch(session, handle, kinds, false);
        });
    }
}

#[test]
fn ranks_without_tokens_take_part() {
    let case = Case::new(3, 12, 2, &[0, 4, 0], spread(12));
    let kinds = [Kind { datatype: ncclFloat8e5m2, columns: 32 }, Kind { datatype: ncclUint8, columns: 16 }];
    with_budget(&case, 48, |session, handle| dispatch(session, handle, kinds, true));
}

/// What a refused call gives: changes to a good one, and the words that name the rule.
struct Change {
    words: &'static str,
    apply: fn(&mut Call),
}

struct Call {
    sent: Desc,
    sent_scales: Desc,
    received: Desc,
    received_scales: Desc,
    config: ncclEpDispatchConfig_t,
    scales_given: [bool; 2],
}

fn offset(desc: &mut Desc, bytes: usize) {
    desc.tensor.data = desc.tensor.data.wrapping_byte_add(bytes);
}

fn resize(desc: &mut Desc, sizes: &[usize]) {
    *desc = Desc::new(desc.tensor.data, desc.tensor.datatype, sizes);
}

#[test]
fn every_rule_is_named() {
    let case = Case::new(1, 4, 1, &[4], |_, token, _| (token % 4) as i64);
    with_budget(&case, 80, |session, handle| {
        let stream = session.rank.stream;
        let rows = case.capacity;
        let memory: Vec<Buffer<u8>> = (0..4).map(|_| Buffer::of(&vec![1; (rows + 8) * 256], stream)).collect();
        let changes = [
            Change { words: "round_scales is 1", apply: |c| c.config.round_scales = 1 },
            Change { words: "quant_recipe 2 is not one of HT mode", apply: |c| c.config.quant_recipe = 2 },
            Change { words: "scales are given without a quant_recipe", apply: |c| c.config.quant_recipe = 0 },
            Change { words: "inputs.scales is missing", apply: |c| c.scales_given[0] = false },
            Change { words: "outputs.scales is missing", apply: |c| c.scales_given[1] = false },
            Change {
                words: "inputs.tokens must be float32, float16",
                apply: |c| {
                    c.sent.tensor.datatype = ncclUint8;
                    c.received.tensor.datatype = ncclUint8;
                },
            },
            Change {
                words: "inputs.scales must be float32, float16",
                apply: |c| {
                    c.sent_scales.tensor.datatype = ncclInt8;
                    c.received_scales.tensor.datatype = ncclInt8;
                },
            },
            Change { words: "inputs.tokens must be 2D", apply: |c| resize(&mut c.sent, &[4 * 64]) },
            Change { words: "inputs.scales must be 2D", apply: |c| resize(&mut c.sent_scales, &[4 * 16]) },
            Change { words: "outputs.tokens must be 2D", apply: |c| resize(&mut c.received, &[4 * 64]) },
            Change { words: "outputs.scales must be 2D", apply: |c| resize(&mut c.received_scales, &[4 * 16]) },
            Change {
                words: "inputs.tokens must have rows of a positive multiple of 16 bytes",
                apply: |c| {
                    resize(&mut c.sent, &[4, 56]);
                    let rows = c.received.tensor.sizes;
                    // SAFETY: the descriptor has two sizes.
                    let rows = unsafe { *rows };
                    resize(&mut c.received, &[rows, 56]);
                },
            },
            Change {
                words: "inputs.scales must have rows of a positive multiple of 16 bytes",
                apply: |c| resize(&mut c.sent_scales, &[4, 8]),
            },
            Change {
                words: "inputs.scales must have rows of a positive multiple of 16 bytes",
                apply: |c| resize(&mut c.sent_scales, &[4, 0]),
            },
            Change {
                words: "inputs.scales must have as many rows as the tokens, 4",
                apply: |c| resize(&mut c.sent_scales, &[3, 16]),
            },
            Change {
                words: "outputs.scales must have as many rows as the tokens",
                apply: |c| resize(&mut c.received_scales, &[3, 16]),
            },
            Change { words: "inputs.tokens must start at a multiple of 16 bytes", apply: |c| offset(&mut c.sent, 8) },
            Change {
                words: "inputs.scales must start at a multiple of 16 bytes",
                apply: |c| offset(&mut c.sent_scales, 8),
            },
            Change {
                words: "outputs.tokens must start at a multiple of 16 bytes",
                apply: |c| offset(&mut c.received, 8),
            },
            Change {
                words: "outputs.scales must start at a multiple of 16 bytes",
                apply: |c| offset(&mut c.received_scales, 8),
            },
            Change {
                words: "inputs.tokens has rows of 96 bytes, scales included, the group's max_token_bytes is 80",
                apply: |c| {
                    resize(&mut c.sent_scales, &[4, 32]);
                    // SAFETY: the descriptor has two sizes.
                    let rows = unsafe { *c.received.tensor.sizes };
                    resize(&mut c.received_scales, &[rows, 32]);
                },
            },
            Change {
                words: "outputs.tokens must have the type and width of inputs.tokens",
                apply: |c| c.received.tensor.datatype = ncclFloat8e5m2,
            },
            Change {
                words: "outputs.scales must have the type and width of inputs.scales",
                apply: |c| c.received_scales.tensor.datatype = ncclFloat8e5m2,
            },
            Change {
                words: "outputs.scales must be in a window if and only if outputs.tokens is",
                apply: |c| c.received.tensor.win_hdl = 64 as ncclWindow_t,
            },
            Change {
                words: "outputs.tokens must have at least max_recv_tokens_per_rank",
                apply: |c| {
                    resize(&mut c.received, &[3, 64]);
                    resize(&mut c.received_scales, &[3, 16]);
                },
            },
        ];
        let call = |change: Option<&Change>| {
            let mut call = Call {
                sent: Desc::of(&memory[0], ncclFloat8e4m3, &[4, 64]),
                sent_scales: Desc::of(&memory[1], ncclUint8, &[4, 16]),
                received: Desc::of(&memory[2], ncclFloat8e4m3, &[rows, 64]),
                received_scales: Desc::of(&memory[3], ncclUint8, &[rows, 16]),
                config: ep_struct!(ncclEpDispatchConfig_t {
                    pass_direction: NCCL_EP_BWD_PASS,
                    quant_recipe: NCCL_EP_DISP_QUANT_FWD,
                }),
                scales_given: [true; 2],
            };
            if let Some(change) = change {
                (change.apply)(&mut call);
            }
            let given = |given: bool, desc: &mut Desc| if given { desc.ptr() } else { ptr::null_mut() };
            let inputs = ep_struct!(ncclEpDispatchInputs_t {
                tokens: call.sent.ptr(),
                scales: given(call.scales_given[0], &mut call.sent_scales),
            });
            let outputs = ep_struct!(ncclEpDispatchOutputs_t {
                tokens: call.received.ptr(),
                scales: given(call.scales_given[1], &mut call.received_scales),
            });
            // SAFETY: all pointers are ours and valid.
            unsafe {
                ncclEpDispatch(
                    handle.handle,
                    &raw const inputs,
                    &raw const outputs,
                    ptr::null(),
                    &raw const call.config,
                    stream,
                )
            }
        };
        nccl_ok(call(None));
        for change in &changes {
            assert_eq!(call(Some(change)), ncclInvalidArgument, "{}", change.words);
            assert!(nccl_error().contains(change.words), "{:?} is not in {:?}", change.words, nccl_error());
        }
        nccl_ok(call(None));
    });
}

#[test]
fn a_plain_combine_refuses_quantised_types() {
    let case = Case::new(1, 4, 1, &[4], |_, token, _| (token % 4) as i64);
    with_budget(&case, 80, |session, handle| {
        let rows = Buffer::<u8>::new(case.capacity * 64, session.rank.stream);
        for datatype in [ncclFloat8e4m3, ncclFloat8e5m2, FLOAT4X2, ncclUint8] {
            let mut input = Desc::of(&rows, datatype, &[case.capacity, 64]);
            let mut output = Desc::of(&rows, datatype, &[4, 64]);
            let inputs = ep_struct!(ncclEpCombineInputs_t { tokens: input.ptr() });
            let outputs = ep_struct!(ncclEpCombineOutputs_t { tokens: output.ptr() });
            let stream = session.rank.stream;
            // SAFETY: all pointers are ours and valid.
            let code =
                unsafe { ncclEpCombine(handle.handle, &raw const inputs, &raw const outputs, ptr::null(), stream) };
            assert_eq!(code, ncclInvalidArgument);
            assert!(nccl_error().contains("must be bfloat16, float16 or float32"), "{}", nccl_error());
        }
    });
}
