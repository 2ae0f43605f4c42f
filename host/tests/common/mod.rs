//! What the integration tests share: ranks as threads with a device each, device buffers, descriptors.

#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(non_upper_case_globals, reason = "constants of the C interfaces in patterns")]

pub mod low_latency;
pub mod reference;

use std::ffi::{CStr, c_char, c_void};
use std::mem::size_of;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

use nvte_ep_bindings::*;
// NCCL and NCCL EP are called through the prototypes of the bindings, which the linker resolves to the exports.
pub use nvte_ep_host::surface::cuda_runtime::*;

/// Gives the process enough devices; has to come before any call of the library.
pub fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the library's first read of the environment comes after this, and tests write no other variable.
        unsafe { std::env::set_var("NVTE_EP_HOST_DEVICES", "1024") };
    });
}

/// Takes devices that no other test of the process uses.
pub fn take_devices(count: i32) -> i32 {
    static NEXT: AtomicI32 = AtomicI32::new(0);
    init();
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    assert!(first + count <= 1024, "out of devices");
    first
}

/// A C string of the library.
pub fn text(pointer: *const c_char) -> String {
    // SAFETY: the library returns C strings that live until this thread's next call.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

pub fn describe(code: u32) -> String {
    // SAFETY: the function has no preconditions.
    text(unsafe { cudaGetErrorString(code) })
}

pub fn ok(code: u32) {
    assert_eq!(code, 0, "{}", describe(code));
}

pub fn nccl_ok(code: u32) {
    assert_eq!(code, 0, "{}", nccl_error());
}

pub fn nccl_error() -> String {
    // SAFETY: the function has no preconditions.
    text(unsafe { ncclGetLastError(ptr::null_mut()) })
}

/// Device memory with a known number of elements, copied through its stream.
pub struct Buffer<T: Copy> {
    pub pointer: *mut T,
    pub len: usize,
    stream: cudaStream_t,
}

impl<T: Copy> Buffer<T> {
    pub fn new(len: usize, stream: cudaStream_t) -> Self {
        let mut pointer = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaMalloc(&raw mut pointer, (len * size_of::<T>()).max(1)) });
        Self { pointer: pointer.cast(), len, stream }
    }

    pub fn of(values: &[T], stream: cudaStream_t) -> Self {
        let buffer = Self::new(values.len(), stream);
        buffer.set(values);
        buffer
    }

    pub fn set(&self, values: &[T]) {
        assert!(values.len() <= self.len);
        let bytes = size_of_val(values);
        // SAFETY: both ranges have that many bytes; the source is copied at the call.
        ok(unsafe {
            cudaMemcpyAsync(self.pointer.cast(), values.as_ptr().cast(), bytes, cudaMemcpyHostToDevice, self.stream)
        });
    }

    pub fn get(&self) -> Vec<T>
    where
        T: Default,
    {
        let mut values = vec![T::default(); self.len];
        let bytes = size_of_val(&*values);
        // SAFETY: both ranges have that many bytes; a copy to pageable memory is done when the call returns.
        ok(unsafe {
            cudaMemcpyAsync(values.as_mut_ptr().cast(), self.pointer.cast(), bytes, cudaMemcpyDeviceToHost, self.stream)
        });
        values
    }
}

impl<T: Copy> Drop for Buffer<T> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: nobody else knows the pointer.
            ok(unsafe { cudaFreeAsync(self.pointer.cast(), self.stream) });
        }
    }
}

/// A tensor descriptor with its sizes.
pub struct Desc {
    sizes: Box<[usize]>,
    pub tensor: Box<ncclEpTensor_t>,
}

impl Desc {
    pub fn new(data: *mut c_void, datatype: ncclDataType_t, sizes: &[usize]) -> Self {
        let mut sizes: Box<[usize]> = sizes.into();
        let tensor = Box::new(ncclEpTensor_t {
            size: size_of::<ncclEpTensor_t>() as u32,
            magic: EP_TENSOR_MAGIC,
            ndim: sizes.len() as u32,
            datatype,
            data,
            sizes: sizes.as_mut_ptr(),
            ..Default::default()
        });
        Self { sizes, tensor }
    }

