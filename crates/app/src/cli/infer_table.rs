//! `vramcast infer --table` with transformers: every cell is a simulation.

use serde_json::json;
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::InferPlan;

use super::{Answer, Failure};
use crate::exit::Exit;
use crate::render::gib;
use crate::render::inspect::grouped;
use crate::render::table::Table;

const PROMPTS: [u64; 5] = [512, 2048, 8192, 32_768, 131_072];
const BATCHES: [u64; 5] = [1, 4, 16, 64, 256];

/// What the process holds, by prompt and batch.
pub(super) fn of_generate(name: &str, model: &Model, plan: &InferPlan, as_json: bool) -> Result<Answer, Failure> {
    let mut rows: Vec<(u64, Vec<u64>)> = Vec::new();
    for prompt in PROMPTS {
        let cells = BATCHES.iter().map(|batch| {
            let mut plan = plan.clone();
            (plan.batch.batch_size, plan.batch.seq_len) = (*batch, prompt);
            simulation::infer(model, &plan).map(|simulation| simulation.process_bytes())
        });
        rows.push((prompt, cells.collect::<Result<_, _>>()?));
    }
    if as_json {
        let rows: Vec<_> = rows.iter().map(|(prompt, cells)| json!({"prompt": prompt, "process": cells})).collect();
        let document = json!({"schema": 1, "model": name, "gpu": plan.gpu.name, "batches": BATCHES, "rows": rows});
        return Ok(Answer::document(document, Exit::Success));
    }
    let heads: Vec<String> = BATCHES.iter().map(|batch| format!("batch {batch}")).collect();
    let mut heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    heads.insert(0, "prompt");
    let mut table = Table::new(&heads);
    for (prompt, cells) in &rows {
        let cell = |bytes: &u64| format!("{}{}", gib(*bytes), if *bytes <= plan.gpu.memory { "" } else { " !" });
        table.row(std::iter::once(grouped(*prompt)).chain(cells.iter().map(cell)).collect());
    }
    let text = format!(
        "{name}\nGiB of the process with {} new tokens on {} (!: over its {} GiB)\n\n{table}",
        plan.new_tokens,
        plan.gpu.name,
        gib(plan.gpu.memory)
    );
    Ok(Answer::success(text))
}
