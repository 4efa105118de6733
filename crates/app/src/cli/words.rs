//! Command lines as other tools spell them, rewritten into ours before they are parsed.
//!
//! `vramcast MODEL` is the overview; `--model M --mode training` is `train M`; `--lora true` is `--lora=true`. Other names of
//! settings stand in the table of settings.

use vramcast_core::ask::line::{self, Follow};
use vramcast_core::ask::{Kind, Runner, read, spell, table};

use super::Failure;

/// Options of the program itself, and whether each takes a value.
const GLOBAL: [(&str, bool); 7] = [
    ("--json", false),
    ("--quiet", false),
    ("-q", false),
    ("--format", true),
    ("--color", true),
    ("--config-dir", true),
    ("--work-limit", true),
];

/// Whether a word names types that a training run may hold its weights in.
fn is_trainable(word: &str) -> bool {
    let precision = table::called("precision", Runner::OneCard).map(|setting| setting.kind);
    matches!(precision, Some(Kind::Spelled(spelling)) if (spelling.read)(word).is_ok())
}

/// What the grammar knows: the names of the commands, and the flags of `infer`.
pub(super) struct Known {
    pub(super) commands: Vec<String>,
    pub(super) of_infer: Vec<String>,
}

/// Rewrites the words after the program's name.
pub(super) fn rewrite(words: Vec<String>, known: &Known) -> Result<Vec<String>, Failure> {
    let commands = &known.commands;
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
            None if is_option(first, "--model") => ("train".to_owned(), rest),
            None if is_a_slip(first) => return Ok(words),
            None => ("overview".to_owned(), rest),
        }
    };
    // What is given decides whose words they are.
    if command == "fit"
        && !rest.iter().take_while(|word| *word != "--").any(|word| word == "--help" || word == "-h")
        && let Some(words) = super::fit::rewrite(rest)?
    {
        return rewrite(before.iter().cloned().chain(words).collect(), known);
    }
    let (rest, probed) = match (command.as_str(), rest.first().map(String::as_str)) {
        ("infer", _) => translate(&command, &without_own(rest, known))?,
        ("train" | "compare", _) => translate(&command, rest)?,
        ("probe", Some(what @ ("train" | "infer"))) => {
            // It is a probe already: its steps are options of the command.
            let (mut rest, _) = translate(what, &[&["--probe=true".to_owned()], &rest[1..]].concat())?;
            rest.insert(0, what.to_owned());
            (rest, false)
        }
        _ => (rest.to_vec(), false),
    };
    let probe = probed.then(|| "probe".to_owned());
    Ok(before.iter().cloned().chain(probe).chain([command]).chain(rest).collect())
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

