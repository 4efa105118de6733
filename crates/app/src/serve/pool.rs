//! Estimates keep a core busy: so many at once, others wait, and none keeps a client waiting for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::http::StatusCode;
use tokio::sync::Semaphore;
use vramcast_core::work::{self, Stopped};

use super::Limits;
use super::problem::Problem;

/// What one answer may record: operations, parameters and tensors.
const MOST_RECORDED: u64 = crate::ask::work::MILLIONS * 1_000_000;
/// Those that may wait, for each that runs.
const WAITING_PER_SLOT: usize = 64;

/// Room for estimates.
pub(crate) struct Pool {
    slots: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    limits: Limits,
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
    /// Room for as many as the limits say.
    pub(crate) fn new(limits: Limits) -> Self {
        Self { slots: Arc::new(Semaphore::new(limits.concurrency)), waiting: Arc::default(), limits }
    }

    /// Estimates that run now, and those that wait.
    pub(crate) fn load(&self) -> (usize, usize) {
        let running = self.limits.concurrency.saturating_sub(self.slots.available_permits());
        (running, self.waiting.load(Ordering::Relaxed))
    }

    /// Runs something on a thread of its own, as soon as there is room. The room is free again when the thread ends,
    /// which it does soon after its time is over.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let busy = |detail: String| Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).retry_after(1);
        let until = tokio::time::Instant::now() + self.limits.time;
        let waiting = Waiting(Arc::clone(&self.waiting));
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= self.limits.concurrency.saturating_mul(WAITING_PER_SLOT) {
            return Err(busy("too many estimates are waiting".into()));
        }
        let slot = tokio::time::timeout_at(until, Arc::clone(&self.slots).acquire_owned()).await;
        drop(waiting);
        let Ok(Ok(slot)) = slot else { return Err(busy("too many estimates at once".into())) };
        let flag = Arc::new(AtomicBool::new(false));
        let unwanted = Unwanted(Arc::clone(&flag));
        let running = tokio::task::spawn_blocking(move || {
            let _slot = slot;
            work::bounded(MOST_RECORDED, flag, work)
        });
        let done = tokio::time::timeout_at(until, running).await;
        drop(unwanted);
        let seconds = self.limits.time.as_secs_f64();
        match done {
            Ok(Ok(Ok(answer))) => answer,
            Ok(Ok(Err(Stopped::TooLarge))) => Err(Problem::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                format!("too large to simulate: more than {MOST_RECORDED} operations, or a tensor of an exbibyte"),
            )
            .hint("fewer layers, experts, micro-batches or tokens")),
            Ok(Ok(Err(Stopped::Unwanted))) | Err(_) => Err(busy(format!("the estimate took more than {seconds} s"))),
            Ok(Err(_)) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the estimate failed; this is a fault")
                .hint("please report the request")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn pool(milliseconds: u64) -> Pool {
        Pool::new(Limits { body: 1024, time: Duration::from_millis(milliseconds), concurrency: 1, rate: 0 })
    }

    #[tokio::test]
    async fn room_is_given_back() {
        let pool = pool(60_000);
        assert_eq!(pool.run(|| Ok(1)).await.ok(), Some(1));
        let failed = pool.run(|| Err::<(), _>(Problem::new(StatusCode::BAD_REQUEST, "x"))).await;
        assert_eq!(failed.err().map(|problem| problem.status), Some(400));
        assert_eq!(
            pool.run(|| -> Result<(), Problem> { panic!("on purpose") }).await.err().map(|p| p.status),
            Some(500)
        );
        assert_eq!(pool.load(), (0, 0));
    }

    #[tokio::test]
    async fn nobody_waits_for_ever() {
        let pool = pool(50);
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let slow = pool.run(move || Ok(receive.recv().is_ok())).await;
        assert_eq!(slow.err().map(|problem| problem.status), Some(503));
        // The thread still runs, so there is no room.
        assert_eq!(pool.run(|| Ok(())).await.err().map(|problem| problem.status), Some(503));
        drop(send);
        while pool.load().0 > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(pool.run(|| Ok(())).await.is_ok());
    }
}
