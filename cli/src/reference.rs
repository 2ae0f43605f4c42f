//! What every output should be, worked out in this process from the inputs of all ranks, in f64, without the library
//! and without the code that computes the step.
//!
//! Bounds. Rounding to the token type has a relative error of at most u (2^-8 for bf16, 2^-11 for f16, 2^-24 for f32).
//! An element of combine's result is a sum over m entries of w * y. Each contribution is rounded twice by the step (y,
//! then w * y) and twice by combine (the sum of a rank, then the sum over ranks), and the sums run in f32 (u32 = 2^-24),
//! one more rounding for w * y and m for the additions. The error is therefore at most
//! (4u + (m + 4) u32) * S, S = the sum of |w * y|; [`SLACK`] covers the higher-order terms. A gradient of a token is
//! rounded three times. What lies below the type's normal range adds one [`Element::TINY`] a rounding, and [`FLOOR`]
//! covers f64 itself. Over several NVLink domains the sum of each is rounded once more. A gradient of a weight is one number,
//! rounded once to f32 and moved.

use crate::compare::Comparison;
use crate::element::{Element, F32_ROUNDOFF};
use crate::experts::{Matrix, entry};
use crate::parallel;
use crate::routing::{Problem, Routing};

/// Factor for the higher-order terms of the bounds.
pub const SLACK: f64 = 1.02;
/// Absolute allowance for the f64 arithmetic of both sides.
pub const FLOOR: f64 = 1e-12;

/// Where a received row came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The sending rank.
    pub rank: usize,
    /// Its row.
    pub row: usize,
    /// The entry of the row that names the expert.
    pub k: usize,
}

/// What a rank receives: one slab an expert, rows by source rank and row, then padding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Padded rows of every local expert.
    pub counts: Vec<i32>,
    /// Source of every row; none = padding.
    pub slots: Vec<Option<Source>>,
}

impl Layout {
    /// The layout of `rank` under the routing of all ranks.
    pub fn new(problem: &Problem, routing: &[Routing], rank: usize) -> Self {
        let local = problem.local_experts();
        let mut slabs: Vec<Vec<Option<Source>>> = vec![Vec::new(); local];
        for (sender, routing) in routing.iter().enumerate() {
            for (i, &expert) in routing.experts.iter().enumerate() {
                let here =
                    usize::try_from(expert).ok().and_then(|e| e.checked_sub(rank * local)).filter(|&e| e < local);
                if let Some(expert) = here {
                    let source = Source { rank: sender, row: i / routing.top_k, k: i % routing.top_k };
                    slabs[expert].push(Some(source));
                }
            }
        }
        for slab in &mut slabs {
            while problem.align > 1 && !slab.len().is_multiple_of(problem.align) {
                slab.push(None);
            }
        }
        Self { counts: slabs.iter().map(|slab| slab.len() as i32).collect(), slots: slabs.concat() }
    }

    /// Rows that are padding.
    pub fn padding(&self) -> usize {
        self.slots.iter().filter(|slot| slot.is_none()).count()
    }
}

/// The truth about one step, for one rank.
#[derive(Debug)]
pub struct Truth {
    /// The step.
    pub step: usize,
    /// Routing of all ranks.
    pub routing: Vec<Routing>,
    /// What this rank receives.
    pub layout: Layout,
    /// Ranks of an NVLink domain.
    pub domain: usize,
}

/// Which rows a received buffer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Tokens, after dispatch.
    Tokens,
    /// Gradients of the layer's output, after combine's backward pass.
    Gradients,
}

/// Reference values of weight gradients: value and sum of magnitudes, one an entry of the routing.
pub type WeightGradients = Vec<(f64, f64)>;

/// The reference of one rank.
#[derive(Debug)]
pub struct Reference<'a> {
    problem: &'a Problem,
    rank: usize,
    threads: usize,
    /// Ranks of an NVLink domain; all of them until it is said.
    pub domain: usize,
    // A as [inner][hidden], B as [hidden][inner].
    experts: Vec<(Vec<f64>, Vec<f64>)>,
}

/// Rows that a thread takes at a time.
const BLOCK: usize = 16;

impl<'a> Reference<'a> {
    /// Computes the experts' matrices.
    pub fn new(problem: &'a Problem, rank: usize, threads: usize) -> Self {
        let (hidden, dim) = (problem.hidden, problem.expert_dim);
        let experts = parallel::map(threads, problem.experts, |expert| {
            let get = |matrix, f, h| f64::from(entry(problem, matrix, expert, f, h));
            let a = (0..dim).flat_map(|f| (0..hidden).map(move |h| get(Matrix::A, f, h))).collect();
            let b = (0..hidden).flat_map(|h| (0..dim).map(move |f| get(Matrix::B, f, h))).collect();
            (a, b)
        });
        Self { problem, rank, threads, domain: problem.ranks, experts }
    }

