//! Sets the SONAME.

include!("../soname.rs");

fn main() {
    println!("cargo::rerun-if-changed=../soname.rs");
    soname("libtransformer_engine", None);
}
