//! Messages of public issues, by their numbers and forms (truth/messages.jsonl): what the doctor makes of them.

#![allow(clippy::disallowed_methods, missing_docs, reason = "a test reads its truth")]

use serde_json::Value;
use vramcast_core::doctor::diagnose;

/// A message with a row's numbers in the form of its program (truth/message-forms.json).
fn message(row: &Value, forms: &Value) -> String {
    let form = row["form"].as_str().unwrap_or_default();
    let numbers = row["numbers"].as_object();
    let text = |key: &str| row["numbers"][key].as_str().unwrap_or_default().to_owned();
    match form {
        // Some say what the process holds in all.
        "torch-2" => {
            let process = row["numbers"]["process"].as_str();
            let own =
                process.map(|size| format!(" Including non-PyTorch memory, this process has {size} memory in use."));
            format!(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} is \
                 free.{} Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated.",
                text("asked"),
                text("total"),
                text("free"),
                own.unwrap_or_default(),
                text("allocated"),
                text("unused")
            )
        }
        "growth" => {
            let sizes = row["numbers"]["sizes"].as_array().cloned().unwrap_or_default();
            let line = |(at, size): (usize, &Value)| format!("Epoch {at}: {}\n", size.as_str().unwrap_or_default());
            let log: String = sizes.iter().enumerate().map(line).collect();
            format!("{log}RuntimeError: CUDA error: out of memory")
        }
        _ => {
            let whole = forms[form].as_str().unwrap_or_else(|| panic!("{form}")).to_owned();
            let put = |text: String, (key, value): (&String, &Value)| {
                text.replace(&format!("{{{key}}}"), value.as_str().unwrap_or_default())
            };
            numbers.into_iter().flatten().fold(whole, put)
        }
    }
}

#[test]
fn the_class_of_public_messages_is_right() {
    let file =
        |name: &str| std::fs::read_to_string(format!("{}/../../truth/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (text, forms) = (file("messages.jsonl"), file("message-forms.json"));
    let forms: Value = serde_json::from_str(&forms).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut wrong = Vec::new();
    for row in &rows {
        let found = diagnose(&message(row, &forms));
        let class = found.first().map(|finding| serde_json::to_value(finding.cause).unwrap());
        if class.as_ref() != Some(&row["class"]) {
            wrong.push(format!("{}: {} and not {class:?}", row["link"], row["class"]));
        }
    }
    assert!(rows.len() >= 100 && wrong.len() <= 5, "{} of {} wrong: {wrong:#?}", wrong.len(), rows.len());
    println!("{} of {} right; wrong: {wrong:#?}", rows.len() - wrong.len(), rows.len());
}
