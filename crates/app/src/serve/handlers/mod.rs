//! The answers, by topic.

pub(crate) mod estimates;
pub(crate) mod lists;
