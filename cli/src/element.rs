//! The three token data types, as one trait.

use clap::ValueEnum;
use half::{bf16, f16};
use nvte_ep_core::ffi::types::{NVTEDType, kNVTEBFloat16, kNVTEFloat16, kNVTEFloat32};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

/// Data type of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The number that the C interface has for it.
    pub const fn code(self) -> NVTEDType {
        match self {
            Self::Bf16 => kNVTEBFloat16,
            Self::F16 => kNVTEFloat16,
            Self::F32 => kNVTEFloat32,
        }
    }

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}

/// Plain old data: no padding, every bit pattern valid.
///
/// # Safety
/// The type has neither padding nor invalid bit patterns.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: an integer.
unsafe impl Plain for u8 {}
// SAFETY: an integer.
unsafe impl Plain for i32 {}
// SAFETY: an integer.
unsafe impl Plain for i64 {}
// SAFETY: a float.
unsafe impl Plain for f32 {}
// SAFETY: a transparent 16-bit integer.
unsafe impl Plain for bf16 {}
// SAFETY: a transparent 16-bit integer.
unsafe impl Plain for f16 {}

/// The bytes of a slice.
pub fn bytes_of<T: Plain>(data: &[T]) -> &[u8] {
    // SAFETY: `Plain` has no padding, so every byte is initialised; length and lifetime are the slice's.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// A token element.
pub trait Element: Plain + Default + Debug {
    /// Its data type.
    const DTYPE: Dtype;
    /// Unit roundoff: the largest relative error of rounding to nearest.
    const ROUNDOFF: f64;
    /// Largest absolute error of rounding a value below the normal range.
    const TINY: f64;
    /// A NaN.
    const NAN: Self;

    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// The value, exactly.
    fn to_f32(self) -> f32;
    /// Rounds by way of f32; the second rounding adds at most 2^-16 of the first one's error.
    fn from_f64(value: f64) -> Self {
        Self::from_f32(value as f32)
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    const ROUNDOFF: f64 = 1.0 / 256.0;
    const TINY: f64 = f64::from_bits((1023 - 134) << 52);
    const NAN: Self = bf16::NAN;
    // Without the branches of bf16::from_f32, which random digits mispredict half of the time.
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1));
        let quiet = bits | 0x0040_0000;
        bf16::from_bits(((if value.is_nan() { quiet } else { rounded }) >> 16) as u16)
    }
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
    const ROUNDOFF: f64 = 1.0 / 2048.0;
    const TINY: f64 = 1.0 / (1u64 << 25) as f64;
    const NAN: Self = f16::NAN;
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const ROUNDOFF: f64 = F32_ROUNDOFF;
    const TINY: f64 = f64::from_bits((1023 - 150) << 52);
    const NAN: Self = f32::NAN;
    fn from_f32(value: f32) -> Self {
        value
    }
    fn to_f32(self) -> f32 {
        self
    }
}

/// Unit roundoff of f32, in which the library sums.
pub const F32_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;

#[cfg(test)]
mod tests {
    use super::*;

    fn rounding_stays_within_the_constants<E: Element>() {
        for i in 1..2000u32 {
            let value = (f64::from(i) * 0.7312).sin() * 3.0;
            let error = (f64::from(E::from_f64(value).to_f32()) - value).abs();
            assert!(error <= value.abs() * E::ROUNDOFF * 1.0001 + E::TINY, "{value} {error}");
        }
        let half_tiny = E::from_f64(E::TINY * 0.99).to_f32();
        assert_eq!(half_tiny, 0.0);
        assert!(E::from_f64(E::TINY * 1.01).to_f32() > 0.0);
        assert!(E::NAN.to_f32().is_nan());
    }

    #[test]
    fn constants() {
        rounding_stays_within_the_constants::<bf16>();
        rounding_stays_within_the_constants::<f16>();
        rounding_stays_within_the_constants::<f32>();
    }

    #[test]
    fn bf16_rounds_as_half_does() {
        let specials = [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-45];
        let patterns = (0..200_000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9E37_79B9)));
        // Ties and their neighbours.
        let ties = (0..2000u32)
            .flat_map(|i| [0x7FFF, 0x8000, 0x8001].map(|low| f32::from_bits(0x3F80_0000 + (i << 16) + low)));
        for value in specials.into_iter().chain(patterns).chain(ties) {
            let ours = <bf16 as Element>::from_f32(value);
            assert_eq!(ours.to_bits(), bf16::from_f32(value).to_bits(), "{value:e} {:#x}", value.to_bits());
        }
    }

    #[test]
    fn all_ones_is_nan_in_every_type() {
        assert!(bf16::from_bits(0xFFFF).to_f32().is_nan());
        assert!(f16::from_bits(0xFFFF).to_f32().is_nan());
        assert!(f32::from_bits(0xFFFF_FFFF).is_nan());
    }
}
