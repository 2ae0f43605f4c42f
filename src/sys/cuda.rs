//! The CUDA driver. The library uses the driver and not the CUDA runtime: every process with a GPU has the driver, with any
//! CUDA runtime, linked statically or not; streams and devices are the same objects in both.

use super::fn_table;
use crate::error::{Error, Result};
use nvte_ep_bindings as b;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};

fn_table! {
    /// The driver's functions.
    pub struct Cuda, abi "C";
    required {
        cuInit: fn(c_uint) -> b::CUresult;
        cuDriverGetVersion: fn(*mut c_int) -> b::CUresult;
        cuGetErrorName: fn(b::CUresult, *mut *const c_char) -> b::CUresult;
        cuGetErrorString: fn(b::CUresult, *mut *const c_char) -> b::CUresult;
        cuDeviceGetCount: fn(*mut c_int) -> b::CUresult;
        cuDeviceGetName: fn(*mut c_char, c_int, b::CUdevice) -> b::CUresult;
        cuDeviceGetAttribute: fn(*mut c_int, b::CUdevice_attribute, b::CUdevice) -> b::CUresult;
        cuDevicePrimaryCtxRetain: fn(*mut b::CUcontext, b::CUdevice) -> b::CUresult;
        cuCtxSetCurrent: fn(b::CUcontext) -> b::CUresult;
        cuCtxGetCurrent: fn(*mut b::CUcontext) -> b::CUresult;
        cuCtxGetDevice: fn(*mut b::CUdevice) -> b::CUresult;
        cuCtxSynchronize: fn() -> b::CUresult;
        cuStreamCreate: fn(*mut b::CUstream, c_uint) -> b::CUresult;
        cuStreamDestroy_v2: fn(b::CUstream) -> b::CUresult;
        cuStreamQuery: fn(b::CUstream) -> b::CUresult;
        cuStreamSynchronize: fn(b::CUstream) -> b::CUresult;
        cuStreamGetCtx: fn(b::CUstream, *mut b::CUcontext) -> b::CUresult;
        cuStreamIsCapturing: fn(b::CUstream, *mut b::CUstreamCaptureStatus) -> b::CUresult;
        cuThreadExchangeStreamCaptureMode: fn(*mut b::CUstreamCaptureMode) -> b::CUresult;
        cuEventCreate: fn(*mut b::CUevent, c_uint) -> b::CUresult;
        cuEventDestroy_v2: fn(b::CUevent) -> b::CUresult;
        cuEventRecord: fn(b::CUevent, b::CUstream) -> b::CUresult;
        cuEventQuery: fn(b::CUevent) -> b::CUresult;
        cuEventSynchronize: fn(b::CUevent) -> b::CUresult;
        cuEventElapsedTime_v2: fn(*mut f32, b::CUevent, b::CUevent) -> b::CUresult;
        cuMemAlloc_v2: fn(*mut b::CUdeviceptr, usize) -> b::CUresult;
        cuMemFree_v2: fn(b::CUdeviceptr) -> b::CUresult;
        cuMemAllocHost_v2: fn(*mut *mut c_void, usize) -> b::CUresult;
        cuMemFreeHost: fn(*mut c_void) -> b::CUresult;
        cuMemGetInfo_v2: fn(*mut usize, *mut usize) -> b::CUresult;
        cuMemcpyHtoDAsync_v2: fn(b::CUdeviceptr, *const c_void, usize, b::CUstream) -> b::CUresult;
        cuMemcpyAsync: fn(b::CUdeviceptr, b::CUdeviceptr, usize, b::CUstream) -> b::CUresult;
        cuMemcpyDtoHAsync_v2: fn(*mut c_void, b::CUdeviceptr, usize, b::CUstream) -> b::CUresult;
        cuPointerGetAttributes: fn(
            c_uint,
            *mut b::CUpointer_attribute,
            *mut *mut c_void,
            b::CUdeviceptr
        ) -> b::CUresult;
        cuModuleLoadData: fn(*mut b::CUmodule, *const c_void) -> b::CUresult;
        cuModuleUnload: fn(b::CUmodule) -> b::CUresult;
        cuModuleGetFunction: fn(*mut b::CUfunction, b::CUmodule, *const c_char) -> b::CUresult;
        cuFuncSetAttribute: fn(b::CUfunction, b::CUfunction_attribute, c_int) -> b::CUresult;
        cuLaunchKernel: fn(
            b::CUfunction,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            b::CUstream,
            *mut *mut c_void,
            *mut *mut c_void
        ) -> b::CUresult;
        cuMemsetD8Async: fn(b::CUdeviceptr, c_uchar, usize, b::CUstream) -> b::CUresult;
    }
    optional {}
}

