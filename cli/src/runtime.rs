//! Which runtime the run uses, why, and what ranks that share a GPU need.

use crate::args::{LaunchRuntime, RuntimeArg};
use nvte_ep_core::env::{Env, RuntimeKind};
use nvte_ep_core::sys;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Set in the process that looks for GPUs.
pub const PROBE_VARIABLE: &str = "NVTE_EP_RUN_PROBE";
/// Says which runtime to use.
pub const RUNTIME_VARIABLE: &str = "NVTE_EP_RUNTIME";
const ANSWER: &str = "nvte-ep probe: ";
/// SMs that a rank's communication uses at most unless asked for more: more than this never finished a step with
/// NCCL EP 0.1.0.
const USUAL_SMS: usize = 32;

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Product name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub sms: usize,
}

/// What was found: the GPUs, or why they cannot be used.
pub type Probe = Result<Vec<Gpu>, String>;

/// The probing process: prints what it finds. A process of its own, because loading one runtime fixes it for a process,
/// and a driver in trouble should not take the launcher with it.
pub fn probe_main() {
    let found = Env::from_lookup(|name| if name == RUNTIME_VARIABLE { None } else { std::env::var(name).ok() })
        .and_then(|env| {
            let cuda = &sys::base(&env)?.cuda;
            (0..cuda.device_count()?)
                .map(|device| {
                    let facts = cuda.device_facts(device)?;
                    let sms = usize::try_from(facts.sm_count).unwrap_or(0);
                    Ok(Gpu { name: facts.name, capability: facts.compute_capability, sms })
                })
                .collect::<nvte_ep_core::error::Result<Vec<Gpu>>>()
        })
        .map_err(|error| error.to_string());
    if let Ok(text) = serde_json::to_string(&found) {
        println!("{ANSWER}{text}");
    }
}

/// Looks for GPUs.
pub fn probe() -> Probe {
    let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let mut command = Command::new(program);
    let output = command.env(PROBE_VARIABLE, "1").stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot start the search for GPUs: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let answer = text.lines().rev().find_map(|line| line.strip_prefix(ANSWER));
    match answer.map(serde_json::from_str) {
        Some(Ok(probe)) => probe,
        _ => Err(format!("the search for GPUs ended without an answer ({})", output.status)),
    }
}

/// The runtime of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Which.
    pub kind: RuntimeKind,
    /// Why, in words.
    pub reason: String,
    /// The GPUs, for CUDA.
    pub gpus: Vec<Gpu>,
}

/// What `NVTE_EP_RUNTIME` asks for. Refused is any other word, also where the command line decides: it would be replaced in
/// silence.
fn from_variable(variable: Option<&str>) -> Result<Option<RuntimeKind>, String> {
    let kinds = [RuntimeKind::Cuda, RuntimeKind::Host];
    let Some(text) = variable.filter(|value| !value.is_empty()) else { return Ok(None) };
    let kind = kinds.into_iter().find(|kind| kind.name() == text);
    Ok(Some(kind.ok_or_else(|| format!("{RUNTIME_VARIABLE} must be cuda or host, got {text}"))?))
}

/// The runtime of `launch` and `doctor`: of the command line, else of `NVTE_EP_RUNTIME`, else `default`.
pub fn asked_for(
    arg: Option<LaunchRuntime>,
    variable: Option<&str>,
    default: RuntimeKind,
) -> Result<RuntimeKind, String> {
    let variable = from_variable(variable)?;
    let arg = arg.map(|arg| match arg {
        LaunchRuntime::Host => RuntimeKind::Host,
        LaunchRuntime::Cuda => RuntimeKind::Cuda,
    });
    Ok(arg.or(variable).unwrap_or(default))
}

