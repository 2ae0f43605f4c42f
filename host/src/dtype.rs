//! Element types: sizes, names, and the conversions between token types and FP32.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use nvte_ep_bindings::*;

/// Bytes of one element; `None` for a type that this library does not know.
pub fn size_of(datatype: ncclDataType_t) -> Option<usize> {
    Some(match datatype {
        ncclInt8 | ncclUint8 | ncclFloat8e4m3 | ncclFloat8e5m2 => 1,
        ncclFloat16 | ncclBfloat16 => 2,
        ncclInt32 | ncclUint32 | ncclFloat32 => 4,
        ncclInt64 | ncclUint64 | ncclFloat64 => 8,
        _ => return None,
    })
}

/// Two packed FP4 values: a type that NCCL EP adds to NCCL's.
pub const FLOAT4X2: ncclDataType_t = 12;

/// Bytes of one element of an EP tensor, which may also be a [`FLOAT4X2`].
pub fn ep_size_of(datatype: ncclDataType_t) -> Option<usize> {
    if datatype == FLOAT4X2 { Some(1) } else { size_of(datatype) }
}

/// Name for messages.
pub fn name(datatype: ncclDataType_t) -> String {
    let name = match datatype {
        ncclInt8 => "int8",
        ncclUint8 => "uint8",
        ncclInt32 => "int32",
        ncclUint32 => "uint32",
        ncclInt64 => "int64",
        ncclUint64 => "uint64",
        ncclFloat16 => "float16",
        ncclFloat32 => "float32",
        ncclFloat64 => "float64",
        ncclBfloat16 => "bfloat16",
        ncclFloat8e4m3 => "float8_e4m3",
        ncclFloat8e5m2 => "float8_e5m2",
        FLOAT4X2 => "float4_e2m1x2",
        other => return format!("data type {other}"),
    };
    name.to_owned()
}

/// A type that tokens may have in an unquantised dispatch or combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// bfloat16
    Bf16,
    /// IEEE half
    F16,
    /// IEEE single
    F32,
}

impl TokenType {
    /// The token type with this NCCL number.
    pub fn from_nccl(datatype: ncclDataType_t) -> Option<Self> {
        match datatype {
            ncclBfloat16 => Some(Self::Bf16),
            ncclFloat16 => Some(Self::F16),
            ncclFloat32 => Some(Self::F32),
            _ => None,
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// Adds a row to FP32 sums; `scratch` is as long as `sums`.
    pub fn add(self, sums: &mut [f32], scratch: &mut [f32], row: &[u8]) {
        match self {
            Self::Bf16 => {
                for (sum, value) in sums.iter_mut().zip(row.as_chunks::<2>().0) {
                    *sum += f32::from_bits(u32::from(u16::from_ne_bytes(*value)) << 16);
                }
            }
            Self::F16 => {
                let mut block = [f16::ZERO; 64];
                for (wide, narrow) in scratch.chunks_mut(64).zip(row.chunks(128)) {
                    for (value, bytes) in block.iter_mut().zip(narrow.as_chunks::<2>().0) {
                        *value = f16::from_ne_bytes(*bytes);
                    }
                    block[..wide.len()].convert_to_f32_slice(wide);
                }
                for (sum, value) in sums.iter_mut().zip(&*scratch) {
                    *sum += *value;
                }
            }
            Self::F32 => {
                for (sum, value) in sums.iter_mut().zip(row.as_chunks::<4>().0) {
                    *sum += f32::from_ne_bytes(*value);
                }
            }
        }
    }

    /// Writes FP32 sums as a row, rounded to nearest even; NaN gets the one pattern that GPUs produce.
    pub fn store(self, sums: &[f32], row: &mut [u8]) {
        match self {
            Self::Bf16 => {
                for (sum, bytes) in sums.iter().zip(row.as_chunks_mut::<2>().0) {
                    *bytes = round_to_bf16(*sum).to_ne_bytes();
                }
            }
            Self::F16 => {
                let mut block = [f16::ZERO; 64];
                for (wide, narrow) in sums.chunks(64).zip(row.chunks_mut(128)) {
                    block[..wide.len()].convert_from_f32_slice(wide);
                    for (value, bytes) in block.iter().zip(narrow.as_chunks_mut::<2>().0) {
                        let bits = if value.is_nan() { 0x7fff } else { value.to_bits() };
                        *bytes = bits.to_ne_bytes();
                    }
                }
            }
            Self::F32 => {
                for (sum, bytes) in sums.iter().zip(row.as_chunks_mut::<4>().0) {
                    let bits = if sum.is_nan() { 0x7fff_ffff } else { sum.to_bits() };
                    *bytes = bits.to_ne_bytes();
                }
            }
        }
    }
}

/// Round to nearest even without a branch, so that rows vectorise.
fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if value.is_nan() { 0x7fff } else { rounded }
}

/// A reduction over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Product.
    Prod,
    /// Largest.
    Max,
    /// Smallest.
    Min,
    /// Sum divided by the number of ranks.
    Avg,
}

impl Reduction {
    /// The reduction with this NCCL number.
    pub fn from_nccl(op: ncclRedOp_t) -> Option<Self> {
        Some(match op {
            ncclSum => Self::Sum,
            ncclProd => Self::Prod,
            ncclMax => Self::Max,
            ncclMin => Self::Min,
            ncclAvg => Self::Avg,
            _ => return None,
        })
    }
}

/// Arithmetic of a reduction in its accumulator type.
trait Element: Copy {
    fn apply(self, op: Reduction, other: Self) -> Self;
    fn average(self, ranks: usize) -> Self;
}

