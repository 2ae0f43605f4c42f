//! Where each rank runs and what it has there, and the rules that only all of it decides.

use super::Lookup;
use super::domains::{MachineName, Surroundings};
use super::variables;
use crate::config::{GroupConfig, RecvCapacity};
use crate::error::{Error, Result};
use crate::memory::GroupMemory;
use crate::sys::nccl::CommFacts;

/// Where one rank runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankLocation {
    /// The same for ranks of one machine only.
    pub(crate) host: u64,
    /// By which NCCL tells it from others, too.
    pub(crate) name: MachineName,
    /// The same for ranks on one device of a machine only.
    pub(crate) device: u64,
    /// Streaming multiprocessors of the device.
    pub(crate) sm_count: u32,
    /// Bytes free on the device; the largest number where that is not known.
    pub(crate) free: u64,
    /// NVLink domains of the communicator; 0 where NCCL does not tell.
    pub(crate) domains: u32,
    /// Most blocks of dispatch that the rank's NCCL EP has barriers for.
    pub(crate) dispatch_blocks: u32,
    /// The network between domains, `NCCL_GIN_TYPE_...`.
    pub(crate) gin: u32,
    /// Its environment, as far as domains depend on it.
    pub(crate) surroundings: Surroundings,
}

impl RankLocation {
    /// Words of a statement that hold it.
    pub(crate) fn words(&self) -> Vec<u64> {
        let Surroundings { team_size, traffic_class, switches } = self.surroundings;
        let small = [self.sm_count, self.domains, self.dispatch_blocks, self.gin, team_size, traffic_class, switches];
        let large = [self.host, self.device, self.free].into_iter().chain(self.name.words());
        large.chain(small.map(u64::from)).collect()
    }

    /// What [`RankLocation::words`] made.
    pub(crate) fn from_words(words: &[u64]) -> Self {
        let Some((&[host, device, free], rest)) = words.split_first_chunk() else {
            unreachable!("as many words as a place has were asked for");
        };
        let Some((name, &[sm_count, domains, dispatch_blocks, gin, team_size, traffic_class, switches])) =
            rest.split_first_chunk()
        else {
            unreachable!("as many words as a place has were asked for");
        };
        let small = |word: u64| word as u32;
        Self {
            host,
            name: MachineName::from_words(*name),
            device,
            free,
            sm_count: small(sm_count),
            domains: small(domains),
            dispatch_blocks: small(dispatch_blocks),
            gin: small(gin),
            surroundings: Surroundings {
                team_size: small(team_size),
                traffic_class: small(traffic_class),
                switches: small(switches),
            },
        }
    }
}

/// How many ranks are where `place` is.
pub(super) fn sharing(places: &[RankLocation], place: &RankLocation) -> u32 {
    places.iter().filter(|p| (p.host, p.device) == (place.host, place.device)).count() as u32
}

/// # Errors
/// More memory than is free on a rank's device: NCCL EP ends the process where its allocation fails.
pub(crate) fn device_memory(config: &GroupConfig, places: &[RankLocation]) -> Result<()> {
    let domains = super::domains::count(places) as u32;
    let wanted = GroupMemory::of(config, domains).total();
    let short = |place: &RankLocation| u64::from(sharing(places, place)).saturating_mul(wanted) > place.free;
    let Some((rank, place)) = places.iter().enumerate().find(|(_, place)| short(place)) else { return Ok(()) };
    let [rows, scales, weights, between] = GroupMemory::staging_parts(config, domains);
    let (part, bytes) = if between > rows.max(scales).max(weights) {
        ("what goes to other NVLink domains", between)
    } else if rows >= scales.max(weights) {
        ("rows on their way", rows)
    } else if scales >= weights {
        ("scales of received rows", scales)
    } else {
        ("weights", weights)
    };
    let sharing = match sharing(places, place) {
        1 => String::new(),
        ranks => format!(" for each of its {ranks} ranks"),
    };
    let remedy = match config.recv_capacity {
        RecvCapacity::Eager => format!(
            "eager mode sizes them for {} rows a rank, which is every token of every rank num_topk times: pass an \
             explicit max_recv_tokens_per_rank, or lower max_tokens_per_rank or hidden_dim",
            config.internal_rows()
        ),
        RecvCapacity::Fixed(_) if bytes == between => "lower max_tokens_per_rank or hidden_dim".into(),
        RecvCapacity::Fixed(_) if bytes == rows => {
            "lower max_tokens_per_rank or hidden_dim, or use zero_copy, which has no such rows".into()
        }
        RecvCapacity::Fixed(rows) => format!("lower max_recv_tokens_per_rank, {rows}, or hidden_dim"),
    };
    Err(Error::Preflight {
        problem: format!(
            "the group takes {wanted} bytes of device memory{sharing} ({bytes} of them for {part}), and rank {rank}'s \
             device has {} free",
            place.free
        ),
        remedy,
    })
}

