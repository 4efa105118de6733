//! Tokens that are proposed cheaply and then checked by the model in one pass: assisted and prompt-lookup decoding of
//! transformers' `generate`.

use serde::{Deserialize, Serialize};

use super::Faults;
use crate::dtype::DType;

/// Tokens that a model tells apart.
pub(crate) fn vocabulary(config: &serde_json::Value) -> Option<u64> {
    [config, &config["text_config"]].iter().find_map(|part| part["vocab_size"].as_u64())
}

/// `assistant_model` of `generate`: a small model that drafts tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Assistant {
    /// Its name.
    pub model: String,
    /// Its `config.json`; a plan file may leave it out where the name can be looked up.
    pub config: serde_json::Value,
    /// The type its weights are held in.
    pub weights: DType,
    /// `num_assistant_tokens`: how many it drafts before each check.
    pub tokens: u64,
    /// `num_assistant_tokens_schedule`.
    pub schedule: Schedule,
}

impl Default for Assistant {
    /// transformers' defaults (`_get_default_generation_params` of generation/configuration_utils.py, 5.17).
    fn default() -> Self {
        Self {
            model: String::new(),
            config: serde_json::Value::Null,
            weights: DType::BF16,
            tokens: 20,
            schedule: Schedule::Constant,
        }
    }
}

/// How the number of drafted tokens changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// It does not.
    Constant,
    /// Two more after a draft that was accepted whole, else one less (`heuristic`, `heuristic_transient`).
    Heuristic,
}

/// How many drafted tokens the model accepts. Runs depend on their data; these are the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Accepted {
    /// Every draft is accepted whole: fewest rounds.
    All,
    /// No drafted token is: one new token a round.
    None,
}

/// Who drafts, and what becomes of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Draft<'a> {
    /// A small model.
    Assistant(&'a Assistant),
    /// Tokens that followed the last two wherever they stood before (`prompt_lookup_num_tokens`).
    PromptLookup(u64),
}

impl Draft<'_> {
    /// How many tokens the first draft has.
    pub fn tokens(self) -> u64 {
        match self {
            Self::Assistant(assistant) => assistant.tokens,
            Self::PromptLookup(tokens) => tokens,
        }
    }

    /// Refuses lengths that cannot be.
    pub(super) fn check(self, faults: &mut Faults) {
        let path = match self {
            Self::Assistant(_) => "assistant.tokens",
            Self::PromptLookup(_) => "prompt_lookup",
        };
        faults.range(path, self.tokens(), 1..=4096);
    }

    /// The rounds of a run of `prompt` and `new` tokens: how many tokens there are before each, and how many are drafted.
    pub fn rounds(self, prompt: u64, new: u64, accepted: Accepted) -> Rounds {
        let heuristic = matches!(self, Self::Assistant(Assistant { schedule: Schedule::Heuristic, .. }));
        let looks_up = matches!(self, Self::PromptLookup(_));
        Rounds { length: prompt, end: prompt.saturating_add(new), tokens: self.tokens(), heuristic, looks_up, accepted }
    }
}

/// Rounds of drafting and checking, in order: tokens before the round, tokens drafted.
#[derive(Debug, Clone)]
pub struct Rounds {
    length: u64,
    end: u64,
    tokens: u64,
    heuristic: bool,
    looks_up: bool,
    accepted: Accepted,
}

impl Iterator for Rounds {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let left = self.end.checked_sub(self.length).filter(|left| *left > 0)?;
        // One token more comes from the check itself. A draft that is looked up is not cut, unless nothing but that one is left.
        let drafted = match self.looks_up {
            true if left == 1 => 0,
            true => self.tokens.min(self.length.saturating_sub(2)),
            false => self.tokens.min(left - 1),
        };
        let matches = if self.accepted == Accepted::All { drafted } else { 0 };
        if self.heuristic {
            self.tokens = if matches == drafted { self.tokens + 2 } else { self.tokens.saturating_sub(1).max(1) };
        }
        let before = self.length;
        self.length = self.length.saturating_add(matches + 1).min(self.end);
        Some((before, drafted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(draft: Draft<'_>, new: u64, accepted: Accepted) -> Vec<(u64, u64)> {
        draft.rounds(100, new, accepted).collect()
    }

    #[test]
    fn a_constant_draft_is_cut_at_the_end() {
        let assistant = Assistant { tokens: 5, ..Assistant::default() };
        let draft = Draft::Assistant(&assistant);
        assert_eq!(rounds(draft, 13, Accepted::All), [(100, 5), (106, 5), (112, 0)]);
        assert_eq!(rounds(draft, 4, Accepted::None), [(100, 3), (101, 2), (102, 1), (103, 0)]);
    }

    #[test]
    fn a_heuristic_draft_grows_with_luck_and_shrinks_without() {
        let assistant = Assistant { tokens: 2, schedule: Schedule::Heuristic, ..Assistant::default() };
        let draft = Draft::Assistant(&assistant);
        assert_eq!(rounds(draft, 20, Accepted::All), [(100, 2), (103, 4), (108, 6), (115, 4)]);
        assert_eq!(rounds(draft, 5, Accepted::None), [(100, 2), (101, 1), (102, 1), (103, 1), (104, 0)]);
    }

    #[test]
    fn a_looked_up_draft_is_not_cut() {
        assert_eq!(rounds(Draft::PromptLookup(10), 12, Accepted::All), [(100, 10), (111, 0)]);
        assert_eq!(rounds(Draft::PromptLookup(10), 3, Accepted::None), [(100, 10), (101, 10), (102, 0)]);
    }
}