fn is_option(word: &str, name: &str) -> bool {
    word.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
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

    /// The value of a flag that can do without one, if the next word is such a value and no model.
    fn optional(&mut self, command: &str, name: &str) -> Option<String> {
        let runner = if command == "infer" { Runner::Transformers } else { Runner::OneCard };
        let row = table::called(name.strip_prefix("--")?, runner)?;
        let words: &[&str] = match row.kind {
            Kind::Spelled(spelling) if spelling.bare.is_some() => spelling.words,
            Kind::Switch | Kind::Off => &[],
            _ => return None,
        };
        let next = self.rest.peek()?;
        let begins = |word: &&str| next == word || word.strip_suffix('N').is_some_and(|start| next.starts_with(start));
        let meant = words.iter().any(begins) || read::truth(next).is_some_and(|_| next.len() > 1);
        meant.then(|| self.rest.next().cloned()).flatten()
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

/// The words of `infer` with those of the engine's own program gathered behind one flag: they are read as in a line of it.
fn without_own(words: &[String], known: &Known) -> Vec<String> {
    let engine = words.iter().enumerate().rev().find_map(|(at, word)| match word.split_once('=') {
        Some(("--engine", name)) => Some(name),
        None if word == "--engine" => words.get(at + 1).map(String::as_str),
        _ => None,
    });
    let Some(runner) = engine.and_then(Runner::find).filter(|runner| runner.serves()) else { return words.to_vec() };
    // Several values may follow where the model is not among them.
    let named =
        words.iter().any(|word| is_option(word, "--model")) || words.first().is_some_and(|word| !word.starts_with('-'));
    let (mut ours, mut own) = (Vec::new(), Vec::new());
    let mut rest = words.iter().peekable();
    while let Some(word) = rest.next() {
        let name = word.trim_start_matches('-').split(['=', '.']).next().unwrap_or_default();
        let is_row = table::called(&name.replace('-', "_"), runner).is_some_and(|row| row.scope.has(runner));
        let taken = name == "model" || known.of_infer.iter().any(|flag| flag == name) && !is_row;
        let letter = !word.starts_with("--") && name.len() < 2 && name != "O";
        let Some(follow) = line::own_flag(runner, word).filter(|_| !taken && !letter) else {
            ours.push(word.clone());
            continue;
        };
        own.push(word.clone());
        let is_value = |next: &&String| !next.starts_with("--");
        if word.contains('=') || follow == Follow::None {
            continue;
        }
        own.extend(rest.next_if(is_value).cloned());
        if follow == Follow::Several && named {
            own.extend(std::iter::from_fn(|| rest.next_if(|next| !next.starts_with('-')).cloned()));
        }
    }
    if !own.is_empty() {
        ours.push(format!("--own-words={}", spell::line(&own)));
    }
    ours
}

/// The words of a command in ours, and whether they ask for a real run.
fn translate(command: &str, words: &[String]) -> Result<(Vec<String>, bool), Failure> {
    let named = words.iter().any(|word| is_option(word, "--model"));
    let mut out: Vec<String> = Vec::new();
    let mut real = Real::default();
    let mut queue = Words { rest: words.iter().peekable() };
    while let Some(word) = queue.rest.next() {
        let (name, inline) = match word.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
            _ => (word.as_str(), None),
        };
        if let Some(value) = inline.is_none().then(|| queue.optional(command, name)).flatten() {
            out.push(format!("{name}={value}"));
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
            // As llama.cpp's programs have it.
            "-m" if command == "infer" => out.push(queue.value(name, inline)?),
            "--dtype" | "--precision" if command != "infer" => {
                let value = queue.value(name, inline)?.to_ascii_lowercase();
                let plain = value.replace("bfloat", "bf").replace("float", "fp");
                let ours = if is_trainable(&value) { "--precision" } else { "--lens-dtype" };
                out.push(format!("{ours}={plain}"));
            }
            "--precision" => out.push(format!("--dtype={}", queue.value(name, inline)?)),
            "--probe" => real.probe = queue.truth(name, inline)?,
            "--estimate-only" => real.estimate_only = queue.truth(name, inline)?,
            "--warmup-steps" | "--probe-steps" => {
                let steps = format!("{name}={}", queue.value(name, inline)?);
                real.steps.push(steps);
            }
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
    // ZeRO 0 shards nothing: without cards or an engine it is a plain run.
    let says = |name: &str| out.iter().any(|word| is_option(word, name));
    if !says("--gpus") && !says("--engine") {
        drop_zero(&mut out);
    }
    let probed = real.probe && !real.estimate_only;
    if probed {
        out.extend(real.steps);
    }
    Ok((out, probed))
}

/// Whether it is to be run for real.
#[derive(Default)]
struct Real {
    probe: bool,
    estimate_only: bool,
    steps: Vec<String>,
}

/// Takes `--zero 0` out of a line.
fn drop_zero(out: &mut Vec<String>) {
    if let Some(at) = out.iter().position(|word| word == "--zero=0") {
        out.remove(at);
    } else if let Some(at) = out.windows(2).position(|pair| pair[0] == "--zero" && pair[1] == "0") {
        out.drain(at..at + 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> Result<String, String> {
        let words = line.split_whitespace().map(str::to_owned).collect();
        let commands = ["train", "infer", "list", "overview", "compare", "probe"].map(str::to_owned).to_vec();
        rewrite(words, &Known { commands, of_infer: vec!["gpu".into(), "revision".into()] })
            .map(|words| words.join(" "))
            .map_err(|failure| format!("{failure:?}"))
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
            "train microsoft/phi-2 --precision=bf16 --seq-length 2048"
        );
        assert_eq!(
            rewritten("--model microsoft/phi-2 --mode inference --precision bf16 --no-kv-cache").unwrap(),
            "infer microsoft/phi-2 --dtype=bf16 --no-kv-cache"
        );
        assert_eq!(rewritten("infer -m x.gguf -c 0").unwrap(), "infer x.gguf -c 0");
        assert_eq!(rewritten("--model m/x --dtype bf16 --dp 2").unwrap(), "train m/x --precision=bf16 --dp 2");
        assert_eq!(rewritten("train m/x --precision bf16-autocast").unwrap(), "train m/x --precision=bf16-autocast");
        assert!(rewritten("infer gpt2 --mode training").is_err() && rewritten("--mode magic").is_err());
    }

    #[test]
    fn truth_values() {
        assert_eq!(rewritten("train m/x --lora true --qlora false").unwrap(), "train m/x --lora=true --qlora=false");
        assert_eq!(rewritten("train m/x --lora").unwrap(), "train m/x --lora");
        assert_eq!(rewritten("train --lora m/x").unwrap(), "train --lora m/x");
        assert_eq!(
            rewritten("train m/x --dtype nf4 --method factors").unwrap(),
            "train m/x --lens-dtype=nf4 --method factors"
        );
        assert_eq!(
            rewritten("train --gpus 2 --offload-param nvme m/x").unwrap(),
            "train --gpus 2 --offload-param=nvme m/x"
        );
        assert_eq!(
            rewritten("train --gradient-checkpointing every-2 m/x").unwrap(),
            "train --gradient-checkpointing=every-2 m/x"
        );
        assert_eq!(
            rewritten("train m/x --flashattn true --grad-checkpoint true").unwrap(),
            "train m/x --flashattn=true --grad-checkpoint=true"
        );
    }

    #[test]
    fn degrees() {
        assert_eq!(
            rewritten("train m/x --lora-target-modules q_proj k_proj --dp 4").unwrap(),
            "train m/x --lora-target-modules=q_proj,k_proj --dp 4"
        );
        assert_eq!(rewritten("train m/x --dp 1 --zero 0").unwrap(), "train m/x --dp 1");
        assert_eq!(rewritten("train m/x --gpus 2 --zero 0").unwrap(), "train m/x --gpus 2 --zero 0");
        assert_eq!(
            rewritten("train m/x --zero 3 --dp 4 --cpu-offload-optimizer").unwrap(),
            "train m/x --zero 3 --dp 4 --cpu-offload-optimizer"
        );
    }

    #[test]
    fn words_of_an_engine_are_gathered() {
        assert_eq!(
            rewritten(
                "infer m/x --engine vllm --port 80 --max-model-len 9 --revision r -O3 --served-model-name a b --gpu c"
            )
            .unwrap(),
            "infer m/x --engine vllm --max-model-len 9 --revision r --gpu c --own-words=--port 80 -O3 --served-model-name a b"
        );
        assert_eq!(
            rewritten("infer --engine=vllm --served-model-name a m/x --enable-auto-tool-choice").unwrap(),
            "infer --engine=vllm m/x --own-words=--served-model-name a --enable-auto-tool-choice"
        );
        assert_eq!(rewritten("infer m/x --port 80").unwrap(), "infer m/x --port 80");
        // What is a setting of the engine stays one.
        assert_eq!(
            rewritten("infer m/x --engine llama.cpp --no-mmap --threads 8").unwrap(),
            "infer m/x --engine llama.cpp --no-mmap --own-words=--threads 8"
        );
        assert_eq!(rewritten("infer m/x --engine vllm --no-such 1").unwrap(), "infer m/x --engine vllm --no-such 1");
    }

    #[test]
    fn a_probe_is_a_command() {
        assert_eq!(
            rewritten("train --model m/x --probe true --warmup-steps 3 --dtype bf16").unwrap(),
            "probe train m/x --precision=bf16 --warmup-steps=3"
        );
        assert_eq!(rewritten("train m/x --probe true --estimate-only true --probe-steps 6").unwrap(), "train m/x");
        assert_eq!(rewritten("probe train --model m/x --dp 1").unwrap(), "probe train m/x --dp 1");
    }
}