/// Barriers of NCCL EP's communicator on the device, one for each of 16 blocks of dispatch and one for combine. Blocks
/// beyond them use words behind; see [`dispatch_blocks`].
const BARRIERS: u32 = 17;

/// Most blocks of dispatch of NCCL EP builds with API 2 (nccl-extensions 0.1.0), where ranks reach each other by load and
/// store. Block i keeps its count of rounds in word 17 + i of a buffer whose words 34 to 50 are not used and whose words
/// from 51 on are where peers announce theirs. From the 35th block on the two are the same words, and the first step
/// never ends (seen with 40, 48 and 64; 32 and 33 work). Builds with API 3 make as many barriers as they need.
pub(crate) const fn dispatch_blocks(enough_barriers: bool) -> u32 {
    if enough_barriers { u32::MAX } else { 2 * BARRIERS }
}

/// Streaming multiprocessors for communication when the caller leaves the choice: more give no more speed on one
/// NVLink domain (TransformerEngine takes the same).
const AUTO_SMS: u32 = 32;

/// Most blocks that wait for each other on every device: all of one device's ranks must be resident together.
fn most_resident(places: &[RankLocation]) -> u32 {
    places.iter().map(|place| place.sm_count / sharing(places, place)).min().unwrap_or(AUTO_SMS)
}

/// A number of multiprocessors for kernels whose blocks wait for each other. `field` names it in the message.
///
/// # Errors
/// More than there are for each rank.
pub(crate) fn resident_cap(argument: &str, requested: u32, places: &[RankLocation]) -> Result<u32> {
    let most = most_resident(places);
    if requested <= most {
        return Ok(requested);
    }
    let busiest =
        places.iter().max_by_key(|place| sharing(places, place)).map_or((0, 0), |p| (p.sm_count, sharing(places, p)));
    let required = match busiest {
        (_, 1) => format!("must be at most {most}, as the smallest device has no more multiprocessors"),
        (sm_count, ranks) => {
            format!("must be at most {most} where {ranks} ranks share one device of {sm_count} multiprocessors")
        }
    };
    Err(Error::argument(argument, required, requested)
        .with_remedy("leave it automatic; more would hang the first step"))
}

/// The number of multiprocessors for a group of our own kernels, equal on every rank.
///
/// # Errors
/// As [`resident_cap`].
pub(crate) fn resident_sms(argument: &str, requested: Option<u32>, places: &[RankLocation]) -> Result<u32> {
    match requested {
        Some(requested) => resident_cap(argument, requested, places),
        None => Ok(AUTO_SMS.min(most_resident(places)).max(1)),
    }
}

/// The number of multiprocessors for kernels that take all that a rank has where it is not said, equal on every rank.
///
/// # Errors
/// As [`resident_cap`].
pub(crate) fn most_of_device(argument: &str, requested: Option<u32>, places: &[RankLocation]) -> Result<u32> {
    requested.map_or_else(|| Ok(most_resident(places).max(1)), |count| resident_cap(argument, count, places))
}

/// # Errors
/// A rank's device that has less than `bytes` free for each of its ranks.
pub(crate) fn room_for(bytes: u64, places: &[RankLocation]) -> Result<()> {
    let short = |place: &RankLocation| u64::from(sharing(places, place)).saturating_mul(bytes) > place.free;
    let Some((rank, place)) = places.iter().enumerate().find(|(_, place)| short(place)) else { return Ok(()) };
    let (free, ranks) = (place.free, sharing(places, place));
    Err(Error::Preflight {
        problem: format!(
            "the group takes {bytes} bytes of device memory on each rank, and rank {rank}'s device, which {ranks} of the ranks \
             use, has {free} free"
        ),
        remedy: "lower hidden_dim, max_tokens_per_rank or the number of multiprocessors".into(),
    })
}

