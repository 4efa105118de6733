//! The other way round for training: the largest value of one setting that fits, the smallest card, the fewest cards.
//!
//! Memory nearly always grows with what is looked for, but not strictly (allocators round), so an answer is always simulated on both sides: it
//! fits, and the next one does not.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::trial::{Tried, attempt, attempt_changed, edited, is_hopeless};
use crate::ask::{Kept, Request, Runner, Surroundings, resolve, tree};
use crate::model::Model;
use crate::plan::{Batch, Fault, Gpus, ModelSizes, TaskKind};
use crate::serving::solve::{Room, largest};

/// What is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// The most samples at once.
    Batch,
    /// The most tokens a sample.
    SeqLen,
    /// The highest rank of an adapter.
    LoraRank,
    /// The most layers of such a model.
    Layers,
    /// The smallest card.
    Gpu,
    /// The fewest cards.
    Gpus,
}

/// What was found.
#[derive(Debug)]
pub struct Solution {
    /// The setting.
    pub path: &'static str,
    /// Its value.
    pub value: Value,
    /// In words.
    pub words: String,
    /// What it takes then.
    pub tried: Tried,
    /// The model, where it is another one.
    pub model: Option<Model>,
    /// The next value, and why it is none.
    pub beyond: Option<(Value, String)>,
}

impl Unknown {
    /// Those that there are, by name.
    pub const ALL: [(&'static str, Self); 6] = [
        ("batch", Self::Batch),
        ("seq-len", Self::SeqLen),
        ("lora-rank", Self::LoraRank),
        ("gpu", Self::Gpu),
        ("gpus", Self::Gpus),
        ("layers", Self::Layers),
    ];

    /// By name; underscores and dashes are the same.
    pub fn find(name: &str) -> Option<Self> {
        let plain = name.replace('_', "-");
        Self::ALL.iter().find(|(known, _)| *known == plain).map(|(_, unknown)| *unknown)
    }

    /// The names.
    pub fn names() -> String {
        let names = Self::ALL.map(|(name, _)| name);
        format!("{} or {}", names[..5].join(", "), names[5])
    }

    /// The setting that is tried, which nobody can fix at the same time.
    pub fn path(self) -> &'static str {
        match self {
            Self::Batch => "batch.batch_size",
            Self::SeqLen => "batch.seq_len",
            Self::LoraRank => "adapter.rank",
            Self::Layers => "model.layers",
            Self::Gpu => "gpu",
            Self::Gpus => "parallel.gpus",
        }
    }
}

/// A question that is asked again with other values.
pub struct Question<'a> {
    /// About which model.
    pub model: &'a Model,
    /// What is asked.
    pub request: &'a Request,
    /// What is known besides.
    pub around: &'a Surroundings<'a>,
    /// What must stay free.
    pub kept: Kept,
}

/// Looks for it; `None`: nothing fits.
pub fn solve(question: &Question<'_>, unknown: Unknown) -> Result<Option<Solution>, Vec<Fault>> {
    if question.request.stated.pointer("/job/lengths").is_some() && unknown == Unknown::SeqLen {
        return Err(vec![Fault::no_effect("job.lengths", "on what is looked for").or("look for batch")]);
    }
    if unknown == Unknown::SeqLen {
        question.check_length()?;
    }
    match unknown {
        Unknown::Batch => question.number(unknown, 1 << 20, |n| format!("{n} samples at once")),
        Unknown::SeqLen => question.number(unknown, 1 << 24, |n| format!("samples of {n} tokens")),
        Unknown::LoraRank => {
            if tree::get(&question.request.stated, "adapter").is_none_or(Value::is_null)
                && question.request.framework.is_none()
            {
                return Err(vec![
                    Fault::new("adapter", "there is no adapter whose rank could be looked for")
                        .or_set("adapter", json!({"method": "lora"})),
                ]);
            }
            question.number(unknown, 1 << 16, |n| format!("adapters of rank {n}"))
        }
        Unknown::Layers => question.layers(),
        Unknown::Gpu => question.card(),
        Unknown::Gpus => question.cards(),
    }
}

