//! The software a run is made with: versions that rules of the simulation ask for.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::PlanError;

/// A version as packages write it: `2.11.0+cu130`, `0.19`, `b5781`. Ordered by its numbers; a build or a pre-release of a
/// version counts as that version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version([u32; 3]);

impl Version {
    /// A version of three numbers.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self([major, minor, patch])
    }

    /// Reads a version, or nothing.
    pub fn parse(text: &str) -> Option<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || ".+-_".contains(c);
        if !text.chars().all(plain) {
            return None;
        }
        let bare = text.trim_start_matches(['v', 'b']);
        let release = bare.split('+').next().unwrap_or_default();
        let mut numbers = [0; 3];
        for (place, part) in release.split('.').take(3).enumerate() {
            let digits = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            match part.get(..digits).map(str::parse) {
                Some(Ok(number)) => numbers[place] = number,
                // `5.17.dev0` is on its way to 5.17.
                _ if place > 0 && part.starts_with(|c: char| c.is_ascii_alphabetic()) => break,
                _ => return None,
            }
        }
        Some(Self(numbers))
    }

    /// Major and minor: what rules are checked against.
    pub fn release(self) -> [u32; 2] {
        [self.0[0], self.0[1]]
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            // llama.cpp numbers its builds.
            [build, 0, 0] if build > 1000 => write!(formatter, "b{build}"),
            [major, minor, 0] => write!(formatter, "{major}.{minor}"),
            [major, minor, patch] => write!(formatter, "{major}.{minor}.{patch}"),
        }
    }
}

