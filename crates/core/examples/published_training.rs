//! Our figures beside published training and generation runs of others, as Markdown tables:
//! `cargo run -p vramcast-core --example published_training -- truth/external/{torchtune,litgpt,peft_metamathqa,unsloth_notebooks}.json`.
//!
//! Rows that cannot be expressed are counted with the reason. docs/accuracy.md lists what is left.

use std::collections::BTreeMap;

use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::memory::phase::{Phase, Work};
use vramcast_core::memory::simulation::{self, Simulation};
use vramcast_core::model::Model;
use vramcast_core::plan::adapter::OtherAdapter;
use vramcast_core::plan::{
    AdapterPlan, Batch, CacheImplementation, Checkpointing, Compile, Gpus, Implementation, InferPlan, LoraPlan,
    LossKind, LossOptions, ModelCode, Optimizer, OptimizerKind, Quantization, Targets, TrainPlan,
};
use vramcast_core::source::catalogue;

/// A row with both figures, in the unit it was published in.
struct Row {
    name: String,
    published: f64,
    ours: f64,
    unit: &'static str,
}

type Outcome = Result<Vec<Row>, String>;

const GIB: f64 = (1_u64 << 30) as f64;
const GB: f64 = 1e9;

#[allow(clippy::disallowed_methods)]
fn main() {
    for path in std::env::args().skip(1) {
        let file: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let read: fn(&Value) -> Outcome = match std::path::Path::new(&path).file_stem().and_then(|stem| stem.to_str()) {
            Some("torchtune") => torchtune,
            Some("litgpt") => litgpt,
            Some("peft_metamathqa") => peft,
            Some("unsloth_notebooks") => unsloth,
            _ => panic!("{path}: torchtune, litgpt, peft_metamathqa or unsloth_notebooks.json"),
        };
        let mut left_out = BTreeMap::<String, u32>::new();
        let mut errors = Vec::new();
        println!("\n{path}\n\n| run | published | ours | difference |\n|---|---:|---:|---:|");
        for row in file["rows"].as_array().unwrap() {
            match read(row) {
                Err(why) => *left_out.entry(why).or_default() += 1,
                Ok(rows) => rows.iter().for_each(|Row { name, published, ours, unit }| {
                    let error = (ours / published - 1.0) * 100.0;
                    errors.push(error.abs());
                    println!("| {name} | {published:.2} {unit} | {ours:.2} {unit} | {error:+.1} % |");
                }),
            }
        }
        errors.sort_by(f64::total_cmp);
        if let Some(last) = errors.last() {
            println!("\n{} figures, median {:.1} %, largest {last:.1} %", errors.len(), errors[errors.len() / 2]);
        }
        left_out.iter().for_each(|(why, count)| println!("left out: {count} × {why}"));
    }
}

/// A model by id; the ids of these tables that have the same shape as one of the catalogue are read as that one.
fn model(id: &str, litgpt: bool) -> Result<Model, String> {
    let known = match id {
        "meta-llama/Meta-Llama-3.1-8B" => "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.2-1B" => "meta-llama/Llama-3.2-1B-Instruct",
        "meta-llama/Llama-3.2-3B" => "meta-llama/Llama-3.2-3B-Instruct",
        "unsloth/Mistral-7B-v0.2" => "mistralai/Mistral-7B-v0.1",
        "google/gemma-2-2b" => "google/gemma-2-2b-it",
        "google/gemma-2-9b" => "google/gemma-2-9b-it",
        id if id.starts_with("TinyLlama/TinyLlama-1.1B") => "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        id => id,
    };
    let mut config = match id {
        // From its model card; not in the catalogue.
        "stabilityai/stablelm-base-alpha-3b" => serde_json::json!({"model_type": "gpt_neox", "hidden_size": 4096,
            "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 16384, "vocab_size": 50688,
            "rotary_pct": 0.25, "use_parallel_residual": true, "max_position_embeddings": 4096}),
        _ => catalogue::find(known).ok_or("the model is not in the catalogue")?.config,
    };
    if litgpt {
        config["tie_word_embeddings"] = false.into();
        // LitGPT calls torch's fused GELU where transformers spells Phi's out.
        if config["hidden_act"] == "gelu_new" {
            config["hidden_act"] = "gelu_pytorch_tanh".into();
        }
    }
    Model::new(config, Some("AutoModelForCausalLM")).map_err(|error| error.to_string())
}

