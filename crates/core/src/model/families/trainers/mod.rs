//! Models as training libraries write them for themselves: one class each for all architectures they know.
//!
//! Their configs are the libraries' own, made out of a Hugging Face config and a plan where a plan asks for such code.

use super::Family;

pub mod litgpt;
mod litgpt_adapter;
mod litgpt_functions;
mod litgpt_lora;
pub mod torchtune;

/// Every family in this folder.
pub const ALL: &[&Family] = &[&litgpt::FAMILY, &torchtune::FAMILY];
