//! Which parameters a run leaves as they are, by the names people use.

use super::{Fault, Faults, TrainPlan};
use crate::model::{Module, ModuleKind, Program};

/// What models call the part that sees.
const TOWERS: [&str; 7] =
    ["visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "image_encoder", "vit"];

/// What models call the part between the one that sees and the one that reads.
const PROJECTORS: [&str; 4] = ["multi_modal_projector", "mm_projector", "merger", "connector"];

impl TrainPlan {
    /// Puts beginnings of parameter names in the place of `embeddings`, `vision` and `first-N-layers`, and refuses what
    /// names nothing; returns what a report should say.
    pub fn resolve_frozen(&mut self, program: &Program) -> Result<Vec<String>, Vec<Fault>> {
        let (mut prefixes, mut notes, mut faults) = (Vec::new(), Vec::new(), Faults::default());
        for name in &self.frozen {
            let found = match name.as_str() {
                "embeddings" => paths(program, |module| matches!(module.kind, ModuleKind::Embedding { .. })),
                "vision" | "vision-if-any" => paths(program, |module| TOWERS.contains(&last(&module.path))),
                "projector-if-any" => paths(program, |module| PROJECTORS.contains(&last(&module.path))),
                _ => match name.strip_prefix("first-").and_then(|rest| rest.strip_suffix("-layers")) {
                    Some(count) => count.parse().map_or_else(
                        |_| Vec::new(),
                        |count: usize| {
                            let layers = first_layers(program, count);
                            faults.when(layers.len() < count, || few(count, layers.len()));
                            layers
                        },
                    ),
                    None => vec![name.clone()],
                },
            };
            if found.is_empty() && name.ends_with("-if-any") {
                continue;
            }
            let named = |prefix: &String| program.parameters.iter().any(|one| one.name.starts_with(prefix.as_str()));
            if name.is_empty() || found.is_empty() || !found.iter().all(named) {
                faults.add(unknown(name, program));
                continue;
            }
            notes.extend(cut_in_the_middle(name, program));
            if self.adapter.is_some() && !name.ends_with("-if-any") {
                notes.push(format!("freezing {name} changes nothing: beneath adapters the model is frozen already"));
            }
            prefixes.extend(found);
        }
        faults.end()?;
        self.frozen = prefixes;
        if program.parameters.iter().all(|parameter| self.is_frozen(parameter)) && self.adapter.is_none() {
            let problem = format!("{{frozen}} {} leaves nothing to train", self.frozen.join(", "));
            return Err(vec![Fault::new("frozen", problem).or("freeze something less than the whole model")]);
        }
        Ok(notes)
    }
}

/// More layers than there are.
fn few(asked: usize, layers: usize) -> Fault {
    let problem = format!("{{frozen}} first-{asked}-layers: this model has {layers} layers");
    Fault::new("frozen", problem).or(format!("use first-{layers}-layers"))
}

/// A name that nothing in the model goes by.
fn unknown(name: &str, program: &Program) -> Fault {
    let problem = match name {
        "embeddings" | "vision" => format!("{{frozen}} {name}: this model has no such part"),
        _ => format!("{{frozen}}: {name:?} names nothing in this model"),
    };
    Fault::new("frozen", problem).or(format!("use {}", known(program)))
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or_default()
}

/// Beginnings of the parameters of some modules.
fn paths(program: &Program, wanted: impl Fn(&Module) -> bool) -> Vec<String> {
    program.modules.iter().filter(|module| wanted(module)).map(|module| format!("{}.", module.path)).collect()
}

/// The first layers of the list of layers that holds most.
fn first_layers(program: &Program, count: usize) -> Vec<String> {
    let list_of = |path: &str| path.rsplit_once('.').map_or(String::new(), |(list, _)| format!("{list}."));
    let layers: Vec<&Module> = program.modules.iter().filter(|module| module.kind == ModuleKind::Layer).collect();
    let held = |list: &str| {
        let own = program.parameters.iter().filter(|parameter| parameter.name.starts_with(list));
        own.fold(0u64, |sum, parameter| sum.saturating_add(parameter.shape.elements()))
    };
    let Some(list) = layers.iter().map(|layer| list_of(&layer.path)).max_by_key(|list| held(list)) else {
        return Vec::new();
    };
    let own = layers.iter().filter(|layer| list_of(&layer.path) == list);
    own.take(count).map(|layer| format!("{}.", layer.path)).collect()
}

/// A name that ends inside another's freezes both.
fn cut_in_the_middle(name: &str, program: &Program) -> Option<String> {
    let rest = |parameter: &str| parameter.strip_prefix(name).map(str::to_owned);
    let cut = program.parameters.iter().find(|parameter| {
        rest(&parameter.name).is_some_and(|rest| !rest.is_empty() && !rest.starts_with('.') && !name.ends_with('.'))
    })?;
    Some(format!("freezing {name} also freezes {}: end it with a dot for that module alone", cut.name))
}

/// How names begin.
fn known(program: &Program) -> String {
    let mut beginnings: Vec<String> = Vec::new();
    for parameter in &program.parameters {
        let two: Vec<&str> = parameter.name.split('.').take(2).collect();
        let beginning = two.join(".");
        if !beginnings.contains(&beginning) {
            beginnings.push(beginning);
        }
    }
    beginnings.truncate(6);
    let sees = program.modules.iter().any(|module| TOWERS.contains(&last(&module.path)));
    let vision = if sees { "vision, " } else { "" };
    format!("embeddings, {vision}first-N-layers or the beginning of a parameter's name ({})", beginnings.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use crate::source::catalogue;

    fn resolved(name: &str) -> Result<(Vec<String>, Vec<String>), Vec<Fault>> {
        resolved_in("Qwen/Qwen2.5-VL-3B-Instruct", name)
    }

    fn resolved_in(model: &str, name: &str) -> Result<(Vec<String>, Vec<String>), Vec<Fault>> {
        let entry = catalogue::find(model).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let mut plan = TrainPlan { frozen: vec![name.to_owned()], ..TrainPlan::default() };
        let program = model.program(plan.batch.training_inputs()).unwrap();
        let notes = plan.resolve_frozen(&program)?;
        Ok((plan.frozen, notes))
    }

    #[test]
    fn people_name_parts() {
        assert_eq!(resolved("embeddings").unwrap().0, ["model.language_model.embed_tokens."]);
        assert_eq!(resolved("vision").unwrap().0, ["model.visual."]);
        let layers = resolved("first-2-layers").unwrap().0;
        assert_eq!(layers, ["model.language_model.layers.0.", "model.language_model.layers.1."]);
    }

    #[test]
    fn a_name_of_nothing_is_refused_and_half_a_name_is_noted() {
        assert!(resolved("visual").unwrap_err()[0].to_string().contains("model.visual"));
        // A part that a model has not is not offered.
        let offered = format!("{:?}", resolved_in("gpt2", "vision").unwrap_err()[0]);
        assert!(offered.contains("no such part") && !offered.contains("embeddings, vision"), "{offered}");
        assert!(resolved("").is_err() && resolved("first-x-layers").is_err() && resolved("m").is_err());
        assert!(resolved("model.visual.blocks.1").unwrap().1[0].contains("blocks.10"));
        assert!(resolved("model.visual.blocks.1.").unwrap().1.is_empty());
    }
}
