// Included by the build scripts of the cdylibs: that they stay loaded, the SONAME, and the link of that name beside the
// library, which a program linked in the build folder needs at run time.

fn soname(library: &str, version: Option<u32>) {
    let name = version.map_or(format!("{library}.so"), |version| format!("{library}.so.{version}"));
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{name}");
    // A group's threads, and whoever unwinds out of the library, run its code after a dlclose.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    if version.is_none() {
        return;
    }
    // OUT_DIR is <profile folder>/build/<package>/out.
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").expect("Cargo sets it"));
    let profile = out.ancestors().nth(3).expect("OUT_DIR lies three folders down");
    link(&format!("{library}.so"), &profile.join(name));
}

fn link(target: &str, path: &std::path::Path) {
    if std::fs::read_link(path).is_ok_and(|present| present == std::path::Path::new(target)) {
        return;
    }
    let _ = std::fs::remove_file(path);
    if let Err(error) = std::os::unix::fs::symlink(target, path) {
        println!("cargo::warning={}: {error}", path.display());
    }
}
