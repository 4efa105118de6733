//! `vramcast learn`: a model's forward pass, traced once, as a model for every command.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use vramcast_core::model::{Inputs, Model};

use super::context::Context;
use super::{Answer, Failure};
use crate::disk;
use crate::exit::Exit;
use crate::learn::{LearnError, learn};

/// What to learn, and where to.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// FILE.py:NAME (a class or function without arguments that makes a module), a config.json of transformers,
    /// timm:NAME, or diffusers:CLASS with --config.
    #[arg(value_name = "WHAT")]
    what: String,
    /// The file to write: a MODEL for every command.
    #[arg(long, short, value_name = "FILE", required = true)]
    out: PathBuf,
    /// An input of the module: NAME=TYPE[SIZES], such as ids=int64[batch,seq] or x=float[batch,3,height,width].
    #[arg(long = "input", value_name = "INPUT")]
    inputs: Vec<String>,
    /// The loss where the module returns none: cross-entropy, mse or none.
    #[arg(long, value_name = "LOSS", default_value = "cross-entropy")]
    loss: String,
    /// The config of a diffusers model.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The class of transformers that loads the config.
    #[arg(long, value_name = "CLASS")]
    auto_class: Option<String>,
    /// The Python that has torch and what the model imports.
    #[arg(long, value_name = "PYTHON", default_value = "python3", env = "VRAMCAST_PYTHON")]
    python: PathBuf,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let as_json = context.text_or_json("learn")?;
    let job = job(arguments)?;
    let program = learn(&job, &arguments.python).map_err(|error| match &error {
        LearnError::Start { .. } => {
            Failure::bad_input(error.to_string()).hint("name the interpreter that has torch with --python")
        }
        _ => Failure::bad_input(format!("{}: it cannot be learned: {error}", arguments.what)),
    })?;
    let model = Model::new(program.clone(), None).map_err(|error| Failure::bad_input(error.to_string()))?;
    let inventory = model.program(Inputs::inventory()).map(|program| program.parameters);
    let total = inventory.map(|all| all.iter().map(|one| one.shape.elements()).sum::<u64>()).unwrap_or(0);
    let text = format!("{program}\n");
    disk::write(&arguments.out, text.as_bytes())
        .map_err(|error| Failure::bad_input(format!("--out {}: {error}", arguments.out.display())))?;
    let dimensions: Vec<&str> =
        program["dimensions"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if as_json {
        let document = json!({"schema": 1, "file": arguments.out, "name": program["name"], "parameters": total,
            "dimensions": dimensions, "learned_from": program["learned_from"], "bytes": text.len()});
        return Ok(Answer::document(document, Exit::Success));
    }
    let name = program["name"].as_str().unwrap_or_default();
    let out = arguments.out.display();
    Ok(Answer::success(format!(
        "{out}: {name}, {total} parameters, sizes by {}, {} KiB\n",
        if dimensions.is_empty() { "nothing".to_owned() } else { dimensions.join(" and ") },
        text.len().div_ceil(1024)
    )))
}

/// What Python is asked.
fn job(arguments: &Arguments) -> Result<Value, Failure> {
    let absolute = |path: &str| std::path::absolute(path).map_or_else(|_| path.to_owned(), |p| p.display().to_string());
    let loss = match arguments.loss.as_str() {
        "none" => Value::Null,
        known @ ("cross-entropy" | "mse") => json!(known),
        other => return Err(Failure::bad_input(format!("--loss: {other} is not cross-entropy, mse or none"))),
    };
    let inputs = arguments.inputs.iter().map(|text| input(text)).collect::<Result<Vec<_>, _>>()?;
    let mut job = json!({"loss": loss, "inputs": inputs});
    let what = arguments.what.as_str();
    let needs_inputs = if let Some(name) = what.strip_prefix("timm:") {
        job["timm"] = json!(name);
        false
    } else if let Some(class) = what.strip_prefix("diffusers:") {
        let config = arguments.config.as_ref();
        let config = config
            .ok_or_else(|| Failure::bad_input("diffusers: a config is missing").hint("add --config config.json"))?;
        job["diffusers"] = json!(class);
        job["config"] = json!(absolute(&config.display().to_string()));
        true
    } else if let Some((path, name)) = what.rsplit_once(".py:") {
        job["module"] = json!(format!("{}:{name}", absolute(&format!("{path}.py"))));
        true
    } else {
        let path = if std::path::Path::new(what).is_dir() { format!("{what}/config.json") } else { what.to_owned() };
        if !std::path::Path::new(&path).is_file() {
            return Err(Failure::bad_input(format!(
                "{what}: neither FILE.py:NAME, a config.json, timm:NAME nor diffusers:CLASS"
            )));
        }
        job["config"] = json!(absolute(&path));
        job["auto_class"] = json!(arguments.auto_class);
        false
    };
    if needs_inputs && arguments.inputs.is_empty() {
        return Err(Failure::bad_input("what the module reads is not said").hint("add --input 'ids=int64[batch,seq]'"));
    }
    Ok(job)
}

/// `ids=int64[batch,seq]`: a name, a type and sizes.
fn input(text: &str) -> Result<Value, Failure> {
    let bad = |why: &str| {
        Failure::bad_input(format!("--input {text}: {why}"))
            .hint("write NAME=TYPE[SIZES], such as ids=int64[batch,seq]")
    };
    let (name, rest) = text.split_once('=').ok_or_else(|| bad("no ="))?;
    let (kind, sizes) = rest.strip_suffix(']').and_then(|rest| rest.split_once('[')).ok_or_else(|| bad("no sizes"))?;
    if !["int64", "int32", "bool", "float", "float32"].contains(&kind) {
        return Err(bad(&format!("{kind} is not int64, int32, bool, float or float32")));
    }
    let known =
        |word: &str| ["batch", "seq", "height", "width", "frames"].contains(&word) || word.parse::<u64>().is_ok();
    // Sizes may be products and quotients of those.
    let words = sizes.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
    let unknown = words.clone().find(|word| !known(word));
    let plain = sizes.chars().all(|c| c.is_ascii_alphanumeric() || ",_*/+-() ".contains(c));
    match unknown {
        Some(word) => Err(bad(&format!("{word} is not batch, seq, height, width, frames or a number"))),
        None if !plain || sizes.is_empty() => Err(bad("its sizes are none")),
        None => Ok(json!([name.trim(), kind, sizes.replace(' ', "")])),
    }
}
