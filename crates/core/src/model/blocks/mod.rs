//! What families share: the same lines of transformers' code in many models.

pub mod attention;
pub mod causal;
pub mod encoder;
pub mod head;
pub mod mlp;
pub mod moe;
pub mod read;

pub use attention::{QkNorm, SelfAttention};
pub use encoder::{Encoded, EncoderAttention};
pub use head::causal_lm_head;
pub use mlp::{gated_mlp, joined_gated_mlp, mlp};
