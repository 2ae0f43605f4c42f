//! The structures that host and kernels of the native engine share, as a C++ compiler lays out `kernels/native/layout.h`, against the
//! Rust ones; and the shared memory that a launch asks for, against what the kernels take.

#[path = "../src/backend/engine/native/layout.rs"]
#[allow(dead_code, reason = "the test looks at some of it")]
mod layout;

// What layout.rs asks of the crate.
mod config {
    pub use nvte_ep_core::config::*;
}
mod dtype {
    pub use nvte_ep_core::dtype::*;
}
mod limits {
    pub use nvte_ep_core::limits::*;
}

use layout::*;
use nvte_ep_core::config::{Dialect, GroupConfig, GroupRequest};
use nvte_ep_core::dtype::DType;
use nvte_ep_core::limits::NATIVE;
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

/// What `program` prints, a name and a number a line. The compiler is that of the C++ tests.
fn printed(program: &str) -> BTreeMap<String, u64> {
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("layout.cc"), folder.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    let status =
        Command::new(compiler).arg("-std=c++17").arg("-I").arg(kernels).arg(&source).arg("-o").arg(&binary).status();
    assert!(status.unwrap().success());
    let output = Command::new(&binary).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, n)| (name.to_owned(), n.parse().unwrap()))
        .collect()
}

/// A program over the kernels' headers.
fn main_of(statements: &str) -> String {
    let headers = ["\"native/combine.h\"", "\"native/dispatch.h\"", "\"native/prepare.h\"", "<cstddef>", "<cstdio>"];
    let includes: String = headers.iter().map(|header| format!("#include {header}\n")).collect();
    format!("{includes}using namespace nvte_ep;\nint main() {{\n{statements}}}\n")
}

macro_rules! structures {
    ($($name:ident { $($field:ident),* })*) => {
        fn in_rust() -> BTreeMap<String, u64> {
            let mut all = BTreeMap::new();
            $(
                all.insert(stringify!($name).to_owned(), size_of::<$name>() as u64);
                $( all.insert(concat!(stringify!($name), ".", stringify!($field)).to_owned(), offset_of!($name, $field) as u64); )*
            )*
            all
        }

        fn in_cpp() -> String {
            let mut text = String::new();
            $(
                text += concat!("std::printf(\"", stringify!($name), " %zu\\n\", sizeof(", stringify!($name), "));\n");
                $( text += concat!("std::printf(\"", stringify!($name), ".", stringify!($field), " %zu\\n\", offsetof(", stringify!($name), ", ", stringify!($field), "));\n"); )*
            )*
            main_of(&text)
        }
    };
}

structures! {
    Status { failed, peer, seen, wanted, abort, overflowed, needed, invalid_indices }
    Window { group_tokens, groups }
    Group {
        peers, own, counters, histogram, status, timeout_ns, exchange_offset, exchange_stride, staged_offset, staged_weights_offset,
        summed_offset, summed_weights_offset, row_stride, weight_stride, rank, ranks, blocks, experts, local_experts, staged, summed
    }
    Handle { meta, experts, targets, slots, zones, counts, alive, top_k, width }
    PrepareArguments {
        group, handle, topk_idx, token_counts, total, header, capacity, header_words, tokens, alignment, indices_are_64, counts_are_64,
        total_is_64, drop, by_place
    }
    DispatchArguments {
        group, handle, tokens, scales, weights, recv_tokens, recv_scales, recv_weights, rows, row_bytes, scale_bytes, piece_bytes, stages,
        drop
    }
    CombineArguments {
        group, handle, rows, row_weights, result, weights, row_bytes, piece_bytes, peer_stages, own_stages, row_type,
        with_weights
    }
}

#[test]
fn host_and_kernels_agree_on_every_structure() {
    assert_eq!(printed(&in_cpp()), in_rust());
    let mut expected: BTreeMap<String, u64> = [
        ("kSignalKinds", SIGNAL_KINDS),
        ("kCounters", COUNTERS),
        ("kExchangeHeader", EXCHANGE_HEADER),
        ("sizeof(Work)", WORK_BYTES),
        ("sizeof(Piece)", PIECE_STRUCT_BYTES),
        ("DispatchShared::kStagers", STAGERS),
        ("Plan::kGroups", PLAN_GROUPS),
        ("kPrepareThreads", PREPARE_THREADS.into()),
        ("kDispatchThreads", DISPATCH_THREADS.into()),
        ("kCombineThreads", COMBINE_THREADS.into()),
    ]
    .map(|(name, number)| (name.to_owned(), number))
    .into();
    let row_types = [("kBFloat16", DType::BFloat16), ("kFloat16", DType::Float16), ("kFloat32", DType::Float32)];
    for (name, dtype) in row_types {
        expected.insert(name.to_owned(), ROW_TYPES.iter().position(|known| *known == dtype).unwrap() as u64);
    }
    let waits = ["kWaitPrepare", "kWaitStaged", "kWaitPulled", "kWaitSummed", "kWaitTaken"];
    expected.extend(waits.iter().zip(WAITS).map(|(name, (kind, _))| ((*name).to_owned(), kind.into())));
    let prints = |name: &str| format!("std::printf(\"{name} %llu\\n\", (unsigned long long)({name}));\n");
    let prints: String = expected.keys().map(String::as_str).chain(["sizeof(Meta)"]).map(prints).collect();
    let mut numbers = printed(&main_of(&prints));
    assert!(numbers.remove("sizeof(Meta)").unwrap() <= META_BYTES);
    assert_eq!(numbers, expected);
}

