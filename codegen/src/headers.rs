//! cbindgen over the C surfaces. Each header comes from named source files, so one declaration has one source.

use crate::Output;
use cbindgen::{Builder, Config, Style};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

struct Header {
    /// Where it is written, below include/.
    path: &'static str,
    /// What it is, for its first comment.
    about: &'static str,
    guard: &'static str,
    sources: &'static [&'static str],
    includes: &'static [&'static str],
    /// Types that the CUDA or NCCL headers declare the same way; repeating such a typedef is valid C11 and C++.
    foreign: &'static str,
    /// Items that the sources mention but other headers declare.
    exclude: &'static [&'static str],
    /// A header beside it for C++ alone, which it includes last.
    cpp: Option<&'static str>,
    /// Of the types and constants in bindings/src/generated.rs, those with one of these prefixes belong here.
    bindings: &'static [&'static str],
}

const BINDINGS: &str = "bindings/src/generated.rs";

const CUDA_STREAM: &str = "struct CUstream_st;\n/** A CUDA stream; the CUDA headers declare the same type. */\n\
                           typedef struct CUstream_st *cudaStream_t;";
const NCCL_WINDOW: &str = "struct ncclWindow_vidmem;\n/** An NCCL window; nccl.h declares the same type. */\n\
                           typedef struct ncclWindow_vidmem *ncclWindow_t;";

/// An object that callers see by its pointer only.
const EXT_OPTIONS: &str = "/** Options of a group, made by nvte_ep_ext_options_create. */\n\
                           typedef struct NVTEEpExtOptions NVTEEpExtOptions;";

/// What the CUDA headers only declare; cbindgen would give bindgen's stand-ins a body.
const CUDA_OPAQUE: &str = "typedef struct CUstream_st CUstream_st;\ntypedef struct CUevent_st CUevent_st;\n\
                           typedef struct CUgraphNode_st CUgraphNode_st;";
const NCCL_OPAQUE: &str = "#include <stdbool.h>\n\ntypedef struct ncclComm ncclComm;\ntypedef struct ncclWindow_vidmem ncclWindow_vidmem;\n\n\
                           /** A setting that is left to the library. */\n\
                           #define NCCL_CONFIG_UNDEF_INT (-2147483647 - 1)\n\
                           #define NCCL_CONFIG_UNDEF_PTR 0\n\
                           /** Starting value of a configuration. */\n\
                           #define NCCL_CONFIG_INITIALIZER \\\n\
                           \x20 {sizeof(ncclConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \\\n\
                           \x20  NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, \\\n\
                           \x20  NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \\\n\
                           \x20  NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \\\n\
                           \x20  NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT}\n\
                           /** Starting value of properties to ask for. */\n\
                           #define NCCL_COMM_PROPERTIES_INITIALIZER \\\n\
                           \x20 {sizeof(ncclCommProperties_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, 0, 0, 0, 0, 0, 0, \\\n\
                           \x20  NCCL_GIN_TYPE_NONE, 0, 0, NCCL_GIN_TYPE_NONE}";
const DRIVER_OPAQUE: &str = "typedef struct CUctx_st CUctx_st;\n\
                             typedef struct CUmod_st CUmod_st;\n\
                             typedef struct CUfunc_st CUfunc_st;";
/// Names that cuda.h gives to the present version of a function.
const DRIVER_VERSIONS: &str = "#define cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2\n\
                               #define cuEventDestroy cuEventDestroy_v2\n\
                               #define cuGraphExecUpdate cuGraphExecUpdate_v2\n\
                               #define cuMemAlloc cuMemAlloc_v2\n\
                               #define cuMemAllocHost cuMemAllocHost_v2\n\
                               #define cuMemFree cuMemFree_v2\n\
                               #define cuMemGetInfo cuMemGetInfo_v2\n\
                               #define cuMemcpyDtoH cuMemcpyDtoH_v2\n\
                               #define cuMemcpyDtoHAsync cuMemcpyDtoHAsync_v2\n\
                               #define cuMemcpyHtoD cuMemcpyHtoD_v2\n\
                               #define cuMemcpyHtoDAsync cuMemcpyHtoDAsync_v2\n\
                               #define cuStreamBeginCapture cuStreamBeginCapture_v2\n\
                               #define cuStreamDestroy cuStreamDestroy_v2\n\
                               #define cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v3";
const OPAQUE: &[&str] = &[
    "CUstream_st",
    "CUevent_st",
    "CUgraphNode_st",
    "CUctx_st",
    "CUmod_st",
    "CUfunc_st",
    "ncclComm",
    "ncclWindow_vidmem",
];

