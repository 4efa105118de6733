//! LoRA's options.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::targets::Targets;
use super::{PlanError, bad, default_adapter_dtype};
use crate::dtype::DType;
use crate::plan::{Fault, Faults, Quantization, QuantizationScheme};

/// LoRA as `peft.LoraConfig` describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraPlan {
    /// The rank.
    pub rank: u64,
    /// The scale; no effect on memory.
    pub alpha: f64,
    /// Dropout before the first matrix, from 0 to 1.
    pub dropout: f64,
    /// Which modules are adapted.
    pub targets: Targets,
    /// Which of them are not.
    pub exclude: Option<Targets>,
    /// Only these layers.
    pub layers_to_transform: Vec<u64>,
    /// The names of layer lists that `layers_to_transform` counts in; any when empty.
    pub layers_pattern: Vec<String>,
    /// Other ranks for modules by a regular expression on the end of their name; the first that fits counts.
    pub rank_pattern: Vec<(String, u64)>,
    /// Modules trained whole, as copies beside the frozen ones, tied or not.
    pub modules_to_save: Vec<String>,
    /// Which biases of the model are trained.
    pub bias: LoraBias,
    /// Whether the second matrix has a bias.
    pub lora_bias: bool,
    /// Weight-decomposed LoRA: a trained magnitude per output.
    pub dora: bool,
    /// Rank-stabilised scaling; no effect on memory.
    pub rslora: bool,
    /// Parameters (not modules) that are adapted, by the end of their name: fused experts.
    pub target_parameters: Vec<String>,
    /// The type adapters are held in; PEFT's choice when absent: fp32.
    pub dtype: Option<DType>,
    /// Whether adapters keep the type of what they adapt, or the one that 4-bit layers compute in
    /// (`autocast_adapter_dtype=False`).
    pub follow_base: bool,
    /// What PEFT is told the model is for.
    pub task: Option<TaskType>,
}

impl Default for LoraPlan {
    /// `LoraConfig()`.
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            targets: Targets::Default,
            exclude: None,
            layers_to_transform: Vec::new(),
            layers_pattern: Vec::new(),
            rank_pattern: Vec::new(),
            modules_to_save: Vec::new(),
            bias: LoraBias::None,
            lora_bias: false,
            dora: false,
            rslora: false,
            target_parameters: Vec::new(),
            dtype: None,
            follow_base: false,
            task: None,
        }
    }
}

/// Which biases of the model are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoraBias {
    /// None.
    #[default]
    None,
    /// All of them.
    All,
    /// Those of adapted modules.
    LoraOnly,
    /// Everything that has no adapter, in its place: embeddings, norms, biases, the head (DeepSpeed-Chat's LoRA).
    Others,
}

/// PEFT's `task_type`, where it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TaskType {
    /// A language model.
    CausalLm,
    /// An encoder-decoder.
    #[serde(rename = "SEQ_2_SEQ_LM")]
    Seq2SeqLm,
    /// Sequence classification: the head is trained whole.
    SeqCls,
    /// Token classification: the head is trained whole.
    TokenCls,
    /// Question answering.
    QuestionAns,
    /// Embeddings.
    FeatureExtraction,
}

/// Keys of `adapter_config.json` that change no size.
const WITHOUT_EFFECT: [&str; 22] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "ensure_weight_tying",
    "task_type",
    "layers_pattern",
    "use_rslora",
    "lora_alpha",
    "runtime_config",
];

/// Keys whose effect is not modelled: refused when set.
const REFUSED: [&str; 8] = [
    "layer_replication",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "kasa_config",
];

impl LoraPlan {
    /// The type of an adapter on a matrix of this type.
    pub fn dtype_on(&self, base: DType) -> DType {
        match self.dtype {
            Some(dtype) => dtype,
            None if self.follow_base => base,
            None => default_adapter_dtype(base),
        }
    }

    /// The type of an adapter on a quantised matrix of a model in this type: PEFT makes it in fp32, and moves it only where
    /// it knows what the matrix computes in.
    pub fn dtype_on_quantised(&self, hidden: DType, base: Option<&Quantization>) -> DType {
        let computes =
            base.filter(|base| base.scheme != QuantizationScheme::Int8).map_or(DType::F32, |base| base.compute);
        if self.dtype.is_none() && self.follow_base { computes } else { self.dtype_on(hidden) }
    }
}

impl LoraPlan {
    /// Checks what PEFT itself checks before it looks at a model.
    pub fn check(&self) -> Result<(), Vec<Fault>> {
        let mut faults = Faults::default();
        const WHOLE: &str = "a positive whole number";
        faults.when(self.rank == 0, || Fault::value("adapter.rank", 0, WHOLE).or_set("adapter.rank", 8));
        for (pattern, _) in self.rank_pattern.iter().filter(|(_, rank)| *rank == 0) {
            faults.add(
                Fault::value("adapter.rank_pattern", format!("0 for {pattern}"), WHOLE).or_drop("adapter.rank_pattern"),
            );
        }
        faults.when(!(0.0..=1.0).contains(&self.dropout), || {
            Fault::value("adapter.dropout", self.dropout, "a probability from 0 to 1").or_set("adapter.dropout", 0.0)
        });
        faults.when(!self.layers_to_transform.is_empty() && matches!(self.targets, Targets::Regex(_)), || {
            let path = "adapter.layers_to_transform";
            Fault::new(path, format!("{{{path}}} cannot be used when {{adapter.targets}} is a regular expression"))
                .or("name the modules")
                .or("put the layers into the expression")
        });
        faults.end()
    }

