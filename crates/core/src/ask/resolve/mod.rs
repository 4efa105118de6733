//! A request settled for a model: a framework's defaults, what was asked, what follows from other values; every fault at once.
//!
//! | module | what is in it |
//! |---|---|
//! | `train`, `infer`, `serve` | the three kinds of plan |
//! | `mesh` | cards into axes |
//! | `engine` | what follows from the engine that spreads a model |
//! | `sizes` | samples within what a model can take |
//! | `precision` | types that a card computes in |

mod engine;
mod infer;
mod mesh;
mod precision;
mod serve;
mod sizes;
mod train;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::beneath::stand_in;
use super::request::{Request, Task};
use super::runner::Runner;
use super::{table, tree};
use crate::model::Model;
use crate::model::families::denoisers::Pictures;
use crate::plan::fault::Remedy;
use crate::plan::import::distance;
use crate::plan::{Batch, Fault, Faults, Framework, Gpus, Origin, PlanError, RunPlan, Situation};
use crate::typed;

/// A plan that can run, and how it came about.
#[derive(Debug, Clone)]
pub struct Settled {
    /// The plan.
    pub plan: RunPlan,
    /// What a report should say.
    pub notes: Vec<String>,
    /// Where every value comes from.
    pub origins: Vec<Origin>,
}

/// What is known besides the model and the request.
pub struct Surroundings<'a> {
    /// What the model is called.
    pub name: &'a str,
    /// The cards that a name may mean.
    pub cards: &'a dyn Fn() -> Gpus,
    /// The card where nobody names one, as a part of a plan, and where it comes from.
    pub card: Option<(Value, String)>,
    /// Options of the allocator that the machine has for every run.
    pub allocator: Option<crate::plan::AllocatorOptions>,
    /// The type in which the config says the weights are stored.
    pub stored: Option<crate::dtype::DType>,
    /// Whether a plan that cannot run is let through: formulas take any.
    pub lenient: bool,
}

impl Surroundings<'_> {
    /// The same once more.
    pub fn again(&self) -> Surroundings<'_> {
        Surroundings { card: self.card.clone(), ..*self }
    }
}

