//! The NCCL interface.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};

use nvte_ep_bindings::*;

use super::{nccl, put};
use crate::batch;
use crate::channel::pairs::Direction;
use crate::channel::rendezvous;
use crate::comm::{self, Comm};
use crate::device;
use crate::errors;
use crate::graph;
use crate::line;
use crate::memory::{self, Kind};
use crate::queue::Stream;

/// Version of NCCL whose interface this is.
#[allow(clippy::cast_possible_wrap, reason = "a version code fits an int")]
const VERSION: c_int = NCCL_VERSION_CODE as c_int;

/// Version code.
///
/// # Safety
///
/// `version` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { put(version, VERSION) })
}

/// A fresh id for a communicator; it names a rendezvous file.
///
/// # Safety
///
/// `uniqueId` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { put(uniqueId, rendezvous::unique_id()?) })
}

/// Creates one rank of a communicator; collective, and inside a group done by `ncclGroupEnd`.
///
/// # Safety
///
/// `comm` is writable, inside a group until it ends.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { Comm::init_rank(comm, nranks, commId, rank) })
}

/// As `ncclCommInitRank`; nothing that a configuration asks for has a meaning here.
///
/// # Safety
///
/// `comm` is writable, inside a group until it ends; `config` is null or valid.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    commId: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { Comm::init_rank_config(comm, nranks, commId, rank, config) })
}

/// Creates a communicator over devices of this process, one rank a device.
///
/// # Safety
///
/// `comm` has room for `ndev` communicators, `devlist` is null or holds `ndev` ordinals.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(comm: *mut ncclComm_t, ndev: c_int, devlist: *const c_int) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { Comm::init_all(comm, ndev, devlist) })
}

/// Creates communicators over the ranks that give the same `color`, by `key` and rank; collective, and inside a group done
/// by `ncclGroupEnd`. `NCCL_SPLIT_NOCOLOR` gives none.
///
/// # Safety
///
/// `newcomm` is writable, inside a group until it ends; `config` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { Comm::resolve(comm, "ncclCommSplit")?.split(color, key, newcomm, config) })
}

/// Waits for the communicator's operations.
///
/// # Safety
///
/// Always safe to call; an unknown communicator is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    nccl(|| Comm::resolve(comm, "ncclCommFinalize")?.line.run(|_| Ok(())))
}

/// Destroys a communicator after its operations.
///
/// # Safety
///
/// Always safe to call; an unknown communicator is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    nccl(|| Comm::close(comm, "ncclCommDestroy", false))
}

/// Ends a communicator's operations, for the peers with an error, and destroys it.
///
/// # Safety
///
/// Always safe to call; an unknown communicator is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    nccl(|| Comm::close(comm, "ncclCommAbort", true))
}

/// Whether an operation of the communicator, or of an EP group over it, has failed.
///
/// # Safety
///
/// `asyncError` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: ncclComm_t, asyncError: *mut ncclResult_t) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { put(asyncError, Comm::resolve(comm, "ncclCommGetAsyncError")?.status.async_error()) })
}

/// Number of ranks.
///
/// # Safety
///
/// `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { put(count, Comm::resolve(comm, "ncclCommCount")?.ranks as c_int) })
}

/// This rank.
///
/// # Safety
///
/// `rank` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { put(rank, Comm::resolve(comm, "ncclCommUserRank")?.rank as c_int) })
}

/// Device of this rank.
///
/// # Safety
///
/// `device` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { put(device, Comm::resolve(comm, "ncclCommCuDevice")?.device.ordinal) })
}

/// Rank, number of ranks, device, and what the communicator can do.
///
/// # Safety
///
/// `props` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommQueryProperties(comm: ncclComm_t, props: *mut ncclCommProperties_t) -> ncclResult_t {
    // SAFETY: the caller's contract.
    nccl(|| unsafe { Comm::resolve(comm, "ncclCommQueryProperties")?.query_properties(props) })
}

