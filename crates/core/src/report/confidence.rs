//! How far an answer can be trusted: what recorded runs of its family and of every feature of its plan say.

use serde::{Deserialize, Serialize};

use super::coverage::{Coverage, Runs};
use crate::model::Model;
use crate::plan::{RunPlan, ServingEngine};
use crate::source::gguf::{Header, architecture};
use crate::units::several;

/// How far an answer can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// The model or the card is not known and was taken for something else.
    Guess,
    /// From the sources of what runs; nobody here measured such a run.
    Sources,
    /// Recorded runs of this family and of all that the plan uses.
    Measured,
}

impl Level {
    /// All, by the name that `--require` takes.
    pub const NAMES: [(&'static str, Self); 3] =
        [("guess", Self::Guess), ("sources", Self::Sources), ("measured", Self::Measured)];

    /// As an answer is.
    pub fn words(self) -> &'static str {
        match self {
            Self::Guess => "a guess",
            Self::Sources => SOURCES,
            Self::Measured => "measured",
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, level)| *level == self).map_or("", |(name, _)| name)
    }
}

impl std::str::FromStr for Level {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::NAMES.iter().find(|(known, _)| *known == name);
        known.map(|(_, level)| *level).ok_or_else(|| format!("{name} is not one of measured, sources, guess"))
    }
}

/// What stands behind an answer.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Confidence {
    /// How far it can be trusted.
    pub level: Level,
    /// Recorded runs of the family.
    pub runs: u32,
    /// What of it was never measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
    /// The band that errors of recorded runs give, in percent: nineteen in twenty runs of the family, and of each feature, are
    /// within. Of what was measured alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub band: Option<Band>,
    /// All that in words, as every interface says it.
    pub words: String,
}

/// Errors in percent, either way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Band {
    /// Of peak allocated.
    pub allocated: f64,
    /// Of peak reserved.
    pub reserved: f64,
}

impl Confidence {
    fn guess(what: &str, missing: String) -> Self {
        Self { level: Level::Guess, runs: 0, missing: vec![missing], band: None, words: format!("a guess; {what}") }
    }
}

/// The confidence of an answer.
pub(super) fn of(model: &Model, plan: &RunPlan) -> Confidence {
    let coverage = Coverage::recorded();
    let counts = coverage.of(plan);
    let model_type = name_of(model, plan);
    let family = counts.families.get(model_type).copied();
    let runs = family.map_or(0, |family| family.rows);
    if model.is_assumed() {
        return Confidence::guess("the type of the model is not known", "the type of the model".into());
    }
    if let RunPlan::Serve(plan) = plan
        && counts.families.is_empty()
    {
        let missing = vec![format!("{} itself: its own account is rebuilt from its sources", plan.engine.name())];
        return Confidence { level: Level::Sources, runs: 0, missing, band: None, words: SOURCES.into() };
    }
    let gpu = plan.gpu();
    if gpu.capability.is_none() && !["", "NVIDIA"].contains(&gpu.vendor.as_str()) {
        let what = format!("what runs on {} is taken to be what runs on NVIDIA's H200", gpu.name);
        return Confidence::guess(&what, format!("kernels of {}", gpu.name));
    }
    let mut missing: Vec<String> = family.is_none().then(|| format!("{model_type} models")).into_iter().collect();
    let features = plan.features();
    missing.extend(features.iter().filter(|name| !counts.features.contains_key(*name)).cloned());
    let behind: Vec<Runs> =
        features.iter().filter_map(|name| counts.features.get(name)).copied().chain(family).collect();
    let worst = |level: fn(&Runs) -> f64| behind.iter().map(level).fold(0.0, f64::max);
    if !missing.is_empty() {
        // What of it was not measured stands among the notes.
        return Confidence { level: Level::Sources, runs, missing, band: None, words: SOURCES.into() };
    }
    let mut band = Band { allocated: worst(|runs| runs.allocated), reserved: worst(|runs| runs.reserved) };
    let words = match plan {
        RunPlan::Serve(plan) => {
            // Engines take what they have once and for all.
            band.reserved = band.allocated;
            let pool = plan.engine == ServingEngine::Vllm;
            let what = if pool { "of the cache's pool" } else { "of what is on the card beside weights" };
            let name = plan.engine.name();
            format!(
                "measured, {} of this family by {name}; 19 in 20 like it within {} % {what}",
                several(runs.into(), "run"),
                upward(band.allocated)
            )
        }
        _ => format!(
            "measured, {} of this family; 19 in 20 like it within {} % allocated, {} % reserved",
            several(runs.into(), "run"),
            upward(band.allocated),
            upward(band.reserved)
        ),
    };
    Confidence { level: Level::Measured, runs, missing, band: Some(band), words }
}

const SOURCES: &str = "from sources";

/// Percent in two digits, rounded up: nineteen in twenty are within what is said.
fn upward(percent: f64) -> f64 {
    let thousandths = (percent * 1000.0).round() as u64;
    let step = 10_u64.pow(thousandths.checked_ilog10().unwrap_or(0).saturating_sub(1));
    thousandths.next_multiple_of(step) as f64 / 1000.0
}

/// What runs of such a model are counted by: its type, or llama.cpp's name for it.
fn name_of<'a>(model: &'a Model, plan: &RunPlan) -> &'a str {
    let model_type = model.config()["model_type"].as_str().unwrap_or_default();
    match plan {
        RunPlan::Serve(plan) if plan.engine == ServingEngine::LlamaCpp => {
            let own = model.files().first().and_then(Header::architecture);
            own.or_else(|| architecture::of_type(model_type)).unwrap_or(model_type)
        }
        _ => model_type,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{AttentionKind, TrainPlan};

    fn model(model_type: &str) -> Model {
        let config = serde_json::json!({"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100});
        Model::assuming(config, None, Some(crate::model::Assumption::Decoder)).unwrap()
    }

    #[test]
    fn errors_have_two_digits_and_are_never_made_smaller() {
        let shown = [4.523, 0.313, 17.359, 8.0, 0.002, 0.0].map(|percent| upward(percent).to_string());
        assert_eq!(shown, ["4.6", "0.32", "18", "8", "0.002", "0"]);
    }

    #[test]
    fn what_was_never_run_is_named() {
        let mut plan = TrainPlan::default();
        let whole = |plan: &TrainPlan| RunPlan::Train(Box::new(plan.clone()));
        let known = of(&model("llama"), &whole(&plan));
        assert_eq!((known.level, known.missing.len()), (Level::Measured, 0));
        assert!(known.runs > 100 && known.band.is_some_and(|band| band.allocated < 5.0));
        plan.attention = AttentionKind::Flash3;
        let unseen = of(&model("llama"), &whole(&plan));
        assert_eq!((unseen.level, unseen.missing), (Level::Sources, vec!["flash3 attention".to_owned()]));
        assert_eq!(of(&model("no-such-type"), &whole(&plan)).level, Level::Guess);
        plan = TrainPlan { gpu: crate::plan::Gpus::embedded().find("TPU v5e").unwrap(), ..TrainPlan::default() };
        let elsewhere = of(&model("llama"), &whole(&plan));
        assert_eq!((elsewhere.level, elsewhere.band), (Level::Guess, None));
        assert!(elsewhere.words.contains("TPU v5e"), "{}", elsewhere.words);
        assert!(Level::Guess < Level::Sources && Level::Sources < Level::Measured);
    }
}