    /// Routing and layout of `step`.
    pub fn truth(&self, step: usize) -> Truth {
        let routing = self.problem.routing(step);
        let layout = Layout::new(self.problem, &routing, self.rank);
        Truth { step, routing, layout, domain: self.domain }
    }

    /// Counts of prepare.
    pub fn counts(&self, truth: &Truth, got: &[i32], into: &mut Comparison) {
        for (column, (expected, got)) in truth.layout.counts.iter().zip(got).enumerate() {
            into.integer((truth.step, 0, column), i64::from(*expected), i64::from(*got));
        }
    }

    /// Received rows from row `first` on; padding has to be zero.
    pub fn rows<E: Element>(&self, truth: &Truth, rows: Rows, first: usize, got: &[E], into: &mut Comparison) {
        let hidden = self.problem.hidden;
        let count = (got.len() / hidden).min(truth.layout.slots.len().saturating_sub(first));
        let parts = parallel::map(self.threads, count.div_ceil(BLOCK), |block| {
            let mut part = Comparison::default();
            let mut expected = vec![E::default(); hidden];
            for row in block * BLOCK..((block + 1) * BLOCK).min(count) {
                match truth.layout.slots[first + row] {
                    None => expected.fill(E::default()),
                    Some(source) => self.source_row(truth, rows, source.rank, source.row, &mut expected),
                }
                part.bits(truth.step, first + row, &expected, &got[row * hidden..(row + 1) * hidden]);
            }
            part
        });
        parts.into_iter().for_each(|part| into.merge(part));
    }

    fn source_row<E: Element>(&self, truth: &Truth, rows: Rows, rank: usize, row: usize, out: &mut [E]) {
        match rows {
            Rows::Tokens => self.problem.token(truth.step, rank, row, out),
            Rows::Gradients => self.problem.gradient(truth.step, rank, row, out),
        }
    }

    /// Received weights; padding has to be zero.
    pub fn weights(&self, truth: &Truth, got: &[f32], into: &mut Comparison) {
        for (row, (slot, got)) in truth.layout.slots.iter().zip(got).enumerate() {
            let expected = slot.map_or(0.0, |source| {
                let routing = &truth.routing[source.rank];
                routing.weights[source.row * routing.top_k + source.k]
            });
            into.bits(truth.step, row, &[expected], std::slice::from_ref(got));
        }
    }

    /// Combine's result; returns what the gradients of this rank's weights should be.
    pub fn result<E: Element>(&self, truth: &Truth, got: &[E], into: &mut Comparison) -> WeightGradients {
        let (hidden, routing) = (self.problem.hidden, &truth.routing[self.rank]);
        let mut gradients = vec![(0.0, 0.0); routing.experts.len()];
        let parts = self.blocks(routing.rows, |row, work: &mut Work<E>, part| {
            work.clear();
            self.source_row(truth, Rows::Tokens, self.rank, row, &mut work.narrow);
            widen(&work.narrow, &mut work.x);
            self.source_row(truth, Rows::Gradients, self.rank, row, &mut work.narrow);
            widen(&work.narrow, &mut work.g);
            let mut live = Vec::new();
            for (k, expert, weight) in routing.row(row) {
                self.forward(expert, &work.x, &mut work.inner, &mut work.y);
                let products = work.g.iter().zip(&work.y).map(|(g, y)| g * y);
                let (value, size) = products.fold((0.0, 0.0), |(sum, size), p: f64| (sum + p, size + p.abs()));
                live.push((row * routing.top_k + k, (value, size)));
                work.add(f64::from(weight));
            }
            let roundings = (4.0, live.len());
            self.compare_row(truth, row, roundings, work, &got[row * hidden..(row + 1) * hidden], part);
            live
        });
        for (part, live) in parts {
            into.merge(part);
            live.into_iter().flatten().for_each(|(at, gradient)| gradients[at] = gradient);
        }
        gradients
    }

