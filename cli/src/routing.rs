//! The inputs of a step: routing, tokens and gradients, each a pure function of seed, step, rank and row, so that every
//! rank knows every rank's inputs. Integer arithmetic and exact float operations only: the same on every machine.

use crate::element::Element;
use serde::{Deserialize, Serialize};

/// A layer and how often it is run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Number of ranks.
    pub ranks: usize,
    /// Most tokens of a rank in one step.
    pub tokens: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts over all ranks.
    pub experts: usize,
    /// Rows that an expert's slab is padded to a multiple of; 0 or 1 = not padded.
    pub align: usize,
    /// Number of steps.
    pub steps: usize,
    /// Seed of everything.
    pub seed: u64,
    /// Inner dimension of the experts.
    pub expert_dim: usize,
}

impl Problem {
    /// Experts of one rank.
    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks
    }

    /// `rows` and the padding of an expert that received them.
    pub fn padded(&self, rows: usize) -> usize {
        rows.next_multiple_of(self.align.max(1))
    }

    /// Tokens that `rank` sends in `step`. The first rank sends all it may in the first step; the others less, and in
    /// turn one rank sends very few, or none in every third step.
    pub fn tokens_of(&self, step: usize, rank: usize) -> usize {
        if self.ranks > 1 && rank == (step + 1) % self.ranks {
            return if step % 3 == 1 { 0 } else { (self.tokens / 16).max(1) };
        }
        if step == 0 && rank == 0 {
            return self.tokens;
        }
        let spread = self.tokens as u64 / 5;
        let less = key(&[self.seed, TOKENS_STREAM, step as u64, rank as u64]) % (spread + 1);
        self.tokens - less as usize
    }

    /// How popular each expert is. Roughly one over its place in a shuffled order; the last place is never chosen,
    /// where there are enough others.
    fn popularity(&self) -> Vec<u64> {
        let mut order: Vec<usize> = (0..self.experts).collect();
        let mut draw = Draw(key(&[self.seed, ORDER_STREAM]));
        for i in (1..order.len()).rev() {
            order.swap(i, draw.below(i as u64 + 1) as usize);
        }
        let mut popularity = vec![0; self.experts];
        for (place, &expert) in order.iter().enumerate() {
            let never = place + 1 == self.experts && self.experts >= 4 && self.top_k < self.experts;
            popularity[expert] = if never { 0 } else { (1 << 24) / (place as u64 + 2) };
        }
        popularity
    }

    /// The routing of all ranks in `step`.
    pub fn routing(&self, step: usize) -> Vec<Routing> {
        let popularity = self.popularity();
        (0..self.ranks).map(|rank| self.rank_routing(step, rank, &popularity)).collect()
    }

    fn rank_routing(&self, step: usize, rank: usize, popularity: &[u64]) -> Routing {
        let (rows, k) = (self.tokens_of(step, rank), self.top_k);
        let mut routing = Routing { rows, top_k: k, experts: vec![-1; rows * k], weights: vec![0.0; rows * k] };
        let mut left = popularity.to_vec();
        let all: u64 = popularity.iter().sum();
        for row in 0..rows {
            let mut draw = Draw(key(&[self.seed, ROUTING_STREAM, step as u64, rank as u64, row as u64]));
            left.copy_from_slice(popularity);
            let mut total = all;
            let row_masked = draw.below(100) == 0;
            let experts = &mut routing.experts[row * k..(row + 1) * k];
            let weights = &mut routing.weights[row * k..(row + 1) * k];
            for (expert, weight) in experts.iter_mut().zip(weights.iter_mut()) {
                let chosen = choose(&left, draw.below(total));
                total -= std::mem::take(&mut left[chosen]);
                let masked = draw.below(50) == 0;
                let raw = (draw.below(1 << 16) + 1) as f32;
                if !(masked || row_masked) {
                    (*expert, *weight) = (chosen as i32, raw);
                }
            }
            let sum: f32 = weights.iter().sum();
            if sum > 0.0 {
                weights.iter_mut().for_each(|weight| *weight /= sum);
            }
        }
        routing
    }

    /// A routing of `rank` in which every expert is as likely as any other: `tokens` rows, nothing masked.
    pub fn uniform(&self, rank: usize) -> Routing {
        let (rows, k) = (self.tokens, self.top_k);
        let mut experts = Vec::with_capacity(rows * k);
        let mut order: Vec<i32> = (0..self.experts as i32).collect();
        for row in 0..rows {
            let mut draw = Draw(key(&[self.seed, ROUTING_STREAM, rank as u64, row as u64]));
            for place in 0..k {
                order.swap(place, place + draw.below((self.experts - place) as u64) as usize);
            }
            experts.extend_from_slice(&order[..k]);
        }
        Routing { rows, top_k: k, experts, weights: vec![1.0 / k as f32; rows * k] }
    }

    /// A routing of `rank` in which an expert is as likely as one over its place in a shuffled order: `tokens` rows, nothing
    /// masked.
    pub fn zipf(&self, rank: usize) -> Routing {
        let (rows, k) = (self.tokens, self.top_k);
        let mut popularity = self.popularity();
        // The one that is never chosen otherwise.
        popularity
            .iter_mut()
            .filter(|share| **share == 0)
            .for_each(|share| *share = (1 << 24) / (self.experts as u64 + 1));
        let all: u64 = popularity.iter().sum();
        let mut experts = Vec::with_capacity(rows * k);
        let mut left = popularity.clone();
        for row in 0..rows {
            let mut draw = Draw(key(&[self.seed, ROUTING_STREAM, rank as u64, row as u64]));
            left.copy_from_slice(&popularity);
            let mut total = all;
            for _ in 0..k {
                let chosen = choose(&left, draw.below(total));
                total -= std::mem::take(&mut left[chosen]);
                experts.push(chosen as i32);
            }
        }
        Routing { rows, top_k: k, experts, weights: vec![1.0 / k as f32; rows * k] }
    }

    /// The uniform routing of `rank`, with the first expert in the place of each token's first choice.
    pub fn hot(&self, rank: usize) -> Routing {
        let mut routing = self.uniform(rank);
        for token in routing.experts.chunks_mut(self.top_k) {
            match token.iter().position(|&expert| expert == 0) {
                Some(at) => token.swap(0, at),
                None => token[0] = 0,
            }
        }
        routing
    }

    /// Fills `out` with the token of that step, rank and row.
    pub fn token<E: Element>(&self, step: usize, rank: usize, row: usize, out: &mut [E]) {
        fill(key(&[self.seed, VALUE_STREAM, step as u64, rank as u64, row as u64]), out);
    }

    /// Fills `out` with the gradient of the layer's output for that step, rank and row.
    pub fn gradient<E: Element>(&self, step: usize, rank: usize, row: usize, out: &mut [E]) {
        fill(key(&[self.seed, GRADIENT_STREAM, step as u64, rank as u64, row as u64]), out);
    }

    /// Rows that a receive buffer needs: the largest padded total of any rank and step, and no less than a rank's
    /// tokens, in whole blocks of 64.
    pub fn capacity(&self, threads: usize) -> usize {
        let totals = crate::parallel::map(threads, self.steps, |step| {
            let mut rows = vec![0; self.experts];
            for routing in self.routing(step) {
                routing.experts.iter().filter(|&&e| e >= 0).for_each(|&e| rows[e as usize] += 1);
            }
            let ranks = rows.chunks(self.local_experts());
            ranks.map(|local| local.iter().map(|&rows| self.padded(rows)).sum()).max().unwrap_or(0)
        });
        totals.into_iter().max().unwrap_or(0).max(self.tokens).next_multiple_of(64)
    }
}

