//! Other plans than the one that was asked for.
//!
//! | module | what is in it |
//! |---|---|
//! | [`suggest`] | when a run does not fit: the single changes that would make it fit, each simulated |
//! | [`changes`] | how one plan becomes another |
//! | [`strategies`] | a model's weights and cache under tensor, pipeline, expert and data parallel |

pub mod changes;
pub mod strategies;
pub mod suggest;
