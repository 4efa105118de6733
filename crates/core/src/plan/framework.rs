//! What training frameworks choose when nobody says otherwise: profiles, kept as data with their sources.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{PlanError, TrainPlan};
use crate::typed;

const EMBEDDED: &str = include_str!("../../data/frameworks.toml");

/// A framework at a version, and its defaults.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Framework {
    /// The name people type.
    pub name: String,
    /// The package that was read.
    pub package: String,
    /// Its version.
    pub version: String,
    /// Who spreads a run over several cards where nothing else is said: a word of `--engine`.
    #[serde(default)]
    pub engine: Option<String>,
    /// What a report should say whenever the profile is used.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Its defaults.
    #[serde(rename = "default")]
    pub defaults: Vec<FrameworkDefault>,
}

/// One default.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrameworkDefault {
    /// The place in a plan, its parts joined by dots.
    pub key: String,
    /// The value there.
    pub value: Value,
    /// The runs it holds for; all when empty.
    #[serde(default)]
    pub when: Vec<Situation>,
    /// The setting and the file that decide it.
    pub source: String,
}

/// What kind of run it is, as far as defaults depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Situation {
    /// The whole model is trained.
    Full,
    /// An adapter beside a model in full.
    Adapter,
    /// An adapter beside a quantised model.
    Quantised,
}

/// A value of a plan that nobody asked for, and where it came from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Provenance {
    /// The place in the plan.
    pub key: String,
    /// The value.
    pub value: Value,
    /// Framework and version.
    pub framework: String,
    /// Framework, version, setting and file.
    pub source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    framework: Vec<Framework>,
}

impl Framework {
    /// All profiles.
    pub fn all() -> Vec<Self> {
        typed::embedded::<File>(EMBEDDED).map(|file| file.framework).unwrap_or_default()
    }

    /// The profile of a name, or of `name@version`.
    pub fn find(text: &str) -> Result<Self, PlanError> {
        let (name, version) = text.split_once('@').map_or((text, None), |(name, version)| (name, Some(version)));
        let lower = name.to_lowercase().replace('_', "-");
        let same = |framework: &Self| {
            let spelled = [framework.name.as_str(), framework.package.as_str()];
            spelled.contains(&lower.as_str()) && version.is_none_or(|version| framework.version == version)
        };
        Self::all().into_iter().find(same).ok_or_else(|| {
            let known: Vec<String> = Self::all().iter().map(|f| format!("{}@{}", f.name, f.version)).collect();
            PlanError::BadValue {
                key: "framework".into(),
                value: text.into(),
                expected: format!("one of {}", known.join(", ")),
            }
        })
    }

    /// The plan with this framework's defaults in it.
    pub fn apply(&self, plan: &TrainPlan, situation: Situation) -> Result<TrainPlan, PlanError> {
        change(plan, self.holding(situation).map(|default| (default.key.as_str(), &default.value)))
    }

    /// Which values of a finished plan are this framework's defaults.
    pub fn provenance(&self, plan: &TrainPlan, situation: Situation) -> Vec<Provenance> {
        let value = serde_json::to_value(plan).unwrap_or_default();
        self.holding(situation)
            .filter(|default| value.pointer(&pointer(&default.key)) == Some(&default.value))
            .map(|default| Provenance {
                key: default.key.clone(),
                value: default.value.clone(),
                framework: format!("{} {}", self.package, self.version),
                source: format!("{} {}: {}", self.package, self.version, default.source),
            })
            .collect()
    }

    pub(crate) fn holding(&self, situation: Situation) -> impl Iterator<Item = &FrameworkDefault> {
        self.defaults.iter().filter(move |default| default.when.is_empty() || default.when.contains(&situation))
    }
}

fn pointer(key: &str) -> String {
    format!("/{}", key.replace('.', "/"))
}

/// A plan with some of its values changed, by their places.
pub fn change<'a>(
    plan: &TrainPlan,
    changes: impl Iterator<Item = (&'a str, &'a Value)>,
) -> Result<TrainPlan, PlanError> {
    let mut value = serde_json::to_value(plan).unwrap_or_default();
    for (key, new) in changes {
        set(&mut value, key, new);
    }
    typed::read(value).map_err(|error| PlanError::BadValue {
        key: "plan".into(),
        value: error.to_string(),
        expected: "what `vramcast schema` prints".into(),
    })
}

fn set(place: &mut Value, key: &str, new: &Value) {
    let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
    if place.is_null() {
        *place = Value::Object(Default::default());
    }
    let Some(object) = place.as_object_mut() else { return };
    let inner = object.entry(first).or_insert(Value::Null);
    match rest {
        None => *inner = new.clone(),
        Some(rest) => {
            if first == "adapter" && inner.is_null() {
                *inner = serde_json::json!({"method": "lora"});
            }
            set(inner, rest, new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::plan::{AdapterPlan, Checkpointing, Implementation, LossKind};

    #[test]
    fn every_default_has_a_place_and_a_source() {
        let all = Framework::all();
        assert_eq!(all.len(), 8);
        for framework in &all {
            for situation in [Situation::Full, Situation::Adapter, Situation::Quantised] {
                let plan = framework.apply(&TrainPlan::default(), situation).unwrap();
                // A key that is no place of a plan would be refused, one set twice would not be found again.
                assert_eq!(framework.provenance(&plan, situation).len(), framework.holding(situation).count());
            }
            assert!(framework.defaults.iter().all(|default| !default.source.is_empty()));
        }
    }

    #[test]
    fn situations_decide() {
        let trl = Framework::find("trl").unwrap();
        let full = trl.apply(&TrainPlan::default(), Situation::Full).unwrap();
        assert_eq!((full.weights, full.autocast, full.loss.kind), (DType::F32, Some(DType::BF16), LossKind::TrlFused));
        assert_eq!((full.checkpointing, full.optimizer.implementation), (Checkpointing::Full, Implementation::Fused));
        assert!(full.adapter.is_none() && full.quantization.is_none());
        let quantised = trl.apply(&TrainPlan::default(), Situation::Quantised).unwrap();
        assert!(matches!(&quantised.adapter, Some(AdapterPlan::Lora(lora)) if lora.dtype == Some(DType::BF16)));
        assert!(quantised.quantization.is_some_and(|quantization| !quantization.prepare));
    }

    #[test]
    fn names_are_found_and_others_refused() {
        assert_eq!(Framework::find("llama_factory").unwrap().package, "llamafactory");
        assert_eq!(Framework::find("trl@1.16.0").unwrap().name, "trl");
        let error = Framework::find("trl@0.1").unwrap_err().to_string();
        assert!(error.contains("trl@1.16.0"), "{error}");
    }
}
