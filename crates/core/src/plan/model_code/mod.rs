//! Whose code the model is: transformers', or that of a training library with models of its own.
//!
//! Such a library reads its own config; here one is made out of a Hugging Face config and what the plan asks for.

mod litgpt;
mod torchtune;

use serde::{Deserialize, Serialize};

use super::{AdapterPlan, Fault, Faults, LoraPlan, PlanError, Targets, TrainPlan};
use crate::model::Model;

/// Whose code the model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ModelCode {
    /// transformers'.
    #[default]
    Transformers,
    /// LitGPT's `GPT` with its own LoRA, as in its versions 0.4.6 to 0.4.13 (from July 2024).
    Litgpt,
    /// The same as LitGPT was in spring 2024 (0.3 to 0.4.5): RMSNorm casts before it multiplies by its weight.
    LitgptSpring2024,
    /// LitGPT's `GPT` of adapter.py, which brings learned tokens that its layers attend to.
    LitgptAdapter,
    /// LitGPT's `GPT` of adapter_v2.py: the same, with a scale and a bias on every linear, and trained norms.
    LitgptAdapterV2,
    /// torchtune's `TransformerDecoder`, as in its versions 0.4 and 0.5.
    Torchtune,
}

impl ModelCode {
    /// The model in a library's own code, and the plan that runs it; `None` for transformers'.
    pub fn own(self, model: &Model, plan: &TrainPlan) -> Result<Option<(Model, TrainPlan)>, PlanError> {
        if self == Self::Transformers {
            return Ok(None);
        }
        let mut faults = Faults::default();
        self.check(plan, &mut faults);
        faults.end()?;
        let (config, plan) = match self {
            Self::Torchtune => (torchtune::config(model.config(), &plan.stack)?, torchtune::renamed(plan)?),
            _ => {
                let mut config = litgpt::config(model.config(), lora(plan), self != Self::LitgptSpring2024)?;
                // Its adapters are part of the model.
                config["adapter_version"] = match self {
                    Self::LitgptAdapter => 1.into(),
                    Self::LitgptAdapterV2 => 2.into(),
                    _ => 0.into(),
                };
                (config, TrainPlan { adapter: None, ..plan.clone() })
            }
        };
        Ok(Some((Model::new(config, Some("AutoModelForCausalLM"))?, plan)))
    }

    /// Whether the model brings adapters itself, which alone are trained.
    pub fn adapts(self) -> bool {
        matches!(self, Self::LitgptAdapter | Self::LitgptAdapterV2)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Transformers => "transformers'",
            Self::Litgpt | Self::LitgptSpring2024 | Self::LitgptAdapter | Self::LitgptAdapterV2 => "LitGPT's",
            Self::Torchtune => "torchtune's",
        }
    }

    /// What such code does not do, or what is not simulated of it.
    pub(super) fn check(self, plan: &TrainPlan, faults: &mut Faults) {
        if self == Self::Transformers {
            return;
        }
        let plain = TrainPlan::default();
        let other = matches!(plan.adapter, Some(AdapterPlan::Other(_)));
        let refused = [
            (plan.parallel.is_some(), "parallel", "several cards"),
            (plan.kernels != plain.kernels, "kernels", "kernels of others"),
            (plan.attention != plain.attention, "attention", "another attention than SDPA"),
            (plan.batch.padded, "batch.padded", "padded samples"),
            (plan.batch.mask && !plan.batch.padded, "batch.mask", "an attention mask"),
            (self != Self::Torchtune && plan.loss != plain.loss, "loss", "another loss"),
            (other, "adapter", "PEFT's methods other than LoRA"),
            (self.adapts() && lora(plan).is_some(), "adapter", "LoRA beside adapters that the model brings itself"),
            (
                lora(plan).is_some_and(|lora| !is_plain(lora, plan)),
                "adapter",
                "LoRA with more than rank, dropout and targets (adapters are in the type of the weights)",
            ),
        ];
        for (_, path, what) in refused.into_iter().filter(|(used, ..)| *used) {
            let fault = Fault::unsupported(path, format!("{what} with {} model code", self.name()));
            faults.add(fault.or_drop(path).or_set("model_code", "transformers"));
        }
    }
}

/// The plan's LoRA.
fn lora(plan: &TrainPlan) -> Option<&LoraPlan> {
    match &plan.adapter {
        Some(AdapterPlan::Lora(lora)) => Some(lora),
        _ => None,
    }
}

/// Whether it asks for rank, dropout and targets only.
fn is_plain(lora: &LoraPlan, plan: &TrainPlan) -> bool {
    let plain =
        LoraPlan { rank: lora.rank, dropout: lora.dropout, targets: lora.targets.clone(), ..LoraPlan::default() };
    let same =
        LoraPlan { alpha: plain.alpha, dtype: None, follow_base: false, task: None, rslora: false, ..lora.clone() };
    same == plain && lora.dtype.is_none_or(|dtype| dtype == plan.weights)
}

/// What is adapted, by the words a library uses; every name that modules of transformers go by is known too.
fn targets(lora: &LoraPlan, default: &[&'static str], all: &[&'static str]) -> Result<Vec<&'static str>, PlanError> {
    let names = match &lora.targets {
        Targets::Default => return Ok(default.to_vec()),
        Targets::AllLinear => return Ok(all.to_vec()),
        Targets::Regex(text) => std::slice::from_ref(text),
        Targets::Names(names) => names.as_slice(),
    };
    let mut found = Vec::new();
    for name in names {
        found.extend_from_slice(match name.rsplit('.').next().unwrap_or_default() {
            "query" | "q_proj" => &["query"][..],
            "key" | "k_proj" => &["key"],
            "value" | "v_proj" => &["value"],
            "qkv_proj" | "query_key_value" | "c_attn" => &["query", "key", "value"],
            "projection" | "o_proj" | "dense" | "out_proj" | "output_proj" => &["projection"],
            "mlp" | "gate_proj" | "up_proj" | "down_proj" | "gate_up_proj" | "fc1" | "fc2" | "w1" | "w2" | "w3"
            | "dense_h_to_4h" | "dense_4h_to_h" => &["mlp"],
            "head" | "lm_head" | "embed_out" | "output" => &["head"],
            _ => return Err(Fault::value("adapter.targets", name, "query, key, value, projection, mlp or head").into()),
        });
    }
    Ok(found)
}
