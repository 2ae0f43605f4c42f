//! bindgen over CUDA, NCCL and NCCL EP as their wheels ship them.

use crate::Output;
use bindgen::{Abi, EnumVariation};
use std::path::Path;

/// What is taken from the headers. Types and constants follow from the functions, but for those named here.
const FUNCTIONS: &[&str] = &[
    "ncclEp.*",
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclCommInit(Rank|RankConfig|All)",
    "ncclCommSplit",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommGetAsyncError",
    "ncclCommCount",
    "ncclCommUserRank",
    "ncclCommCuDevice",
    "ncclCommQueryProperties",
    "ncclAllGather",
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclReduce(Scatter)?",
    "nccl(Send|Recv)",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclMemAlloc",
    "ncclMemFree",
    "ncclCommWindow(Register|Deregister)",
    "ncclWinGetUserPtr",
    "ncclGetPeerDevicePointer",
    "cu(Init|DriverGetVersion|GetErrorName|GetErrorString)",
    "cuDevice(Get|GetCount|GetName|GetAttribute)",
    "cuDevicePrimaryCtx(Retain|Release)(_v2)?",
    "cuCtx(GetCurrent|SetCurrent|GetDevice|Synchronize)",
    "cuStream(Create|Destroy(_v2)?|Query|Synchronize|IsCapturing|WaitEvent|GetCtx)",
    "cuEvent(Create|Destroy(_v2)?|Record|Query|Synchronize|ElapsedTime(_v2)?)",
    "cuMem(Alloc_v2|Free_v2|AllocHost_v2|FreeHost|GetInfo_v2|cpyAsync|cpyHtoDAsync_v2|cpyDtoHAsync_v2|cpyHtoD_v2|cpyDtoH_v2|setD8Async|setD32Async)",
    "cuPointerGetAttributes?",
    "cuModule(LoadData|Unload|GetFunction)",
    "cuLaunchKernel",
    "cuFuncSetAttribute",
    "cuThreadExchangeStreamCaptureMode",
];
const TYPES: &[&str] = &[
    "cudaError",
    "cudaMemcpyKind",
    "cudaMemoryType",
    "cudaDeviceAttr",
    "cudaStreamCaptureMode",
    "cudaStreamCaptureStatus",
    "cudaPointerAttributes",
    "cudaDeviceProp",
    "dim3",
    "cudaGraphExecUpdate(Result|ResultInfo)",
    "nccl(DataType|RedOp|Result)_t",
    "CU(stream|event)_flags",
];
const CONSTANTS: &[&str] = &[
    "NCCL_(API_MAGIC|CONFIG_UNDEF_INT|SPLIT_NOCOLOR)",
    "NCCL_(MAJOR|MINOR|PATCH|VERSION_CODE|UNIQUE_ID_BYTES)",
    "NCCL_WIN_.*",
    "NCCL_EP_(MAJOR|MINOR|PATCH|VERSION|API_VERSION)",
    "cuda(Stream(Default|NonBlocking)|Event(Default|BlockingSync|DisableTiming|Interprocess))",
];

pub fn generate(wheels: &Path) -> Result<Output, String> {
    let mut builder = bindgen::Builder::default()
        .header_contents(
            "wrapper.h",
            "#include <nccl_ep.h>\n#include <nccl_device/core.h>\n#include <cuda_runtime_api.h>\n",
        )
        .generate_comments(false)
        .default_enum_style(EnumVariation::Consts)
        .prepend_enum_name(false)
        .layout_tests(true)
        .derive_default(true)
        .merge_extern_blocks(true)
        .sort_semantically(true)
        .override_abi(Abi::CUnwind, "ncclEp.*")
        .rust_target(bindgen::RustTarget::stable(88, 0).map_err(|e| e.to_string())?)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .clang_args(["-x", "c", "-std=c11"]);
    for include in ["nccl/ep/include", "nvidia/nccl/include", "nvidia/cu13/include", "nvidia/cu13/include/cccl"] {
        builder = builder.clang_arg(format!("-I{}", wheels.join(include).display()));
    }
    for function in FUNCTIONS {
        builder = builder.allowlist_function(function);
    }
    for ty in TYPES {
        builder = builder.allowlist_type(ty);
    }
    for constant in CONSTANTS {
        builder = builder.allowlist_var(constant);
    }
    let text = builder.generate().map_err(|e| e.to_string())?.to_string();
    Ok(Output { path: "bindings/src/generated.rs".into(), text })
}