/// Chooses from the command line, `NVTE_EP_RUNTIME` and what `probe` finds.
pub fn choose(arg: RuntimeArg, variable: Option<&str>, probe: impl FnOnce() -> Probe) -> Result<Choice, String> {
    let host = |reason: String| Ok(Choice { kind: RuntimeKind::Host, reason, gpus: Vec::new() });
    let (asked, by) = match (arg, from_variable(variable)?) {
        (RuntimeArg::Host, _) => (Some(RuntimeKind::Host), "--runtime host".to_owned()),
        (RuntimeArg::Cuda, _) => (Some(RuntimeKind::Cuda), "--runtime cuda".to_owned()),
        (RuntimeArg::Auto, Some(kind)) => (Some(kind), format!("{RUNTIME_VARIABLE}={}", kind.name())),
        (RuntimeArg::Auto, None) => (None, String::new()),
    };
    if asked == Some(RuntimeKind::Host) {
        return host(format!("asked for by {by}"));
    }
    match (probe(), asked) {
        (Ok(gpus), Some(_)) if gpus.is_empty() => Err(format!("{by} asks for a GPU, but the CUDA driver finds none")),
        (Ok(gpus), Some(_)) => Ok(Choice { kind: RuntimeKind::Cuda, reason: format!("asked for by {by}"), gpus }),
        (Err(error), Some(_)) => Err(format!("{by} asks for a GPU, but {error}")),
        (Ok(gpus), None) => match gpus.iter().find(|gpu| gpu.capability >= (9, 0)) {
            Some(gpu) => {
                let reason = format!("found {} with compute capability 9.0 or later: {}", plural(gpus.len()), gpu.name);
                Ok(Choice { kind: RuntimeKind::Cuda, reason, gpus })
            }
            None if gpus.is_empty() => host("chosen because the CUDA driver finds no GPU".into()),
            None => {
                let (gpu, (major, minor)) = (&gpus[0].name, gpus[0].capability);
                host(format!("chosen because compute capability 9.0 is needed and {gpu} has {major}.{minor}"))
            }
        },
        (Err(error), None) => {
            let first = error.lines().next().unwrap_or_default().split(';').next().unwrap_or_default();
            host(format!("chosen because {first} (--runtime cuda tells more)"))
        }
    }
}

fn plural(gpus: usize) -> String {
    if gpus == 1 { "1 GPU".into() } else { format!("{gpus} GPUs") }
}

/// What the ranks run with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// SM cap of a rank; 0 = the library's choice.
    pub max_sms: usize,
    /// Variables to set for the ranks, unless the user set them.
    pub variables: Vec<(&'static str, &'static str)>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Plans `ranks` ranks on this machine; refuses what would never finish.
pub fn plan(choice: &Choice, ranks: usize, max_sms: Option<usize>, mps: bool) -> Result<Plan, String> {
    let Some(sms) = choice.gpus.iter().map(|gpu| gpu.sms).min() else {
        return Ok(Plan { max_sms: max_sms.unwrap_or(0), ..Plan::default() });
    };
    let gpus = choice.gpus.len();
    let sharing = ranks.div_ceil(gpus);
    let cap = max_sms.unwrap_or_else(|| USUAL_SMS.min(sms / sharing));
    if cap == 0 || sharing * cap > sms {
        let cap = cap.max(1);
        return Err(format!(
            "{ranks} ranks on {} put {sharing} on one, which need {sharing} x {cap} SMs at a time where it has {sms}: their \
             kernels wait for each other, so the run would never finish; use --max-sms {} or fewer ranks",
            plural(gpus),
            (sms / sharing).max(1)
        ));
    }
    if sharing == 1 {
        return Ok(Plan { max_sms: cap, ..Plan::default() });
    }
    if !mps {
        return Err(format!(
            "{ranks} ranks on {} put {sharing} on one, which needs the MPS daemon, or their kernels would wait for each \
             other for ever: start it with nvidia-cuda-mps-control -d (it is looked for in CUDA_MPS_PIPE_DIRECTORY, \
             else /tmp/nvidia-mps), or use --ranks {gpus}",
            plural(gpus)
        ));
    }
    let note = format!(
        "{sharing} ranks share a GPU: this takes the MPS daemon (running), NCCL_MULTI_RANK_GPU_ENABLE=1 and \
         NCCL_NVLS_ENABLE=0 (set), and {sharing} x {cap} SMs of its {sms}"
    );
    Ok(Plan {
        max_sms: cap,
        variables: vec![("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_NVLS_ENABLE", "0")],
        notes: vec![note],
    })
}