    /// Reads the keys of PEFT's `adapter_config.json`; keys without effect on memory are returned by name.
    pub fn from_adapter_config(config: &Value) -> Result<(Self, Vec<String>), PlanError> {
        let object = config.as_object().ok_or_else(|| bad("adapter_config.json", config, "a JSON object"))?;
        let mut plan = Self::default();
        let mut ignored = Vec::new();
        let default = LoraPlan::default();
        for (key, value) in object {
            if REFUSED.contains(&key.as_str()) {
                let set = !(value.is_null() || *value == false || value.as_array().is_some_and(Vec::is_empty));
                if set {
                    return Err(Fault::unsupported(key, format!("{key} in adapter_config.json")).or_drop(key).into());
                }
                continue;
            }
            if value.is_null() {
                continue;
            }
            match key.as_str() {
                "r" => plan.rank = value.as_u64().ok_or_else(|| bad(key, value, "a positive whole number"))?,
                "lora_dropout" => plan.dropout = value.as_f64().ok_or_else(|| bad(key, value, "a number"))?,
                "lora_alpha" => plan.alpha = value.as_f64().unwrap_or(default.alpha),
                "target_modules" => plan.targets = Targets::from_value(key, value)?,
                "exclude_modules" => plan.exclude = Some(Targets::from_value(key, value)?),
                "layers_to_transform" => plan.layers_to_transform = numbers(key, value)?,
                "layers_pattern" => plan.layers_pattern = strings(key, value)?,
                "rank_pattern" => plan.rank_pattern = ranks(key, value)?,
                "modules_to_save" => plan.modules_to_save = strings(key, value)?,
                "target_parameters" => plan.target_parameters = strings(key, value)?,
                "bias" => {
                    plan.bias =
                        crate::typed::read(value.clone()).map_err(|_| bad(key, value, "none, all or lora_only"))?;
                }
                "lora_bias" => plan.lora_bias = *value == true,
                "use_dora" => plan.dora = *value == true,
                "use_rslora" => plan.rslora = *value == true,
                "task_type" => plan.task = crate::typed::read(value.clone()).ok(),
                known if WITHOUT_EFFECT.contains(&known) => {}
                _ => ignored.push(key.clone()),
            }
        }
        plan.check()?;
        Ok((plan, ignored))
    }
}

fn strings(key: &str, value: &Value) -> Result<Vec<String>, PlanError> {
    match value {
        Value::String(one) => Ok(vec![one.clone()]),
        Value::Array(list) => {
            list.iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(|| bad(key, item, "a name"))).collect()
        }
        _ => Err(bad(key, value, "a list of names")),
    }
}

fn numbers(key: &str, value: &Value) -> Result<Vec<u64>, PlanError> {
    match value {
        Value::Number(_) => Ok(vec![value.as_u64().ok_or_else(|| bad(key, value, "a layer's number"))?]),
        Value::Array(list) => {
            list.iter().map(|item| item.as_u64().ok_or_else(|| bad(key, item, "a layer's number"))).collect()
        }
        _ => Err(bad(key, value, "a list of layer numbers")),
    }
}

fn ranks(key: &str, value: &Value) -> Result<Vec<(String, u64)>, PlanError> {
    let object = value.as_object().ok_or_else(|| bad(key, value, "an object of patterns and ranks"))?;
    object
        .iter()
        .map(|(pattern, rank)| {
            let rank = rank.as_u64().filter(|rank| *rank > 0);
            Ok((pattern.clone(), rank.ok_or_else(|| bad(key, value, "positive whole numbers"))?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_config_is_read() {
        let config = serde_json::json!({
            "peft_type": "LORA", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "bias": "none", "use_dora": false,
            "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "modules_to_save": null, "new_key": 1,
        });
        let (plan, ignored) = LoraPlan::from_adapter_config(&config).unwrap();
        assert_eq!((plan.rank, plan.dropout, plan.task), (16, 0.05, Some(TaskType::CausalLm)));
        assert_eq!(plan.targets, Targets::Names(vec!["q_proj".into(), "v_proj".into()]));
        assert_eq!(ignored, ["new_key"]);
    }

    #[test]
    fn a_rank_of_zero_and_what_is_not_modelled_are_refused() {
        assert!(LoraPlan::from_adapter_config(&serde_json::json!({"r": 0})).is_err());
        assert!(LoraPlan::from_adapter_config(&serde_json::json!({"r": 8, "use_bdlora": true})).is_err());
        let faults = LoraPlan { rank: 0, dropout: f64::NAN, ..LoraPlan::default() }.check().unwrap_err();
        let paths: Vec<String> = faults.into_iter().map(|fault| fault.path).collect();
        assert_eq!(paths, ["adapter.rank", "adapter.dropout"]);
    }
}
