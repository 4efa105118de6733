//! Reads every configuration under some folders and counts: read whole, read with keys that are not simulated, refused.
//! Of documents (`*.md`) the launch lines in fenced blocks count, with the files that the document itself shows.
//!
//! `cargo run --profile test -p vramcast-core --example corpus -- [--all] [--settled] FOLDER…`; the first part of a path below a folder is the tool.
//! A model that is not in the catalogue is stood in for by another one: the file is judged, not the model. Each plan is simulated, and what
//! that refuses is refused, unless `--settled` asks for plans alone.

#![allow(clippy::disallowed_methods, reason = "the core does no I/O; its examples do")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use vramcast_core::ask::file::Content;
use vramcast_core::ask::{Asked, Surroundings, Task, Wanted, answer, line, program, resolve};
use vramcast_core::model::Model;
use vramcast_core::plan::import::Beside;
use vramcast_core::plan::{Fault, Gpus};
use vramcast_core::source::{catalogue, python};

/// Whether plans are settled alone, which takes a minute where their simulation takes an hour.
static SETTLED: AtomicBool = AtomicBool::new(false);

/// Why something is no whole example of training or serving one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    /// Several roles, a teacher, a merge, generation.
    AnotherTask,
    /// Nothing that starts a run by anything that is read.
    NoConfiguration,
    /// A script of its own with a loop of its own, of which nothing says what it is.
    OwnScript,
    /// Its model or its sizes are the caller's.
    LeftToTheCaller,
    /// A file that the repository does not have.
    MissingFile,
}

const WHYS: [(Why, &str); 5] = [
    (Why::AnotherTask, "another task"),
    (Why::NoConfiguration, "no configuration"),
    (Why::OwnScript, "own script"),
    (Why::LeftToTheCaller, "left to the caller"),
    (Why::MissingFile, "missing file"),
];

/// Words of refusals that say so.
const OUTSIDE: [(Why, &str); 26] = [
    (Why::MissingFile, "there is no such file beside it or above"),
    (Why::LeftToTheCaller, "an argument that its line has to give"),
    (Why::LeftToTheCaller, "the script's text does not tell it"),
    (Why::NoConfiguration, "is a placeholder"),
    (Why::LeftToTheCaller, "no group: advantages compare at least two completions"),
    (Why::OwnScript, "none of its arguments is one of a Trainer"),
    (Why::NoConfiguration, "are read where they train"),
    (Why::NoConfiguration, "help "),
    (Why::NoConfiguration, "not a plan"),
    (Why::NoConfiguration, "its kind is not known"),
    (Why::NoConfiguration, "holds an object"),
    (Why::NoConfiguration, "is no configuration"),
    (Why::AnotherTask, "roles on shared cards"),
    (Why::AnotherTask, "engine_kwargs"),
    (Why::AnotherTask, "supervised fine-tuning"),
    (Why::AnotherTask, "another task"),
    (Why::AnotherTask, "distillation"),
    (Why::AnotherTask, "generation or evaluation"),
    (Why::AnotherTask, "a merge"),
    (Why::AnotherTask, "only sft and pt"),
    (Why::AnotherTask, "reference model"),
    (Why::AnotherTask, "a teacher"),
    (Why::AnotherTask, "no cards of this kind"),
    (Why::AnotherTask, "only runs on"),
    (Why::AnotherTask, "do_train: off"),
    (Why::AnotherTask, "KTransformers"),
];