const HEADERS: &[Header] = &[
    Header {
        path: "nvte_ep/transformer_engine/transformer_engine.h",
        about: "NVTETensor: descriptions of arrays. Every function throws std::runtime_error on an error.",
        // TransformerEngine's, so that a unit cannot have its header and ours.
        guard: "TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_",
        sources: &["src/ffi/types.rs", "abi/tensor/src/exports.rs"],
        includes: &[],
        foreign: CUDA_STREAM,
        exclude: &["cudaStream_t"],
        cpp: Some("wrappers.h"),
        bindings: &[],
    },
    Header {
        path: "nvte_ep/transformer_engine/comm_window.h",
        about: "NVTECommWindow: a payload's place in symmetric memory.",
        guard: "NVTE_EP_TRANSFORMER_ENGINE_COMM_WINDOW_H_",
        sources: &["src/ffi/comm_window.rs"],
        includes: &[],
        foreign: NCCL_WINDOW,
        exclude: &["ncclWindow_t"],
        cpp: None,
        bindings: &[],
    },
    Header {
        path: "nvte_ep/transformer_engine/ep.h",
        about: "Expert parallelism, register_layer ABI. Every function throws std::runtime_error on an error.",
        guard: "NVTE_EP_TRANSFORMER_ENGINE_EP_H_",
        sources: &["src/ffi/register_layer.rs", "abi/register_layer/src/exports.rs"],
        includes: &["transformer_engine/comm_window.h", "transformer_engine/transformer_engine.h"],
        foreign: "",
        exclude: &[],
        cpp: None,
        bindings: &[],
    },
    // The same folder name for TransformerEngine's ABI, in a folder of its own: a program has one of the two on its path.
    // What is the same in both is only named there (SAME).
    Header {
        path: "nvte_ep/te/transformer_engine/comm_window.h",
        about: "NVTECommWindow: a payload's place in symmetric memory.",
        guard: "TRANSFORMER_ENGINE_COMM_WINDOW_H_",
        sources: &["src/ffi/te_window.rs"],
        includes: &[],
        foreign: NCCL_WINDOW,
        exclude: &["ncclWindow_t"],
        cpp: None,
        bindings: &[],
    },
    Header {
        path: "nvte_ep/te/transformer_engine/ep.h",
        about: "Expert parallelism, TransformerEngine >= 2.19 ABI. Every function throws std::runtime_error on an error.",
        guard: "TRANSFORMER_ENGINE_EP_H_",
        sources: &["src/ffi/te.rs", "abi/te/src/exports.rs"],
        includes: &["transformer_engine/comm_window.h", "transformer_engine/transformer_engine.h"],
        foreign: "/** Starting value of a configuration: its size, and zeroes. */\n\
                  #define NVTE_EP_GROUP_CONFIG_INIT {sizeof(NVTEEpGroupConfig)}\n\
                  #define NVTE_EP_LAYER_CONFIG_INIT {sizeof(NVTEEpLayerConfig)}",
        exclude: &[],
        cpp: None,
        bindings: &[],
    },
    Header {
        path: "nvte_ep/nvte_ep_ext.h",
        about: "nvte-ep's additions to the interface, for every ABI. Every function but nvte_ep_ext_version throws std::runtime_error.",
        guard: "NVTE_EP_EXT_H_",
        sources: &["src/ffi/ext.rs", "src/ffi/low_latency.rs", "abi/ext/src/exports.rs"],
        includes: &["<transformer_engine/ep.h>"],
        foreign: EXT_OPTIONS,
        exclude: &["NVTEEpExtOptions"],
        cpp: None,
        bindings: &[],
    },
    Header {
        path: "nvte_ep/nvte_ep_status.h",
        about: "The same functions as nvte_ep_try_..., which return a status and never throw. Not thrown, an error is nvte_ep_last_error().",
        guard: "NVTE_EP_STATUS_H_",
        sources: &[
            "src/ffi/status.rs",
            "abi/status.rs",
            "abi/register_layer/src/twins.rs",
            "abi/ext/src/twins.rs",
            "abi/tensor/src/twins.rs",
        ],
        includes: &["<nvte_ep_ext.h>"],
        foreign: "",
        exclude: &["LAST", "CUDA_OUT_OF_MEMORY"],
        cpp: None,
        bindings: &[],
    },
    Header {
        path: "nvte_ep/te/nvte_ep_status.h",
        about: "The same functions as nvte_ep_try_..., which return a status and never throw. Not thrown, an error is nvte_ep_last_error().",
        guard: "NVTE_EP_STATUS_H_",
        sources: &[
            "src/ffi/status.rs",
            "abi/status.rs",
            "abi/te/src/twins.rs",
            "abi/ext/src/twins.rs",
            "abi/tensor/src/twins.rs",
        ],
        includes: &["<nvte_ep_ext.h>"],
        foreign: "",
        exclude: &["LAST", "CUDA_OUT_OF_MEMORY"],
        cpp: None,
        bindings: &[],
    },
    Header {
        path: "nvte_ep_host/cuda_runtime_api.h",
        about: "The part of the CUDA runtime interface that the host runtime offers, for machines without CUDA.",
        guard: "NVTE_EP_HOST_CUDA_RUNTIME_API_H_",
        sources: &[
            BINDINGS,
            "host/src/surface/cuda_runtime.rs",
            "host/src/surface/cuda_memory.rs",
            "host/src/surface/cuda_stream.rs",
        ],
        includes: &[],
        foreign: CUDA_OPAQUE,
        exclude: &[],
        cpp: None,
        bindings: &["cuda", "CUuuid"],
    },
    Header {
        path: "nvte_ep_host/cuda.h",
        about: "The part of the CUDA driver interface that the host runtime offers, for machines without CUDA.",
        guard: "NVTE_EP_HOST_CUDA_H_",
        sources: &[
            BINDINGS,
            "host/src/surface/cuda_driver.rs",
            "host/src/surface/cuda_driver_memory.rs",
            "host/src/surface/cuda_driver_stream.rs",
            "host/src/surface/cuda_module.rs",
        ],
        includes: &["cuda_runtime_api.h"],
        foreign: DRIVER_OPAQUE,
        exclude: &["CUuuid_st", "CUuuid"],
        cpp: None,
        bindings: &["CU", "cudaError_enum"],
    },
    Header {
        path: "nvte_ep_host/nccl.h",
        about: "The part of NCCL's interface that the host runtime offers, for machines without NCCL.",
        guard: "NVTE_EP_HOST_NCCL_H_",
        sources: &[BINDINGS, "host/src/surface/nccl.rs"],
        includes: &["cuda_runtime_api.h"],
        foreign: NCCL_OPAQUE,
        exclude: &["VERSION"],
        cpp: None,
        bindings: &[
            "nccl",
            "NCCL_API",
            "NCCL_GIN",
            "NCCL_MAJOR",
            "NCCL_MINOR",
            "NCCL_PATCH",
            "NCCL_SPLIT",
            "NCCL_UNIQUE",
            "NCCL_VERSION",
            "NCCL_WIN",
        ],
    },
    Header {
        path: "nvte_ep_host/nvte_ep_host.h",
        about: "What the host runtime adds to the interfaces that it stands in for.",
        guard: "NVTE_EP_HOST_H_",
        sources: &["host/src/surface/host_ext.rs"],
        includes: &[],
        foreign: "",
        exclude: &[],
        cpp: None,
        bindings: &[],
    },
];

