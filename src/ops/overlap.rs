//! No call writes memory that it reads or writes through another of its arguments.
//!
//! Peers write into this rank's buffers while it still reads its own, so nothing is in place. Arguments that are only read may
//! share memory; so may the rows from C on, which no call touches, and dispatch's `topk_idx`, whose contents it does not read.
#![forbid(unsafe_code)]

use super::args::{Arguments, MOST_TENSORS};
use super::mxfp8::scales_of;
use crate::error::{Error, Result};
use crate::tensor::TensorView;

/// Where the tensors of a call begin and end, as addresses. What is not there begins behind everything and ends before it.
pub(crate) struct Extents {
    list: [(u64, u64); MOST_TENSORS],
    /// Whether there is more to a tensor: scales, or a window of unknown address.
    is_partial: bool,
}

impl Extents {
    /// No tensors.
    pub(crate) const NONE: Self = Self { list: [(u64::MAX, 0); MOST_TENSORS], is_partial: false };

    /// Enters `bytes` bytes from the first element of a plain tensor, which end within the address space.
    #[inline]
    pub(crate) const fn set(&mut self, index: usize, tensor: &TensorView, bytes: u64) {
        self.list[index] = (tensor.data, tensor.data.wrapping_add(bytes));
    }

    /// There is a tensor of another kind.
    pub(crate) const fn set_partial(&mut self) {
        self.is_partial = true;
    }

    /// Checks `call`, whose tensors these are, cut to the rows that count, over `bytes` bytes of handle memory, which prepare
    /// writes and the other calls read.
    ///
    /// # Errors
    /// Two arguments that share bytes, at least one of them written.
    #[inline]
    pub(crate) fn require_disjoint<C: Arguments>(
        &self,
        handle_mem: &TensorView,
        bytes: usize,
        call: &mut C,
    ) -> Result<()> {
        if self.is_partial || self.meet::<C>(handle_mem, bytes) {
            return Ranges::new::<C>(handle_mem, bytes).with(call).require_disjoint();
        }
        Ok(())
    }

    /// Whether anything may share bytes: seen from first and last addresses alone, since this runs at every call. An empty tensor
    /// within another one seems to.
    #[inline(always)]
    fn meet<C: Arguments>(&self, handle_mem: &TensorView, bytes: usize) -> bool {
        let meets = |a: (u64, u64), b: (u64, u64)| a.0 < b.1 && b.0 < a.1;
        let memory = (handle_mem.data, handle_mem.data + bytes as u64);
        for index in 0..MOST_TENSORS {
            let (extent, is_written) = (self.list[index], C::WRITTEN[index]);
            if (is_written || C::WRITES_HANDLE) && meets(memory, extent) {
                return true;
            }
            for other in index + 1..MOST_TENSORS {
                if (is_written || C::WRITTEN[other]) && meets(extent, self.list[other]) {
                    return true;
                }
            }
        }
        false
    }
}

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

/// Most arguments of a call, or of prepare and dispatch in one, scales and handle memory counted.
const MOST: usize = 10;

/// What calls read and write, once their arguments are checked and cut to the rows that count.
pub(crate) struct Ranges {
    list: [Range; MOST],
    len: usize,
}

impl Ranges {
    /// Handle memory of `bytes` bytes, as the call `C` uses it.
    #[cold]
    pub(crate) fn new<C: Arguments>(handle_mem: &TensorView, bytes: usize) -> Self {
        let (name, start) = (handle_mem.name, handle_mem.data);
        let first = Range { name, window: 0, start, end: start + bytes as u64, is_written: C::WRITES_HANDLE };
        Self { list: [first; MOST], len: 1 }
    }

    /// These, and the tensors of `call`.
    pub(crate) fn with<C: Arguments>(mut self, call: &mut C) -> Self {
        for (tensor, is_written) in call.tensors().into_iter().zip(C::WRITTEN) {
            let Some(tensor) = tensor else { continue };
            self.add(tensor, is_written);
            if let Some(scales) = scales_of(tensor) {
                self.add(&scales, is_written);
            }
        }
        self
    }

    fn add(&mut self, tensor: &TensorView, is_written: bool) {
        let (window, start) = match tensor.window {
            Some(window) if tensor.data == 0 => (window.handle(), window.offset),
            _ => (0, tensor.data),
        };
        let end = start.saturating_add(tensor.byte_len());
        self.list[self.len] = Range { name: tensor.name, window, start, end, is_written };
        self.len += 1;
    }

    /// # Errors
    /// Two arguments that share bytes, at least one of them written.
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

#[cfg(test)]
mod tests {
    use super::super::args::{Combine, CombineBwd, Dispatch, Prepare};
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

