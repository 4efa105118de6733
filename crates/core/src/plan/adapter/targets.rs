//! Which modules and parameters a list of names, a regular expression, `all-linear` or a default picks.

use std::collections::BTreeSet;

use regex_lite::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::lora::TaskType;
use super::{LoraPlan, PlanError, bad, defaults};
use crate::model::facts::{ExpertNames, NameList};
use crate::model::families::facts;
use crate::model::op::{ModuleId, Parameter, ParameterId};
use crate::model::{Module, ModuleKind};

/// Which modules are meant.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(into = "Option<NamesOrPattern>", from = "Option<NamesOrPattern>")]
#[schemars(with = "Option<NamesOrPattern>")]
pub enum Targets {
    /// PEFT's own choice for the model type; refused where it has none.
    #[default]
    Default,
    /// Every linear but the output embedding.
    AllLinear,
    /// Modules whose whole name fits a regular expression.
    Regex(String),
    /// Modules with these names, or whose name ends in `.name`.
    Names(Vec<String>),
}

#[derive(Debug, Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(untagged)]
enum NamesOrPattern {
    Pattern(String),
    Names(Vec<String>),
}

impl From<Option<NamesOrPattern>> for Targets {
    fn from(value: Option<NamesOrPattern>) -> Self {
        match value {
            None => Self::Default,
            Some(NamesOrPattern::Pattern(text)) => Self::parse(&text),
            Some(NamesOrPattern::Names(names)) => Self::Names(names),
        }
    }
}

impl From<Targets> for Option<NamesOrPattern> {
    fn from(value: Targets) -> Self {
        match value {
            Targets::Default => None,
            Targets::AllLinear => Some(NamesOrPattern::Pattern("all-linear".into())),
            Targets::Regex(text) => Some(NamesOrPattern::Pattern(text)),
            Targets::Names(names) => Some(NamesOrPattern::Names(names)),
        }
    }
}

impl Targets {
    /// A string as PEFT reads it: `all-linear` or a regular expression.
    pub fn parse(text: &str) -> Self {
        if text.eq_ignore_ascii_case("all-linear") { Self::AllLinear } else { Self::Regex(text.to_owned()) }
    }

    pub(super) fn from_value(key: &str, value: &Value) -> Result<Self, PlanError> {
        crate::typed::read(value.clone()).map_err(|_| bad(key, value, "a list of names, or a string"))
    }
}

/// What a plan's targets come to on a model.
#[derive(Debug, Clone, Default)]
pub(super) struct Resolved {
    /// Modules, in the model's order.
    pub(super) modules: Vec<ModuleId>,
    /// Parameters, in the model's order.
    pub(super) parameters: Vec<ParameterId>,
    /// Ranks by pattern, the plan's own first.
    pub(super) ranks: Vec<(String, u64)>,
}

/// The model as PEFT sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) model_type: &'a str,
    pub(super) modules: &'a [Module],
    pub(super) parameters: &'a [Parameter],
}

/// `inject_adapter`: what is adapted, or why PEFT refuses.
pub(super) fn resolve(plan: &LoraPlan, view: View<'_>) -> Result<Resolved, PlanError> {
    let mut ranks = plan.rank_pattern.clone();
    let mut wanted: Vec<String> = plan.target_parameters.clone();
    let mut targets = plan.targets.clone();
    if let Some(fused) = facts(view.model_type).experts {
        targets = Targets::Names(leaf_names(plan, view, &fused)?);
        rewrite(plan, &fused, &mut targets, &mut wanted, &mut ranks)?;
    }
    if targets == Targets::Default {
        targets = default_targets(defaults::lora(view.model_type), view, "LoRA")?;
    }
    let matcher = Matcher::new(plan, &targets, view)?;
    let mut resolved = Resolved { ranks, ..Resolved::default() };
    for (index, module) in view.modules.iter().enumerate().filter(|(_, module)| !module.path.is_empty()) {
        if matcher.picks(&module.path) {
            check_module(module, view.model_type, &targets)?;
            resolved.modules.push(ModuleId(index as u32));
        }
    }
    let named = |target: &&String| view.parameters.iter().any(|one| is_or_ends_with(&one.name, target));
    if let Some(target) = plan.target_parameters.iter().find(|target| !named(target)) {
        return Err(PlanError::Conflict {
            what: format!("target_parameters: {target} names no parameter of this model"),
            hint: "leave it out; linears go under target_modules".into(),
        });
    }
    for (index, parameter) in view.parameters.iter().enumerate() {
        if wanted.iter().any(|target| is_or_ends_with(&parameter.name, target)) {
            resolved.parameters.push(ParameterId(index as u32));
        }
    }
    if resolved.modules.is_empty() && resolved.parameters.is_empty() {
        return Err(nothing_matched(plan, &targets, view));
    }
    Ok(resolved)
}

