//! Where and how ranks meet: unique ids, files, namespaces, variables.

mod common;

use std::ffi::c_char;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::ptr;

use common::*;
use nvte_ep_bindings::*;

fn id_of(text: &str) -> ncclUniqueId {
    let mut id = ncclUniqueId::default();
    for (there, byte) in id.internal.iter_mut().zip(text.bytes()) {
        *there = c_char::from_ne_bytes([byte]);
    }
    id
}

fn join(id: ncclUniqueId) -> u32 {
    let device = take_devices(1);
    // SAFETY: no preconditions.
    ok(unsafe { cudaSetDevice(device) });
    let mut comm = ptr::null_mut();
    // SAFETY: the result pointer is ours.
    unsafe { ncclCommInitRank(&raw mut comm, 1, id, 0) }
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("nvte-ep-meeting-{name}-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    folder
}

#[test]
fn an_id_that_names_a_file_of_others_leaves_it_alone() {
    let folder = folder("others");
    let digits = "0123456789abcdef".repeat(2);
    for (name, words) in [
        ("config".to_owned(), "the unique id was not made by ncclGetUniqueId of the host runtime"),
        (format!("nvte-ep-{digits}"), " is no rendezvous file of this user's ranks"),
    ] {
        let file = folder.join(name);
        std::fs::write(&file, "thirty-two bytes of other things").unwrap();
        assert_eq!(join(id_of(&format!("nvte-ep-host:{}", file.display()))), ncclInvalidArgument);
        assert!(nccl_error().contains(words), "{}", nccl_error());
        assert_eq!(std::fs::read(&file).unwrap(), b"thirty-two bytes of other things");
    }
    // No link is followed, and no folder taken for a file.
    let target = folder.join("target");
    std::fs::write(&target, "").unwrap();
    let link = folder.join(format!("nvte-ep-{}", digits.replace('0', "f")));
    std::os::unix::fs::symlink(&target, &link).unwrap();
    assert_ne!(join(id_of(&format!("nvte-ep-host:{}", link.display()))), ncclSuccess);
    assert_eq!(std::fs::metadata(&target).unwrap().len(), 0);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// A meeting that fails leaves no file.
#[test]
fn a_file_that_cannot_be_made_large_enough_is_removed() {
    let id = unique_id();
    let path: String = id.internal.iter().map(|c| char::from(c.to_ne_bytes()[0])).filter(|c| *c != '\0').collect();
    let path = PathBuf::from(path.strip_prefix("nvte-ep-host:").unwrap());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "meets_without_room", "--ignored", "--nocapture"]).env("NVTE_EP_HOST_TEST_ID", hex(&id));
    let limit = || {
        // A file that grows beyond this fails, as on a full file system.
        let none = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
        // SAFETY: the structure is ours.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const none) };
        // SAFETY: no handler is given.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        Ok(())
    };
    // SAFETY: between fork and exec only system calls.
    unsafe { child.pre_exec(limit) };
    let output = child.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(err.contains("cannot reserve the control block"), "{err}");
    assert!(!path.exists());
}

#[test]
#[ignore = "run by a_file_that_cannot_be_made_large_enough_is_removed"]
fn meets_without_room() {
    let text = std::env::var("NVTE_EP_HOST_TEST_ID").unwrap();
    let mut id = ncclUniqueId::default();
    for (index, byte) in id.internal.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap().cast_signed();
    }
    assert_eq!(join(id), ncclSystemError);
}

/// Ranks in PID namespaces of their own, as in containers: process numbers mean other processes there.
#[test]
fn ranks_of_other_pid_namespaces_are_refused_in_words() {
    let id = hex(&unique_id());
    let children = [0, 1].map(|rank| {
        Command::new("unshare")
            .args(["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "joins_from_a_container", "--ignored", "--nocapture", "--test-threads=1"])
            .env("NVTE_EP_HOST_TEST_ROLE", format!("{rank} 2 {id}"))
            .env_remove("NVTE_EP_HOST_DEVICES")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let words = format!("rank {} is in another PID namespace than rank {rank} (another container)", 1 - rank);
        let either = format!("rank {rank} is in another PID namespace than rank {} (another container)", 1 - rank);
        assert!(error.contains(&words) || error.contains(&either), "rank {rank}: {error}");
    }
}

#[test]
#[ignore = "run by ranks_of_other_pid_namespaces_are_refused_in_words"]
fn joins_from_a_container() {
    join_as_process();
}

#[test]
fn a_variable_that_cannot_be_read_is_an_error() {
    for (name, value, rule) in [
        ("NVTE_EP_HOST_DEVICES", "two", "a number from 1 to "),
        ("NVTE_EP_HOST_TIMEOUT_MS", "60s", "a number from 1 to "),
        ("NVTE_EP_HOST_CHECK", "Warn", "off, warn or error"),
    ] {
        let id = hex(&unique_id());
        let child = spawn_rank_with("joins", &id, 0, 1, 60_000, &[(name, value)]);
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(error.contains(&format!("nvte_ep_host: {name} must be {rule}")), "{error}");
        assert!(error.contains(&format!(", got {value:?}")), "{error}");
    }
}

#[test]
#[ignore = "run by a_variable_that_cannot_be_read_is_an_error"]
fn joins() {
    join_as_process().leave();
}
