//! A file beneath what else is asked: whose defaults hold, its engine, and what of it runs on several cards.

use serde_json::{Value, json};

use super::file::Content;
use super::request::Asked;
use super::runner::Runner;
use super::tree;
use crate::plan::{Fault, Framework};

/// Cards of a node, where a file names an engine and nobody says how many there are.
const USUAL_CARDS: u64 = 8;

/// What frameworks do in their own way on one card, and the value that runs on several.
const PLAIN: [(&str, &str); 2] = [("model_code", "transformers"), ("loss.kind", "standard")];

impl Content {
    /// The same with everything in its tree: flags, DeepSpeed's configuration, and what it leaves open about its cards.
    pub fn folded(mut self) -> Result<Self, Vec<Fault>> {
        if self.named.is_empty() && self.deepspeed.is_none() {
            return Ok(self);
        }
        let (task, model, framework, deepspeed) =
            (self.task, self.model.take(), self.framework.clone(), self.deepspeed.take());
        let auto_class = self.auto_class.take();
        let mut asked = Asked { task: task.unwrap_or_default(), ..Asked::default() };
        asked.beneath(self);
        if let Some(document) = deepspeed {
            asked.deepspeed(&document, None)?;
        }
        asked.on_cards();
        let request = asked.request()?;
        Ok(Self { task, model, auto_class, framework, tree: request.stated, notes: request.notes, ..Self::default() })
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
            part["hidden_size"]
                .as_u64()
                .or_else(|| part["hidden_sizes"].as_array()?.iter().filter_map(Value::as_u64).max())
        };
        let hidden_size = config.and_then(|config| size(config).or_else(|| size(&config["text_config"])));
        let content = Content::of_deepspeed(document, hidden_size)?;
        let mut tree = content.tree;
        if self.names("engine").is_none()
            && let Some(options) = tree::take(&mut tree, "parallel.engine.*")
        {
            tree::set(&mut tree, "parallel.engine.deepspeed", options);
        }
        self.trees.push(tree);
        self.notes.extend(content.notes);
        Ok(())
    }

    /// Fills in what a file leaves open about its cards: how many they are, and what runs on several of them.
    pub fn on_cards(&mut self) {
        let said =
            |path: &str| self.trees.iter().any(|tree| tree::get(tree, path).is_some_and(|value| !value.is_null()));
        let flagged = |names: &[&str]| {
            names.iter().any(|name| self.names(name).or_else(|| self.names(&name.replace('-', "_"))).is_some())
        };
        let counted = ["gpus", "nodes", "dp", "mesh.dp_shard"].iter().any(|key| said(&format!("parallel.{key}")))
            || flagged(&["gpus", "num-gpus", "nproc-per-node", "nodes", "dp", "dp-replicate", "tp", "cp", "pp"]);
        if said("parallel.engine") && !counted {
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
        if self.runner() == Runner::OneCard || !self.runner().trains() {
            return;
        }
        let Some(framework) = self.framework.as_deref().and_then(|name| Framework::find(name).ok()) else { return };
        for (path, plain) in PLAIN {
            let own = framework.defaults.iter().any(|default| default.key == path && default.value != plain);
            let stated = self.trees.iter().rev().find_map(|tree| tree::get(tree, path));
            if own && stated.is_none_or(|value| value != plain) {
                self.trees.push(tree::of(path, json!(plain)));
                let what = if path == "loss.kind" { "loss" } else { "code of the model" };
                let name = &framework.name;
                self.notes
                    .push(format!("not simulated: {name}'s own {what} on several cards; transformers' stands in"));
            }
        }
        for (path, what) in
            [("checkpoints.reentrant", "reentrant checkpoints"), ("checkpoints.offload", "offloaded checkpoints")]
        {
            let stated = self.trees.iter().rev().find_map(|tree| tree::get(tree, path)).cloned();
            let usual = framework.defaults.iter().any(|default| default.key == path && default.value == true);
            if stated.map_or(usual, |value| value == true) {
                self.trees.push(tree::of(path, json!(false)));
                self.notes.push(format!("not simulated: {what} on several cards; plain ones stand in"));
            }
        }
        if framework.defaults.iter().any(|default| default.key == "keep_loss") {
            self.trees.push(json!({"keep_loss": false}));
        }
    }
}
