//! Work that may never return, run for so long at most.

use crate::error::{Error, Result};
use crate::patience::Patience;
use crate::sys::thread;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Runs `work`, which may never return, for `limit` at most, or until `hopeless` says why there is no end; its thread is left
/// behind then.
pub(super) fn bounded<F: FnOnce() -> Result<()> + Send + 'static>(
    limit: Option<Duration>,
    what: &str,
    hopeless: &dyn Fn() -> Option<String>,
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
    let mut patience =
        Patience::new(what, limit, "a rank died or left the sequence of calls; end this process too", hopeless);
    loop {
        match thread.wait(patience.slice()) {
            Some(result) => {
                return result.unwrap_or_else(|| Err(Error::Internal(format!("a panic while waiting for {what}"))));
            }
            None => patience.check()?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