    /// Checks `call`, and that the quick look lets through nothing that the list refuses.
    fn check<C: Arguments + Copy>(call: &C) -> Result<()> {
        let (mut call, memory, mut extents) = (*call, bytes("handle_mem", 0x1000, 0x10_0000), Extents::NONE);
        for (index, tensor) in call.tensors().into_iter().enumerate() {
            match tensor {
                Some(tensor) if tensor.window.is_some() || tensor.scales.is_some() => extents.set_partial(),
                Some(tensor) => extents.set(index, tensor, tensor.byte_len()),
                None => {}
            }
        }
        let found = extents.require_disjoint(&memory, 0x1000, &mut call);
        assert_eq!(found, Ranges::new::<C>(&memory, 0x1000).with(&mut call).require_disjoint());
        found
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
        assert_eq!(check(&dispatch()), Ok(()), "neighbours");
        for (at, other) in [(0x2000, "tokens"), (0x1001, "tokens"), (0x2fff, "tokens"), (0x3010, "topk_weights")] {
            let text = check(&Dispatch { recv_tokens: rows("recv_tokens", at), ..dispatch() }).unwrap_err();
            assert!(
                text.to_string().starts_with(&format!("recv_tokens must not share memory with {other}, got {at:#x}"))
            );
        }
        let call = Dispatch { recv_topk_weights: Some(rows("recv_topk_weights", 0x4ff0)), ..dispatch() };
        let text = check(&call).unwrap_err().to_string();
        let expected =
            "recv_topk_weights must not share memory with recv_tokens, got 0x4ff0 to 0x5ff0 and 0x4000 to 0x5000";
        assert_eq!(text, expected);
        let call = Combine { expert_out: rows("expert_out", 0x1000), result: rows("result", 0x10_0ff0) };
        let text = check(&call).unwrap_err().to_string();
        assert!(text.starts_with("result must not share memory with handle_mem"), "{text}");
    }

    #[test]
    fn what_is_only_read_may_share_memory() {
        let same = Dispatch { topk_weights: Some(rows("topk_weights", 0x2000)), ..dispatch() };
        assert_eq!(check(&same), Ok(()));
        let unread =
            Dispatch { recv_tokens: rows("recv_tokens", 0x1000), tokens: rows("tokens", 0x6000), ..dispatch() };
        assert_eq!(check(&unread), Ok(()), "topk_idx is not read");
        let call = CombineBwd { grad: rows("grad", 0x10_0000), grad_expert_out: rows("grad_expert_out", 0x1000) };
        assert_eq!(check(&call), Ok(()), "handle memory is read");
    }

    #[test]
    fn prepare_writes_its_handle_memory() {
        let call = |topk_idx, counts, total| Prepare {
            topk_idx: rows("topk_idx", topk_idx),
            token_counts: Some(bytes("token_counts", 32, counts)),
            total: Some(bytes("total", 8, total)),
        };
        assert_eq!(check(&call(0x1000, 0x2000, 0x2020)), Ok(()));
        for (call, text) in [
            (call(0x10_0800, 0x2000, 0x2020), "handle_mem must not share memory with topk_idx"),
            (call(0x1000, 0x1ff8, 0x2020), "token_counts must not share memory with topk_idx"),
            (call(0x1000, 0x2000, 0x2018), "total must not share memory with token_counts"),
            (call(0x1000, 0x10_0100, 0x2020), "token_counts must not share memory with handle_mem"),
        ] {
            let found = check(&call).unwrap_err().to_string();
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
        let text = check(&call).unwrap_err().to_string();
        assert!(
            text.starts_with("grad_expert_out.rowwise_scale_inv must not share memory with grad.rowwise_scale_inv")
        );
        let windowed = |name, handle, offset| TensorView { window: Window::new(handle, offset), ..rows(name, 0) };
        let at = |handle, offset| Combine {
            expert_out: windowed("expert_out", 7, 0),
            result: windowed("result", handle, offset),
        };
        assert!(check(&at(7, 0xff0)).is_err());
        assert_eq!(check(&at(7, 0x1000)), Ok(()));
        assert_eq!(check(&at(8, 0)), Ok(()), "another window's offsets");
        // Where the address is known too, it counts.
        let known = |tensor: TensorView, data| TensorView { data, ..tensor };
        let Combine { expert_out, result } = at(8, 0x8000);
        let call = Combine { expert_out: known(expert_out, 0x1000), result: known(result, 0x1800) };
        assert!(check(&call).is_err());
    }

    #[test]
    fn the_quick_look_finds_all_that_the_list_finds() {
        let (mut seed, mut refused) = (1u64, 0);
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..20_000 {
            let mut tensor = |name| TensorView {
                shape: Shape::new(&[next(3) as usize, 64]).unwrap(),
                ..rows(name, 0xf_f000 + 0x80 * next(128))
            };
            let call = Dispatch {
                topk_idx: None,
                tokens: tensor("tokens"),
                topk_weights: Some(tensor("topk_weights")),
                recv_tokens: tensor("recv_tokens"),
                recv_topk_weights: Some(tensor("recv_topk_weights")),
            };
            refused += usize::from(check(&call).is_err());
        }
        assert!((1_000..19_000).contains(&refused), "{refused}");
    }

    #[test]
    fn nothing_shares_memory_with_an_empty_tensor() {
        let mut result = rows("result", 0x1800);
        result.shape = Shape::new(&[0, 64]).unwrap();
        assert_eq!(check(&Combine { expert_out: rows("expert_out", 0x1000), result }), Ok(()));
    }
}