/// What became of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Whole,
    Partly(Vec<String>),
    Refused(String),
    Outside(Why, String),
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut takes = |flag: &str| {
        let is = arguments.first().is_some_and(|word| word == flag);
        is.then(|| arguments.remove(0)).is_some()
    };
    let all = takes("--all");
    SETTLED.store(takes("--settled"), Ordering::Relaxed);
    let mut rows: BTreeMap<String, Vec<(PathBuf, Outcome, bool)>> = BTreeMap::new();
    for folder in &arguments {
        let folder = Path::new(folder);
        let mut files = Vec::new();
        walk(folder, &mut files);
        files.sort();
        for file in files {
            let tool = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            if file.extension().is_some_and(|extension| extension == "sh") {
                let lines = scripts(&file).into_iter().map(|(outcome, known)| (file.clone(), outcome, known));
                rows.entry(format!("{tool} (lines of scripts)")).or_default().extend(lines);
                continue;
            }
            if matches!(file.extension().and_then(|e| e.to_str()), Some("md" | "mdx")) {
                let lines = documents(&file).into_iter().map(|(outcome, known)| (file.clone(), outcome, known));
                rows.entry(format!("{tool} (lines of documents)")).or_default().extend(lines);
                continue;
            }
            if matches!(file.extension().and_then(|e| e.to_str()), Some("py" | "ipynb")) {
                let programs = programs(&file).into_iter().map(|(outcome, known)| (file.clone(), outcome, known));
                rows.entry(format!("{tool} (Python)")).or_default().extend(programs);
                continue;
            }
            let (outcome, known) = judge(&file);
            rows.entry(tool).or_default().push((file, outcome, known));
        }
    }
    println!("| tool | files | whole | with keys not simulated | refused | of other tasks | read | stand-in models |");
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    for (tool, files) in &rows {
        let count = |is: fn(&Outcome) -> bool| files.iter().filter(|(_, outcome, _)| is(outcome)).count();
        let whole = count(|outcome| *outcome == Outcome::Whole);
        let partly = count(|outcome| matches!(outcome, Outcome::Partly(_)));
        let refused = count(|outcome| matches!(outcome, Outcome::Refused(_)));
        let outside = count(|outcome| matches!(outcome, Outcome::Outside(..)));
        let stood =
            files.iter().filter(|(_, outcome, known)| !known && !matches!(outcome, Outcome::Outside(..))).count();
        let share = 100.0 * (whole + partly) as f64 / (whole + partly + refused).max(1) as f64;
        println!("| {tool} | {} | {whole} | {partly} | {refused} | {outside} | {share:.0} % | {stood} |", files.len());
    }
    println!(
        "\n| tool | {} | read, if own scripts and what is left to the caller counted as refused |",
        WHYS.map(|(_, name)| name).join(" | ")
    );
    println!("|---|{}--:|", "--:|".repeat(WHYS.len()));
    for (tool, files) in &rows {
        let of = |why: Why| {
            files
                .iter()
                .filter(|(_, outcome, _)| matches!(outcome, Outcome::Outside(group, _) if *group == why))
                .count()
        };
        let counts: Vec<String> = WHYS.iter().map(|(why, _)| of(*why).to_string()).collect();
        let read =
            files.iter().filter(|(_, outcome, _)| matches!(outcome, Outcome::Whole | Outcome::Partly(_))).count();
        let refused = files.iter().filter(|(_, outcome, _)| matches!(outcome, Outcome::Refused(_))).count();
        let all = read + refused + of(Why::OwnScript) + of(Why::LeftToTheCaller);
        println!("| {tool} | {} | {:.0} % |", counts.join(" | "), 100.0 * read as f64 / all.max(1) as f64);
    }
    for (tool, files) in &rows {
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        for (file, outcome, _) in files {
            let (mark, why) = match outcome {
                Outcome::Whole => ("whole", String::new()),
                Outcome::Partly(what) => ("partly", what.join("; ")),
                Outcome::Refused(why) => ("refused", why.clone()),
                Outcome::Outside(_, why) => ("outside", why.clone()),
            };
            if all {
                println!("{mark}\t{}\t{}", file.display(), why.replace('\n', " | "));
            } else if mark == "refused" || mark == "outside" {
                *reasons.entry(format!("{mark}: {}", why.lines().next().unwrap_or_default())).or_default() += 1;
            }
        }
        let mut reasons: Vec<_> = reasons.into_iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        reasons.iter().for_each(|(why, count)| println!("{tool}: {count} x {why}"));
    }
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            walk(&path, files);
        } else if matches!(
            path.extension().and_then(|e| e.to_str()),
            Some("yaml" | "yml" | "json" | "toml" | "sh" | "py" | "ipynb" | "md" | "mdx")
        ) {
            files.push(path);
        }
    }
}

fn parse(path: &Path) -> Result<Value, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    if path.extension().is_some_and(|extension| extension == "py" || extension == "sh") {
        return Ok(Value::String(text));
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml::from_str(&text).map_err(|error| error.to_string()),
        Some("json") => serde_json::from_str(&text).map_err(|error| error.to_string()),
        _ => serde_saphyr::from_str(&text).map_err(|error| error.to_string()),
    }
}

