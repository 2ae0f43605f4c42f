//! Copies and fills, with CUDA's rules about when the call returns.

use std::ffi::c_void;
use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::fault::{Fault, Outcome};
use crate::graph;
use crate::memory::{self, Kind, Span};
use crate::stream::Stream;

/// Where one end of a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Device,
    Pinned,
    Pageable,
}

/// The place of an address; untracked memory counts as device memory where the caller says that it is.
fn place(address: usize, said_device: bool) -> Place {
    match memory::find(address).map(|allocation| allocation.kind) {
        Some(Kind::Device | Kind::Nccl) => Place::Device,
        Some(Kind::Pinned) => Place::Pinned,
        None if said_device => Place::Device,
        None => Place::Pageable,
    }
}

/// Copies `bytes` bytes in stream order; with `wait` the call returns when they are there.
///
/// # Safety
///
/// Both ranges are valid until the stream has got there (pageable sources: until the call returns).
pub unsafe fn copy(
    target: *mut c_void,
    source: *const c_void,
    bytes: usize,
    kind: cudaMemcpyKind,
    stream: &Arc<Stream>,
    wait: bool,
) -> Outcome<()> {
    if kind > cudaMemcpyDefault {
        return Err(Fault::cuda(cudaErrorInvalidMemcpyDirection, format!("copy direction {kind} is unknown")));
    }
    // SAFETY: the caller vouches for both ranges.
    let to = unsafe { Span::new(target, bytes) }?;
    // SAFETY: the caller vouches for both ranges.
    let from = unsafe { Span::new(source, bytes) }?;
    if bytes == 0 {
        return if wait { stream.synchronize() } else { Ok(()) };
    }
    let to_place = place(to.address(), matches!(kind, cudaMemcpyHostToDevice | cudaMemcpyDeviceToDevice));
    let from_place = place(from.address(), matches!(kind, cudaMemcpyDeviceToHost | cudaMemcpyDeviceToDevice));
    // A graph reads pageable memory each time that it is launched.
    let captured = graph::is_capturing(stream);
    if !captured && !wait && from_place == Place::Pageable && to_place != Place::Pageable {
        let content = from.view(0, bytes).to_vec();
        let run = move || {
            to.write(0, &content);
            Ok(())
        };
        return stream.enqueue(&[to], run).map(drop);
    }
    let done = stream.enqueue(&[to, from], move || {
        to.copy_from(&from);
        Ok(())
    })?;
    if let Some(done) = done.filter(|_| wait || to_place == Place::Pageable) {
        done.host_wait();
        stream.device().check()?;
    }
    Ok(())
}

/// Fills `bytes` bytes with a repeated pattern in stream order; with `wait` the call returns when that is done.
///
/// # Safety
///
/// The range is valid until the stream has got there.
pub unsafe fn fill(target: *mut c_void, pattern: &[u8], bytes: usize, stream: &Arc<Stream>, wait: bool) -> Outcome<()> {
    // SAFETY: the caller vouches for the range.
    let to = unsafe { Span::new(target, bytes) }?;
    let pattern = pattern.to_vec();
    let done = stream.enqueue(&[to], move || {
        match *pattern {
            [value] => to.fill(0, bytes, value),
            _ => to.write(0, &pattern.repeat(bytes / pattern.len())),
        }
        Ok(())
    })?;
    if let Some(done) = done.filter(|_| wait) {
        done.host_wait();
        stream.device().check()?;
    }
    Ok(())
}

/// Frees device memory in stream order; the address is invalid for callers at once.
pub fn free_async(pointer: *mut c_void, stream: &Arc<Stream>) -> Outcome<()> {
    if pointer.is_null() {
        return Ok(());
    }
    graph::refuse_on_captured(stream, "freeing memory in stream order")?;
    let allocation = memory::forget(pointer as usize, Kind::on_device)?;
    // Once and whatever happened on the device.
    let run = move |_: Option<&Fault>| {
        memory::release(allocation);
        Ok(())
    };
    stream.push(Vec::new(), std::sync::Arc::new(run)).map(drop)
}
