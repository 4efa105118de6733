//! Job files of "GPU Memory Calculator for LLM Training": a model in numbers, how it is trained, on what.
//!
//! | module | what is in it |
//! |---|---|
//! | `file` | the format: keys, ranges, rules between keys |
//! | `outcome` | what comes out: by simulation, or by a formula |
//! | `places` | where a value stands in the file |
//! | `run` | a job as a plan to simulate and as a question to a formula |

mod file;
mod outcome;
mod places;
mod run;

use std::path::Path;

pub(crate) use file::{Job, Problem, check};
pub(crate) use outcome::outcome;

use super::files;
use crate::failure::Failure;

/// Jobs that are built in, by name.
pub(crate) const PRESETS: [(&str, &str); 7] = [
    ("llama2_7b_deepspeed", include_str!("../../../configs/llama2_7b_deepspeed.json")),
    ("llama2_13b_fsdp", include_str!("../../../configs/llama2_13b_fsdp.json")),
    ("llama2_70b_megatron_deepspeed", include_str!("../../../configs/llama2_70b_megatron_deepspeed.json")),
    ("llama3_8b_fsdp", include_str!("../../../configs/llama3_8b_fsdp.json")),
    ("gpt3_175b_megatron", include_str!("../../../configs/gpt3_175b_megatron.json")),
    ("gpt2_124m_single", include_str!("../../../configs/gpt2_124m_single.json")),
    ("pytorch_ddp_example", include_str!("../../../configs/pytorch_ddp_example.json")),
];

/// The text of a job: a file, or a preset by its name (with or without `configs/` and `.json`).
pub(crate) fn read(path: &Path) -> Result<String, Failure> {
    let shown = path.display();
    // What is there and no file says so when it is read.
    if path == Path::new("-") || path.exists() {
        return files::text(path);
    }
    let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let preset = PRESETS.iter().find(|(preset, _)| *preset == name);
    preset.map(|(_, text)| (*text).to_owned()).ok_or_else(|| {
        Failure::bad_input(format!("{shown}: no such file, and no preset of that name"))
            .hint("`vramcast list presets` shows what is built in")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_no_problems() {
        for (name, text) in PRESETS {
            assert_eq!(check(text).1, Vec::new(), "{name}");
            assert!(check(text).0.is_some(), "{name}");
        }
    }
}