fn train(model: &Model, plan: &TrainPlan) -> Result<Simulation, String> {
    simulation::train(model, plan).map_err(|error| error.to_string())
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_default()
}

/// Numbers and flags of these files are sometimes strings.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn flag(value: &Value) -> bool {
    value == true || value == "true"
}

fn torchtune(row: &Value) -> Outcome {
    let method = text(row, "method");
    let all = ["q_proj", "v_proj", "output_proj", "mlp"].map(str::to_owned).to_vec();
    // The other table tells its flags for some runs on one card alone.
    let speed = text(row, "table").contains("Memory and training speed");
    let known = row["activation_checkpointing"] == true && text(row, "gpu").starts_with("1x");
    if text(row, "table").contains("Optimization flags") || speed && known {
        if row["packed"] != true {
            return Err("not packed: tokens are not known".into());
        }
        let on = |key: &str| row[key] == true;
        let rank = number(&row["lora_rank"]).unwrap_or(if speed { 8 } else { 64 });
        // Of llama3_1/8B_{lora,qlora}_single_device.yaml when that table was written (30b8519e8, 24 September 2024); what the file
        // here says of them is from November.
        let own: &[&str] = match (speed, method) {
            (true, "lora") => &["q_proj", "v_proj"],
            (true, _) => &["q_proj", "v_proj", "k_proj", "output_proj", "mlp"],
            _ => &["q_proj", "v_proj", "output_proj", "mlp"],
        };
        let targets = Targets::Names(own.iter().map(|&name| name.to_owned()).collect());
        let lora = LoraPlan { rank, targets, dtype: Some(DType::BF16), ..LoraPlan::default() };
        // Of its recipes since September 2024.
        let chunked = speed || text(row, "loss").starts_with("CEWith");
        let optimizer = text(row, "optimizer");
        let plan = TrainPlan {
            batch: Batch {
                batch_size: number(&row["batch_size"]).unwrap_or(2),
                seq_len: number(&row["max_seq_len"]).unwrap_or(4096),
                ..Batch::default()
            },
            model_code: ModelCode::Torchtune,
            keep_outputs: false,
            checkpointing: if on("activation_checkpointing") { Checkpointing::Full } else { Checkpointing::Off },
            save_on_cpu: on("activation_offloading"),
            loss: LossOptions { kind: if chunked { LossKind::Chunked } else { LossKind::Standard }, chunks: 8 },
            optimizer: Optimizer {
                kind: match optimizer {
                    text if text.contains("Paged") => OptimizerKind::PagedAdamW8bit,
                    text if text.contains("8bit") => OptimizerKind::AdamW8bit,
                    _ => OptimizerKind::AdamW,
                },
                // By its figures: weights, gradients and states are 23.9 GiB, and any other step would add 6.
                implementation: if optimizer.contains("8bit") {
                    Optimizer::default().implementation
                } else {
                    Implementation::Fused
                },
                ..Optimizer::default()
            },
            // `compile_model` takes the layers, `compile_loss` the chunks of the loss.
            compile: on("compile").then_some(if chunked { Compile::LayersAndLoss } else { Compile::Layers }),
            optimizer_in_backward: on("optimizer_in_bwd"),
            adapter: method.contains("lora").then_some(AdapterPlan::Lora(lora)),
            quantization: (method == "qlora").then(|| Quantization { double: true, ..Quantization::default() }),
            gpu: Gpus::embedded().find("A100-80GB").unwrap(),
            ..TrainPlan::default()
        };
        let id = if speed { "meta-llama/Meta-Llama-3.1-8B" } else { "meta-llama/Llama-3.2-3B" };
        let peak = train(&model(id, false)?, &plan)?.replay.peak_allocated() as f64;
        let flags = [
            ("compile", "compiled"),
            ("activation_checkpointing", "recomputed"),
            ("activation_offloading", "offloaded"),
            ("optimizer_in_bwd", "optimizer in backward"),
        ];
        let mut name = format!("{} {method}, 2 × {}, {optimizer}", text(row, "model"), plan.batch.seq_len);
        flags.iter().filter(|(key, _)| on(key)).for_each(|(_, word)| name += &format!(", {word}"));
        if chunked {
            name += ", loss in 8 chunks";
        }
        return Ok(vec![Row { name, published: row["published"].as_f64().unwrap(), ours: peak / GIB, unit: "GiB" }]);
    }
    let names = |names: &[&str]| Targets::Names(names.iter().map(|&name| name.to_owned()).collect());
    let (id, rank, targets, published, scale, unit) = match (method, text(row, "model")) {
        ("lora model init", "Llama-2-7B") => {
            ("meta-llama/Llama-2-7b-hf", 8, names(&["q_proj", "v_proj"]), 13.96, GB, "GB")
        }
        ("lora model init", _) => ("meta-llama/Llama-3.2-3B", 64, Targets::Names(all), 6.21, GIB, "GiB"),
        ("qlora model init", _) => return Err("peak of loading and quantising, torchao's NF4".into()),
        _ if text(row, "gpu").starts_with(['4', '8']) => return Err("several cards".into()),
        _ if row["compile"] == true => return Err("flags are not given".into()),
        _ => return Err("not packed: tokens are not known".into()),
    };
    let lora = LoraPlan { rank, targets, dtype: Some(DType::BF16), ..LoraPlan::default() };
    let plan = TrainPlan {
        batch: Batch { seq_len: 8, ..Batch::default() },
        model_code: ModelCode::Torchtune,
        adapter: Some(AdapterPlan::Lora(lora)),
        ..TrainPlan::default()
    };
    let loaded = train(&model(id, false)?, &plan)?.replay.phases[0].before as f64;
    Ok(vec![Row {
        name: format!("{} LoRA r{rank}, allocated when loaded", text(row, "model")),
        published,
        ours: loaded / scale,
        unit,
    }])
}

