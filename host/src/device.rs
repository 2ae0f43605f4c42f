//! Devices: what a process sees as GPUs, their attributes, their sticky error, and which one a thread uses.

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{LazyLock, OnceLock};

use nvte_ep_bindings::*;

use crate::acting;
use crate::fault::{self, Fault, Outcome};
use crate::machine;
use crate::settings;

/// Name of every device.
pub const NAME: &str = "nvte-ep host device";
/// CUDA version that the driver and the runtime report.
pub const CUDA_VERSION: i32 = 13000;
/// Streaming multiprocessors that a device reports, those of an H200.
pub const SM_COUNT: i32 = 132;

/// A stand-in for one GPU.
#[derive(Debug)]
pub struct Device {
    /// Its ordinal.
    pub ordinal: i32,
    /// References from `cuDevicePrimaryCtxRetain`.
    retained: AtomicU32,
    sticky: OnceLock<Sticky>,
}

/// The error that made a device unusable.
#[derive(Debug)]
pub struct Sticky {
    /// What happened.
    pub fault: Fault,
    /// Its text as a C string.
    pub text: CString,
}

static DEVICES: LazyLock<Box<[Device]>> = LazyLock::new(|| {
    (0..settings::devices())
        .map(|ordinal| Device { ordinal, retained: AtomicU32::new(0), sticky: OnceLock::new() })
        .collect()
});

static DRIVER_READY: AtomicBool = AtomicBool::new(false);

/// Every device.
pub fn all() -> &'static [Device] {
    &DEVICES
}

/// The device with this ordinal.
pub fn get(ordinal: i32) -> Option<&'static Device> {
    usize::try_from(ordinal).ok().and_then(|index| DEVICES.get(index))
}

/// Records `cuInit` (or a runtime call, which implies it).
pub fn initialize_driver() {
    DRIVER_READY.store(true, Ordering::Relaxed);
}

/// Whether the driver interface may be used yet.
pub fn driver_ready() -> bool {
    DRIVER_READY.load(Ordering::Relaxed)
}

/// The device selected on this thread, whether or not its context is current.
pub fn selected() -> &'static Device {
    &DEVICES[acting::device() as usize]
}

/// What a runtime call does first: makes the selected device's primary context current if none is.
pub fn make_current() -> &'static Device {
    initialize_driver();
    let device = selected();
    acting::set_current_device(Some(device.ordinal));
    device
}

/// Selects a device on this thread and makes its primary context current.
pub fn select(ordinal: i32) -> Outcome<()> {
    let device = get(ordinal).ok_or_else(|| {
        Fault::cuda(cudaErrorInvalidDevice, format!("there is no device {ordinal} of {}", all().len()))
    })?;
    make_current_driver(Some(device));
    initialize_driver();
    Ok(())
}

/// The device whose primary context is current on this thread.
pub fn current() -> Option<&'static Device> {
    acting::current_device().map(|ordinal| &DEVICES[ordinal as usize])
}

/// `cuCtxSetCurrent`.
pub fn make_current_driver(device: Option<&'static Device>) {
    acting::set_current_device(device.map(|device| device.ordinal));
}

impl Device {
    /// The primary context's handle.
    pub fn context(&'static self) -> CUcontext {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// The device whose primary context this handle is.
    pub fn from_context(context: CUcontext) -> Option<&'static Device> {
        DEVICES.iter().find(|device| std::ptr::addr_eq(*device, context))
    }

