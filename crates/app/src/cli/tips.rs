//! Tips on options that are not there: by what they mean, where clap goes by letters alone.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use vramcast_core::ask::{Kind, Runner, Scope, line, table};
use vramcast_core::plan::{Framework, TaskKind};

/// The same error with a better tip, where there is one.
pub(super) fn improved(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return error };
    let trains = !arguments.iter().any(|argument| argument == "infer");
    let tip = match option.strip_prefix("--") {
        Some(name) => tip(name, trains),
        None => detached(option, arguments, trains),
    };
    if let (ErrorKind::UnknownArgument, Some(tip)) = (error.kind(), tip) {
        error.remove(ContextKind::SuggestedArg);
        // It holds the option that clap would have suggested.
        error.remove(ContextKind::Usage);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    }
    error
}

/// A word behind an option that takes its values with a sign of equality: words that it knows are joined before they come here.
fn detached(word: &str, arguments: &[OsString], trains: bool) -> Option<String> {
    let at = arguments.iter().position(|argument| argument == word)?;
    let flag = arguments.get(at.checked_sub(1)?)?.to_str()?.strip_prefix("--")?;
    let scope = if trains { Scope::TRAIN } else { Scope::INFER };
    let row = table::of(scope).find(|row| row.is_called(flag) && !row.flag.is_empty())?;
    let words = match row.kind {
        Kind::Spelled(spelling) if !spelling.words.is_empty() => spelling.words,
        Kind::Spelled(_) => return None,
        Kind::Switch | Kind::Off => &["true", "false"],
        _ => return None,
    };
    Some(format!("'--{flag}' knows {}", words.join(", ")))
}

/// What people type, and what it is called here in `train` and in `infer`, if it is; a name alone is the option.
const MEANT: [(&[&str], &str, &str); 13] = [
    (&["bs", "batch", "micro-batch-size"], "batch-size", "batch-size"),
    (&["quant", "quantize", "quantisation"], "quantization", "quantization"),
    (&["4bit", "4-bit", "load-in-4bit", "int4"], "qlora", "quantization nf4"),
    (&["8bit", "8-bit", "load-in-8bit"], "lora --quantization int8", "quantization int8"),
    (&["vram", "memory", "gpu-memory", "max-memory"], "memory-limit", "gpu"),
    (&["fp16-mixed", "amp", "mixed-precision"], "precision bf16-mixed", "dtype"),
    (&["fsdp"], "engine fsdp2", ""),
    (&["zero1", "zero2", "zero3"], "zero", ""),
    (&["compile"], "torch-compile", ""),
    (&["offload"], "cpu-offload", ""),
    (&["context-parallel", "context-parallel-size"], "cp", ""),
    (&["flash-attn", "flash-attention", "fa2"], "attention flash2", ""),
    (&["galore"], "optimizer galore-adamw", ""),
];

/// What changes how a model learns, and no byte.
const NO_MEMORY: [&str; 8] =
    ["lr", "learning-rate", "epochs", "num-epochs", "num-train-epochs", "weight-decay", "warmup-steps", "seed"];

