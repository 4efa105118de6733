//! Scores predictions against recorded truth.
//!
//! | module | what is in it |
//! |---|---|
//! | [`kinds`] | the kinds of truth, and files of them scored |
//! | [`models`], [`lora`], [`ledger`], [`jobs`], [`engine`], [`external`] | one kind each |
//! | `keys`, `run`, `distributed` | from a recorded run to its plan |
//! | [`job`] | from a plan to a run for the probe |
//! | [`summary`], [`limits`] | many rows in a few numbers, and how large those may be |
//! | [`residual`] | where a run and its simulation differ |

mod distributed;
pub mod engine;
pub mod external;
pub mod job;
pub mod jobs;
mod keys;
pub mod kinds;
pub mod ledger;
pub mod limits;
pub mod lora;
pub mod models;
pub mod pattern;
mod pictures;
mod pool;
pub mod residual;
mod run;
pub mod summary;
mod tasks;
