//! A bar on stderr, but only when someone is watching and it takes longer than a moment.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Anything faster needs no bar.
const PATIENCE: Duration = Duration::from_millis(700);

/// Counts files read.
pub(super) struct Progress {
    total: u64,
    started: Instant,
    state: Mutex<State>,
    wanted: bool,
}

struct State {
    done: u64,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Starts counting; nothing is shown yet.
    pub(super) fn new(total: usize, wanted: bool) -> Self {
        let state = Mutex::new(State { done: 0, bar: None });
        Self { total: total as u64, started: Instant::now(), state, wanted: wanted && total > 1 }
    }

    /// One more file is read.
    pub(super) fn step(&self) {
        let Ok(mut state) = self.state.lock() else { return };
        state.done += 1;
        if !self.wanted || self.started.elapsed() < PATIENCE {
            return;
        }
        let done = state.done;
        // indicatif draws on stderr, and not at all when that is no terminal.
        state.bar.get_or_insert_with(|| bar(self.total)).set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Ok(state) = self.state.lock()
            && let Some(bar) = &state.bar
        {
            bar.finish_and_clear();
        }
    }
}

fn bar(total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("reading tensor headers {wide_bar} {pos}/{len}");
    ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
