//! Streams, events, memory and contexts.

mod common;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use common::*;
use nvte_ep_bindings::*;
use nvte_ep_host::surface::cuda_driver_memory::{cuMemAllocAsync, cuMemFreeAsync, cuMemcpyDtoDAsync_v2};

/// Holds a stream up until it is opened.
struct Gate {
    open: Sender<()>,
    state: Box<Receiver<()>>,
}

impl Gate {
    fn close(stream: cudaStream_t) -> Self {
        unsafe extern "C" fn wait(data: *mut c_void) {
            // SAFETY: the gate outlives the stream's work.
            let receiver = unsafe { &*data.cast::<Receiver<()>>() };
            receiver.recv().unwrap();
        }
        let (open, state) = channel();
        let state = Box::new(state);
        // SAFETY: the receiver lives in a box that the gate keeps.
        ok(unsafe { cudaLaunchHostFunc(stream, Some(wait), (&raw const *state).cast_mut().cast()) });
        Self { open, state }
    }

    fn open(self, stream: cudaStream_t) {
        self.open.send(()).unwrap();
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamSynchronize(stream) });
        drop(self.state);
    }
}

fn use_own_device() {
    let device = take_devices(1);
    // SAFETY: no preconditions.
    ok(unsafe { cudaSetDevice(device) });
}

fn new_stream(flags: u32) -> cudaStream_t {
    let mut stream = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaStreamCreateWithFlags(&raw mut stream, flags) });
    stream
}

fn new_event() -> cudaEvent_t {
    let mut event = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaEventCreate(&raw mut event) });
    event
}

fn set(buffer: &Buffer<u8>, value: i32, stream: cudaStream_t) {
    // SAFETY: the buffer has that many bytes.
    ok(unsafe { cudaMemsetAsync(buffer.pointer.cast(), value, buffer.len, stream) });
}

fn query(stream: cudaStream_t) -> u32 {
    // SAFETY: no preconditions.
    unsafe { cudaStreamQuery(stream) }
}

/// Gives a stream that must be held up time to show that it is not.
fn stays_held_up(stream: cudaStream_t) {
    for _ in 0..50 {
        assert_eq!(query(stream), cudaErrorNotReady);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn calls_return_before_a_held_up_stream_gets_there() {
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let other = new_stream(cudaStreamNonBlocking);
    let buffer = Buffer::of(&[1u8; 8], stream);
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamSynchronize(stream) });
    let gate = Gate::close(stream);
    set(&buffer, 2, stream);
    assert_eq!(query(stream), cudaErrorNotReady);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaGetLastError() }, cudaErrorNotReady);
    // Another non-blocking stream is not held up and sees the old content.
    let mut seen = [0u8; 8];
    // SAFETY: both ranges have 8 bytes.
    ok(unsafe { cudaMemcpyAsync(seen.as_mut_ptr().cast(), buffer.pointer.cast(), 8, cudaMemcpyDeviceToHost, other) });
    assert_eq!(seen, [1; 8]);
    gate.open(stream);
    assert_eq!((query(stream), buffer.get()), (0, vec![2; 8]));
}

#[test]
fn events_order_streams() {
    use_own_device();
    let (first, second) = (new_stream(cudaStreamNonBlocking), new_stream(cudaStreamNonBlocking));
    let buffer = Buffer::of(&[0u8; 4], first);
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamSynchronize(first) });
    let (start, end) = (new_event(), new_event());
    let gate = Gate::close(first);
    // SAFETY: no preconditions.
    ok(unsafe { cudaEventRecord(start, first) });
    set(&buffer, 1, first);
    // SAFETY: no preconditions.
    ok(unsafe { cudaEventRecord(end, first) });
    // SAFETY: no preconditions; `end` is not recorded again before it happens.
    ok(unsafe { cudaStreamWaitEvent(second, end, 0) });
    set(&buffer, 2, second);
    // SAFETY: no preconditions.
    assert_eq!(unsafe { cudaEventQuery(end) }, cudaErrorNotReady);
    stays_held_up(second);
    let mut ms = -1f32;
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaEventElapsedTime(&raw mut ms, start, end) }, cudaErrorNotReady);
    gate.open(first);
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamSynchronize(second) });
    assert_eq!(buffer.get(), [2; 4]);
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaEventElapsedTime(&raw mut ms, start, end) });
    assert!((0.0..60_000.0).contains(&ms), "{ms}");
    for event in [start, end] {
        // SAFETY: no preconditions.
        ok(unsafe { cudaEventDestroy(event) });
        // SAFETY: no preconditions; a second time is refused.
        assert_eq!(unsafe { cudaEventDestroy(event) }, cudaErrorInvalidResourceHandle);
    }
}