/// LitGPT's switches, which are its names of what is adapted.
fn litgpt_targets(lora: &Value) -> Vec<String> {
    let on = |name: &str| flag(&lora[name]) || flag(&lora[format!("lora_{name}").as_str()]);
    let switches = ["query", "key", "value", "projection", "mlp", "head"];
    switches.into_iter().filter(|name| on(name)).map(str::to_owned).collect()
}

/// RMSNorm of spring 2024 casts before it multiplies. Which commit a row ran on is not published: rows of the config hub
/// whose models were there in spring are taken to be of then.
fn litgpt_code(row: &Value) -> ModelCode {
    let later = ["llama-3.1", "llama-3.2", "Phi-3", "gemma-2-"];
    let spring =
        text(row, "table").starts_with("config_hub") && !later.iter().any(|name| text(row, "model").starts_with(name));
    if spring { ModelCode::LitgptSpring2024 } else { ModelCode::Litgpt }
}

fn litgpt(row: &Value) -> Outcome {
    let (method, table) = (text(row, "method"), text(row, "table"));
    let devices = number(&row["devices_in_yaml"]).or_else(|| row["devices"].as_u64()).unwrap_or(1);
    match method {
        _ if row["suspect"].is_string() => return Err("the source contradicts itself".into()),
        _ if devices > 1 || table.contains("Multiple GPUs") => return Err("several cards".into()),
        "lora" | "qlora" | "full" | "inference" => {}
        _ => return Err(format!("LitGPT's own {method}")),
    }
    // Its own code ties no embeddings; generation is simulated by transformers' with untied ones.
    let model = model(text(row, "hf_id"), true)?;
    let quantization = match text(row, "quantize").strip_prefix("bnb.") {
        None => None,
        Some(scheme) => {
            let read = Quantization::parse(scheme).map_err(|error| error.to_string())?;
            // Its rows are older than bitsandbytes 0.43.2, and Lightning packs from fp16.
            let packed_from = Some(DType::F16);
            Some(Quantization { skip: Some(Vec::new()), prepare: false, keeps_inputs: true, packed_from, ..read })
        }
    };
    let hub = table.starts_with("config_hub");
    let card = if hub { "A10G" } else { "A100-40GB" };
    let gpu = Gpus::embedded().find(card).unwrap();
    let weights = if text(row, "precision") == "32-true" { DType::F32 } else { DType::BF16 };
    let scheme = text(row, "quantize").trim_start_matches("bnb.");
    let (run, what) = if method == "inference" {
        let new_tokens = row["inference"]["max_new_tokens"].as_u64().unwrap_or(50);
        let batch = Batch { seq_len: 16, ..Batch::default() };
        let cache = CacheImplementation::Static;
        let plan =
            InferPlan { batch, new_tokens, cache, weights, quantization, gpu: gpu.clone(), ..InferPlan::default() };
        let run = simulation::infer(&model, &plan).map_err(|error| error.to_string())?;
        (run, format!("generate {new_tokens} {} {scheme}", weights.name()))
    } else {
        let lora = &row["lora"];
        let rank = number(&lora["r"]).or_else(|| number(&lora["lora_r"]));
        let dropout = ["dropout", "lora_dropout"]
            .iter()
            .find_map(|key| lora[*key].as_f64().or_else(|| lora[*key].as_str()?.parse().ok()));
        let adapter = rank.map(|rank| {
            let targets = Targets::Names(litgpt_targets(lora));
            let (dropout, dtype) = (dropout.unwrap_or(0.0), Some(weights));
            AdapterPlan::Lora(LoraPlan { rank, dropout, targets, dtype, ..LoraPlan::default() })
        });
        // bitsandbytes' PagedAdamW beside quantised weights: its state is not torch's.
        let kind = if quantization.is_some() { OptimizerKind::PagedAdamW32 } else { OptimizerKind::AdamW };
        let (batch_size, seq_len) =
            (number(&row["micro_batch_size"]).unwrap(), number(&row["max_seq_length"]).unwrap());
        let plan = TrainPlan {
            batch: Batch { batch_size, seq_len, ..Batch::default() },
            weights,
            optimizer: Optimizer { kind, ..Optimizer::default() },
            adapter,
            quantization,
            model_code: litgpt_code(row),
            gpu: gpu.clone(),
            // Its loop deletes neither logits nor loss.
            keep_loss: hub,
            // Gradients of earlier micro-batches are alive from the second on; all later ones are alike.
            // In 2023 the longest sample was in the first batch alone, which meets neither those nor an older graph.
            gradient_accumulation: if hub && number(&row["global_batch_size"]).is_none_or(|all| all > batch_size) {
                2
            } else {
                1
            },
            ..TrainPlan::default()
        };
        let run = train(&model, &plan)?;
        let what = if row["lora"].is_object() { format!("LoRA {scheme}") } else { "full".to_owned() };
        (run, format!("{what}, {batch_size} × {seq_len}"))
    };
    let name = format!("{} {what}", text(row, "model")).replace("  ", " ").replace(" ,", ",");
    if row["outcome"] == "OOM" {
        let fits = if run.process_bytes() > gpu.memory { "does not fit" } else { "**fits**" };
        return Err(format!(
            "ran out of memory: {name}: ours {:.1} GB {fits} in {card}",
            run.process_bytes() as f64 / GB
        ));
    }
    let steps = run.log.phases.iter().zip(&run.replay.phases);
    // The first step alone where the longest sample is there alone.
    let of_first =
        steps.filter(|(name, _)| hub || method == "inference" || (name.step, name.micro) == (Some(0), Some(0)));
    let ours = of_first.map(|(_, phase)| phase.peak).max().unwrap_or(0);
    let published = row["published_gb"].as_f64().ok_or("no figure")?;
    Ok(vec![Row { name, published, ours: ours as f64 / GB, unit: "GB" }])
}

