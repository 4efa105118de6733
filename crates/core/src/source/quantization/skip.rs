//! The modules a quantisation leaves alone. Each library has its own dialect for naming them.

use regex_lite::{Regex, RegexBuilder};

use super::QuantizationError;
use super::keys::bad;

/// Most rules and longest rule we read; published lists have a few thousand plain names.
const MAX_RULES: usize = 100_000;
const MAX_RULE_BYTES: usize = 1000;
const MAX_PATTERNS: usize = 1000;
/// Largest compiled pattern, in bytes.
const MAX_PATTERN_BYTES: usize = 1 << 17;

/// One rule.
#[derive(Debug, Clone)]
enum Rule {
    /// The module of that name.
    Exact(String),
    /// That module, all below it, and all whose name ends so.
    Name(String),
    /// Modules whose name the pattern matches from its start.
    Pattern(Regex),
}

impl Rule {
    fn matches(&self, module: &str) -> bool {
        match self {
            Self::Exact(name) => module == name,
            Self::Name(name) => {
                let below = module
                    .strip_prefix(name.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.') || name.ends_with('.'));
                below || module.ends_with(name.as_str())
            }
            Self::Pattern(pattern) => pattern.is_match(module),
        }
    }
}

/// All rules of a config.
#[derive(Debug, Clone, Default)]
pub(super) struct Skip {
    rules: Vec<Rule>,
    patterns: usize,
    head: bool,
}

impl Skip {
    /// transformers' rule (`quantizers_utils.should_convert_module`): a name or regular expression that matches from
    /// the start up to a dot, or a suffix. Without a list, or where the library adds its own, the head is left alone.
    pub(super) fn transformers(names: Option<Vec<&str>>, always_head: bool) -> Result<Self, QuantizationError> {
        let head = always_head || names.is_none();
        let mut skip = Self { head, ..Self::default() };
        for name in names.unwrap_or_default() {
            if is_plain(name) {
                skip.push(name, Rule::Name(name.to_owned()))?;
            } else {
                let end = if name.ends_with('.') { "" } else { r"(?:\.|$)" };
                // A pattern that is no regular expression still counts as a suffix.
                match pattern(&format!("^(?:{name}){end}")) {
                    Some(pattern) => skip.push(name, Rule::Pattern(pattern))?,
                    None => skip.push(name, Rule::Name(name.to_owned()))?,
                }
            }
        }
        Ok(skip)
    }

    /// compressed-tensors' rule (`utils/match.py`): an exact name, or `re:` and a regular expression.
    pub(super) fn compressed_tensors(names: Vec<&str>) -> Result<Self, QuantizationError> {
        let mut skip = Self::default();
        for name in names {
            match name.strip_prefix("re:") {
                None => skip.push(name, Rule::Exact(name.to_owned()))?,
                Some(text) => {
                    let compiled = pattern(&format!("^(?:{text})"));
                    let compiled = compiled.ok_or_else(|| bad("ignore", format!("has the bad pattern `{name}`")))?;
                    skip.push(name, Rule::Pattern(compiled))?;
                }
            }
        }
        Ok(skip)
    }

    /// ModelOpt's rule: shell wildcards over the whole name; a name without any stands for all below it, too.
    pub(super) fn wildcards(names: Vec<&str>) -> Result<Self, QuantizationError> {
        let mut skip = Self::default();
        for name in names {
            if !name.contains(['*', '?']) {
                skip.push(name, Rule::Name(name.to_owned()))?;
                continue;
            }
            let escaped: String = name
                .chars()
                .map(|character| match character {
                    '*' => ".*".to_owned(),
                    '?' => ".".to_owned(),
                    other => regex_lite::escape(other.encode_utf8(&mut [0; 4])),
                })
                .collect();
            let compiled = pattern(&format!("^(?:{escaped})$"));
            let compiled = compiled.ok_or_else(|| bad("exclude_modules", format!("has the bad pattern `{name}`")))?;
            skip.push(name, Rule::Pattern(compiled))?;
        }
        Ok(skip)
    }

