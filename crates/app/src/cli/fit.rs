//! `vramcast fit`: files and launch lines of other tools as they are. What is given decides between `train` and `infer`, whose
//! flags it takes; `words.rs` puts their names in its place.

use std::path::{Path, PathBuf};

use clap::Args;
use vramcast_core::ask::file::Content;
use vramcast_core::ask::line::{self, shell};
use vramcast_core::ask::{Task, spell};

use super::{Answer, Failure};
use crate::ask::files;

/// What somebody has.
#[derive(Debug, Args)]
#[command(
    override_usage = "vramcast fit FILE|- [FLAGS of train or infer]\n       vramcast fit [FLAGS] -- LINE…",
    after_help = "\
Examples:
  vramcast fit qlora.yml --gpu rtx-4090
  vramcast fit ds_config.json --model llama3-8b --gpus 8
  vramcast fit train.py
  vramcast fit -- accelerate launch --config_file fsdp.yaml train.py --model_name_or_path gpt2
  vramcast fit -- vllm serve Qwen/Qwen2.5-7B --max-model-len 8192
docs/formats.md lists every format and key."
)]
pub(super) struct Arguments {
    /// A file of axolotl, LLaMA-Factory, TRL, transformers' Trainer, accelerate, DeepSpeed, torchtune, torchtitan, LitGPT,
    /// ms-swift, Automodel, verl or vLLM, a script, a Python program or a notebook; or a line behind `--`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FILE|LINE")]
    given: Vec<String>,
}

/// Only what names neither a file nor a line comes here.
pub(super) fn run(_: &Arguments) -> Result<Answer, Failure> {
    Err(Failure::bad_input("fit needs a file, or a line behind --")
        .hint("vramcast fit qlora.yml, or vramcast fit -- torchrun …"))
}

/// Files and lines, on `train` and `infer`.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct FileArguments {
    /// A plan as JSON, TOML or YAML (`vramcast schema`), or a file of another tool, known by its keys (docs/formats.md);
    /// flags override it.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// A launch line as one text; `vramcast fit -- LINE` for short.
    #[arg(long, value_name = "LINE", conflicts_with = "plan")]
    line: Option<String>,
    /// Keys of the file that shall be left out.
    #[arg(long, value_name = "KEYS", value_delimiter = ',')]
    without: Vec<String>,
}

impl FileArguments {
    /// What the file or the line says.
    pub(super) fn content(&self) -> Result<Option<Content>, Failure> {
        match (&self.plan, &self.line) {
            (Some(path), _) => files::plan(path, &self.without).map(Some),
            (None, Some(line)) => {
                let lines = shell::lines(line);
                // What prepares the ground for a known line starts nothing itself; what is exported before it counts for it.
                let known = lines.iter().position(|words| line::is_known(words) && !exports(words)).unwrap_or(0);
                let mut words = Vec::new();
                for (at, line) in lines.into_iter().enumerate() {
                    let (exported, idle) = (exports(&line), at < known);
                    if exported || !idle {
                        words.extend(line);
                    }
                    if !exported && !idle {
                        break;
                    }
                }
                files::line(&words, &self.without).map(Some)
            }
            (None, None) if self.without.is_empty() => Ok(None),
            (None, None) => Err(Failure::bad_input("--without leaves keys of a file out, and there is none")),
        }
    }
}

fn exports(words: &[String]) -> bool {
    words.first().is_some_and(|word| word == "export")
}

/// A line in quotes, or a file, behind flags.
fn behind(words: &[String]) -> Option<usize> {
    let known = |words: &Vec<String>| line::is_known(words) || line::holds_engine(words);
    let at = words.iter().position(|word| word.trim().contains(' ') && shell::lines(word).iter().any(known));
    let valued = |at: usize| words.get(at.wrapping_sub(1)).is_some_and(|word| !word.starts_with('-'));
    at.or_else(|| words.len().checked_sub(1).filter(|last| valued(*last) && Path::new(&words[*last]).is_file()))
}

/// The words of `fit` as those of `train` or `infer`; `None` where nothing is given.
pub(super) fn rewrite(words: &[String]) -> Result<Option<Vec<String>>, Failure> {
    let mut arguments = FileArguments::default();
    let without = |words: &[String]| -> Vec<String> {
        let at = words.iter().position(|word| word == "--without" || word.starts_with("--without="));
        let text = at.and_then(|at| {
            words[at].strip_prefix("--without=").map(str::to_owned).or_else(|| words.get(at + 1).cloned())
        });
        text.map_or_else(Vec::new, |text| text.split(',').map(str::to_owned).collect())
    };
    let (given, rest) = match words.iter().position(|word| word == "--") {
        Some(at) => {
            // A line in quotes is one word.
            let line = match &words[at + 1..] {
                [whole] if whole.trim().contains(char::is_whitespace) => whole.trim().to_owned(),
                words => spell::line(words),
            };
            arguments.line = Some(line.clone());
            (["--line".to_owned(), line], words[..at].to_vec())
        }
        None if words.first().is_some_and(|word| word.starts_with("--"))
            && let Some(at) = behind(words) =>
        {
            let reordered = [&words[at..=at], &words[..at], &words[at + 1..]].concat();
            return rewrite(&reordered);
        }
        None => match words.split_first() {
            Some((line, rest)) if line.contains(char::is_whitespace) && !Path::new(line).exists() => {
                arguments.line = Some(line.clone());
                (["--line".to_owned(), line.clone()], rest.to_vec())
            }
            Some((file, rest)) if !file.starts_with('-') || file == "-" => {
                arguments.plan = Some(file.into());
                (["--plan".to_owned(), file.clone()], rest.to_vec())
            }
            _ => return Ok(None),
        },
    };
    arguments.without = without(&rest);
    let content = arguments.content().map_err(|failure| match &arguments.plan {
        Some(file) if file.extension().is_none() && !file.exists() => {
            failure.hint(format!("a launch line stands behind --: vramcast fit -- {} …", file.display()))
        }
        _ => failure,
    });
    let Some(content) = content? else { return Ok(None) };
    let command = if content.task == Some(Task::Infer) { "infer" } else { "train" };
    Ok(Some(std::iter::once(command.to_owned()).chain(given).chain(rest).collect()))
}
