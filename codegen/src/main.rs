//! Regenerates what is generated and committed: the exported functions, their C headers (syn, cbindgen) and the guide's reference, Rust bindings
//! (bindgen) and PTX (NVRTC).
//!
//! `cargo run -p nvte-ep-codegen -- headers [--check]`, `... -- bindings [--check] --wheels DIR` and
//! `... -- kernels [--check] --nvrtc FILE`.
//! With `--check` nothing is written; a file that differs from what would be written is an error that names it.

mod bindings;
mod exports;
mod headers;
mod kernels;
mod reference;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// One generated file: where it belongs, relative to the repository root, and its text.
pub struct Output {
    path: PathBuf,
    text: String,
}

fn main() -> ExitCode {
    match run() {
        Ok(message) => {
            println!("{message}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("codegen: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String, String> {
    let usage = "usage: nvte-ep-codegen headers|bindings|kernels [--check] [--wheels DIR] [--nvrtc FILE]";
    let (mut what, mut check, mut wheels, mut nvrtc) = (None, false, None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "headers" | "bindings" | "kernels" => what = Some(argument),
            "--check" => check = true,
            "--wheels" => wheels = Some(PathBuf::from(arguments.next().ok_or(usage)?)),
            "--nvrtc" => nvrtc = Some(PathBuf::from(arguments.next().ok_or(usage)?)),
            _ => return Err(usage.into()),
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("codegen/ lies in the repository root");
    let stages: Vec<Vec<Output>> = match what.as_deref() {
        // Headers are made from the exported functions, which are written first.
        Some("headers") => {
            let exports = exports::generate(root)?;
            if !check {
                write(root, &exports)?;
            }
            let headers = headers::generate(root)?;
            let reference = reference::generate(root, &headers)?;
            vec![exports, headers, reference]
        }
        Some("bindings") => {
            vec![vec![bindings::generate(&wheels.ok_or("bindings needs --wheels \"$(qa/wheels.sh)\"")?)?]]
        }
        Some("kernels") => vec![kernels::generate(root, &nvrtc.ok_or("kernels needs --nvrtc \"$(qa/nvrtc.sh)\"")?)?],
        _ => return Err(usage.into()),
    };
    let outputs: Vec<Output> = stages.into_iter().flatten().collect();
    if !check {
        write(root, &outputs)?;
        return Ok(format!("{} file(s) written", outputs.len()));
    }
    let stale: Vec<_> = outputs
        .iter()
        .filter(|output| !is_current(root, output))
        .map(|output| output.path.display().to_string())
        .collect();
    if !stale.is_empty() {
        return Err(format!("stale: {}; run the same command without --check and commit", stale.join(", ")));
    }
    Ok(format!("{} file(s) up to date", outputs.len()))
}

fn is_current(root: &Path, output: &Output) -> bool {
    std::fs::read_to_string(root.join(&output.path)).is_ok_and(|committed| committed == output.text)
}

fn write(root: &Path, outputs: &[Output]) -> Result<(), String> {
    for output in outputs.iter().filter(|output| !is_current(root, output)) {
        let path = root.join(&output.path);
        std::fs::create_dir_all(path.parent().expect("an output lies in a folder")).map_err(|e| e.to_string())?;
        std::fs::write(&path, &output.text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(())
}