/// Headers of TransformerEngine's ABI that are the other folder's.
const SAME: [&str; 3] = ["transformer_engine/transformer_engine.h", "nvte_ep_ext.h", "nvte_ep.hpp"];

pub fn generate(root: &Path) -> Result<Vec<Output>, String> {
    HEADERS.iter().map(|header| one(root, header)).chain(SAME.iter().map(|path| Ok(same(path)))).collect()
}

/// A header that includes the one of the same name in the folder above `te`.
fn same(path: &str) -> Output {
    let up = "../".repeat(path.split('/').count());
    let text = format!(
        "/* The same for every ABI. Generated by `cargo run -p nvte-ep-codegen -- headers`. SPDX-License-Identifier: Apache-2.0 */\n\
         #include \"{up}{path}\"\n"
    );
    Output { path: Path::new("include/nvte_ep/te").join(path), text }
}

fn one(root: &Path, header: &Header) -> Result<Output, String> {
    let mut config = Config::from_file(root.join("cbindgen.toml"))?;
    config.header = Some(format!(
        "/* {} */\n/* Generated by `cargo run -p nvte-ep-codegen -- headers` from {}. SPDX-License-Identifier: Apache-2.0 */",
        header.about,
        header.sources.join(" and ")
    ));
    config.include_guard = Some(header.guard.into());
    // An include in angle brackets is searched for on the program's path, one of the two folders.
    for include in header.includes {
        match include.strip_prefix('<').and_then(|rest| rest.strip_suffix('>')) {
            Some(path) => config.sys_includes.push(path.into()),
            None => config.includes.push((*include).into()),
        }
    }
    config.after_includes = (!header.foreign.is_empty()).then(|| format!("\n{}", header.foreign));
    config.trailer = header.cpp.map(|file| format!("#ifdef __cplusplus\n#include \"{file}\"\n#endif"));
    if header.path.ends_with("/cuda.h") {
        config.trailer = Some(DRIVER_VERSIONS.into());
    }
    // Types of the sources that no function of theirs mentions.
    config.export.include = ["NVTECommWindow", "NVTENVFP44Over6Mode"].map(String::from).to_vec();
    config.export.exclude = header.exclude.iter().chain(OPAQUE).map(ToString::to_string).collect();
    if header.sources.contains(&BINDINGS) {
        let bindings = std::fs::read_to_string(root.join(BINDINGS)).map_err(|e| e.to_string())?;
        let belongs = |item: &str| header.bindings.iter().any(|prefix| item.starts_with(prefix));
        config.export.exclude.extend(items(&bindings).filter(|item| !belongs(item)).map(ToString::to_string));
        // Of an enumeration that no function takes, its constants are used all the same.
        let enumerations = enumerations(&bindings);
        let own = enumerations.iter().filter(|(_, constants)| constants.iter().any(|(name, _)| belongs(name)));
        config.export.include.extend(own.map(|(name, _)| (*name).to_owned()));
    }
    // A type and a function may share a name in C only where the type has no typedef.
    config.style = if header.path.ends_with("nvte_ep_host.h") { Style::Tag } else { Style::Both };
    let mut builder = Builder::new().with_config(config);
    for source in header.sources {
        builder = builder.with_src(if *source == BINDINGS { types_only(root)? } else { root.join(source) });
    }
    let bindings = builder.generate().map_err(|e| format!("{}: {e}", header.path))?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).map_err(|e| e.to_string())?;
    Ok(Output { path: Path::new("include").join(header.path), text: in_c_words(&text) })
}

