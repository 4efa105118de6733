//! A file beneath what else is asked: whose defaults hold, its engine, and what of it runs on several cards.

use serde::Deserialize;
use serde_json::{Value, json};

use super::file::Content;
use super::read::Given;
use super::request::Asked;
use super::runner::Runner;
use super::tree;
use crate::plan::{Fault, Framework, LossKind};

/// Cards of a node, where a file names an engine and nobody says how many there are.
const USUAL_CARDS: u64 = 8;

/// What a framework does in its own way on one card and is not simulated on several: what is said of it (of a loss that is
/// kept until the next nothing: it is as small as a number), and what stands in.
pub(super) fn stand_in(runner: Runner, path: &str, value: &Value, framework: &str) -> Option<(Value, String)> {
    if runner == Runner::OneCard || !runner.trains() {
        return None;
    }
    let (plain, said) = match path {
        "model_code" => (json!("transformers"), format!("{framework}'s own code of the model")),
        "loss.kind" if LossKind::deserialize(value).is_ok_and(|kind| kind.runs_under(runner.name())) => return None,
        "loss.kind" => (json!("standard"), format!("{framework}'s own loss")),
        "checkpoints.reentrant" => (json!(false), "reentrant checkpoints".into()),
        "checkpoints.offload" => (json!(false), "offloaded checkpoints".into()),
        "keep_loss" => (json!(false), String::new()),
        _ => return None,
    };
    let whose = if plain == false { "plain ones stand in" } else { "transformers' stands in" };
    let note = if said.is_empty() { said } else { format!("not simulated: {said} on several cards; {whose}") };
    (*value != plain).then_some((plain, note))
}

/// Settings that have a stand-in.
const OWN: [&str; 5] = ["model_code", "loss.kind", "checkpoints.reentrant", "checkpoints.offload", "keep_loss"];

impl Content {
    /// The same with everything in its tree: flags, DeepSpeed's configuration, and what it leaves open about its cards.
    pub fn folded(mut self) -> Result<Self, Vec<Fault>> {
        if self.placement.is_some() {
            let problem = "a file of several roles on shared cards has no single plan";
            return Err(vec![
                Fault::new("", problem).or("ask for the actor by the task policy, for the critic by value"),
            ]);
        }
        if self.named.is_empty() && self.deepspeed.is_none() {
            return Ok(self);
        }
        let (task, model, framework, deepspeed) =
            (self.task, self.model.take(), self.framework.clone(), self.deepspeed.take());
        let (auto_class, config) = (self.auto_class.take(), self.config.take());
        let mut asked = Asked { task: task.unwrap_or_default(), ..Asked::default() };
        asked.beneath(self);
        if let Some(document) = deepspeed {
            asked.deepspeed(&document, None)?;
        }
        asked.on_cards();
        let request = asked.request()?;
        Ok(Self {
            task,
            model,
            config,
            auto_class,
            framework,
            tree: request.stated,
            notes: request.notes,
            ..Self::default()
        })
    }
}

impl Asked {
    /// Lays a file's content below everything else.
    pub fn beneath(&mut self, file: Content) {
        self.framework = self.framework.take().or(file.framework);
        self.trees.insert(0, file.tree);
        self.named.splice(0..0, file.named);
        self.notes.splice(0..0, file.notes);
    }

    /// DeepSpeed's configuration; the model's config fills in what is `auto`, as transformers does (integrations/deepspeed.py).
    pub fn deepspeed(&mut self, document: &Value, config: Option<&Value>) -> Result<(), Vec<Fault>> {
        let size = |part: &Value| {
            // `attribute_map` of configs that call it otherwise.
            ["hidden_size", "n_embd", "d_model", "dim"]
                .iter()
                .find_map(|key| part[*key].as_u64())
                .or_else(|| part["hidden_sizes"].as_array()?.iter().filter_map(Value::as_u64).max())
        };
        let hidden_size = config.and_then(|config| size(config).or_else(|| size(&config["text_config"])));
        let content = Content::of_deepspeed(document, hidden_size)?;
        self.batches(document)?;
        let mut tree = content.tree;
        self.rest_of_batch(document, &mut tree);
        if self.names("engine").is_none()
            && let Some(options) = tree::take(&mut tree, "parallel.engine.*")
        {
            tree::set(&mut tree, "parallel.engine.deepspeed", options);
        }
        self.trees.push(tree);
        self.notes.extend(content.notes);
        Ok(())
    }

    /// What a batch of all cards and one of each card leave of the third: steps between updates, and no more cards than divide them.
    fn rest_of_batch(&mut self, document: &Value, tree: &mut Value) {
        let number = |key: &str| document.get(key).and_then(Value::as_u64).filter(|size| *size > 0);
        let (all, micro) = (number("train_batch_size"), number("train_micro_batch_size_per_gpu"));
        let (Some(all), Some(micro)) = (all, micro.filter(|micro| all.is_some_and(|all| all.is_multiple_of(*micro))))
        else {
            return;
        };
        let steps = number("gradient_accumulation_steps");
        let turns = all / micro / steps.unwrap_or(1);
        let most = (1..=USUAL_CARDS.min(turns)).rev().find(|cards| turns.is_multiple_of(*cards)).unwrap_or(1);
        let cards = if steps.is_some() { turns.max(1) } else { most };
        let counted = self.counts_cards();
        if !counted && cards != USUAL_CARDS {
            tree::set(tree, "parallel.gpus", json!(cards));
            let turns = if steps.is_some() { "says" } else { "allows" };
            self.notes.push(format!(
                "the file does not say on how many cards it runs: a batch of {all} by {micro} {turns} {cards}"
            ));
        }
        if steps.is_none() && !counted && tree::get(tree, "gradient_accumulation").is_none() {
            tree::set(tree, "gradient_accumulation", json!(turns / cards));
        }
    }