#[test]
fn the_null_stream_waits_for_blocking_streams_and_they_for_it() {
    use_own_device();
    let (blocking, free) = (new_stream(0), new_stream(cudaStreamNonBlocking));
    let null = ptr::null_mut();
    let gate = Gate::close(blocking);
    let buffer = Buffer::<u8>::new(4, free);
    set(&buffer, 1, null);
    set(&buffer, 9, free);
    assert_eq!(buffer.get(), [9; 4], "a non-blocking stream does not wait");
    stays_held_up(null);
    assert_eq!(query(1 as cudaStream_t), cudaErrorNotReady);
    gate.open(blocking);
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamSynchronize(null) });
    assert_eq!(buffer.get(), [1; 4]);

    let gate = Gate::close(null);
    set(&buffer, 3, blocking);
    set(&buffer, 4, 2 as cudaStream_t);
    stays_held_up(blocking);
    stays_held_up(2 as cudaStream_t);
    gate.open(null);
    for stream in [blocking, 2 as cudaStream_t] {
        // SAFETY: no preconditions.
        ok(unsafe { cudaStreamSynchronize(stream) });
    }
    assert!([vec![3; 4], vec![4; 4]].contains(&buffer.get()));
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    unsafe extern "C" fn count(data: *mut c_void) {
        // SAFETY: the counter is static.
        unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
    }
    static COUNT: AtomicU32 = AtomicU32::new(0);
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let gate = Gate::close(stream);
    for _ in 0..100 {
        // SAFETY: the counter is static.
        ok(unsafe { cudaLaunchHostFunc(stream, Some(count), (&raw const COUNT).cast_mut().cast()) });
    }
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamDestroy(stream) });
    assert_eq!(query(stream), cudaErrorInvalidResourceHandle);
    gate.open.send(()).unwrap();
    // SAFETY: no preconditions.
    ok(unsafe { cudaDeviceSynchronize() });
    assert_eq!(COUNT.load(Ordering::SeqCst), 100);
}

#[test]
fn host_functions_may_not_call_cuda() {
    unsafe extern "C" fn call(data: *mut c_void) {
        // SAFETY: no preconditions.
        let code = unsafe { cudaDeviceSynchronize() };
        // SAFETY: the test waits for this function.
        unsafe { data.cast::<u32>().write(code) };
    }
    use_own_device();
    let stream = new_stream(0);
    let mut code = 0u32;
    // SAFETY: the result outlives the stream's work.
    ok(unsafe { cudaLaunchHostFunc(stream, Some(call), (&raw mut code).cast()) });
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamSynchronize(stream) });
    // SAFETY: the function has ended.
    assert_eq!(unsafe { (&raw const code).read_volatile() }, cudaErrorNotPermitted);
}

/// A forked child has none of the threads that work here: it is told, in both interfaces of CUDA, and does not hang.
#[test]
fn a_forked_child_is_refused() {
    use_own_device();
    let stream = new_stream(0);
    // SAFETY: the child makes calls of the library and ends without destructors; nothing here is locked by other threads
    // that those calls would wait for, as they are refused first.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no preconditions.
        let query = unsafe { cudaStreamQuery(stream) };
        // SAFETY: no preconditions.
        let wait = unsafe { cudaDeviceSynchronize() };
        // SAFETY: no preconditions.
        let driver = unsafe { cuStreamQuery(stream.cast()) };
        let mut version = 0;
        // SAFETY: the result pointer is ours.
        let nccl = unsafe { ncclGetVersion(&raw mut version) };
        let told = [query, wait, driver] == [cudaErrorInitializationError; 3] && nccl == ncclUnhandledCudaError;
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!told)) };
    }
    let mut status = -1;
    // SAFETY: the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    // SAFETY: no preconditions.
    ok(unsafe { cudaStreamSynchronize(stream) });
}