/// Enumerations of the C headers, and the constants of each with their values.
type Enumerations<'a> = BTreeMap<&'a str, Vec<(&'a str, &'a str)>>;

/// Of an enumeration, bindgen makes an integer type and constants of that type.
fn enumerations(bindings: &str) -> Enumerations<'_> {
    let mut found = Enumerations::new();
    for line in bindings.lines() {
        let constant = line.strip_prefix("pub const ").and_then(|rest| rest.strip_suffix(';')?.split_once(" = "));
        if let Some(((name, kind), value)) = constant.and_then(|(left, value)| Some((left.split_once(": ")?, value))) {
            found.entry(kind).or_default().push((name, value));
        }
    }
    // The others are constants of a plain type.
    found.retain(|kind, _| bindings.contains(&integer_type(kind)));
    found
}

/// The line by which bindgen declares an enumeration.
fn integer_type(name: &str) -> String {
    format!("pub type {name} = ::std::os::raw::c_uint;\n")
}

/// A copy of bindgen's output for cbindgen, which never compiles it: without the prototypes, which it would declare as well,
/// with enum typedefs as types, since it does not follow `use`, and with enumerations as such. These are types of their own in
/// C++, where functions are overloaded by them, as with CUDA's and NCCL's headers.
fn types_only(root: &Path) -> Result<PathBuf, String> {
    let text = std::fs::read_to_string(root.join(BINDINGS)).map_err(|e| e.to_string())?;
    let types = text.split("\nunsafe extern \"C\" {").next().expect("split gives a first part");
    let enumerations = enumerations(&text);
    let is_of_enumeration = |line: &str| {
        let constant = line.strip_prefix("pub const ").and_then(|rest| rest.split_once(": "));
        constant.and_then(|(_, rest)| rest.split(' ').next()).is_some_and(|kind| enumerations.contains_key(kind))
    };
    let mut types: String = types
        .lines()
        .filter(|line| {
            !is_of_enumeration(line) && !enumerations.keys().any(|name| integer_type(name).trim_end() == *line)
        })
        .map(|line| match line.strip_prefix("pub use self::").and_then(|rest| rest.split_once(" as ")) {
            Some((from, to)) => format!("pub type {} = {from};\n", to.trim_end_matches(';')),
            None => format!("{line}\n"),
        })
        .collect();
    for (name, constants) in &enumerations {
        let constants: String = constants.iter().map(|(name, value)| format!("    {name} = {value},\n")).collect();
        let _ = write!(types, "#[repr(C)]\npub enum {name} {{\n{constants}}}\n");
    }
    let path = root.join("target/codegen/bindings_types.rs");
    std::fs::create_dir_all(path.parent().expect("it has a folder")).map_err(|e| e.to_string())?;
    std::fs::write(&path, types).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

/// Names of the types and constants in bindgen's output.
fn items(bindings: &str) -> impl Iterator<Item = &str> {
    bindings.lines().filter_map(|line| {
        let line = line.strip_prefix("pub ")?;
        let rest = ["const ", "type ", "struct ", "union "].iter().find_map(|kind| line.strip_prefix(kind))?;
        rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()
    })
}

/// Rust's "# Safety" heading in a C reader's words, and a field's name as C has it (bindgen avoids Rust's keyword).
fn in_c_words(text: &str) -> String {
    text.replace(" * # Safety\n *\n", " * The caller must ensure:\n")
        .replace(" * # Safety\n", " * The caller must ensure:\n")
        .replace(" type_;", " type;")
}