    /// Gradients of this rank's tokens.
    pub fn grad_tokens<E: Element>(&self, truth: &Truth, got: &[E], into: &mut Comparison) {
        let (hidden, routing) = (self.problem.hidden, &truth.routing[self.rank]);
        let parts = self.blocks(routing.rows, |row, work: &mut Work<E>, part| {
            work.clear();
            self.source_row(truth, Rows::Gradients, self.rank, row, &mut work.narrow);
            widen(&work.narrow, &mut work.g);
            let mut live = 0;
            for (_, expert, weight) in routing.row(row) {
                self.backward(expert, &work.g, &mut work.inner, &mut work.y);
                work.add(f64::from(weight));
                live += 1;
            }
            self.compare_row(truth, row, (3.0, live), work, &got[row * hidden..(row + 1) * hidden], part);
        });
        parts.into_iter().for_each(|(part, _)| into.merge(part));
    }

    /// Gradients of this rank's weights; a masked entry's is zero.
    pub fn grad_weights(&self, truth: &Truth, expected: &WeightGradients, got: &[f32], into: &mut Comparison) {
        let top_k = self.problem.top_k;
        for (i, ((value, size), got)) in expected.iter().zip(got).enumerate() {
            let bound = if *size > 0.0 { value.abs() * F32_ROUNDOFF * SLACK + FLOOR * size.max(1.0) } else { 0.0 };
            into.bounded((truth.step, i / top_k, i % top_k), *value, *size, bound, *got);
        }
    }

    /// Runs `work` for every row, blocks of rows shared between threads; what was compared and the rows' results.
    fn blocks<E: Element, T: Send>(
        &self,
        rows: usize,
        work: impl Fn(usize, &mut Work<E>, &mut Comparison) -> T + Sync,
    ) -> Vec<(Comparison, Vec<T>)> {
        parallel::map(self.threads, rows.div_ceil(BLOCK), |block| {
            let mut part = Comparison::default();
            let mut room = Work::new(self.problem);
            let range = block * BLOCK..((block + 1) * BLOCK).min(rows);
            let results = range.map(|row| work(row, &mut room, &mut part)).collect();
            (part, results)
        })
    }

    fn compare_row<E: Element>(
        &self,
        truth: &Truth,
        row: usize,
        (roundings, live): (f64, usize),
        work: &Work<E>,
        got: &[E],
        into: &mut Comparison,
    ) {
        let live = live as f64;
        // Each domain's sum is rounded too.
        let roundings = roundings + if truth.domain < self.problem.ranks { 1.0 } else { 0.0 };
        let relative = SLACK * (roundings * E::ROUNDOFF + (live + 4.0) * F32_ROUNDOFF);
        // Up to three roundings a contribution, and the final one; none where nothing contributes: zeros are exact.
        let absolute = if live > 0.0 { FLOOR + (3.0 * live + 1.0) * E::TINY } else { 0.0 };
        for (column, got) in got.iter().enumerate() {
            let (sum, size) = (work.sum[column], work.size[column]);
            into.bounded((truth.step, row, column), sum, size, relative * size + absolute, got.to_f32());
        }
    }

    /// y = B (A x).
    fn forward(&self, expert: usize, x: &[f64], inner: &mut [f64], y: &mut [f64]) {
        let (a, b) = &self.experts[expert];
        products(a, x, inner);
        products(b, inner, y);
    }

    /// The gradient of x for the gradient `g` of y.
    fn backward(&self, expert: usize, g: &[f64], inner: &mut [f64], out: &mut [f64]) {
        let (a, b) = &self.experts[expert];
        weighted_rows(b, g, inner);
        weighted_rows(a, inner, out);
    }
}

/// Room for one row.
struct Work<E> {
    narrow: Vec<E>,
    x: Vec<f64>,
    g: Vec<f64>,
    y: Vec<f64>,
    inner: Vec<f64>,
    sum: Vec<f64>,
    size: Vec<f64>,
}

impl<E: Element> Work<E> {
    fn new(problem: &Problem) -> Self {
        let wide = vec![0.0; problem.hidden];
        Self {
            narrow: vec![E::default(); problem.hidden],
            x: wide.clone(),
            g: wide.clone(),
            y: wide.clone(),
            inner: vec![0.0; problem.expert_dim],
            sum: wide.clone(),
            size: wide,
        }
    }

    fn clear(&mut self) {
        self.sum.fill(0.0);
        self.size.fill(0.0);
    }

    /// Adds weight * y.
    fn add(&mut self, weight: f64) {
        for ((sum, size), y) in self.sum.iter_mut().zip(&mut self.size).zip(&self.y) {
            *sum += weight * y;
            *size += (weight * y).abs();
        }
    }
}

fn widen<E: Element>(row: &[E], wide: &mut [f64]) {
    wide.iter_mut().zip(row).for_each(|(wide, value)| *wide = f64::from(value.to_f32()));
}

