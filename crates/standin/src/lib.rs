//! A CUDA that computes nothing and counts every byte.
//!
//! `vramcast rehearse` loads this library into the user's program, where it takes the place of NVIDIA's driver, runtime
//! and mathematics libraries. Memory calls are answered by a ledger of addresses; kernels return at once; what is read
//! from the device is zero, unless the host wrote it there.
//!
//! | module | what it stands in for |
//! |---|---|
//! | [`card`] | the pretended card, as the parent process describes it |
//! | [`ledger`] | device memory: who holds which address, and how much is left |
//! | `places` | where in its addresses the driver puts them |
//! | [`contents`] | what the host wrote to small pieces of device memory |
//! | [`binaries`] | for which architectures kernels were compiled |
//! | [`memory`], [`device`], [`stream`], [`graph`], [`launch`] | the runtime (`cuda…`) and its twins in the driver (`cu…`) |
//! | [`driver`] | the rest of the driver: virtual memory, contexts, entry points |
//! | [`blas`], [`dnn`], [`solver`] | cuBLAS, cuDNN, and the handles of cuSPARSE, cuSOLVER, cuFFT, cuRAND |
//! | `convolution` | what cuDNN's convolutions take beside their tensors |
//! | [`nccl`], [`nvml`] | a world of any size in one process; the management library |
//! | [`journal`] | nothing: what a program without Python takes, written down |
//! | [`unknown`] | calls nobody wrote: they succeed, and are counted |
//!
//! Signatures follow NVIDIA's public headers. A function that is not here is made by the parent process, which reads
//! what torch imports and generates an entry that calls [`unknown`].
#![allow(non_snake_case)]

#[macro_use]
mod foreign;
mod binaries;
mod blas;
mod card;
mod contents;
mod convolution;
mod device;
mod dnn;
mod driver;
mod graph;
mod journal;
mod launch;
mod ledger;
mod memory;
mod nccl;
mod nvml;
// One definition with the simulator's allocator: places.rs is a link to core's memory/allocator/driver.rs, which needs only
// the standard library. A link and no path attribute, so that packages hold the file itself.
mod places;
mod solver;
mod stream;
mod unknown;
