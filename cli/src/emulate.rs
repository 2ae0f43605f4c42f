//! The exact bits of combine and of dispatch's backward pass: the experts' outputs of all ranks, recomputed with the code
//! that the ranks themselves use, summed as the library sums (a rank's local experts in ascending order in f32 from +0,
//! rounded to the token type; then over the ranks in ascending order in f32, rounded). Over several NVLink domains the sum over
//! each domain's ranks is rounded, and those are summed in f32 from the own domain downwards, the last one after the first.

use crate::compare::Comparison;
use crate::element::Element;
use crate::experts::Experts;
use crate::parallel;
use crate::reference::Truth;
use crate::routing::Problem;

/// The pass whose sums are emulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Combine: sums of weighted expert outputs.
    Forward,
    /// Dispatch's backward pass: sums of token gradients.
    Backward,
}

/// Tokens that a thread takes at a time: enough that an expert's matrices are used for several of them.
const BLOCK: usize = 32;

/// Compares `got`, this rank's result of the pass, bit by bit. In the backward pass returns the exact gradients of the
/// weights too, one an entry of the routing.
pub fn check<E: Element>(
    (problem, experts): (&Problem, &Experts),
    (truth, rank): (&Truth, usize),
    threads: usize,
    pass: Pass,
    got: &[E],
    into: &mut Comparison,
) -> Vec<f32> {
    let (hidden, local) = (problem.hidden, problem.local_experts());
    let routing = &truth.routing[rank];
    let parts = parallel::map(threads, routing.rows.div_ceil(BLOCK), |block| {
        let first = block * BLOCK;
        let rows = BLOCK.min(routing.rows - first);
        let mut entries: Vec<(usize, usize, usize, f32)> = (0..rows)
            .flat_map(|row| routing.row(first + row).map(move |(k, expert, weight)| (expert, row, k, weight)))
            .collect();
        // The own domain, those before it, then those behind from the last.
        let (domains, own) = (problem.ranks / truth.domain, rank / truth.domain);
        let order = |expert: usize| (own + domains - expert / local / truth.domain) % domains;
        entries.sort_unstable_by_key(|&(expert, row, ..)| (order(expert), expert, row));
        let mut tokens = vec![E::default(); rows * hidden];
        let mut gradients = vec![E::default(); rows * hidden];
        for row in 0..rows {
            problem.token(truth.step, rank, first + row, &mut tokens[row * hidden..(row + 1) * hidden]);
            if pass == Pass::Backward {
                problem.gradient(truth.step, rank, first + row, &mut gradients[row * hidden..(row + 1) * hidden]);
            }
        }
        let mut totals = vec![0f32; rows * hidden];
        let (mut sums, mut of_domain) = (vec![0f32; rows * hidden], vec![0f32; rows * hidden]);
        let mut summed = None;
        let (mut inner, mut scratch) = (vec![0.0; experts.inner_len()], experts.scratch());
        let mut contribution = vec![E::default(); hidden];
        let mut weight_gradients = vec![0f32; rows * routing.top_k];
        for of_rank in entries.chunk_by(|left, right| left.0 / local == right.0 / local) {
            sums.fill(0.0);
            for &(expert, row, k, weight) in of_rank {
                let token = &tokens[row * hidden..(row + 1) * hidden];
                if pass == Pass::Forward {
                    experts.forward(expert, weight, token, &mut inner, &mut contribution, &mut scratch);
                } else {
                    let grad = &gradients[row * hidden..(row + 1) * hidden];
                    experts.inner(expert, token, &mut inner, &mut scratch);
                    weight_gradients[row * routing.top_k + k] =
                        experts.backward(expert, weight, grad, &inner, &mut contribution, &mut scratch);
                }
                let sums = &mut sums[row * hidden..(row + 1) * hidden];
                sums.iter_mut().zip(&contribution).for_each(|(sum, value)| *sum += value.to_f32());
            }
            // A token without an expert on this rank adds +0, which changes no sum that began at +0.
            let domain = order(of_rank[0].0);
            if summed.replace(domain).is_some_and(|before| before != domain) {
                add_rounded::<E>(&mut totals, &of_domain);
                of_domain.fill(0.0);
            }
            add_rounded::<E>(&mut of_domain, &sums);
        }
        if domains == 1 {
            totals = of_domain;
        } else {
            add_rounded::<E>(&mut totals, &of_domain);
        }
        let mut part = Comparison::default();
        let mut expected = vec![E::default(); hidden];
        for row in 0..rows {
            let totals = &totals[row * hidden..(row + 1) * hidden];
            expected.iter_mut().zip(totals).for_each(|(expected, total)| *expected = E::from_f32(*total));
            let at = (first + row) * hidden;
            part.bits(truth.step, first + row, &expected, &got[at..at + hidden]);
        }
        (part, weight_gradients)
    });
    let mut weight_gradients = Vec::with_capacity(routing.experts.len());
    for (part, of_block) in parts {
        into.merge(part);
        weight_gradients.extend(of_block);
    }
    weight_gradients
}

