//! Where a program was when memory ran out, by its traceback, and whether memory grew before.

use std::sync::LazyLock;

use regex_lite::Regex;
use serde::Serialize;

use super::torch::sizes;

/// Where a program was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Where {
    /// The part of a run.
    pub phase: &'static str,
    /// The innermost line of source that is named, `file:line function`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
    /// The step, where a bar of progress shows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
}

/// Words of a traceback and the part of a run they are in; what is named first wins.
const PHASES: [(&str, &[&str]); 9] = [
    (
        "evaluation",
        &["evaluation_loop", "prediction_step", "in evaluate", "compute_metrics", "validation_step", "nested_concat"],
    ),
    (
        "saving",
        &["save_checkpoint", "_save_checkpoint", "save_pretrained", "in save_model", "full_tensor", "get_state_dict"],
    ),
    (
        "optimizer",
        &[
            "optimizer.step",
            "in step_fn",
            "_init_group",
            "_multi_tensor_adam",
            "exp_avg",
            "in update_step",
            "initialize_optimizer_states",
        ],
    ),
    ("backward", &[".backward(", "in backward", "run_backward", "_engine_run_backward"]),
    ("loss", &["cross_entropy", "logits.float()", "fixed_cross_entropy", "logits_to_keep", "lm_head("]),
    ("generation", &["in generate", "_sample(", "in _prefill", "prefill"]),
    ("profiling", &["profile_run", "determine_num_available_blocks", "determine_available_memory", "capture_model"]),
    ("forward", &["in forward", "_call_impl", "training_step"]),
    (
        "loading",
        &[
            "from_pretrained",
            "load_state_dict",
            "_load_pretrained_model",
            "load_model",
            "in to\n",
            ".to(device",
            ".cuda(",
            "in _apply",
        ],
    ),
];

static FRAME: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r#"File "([^"]+)", line (\d+), in (\S+)"#).ok());
static BAR: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\| (\d+)/(\d+) \[").ok());

/// Where a traceback is; `None` without one.
pub(super) fn of(text: &str) -> Option<Where> {
    // From the end, and lines alone that may be one: a log is long.
    let last = text.lines().rev().filter(|line| line.contains("File \"")).find_map(|line| {
        let found = FRAME.as_ref()?.captures_iter(line).last()?;
        let file = found.get(1)?.as_str();
        let short = file.rsplit_once("site-packages/").map_or(file, |(_, rest)| rest);
        Some(format!("{short}:{} {}", found.get(2)?.as_str(), found.get(3)?.as_str()))
    });
    let traced = text.find("Traceback").map(|at| &text[at..])?;
    let phase =
        PHASES.iter().find(|(_, words)| words.iter().any(|word| traced.contains(word))).map(|(name, _)| *name)?;
    let bars = text.split(['\n', '\r']).filter(|line| line.contains("| "));
    let step = bars.filter_map(|line| BAR.as_ref()?.captures(line)?.get(1)?.as_str().parse().ok()).max();
    Some(Where { phase, line: last, step })
}

/// Whether memory that a log reports again and again only ever grew.
pub(super) fn growth(text: &str) -> Option<String> {
    let told = |line: &&str| {
        // Units end in it, or are bytes.
        if !line.contains('B') && !line.contains("bytes") {
            return false;
        }
        let plain = line.to_lowercase();
        ["step", "iter", "epoch", "batch"].iter().any(|word| plain.contains(word))
            && !plain.contains("tried to allocate")
    };
    let values: Vec<u64> = text.lines().filter(told).filter_map(|line| sizes(line).next()).collect();
    let (first, last) = (*values.first()?, *values.last()?);
    let grows = values.windows(2).all(|pair| pair[1] >= pair[0]) && values.len() >= 4;
    // Optimizer states come with the first step: the growth must go on behind it.
    let later = *values.get(values.len() / 2)?;
    (grows && last > later && last > first + first / 10).then(|| {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        format!(
            "the log reports {:.2} GiB at first and {:.2} GiB at last, and never less than before",
            gib(first),
            gib(last)
        )
    })
}