/// Gathers `sendcount` elements of every rank.
///
/// # Safety
///
/// `sendbuff` has `sendcount` elements, `recvbuff` that many for each rank, both until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    sendcount: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        let comm = Comm::resolve(comm, "ncclAllGather")?;
        let stream = Stream::resolve(stream, comm.device)?;
        // SAFETY: the caller's contract.
        unsafe { comm.all_gather(sendbuff, recvbuff, sendcount, datatype, &stream) }
    })
}

/// Reduces `count` elements over the ranks; everyone gets the result.
///
/// # Safety
///
/// Both buffers have `count` elements until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        let comm = Comm::resolve(comm, "ncclAllReduce")?;
        let stream = Stream::resolve(stream, comm.device)?;
        // SAFETY: the caller's contract.
        unsafe { comm.all_reduce(sendbuff, recvbuff, count, datatype, op, &stream) }
    })
}

/// Reduces `count` elements over the ranks; the root gets the result.
///
/// # Safety
///
/// `sendbuff`, and on the root `recvbuff`, have `count` elements until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        let comm = Comm::resolve(comm, "ncclReduce")?;
        let stream = Stream::resolve(stream, comm.device)?;
        // SAFETY: the caller's contract.
        unsafe { comm.reduce(sendbuff, recvbuff, count, datatype, op, root, &stream) }
    })
}

/// Reduces `recvcount` elements for each rank; rank i gets the i-th part of the result.
///
/// # Safety
///
/// `recvbuff` has `recvcount` elements, `sendbuff` that many for each rank, both until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcount: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        let comm = Comm::resolve(comm, "ncclReduceScatter")?;
        let stream = Stream::resolve(stream, comm.device)?;
        // SAFETY: the caller's contract.
        unsafe { comm.reduce_scatter(sendbuff, recvbuff, recvcount, datatype, op, &stream) }
    })
}

/// Sends `count` elements to `peer`, which has to receive them; inside a group done by `ncclGroupEnd`, side by side with the
/// group's other transfers.
///
/// # Safety
///
/// `sendbuff` has `count` elements until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    sendbuff: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        let comm = Comm::resolve(comm, "ncclSend")?;
        let stream = Stream::resolve(stream, comm.device)?;
        // SAFETY: the caller's contract.
        unsafe { comm.transfer(Direction::Send, sendbuff, count, datatype, peer, &stream) }
    })
}

/// Receives `count` elements that `peer` sends; inside a group done by `ncclGroupEnd`, side by side with the group's other
/// transfers.
///
/// # Safety
///
/// `recvbuff` has `count` elements until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        let comm = Comm::resolve(comm, "ncclRecv")?;
        let stream = Stream::resolve(stream, comm.device)?;
        // SAFETY: the caller's contract.
        unsafe { comm.transfer(Direction::Receive, recvbuff, count, datatype, peer, &stream) }
    })
}

/// Copies the root's `count` elements to every rank.
///
/// # Safety
///
/// `recvbuff`, and on the root `sendbuff`, have `count` elements until the stream has got there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    nccl(|| {
        let comm = Comm::resolve(comm, "ncclBroadcast")?;
        let stream = Stream::resolve(stream, comm.device)?;
        // SAFETY: the caller's contract.
        unsafe { comm.broadcast(sendbuff, recvbuff, count, datatype, root, &stream) }
    })
}

/// Starts a group: communicators created and windows registered in it are set up at the same time, and sends and receives
/// done side by side.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> ncclResult_t {
    nccl(|| {
        batch::start();
        Ok(())
    })
}

/// Ends a group.
///
/// # Safety
///
/// The addresses given to `ncclCommInitRank` and `ncclCommWindowRegister` in the group are still writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> ncclResult_t {
    nccl(batch::end)
}

/// Allocates memory that can be registered as a window.
///
/// # Safety
///
/// `ptr` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t {
    nccl(|| {
        let device = device::make_current();
        device.check()?;
        // SAFETY: the caller's contract.
        unsafe { put(ptr, std::ptr::null_mut()) }?;
        let memory = super::allocate(size, Kind::Nccl, device)?;
        // SAFETY: the caller's contract.
        unsafe { put(ptr, memory) }
    })
}

