//! Estimates keep a core busy: so many at once, others wait, and none keeps a client waiting for ever.

use std::sync::Arc;

use axum::http::StatusCode;
use tokio::sync::Semaphore;

use super::Limits;
use super::problem::Problem;

/// Room for estimates.
pub(crate) struct Pool {
    slots: Arc<Semaphore>,
    limits: Limits,
}

impl Pool {
    /// Room for as many as the limits say.
    pub(crate) fn new(limits: Limits) -> Self {
        Self { slots: Arc::new(Semaphore::new(limits.concurrency)), limits }
    }

    /// Runs something on a thread of its own, as soon as there is room.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let busy = |detail: &str| Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).retry_after(1);
        let started = tokio::time::Instant::now();
        let slot = tokio::time::timeout(self.limits.time, Arc::clone(&self.slots).acquire_owned()).await;
        let Ok(Ok(slot)) = slot else { return Err(busy("too many estimates at once")) };
        let running = tokio::task::spawn_blocking(move || {
            let _slot = slot;
            work()
        });
        match tokio::time::timeout_at(started + self.limits.time, running).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the estimate failed")),
            Err(_) => Err(busy("the estimate took too long")),
        }
    }
}