/// Tokens of the mean padded batch, whose logits live on after a step: from the full fine-tune, where the states are
/// 8 bytes a parameter and the rest of the published figure is logits.
const MEAN_TOKENS: u64 = 1347;
/// Tokens of the longest sample, which are not published: the length whose peak is nearest to that of LoRA r32.
const LONGEST: u64 = 641;

fn peft(row: &Value) -> Outcome {
    if row["in_head"] != true {
        return Err("an older run of the same experiment".into());
    }
    let config = &row["peft_config"];
    let adapter = match (text(row, "peft_type"), text(&row["train_config"], "optimizer_type")) {
        ("FULL_FT", _) => None,
        ("LORA", "AdamW") if config["init_lora_weights"] != true || config["use_bdlora"].is_object() => {
            return Err("a variant of LoRA that is not modelled".into());
        }
        ("LORA", "AdamW") if !text(row, "experiment").contains("bdlora") => {
            let targets = config["target_modules"].as_array().ok_or("targets")?;
            let targets = Targets::Names(targets.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect());
            let (rank, dora) = (config["r"].as_u64().ok_or("rank")?, config["use_dora"] == true);
            Some(AdapterPlan::Lora(LoraPlan { rank, dora, targets, ..LoraPlan::default() }))
        }
        ("LORA", _) => return Err("a variant of LoRA that is not modelled".into()),
        _ => return peft_count(row).ok_or_else(|| "a method whose memory is not modelled".to_owned()),
    };
    let model = model("meta-llama/Llama-3.2-3B", false)?;
    let plan = TrainPlan {
        batch: Batch { batch_size: 4, seq_len: LONGEST, mask: true, padded: true, ..Batch::default() },
        clip: true,
        adapter,
        gpu: Gpus::embedded().find("L40S").unwrap(),
        ..TrainPlan::default()
    };
    let run = train(&model, &plan)?;
    let trainable = run.adapter.as_ref().map_or_else(
        || run.program.parameters.iter().map(|parameter| parameter.shape.elements()).sum(),
        |layout| layout.trainable(),
    );
    let after = run
        .log
        .phases
        .iter()
        .position(|phase| *phase == Phase::of_step(1, Work::Optimizer))
        .map_or(0, |at| run.replay.phases[at].after);
    let after = after + MEAN_TOKENS * 128_256 * 2;
    let gib = |key: &str| row[key].as_f64().unwrap_or(0.0) / GIB;
    let figure = |what: &str, published, ours, unit| Row {
        name: format!("{} {what}", text(row, "experiment")),
        published,
        ours,
        unit,
    };
    let counted = row["num_trainable_params"].as_f64().unwrap_or(0.0);
    Ok(vec![
        figure("trainable", counted / 1e6, trainable as f64 / 1e6, "M"),
        figure("allocated after a step", gib("measured_allocated_after_step_avg_bytes"), after as f64 / GIB, "GiB"),
        figure("peak reserved", gib("measured_bytes"), run.replay.peak_reserved() as f64 / GIB, "GiB"),
    ])
}

