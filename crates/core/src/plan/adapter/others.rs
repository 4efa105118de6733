//! The other common methods of PEFT: what they train, and but for prefix tuning, whose runs are not simulated, where it sits.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::targets::{self, Targets, View};
use super::{AdaptedKind, AdaptedModule, AdapterLayout, LoraPlan, PlanError, TrainableTensor, bad, defaults};
use crate::model::facts::NameList;
use crate::model::op::ModuleId;
use crate::model::{Inventory, ModuleKind, Program, Shape};
use crate::plan::{Fault, Faults};

/// A method other than LoRA.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OtherAdapter {
    /// IA³: a learned scale per output (or per input of feed-forward layers).
    Ia3(Ia3Plan),
    /// OFT: rotations of blocks of inputs.
    Oft(OftPlan),
    /// VeRA: two scales per module around frozen random matrices that all share.
    Vera(VeraPlan),
    /// Prompt tuning: virtual tokens before the input.
    PromptTuning(PromptPlan),
    /// Prefix tuning: virtual keys and values in every layer.
    PrefixTuning(PrefixPlan),
}

/// `peft.IA3Config`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Ia3Plan {
    /// Which modules are scaled.
    pub targets: Targets,
    /// Which of them are feed-forward: scaled before instead of after.
    pub feedforward: Targets,
}

/// `peft.OFTConfig`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OftPlan {
    /// Which modules are rotated.
    pub targets: Targets,
    /// Blocks per module; 0 when the block's size is given.
    pub rank: u64,
    /// Inputs per block; 0 when the number of blocks is given.
    pub block_size: u64,
    /// Whether all blocks of a module share one rotation.
    pub block_share: bool,
}

impl Default for OftPlan {
    fn default() -> Self {
        Self { targets: Targets::Default, rank: 0, block_size: 32, block_share: false }
    }
}

/// `peft.VeraConfig`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VeraPlan {
    /// Which modules are adapted.
    pub targets: Targets,
    /// The rank.
    pub rank: u64,
}

impl Default for VeraPlan {
    fn default() -> Self {
        Self { targets: Targets::Default, rank: 256 }
    }
}

/// `peft.PromptTuningConfig`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct PromptPlan {
    /// How many virtual tokens.
    pub virtual_tokens: u64,
    /// Whether encoder and decoder have their own (`SEQ_2_SEQ_LM`).
    #[serde(default)]
    pub encoder_decoder: bool,
}

/// `peft.PrefixTuningConfig`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct PrefixPlan {
    /// How many virtual tokens.
    pub virtual_tokens: u64,
    /// Whether they come out of a small network.
    #[serde(default)]
    pub projection: bool,
    /// Width of that network; that of the keys when absent.
    #[serde(default)]
    pub encoder_hidden_size: Option<u64>,
}

impl OtherAdapter {
    /// Reads `adapter_config.json`.
    pub fn from_adapter_config(config: &Value) -> Result<Self, PlanError> {
        let number = |key: &str, default: u64| match &config[key] {
            Value::Null => Ok(default),
            value => value.as_u64().ok_or_else(|| bad(key, value, "a whole number")),
        };
        let targets = |key: &str| Targets::from_value(key, &config[key]);
        match config["peft_type"].as_str().unwrap_or_default() {
            "IA3" => Ok(Self::Ia3(Ia3Plan {
                targets: targets("target_modules")?,
                feedforward: targets("feedforward_modules")?,
            })),
            "OFT" => Ok(Self::Oft(OftPlan {
                targets: targets("target_modules")?,
                rank: number("r", 0)?,
                block_size: number("oft_block_size", 32)?,
                block_share: config["block_share"] == true,
            })),
            "VERA" => Ok(Self::Vera(VeraPlan { targets: targets("target_modules")?, rank: number("r", 256)? })),
            "PROMPT_TUNING" => Ok(Self::PromptTuning(PromptPlan {
                virtual_tokens: number("num_virtual_tokens", 0)?,
                encoder_decoder: config["task_type"] == "SEQ_2_SEQ_LM",
            })),
            "PREFIX_TUNING" => Ok(Self::PrefixTuning(PrefixPlan {
                virtual_tokens: number("num_virtual_tokens", 0)?,
                projection: config["prefix_projection"] == true,
                encoder_hidden_size: config["encoder_hidden_size"].as_u64(),
            })),
            other => Err(Fault::unsupported("peft_type", format!("PEFT's {other}"))
                .or("LORA, IA3, OFT, VERA, PROMPT_TUNING and PREFIX_TUNING are known")
                .into()),
        }
    }

