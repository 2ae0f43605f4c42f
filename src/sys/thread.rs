//! Threads of the library's own. Signals are the program's: it may have a thread or a descriptor for them, so none may be
//! delivered to a thread that it does not know. And each has a name, by which users find it in a debugger.

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// All signals blocked on the calling thread while this lives; a thread that is started meanwhile has them blocked for good.
struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    fn new() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the call fills the set.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: the first set is filled, and the call fills the second; it fails for no valid first argument.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: filled just now.
        Self { before: unsafe { before.assume_init() } }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set is the one that the thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

/// Starts a thread. A name of more than 15 bytes is cut off by the system.
///
/// # Errors
/// The system's, where it has no thread left.
pub(crate) fn spawn<R: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> R + Send + 'static,
) -> io::Result<JoinHandle<R>> {
    let _blocked = SignalsBlocked::new();
    Builder::new().name(name.into()).spawn(body)
}

/// Starts a thread of `scope`, as [`spawn`] does.
///
/// # Errors
/// As [`spawn`].
pub(crate) fn spawn_scoped<'scope, R: Send + 'scope>(
    name: &str,
    scope: &'scope Scope<'scope, '_>,
    body: impl FnOnce() -> R + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, R>> {
    let _blocked = SignalsBlocked::new();
    Builder::new().name(name.into()).spawn_scoped(scope, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The calling thread's name and its blocked signals.
    fn status() -> (String, u64) {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        (field("Name:"), u64::from_str_radix(&field("SigBlk:"), 16).unwrap())
    }

    #[test]
    fn threads_take_no_signals_and_have_names() {
        let before = status();
        // All but SIGKILL and SIGSTOP, which nobody blocks, and the C library's own two.
        let all = !(1u64 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1) | 3 << 31);
        let check = |(name, blocked): (String, u64)| {
            assert_eq!(name, "nvte_ep_test");
            assert_eq!(blocked & all, all, "{blocked:x}");
        };
        check(spawn("nvte_ep_test", status).unwrap().join().unwrap());
        check(std::thread::scope(|scope| spawn_scoped("nvte_ep_test", scope, status).unwrap().join().unwrap()));
        assert_eq!(status(), before, "the calling thread is as it was");
    }
}