impl Question<'_> {
    /// Refuses to look for a length that decides nothing.
    fn check_length(&self) -> Result<(), Vec<Fault>> {
        const LENGTH: &str = "batch.seq_len";
        let stated = |path: &str| tree::get(&self.request.stated, path).filter(|value| !value.is_null());
        let kind = stated("objective.kind").and_then(Value::as_str).and_then(TaskKind::called);
        let inputs = || Batch::default().training_inputs();
        let unread = !Batch::reads_tokens(self.model)
            && self.model.unused_inputs(&inputs()).is_ok_and(|unused| unused.contains(&"seq_len"));
        if unread {
            return Err(vec![Fault::no_effect(LENGTH, "on a model that reads no tokens").or("look for batch")]);
        }
        if kind.is_some_and(TaskKind::rolls_out) && stated("objective.max_prompt_length").is_some() {
            let what = "where {objective.max_prompt_length} and {objective.max_completion_length} say all lengths";
            return Err(vec![Fault::no_effect(LENGTH, what).or_drop("objective.max_prompt_length")]);
        }
        Ok(())
    }

    fn attempt(&self, change: &Value) -> Result<Tried, Vec<Fault>> {
        attempt_changed(self.model, (self.request, change), self.around, self.kept)
    }

    /// The largest number that fits.
    fn number(
        &self,
        unknown: Unknown,
        most: u64,
        words: impl Fn(u64) -> String,
    ) -> Result<Option<Solution>, Vec<Fault>> {
        let path = unknown.path();
        let mut known = Known::new(|n| self.attempt(&tree::of(path, json!(n))));
        // What is wrong with the rest of the plan shows on the smallest.
        known.at(1).clone()?;
        let Some(found) = highest(most, |n| room(known.at(n))) else { return Ok(None) };
        let tried = known.at(found).clone()?;
        let beyond = self.beyond(found.saturating_add(1), known.at(found.saturating_add(1)));
        Ok(Some(Solution { path, value: json!(found), words: words(found), tried, model: None, beyond }))
    }

    fn beyond(&self, next: u64, tried: &Result<Tried, Vec<Fault>>) -> Option<(Value, String)> {
        let why = match tried {
            Ok(tried) if tried.fits => return None,
            Ok(tried) if tried.headroom() < 0 => {
                format!("{:.2} GiB are missing", tried.headroom().unsigned_abs() as f64 / f64::from(1 << 30))
            }
            Ok(_) => "it runs out of memory below the limit".to_owned(),
            Err(faults) => faults.first().map_or_else(String::new, |fault| fault.said(&crate::plan::fault::Places)),
        };
        Some((json!(next), why))
    }

    /// The most layers, the others as the config has them.
    fn layers(&self) -> Result<Option<Solution>, Vec<Fault>> {
        let known = ModelSizes::of(self.model.config(), 0).layers;
        let Some(known) = known else {
            return Err(vec![Fault::new("model", "its config does not say how many layers it has")]);
        };
        let tried = |count: u64| {
            let model = self.model.reconfigured(with_layers(self.model.config(), known, count));
            let tried = attempt(&model, self.request, self.around, self.kept)?;
            Ok::<_, Vec<Fault>>((model, tried))
        };
        tried(known)?;
        let mut tries = Known::new(|count| tried(count).map(|(_, tried)| tried));
        let Some(found) = highest(1 << 12, |count| room(tries.at(count))) else { return Ok(None) };
        let (model, this) = tried(found)?;
        let beyond = self.beyond(found + 1, tries.at(found + 1));
        let words = format!("{found} layers (it has {known})");
        Ok(Some(Solution { path: "model.layers", value: json!(found), words, tried: this, model: Some(model), beyond }))
    }

    /// The smallest card that stands in for the asked one.
    fn card(&self) -> Result<Option<Solution>, Vec<Fault>> {
        let asked = self.attempt(&json!({}))?;
        // The largest that does not do: where the weights alone are more than it has, nobody simulates it.
        let mut smaller: Option<(Value, Option<Tried>)> = None;
        for card in Gpus::instead_of((self.around.cards)().all(), asked.plan.gpu()) {
            let (name, change) = (json!(card.name), json!({"gpu": card.name}));
            let around = &Surroundings { card: None, ..self.around.again() };
            let settled = resolve(self.model, &edited(self.request, &change), around);
            if settled.is_ok_and(|settled| is_hopeless(self.model, &settled.plan, self.kept)) {
                smaller = Some((name, None));
                continue;
            }
            match self.attempt(&change) {
                Ok(tried) if tried.fits => {
                    let words = format!("{} ({:.2} GiB)", card.name, card.memory as f64 / f64::from(1 << 30));
                    let beyond = smaller.and_then(|(name, tried)| {
                        let tried = tried.map_or_else(|| self.attempt(&json!({"gpu": name})), Ok);
                        self.beyond(0, &tried).map(|(_, why)| (name, why))
                    });
                    return Ok(Some(Solution { path: "gpu", value: name, words, tried, model: None, beyond }));
                }
                Ok(tried) => smaller = Some((name, Some(tried))),
                Err(_) => {}
            }
        }
        Ok(None)
    }

    /// The fewest cards: one after the other within a machine of eight, then whole machines.
    fn cards(&self) -> Result<Option<Solution>, Vec<Fault>> {
        let with = |count: u64| {
            let mut change = json!({"parallel": {"gpus": count}});
            if self.request.runner == Runner::OneCard && count > 1 {
                tree::set(&mut change, "parallel.engine.fsdp2", json!({}));
            }
            change
        };
        let counts: Vec<u64> = (1..=8).chain((2..=128).map(|machines| machines * 8)).collect();
        // Counts that other axes do not divide are no answer either way.
        let (mut found, mut fault, mut before) = (None, None, None);
        for count in counts {
            match self.attempt(&with(count)) {
                Ok(tried) if tried.fits => {
                    let name = &tried.plan.gpu().name;
                    let engine = match tried.request.runner {
                        Runner::OneCard => String::new(),
                        runner => format!(" by {}", runner.title()),
                    };
                    let words = format!("{count} x {name}{engine}");
                    let beyond = before.clone();
                    found = Some(Solution {
                        path: "parallel.gpus",
                        value: json!(count),
                        words,
                        tried,
                        model: None,
                        beyond,
                    });
                    break;
                }
                Ok(tried) => before = self.beyond(count, &Ok(tried)),
                Err(faults) => drop(fault.get_or_insert(faults)),
            }
        }
        match (found, before, fault) {
            (None, None, Some(faults)) => Err(faults),
            (found, ..) => Ok(found),
        }
    }
}

