//! How long a wait goes on: to its limit, or until it can be seen that there is no end.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::time::{Duration, Instant};

/// How often a wait asks whether there is hope.
pub(crate) const PERIOD: Duration = Duration::from_millis(100);

/// One wait.
pub(crate) struct Patience<'a> {
    what: &'a str,
    start: Instant,
    asked: Instant,
    limit: Option<Duration>,
    /// What to do where the limit is over.
    remedy: &'a str,
    /// Why there is no end, if that is known.
    hopeless: &'a dyn Fn() -> Option<String>,
}

impl<'a> Patience<'a> {
    /// A wait for `what` that starts now.
    pub(crate) fn new(
        what: &'a str,
        limit: Option<Duration>,
        remedy: &'a str,
        hopeless: &'a dyn Fn() -> Option<String>,
    ) -> Self {
        let now = Instant::now();
        Self { what, start: now, asked: now, limit, remedy, hopeless }
    }

    pub(crate) fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    /// How long to sleep at most until the next [`Patience::check`].
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
            in_vain = (self.hopeless)();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn end(limit: Option<u64>, hopeless: &dyn Fn() -> Option<String>) -> (u64, String) {
        let mut patience = Patience::new("a test", limit.map(Duration::from_millis), "try again", hopeless);
        loop {
            match patience.check() {
                Ok(()) => std::thread::sleep(patience.slice().min(Duration::from_millis(5))),
                Err(Error::TimeOut { waited_for, milliseconds, remedy }) if waited_for == "a test" => {
                    return (milliseconds, remedy);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn waits_end_at_the_limit_or_without_hope() {
        let (waited, remedy) = end(Some(30), &|| None);
        assert!(waited >= 30 && remedy == "try again", "{waited} {remedy}");
        let (waited, remedy) = end(Some(0), &|| Some("it is gone".into()));
        assert!(waited < 100 && remedy == "it is gone", "the reason comes before the limit: {waited} {remedy}");
        let (waited, remedy) = end(None, &|| Some("it is gone".into()));
        assert!(waited >= 100 && remedy == "it is gone", "asked every 100 ms: {waited} {remedy}");
        let patience = Patience::new("a test", Some(Duration::from_millis(30)), "", &|| None);
        assert!(patience.slice() <= Duration::from_millis(30));
        assert_eq!(Patience::new("a test", None, "", &|| None).slice(), PERIOD);
    }
}