#[test]
fn pageable_sources_are_copied_at_the_call_and_pinned_ones_later() {
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let buffer = Buffer::<u8>::new(8, stream);
    let mut pinned = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaMallocHost(&raw mut pinned, 4) });
    let gate = Gate::close(stream);
    let mut pageable = [7u8; 4];
    let copy = |offset: usize, from: *const c_void| {
        // SAFETY: both ranges have 4 bytes.
        ok(unsafe {
            cudaMemcpyAsync(buffer.pointer.wrapping_add(offset).cast(), from, 4, cudaMemcpyHostToDevice, stream)
        });
    };
    copy(0, pageable.as_ptr().cast());
    copy(4, pinned);
    pageable.fill(8);
    // SAFETY: the pinned memory has 4 bytes.
    unsafe { pinned.cast::<u8>().write_bytes(5, 4) };
    gate.open(stream);
    assert_eq!(buffer.get(), [7, 7, 7, 7, 5, 5, 5, 5]);
    assert_eq!(pageable, [8; 4]);
    // SAFETY: nobody uses the memory any more.
    ok(unsafe { cudaFreeHost(pinned) });
}

#[test]
fn memory_is_aligned_poisoned_and_tracked() {
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let buffer = Buffer::<u8>::new(1000, stream);
    assert_eq!(buffer.pointer as usize % 256, 0);
    // Every second byte; the others tell allocations apart.
    let other = Buffer::<u8>::new(1000, stream).get();
    for bytes in [&buffer.get(), &other] {
        assert!(bytes.iter().skip(1).step_by(2).all(|byte| *byte == 0xCB));
        assert_eq!(bytes[..984], bytes[16..]);
    }
    assert_ne!(buffer.get()[..16], other[..16]);
    let mut attributes = cudaPointerAttributes::default();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaPointerGetAttributes(&raw mut attributes, buffer.pointer.wrapping_add(999).cast()) });
    assert_eq!(attributes.type_, cudaMemoryTypeDevice);
    let local = 0u8;
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaPointerGetAttributes(&raw mut attributes, (&raw const local).cast()) });
    assert_eq!(attributes.type_, cudaMemoryTypeUnregistered);
    for wrong in [buffer.pointer.wrapping_add(256).cast(), (&raw const local).cast_mut().cast()] {
        // SAFETY: refused.
        assert_eq!(unsafe { cudaFree(wrong) }, cudaErrorInvalidValue);
    }
    // SAFETY: refused.
    assert_eq!(unsafe { cudaFreeHost(buffer.pointer.cast()) }, cudaErrorInvalidValue);
    // SAFETY: nothing to free.
    ok(unsafe { cudaFree(ptr::null_mut()) });
    // SAFETY: refused, as the range leaves the allocation.
    assert_eq!(unsafe { cudaMemsetAsync(buffer.pointer.cast(), 0, 1001, stream) }, cudaErrorInvalidValue);
    let mut huge = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaMalloc(&raw mut huge, 1 << 50) }, cudaErrorMemoryAllocation);
    assert!(huge.is_null());
    for code in [cudaErrorMemoryAllocation, cudaSuccess] {
        // SAFETY: no preconditions.
        assert_eq!(unsafe { cudaGetLastError() }, code);
    }
}

#[test]
fn a_thread_has_no_context_until_it_asks_for_one() {
    use_own_device();
    let mut primary = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cuDevicePrimaryCtxRetain(&raw mut primary, 0) });
    std::thread::spawn({
        let primary = primary as usize;
        move || {
            let current = || {
                let mut context = ptr::null_mut();
                // SAFETY: the result pointer is ours.
                ok(unsafe { cuCtxGetCurrent(&raw mut context) });
                context as usize
            };
            let mut device = -1;
            assert_eq!(current(), 0);
            // SAFETY: the result pointer is ours.
            assert_eq!(unsafe { cuCtxGetDevice(&raw mut device) }, CUDA_ERROR_INVALID_CONTEXT);
            let mut memory = 0;
            // SAFETY: the result pointer is ours.
            assert_eq!(unsafe { cuMemAlloc_v2(&raw mut memory, 16) }, CUDA_ERROR_INVALID_CONTEXT);
            // SAFETY: refused.
            assert_eq!(unsafe { cuCtxSetCurrent(ptr::dangling_mut()) }, CUDA_ERROR_INVALID_CONTEXT);
            // SAFETY: no preconditions.
            ok(unsafe { cuCtxSetCurrent(primary as CUcontext) });
            assert_eq!(current(), primary);
            // SAFETY: no preconditions.
            ok(unsafe { cuCtxSetCurrent(ptr::null_mut()) });
            assert_eq!(current(), 0);
            let mut pointer = ptr::null_mut();
            // SAFETY: the result pointer is ours; a runtime call brings the context.
            ok(unsafe { cudaMalloc(&raw mut pointer, 16) });
            assert_eq!(current(), primary);
            // SAFETY: nobody uses the memory.
            ok(unsafe { cudaFree(pointer) });
        }
    })
    .join()
    .unwrap();
    // SAFETY: no preconditions.
    ok(unsafe { cuDevicePrimaryCtxRelease_v2(0) });
}

