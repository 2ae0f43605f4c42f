//! Who sends to whom: the routings that are timed, and what they amount to.

use crate::Outcome;
use crate::routing::{Problem, Routing};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A kind of routing. All have as many tokens on every rank, and no entry is masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Every expert is as likely as any other.
    Uniform,
    /// An expert is as likely as one over its place in a shuffled order.
    Zipf,
    /// One expert is in every token's choice, the others are as likely as each other.
    Hot,
    /// As recorded in the file of --routing-file.
    File,
}

impl Kind {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
            Self::Hot => "hot",
            Self::File => "file",
        }
    }
}

/// Recorded indices: a line a token, with the experts' numbers between commas or blanks; -1 masks an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded(Vec<Vec<i32>>);

impl Recorded {
    /// Reads a file.
    pub fn read(path: &Path) -> Outcome<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Self::parse(&text).map_err(|error| format!("{}: {error}", path.display()).into())
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut tokens = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let words = line.split([',', ' ', '\t', ';']).filter(|word| !word.is_empty());
            let token: Result<Vec<i32>, _> = words.map(|word| word.parse().map_err(|_| word.to_owned())).collect();
            match token {
                Ok(token) if token.is_empty() => {}
                Ok(token) => tokens.push(token),
                Err(word) => return Err(format!("line {}: {word:?} is no expert's number", number + 1)),
            }
        }
        if tokens.is_empty() { Err("no line names an expert".into()) } else { Ok(Self(tokens)) }
    }

    /// The routing of a rank, which takes the tokens in turn after those of the ranks before it.
    fn routing(&self, problem: &Problem, rank: usize) -> Outcome<Routing> {
        let (k, tokens) = (problem.top_k, problem.tokens);
        let mut experts = Vec::with_capacity(tokens * k);
        for row in 0..tokens {
            let token = &self.0[(rank * tokens + row) % self.0.len()];
            let Some(chosen) = token.get(..k) else {
                let found = token.len();
                return Err(
                    format!("--routing-file: a line must name at least --top-k experts, {k}, got {found}").into()
                );
            };
            if let Some(beyond) = chosen.iter().find(|&&expert| expert >= problem.experts as i32) {
                let all = problem.experts;
                return Err(format!("--routing-file: an index must be below --experts, {all}, got {beyond}").into());
            }
            experts.extend_from_slice(chosen);
        }
        Ok(Routing { rows: tokens, top_k: k, experts, weights: vec![1.0 / k as f32; tokens * k] })
    }
}

/// The routing of every rank.
pub fn routings(problem: &Problem, kind: Kind, recorded: Option<&Recorded>) -> Outcome<Vec<Routing>> {
    let ranks = 0..problem.ranks;
    match (kind, recorded) {
        (Kind::Uniform, _) => Ok(ranks.map(|rank| problem.uniform(rank)).collect()),
        (Kind::Zipf, _) => Ok(ranks.map(|rank| problem.zipf(rank)).collect()),
        (Kind::Hot, _) => Ok(ranks.map(|rank| problem.hot(rank)).collect()),
        (Kind::File, Some(recorded)) => ranks.map(|rank| recorded.routing(problem, rank)).collect(),
        (Kind::File, None) => Err("--routing file needs --routing-file".into()),
    }
}

/// What a routing amounts to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Rows of each expert, without padding.
    pub expert_rows: Vec<usize>,
    /// Rows that each rank receives, without padding.
    pub received: Vec<usize>,
    /// Rows of padding in each rank's slabs.
    pub padding: Vec<usize>,
    /// Rows that each rank sends to others: a token goes once to each of the ranks that its experts are on.
    pub sent: Vec<usize>,
}

impl Traffic {
    /// Of all ranks' routings.
    pub fn of(problem: &Problem, routings: &[Routing]) -> Self {
        let local = problem.local_experts();
        let mut expert_rows = vec![0; problem.experts];
        let mut sent = vec![0; problem.ranks];
        for (rank, routing) in routings.iter().enumerate() {
            for token in routing.experts.chunks(problem.top_k) {
                // A token that names an expert twice sends it one row.
                let mut named: Vec<usize> = token.iter().filter(|&&e| e >= 0).map(|&e| e as usize).collect();
                named.sort_unstable();
                named.dedup();
                named.iter().for_each(|&expert| expert_rows[expert] += 1);
                named.iter_mut().for_each(|expert| *expert /= local);
                named.dedup();
                sent[rank] += named.iter().filter(|&&to| to != rank).count();
            }
        }
        let of_rank = |count: &dyn Fn(usize) -> usize| -> Vec<usize> {
            expert_rows.chunks(local).map(|rows| rows.iter().map(|&rows| count(rows)).sum()).collect()
        };
        let received = of_rank(&|rows| rows);
        let padding = of_rank(&|rows| if rows == 0 { 0 } else { problem.padded(rows) - rows });
        Self { expert_rows, received, padding, sent }
    }

    /// Rows with padding of the rank that has most.
    pub fn demand(&self) -> usize {
        self.received.iter().zip(&self.padding).map(|(rows, padding)| rows + padding).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::tests::problem;

    #[test]
    fn rows_are_counted_once_for_each_expert_and_rank() {
        let problem = problem(2, 2, 2, 4, 4);
        let recorded = Recorded::parse("0,1\n0 2\n\n3;3\n-1 2\n").unwrap();
        let routings = routings(&problem, Kind::File, Some(&recorded)).unwrap();
        let traffic = Traffic::of(&problem, &routings);
        assert_eq!(traffic.expert_rows, [2, 1, 2, 1]);
        assert_eq!((traffic.received.clone(), traffic.padding.clone()), (vec![3, 3], vec![5, 5]));
        assert_eq!(traffic.sent, [1, 0]);
        assert_eq!(traffic.demand(), 8);
    }

    #[test]
    fn files_that_do_not_fit_are_refused() {
        assert_eq!(Recorded::parse("1,2\n3,x\n").unwrap_err(), "line 2: \"x\" is no expert's number");
        assert_eq!(Recorded::parse("\n").unwrap_err(), "no line names an expert");
        let refused = |text: &str| {
            let problem = problem(2, 2, 2, 4, 1);
            routings(&problem, Kind::File, Some(&Recorded::parse(text).unwrap())).unwrap_err().to_string()
        };
        assert_eq!(refused("1"), "--routing-file: a line must name at least --top-k experts, 2, got 1");
        assert_eq!(refused("1 4"), "--routing-file: an index must be below --experts, 4, got 4");
    }

    #[test]
    fn kinds_differ_in_how_uneven_they_are() {
        let problem = problem(2, 500, 2, 16, 1);
        let most = |kind| {
            let routings = routings(&problem, kind, None).unwrap();
            assert!(routings.iter().all(|routing| routing.live() == 1000));
            *Traffic::of(&problem, &routings).expert_rows.iter().max().unwrap()
        };
        let (uniform, zipf, hot) = (most(Kind::Uniform), most(Kind::Zipf), most(Kind::Hot));
        assert!(uniform < 200 && (300..900).contains(&zipf) && hot == 1000, "{uniform} {zipf} {hot}");
    }
}
