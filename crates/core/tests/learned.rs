//! What was learned: programs beside the real torch on a pretend card, and tables that refuse what they do not follow.

#![allow(clippy::disallowed_methods, reason = "tests read recorded runs")]

use std::io::Read;

use serde_json::{Value, json};
use vramcast_core::model::{Inputs, Model, families, learned};
use vramcast_core::verify::ledger::{self, LedgerRow};

fn read(name: &str) -> String {
    std::fs::read_to_string(format!("{}/tests/learned/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn training(seq: u64) -> Inputs {
    Inputs { batch: 2, seq, labels: true, cache: false, last_logits: None, ..Inputs::inventory() }
}

fn program(name: &str) -> Value {
    serde_json::from_str(&read(&format!("{name}.json"))).unwrap()
}

/// Runs of `modules.py` that were drawn before anything was compared (docs/learn.md has the first scores).
#[test]
fn learned_programs_take_what_torch_takes() {
    let mut errors = Vec::new();
    for line in read("rows.jsonl").lines() {
        let mut row: Value = serde_json::from_str(line).unwrap();
        row["config"] = program(row["model"].as_str().unwrap());
        let LedgerRow::Scored(scored) = ledger::score(&row) else { panic!("{} is not scored", row["id"]) };
        let error = scored.allocated.error().unwrap().abs();
        assert!(error < 1.0, "{}: {error} %", scored.id);
        errors.push(error);
    }
    errors.sort_by(f64::total_cmp);
    assert!(errors.len() >= 19 && errors[errors.len() / 2] < 0.1, "{errors:?}");
}

/// Families that are written by hand, learned by `tools/learn/runs.py`: both take the same bytes.
#[test]
fn learned_families_give_the_bytes_of_those_written_by_hand() {
    let path = format!("{}/tests/learned/families.jsonl.zz", env!("CARGO_MANIFEST_DIR"));
    let mut text = String::new();
    let packed = std::fs::read(path).unwrap();
    flate2::read::ZlibDecoder::new(packed.as_slice()).read_to_string(&mut text).unwrap();
    let predicted = |row: &Value| match ledger::score(row) {
        LedgerRow::Scored(scored) => scored.allocated.predicted.unwrap(),
        LedgerRow::Skipped { id, skipped } => panic!("{id}: {skipped}"),
    };
    assert!(text.lines().count() >= 10);
    for line in text.lines() {
        let by_hand: Value = serde_json::from_str(line).unwrap();
        let mut learned = by_hand.clone();
        learned["config"] = by_hand["program"].clone();
        learned["auto_class"] = Value::Null;
        assert_eq!(predicted(&by_hand), predicted(&learned), "{}", by_hand["id"]);
    }
}

/// A table answers for what it follows; a key that it could not follow must have the class's value.
#[test]
fn a_table_refuses_what_it_does_not_follow() {
    let count = |config: Value| {
        let model = Model::new(config, Some("AutoModelForMaskedLM")).map_err(|error| error.to_string())?;
        model.inventory().map(|inventory| inventory.total()).map_err(|error| error.to_string())
    };
    let usual = count(json!({"model_type": "deberta"})).unwrap();
    let wider = count(json!({"model_type": "deberta", "hidden_size": 1536})).unwrap();
    assert!(wider > 2 * usual, "{usual} {wider}");
    // Of a family's type a table has only heads that the family lacks.
    for model_type in learned::types() {
        for task in learned::tasks(model_type).unwrap_or_default() {
            let reads = families::with_head(model_type, task).unwrap();
            assert!(std::ptr::eq(reads, &learned::FAMILY), "{model_type} with {} is a family's", task.class());
        }
    }
    let refused = learned::types().filter(|name| {
        let model = Model::new(json!({"model_type": name, "hidden_size": 7, "num_hidden_layers": 1}), None);
        model.is_ok_and(|model| model.inventory().is_err())
    });
    assert!(refused.count() > 20);
    let counted = Model::new(json!({"model_type": "reformer"}), Some("AutoModelForMaskedLM")).unwrap();
    assert!(counted.only_counted().unwrap().contains("transformers 5.22"));
    assert!(counted.program(training(8)).unwrap_err().to_string().contains("vramcast learn"));
}

/// A pass that came along has the parameters of its type's table, runs, and refuses a config that it was not learned with.
#[test]
fn passes_that_came_along_run_by_class_defaults() {
    let all: Vec<_> = learned::passes::all().collect();
    assert!(all.len() >= 20, "{}", all.len());
    // Each of a few, for the time that tests have.
    for (model_type, class) in all.iter().step_by(9) {
        let mut config = json!({"model_type": model_type});
        if model_type.starts_with("timm/") {
            config["num_classes"] = 10.into();
        }
        let model = Model::new(config, Some(class)).unwrap();
        let sorted = |inputs: Inputs| {
            let mut all: Vec<_> =
                model.program(inputs).unwrap().parameters.into_iter().map(|one| (one.name, one.shape)).collect();
            all.sort();
            all
        };
        assert_eq!(sorted(training(64)), sorted(Inputs::inventory()), "{model_type}");
        let other = Model::new(json!({"model_type": model_type, "hidden_act": "nothing"}), Some(class)).unwrap();
        let _ = other.program(training(64));
    }
    let wider = Model::new(json!({"model_type": "roformer", "hidden_size": 64}), Some("AutoModelForMaskedLM")).unwrap();
    let refused = wider.program(training(8)).unwrap_err().to_string();
    assert!(refused.contains("hidden_size") && refused.contains("vramcast learn"), "{refused}");
}

/// Broken files end in an error that says what is wrong, never in a panic.
#[test]
fn a_broken_program_is_refused() {
    let text = read("Net.json");
    let document = program("Net");
    let build = |document: Value| Model::new(document, None).and_then(|model| model.program(training(8)));
    build(document.clone()).unwrap();
    for (from, to) in [
        ("\"embedding\"", "\"embeding\""),
        ("[\"free\",", "[\"free\",9"),
        ("batch*seq", "batch*sequence"),
        ("\"up.weight\"", "1"),
    ] {
        let broken = text.replace(from, to);
        if let Ok(document) = serde_json::from_str::<Value>(&broken) {
            let _ = build(document);
        }
    }
    let mut odd = document;
    odd["multiples"] = json!({"seq": 8});
    build(odd.clone()).unwrap();
    let odd = Model::new(odd, None).unwrap().program(training(9)).unwrap_err().to_string();
    assert!(odd.contains("multiples of 8"), "{odd}");
}
