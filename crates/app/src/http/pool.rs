//! Estimates keep a core and some memory busy: so many at once, others wait, and none keeps a client waiting for ever.
//!
//! Nobody sees from outside what an estimate takes. So each begins as a light one; what records more than those may begins
//! again where heavy ones wait for each other, and light ones do not wait for them. The same question, asked again, begins there:
//! who is told to come later asks it word for word.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use vramcast_core::work::{self, Stopped};

use super::problem::Problem;

/// What one simulation of a heavy answer may record, in operations, parameters and tensors: about a gibibyte.
const HEAVY: u64 = crate::ask::work::MILLIONS * 1_000_000;
/// The same of all simulations of a light one together: some 170 MiB, and about a twentieth of a second; 70B under FSDP2 and 512
/// decoded tokens, which people change by the keystroke, are among them. What turns out to be
/// heavy has kept light ones waiting for as long.
const LIGHT: u64 = 500_000;
/// What a request records at the cost of one.
const PER_TOKEN: u64 = 150_000;
/// So many questions are known to be heavy.
const KNOWN: usize = 1024;
/// Those that may wait, for each that runs.
const WAITING_PER_SLOT: usize = 64;

tokio::task_local! {
    /// What the present request has recorded so far.
    static RECORDED: Cell<u64>;
}

/// Answers a request; with what it cost beyond the token that every request takes.
pub(crate) async fn counted<T>(answer: impl Future<Output = T>) -> (T, f64) {
    RECORDED
        .scope(Cell::new(0), async {
            let answer = answer.await;
            let recorded = RECORDED.with(Cell::get);
            (answer, recorded.saturating_sub(PER_TOKEN) as f64 / PER_TOKEN as f64)
        })
        .await
}

/// Room for estimates.
pub(crate) struct Pool {
    light: Slots,
    heavy: Slots,
    /// How long one may take.
    time: Duration,
    /// Questions that were heavy, the oldest first.
    known: Mutex<VecDeque<u64>>,
}

/// Room for estimates of one kind.
struct Slots {
    free: Arc<Semaphore>,
    count: usize,
    waiting: Arc<AtomicUsize>,
    is_heavy: bool,
    /// What each simulation may record, and all of one answer together.
    most: u64,
    whole: u64,
    threads: Threads,
}

impl Slots {
    fn light(count: usize, most: u64) -> Self {
        let threads = Threads::new(count, || ());
        Self {
            free: Arc::new(Semaphore::new(count)),
            count,
            waiting: Arc::default(),
            is_heavy: false,
            most,
            whole: most,
            threads,
        }
    }

    fn heavy(count: usize) -> Self {
        let threads = Threads::new(count, step_back);
        Self { is_heavy: true, whole: HEAVY * work::TOGETHER, threads, ..Self::light(count, HEAVY) }
    }

    /// There is no room: the server's fault where everybody suffers, the askers' where heavy ones wait for each other.
    fn busy(&self, detail: &str) -> Problem {
        match self.is_heavy {
            true => Problem::new(StatusCode::TOO_MANY_REQUESTS, format!("{detail} that are as heavy")).retry_after(5),
            false => Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).retry_after(1),
        }
    }
}

/// As many threads as there is room for, which stay: what one estimate took of memory, the next takes again. A thread that
/// has nothing to do keeps what it freed, so that more of them would hold as many times the most.
struct Threads(Option<Runtime>);