    /// Counts a reference to the primary context.
    pub fn retain(&self) {
        self.retained.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives a reference back.
    pub fn give_back(&self) -> Outcome<()> {
        self.retained
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1))
            .map(drop)
            .map_err(|_| Fault::cuda(CUDA_ERROR_INVALID_CONTEXT, "the primary context was not retained"))
    }

    /// The sticky error, if there is one.
    pub fn sticky(&self) -> Option<&Sticky> {
        self.sticky.get()
    }

    /// Fails when the device has a sticky error; to NCCL's callers that is a CUDA error, whatever its origin.
    pub fn check(&self) -> Outcome<()> {
        self.sticky().map_or(Ok(()), |sticky| Err(Fault::cuda(sticky.fault.cuda, sticky.fault.text.clone())))
    }

    /// Makes `fault` the sticky error unless there is one, and prints it once.
    pub fn poison(&self, fault: Fault) {
        let text = CString::new(fault.text.replace('\0', "?")).unwrap_or_default();
        self.sticky.get_or_init(|| {
            // Before anybody sees the error, and may end the process for it. A report names the rank itself.
            match fault.annotated {
                true => fault::report(&fault.text),
                false => fault::report(&format!("device {}: {}", self.ordinal, fault.text)),
            }
            Sticky { fault, text }
        });
    }

    /// An attribute; the two interfaces number them alike.
    pub fn attribute(&self, attribute: u32) -> Option<i32> {
        Some(match attribute {
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
            | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
            | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => i32::MAX,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65535,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => 48 * 1024,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => 227 * 1024,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => 228 * 1024,
            CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => 1024,
            CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 64 * 1024,
            CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
            CU_DEVICE_ATTRIBUTE_MAX_PITCH => i32::MAX,
            CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK | CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR => 65536,
            CU_DEVICE_ATTRIBUTE_CLOCK_RATE => 1_980_000,
            CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => 3_201_000,
            CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => 6144,
            CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 60 * 1024 * 1024,
            CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT => 512,
            CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT => 32,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => SM_COUNT,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => 2048,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => 32,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
            CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
            CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
            | CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
            | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
            | CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
            CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT
            | CU_DEVICE_ATTRIBUTE_INTEGRATED
            | CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
            | CU_DEVICE_ATTRIBUTE_ECC_ENABLED
            | CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID
            | CU_DEVICE_ATTRIBUTE_PCI_BUS_ID
            | CU_DEVICE_ATTRIBUTE_TCC_DRIVER
            | CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
            | CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
            | CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD
            | CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
            | CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH
            | CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED => 0,
            CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS => i32::from(settings::pageable_memory()),
            CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID => self.ordinal,
            _ => return None,
        })
    }

    /// The properties, as far as an attribute or another call tells them.
    pub fn properties(&self) -> cudaDeviceProp {
        let number = |attribute| self.attribute(attribute).unwrap_or(0);
        let bytes = |attribute| number(attribute) as usize;
        let mut properties = cudaDeviceProp {
            totalGlobalMem: machine::memory().1,
            sharedMemPerBlock: bytes(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
            regsPerBlock: number(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
            warpSize: number(CU_DEVICE_ATTRIBUTE_WARP_SIZE),
            memPitch: bytes(CU_DEVICE_ATTRIBUTE_MAX_PITCH),
            maxThreadsPerBlock: number(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
            maxThreadsDim: [
                number(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
                number(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
                number(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z),
            ],
            maxGridSize: [
                number(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
                number(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
                number(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z),
            ],
            totalConstMem: bytes(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY),
            major: number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            minor: number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            textureAlignment: bytes(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT),
            texturePitchAlignment: bytes(CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT),
            multiProcessorCount: number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            canMapHostMemory: number(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
            concurrentKernels: number(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS),
            pciDeviceID: number(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),
            asyncEngineCount: number(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
            unifiedAddressing: number(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
            memoryBusWidth: number(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
            l2CacheSize: number(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
            maxThreadsPerMultiProcessor: number(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
            sharedMemPerMultiprocessor: bytes(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
            regsPerMultiprocessor: number(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR),
            sharedMemPerBlockOptin: bytes(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            maxBlocksPerMultiProcessor: number(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR),
            reservedSharedMemPerBlock: bytes(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK),
            memoryPoolsSupported: number(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
            ..cudaDeviceProp::default()
        };
        for (there, byte) in properties.name.iter_mut().zip(NAME.bytes()) {
            *there = std::ffi::c_char::from_ne_bytes([byte]);
        }
        properties
    }
}
