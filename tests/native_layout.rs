//! The structures that host and kernels of the native engine share, as a C++ compiler lays out `kernels/native/layout.h`, against the
//! Rust ones; and the shared memory that a launch asks for, against what the kernels take.

#[path = "../src/backend/engine/native/layout.rs"]
#[allow(dead_code, reason = "the test looks at some of it")]
mod layout;

// What layout.rs asks of the crate.
mod config {
    pub use nvte_ep_core::config::*;
}
mod limits {
    pub use nvte_ep_core::limits::*;
}

use layout::*;
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
        .map(|line| line.split_once(' ').unwrap())
        .map(|(name, n)| (name.to_owned(), n.parse().unwrap()))
        .collect()
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
            let mut text = String::from("#include \"native/combine.h\"\n#include \"native/dispatch.h\"\n#include <cstddef>\n#include <cstdio>\nusing namespace nvte_ep;\nint main() {\n");
            $(
                text += concat!("std::printf(\"", stringify!($name), " %zu\\n\", sizeof(", stringify!($name), "));\n");
                $( text += concat!("std::printf(\"", stringify!($name), ".", stringify!($field), " %zu\\n\", offsetof(", stringify!($name), ", ", stringify!($field), "));\n"); )*
            )*
            text + "}\n"
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
        total_is_64, drop
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
    let numbers = printed(
        "#include \"native/combine.h\"\n#include \"native/dispatch.h\"\n#include <cstdio>\nusing namespace nvte_ep;\nint main() {\n\
         std::printf(\"signals %u\\ncounters %u\\nheader %llu\\nmeta %zu\\nwork %zu\\npiece %zu\\nstagers %u\\nplan %u\\n\", \
         unsigned(kSignalKinds), unsigned(kCounters), kExchangeHeader, sizeof(Meta), sizeof(Work), sizeof(Piece), \
         DispatchShared::kStagers, Plan::kGroups); }\n",
    );
    let expected = [
        ("signals", SIGNAL_KINDS),
        ("counters", COUNTERS),
        ("header", EXCHANGE_HEADER),
        ("work", WORK_BYTES),
        ("piece", PIECE_STRUCT_BYTES),
        ("stagers", STAGERS),
        ("plan", PLAN_GROUPS),
    ];
    for (name, number) in expected {
        assert_eq!(numbers[name], number, "{name}");
    }
    assert!(numbers["meta"] <= META_BYTES);
}