/// Frees memory of `ncclMemAlloc` after all work of the device.
///
/// # Safety
///
/// Nobody uses the memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t {
    nccl(|| {
        let device = device::make_current();
        if ptr.is_null() {
            return Ok(());
        }
        graph::refuse_unsafe("ncclMemFree")?;
        if let Some(memory) = memory::find(ptr as usize) {
            comm::check_freed(&memory)?;
        }
        let allocation = memory::forget(ptr as usize, |kind| kind == Kind::Nccl)
            .map_err(|fault| crate::fault::Fault::nccl(ncclInvalidArgument, format!("ncclMemFree: {}", fault.text)))?;
        device.synchronize();
        memory::release(allocation);
        device.check()
    })
}

/// Registers memory of `ncclMemAlloc` as a window; with `NCCL_WIN_COLL_SYMMETRIC` collective, and inside a group done by
/// `ncclGroupEnd`.
///
/// # Safety
///
/// `win` is null or writable, inside a group until it ends; the memory stays until the window is deregistered.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn ncclCommWindowRegister(
    comm: ncclComm_t,
    buff: *mut c_void,
    size: usize,
    win: *mut ncclWindow_t,
    winFlags: c_int,
) -> ncclResult_t {
    nccl(|| {
        let comm = Comm::resolve(comm, "ncclCommWindowRegister")?;
        // SAFETY: the caller's contract.
        unsafe { put(win, std::ptr::null_mut()) }?;
        // SAFETY: the caller's contract.
        unsafe { comm.windows.register(&comm.line, buff, size, winFlags, win) }
    })
}

/// Ends the registration of a window.
///
/// # Safety
///
/// No operation uses the window any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowDeregister(comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t {
    nccl(|| Comm::resolve(comm, "ncclCommWindowDeregister")?.windows.deregister(win))
}

/// The address that a window was registered with.
///
/// # Safety
///
/// `outUserPtr` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn ncclWinGetUserPtr(
    comm: ncclComm_t,
    win: ncclWindow_t,
    outUserPtr: *mut *mut c_void,
) -> ncclResult_t {
    nccl(|| {
        let address = Comm::resolve(comm, "ncclWinGetUserPtr")?.windows.address(win, 0, 0)?;
        // SAFETY: the caller's contract.
        unsafe { put(outUserPtr, address) }
    })
}

/// Address at which this process reaches a peer's part of a symmetric window.
///
/// # Safety
///
/// `outPtr` is null or writable.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "parameter names of the C interface")]
pub unsafe extern "C" fn ncclGetPeerDevicePointer(
    window: ncclWindow_t,
    offset: usize,
    peer: c_int,
    outPtr: *mut *mut c_void,
) -> ncclResult_t {
    nccl(|| {
        let address = comm::window(window)?.peer_address(peer, offset)?;
        // SAFETY: the caller's contract.
        unsafe { put(outPtr, address as *mut c_void) }
    })
}

/// Description of a result code.
///
/// # Safety
///
/// Always safe to call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(result: ncclResult_t) -> *const c_char {
    errors::nccl_description(result).as_ptr()
}

/// Text of the last error in this process; valid until the next call on this thread.
///
/// # Safety
///
/// Always safe to call; `comm` is not looked at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(comm: ncclComm_t) -> *const c_char {
    thread_local! {
        static TEXT: RefCell<CString> = RefCell::default();
    }
    let _ = comm;
    let fresh = CString::new(line::last_error().replace('\0', "?")).unwrap_or_default();
    // A thread that is ending has no place for the text any more.
    let stored = TEXT.try_with(|text| text.replace(fresh));
    stored.and_then(|_| TEXT.try_with(|text| text.borrow().as_ptr())).unwrap_or(c"".as_ptr())
}
