//! When bitsandbytes multiplies by a 4-bit matrix in one kernel instead of making it dense first: the ladder of
//! `_gemm_4bit_use_custom_cuda` (bitsandbytes 0.50, backends/cuda/ops.py), as it stands there.

use crate::dtype::DType;
use crate::memory::device::Device;

/// Past this many rows the matrix is always made dense.
const MOST_ROWS: u64 = 1536;
/// Up to this many rows it never is.
const FLOOR: u64 = 4;

/// A product `[rows, inputs] × [outputs, inputs]ᵀ` on a card.
struct Product {
    rows: u64,
    outputs: u64,
    inputs: u64,
    tiles: u64,
    processors: u64,
    capability: u32,
}

/// Whether the product runs without a dense copy of the matrix.
pub(super) fn is_fused(device: &Device, dtype: DType, [rows, outputs, inputs]: [u64; 3], block_size: u64) -> bool {
    if rows > MOST_ROWS || !inputs.is_multiple_of(block_size.max(1)) {
        return false;
    }
    if rows <= FLOOR {
        return true;
    }
    let capability = device.capability;
    if dtype == DType::F32 || capability < 75 || (capability == 75 && dtype != DType::F16) {
        return rows < 8;
    }
    let product =
        Product { rows, outputs, inputs, tiles: outputs.div_ceil(64), processors: device.multiprocessors, capability };
    match capability {
        87 | 110..=119 => false,
        100..=109 => product.blackwell_datacentre(),
        _ if outputs.saturating_mul(inputs) < 4 << 20 => product.small(),
        _ if rows > 512 => false,
        _ if rows < 8 => product.few_rows(),
        75 => product.turing(),
        80 => product.ampere(),
        86 => product.rows <= product.by_waves([128, 64, 16]),
        90..=99 => product.hopper(),
        _ => product.consumer(),
    }
}

impl Product {
    fn waves(&self, count: u64) -> bool {
        self.tiles >= self.processors * count
    }

    fn half_wave(&self) -> bool {
        self.tiles >= self.processors / 2
    }

    fn by_waves(&self, [whole, half, less]: [u64; 3]) -> u64 {
        match self {
            _ if self.waves(1) => whole,
            _ if self.half_wave() => half,
            _ => less,
        }
    }

    fn has_wide_memory(&self) -> bool {
        self.capability == 80 || (90..100).contains(&self.capability)
    }

    fn blackwell_datacentre(&self) -> bool {
        match self {
            _ if self.waves(3) => self.rows <= 32,
            _ if self.waves(1) => self.inputs < self.outputs && self.rows <= 8,
            _ => false,
        }
    }

    /// Matrices below four million elements: making them dense costs the most there.
    fn small(&self) -> bool {
        let Self { rows, outputs, inputs, tiles, processors, .. } = *self;
        if inputs * 2 < outputs {
            if self.has_wide_memory() {
                let low = tiles * 3 < processors;
                let most = match (self.capability == 80, low) {
                    (true, true) => 1536,
                    (true, false) | (false, true) => 512,
                    (false, false) => 320,
                };
                return rows <= most;
            }
            if self.capability == 75 {
                let most = match inputs {
                    _ if self.waves(3) => 320,
                    1024.. => 64,
                    704.. => 96,
                    _ => 320,
                };
                return rows <= most;
            }
            let tight = !self.waves(1) && tiles * inputs > processors * 320;
            return rows <= if tight { 192 } else { 320 };
        }
        let quarter = tiles * 4 <= processors;
        if self.capability == 80 && quarter {
            let most = match inputs >= outputs {
                true if tiles * 8 <= processors => 32,
                true => 128,
                false => 384,
            };
            return rows <= most;
        }
        if self.capability == 75 && tiles < processors && rows > 8 {
            return rows <= 64;
        }
        match self {
            _ if quarter => rows <= if inputs < outputs || self.has_wide_memory() { 32 } else { 23 },
            _ if tiles * 2 <= processors => rows <= 16,
            _ => false,
        }
    }

