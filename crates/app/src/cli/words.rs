//! Command lines as other tools spell them, rewritten into ours before they are parsed.
//!
//! `vramcast MODEL` is the overview; `--model M --mode training` is `train M`; `--flashattn true` is `--attention sdpa`. One
//! name is canonical, and this table has all others. What would change nothing is dropped; what cannot be done is refused.

use super::Failure;

/// Options of the program itself, and whether each takes a value.
const GLOBAL: [(&str, bool); 6] = [
    ("--json", false),
    ("--quiet", false),
    ("-q", false),
    ("--format", true),
    ("--color", true),
    ("--config-dir", true),
];

/// Other names of options, with as many values.
const RENAMED: [(&str, &str); 7] = [
    ("--seq-length", "--seq-len"),
    ("--sequence-length", "--seq-len"),
    ("--max-seq-len", "--seq-len"),
    ("--per-device-batch", "--batch-size"),
    ("--grad-accum", "--gradient-accumulation"),
    ("--gradient-accumulation-steps", "--gradient-accumulation"),
    ("--lora-r", "--lora-rank"),
];

/// Options that others give a truth value: what true and false stand for here.
const TRUTH: [(&str, &[&str], &[&str]); 12] = [
    ("--lora", &["--lora"], &[]),
    ("--qlora", &["--qlora"], &[]),
    ("--liger", &["--liger"], &[]),
    ("--flashattn", &["--attention=sdpa"], &["--attention=eager"]),
    ("--grad-checkpoint", &["--gradient-checkpointing=full"], &["--gradient-checkpointing=off"]),
    ("--gradient-checkpointing", &["--gradient-checkpointing=full"], &["--gradient-checkpointing=off"]),
    ("--fused-loss", &["--loss=liger"], &[]),
    ("--kv-cache", &[], &["--no-kv-cache"]),
    ("--no-kv-cache", &["--no-kv-cache"], &[]),
    ("--master-weights", &["--master-weights"], &[]),
    ("--cpu-offload-optimizer", &["--offload-optimizer=cpu"], &[]),
    // Parameters are counted from the config either way.
    ("--load-full-model", &[], &[]),
];

/// Types that a training run may hold its weights in.
const TRAINABLE: [&str; 12] = [
    "fp32",
    "bf16",
    "fp16",
    "float32",
    "bfloat16",
    "float16",
    "bf16-mixed",
    "fp16-mixed",
    "amp-bf16",
    "amp-fp16",
    "f32",
    "f16",
];

/// Rewrites the words after the program's name. `commands` are the names of the commands; `knows` says whether a command
/// has an option.
pub(super) fn rewrite(
    words: Vec<String>,
    commands: &[String],
    knows: impl Fn(&str, &str) -> bool,
) -> Result<Vec<String>, Failure> {
    let at = first_word(&words);
    let Some(first) = words.get(at) else { return Ok(words) };
    if ["-h", "--help", "-V", "--version"].contains(&first.as_str()) {
        return Ok(words);
    }
    let (before, rest) = words.split_at(at);
    let (command, rest) = if commands.contains(first) {
        (first.clone(), &rest[1..])
    } else {
        match mode(rest)? {
            Some(command) => (command.to_owned(), rest),
            None if is_a_slip(first) => return Ok(words),
            None => ("overview".to_owned(), rest),
        }
    };
    let rest = match command.as_str() {
        "train" | "infer" | "compare" => translate(&command, rest, &knows)?,
        _ => rest.to_vec(),
    };
    Ok(before.iter().cloned().chain([command]).chain(rest).collect())
}

/// The place of the first word that is no option of the program itself.
fn first_word(words: &[String]) -> usize {
    let mut at = 0;
    while let Some(word) = words.get(at) {
        match GLOBAL.iter().find(|(name, _)| word == name || word.starts_with(&format!("{name}="))) {
            Some((name, true)) if word == name => at += 2,
            Some(_) => at += 1,
            None => break,
        }
    }
    at.min(words.len())
}

/// A plain word that is neither a model nor a path is left to be refused as a command.
fn is_a_slip(word: &str) -> bool {
    word.chars().all(|c| c.is_ascii_lowercase() || c == '-')
        && !word.starts_with('-')
        && vramcast_core::source::catalogue::find(word).is_none()
        && !std::path::Path::new(word).exists()
}

fn mode(words: &[String]) -> Result<Option<&'static str>, Failure> {
    let value = words.iter().enumerate().find_map(|(at, word)| match word.strip_prefix("--mode") {
        Some("") => Some(words.get(at + 1).map_or("", String::as_str)),
        Some(rest) => rest.strip_prefix('='),
        None => None,
    });
    match value {
        None => Ok(None),
        Some("training" | "train") => Ok(Some("train")),
        Some("inference" | "infer") => Ok(Some("infer")),
        Some(other) => Err(Failure::bad_input(format!("--mode: {other} is neither training nor inference"))),
    }
}

