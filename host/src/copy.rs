//! Copies and fills, with CUDA's rules about when the call returns.

use std::ffi::c_void;
use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::fault::{Fault, Outcome};
use crate::graph;
use crate::memory::{self, Kind, Span};
use crate::queue::Stream;

/// Where one end of a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Residence {
    Device,
    Pinned,
    Pageable,
}

/// Where an address is; untracked memory counts as device memory where the caller says that it is.
fn residence(address: usize, said_device: bool) -> Residence {
    match memory::find(address).map(|allocation| allocation.kind) {
        Some(Kind::Device | Kind::Nccl | Kind::Graph) => Residence::Device,
        Some(Kind::Pinned | Kind::Registered) => Residence::Pinned,
        None if said_device => Residence::Device,
        None => Residence::Pageable,
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
    let to_residence = residence(to.address(), matches!(kind, cudaMemcpyHostToDevice | cudaMemcpyDeviceToDevice));
    let from_residence = residence(from.address(), matches!(kind, cudaMemcpyDeviceToHost | cudaMemcpyDeviceToDevice));
    // A graph reads pageable memory each time that it is launched.
    let captured = graph::is_capturing(stream);
    if !captured && !wait && from_residence == Residence::Pageable && to_residence != Residence::Pageable {
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
    if let Some(done) = done.filter(|_| wait || to_residence == Residence::Pageable) {
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

/// A rectangle in memory: rows of `width` bytes, `pitch` bytes apart.
#[derive(Clone, Copy, Debug)]
pub struct Rectangle {
    /// First row.
    pub base: *const c_void,
    /// Bytes from one row to the next.
    pub pitch: usize,
}

/// Copies `height` rows of `width` bytes in stream order.
///
/// # Safety
///
/// Both rectangles are valid until the stream has got there.
pub unsafe fn copy_rows(
    target: Rectangle,
    source: Rectangle,
    width: usize,
    height: usize,
    kind: cudaMemcpyKind,
    stream: &Arc<Stream>,
) -> Outcome<()> {
    if kind > cudaMemcpyDefault {
        return Err(Fault::cuda(cudaErrorInvalidMemcpyDirection, format!("copy direction {kind} is unknown")));
    }
    if width > target.pitch || width > source.pitch {
        let text = format!("rows of {width} bytes do not fit pitches of {} and {}", target.pitch, source.pitch);
        return Err(Fault::cuda(cudaErrorInvalidPitchValue, text));
    }
    if width == 0 || height == 0 {
        return Ok(());
    }
    let span = |rectangle: Rectangle| {
        let bytes = rectangle.pitch.checked_mul(height - 1).and_then(|bytes| bytes.checked_add(width));
        let bytes = bytes.ok_or_else(|| Fault::cuda(cudaErrorInvalidValue, "the rectangle is too large"))?;
        // SAFETY: the caller vouches for both rectangles.
        unsafe { Span::new(rectangle.base, bytes) }
    };
    let (to, from) = (span(target)?, span(source)?);
    let (to_pitch, from_pitch) = (target.pitch, source.pitch);
    let pageable = [to, from].iter().any(|span| residence(span.address(), false) == Residence::Pageable);
    let done = stream.enqueue(&[to, from], move || {
        for row in 0..height {
            to.write(row * to_pitch, from.view(row * from_pitch, width));
        }
        Ok(())
    })?;
    // The source may change when the call returns, the target has to be there.
    if let Some(done) = done.filter(|_| pageable) {
        done.wait();
        stream.device().check()?;
    }
    Ok(())
}

/// Frees device memory in stream order; the address is invalid for callers at once.
pub fn free_async(pointer: *mut c_void, stream: &Arc<Stream>) -> Outcome<()> {
    if pointer.is_null() {
        return Ok(());
    }
    if let Some(memory) = graph::memory_at(pointer as usize) {
        return graph::free_memory(&memory, stream);
    }
    graph::refuse_on_captured(stream, "freeing memory in stream order that no graph allocates")?;
    let allocation = memory::forget(pointer as usize, Kind::is_freed_by_callers)?;
    // Once and whatever happened on the device.
    let run = move |_: Option<&Fault>| {
        memory::release(allocation);
        Ok(())
    };
    stream.push(Vec::new(), std::sync::Arc::new(run)).map(drop)
}