/// Settles a request.
pub fn resolve(model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Settled, Vec<Fault>> {
    settle(model, request, around).map_err(|faults| {
        let all = further(model, request, around, faults);
        all.into_iter().map(|fault| plainer(fault, &request.stated)).collect()
    })
}

/// A fault whose places are those that were asked for: of a group of settings, the ones that stand in the request. Cures that
/// need other cards than there are go.
fn plainer(mut fault: Fault, stated: &Value) -> Fault {
    let within = |path: &str| -> Option<String> {
        if path.contains('#') || table::all().any(|row| row.path == path) {
            return None;
        }
        let group = tree::get(stated, path).filter(|group| group.is_object())?;
        let leaves = tree::leaves(group).into_iter().filter(|(_, value)| !value.is_null());
        let places = leaves.map(|(key, _)| format!("{path}.{key}"));
        let rows = places.filter(|place| table::all().any(|row| row.path == place && !row.flag.is_empty()));
        let named: Vec<String> = rows.map(|place| format!("{{{place}}}")).collect();
        (!named.is_empty()).then(|| named.join(" and "))
    };
    let number = |key: &str| tree::get(stated, &format!("parallel.{key}")).and_then(Value::as_u64);
    let world = number("gpus").map(|gpus| gpus.saturating_mul(number("nodes").unwrap_or(1)));
    fault.remedies.retain(|remedy| match (remedy, world) {
        (Remedy::Set(path, value), Some(world)) if path.starts_with("parallel.mesh.") => {
            value.as_u64().is_none_or(|size| size > 0 && world.is_multiple_of(size))
        }
        _ => true,
    });
    for remedy in &mut fault.remedies {
        if let Remedy::Drop(path) = remedy
            && let Some(named) = within(path)
        {
            *remedy = Remedy::Other(format!("drop {named}"));
        }
    }
    if let Some(named) = within(&fault.path) {
        fault.problem = fault.problem.replace(&format!("{{{}}}", fault.path), &named);
    }
    fault
}

/// Faults, and those that show once the values which have them are gone: a plan that cannot be read is not checked either.
fn further(model: &Model, request: &Request, around: &Surroundings<'_>, mut faults: Vec<Fault>) -> Vec<Fault> {
    /// Faults that are worth naming at once.
    const MOST: usize = 32;
    let mut rest = request.clone();
    let mut seen = 0;
    let mut gone: Vec<String> = Vec::new();
    while seen < faults.len() && faults.len() < MOST {
        let before = gone.len();
        for fault in &faults[seen..] {
            gone.extend(tree::take(&mut rest.stated, &fault.path).map(|_| fault.path.clone()));
        }
        seen = faults.len();
        let Err(more) = settle(model, &rest, around) else { break };
        // What only follows from a value that is gone is no fault of who asked.
        let stated = |fault: &Fault| !fault.path.is_empty() && tree::get(&rest.stated, &fault.path).is_some();
        let new = |fault: &Fault| !faults.iter().any(|known| known.path == fault.path);
        // So are axes that another would have to multiply with.
        let axes = gone.iter().any(|path| path.starts_with("parallel."));
        let follows =
            |fault: &Fault| fault.problem.contains("no effect") || axes && fault.path.starts_with("parallel.");
        let own = |fault: &Fault| stated(fault) && new(fault) && !follows(fault);
        let more: Vec<Fault> = more.into_iter().filter(own).collect();
        if gone.len() > before {
            faults.extend(more);
        }
    }
    faults
}

fn settle(model: &Model, request: &Request, around: &Surroundings<'_>) -> Result<Settled, Vec<Fault>> {
    match (request.task, request.runner) {
        (Task::Train, _) => train::settle(model, request, around),
        (Task::Infer, Runner::Transformers) => infer::settle(model, request, around),
        (Task::Infer, _) => serve::settle(model, request, around),
    }
}

/// How sources begin that load a checkpoint in the type it is stored in.
const AS_STORED: &str = "dtype='auto'";

/// The type of a checkpoint: its config says it; those from before configs did are fp32, unless they are quantised.
fn stored(config: &Value) -> &'static str {
    let named = |part: &Value| part["dtype"].as_str().or_else(|| part["torch_dtype"].as_str()).map(str::to_owned);
    match named(config).or_else(|| named(&config["text_config"])).as_deref() {
        Some("float16") => "fp16",
        Some("float32") => "fp32",
        None if config.get("quantization_config").is_none() => "fp32",
        _ => "bf16",
    }
}

/// The tree of a plan with a request over it, on its way to a plan.
struct Draft<'a> {
    request: &'a Request,
    tree: Value,
    faults: Faults,
    notes: Vec<String>,
    /// What a framework's defaults decided: place, value, framework and source.
    framework: Vec<(String, Value, String, String)>,
    /// Values that follow from others, with the reason.
    derived: Vec<(String, String)>,
}

impl<'a> Draft<'a> {
    fn new(request: &'a Request, defaults: &impl Serialize) -> Self {
        Self {
            request,
            tree: serde_json::to_value(defaults).unwrap_or_default(),
            faults: Faults::default(),
            notes: request.notes.clone(),
            framework: Vec::new(),
            derived: Vec::new(),
        }
    }

    /// Whether somebody asked for a value at a place.
    fn states(&self, path: &str) -> bool {
        tree::get(&self.request.stated, path).is_some_and(|value| !value.is_null())
    }

    /// A value that follows from others, unless somebody asked for another.
    fn derive(&mut self, path: &str, value: Value, why: &str) {
        if !self.states(path) && tree::get(&self.tree, path) != Some(&value) {
            tree::set(&mut self.tree, path, value);
            self.derived.push((path.to_owned(), why.to_owned()));
        }
    }

