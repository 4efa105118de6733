//! Quantised weights: how bitsandbytes holds and multiplies them.

use serde::{Deserialize, Serialize};

use super::{Fault, Faults, Version};
use crate::dtype::DType;
use crate::model::Sharing;

/// A frozen base held in few bits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Quantization {
    /// The number format.
    pub scheme: QuantizationScheme,
    /// Whether the scales of 4-bit weights are quantised again.
    pub double: bool,
    /// Weights that share a scale (4-bit).
    pub block_size: u64,
    /// The type 4-bit layers compute in.
    pub compute: DType,
    /// From which size on inputs of 8-bit layers are outliers; 0: none are.
    pub threshold: f64,
    /// How many columns of an 8-bit layer's input hold outliers.
    pub outliers: Outliers,
    /// Deviation of random weights, for the outliers they give (`initializer_range` of the config).
    pub initializer_range: f64,
    /// Modules whose path holds one of these stay as they are; when absent, the output embedding does.
    pub skip: Option<Vec<String>>,
    /// Whether GPT-2's `Conv1D` is quantised too, as transformers does.
    pub conv1d: bool,
    /// Whether linears of a model that is already there are replaced one by one, so that a weight which layers share is
    /// packed for each; transformers ties packed weights.
    pub one_by_one: bool,
    /// Whether the checkpoint holds them so already: nothing is on the card in full first.
    pub stored: bool,
    /// Whether experts that are one parameter for all are packed too: `bitsandbytes.nn.parametrize.replace_parameter_4bit`
    /// (0.48 and later), which nobody calls by itself but axolotl's `quantize_moe_experts`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub experts: bool,
    /// The type packed 4-bit weights are stored as (`bnb_4bit_quant_storage`); FSDP shards floats only.
    pub storage: DType,
    /// Whether `prepare_model_for_kbit_training` runs, which makes all other 16-bit parameters fp32.
    pub prepare: bool,
    /// Whether 4-bit linears keep their input until the graph dies, and multiply by the matrix in full: another way to
    /// name a bitsandbytes of up to 0.43.1 in the plan's `stack`.
    pub keeps_inputs: bool,
    /// The type that 4-bit weights were packed from and come back in, when not the model's (Lightning packs from fp16).
    pub packed_from: Option<DType>,
    /// Whether torchao's `NF4Tensor` holds them, as torchtune's code has it.
    #[serde(skip)]
    pub torchao: bool,
}

impl Default for Quantization {
    /// `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)`, as
    /// QLoRA is run.
    fn default() -> Self {
        Self {
            scheme: QuantizationScheme::Nf4,
            double: false,
            block_size: 64,
            compute: DType::BF16,
            threshold: 6.0,
            outliers: Outliers::Trained,
            initializer_range: 0.02,
            skip: None,
            conv1d: true,
            one_by_one: false,
            stored: false,
            experts: false,
            storage: DType::U8,
            prepare: true,
            keeps_inputs: false,
            packed_from: None,
            torchao: false,
        }
    }
}

/// Number formats of bitsandbytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum QuantizationScheme {
    /// 4-bit normal floats.
    Nf4,
    /// 4-bit floats.
    Fp4,
    /// LLM.int8.
    Int8,
}

/// How many columns hold outliers. It depends on the data: the two ends of the range can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Outliers {
    /// None to speak of, as in trained models: a handful of columns of each layer.
    Trained,
    /// As many as random weights (`from_config`) give: nearly all columns of the input of a gated MLP's last linear, as
    /// `silu(gate) * up` of wide models often passes the threshold. The worst case.
    RandomWeights,
}

impl Quantization {
    /// The last bitsandbytes whose 4-bit linears keep their input until the graph dies.
    pub const LAST_TO_KEEP_INPUTS: Version = Version::new(0, 43, 1);

    /// What becomes of weights that layers share.
    pub fn sharing(&self) -> Sharing {
        if self.one_by_one { Sharing::LinearsApart } else { Sharing::Once }
    }

    /// Reads `nf4`, `nf4-dq`, `fp4`, `fp4-dq` or `int8`.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let (name, double) = match text.strip_suffix("-dq") {
            Some(name) => (name, true),
            None => (text, false),
        };
        let scheme = match (name, double) {
            ("nf4", _) => QuantizationScheme::Nf4,
            ("fp4", _) => QuantizationScheme::Fp4,
            ("int8", false) => QuantizationScheme::Int8,
            _ => return Err(Fault::value("quantization", text, "nf4, nf4-dq, fp4, fp4-dq or int8")),
        };
        Ok(Self { scheme, double, ..Self::default() })
    }

    /// Refuses what bitsandbytes cannot do.
    pub(super) fn check(&self, faults: &mut Faults) {
        let (path, sizes) = ("quantization.block_size", 32..=4096);
        faults.when(!self.block_size.is_power_of_two() || !sizes.contains(&self.block_size), || {
            let above = self.block_size.checked_next_power_of_two().unwrap_or(4096).clamp(32, 4096);
            let below = (above / 2).clamp(32, 4096);
            let fault = Fault::value(path, self.block_size, "a power of two from 32 to 4096");
            let fault = if (32..4096).contains(&self.block_size) { fault.or_set(path, below) } else { fault };
            fault.or_set(path, above)
        });
        faults.float("quantization.compute", self.compute);
        faults.when(self.experts && self.scheme == QuantizationScheme::Int8, || {
            Fault::unsupported("quantization.experts", "8-bit experts").or_set("quantization", "nf4")
        });
        faults.when(!(0.0..).contains(&self.threshold), || {
            Fault::value("quantization.threshold", self.threshold, "0 or more").or_set("quantization.threshold", 6.0)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearby_block_sizes_are_offered() {
        let said = |block_size| {
            let mut faults = Faults::default();
            Quantization { block_size, threshold: f64::NAN, ..Quantization::default() }.check(&mut faults);
            faults.end().unwrap_err().iter().map(|fault| fault.remedies.len()).collect::<Vec<_>>()
        };
        assert_eq!((said(100), said(0), said(64)), (vec![2, 1], vec![1, 1], vec![1]));
        assert!(Quantization::parse("int8-dq").is_err() && Quantization::parse("fp4-dq").is_ok());
    }
}
