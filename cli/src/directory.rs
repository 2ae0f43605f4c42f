//! Directories of a run: who makes them, how it shows that somebody still uses them, and how those of dead runs are swept.
//!
//! Whoever uses a directory holds a lock on the file [`LOCK`] in it. The kernel releases the lock when the process ends,
//! however it ends, so a directory whose lock is free belongs to nobody. So do the host runtime's rendezvous files, which
//! are locked themselves.

use crate::Outcome;
use rustix::fs::FlockOperation;
use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The locked file of a directory.
const LOCK: &str = "lock";
/// What all our names in temporary folders begin with.
const PREFIX: &str = "nvte-ep-";
/// Younger files are left alone: between making a file and locking it there is a moment.
const GRACE: Duration = Duration::from_secs(600);
/// Where the host runtime's ranks meet, unless it is not writable.
const SHARED_MEMORY: &str = "/dev/shm";

/// The folder of temporary files, as an absolute path: ranks may change their working directory.
fn temporary_folder() -> Outcome<PathBuf> {
    let folder = std::env::temp_dir();
    Ok(std::path::absolute(&folder).map_err(|error| format!("TMPDIR: {}: {error}", folder.display()))?)
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Opens and locks the directory's lock file; several ranks may hold it.
fn lock(directory: &Path) -> Outcome<File> {
    let path = directory.join(LOCK);
    let file = File::create(&path).and_then(|file| {
        rustix::fs::flock(&file, FlockOperation::LockShared)?;
        Ok(file)
    });
    Ok(file.map_err(|error| format!("cannot lock {}: {error}", path.display()))?)
}

/// A new directory that only this user may enter, removed with its owner.
#[derive(Debug)]
pub struct PrivateDirectory {
    directory: tempfile::TempDir,
    _lock: File,
}

impl PrivateDirectory {
    /// Makes it in the temporary folder, and sweeps what dead runs have left there.
    pub fn new() -> Outcome<Self> {
        let folder = temporary_folder()?;
        sweep(&folder);
        if folder != Path::new(SHARED_MEMORY) {
            sweep(Path::new(SHARED_MEMORY));
        }
        let permissions = std::fs::Permissions::from_mode(0o700);
        let made = tempfile::Builder::new().prefix(PREFIX).permissions(permissions).tempdir_in(&folder);
        let directory = made.map_err(|error| format!("cannot create a directory in {}: {error}", folder.display()))?;
        Ok(Self { _lock: lock(directory.path())?, directory })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// The directory that all ranks of the launcher's job `job` find, made by whoever comes first, and its lock.
pub fn job_directory(job: &str) -> Outcome<(PathBuf, File)> {
    let user = user();
    let word: String = job.bytes().map(|byte| if byte.is_ascii_alphanumeric() { byte as char } else { '-' }).collect();
    let path = temporary_folder()?.join(format!("{PREFIX}{user}-{word}"));
    match std::fs::DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(format!("cannot create {}: {error}", path.display()).into());
        }
        _ => {}
    }
    let found = std::fs::symlink_metadata(&path)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        let path = path.display();
        return Err(format!("{path} is not a directory that only this user may enter: remove it").into());
    }
    let lock = lock(&path)?;
    Ok((path, lock))
}

/// Removes the directory; a file that appears meanwhile may keep it, which harms nobody.
pub fn remove(directory: &Path) {
    drop(std::fs::remove_dir_all(directory));
}

/// Removes what dead runs of this user have left in a folder.
fn sweep(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let path = entry.path();
        let Ok(found) = std::fs::symlink_metadata(&path) else { continue };
        // The host runtime names its rendezvous files after 128 random bits.
        let rendezvous = rest.len() == 32 && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
        if found.is_dir() && abandoned(&path.join(LOCK)) {
            remove(&path);
        } else if found.is_file() && rendezvous && abandoned(&path) {
            drop(std::fs::remove_file(&path));
        }
    }
}

/// Whether this is an older file of this user that nobody has locked.
fn abandoned(path: &Path) -> bool {
    let open = || -> std::io::Result<bool> {
        let file = File::options().read(true).open(path)?;
        let found = file.metadata()?;
        let old = found.modified()?.elapsed().is_ok_and(|age| age > GRACE);
        Ok(old && found.uid() == user() && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
    };
    open().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn aged(path: &Path) {
        let file = File::options().append(true).create(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - 2 * GRACE).unwrap();
    }

    #[test]
    fn what_nobody_uses_is_swept_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["nvte-ep-dead", "nvte-ep-young", "nvte-ep-used", "nvte-ep-unlocked", "other"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        for name in ["nvte-ep-dead", "nvte-ep-used", "other"] {
            std::fs::write(at(name).join("id"), "x").unwrap();
            aged(&at(name).join(LOCK));
        }
        std::fs::write(at("nvte-ep-young").join(LOCK), "").unwrap();
        let used = File::open(at("nvte-ep-used").join(LOCK)).unwrap();
        rustix::fs::flock(&used, FlockOperation::LockShared).unwrap();
        let dead = format!("nvte-ep-{}", "0a".repeat(16));
        let meeting = format!("nvte-ep-{}", "0b".repeat(16));
        for name in [&dead, &meeting, "nvte-ep-notes"] {
            aged(&at(name));
        }
        let held = File::open(at(&meeting)).unwrap();
        rustix::fs::flock(&held, FlockOperation::LockShared).unwrap();
        sweep(folder.path());
        let mut left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        let mut expected = [&meeting, "nvte-ep-notes", "nvte-ep-unlocked", "nvte-ep-used", "nvte-ep-young", "other"]
            .map(str::to_owned);
        expected.sort();
        assert_eq!(left, expected);
    }

    #[test]
    fn private_directories_are_locked_and_go_with_their_owner() {
        let directory = PrivateDirectory::new().unwrap();
        let path = directory.path().to_owned();
        assert!(path.is_absolute());
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        aged(&path.join(LOCK));
        sweep(path.parent().unwrap());
        assert!(path.exists(), "it is in use");
        drop(directory);
        assert!(!path.exists());
    }

    #[test]
    fn a_job_directory_is_found_again_and_guarded() {
        let job = format!("test {}", std::process::id());
        let (path, _lock) = job_directory(&job).unwrap();
        assert_eq!(job_directory(&job).unwrap().0, path);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(job_directory(&job).unwrap_err().to_string().contains("only this user"));
        remove(&path);
    }
}
