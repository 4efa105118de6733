//! Scores predictions against recorded truth.

mod distributed;
pub mod external;
mod generate;
pub mod job;
pub mod ledger;
pub mod lora;
pub mod models;
pub mod pattern;
mod recorded;
pub mod residual;
pub mod summary;
mod variants;