macro_rules! packages {
    ($($(#[doc = $doc:literal])+ $name:ident $spelled:literal $(| $also:literal)* : $oldest:expr => $newest:expr;)+) => {
        /// A package whose version decides something, or was looked at.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Package { $($(#[doc = $doc])+ $name,)+ }

        impl Package {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// Its name, as package registries spell it.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $spelled,)+ }
            }

            /// The oldest and the newest version that the rules were checked with.
            pub fn checked(self) -> [Version; 2] {
                let [major, minor, patch] = match self { $(Self::$name => $oldest,)+ };
                let oldest = Version::new(major, minor, patch);
                let [major, minor, patch] = match self { $(Self::$name => $newest,)+ };
                [oldest, Version::new(major, minor, patch)]
            }

            /// The package of a name.
            pub fn find(name: &str) -> Option<Self> {
                match name.to_ascii_lowercase().replace('_', "-").as_str() {
                    $($spelled $(| $also)* => Some(Self::$name),)+
                    _ => None,
                }
            }
        }
    };
}

packages! {
    /// PyTorch: the sources named in `memory/torch` and `memory/sharding`; 2.10 by SimuMax's runs on B200; `fully_shard` and pipelines
    /// (`memory/sharding/fsdp2.rs`, `pipeline/`) also as 2.4 and 2.6 have them.
    Torch "torch": [2, 10, 0] => [2, 11, 0];
    /// transformers: the ledger's rows are of 5.17, some families and formats were read in 5.22.
    Transformers "transformers": [5, 17, 0] => [5, 22, 0];
    /// PEFT (`source/adapter.rs`, `memory/lower/scales.rs`).
    Peft "peft": [0, 21, 0] => [0, 21, 0];
    /// bitsandbytes: 0.42's 4-bit product in LitGPT's rows, 0.50 in the ledger's.
    Bitsandbytes "bitsandbytes": [0, 42, 0] => [0, 50, 0];
    /// DeepSpeed: 0.19, and MiCS as 0.17 has it (`memory/sharding`).
    Deepspeed "deepspeed": [0, 17, 0] => [0, 19, 0];
    /// Megatron-Core: SimuMax's runs are of 0.12 and 0.14.
    MegatronCore "megatron-core" | "megatron": [0, 12, 0] => [0, 14, 0];
    /// Transformer Engine: SimuMax's runs are of 2.1 and 2.11, Megatron-Bridge's of 2.17.
    TransformerEngine "transformer-engine": [2, 1, 0] => [2, 17, 0];
    /// TRL (`memory/lower/trl_loss.rs`): 1.16 measured; before 1.15 as in `memory/tasks/whole.rs`.
    Trl "trl": [1, 12, 0] => [1, 16, 0];
    /// Liger's kernels (`plan/liger.rs`).
    Liger "liger-kernel" | "liger": [0, 8, 0] => [0, 8, 5];
    /// flash-linear-attention (`memory/torch/gated_delta.rs`). Where none is named it is not installed.
    FlashLinearAttention "flash-linear-attention" | "fla-core" | "fla": [0, 6, 0] => [0, 6, 0];
    /// torchtune (`plan/model_code/torchtune.rs`): 0.4 rehearsed, builders read in 0.1 to 0.6.
    Torchtune "torchtune": [0, 4, 0] => [0, 6, 1];
    /// vLLM (`serving/vllm/rules.rs`).
    Vllm "vllm": [0, 6, 0] => [0, 27, 0];
    /// llama.cpp, by the numbers of its builds (`serving/llama_cpp/cache.rs`).
    LlamaCpp "llama.cpp" | "llama-cpp": [0, 0, 0] => [7832, 0, 0];
}

/// The versions that a plan names; what it does not name is the newest the rules were checked with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct Stack(BTreeMap<Package, Version>);

impl Stack {
    /// Whether nothing is named.
    pub fn is_default(&self) -> bool {
        self.0.is_empty()
    }

    /// The same with a version named.
    #[must_use]
    pub fn with(mut self, package: Package, version: Version) -> Self {
        self.0.insert(package, version);
        self
    }

    /// The version that is named.
    pub fn named(&self, package: Package) -> Option<Version> {
        self.0.get(&package).copied()
    }

    /// The version that rules go by.
    pub fn version(&self, package: Package) -> Version {
        self.named(package).unwrap_or(package.checked()[1])
    }

    /// Whether a package is older than a version.
    pub fn before(&self, package: Package, major: u32, minor: u32, patch: u32) -> bool {
        self.version(package) < Version::new(major, minor, patch)
    }

    /// What is known of the packages that a record names; it may name others, too.
    pub fn recorded<'a>(versions: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, PlanError> {
        let mut stack = Self::default();
        for (name, text) in versions {
            if let Some(package) = Package::find(name) {
                stack = stack.with(package, read(package, text)?);
            }
        }
        Ok(stack)
    }

    /// What is named that the rules were not checked with, in words.
    pub fn unknown(&self) -> Vec<String> {
        let outside = |(package, version): (&Package, &Version)| {
            let (name, [oldest, newest]) = (package.name(), package.checked());
            if version.release() > newest.release() {
                Some(format!("{name} {version} is newer than {newest}, the newest that the rules were checked with"))
            } else if version.release() < oldest.release() {
                Some(format!("{name} {version} is older than {oldest}, the oldest that the rules were checked with"))
            } else {
                None
            }
        };
        self.0.iter().filter_map(outside).collect()
    }
}

fn read(package: Package, text: &str) -> Result<Version, PlanError> {
    Version::parse(text).ok_or_else(|| PlanError::BadValue {
        key: format!("stack.{}", package.name()),
        value: text.into(),
        expected: format!("a version such as {}", package.checked()[1]),
    })
}

impl TryFrom<BTreeMap<String, String>> for Stack {
    type Error = PlanError;

    fn try_from(versions: BTreeMap<String, String>) -> Result<Self, PlanError> {
        if let Some(name) = versions.keys().find(|name| Package::find(name).is_none()) {
            let known: Vec<&str> = Package::ALL.iter().map(|package| package.name()).collect();
            let expected = format!("one of {}", known.join(", "));
            return Err(PlanError::BadValue { key: "stack".into(), value: name.clone(), expected });
        }
        Self::recorded(versions.iter().map(|(name, text)| (name.as_str(), text.as_str())))
    }
}