/// `out[i]` = row i of the matrix times x.
fn products(matrix: &[f64], x: &[f64], out: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { products_avx2(matrix, x, out) };
    }
    products_plain(matrix, x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn products_avx2(matrix: &[f64], x: &[f64], out: &mut [f64]) {
    products_plain(matrix, x, out);
}

#[inline(always)]
fn products_plain(matrix: &[f64], x: &[f64], out: &mut [f64]) {
    for (out, row) in out.iter_mut().zip(matrix.chunks_exact(x.len())) {
        *out = dot(row, x);
    }
}

#[inline(always)]
fn dot(left: &[f64], right: &[f64]) -> f64 {
    let (left, left_tail) = left.as_chunks::<8>();
    let (right, right_tail) = right.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (left, right) in left.iter().zip(right) {
        for lane in 0..8 {
            sums[lane] += left[lane] * right[lane];
        }
    }
    let tail: f64 = left_tail.iter().zip(right_tail).map(|(l, r)| l * r).sum();
    sums.iter().sum::<f64>() + tail
}

/// `out` = sum of the matrix's rows, row i times `x[i]`.
fn weighted_rows(matrix: &[f64], x: &[f64], out: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { weighted_rows_avx2(matrix, x, out) };
    }
    weighted_rows_plain(matrix, x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn weighted_rows_avx2(matrix: &[f64], x: &[f64], out: &mut [f64]) {
    weighted_rows_plain(matrix, x, out);
}

#[inline(always)]
fn weighted_rows_plain(matrix: &[f64], x: &[f64], out: &mut [f64]) {
    out.fill(0.0);
    for (x, row) in x.iter().zip(matrix.chunks_exact(out.len())) {
        out.iter_mut().zip(row).for_each(|(sum, value)| *sum += value * x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::problem;
    use half::bf16;

    fn by_hand() -> (Problem, Vec<Routing>) {
        let problem = problem(2, 4, 2, 4, 4);
        let routing = vec![
            Routing {
                rows: 3,
                top_k: 2,
                experts: vec![2, 0, -1, 2, 3, 1],
                weights: vec![0.25, 0.75, 0.0, 1.0, 0.5, 0.5],
            },
            Routing { rows: 2, top_k: 2, experts: vec![-1, -1, 0, 2], weights: vec![0.0, 0.0, 0.125, 0.875] },
        ];
        (problem, routing)
    }

    fn source(rank: usize, row: usize, k: usize) -> Option<Source> {
        Some(Source { rank, row, k })
    }

    #[test]
    fn layout_by_hand() {
        let (mut problem, routing) = by_hand();
        let first = Layout::new(&problem, &routing, 0);
        assert_eq!(first.counts, [4, 4]);
        let slabs = [source(0, 0, 1), source(1, 1, 0), None, None, source(0, 2, 1), None, None, None];
        assert_eq!(first.slots, slabs);
        assert_eq!(first.padding(), 5);
        problem.align = 0;
        let second = Layout::new(&problem, &routing, 1);
        assert_eq!(second.counts, [3, 1]);
        assert_eq!(second.slots, [source(0, 0, 0), source(0, 1, 1), source(1, 1, 1), source(0, 2, 0)]);
        problem.align = 8;
        let empty = vec![Routing { rows: 1, top_k: 2, experts: vec![0, -1], weights: vec![1.0, 0.0] }];
        assert_eq!(Layout::new(&problem, &empty, 0).counts, [8, 0], "an expert without tokens is not padded");
    }

    /// With F = 1 an expert is y = b (a . x): everything has a closed form.
    fn rank_one(problem: &mut Problem) -> Reference<'_> {
        (problem.hidden, problem.expert_dim) = (8, 1);
        let mut reference = Reference::new(problem, 0, 2);
        for (e, (a, b)) in reference.experts.iter_mut().enumerate() {
            a.fill(1.0);
            b.fill((e + 1) as f64);
        }
        reference
    }

    #[test]
    fn result_and_gradients_in_closed_form() {
        let (mut problem, routing) = by_hand();
        let reference = rank_one(&mut problem);
        let layout = Layout::new(reference.problem, &routing, 0);
        let truth = Truth { step: 0, routing, layout, domain: reference.domain };
        let row_sum = |rows, row| {
            let mut values = [0f32; 8];
            reference.source_row(&truth, rows, 0, row, &mut values);
            values.iter().map(|v| f64::from(*v)).sum::<f64>()
        };
        // Row 0: 0.25 * 3 + 0.75 * 1, row 1: 1 * 3, row 2: 0.5 * 4 + 0.5 * 2, times the sum of the row.
        let factors = [1.5, 3.0, 3.0];
        let by_row = |rows| (0..24).map(|i| (factors[i / 8] * row_sum(rows, i / 8)) as f32).collect::<Vec<f32>>();
        let mut comparison = Comparison::new("result", "");
        let weights = reference.result(&truth, &by_row(Rows::Tokens), &mut comparison);
        assert_eq!((comparison.wrong, comparison.elements), (0, 24), "{:?}", comparison.first);

        let mut comparison = Comparison::new("grad_tokens", "");
        reference.grad_tokens(&truth, &by_row(Rows::Gradients), &mut comparison);
        assert_eq!((comparison.wrong, comparison.elements), (0, 24), "{:?}", comparison.first);

        // d weight = (sum of gradient) * (expert + 1) * (sum of token).
        let product = |row, expert: f64| row_sum(Rows::Gradients, row) * row_sum(Rows::Tokens, row) * (expert + 1.0);
        let expected = [product(0, 2.0), product(0, 0.0), 0.0, product(1, 2.0), product(2, 3.0), product(2, 1.0)]
            .map(|v| v as f32);
        let mut comparison = Comparison::new("grad_topk_weights", "");
        reference.grad_weights(&truth, &weights, &expected, &mut comparison);
        assert_eq!((comparison.wrong, comparison.elements), (0, 6), "{:?}", comparison.first);
        let mut nonzero_where_masked = expected;
        nonzero_where_masked[2] = 1e-30;
        reference.grad_weights(&truth, &weights, &nonzero_where_masked, &mut comparison);
        assert_eq!(comparison.wrong, 1);
    }

    #[test]
    fn a_missing_or_doubled_contribution_breaks_the_bound() {
        let (mut problem, routing) = by_hand();
        problem.hidden = 64;
        let reference = Reference::new(&problem, 0, 1);
        let layout = Layout::new(&problem, &routing, 0);
        let truth = Truth { step: 1, routing, layout, domain: reference.domain };
        let computed = |skip: Option<usize>| {
            let mut out = vec![bf16::ZERO; 3 * 64];
            let (mut x, mut inner, mut y) = (vec![bf16::ZERO; 64], vec![0.0; 3], vec![0.0; 64]);
            for row in 0..3 {
                reference.source_row(&truth, Rows::Tokens, 0, row, &mut x);
                let wide: Vec<f64> = x.iter().map(|v| f64::from(v.to_f32())).collect();
                let mut sum = vec![0.0; 64];
                for (k, expert, weight) in truth.routing[0].row(row) {
                    reference.forward(expert, &wide, &mut inner, &mut y);
                    let factor = if skip == Some(row * 2 + k) { 0.0 } else { f64::from(weight) };
                    sum.iter_mut().zip(&y).for_each(|(sum, y)| *sum += factor * y);
                }
                out[row * 64..(row + 1) * 64].iter_mut().zip(&sum).for_each(|(o, s)| *o = bf16::from_f64(*s));
            }
            let mut comparison = Comparison::new("result", "");
            reference.result(&truth, &out, &mut comparison);
            comparison
        };
        assert_eq!(computed(None).wrong, 0);
        for entry in [0, 1, 3, 4, 5] {
            assert!(computed(Some(entry)).wrong > 20);
        }
    }

    #[test]
    fn received_rows_and_weights() {
        let (problem, routing) = by_hand();
        let reference = Reference::new(&problem, 0, 2);
        let layout = Layout::new(&problem, &routing, 0);
        let truth = Truth { step: 3, routing, layout, domain: reference.domain };
        let mut rows = vec![0f32; 8 * 16];
        problem.token(3, 0, 0, &mut rows[..16]);
        problem.token(3, 1, 1, &mut rows[16..32]);
        problem.token(3, 0, 2, &mut rows[4 * 16..5 * 16]);
        let mut comparison = Comparison::new("recv_tokens", "");
        reference.rows(&truth, Rows::Tokens, 0, &rows, &mut comparison);
        assert_eq!((comparison.wrong, comparison.elements), (0, 8 * 16));
        rows[7 * 16 + 3] = f32::NAN;
        reference.rows(&truth, Rows::Tokens, 4, &rows[4 * 16..], &mut comparison);
        assert_eq!((comparison.wrong, comparison.first[0].row, comparison.first[0].column), (1, 7, 3));
        let mut comparison = Comparison::new("recv_topk_weights", "");
        reference.weights(&truth, &[0.75, 0.125, 0.0, 0.0, 0.5, 0.0, -0.0, 0.0], &mut comparison);
        assert_eq!((comparison.wrong, comparison.first[0].row), (1, 6));
    }
}