    /// Checks what PEFT itself checks before it looks at a model.
    pub fn check(&self) -> Result<(), Vec<Fault>> {
        const BLOCK: &str = "adapter.oft.block_size";
        let mut faults = Faults::default();
        match self {
            Self::Vera(plan) => faults.when(plan.rank == 0, || {
                Fault::value("adapter.vera.rank", 0, "a positive whole number").or_set("adapter.vera.rank", 256)
            }),
            Self::Oft(OftPlan { rank, block_size, .. }) => {
                faults.when(*rank == 0 && *block_size == 0, || {
                    Fault::value(BLOCK, 0, "positive, or {adapter.oft.rank} is").or_set(BLOCK, 32)
                });
                faults.when(*rank > 0 && *block_size > 0, || {
                    Fault::value(BLOCK, block_size, "0 when {adapter.oft.rank} is given")
                        .or_set(BLOCK, 0)
                        .or_set("adapter.oft.rank", 0)
                });
            }
            Self::Ia3(_) | Self::PromptTuning(_) | Self::PrefixTuning(_) => {}
        }
        faults.end()
    }

    /// What is trained on a program, and where; methods whose runs are not simulated are refused.
    pub fn layout(&self, model_type: &str, program: &Program) -> Result<AdapterLayout, PlanError> {
        let view = View { model_type, modules: &program.modules, parameters: &program.parameters };
        let vector = |name: &'static str, size: u64| TrainableTensor { name, shape: Shape::from([size]) };
        let adapted = |(id, name): (ModuleId, &str), kind, tensors| AdaptedModule {
            module: Some(id),
            name: name.to_owned(),
            kind,
            rank: 0,
            tensors,
        };
        let mut layout = AdapterLayout::default();
        match self {
            Self::Ia3(plan) => {
                let feedforward = feedforward(plan, model_type)?;
                let default = defaults::ia3(model_type).map(|(names, _)| names);
                for (id, inputs, outputs) in picked(view, &plan.targets, default, "IA³")? {
                    let path = program.modules[id.0 as usize].path.as_str();
                    let tensor = match feedforward.iter().any(|name| path.ends_with(name.as_str())) {
                        true => vector(IA3_BEFORE, inputs),
                        false => vector("ia3_l", outputs),
                    };
                    layout.adapted.push(adapted((id, path), AdaptedKind::Linear, vec![tensor]));
                }
            }
            Self::Vera(plan) => {
                self.check()?;
                for (id, _, outputs) in picked(view, &plan.targets, defaults::vera(model_type), "VeRA")? {
                    let path = program.modules[id.0 as usize].path.as_str();
                    let pair = vec![vector("vera_lambda_b", outputs), vector("vera_lambda_d", plan.rank)];
                    layout.adapted.push(adapted((id, path), AdaptedKind::Linear, pair));
                }
            }
            Self::PromptTuning(plan) if plan.encoder_decoder => {
                return Err(not_simulated("prompt tuning of an encoder-decoder"));
            }
            Self::PromptTuning(plan) => {
                let modules = (0..).map(ModuleId).zip(&program.modules);
                let table = modules.filter_map(|(id, module)| match module.kind {
                    ModuleKind::Embedding { width, .. } => Some((id, module.path.as_str(), width)),
                    _ => None,
                });
                let (id, path, width) = table
                    .take(1)
                    .last()
                    .ok_or_else(|| bad("adapter", "this model", "a model with token embeddings"))?;
                let shape = Shape::from([plan.virtual_tokens, width]);
                let tensor = TrainableTensor { name: "prompt_encoder", shape };
                layout.adapted.push(adapted((id, path), AdaptedKind::Embedding, vec![tensor]));
            }
            Self::Oft(plan) => {
                self.check()?;
                for (id, inputs, _) in picked(view, &plan.targets, defaults::lora(model_type), "OFT")? {
                    let path = program.modules[id.0 as usize].path.as_str();
                    let tensor = TrainableTensor { name: OFT_ROTATION, shape: plan.shape(inputs) };
                    layout.adapted.push(adapted((id, path), AdaptedKind::Linear, vec![tensor]));
                }
            }
            Self::PrefixTuning(_) => {
                let count = self.trainable(model_type, &Inventory::of(program))?;
                return Err(not_simulated(&format!("prefix tuning, which trains {count} parameters here,")));
            }
        }
        Ok(layout)
    }

