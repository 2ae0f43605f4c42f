//! `nvte-ep doctor` on machines that are made up: a folder with a driver, NCCL, NCCL EP, a compiler and headers, of which
//! each test takes one away or breaks it.

use serde_json::Value;
use std::ffi::OsString;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_nvte-ep");

struct Machine {
    root: PathBuf,
    variables: Vec<(&'static str, OsString)>,
}

/// Compiles a library that has all functions of the host runtime with this prefix; `overrides` defines some of them, the
/// others return 0.
fn library(path: &Path, prefix: &str, without: &str, overrides: &str) {
    let exports = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/exports.txt");
    let exports = std::fs::read_to_string(exports).unwrap();
    let mut source = format!("#include <string.h>\n{overrides}\n");
    for name in exports.lines().filter(|name| name.starts_with(prefix) && !name.starts_with(without)) {
        if !overrides.contains(&format!("{name}(")) {
            source += &format!("int {name}(void) {{ return 0; }}\n");
        }
    }
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let file = path.with_extension("c");
    std::fs::write(&file, source).unwrap();
    let soname = path.file_name().unwrap().to_str().unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{soname}"), "-o"])
        .args([path, &file])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

fn nccl(path: &Path, version: i32) {
    library(path, "nccl", "ncclEp", &format!("int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}"));
}

fn driver(path: &Path, devices: i32) {
    let overrides = format!(
        "int cuDeviceGetCount(int* n) {{ *n = {devices}; return 0; }}
         int cuDeviceGetAttribute(int* v, int a, int d) {{ *v = a == 75 ? 9 : a == 16 ? 132 : 0; return 0; }}
         int cuDeviceGetName(char* n, int l, int d) {{ strcpy(n, \"Made-up GPU\"); return 0; }}"
    );
    library(path, "cu", "cuda", &overrides);
}

fn file(path: PathBuf, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

impl Machine {
    /// With everything there.
    fn new(name: &str) -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("doctor-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&root));
        let at = |path: &str| root.join(path);
        driver(&at("driver/libcuda.so.1"), 1);
        nccl(&at("nccl/lib/libnccl.so.2"), 23007);
        file(at("nccl/include/nccl.h"), "#define NCCL_VERSION_CODE 23007\n");
        file(at("nccl/include/nccl_device.h"), "");
        library(&at("ep/lib/libnccl_ep.so"), "ncclEp", "none", "");
        for header in ["nccl_ep.h", "nccl_ep/common.hpp", "nccl_ep/device/ht_ep.cuh"] {
            file(at("ep/include").join(header), "");
        }
        file(at("cuda/include/cuda_runtime.h"), "");
        file(at("cuda/bin/nvcc"), "#!/bin/sh\nexit 0\n");
        std::fs::set_permissions(at("cuda/bin/nvcc"), std::fs::Permissions::from_mode(0o755)).unwrap();
        let variables = [
            ("LD_LIBRARY_PATH", "driver"),
            ("NCCL_HOME", "nccl"),
            ("NCCL_EP_HOME", "ep"),
            ("CUDA_HOME", "cuda"),
            ("NCCL_EP_JIT_CACHE_DIR", "cache"),
        ];
        let variables = variables.map(|(name, path)| (name, at(path).into_os_string())).to_vec();
        Self { root, variables }
    }

    fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.variables.retain(|(there, _)| *there != name);
        self.variables.push((name, value.into()));
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.arg("doctor").args(arguments).env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// The report, whose exit code has to fit it.
    fn report(&self) -> Value {
        let output = self.command(&["--json"]).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"));
        let usable = report["usable"].as_bool().unwrap();
        assert_eq!(output.status.code(), Some(i32::from(!usable)), "{report}");
        assert_eq!((&report["schema"], &report["runtime"]), (&1.into(), &"cuda".into()));
        let problems = levels(&report).iter().filter(|(_, level)| level == "problem").count();
        assert_eq!(usable, problems == 0, "{report}");
        report
    }

    /// The one problem has to be `check`, found with `words`, and its remedy has to say `remedy`.
    fn has_one_problem(&self, check: &str, words: &str, remedy: &str) {
        let report = self.report();
        let problems: Vec<&Value> =
            report["checks"].as_array().unwrap().iter().filter(|check| check["level"] == "problem").collect();
        let [problem] = problems[..] else { panic!("{report:#}") };
        assert_eq!(problem["check"], check, "{report:#}");
        assert!(problem["found"].as_str().unwrap().contains(words), "{problem:#}");
        assert!(problem["remedy"].as_str().unwrap().contains(remedy), "{problem:#}");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.root));
    }
}

/// Of what belongs to the libraries; shared memory and such are those of the machine that runs the tests.
fn levels(report: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    report["checks"].as_array().unwrap().iter().map(|check| (text(&check["check"]), text(&check["level"]))).collect()
}

#[test]
fn everything_is_there() {
    let machine = Machine::new("whole");
    let report = machine.report();
    let found = levels(&report);
    let expected = [
        "driver",
        "device",
        "nccl",
        "nccl-ep",
        "nvcc",
        "cuda-headers",
        "nccl-headers",
        "nccl-ep-headers",
        "cache",
        "variables",
    ];
    for name in expected {
        assert!(found.contains(&(name.into(), "ok".into())), "{name}: {report:#}");
    }
    assert_eq!(report["usable"], true, "{report:#}");
    let output = machine.command(&[]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with(&format!("nvte-ep {}, runtime cuda\n\nok ", env!("CARGO_PKG_VERSION"))), "{text}");
    assert!(text.contains("0: Made-up GPU, compute capability 9.0, 132 multiprocessors"), "{text}");
    assert!(text.ends_with("\nusable\n"), "{text}");
}

#[test]
fn no_gpu() {
    let machine = Machine::new("no_gpu");
    driver(&machine.root.join("driver/libcuda.so.1"), 0);
    machine.has_one_problem("driver", "it finds no GPU", "NVTE_EP_RUNTIME=host");
}

#[test]
fn an_old_nccl_is_first_in_the_path() {
    let mut machine = Machine::new("old_nccl");
    let root = machine.root.clone();
    nccl(&root.join("old/libnccl.so.2"), 22705);
    std::fs::create_dir_all(root.join("site/nvidia")).unwrap();
    symlink(root.join("nccl"), root.join("site/nvidia/nccl")).unwrap();
    machine.variables.retain(|(name, _)| *name != "NCCL_HOME");
    machine.set("PYTHONPATH", root.join("site"));
    machine.set("LD_LIBRARY_PATH", std::env::join_paths([root.join("old"), root.join("driver")]).unwrap());
    // The headers of that version are missing too; without its own problem this one would hide in it.
    file(root.join("old_headers/nccl.h"), "#define NCCL_VERSION_CODE 22705\n");
    file(root.join("old_headers/nccl_device.h"), "");
    machine.set("NCCL_EP_JIT_BUILD_INCLUDE_DIR", root.join("old_headers"));
    let remedy = format!("set NVTE_EP_NCCL_LIB={}", root.join("site/nvidia/nccl/lib/libnccl.so.2").display());
    machine.has_one_problem("nccl", "NCCL 2.27.5 is in use, and 2.30.4 or later is needed", &remedy);
}

#[test]
fn nccl_ep_is_missing() {
    let machine = Machine::new("no_nccl_ep");
    std::fs::remove_file(machine.root.join("ep/lib/libnccl_ep.so")).unwrap();
    machine.has_one_problem("nccl-ep", "NCCL EP could not be loaded", "pip install nccl-extensions");
}

#[test]
fn nvcc_is_missing() {
    let machine = Machine::new("no_nvcc");
    std::fs::remove_file(machine.root.join("cuda/bin/nvcc")).unwrap();
    machine.has_one_problem("nvcc", "needs nvcc", "NCCL_EP_JIT_NVCC or CUDA_HOME");
}

#[test]
fn headers_are_missing() {
    for (header, check) in [
        ("cuda/include/cuda_runtime.h", "cuda-headers"),
        ("nccl/include/nccl_device.h", "nccl-headers"),
        ("ep/include/nccl_ep/device/ht_ep.cuh", "nccl-ep-headers"),
    ] {
        let machine = Machine::new(&format!("no_{check}"));
        std::fs::remove_file(machine.root.join(header)).unwrap();
        let name = Path::new(header).file_name().unwrap().to_str().unwrap();
        machine.has_one_problem(check, &format!("{name} is not in "), "or set NCCL_EP_JIT_");
    }
}

#[test]
fn the_cache_cannot_be_written() {
    let mut machine = Machine::new("cache");
    file(machine.root.join("file"), "");
    machine.set("NCCL_EP_JIT_CACHE_DIR", machine.root.join("file/cache"));
    machine.has_one_problem("cache", "cannot be made", "set NCCL_EP_JIT_CACHE_DIR to a folder that you can write");
}

#[test]
fn a_compile_has_failed_before() {
    let machine = Machine::new("marker");
    let marker = machine.root.join("cache/kernel/compile.failed");
    file(marker.clone(), "");
    machine.has_one_problem("cache-failures", marker.to_str().unwrap(), "remove these files");
    assert!(marker.exists(), "in a folder that the user chose nothing is removed");
}

#[test]
fn nccl_ep_refuses_the_nccl() {
    let machine = Machine::new("gate");
    let gate = "const char gate[] = \"build NCCL %d.%d.%d and runtime NCCL %d.%d.%d are incompatible. %s\"; \
                const char banner[] = \"NCCL EP version 0.2.0+cuda13.4\";";
    library(&machine.root.join("ep/lib/libnccl_ep.so"), "ncclEp", "none", gate);
    machine.has_one_problem("nccl-ep", "takes only the NCCL that it was built with or a later one", "update NCCL");
    nccl(&machine.root.join("nccl/lib/libnccl.so.2"), 23203);
    file(machine.root.join("nccl/include/nccl.h"), "#define NCCL_VERSION_CODE 23203\n");
    assert_eq!(machine.report()["usable"], true);
}

#[test]
fn shared_memory_is_tiny() {
    let machine = Machine::new("shm");
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", "mount -t tmpfs -o size=1m none /dev/shm && exec \"$0\" doctor --json", PROGRAM]);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    let output = command.envs(machine.variables.iter().map(|(name, value)| (name, value))).output().unwrap();
    let Ok(report) = serde_json::from_slice::<Value>(&output.stdout) else {
        println!("not tried: takes root and mounts: {}", String::from_utf8_lossy(&output.stderr));
        return;
    };
    assert_eq!(output.status.code(), Some(1));
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["check"] == "shared-memory").unwrap();
    assert_eq!(check["level"], "problem");
    assert!(check["found"].as_str().unwrap().contains("too little for NCCL"), "{check}");
    assert!(check["remedy"].as_str().unwrap().contains("--shm-size=1g"), "{check}");
}

#[test]
fn the_host_runtime_is_on_the_path_without_the_variable() {
    let mut machine = Machine::new("host_runtime");
    let host = std::env::current_exe().unwrap().parent().unwrap().join("libnvte_ep_host.so");
    let folder = machine.root.join("host_runtime");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libcuda.so.1", "libnccl.so.2", "libnccl_ep.so.0"] {
        symlink(&host, folder.join(name)).unwrap();
    }
    machine.set("LD_LIBRARY_PATH", folder);
    machine.has_one_problem("driver", "the CUDA driver is the host runtime here (", "set NVTE_EP_RUNTIME=host");
}

#[test]
fn a_library_that_ends_the_process_does_not_end_the_report() {
    let machine = Machine::new("abort");
    let overrides = "#include <stdlib.h>\n__attribute__((constructor)) static void end(void) { abort(); }";
    library(&machine.root.join("ep/lib/libnccl_ep.so"), "ncclEp", "none", overrides);
    machine.has_one_problem("libraries", "a library ended the process that loaded it (signal: 6", "");
}

#[test]
fn the_host_runtime_runs_a_step() {
    let built = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let mut command = Command::new(PROGRAM);
    command.args(["doctor", "--runtime", "host", "--run", "--json"]).env_remove("NVTE_EP_HOST_FAULT");
    let output = command.env("NVTE_EP_HOST_LIB", built.join("libnvte_ep_host.so")).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["usable"]), (Some(0), &true.into()), "{report:#}");
    let run = report["checks"].as_array().unwrap().last().unwrap();
    assert_eq!((&run["check"], &run["level"]), (&"run".into(), &"ok".into()), "{report:#}");
}