    /// Five to seven rows.
    fn few_rows(&self) -> bool {
        let Self { rows, outputs, inputs, tiles, processors, .. } = *self;
        let hopper = (90..100).contains(&self.capability);
        if !self.has_wide_memory() || rows < 6 || tiles < if hopper { 36 } else { 48 } {
            return true;
        }
        let below_three_quarters = tiles * 4 < processors * 3;
        let below_three_fifths = tiles * 5 < processors * 3;
        let loses = match inputs.cmp(&outputs) {
            std::cmp::Ordering::Greater => below_three_quarters,
            std::cmp::Ordering::Equal if hopper => below_three_quarters && !below_three_fifths,
            std::cmp::Ordering::Equal => below_three_fifths,
            std::cmp::Ordering::Less => false,
        };
        !loses
    }

    fn turing(&self) -> bool {
        self.rows
            <= match self {
                _ if self.waves(3) => {
                    if self.inputs < self.outputs {
                        128
                    } else {
                        64
                    }
                }
                _ if self.half_wave() => 64,
                _ => 32,
            }
    }

    fn ampere(&self) -> bool {
        let Self { rows, outputs, inputs, tiles, processors, .. } = *self;
        match self {
            _ if self.waves(3) => rows <= 128,
            _ if self.waves(1) => rows <= if inputs < outputs { 64 } else { 32 },
            _ if inputs >= outputs * 3 && tiles * 4 > processors => false,
            _ if inputs == outputs && tiles >= 48 && tiles * 5 < processors * 3 => false,
            _ if tiles * 2 < processors && inputs <= outputs => rows <= 128,
            _ if tiles * 2 < processors && tiles * 3 >= processors => false,
            _ if self.half_wave() && inputs < outputs => rows <= 128,
            _ => rows <= 16,
        }
    }

    fn hopper(&self) -> bool {
        let Self { rows, outputs, inputs, tiles, processors, .. } = *self;
        match self {
            _ if self.waves(3) => rows <= 64,
            _ if self.waves(2) => rows <= 48,
            _ if self.waves(1) => rows <= 32,
            _ if self.half_wave() => !(inputs >= outputs && tiles * 4 < processors * 3) && rows <= 16,
            _ => false,
        }
    }

    /// Ada, consumer Blackwell and what is not listed.
    fn consumer(&self) -> bool {
        let Self { rows, outputs, inputs, tiles, processors, capability } = *self;
        let tall = inputs > outputs * 2;
        if capability == 121 && self.waves(1) {
            return rows <= 256;
        }
        if self.waves(3) {
            return rows <= 256;
        }
        if self.waves(2) {
            return rows <= 128;
        }
        let near_wave = tiles * 5 >= processors * 4;
        if capability == 120 {
            let most = match self {
                _ if near_wave => {
                    if inputs >= outputs {
                        96
                    } else {
                        64
                    }
                }
                _ if self.half_wave() && inputs * 2 >= outputs && tiles >= 128 => 64,
                _ if tall && tiles > 64 => 16,
                _ => 8,
            };
            return rows <= most;
        }
        let most = match self {
            _ if near_wave && (tall || tiles >= 200) => 128,
            _ if near_wave && inputs >= outputs => {
                if processors >= 60 {
                    128
                } else {
                    32
                }
            }
            _ if near_wave => 64,
            _ if self.half_wave() && tall => 64,
            _ if self.half_wave() && tiles >= 64 => 8,
            _ if self.half_wave() => 32,
            _ if inputs > outputs && tiles <= 48 => {
                if inputs >= outputs * 3 {
                    12
                } else {
                    10
                }
            }
            _ if tall || tiles < 48 => 16,
            _ => 8,
        };
        rows <= most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_tokens_are_fused_and_long_prompts_are_not() {
        let fused = |rows| is_fused(&Device::h200(), DType::BF16, [rows, 4096, 4096], 64);
        assert!(fused(1) && fused(4));
        assert!(!fused(16) && !fused(2048));
        assert!(!is_fused(&Device::h200(), DType::BF16, [1, 4096, 100], 64));
    }
}
