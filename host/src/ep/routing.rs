//! From the ranks' top-k indices to the maps of one rank: pure computation.

/// What the maps depend on besides the indices.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Ranks of the group.
    pub ranks: usize,
    /// This rank.
    pub rank: usize,
    /// Experts of the group.
    pub experts: usize,
    /// Most tokens a rank dispatches.
    pub max_tokens: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Distinct tokens that a rank can receive.
    pub capacity: usize,
    /// Rows that they and the padding can take.
    pub rows: usize,
    /// Zone padding in rows; 0 and 1 mean none.
    pub alignment: usize,
    /// Whether rows beyond the capacity are dropped.
    pub drop: bool,
}

impl Shape {
    /// Experts of each rank.
    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks
    }

    /// The global index of this rank's first expert.
    pub fn first_expert(&self) -> usize {
        self.rank * self.local_experts()
    }

    fn padded(&self, count: usize) -> usize {
        // An expert without tokens gets no rows.
        if self.alignment <= 1 { count } else { count.next_multiple_of(self.alignment) }
    }
}

/// The maps of one rank; see [`super::memory_layout::MemoryLayout`] for shapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Where the own tokens are among those that each rank receives.
    pub source_map: Vec<i32>,
    /// Where the peers' tokens are among those that this rank receives.
    pub token_map: Vec<i32>,
    /// Rows of each received token.
    pub slots: Vec<i32>,
    /// Tokens of each local expert.
    pub counts: Vec<i32>,
    /// First row of each zone, and the padded total.
    pub bases: Vec<i64>,
    /// Unique tokens kept.
    pub received: usize,
    /// Unique tokens before any drop.
    pub arriving: usize,
}

/// The receive buffer is too small and the policy is to trap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow {
    /// The rank whose buffer it is.
    pub rank: usize,
    /// Padded rows that the routing needs.
    pub rows: usize,
    /// Unique tokens that arrive.
    pub tokens: usize,
}

/// The distinct values of `row` inside `range`, ascending.
fn distinct(row: &[i32], range: std::ops::Range<usize>, into: &mut Vec<usize>) {
    into.clear();
    into.extend(row.iter().filter_map(|e| usize::try_from(*e).ok()).filter(|e| range.contains(e)));
    into.sort_unstable();
    into.dedup();
}

/// Computes the maps from every rank's indices, `top_k` to a row; negative ones are no expert.
///
/// Zones hold rows by source rank, then source row.
pub fn route(shape: &Shape, indices: &[Vec<i32>]) -> Result<Routing, Overflow> {
    let Shape { ranks, rank, max_tokens, top_k, capacity, rows: row_limit, .. } = *shape;
    let local_experts = shape.local_experts();
    let mine = shape.first_expert()..shape.first_expert() + local_experts;
    let mut experts = Vec::with_capacity(top_k);

    let mut counts = vec![0i32; local_experts];
    let mut arriving = 0;
    for row in indices.iter().flat_map(|rows| rows.chunks_exact(top_k)) {
        distinct(row, mine.clone(), &mut experts);
        arriving += usize::from(!experts.is_empty());
        for expert in &experts {
            counts[expert - mine.start] += 1;
        }
    }
    let mut bases = Vec::with_capacity(local_experts + 1);
    let mut total = 0usize;
    for count in &counts {
        bases.push(total as i64);
        total += shape.padded(*count as usize);
    }
    bases.push(total as i64);
    if !shape.drop && (total > row_limit || arriving > capacity) {
        return Err(Overflow { rank, rows: total, tokens: arriving });
    }

    let mut token_map = vec![-1i32; ranks * max_tokens];
    let mut slots = vec![-1i32; capacity * top_k];
    let mut next: Vec<i64> = bases[..local_experts].to_vec();
    let mut received = 0;
    for (source, rows) in indices.iter().enumerate() {
        for (token, row) in rows.chunks_exact(top_k).enumerate() {
            distinct(row, mine.clone(), &mut experts);
            if experts.is_empty() || received == capacity {
                continue;
            }
            token_map[source * max_tokens + token] = received as i32;
            for (slot, expert) in slots[received * top_k..].iter_mut().zip(&experts) {
                let position = &mut next[expert - mine.start];
                if *position < row_limit as i64 {
                    *slot = *position as i32;
                }
                *position += 1;
            }
            received += 1;
        }
    }

    let mut source_map = vec![-1i32; max_tokens * ranks];
    let mut unique = vec![0usize; ranks];
    for (source, rows) in indices.iter().enumerate().take(rank + 1) {
        for (token, row) in rows.chunks_exact(top_k).enumerate() {
            distinct(row, 0..shape.experts, &mut experts);
            let mut previous = None;
            for destination in experts.iter().map(|expert| expert / local_experts) {
                if previous.replace(destination) == Some(destination) {
                    continue;
                }
                if source == rank && unique[destination] < capacity {
                    source_map[token * ranks + destination] = unique[destination] as i32;
                }
                unique[destination] += 1;
            }
        }
    }
    Ok(Routing { source_map, token_map, slots, counts, bases, received, arriving })
}