    /// Lays a framework's defaults over ours.
    fn framework(&mut self, name: &str, situation: Situation, config: &Value) {
        let framework = match Framework::find(name) {
            Ok(framework) => framework,
            Err(error) => return faults_of(error, "framework").into_iter().for_each(|fault| self.faults.add(fault)),
        };
        let title = format!("{} {}", framework.package, framework.version);
        for default in framework.holding(situation) {
            // DeepSpeed casts the weights to the 16-bit type that its file names.
            let cast = self.states("parallel.engine.deepspeed");
            let as_stored = default.key == "weights" && default.source.starts_with(AS_STORED) && !cast;
            let value = if as_stored { json!(stored(config)) } else { default.value.clone() };
            if let Some((_, note)) = stand_in(self.request.runner, &default.key, &value, &framework.name) {
                let said = !note.is_empty() && !self.states(&default.key);
                self.notes.extend(said.then_some(note));
                continue;
            }
            if default.key.starts_with("adapter.") {
                // A framework says how adapters are, not that there are some.
                if !self.states("adapter") {
                    continue;
                }
                if tree::get(&self.tree, "adapter").is_none_or(Value::is_null) {
                    tree::set(&mut self.tree, "adapter", json!({"method": "lora"}));
                }
            }
            tree::set(&mut self.tree, &default.key, value.clone());
            let source = format!("{title}: {}", default.source);
            self.framework.push((default.key.clone(), value, title.clone(), source));
        }
        let task = tree::get(&self.request.stated, "objective.kind").is_some();
        let evaluates = self.states("job.evaluation");
        // Tasks count their own tokens; what is asked for is simulated, or said to be left out.
        let measured = self.states("batch.seq_len") || self.states("job.lengths");
        let holds = |note: &&String| {
            !(task && note.contains("have a label")
                || evaluates && note.starts_with("no evaluation is simulated")
                || measured && note.contains("sets no sequence length"))
        };
        self.notes.extend(framework.notes.iter().filter(holds).cloned());
    }

    /// The card of a name, or the one that is found where nobody names one.
    fn card(&mut self, around: &Surroundings<'_>) {
        let stated = tree::get(&self.request.stated, "gpu").cloned().filter(|gpu| !gpu.is_null());
        if let Some(options) = around.allocator.filter(|_| !self.states("allocator") && !self.request.runner.serves()) {
            self.tree["allocator"] = json!(options);
            self.derived.push(("allocator".into(), "as the machine is set up".into()));
        }
        let gpu = match (&stated, &around.card) {
            // A card that was named, with what is known of its machine.
            (Some(_), Some((card, _))) => Some(card.clone()),
            (Some(Value::String(name)), _) => match (around.cards)().find(name) {
                Ok(card) => serde_json::to_value(card).ok(),
                Err(error) => {
                    faults_of(error, "gpu").into_iter().for_each(|fault| self.faults.add(fault));
                    // One fault is enough: what else is wrong is found out on the usual card.
                    self.tree.as_object_mut().and_then(|plan| plan.remove("gpu"));
                    None
                }
            },
            (Some(card), None) => Some(card.clone()),
            (None, Some((card, from))) => {
                self.derived.push(("gpu".into(), from.clone()));
                Some(card.clone())
            }
            (None, None) => None,
        };
        if let Some(gpu) = gpu {
            self.tree["gpu"] = gpu;
        }
    }

    /// Pictures of a model that makes them: one for each sample, or those of its video, of whole latents.
    fn pictures(&mut self, pictures: Pictures, [high, wide]: [u64; 2], whole: bool, batch: &mut Batch) {
        const ALONE: &str =
            "one part of a pipeline alone: the others (text encoders, denoiser, autoencoder) are not counted";
        if !whole {
            self.notes.push(ALONE.to_owned());
        }
        let Some([count, height, width]) = batch.images else {
            batch.images = Some([batch.batch_size.saturating_mul(pictures.frames), high, wide]);
            return self.derived.push(("batch.images".into(), "as large as the model makes them".into()));
        };
        let full = [height, width].map(|size| size.next_multiple_of(pictures.pixels));
        let samples = batch.batch_size.max(1);
        if pictures.frames == 1 && count != samples {
            batch.images = Some([samples, height, width]);
            self.notes.push(format!("{samples} pictures, not {count}: one for each sample"));
        }
        let frames = (count / samples).saturating_sub(1) / pictures.between * pictures.between + 1;
        let nearest = if pictures.frames == 1 { samples } else { samples * frames };
        let fault = if full != [height, width] {
            format!("sides of {height} and {width} pixels are no multiples of {}", pictures.pixels)
        } else if pictures.frames > 1 && count != samples.saturating_mul(frames) {
            format!("{count} pictures are not {samples} videos of one picture and some times {} more", pictures.between)
        } else {
            return;
        };
        self.faults.add(Fault::new("batch.images", fault).or_set("batch.images", json!([nearest, full[0], full[1]])));
    }