/// The number of multiprocessors for dispatch, equal on every rank, and of combine where it has no other. `field` names
/// it in the message.
///
/// # Errors
/// An explicit number beyond a device's count, or beyond NCCL EP's barriers.
pub(crate) fn sm_cap(argument: &str, requested: Option<u32>, places: &[RankLocation]) -> Result<u32> {
    let Some(requested) = requested else { return Ok(AUTO_SMS.min(most_resident(places)).max(1)) };
    let blocks = places.iter().map(|place| place.dispatch_blocks).min().unwrap_or(u32::MAX);
    resident_cap(argument, requested, places)?;
    if requested <= blocks || places.len() < 2 {
        return Ok(requested);
    }
    Err(Error::argument(argument, format!("must be at most {blocks} with this NCCL EP"), requested).with_remedy(format!(
        "it has barriers for no more blocks, and the first step would never end; leave it automatic, {AUTO_SMS}, beyond \
         which nothing is gained on one NVLink domain"
    )))
}

/// The counts that NCCL EP's own variables ask for, which it takes before the group's.
///
/// # Errors
/// As [`sm_cap`] and [`resident_cap`].
pub(crate) fn variables_fit(env: Lookup<'_>, places: &[RankLocation]) -> Result<()> {
    for name in variables::DISPATCH_COUNTS {
        if let Some(count) = variables::count(name, env)? {
            sm_cap(name, Some(count), places)?;
        }
    }
    if let Some(count) = variables::count(variables::COMBINE_SMS, env)? {
        resident_cap(variables::COMBINE_SMS, count, places)?;
    }
    Ok(())
}

/// Blocks for one of the kernels that work on a rank alone, the permutation or the scan, whose variable is `name`; none
/// leaves the choice to NCCL EP, which takes no more than for communication. A rank that has its device for itself gets all
/// of it, as in TransformerEngine. Blocks wait for each other, and where ranks share a device the others' kernels wait on
/// it too, so a number that some library of this process left in the environment is lowered to what there is room for.
pub(crate) fn local_sms(name: &str, env: Lookup<'_>, places: &[RankLocation], own: &RankLocation) -> Option<u32> {
    let most = most_resident(places);
    match variables::count(name, env).ok().flatten() {
        Some(count) if count > most => {
            let text = format!(
                "{name}={count} is more than {most}, the multiprocessors that a rank has for itself here: {most} are used"
            );
            tracing::warn!(target: "nvte_ep", "{text}");
            Some(most)
        }
        Some(count) => Some(count),
        None => (sharing(places, own) == 1).then_some(own.sm_count),
    }
}