/// A launch asks for as much shared memory as the kernel lays out. On a CPU a barrier takes more than the GPU's 8 bytes, which is
/// taken off.
#[test]
fn a_launch_has_the_shared_memory_that_its_kernel_takes() {
    for (ranks, experts, top_k, row_bytes, scale_bytes) in [
        (1, 8, 2, 512, 0),
        (4, 64, 8, 14336, 0),
        (8, 64, 8, 7168, 224),
        (3, 51, 32, 28672, 0),
        (72, 288, 8, 16384, 0),
        (72, 4032, 64, 32768, 0),
        (8, 4096, 64, 14336, 448),
        (1, 4096, 64, 14336, 0),
    ] {
        let request = GroupRequest {
            ep_size: ranks,
            num_experts: experts,
            max_tokens_per_rank: 128,
            max_recv_tokens_per_rank: 4096,
            hidden_dim: 16384,
            max_num_sms: 0,
            max_token_dtype: DType::Float32 as i32,
            zero_copy: 0,
            allow_handle_mem_reloc: 1,
            num_topk: top_k,
            drop_on_overflow: 0,
            dialect: Dialect::TE,
        };
        let config = GroupConfig::of(request, &NATIVE).unwrap();
        let group = GroupLayout::of(&config, 32).group;
        let width = (top_k as u32).min(group.local_experts).next_multiple_of(4);
        let dispatch = dispatch_stages(&group, width, row_bytes, scale_bytes);
        let combine = combine_stages(&group, width, row_bytes);
        let window = |window: Window| format!("{{{}, {}}}", window.group_tokens, window.groups);
        let (staged, summed) = (window(group.staged), window(group.summed));
        let (weights, local, warps) = (group.weight_stride, group.local_experts, PREPARE_THREADS / 32);
        let (pieces, piece, combine_piece) = (dispatch.stages[0], dispatch.piece_bytes, combine.piece_bytes);
        let [peers, own] = combine.stages;
        let program = format!(
            "Group g{{}};
             g.ranks = {ranks}, g.experts = {experts}, g.local_experts = {local}, g.weight_stride = {weights};
             g.staged = {staged}, g.summed = {summed};
             DispatchArguments d{{}};
             d.group = g, d.handle.width = {width}, d.piece_bytes = {piece}, d.scale_bytes = {scale_bytes}, d.stages = {pieces};
             CombineArguments c{{}};
             c.group = g, c.handle.width = {width}, c.piece_bytes = {combine_piece}, c.peer_stages = {peers}, c.own_stages = {own};
             const u64 more = sizeof(Barrier) - {BARRIER_BYTES};
             const u64 of_dispatch = DispatchShared::kStagers + 2 * d.stages + Plan::kGroups;
             const u64 of_combine = 2 * ({peers} + {own}) + 2 * (2 * Line::kTold + Plan::kGroups);
             std::printf(\"prepare %llu\\n\", PrepareShared::size(g, {warps}));
             std::printf(\"dispatch %llu\\n\", DispatchShared::size(d) - more * of_dispatch);
             std::printf(\"combine %llu\\n\", CombineShared::size(c) - more * of_combine);\n"
        );
        let expected = [
            ("prepare", prepare_shared(&group)),
            ("dispatch", dispatch.shared_bytes),
            ("combine", combine.shared_bytes),
        ];
        let expected: BTreeMap<String, u64> = expected.map(|(name, bytes)| (name.to_owned(), bytes.into())).into();
        assert_eq!(printed(&main_of(&program)), expected, "{ranks} ranks, rows of {row_bytes} bytes");
        assert!(expected.values().all(|bytes| *bytes <= SHARED_BYTES), "{expected:?}");
        assert!(pieces >= 4 && peers >= 1 && own >= 2, "{pieces} {peers} {own}");
    }
}
