//! The program of one tensor-parallel card: the model with the sizes that the card has.
//!
//! A module that is split by columns or rows runs on smaller sizes, and so does all that is between: that is the same model
//! with fewer heads and a narrower MLP. So the config is made smaller and the family run on it; what comes out must have
//! exactly the parameters that the plan gives a card, else the model is refused.

use std::collections::BTreeMap;

use super::load;
use super::log::Category;
use super::lower::tensor_parallel::Split;
use super::optimizer::Trained;
use super::tensor::Tensor;
use super::torch::Torch;
use crate::model::families;
use crate::model::op::{ModuleId, Op, ParameterId};
use crate::model::tensor_plans::{TensorRules, TensorStyle, style};
use crate::model::{Inputs, Model, Module, ModuleKind, Program, Shape, Step};
use crate::plan::parallel::{TensorForm, TensorParallel};
use crate::plan::{Fault, PlanError, TrainPlan};

/// Where the number of cards is in a plan.
const TP: &str = "parallel.mesh.tp";

/// The program of rank 0 of `ways` tensor-parallel cards, and what happens around its modules.
pub fn localise(
    model: &Model,
    inputs: Inputs,
    ways: u64,
    options: TensorParallel,
) -> Result<(Program, Split), PlanError> {
    let text = model.config().get("text_config").filter(|text| text.get("model_type").is_some());
    let model_type = text.unwrap_or(model.config())["model_type"].as_str().unwrap_or_default();
    let plan = families::facts(model_type).tensor_plan;
    if plan.is_empty() {
        let planned = families::all().filter(|family| !family.facts.tensor_plan.is_empty());
        let planned: Vec<&str> = planned.flat_map(|family| family.model_types).copied().collect();
        let what = format!("tensor parallel for model type {model_type:?}, which has no plan (tp_plan) known here,");
        let fault = Fault::unsupported(TP, what).or(format!("models with one are {}", planned.join(", ")));
        return Err(fault.or_drop(TP).into());
    }
    let whole = model.program(inputs.clone())?;
    let titan = options.form == TensorForm::Torchtitan;
    let wanted = Wanted::of(&whole, plan, ways, titan)?;
    if titan && !wanted.is_plain() {
        let what = format!("torchtitan's tensor parallel (for Llama's layers and an untied head) of this {model_type}");
        return Err(Fault::unsupported(TP, what).or("use transformers' plan, or a model like Llama 3 8B").into());
    }
    for config in smaller(model.config(), &whole, ways) {
        let Ok(mut program) = model.reconfigured(config).program(inputs.clone()) else { continue };
        if wanted.matches(&program) {
            let mut split = wanted.apply(&mut program, ways);
            (split.sequence, split.loss_parallel) = (titan, options.loss_parallel);
            return Ok((program, split));
        }
    }
    let what =
        format!("{{{TP}}} {ways} for this {model_type}, whose parts do not come out as transformers' plan cuts them,");
    Err(Fault::unsupported(TP, what).or("use another {parallel.mesh.tp}, or data parallel").into())
}

/// Parameters onto the card, and then cut: what `apply_tensor_parallelism` does to a model that is there already. Modules
/// are cut in the order of the model; a tied table is cut for both its modules, and one of the parts goes when they are
/// tied again.
pub fn load(torch: &mut Torch, program: &Program, split: &Split, plan: &TrainPlan) -> (Vec<Tensor>, Vec<Trained>) {
    let mut whole = program.clone();
    for (id, shape) in &split.wholes {
        whole.parameters[id.0 as usize].shape = *shape;
    }
    let (mut parameters, mut trained) = load::parameters(torch, &whole, plan);
    // torchtitan cuts what is around the layers first.
    let in_layer = |id: &&ParameterId| program.parameters[id.0 as usize].name.contains("layers.");
    let (inside, around): (Vec<_>, Vec<_>) = program.registration.iter().partition(|id| split.sequence && in_layer(id));
    for id in around.into_iter().chain(inside) {
        let Some(all) = split.wholes.get(id) else { continue };
        let old = &parameters[id.0 as usize];
        let place = trained.iter().position(|one| one.tensor.storage.id() == old.storage.id());
        let shape = program.parameters[id.0 as usize].shape;
        // `distribute_tensor` lays out the parts of all cards, and those of columns are copies; so are those of experts'
        // packed projections.
        let columns = split.sequence && all.last() != shape.last();
        let packed = all.rank() == 3 && all.size(-2) != shape.size(-2);
        let ways = if columns || packed { all.elements() / shape.elements().max(1) } else { 0 };
        let parts: Vec<Tensor> = (0..ways).map(|_| torch.fresh("contiguous", shape, plan.weights)).collect();
        let mut part = torch.in_category(Category::Weights, |torch| torch.fresh("parameter", shape, plan.weights));
        drop(parts);
        if let Some(place) = place {
            let leaf;
            (part, leaf) = torch.leaf(part);
            trained[place] = Trained { tensor: part.clone(), leaf, apart: trained[place].apart };
        }
        parameters[id.0 as usize] = part;
    }
    (parameters, trained)
}