    /// DeepSpeed asserts that a batch of all cards is what they take together (runtime/config.py).
    fn batches(&self, document: &Value) -> Result<(), Vec<Fault>> {
        let number = |key: &str| document.get(key).and_then(Value::as_u64);
        let said = |path: &str| self.trees.iter().rev().find_map(|tree| tree::get(tree, path)?.as_u64());
        let flag = |name: &str| match self.names(name)? {
            Given::Text(text) => text.parse().ok(),
            Given::Value(value) => value.as_u64(),
            _ => None,
        };
        let split = self.trees.iter().any(|tree| tree::get(tree, "parallel.mesh").is_some())
            || ["tp", "pp", "cp", "sp"].iter().any(|axis| self.names(axis).is_some());
        let (Some(all), Some(micro), Some(steps), false) = (
            number("train_batch_size"),
            number("train_micro_batch_size_per_gpu"),
            number("gradient_accumulation_steps"),
            split,
        ) else {
            return Ok(());
        };
        let each = micro.saturating_mul(steps).max(1);
        let gpus = flag("gpus").or_else(|| said("parallel.gpus"));
        let cards = gpus.map(|gpus| gpus.saturating_mul(flag("nodes").or_else(|| said("parallel.nodes")).unwrap_or(1)));
        if cards.map_or(all % each == 0, |cards| all == each.saturating_mul(cards)) {
            return Ok(());
        }
        let on = cards.map_or_else(String::new, |cards| format!(" × {cards} cards"));
        let problem = format!(
            "train_batch_size is {all}, and train_micro_batch_size_per_gpu × gradient_accumulation_steps{on} is not: \
             {micro} × {steps}{on}"
        );
        let cure = "DeepSpeed refuses that: leave train_batch_size out, or change one of them";
        Err(vec![Fault::new("parallel.engine.deepspeed", problem).or(cure)])
    }

    /// Whether a layer says something there.
    fn states(&self, path: &str) -> bool {
        self.trees.iter().any(|tree| tree::get(tree, path).is_some_and(|value| !value.is_null()))
    }

    /// Whether anything says how many cards there are.
    fn counts_cards(&self) -> bool {
        let flagged = |name: &&str| self.names(name).or_else(|| self.names(&name.replace('-', "_"))).is_some();
        let flags = ["gpus", "num-gpus", "nproc-per-node", "nodes", "dp", "dp-replicate", "tp", "cp", "pp"];
        ["gpus", "nodes", "dp", "mesh.dp_shard"].iter().any(|key| self.states(&format!("parallel.{key}")))
            || flags.iter().any(flagged)
    }

    /// Fills in what a file leaves open about its cards: how many they are, and what runs on several of them.
    pub fn on_cards(&mut self) {
        let said = |path: &str| self.states(path);
        if said("parallel.engine") && !self.counts_cards() {
            let size = |axis: &str| {
                let path = format!("parallel.mesh.{axis}");
                self.trees.iter().rev().find_map(|tree| tree::get(tree, &path)?.as_u64()).unwrap_or(1).max(1)
            };
            let split =
                ["tp", "cp", "pp", "dp_replicate"].iter().fold(1u64, |all, axis| all.saturating_mul(size(axis)));
            // FSDP shards something: what is dealt out over tensors and stages leaves it two cards at least.
            let shards = said("parallel.engine.fsdp2") && size("dp_replicate") == 1;
            let cards = split.saturating_mul(USUAL_CARDS.div_ceil(split).max(if shards { 2 } else { 1 }));
            self.trees.push(json!({"parallel": {"gpus": cards}}));
            self.notes.push(format!("the file does not say on how many cards it runs: {cards} are taken"));
        }
        let Some(framework) = self.framework.as_deref().and_then(|name| Framework::find(name).ok()) else { return };
        for path in OWN {
            let stated = self.trees.iter().rev().find_map(|tree| tree::get(tree, path));
            let stood = stated
                .filter(|value| !value.is_null())
                .and_then(|value| stand_in(self.runner(), path, value, &framework.name));
            if let Some((plain, note)) = stood {
                self.trees.push(tree::of(path, plain));
                self.notes.extend(Some(note).filter(|note| !note.is_empty()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_of_all_cards_says_how_many_they_can_be() {
        let cards = |document: Value| {
            let mut asked = Asked::default();
            asked.deepspeed(&document, None).unwrap();
            asked.on_cards();
            let request = asked.request().unwrap();
            let at = |path: &str| tree::get(&request.stated, path).and_then(Value::as_u64);
            (at("parallel.gpus"), at("gradient_accumulation"))
        };
        let batch = |all: u64, micro: u64| json!({"train_batch_size": all, "train_micro_batch_size_per_gpu": micro, "zero_optimization": {"stage": 1}});
        assert_eq!(cards(batch(32, 32)), (Some(1), Some(1)));
        assert_eq!(cards(batch(24, 2)), (Some(6), Some(2)));
        assert_eq!(cards(batch(1024, 16)), (Some(8), Some(8)));
        let mut said = batch(64, 4);
        said["gradient_accumulation_steps"] = json!(4);
        assert_eq!(cards(said), (Some(4), Some(4)));
    }
}
