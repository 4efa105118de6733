//! Asking: find the model, read files, settle the plan, simulate it. No interface is known here; each of them makes a
//! [`question::Question`] and shows its answer.
//!
//! | module | what is in it |
//! |---|---|
//! | [`question`] | the one way from what is asked to the answer |
//! | [`found`] | which model is meant, and how far a name may reach |
//! | [`stored`] | tensor headers beside the config |
//! | [`files`] | plan files and their like, read with a cap |
//! | [`card`] | the card where nobody names one |
//! | [`inspect`] | what a model consists of |
//! | [`compare`] | published formulas beside the simulation |
//! | [`formula`] | what a published formula says |
//! | [`lists`] | what vramcast knows |
//! | [`work`] | how much one answer may take |
//! | [`solve`], [`table`] | the other way round; many answers side by side |
//! | [`heat`] | a serving engine over cards, formats, contexts |
//! | [`placement`] | roles on shared cards, one by one and together |
//! | [`plan`] | plans that fit, where much is left open |
//! | [`engines`] | one question to every engine that serves |
//! | [`real`] | what a real run left behind |
//! | [`job`] | job files: a model in numbers, how it is trained, on what |

pub(crate) mod card;
pub(crate) mod compare;
#[cfg_attr(target_family = "wasm", path = "../web/data.rs")]
pub(crate) mod data;
pub(crate) mod engines;
pub(crate) mod files;
pub(crate) mod formula;
pub(crate) mod found;
pub(crate) mod heat;
pub mod inspect;
pub(crate) mod job;
pub(crate) mod lists;
pub(crate) mod placement;
pub(crate) mod plan;
pub(crate) mod question;
pub(crate) mod real;
pub(crate) mod solve;
pub(crate) mod stored;
pub(crate) mod table;
pub(crate) mod work;