/// A CUDA stream as its address; 0 is the default stream. Who has one was promised, by [`Stream::bind`], that it may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(usize);

impl Stream {
    /// The stream whose C handle has this address, for the calls that are made with this value. The promise about a call's memory
    /// is given here, once, and not again at each function that hands the call on.
    ///
    /// # Safety
    /// As long as the value is used, the stream lives. The tensors and the handle memory that calls name together with it are
    /// device memory of the described extent, and live until the queued work is done. Collective calls come in the same order on
    /// every rank.
    #[must_use]
    pub const unsafe fn bind(address: usize) -> Self {
        Self(address)
    }

    /// Its address.
    #[must_use]
    pub const fn address(self) -> usize {
        self.0
    }

    /// Whether it is the legacy default stream, by either name.
    #[must_use]
    pub const fn is_legacy(self) -> bool {
        self.0 <= 1
    }

    /// The C handle.
    #[must_use]
    pub fn as_raw(self) -> b::CUstream {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// What a stream does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamState {
    /// What is queued on it is done.
    Working,
    /// What is queued on it becomes part of a graph.
    Capturing,
}

/// Kinds of memory that the driver tells apart. It numbers them as the runtime does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory of this device.
    Device(i32),
    /// Memory that moves between host and devices.
    Managed,
    /// Host memory that devices can reach.
    PageLocked,
}

/// The allocation around an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryAt {
    /// Its kind.
    pub kind: MemoryKind,
    /// Its first address.
    pub start: u64,
    /// The address behind its last byte.
    pub end: u64,
    /// Whether it is one of `cudaMalloc`: what follows is another. Other memory may be mapped piece by piece.
    pub whole: bool,
}

/// What one device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub sm_count: i32,
    /// PCI domain, bus and device: tells whether two ranks of one machine share a device.
    pub pci: (i32, i32, i32),
    /// The product's name.
    pub name: String,
}

impl Cuda {
    /// `Ok` for `CUDA_SUCCESS`, else [`Error::Library`] with the driver's name and text for the code.
    ///
    /// # Errors
    /// Every other code.
    #[inline]
    pub fn check(&self, call: &'static str, code: b::CUresult) -> Result<()> {
        if code == b::CUDA_SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: b::CUresult) -> Error {
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: `name` is a live pointer; the driver leaves it null for a code that it does not know.
        unsafe { (self.cuGetErrorName)(code, &raw mut name) };
        // SAFETY: as above.
        unsafe { (self.cuGetErrorString)(code, &raw mut text) };
        let read = |pointer: *const c_char| {
            if pointer.is_null() {
                return "unknown error".to_owned();
            }
            // SAFETY: the driver's strings are NUL-terminated and live as long as the process.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
        };
        Error::Library { call, code: i64::from(code), text: format!("{}: {}", read(name), read(text)) }
    }

    /// Number of devices; an error when the driver finds no usable one.
    ///
    /// # Errors
    /// The driver's.
    pub fn device_count(&self) -> Result<i32> {
        // SAFETY: takes flags, which must be 0.
        self.check("cuInit", unsafe { (self.cuInit)(0) })?;
        let mut count = 0;
        // SAFETY: `count` is a live int.
        self.check("cuDeviceGetCount", unsafe { (self.cuDeviceGetCount)(&raw mut count) })?;
        Ok(count)
    }