/// Names that no module goes by: PEFT's `inject_adapter` passes over them where it finds another.
pub(super) fn passed_over<'a>(plan: &'a LoraPlan, view: View<'_>) -> Vec<&'a str> {
    let Targets::Names(names) = &plan.targets else { return Vec::new() };
    let fused = facts(view.model_type).experts;
    let is_fused = |name: &str| fused.is_some_and(|all| all.mapping.iter().any(|(old, _)| is_or_ends_with(name, old)));
    let is_module = |name: &str| view.modules.iter().any(|module| is_or_ends_with(&module.path, name));
    names.iter().map(String::as_str).filter(|name| !is_module(name) && !is_fused(name)).collect()
}

/// PEFT's own targets for a type, or its refusal.
pub(super) fn default_targets(list: Option<NameList>, view: View<'_>, method: &str) -> Result<Targets, PlanError> {
    match list {
        Some([one]) if one.starts_with(".*") => Ok(Targets::Regex((*one).to_owned())),
        Some(list) => Ok(Targets::Names(list.iter().map(|name| (*name).to_owned()).collect())),
        None => Err(PlanError::Conflict {
            what: format!("no default {method} targets of PEFT are known for model_type {}", view.model_type),
            hint: format!(
                "name them (--lora-target-modules), or say all-linear; {}",
                called(&LoraPlan::default(), view)
            ),
        }),
    }
}

/// Expert projections by their old names become fused parameters, with the rank of all that is fused.
fn rewrite(
    plan: &LoraPlan,
    fused: &ExpertNames,
    targets: &mut Targets,
    wanted: &mut Vec<String>,
    ranks: &mut Vec<(String, u64)>,
) -> Result<(), PlanError> {
    let Targets::Names(names) = targets else { return Ok(()) };
    let mut found: Vec<&str> = Vec::new();
    names.retain(|name| {
        let Some((old, new)) = fused.mapping.iter().find(|(old, _)| is_or_ends_with(name, old)) else { return true };
        if !wanted.iter().any(|known| known == new) {
            wanted.push((*new).to_owned());
        }
        if fused.fused.contains(old) && !found.contains(old) {
            found.push(old);
        }
        false
    });
    match found.len() {
        0 => Ok(()),
        n if n == fused.fused.len() => {
            let rank = plan.rank.saturating_mul(n as u64);
            ranks.push((format!(r".*\.{}", defaults::FUSED_NAME), rank));
            Ok(())
        }
        _ => Err(PlanError::Conflict {
            what: format!("PEFT cannot target {} alone: {} are fused", found.join(", "), fused.fused.join(" and ")),
            hint: format!("target {} together", fused.fused.join(" and ")),
        }),
    }
}

/// A string target on a model with fused experts, as the names of leaves; a list stays as it is.
fn leaf_names(plan: &LoraPlan, view: View<'_>, fused: &ExpertNames) -> Result<Vec<String>, PlanError> {
    let mut names: Vec<String> = Vec::new();
    let mut add = |name: &str| {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    };
    match &plan.targets {
        Targets::Names(list) => return Ok(list.clone()),
        // Without targets the rewriting leaves an empty list, which matches nothing.
        Targets::Default => {}
        Targets::AllLinear => {
            linears(plan, view).iter().for_each(|module| add(leaf(&module.path)));
            fused.mapping.iter().for_each(|(old, _)| add(old));
        }
        Targets::Regex(_) => {
            let matcher = Matcher::new(plan, &plan.targets, view)?;
            let modules = view.modules.iter().map(|module| module.path.as_str());
            let keys: Vec<&str> = modules.chain(view.parameters.iter().map(|p| p.name.as_str())).collect();
            keys.iter().filter(|key| !key.is_empty() && matcher.picks(key)).for_each(|key| add(leaf(key)));
            for (old, new) in fused.mapping {
                let container = |p: &Parameter| p.name.strip_suffix(new).map(|rest| format!("{rest}{old}"));
                let holders = view.parameters.iter().filter(|p| is_or_ends_with(&p.name, new));
                if holders.filter_map(container).any(|key| matcher.picks(&key)) {
                    add(old);
                }
            }
        }
    }
    Ok(names)
}

