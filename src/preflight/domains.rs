//! NVLink domains: which ranks load and store each other's memory, what decides that, and what NCCL EP needs of it.
//!
//! NCCL cuts a communicator into domains of equal size: of as many ranks as divide the length of every run of consecutive ranks
//! on one machine, and no more than `NCCL_LSA_TEAM_SIZE` says. Within a domain NCCL EP loads and stores, between domains it needs
//! GIN. It describes a machine as one domain.

use super::{Lookup, RankLocation};
use crate::error::{Error, Result};
use crate::limits::{DOCUMENTED, DOMAINS};
use nvte_ep_bindings as b;
use std::fmt::Write;
use std::ops::RangeInclusive;

/// Most lines of a table in a message.
const MOST_LINES: usize = 16;

/// Name of a rank's machine, as far as Linux's longest host name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct MachineName([u64; 8]);

impl MachineName {
    pub(crate) fn new(name: &str) -> Self {
        let mut words = [0; 8];
        for (word, bytes) in words.iter_mut().zip(name.as_bytes().chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(whole);
        }
        Self(words)
    }

    pub(crate) const fn words(self) -> [u64; 8] {
        self.0
    }

    pub(crate) const fn from_words(words: [u64; 8]) -> Self {
        Self(words)
    }

    fn text(self) -> String {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Variables that keep ranks from reaching each other, and the values by which they do.
const SWITCHES: [(&str, &str); 3] = [("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "LOC"), ("NCCL_GIN_ENABLE", "0")];

/// What of a rank's environment bears on domains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Surroundings {
    /// `NCCL_LSA_TEAM_SIZE`; 0 where it is unset.
    pub(crate) team_size: u32,
    /// `NCCL_IB_TC`, the traffic class of its network, and one more; 0 where it is unset.
    pub(crate) traffic_class: u32,
    /// A bit for each of [`SWITCHES`] that is thrown.
    pub(crate) switches: u32,
}

impl Surroundings {
    pub(crate) fn of(env: Lookup<'_>) -> Self {
        let number = |name: &str| env(name).and_then(|value| value.to_str()?.trim().parse::<u32>().ok());
        let thrown = |(index, (name, value)): (usize, &(&str, &str))| {
            u32::from(env(name).is_some_and(|found| found == *value)) << index
        };
        Self {
            team_size: number("NCCL_LSA_TEAM_SIZE").unwrap_or(0),
            traffic_class: number("NCCL_IB_TC").map_or(0, |class| class.saturating_add(1)),
            switches: SWITCHES.iter().enumerate().map(thrown).sum(),
        }
    }

    pub(crate) fn switched_off(self) -> Vec<&'static str> {
        (0..SWITCHES.len()).filter(|index| self.switches >> index & 1 == 1).map(|index| SWITCHES[index].0).collect()
    }
}

/// Number of domains; 1 where NCCL does not tell.
pub(crate) fn count(places: &[RankLocation]) -> usize {
    places.iter().map(|place| place.domains as usize).max().unwrap_or(0).max(1)
}

/// # Errors
/// Domains that NCCL EP cannot take, with what made them; the same on every rank.
pub(crate) fn check(places: &[RankLocation], undocumented: bool) -> Result<()> {
    let domains = count(places);
    if domains == 1 {
        return Ok(());
    }
    if domains > machines(places) {
        return Err(split(places));
    }
    network(places)?;
    if domains > DOMAINS {
        return Err(Error::Preflight {
            problem: format!("the communicator has {domains} NVLink domains, and NCCL EP takes at most {DOMAINS}"),
            remedy: "make groups of fewer machines (ncclCommSplit)".into(),
        });
    }
    let size = places.len() / domains;
    if undocumented || domains.max(size) <= DOCUMENTED {
        return Ok(());
    }
    Err(Error::Preflight {
        problem: format!("the communicator has {domains} NVLink domains of {size} ranks, and NCCL EP documents 8 of 8"),
        remedy: "set the option undocumented_scale to on to try more".into(),
    })
}

/// What the ranks had better look at, where all of them may go on.
pub(crate) fn warnings(places: &[RankLocation]) -> Vec<String> {
    let mut all = Vec::new();
    if count(places) == 1 {
        return all;
    }
    let odd = places.iter().position(|place| place.surroundings.traffic_class != places[0].surroundings.traffic_class);
    if let Some(rank) = odd {
        let name = |rank: usize| match places[rank].surroundings.traffic_class {
            0 => "unset".to_owned(),
            class => (class - 1).to_string(),
        };
        all.push(format!(
            "NCCL_IB_TC, the traffic class of the network, is {} on rank {rank} and {} on rank 0: only one of them can be the \
             lossless class of a RoCE network",
            name(rank),
            name(0)
        ));
    }
    if places.iter().any(|place| place.gin == b::NCCL_GIN_TYPE_PROXY) {
        all.push(
            "GIN goes through a thread of the processor (type 2, proxy), which is slower than GDAKI (type 3); \
             NCCL_DEBUG=INFO says why NCCL chose it"
                .into(),
        );
    }
    all
}

/// Why the native engine, which works within one domain, cannot have these.
pub(crate) fn beyond_one(places: &[RankLocation]) -> Option<String> {
    let domains = count(places);
    (domains > 1).then(|| format!("{domains}{}", table(places)))
}

fn machines(places: &[RankLocation]) -> usize {
    let mut hosts: Vec<u64> = places.iter().map(|place| place.host).collect();
    hosts.sort_unstable();
    hosts.dedup();
    hosts.len()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Ranks of a domain by the rule above, with what tells machines apart.
fn domain_size<Key: PartialEq>(places: &[RankLocation], key: impl Fn(&RankLocation) -> Key, team: u32) -> usize {
    let size = places.chunk_by(|a, b| key(a) == key(b)).map(<[_]>::len).fold(0, gcd);
    gcd(size, team as usize)
}

/// The error of a machine in several domains, which names what cut it: what, taken away, would make it one.
fn split(places: &[RankLocation]) -> Error {
    let (domains, machines) = (count(places), machines(places));
    let enough = |size: usize| places.len() / size <= machines;
    let seen = |place: &RankLocation| (place.host, place.name);
    let team = places.iter().map(|place| place.surroundings.team_size).find(|size| *size > 0).unwrap_or(0);
    let mut counts = Vec::new();
    for place in places {
        let of_host = places.iter().filter(|other| other.host == place.host).count();
        if !counts.contains(&of_host) {
            counts.push(of_host);
        }
    }
    let (cause, remedy) = if places.len() / domain_size(places, seen, team) < domains {
        let remedy = "use GPUs with peer access (nvidia-smi topo -m), let every process see all of them, and leave \
                      NCCL_P2P_DISABLE and NCCL_P2P_LEVEL unset";
        ("ranks of one machine do not reach each other's memory".to_owned(), remedy)
    } else if enough(domain_size(places, seen, 0)) {
        (format!("NCCL_LSA_TEAM_SIZE={team} cuts the machines"), "unset NCCL_LSA_TEAM_SIZE on every rank")
    } else if enough(domain_size(places, |place| place.host, 0)) {
        let other = places.windows(2).find(|pair| pair[0].host == pair[1].host && pair[0].name != pair[1].name);
        let [first, second] =
            other.map_or([String::new(), String::new()], |pair| [pair[0], pair[1]].map(|p| p.name.text()));
        let cause = format!("one machine has the host names {first} and {second}, and NCCL takes it for two");
        (cause, "start all ranks of a machine in one pod, or in pods with the host's network and name")
    } else if counts.len() == 1 {
        let cause = "the ranks of a machine do not follow each other".to_owned();
        (cause, "number the ranks machine by machine (mpirun --map-by ppr:8:node, srun --distribution=block)")
    } else {
        let counts: Vec<String> = counts.iter().map(ToString::to_string).collect();
        let cause = format!("the machines have {} ranks, and domains are of one size", counts.join(" and "));
        (cause, "start as many ranks on every machine, one machine after the other")
    };
    Error::Preflight {
        problem: format!(
            "the communicator has {domains} NVLink domains on {machines} machine{}, and NCCL EP needs all ranks of a machine in \
             one: {cause}{}",
            if machines == 1 { "" } else { "s" },
            table(places)
        ),
        remedy: remedy.into(),
    }
}

/// # Errors
/// No network that kernels use between the domains, or not the same one on all ranks.
fn network(places: &[RankLocation]) -> Result<()> {
    let domains = count(places);
    if let Some((rank, place)) = places.iter().enumerate().find(|(_, place)| place.gin == b::NCCL_GIN_TYPE_NONE) {
        let off = place.surroundings.switched_off();
        let remedy = "use GPUs of one NVLink domain (between machines that takes a running IMEX service), or network \
                      adapters that GIN supports; NCCL_DEBUG=INFO says what it found";
        return Err(Error::Preflight {
            problem: format!(
                "the ranks are in {domains} NVLink domains, and NCCL has no GPU-initiated network (GIN) between them on rank \
                 {rank}{}",
                table(places)
            ),
            remedy: if off.is_empty() { remedy.into() } else { format!("unset {}", off.join(" and ")) },
        });
    }
    let Some(rank) = places.iter().position(|place| place.gin != places[0].gin) else { return Ok(()) };
    let name = |gin: u32| match gin {
        b::NCCL_GIN_TYPE_PROXY => "2, proxy".to_owned(),
        b::NCCL_GIN_TYPE_GDAKI => "3, GDAKI".to_owned(),
        b::NCCL_GIN_TYPE_GPI => "4, GPI".to_owned(),
        other => other.to_string(),
    };
    Err(Error::Preflight {
        problem: format!(
            "the ranks are in {domains} NVLink domains, and GIN between them is of type {} on rank {rank}, and of type {} on \
             rank 0",
            name(places[rank].gin),
            name(places[0].gin)
        ),
        remedy: "set NCCL_GIN_TYPE to the same number on every rank, one that all machines' adapters support".into(),
    })
}

/// Which ranks are on which machine and in which domain, a line for those that follow each other there.
fn table(places: &[RankLocation]) -> String {
    let size = (places.len() / count(places)).max(1);
    let place = |rank: usize| (places[rank].host, places[rank].name, rank / size);
    let mut lines: Vec<RangeInclusive<usize>> = Vec::new();
    for rank in 0..places.len() {
        match lines.last_mut() {
            Some(line) if place(*line.start()) == place(rank) => *line = *line.start()..=rank,
            _ => lines.push(rank..=rank),
        }
    }
    let mut text = " (rank: machine, domain".to_owned();
    for line in lines.iter().take(MOST_LINES) {
        let (first, last) = (*line.start(), *line.end());
        let ranks = if first == last { first.to_string() } else { format!("{first}-{last}") };
        let _ = write!(text, "; {ranks}: {}, {}", places[first].name.text(), first / size);
    }
    if lines.len() > MOST_LINES {
        text += "; ...";
    }
    text + ")"
}

#[cfg(test)]
mod tests {
    use super::super::location::tests::location;
    use super::*;
    use std::ffi::OsString;

    /// Ranks on the machines of these numbers, in as many domains as NCCL would make of them, with GDAKI.
    fn ranks(machines: &[u64]) -> Vec<RankLocation> {
        let place = |(rank, machine): (usize, &u64)| RankLocation {
            name: MachineName::new(&format!("node{machine}")),
            gin: b::NCCL_GIN_TYPE_GDAKI,
            ..location(*machine, rank as u64)
        };
        as_nccl_cuts(machines.iter().enumerate().map(place).collect())
    }

    fn as_nccl_cuts(mut places: Vec<RankLocation>) -> Vec<RankLocation> {
        let team = places[0].surroundings.team_size;
        let domains = places.len() / domain_size(&places, |place| (place.host, place.name), team);
        places.iter_mut().for_each(|place| place.domains = domains as u32);
        places
    }

    fn refused(places: &[RankLocation]) -> String {
        check(places, false).unwrap_err().to_string()
    }

    fn change(places: &[RankLocation], change: impl Fn(usize, &mut RankLocation)) -> Vec<RankLocation> {
        let mut places = places.to_vec();
        places.iter_mut().enumerate().for_each(|(rank, place)| change(rank, place));
        places
    }

    #[test]
    fn one_domain_needs_nothing() {
        check(&change(&ranks(&[1; 8]), |_, place| place.gin = 0), false).unwrap();
        // An NVL72 rack: machines in one domain.
        let rack: Vec<u64> = (0..72).map(|rank| rank / 4).collect();
        check(&change(&ranks(&rack), |rank, place| (place.domains, place.gin) = (1, rank as u32)), false).unwrap();
        // NCCL does not tell.
        check(&change(&ranks(&[1, 2]), |_, place| (place.domains, place.gin) = (0, 0)), false).unwrap();
    }

    #[test]
    fn what_cuts_a_machine_is_named() {
        let table = "(rank: machine, domain; 0: node0, 0; 1: node1, 1; 2: node0, 2; 3: node1, 3)";
        assert_eq!(
            refused(&ranks(&[0, 1, 0, 1])),
            format!(
                "the communicator has 4 NVLink domains on 2 machines, and NCCL EP needs all ranks of a machine in one: the \
                 ranks of a machine do not follow each other {table}; number the ranks machine by machine (mpirun --map-by \
                 ppr:8:node, srun --distribution=block)"
            )
        );
        let text = refused(&ranks(&[0, 0, 0, 1, 1, 1, 1, 1]));
        assert!(text.contains("has 8 NVLink domains on 2 machines"), "{text}");
        assert!(text.contains("in one: the machines have 3 and 5 ranks, and domains are of one size (rank"), "{text}");
        let text = refused(&ranks(&[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]));
        assert!(text.contains("has 3 NVLink domains") && text.contains("4-7: node1, 1; 8-11: node1, 2)"), "{text}");
        let cut = change(&ranks(&[0, 0, 0, 0, 1, 1, 1, 1]), |_, place| place.surroundings.team_size = 2);
        let text = refused(&as_nccl_cuts(cut));
        assert!(
            text.contains("has 4 NVLink") && text.contains("in one: NCCL_LSA_TEAM_SIZE=2 cuts the machines"),
            "{text}"
        );
        let pods = change(&ranks(&[0; 4]), |rank, place| place.name = MachineName::new(&format!("pod-{rank}")));
        let text = refused(&as_nccl_cuts(pods));
        assert!(
            text.contains("4 NVLink domains on 1 machine, ") && text.contains("names pod-0 and pod-1, and"),
            "{text}"
        );
        let apart = change(&ranks(&[0; 4]), |_, place| place.domains = 2);
        assert!(refused(&apart).contains("in one: ranks of one machine do not reach each other's memory (rank"));
    }

    #[test]
    fn several_domains_need_one_network() {
        let both = ranks(&[0, 0, 1, 1]);
        check(&both, false).unwrap();
        let text = refused(&change(&both, |rank, place| place.gin = if rank == 2 { 0 } else { 3 }));
        assert!(
            text.starts_with(
                "the ranks are in 2 NVLink domains, and NCCL has no GPU-initiated network (GIN) between them on rank 2 (rank: \
                 machine, domain; 0-1: node0, 0; 2-3: node1, 1); use GPUs of one"
            ),
            "{text}"
        );
        let off = change(&both, |_, place| (place.gin, place.surroundings.switches) = (0, 0b101));
        assert!(refused(&off).ends_with("; unset NCCL_P2P_DISABLE and NCCL_GIN_ENABLE"), "{}", refused(&off));
        let text = refused(&change(&both, |rank, place| place.gin = if rank < 2 { 3 } else { 2 }));
        assert!(
            text.contains("GIN between them is of type 2, proxy on rank 2, and of type 3, GDAKI on rank 0"),
            "{text}"
        );
    }

    #[test]
    fn more_than_is_documented_takes_an_option() {
        let nine: Vec<u64> = (0..9).collect();
        let wide: Vec<u64> = (0..32).map(|rank| rank / 16).collect();
        for machines in [nine, wide] {
            let places = ranks(&machines);
            assert!(
                refused(&places).ends_with("documents 8 of 8; set the option undocumented_scale to on to try more")
            );
            check(&places, true).unwrap();
        }
        let documented: Vec<u64> = (0..64).map(|rank| rank / 8).collect();
        check(&ranks(&documented), false).unwrap();
        let many: Vec<u64> = (0..34).collect();
        let text = check(&ranks(&many), true).unwrap_err().to_string();
        assert!(
            text.starts_with("the communicator has 34 NVLink domains, and NCCL EP takes at most 33; make"),
            "{text}"
        );
    }

    #[test]
    fn what_may_be_slow_or_lossy_is_warned_of() {
        let both = ranks(&[0, 1]);
        assert_eq!(warnings(&both), [""; 0]);
        let class = change(&both, |rank, place| place.surroundings.traffic_class = rank as u32 * 107);
        let text = "NCCL_IB_TC, the traffic class of the network, is 106 on rank 1 and unset on rank 0: only one";
        assert!(warnings(&class)[0].starts_with(text), "{:?}", warnings(&class));
        let proxy = change(&both, |_, place| place.gin = b::NCCL_GIN_TYPE_PROXY);
        assert!(warnings(&proxy)[0].contains("type 2, proxy"));
        assert_eq!(warnings(&change(&class, |_, place| place.domains = 1)), [""; 0], "no network is used");
    }

    #[test]
    fn the_environment_is_read_and_names_survive() {
        let values =
            [("NCCL_LSA_TEAM_SIZE", "4"), ("NCCL_IB_TC", " 106"), ("NCCL_P2P_LEVEL", "LOC"), ("NCCL_GIN_ENABLE", "1")];
        let env = |name: &str| values.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value));
        let found = Surroundings::of(&env);
        assert_eq!(found, Surroundings { team_size: 4, traffic_class: 107, switches: 0b010 });
        assert_eq!(found.switched_off(), ["NCCL_P2P_LEVEL"]);
        let name = "a-name-of-sixty-four-letters-as-long-as-linux-takes-them-0123456";
        assert_eq!(MachineName::from_words(MachineName::new(name).words()).text(), name);
        assert_eq!(MachineName::new("").text(), "");
        let cyclic: Vec<u64> = (0..20).map(|rank| rank % 2).collect();
        assert!(table(&ranks(&cyclic)).ends_with("; 15: node1, 15; ...)"));
    }
}
