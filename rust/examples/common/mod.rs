//! What the examples share: finding the other ranks, and a step whose right values are known.

use nvte_ep::{Communicator, UniqueId};
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A rank's place, from the variables of torchrun and `nvte-ep launch`, or of Open MPI's mpirun. One rank without any.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub rank: usize,
    pub size: usize,
    pub local_rank: usize,
}

impl Place {
    pub fn of_this_process() -> Self {
        let number = |names: [&str; 2], otherwise| {
            let found = names.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
            found.unwrap_or(otherwise)
        };
        Self {
            rank: number(["RANK", "OMPI_COMM_WORLD_RANK"], 0),
            size: number(["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"], 1),
            local_rank: number(["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"], 0),
        }
    }

    /// The communicator of all ranks, on the thread's current device. Rank 0 leaves its id in a file for the others.
    pub fn meet(&self) -> Outcome<Communicator> {
        let file = rendezvous_file()?;
        let id = if self.rank == 0 {
            let id = UniqueId::new()?;
            let unfinished = file.with_extension("new");
            std::fs::write(&unfinished, id.as_bytes())?;
            std::fs::rename(&unfinished, &file)?;
            id
        } else {
            let start = Instant::now();
            loop {
                match std::fs::read(&file) {
                    Ok(bytes) => break UniqueId::from_bytes(bytes.as_slice().try_into()?),
                    Err(error) if start.elapsed() > Duration::from_secs(60) => return Err(error.into()),
                    Err(_) => std::thread::sleep(Duration::from_millis(10)),
                }
            }
        };
        let comm = Communicator::new(id, self.rank, self.size);
        if self.rank == 0 {
            std::fs::remove_file(&file)?; // every rank has read it by now
        }
        Ok(comm?)
    }
}

/// A file that all ranks of this run know. `nvte-ep launch` has a folder for it. Else NVTE_EP_EXAMPLE_RENDEZVOUS names it, or
/// it is called after the launcher: the ranks' parent, of whose number and start time there is only one.
fn rendezvous_file() -> Outcome<PathBuf> {
    if let Some(folder) = std::env::var_os("NVTE_EP_LAUNCH_DIRECTORY") {
        return Ok(PathBuf::from(folder).join("id"));
    }
    if let Some(file) = std::env::var_os("NVTE_EP_EXAMPLE_RENDEZVOUS") {
        return Ok(file.into());
    }
    let parent = std::os::unix::process::parent_id();
    let stat = std::fs::read_to_string(format!("/proc/{parent}/stat"))?;
    let started = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)).unwrap_or_default();
    Ok(std::env::temp_dir().join(format!("nvte_ep_rust_example_{parent}_{started}")))
}

pub const TOKENS: usize = 8; // of a rank
pub const HIDDEN: usize = 512;
pub const TOP_K: usize = 2;
pub const LOCAL_EXPERTS: usize = 4; // of a rank

/// Each token's experts: two, on different ranks where there are two. Another `shift` gives others.
pub fn experts(place: &Place, shift: usize) -> Vec<i64> {
    let all = LOCAL_EXPERTS * place.size;
    let expert = |i: usize| (place.rank * TOKENS + i / TOP_K + i % TOP_K * (all / 2) + shift) % all;
    (0..TOKENS * TOP_K).map(|i| expert(i) as i64).collect()
}

/// Small whole numbers, so that sums are exact; another `seed` gives others.
pub fn rows(place: &Place, seed: usize) -> Vec<f32> {
    let value = |i: usize| (place.rank * TOKENS + i / HIDDEN + i % HIDDEN + seed * 7) % 64;
    (0..TOKENS * HIDDEN).map(|i| value(i) as f32).collect()
}

/// How many values are not `factor` times the expected ones.
pub fn wrong(got: &[f32], expected: &[f32], factor: f32) -> usize {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).filter(|(got, expected)| **got != factor * **expected).count()
}

/// Ends the process by what a rank found.
pub fn report(place: &Place, wrong: usize) -> Outcome<()> {
    println!("rank {}: {wrong} values wrong", place.rank);
    if wrong == 0 { Ok(()) } else { Err("wrong values".into()) }
}
