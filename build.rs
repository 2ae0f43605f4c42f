//! Builds `shim/boundary.cc`, the only C++ of the libraries.

fn main() {
    println!("cargo::rerun-if-changed=shim/boundary.cc");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(true)
        .warnings_into_errors(false)
        .flag_if_supported("-fvisibility=hidden")
        .file("shim/boundary.cc")
        .compile("nvte_ep_shim");
}
