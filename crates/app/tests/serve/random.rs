//! Random plans and configs: whatever they say, the answer is a document or a problem, never a fault.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use serde_json::{Map, Value, json};

use super::Server;

/// Numbers at which sizes break.
fn number() -> impl Strategy<Value = Value> {
    prop_oneof![
        4 => (0u64..64).prop_map(Value::from),
        2 => prop::sample::select(vec![127u64, 128, 1000, 4096, 65_536, 1 << 20, 1 << 24]).prop_map(Value::from),
        1 => prop::sample::select(vec![u64::MAX, u64::MAX - 1, 1 << 63, 1 << 62, 1 << 32, (1 << 32) - 1]).prop_map(Value::from),
        1 => prop::sample::select(vec![json!(-1), json!(0.5), json!(1e30), json!(null)]),
    ]
}

/// A value that a schema allows, more or less.
fn value_of(schema: &Value, definitions: &Value, depth: u32) -> BoxedStrategy<Value> {
    if let Some(name) = schema["$ref"].as_str().and_then(|reference| reference.rsplit('/').next()) {
        return value_of(&definitions[name], definitions, depth);
    }
    for several in ["anyOf", "oneOf"] {
        if let Some(choices) = schema[several].as_array() {
            let all: Vec<_> = choices.iter().map(|choice| value_of(choice, definitions, depth)).collect();
            return proptest::strategy::Union::new(all).boxed();
        }
    }
    if let Some(words) = schema["enum"].as_array() {
        return prop::sample::select(words.clone()).boxed();
    }
    if !schema["const"].is_null() {
        return Just(schema["const"].clone()).boxed();
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        kind => kind.as_str().into_iter().collect(),
    };
    match kinds.first().copied() {
        Some("object") if depth > 0 => object_of(schema, definitions, depth - 1),
        Some("array") if depth > 0 => {
            let items = if schema["items"].is_object() {
                value_of(&schema["items"], definitions, depth - 1)
            } else {
                number().boxed()
            };
            prop::collection::vec(items, 0..4).prop_map(Value::Array).boxed()
        }
        Some("integer" | "number") => number().boxed(),
        Some("boolean") => any::<bool>().prop_map(Value::from).boxed(),
        Some("string") => prop::sample::select(vec!["", "H200", "T4", "q_proj", "all-linear", "(", "é", "fp32"])
            .prop_map(Value::from)
            .boxed(),
        _ => Just(json!({})).boxed(),
    }
}

/// Some of an object's keys, and at times one that it does not have.
fn object_of(schema: &Value, definitions: &Value, depth: u32) -> BoxedStrategy<Value> {
    let Some(properties) = schema["properties"].as_object() else { return Just(json!({})).boxed() };
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut keys: BoxedStrategy<Map<String, Value>> = Just(Map::new()).boxed();
    for (key, schema) in properties {
        let chance = if required.contains(&key.as_str()) { 0.98 } else { 1.5 / properties.len().max(2) as f64 };
        let (key, value) = (key.clone(), value_of(schema, definitions, depth));
        keys = (keys, prop::option::weighted(chance, value))
            .prop_map(move |(mut object, value)| {
                if let Some(value) = value {
                    object.insert(key.clone(), value);
                }
                object
            })
            .boxed();
    }
    keys.prop_map(Value::Object).boxed()
}

/// A config of a family with some of its sizes at random.
fn config() -> impl Strategy<Value = Value> {
    let kinds =
        vec!["llama", "gpt2", "mixtral", "t5", "mamba", "qwen2", "bert", "deepseek_v3", "gemma3", "whisper", "nothing"];
    let keys = vec![
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "intermediate_size",
        "n_embd",
        "n_layer",
        "n_head",
        "num_local_experts",
        "head_dim",
        "max_position_embeddings",
        "state_size",
        "d_model",
        "num_layers",
        "sliding_window",
        "n_routed_experts",
    ];
    (prop::sample::select(kinds), prop::collection::vec((prop::sample::select(keys), number()), 0..8)).prop_map(
        |(kind, sizes)| {
            let mut config = json!({"model_type": kind});
            for (key, size) in sizes {
                config[key] = size;
            }
            config
        },
    )
}

fn holds(server: &Server, path: &str, body: &Value) -> Result<(), TestCaseError> {
    let mut answer = server.post(path, body);
    // What ran out of time before may still be ending, and until then a heavy one is told to come again.
    for _ in 0..100 {
        if answer.status != 429 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
        answer = server.post(path, body);
    }
    // Time-outs are answers, too: a plan may ask for more than a second.
    prop_assert!([200, 422, 503].contains(&answer.status), "{path} {body}: {} {}", answer.status, answer.body);
    if answer.status == 200 {
        let document = answer.json();
        let sum: u128 = document["breakdown"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|part| u128::from(part["bytes"].as_u64().unwrap_or(0)))
            .sum();
        let total = u128::from(document["totals"]["process"].as_u64().unwrap_or(0));
        // Sizes that saturate no longer add up.
        prop_assert!(
            sum == total || total >= u128::from(u64::MAX / 4) || sum >= u128::from(u64::MAX / 4),
            "{body}: {sum} is not {total}"
        );
    }
    Ok(())
}

/// The same ones every time; `VRAMCAST_PLANS=N` draws as many anew.
fn cases(count: u32) -> TestRunner {
    let more = std::env::var("VRAMCAST_PLANS").ok().and_then(|count| count.parse().ok());
    TestRunner::new(Config {
        cases: more.unwrap_or(count),
        rng_seed: if more.is_some() { RngSeed::Random } else { RngSeed::Fixed(18) },
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    })
}

#[test]
fn random_plans() {
    plans(50);
}

#[test]
fn random_configs() {
    configs(50);
}

#[test]
#[ignore = "second ring: minutes"]
fn many_random_plans_and_configs() {
    plans(150);
    configs(150);
}

fn plans(count: u32) {
    let server = Server::start(&["--rate", "0", "--timeout", "1"]);
    for (kind, path) in [("train", "/train"), ("infer", "/infer")] {
        let schema = server.get(&format!("/api/v1/schema/{kind}")).document();
        let plan = value_of(&schema, &schema["$defs"], 5);
        let model = prop::sample::select(vec![
            "gpt2",
            "EleutherAI/pythia-14m",
            "openai/whisper-base",
            "google-t5/t5-base",
            "FacebookAI/roberta-base",
        ]);
        cases(count)
            .run(&(model, plan), |(model, plan)| holds(&server, path, &json!({"model": model, "plan": plan})))
            .unwrap();
    }
}

fn configs(count: u32) {
    let server = Server::start(&["--rate", "0", "--timeout", "1"]);
    cases(count)
        .run(&config(), |config| {
            holds(&server, "/train", &json!({"config": config}))?;
            holds(&server, "/infer", &json!({"config": config, "plan": {"new_tokens": 3}}))?;
            holds(&server, "/inspect", &json!({"config": config}))
        })
        .unwrap();
}