/// What a plan gives a card of each parameter.
struct Wanted {
    /// By name of the parameter: all of it, the card's part, and whether the model must come to that part by itself.
    shapes: BTreeMap<String, (Shape, Shape, bool)>,
    styles: BTreeMap<String, (TensorStyle, u64)>,
}

impl Wanted {
    fn of(whole: &Program, plan: &[TensorRules], ways: u64, titan: bool) -> Result<Self, PlanError> {
        let mut wanted = Self { shapes: BTreeMap::new(), styles: BTreeMap::new() };
        let head =
            whole.modules.iter().find(|module| module.path == "lm_head").and_then(|head| head.parameters.first());
        let tied = head.filter(|id| whole.modules.iter().any(|m| is_table(m.kind) && m.parameters.contains(id)));
        for parameter in &whole.parameters {
            wanted.shapes.insert(parameter.name.clone(), (parameter.shape, parameter.shape, true));
        }
        for module in &whole.modules {
            let style = match module.kind {
                ModuleKind::Embedding { .. } if titan && tied.is_none() => Some(TensorStyle::Embedding),
                ModuleKind::Embedding { .. } if tied.is_some_and(|id| module.parameters.contains(id)) => {
                    module.path.ends_with("embed_tokens").then_some(TensorStyle::Embedding)
                }
                _ if module.path == "lm_head" => Some(TensorStyle::ColumnGathered),
                _ => style(plan, &module.path),
            };
            let Some(style) = style else { continue };
            let mut size = 0;
            for id in &module.parameters {
                let parameter = &whole.parameters[id.0 as usize];
                let (dim, by_itself) = match (style, parameter.shape.rank()) {
                    (TensorStyle::Column, _) => (0, true),
                    (TensorStyle::ColumnGathered | TensorStyle::Embedding, _) => (0, false),
                    (TensorStyle::Row, 2) => (1, true),
                    (TensorStyle::RowSplit, 2) => (1, false),
                    (TensorStyle::Experts, 3) => (if parameter.name.ends_with("down_proj") { 2 } else { 1 }, true),
                    _ => continue,
                };
                let all = parameter.shape.size(dim);
                size = size.max(all);
                if style == TensorStyle::ColumnGathered && !all.is_multiple_of(ways) {
                    let path = &module.path;
                    let problem =
                        format!("{{{TP}}} {ways} does not divide the {all} outputs of {path}, which are gathered");
                    return Err(Fault::new(TP, problem).or(nearest(all, ways)).into());
                }
                let packed = style == TensorStyle::Experts && dim == 1;
                let part = if packed { 2 * (all / 2).div_ceil(ways) } else { all.div_ceil(ways) };
                let shapes = (parameter.shape, parameter.shape.with(dim, part), by_itself);
                wanted.shapes.insert(parameter.name.clone(), shapes);
            }
            wanted.styles.insert(module.path.clone(), (style, size));
        }
        Ok(wanted)
    }

    /// Whether only the head, the table and Llama's linears are split, the head by itself.
    fn is_plain(&self) -> bool {
        use TensorStyle::{Column, ColumnGathered, Embedding, Row};
        let known = |path: &str, style: TensorStyle| match style {
            Column => path.ends_with("_proj") && (path.contains(".self_attn.") || path.contains(".mlp.")),
            Row => path.ends_with(".o_proj") || path.ends_with(".down_proj"),
            ColumnGathered => path == "lm_head",
            Embedding => true,
            _ => false,
        };
        let has = |wanted: TensorStyle| self.styles.values().any(|(style, _)| *style == wanted);
        has(Embedding)
            && has(ColumnGathered)
            && self.styles.iter().all(|(path, (style, _))| known(path, *style))
            && self.shapes.contains_key("lm_head.weight")
    }