/// Options with their values, in order.
struct Words<'a> {
    rest: std::iter::Peekable<std::slice::Iter<'a, String>>,
}

impl Words<'_> {
    /// The value of an option: behind its `=`, or the next word.
    fn value(&mut self, name: &str, inline: Option<String>) -> Result<String, Failure> {
        inline
            .or_else(|| self.rest.next().cloned())
            .ok_or_else(|| Failure::bad_input(format!("{name}: a value is missing")))
    }

    /// A truth value, if one follows.
    fn truth(&mut self, name: &str, inline: Option<String>) -> Result<bool, Failure> {
        let read = |text: &str| match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Some(true),
            "false" | "0" | "no" | "off" => Some(false),
            _ => None,
        };
        if let Some(text) = inline {
            return read(&text).ok_or_else(|| Failure::bad_input(format!("{name}: {text} is neither true nor false")));
        }
        let next = self.rest.peek().and_then(|word| read(word));
        if next.is_some() {
            self.rest.next();
        }
        Ok(next.unwrap_or(true))
    }
}

fn translate(command: &str, words: &[String], knows: &impl Fn(&str, &str) -> bool) -> Result<Vec<String>, Failure> {
    let named = words.iter().any(|word| word == "--model" || word.starts_with("--model="));
    let lens = words.iter().any(|word| word.starts_with("--method"));
    let mut out: Vec<String> = Vec::new();
    let (mut replicas, mut stage): (Option<String>, Option<String>) = (None, None);
    let mut queue = Words { rest: words.iter().peekable() };
    while let Some(word) = queue.rest.next() {
        let (name, inline) = match word.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
            _ => (word.as_str(), None),
        };
        if let Some((_, ours)) = RENAMED.iter().find(|(theirs, _)| *theirs == name) {
            out.push(format!("{ours}={}", queue.value(name, inline)?));
            continue;
        }
        let full = name == "--gradient-checkpointing" && inline.is_some();
        if let Some((_, yes, no)) = TRUTH.iter().find(|(theirs, _, _)| *theirs == name && !full) {
            let meant = if queue.truth(name, inline)? { *yes } else { *no };
            for option in meant {
                let known = option.split('=').next().unwrap_or(option).trim_start_matches('-').to_owned();
                if !knows(command, &known) {
                    return Err(unsupported(name, "it is not simulated yet"));
                }
                out.push((*option).to_owned());
            }
            continue;
        }
        match name {
            "--mode" => {
                let value = queue.value(name, inline)?;
                if mode(&[format!("--mode={value}")])? != Some(command) && command != "compare" {
                    return Err(Failure::bad_input(format!("--mode {value} does not go with `{command}`")));
                }
            }
            "--model" => out.push(queue.value(name, inline)?),
            "--dtype" | "--precision" if command != "infer" => {
                let value = queue.value(name, inline)?.to_ascii_lowercase();
                let plain = value.replace("bfloat", "bf").replace("float", "fp");
                let ours = if TRAINABLE.contains(&value.as_str()) { "--precision" } else { "--lens-dtype" };
                out.push(format!("{ours}={plain}"));
            }
            "--precision" => out.push(format!("--dtype={}", queue.value(name, inline)?)),
            "--dp" => replicas = Some(queue.value(name, inline)?),
            "--zero" => stage = Some(queue.value(name, inline)?),
            "--tp" | "--pp" => {
                let value = queue.value(name, inline)?;
                if value == "1" {
                    continue;
                }
                let ours = if lens { format!("--lens{}", &name[1..]) } else { name.to_owned() };
                if !knows(command, ours.trim_start_matches('-')) {
                    return Err(unsupported(
                        &format!("{name} {value}"),
                        "the lenses factors, engines and megatron know it",
                    ));
                }
                out.push(format!("{ours}={value}"));
            }
            "--probe" => {
                if queue.truth(name, inline)? {
                    return Err(unsupported("--probe", "vramcast needs no GPU; leave it out"));
                }
            }
            "--estimate-only" => drop(queue.truth(name, inline)?),
            "--warmup-steps" | "--probe-steps" => drop(queue.value(name, inline)?),
            "--lora-target-modules" => {
                let mut targets = vec![queue.value(name, inline)?];
                // Further words are targets where the model is known already.
                let has_model = named || out.iter().any(|word| !word.starts_with('-'));
                while has_model && queue.rest.peek().is_some_and(|word| !word.starts_with('-')) {
                    targets.extend(queue.rest.next().cloned());
                }
                out.push(format!("--lora-target-modules={}", targets.join(",")));
            }
            _ => out.push(word.clone()),
        }
    }
    spread(&mut out, replicas, stage);
    Ok(out)
}