fn add_rounded<E: Element>(totals: &mut [f32], sums: &[f32]) {
    totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += E::from_f32(*sum).to_f32());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::Reference;
    use crate::routing::tests::problem;
    use half::{bf16, f16};

    /// Sums the contributions of one token, written out for one token at a time.
    fn combined<E: Element>(problem: &Problem, experts: &Experts, truth: &Truth, rank: usize, pass: Pass) -> Vec<E> {
        let hidden = problem.hidden;
        let mut out = Vec::new();
        let (mut inner, mut scratch) = (vec![0.0; experts.inner_len()], experts.scratch());
        let (mut x, mut g) = (vec![E::default(); hidden], vec![E::default(); hidden]);
        for row in 0..truth.routing[rank].rows {
            problem.token(truth.step, rank, row, &mut x);
            problem.gradient(truth.step, rank, row, &mut g);
            let mut total = vec![0f32; hidden];
            let mut domain_total = vec![0f32; hidden];
            let domains = problem.ranks / truth.domain;
            let own = rank / truth.domain;
            let order = (0..=own).rev().chain((own + 1..domains).rev());
            for target in order.flat_map(|domain| domain * truth.domain..(domain + 1) * truth.domain) {
                let mut sum = vec![0f32; hidden];
                for expert in target * problem.local_experts()..(target + 1) * problem.local_experts() {
                    for (_, _, weight) in truth.routing[rank].row(row).filter(|(_, chosen, _)| *chosen == expert) {
                        let mut y = vec![E::default(); hidden];
                        experts.forward(expert, weight, &x, &mut inner, &mut y, &mut scratch);
                        if pass == Pass::Backward {
                            experts.backward(expert, weight, &g, &inner, &mut y, &mut scratch);
                        }
                        sum.iter_mut().zip(&y).for_each(|(sum, y)| *sum += y.to_f32());
                    }
                }
                domain_total.iter_mut().zip(&sum).for_each(|(total, sum)| *total += E::from_f32(*sum).to_f32());
                if (target + 1).is_multiple_of(truth.domain) {
                    for (total, part) in total.iter_mut().zip(&mut domain_total) {
                        let part = std::mem::take(part);
                        *total += if domains == 1 { part } else { E::from_f32(part).to_f32() };
                    }
                }
            }
            out.extend(total.into_iter().map(E::from_f32));
        }
        out
    }

    fn agrees<E: Element>(ranks: usize, domain: usize) {
        let problem = problem(ranks, 70, 3, 8, 4);
        let experts = Experts::new(&problem, 2);
        let mut reference = Reference::new(&problem, 1, 2);
        reference.domain = domain;
        for step in [0, 2] {
            let truth = reference.truth(step);
            for pass in [Pass::Forward, Pass::Backward] {
                let mut got: Vec<E> = combined(&problem, &experts, &truth, 1, pass);
                let mut bits = Comparison::default();
                check((&problem, &experts), (&truth, 1), 2, pass, &got, &mut bits);
                assert_eq!((bits.wrong, bits.elements), (0, got.len() as u64));
                let mut bounded = Comparison::default();
                match pass {
                    Pass::Forward => drop(reference.result(&truth, &got, &mut bounded)),
                    Pass::Backward => reference.grad_tokens(&truth, &got, &mut bounded),
                }
                assert_eq!((bounded.wrong, bounded.elements), (0, got.len() as u64), "{:?}", bounded.first);
                assert!(bounded.max_share > 0.02, "the bound is not far from what happens: {}", bounded.max_share);
                let last = got.len() - 1;
                got[last] = E::from_f32(100.0 - got[last].to_f32());
                check((&problem, &experts), (&truth, 1), 2, pass, &got, &mut bits);
                assert_eq!(bits.wrong, 1);
            }
        }
    }

    #[test]
    fn agrees_with_the_sum_token_by_token_and_with_the_reference() {
        agrees::<bf16>(2, 2);
        agrees::<f16>(2, 2);
        agrees::<f32>(2, 2);
        agrees::<bf16>(8, 2);
        agrees::<f32>(4, 1);
    }

    #[test]
    fn weight_gradients_agree_with_the_reference() {
        let problem = problem(2, 50, 2, 4, 1);
        let experts = Experts::new(&problem, 1);
        let reference = Reference::new(&problem, 0, 1);
        let truth = reference.truth(0);
        let got: Vec<f32> = combined(&problem, &experts, &truth, 0, Pass::Forward);
        let expected = reference.result(&truth, &got, &mut Comparison::default());
        let mut ignored = Comparison::default();
        let exact = check((&problem, &experts), (&truth, 0), 1, Pass::Backward, &got, &mut ignored);
        let mut comparison = Comparison::default();
        reference.grad_weights(&truth, &expected, &exact, &mut comparison);
        assert_eq!((comparison.wrong, comparison.elements), (0, 100), "{:?}", comparison.first);
    }
}
