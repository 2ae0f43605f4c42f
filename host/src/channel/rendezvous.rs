//! Where ranks meet: the file that a unique id names.

use std::ffi::{CString, c_char};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nvte_ep_bindings::{ncclInvalidArgument, ncclSystemError, ncclUniqueId};

use super::control::{Control, MAGIC, system};
use crate::fault::{Fault, Outcome};
use crate::sys;

/// Marks a unique id made by this library; the path of the rendezvous file follows.
const ID_PREFIX: &[u8] = b"nvte-ep-host:";
/// What the name of a rendezvous file begins with; 32 hexadecimal digits follow.
const NAME_PREFIX: &str = "nvte-ep-";
const NAME_DIGITS: usize = 32;

/// Folder for rendezvous files: the first with room for one.
pub fn folder() -> PathBuf {
    let temporary = std::env::temp_dir();
    first_with_room(&[Path::new("/dev/shm"), &temporary]).unwrap_or(temporary)
}

fn first_with_room(folders: &[&Path]) -> Option<PathBuf> {
    let needed = Control::bytes(super::MAX_RANKS) as u64;
    folders.iter().find(|folder| is_writable(folder) && sys::free_space(folder) >= needed).map(|it| it.to_path_buf())
}

fn is_writable(folder: &Path) -> bool {
    CString::new(folder.as_os_str().as_bytes()).is_ok_and(|path| {
        // SAFETY: path is a C string that lives through the call.
        unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
    })
}

/// A fresh unique id.
pub fn unique_id() -> Outcome<ncclUniqueId> {
    let bytes = sys::random_bytes()
        .map_err(|e| Fault::nccl(ncclSystemError, format!("ncclGetUniqueId: no random bytes: {e}")))?;
    let name: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    let path = std::path::absolute(folder().join(format!("{NAME_PREFIX}{name}")))
        .map_err(|e| Fault::nccl(ncclSystemError, format!("ncclGetUniqueId: no folder to meet in: {e}")))?;
    let mut id = ncclUniqueId::default();
    let text = [ID_PREFIX, path.as_os_str().as_bytes()].concat();
    if text.len() >= id.internal.len() {
        let text = format!("ncclGetUniqueId: the temporary folder's name is too long: {}", path.display());
        return Err(Fault::nccl(ncclSystemError, text));
    }
    for (there, byte) in id.internal.iter_mut().zip(text) {
        *there = c_char::from_ne_bytes([byte]);
    }
    Ok(id)
}

/// The file that an id names, which has to be one that [`unique_id`] may have named.
pub fn path_of(id: &ncclUniqueId) -> Outcome<PathBuf> {
    let bytes: Vec<u8> = id.internal.iter().map(|b| b.to_ne_bytes()[0]).take_while(|b| *b != 0).collect();
    let path = bytes.strip_prefix(ID_PREFIX).map(|path| Path::new(std::ffi::OsStr::from_bytes(path)));
    let is_ours = |path: &&Path| {
        let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(NAME_PREFIX));
        let digits = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        path.is_absolute()
            && !path.components().any(|part| part == std::path::Component::ParentDir)
            && name.is_some_and(|name| name.len() == NAME_DIGITS && name.bytes().all(digits))
    };
    path.filter(is_ours).map(Path::to_path_buf).ok_or_else(|| {
        let text = "ncclCommInitRank: the unique id was not made by ncclGetUniqueId of the host runtime";
        Fault::nccl(ncclInvalidArgument, text)
    })
}

/// Opens the rendezvous file, which the first rank creates; a file of others is not touched.
pub(super) fn open(path: &Path) -> Outcome<OwnedFd> {
    let cannot = |e: std::io::Error| system(&format!("cannot open the rendezvous file {}", path.display()), &e);
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(cannot)?;
    let metadata = file.metadata().map_err(cannot)?;
    let mut magic = [0; 4];
    // A peer may have made room and not have written yet.
    let read = if metadata.is_file() { file.read_at(&mut magic, 0).map_err(cannot)? } else { 0 };
    let is_block = read == 0 || (read == 4 && [0, MAGIC].contains(&u32::from_ne_bytes(magic)));
    // SAFETY: no preconditions.
    let own = unsafe { libc::geteuid() };
    if !metadata.is_file() || metadata.uid() != own || !is_block {
        let text = format!("ncclCommInitRank: {} is no rendezvous file of this user's ranks", path.display());
        return Err(Fault::nccl(ncclInvalidArgument, text));
    }
    let file = OwnedFd::from(file);
    // Until all have met: `nvte-ep launch` and `run` remove old rendezvous files that nobody has locked.
    // SAFETY: the descriptor is open. Where the file system has no locks, the file may be removed while ranks wait.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH) };
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_of(text: &str) -> ncclUniqueId {
        let mut id = ncclUniqueId::default();
        for (there, byte) in id.internal.iter_mut().zip(text.bytes()) {
            *there = c_char::from_ne_bytes([byte]);
        }
        id
    }

    #[test]
    fn an_id_names_a_rendezvous_file_and_no_other() {
        let made = path_of(&unique_id().unwrap()).unwrap();
        assert!(made.is_absolute() && made.parent() == Some(&folder()), "{}", made.display());
        let digits = "0123456789abcdef".repeat(2);
        assert!(path_of(&id_of(&format!("nvte-ep-host:/tmp/nvte-ep-{digits}"))).is_ok());
        for other in [
            String::new(),
            format!("/tmp/nvte-ep-{digits}"),
            "nvte-ep-host:".to_owned(),
            "nvte-ep-host:/etc/passwd".to_owned(),
            format!("nvte-ep-host:nvte-ep-{digits}"),
            format!("nvte-ep-host:/tmp/../etc/nvte-ep-{digits}"),
            format!("nvte-ep-host:/tmp/nvte-ep-{digits}0"),
            format!("nvte-ep-host:/tmp/nvte-ep-{}Z", &digits[1..]),
            format!("nvte-ep-host:/tmp/nvte-ep-{digits}/passwd"),
        ] {
            let fault = path_of(&id_of(&other)).unwrap_err();
            assert!(fault.text.ends_with("was not made by ncclGetUniqueId of the host runtime"), "{other}");
        }
    }

    #[test]
    fn a_folder_without_room_is_passed_over() {
        let temporary = std::env::temp_dir();
        // File systems of the kernel have no room and cannot be written.
        assert_eq!(first_with_room(&[Path::new("/proc"), &temporary]), Some(temporary));
        assert_eq!(first_with_room(&[Path::new("/proc"), Path::new("/nonexistent")]), None);
    }
}
