//! Other plans than the one that was asked for, found by changing it and simulating every change.
//!
//! | module | what is in it |
//! |---|---|
//! | [`moves`] | what can be changed: one row per move, with its cost; `meshes` the splits over cards, `serving` what else can be where tokens are generated |
//! | [`trial`] | a request tried: settled, simulated, judged |
//! | [`smallest`] | the fewest and cheapest changes after which a run fits |
//! | [`frontier`], `explore` | plans that fit, memory against cost, and the search for them |
//! | [`solve`] | the largest value of one setting that fits |
//! | [`strategies`] | a model's weights and cache under tensor, pipeline, expert and data parallel |

mod explore;
pub mod frontier;
mod meshes;
pub mod moves;
mod serving;
pub mod smallest;
pub mod solve;
pub mod strategies;
pub mod trial;