/// As [`route`] for the modes in which a token's rows are written as duplicates: of a token with too many rows those
/// inside the capacity are kept, and a rank whose buffer is too small is everyone's error.
pub fn route_duplicates(shape: &Shape, indices: &[Vec<i32>]) -> Result<Routing, Overflow> {
    let Shape { ranks, rank, max_tokens, top_k, capacity, .. } = *shape;
    let local_experts = shape.local_experts();
    let mut experts = Vec::with_capacity(top_k);

    let mut counts = vec![0usize; shape.experts];
    let mut arriving = vec![0usize; ranks];
    for row in indices.iter().flat_map(|rows| rows.chunks_exact(top_k)) {
        distinct(row, 0..shape.experts, &mut experts);
        for to_rank in experts.chunk_by(|a, b| a / local_experts == b / local_experts) {
            arriving[to_rank[0] / local_experts] += 1;
        }
        for expert in &experts {
            counts[*expert] += 1;
        }
    }
    let zones: Vec<Vec<usize>> = counts
        .chunks_exact(local_experts)
        .map(|counts| {
            let mut zones = vec![0];
            zones.extend(counts.iter().scan(0, |end, count| {
                *end += shape.padded(*count);
                Some(*end)
            }));
            zones
        })
        .collect();
    if !shape.drop
        && let Some(rank) = (0..ranks).find(|rank| zones[*rank][local_experts] > capacity)
    {
        return Err(Overflow { rank, rows: zones[rank][local_experts], tokens: arriving[rank] });
    }

    let mut source_map = vec![-1i32; max_tokens * ranks];
    let mut token_map = vec![-1i32; ranks * max_tokens];
    let mut slots = vec![-1i32; capacity * top_k];
    let mut next: Vec<usize> = zones.iter().flat_map(|zones| zones[..local_experts].to_vec()).collect();
    let mut received = vec![0usize; ranks];
    for (source, rows) in indices.iter().enumerate() {
        for (token, row) in rows.chunks_exact(top_k).enumerate() {
            distinct(row, 0..shape.experts, &mut experts);
            for to_rank in experts.chunk_by(|a, b| a / local_experts == b / local_experts) {
                let destination = to_rank[0] / local_experts;
                let mut live = Vec::with_capacity(to_rank.len());
                for expert in to_rank {
                    live.extend((next[*expert] < capacity).then_some(next[*expert] as i32));
                    next[*expert] += 1;
                }
                if live.is_empty() {
                    continue;
                }
                let position = received[destination];
                received[destination] += 1;
                if source == rank {
                    source_map[token * ranks + destination] = position as i32;
                }
                if destination == rank {
                    token_map[source * max_tokens + token] = position as i32;
                    slots[position * top_k..][..live.len()].copy_from_slice(&live);
                }
            }
        }
    }
    let mine = shape.first_expert();
    Ok(Routing {
        source_map,
        token_map,
        slots,
        counts: counts[mine..mine + local_experts].iter().map(|count| *count as i32).collect(),
        bases: zones[rank].iter().map(|base| *base as i64).collect(),
        received: received[rank],
        arriving: arriving[rank],
    })
}

