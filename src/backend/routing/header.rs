//! The routing header, which every prepare writes into the first bytes of handle memory. It says the layer, the token count and
//! the index type, also after a framework moved the bytes or the library closed the handle.
#![forbid(unsafe_code)]

use crate::config::{LayerConfig, MAX_TOP_K, SlabAlignment};
use crate::dtype::DType;
use crate::memory::HEADER_BYTES;
use crate::ops::Prepared;

/// Where the header's bytes hold the step's total: the rows that this rank receives, padding included and before any drop,
/// as one int64 that prepare's kernels write.
pub(crate) const TOTAL_OFFSET: usize = 8;
/// Behind the total, in how many words it may hold the number of the step's indices that are no expert, which is their sum; an
/// engine uses as many as it has parts that count.
pub(crate) const MAX_COUNTS: usize = 32;
/// Words of header, total and counts, which are read in one go.
pub(crate) const WORDS: usize = 4 + MAX_COUNTS;

const _: () = assert!(TOTAL_OFFSET == 2 * size_of::<u32>() && WORDS * size_of::<u32>() <= HEADER_BYTES);

/// The two words of a header: a packed description with a check of everything, and the token count.
///
/// Bits of the first word: 0-5 top_k - 1, 6 whether indices are int32, 7-11 log2 of the alignment, 12-31 the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header(pub(crate) [u32; 2]);

const CHECK_SHIFT: u32 = 12;

fn check(description: u32, num_tokens: u32, group: u64) -> u32 {
    let words = u64::from(num_tokens) << 32 | u64::from(description);
    (mix(words ^ mix(group ^ TAG)) as u32) << CHECK_SHIFT
}

/// "nvte-ep1".
const TAG: u64 = u64::from_be_bytes(*b"nvte-ep1");

/// Every bit of the result depends on every bit of `word` (the finalizer of MurmurHash3).
const fn mix(mut word: u64) -> u64 {
    word = (word ^ word >> 33).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    word = (word ^ word >> 33).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    word ^ word >> 33
}

impl Header {
    /// The header of a prepare in the group that `group` identifies.
    pub(crate) fn new(layer: &LayerConfig, prepared: Prepared, group: u64) -> Self {
        let index = u32::from(prepared.index_dtype == DType::Int32);
        let description = (layer.top_k - 1) | index << 6 | layer.alignment.tokens().trailing_zeros() << 7;
        let num_tokens = prepared.num_tokens as u32;
        Self([description | check(description, num_tokens, group), num_tokens])
    }

    /// What the words say; none if no prepare of this group wrote them.
    pub(crate) fn read(self, group: u64) -> Option<(LayerConfig, Prepared)> {
        let Self([word, num_tokens]) = self;
        let description = word & ((1 << CHECK_SHIFT) - 1);
        if word != description | check(description, num_tokens, group) {
            return None;
        }
        let top_k = (description & (MAX_TOP_K - 1)) + 1;
        let alignment = SlabAlignment::parse("header", 1 << (description >> 7 & 31)).ok()?;
        let index_dtype = if description >> 6 & 1 == 1 { DType::Int32 } else { DType::Int64 };
        let prepared = Prepared { num_tokens: num_tokens as usize, index_dtype, recv_total: None };
        Some((LayerConfig { top_k, alignment }, prepared))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        for top_k in [1, 2, 31, 32, 33, 64] {
            for alignment in [1, 2, 128, 1 << 30] {
                for index_dtype in [DType::Int32, DType::Int64] {
                    for num_tokens in [0, 1, 65536] {
                        let layer = LayerConfig::parse("layer_cfg", top_k, alignment).unwrap();
                        let prepared = Prepared { num_tokens, index_dtype, recv_total: None };
                        assert_eq!(Header::new(&layer, prepared, 9).read(9), Some((layer, prepared)));
                    }
                }
            }
        }
    }

    #[test]
    fn other_bytes_are_no_header() {
        let layer = LayerConfig::parse("layer_cfg", 8, 16).unwrap();
        let Header([a, b]) =
            Header::new(&layer, Prepared { num_tokens: 77, index_dtype: DType::Int64, recv_total: None }, 1);
        assert_eq!(Header([a, b]).read(2), None, "another group");
        let mut accepted = 0;
        for bit in 0..32 {
            accepted += usize::from(Header([a ^ 1 << bit, b]).read(1).is_some());
            accepted += usize::from(Header([a, b ^ 1 << bit]).read(1).is_some());
        }
        assert_eq!(accepted, 0, "one flipped bit");
        for bytes in [[0; 2], [u32::MAX; 2], [0xCBCB_CBCB; 2]] {
            assert_eq!(Header(bytes).read(1), None);
        }
    }
}
