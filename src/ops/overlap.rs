//! No call writes memory that it reads or writes through another of its arguments.
//!
//! Peers write into this rank's buffers while it still reads its own, so nothing is in place. Arguments that are only read may
//! share memory; so may the rows from C on, which no call touches, and dispatch's `topk_idx`, whose contents it does not read.
#![forbid(unsafe_code)]

use super::args::{Combine, CombineBwd, Dispatch, DispatchBwd, Prepare};
use super::mxfp8::scales_of;
use crate::error::{Error, Result};
use crate::tensor::TensorView;

/// The bytes of one argument.
#[derive(Clone, Copy)]
struct Range {
    name: &'static str,
    /// The window where its address is not known; else 0.
    window: usize,
    start: u64,
    end: u64,
    is_written: bool,
}

/// Most arguments of a call, scales and handle memory counted.
const MOST: usize = 10;

/// What a call reads and writes, once its arguments are checked and cut to the rows that count.
pub(crate) struct Ranges {
    list: [Range; MOST],
    len: usize,
}

/// A call that says what it reads and writes, its handle memory excepted.
pub(crate) trait Touches {
    /// Adds its arguments.
    fn touches(&self, ranges: &mut Ranges);
}

impl Ranges {
    /// Handle memory of `bytes` bytes, which prepare writes and the other calls read.
    #[inline]
    pub(crate) fn new(handle_mem: &TensorView, bytes: usize, is_written: bool) -> Self {
        let (name, start) = (handle_mem.name, handle_mem.data);
        let first = Range { name, window: 0, start, end: start + bytes as u64, is_written };
        Self { list: [first; MOST], len: 1 }
    }

    #[inline]
    fn add(&mut self, tensor: &TensorView, is_written: bool) {
        let (window, start) = match tensor.window {
            Some(window) if tensor.data == 0 => (window.handle(), window.offset),
            _ => (0, tensor.data),
        };
        let end = start.saturating_add(tensor.byte_len());
        self.list[self.len] = Range { name: tensor.name, window, start, end, is_written };
        self.len += 1;
        if let Some(scales) = scales_of(tensor) {
            self.add(&scales, is_written);
        }
    }

    #[inline]
    fn reads(&mut self, tensors: [Option<&TensorView>; 2]) {
        tensors.into_iter().flatten().for_each(|tensor| self.add(tensor, false));
    }

    #[inline]
    fn writes(&mut self, tensors: [Option<&TensorView>; 2]) {
        tensors.into_iter().flatten().for_each(|tensor| self.add(tensor, true));
    }

    /// # Errors
    /// Two arguments that share bytes, at least one of them written.
    #[inline]
    pub(crate) fn require_disjoint(&self) -> Result<()> {
        let list = &self.list[..self.len];
        for (index, a) in list.iter().enumerate() {
            for b in &list[index + 1..] {
                let shared = a.start.max(b.start) < a.end.min(b.end) && a.window == b.window;
                if shared && (a.is_written || b.is_written) {
                    return Err(overlap(a, b));
                }
            }
        }
        Ok(())
    }
}

#[cold]
fn overlap(a: &Range, b: &Range) -> Error {
    let (written, other) = if b.is_written { (b, a) } else { (a, b) };
    let required = format!("must not share memory with {}", other.name);
    let range = |range: &Range| format!("{:#x} to {:#x}", range.start, range.end);
    Error::argument(written.name, required, format!("{} and {}", range(written), range(other)))
}

impl Touches for Prepare {
    fn touches(&self, ranges: &mut Ranges) {
        ranges.reads([Some(&self.topk_idx), None]);
        ranges.writes([self.token_counts.as_ref(), self.total.as_ref()]);
    }
}

impl Touches for Dispatch {
    fn touches(&self, ranges: &mut Ranges) {
        ranges.reads([Some(&self.tokens), self.topk_weights.as_ref()]);
        ranges.writes([Some(&self.recv_tokens), self.recv_topk_weights.as_ref()]);
    }
}

impl Touches for Combine {
    fn touches(&self, ranges: &mut Ranges) {
        ranges.reads([Some(&self.expert_out), None]);
        ranges.writes([Some(&self.result), None]);
    }
}

impl Touches for DispatchBwd {
    fn touches(&self, ranges: &mut Ranges) {
        ranges.reads([Some(&self.grad), self.g_recv_topk_weights.as_ref()]);
        ranges.writes([Some(&self.grad_tokens), self.grad_topk_weights.as_ref()]);
    }
}

