//! Scores LoRA truth: `cargo run --example verify_lora -- CONFIGS ROWS [FILTER]`, rows as `truth/lora.json` or JSON lines.

use serde_json::Value;
use vramcast_core::model::Model;
use vramcast_core::verify::lora::score;

#[allow(clippy::disallowed_methods)]
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    let configs: Value = serde_json::from_str(&read(&arguments[1])).unwrap();
    let text = read(&arguments[2]);
    let rows: Vec<Value> = match serde_json::from_str::<Value>(&text) {
        Ok(file) => file["rows"].as_array().cloned().unwrap(),
        Err(_) => text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
    };
    let filter = arguments.get(3).cloned().unwrap_or_default();
    let (mut good, mut all) = (0, 0);
    for row in rows {
        let id = row["id"].as_str().unwrap();
        if !filter.is_empty() && row["model_type"] != filter.as_str() && id != filter {
            continue;
        }
        all += 1;
        let entry = &configs[id];
        let model = match Model::new(entry["config"].clone(), entry["auto_class"].as_str()) {
            Ok(model) => model,
            Err(error) => {
                println!("{id}: {error}");
                continue;
            }
        };
        let scored = score(&row, &model);
        if scored.ok {
            good += 1;
            continue;
        }
        println!(
            "{id} ({}) {} trainable {:?} tensors {:?} modules {:?}\n    ours {:?}\n    peft {:?} {}",
            row["model_type"].as_str().unwrap_or_default(),
            row["target_modules"],
            scored.trainable,
            scored.tensors,
            scored.modules,
            scored.refused,
            scored.expected_refusal,
            row["adapted_by_name"]
        );
    }
    println!("{good} of {all}");
}