    /// A model that sees pictures alone takes one for each sample.
    fn one_each(&mut self, batch: &mut Batch) {
        let (samples, Some([count, height, width])) = (batch.batch_size, batch.images) else { return };
        if count == samples || count == 0 || samples == 0 {
            return;
        }
        if self.states("batch.batch_size") {
            batch.images = Some([samples, height, width]);
            self.notes.push(format!("{samples} pictures, not {count}: one for each sample"));
        } else {
            batch.batch_size = count;
            self.derived.push(("batch.batch_size".into(), "one sample for each picture".into()));
        }
    }

    /// Images as the model's processor scales them: to whole patches of those that are cut.
    fn images(&mut self, model: &Model, batch: &mut Batch) {
        if let Some((pictures, sides)) = model.pictures() {
            self.pictures(pictures, sides, model.is_pipeline(), batch);
        }
        if !Batch::reads_tokens(model) && model.pictures().is_none() {
            self.one_each(batch);
        }
        let (Some([count, height, width]), Some(cut)) = (batch.images, model.image_patches()) else { return };
        let grid = [cut.along(height), cut.along(width)];
        let scaled = grid.map(|patches| patches.saturating_mul(cut.side));
        self.notes.push(format!(
            "images are scaled to {}x{} pixels, {}x{} patches, as the model's processor does",
            scaled[0], scaled[1], grid[0], grid[1]
        ));
        batch.images = Some([count, scaled[0], scaled[1]]);
        if scaled != [height, width] {
            self.derived.push(("batch.images".into(), "as the model's processor scales them".into()));
        }
    }

    /// Refuses settings that whoever runs does not honour; at their default they say nothing.
    fn honoured(&mut self, defaults: &Value, around: &Surroundings<'_>) {
        if around.lenient {
            return;
        }
        let (runner, task) = (self.request.runner, self.request.task);
        // A trainer's file asks for evaluation by the way; what is asked about is the run.
        let evaluates = table::at("job.evaluation.rows", runner.alone()).is_some_and(|row| row.scope.has(runner));
        let aside = self.request.framework.is_some() && !evaluates && self.states("job.evaluation");
        if aside {
            self.tree["job"]["evaluation"] = Value::Null;
            self.notes.push(
                "evaluation between steps is not simulated on cards that share a batch, and left out here".to_owned(),
            );
        }
        for (path, value) in tree::leaves(&self.request.stated) {
            if aside && path.starts_with("job.evaluation") {
                continue;
            }
            let Some(row) = table::at(&path, runner.alone()) else { continue };
            let same_task = row.scope.runners().any(|one| one.trains() == (task == Task::Train));
            let usual = tree::get(defaults, &path).is_some_and(|usual| *usual == value) || value.is_null();
            if row.scope.has(runner) || usual || value == json!({}) || !same_task {
                continue;
            }
            let on = match runner {
                Runner::OneCard => "without several cards".to_owned(),
                other => format!("on {}", other.title()),
            };
            if path.starts_with("objective.") {
                let what = format!("{{{path}}} {on}");
                self.faults
                    .add(Fault::unsupported(path.clone(), what).or_drop(path).or("run on one card, or under DDP"));
                continue;
            }
            if path == "torch_compile" {
                self.faults.add(crate::ask::request::uncompiled(runner));
                continue;
            }
            self.faults.add(Fault::no_effect(path, on));
        }
    }

