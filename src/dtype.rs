//! Data types, in the order of TransformerEngine's numbers, with NCCL's number of each, in one table.
#![forbid(unsafe_code)]

use nvte_ep_bindings as nccl;
use std::fmt;

/// A tensor's data type. A word, so that the structures with one have no padding: what copies those copies words.
#[repr(usize)]
#[allow(missing_docs, reason = "the names are the formats' own")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    Byte,
    Int16,
    Int32,
    Int64,
    Float32,
    Float16,
    BFloat16,
    Float8E4M3,
    Float8E5M2,
    Float8E8M0,
    Float4E2M1,
}

struct Row {
    dtype: DType,
    /// What NCCL EP is told; none where it has no such type.
    nccl: Option<nccl::ncclDataType_t>,
    bits: usize,
    name: &'static str,
}

const fn row(dtype: DType, nccl: Option<nccl::ncclDataType_t>, bits: usize, name: &'static str) -> Row {
    Row { dtype, nccl, bits, name }
}

/// Ordered by the variant, so that a variant indexes its row (`rows_are_in_order` checks).
const TABLE: [Row; 11] = [
    row(DType::Byte, Some(nccl::ncclUint8), 8, "byte"),
    row(DType::Int16, None, 16, "int16"),
    row(DType::Int32, Some(nccl::ncclInt32), 32, "int32"),
    row(DType::Int64, Some(nccl::ncclInt64), 64, "int64"),
    row(DType::Float32, Some(nccl::ncclFloat32), 32, "float32"),
    row(DType::Float16, Some(nccl::ncclFloat16), 16, "float16"),
    row(DType::BFloat16, Some(nccl::ncclBfloat16), 16, "bfloat16"),
    row(DType::Float8E4M3, Some(nccl::ncclFloat8e4m3), 8, "float8_e4m3"),
    row(DType::Float8E5M2, Some(nccl::ncclFloat8e5m2), 8, "float8_e5m2"),
    row(DType::Float8E8M0, Some(nccl::ncclUint8), 8, "float8_e8m0"),
    row(DType::Float4E2M1, None, 4, "float4_e2m1"),
];

impl DType {
    /// The type whose place in the list of all is `index`.
    pub(crate) fn from_index(index: usize) -> Option<Self> {
        TABLE.get(index).map(|row| row.dtype)
    }

    /// The type with TransformerEngine's number `code`.
    #[must_use]
    #[inline]
    pub fn from_nvte(code: i32) -> Option<Self> {
        // Numbered in the table's order; a negative one is no index.
        TABLE.get(code as usize).map(|row| row.dtype)
    }

    /// TransformerEngine's number for it.
    #[must_use]
    #[inline]
    pub const fn nvte(self) -> i32 {
        self as i32
    }

    #[inline]
    const fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// NCCL's number for it.
    #[must_use]
    #[inline]
    pub const fn nccl(self) -> Option<nccl::ncclDataType_t> {
        self.row().nccl
    }

    /// Bits of one element.
    #[must_use]
    #[inline]
    pub const fn bits(self) -> usize {
        self.row().bits
    }

    /// Bytes of `count` elements, rounded up to whole bytes.
    #[must_use]
    #[inline]
    pub const fn bytes(self, count: usize) -> usize {
        (count * self.bits()).div_ceil(8)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::types as nvte;

    #[test]
    fn rows_are_in_order() {
        let numbers = [
            (nvte::kNVTEByte, DType::Byte),
            (nvte::kNVTEInt16, DType::Int16),
            (nvte::kNVTEInt32, DType::Int32),
            (nvte::kNVTEInt64, DType::Int64),
            (nvte::kNVTEFloat32, DType::Float32),
            (nvte::kNVTEFloat16, DType::Float16),
            (nvte::kNVTEBFloat16, DType::BFloat16),
            (nvte::kNVTEFloat8E4M3, DType::Float8E4M3),
            (nvte::kNVTEFloat8E5M2, DType::Float8E5M2),
            (nvte::kNVTEFloat8E8M0, DType::Float8E8M0),
            (nvte::kNVTEFloat4E2M1, DType::Float4E2M1),
        ];
        assert_eq!((numbers.len(), TABLE.len()), (nvte::kNVTENumTypes as usize, nvte::kNVTENumTypes as usize));
        for (index, (number, dtype)) in numbers.into_iter().enumerate() {
            assert_eq!((TABLE[index].dtype, dtype as usize), (dtype, index));
            assert_eq!(DType::from_nvte(number), Some(dtype), "TransformerEngine numbers the types in this order");
            assert_eq!(dtype.nvte(), number);
        }
        assert_eq!(DType::from_nvte(nvte::kNVTENumTypes), None);
        assert_eq!(DType::from_nvte(-1), None);
    }

    #[test]
    fn engines_know_types_by_number_and_place() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(DType::from_index(index), Some(row.dtype));
        }
        assert_eq!(DType::from_index(TABLE.len()), None);
        assert_eq!(DType::BFloat16.nccl(), Some(nccl::ncclBfloat16));
        assert_eq!(DType::Float8E8M0.nccl(), Some(nccl::ncclUint8), "scales move as bytes");
        assert_eq!(DType::Float4E2M1.nccl(), None);
    }

    #[test]
    fn sizes() {
        assert_eq!(DType::BFloat16.bytes(7), 14);
        assert_eq!(DType::Float4E2M1.bytes(3), 2);
        assert_eq!(DType::Int64.bytes(0), 0);
    }
}
