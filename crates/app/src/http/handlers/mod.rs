//! The answers, by topic.

pub(crate) mod about;
pub(crate) mod estimates;
pub(crate) mod lists;
pub(crate) mod plans;

use std::sync::Arc;

use axum::extract::State;

use super::Service;

/// What every handler gets.
type Shared = State<Arc<Service>>;