/// What a file refers to stands beside it, or beside a folder above.
fn open(from: &Path, name: &str) -> Result<Value, String> {
    // Where the example was meant to stand, the folders at the beginning of a path are others.
    let whole: Vec<&str> = name.split('/').filter(|part| !part.is_empty()).collect();
    let ends = |folder: &Path| (0..whole.len()).map(|at| folder.join(whole[at..].join("/"))).collect::<Vec<_>>();
    let names = |folder: &Path| if name.starts_with('/') { ends(folder) } else { vec![folder.join(name)] };
    let found = from.ancestors().skip(1).flat_map(names).find(|path| path.is_file());
    parse(&found.ok_or("there is no such file beside it or above")?)
}

/// What becomes of a file, and whether its model is known.
fn judge(path: &Path) -> (Outcome, bool) {
    let value = match parse(path) {
        Ok(value) => value,
        Err(why) => return (refused(format!("{} is no configuration: {why}", path.display())), false),
    };
    let follow = |name: &str| open(path, name);
    let name = path.display().to_string();
    let beside = Beside { name: &name, open: &follow, ..Beside::default() };
    match Content::read_beside(value, &beside) {
        Ok(content) => settle(content),
        Err(faults) => (refused(said(&faults)), false),
    }
}

/// What becomes of a program, or of each configuration in it; nothing where it calls nothing that is read.
fn programs(path: &Path) -> Vec<(Outcome, bool)> {
    let Ok(text) = std::fs::read_to_string(path) else { return Vec::new() };
    let code = match path.extension().is_some_and(|extension| extension == "py") {
        true => Some(text),
        false => serde_json::from_str(&text).ok().and_then(|value| python::notebook(&value)),
    };
    let Some(code) = code else { return Vec::new() };
    let (follow, name) = (|name: &str| open(path, name), path.display().to_string());
    let beside = Beside { name: &name, open: &follow, ..Beside::default() };
    let names = program::configurations(&code);
    let wanted: Vec<Option<&str>> =
        if names.is_empty() { vec![None] } else { names.iter().map(|name| Some(name.as_str())).collect() };
    let judged =
        wanted.into_iter().map(|wanted| match program::read(&code, &serde_json::Map::new(), wanted, &beside) {
            Ok(content) => settle(content),
            Err(faults) => (refused(said(&faults)), false),
        });
    // A program that names nothing that is read is no configuration, however large it is.
    let nothing = |why: &str| {
        why.contains("none of its calls") || why.contains("larger than what is followed") && !program::is_known(&code)
    };
    judged.filter(|(outcome, _)| !matches!(outcome, Outcome::Refused(why) if nothing(why))).collect()
}

