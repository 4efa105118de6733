//! ggml without data: tensors, the graph they make, who computes which node, and the buffers that takes.
//!
//! | module | after |
//! |---|---|
//! | [`tensor`] | ggml.c: shapes and strides of every operation |
//! | [`cuda`] | ggml-cuda.cu: what a card can compute, and how much room it wants |
//! | [`schedule`] | ggml-backend.cpp: nodes to backends, splits, copies of inputs |
//! | [`allocate`] | ggml-alloc.c: the buffer of every backend |

pub(crate) mod allocate;
pub(crate) mod cuda;
pub(crate) mod schedule;
pub(crate) mod tensor;