    pub fn of<T: Copy>(buffer: &Buffer<T>, datatype: ncclDataType_t, sizes: &[usize]) -> Self {
        Self::new(buffer.pointer.cast(), datatype, sizes)
    }

    pub fn ptr(&mut self) -> *mut ncclEpTensor_t {
        &raw mut *self.tensor
    }
}

/// Sets `size` and `magic` of a structure, and zero where nothing is said.
macro_rules! ep_struct {
    ($t:ident { $($field:ident : $value:expr),* $(,)? }) => {
        {
            let mut value = $t::default();
            value.size = size_of::<$t>() as u32;
            value.magic = nvte_ep_bindings::EP_STRUCT_MAGIC;
            $(value.$field = $value;)*
            value
        }
    };
}
#[allow(unused_imports, reason = "each test binary uses a part")]
pub(crate) use ep_struct;

pub fn unique_id() -> ncclUniqueId {
    init();
    let mut id = ncclUniqueId::default();
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclGetUniqueId(&raw mut id) });
    id
}

/// One rank with a communicator and a stream of its own.
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub comm: ncclComm_t,
    pub stream: cudaStream_t,
}

impl Rank {
    pub fn join(id: ncclUniqueId, rank: usize, ranks: usize, device: i32) -> Self {
        // SAFETY: no preconditions.
        ok(unsafe { cudaSetDevice(device) });
        let mut comm = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclCommInitRank(&raw mut comm, ranks as i32, id, rank as i32) });
        let mut stream = ptr::null_mut();
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaStreamCreateWithFlags(&raw mut stream, cudaStreamNonBlocking) });
        Self { rank, ranks, comm, stream }
    }

    pub fn sync(&self) {
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamSynchronize(self.stream) });
    }

    pub fn leave(self) {
        self.sync();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommDestroy(self.comm) });
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamDestroy(self.stream) });
    }

    /// Destroys a group when all ranks are done with it; collective.
    pub fn destroy_group(&self, group: ncclEpGroup_t) {
        self.sync();
        let met = Buffer::of(&[0f32], self.stream);
        let data = met.pointer.cast();
        // SAFETY: the buffer has one element.
        nccl_ok(unsafe { ncclAllReduce(data, data.cast(), 1, ncclFloat32, ncclSum, self.comm, self.stream) });
        self.sync();
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpGroupDestroy(group) });
    }

    pub fn create_group(&self, config: &ncclEpGroupConfig_t) -> Result<ncclEpGroup_t, (u32, String)> {
        let mut group = ptr::null_mut();
        // SAFETY: result pointer and configuration are ours.
        match unsafe { ncclEpCreateGroup(&raw mut group, self.comm, config) } {
            0 => Ok(group),
            code => Err((code, nccl_error())),
        }
    }
}

/// Runs `work` as `ranks` threads, each with its own device and communicator.
pub fn run_ranks(ranks: usize, work: impl Fn(&Rank) + Sync) {
    let id = unique_id();
    let first = take_devices(ranks as i32);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let work = &work;
                scope.spawn(move || {
                    let me = Rank::join(id, rank, ranks, first + rank as i32);
                    work(&me);
                    me.leave();
                })
            })
            .collect();
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}

pub fn group_config(experts: usize, max_tokens: usize, capacity: usize, token_bytes: usize) -> ncclEpGroupConfig_t {
    ep_struct!(ncclEpGroupConfig_t {
        version: NCCL_EP_API_VERSION,
        algorithm: NCCL_EP_ALGO_HIGH_THROUGHPUT,
        num_experts: experts as u32,
        max_dispatch_tokens_per_rank: max_tokens as u32,
        max_recv_tokens_per_rank: capacity as u32,
        max_token_bytes: token_bytes as u32,
    })
}

