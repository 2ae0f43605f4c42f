//! Ranks that an external launcher started: mpirun, torchrun or srun.

/// A rank that an external launcher started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchedRank {
    /// The launcher.
    pub launcher: &'static str,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Number of this rank on its machine.
    pub local_rank: usize,
    /// What names the job, the same for all its ranks.
    pub job: String,
}

/// The variables by which a launcher tells a process its rank.
struct Launcher {
    name: &'static str,
    /// Rank, number of ranks; both are there for a process of this launcher.
    rank_and_size: [&'static str; 2],
    /// Variables that have to be there too, or the process is not one of its ranks.
    needs: &'static [&'static str],
    local_rank: &'static [&'static str],
    /// Number of ranks on this machine.
    local_size: &'static [&'static str],
    /// Number of machines.
    hosts: &'static [&'static str],
    /// What names the job; those that are there count.
    job: &'static [&'static str],
}

/// In order: torchrun may be started by srun or mpirun, mpirun by srun; the innermost counts.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank_and_size: ["RANK", "WORLD_SIZE"],
        needs: &["LOCAL_RANK"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        hosts: &["GROUP_WORLD_SIZE"],
        job: &["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    },
    Launcher {
        name: "mpirun",
        rank_and_size: ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        needs: &[],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        hosts: &[],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"],
    },
    Launcher {
        name: "srun",
        rank_and_size: ["SLURM_PROCID", "SLURM_NTASKS"],
        // A batch script has a rank too, but no step: there the command starts its own ranks.
        needs: &["SLURM_STEP_ID"],
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
        hosts: &["SLURM_STEP_NUM_NODES", "SLURM_NNODES"],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
    Launcher {
        name: "mpirun",
        rank_and_size: ["PMI_RANK", "PMI_SIZE"],
        needs: &[],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        hosts: &[],
        job: &["PMI_JOBID", "PMI_ID_NAMESPACE", "HYDI_CONTROL_FD", "PMI_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

/// The rank that a launcher gave this process, read from its environment; none without a launcher.
///
/// An error for ranks on several machines and for variables that make no sense.
pub fn detect(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchedRank>, String> {
    let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
    let number = |name: &str| {
        get(name)
            .map(|value| value.parse::<usize>().map_err(|_| format!("{name} must be a number, got {value}")))
            .transpose()
    };
    let first = |names: &[&str]| names.iter().find_map(|name| number(name).transpose()).transpose();
    for launcher in &LAUNCHERS {
        let (Some(rank), Some(size)) = (number(launcher.rank_and_size[0])?, number(launcher.rank_and_size[1])?) else {
            continue;
        };
        if launcher.needs.iter().any(|name| get(name).is_none()) {
            continue;
        }
        if rank >= size {
            let [rank_name, size_name] = launcher.rank_and_size;
            return Err(format!("{rank_name} must be below {size_name} = {size}, got {rank}"));
        }
        let local_size = first(launcher.local_size)?.unwrap_or(size);
        let hosts = first(launcher.hosts)?.unwrap_or(1);
        if local_size != size || hosts > 1 {
            let name = launcher.name;
            return Err(format!(
                "{name} spread the {size} ranks over several machines, but nvte-ep run works on one machine: start it \
                 with all ranks on one"
            ));
        }
        let local_rank = first(launcher.local_rank)?.unwrap_or(rank);
        let job = launcher.job.iter().filter_map(|name| get(name));
        let job = std::iter::once(launcher.name.to_owned()).chain(job).collect::<Vec<_>>().join("-");
        return Ok(Some(LaunchedRank { launcher: launcher.name, rank, size, local_rank, job }));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detected(pairs: &[(&str, &str)]) -> Result<Option<LaunchedRank>, String> {
        detect(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn nobody() {
        assert_eq!(detected(&[]), Ok(None));
        assert_eq!(detected(&[("RANK", "0"), ("WORLD_SIZE", "2")]), Ok(None), "not torchrun without LOCAL_RANK");
        let batch_script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "5")];
        assert_eq!(detected(&batch_script), Ok(None));
        assert_eq!(detected(&[("PMI_RANK", ""), ("PMI_SIZE", "2")]), Ok(None));
    }

    #[test]
    fn each_launcher() {
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("PMIX_NAMESPACE", "prterun-host-77@1"),
            ("PMIX_RANK", "3"),
        ];
        let expected = LaunchedRank {
            launcher: "mpirun",
            rank: 3,
            size: 4,
            local_rank: 3,
            job: "mpirun-prterun-host-77@1".into(),
        };
        assert_eq!(detected(&open_mpi), Ok(Some(expected)));
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_STEP_ID", "0"),
        ];
        let found = detected(&torchrun).unwrap().unwrap();
        assert_eq!((found.launcher, found.rank, found.job.as_str()), ("torchrun", 1, "torchrun-29500-none"));
        let srun = [
            ("SLURM_PROCID", "2"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "2"),
            ("SLURM_JOB_ID", "12"),
            ("SLURM_STEP_ID", "3"),
            ("SLURM_NNODES", "1"),
        ];
        let found = detected(&srun).unwrap().unwrap();
        assert_eq!((found.launcher, found.rank, found.size, found.job.as_str()), ("srun", 2, 4, "srun-12-3"));
        let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        assert_eq!(detected(&hydra).unwrap().unwrap().local_rank, 1);
    }

    #[test]
    fn several_machines_and_nonsense_are_refused() {
        let two_hosts = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert!(detected(&two_hosts).unwrap_err().contains("works on one machine"));
        let nodes = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_ID", "0"), ("SLURM_NNODES", "2")];
        assert!(detected(&nodes).unwrap_err().contains("srun spread the 4 ranks over several machines"));
        assert_eq!(detected(&[("PMI_RANK", "x"), ("PMI_SIZE", "2")]).unwrap_err(), "PMI_RANK must be a number, got x");
        let beyond = [("PMI_RANK", "2"), ("PMI_SIZE", "2")];
        assert_eq!(detected(&beyond).unwrap_err(), "PMI_RANK must be below PMI_SIZE = 2, got 2");
    }
}