/// What was probably meant by `--name`.
fn tip(name: &str, trains: bool) -> Option<String> {
    let typed = name.replace('_', "-");
    if trains && NO_MEMORY.contains(&typed.as_str()) {
        return Some(format!("'--{name}' decides no memory: leave it out"));
    }
    if trains && ["bf16", "fp16"].contains(&name) {
        return Some(format!(
            "'--precision {name}' holds weights in it, '--precision {name}-mixed' computes in it as the Trainer's '--{name}'"
        ));
    }
    if !trains && ["users", "concurrent-users"].contains(&typed.as_str()) {
        return Some("an engine's answer says how many sequences run at once; '--solve batch' finds the most".into());
    }
    let meant = MEANT.iter().find(|(names, ..)| names.contains(&typed.as_str()));
    let ours = meant.map(|(_, train, infer)| if trains { train } else { infer }).filter(|ours| !ours.is_empty());
    if let Some(ours) = ours {
        return Some(format!("it is called '--{ours}'"));
    }
    let value = |flag: &str, word: &str| Some(format!("'{word}' is a value: '--{flag} {word}'"));
    if let Some(task) = TaskKind::called(name).filter(|_| trains) {
        return value("task", task.name());
    }
    if let Some(runner) = Runner::find(name).filter(|runner| runner.trains() == trains) {
        return value("engine", runner.name());
    }
    if trains && Framework::find(name).is_ok() {
        return value("framework", name);
    }
    let (here, there) = if trains { (Scope::TRAIN, Scope::INFER) } else { (Scope::INFER, Scope::TRAIN) };
    let holds = |kind: Kind| match kind {
        Kind::Choice(words) => words.iter().any(|(word, _)| *word == name),
        Kind::Listed(words) => words().iter().any(|word| word == name),
        Kind::Spelled(spelling) => spelling.words.contains(&name),
        _ => false,
    };
    if let Some(row) = table::of(here).find(|row| !row.flag.is_empty() && name.len() > 2 && holds(row.kind)) {
        return value(row.flag, name);
    }
    // Plan files know settings by other names.
    let key = name.replace('-', "_");
    let called = table::of(here)
        .filter(|row| !row.flag.is_empty() && row.flag != name && row.path.rsplit('.').next() == Some(&key));
    let called: Vec<String> = called.map(|row| format!("'--{}'", row.flag)).collect();
    if !called.is_empty() {
        return Some(format!("as an option it is called {}", called.join(" or ")));
    }
    if !trains && ["num-gpus", "n-gpus", "dp-shard", "dp-replicate"].contains(&name) {
        return Some("an engine is spread over cards by '--tp N', beside '--engine vllm' or another".into());
    }
    if !trains && line::own_flag(Runner::Vllm, &format!("--{name}")).is_some() {
        return Some(format!("'--{name}' is vLLM's: it is read beside '--engine vllm'"));
    }
    let (ours, other) = if trains { ("train", "infer") } else { ("infer", "train") };
    let elsewhere = table::of(there).any(|row| row.is_called(name)) && !table::of(here).any(|row| row.is_called(name));
    elsewhere.then(|| format!("'--{name}' is an option of 'vramcast {other}', not of 'vramcast {ours}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_meant() {
        let train = |name| tip(name, true).unwrap_or_default();
        let infer = |name| tip(name, false).unwrap_or_default();
        assert!(train("dpo").contains("'--task dpo'") && train("online_dpo").contains("'--task online-dpo'"));
        assert!(train("ddp").contains("'--engine ddp'") && infer("vllm").contains("'--engine vllm'"));
        assert!(train("adafactor").contains("'--optimizer adafactor'"), "{}", train("adafactor"));
        assert!(train("rank").contains("'--lora-rank'"), "{}", train("rank"));
        assert!(infer("num-gpus").contains("'--tp N'") && infer("port").contains("'--engine vllm'"));
        assert!(train("load_in_4bit").contains("'--qlora'") && infer("4bit").contains("'--quantization nf4'"));
        assert!(train("lr").contains("no memory") && train("bs").contains("'--batch-size'"));
        // What is promised is there.
        for (_, train, infer) in MEANT {
            for (line, scope) in [(train, Scope::TRAIN), (infer, Scope::INFER)] {
                for flag in line.split(" --").filter_map(|part| part.split(' ').next()).filter(|flag| !flag.is_empty())
                {
                    assert!(table::of(scope).any(|row| row.is_called(flag)), "{flag}");
                }
            }
        }
        assert!(train("unsloth").contains("'--framework unsloth'") && train("fsdp").contains("'--engine fsdp2'"));
        assert!(train("bf16").contains("'--precision bf16-mixed'") && infer("users").contains("'--solve batch'"));
        assert!(train("kv-cache-dtype").contains("'vramcast infer'"), "{}", train("kv-cache-dtype"));
        assert_eq!(tip("no-such-option", true), None);
    }
}