    /// The calling thread's current device. A thread that has none yet gets device 0, as the CUDA runtime does.
    ///
    /// # Errors
    /// The driver's.
    #[inline]
    pub fn current_device(&self) -> Result<i32> {
        let mut device = 0;
        // SAFETY: `device` is a live int.
        match unsafe { (self.cuCtxGetDevice)(&raw mut device) } {
            b::CUDA_ERROR_INVALID_CONTEXT | b::CUDA_ERROR_NOT_INITIALIZED => {
                self.set_current_device(0)?;
                Ok(0)
            }
            code => self.check("cuCtxGetDevice", code).map(|()| device),
        }
    }

    /// Makes the primary context of `device` current on the calling thread, as `cudaSetDevice` does.
    ///
    /// # Errors
    /// The driver's; or an argument error for a device that does not exist.
    pub fn set_current_device(&self, device: i32) -> Result<()> {
        let count = self.device_count()?;
        if !(0..count).contains(&device) {
            return Err(Error::argument("device", format!("must be below the device count {count}"), device));
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is initialised, the device exists, and `context` is a live pointer. The primary context is
        // retained and never released: it belongs to the process.
        let code = unsafe { (self.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        // SAFETY: `context` is the primary context just retained.
        self.check("cuCtxSetCurrent", unsafe { (self.cuCtxSetCurrent)(context) })
    }

    /// What `device` is.
    ///
    /// # Errors
    /// The driver's.
    pub fn device_facts(&self, device: i32) -> Result<DeviceFacts> {
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is a live int.
            let code = unsafe { (self.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
            self.check("cuDeviceGetAttribute", code).map(|()| value)
        };
        let mut name = [0 as c_char; 256];
        // SAFETY: `name` holds as many bytes as its length says.
        let code = unsafe { (self.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int, device) };
        self.check("cuDeviceGetName", code)?;
        // SAFETY: the driver terminates the name within the buffer.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Ok(DeviceFacts {
            compute_capability: (
                attribute(b::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(b::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sm_count: attribute(b::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            pci: (
                attribute(b::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
                attribute(b::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
                attribute(b::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
            ),
            name,
        })
    }

    /// Queues zeroes over `bytes` bytes at the device address `address`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The memory is the caller's to write, on the device of `stream`.
    #[inline]
    pub unsafe fn zero(&self, address: u64, bytes: usize, stream: Stream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller vouches for memory and stream.
        self.check("cuMemsetD8Async", unsafe { (self.cuMemsetD8Async)(address, 0, bytes, stream.as_raw()) })
    }

    /// Queues a copy of `bytes` bytes between two addresses, of device or pinned host memory; allowed while a stream
    /// captures.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Both ranges are live until the copy is done, and the target is the caller's to write.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller vouches for memory and stream.
        self.check("cuMemcpyAsync", unsafe { (self.cuMemcpyAsync)(to, from, bytes, stream.as_raw()) })
    }

    /// Free and total bytes of the current device.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are live.
        self.check("cuMemGetInfo_v2", unsafe { (self.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        Ok((free, total))
    }

    /// Whether `stream` captures a graph, or works. No capture of another stream is harmed.
    ///
    /// # Errors
    /// That of work queued on the stream; a stream of another context than the current one.
    #[inline]
    pub fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        // It is never captured, and asking it is a wait for all others, which captures forbid.
        if stream.is_legacy() {
            return Ok(StreamState::Working);
        }
        if self.is_capturing(stream)? {
            return Ok(StreamState::Capturing);
        }
        // A capture in global mode forbids queries to every thread that does not say that it knows better.
        let mut mode = b::CU_STREAM_CAPTURE_MODE_RELAXED;
        let exchange = self.cuThreadExchangeStreamCaptureMode;
        // SAFETY: `mode` is live.
        self.check("cuThreadExchangeStreamCaptureMode", unsafe { exchange(&raw mut mode) })?;
        // SAFETY: the stream is bound.
        let code = unsafe { (self.cuStreamQuery)(stream.as_raw()) };
        // SAFETY: `mode` is live, and the thread's own mode again.
        self.check("cuThreadExchangeStreamCaptureMode", unsafe { exchange(&raw mut mode) })?;
        if code != b::CUDA_ERROR_NOT_READY {
            self.check("cuStreamQuery", code)?;
        }
        Ok(StreamState::Working)
    }

    /// Lets the calling thread ask for the state of events and streams while other threads capture graphs.
    ///
    /// # Errors
    /// The driver's.
    pub fn ignore_captures(&self) -> Result<()> {
        let mut mode = b::CU_STREAM_CAPTURE_MODE_RELAXED;
        let exchange = self.cuThreadExchangeStreamCaptureMode;
        // SAFETY: `mode` is live.
        self.check("cuThreadExchangeStreamCaptureMode", unsafe { exchange(&raw mut mode) })
    }

    /// Whether the stream belongs to the calling thread's current context.
    ///
    /// # Errors
    /// The driver's.
    pub fn is_of_current_context(&self, stream: Stream) -> Result<bool> {
        let (mut own, mut current) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: `own` is live; the stream is bound.
        self.check("cuStreamGetCtx", unsafe { (self.cuStreamGetCtx)(stream.as_raw(), &raw mut own) })?;
        // SAFETY: `current` is live.
        self.check("cuCtxGetCurrent", unsafe { (self.cuCtxGetCurrent)(&raw mut current) })?;
        Ok(own == current)
    }

    /// What tells the allocation at `address` from all others, of the same place too; 0 for memory that the driver does not
    /// know.
    ///
    /// # Errors
    /// The driver's.
    #[inline]
    pub fn allocation_id(&self, address: u64) -> Result<u64> {
        let mut id = 0u64;
        let mut attribute = b::CU_POINTER_ATTRIBUTE_BUFFER_ID;
        let mut out: *mut c_void = (&raw mut id).cast();
        let (attributes, out) = (&raw mut attribute, &raw mut out);
        // SAFETY: one attribute and a place of its type; any address may be asked about.
        let code = unsafe { (self.cuPointerGetAttributes)(1, attributes, out, address) };
        self.check("cuPointerGetAttributes", code).map(|()| id)
    }

    /// What the driver knows of the memory at `address`; none for memory that it does not know.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory_at(&self, address: u64) -> Result<Option<MemoryAt>> {
        let mut kind: c_uint = 0;
        let (mut device, mut managed): (c_int, c_uint) = (-1, 0);
        let (mut start, mut bytes): (u64, usize) = (0, 0);
        // An attribute of one byte, in a place that has room for more.
        let mut whole: c_uint = 0;
        let mut attributes = [
            b::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            b::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            b::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            b::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            b::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            b::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ];
        let mut out: [*mut c_void; 6] = [
            (&raw mut kind).cast(),
            (&raw mut device).cast(),
            (&raw mut managed).cast(),
            (&raw mut start).cast(),
            (&raw mut bytes).cast(),
            (&raw mut whole).cast(),
        ];
        let (count, attributes, out) = (attributes.len() as c_uint, attributes.as_mut_ptr(), out.as_mut_ptr());
        // SAFETY: six attributes and as many places, each of its attribute's type; any address may be asked about.
        let code = unsafe { (self.cuPointerGetAttributes)(count, attributes, out, address) };
        if code == b::CUDA_ERROR_INVALID_VALUE {
            return Ok(None);
        }
        self.check("cuPointerGetAttributes", code)?;
        let kind = match (kind, managed) {
            (_, 1) => MemoryKind::Managed,
            (b::cudaMemoryTypeDevice, _) => MemoryKind::Device(device),
            (b::cudaMemoryTypeHost, _) => MemoryKind::PageLocked,
            _ => return Ok(None),
        };
        // Where the driver tells no range there is at least the byte that was asked about.
        let (start, bytes) = if bytes == 0 { (address, 1) } else { (start, bytes as u64) };
        Ok(Some(MemoryAt { kind, start, end: start.saturating_add(bytes), whole: whole & 1 == 1 }))
    }

    /// Whether `stream` is being captured into a graph.
    ///
    /// # Errors
    /// The driver's.
    #[inline]
    pub fn is_capturing(&self, stream: Stream) -> Result<bool> {
        let mut status = b::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: `status` is live; the stream is bound.
        let code = unsafe { (self.cuStreamIsCapturing)(stream.as_raw(), &raw mut status) };
        self.check("cuStreamIsCapturing", code)?;
        Ok(status != b::CU_STREAM_CAPTURE_STATUS_NONE)
    }
}