    /// The plan, where the tree is one.
    fn plan<Plan: DeserializeOwned>(&mut self) -> Option<Plan> {
        match typed::located::<Plan>(self.tree.clone()) {
            Ok(plan) => Some(plan),
            Err(misread) => {
                let mut path = misread.place.join(".");
                let problem = misread.error.to_string();
                if problem.starts_with("invalid type: sequence, expected struct ") {
                    self.faults.add(Fault::new(path.clone(), format!("{{{path}}} is a list, not an object")));
                    return None;
                }
                // What is not known stands below the place where it is missed.
                let unknown = problem.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
                if let Some(field) = unknown.filter(|field| !path.ends_with(field)) {
                    path = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
                }
                let problem = reworded(problem.split(" at line").next().unwrap_or(&problem));
                let fault =
                    Fault::new(path.clone(), if path.is_empty() { problem } else { format!("{{{path}}}: {problem}") });
                self.faults.add(fault.or("`vramcast schema` prints what a plan may hold"));
                None
            }
        }
    }
}

/// A reader's words as people say them: it speaks of variants, fields and types of Rust.
pub fn reworded(problem: &str) -> String {
    let plain = |text: &str| text.replace('`', "");
    let Some((what, known)) = problem.split_once(", expected ") else { return problem.to_owned() };
    let near = |word: &str| {
        // A long list is looked through for whoever mistyped one of its words.
        let all: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
        let is_near = |one: &&str| distance(one, word) <= 2.min(word.len() / 3);
        let mut near: Vec<&str> = all.iter().copied().filter(is_near).collect();
        // Its first part may be right: galore-adamw-8bit.
        let part = word.split('-').next().filter(|part| part.len() > 2);
        if let (true, Some(part)) = (near.is_empty(), part) {
            near = all.iter().copied().filter(|one| one.contains(part)).take(6).collect();
        }
        (all.len() > 12 && !near.is_empty()).then(|| near.join(" or "))
    };
    if let Some(value) = what.strip_prefix("unknown variant ").map(plain) {
        return match near(&value) {
            Some(near) => format!("{value} is not known; did you mean {near}"),
            None => format!("{value} is not {}", plain(known)),
        };
    }
    if let Some(field) = what.strip_prefix("unknown field ").map(plain) {
        return match near(&field) {
            Some(near) => format!("there is no {field} here; did you mean {near}"),
            None => format!("there is no {field} here; known are {}", plain(known.trim_start_matches("one of "))),
        };
    }
    let Some(value) = what.strip_prefix("invalid type: ").or_else(|| what.strip_prefix("invalid value: ")) else {
        return problem.to_owned();
    };
    let value = match value.split_once(' ') {
        Some(("string" | "integer" | "boolean", value)) => plain(value),
        Some(("floating", value)) => plain(value.trim_start_matches("point ")),
        _ => match value {
            "map" => "an object".to_owned(),
            "sequence" => "a list".to_owned(),
            other => plain(other),
        },
    };
    let wanted = match known {
        "u64" | "u32" | "usize" => "a whole number",
        "f64" => "a number",
        "a boolean" => "true or false",
        "a string" => "a text",
        "a sequence" => "a list",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other => other,
    };
    format!("{value} is not {wanted}")
}

/// An error of the plan stage as faults; those of the model stand at the model.
pub fn faults_of(error: PlanError, path: &str) -> Vec<Fault> {
    match error {
        PlanError::Faults(faults) => faults,
        PlanError::BadValue { key, value, expected } => {
            let key = if key.is_empty() { path.to_owned() } else { key };
            vec![Fault::value(key, value, expected)]
        }
        PlanError::Conflict { what, hint } => vec![Fault::new(path, what).or(hint)],
        PlanError::Unsupported { what, hint } => vec![Fault::unsupported(path, what).or(hint)],
        error => vec![Fault::new(path, error.to_string())],
    }
}

/// How many positions a model's smallest table of learned ones holds.
pub fn positions(model: &Model) -> Option<u64> {
    limits(model).tokens
}

/// The longest sequence that a model was made for, as engines read its config.
pub fn longest_sequence(model: &Model) -> Option<u64> {
    crate::serving::lengths::longest(model)
}

/// How many tokens a decoder beside an encoder has positions for.
pub fn target_positions(model: &Model) -> Option<u64> {
    limits(model).targets
}

fn limits(model: &Model) -> sizes::Limits {
    let [tokens, targets] = model.positions();
    sizes::Limits { tokens, targets }
}