impl Threads {
    fn new(count: usize, begin: fn()) -> Self {
        let mut builder = Builder::new_current_thread();
        builder.max_blocking_threads(count).thread_keep_alive(Duration::from_secs(1 << 30)).on_thread_start(begin);
        Self(builder.build().ok())
    }

    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        match &self.0 {
            Some(runtime) => runtime.spawn_blocking(work),
            None => tokio::task::spawn_blocking(work),
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A thread of heavy estimates takes what light ones leave of the cores.
fn step_back() {
    // Linux alone does this by thread. Where it is refused, all are as important.
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{getpriority_process, setpriority_process};
        let _ = getpriority_process(None).and_then(|nice| setpriority_process(None, (nice + 5).min(19)));
    }
}

/// Tells an estimate that nobody waits for it any more: its time is over, or its client went away.
struct Unwanted(Arc<AtomicBool>);

impl Drop for Unwanted {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One that waits for room; counted until it stops waiting, whatever happens.
struct Waiting(Arc<AtomicUsize>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pool {
    /// Room for so many, each for so long; all but one of them may be heavy.
    pub(crate) fn new(concurrency: usize, time: Duration) -> Self {
        let heavy = concurrency.saturating_sub(1).max(1);
        Self { light: Slots::light(concurrency, LIGHT), heavy: Slots::heavy(heavy), time, known: Mutex::default() }
    }

    /// Estimates that run now, and those that wait.
    pub(crate) fn load(&self) -> (usize, usize) {
        let both = [&self.light, &self.heavy];
        let running = both.iter().map(|slots| slots.count.saturating_sub(slots.free.available_permits())).sum();
        (running, both.iter().map(|slots| slots.waiting.load(Ordering::Relaxed)).sum())
    }

    /// Runs something on a thread of its own, as soon as there is room, and once more where it turns out to be heavy. The
    /// room is free again when the thread ends, which it does soon after its time is over. `question` tells what is asked.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        question: u64,
        work: impl Fn() -> Result<T, Problem> + Send + Sync + 'static,
    ) -> Result<T, Problem> {
        let until = tokio::time::Instant::now() + self.time;
        let work = Arc::new(work);
        if !self.is_known(question) {
            match self.once(&self.light, until, Arc::clone(&work)).await? {
                Ok(answer) => return answer,
                Err(Stopped::Unwanted) => return Err(self.too_slow(&self.light)),
                Err(Stopped::TooLarge) => self.remember(question),
            }
        }
        match self.once(&self.heavy, until, work).await? {
            Ok(answer) => answer,
            Err(Stopped::Unwanted) => Err(self.too_slow(&self.heavy)),
            Err(Stopped::TooLarge) => {
                let (one, all) = (HEAVY, HEAVY * work::TOGETHER);
                let detail = format!(
                    "too large to simulate: more than {one} operations at once or {all} together, or a tensor of an exbibyte"
                );
                Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
                    .hint("fewer layers, experts, micro-batches or tokens"))
            }
        }
    }

    fn is_known(&self, question: u64) -> bool {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).contains(&question)
    }