/// Memory of `ncclMemAlloc` that every rank has registered.
pub struct WindowMemory {
    pub base: *mut u8,
    pub bytes: usize,
    pub window: ncclWindow_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
}

impl WindowMemory {
    /// Collective.
    pub fn new(rank: &Rank, bytes: usize) -> Self {
        let (mut base, mut window) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the result pointer is ours.
        nccl_ok(unsafe { ncclMemAlloc(&raw mut base, bytes) });
        let flags = NCCL_WIN_COLL_SYMMETRIC as i32;
        // SAFETY: the result pointer is ours, and the memory has that many bytes.
        nccl_ok(unsafe { ncclCommWindowRegister(rank.comm, base, bytes, &raw mut window, flags) });
        Self { base: base.cast(), bytes, window, comm: rank.comm, stream: rank.stream }
    }

    pub fn set(&self, offset: usize, values: &[u8]) {
        assert!(offset + values.len() <= self.bytes);
        let to = self.base.wrapping_add(offset).cast();
        // SAFETY: both ranges have that many bytes; the source is copied at the call.
        ok(unsafe { cudaMemcpyAsync(to, values.as_ptr().cast(), values.len(), cudaMemcpyHostToDevice, self.stream) });
    }

    pub fn get(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.bytes);
        let mut values = vec![0; bytes];
        let from = self.base.wrapping_add(offset).cast();
        // SAFETY: both ranges have that many bytes; a copy to pageable memory is done when the call returns.
        ok(unsafe { cudaMemcpyAsync(values.as_mut_ptr().cast(), from, bytes, cudaMemcpyDeviceToHost, self.stream) });
        values
    }

    /// A tensor that lies at an offset; without `data` the library has to find it.
    pub fn desc(&self, offset: usize, datatype: ncclDataType_t, sizes: &[usize], with_data: bool) -> Desc {
        let data = if with_data { self.base.wrapping_add(offset).cast() } else { ptr::null_mut() };
        let mut desc = Desc::new(data, datatype, sizes);
        desc.tensor.win_hdl = self.window;
        desc.tensor.win_offset = offset as u64;
        desc
    }

    pub fn free(self) {
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclCommWindowDeregister(self.comm, self.window) });
        // SAFETY: nobody uses the memory any more.
        nccl_ok(unsafe { ncclMemFree(self.base.cast()) });
    }
}

fn handle_memory(rank: &Rank, group: ncclEpGroup_t, layout: ncclEpLayout_t, top_k: usize) -> Buffer<u8> {
    let mut size = 0;
    // SAFETY: the result pointer is ours.
    nccl_ok(unsafe { ncclEpHandleMemSize(group, layout, ptr::null(), &raw mut size, top_k as i32) });
    Buffer::new(size, rank.stream)
}

/// A handle with its memory.
pub struct TestHandle {
    pub handle: ncclEpHandle_t,
    pub memory: Buffer<u8>,
    pub top_k: usize,
}

impl TestHandle {
    pub fn new(rank: &Rank, group: ncclEpGroup_t, top_k: usize, alignment: usize) -> Self {
        let memory = handle_memory(rank, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, top_k);
        Self::over(memory, group, top_k, alignment)
    }

    /// With the flat layout.
    pub fn flat(rank: &Rank, group: ncclEpGroup_t, top_k: usize) -> Self {
        let memory = handle_memory(rank, group, NCCL_EP_LAYOUT_FLAT, top_k);
        Self::with_layout(memory, group, NCCL_EP_LAYOUT_FLAT, top_k, 0)
    }

    pub fn over(memory: Buffer<u8>, group: ncclEpGroup_t, top_k: usize, alignment: usize) -> Self {
        Self::with_layout(memory, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, top_k, alignment)
    }

