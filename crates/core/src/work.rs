//! How much one answer may take: everything a model or a simulation records counts, and past a bound the work stops.
//!
//! A config or a plan is a few bytes that can ask for billions of operations. Who answers strangers sets a bound, and
//! may stop an answer that nobody waits for any more. Without a bound nothing is counted.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why work ended before it was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// It recorded more than it may, or something larger than anything.
    TooLarge,
    /// Its caller does not want it any more.
    Unwanted,
}

/// How often the bound of one simulation all simulations of an answer may record together: tables and searches make many.
pub const TOGETHER: u64 = 8;

thread_local! {
    static MOST: Cell<u64> = const { Cell::new(u64::MAX) };
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    /// Of all simulations together: what was left when the present one began.
    static WHOLE: Cell<u64> = const { Cell::new(u64::MAX) };
    /// So little left of all is little.
    static LITTLE: Cell<u64> = const { Cell::new(0) };
    static RECORDED: Cell<u64> = const { Cell::new(0) };
    /// What was written down again counts for, ever.
    static REPEATED: Cell<u64> = const { Cell::new(0) };
    static UNWANTED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Between two looks at whether the answer is still wanted.
const LOOK_EVERY: u64 = 1024;

/// Does some work, each simulation of which may record at most `most` things and all of them together [`TOGETHER`] times
/// as many, and which ends early once `unwanted` is set.
///
/// Stopping unwinds the stack, so that every value on it is dropped as usual; nothing is printed.
pub fn bounded<T>(most: u64, unwanted: Arc<AtomicBool>, work: impl FnOnce() -> T) -> Result<T, Stopped> {
    bounded_together(most, most.saturating_mul(TOGETHER).min(u64::MAX - 1), unwanted, work)
}

/// The same, where all simulations together may record at most `whole` things. Where that is no more than one may, the
/// answer is whole or stopped: nothing is left out of it.
pub fn bounded_together<T>(
    most: u64,
    whole: u64,
    unwanted: Arc<AtomicBool>,
    work: impl FnOnce() -> T,
) -> Result<T, Stopped> {
    MOST.set(most);
    LEFT.set(most);
    WHOLE.set(whole);
    LITTLE.set(if whole > most { most } else { 0 });
    UNWANTED.set(Some(unwanted));
    let done = catch_unwind(AssertUnwindSafe(work));
    settle();
    RECORDED.set(whole - WHOLE.get());
    MOST.set(u64::MAX);
    LEFT.set(u64::MAX);
    WHOLE.set(u64::MAX);
    LITTLE.set(0);
    UNWANTED.set(None);
    done.map_err(|payload| match payload.downcast::<Stopped>() {
        Ok(stopped) => *stopped,
        // A panic of another kind is not ours to hide.
        Err(payload) => resume_unwind(payload),
    })
}

/// A tensor of so many bytes is about to be made: none of a bound answer is larger than an exbibyte.
pub(crate) fn check_size(bytes: u64) {
    if bytes > 1 << 60 && LEFT.get() != u64::MAX {
        resume_unwind(Box::new(Stopped::TooLarge));
    }
}

/// What the last bounded work of this thread recorded, whatever came of it: what it cost.
pub fn recorded() -> u64 {
    RECORDED.get()
}

/// Does some work and says what it recorded; nothing where nothing is counted.
pub fn spent<T>(work: impl FnOnce() -> T) -> (T, u64) {
    // What the present simulation took is only known of all when the next begins.
    settle();
    let before = WHOLE.get();
    let done = work();
    settle();
    (done, before - WHOLE.get().min(before))
}

/// Whether so little is left of all that an answer may record that nothing further should begin which can be left out.
pub fn is_short() -> bool {
    WHOLE.get() < LITTLE.get()
}

/// Another answer begins: a row of many is a question of its own.
pub(crate) fn fresh() {
    if LITTLE.get() > 0 {
        settle();
        WHOLE.set(MOST.get().saturating_mul(TOGETHER).min(u64::MAX - 1));
    }
}

/// A simulation begins, where the answer is still wanted.
pub(crate) fn begin() {
    look();
    settle();
}

/// What was recorded so far is gone, but it was work.
fn settle() {
    let (most, whole) = (MOST.get(), WHOLE.get());
    if most == u64::MAX {
        return;
    }
    let whole = whole.saturating_sub(most.min(whole) - LEFT.get().min(most.min(whole)));
    WHOLE.set(whole);
    LEFT.set(most.min(whole));
}

/// Does what leaves nothing behind that stays: it was work, but its records are gone.
pub(crate) fn passing<T>(work: impl FnOnce() -> T) -> T {
    lighter(u64::MAX, work)
}

/// Does what runs without a graph: a record of it takes a hundred bytes, where others take three hundred.
pub(crate) fn without_graph<T>(work: impl FnOnce() -> T) -> T {
    lighter(3, work)
}

/// Of what is recorded one part in `parts` stays; all of it was work.
fn lighter<T>(parts: u64, work: impl FnOnce() -> T) -> T {
    let (before, already) = (LEFT.get(), REPEATED.get());
    let done = work();
    if before != u64::MAX {
        let recorded = before.saturating_sub(LEFT.get());
        // What is written down again takes as much with a graph as without.
        let repeated = if parts == u64::MAX { 0 } else { (REPEATED.get() - already).min(recorded) };
        let kept = repeated + (recorded - repeated) / parts;
        let whole = WHOLE.get().saturating_sub(recorded - kept);
        WHOLE.set(whole);
        LEFT.set((before - kept).min(whole));
    }
    done
}

/// Something is about to be recorded. Called while nothing is borrowed that a destructor needs.
pub(crate) fn record() {
    let left = LEFT.get();
    if left == u64::MAX {
        return;
    }
    if left == 0 {
        resume_unwind(Box::new(Stopped::TooLarge));
    }
    LEFT.set(left - 1);
    if left.is_multiple_of(LOOK_EVERY) {
        look();
    }
}

/// Ends work that nobody waits for any more. What goes on for some milliseconds without recording anything looks by itself, while
/// nothing is borrowed that a destructor needs.
pub(crate) fn look() {
    let unwanted = UNWANTED.with_borrow(|flag| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)));
    if unwanted {
        resume_unwind(Box::new(Stopped::Unwanted));
    }
}