impl From<Stack> for BTreeMap<String, String> {
    fn from(stack: Stack) -> Self {
        crate::order::map(
            stack.0.into_iter().map(|(package, version)| (package.name().to_owned(), version.to_string())),
        )
    }
}

impl schemars::JsonSchema for Stack {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Stack".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let versions: serde_json::Map<String, serde_json::Value> = Package::ALL
            .iter()
            .map(|package| (package.name().to_owned(), serde_json::json!({"type": "string"})))
            .collect();
        schemars::json_schema!({
            "type": "object",
            "description": "Versions of the software, by the names of its packages.",
            "properties": versions,
            "additionalProperties": false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        Version::parse(text).unwrap_or_else(|| panic!("{text}"))
    }

    #[test]
    fn versions_are_read_and_ordered() {
        assert_eq!(version("2.11.0+cu130"), version("2.11"));
        assert_eq!(version("2.10.0a0+a36e1d39eb.nv26.01"), Version::new(2, 10, 0));
        assert_eq!(version("v0.12.0rc3"), Version::new(0, 12, 0));
        assert_eq!(version("5.17.dev0"), Version::new(5, 17, 0));
        assert_eq!(version("b5781").to_string(), "b5781");
        assert!(version("0.9") < version("0.19") && version("0.43.1") < version("0.43.2"));
        for bad in ["", "0.42's 4-bit product", "e5493986 (2024-07-22)", "dev", "1..2", "99999999999"] {
            assert_eq!(Version::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_stack_is_a_map_of_strings_and_unknown_packages_are_refused_by_name() {
        let stack: Stack = serde_json::from_str(r#"{"torch": "2.10.1", "liger_kernel": "0.8.5"}"#).unwrap();
        assert_eq!(serde_json::to_string(&stack).unwrap(), r#"{"liger-kernel":"0.8.5","torch":"2.10.1"}"#);
        assert!(stack.before(Package::Torch, 2, 11, 0) && !Stack::default().before(Package::Torch, 2, 11, 0));
        let error = serde_json::from_str::<Stack>(r#"{"tensorflow": "2.0"}"#).unwrap_err().to_string();
        assert!(error.contains("tensorflow") && error.contains("deepspeed"), "{error}");
        let error = serde_json::from_str::<Stack>(r#"{"torch": "nightly"}"#).unwrap_err().to_string();
        assert!(error.contains("stack.torch") && error.contains("nightly"), "{error}");
    }

    #[test]
    fn versions_that_no_rule_was_checked_with_are_named() {
        assert!(Stack::default().unknown().is_empty());
        let known = Stack::default().with(Package::Torch, version("2.11.3"));
        assert!(known.unknown().is_empty());
        let other = known.with(Package::Torch, version("2.13")).with(Package::Peft, version("0.4"));
        let said = other.unknown();
        assert!(said[0].starts_with("torch 2.13 is newer than 2.11") && said[1].contains("older"), "{said:?}");
    }

    #[test]
    fn older_spellings_are_read() {
        let plan = serde_json::json!({
            "parallel": {"engine": {"megatron": {"core": 12, "torch": 10}}, "communicators": 3},
            "quantization": {"keeps_inputs": true},
            "stack": {"torch": "2.11"},
        });
        let plan: crate::plan::TrainPlan = serde_json::from_value(plan).unwrap();
        let stack = plan.versions();
        assert_eq!(stack.named(Package::MegatronCore), Some(version("0.12")));
        assert_eq!(stack.named(Package::Torch), Some(version("2.11")), "what the stack says comes first");
        assert!(plan.keeps_inputs());
        let newer = crate::plan::TrainPlan { stack: Stack::default(), quantization: Some(Default::default()), ..plan };
        assert!(!newer.keeps_inputs());
    }
}
