//! Waits that end: each has a deadline, or ends when the library knows that it is futile.

use crate::error::{Error, Result};
use crate::sys::cuda::{Cuda, Stream};
use crate::sys::thread;
use nvte_ep_bindings as b;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a wait asks whether it is futile.
pub(crate) const PERIOD: Duration = Duration::from_millis(100);

/// One wait.
pub(crate) struct Deadline<'a> {
    what: &'a str,
    start: Instant,
    asked: Instant,
    limit: Option<Duration>,
    /// What to do where the limit is over.
    remedy: &'a str,
    /// Why there is no end, if that is known.
    futile: &'a dyn Fn() -> Option<String>,
}

impl<'a> Deadline<'a> {
    /// A wait for `what` that starts now.
    pub(crate) fn new(
        what: &'a str,
        limit: Option<Duration>,
        remedy: &'a str,
        futile: &'a dyn Fn() -> Option<String>,
    ) -> Self {
        let now = Instant::now();
        Self { what, start: now, asked: now, limit, remedy, futile }
    }

    pub(crate) fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    /// How long to sleep at most until the next [`Deadline::check`].
    pub(crate) fn slice(&self) -> Duration {
        self.limit.map_or(PERIOD, |limit| limit.saturating_sub(self.waited()).min(PERIOD))
    }

    /// # Errors
    /// [`Error::TimeOut`] where the wait is in vain, or long enough.
    pub(crate) fn check(&mut self) -> Result<()> {
        let waited = self.waited();
        let over = self.limit.is_some_and(|limit| waited >= limit);
        let mut in_vain = None;
        if over || self.asked.elapsed() >= PERIOD {
            in_vain = (self.futile)();
            self.asked = Instant::now();
        }
        match in_vain.or_else(|| over.then(|| self.remedy.to_owned())) {
            None => Ok(()),
            Some(remedy) => {
                let milliseconds = waited.as_millis() as u64;
                Err(Error::TimeOut { waited_for: self.what.to_owned(), milliseconds, remedy })
            }
        }
    }
}

/// Runs `work`, which may never return, for `limit` at most, or until `futile` says why there is no end; its thread is left
/// behind then.
pub(crate) fn bounded<F: FnOnce() -> Result<()> + Send + 'static>(
    limit: Option<Duration>,
    what: &str,
    futile: &dyn Fn() -> Option<String>,
    work: F,
) -> Result<()> {
    let work = Arc::new(Mutex::new(Some(work)));
    let run = |work: &Mutex<Option<_>>| {
        let work = work.lock().take();
        work.map_or(Ok(()), |work: F| work())
    };
    let in_thread = work.clone();
    let thread = match thread::spawn(c"nvte_ep_wait", move || run(&in_thread)) {
        Ok(thread) => thread,
        // Without a limit the calling thread may as well wait itself.
        Err(_) if limit.is_none() => return run(&work),
        Err(error) => {
            return Err(Error::State(format!(
                "the thread that waits for {what} could not be started ({error}): raise the limit of threads or of memory"
            )));
        }
    };
    let mut deadline =
        Deadline::new(what, limit, "a rank died or left the sequence of calls; end this process too", futile);
    loop {
        match thread.wait(deadline.slice()) {
            Some(result) => {
                return result.unwrap_or_else(|| Err(Error::Internal(format!("a panic while waiting for {what}"))));
            }
            None => deadline.check()?,
        }
    }
}

impl Cuda {
    /// Waits for the work queued on `stream`, but not longer than `limit`; `what` says in the time-out's text what was
    /// waited for. `futile`, asked now and then, ends the wait early and says why.
    ///
    /// # Errors
    /// [`Error::TimeOut`], or the error of the queued work.
    pub fn wait(
        &self,
        stream: Stream,
        limit: Option<Duration>,
        what: &str,
        remedy: &str,
        futile: &dyn Fn() -> Option<String>,
    ) -> Result<()> {
        let mut deadline = Deadline::new(what, limit, remedy, futile);
        loop {
            // SAFETY: the stream is bound.
            match unsafe { (self.cuStreamQuery)(stream.as_raw()) } {
                b::CUDA_ERROR_NOT_READY => deadline.check()?,
                code => return self.check("cuStreamQuery", code),
            }
            // Short at first for the common quick case, then easy on the processor.
            match deadline.waited().as_micros() {
                ..200 => std::thread::yield_now(),
                200..5000 => std::thread::sleep(Duration::from_micros(20)),
                _ => std::thread::sleep(Duration::from_micros(500)),
            }
        }
    }

