//! A stable 64-bit hash of outputs, to compare runs bit by bit.
//!
//! Rows are hashed by themselves, eight bytes at a time, and the row hashes are chained in order, so threads can share
//! the work. The function is part of the output format: changing it makes old digests incomparable.

use crate::parallel;

const START: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x9e37_79b9_7f4a_7c15;

fn absorb(hash: u64, word: u64) -> u64 {
    let mixed = (hash ^ word).wrapping_mul(PRIME);
    mixed ^ (mixed >> 29)
}

/// Hash of one row; its length counts.
pub fn row(bytes: &[u8]) -> u64 {
    let (words, tail) = bytes.as_chunks::<8>();
    let hash = words.iter().fold(START, |hash, word| absorb(hash, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    absorb(absorb(hash, u64::from_le_bytes(last)), bytes.len() as u64)
}

/// Chains the hashes of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest {
    hash: u64,
    rows: u64,
}

impl Digest {
    /// Of no rows.
    pub const fn new() -> Self {
        Self { hash: START, rows: 0 }
    }

    /// Adds rows of `width` bytes.
    pub fn rows(&mut self, threads: usize, bytes: &[u8], width: usize) {
        let count = bytes.len() / width.max(1);
        let group = 64;
        for hashes in parallel::map(threads, count.div_ceil(group), |g| {
            let rows = bytes[g * group * width..((g + 1) * group * width).min(count * width)].chunks_exact(width);
            rows.map(row).collect::<Vec<u64>>()
        }) {
            for hash in hashes {
                self.hash = absorb(self.hash, hash);
                self.rows += 1;
            }
        }
    }

    /// The hash of everything added, in hexadecimal.
    pub fn finish(self) -> String {
        format!("{:016x}", absorb(self.hash, self.rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stable_and_sensitive() {
        let data: Vec<u8> = (0..=255).collect();
        let of = |bytes: &[u8], threads| {
            let mut digest = Digest::new();
            digest.rows(threads, bytes, 16);
            digest.finish()
        };
        let whole = of(&data, 1);
        assert_eq!(whole, of(&data, 3));
        let mut parts = Digest::new();
        parts.rows(1, &data[..64], 16);
        parts.rows(2, &data[64..], 16);
        assert_eq!(parts.finish(), whole);
        for bit in 0..data.len() * 8 {
            let mut flipped = data.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(&flipped, 1), whole);
        }
        let mut swapped = data.clone();
        swapped.rotate_left(16);
        assert_ne!(of(&swapped, 1), whole);
        assert_ne!(row(&[]), row(&[0]));
    }
}
