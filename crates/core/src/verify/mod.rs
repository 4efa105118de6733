//! Scores predictions against recorded truth.

pub mod models;
pub mod pattern;
