//! Sets the SONAME: the primary library's, since the stub stands in for it.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvte_ep.so.1");
}
