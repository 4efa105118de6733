//! Stage 4: a model and a plan into events over time.
//!
//! | module | what is in it |
//! |---|---|
//! | [`log`], [`phase`] | storages and the events of their lives, and the phases these lie in |
//! | [`tensor`], [`autograd`] | shape-only tensors, the graph, the backward walk |
//! | [`saved`] | what is kept for backward: held, recomputed, or on the host |
//! | [`torch`] | the operations of torch on them |
//! | [`lower`] | how transformers' code spends those operations on a program |
//! | `compiled` | `torch.compile`: graphs in place of those operations |
//! | [`optimizer`] | state and step of every optimizer |
//! | [`allocator`] | the caching allocator, replayed on the events |
//! | `adapters`, `outliers` | loading with adapters and quantised weights |
//! | [`device`] | what the card decides |
//! | [`effort`] | what a step computes and moves |
//! | [`process`], [`nccl`] | what the process holds besides |
//! | [`sharding`] | one card of many |
//! | [`schedule`] | what a rank of a pipeline does in which order |
//! | [`megatron`] | one rank of Megatron-Core |
//! | `load`, `loading`, `merging` | a model onto the card, as `from_pretrained` does it, and an adapter merged into it |
//! | `ready` | running what was loaded on batches of any size |
//! | [`train`], `engine`, `evaluation` | the training loop, what it asks of engines, and evaluation between its steps |
//! | `tasks` | preferences, rewards, rollouts, pairs: what a micro-batch does there |
//! | `repeat` | parts of a run that come again are written down, not run |
//! | [`infer`], [`simulation`] | `generate`, and one call for all of it |

mod adapters;
pub mod allocator;
mod along;
pub mod autograd;
mod compiled;
mod depth;
pub mod device;
pub mod effort;
mod engine;
mod evaluation;
pub mod fold;
pub mod infer;
mod job;
mod load;
mod loading;
pub mod log;
pub mod lower;
pub mod megatron;
mod merging;
pub mod nccl;
pub mod optimizer;
mod other_adapters;
mod outliers;
pub mod phase;
pub mod process;
mod ready;
mod repeat;
pub mod saved;
pub mod schedule;
pub mod sharding;
pub mod simulation;
mod stored;
mod tasks;
pub mod tensor;
pub mod tensor_parallel;
pub mod torch;
pub mod train;