impl Routing {
    /// Padded count of a local expert and first row of its zone, as published: clamped to the capacity.
    pub fn published(&self, expert: usize, rows: usize) -> (i64, i64) {
        let capacity = rows as i64;
        let [start, end] = [self.bases[expert], self.bases[expert + 1]].map(|row| row.min(capacity));
        (end - start, start)
    }

    /// Padded rows in all, before any drop.
    pub fn total(&self) -> i64 {
        self.bases.last().copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        ranks: 2,
        rank: 0,
        experts: 4,
        max_tokens: 2,
        top_k: 2,
        capacity: 8,
        rows: 8,
        alignment: 2,
        drop: false,
    };

    #[test]
    fn zones_are_sorted_padded_and_adjacent() {
        // rank 0: tokens (1,0) and (3,1); rank 1: tokens (1,1) and (-1,2).
        let indices = [vec![1, 0, 3, 1], vec![1, 1, -1, 2]];
        let routing = route(&SHAPE, &indices).unwrap();
        assert_eq!(routing.counts, [1, 3]);
        assert_eq!(routing.bases, [0, 2, 6]);
        assert_eq!(routing.token_map, [0, 1, 2, -1]);
        assert_eq!(routing.slots[..6], [0, 2, 3, -1, 4, -1]);
        assert_eq!(routing.source_map, [0, -1, 1, 0]);
        let other = route(&Shape { rank: 1, ..SHAPE }, &indices).unwrap();
        assert_eq!(other.source_map, [2, -1, -1, 1]);
        assert_eq!(other.bases, [0, 2, 4]);
    }

    #[test]
    fn overflow_traps_or_drops() {
        let indices = [vec![1, 0, 3, 1], vec![1, 1, -1, 2]];
        let tight = Shape { capacity: 5, rows: 5, ..SHAPE };
        assert_eq!(route(&tight, &indices), Err(Overflow { rank: 0, rows: 6, tokens: 3 }));
        let dropped = route(&Shape { drop: true, capacity: 2, rows: 2, ..SHAPE }, &indices).unwrap();
        assert_eq!((dropped.received, dropped.arriving), (2, 3));
        assert_eq!(dropped.slots, [0, -1, -1, -1]);
        assert_eq!(dropped.published(0, 2), (2, 0));
        assert_eq!(dropped.published(1, 2), (0, 2));
        assert_eq!(dropped.total(), 6);
    }

    #[test]
    fn duplicates_give_the_same_maps_where_nothing_is_dropped() {
        let indices = [vec![1, 0, 3, 1], vec![1, 1, -1, 2]];
        for rank in 0..2 {
            let shape = Shape { rank, ..SHAPE };
            assert_eq!(route_duplicates(&shape, &indices), route(&shape, &indices));
        }
        // Zones of rank 0 begin at 0 and 2 and hold 1 and 3 rows; with 3 rows of room the first two tokens keep a row.
        let tight = Shape { drop: true, capacity: 3, rows: 3, ..SHAPE };
        let dropped = route_duplicates(&tight, &indices).unwrap();
        assert_eq!((dropped.received, dropped.arriving, dropped.total()), (1, 3, 6));
        assert_eq!(dropped.slots, [0, 2, -1, -1, -1, -1]);
        assert_eq!((dropped.token_map, dropped.source_map), (vec![0, -1, -1, -1], vec![0, -1, -1, 0]));
        // Rank 1 sees that rank 0 has no room.
        let narrow = Shape { capacity: 5, rows: 5, rank: 1, ..SHAPE };
        assert_eq!(route_duplicates(&narrow, &indices), Err(Overflow { rank: 0, rows: 6, tokens: 3 }));
    }
}