/// Events that are written down again count too, many together: each takes eight bytes and some forty nanoseconds, what is run
/// three hundred bytes and a microsecond. They are counted before there is room for them.
pub(crate) fn repeat(events: usize) {
    const TOGETHER: u64 = 32;
    let (left, more) = (LEFT.get(), events as u64 / TOGETHER);
    if left == u64::MAX {
        return;
    }
    REPEATED.set(REPEATED.get() + more);
    // The next thing that is recorded ends it.
    LEFT.set(left.saturating_sub(more));
    look();
    record();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::simulation;
    use crate::model::Model;
    use crate::plan::TrainPlan;
    use crate::source::catalogue;

    fn train(most: u64, unwanted: bool) -> Result<u64, Stopped> {
        let entry = catalogue::find("gpt2").unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let mut plan = TrainPlan::default();
        plan.batch.seq_len = 512;
        bounded(most, Arc::new(AtomicBool::new(unwanted)), || simulation::train(&model, &plan).unwrap().process_bytes())
    }

    /// What is written down again or begun anew records little, and may take long.
    #[test]
    fn work_that_records_little_stops() {
        for work in [begin, || repeat(64), look] {
            let stops = |unwanted: bool| bounded(1 << 22, Arc::new(AtomicBool::new(unwanted)), work);
            assert_eq!((stops(true), stops(false)), (Err(Stopped::Unwanted), Ok(())));
        }
    }

    #[test]
    fn work_stops() {
        let whole = train(u64::MAX - 1, false).unwrap();
        assert_eq!(train(1 << 22, false), Ok(whole));
        assert_eq!(train(1000, false), Err(Stopped::TooLarge));
        assert_eq!(train(1 << 22, true), Err(Stopped::Unwanted));
        // The thread is as good as new.
        assert_eq!(train(1 << 22, false), Ok(whole));
        let once = recorded();
        assert!(once > 1000, "{once}");
        // Many simulations of one answer add up.
        let entry = catalogue::find("gpt2").unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let mut plan = TrainPlan::default();
        plan.batch.seq_len = 512;
        let often = |times: u64| {
            let again = || (0..times).map(|_| simulation::train(&model, &plan).unwrap().process_bytes()).max();
            bounded(once + 1, Arc::default(), again)
        };
        assert_eq!(often(TOGETHER), Ok(Some(whole)));
        // The program is made once for all of them, which leaves room for a few more.
        assert_eq!((often(2 * TOGETHER), recorded()), (Err(Stopped::TooLarge), TOGETHER * (once + 1)));
        // Where little is left things are left out; but not where one simulation alone takes what all may.
        let short = |most: u64, whole: u64| {
            let after = || {
                simulation::train(&model, &plan).unwrap();
                begin();
                is_short()
            };
            bounded_together(most, whole, Arc::default(), after)
        };
        assert_eq!(often(1), Ok(Some(whole)));
        let again = recorded();
        assert_eq!((short(again + 1, 2 * again), short(2 * again, 2 * again)), (Ok(true), Ok(false)));
    }
}
