//! Other plans than the one that was asked for.
//!
//! | module | what is in it |
//! |---|---|
//! | [`strategies`] | a model's weights and cache under tensor, pipeline, expert and data parallel |

pub mod strategies;
