//! Threads of the library's own. Signals are the program's: it may have a thread or a descriptor for them, so none may be
//! delivered to a thread that it does not know. And each has a name, by which users find it in a debugger.

use parking_lot::{Condvar, Mutex};
use std::ffi::{CStr, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

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

/// Bytes of a thread's stack.
const STACK: usize = 2 << 20;

/// What a thread is to do, and what became of it.
struct Task<F, R> {
    body: Mutex<Option<F>>,
    end: Arc<End<R>>,
}

/// How a thread ended; none while it runs, and in it none where it panicked.
#[derive(Debug)]
struct End<R> {
    result: Mutex<Option<Option<R>>>,
    is_there: Condvar,
}

/// A thread that was started. If this is dropped, the thread goes on alone.
#[derive(Debug)]
pub(crate) struct Thread<R> {
    /// None once it is joined.
    id: Option<libc::pthread_t>,
    end: Arc<End<R>>,
}

impl<R> Thread<R> {
    /// What the thread returned, if it does within `limit`; in it none where it panicked.
    pub(crate) fn wait(&self, limit: Duration) -> Option<Option<R>> {
        let mut result = self.end.result.lock();
        self.end.is_there.wait_while_for(&mut result, |result| result.is_none(), limit);
        result.take()
    }

    /// Waits for the end of the thread. What it returned; none where it panicked.
    pub(crate) fn join(mut self) -> Option<R> {
        if let Some(id) = self.id.take() {
            // SAFETY: the thread was started joinable, and this is the only one who joins or detaches it.
            unsafe { libc::pthread_join(id, std::ptr::null_mut()) };
        }
        self.end.result.lock().take().flatten()
    }
}

impl<R> Drop for Thread<R> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            // SAFETY: the thread was started joinable, and this is the only one who joins or detaches it.
            unsafe { libc::pthread_detach(id) };
        }
    }
}

extern "C" fn run<R, F: FnOnce() -> R>(task: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` gives the task to this thread.
    let task = unsafe { Arc::from_raw(task.cast_const().cast::<Task<F, R>>()) };
    let body = task.body.lock().take();
    let result = body.and_then(|body| catch_unwind(AssertUnwindSafe(body)).map_err(std::mem::forget).ok());
    *task.end.result.lock() = Some(result);
    task.end.is_there.notify_all();
    std::ptr::null_mut()
}

/// Starts a thread. The system cuts a name of more than 15 bytes off.
///
/// The standard library's threads end the process where there is no memory for one; this returns the system's error.
///
/// # Errors
/// The system's, where it has no thread or no memory left.
pub(crate) fn spawn<R: Send + 'static, F: FnOnce() -> R + Send + 'static>(
    name: &'static CStr,
    body: F,
) -> io::Result<Thread<R>> {
    let end = Arc::new(End { result: Mutex::new(None), is_there: Condvar::new() });
    let named = move || {
        // SAFETY: the call names the calling thread by a string that ends.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        body()
    };
    start(named, end)
}

fn start<R: Send + 'static, F: FnOnce() -> R + Send + 'static>(body: F, end: Arc<End<R>>) -> io::Result<Thread<R>> {
    let task = Arc::into_raw(Arc::new(Task { body: Mutex::new(Some(body)), end: Arc::clone(&end) }));
    let (mut attributes, mut id) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the call fills the attributes.
    unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) };
    // SAFETY: filled just now; the size is a valid one.
    unsafe { libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK) };
    let blocked = SignalsBlocked::new();
    // SAFETY: the function takes what it is given, which is its own from here on.
    let code = unsafe {
        libc::pthread_create(id.as_mut_ptr(), attributes.as_ptr(), run::<R, F>, task.cast_mut().cast::<c_void>())
    };
    drop(blocked);
    // SAFETY: filled above.
    unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
    if code != 0 {
        // SAFETY: no thread has it.
        drop(unsafe { Arc::from_raw(task) });
        return Err(io::Error::from_raw_os_error(code));
    }
    // SAFETY: filled where the call succeeds.
    Ok(Thread { id: Some(unsafe { id.assume_init() }), end })
}

/// One value on its way from one thread to another.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    value: Mutex<Option<T>>,
    is_there: Condvar,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { value: Mutex::new(None), is_there: Condvar::new() })
    }

    pub(crate) fn put(&self, value: T) {
        *self.value.lock() = Some(value);
        self.is_there.notify_all();
    }

    /// Waits for the value.
    pub(crate) fn take(&self) -> T {
        let mut value = self.value.lock();
        loop {
            match value.take() {
                Some(value) => return value,
                None => self.is_there.wait(&mut value),
            }
        }
    }
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
        check(spawn(c"nvte_ep_test", status).unwrap().join().unwrap());
        let waited_for = spawn(c"nvte_ep_test", status).unwrap();
        check(waited_for.wait(Duration::from_secs(60)).unwrap().unwrap());
        assert_eq!(status(), before, "the calling thread is as it was");
    }

    #[test]
    fn ends_of_threads() {
        assert_eq!(spawn(c"nvte_ep_test", || -> i32 { panic!("on purpose") }).unwrap().join(), None);
        let (go, late) = (Mailbox::new(), Mailbox::new());
        let thread = {
            let (go, late) = (Arc::clone(&go), Arc::clone(&late));
            spawn(c"nvte_ep_test", move || late.put(go.take())).unwrap()
        };
        assert!(thread.wait(Duration::from_millis(10)).is_none(), "it waits");
        // A thread that nobody waits for goes on.
        drop(thread);
        go.put(5);
        assert_eq!(late.take(), 5);
    }
}