    /// Reads words back after all that is queued on `stream`; the calling thread waits, until `futile` says why there is no
    /// end. No capture of another stream is harmed.
    ///
    /// # Errors
    /// The driver's; [`Error::TimeOut`].
    ///
    /// # Safety
    /// The memory is readable device memory, and `stream` does not capture.
    pub unsafe fn read_words<const N: usize>(
        &self,
        address: u64,
        stream: Stream,
        limit: Option<Duration>,
        futile: &dyn Fn() -> Option<String>,
    ) -> Result<[u32; N]> {
        let read = || {
            // The copy waits for the stream too, but without an end.
            self.wait(stream, limit, "the work queued on the stream", "", futile)?;
            let mut words = [0u32; N];
            let (to, bytes) = (words.as_mut_ptr().cast(), size_of_val(&words));
            // SAFETY: the caller vouches for memory and stream; the copy is waited for before `words` is looked at.
            let code = unsafe { (self.cuMemcpyDtoHAsync_v2)(to, address, bytes, stream.as_raw()) };
            self.check("cuMemcpyDtoHAsync_v2", code)?;
            // SAFETY: the stream is bound.
            self.check("cuStreamSynchronize", unsafe { (self.cuStreamSynchronize)(stream.as_raw()) })?;
            Ok(words)
        };
        // A capture in global mode forbids waits to every thread that does not say that it knows better.
        let mut mode = b::CU_STREAM_CAPTURE_MODE_RELAXED;
        let exchange = self.cuThreadExchangeStreamCaptureMode;
        // SAFETY: `mode` is live.
        self.check("cuThreadExchangeStreamCaptureMode", unsafe { exchange(&raw mut mode) })?;
        let words = read();
        // SAFETY: `mode` is live, and the thread's own mode again.
        self.check("cuThreadExchangeStreamCaptureMode", unsafe { exchange(&raw mut mode) })?;
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(limit: Option<u64>, futile: &dyn Fn() -> Option<String>) -> (u64, String) {
        let mut deadline = Deadline::new("a test", limit.map(Duration::from_millis), "try again", futile);
        loop {
            match deadline.check() {
                Ok(()) => std::thread::sleep(deadline.slice().min(Duration::from_millis(5))),
                Err(Error::TimeOut { waited_for, milliseconds, remedy }) if waited_for == "a test" => {
                    return (milliseconds, remedy);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn waits_end_at_the_limit_or_when_futile() {
        let (waited, remedy) = end(Some(30), &|| None);
        assert!(waited >= 30 && remedy == "try again", "{waited} {remedy}");
        let (_, remedy) = end(Some(0), &|| Some("it is gone".into()));
        assert_eq!(remedy, "it is gone", "the reason comes before the limit");
        let (waited, remedy) = end(None, &|| Some("it is gone".into()));
        assert!(waited >= 100 && remedy == "it is gone", "asked every 100 ms: {waited} {remedy}");
        let deadline = Deadline::new("a test", Some(Duration::from_millis(30)), "", &|| None);
        assert!(deadline.slice() <= Duration::from_millis(30));
        assert_eq!(Deadline::new("a test", None, "", &|| None).slice(), PERIOD);
    }

    #[test]
    fn a_wait_is_bounded() {
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        let limit = Some(Duration::from_millis(20));
        let error = bounded(limit, "a test", &|| None, move || {
            let _ = blocked.recv();
            Ok(())
        })
        .unwrap_err();
        assert!(matches!(error, Error::TimeOut { milliseconds: 20.., .. }), "{error}");
        drop(release);
        bounded(Some(Duration::from_secs(60)), "a test", &|| None, || Ok(())).unwrap();
        bounded(None, "a test", &|| None, || Ok(())).unwrap();
    }
}