/// One rank's routing in one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Number of tokens.
    pub rows: usize,
    /// Entries of a row.
    pub top_k: usize,
    /// Expert of every entry, row after row; -1 = masked.
    pub experts: Vec<i32>,
    /// Weight of every entry; those of a row sum to one, a masked entry has none.
    pub weights: Vec<f32>,
}

impl Routing {
    /// Entries that are not masked.
    pub fn live(&self) -> usize {
        self.experts.iter().filter(|&&expert| expert >= 0).count()
    }

    /// Experts and weights of one row.
    pub fn row(&self, row: usize) -> impl Iterator<Item = (usize, usize, f32)> + '_ {
        let range = row * self.top_k..(row + 1) * self.top_k;
        let entries = self.experts[range.clone()].iter().zip(&self.weights[range]).enumerate();
        entries.filter(|(_, (expert, _))| **expert >= 0).map(|(k, (expert, weight))| (k, *expert as usize, *weight))
    }
}

const TOKENS_STREAM: u64 = 1;
const ORDER_STREAM: u64 = 2;
const ROUTING_STREAM: u64 = 3;
const VALUE_STREAM: u64 = 4;
const GRADIENT_STREAM: u64 = 5;
/// Stream of the experts' matrices.
pub const EXPERT_STREAM: u64 = 6;

/// SplitMix64's output function.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// One number from several.
pub fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(STRIDE, |hash, part| mix(hash.wrapping_add(STRIDE) ^ mix(part.wrapping_add(STRIDE))))
}

struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(STRIDE);
        mix(self.0) % limit
    }
}

/// The place of `point` where shares lie one behind the other.
fn choose(shares: &[u64], mut point: u64) -> usize {
    let chosen = shares.iter().position(|&share| {
        let here = point < share;
        point = point.wrapping_sub(if here { 0 } else { share });
        here
    });
    chosen.unwrap_or_else(|| unreachable!("the point is below the sum of the shares"))
}

