//! `--write TOOL`: a plan as files and a launch line of another tool.

use std::path::Path;

use serde_json::json;
use vramcast_core::ask::write::TOOLS;

use super::context::Context;
use super::{Answer, Failure};
use crate::ask::question::Prepared;
use crate::disk;
use crate::exit::Exit;

/// What `--write` may name.
pub(super) fn tool(text: &str) -> Result<String, String> {
    let plain = text.to_lowercase().replace('_', "-");
    let known = TOOLS.iter().find(|(name, _)| *name == plain || name.replace('.', "-") == plain);
    known
        .map(|(name, _)| (*name).to_owned())
        .ok_or_else(|| format!("use one of {}", TOOLS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")))
}

/// Writes the files into a folder, or shows them.
pub(super) fn run(prepared: &Prepared, tool: &str, out: Option<&Path>, context: &Context) -> Result<Answer, Failure> {
    let as_json = context.text_or_json("--write")?;
    let written = prepared.write(tool)?;
    if let Some(folder) = out {
        let failed = |path: &Path, error: std::io::Error| Failure::bad_input(format!("{}: {error}", path.display()));
        std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        for (name, text) in &written.files {
            let path = folder.join(name);
            disk::write(&path, text.as_bytes()).map_err(|error| failed(&path, error))?;
        }
    }
    if as_json {
        return Ok(Answer::document(json!({"schema": 1, "tool": tool, "written": written}), Exit::Success));
    }
    let mut text = String::new();
    for (name, body) in &written.files {
        match out {
            Some(folder) => text += &format!("wrote {}\n", folder.join(name).display()),
            None => text += &format!("# {name}\n{body}\n"),
        }
    }
    if !written.line.is_empty() {
        text += &format!("{}\n", written.line);
    }
    for unsaid in &written.unsaid {
        text += &format!("note: {tool} cannot say {unsaid}\n");
    }
    Ok(Answer::text(text, Exit::Success))
}
