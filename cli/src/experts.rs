//! The experts, computed on the host's processors: y = B (A x) and its gradients, for any row independently of the rows
//! around it, so that whoever recomputes a row gets the same bits.
//!
//! Sums run in f64 and every output is rounded once to the token type, so what a check has to allow for is the rounding
//! of the library's own sums and nothing of the expert.

use crate::element::Element;
use crate::parallel;
use crate::routing::{EXPERT_STREAM, Problem, key, mix};

/// Which of an expert's two matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// A, hidden to inner dimension.
    A,
    /// B, inner dimension to hidden.
    B,
}

/// Element (inner `f`, hidden `h`) of a matrix of `expert`: fixed-point, of a size that keeps y about as large as x.
pub fn entry(problem: &Problem, matrix: Matrix, expert: usize, f: usize, h: usize) -> f32 {
    let scale = match matrix {
        Matrix::A => 3.0 / (problem.hidden as f32).sqrt(),
        Matrix::B => 1.75 / (problem.expert_dim as f32).sqrt(),
    };
    let row = key(&[problem.seed, EXPERT_STREAM, matrix as u64, expert as u64]);
    let bits = mix(row.wrapping_add(mix(((f as u64) << 32) | h as u64)));
    f32::from(bits as u16 as i16) / 32768.0 * scale
}

/// Lanes that the inner dimension is computed in; it is padded with zeros to a multiple.
const LANES: usize = 16;

/// One matrix in both orders: hidden by inner to reduce over hidden, inner by hidden to expand into it.
#[derive(Debug)]
struct Both {
    reduce: Vec<f32>,
    expand: Vec<f32>,
}

/// All experts' matrices.
#[derive(Debug)]
pub struct Experts {
    dim: usize,
    hidden: usize,
    matrices: Vec<(Both, Both)>,
}

impl Experts {
    /// Computes the matrices.
    pub fn new(problem: &Problem, threads: usize) -> Self {
        let (hidden, dim) = (problem.hidden, problem.expert_dim.next_multiple_of(LANES));
        let matrices = parallel::map(threads, problem.experts, |expert| {
            let both = |matrix| {
                let mut expand = vec![0.0; dim * hidden];
                let mut reduce = vec![0.0; dim * hidden];
                for f in 0..problem.expert_dim {
                    for h in 0..hidden {
                        let value = entry(problem, matrix, expert, f, h);
                        expand[f * hidden + h] = value;
                        reduce[h * dim + f] = value;
                    }
                }
                Both { reduce, expand }
            };
            (both(Matrix::A), both(Matrix::B))
        });
        Self { dim, hidden, matrices }
    }

    /// Room for one row's intermediate values.
    pub fn scratch(&self) -> Scratch {
        Scratch { wide: vec![0.0; self.hidden], out: vec![0.0; self.hidden], inner: vec![0.0; self.dim] }
    }

    /// Length of the inner values that the forward pass leaves for the backward pass.
    pub fn inner_len(&self) -> usize {
        self.dim
    }

    /// Forward: `out` = weight * y, with y rounded to the token type first; `inner` = A x, which [`Experts::backward`]
    /// needs.
    pub fn forward<E: Element>(
        &self,
        expert: usize,
        weight: f32,
        x: &[E],
        inner: &mut [f64],
        out: &mut [E],
        scratch: &mut Scratch,
    ) {
        let (a, b) = &self.matrices[expert];
        widen(x, &mut scratch.wide);
        reduce(&a.reduce, &scratch.wide, inner);
        expand(&b.expand, inner, &mut scratch.out);
        for (out, y) in out.iter_mut().zip(&scratch.out) {
            *out = E::from_f32(weight * E::from_f64(*y).to_f32());
        }
    }

    /// Only A x, as [`Experts::forward`] leaves it in `inner`.
    pub fn inner<E: Element>(&self, expert: usize, x: &[E], inner: &mut [f64], scratch: &mut Scratch) {
        widen(x, &mut scratch.wide);
        reduce(&self.matrices[expert].0.reduce, &scratch.wide, inner);
    }

    /// Backward, for the gradient `grad` of weight * y: fills `out` with the gradient of x, and returns that of the
    /// weight.
    pub fn backward<E: Element>(
        &self,
        expert: usize,
        weight: f32,
        grad: &[E],
        inner: &[f64],
        out: &mut [E],
        scratch: &mut Scratch,
    ) -> f32 {
        let (a, b) = &self.matrices[expert];
        widen(grad, &mut scratch.wide);
        reduce(&b.reduce, &scratch.wide, &mut scratch.inner);
        let grad_weight: f64 = scratch.inner.iter().zip(inner).map(|(d, z)| d * z).sum();
        scratch.inner.iter_mut().for_each(|d| *d *= f64::from(weight));
        expand(&a.expand, &scratch.inner, &mut scratch.out);
        for (out, d) in out.iter_mut().zip(&scratch.out) {
            *out = E::from_f64(*d);
        }
        grad_weight as f32
    }
}

/// Intermediate values of one row.
#[derive(Debug, Clone)]
pub struct Scratch {
    wide: Vec<f64>,
    out: Vec<f64>,
    inner: Vec<f64>,
}

fn widen<E: Element>(row: &[E], wide: &mut [f64]) {
    wide.iter_mut().zip(row).for_each(|(wide, value)| *wide = f64::from(value.to_f32()));
}

