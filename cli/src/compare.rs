//! Comparing an output with what it should be: bit by bit, or within a bound.

use crate::element::{Element, bytes_of};
use serde::{Deserialize, Serialize};

/// How many differences are kept with their place and values.
const KEPT: usize = 4;

/// One difference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Step in which it was seen.
    pub step: usize,
    /// Row of the output.
    pub row: usize,
    /// Column of the output.
    pub column: usize,
    /// What should be there, with the reason where there is more to say.
    pub expected: String,
    /// What is there.
    pub got: String,
}

/// Everything compared of one output.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Comparison {
    /// The output's name.
    pub output: String,
    /// How it is compared, in words.
    pub rule: String,
    /// Elements compared.
    pub elements: u64,
    /// Elements that differ.
    pub wrong: u64,
    /// Largest absolute error seen.
    pub max_abs: f64,
    /// Largest error relative to the sum of the magnitudes that make up the element.
    pub max_rel: f64,
    /// Largest error as a share of its bound.
    pub max_share: f64,
    /// The first differences.
    pub first: Vec<Mismatch>,
}

impl Comparison {
    /// Nothing compared yet.
    pub fn new(output: &str, rule: &str) -> Self {
        Self { output: output.into(), rule: rule.into(), ..Self::default() }
    }

    /// Adds what another comparison of the same output found.
    pub fn merge(&mut self, other: Self) {
        self.elements += other.elements;
        self.wrong += other.wrong;
        grow(&mut self.max_abs, other.max_abs);
        grow(&mut self.max_rel, other.max_rel);
        grow(&mut self.max_share, other.max_share);
        let room = KEPT.saturating_sub(self.first.len());
        self.first.extend(other.first.into_iter().take(room));
    }

    fn differs(&mut self, at: (usize, usize, usize), expected: impl FnOnce() -> String, got: impl FnOnce() -> String) {
        self.wrong += 1;
        if self.first.len() < KEPT {
            let (step, row, column) = at;
            self.first.push(Mismatch { step, row, column, expected: expected(), got: got() });
        }
    }

    /// Compares one integer.
    pub fn integer(&mut self, at: (usize, usize, usize), expected: i64, got: i64) {
        self.elements += 1;
        if expected != got {
            grow(&mut self.max_abs, (expected as f64 - got as f64).abs());
            self.differs(at, || expected.to_string(), || got.to_string());
        }
    }

    /// Compares a row bit by bit; a zero's sign and a NaN's payload count.
    pub fn bits<E: Element>(&mut self, step: usize, row: usize, expected: &[E], got: &[E]) {
        debug_assert_eq!(expected.len(), got.len());
        self.elements += got.len() as u64;
        if bytes_of(expected) == bytes_of(got) {
            return;
        }
        for (column, (expected, got)) in expected.iter().zip(got).enumerate() {
            if bytes_of(std::slice::from_ref(expected)) != bytes_of(std::slice::from_ref(got)) {
                let (want, have) = (expected.to_f32(), got.to_f32());
                grow(&mut self.max_abs, f64::from((want - have).abs()));
                self.differs((step, row, column), || show(*expected), || show(*got));
            }
        }
    }

    /// Compares one element with its reference; `magnitude` is the sum of the magnitudes that make it up.
    pub fn bounded(&mut self, at: (usize, usize, usize), expected: f64, magnitude: f64, bound: f64, got: f32) {
        self.elements += 1;
        let error = (f64::from(got) - expected).abs();
        grow(&mut self.max_abs, error);
        if magnitude > 0.0 {
            grow(&mut self.max_rel, error / magnitude);
        }
        if bound > 0.0 {
            grow(&mut self.max_share, error / bound);
        }
        // A NaN fails every comparison, so the test is for what passes.
        let within = error <= bound;
        if !within {
            self.differs(at, || format!("{expected:e} within {bound:.3e}"), || format!("{got:e}"));
        }
    }
}

/// Raises `largest` to `value`; stays finite and a number, as JSON has no others.
fn grow(largest: &mut f64, value: f64) {
    *largest = largest.max(value).min(f64::MAX);
}

fn show<E: Element>(value: E) -> String {
    let hex: String = bytes_of(std::slice::from_ref(&value)).iter().rev().map(|byte| format!("{byte:02x}")).collect();
    format!("{:e} (0x{hex})", value.to_f32())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn every_flipped_bit_is_found<E: Element>(row: &[E], flip: impl Fn(E, u32) -> E) {
        let mut same = Comparison::new("x", "bits");
        same.bits(0, 0, row, row);
        assert_eq!((same.elements, same.wrong), (row.len() as u64, 0));
        for column in 0..row.len() {
            for bit in 0..size_of::<E>() as u32 * 8 {
                let mut got = row.to_vec();
                got[column] = flip(got[column], bit);
                let mut comparison = Comparison::new("x", "bits");
                comparison.bits(2, 5, row, &got);
                assert_eq!(comparison.wrong, 1, "column {column} bit {bit}");
                let first = &comparison.first[0];
                assert_eq!((first.step, first.row, first.column), (2, 5, column));
            }
        }
    }

    #[test]
    fn flipped_bits() {
        let values = [0.0f32, -0.0, 1.5, -3.25, f32::NAN, 1e-3];
        every_flipped_bit_is_found(&values, |v, bit| f32::from_bits(v.to_bits() ^ (1 << bit)));
        every_flipped_bit_is_found(&values.map(bf16::from_f32), |v, bit| bf16::from_bits(v.to_bits() ^ (1 << bit)));
        every_flipped_bit_is_found(&values.map(f16::from_f32), |v, bit| f16::from_bits(v.to_bits() ^ (1 << bit)));
    }

    #[test]
    fn bounds_and_nan() {
        let mut comparison = Comparison::new("x", "bound");
        comparison.bounded((0, 0, 0), 1.0, 2.0, 0.25, 1.25);
        assert_eq!(
            (comparison.wrong, comparison.max_abs, comparison.max_rel, comparison.max_share),
            (0, 0.25, 0.125, 1.0)
        );
        comparison.bounded((0, 0, 1), 1.0, 2.0, 0.25, 1.26);
        comparison.bounded((1, 7, 2), 0.0, 0.0, 0.0, f32::NAN);
        comparison.bounded((1, 7, 3), 0.0, 0.0, 0.0, 0.0);
        assert_eq!((comparison.wrong, comparison.elements), (2, 4));
        assert_eq!(comparison.first[1].got, "NaN");
    }

    #[test]
    fn merging_keeps_the_first_few() {
        let mut all = Comparison::new("counts", "exact");
        for step in 0..10 {
            let mut one = Comparison::new("counts", "exact");
            one.integer((step, 0, 0), 5, 6);
            one.integer((step, 0, 1), 5, 5);
            all.merge(one);
        }
        assert_eq!((all.wrong, all.elements, all.first.len(), all.max_abs), (10, 20, KEPT, 1.0));
    }
}