/// Methods of which only the trainable parameters are counted.
fn peft_count(row: &Value) -> Option<Vec<Row>> {
    let model = model("meta-llama/Llama-3.2-3B", false).ok()?;
    let adapter = OtherAdapter::from_adapter_config(&row["peft_config"]).ok()?;
    let trainable = adapter.trainable("llama", &model.inventory().ok()?).ok()?;
    let name = format!("{} trainable", text(row, "experiment"));
    let published = row["num_trainable_params"].as_f64()?;
    Some(vec![Row { name, published: published / 1e6, ours: trainable as f64 / 1e6, unit: "M" }])
}

/// What the notebooks print before training: reserved after loading. Ours is what is allocated then.
fn unsloth(row: &Value) -> Outcome {
    match row {
        _ if row["suspect"].is_array() => return Err("code and output are from different versions".into()),
        _ if text(row, "load_in_4bit") != "True" => return Err("not in 4 bits".into()),
        _ => {}
    }
    let name = text(row, "model").trim_start_matches("unsloth/");
    if name.starts_with("gpt-oss") {
        return Err("experts that Unsloth quantises itself".into());
    }
    let short = name.trim_end_matches("-bnb-4bit").trim_end_matches("-unsloth");
    let short = match short {
        "mistral-7b-v0.3" => "mistral-7b-instruct",
        "Mistral-Nemo-Base-2407" => "mistral-nemo",
        "llama-3-8b-Instruct" => "llama3-8b",
        short => short,
    };
    let entry = catalogue::find(short).ok_or("the model is not in the catalogue")?;
    let model = Model::new(entry.config, Some("AutoModelForCausalLM")).map_err(|error| error.to_string())?;
    let linears = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj";
    let targets = Targets::Names(linears.split(' ').map(str::to_owned).collect());
    let lora = LoraPlan { rank: number(&row["lora_r"]).ok_or("no rank")?, targets, ..LoraPlan::default() };
    let plan = TrainPlan {
        batch: Batch { seq_len: 8, ..Batch::default() },
        adapter: Some(AdapterPlan::Lora(lora)),
        quantization: Some(Quantization { double: true, prepare: false, ..Quantization::default() }),
        ..TrainPlan::default()
    };
    let run = train(&model, &plan)?;
    let trainable = run.adapter.as_ref().map(|layout| layout.trainable());
    if trainable != row["trainable_params"].as_u64() {
        return Err("other modules are adapted".into());
    }
    let published = row["published_start"].as_f64().ok_or("no figure")?;
    Ok(vec![Row { name: name.to_owned(), published, ours: run.replay.phases[0].before as f64 / GIB, unit: "GiB" }])
}
