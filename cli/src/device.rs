//! One rank's device: memory, copies, timing, and the communicator.

use crate::Outcome;
use crate::element::Plain;
use nvte_ep_bindings as b;
use nvte_ep_core::env::Env;
use nvte_ep_core::sys::cuda::{DeviceFacts, Stream};
use nvte_ep_core::sys::{self, Base};
use std::ffi::c_int;
use std::time::Instant;

/// Bytes of a communicator's unique id.
pub const ID_BYTES: usize = size_of::<b::ncclUniqueId>();
/// cuStreamCreate's flag for a stream that does not wait for the default stream (CU_STREAM_NON_BLOCKING).
const NON_BLOCKING: u32 = 1;

/// A device that is current on this thread, with a stream of its own.
#[derive(Debug)]
pub struct Device {
    /// The libraries behind it.
    pub base: &'static Base,
    /// What it is.
    pub facts: DeviceFacts,
    /// Its number.
    pub ordinal: i32,
    stream: Stream,
    start: b::CUevent,
    end: b::CUevent,
}

/// Device memory. Unless [`Device::free`] ends it, it lives as long as the process, which does one run: freeing could wait for a
/// stream that is stuck.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Its first address.
    pub address: u64,
    bytes: usize,
}

impl Memory {
    /// Memory of somebody else.
    pub const fn of(address: u64, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// Its size.
    pub const fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

impl Device {
    /// Takes the device of this machine's rank `local_rank`, in turn where there are fewer devices than ranks.
    pub fn open(env: &Env, local_rank: usize) -> Outcome<Self> {
        let base = sys::base(env)?;
        let cuda = &base.cuda;
        let count = cuda.device_count()?;
        if count < 1 {
            return Err("the runtime has no device".into());
        }
        let ordinal = (local_rank % count as usize) as i32;
        cuda.set_current_device(ordinal)?;
        let facts = cuda.device_facts(ordinal)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a live pointer, and a context is current.
        cuda.check("cuStreamCreate", unsafe { (cuda.cuStreamCreate)(&raw mut stream, NON_BLOCKING) })?;
        let event = || {
            let mut event = std::ptr::null_mut();
            // SAFETY: `event` is a live pointer, and a context is current.
            let code = unsafe { (cuda.cuEventCreate)(&raw mut event, b::cudaEventDefault) };
            cuda.check("cuEventCreate", code).map(|()| event)
        };
        let (start, end) = (event()?, event()?);
        // SAFETY: ours, until it is destroyed.
        let stream = unsafe { Stream::bind(stream.expose_provenance()) };
        Ok(Self { base, facts, ordinal, stream, start, end })
    }

    /// The stream, for the library's calls.
    pub fn stream(&self) -> b::CUstream {
        self.stream.as_raw()
    }

    /// Allocates device memory; never empty, so that it always has an address.
    pub fn allocate(&self, bytes: usize) -> Outcome<Memory> {
        let (mut address, bytes) = (0, bytes.max(256));
        // SAFETY: `address` is a live pointer, and a context is current.
        let code = unsafe { (self.base.cuda.cuMemAlloc_v2)(&raw mut address, bytes) };
        self.base.cuda.check("cuMemAlloc_v2", code).map_err(|error| format!("{error} ({bytes} bytes asked for)"))?;
        Ok(Memory { address, bytes })
    }

    /// Frees memory that nothing queued uses any more.
    pub fn free(&self, memory: Memory) -> Outcome<()> {
        // SAFETY: it was allocated above, and the caller vouches for what is queued.
        Ok(self.base.cuda.check("cuMemFree_v2", unsafe { (self.base.cuda.cuMemFree_v2)(memory.address) })?)
    }

    /// Copies `data` to byte `offset` of the memory, and waits.
    pub fn upload<T: Plain>(&self, memory: &Memory, offset: usize, data: &[T]) -> Outcome<()> {
        let bytes = size_of_val(data);
        assert!(offset + bytes <= memory.bytes, "upload past the end of device memory");
        if bytes == 0 {
            return Ok(());
        }
        let (copy, address) = (self.base.cuda.cuMemcpyHtoDAsync_v2, memory.address + offset as u64);
        // SAFETY: source and target hold `bytes` bytes, and `synchronize` waits while `data` is borrowed.
        let code = unsafe { copy(address, data.as_ptr().cast(), bytes, self.stream()) };
        self.base.cuda.check("cuMemcpyHtoDAsync_v2", code)?;
        self.synchronize()
    }

    /// Copies from byte `offset` of the memory into `data`, and waits.
    pub fn download<T: Plain>(&self, memory: &Memory, offset: usize, data: &mut [T]) -> Outcome<()> {
        let bytes = size_of_val(data);
        assert!(offset + bytes <= memory.bytes, "download past the end of device memory");
        if bytes == 0 {
            return Ok(());
        }
        let (copy, address) = (self.base.cuda.cuMemcpyDtoHAsync_v2, memory.address + offset as u64);
        let target = data.as_mut_ptr().cast();
        // SAFETY: source and target hold `bytes` bytes, and `synchronize` waits while `data` is borrowed.
        let code = unsafe { copy(target, address, bytes, self.stream()) };
        self.base.cuda.check("cuMemcpyDtoHAsync_v2", code)?;
        self.synchronize()
    }

    /// Fills the memory with ones, which is NaN in every float type and -1 in every integer type.
    pub fn poison(&self, memory: &Memory) -> Outcome<()> {
        let fill = self.base.cuda.cuMemsetD8Async;
        // SAFETY: the memory is this program's and as large as it says.
        let code = unsafe { fill(memory.address, 0xFF, memory.bytes, self.stream()) };
        Ok(self.base.cuda.check("cuMemsetD8Async", code)?)
    }

    /// Queues a copy of the first `bytes` bytes.
    pub fn copy(&self, to: &Memory, from: &Memory, bytes: usize) -> Outcome<()> {
        assert!(bytes <= to.bytes && bytes <= from.bytes, "copy past the end of device memory");
        // SAFETY: both are at least that long and live as long as the process.
        Ok(unsafe { self.base.cuda.copy(to.address, from.address, bytes, self.stream) }?)
    }

    /// Waits for everything queued on the stream.
    pub fn synchronize(&self) -> Outcome<()> {
        // SAFETY: the stream is live.
        let code = unsafe { (self.base.cuda.cuStreamSynchronize)(self.stream()) };
        Ok(self.base.cuda.check("cuStreamSynchronize", code)?)
    }

    /// Runs `call`, which queues work on the stream; waits for it and returns how many milliseconds it took.
    pub fn timed(&self, call: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
        Ok(self.timed_both(call)?.0)
    }

    /// The same, and for how many milliseconds the call kept this thread.
    pub fn timed_both(&self, call: impl FnOnce() -> Outcome<()>) -> Outcome<(f64, f64)> {
        let cuda = &self.base.cuda;
        // SAFETY: event and stream are live.
        cuda.check("cuEventRecord", unsafe { (cuda.cuEventRecord)(self.start, self.stream()) })?;
        let begin = Instant::now();
        call()?;
        let host = begin.elapsed();
        // SAFETY: as above.
        cuda.check("cuEventRecord", unsafe { (cuda.cuEventRecord)(self.end, self.stream()) })?;
        self.synchronize()?;
        let mut milliseconds = 0f32;
        // SAFETY: both events were recorded and have passed; `milliseconds` is live.
        let code = unsafe { (cuda.cuEventElapsedTime_v2)(&raw mut milliseconds, self.start, self.end) };
        cuda.check("cuEventElapsedTime_v2", code)?;
        Ok((f64::from(milliseconds), host.as_secs_f64() * 1e3))
    }
}

/// A unique id for a communicator.
pub fn unique_id(base: &Base) -> Outcome<[u8; ID_BYTES]> {
    let mut id = b::ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: `id` is live.
    base.nccl.check("ncclGetUniqueId", unsafe { (base.nccl.ncclGetUniqueId)(&raw mut id) })?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// A communicator over all ranks.
#[derive(Debug)]
pub struct Communicator {
    /// The C handle.
    pub raw: b::ncclComm_t,
    base: &'static Base,
    words: Memory,
}

impl Communicator {
    /// Joins the communicator of `id` as `rank` of `size`.
    pub fn join(device: &Device, id: [u8; ID_BYTES], rank: usize, size: usize) -> Outcome<Self> {
        let words = device.allocate(4 * (size + 1))?;
        device.upload(&words, 0, &vec![0i32; size + 1])?;
        let mut raw = std::ptr::null_mut();
        let id = b::ncclUniqueId { internal: id.map(|byte| byte as _) };
        let init = device.base.nccl.ncclCommInitRank;
        // SAFETY: `raw` is live, and the id came from this NCCL on rank 0.
        let code = unsafe { init(&raw mut raw, size as c_int, id, rank as c_int) };
        device.base.nccl.check("ncclCommInitRank", code)?;
        Ok(Self { raw, base: device.base, words })
    }

    /// Ranks of an NVLink domain; all of them where NCCL does not tell.
    pub fn domain(&self) -> Outcome<usize> {
        // SAFETY: this value made the communicator, with this NCCL.
        let facts = unsafe { self.base.nccl.comm_facts(self.raw) }?;
        Ok(facts.size as usize / facts.domains() as usize)
    }

    /// Waits until every rank is here, so that what follows is timed from the same moment.
    pub fn barrier(&self, device: &Device) -> Outcome<()> {
        let gather = self.base.nccl.ncclAllGather;
        let from = std::ptr::with_exposed_provenance(self.words.address as usize);
        let to = std::ptr::with_exposed_provenance_mut(self.words.address as usize + 4);
        // SAFETY: one word is sent and one a rank received, which `words` holds; all ranks make this call.
        let code = unsafe { gather(from, to, 1, b::ncclInt32, self.raw, device.stream()) };
        self.base.nccl.check("ncclAllGather", code)?;
        device.synchronize()
    }

    /// Destroys the communicator. Not done on drop: after a failure it could wait for peers that are gone.
    pub fn leave(self) -> Outcome<()> {
        // SAFETY: this value made the communicator, and it ends here.
        let code = unsafe { (self.base.nccl.ncclCommDestroy)(self.raw) };
        Ok(self.base.nccl.check("ncclCommDestroy", code)?)
    }
}