/// Whether the MPS daemon runs, by its control pipe.
pub fn mps_runs() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").filter(|folder| !folder.is_empty());
    let control = folder.map_or_else(|| PathBuf::from("/tmp/nvidia-mps"), PathBuf::from).join("control");
    std::fs::metadata(control).is_ok_and(|found| found.file_type().is_fifo() || found.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(capability: (i32, i32)) -> Gpu {
        Gpu { name: "Card".into(), capability, sms: 132 }
    }

    fn never() -> Probe {
        panic!("no need to look for GPUs")
    }

    #[test]
    fn asked_for() {
        assert_eq!(choose(RuntimeArg::Host, Some("cuda"), never).unwrap().reason, "asked for by --runtime host");
        assert_eq!(choose(RuntimeArg::Auto, Some("host"), never).unwrap().kind, RuntimeKind::Host);
        let choice = choose(RuntimeArg::Cuda, Some("host"), || Ok(vec![gpu((9, 0))])).unwrap();
        assert_eq!((choice.kind, choice.gpus.len()), (RuntimeKind::Cuda, 1));
        let error = choose(RuntimeArg::Auto, Some("cuda"), || Err("there is no driver".into())).unwrap_err();
        assert_eq!(error, "NVTE_EP_RUNTIME=cuda asks for a GPU, but there is no driver");
        assert_eq!(
            choose(RuntimeArg::Cuda, None, || Ok(Vec::new())).unwrap_err(),
            "--runtime cuda asks for a GPU, but the CUDA driver finds none"
        );
        let error = choose(RuntimeArg::Auto, Some("gpu"), never).unwrap_err();
        assert_eq!(error, "NVTE_EP_RUNTIME must be cuda or host, got gpu");
        let error = choose(RuntimeArg::Host, Some("cpu"), never).unwrap_err();
        assert_eq!(error, "NVTE_EP_RUNTIME must be cuda or host, got cpu", "not replaced in silence either");
    }

    #[test]
    fn launched_programs() {
        let for_launch = |arg, variable| super::asked_for(arg, variable, RuntimeKind::Host);
        assert_eq!(for_launch(None, None), Ok(RuntimeKind::Host));
        assert_eq!(for_launch(None, Some("cuda")), Ok(RuntimeKind::Cuda));
        assert_eq!(for_launch(Some(LaunchRuntime::Host), Some("cuda")), Ok(RuntimeKind::Host));
        for arg in [None, Some(LaunchRuntime::Host)] {
            assert_eq!(for_launch(arg, Some("cpu")).unwrap_err(), "NVTE_EP_RUNTIME must be cuda or host, got cpu");
        }
    }

    #[test]
    fn automatic() {
        let chosen = |probe: Probe| choose(RuntimeArg::Auto, Some(""), || probe).unwrap();
        let cuda = chosen(Ok(vec![gpu((8, 0)), gpu((9, 0))]));
        assert_eq!(cuda.reason, "found 2 GPUs with compute capability 9.0 or later: Card");
        let old = chosen(Ok(vec![gpu((8, 6))]));
        assert_eq!(old.reason, "chosen because compute capability 9.0 is needed and Card has 8.6");
        assert_eq!(chosen(Ok(Vec::new())).reason, "chosen because the CUDA driver finds no GPU");
        let none = chosen(Err("the CUDA driver could not be loaded; install it. Tried:\n  x".into()));
        assert_eq!(none.kind, RuntimeKind::Host);
        let reason = "chosen because the CUDA driver could not be loaded (--runtime cuda tells more)";
        assert_eq!(none.reason, reason);
    }

    #[test]
    fn ranks_that_share_a_gpu() {
        let choice = |gpus| Choice { kind: RuntimeKind::Cuda, reason: String::new(), gpus: vec![gpu((9, 0)); gpus] };
        let alone = plan(&choice(2), 2, None, false).unwrap();
        assert_eq!((alone.max_sms, alone.variables.len()), (32, 0));
        let four = plan(&choice(1), 4, None, true).unwrap();
        assert_eq!((four.max_sms, four.variables.len(), four.notes.len()), (32, 2, 1));
        assert_eq!(plan(&choice(1), 8, None, true).unwrap().max_sms, 16);
        assert_eq!(plan(&choice(1), 8, Some(8), true).unwrap().max_sms, 8);
        assert!(plan(&choice(1), 2, None, false).unwrap_err().contains("MPS"));
        let error = plan(&choice(1), 8, Some(32), true).unwrap_err();
        assert!(error.contains("8 x 32 SMs") && error.contains("--max-sms 16"), "{error}");
        assert!(plan(&choice(1), 200, None, true).is_err());
        let host = Choice { kind: RuntimeKind::Host, reason: String::new(), gpus: Vec::new() };
        assert_eq!(plan(&host, 8, Some(5), false).unwrap().max_sms, 5);
    }
}
