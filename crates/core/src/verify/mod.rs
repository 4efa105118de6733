//! Scores predictions against recorded truth.

pub mod external;
mod generate;
pub mod ledger;
pub mod models;
pub mod pattern;
pub mod summary;