/// `out[f]` = sum over h of `matrix[h][f] * x[h]`.
fn reduce(matrix: &[f32], x: &[f64], out: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { reduce_avx2(matrix, x, out) };
    }
    reduce_lanes(matrix, x, out);
}

/// `out[h]` = sum over f of `matrix[f][h] * inner[f]`.
fn expand(matrix: &[f32], inner: &[f64], out: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { expand_avx2(matrix, inner, out) };
    }
    expand_lanes(matrix, inner, out);
}

// Wider registers only: without fused multiply-add every lane computes the same bits as the plain build.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn reduce_avx2(matrix: &[f32], x: &[f64], out: &mut [f64]) {
    reduce_lanes(matrix, x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn expand_avx2(matrix: &[f32], inner: &[f64], out: &mut [f64]) {
    expand_lanes(matrix, inner, out);
}

#[inline(always)]
fn reduce_lanes(matrix: &[f32], x: &[f64], out: &mut [f64]) {
    let dim = out.len();
    for (block, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut sums = [0.0; LANES];
        for (row, x) in matrix.chunks_exact(dim).zip(x) {
            let row = &row[block * LANES..(block + 1) * LANES];
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += f64::from(*value) * x;
            }
        }
        *out = sums;
    }
}

#[inline(always)]
fn expand_lanes(matrix: &[f32], inner: &[f64], out: &mut [f64]) {
    let hidden = out.len();
    let (blocks, tail) = out.as_chunks_mut::<LANES>();
    let tail_at = blocks.len() * LANES;
    for (block, out) in blocks.iter_mut().enumerate() {
        expand_block(matrix, hidden, block * LANES, inner, out);
    }
    for (lane, out) in tail.iter_mut().enumerate() {
        let mut one = [0.0];
        expand_block(matrix, hidden, tail_at + lane, inner, &mut one);
        [*out] = one;
    }
}

/// `N` columns from column `at` on.
#[inline(always)]
fn expand_block<const N: usize>(matrix: &[f32], hidden: usize, at: usize, inner: &[f64], out: &mut [f64; N]) {
    let mut sums = [0.0; N];
    for (row, inner) in matrix.chunks_exact(hidden).zip(inner) {
        for (sum, value) in sums.iter_mut().zip(&row[at..at + N]) {
            *sum += f64::from(*value) * inner;
        }
    }
    *out = sums;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::problem;

    #[test]
    fn agrees_with_the_plain_formula() {
        let mut problem = problem(2, 4, 1, 4, 1);
        for (hidden, dim) in [(8, 1), (24, 16), (40, 19)] {
            (problem.hidden, problem.expert_dim) = (hidden, dim);
            let experts = Experts::new(&problem, 2);
            let (mut x, mut g) = (vec![0f32; hidden], vec![0f32; hidden]);
            problem.token(0, 0, 0, &mut x);
            problem.gradient(0, 0, 0, &mut g);
            let get = |m, f, h| f64::from(entry(&problem, m, 3, f, h));
            let z: Vec<f64> =
                (0..dim).map(|f| (0..hidden).map(|h| get(Matrix::A, f, h) * f64::from(x[h])).sum()).collect();
            let dz: Vec<f64> =
                (0..dim).map(|f| (0..hidden).map(|h| get(Matrix::B, f, h) * f64::from(g[h])).sum()).collect();
            let (mut out, mut dx) = (vec![0f32; hidden], vec![0f32; hidden]);
            let mut inner = vec![0.0; experts.inner_len()];
            let mut scratch = experts.scratch();
            experts.forward(3, 0.5, &x, &mut inner, &mut out, &mut scratch);
            let grad_weight = experts.backward(3, 0.5, &g, &inner, &mut dx, &mut scratch);
            let mut expected_weight = 0.0;
            for h in 0..hidden {
                let y: f64 = (0..dim).map(|f| get(Matrix::B, f, h) * z[f]).sum();
                let d: f64 = (0..dim).map(|f| get(Matrix::A, f, h) * dz[f] * 0.5).sum();
                assert!((f64::from(out[h]) - 0.5 * y).abs() < 1e-6 && (f64::from(dx[h]) - d).abs() < 1e-6);
                expected_weight += f64::from(g[h]) * y;
            }
            assert!((f64::from(grad_weight) - expected_weight).abs() < 1e-5);
        }
    }

    #[test]
    fn vector_width_does_not_change_bits() {
        let mut problem = problem(2, 4, 1, 4, 1);
        (problem.hidden, problem.expert_dim) = (64, 32);
        let experts = Experts::new(&problem, 1);
        let x: Vec<f64> = (0..64).map(|i| f64::from(i).sin()).collect();
        let (mut dispatched, mut plain) = ([0.0; 32], [0.0; 32]);
        reduce(&experts.matrices[1].0.reduce, &x, &mut dispatched);
        reduce_lanes(&experts.matrices[1].0.reduce, &x, &mut plain);
        assert_eq!(dispatched, plain);
        let (mut wide, mut narrow) = ([0.0; 64], [0.0; 64]);
        expand(&experts.matrices[1].1.expand, &plain, &mut wide);
        expand_lanes(&experts.matrices[1].1.expand, &plain, &mut narrow);
        assert_eq!(wide, narrow);
    }
}
