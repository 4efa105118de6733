//! `vramcast weights`: a checkpoint that can be loaded and takes no disk, for rehearsals.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Map, Value, json};
use vramcast_core::dtype::DType;
use vramcast_core::model::Model;

use super::context::Context;
use super::model::ModelArguments;
use super::{Answer, Failure};
use crate::ask::found::Reach;
use crate::disk;
use crate::exit::Exit;
use crate::render::gib;

/// Which model's weights, and where to.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// A folder to make: config.json, and a safetensors file whose tensors are a hole of zeros.
    #[arg(long, value_name = "FOLDER", required = true)]
    sparse: PathBuf,
    /// The type of the weights: fp32, bf16 or fp16 [default: what the config says, else bf16].
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let as_json = context.text_or_json("weights")?;
    let found = arguments.model.subject().find(Reach::Machine, false)?;
    let model = found.require_model()?;
    let mut config = found.resolved.config.clone().unwrap_or_default();
    if config.get("quantization_config").is_some_and(|section| !section.is_null()) {
        return Err(Failure::bad_input(format!("{} is quantised: its packed weights cannot be zeros", found.name))
            .hint("add --dequantize"));
    }
    let dtype = match &arguments.dtype {
        Some(name) => stored(name)?,
        None => found.stored_dtype().unwrap_or(DType::BF16),
    };
    config["dtype"] = json!(torch_name(dtype));
    let (header, bytes) = header(model, dtype)?;
    let folder = &arguments.sparse;
    let failed = |error: std::io::Error| Failure::bad_input(format!("--sparse {}: {error}", folder.display()));
    if std::fs::read_dir(folder).is_ok_and(|mut there| there.next().is_some()) {
        return Err(Failure::bad_input(format!("--sparse {}: it is there and not empty", folder.display()))
            .hint("name a folder that is not there yet"));
    }
    if folder.exists() && !folder.is_dir() {
        return Err(Failure::bad_input(format!("--sparse {}: it is not a folder", folder.display()))
            .hint("name a folder that is not there yet"));
    }
    std::fs::create_dir_all(folder).map_err(failed)?;
    disk::write(&folder.join("config.json"), format!("{config:#}\n").as_bytes()).map_err(failed)?;
    let on_disk = sparse(&folder.join("model.safetensors"), &header, bytes).map_err(failed)?;
    if as_json {
        let document =
            json!({"schema": 1, "folder": folder, "dtype": dtype.name(), "bytes": bytes, "on_disk": on_disk});
        return Ok(Answer::document(document, Exit::Success));
    }
    let shown = folder.display();
    let takes = format!("{} GiB of zeros, {} KiB on disk", gib(bytes), on_disk / 1024);
    Ok(Answer::success(format!("{shown}: {}, {}, {takes}\n", found.name, dtype.name())))
}

/// The type by its name.
fn stored(name: &str) -> Result<DType, Failure> {
    let known = DType::parse(name).filter(|dtype| [DType::F32, DType::BF16, DType::F16].contains(dtype));
    known.ok_or_else(|| Failure::bad_input(format!("--dtype: {name} is not one of fp32, bf16, fp16")))
}

fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F16 => "float16",
        _ => "bfloat16",
    }
}

/// A safetensors header of all parameters, with its length before it, and the bytes that follow it.
fn header(model: &Model, dtype: DType) -> Result<(Vec<u8>, u64), Failure> {
    let name = match dtype {
        DType::F32 => "F32",
        DType::F16 => "F16",
        _ => "BF16",
    };
    let mut tensors = Map::new();
    // transformers reads no file without it.
    tensors.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0u64;
    for parameter in model.inventory()?.parameters {
        let shape = parameter.shape.sizes().to_vec();
        let bytes = vramcast_core::dtype::elements(&shape).and_then(|count| dtype.bytes(count));
        let next = bytes.and_then(|bytes| end.checked_add(bytes));
        let next = next.ok_or_else(|| Failure::bad_input(format!("{}: far too large", parameter.name)))?;
        let tensor = json!({"dtype": name, "shape": shape, "data_offsets": [end, next]});
        tensors.insert(parameter.name.clone(), tensor);
        end = next;
    }
    let mut text = Value::Object(tensors).to_string();
    // Data begins at a multiple of eight.
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
    let mut whole = (text.len() as u64).to_le_bytes().to_vec();
    whole.extend(text.as_bytes());
    Ok((whole, end))
}

/// A file that begins with a header and goes on as a hole; what it takes on disk.
fn sparse(path: &Path, header: &[u8], hole: u64) -> std::io::Result<u64> {
    let mut file = File::create_new(path)?;
    file.write_all(header)?;
    file.set_len(header.len() as u64 + hole)?;
    file.sync_all()?;
    Ok(on_disk(&file.metadata()?))
}

#[cfg(unix)]
fn on_disk(file: &std::fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(file) * 512
}

#[cfg(not(unix))]
fn on_disk(file: &std::fs::Metadata) -> u64 {
    file.len()
}