fn leaf(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

fn is_or_ends_with(key: &str, name: &str) -> bool {
    key == name || key.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
}

/// The linears that `all-linear` means.
fn linears<'a>(plan: &LoraPlan, view: View<'a>) -> Vec<&'a Module> {
    let linear = |module: &&Module| matches!(module.kind, ModuleKind::Linear { .. } | ModuleKind::Conv1d { .. });
    let head = output_embedding(plan, view);
    view.modules.iter().filter(linear).filter(|module| Some(module.path.as_str()) != head).collect()
}

fn output_embedding<'a>(plan: &LoraPlan, view: View<'a>) -> Option<&'a str> {
    let path_of = |path: &str| {
        let is_linear = |module: &&Module| matches!(module.kind, ModuleKind::Linear { .. }) && module.path == path;
        view.modules.iter().find(is_linear).map(|module| module.path.as_str())
    };
    // Without input embeddings (speech models) transformers names no output embedding either.
    let has_inputs = view.modules.iter().any(|module| matches!(module.kind, ModuleKind::Embedding { .. }));
    let output = defaults::OUTPUT_EMBEDDINGS.iter().filter(|_| has_inputs).find_map(|path| path_of(path));
    match (output, plan.task) {
        (None, Some(TaskType::SeqCls)) => ["score", "classifier"].iter().find_map(|path| path_of(path)),
        _ => output,
    }
}

/// `check_target_module_exists` of peft/tuners/tuners_utils.py.
struct Matcher<'a> {
    whole: Option<Regex>,
    names: Vec<&'a str>,
    excluded: Option<Regex>,
    excluded_names: &'a [String],
    saved: Vec<Regex>,
    layers: &'a [u64],
    layer_patterns: Vec<Regex>,
}

impl<'a> Matcher<'a> {
    fn new(plan: &'a LoraPlan, targets: &'a Targets, view: View<'a>) -> Result<Self, PlanError> {
        let (whole, names) = match targets {
            Targets::Regex(text) => (Some(whole_match("target_modules", text)?), Vec::new()),
            Targets::Names(list) => (None, list.iter().map(String::as_str).collect()),
            Targets::AllLinear => (None, linears(plan, view).iter().map(|module| module.path.as_str()).collect()),
            Targets::Default => (None, Vec::new()),
        };
        let (excluded, excluded_names): (_, &[String]) = match &plan.exclude {
            Some(Targets::Regex(text)) => (Some(whole_match("exclude_modules", text)?), &[]),
            Some(Targets::Names(list)) => (None, list),
            _ => (None, &[]),
        };
        let saved = saved_names(plan);
        let saved = saved.iter().map(|name| compile("modules_to_save", &format!(r"^(?:|.*\.){name}(?:$|\..*)")));
        let layer_patterns =
            plan.layers_pattern.iter().map(|name| compile("layers_pattern", &format!(r"^(?:|.*?\.){name}\.(\d+)\.")));
        let mut layer_patterns: Vec<Regex> = layer_patterns.collect::<Result<_, _>>()?;
        if layer_patterns.is_empty() {
            layer_patterns.push(compile("layers_pattern", r"^.*?\.[^.]*\.(\d+)\.")?);
        }
        Ok(Self {
            whole,
            names,
            excluded,
            excluded_names,
            saved: saved.collect::<Result<_, _>>()?,
            layers: &plan.layers_to_transform,
            layer_patterns,
        })
    }