    pub fn with_layout(
        memory: Buffer<u8>,
        group: ncclEpGroup_t,
        layout: ncclEpLayout_t,
        top_k: usize,
        alignment: usize,
    ) -> Self {
        let mut desc = Desc::of(&memory, ncclUint8, &[memory.len]);
        let config = ep_struct!(ncclEpHandleConfig_t { dispatch_output_per_expert_alignment: alignment });
        let mut handle = ptr::null_mut();
        // SAFETY: all pointers are ours and valid.
        nccl_ok(unsafe {
            ncclEpInitHandle(&raw mut handle, group, layout, &raw const config, top_k as i32, desc.ptr())
        });
        Self { handle, memory, top_k }
    }

    pub fn destroy(self) -> Buffer<u8> {
        // SAFETY: no preconditions.
        nccl_ok(unsafe { ncclEpHandleDestroy(self.handle) });
        self.memory
    }
}

/// Environment of a re-executed test: rank, ranks and unique id.
const ROLE: &str = "NVTE_EP_HOST_TEST_ROLE";

/// A unique id as text for [`spawn_rank_with`].
pub fn hex(id: &ncclUniqueId) -> String {
    id.internal.iter().map(|b| format!("{:02x}", b.cast_unsigned())).collect()
}

/// A rank as a process: this test binary, running the ignored test `entry`.
pub fn spawn_rank(entry: &str, id: &ncclUniqueId, rank: usize, ranks: usize, timeout_ms: u32) -> std::process::Child {
    let id = hex(id);
    spawn_rank_with(entry, &id, rank, ranks, timeout_ms, &[])
}

/// As [`spawn_rank`], with more environment variables.
pub fn spawn_rank_with(
    entry: &str,
    id: &str,
    rank: usize,
    ranks: usize,
    timeout_ms: u32,
    variables: &[(&str, &str)],
) -> std::process::Child {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", entry, "--ignored", "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{rank} {ranks} {id}"))
        .env("NVTE_EP_HOST_TIMEOUT_MS", timeout_ms.to_string())
        .env_remove("NVTE_EP_HOST_DEVICES")
        .envs(variables.iter().copied())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs all ranks as processes and returns their stderr; ranks in `may_fail` may end in any way.
pub fn run_processes(entry: &str, ranks: usize, timeout_ms: u32, may_fail: &[usize]) -> Vec<String> {
    run_processes_with(entry, ranks, timeout_ms, may_fail, &[])
}

/// As [`run_processes`], with more environment variables.
pub fn run_processes_with(
    entry: &str,
    ranks: usize,
    timeout_ms: u32,
    may_fail: &[usize],
    variables: &[(&str, &str)],
) -> Vec<String> {
    let id = hex(&unique_id());
    let spawn = |rank| spawn_rank_with(entry, &id, rank, ranks, timeout_ms, variables);
    let children: Vec<_> = (0..ranks).map(spawn).collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let mut errors = Vec::new();
    for (rank, output) in outputs.into_iter().enumerate() {
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let passed = output.status.success() && stdout.contains("1 passed");
        assert!(passed || may_fail.contains(&rank), "rank {rank}: {}\n{stdout}\n{stderr}", output.status);
        errors.push(stderr);
    }
    errors
}

/// In a rank's process: joins the communicator.
pub fn join_as_process() -> Rank {
    let role = std::env::var(ROLE).expect("run by a parent test");
    let mut words = role.split(' ');
    let rank = words.next().unwrap().parse().unwrap();
    let ranks = words.next().unwrap().parse().unwrap();
    let hex = words.next().unwrap();
    let mut id = ncclUniqueId::default();
    for (index, byte) in id.internal.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).unwrap().cast_signed();
    }
    Rank::join(id, rank, ranks, 0)
}

/// Text of the device's sticky error.
pub fn sticky_text() -> String {
    // SAFETY: the function has no preconditions.
    text(unsafe { nvte_ep_host::surface::host_ext::nvte_ep_host_last_error() })
}