impl Touches for CombineBwd {
    fn touches(&self, ranges: &mut Ranges) {
        ranges.reads([Some(&self.grad), None]);
        ranges.writes([Some(&self.grad_expert_out), None]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::tensor::{Scales, Shape, Window};

    /// `[16, 64]` float32 at `data`: 4096 bytes.
    fn rows(name: &'static str, data: u64) -> TensorView {
        let shape = Shape::new(&[16, 64]).unwrap();
        TensorView { name, dtype: DType::Float32, shape, data, window: None, scales: None }
    }

    fn bytes(name: &'static str, length: usize, data: u64) -> TensorView {
        TensorView { dtype: DType::Byte, shape: Shape::vector(length), ..rows(name, data) }
    }

    fn check(call: &impl Touches, writes_memory: bool) -> Result<()> {
        let mut ranges = Ranges::new(&bytes("handle_mem", 0x1000, 0x10_0000), 0x1000, writes_memory);
        call.touches(&mut ranges);
        ranges.require_disjoint()
    }

    fn dispatch() -> Dispatch {
        Dispatch {
            topk_idx: Some(rows("topk_idx", 0x1000)),
            tokens: rows("tokens", 0x2000),
            topk_weights: Some(rows("topk_weights", 0x3000)),
            recv_tokens: rows("recv_tokens", 0x4000),
            recv_topk_weights: Some(rows("recv_topk_weights", 0x5000)),
        }
    }

    #[test]
    fn what_is_written_shares_memory_with_nothing() {
        assert_eq!(check(&dispatch(), false), Ok(()), "neighbours");
        for (at, other) in [(0x2000, "tokens"), (0x1001, "tokens"), (0x2fff, "tokens"), (0x3010, "topk_weights")] {
            let text = check(&Dispatch { recv_tokens: rows("recv_tokens", at), ..dispatch() }, false).unwrap_err();
            assert!(
                text.to_string().starts_with(&format!("recv_tokens must not share memory with {other}, got {at:#x}"))
            );
        }
        let call = Dispatch { recv_topk_weights: Some(rows("recv_topk_weights", 0x4ff0)), ..dispatch() };
        let text = check(&call, false).unwrap_err().to_string();
        let expected =
            "recv_topk_weights must not share memory with recv_tokens, got 0x4ff0 to 0x5ff0 and 0x4000 to 0x5000";
        assert_eq!(text, expected);
        let call = Combine { expert_out: rows("expert_out", 0x1000), result: rows("result", 0x10_0ff0) };
        let text = check(&call, false).unwrap_err().to_string();
        assert!(text.starts_with("result must not share memory with handle_mem"), "{text}");
    }

    #[test]
    fn what_is_only_read_may_share_memory() {
        let same = Dispatch { topk_weights: Some(rows("topk_weights", 0x2000)), ..dispatch() };
        assert_eq!(check(&same, false), Ok(()));
        let unread =
            Dispatch { recv_tokens: rows("recv_tokens", 0x1000), tokens: rows("tokens", 0x6000), ..dispatch() };
        assert_eq!(check(&unread, false), Ok(()), "topk_idx is not read");
        let call = CombineBwd { grad: rows("grad", 0x10_0000), grad_expert_out: rows("grad_expert_out", 0x1000) };
        assert_eq!(check(&call, false), Ok(()), "handle memory is read");
    }

    #[test]
    fn prepare_writes_its_handle_memory() {
        let call = |topk_idx, counts, total| Prepare {
            topk_idx: rows("topk_idx", topk_idx),
            token_counts: Some(bytes("token_counts", 32, counts)),
            total: Some(bytes("total", 8, total)),
        };
        assert_eq!(check(&call(0x1000, 0x2000, 0x2020), true), Ok(()));
        for (call, text) in [
            (call(0x10_0800, 0x2000, 0x2020), "handle_mem must not share memory with topk_idx"),
            (call(0x1000, 0x1ff8, 0x2020), "token_counts must not share memory with topk_idx"),
            (call(0x1000, 0x2000, 0x2018), "total must not share memory with token_counts"),
            (call(0x1000, 0x10_0100, 0x2020), "token_counts must not share memory with handle_mem"),
        ] {
            let found = check(&call, true).unwrap_err().to_string();
            assert!(found.starts_with(text), "{found}");
        }
    }

    #[test]
    fn scales_and_windows_count() {
        let shape = Shape::new(&[16, 2]).unwrap();
        let scaled = |mut tensor: TensorView, data| {
            tensor.scales = Some(Scales { dtype: DType::Float8E8M0, shape, data, window: None });
            tensor
        };
        let call = CombineBwd {
            grad: scaled(rows("grad", 0x1000), 0x2000),
            grad_expert_out: scaled(rows("grad_expert_out", 0x3000), 0x2010),
        };
        let text = check(&call, false).unwrap_err().to_string();
        assert!(
            text.starts_with("grad_expert_out.rowwise_scale_inv must not share memory with grad.rowwise_scale_inv")
        );
        let windowed = |name, handle, offset| TensorView { window: Window::new(handle, offset), ..rows(name, 0) };
        let at = |handle, offset| Combine {
            expert_out: windowed("expert_out", 7, 0),
            result: windowed("result", handle, offset),
        };
        assert!(check(&at(7, 0xff0), false).is_err());
        assert_eq!(check(&at(7, 0x1000), false), Ok(()));
        assert_eq!(check(&at(8, 0), false), Ok(()), "another window's offsets");
    }

    #[test]
    fn nothing_shares_memory_with_an_empty_tensor() {
        let mut result = rows("result", 0x1800);
        result.shape = Shape::new(&[0, 64]).unwrap();
        assert_eq!(check(&Combine { expert_out: rows("expert_out", 0x1000), result }, false), Ok(()));
    }
}
