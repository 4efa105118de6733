//! Scores predictions against recorded truth.

mod distributed;
mod generate;
pub mod ledger;
pub mod lora;
pub mod models;
pub mod pattern;
mod recorded;
pub mod summary;
