//! Whose code the model is: transformers', or that of a training library with models of its own.
//!
//! Such a library reads its own config; here one is made out of a Hugging Face config and what the plan asks for.

mod litgpt;
mod torchtune;

use serde::{Deserialize, Serialize};

use super::{AdapterPlan, LoraPlan, PlanError, Targets, TrainPlan};
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
    /// torchtune's `TransformerDecoder`, as in its versions 0.4 and 0.5.
    Torchtune,
}

impl ModelCode {
    /// The model in a library's own code, and the plan that runs it; `None` for transformers'.
    pub fn own(self, model: &Model, plan: &TrainPlan) -> Result<Option<(Model, TrainPlan)>, PlanError> {
        if self == Self::Transformers {
            return Ok(None);
        }
        self.check(plan)?;
        let lora = lora(plan)?;
        let (config, plan) = match self {
            Self::Torchtune => (torchtune::config(model.config())?, torchtune::renamed(plan)?),
            _ => {
                let config = litgpt::config(model.config(), lora, self == Self::Litgpt)?;
                // Its adapters are part of the model.
                (config, TrainPlan { adapter: None, ..plan.clone() })
            }
        };
        Ok(Some((Model::new(config, Some("AutoModelForCausalLM"))?, plan)))
    }

    fn name(self) -> &'static str {
        match self {
            Self::Transformers => "transformers'",
            Self::Litgpt | Self::LitgptSpring2024 => "LitGPT's",
            Self::Torchtune => "torchtune's",
        }
    }

    /// What such code does not do, or what is not simulated of it.
    fn check(self, plan: &TrainPlan) -> Result<(), PlanError> {
        let refuse = |what: &str| {
            let hint = "leave it out, or take transformers' model code (model_code = \"transformers\")".to_owned();
            Err(PlanError::Unsupported { what: format!("{what} with {} model code", self.name()), hint })
        };
        let plain = TrainPlan::default();
        match plan {
            _ if plan.parallel.is_some() => refuse("several cards"),
            _ if plan.kernels != plain.kernels => refuse("kernels of others"),
            _ if plan.attention != plain.attention => refuse("another attention than SDPA"),
            _ if plan.batch.padded || plan.batch.mask => refuse("an attention mask"),
            _ if self != Self::Torchtune && plan.loss != plain.loss => refuse("another loss"),
            _ => Ok(()),
        }
    }
}

/// The plan's LoRA; other adapters are refused.
fn lora(plan: &TrainPlan) -> Result<Option<&LoraPlan>, PlanError> {
    match &plan.adapter {
        None => Ok(None),
        Some(AdapterPlan::Lora(lora)) => {
            let plain = LoraPlan {
                rank: lora.rank,
                dropout: lora.dropout,
                targets: lora.targets.clone(),
                ..LoraPlan::default()
            };
            let same = LoraPlan {
                alpha: plain.alpha,
                dtype: None,
                follow_base: false,
                task: None,
                rslora: false,
                ..lora.clone()
            } == plain;
            match same && lora.dtype.is_none_or(|dtype| dtype == plan.weights) {
                true => Ok(Some(lora)),
                false => Err(PlanError::Unsupported {
                    what: "LoRA with more than rank, dropout and targets in a library's own model code".into(),
                    hint: "leave the other options out; adapters are in the type of the weights".into(),
                }),
            }
        }
        Some(AdapterPlan::Other(_)) => Err(PlanError::Unsupported {
            what: "PEFT's methods in a library's own model code".into(),
            hint: "use LoRA".into(),
        }),
    }
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
            _ => {
                return Err(PlanError::BadValue {
                    key: "adapter.targets".into(),
                    value: name.clone(),
                    expected: "query, key, value, projection, mlp or head".into(),
                });
            }
        });
    }
    Ok(found)
}
