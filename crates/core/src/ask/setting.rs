//! What a setting is: one row per setting, from which flags, plan files, requests, the page and Python are derived.

use serde::Serialize;
use serde_json::Value;

use super::runner::Scope;

/// One setting.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Its place in a plan, parts joined by dots; `*` stands for the engine that spreads the model.
    pub path: &'static str,
    /// Its flag, without dashes; Python's keyword is the same with underscores. Empty: `--set PATH=VALUE` alone.
    pub flag: &'static str,
    /// A letter for it.
    pub short: Option<char>,
    /// Other names of the flag.
    pub aliases: &'static [&'static str],
    /// What a value may be.
    pub kind: Kind,
    /// What the value is called in help.
    pub value: &'static str,
    /// What it says, in a line.
    pub help: &'static str,
    /// What stands behind its default.
    pub from: &'static str,
    /// Under which heading it stands.
    pub topic: Topic,
    /// Who honours it.
    pub scope: Scope,
    /// Flags beside which it changes the answer, with its own: an example that runs.
    pub example: &'static str,
}

/// What a value may be.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// On where it is named.
    Switch,
    /// Off where it is named: the flag says what is not done.
    Off,
    /// A whole number.
    Whole,
    /// A number.
    Real,
    /// Any text.
    Text,
    /// Names, separated by commas or given several times.
    Names,
    /// One of some words, each with what it says.
    Choice(&'static [(&'static str, &'static str)]),
    /// One of many words that are listed elsewhere.
    Listed(fn() -> Vec<String>),
    /// A way to write several values at once, or one that a plan holds in another form.
    Spelled(Spelling),
    /// Known, and refused with these words.
    Refused(&'static str),
}

/// How words become values of a plan, and back.
#[derive(Debug, Clone, Copy)]
pub struct Spelling {
    /// What may be written.
    pub words: &'static [&'static str],
    /// The value where the flag stands alone; absent: it needs one.
    pub bare: Option<&'static str>,
    /// A tree to lay over the plan, or what was expected.
    pub read: fn(&str) -> Result<Value, String>,
    /// The words for what a tree says at these places.
    pub write: fn(&Value) -> Option<String>,
}

/// Where a setting stands in help and on the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[allow(missing_docs, reason = "the names are the headings")]
#[serde(rename_all = "kebab-case")]
pub enum Topic {
    Hardware,
    Batch,
    Task,
    Job,
    Precision,
    Optimizer,
    Kernels,
    Adapters,
    Generation,
    Pictures,
    DraftedTokens,
    ManyCards,
    Ddp,
    Fsdp,
    Pipeline,
    DeepSpeed,
    Megatron,
    Serving,
}

impl Topic {
    /// The heading.
    pub fn title(self) -> &'static str {
        match self {
            Self::Hardware => "Hardware",
            Self::Batch => "Batch",
            Self::Task => "Post-training",
            Self::Job => "The whole job",
            Self::Precision => "Precision",
            Self::Optimizer => "Optimizer",
            Self::Kernels => "Kernels",
            Self::Adapters => "Adapters",
            Self::Generation => "Generation",
            Self::Pictures => "Pictures",
            Self::DraftedTokens => "Drafted tokens",
            Self::ManyCards => "Many cards",
            Self::Ddp => "DDP",
            Self::Fsdp => "FSDP",
            Self::Pipeline => "Pipeline and context (fsdp2)",
            Self::DeepSpeed => "DeepSpeed",
            Self::Megatron => "Megatron",
            Self::Serving => "Serving engines",
        }
    }
}

/// A setting at a place, with its flag and its kind; what else there is to say follows.
pub const fn setting(path: &'static str, flag: &'static str, kind: Kind, help: &'static str) -> Setting {
    Setting {
        path,
        flag,
        short: None,
        aliases: &[],
        kind,
        value: match kind {
            Kind::Whole => "N",
            Kind::Real => "X",
            Kind::Names => "NAMES",
            Kind::Text => "TEXT",
            _ => "HOW",
        },
        help,
        from: "off unless asked for",
        topic: Topic::Kernels,
        scope: Scope::ONE_CARD,
        example: "",
    }
}

impl Setting {
    /// With a letter.
    pub const fn short(mut self, letter: char) -> Self {
        self.short = Some(letter);
        self
    }

    /// With other names.
    pub const fn also(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }

    /// With a name for its value.
    pub const fn value(mut self, value: &'static str) -> Self {
        self.value = value;
        self
    }

    /// With what stands behind its default.
    pub const fn from(mut self, from: &'static str) -> Self {
        self.from = from;
        self
    }

    /// Under a heading, honoured by some.
    pub const fn on(mut self, topic: Topic, scope: Scope) -> Self {
        (self.topic, self.scope) = (topic, scope);
        self
    }

    /// With flags beside which it changes the answer.
    pub const fn example(mut self, example: &'static str) -> Self {
        self.example = example;
        self
    }

    /// Python's keyword for it.
    pub fn keyword(&self) -> String {
        self.flag.replace('-', "_")
    }

    /// Whether a name is its flag or an alias; underscores and dashes are the same.
    pub fn is_called(&self, name: &str) -> bool {
        let same = |known: &str| {
            known.len() == name.len()
                && known.bytes().zip(name.bytes()).all(|(a, b)| a == b || (a == b'-' && b == b'_'))
        };
        !self.flag.is_empty() && (same(self.flag) || self.aliases.iter().any(|alias| same(alias)))
    }

    /// Whether the flag stands alone.
    pub fn is_switch(&self) -> bool {
        match self.kind {
            Kind::Switch | Kind::Off | Kind::Refused(_) => true,
            Kind::Spelled(spelling) => spelling.words == ["true"],
            _ => false,
        }
    }
}