/// `--dp` and `--zero` as cards and an engine.
fn spread(out: &mut Vec<String>, replicas: Option<String>, stage: Option<String>) {
    let has = |name: &str| out.iter().any(|word| word == name || word.starts_with(&format!("{name}=")));
    let (counted, engine) = (has("--gpus"), has("--engine"));
    let count = replicas.as_deref().unwrap_or("1");
    match stage.as_deref() {
        Some(stage) if counted => out.push(format!("--zero={stage}")),
        Some(stage) if stage != "0" => out.extend([format!("--gpus={count}"), format!("--zero={stage}")]),
        _ if count == "1" => {}
        _ => {
            out.push(format!("--gpus={count}"));
            if !engine {
                out.push("--engine=ddp".into());
            }
        }
    }
}

fn unsupported(what: &str, hint: &str) -> Failure {
    Failure::bad_input(format!("{what} is not supported")).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> Result<String, String> {
        let words = line.split_whitespace().map(str::to_owned).collect();
        let commands = ["train", "infer", "list", "overview", "compare"].map(str::to_owned);
        let knows = |_: &str, option: &str| !["tp", "pp", "offload-optimizer"].contains(&option);
        rewrite(words, &commands, knows).map(|words| words.join(" ")).map_err(|failure| format!("{failure:?}"))
    }

    #[test]
    fn a_model_alone_is_the_overview() {
        assert_eq!(rewritten("gpt2 --dtype bf16").unwrap(), "overview gpt2 --dtype bf16");
        assert_eq!(rewritten("--json microsoft/phi-2").unwrap(), "--json overview microsoft/phi-2");
        assert_eq!(rewritten("--config-dir my --list-types").unwrap(), "--config-dir my overview --list-types");
        assert_eq!(rewritten("--format csv list gpus").unwrap(), "--format csv list gpus");
        assert_eq!(rewritten("--help").unwrap(), "--help");
        assert_eq!(rewritten("trian phi-2").unwrap(), "trian phi-2");
        assert_eq!(rewritten("").unwrap(), "");
    }

    #[test]
    fn modes_are_commands() {
        assert_eq!(
            rewritten("--model microsoft/phi-2 --mode training --precision bf16 --seq-length 2048").unwrap(),
            "train microsoft/phi-2 --precision=bf16 --seq-len=2048"
        );
        assert_eq!(
            rewritten("--model microsoft/phi-2 --mode inference --precision bf16 --no-kv-cache").unwrap(),
            "infer microsoft/phi-2 --dtype=bf16 --no-kv-cache"
        );
        assert!(rewritten("infer gpt2 --mode training").is_err() && rewritten("--mode magic").is_err());
    }

    #[test]
    fn truth_values_and_degrees() {
        assert_eq!(
            rewritten("train --model m/x --zero 2 --dp 8 --tp 1 --pp 1 --flashattn true --grad-checkpoint true")
                .unwrap(),
            "train m/x --attention=sdpa --gradient-checkpointing=full --gpus=8 --zero=2"
        );
        assert_eq!(rewritten("train m/x --lora true --qlora false").unwrap(), "train m/x --lora");
        assert_eq!(rewritten("train m/x --lora").unwrap(), "train m/x --lora");
        assert_eq!(rewritten("train --lora m/x").unwrap(), "train --lora m/x");
        assert_eq!(
            rewritten("train m/x --lora-target-modules q_proj k_proj --dp 4").unwrap(),
            "train m/x --lora-target-modules=q_proj,k_proj --gpus=4 --engine=ddp"
        );
        assert_eq!(rewritten("train m/x --dp 1 --zero 0").unwrap(), "train m/x");
        assert_eq!(
            rewritten("train m/x --dtype nf4 --method factors").unwrap(),
            "train m/x --lens-dtype=nf4 --method factors"
        );
        assert_eq!(rewritten("train m/x --method=factors --tp 4").unwrap(), "train m/x --method=factors --lens-tp=4");
        assert!(rewritten("train m/x --tp 4").unwrap_err().contains("--tp 4"));
        assert!(rewritten("train m/x --probe true").unwrap_err().contains("--probe"));
        assert!(rewritten("train m/x --cpu-offload-optimizer").unwrap_err().contains("cpu-offload"));
        assert_eq!(rewritten("train m/x --gpus 8 --engine fsdp2").unwrap(), "train m/x --gpus 8 --engine fsdp2");
        assert_eq!(
            rewritten("train m/x --gradient-checkpointing=every-2").unwrap(),
            "train m/x --gradient-checkpointing=every-2"
        );
    }
}