/// Tries, each made once.
struct Known<F> {
    tried: BTreeMap<u64, Result<Tried, Vec<Fault>>>,
    attempt: F,
}

impl<F: Fn(u64) -> Result<Tried, Vec<Fault>>> Known<F> {
    fn new(attempt: F) -> Self {
        Self { tried: BTreeMap::new(), attempt }
    }

    fn at(&mut self, n: u64) -> &Result<Tried, Vec<Fault>> {
        self.tried.entry(n).or_insert_with(|| (self.attempt)(n))
    }
}

fn room(tried: &Result<Tried, Vec<Fault>>) -> Room {
    let left = tried.as_ref().ok().map(Tried::headroom);
    Room { holds: tried.as_ref().is_ok_and(|tried| tried.fits), left }
}

/// The highest number from 1 that holds; where the next one fails and one just above it holds, or a rounder one (kernels fill up lengths that are
/// no multiples), that one's like.
fn highest<R: Into<Room>>(most: u64, mut room: impl FnMut(u64) -> R) -> Option<u64> {
    let mut room = |n| -> Room { room(n).into() };
    let mut found = largest(1, most, &mut room)?;
    loop {
        let near = found.saturating_add((found / 100).max(4)).min(most);
        let rounder = [8, 16, 32, 64].map(|step| (found + 2).next_multiple_of(step));
        let mut above: Vec<u64> = (found + 2..=found + 4).chain(rounder).filter(|n| *n <= near).collect();
        crate::order::sort(&mut above);
        above.dedup();
        match above.into_iter().rev().find(|n| room(*n).holds) {
            Some(above) => found = largest(above, most, &mut room)?,
            None => return Some(found),
        }
    }
}

/// A config with another number of layers: lists of one entry per layer go on as they began.
fn with_layers(config: &Value, known: u64, count: u64) -> Value {
    fn walk(value: &mut Value, known: u64, count: u64) {
        let Some(object) = value.as_object_mut() else { return };
        for (key, value) in object {
            match value {
                Value::Number(number)
                    if ["num_hidden_layers", "n_layer", "n_layers", "num_layers"].contains(&key.as_str())
                        && number.as_u64() == Some(known) =>
                {
                    *value = json!(count);
                }
                Value::Array(each) if each.len() as u64 == known && !each.is_empty() => {
                    let all = (0..count as usize).map(|at| each[at % each.len()].clone());
                    *value = all.collect();
                }
                Value::Object(_) if key == "text_config" => walk(value, known, count),
                _ => {}
            }
        }
    }
    let mut config = config.clone();
    walk(&mut config, known, count);
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_is_not_missed_behind_a_gap() {
        assert_eq!(highest(100, |n| n <= 12), Some(12));
        assert_eq!(highest(100, |n| n <= 12 || n == 14), Some(14));
        assert_eq!(highest(1 << 20, |n| n <= 8557 || (n % 64 == 0 && n <= 8640)), Some(8640));
        assert_eq!(highest(100, |_| false), None);
        assert_eq!(highest(100, |_| true), Some(100));
    }

    #[test]
    fn layers_go_on_as_they_began() {
        let config = json!({"num_hidden_layers": 4, "layer_types": ["a", "a", "a", "b"], "x": 4});
        let longer = with_layers(&config, 4, 6);
        assert_eq!(longer, json!({"num_hidden_layers": 6, "layer_types": ["a", "a", "a", "b", "a", "a"], "x": 4}));
    }

    #[test]
    fn names_lead_to_unknowns() {
        for (name, unknown) in Unknown::ALL {
            assert_eq!(Unknown::find(&name.replace('-', "_")), Some(unknown));
        }
        assert_eq!(Unknown::names(), "batch, seq-len, lora-rank, gpu, gpus or layers");
    }
}
