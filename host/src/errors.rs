//! Names and descriptions of error codes.

use std::ffi::CStr;

use nvte_ep_bindings::*;

/// Code, name in the runtime, name in the driver, description.
type Row = (u32, &'static CStr, &'static CStr, &'static CStr);

#[rustfmt::skip]
const CODES: &[Row] = &[
    (cudaSuccess, c"cudaSuccess", c"CUDA_SUCCESS", c"no error"),
    (cudaErrorInvalidValue, c"cudaErrorInvalidValue", c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (cudaErrorMemoryAllocation, c"cudaErrorMemoryAllocation", c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (cudaErrorInitializationError, c"cudaErrorInitializationError", c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (cudaErrorCudartUnloading, c"cudaErrorCudartUnloading", c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (cudaErrorInvalidMemcpyDirection, c"cudaErrorInvalidMemcpyDirection", c"unrecognized", c"invalid copy direction"),
    (cudaErrorNoDevice, c"cudaErrorNoDevice", c"CUDA_ERROR_NO_DEVICE", c"no device"),
    (cudaErrorInvalidDevice, c"cudaErrorInvalidDevice", c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (cudaErrorDeviceUninitialized, c"cudaErrorDeviceUninitialized", c"CUDA_ERROR_INVALID_CONTEXT", c"no valid context"),
    (cudaErrorOperatingSystem, c"cudaErrorOperatingSystem", c"CUDA_ERROR_OPERATING_SYSTEM", c"operating system call failed"),
    (cudaErrorInvalidResourceHandle, c"cudaErrorInvalidResourceHandle", c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (cudaErrorIllegalState, c"cudaErrorIllegalState", c"CUDA_ERROR_ILLEGAL_STATE", c"the resource is not in a state for this operation"),
    (cudaErrorNotReady, c"cudaErrorNotReady", c"CUDA_ERROR_NOT_READY", c"not ready"),
    (cudaErrorIllegalAddress, c"cudaErrorIllegalAddress", c"CUDA_ERROR_ILLEGAL_ADDRESS", c"illegal memory access"),
    (cudaErrorLaunchTimeout, c"cudaErrorLaunchTimeout", c"CUDA_ERROR_LAUNCH_TIMEOUT", c"operation timed out"),
    (cudaErrorAssert, c"cudaErrorAssert", c"CUDA_ERROR_ASSERT", c"device-side assertion failed"),
    (cudaErrorMisalignedAddress, c"cudaErrorMisalignedAddress", c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
    (cudaErrorLaunchFailure, c"cudaErrorLaunchFailure", c"CUDA_ERROR_LAUNCH_FAILED", c"operation failed on the device"),
    (cudaErrorInvalidPitchValue, c"cudaErrorInvalidPitchValue", c"unrecognized", c"invalid pitch"),
    (cudaErrorHostMemoryAlreadyRegistered, c"cudaErrorHostMemoryAlreadyRegistered", c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"host memory is registered already"),
    (cudaErrorHostMemoryNotRegistered, c"cudaErrorHostMemoryNotRegistered", c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"host memory is not registered"),
    (cudaErrorGraphExecUpdateFailure, c"cudaErrorGraphExecUpdateFailure", c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"the executable graph cannot be updated"),
    (cudaErrorNotPermitted, c"cudaErrorNotPermitted", c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (cudaErrorNotSupported, c"cudaErrorNotSupported", c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (cudaErrorStreamCaptureUnsupported, c"cudaErrorStreamCaptureUnsupported", c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (cudaErrorStreamCaptureInvalidated, c"cudaErrorStreamCaptureInvalidated", c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture"),
    (cudaErrorStreamCaptureMerge, c"cudaErrorStreamCaptureMerge", c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"operation would result in a merge of separate capture sequences"),
    (cudaErrorStreamCaptureUnmatched, c"cudaErrorStreamCaptureUnmatched", c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began"),
    (cudaErrorStreamCaptureUnjoined, c"cudaErrorStreamCaptureUnjoined", c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
    (cudaErrorStreamCaptureIsolation, c"cudaErrorStreamCaptureIsolation", c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream"),
    (cudaErrorStreamCaptureImplicit, c"cudaErrorStreamCaptureImplicit", c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"operation would make the legacy stream depend on a capturing blocking stream"),
    (cudaErrorCapturedEvent, c"cudaErrorCapturedEvent", c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capturing stream"),
    (cudaErrorStreamCaptureWrongThread, c"cudaErrorStreamCaptureWrongThread", c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"attempt to terminate a thread-local capture sequence from another thread"),
    (cudaErrorUnknown, c"cudaErrorUnknown", c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn find(code: u32) -> Option<&'static Row> {
    CODES.iter().find(|row| row.0 == code)
}

/// Name of a runtime error.
pub fn runtime_name(code: cudaError_t) -> &'static CStr {
    find(code).map_or(c"unrecognized error code", |row| row.1)
}

/// Name of a driver error.
pub fn driver_name(code: CUresult) -> Option<&'static CStr> {
    find(code).map(|row| row.2).filter(|name| name.to_bytes().starts_with(b"CUDA_"))
}

/// Description of an error of either interface.
pub fn description(code: u32) -> Option<&'static CStr> {
    find(code).map(|row| row.3)
}

/// Description of an NCCL result.
pub fn nccl_description(code: ncclResult_t) -> &'static CStr {
    match code {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"a CUDA call failed",
        ncclSystemError => c"a system call failed or a peer did not answer",
        ncclInternalError => c"internal error",
        ncclInvalidArgument => c"invalid argument",
        ncclInvalidUsage => c"invalid usage",
        ncclRemoteError => c"a peer failed or its process ended",
        ncclInProgress => c"operation in progress",
        ncclTimeout => c"operation timed out",
        _ => c"unknown result code",
    }
}