fn said(faults: &[Fault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn refused(why: String) -> Outcome {
    match OUTSIDE.iter().find(|(_, word)| why.contains(word)) {
        Some((group, _)) => Outcome::Outside(*group, why),
        None => Outcome::Refused(why),
    }
}

/// Every line of a script that starts a run.
fn scripts(path: &Path) -> Vec<(Outcome, bool)> {
    lines(&std::fs::read_to_string(path).unwrap_or_default(), &|name| open(path, name))
}

/// Every line in a document's blocks that starts a run. A block that begins with a comment that is a file's name is that file.
fn documents(path: &Path) -> Vec<(Outcome, bool)> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let blocks = blocks(&text);
    let shown = |name: &str| {
        let is =
            |text: &&str| text.lines().next().is_some_and(|line| line.trim_start_matches(['#', ' ']).trim() == name);
        let block = blocks.iter().map(|(_, text)| text.as_str()).find(is)?;
        if name.ends_with(".py") || name.ends_with(".sh") {
            return Some(Value::String(block.to_owned()));
        }
        serde_saphyr::from_str::<Value>(block).ok()
    };
    let follow = |name: &str| open(path, name).or_else(|problem| shown(name).ok_or(problem));
    let shells = blocks.iter().filter(|(kind, _)| ["", "bash", "sh", "shell", "console"].contains(&kind.as_str()));
    shells.flat_map(|(_, text)| lines(text, &follow)).collect()
}

/// Fenced blocks: what they are said to be, and their text without its margin and prompts.
fn blocks(text: &str) -> Vec<(String, String)> {
    let (mut blocks, mut inside): (Vec<(String, String)>, Option<usize>) = (Vec::new(), None);
    for line in text.lines() {
        let bare = line.trim_start();
        match (bare.strip_prefix("```"), inside) {
            (Some(kind), None) => {
                inside = Some(line.len() - bare.len());
                let kind: String = kind.chars().take_while(|letter| letter.is_ascii_alphanumeric()).collect();
                blocks.push((kind, String::new()));
            }
            (Some(_), Some(_)) => inside = None,
            (None, Some(margin)) => {
                let line =
                    line.get(margin..).filter(|_| line.trim_start().len() + margin <= line.len()).unwrap_or(bare);
                let (_, block) = blocks.last_mut().expect("one was begun");
                *block += line.strip_prefix("$ ").unwrap_or(line);
                block.push('\n');
            }
            (None, None) => {}
        }
    }
    blocks
}

fn lines(text: &str, follow: &dyn Fn(&str) -> Result<Value, String>) -> Vec<(Outcome, bool)> {
    let line::shell::Script { lines, files, .. } = line::shell::script(text, &[]);
    // Files that the script writes itself.
    let follow = &|name: &str| match files.get(name) {
        Some(text) => serde_saphyr::from_str(text).map_err(|error| error.to_string()),
        None => follow(name),
    };
    let known = lines.iter().filter(|words| words[0] != "export" && line::is_known(words));
    let judged = |words: &Vec<String>| match line::read(words, follow, &[]) {
        Ok(content) => settle(content),
        Err(faults) => match refused(said(&faults)) {
            // Documents start scripts that nobody has.
            Outcome::Outside(Why::OwnScript, why) if follow(script(words)).is_err() => {
                (Outcome::Outside(Why::MissingFile, why), false)
            }
            outcome => (outcome, false),
        },
    };
    known.map(judged).collect()
}

/// The script that a line starts.
fn script(words: &[String]) -> &str {
    words.iter().find(|word| word.ends_with(".py")).map_or("", String::as_str)
}

/// What becomes of a content on its model, or on another one.
fn settle(mut content: Content) -> (Outcome, bool) {
    let named = content.model.take();
    let entry =
        named.as_deref().and_then(|name| catalogue::find(name).or_else(|| catalogue::find(catalogue::kin(name)?)));
    let known = entry.is_some() || named.is_none();
    let entry = entry.or_else(|| catalogue::find("meta-llama/Meta-Llama-3-8B")).expect("the stand-in is built in");
    let mut config = content.config.take().filter(|_| named.is_none()).unwrap_or(entry.config);
    if !known {
        config["max_position_embeddings"] = serde_json::json!(1 << 24);
    }
    let model = Model::new(config, entry.auto_class.as_deref()).expect("it is a model");
    let task = content.task.unwrap_or(Task::Train);
    let mut asked = Asked { task, ..Asked::default() };
    let deepspeed = content.deepspeed.take();
    // Names of modules are the named model's own.
    if !known {
        for place in ["adapter.targets", "adapter.modules_to_save", "adapter.target_parameters"] {
            vramcast_core::ask::tree::take(&mut content.tree, place);
        }
        content.tree.as_object_mut().map(|tree| tree.remove("frozen"));
        // So are its experts and positions.
        for place in ["parallel.mesh.ep", "parallel.mesh.etp", "parallel.engine.megatron.moe", "quantization.experts"] {
            vramcast_core::ask::tree::take(&mut content.tree, place);
        }
        content.named.retain(|(name, _)| !name.contains("expert"));
    }
    asked.beneath(content);
    if let Some(document) = deepspeed
        && let Err(faults) = asked.deepspeed(&document, Some(model.config()))
    {
        return (refused(said(&faults)), known);
    }
    asked.on_cards();
    let cards = Gpus::embedded;
    let around = Surroundings { name: "m", cards: &cards, card: None, allocator: None, stored: None, lenient: false };
    // Read is what is answered: simulations refuse too.
    let notes = asked.request().and_then(|request| match SETTLED.load(Ordering::Relaxed) {
        true => resolve(&model, &request, &around).map(|settled| settled.notes),
        false => answer(&model, &request, &around, Wanted::default()).map(|answer| answer.report.notes),
    });
    let outcome = match notes {
        Err(faults) => refused(said(&faults)),
        Ok(notes) => {
            let mut said: Vec<String> =
                notes.iter().filter_map(|note| note.strip_prefix("not simulated: ")).map(str::to_owned).collect();
            said.sort();
            if said.is_empty() { Outcome::Whole } else { Outcome::Partly(said) }
        }
    };
    (outcome, known)
}
