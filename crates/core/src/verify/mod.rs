//! Scores predictions against recorded truth.

mod distributed;
mod generate;
pub mod ledger;
pub mod models;
pub mod pattern;
pub mod summary;
