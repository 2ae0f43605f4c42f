//! Where a rank is: for the progress bar, and for the message when time runs out.

use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;
use std::sync::Mutex;

/// Where a rank is.
#[derive(Debug)]
pub struct Progress {
    now: Mutex<String>,
    shown: Shown,
}

#[derive(Debug)]
enum Shown {
    Nowhere,
    /// A file that the parent process shows.
    File(PathBuf),
    Bar(ProgressBar),
}

/// A bar over the steps, on stderr and only if that is a terminal.
pub fn bar(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{elapsed} [{bar:30}] step {pos} of {len}: {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

impl Progress {
    fn new(shown: Shown) -> Self {
        Self { now: Mutex::new("starting".into()), shown }
    }

    /// Shown by nobody.
    pub fn silent() -> Self {
        Self::new(Shown::Nowhere)
    }

    /// Written to a file for [`show`].
    pub fn file(path: PathBuf) -> Self {
        Self::new(Shown::File(path))
    }

    /// Shown by this process.
    pub fn shown(steps: usize) -> Self {
        Self::new(Shown::Bar(bar(steps)))
    }

    /// The rank is at `what`, with `steps` steps done.
    pub fn at(&self, steps: usize, what: &str) {
        if let Ok(mut now) = self.now.lock() {
            *now = format!("{what} (step {steps})");
        }
        match &self.shown {
            Shown::Nowhere => {}
            // Only looks: a lost line is no loss.
            Shown::File(path) => drop(std::fs::write(path, format!("{steps}\n{what}"))),
            Shown::Bar(bar) => update(bar, steps, what),
        }
    }

    /// Where the rank is.
    pub fn now(&self) -> String {
        self.now.lock().map_or_else(|_| "an unknown place".into(), |now| now.clone())
    }

    /// Clears the bar.
    pub fn finish(&self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

fn update(bar: &ProgressBar, steps: usize, what: &str) {
    bar.set_position(steps as u64);
    bar.set_message(what.to_owned());
}

/// Shows what a rank wrote to its file.
pub fn show(bar: &ProgressBar, text: &str) {
    if let Some((steps, what)) = text.split_once('\n')
        && let Ok(steps) = steps.parse()
    {
        update(bar, steps, what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_where_it_is() {
        let progress = Progress::silent();
        progress.at(2, "nvte_ep_combine");
        assert_eq!(progress.now(), "nvte_ep_combine (step 2)");
        let bar = ProgressBar::hidden();
        bar.set_length(5);
        show(&bar, "3\nexperts");
        show(&bar, "torn");
        assert_eq!(bar.position(), 3);
        assert_eq!(bar.message(), "experts");
    }
}