#[test]
fn attributes_are_those_of_the_modelled_device() {
    use_own_device();
    let attribute = |number: u32| {
        let mut value = -1;
        // SAFETY: the result pointer is ours.
        let code = unsafe { cuDeviceGetAttribute(&raw mut value, number, 0) };
        (code, value)
    };
    assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), (0, 9));
    assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR), (0, 0));
    assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), (0, 132));
    assert_eq!(attribute(100_000).0, CUDA_ERROR_INVALID_VALUE);
    let mut name = [1i8; 8];
    // SAFETY: the buffer has 8 bytes.
    ok(unsafe { cuDeviceGetName(name.as_mut_ptr(), 8, 0) });
    assert_eq!(name.map(i8::cast_unsigned), *b"nvte-ep\0");
    let mut version = 0;
    // SAFETY: the result pointer is ours.
    ok(unsafe { cuDriverGetVersion(&raw mut version) });
    assert_eq!(version, 13000);
}

#[test]
fn memory_freed_in_stream_order_stays_until_then() {
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let mut memory = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaMallocAsync(&raw mut memory, 64, stream) });
    let result = Buffer::<u8>::new(64, stream);
    let gate = Gate::close(stream);
    // SAFETY: the memory is freed behind this.
    ok(unsafe { cudaMemsetAsync(memory, 6, 64, stream) });
    // SAFETY: both have 64 bytes.
    ok(unsafe { cudaMemcpyAsync(result.pointer.cast(), memory, 64, cudaMemcpyDeviceToDevice, stream) });
    // SAFETY: nobody uses the memory behind this.
    ok(unsafe { cudaFreeAsync(memory, stream) });
    // SAFETY: refused.
    assert_eq!(unsafe { cudaFreeAsync(memory, stream) }, cudaErrorInvalidValue);
    gate.open(stream);
    assert_eq!(result.get(), [6; 64]);
}

/// cudarc's programs allocate so wherever the device says that it has memory pools, as the host runtime's does.
#[test]
fn the_driver_interface_allocates_in_stream_order_too() {
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let mut memory = 0;
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cuMemAllocAsync(&raw mut memory, 0, stream) }, CUDA_ERROR_INVALID_VALUE);
    // SAFETY: as above.
    ok(unsafe { cuMemAllocAsync(&raw mut memory, 64, stream) });
    let result = Buffer::<u8>::new(64, stream);
    let gate = Gate::close(stream);
    // SAFETY: the memory is freed behind this.
    ok(unsafe { cuMemsetD8Async(memory, 6, 64, stream) });
    // SAFETY: both have 64 bytes.
    ok(unsafe { cuMemcpyDtoDAsync_v2(result.pointer.addr() as u64, memory, 64, stream) });
    // SAFETY: nobody uses the memory behind this.
    ok(unsafe { cuMemFreeAsync(memory, stream) });
    // SAFETY: refused.
    assert_eq!(unsafe { cuMemFreeAsync(memory, stream) }, CUDA_ERROR_INVALID_VALUE);
    gate.open(stream);
    assert_eq!(result.get(), [6; 64]);
}

#[test]
fn rows_are_copied_with_their_pitches() {
    use_own_device();
    let stream = new_stream(cudaStreamNonBlocking);
    let from = Buffer::of(&(0..40u8).collect::<Vec<u8>>(), stream);
    let to = Buffer::of(&[0xEEu8; 30], stream);
    let copy = |to_pitch, from_pitch, width, height| {
        let (to, from) = (to.pointer.cast(), from.pointer.cast());
        // SAFETY: what leaves the buffers is refused.
        unsafe { cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, cudaMemcpyDeviceToDevice, stream) }
    };
    ok(copy(8, 10, 6, 4));
    let expected: Vec<u8> = (0..30).map(|i| if i % 8 < 6 { (i / 8 * 10 + i % 8) as u8 } else { 0xEE }).collect();
    assert_eq!(to.get(), expected);
    assert_eq!(copy(8, 10, 9, 1), cudaErrorInvalidPitchValue);
    assert_eq!(copy(8, 10, 8, 5), cudaErrorInvalidValue, "40 bytes into 30");
    ok(copy(8, 10, 0, 100));
    // A pageable target is there when the call returns.
    let mut host = [0u8; 12];
    let target = host.as_mut_ptr().cast();
    // SAFETY: the array has 12 bytes, the buffer more.
    ok(unsafe { cudaMemcpy2DAsync(target, 4, from.pointer.cast(), 20, 4, 2, cudaMemcpyDeviceToHost, stream) });
    assert_eq!(host, [0, 1, 2, 3, 20, 21, 22, 23, 0, 0, 0, 0]);
}

