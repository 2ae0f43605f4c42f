//! Builds `shim/`, the only C++ of the libraries, the table of error codes from docs/errors.md, and the list of compiled kernels.

use std::fmt::Write;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=shim");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(true)
        .warnings_into_errors(false)
        .flag_if_supported("-fvisibility=hidden")
        .files(["shim/boundary.cc", "shim/thread_exit.cc"])
        .compile("nvte_ep_shim");
    error_codes();
    cubins();
}

/// The machine code that packaging/cubins.sh left in the folder NVTE_EP_CUBINS, by architecture; without one none.
fn cubins() {
    println!("cargo::rerun-if-env-changed=NVTE_EP_CUBINS");
    let mut table = String::from("&[\n");
    if let Some(folder) = std::env::var_os("NVTE_EP_CUBINS") {
        let folder = Path::new(&folder).canonicalize().expect("NVTE_EP_CUBINS is a folder");
        for architecture in [90, 100, 120] {
            let path = folder.join(format!("native_sm_{architecture}.cubin"));
            println!("cargo::rerun-if-changed={}", path.display());
            assert!(path.is_file(), "{} is missing: packaging/cubins.sh makes it", path.display());
            writeln!(table, "    ({architecture}, &Aligned(*include_bytes!({path:?}))),").expect("a string takes all");
        }
    }
    table.push(']');
    let out = std::env::var_os("OUT_DIR").expect("Cargo sets it");
    std::fs::write(Path::new(&out).join("cubins.rs"), table).expect("the folder is Cargo's for this");
}

/// Of each entry its number and the parts of its texts between what is filled in.
fn error_codes() {
    println!("cargo::rerun-if-changed=docs/errors.md");
    let document = std::fs::read_to_string("docs/errors.md").expect("the document is part of the sources");
    let mut table = String::from("&[\n");
    for entry in document.split("\n* <a id=\"NVTE-EP-").skip(1) {
        let number: u32 = entry.split('"').next().and_then(|text| text.parse().ok()).expect("a number");
        // Up to an empty line, and what may be filled in stands behind a "with".
        let head = entry.split("\n\n").next().unwrap_or_default();
        let head = head.split_whitespace().collect::<Vec<_>>().join(" ");
        for text in head.split("` with `").next().unwrap_or_default().split('`').skip(1).step_by(2) {
            let parts: Vec<&str> = text.split("{}").filter(|part| !part.is_empty()).collect();
            writeln!(table, "    ({number}, &{parts:?}),").expect("a string takes all");
        }
    }
    table.push_str("]\n");
    let out = std::env::var_os("OUT_DIR").expect("Cargo sets it");
    std::fs::write(Path::new(&out).join("error_codes.rs"), table).expect("the folder is Cargo's for this");
}