    /// Its name, as papers spell it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ia3(_) => "IA³",
            Self::Oft(_) => "OFT",
            Self::Vera(_) => "VeRA",
            Self::PromptTuning(_) => "prompt tuning",
            Self::PrefixTuning(_) => "prefix tuning",
        }
    }

    /// Tokens that go before those of the batch.
    pub fn virtual_tokens(&self) -> u64 {
        match self {
            Self::PromptTuning(plan) => plan.virtual_tokens,
            _ => 0,
        }
    }

    /// Elements that are trained on a model.
    pub fn trainable(&self, model_type: &str, inventory: &Inventory) -> Result<u64, PlanError> {
        let view = View { model_type, modules: &inventory.modules, parameters: &inventory.parameters };
        self.check()?;
        match self {
            Self::Ia3(plan) => ia3(plan, view),
            Self::Oft(plan) => sum(view, &plan.targets, defaults::lora(model_type), "OFT", |inputs, _, _| {
                Ok(plan.shape(inputs).elements())
            }),
            Self::Vera(plan) => {
                sum(view, &plan.targets, defaults::vera(model_type), "VeRA", |_, outputs, _| Ok(plan.rank + outputs))
            }
            Self::PromptTuning(plan) => {
                let copies = if plan.encoder_decoder { 2 } else { 1 };
                Ok(plan.virtual_tokens.saturating_mul(copies).saturating_mul(embedding_width(inventory)?))
            }
            Self::PrefixTuning(plan) => prefix(plan, inventory),
        }
    }
}

impl OftPlan {
    /// The rows and columns of each block that rotates some of so many inputs.
    pub fn block(&self, inputs: u64) -> u64 {
        match self.rank {
            0 => closest_divisor(inputs, self.block_size),
            rank => inputs / closest_divisor(inputs, rank).max(1),
        }
    }

    /// What is trained for so many inputs: of each block what is above its diagonal.
    fn shape(&self, inputs: u64) -> Shape {
        let block = self.block(inputs);
        let blocks = if self.block_share { 1 } else { inputs / block.max(1) };
        Shape::from([blocks, block * block.saturating_sub(1) / 2])
    }
}

/// The name of what OFT trains.
pub const OFT_ROTATION: &str = "oft_R";

/// The name of an IA³ scale that is applied to the input.
pub const IA3_BEFORE: &str = "ia3_l (input)";

/// The linears that targets pick, with their inputs and outputs.
fn picked(
    view: View<'_>,
    chosen: &Targets,
    default: Option<NameList>,
    method: &str,
) -> Result<Vec<(ModuleId, u64, u64)>, PlanError> {
    let chosen = match chosen {
        Targets::Default => targets::default_targets(default, view, method)?,
        chosen => chosen.clone(),
    };
    // Rewriting for fused experts is LoRA's alone, so the type is not passed on.
    let plan = LoraPlan { targets: chosen, ..LoraPlan::default() };
    let resolved = targets::resolve(&plan, View { model_type: "", ..view })?;
    let mut found = Vec::new();
    for id in resolved.modules {
        let module = &view.modules[id.0 as usize];
        let (inputs, outputs) = match module.kind {
            ModuleKind::Linear { inputs, outputs } => (inputs, outputs),
            // PEFT's OFT knows no `Conv1D`.
            ModuleKind::Conv1d { inputs, outputs } if method != "OFT" => (inputs, outputs),
            _ => {
                let fault = Fault::unsupported("adapter", format!("{method} on {}", module.path));
                return Err(fault.or("target linears only").into());
            }
        };
        found.push((id, inputs, outputs));
    }
    Ok(found)
}

