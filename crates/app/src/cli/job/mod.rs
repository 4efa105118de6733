//! Job files of "GPU Memory Calculator for LLM Training": a model in numbers, how it is trained, on what.
//!
//! | module | what is in it |
//! |---|---|
//! | [`calculate`] | `vramcast calculate` and `vramcast quick` |
//! | [`validate`] | `vramcast validate`: every problem with its place |
//! | `file` | the format: keys, ranges, rules between keys |
//! | `places` | where a value stands in the file |
//! | `run` | a job as a plan to simulate and as a question to a formula |

pub(super) mod calculate;
mod file;
mod places;
mod run;
pub(super) mod validate;

use std::path::Path;

pub(super) use file::{Job, Problem, check};

use super::Failure;

/// Jobs that are built in, by name.
pub(super) const PRESETS: [(&str, &str); 7] = [
    ("llama2_7b_deepspeed", include_str!("../../../../../configs/llama2_7b_deepspeed.json")),
    ("llama2_13b_fsdp", include_str!("../../../../../configs/llama2_13b_fsdp.json")),
    ("llama2_70b_megatron_deepspeed", include_str!("../../../../../configs/llama2_70b_megatron_deepspeed.json")),
    ("llama3_8b_fsdp", include_str!("../../../../../configs/llama3_8b_fsdp.json")),
    ("gpt3_175b_megatron", include_str!("../../../../../configs/gpt3_175b_megatron.json")),
    ("gpt2_124m_single", include_str!("../../../../../configs/gpt2_124m_single.json")),
    ("pytorch_ddp_example", include_str!("../../../../../configs/pytorch_ddp_example.json")),
];

/// The text of a job: a file, or a preset by its name (with or without `configs/` and `.json`).
fn read(path: &Path) -> Result<String, Failure> {
    /// No job file is larger.
    const MAX_BYTES: u64 = 1 << 20;
    let shown = path.display();
    if path.is_file() {
        if std::fs::metadata(path).is_ok_and(|metadata| metadata.len() > MAX_BYTES) {
            return Err(Failure::bad_input(format!("{shown}: too large for a job file")));
        }
        return std::fs::read_to_string(path).map_err(|e| Failure::bad_input(format!("{shown}: {e}")));
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