    /// Whether a program has these parameters, those that are cut afterwards being whole.
    fn matches(&self, program: &Program) -> bool {
        program.parameters.len() == self.shapes.len()
            && program.parameters.iter().all(|parameter| match self.shapes.get(&parameter.name) {
                Some((_, part, true)) => *part == parameter.shape,
                Some((whole, _, false)) => *whole == parameter.shape,
                None => false,
            })
    }

    /// Cuts what is left and finds the modules.
    fn apply(&self, program: &mut Program, ways: u64) -> Split {
        let mut wholes = BTreeMap::new();
        for (index, parameter) in program.parameters.iter_mut().enumerate() {
            let Some((whole, part, _)) = self.shapes.get(&parameter.name) else { continue };
            parameter.shape = *part;
            if whole != part {
                wholes.insert(ParameterId(index as u32), *whole);
            }
        }
        let named = program.modules.iter().enumerate();
        let styled =
            |(index, module): (usize, &Module)| Some((ModuleId(index as u32), *self.styles.get(&module.path)?));
        let modules = crate::order::map(named.filter_map(styled));
        Split { ways, modules, wholes, ..Split::default() }
    }
}

fn is_table(kind: ModuleKind) -> bool {
    matches!(kind, ModuleKind::Embedding { .. })
}

fn nearest(whole: u64, ways: u64) -> String {
    let divisors: Vec<String> =
        (2..=whole.min(64)).filter(|n| whole.is_multiple_of(*n)).map(|n| n.to_string()).collect();
    match divisors.is_empty() {
        true => format!("use data parallel instead of {{{TP}}} {ways}: none up to 64 divides it"),
        false => format!("{{{TP}}} may be {}", divisors.join(", ")),
    }
}

/// The config with fewer heads and narrower layers, in every combination: which of them a plan splits differs by model.
fn smaller(config: &serde_json::Value, whole: &Program, ways: u64) -> Vec<serde_json::Value> {
    let nested = config.get("text_config").is_some_and(|text| text.get("model_type").is_some());
    let text = if nested { &config["text_config"] } else { config };
    let mut choices: Vec<Vec<(&str, u64)>> = Vec::new();
    if let Some((heads, kv_heads, width)) = heads(whole)
        && heads.is_multiple_of(ways)
        && kv_heads.is_multiple_of(ways)
    {
        let mut keys = vec![("num_attention_heads", heads / ways), ("num_key_value_heads", kv_heads / ways)];
        if text.get("kv_lora_rank").is_none() {
            keys.push(("head_dim", width));
        }
        choices.push(keys);
    }
    for key in ["intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"] {
        let stated = text.get(key).and_then(serde_json::Value::as_u64);
        let width = stated.or_else(|| (key == "intermediate_size").then(|| mlp_width(whole)).flatten());
        choices.extend(width.map(|width| vec![(key, width.div_ceil(ways))]));
    }
    let mut configs = Vec::new();
    for mask in (0..1u32 << choices.len()).rev() {
        let mut config = config.clone();
        let chosen = choices.iter().enumerate().filter(|(bit, _)| mask & (1 << bit) != 0);
        for (key, value) in chosen.flat_map(|(_, keys)| keys) {
            let text = if nested { &mut config["text_config"] } else { &mut config };
            text[*key] = (*value).into();
        }
        configs.push(config);
    }
    configs
}

/// Heads of queries, of keys, and the width of one.
fn heads(program: &Program) -> Option<(u64, u64, u64)> {
    program.steps.iter().find_map(|step| match step {
        Step::Run { op: Op::Attention(spec), inputs, .. } => {
            let query = program.values[inputs.first()?.0 as usize];
            Some((query.size(1), query.size(1) / spec.groups.max(1), query.last()))
        }
        _ => None,
    })
}

/// The width of the first MLP.
fn mlp_width(program: &Program) -> Option<u64> {
    let ends = ["mlp.gate_proj", "mlp.up_proj", "mlp.fc1", "mlp.c_fc", "mlp.dense_h_to_4h"];
    let module = program.modules.iter().find(|module| ends.iter().any(|end| module.path.ends_with(end)))?;
    let weight: &ParameterId = module.parameters.first()?;
    Some(program.parameters[weight.0 as usize].shape.size(0))
}