/// Sixteen-bit fixed-point values in [-1, 1), rounded to the type: more digits than bf16 and f16 hold, fewer than f32.
fn fill<E: Element>(key: u64, out: &mut [E]) {
    for (i, quad) in out.chunks_mut(4).enumerate() {
        let mut bits = mix(key.wrapping_add(STRIDE.wrapping_mul(i as u64 + 1)));
        for value in quad {
            *value = E::from_f32(f32::from(bits as u16 as i16) / 32768.0);
            bits >>= 16;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use half::bf16;

    pub(crate) fn problem(ranks: usize, tokens: usize, top_k: usize, experts: usize, align: usize) -> Problem {
        Problem { ranks, tokens, hidden: 16, top_k, experts, align, steps: 4, seed: 7, expert_dim: 3 }
    }

    #[test]
    fn rows_hold_distinct_experts_and_weights_that_sum_to_one() {
        for (top_k, experts) in [(1, 4), (2, 8), (8, 8), (8, 64)] {
            let problem = problem(4, 200, top_k, experts, 1);
            let (mut masked, mut all, mut empty_rows) = (0, 0, 0);
            for step in 0..problem.steps {
                for routing in problem.routing(step) {
                    for row in 0..routing.rows {
                        let entries: Vec<_> = routing.row(row).collect();
                        let mut chosen: Vec<usize> = entries.iter().map(|(_, expert, _)| *expert).collect();
                        chosen.sort_unstable();
                        chosen.dedup();
                        assert_eq!(chosen.len(), entries.len());
                        assert!(chosen.iter().all(|&expert| expert < experts));
                        assert!(entries.iter().all(|(_, _, weight)| *weight > 0.0));
                        let sum: f32 = entries.iter().map(|(_, _, weight)| weight).sum();
                        assert!(entries.is_empty() || (sum - 1.0).abs() < 1e-5);
                        empty_rows += usize::from(entries.is_empty());
                        masked += top_k - entries.len();
                        all += top_k;
                    }
                }
            }
            let share = masked as f64 / all as f64;
            assert!((0.015..0.05).contains(&share), "{share}");
            assert!(empty_rows > 0);
        }
    }

    #[test]
    fn skewed_uneven_and_reproducible() {
        let problem = problem(4, 400, 2, 16, 16);
        let routing = problem.routing(0);
        assert_eq!(routing, problem.routing(0));
        assert_ne!(routing[0], problem.routing(2)[0]);
        let mut received = vec![0; 16];
        routing.iter().flat_map(|r| &r.experts).filter(|&&e| e >= 0).for_each(|&e| received[e as usize] += 1);
        let hottest = received.iter().max().copied().unwrap_or(0);
        assert!(hottest > 2 * received.iter().sum::<usize>() / 16, "{received:?}");
        assert_eq!(received.iter().filter(|&&rows| rows == 0).count(), 1);
        assert_eq!(routing.iter().map(|r| r.rows).max(), Some(400));
        assert_eq!(routing[1].rows, 25);
        assert_eq!(problem.tokens_of(1, 2), 0);
        assert!((0..4).all(|step| (0..4).all(|rank| problem.tokens_of(step, rank) <= 400)));
    }

    #[test]
    fn capacity_holds_every_step() {
        let problem = problem(4, 100, 2, 8, 16);
        let capacity = problem.capacity(2);
        for step in 0..problem.steps {
            let mut rows = [0; 8];
            let routing = problem.routing(step);
            routing.iter().flat_map(|r| &r.experts).filter(|&&e| e >= 0).for_each(|&e| rows[e as usize] += 1);
            for local in rows.chunks(2) {
                assert!(local.iter().map(|r: &usize| r.next_multiple_of(16)).sum::<usize>() <= capacity);
            }
        }
        assert!(capacity >= 100 && capacity.is_multiple_of(64));
    }

    #[test]
    fn values_are_spread_over_the_range() {
        let problem = problem(2, 10, 1, 4, 1);
        let mut row = vec![0f32; 4096];
        problem.token(0, 1, 3, &mut row);
        let mean: f32 = row.iter().sum::<f32>() / 4096.0;
        let square: f32 = row.iter().map(|x| x * x).sum::<f32>() / 4096.0;
        assert!(mean.abs() < 0.05 && (square - 1.0 / 3.0).abs() < 0.03);
        let mut half = vec![bf16::ZERO; 4096];
        problem.token(0, 1, 3, &mut half);
        assert!(row.iter().zip(&half).all(|(x, h)| bf16::from_f32(*x) == *h));
        let mut other = vec![0f32; 4096];
        problem.gradient(0, 1, 3, &mut other);
        assert_ne!(row, other);
    }
}
