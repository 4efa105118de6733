//! Where estimates are computed: on a server's threads, or where they are asked for.

#[cfg(not(target_family = "wasm"))]
use std::hash::{DefaultHasher, Hash, Hasher};

#[cfg(not(target_family = "wasm"))]
use super::pool::Pool;
use super::problem::Problem;
use crate::ask::work;

/// Room for estimates.
pub(crate) enum Room {
    /// On threads, so many at once.
    #[cfg(not(target_family = "wasm"))]
    Server(Box<Pool>),
    /// Where they are asked for, one after the other.
    Here,
}

impl Room {
    /// Computes something as soon as there is room; `question` tells what is asked, where somebody wants to know.
    #[cfg_attr(target_family = "wasm", allow(unused_variables, reason = "nobody waits for room there"))]
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        question: impl FnOnce() -> String,
        compute: impl Fn() -> Result<T, Problem> + Send + Sync + 'static,
    ) -> Result<T, Problem> {
        match self {
            #[cfg(not(target_family = "wasm"))]
            Self::Server(pool) => {
                let mut hasher = DefaultHasher::new();
                question().hash(&mut hasher);
                pool.run(hasher.finish(), compute).await
            }
            Self::Here => {
                // Limits speak the command line's errors; what the work itself says is the answer.
                let done = work::within(work::MILLIONS, || Ok(compute()));
                done.unwrap_or_else(|failure| Err(Problem::from(failure)))
            }
        }
    }

    /// Estimates that run now, and those that wait.
    pub(crate) fn load(&self) -> (usize, usize) {
        match self {
            #[cfg(not(target_family = "wasm"))]
            Self::Server(pool) => pool.load(),
            Self::Here => (0, 0),
        }
    }

    /// Does something short that would hold up others.
    pub(crate) async fn aside<T: Send + 'static>(&self, work: fn() -> T) -> Result<T, Problem> {
        match self {
            #[cfg(not(target_family = "wasm"))]
            Self::Server(_) => tokio::task::spawn_blocking(work).await.map_err(|_| {
                Problem::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, "this failed, and is a fault")
            }),
            Self::Here => Ok(work()),
        }
    }
}
