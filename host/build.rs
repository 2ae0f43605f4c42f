//! Compiles the kernels, names the library and lays out, beside it, the folder through which programs find it as
//! CUDA and NCCL.

use std::env;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Library names that programs and `libnvte_ep.so` look for.
const SONAMES: [&str; 5] = ["libcuda.so.1", "libcudart.so.12", "libcudart.so.13", "libnccl.so.2", "libnccl_ep.so.0"];

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvte_ep_host.so.1");
    // Stream workers may still run when a program unloads the library, so its code stays mapped.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("OUT_DIR is unset"))?);
    // OUT_DIR is <profile folder>/build/<package>-<hash>/out.
    let profile = out_dir.ancestors().nth(3).ok_or_else(|| io::Error::other("OUT_DIR has no profile folder"))?;
    write_not_supported(&out_dir)?;
    compile_kernels();
    link("libnvte_ep_host.so", &profile.join("libnvte_ep_host.so.1"))?;
    let folder = profile.join("host_runtime");
    std::fs::create_dir_all(&folder)?;
    for name in SONAMES {
        link("../libnvte_ep_host.so", &folder.join(name))?;
    }
    Ok(())
}

/// Compiles the kernels for the CPU.
fn compile_kernels() {
    println!("cargo::rerun-if-changed=native");
    println!("cargo::rerun-if-changed=../kernels/native");
    println!("cargo::rerun-if-changed=../kernels/topk_idx.cu");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .cpp_link_stdlib(None)
        .include("../kernels")
        .warnings(true)
        .extra_warnings(true)
        // Sums are rounded as on a GPU, whatever the profile.
        .flag("-ffp-contract=off")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .flag("-fvisibility=hidden")
        .opt_level(2)
        // Pragmas for a GPU's compiler.
        .flag("-Wno-unknown-pragmas")
        .file("native/kernels.cc")
        .file("native/topk_idx.cc")
        .compile("nvte_ep_host_native");
}

/// Writes the functions of `not_supported.txt`. They take no parameters: who calls them cleans up its own.
fn write_not_supported(out_dir: &Path) -> io::Result<()> {
    const LIST: &str = "not_supported.txt";
    println!("cargo::rerun-if-changed={LIST}");
    let functions: String = std::fs::read_to_string(LIST)?
        .lines()
        .map(|name| {
            format!(
                "/// Not supported.\n///\n/// # Safety\n///\n/// Always safe to call.\n#[unsafe(no_mangle)]\n\
                 pub unsafe extern \"C\" fn {name}() -> u32 {{\n    refuse(\"{name}\")\n}}\n"
            )
        })
        .collect();
    std::fs::write(out_dir.join("not_supported.rs"), functions)
}

/// Makes `at` a symlink to `target`, replacing what was there.
fn link(target: &str, at: &Path) -> io::Result<()> {
    match std::fs::remove_file(at) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    match symlink(target, at) {
        // Another build of the same profile folder made it in between.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}
