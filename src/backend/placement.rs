//! Where the tensors of a call lie.

use super::live::Group;
use super::residency::Fit;
use crate::config::Dialect;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::{Arguments, Extents, scales_of};
use crate::tensor::TensorView;

impl Group {
    /// In the ABI whose windows have no place for scales, those of rows that lie in a window are looked up by their
    /// address.
    #[inline]
    pub(super) fn find_scales(&self, call: &mut impl Arguments) {
        for rows in call.tensors().into_iter().flatten() {
            let (Some(_), Some(scales)) = (rows.window, &mut rows.scales) else { continue };
            if self.config.dialect == Dialect::REGISTER_LAYER {
                scales.window = self.symm.place_of(scales.data).map(|place| place.window);
            }
        }
    }

    /// Checks where a call's tensors lie, and says so. Those that peers do not reach go by their addresses from here on: nothing
    /// is gained by a window there, and NCCL EP (0.1.0) does not look at all of them.
    #[inline]
    pub(super) fn resolve_windows(&mut self, call: &mut impl Arguments) -> Result<Extents> {
        let mut extents = Extents::NONE;
        for (index, tensor) in call.tensors().into_iter().enumerate() {
            match tensor {
                Some(tensor) if tensor.window.is_some() || tensor.scales.is_some() => {
                    self.resolve(tensor, index == 0 && self.engine.reaches_windows())?;
                    match tensor.scales {
                        None if tensor.data != 0 => extents.set(index, tensor, tensor.byte_len()),
                        _ => extents.set_partial(),
                    }
                }
                Some(tensor) => {
                    let bytes = tensor.byte_len();
                    self.residency.check(&self.base.cuda, tensor, bytes, Fit::Reachable)?;
                    extents.set(index, tensor, bytes);
                }
                None => {}
            }
        }
        Ok(extents)
    }

    /// Checks where a tensor with windows or scales lies.
    #[inline(never)]
    fn resolve(&mut self, tensor: &mut TensorView, reached_by_peers: bool) -> Result<()> {
        let address = self.window_address(tensor)?;
        let scales = match scales_of(tensor) {
            Some(scales) if scales.window.is_some() => self.window_address(&scales)?,
            Some(scales) => self.require_reachable(&scales).map(|()| None)?,
            None => None,
        };
        if tensor.window.is_none() {
            self.require_reachable(tensor)?;
        }
        if reached_by_peers {
            // The engine goes by the window; the address tells which memory that is.
            tensor.data = address.unwrap_or(tensor.data);
            return Ok(());
        }
        if let Some(address) = address {
            (tensor.data, tensor.window) = (address, None);
        }
        if let (Some(address), Some(kept)) = (scales, &mut tensor.scales) {
            (kept.data, kept.window) = (address, None);
        }
        Ok(())
    }

    /// Where a tensor with a window lies, if that can be known. Of a window that the program registered itself, NCCL tells where
    /// it begins and not where it ends; the driver tells where its memory ends.
    fn window_address(&mut self, tensor: &TensorView) -> Result<Option<u64>> {
        let Some((address, within)) = self.symm.check_window(tensor)? else { return Ok(None) };
        if !within {
            self.require_reachable(&TensorView { data: address, ..*tensor })?;
        }
        Ok(Some(address))
    }

    /// # Errors
    /// A tensor that the group's device cannot reach, or whose allocation ends before it does.
    #[inline]
    fn require_reachable(&mut self, tensor: &TensorView) -> Result<()> {
        self.residency.check(&self.base.cuda, tensor, tensor.byte_len(), Fit::Reachable)
    }

    /// Handle memory of at least `bytes` bytes on the group's device.
    #[inline]
    pub(super) fn require_memory(&mut self, mem: &TensorView, bytes: usize) -> Result<()> {
        require_memory(mem, bytes)?;
        self.residency.check(&self.base.cuda, mem, bytes as u64, Fit::OnDevice)
    }
}

/// Handle memory of at least `bytes` bytes.
#[inline]
fn require_memory(mem: &TensorView, bytes: usize) -> Result<()> {
    let found = mem.vector("[bytes]")?;
    mem.require_dtype(&[DType::Byte])?;
    if found < bytes {
        return Err(Error::argument(mem.name, format!("must have the reported size, {bytes} bytes"), found));
    }
    mem.require_storage(256)
}
