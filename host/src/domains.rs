//! Machines that a test asks for: which rank is on which, and the NVLink domains that NCCL would make of them.
//!
//! A domain has as many ranks as divide the length of every run of consecutive ranks on one machine, and
//! NCCL's own variable cuts it further. So ranks that are dealt out in turn, or 3 and 5 ranks a machine, have a domain each.

use std::sync::LazyLock;

/// How many ranks each simulated machine has.
pub const VARIABLE: &str = "NVTE_EP_HOST_DOMAINS";
/// NCCL's own variable for the most ranks of a domain.
const TEAM_SIZE_VARIABLE: &str = "NCCL_LSA_TEAM_SIZE";
/// As many ranks as a communicator may have.
const MOST: usize = 1024;

/// How ranks are given to machines.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Machines {
    /// All on this one.
    One,
    /// One machine after the other, each with so many; the last number holds for all that follow.
    InOrder(Vec<usize>),
    /// In turn to machines that have so many each.
    Cyclic(usize),
}

impl Machines {
    fn parse(text: &str) -> Result<Self, String> {
        let number = |part: &str| part.trim().parse().ok().filter(|number| (1..=MOST).contains(number));
        let parsed = match text.strip_prefix("cyclic:") {
            Some(each) => number(each).map(Self::Cyclic),
            None => text.split('+').map(number).collect::<Option<Vec<_>>>().map(Self::InOrder),
        };
        parsed.ok_or_else(|| {
            let forms = "a number of ranks a machine (4), one for each machine (3+5), or cyclic:4";
            format!("{VARIABLE} must be {forms}, got {text:?}")
        })
    }

    fn of(&self, rank: usize, ranks: usize) -> usize {
        match self {
            Self::One => 0,
            Self::Cyclic(each) => rank % ranks.div_ceil(*each),
            Self::InOrder(sizes) => {
                let mut end = 0;
                let each = sizes.iter().copied().chain(std::iter::repeat(sizes[sizes.len() - 1]));
                let begins_after = |size: usize| {
                    end += size;
                    end <= rank
                };
                each.map(begins_after).take_while(|after| *after).count()
            }
        }
    }

    fn domain_size(&self, ranks: usize, team: Option<usize>) -> usize {
        let machines: Vec<usize> = (0..ranks).map(|rank| self.of(rank, ranks)).collect();
        let size = machines.chunk_by(|a, b| a == b).map(<[usize]>::len).fold(0, gcd);
        team.map_or(size, |team| gcd(size, team))
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

static MACHINES: LazyLock<Result<Machines, String>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    if text.trim().is_empty() { Ok(Machines::One) } else { Machines::parse(text.trim()) }
});

/// Fails with what is wrong with the variable.
pub fn readable() -> Result<(), String> {
    MACHINES.as_ref().map(drop).map_err(Clone::clone)
}

/// The number of the simulated machine of a rank; nothing where all are on this one.
pub fn machine(rank: usize, ranks: usize) -> Option<usize> {
    MACHINES.as_ref().ok().filter(|machines| **machines != Machines::One).map(|machines| machines.of(rank, ranks))
}

/// Ranks of a domain of a communicator of `ranks`.
pub fn size(ranks: usize) -> usize {
    let team =
        std::env::var(TEAM_SIZE_VARIABLE).ok().and_then(|text| text.trim().parse().ok()).filter(|team| *team > 0);
    MACHINES.as_ref().map_or(ranks, |machines| machines.domain_size(ranks, team))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machines(text: &str, ranks: usize) -> Vec<usize> {
        let machines = Machines::parse(text).unwrap();
        (0..ranks).map(|rank| machines.of(rank, ranks)).collect()
    }

    #[test]
    fn ranks_are_given_to_machines() {
        assert_eq!(machines("4", 8), [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(machines("3+5", 8), [0, 0, 0, 1, 1, 1, 1, 1]);
        assert_eq!(machines("1+2", 5), [0, 1, 1, 2, 2]);
        assert_eq!(machines("cyclic:2", 5), [0, 1, 2, 0, 1]);
        for text in ["0", "4+", "cyclic", "cyclic:0", "1025", "two"] {
            let error = Machines::parse(text).unwrap_err();
            assert!(error.starts_with("NVTE_EP_HOST_DOMAINS must be a number of ranks a machine (4)"), "{error}");
        }
    }

    #[test]
    fn a_domain_has_what_divides_all_runs() {
        let size = |text: &str, ranks, team| Machines::parse(text).unwrap().domain_size(ranks, team);
        assert_eq!((size("4", 8, None), size("8", 8, None)), (4, 8));
        assert_eq!((size("3+5", 8, None), size("cyclic:4", 8, None)), (1, 1));
        assert_eq!((size("4+8", 12, None), size("4", 6, None)), (4, 2));
        assert_eq!((size("4", 8, Some(2)), Machines::One.domain_size(8, Some(4))), (2, 4));
        assert_eq!(Machines::One.domain_size(6, None), 6);
    }
}