/// Adds up something over the linears that targets pick.
fn sum(
    view: View<'_>,
    chosen: &Targets,
    default: Option<NameList>,
    method: &str,
    count: impl Fn(u64, u64, &str) -> Result<u64, PlanError>,
) -> Result<u64, PlanError> {
    picked(view, chosen, default, method)?.into_iter().try_fold(0u64, |total, (id, inputs, outputs)| {
        Ok(total.saturating_add(count(inputs, outputs, &view.modules[id.0 as usize].path)?))
    })
}

fn not_simulated(method: &str) -> PlanError {
    Fault::unsupported("adapter", format!("the memory of {method}"))
        .or("LoRA, IA³, VeRA, OFT and prompt tuning of decoders are")
        .into()
}

/// The ends of names of modules whose input is scaled.
fn feedforward(plan: &Ia3Plan, model_type: &str) -> Result<Vec<String>, PlanError> {
    let default = defaults::ia3(model_type);
    match (&plan.feedforward, &plan.targets) {
        (Targets::Default, Targets::Default) => {
            Ok(default.map(|(_, names)| names.iter().map(|name| (*name).to_owned()).collect()).unwrap_or_default())
        }
        (Targets::Names(names), _) => Ok(names.clone()),
        (Targets::Default, _) => Ok(Vec::new()),
        _ => Err(bad("adapter.ia3.feedforward", "a pattern", "a list of names")),
    }
}

fn ia3(plan: &Ia3Plan, view: View<'_>) -> Result<u64, PlanError> {
    let default = defaults::ia3(view.model_type);
    let feedforward = feedforward(plan, view.model_type)?;
    sum(view, &plan.targets, default.map(|(names, _)| names), "IA³", |inputs, outputs, path| {
        let before = feedforward.iter().any(|name| path.ends_with(name.as_str()));
        Ok(if before { inputs } else { outputs })
    })
}

/// The divisor nearest to `wanted`, the smaller one on a tie (`adjust_oft_parameters`).
fn closest_divisor(inputs: u64, wanted: u64) -> u64 {
    if inputs == 0 || wanted >= inputs {
        return inputs;
    }
    let wanted = wanted.max(1);
    let higher = (wanted..=inputs).find(|n| inputs.is_multiple_of(*n)).unwrap_or(inputs);
    let lower = (1..=wanted).rev().find(|n| inputs.is_multiple_of(*n)).unwrap_or(1);
    if wanted - lower <= higher - wanted { lower } else { higher }
}

fn embedding_width(inventory: &Inventory) -> Result<u64, PlanError> {
    let width = inventory.modules.iter().find_map(|module| match module.kind {
        ModuleKind::Embedding { width, .. } => Some(width),
        _ => None,
    });
    width.ok_or_else(|| bad("adapter", "this model", "a model with token embeddings"))
}

fn prefix(plan: &PrefixPlan, inventory: &Inventory) -> Result<u64, PlanError> {
    let layers = inventory.modules.iter().filter(|module| module.kind == ModuleKind::Layer).count() as u64;
    let width = inventory.caches.iter().map(|cache| cache.heads.saturating_mul(cache.key_dim)).max();
    let width = width.ok_or_else(|| bad("adapter", "this model", "a model with a key-value cache"))?;
    let outputs = layers.saturating_mul(2).saturating_mul(width);
    Ok(if plan.projection {
        let hidden = plan.encoder_hidden_size.unwrap_or(width);
        let first = width.saturating_mul(hidden).saturating_add(hidden);
        let second = hidden.saturating_mul(outputs).saturating_add(outputs);
        plan.virtual_tokens.saturating_mul(width).saturating_add(first).saturating_add(second)
    } else {
        plan.virtual_tokens.saturating_mul(outputs)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_divisor_is_taken() {
        assert_eq!(closest_divisor(4096, 32), 32);
        assert_eq!(closest_divisor(896, 30), 28);
        assert_eq!(closest_divisor(100, 200), 100);
    }
}