#[test]
fn registered_memory_is_pinned_until_it_is_not() {
    use_own_device();
    let mut memory = vec![0u8; 256];
    let base = memory.as_mut_ptr().cast::<c_void>();
    let kind = |address: *mut c_void| {
        let mut attributes = cudaPointerAttributes::default();
        // SAFETY: the result pointer is ours.
        ok(unsafe { cudaPointerGetAttributes(&raw mut attributes, address) });
        attributes.type_
    };
    let mut seen = ptr::null_mut();
    assert_eq!(kind(base), cudaMemoryTypeUnregistered);
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaHostGetDevicePointer(&raw mut seen, base, 0) }, cudaErrorInvalidValue);
    // SAFETY: the memory has 256 bytes and lives to the end.
    ok(unsafe { cudaHostRegister(base, 256, 0) });
    let inside = base.wrapping_byte_add(100);
    assert_eq!((kind(base), kind(inside)), (cudaMemoryTypeHost, cudaMemoryTypeHost));
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaHostGetDevicePointer(&raw mut seen, inside, 0) });
    assert_eq!(seen, inside);
    // SAFETY: refused.
    assert_eq!(unsafe { cudaHostRegister(inside, 8, 0) }, cudaErrorHostMemoryAlreadyRegistered);
    // SAFETY: refused, it is not device memory.
    assert_eq!(unsafe { cudaFree(base) }, cudaErrorInvalidValue);
    // SAFETY: refused, CUDA did not allocate it.
    assert_eq!(unsafe { cudaFreeHost(base) }, cudaErrorInvalidValue);
    // SAFETY: nothing uses the memory.
    ok(unsafe { cudaHostUnregister(base) });
    assert_eq!(kind(base), cudaMemoryTypeUnregistered);
    // SAFETY: refused.
    assert_eq!(unsafe { cudaHostUnregister(base) }, cudaErrorHostMemoryNotRegistered);
    assert_eq!(memory, [0; 256]);
}

#[test]
fn what_programs_ask_before_they_allocate() {
    use_own_device();
    let (mut free, mut total) = (0, 0);
    // SAFETY: the result pointers are ours.
    ok(unsafe { cudaMemGetInfo(&raw mut free, &raw mut total) });
    let in_use = std::fs::read_to_string("/proc/meminfo").unwrap();
    let all: usize = in_use.lines().next().unwrap().split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
    assert_eq!(total, all * 1024, "the machine's memory");
    assert!(free > 0 && free < total);
    let mut memory = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { cudaMalloc(&raw mut memory, total + 1) }, cudaErrorMemoryAllocation);
    let (mut least, mut greatest) = (7, 7);
    // SAFETY: the result pointers are ours.
    ok(unsafe { cudaDeviceGetStreamPriorityRange(&raw mut least, &raw mut greatest) });
    assert_eq!((least, greatest), (0, 0));
    let mut stream = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    ok(unsafe { cudaStreamCreateWithPriority(&raw mut stream, cudaStreamNonBlocking, -5) });
    let [from, to] = [9u8, 0].map(|value| Buffer::of(&[value; 8], stream));
    let event = new_event();
    // SAFETY: both devices are this one, and the buffers have 8 bytes.
    ok(unsafe { cudaMemcpyPeerAsync(to.pointer.cast(), 0, from.pointer.cast(), 0, 8, stream) });
    // SAFETY: no preconditions.
    ok(unsafe { cudaEventRecordWithFlags(event, stream, 0) });
    // SAFETY: no preconditions.
    ok(unsafe { cudaEventSynchronize(event) });
    assert_eq!(to.get(), [9; 8]);
    // SAFETY: refused.
    let code = unsafe { cudaMemcpyPeerAsync(to.pointer.cast(), 5000, from.pointer.cast(), 0, 8, stream) };
    assert_eq!(code, cudaErrorInvalidDevice);
}
