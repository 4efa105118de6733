//! Language models that also see or hear.
//!
//! A batch without images or audio runs the language model alone, as transformers does; the towers are then declared
//! but not run.

use super::Family;

mod parts;
pub mod qwen2_5_vl;
pub mod qwen2_vl;
pub mod qwen3_vl;
mod qwen_text;
mod qwen_vision;

/// Every family in this folder.
pub const ALL: &[&Family] = &[&qwen2_5_vl::FAMILY, &qwen2_vl::FAMILY, &qwen3_vl::FAMILY];