    fn picks(&self, key: &str) -> bool {
        if self.excluded.as_ref().is_some_and(|pattern| pattern.is_match(key))
            || self.excluded_names.iter().any(|name| is_or_ends_with(key, name))
            || self.saved.iter().any(|pattern| pattern.is_match(key))
        {
            return false;
        }
        if let Some(whole) = &self.whole {
            return whole.is_match(key);
        }
        if self.names.contains(&key) {
            return true;
        }
        self.names.iter().any(|name| is_or_ends_with(key, name)) && self.is_wanted_layer(key)
    }

    fn is_wanted_layer(&self, key: &str) -> bool {
        if self.layers.is_empty() {
            return true;
        }
        let index = self.layer_patterns.iter().find_map(|pattern| pattern.captures(key));
        let index = index.and_then(|found| found.get(1)?.as_str().parse::<u64>().ok());
        index.is_some_and(|index| self.layers.contains(&index))
    }
}

/// Modules trained whole: the plan's, and the heads that PEFT adds for classifiers.
pub(super) fn saved_names(plan: &LoraPlan) -> Vec<String> {
    let mut names = plan.modules_to_save.clone();
    if matches!(plan.task, Some(TaskType::SeqCls | TaskType::TokenCls)) {
        names.extend(["classifier", "score"].map(str::to_owned));
    }
    names
}

/// The rank of a module or parameter.
pub(super) fn rank_of(plan: &LoraPlan, ranks: &[(String, u64)], key: &str) -> Result<u64, PlanError> {
    for (pattern, rank) in ranks {
        if compile("rank_pattern", &format!(r"^(?:.*\.)?(?:{pattern})$"))?.is_match(key) {
            return Ok(*rank);
        }
    }
    Ok(plan.rank)
}

fn whole_match(key: &str, text: &str) -> Result<Regex, PlanError> {
    compile(key, &format!("^(?:{text})$"))
}

fn compile(key: &str, text: &str) -> Result<Regex, PlanError> {
    Regex::new(text).map_err(|_| bad(key, text, "a regular expression without look-around"))
}

/// Modules that PEFT cannot adapt, or will not on some models.
fn check_module(module: &Module, model_type: &str, targets: &Targets) -> Result<(), PlanError> {
    let name = leaf(&module.path);
    let refused = facts(model_type).lora_refused;
    if refused.contains(&name) {
        return Err(PlanError::Conflict {
            what: format!("PEFT refuses LoRA on {name} of {model_type} models"),
            hint: format!("leave out {}", refused.join(" and ")),
        });
    }
    match module.kind {
        ModuleKind::Linear { .. } | ModuleKind::Conv1d { .. } | ModuleKind::Embedding { .. } => Ok(()),
        ModuleKind::Convolution => Ok(()),
        ModuleKind::Container | ModuleKind::Layer | ModuleKind::Norm | ModuleKind::Experts => {
            let hint = match targets {
                Targets::Regex(_) => "make the expression fit linears, embeddings or convolutions only",
                _ => "name linears, embeddings or convolutions; fused experts go under target_parameters",
            };
            Err(PlanError::Conflict { what: format!("{} cannot be adapted", module.path), hint: hint.into() })
        }
    }
}

/// The refusal when nothing fits, with the names that exist.
fn nothing_matched(plan: &LoraPlan, targets: &Targets, view: View<'_>) -> PlanError {
    let asked = match targets {
        Targets::Names(list) if list.is_empty() => {
            "PEFT finds no target modules by itself where experts are fused (name them: --lora-target-modules)"
                .to_owned()
        }
        Targets::Names(list) => format!("no module is called {}", list.join(", ")),
        Targets::Regex(text) => format!("no module fits {text}"),
        Targets::AllLinear | Targets::Default => "the model has no linears to adapt".to_owned(),
    };
    PlanError::Conflict { what: asked, hint: called(plan, view) }
}

/// What the linears of a model are called.
fn called(plan: &LoraPlan, view: View<'_>) -> String {
    let names: BTreeSet<&str> = linears(plan, view).iter().map(|module| leaf(&module.path)).collect();
    format!("the linears are called {}", names.into_iter().collect::<Vec<_>>().join(", "))
}
