//! Which row of the receive buffer each arriving token gets.

use crate::ep::ll::arrivals::Arrivals;
use crate::ep::ll::limits::Shape;
use crate::settings;

/// The parts of a receive buffer: slabs of local experts, or of source ranks.
#[derive(Clone, Copy, Debug)]
pub struct Regions {
    /// How many.
    pub number: usize,
    /// Rows of each.
    pub rows: usize,
}

impl Regions {
    /// Those of a layout.
    pub fn of(shape: &Shape) -> Self {
        if shape.rank_major {
            Self { number: shape.ranks, rows: shape.max_tokens }
        } else {
            Self { number: shape.experts / shape.ranks, rows: shape.ranks * shape.max_tokens }
        }
    }
}

/// A slab without room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow {
    /// The expert.
    pub expert: usize,
    /// Rows that it gets.
    pub rows: usize,
    /// Rows that its slab has.
    pub room: usize,
}

/// Places what every rank's tokens, `top_k` experts to each, bring to `rank`; gives the rows that each region has used too.
///
/// Rows are in the order of source rank, source row and top-k position, or shuffled if that is set: kernels take them as they come.
pub fn place(
    shape: &Shape,
    rank: usize,
    number: u64,
    experts: &[Vec<i32>],
) -> Result<(Arrivals, Vec<usize>), Overflow> {
    let regions = Regions::of(shape);
    let local = shape.experts / shape.ranks;
    let mine = rank * local..(rank + 1) * local;
    let mut used = vec![0; regions.number];
    let mut arrivals = Arrivals { number, ..Arrivals::default() };
    for (source, experts) in experts.iter().enumerate() {
        let first = arrivals.tokens.len();
        for (token, experts) in experts.chunks_exact(shape.top_k).enumerate() {
            let before = arrivals.slots.len();
            arrivals.slots.extend(experts.iter().scan(false, |arrived, expert| {
                let expert = usize::try_from(*expert).ok().filter(|expert| mine.contains(expert));
                let region = match expert {
                    Some(_) if shape.rank_major && *arrived => None,
                    Some(_) if shape.rank_major => Some(source),
                    other => other.map(|expert| expert - mine.start),
                };
                *arrived |= expert.is_some();
                Some(region.map_or(-1, |region| {
                    used[region] += 1;
                    (region * regions.rows + used[region] - 1) as i32
                }))
            }));
            if arrivals.slots[before..].iter().all(|slot| *slot < 0) {
                arrivals.slots.truncate(before);
            } else {
                arrivals.tokens.push(token as i32);
            }
        }
        arrivals.of_rank.push(first..arrivals.tokens.len());
    }
    if let Some(region) = used.iter().position(|rows| *rows > regions.rows) {
        return Err(Overflow { expert: mine.start + region, rows: used[region], room: regions.rows });
    }
    if let Some(seed) = settings::shuffle() {
        shuffle(
            &mut arrivals.slots,
            &used,
            regions.rows,
            seed ^ number.rotate_left(32) ^ (rank as u64).rotate_left(48),
        );
    }
    Ok((arrivals, used))
}

/// Gives the rows of each region to other tokens of it.
fn shuffle(slots: &mut [i32], used: &[usize], rows: usize, seed: u64) {
    let mut state = seed;
    // SplitMix64.
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    };
    let orders: Vec<Vec<i32>> = used
        .iter()
        .enumerate()
        .map(|(region, used)| {
            let mut order: Vec<i32> = (region * rows..region * rows + used).map(|row| row as i32).collect();
            for last in (1..order.len()).rev() {
                order.swap(last, (next() % (last as u64 + 1)) as usize);
            }
            order
        })
        .collect();
    for slot in slots.iter_mut().filter(|slot| **slot >= 0) {
        *slot = orders[*slot as usize / rows][*slot as usize % rows];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape =
        Shape { ranks: 2, experts: 4, max_tokens: 2, max_token_bytes: 1024, top_k: 3, rank_major: false };

    /// Rank 0's tokens (1, -1, 0) and (3, 2, 1), rank 1's token (1, 1, 2).
    fn experts() -> Vec<Vec<i32>> {
        vec![vec![1, -1, 0, 3, 2, 1], vec![1, 1, 2]]
    }

    #[test]
    fn rows_of_an_expert_are_in_the_order_of_ranks_and_rows() {
        let (arrivals, used) = place(&SHAPE, 0, 7, &experts()).unwrap();
        assert_eq!((&*used, arrivals.number), (&[1, 4][..], 7));
        assert_eq!((&*arrivals.of_rank, &*arrivals.tokens), (&[0..2, 2..3][..], &[0, 1, 0][..]));
        assert_eq!(arrivals.slots, [4, -1, 0, -1, -1, 5, 6, 7, -1]);
        let (arrivals, used) = place(&SHAPE, 1, 7, &experts()).unwrap();
        assert_eq!((&*used, &*arrivals.tokens), (&[2, 1][..], &[1, 0][..]));
        assert_eq!(arrivals.slots, [4, 0, -1, -1, -1, 1]);
    }

    #[test]
    fn a_rank_major_token_has_one_row() {
        let (arrivals, used) = place(&Shape { rank_major: true, ..SHAPE }, 0, 1, &experts()).unwrap();
        assert_eq!(used, [2, 1]);
        assert_eq!(arrivals.slots, [0, -1, -1, -1, -1, 1, 2, -1, -1]);
    }

    #[test]
    fn duplicates_may_exceed_a_slab() {
        let experts = vec![vec![1, 1, 1, 1, 1, 0], vec![]];
        assert_eq!(place(&SHAPE, 0, 1, &experts), Err(Overflow { expert: 1, rows: 5, room: 4 }));
    }

    #[test]
    fn a_shuffle_moves_rows_within_their_region() {
        let slots: Vec<i32> = (0..20).chain([32, 33, -1, 34]).collect();
        let mut shuffled = slots.clone();
        shuffle(&mut shuffled, &[20, 3], 32, 5);
        assert_ne!(shuffled, slots);
        assert_eq!(shuffled[22], -1);
        let mut sorted = shuffled.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (-1..20).chain(32..35).collect::<Vec<i32>>());
        assert!(shuffled[..20].iter().all(|slot| *slot < 20));
        let mut other = slots.clone();
        shuffle(&mut other, &[20, 3], 32, 6);
        assert_ne!(other, shuffled);
    }
}
