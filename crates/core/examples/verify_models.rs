//! Scores model truth files: `cargo run --example verify_models -- FOLDER [FILTER]`. A tool for writing families.

#[allow(clippy::disallowed_methods)]
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let filter = arguments.get(2).cloned().unwrap_or_default();
    let mut files: Vec<_> = std::fs::read_dir(&arguments[1]).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let (mut good, mut all) = (0, 0);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let Ok(truth) = serde_json::from_str::<serde_json::Value>(&text) else { continue };
        if !truth.is_object() || (!filter.is_empty() && truth["model_type"] != filter.as_str()) {
            continue;
        }
        let row = vramcast_core::verify::models::score(&truth);
        all += 1;
        if row.ok {
            good += 1;
            continue;
        }
        println!(
            "{} ({}): params {:?} kv {:?} active {:?}",
            row.id, row.model_type, row.params, row.kv_bytes_per_token, row.active_params
        );
        if let Some(error) = row.error {
            println!("    {error}");
        }
        for (kind, names) in
            [("missing", row.tensors.missing), ("extra", row.tensors.extra), ("reshaped", row.tensors.reshaped)]
        {
            for name in names.iter().take(12) {
                println!("    {kind} {name}");
            }
        }
    }
    println!("{good} of {all}");
}
