//! What a card decides: kernels, workspaces, scratch.

use crate::plan::Gpu;
use crate::plan::hardware::since_hopper;

/// What the simulation needs to know of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Compute capability, major and minor: 90 for Hopper.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u64,
    /// Threads a multiprocessor can hold.
    pub threads_per_multiprocessor: u64,
    /// cuBLAS's workspace, where the machine sets another than torch's rule gives.
    pub blas_workspace: Option<u64>,
    /// Whether SDPA may take cuDNN's kernel.
    pub cudnn_attention: bool,
}

impl Device {
    /// What decides on a card; what is not known of it is taken from Hopper.
    pub fn of(gpu: &Gpu) -> Self {
        let (multiprocessors, threads) = gpu.threads();
        Self {
            capability: gpu.capability(),
            multiprocessors,
            threads_per_multiprocessor: threads.max(512),
            blas_workspace: gpu.machine.blas_workspace,
            cudnn_attention: gpu.machine.cudnn_attention,
        }
    }

    /// The card of the recorded runs.
    pub fn h200() -> Self {
        Self::of(&Gpu::h200())
    }

    /// Whether SDPA can take cuDNN's kernel here.
    pub fn has_cudnn_attention(&self) -> bool {
        self.cudnn_attention && since_hopper(self.capability)
    }

    /// What torch hands cuBLAS as workspace, per thread that multiplies: 32 MiB on Hopper and later, else 8 MiB and
    /// 128 KiB (`getChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp; ledger rows of both kinds).
    pub fn blas_workspace(&self) -> u64 {
        let by_card = if since_hopper(self.capability) { 32 << 20 } else { (4096 * 2 + 16 * 8) << 10 };
        self.blas_workspace.unwrap_or(by_card)
    }

    /// Scratch of a reduction of `inputs` elements to each of `outputs`, in bytes: partial results of several blocks,
    /// and the semaphores by which these find out who is last. Accumulators are fp32.
    ///
    /// The rule is `setReduceConfig` of ATen/native/cuda/Reduce.cuh. `rows`: the reduced elements lie side by side.
    pub fn reduction_scratch(&self, outputs: u64, inputs: u64, rows: bool) -> [u64; 2] {
        const MAX_THREADS: u64 = 512;
        if outputs == 0 || inputs == 0 {
            return [0, 0];
        }
        let vector = match (rows, outputs % 4, outputs % 2) {
            (true, ..) => 1,
            (false, 0, _) => 4,
            (false, _, 0) => 2,
            _ => 1,
        };
        let (dim0, dim1) = match rows {
            // One long row is read four elements at a time.
            true if outputs == 1 && inputs > 128 => (inputs / 4, outputs),
            true => (inputs, outputs),
            false => (outputs / vector, inputs),
        };
        let most = MAX_THREADS / vector;
        let power = |n: u64| if n < most { last_power_of_two(n.max(1)) } else { most };
        let mut width = power(dim0).min(32);
        let height = power(dim1).min(most / width);
        width = power(dim0).min(most / height);
        let mut step_input = if rows { width } else { 1 };
        let mut step_output = if rows { 1 } else { width };
        let per_thread = |step: u64| inputs.div_ceil(step);
        let across_warps = per_thread(step_input) >= height * 16 || per_thread(step_input) >= 256;
        if across_warps {
            step_input *= height;
        } else {
            step_output *= height;
        }
        let target = self.multiprocessors * (self.threads_per_multiprocessor / (width * height));
        let grid = (outputs / vector).div_ceil(step_output).max(1);
        if !across_warps || per_thread(step_input) < 256 || grid > target {
            return [0, 0];
        }
        let blocks =
            target.div_ceil(grid).min(per_thread(step_input).div_ceil(16)).max(per_thread(step_input).div_ceil(256));
        if blocks <= 1 {
            return [0, 0];
        }
        [4 * outputs * blocks * if rows { 1 } else { width * vector }, 4 * grid]
    }
}

fn last_power_of_two(n: u64) -> u64 {
    1 << n.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_sums_take_what_traces_show() {
        // 512 * C * k with k = max(min(ceil(2112 / g), ceil(v / 16)), ceil(v / 256)), v = ceil(R / 4), g = ceil(C / 128).
        let device = Device::h200();
        assert_eq!(device.reduction_scratch(2048, 1020, false), [0, 0]);
        assert_eq!(device.reduction_scratch(2048, 2048, false), [512 * 2048 * 32, 4 * 16]);
        assert_eq!(device.reduction_scratch(4096, 8192, false), [512 * 4096 * 66, 4 * 32]);
    }
}