macro_rules! integer_elements {
    ($($t:ty),*) => {$(
        impl Element for $t {
            fn apply(self, op: Reduction, other: Self) -> Self {
                match op {
                    Reduction::Sum | Reduction::Avg => self.wrapping_add(other),
                    Reduction::Prod => self.wrapping_mul(other),
                    Reduction::Max => self.max(other),
                    Reduction::Min => self.min(other),
                }
            }
            fn average(self, ranks: usize) -> Self {
                // Ranks fit every type but int8 with more than 127 of them, where the sum has wrapped already.
                <$t>::try_from(ranks).map_or(0, |ranks| self / ranks)
            }
        }
    )*};
}
macro_rules! float_elements {
    ($($t:ty),*) => {$(
        impl Element for $t {
            fn apply(self, op: Reduction, other: Self) -> Self {
                match op {
                    Reduction::Sum | Reduction::Avg => self + other,
                    Reduction::Prod => self * other,
                    Reduction::Max => self.max(other),
                    Reduction::Min => self.min(other),
                }
            }
            fn average(self, ranks: usize) -> Self {
                self / ranks as $t
            }
        }
    )*};
}
integer_elements!(i8, u8, i32, u32, i64, u64);
float_elements!(f32, f64);

fn reduce_as<const N: usize, A: Element>(
    op: Reduction,
    inputs: &[&[u8]],
    output: &mut [u8],
    load: impl Fn([u8; N]) -> A,
    store: impl Fn(A) -> [u8; N],
) {
    let rows: Vec<&[[u8; N]]> = inputs.iter().map(|input| input.as_chunks::<N>().0).collect();
    let Some((first, rest)) = rows.split_first() else { return };
    for (index, out) in output.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let value = rest.iter().fold(load(first[index]), |value, row| value.apply(op, load(row[index])));
        *out = store(if op == Reduction::Avg { value.average(rows.len()) } else { value });
    }
}

/// Reduces the ranks' inputs, in rank order; 16-bit floats are accumulated in FP32 and rounded once.
pub fn reduce(datatype: ncclDataType_t, op: Reduction, inputs: &[&[u8]], output: &mut [u8]) {
    match datatype {
        ncclInt8 => reduce_as(op, inputs, output, i8::from_ne_bytes, i8::to_ne_bytes),
        ncclUint8 => reduce_as(op, inputs, output, u8::from_ne_bytes, u8::to_ne_bytes),
        ncclInt32 => reduce_as(op, inputs, output, i32::from_ne_bytes, i32::to_ne_bytes),
        ncclUint32 => reduce_as(op, inputs, output, u32::from_ne_bytes, u32::to_ne_bytes),
        ncclInt64 => reduce_as(op, inputs, output, i64::from_ne_bytes, i64::to_ne_bytes),
        ncclUint64 => reduce_as(op, inputs, output, u64::from_ne_bytes, u64::to_ne_bytes),
        ncclFloat32 => reduce_as(op, inputs, output, f32::from_ne_bytes, f32::to_ne_bytes),
        ncclFloat64 => reduce_as(op, inputs, output, f64::from_ne_bytes, f64::to_ne_bytes),
        ncclFloat16 => reduce_as(
            op,
            inputs,
            output,
            |bytes| f16::from_ne_bytes(bytes).to_f32(),
            |value| f16::from_f32(value).to_ne_bytes(),
        ),
        ncclBfloat16 => reduce_as(
            op,
            inputs,
            output,
            |bytes| bf16::from_ne_bytes(bytes).to_f32(),
            |value| bf16::from_f32(value).to_ne_bytes(),
        ),
        other => unreachable!("reduction of {} is refused at the call", name(other)),
    }
}

/// Whether [`reduce`] knows the type.
pub fn reducible(datatype: ncclDataType_t) -> bool {
    datatype <= ncclBfloat16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_agrees_with_half_on_every_tie_and_neighbour() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                let expected = if value.is_nan() { 0x7fff } else { bf16::from_f32(value).to_bits() };
                assert_eq!(round_to_bf16(value), expected, "{:#x}", value.to_bits());
            }
        }
    }

    #[test]
    fn rows_survive_a_round_trip_except_negative_zero() {
        let values = [1.5f32, -0.0, 2.0f32.powi(-24), 65504.0, -3.25];
        let row: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_ne_bytes()).collect();
        let (mut sums, mut scratch, mut out) = ([0f32; 5], [0f32; 5], vec![0u8; 10]);
        TokenType::F16.add(&mut sums, &mut scratch, &row);
        TokenType::F16.store(&sums, &mut out);
        let back: Vec<u16> = out.as_chunks::<2>().0.iter().map(|b| u16::from_ne_bytes(*b)).collect();
        let expected = [1.5f32, 0.0, 2.0f32.powi(-24), 65504.0, -3.25].map(|v| f16::from_f32(v).to_bits());
        assert_eq!(back, expected);
    }

    #[test]
    fn reductions_of_every_kind() {
        let inputs: Vec<Vec<u8>> =
            [[3i32, -4], [5, 6]].iter().map(|row| row.iter().flat_map(|v| v.to_ne_bytes()).collect()).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        for (op, expected) in [
            (Reduction::Sum, [8, 2]),
            (Reduction::Prod, [15, -24]),
            (Reduction::Max, [5, 6]),
            (Reduction::Min, [3, -4]),
            (Reduction::Avg, [4, 1]),
        ] {
            let mut out = [0u8; 8];
            reduce(ncclInt32, op, &inputs, &mut out);
            let values: Vec<i32> = out.as_chunks::<4>().0.iter().map(|b| i32::from_ne_bytes(*b)).collect();
            assert_eq!(values, expected, "{op:?}");
        }
    }
}