    fn push(&mut self, name: &str, rule: Rule) -> Result<(), QuantizationError> {
        if name.len() > MAX_RULE_BYTES {
            return Err(bad("ignore", format!("has a name of {} bytes", name.len())));
        }
        self.patterns += usize::from(matches!(rule, Rule::Pattern(_)));
        if self.rules.len() == MAX_RULES || self.patterns > MAX_PATTERNS {
            return Err(bad("ignore", "has too many names".to_owned()));
        }
        // An empty name would be the suffix of every module.
        if !name.is_empty() {
            self.rules.push(rule);
        }
        Ok(())
    }

    /// Also leaves the head alone.
    pub(super) fn and_head(mut self) -> Self {
        self.head = true;
        self
    }

    /// Whether the head is left alone whatever it is called.
    pub(super) fn leaves_head(&self) -> bool {
        self.head
    }

    /// Whether a module is left alone.
    pub(super) fn leaves(&self, module: &str) -> bool {
        self.rules.iter().any(|rule| rule.matches(module))
    }
}

/// A regular expression, if it is a small and valid one.
pub(super) fn pattern(text: &str) -> Option<Regex> {
    if text.len() > MAX_RULE_BYTES + 20 {
        return None;
    }
    RegexBuilder::new(text).size_limit(MAX_PATTERN_BYTES).build().ok()
}

/// Whether a name has nothing in it but what names have.
fn is_plain(name: &str) -> bool {
    name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transformers_names() {
        let skip =
            Skip::transformers(Some(vec!["lm_head", "model.layers.1", "model.layers.*.self_attn", "gate"]), false);
        let skip = skip.unwrap();
        assert!(skip.leaves("lm_head"));
        assert!(skip.leaves("model.layers.1.mlp.up_proj"));
        assert!(!skip.leaves("model.layers.11.mlp.up_proj"));
        assert!(skip.leaves("model.layers.11.self_attn.q_proj"));
        assert!(skip.leaves("model.layers.4.mlp.gate"), "a suffix");
        assert!(!skip.leaves("model.layers.4.mlp.gate_proj"));
        assert!(!skip.leaves_head());
        assert!(Skip::transformers(None, false).unwrap().leaves_head());
        assert!(Skip::transformers(Some(vec![]), true).unwrap().leaves_head());
    }

    #[test]
    fn compressed_tensors_names() {
        let skip = Skip::compressed_tensors(vec!["lm_head", "re:.*mlp.gate$"]).unwrap();
        assert!(skip.leaves("lm_head") && skip.leaves("model.layers.0.mlp.gate"));
        assert!(!skip.leaves("model.lm_head") && !skip.leaves("model.layers.0.mlp.gate_proj"));
        assert!(Skip::compressed_tensors(vec!["re:("]).is_err());
    }

    #[test]
    fn wildcards() {
        let skip = Skip::wildcards(vec!["lm_head", "model.layers.*.mlp.gate", "visual*"]).unwrap();
        assert!(skip.leaves("lm_head") && skip.leaves("model.layers.3.mlp.gate") && skip.leaves("visual.blocks.0"));
        assert!(!skip.leaves("model.layers.3.mlp.gate_proj"));
    }

    #[test]
    fn hostile_rules_are_refused_or_harmless() {
        assert!(!Skip::transformers(Some(vec![""]), false).unwrap().leaves("anything"));
        assert!(Skip::transformers(Some(vec!["("]), false).unwrap().leaves("a("), "a suffix, as in Python");
        assert!(Skip::compressed_tensors(vec!["re:((a{1000}){1000}){1000}"]).is_err());
        let long = "a".repeat(2000);
        assert!(Skip::transformers(Some(vec![&long]), false).is_err());
    }
}
