//! The folder where NCCL EP keeps its compiled kernels, which it aborts over if it cannot use it.

use super::Lookup;
use crate::error::{Error, Result};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

pub(super) const VARIABLE: &str = "NCCL_EP_JIT_CACHE_DIR";

/// What NCCL EP leaves in a kernel's folder after a compile that failed, and does not try again while it is there.
const MARKER: &str = "compile.failed";

/// One shape's kernels, some 15 folders, take 15 MB.
const ENOUGH: u64 = 64 << 20;
/// One kernel takes 1 MB.
const LEAST: u64 = 4 << 20;

/// The folder for compiled kernels: the user's choice, or one of this user's own (NCCL EP's default is shared by all
/// users of the machine). It has to be writable, and nobody else's.
pub(super) fn directory(env: Lookup<'_>) -> Result<PathBuf> {
    let user = user();
    let chosen = env(VARIABLE);
    let folder = place(env);
    let refuse = |why: String| Error::Preflight {
        problem: format!("NCCL EP's compile cache {} {why}", folder.display()),
        remedy: format!("set {VARIABLE} to a folder that you can write"),
    };
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(&folder).map_err(|e| refuse(format!("cannot be made: {e}")))?;
    let facts = folder.metadata().map_err(|e| refuse(format!("cannot be read: {e}")))?;
    if chosen.is_none() && facts.uid() != user {
        return Err(refuse(format!("belongs to user {}", facts.uid())));
    }
    if let Some(text) = trust(facts.uid(), facts.mode(), user) {
        tracing::warn!(target: "nvte_ep", "{}: {text}", folder.display());
    }
    let probe = folder.join(format!(".nvte_ep_probe_{}", std::process::id()));
    std::fs::write(&probe, b"").map_err(|e| refuse(format!("cannot be written: {e}")))?;
    let _ = std::fs::remove_file(&probe);
    match free_bytes(&folder) {
        Some(free) if free < LEAST => return Err(refuse(format!("has {free} bytes of disk space left"))),
        Some(free) if free < ENOUGH => {
            tracing::warn!(target: "nvte_ep", "{}: {free} bytes of disk space are left", folder.display());
        }
        Some(_) | None => {}
    }
    for marker in failures(&folder) {
        // Ours to tidy up: without the marker the compile is tried again, and if it fails it says why.
        let removed = chosen.is_none() && std::fs::remove_file(&marker).is_ok();
        let text = if removed { "removed, so it is tried again" } else { "remove it to have it tried again" };
        tracing::warn!(target: "nvte_ep", "{}: a kernel failed to compile here before: {text}", marker.display());
    }
    Ok(folder)
}

fn user() -> u32 {
    // SAFETY: cannot fail and touches nothing.
    unsafe { libc::geteuid() }
}

/// Where the folder is, or will be.
pub(super) fn place(env: Lookup<'_>) -> PathBuf {
    let default = || {
        let temporary = env("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
        temporary.join(format!("nvte_ep_jit_{}", user()))
    };
    env(VARIABLE).map_or_else(default, PathBuf::from)
}

/// Why code from this folder is a risk, if it is.
pub(super) fn trust(owner: u32, mode: u32, user: u32) -> Option<String> {
    if owner != user {
        return Some(format!("belongs to user {owner}, whose compiled code would run here"));
    }
    (mode & 0o022 != 0)
        .then(|| format!("others may write it (mode {:o}), and their code would run here", mode & 0o7777))
}

fn free_bytes(folder: &Path) -> Option<u64> {
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut facts = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path is NUL-terminated and `facts` is writable.
    if unsafe { libc::statvfs(path.as_ptr(), facts.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: all-zero is valid, and the call filled it.
    let facts = unsafe { facts.assume_init() };
    Some(facts.f_bavail.saturating_mul(facts.f_frsize))
}

/// The failure markers in `folder`, which has a folder for each kernel, all in one folder in it.
pub(super) fn failures(folder: &Path) -> Vec<PathBuf> {
    let inside = |folder: &Path| -> Vec<PathBuf> {
        let entries = folder.read_dir().into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    };
    let first = inside(folder);
    let second: Vec<PathBuf> = first.iter().flat_map(|folder| inside(folder)).collect();
    let kernels = first.into_iter().chain(second).map(|kernel| kernel.join(MARKER));
    kernels.filter(|marker| marker.exists()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    #[test]
    fn failed_compiles_are_found_and_in_our_own_folder_tried_again() {
        let root = std::env::temp_dir().join(format!("nvte_ep_cache_{}", std::process::id()));
        // SAFETY: cannot fail and touches nothing.
        let own = root.join(format!("nvte_ep_jit_{}", unsafe { libc::geteuid() }));
        let marker = own.join("nccl_ep_jit/0123456789abcdef/compile.failed");
        std::fs::create_dir_all(marker.parent().unwrap()).unwrap();
        std::fs::write(&marker, "").unwrap();
        assert_eq!(failures(&own), std::slice::from_ref(&marker));

        let named = |name: &str| (name == VARIABLE).then(|| own.clone().into_os_string());
        assert_eq!(directory(&named).unwrap(), own);
        assert!(marker.exists(), "the user's folder is the user's");
        let default = |name: &str| (name == "TMPDIR").then(|| OsString::from(&root));
        assert_eq!(directory(&default).unwrap(), own);
        assert!(!marker.exists());
        assert!(free_bytes(&own).is_some_and(|free| free > 0));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn other_peoples_folders_are_told() {
        assert_eq!(trust(7, 0o40700, 7), None);
        assert_eq!(trust(0, 0o40755, 7).unwrap(), "belongs to user 0, whose compiled code would run here");
        let text = trust(7, 0o41777, 7).unwrap();
        assert_eq!(text, "others may write it (mode 1777), and their code would run here");
    }
}
