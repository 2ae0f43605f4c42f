//! The built library: its symbols, and its place as CUDA and NCCL.

use std::ffi::{CString, c_int, c_void};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where test binaries are, and the library as it was built for them. The copy in the profile folder is only renewed by
/// `cargo build`.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libnvte_ep_host.so")
}

#[test]
fn exports_are_exactly_the_list() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(built()).output().expect("nm is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut found: Vec<&str> = text.lines().filter_map(|line| line.split(' ').next_back()).collect();
    found.sort_unstable();
    let listed: Vec<&str> = include_str!("../exports.txt").lines().collect();
    assert_eq!(found, listed);
}

/// Loads a library and calls one of its version functions.
fn version(path: &Path, symbol: &std::ffi::CStr) -> c_int {
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: loading this library runs no code of its own.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{path:?} cannot be loaded");
    // SAFETY: the handle is live and the symbol a C string.
    let address = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    assert!(!address.is_null(), "{path:?}: {symbol:?}");
    // SAFETY: all the functions asked for here have this signature.
    let function: unsafe extern "C" fn(*mut c_int) -> u32 = unsafe { std::mem::transmute::<*mut c_void, _>(address) };
    let mut version = 0;
    // SAFETY: the result pointer is ours.
    assert_eq!(unsafe { function(&raw mut version) }, 0);
    // SAFETY: the handle is live; the library itself stays, as it is linked with nodelete.
    unsafe { libc::dlclose(library) };
    version
}

#[test]
fn programs_find_it_under_the_names_they_look_for() {
    let library = built();
    let profile = library.ancestors().nth(2).unwrap();
    assert_eq!(std::fs::read_link(profile.join("libnvte_ep_host.so.1")).unwrap(), Path::new("libnvte_ep_host.so"));
    let folder = std::env::temp_dir().join(format!("nvte-ep-host-names-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    for (name, symbol, expected) in [
        ("libcuda.so.1", c"cuDriverGetVersion", 13000),
        ("libcudart.so.12", c"cudaRuntimeGetVersion", 13000),
        ("libcudart.so.13", c"cudaDriverGetVersion", 13000),
        ("libnccl.so.2", c"ncclGetVersion", 23007),
        ("libnccl.so.2", c"ncclEpGetVersion", 200),
    ] {
        let made = std::fs::read_link(profile.join("host_runtime").join(name)).unwrap();
        assert_eq!(made, Path::new("../libnvte_ep_host.so"));
        let link = folder.join(name);
        let _ = std::fs::remove_file(&link);
        symlink(&library, &link).unwrap();
        assert_eq!(version(&link, symbol), expected, "{name}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