    fn remember(&self, question: u64) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() == KNOWN {
            known.pop_front();
        }
        known.push_back(question);
    }

    /// Its time is over: what is light should not have taken it, what is heavy asks for too much.
    fn too_slow(&self, slots: &Slots) -> Problem {
        let detail = format!("the estimate took more than {} s", self.time.as_secs_f64());
        match slots.is_heavy {
            true => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
                .hint("fewer layers, experts, micro-batches or tokens"),
            false => slots.busy(&detail),
        }
    }

    async fn once<T: Send + 'static>(
        &self,
        slots: &Slots,
        until: tokio::time::Instant,
        work: Arc<impl Fn() -> Result<T, Problem> + Send + Sync + 'static>,
    ) -> Result<Result<Result<T, Problem>, Stopped>, Problem> {
        let waiting = Waiting(Arc::clone(&slots.waiting));
        if slots.waiting.fetch_add(1, Ordering::Relaxed) >= slots.count.saturating_mul(WAITING_PER_SLOT) {
            return Err(slots.busy("too many estimates are waiting"));
        }
        let slot = tokio::time::timeout_at(until, Arc::clone(&slots.free).acquire_owned()).await;
        drop(waiting);
        let Ok(Ok(slot)) = slot else { return Err(slots.busy("too many estimates at once")) };
        let flag = Arc::new(AtomicBool::new(false));
        let unwanted = Unwanted(Arc::clone(&flag));
        let (most, whole) = (slots.most, slots.whole);
        let running = slots.threads.run(move || {
            let _slot = slot;
            let done = work::bounded_together(most, whole, flag, || work());
            (done, work::recorded())
        });
        let done = tokio::time::timeout_at(until, running).await;
        drop(unwanted);
        match done {
            Ok(Ok((done, recorded))) => {
                let _ = RECORDED.try_with(|sum| sum.set(sum.get().saturating_add(recorded)));
                Ok(done)
            }
            Ok(Err(_)) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the estimate failed; this is a fault")
                .hint("please report the request")),
            Err(_) => {
                // Nobody knows how much of it was done: all that was allowed.
                let _ = RECORDED.try_with(|sum| sum.set(sum.get().saturating_add(most)));
                Err(self.too_slow(slots))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(milliseconds: u64) -> Pool {
        Pool::new(1, Duration::from_millis(milliseconds))
    }

    #[tokio::test]
    async fn room_is_given_back() {
        let pool = pool(60_000);
        assert_eq!(pool.run(0, || Ok(1)).await.ok(), Some(1));
        let failed = pool.run(0, || Err::<(), _>(Problem::new(StatusCode::BAD_REQUEST, "x"))).await;
        assert_eq!(failed.err().map(|problem| problem.status), Some(400));
        assert_eq!(
            pool.run(0, || -> Result<(), Problem> { panic!("on purpose") }).await.err().map(|p| p.status),
            Some(500)
        );
        assert_eq!(pool.load(), (0, 0));
    }

    /// Records some thousand things.
    fn record() -> Result<(), Problem> {
        use vramcast_core::{memory::simulation, model::Model, plan::TrainPlan, source::catalogue};
        let entry = catalogue::find("gpt2").unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let mut plan = TrainPlan::default();
        plan.batch.seq_len = 64;
        simulation::train(&model, &plan).map(drop).map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "x"))
    }

    #[tokio::test]
    async fn what_is_heavy_is_run_where_the_heavy_are_and_costs_more() {
        let pool = pool(60_000);
        let light = counted(pool.run(0, || Ok(()))).await;
        assert!(light.0.is_ok() && light.1 == 0.0);
        let runs = Arc::new(AtomicUsize::new(0));
        let pool = Pool { light: Slots::light(1, 50), ..pool };
        // As a light one and as a heavy one; asked again, as a heavy one alone.
        for (question, ran) in [(1, 2), (1, 3), (2, 5)] {
            let again = Arc::clone(&runs);
            let (answer, cost) = counted(pool.run(question, move || {
                again.fetch_add(1, Ordering::Relaxed);
                record()
            }))
            .await;
            assert!(answer.is_ok(), "{:?}", answer.err().map(|problem| problem.detail));
            assert_eq!(runs.load(Ordering::Relaxed), ran);
            assert!(cost >= 0.0);
        }
    }

    /// Memory is bounded by the number of threads, and light ones go first.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn heavy_ones_share_a_thread_that_stands_back() {
        let (pool, own) = (pool(60_000), rustix::process::getpriority_process(None).unwrap());
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..8 {
            let work =
                || Ok((format!("{:?}", std::thread::current().id()), rustix::process::getpriority_process(None).ok()));
            let until = tokio::time::Instant::now() + Duration::from_secs(60);
            let Ok(Ok(Ok(thread))) = pool.once(&pool.heavy, until, Arc::new(work)).await else { panic!("no answer") };
            seen.insert(thread);
        }
        assert!(seen.len() == 1 && seen.iter().all(|(_, nice)| *nice >= Some((own + 5).min(19))), "{seen:?}");
    }

    #[tokio::test]
    async fn nobody_waits_for_ever() {
        let pool = pool(50);
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let receive = std::sync::Mutex::new(receive);
        let slow = pool.run(0, move || Ok(receive.lock().unwrap().recv().is_ok())).await;
        assert_eq!(slow.err().map(|problem| problem.status), Some(503));
        // The thread still runs, so there is no room.
        assert_eq!(pool.run(0, || Ok(())).await.err().map(|problem| problem.status), Some(503));
        drop(send);
        while pool.load().0 > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(pool.run(0, || Ok(())).await.is_ok());
    }
}