/// What the communicator says of this rank's memory, and why NCCL EP cannot use it. What there is between domains all ranks
/// look at together ([`super::domains`]).
///
/// # Errors
/// No symmetric memory.
pub(crate) fn links(facts: &CommFacts, env: Lookup<'_>) -> Result<()> {
    for name in ["NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE"] {
        if env(name).is_some_and(|value| value == "0") {
            return Err(Error::Preflight {
                problem: format!("{name}=0 takes NCCL's symmetric memory away, in which NCCL EP's buffers lie"),
                remedy: format!("unset {name}, before the communicator is made"),
            });
        }
    }
    let off = Surroundings::of(env).switched_off();
    let Some(links) = facts.links else {
        off.iter()
            .for_each(|name| tracing::warn!(target: "nvte_ep", "{name} may keep the ranks from reaching each other"));
        return Ok(());
    };
    if links.device_api {
        return Ok(());
    }
    let remedy = "NCCL needs GPUs with peer access to each other (NVLink; nvidia-smi topo -m), the driver's virtual memory \
                  functions, and between machines GIN; NCCL_DEBUG=INFO says which is missing";
    Err(Error::Preflight {
        problem: "this communicator has no symmetric memory, in which NCCL EP's buffers lie".into(),
        remedy: if off.is_empty() { remedy.into() } else { format!("unset {}", off.join(" and ")) },
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::config::GroupRequest;
    use crate::config::tests::REQUEST;
    use crate::sys::nccl::Links;
    use std::ffi::OsString;

    /// An idle device of an H200's size, with NCCL EP of API 2.
    pub(in super::super) fn location(host: u64, device: u64) -> RankLocation {
        RankLocation {
            host,
            device,
            sm_count: 132,
            free: 139 << 30,
            domains: 1,
            dispatch_blocks: dispatch_blocks(false),
            name: MachineName::default(),
            gin: 0,
            surroundings: Surroundings::default(),
        }
    }

    #[test]
    fn a_place_survives_the_exchange() {
        let surroundings = Surroundings { team_size: 4, traffic_class: 107, switches: 5 };
        let own = RankLocation { free: u64::MAX, dispatch_blocks: u32::MAX, ..location(u64::MAX - 1, 3 << 32) };
        let own = RankLocation { name: MachineName::new("node-7.example"), gin: 3, surroundings, ..own };
        assert_eq!(RankLocation::from_words(&own.words()), own);
    }

    #[test]
    fn multiprocessors_are_shared_out() {
        let apart: Vec<_> = (0..8).map(|device| location(1, device)).collect();
        let (two, eight) = (vec![location(1, 0); 2], vec![location(1, 0); 8]);
        assert_eq!(sm_cap("max_num_sms", None, &apart).unwrap(), 32);
        assert_eq!(sm_cap("max_num_sms", None, &two).unwrap(), 32);
        assert_eq!(sm_cap("max_num_sms", None, &eight).unwrap(), 16);
        let text = sm_cap("max_num_sms", Some(32), &eight).unwrap_err().to_string();
        assert!(
            text.contains("must be at most 16 where 8 ranks share one device of 132 multiprocessors, got 32"),
            "{text}"
        );
        let text = sm_cap("max_num_sms", Some(133), &apart).unwrap_err().to_string();
        assert!(text.starts_with("max_num_sms must be at most 132, as the smallest device has no more"), "{text}");
        assert_eq!(resident_cap("preprocess_sms", 66, &two).unwrap(), 66);
        assert!(resident_cap("preprocess_sms", 67, &two).is_err());
    }

    /// Measured on two H200: 8, 32 and 33 work; 40, 48 and 64 never end.
    #[test]
    fn dispatch_has_no_more_blocks_than_barriers_serve() {
        let two: Vec<_> = (0..2).map(|device| location(1, device)).collect();
        for works in [8, 32, 33] {
            assert_eq!(sm_cap("max_num_sms", Some(works), &two).unwrap(), works);
        }
        for hangs in [35, 40, 48, 64, 132] {
            let text = sm_cap("max_num_sms", Some(hangs), &two).unwrap_err().to_string();
            let start = format!("max_num_sms must be at most 34 with this NCCL EP, got {hangs}; it has barriers");
            assert!(text.starts_with(&start), "{text}");
        }
        // No other rank waits for the blocks, or there is a barrier for each.
        assert_eq!(sm_cap("max_num_sms", Some(132), &two[..1]).unwrap(), 132);
        let newer: Vec<_> = two.iter().map(|p| RankLocation { dispatch_blocks: dispatch_blocks(true), ..*p }).collect();
        assert_eq!(sm_cap("max_num_sms", Some(132), &newer).unwrap(), 132);
        // One rank's older build is enough to make it hang.
        assert!(sm_cap("max_num_sms", Some(48), &[newer[0], two[1]]).is_err());
    }

    #[test]
    fn nccl_eps_own_counts_follow_the_same_rules() {
        let two: Vec<_> = (0..2).map(|device| location(1, device)).collect();
        let env = |name: &'static str, value: &'static str| move |asked: &str| (asked == name).then(|| value.into());
        let fit =
            |name, value, places: &[RankLocation]| variables_fit(&env(name, value), places).map_err(|e| e.to_string());
        fit("NCCL_EP_COMM_SMS", "32", &two).unwrap();
        let text = fit("NCCL_EP_COMM_SMS", "48", &two).unwrap_err();
        assert!(text.starts_with("NCCL_EP_COMM_SMS must be at most 34 with this NCCL EP, got 48"), "{text}");
        assert!(fit("NCCL_EP_DISPATCH_SMS", "48", &two).is_err());
        fit("NCCL_EP_COMBINE_SMS", "48", &two).unwrap();
        // Of those that work on one rank alone, what there is room for.
        let shared = [location(1, 0); 2];
        for name in ["NCCL_EP_SHUFFLE_SMS", "NCCL_EP_PREPROCESS_NUM_SMS"] {
            let count = |value, places: &[RankLocation]| local_sms(name, &env(name, value), places, &places[0]);
            assert_eq!(count("132", &shared), Some(66));
            assert_eq!(count("60", &shared), Some(60));
            assert_eq!((count("4096", &two), count("", &two), count("", &shared)), (Some(132), Some(132), None));
        }
    }

    #[test]
    fn memory_is_counted_before_it_is_asked_for() {
        let places: Vec<_> = (0..8).map(|device| location(1, device)).collect();
        // field_cases.md A54.
        let mut dialect = REQUEST.dialect;
        dialect.eager = true;
        let request = GroupRequest {
            ep_size: 8,
            num_experts: 256,
            max_tokens_per_rank: 65536,
            max_recv_tokens_per_rank: 0,
            hidden_dim: 7168,
            num_topk: 8,
            dialect,
            ..REQUEST
        };
        let eager = GroupConfig::try_from(request).unwrap();
        device_memory(&eager, &places).unwrap();
        let full = |free| places.iter().map(|p| RankLocation { free, ..*p }).collect::<Vec<_>>();
        let text = device_memory(&eager, &full(78 << 30)).unwrap_err().to_string();
        // Rows 2 * 8 * 65536 * 14336; scales 4194304 * 14336; weights 2 * 4194304 * 256 * 4; map 8 * 65536 * 32; 32 MiB.
        assert_eq!(GroupMemory::of(&eager, 1).total(), 83_802_193_920);
        assert_eq!(
            text,
            format!(
                "the group takes 83802193920 bytes of device memory (60129542144 of them for scales of received rows), \
                 and rank 0's device has {} free; eager mode sizes them for 4194304 rows a rank, which is every token of \
                 every rank num_topk times: pass an explicit max_recv_tokens_per_rank, or lower max_tokens_per_rank or \
                 hidden_dim",
                78u64 << 30
            )
        );
        // Two ranks on one device have to fit together.
        let mut shared = places.clone();
        shared[5].device = 4;
        let text = device_memory(&eager, &shared).unwrap_err().to_string();
        assert!(text.contains("device memory for each of its 2 ranks (") && text.contains("rank 4's device"), "{text}");

        let fixed = |rows, tokens| {
            let sized = GroupRequest { max_recv_tokens_per_rank: rows, max_tokens_per_rank: tokens, ..request };
            let config = GroupConfig::try_from(sized).unwrap();
            device_memory(&config, &full(1 << 30)).unwrap_err().to_string()
        };
        let text = fixed(65536, 65536);
        assert!(text.ends_with("; lower max_tokens_per_rank or hidden_dim, or use zero_copy, which has no such rows"));
        let two: Vec<_> = full(1 << 30).into_iter().map(|place| RankLocation { domains: 2, ..place }).collect();
        let request = GroupRequest { max_recv_tokens_per_rank: 65536, max_tokens_per_rank: 65536, ..request };
        let config = GroupConfig::try_from(GroupRequest { zero_copy: 1, ..request }).unwrap();
        let text = device_memory(&config, &two).unwrap_err().to_string();
        assert!(text.contains("of them for what goes to other NVLink domains), and"), "{text}");
        assert!(text.ends_with(" free; lower max_tokens_per_rank or hidden_dim"), "{text}");
        assert!(fixed(1 << 20, 4096).ends_with("; lower max_recv_tokens_per_rank, 1048576, or hidden_dim"));
    }

    #[test]
    fn what_nccl_says_of_the_links_is_heeded() {
        let check = |links, variables: &[(&str, &str)]| {
            let env = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value));
            links_text(links, &env)
        };
        fn links_text(links: Option<Links>, env: Lookup<'_>) -> String {
            let facts = CommFacts { size: 2, rank: 0, device: 0, links };
            links_of(&facts, env).err().map_or(String::new(), |error| error.to_string())
        }
        use super::links as links_of;
        let good = Links { device_api: true, domains: 1, gin: 0 };
        assert_eq!(check(Some(good), &[("NCCL_CUMEM_ENABLE", "1")]), "");
        assert_eq!(check(None, &[("NCCL_P2P_DISABLE", "1")]), "", "perhaps it works all the same");
        assert_eq!(
            check(Some(good), &[("NCCL_CUMEM_ENABLE", "0")]),
            "NCCL_CUMEM_ENABLE=0 takes NCCL's symmetric memory away, in which NCCL EP's buffers lie; unset \
             NCCL_CUMEM_ENABLE, before the communicator is made"
        );
        assert!(check(None, &[("NCCL_WIN_ENABLE", "0")]).starts_with("NCCL_WIN_ENABLE=0 takes"));
        let none = Some(Links { device_api: false, ..good });
        assert!(check(none, &[]).starts_with("this communicator has no symmetric memory"), "{}", check(none, &[]));
        assert!(check(none, &[("NCCL_P2P_DISABLE", "1")]).ends_with("; unset NCCL_P2P_DISABLE"));
        let off = check(none, &[("NCCL_P2P_DISABLE", "1"), ("NCCL_GIN_ENABLE", "0")]);
        assert!(off.ends_with("; unset NCCL_P2P_DISABLE and NCCL_GIN_ENABLE"), "{off}");
    }
}
