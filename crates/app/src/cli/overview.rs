//! `vramcast MODEL`: every data type × inference, training, LoRA and QLoRA at a glance.

use clap::Args;
use serde_json::{Value, json};
use vramcast_core::ask::{positions, target_positions};
use vramcast_core::dtype::DType;
use vramcast_core::dtype::Format as StorageFormat;
use vramcast_core::lens::{Facts, GIB, Method, rule_of_thumb};
use vramcast_core::memory::simulation;
use vramcast_core::model::{Inventory, Model};
use vramcast_core::plan::{
    AdapterPlan, AllocatorOptions, Batch, Checkpointing, Gpu, InferPlan, LoraPlan, PlanError, Quantization,
    QuantizationScheme, Targets, TrainPlan,
};
use vramcast_core::units::grouped;

use super::context::Context;
use super::lens::MethodName;
use super::model::{AssumeArguments, ModelArguments};
use super::output::MachineArguments;
use super::overview_detail as detail;
use super::{Answer, Failure};
use crate::ask::found::{Found, Reach, Subject};
use crate::ask::work;
use crate::exit::Exit;
use crate::render::page::{Block, Page};
use crate::render::table::Table;

/// Data types of the table.
pub(super) const DATA_TYPES: [&str; 8] = ["fp32", "fp16", "bf16", "fp8", "int8", "int4", "mxfp4", "nvfp4"];

/// What to look at.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    assume: AssumeArguments,
    /// Only this data type (`vramcast --list-types`) [default: all].
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,
    /// Samples at once.
    #[arg(long, short, value_name = "N", default_value_t = 1, alias = "per-device-batch")]
    batch_size: u64,
    /// Tokens of a sample [default: 2048; fewer of a model that computes them one by one].
    #[arg(long, short, value_name = "N", alias = "seq-len", alias = "seq-length")]
    sequence_length: Option<u64>,
    /// Rank of LoRA's adapters.
    #[arg(long, value_name = "R", default_value_t = 64)]
    lora_rank: u64,
    /// Show splits over several cards, and which cards hold what.
    #[arg(long)]
    show_detailed: bool,
    /// List data types and cards.
    #[arg(long)]
    list_types: bool,
    /// The card of the simulation [default: this machine's, else H200].
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    #[command(flatten)]
    machine: MachineArguments,
    /// simulate, or rule-of-thumb: the factors of the tool this page is modelled on.
    #[arg(long, value_name = "METHOD", default_value = "simulate", hide_possible_values = true)]
    method: MethodName,
}

/// One data type in bytes; what cannot be is absent.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    pub name: String,
    pub total: u64,
    pub inference: Option<u64>,
    /// Whether inference is weights in this type beside the rest of a bf16 run.
    pub composed: bool,
    pub training: Option<u64>,
    pub lora: Option<u64>,
    pub qlora: Option<u64>,
}

/// What the page is made from.
pub(super) struct Overview<'a> {
    pub model: &'a Model,
    pub inventory: Inventory,
    pub facts: Option<Facts>,
    pub batch: Batch,
    pub lora_rank: u64,
    pub gpu: Gpu,
    pub allocator: AllocatorOptions,
    pub by_rule: bool,
    /// Positions the model can take.
    pub positions: u64,
    /// Why a column is empty.
    pub refusals: Vec<String>,
    /// Whether adapters sit on all linears, for want of PEFT's own choice.
    pub all_linear: bool,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    if arguments.list_types {
        return detail::types(context);
    }
    let by_rule = match arguments.method {
        MethodName(None) => false,
        MethodName(Some(Method::RuleOfThumb)) => true,
        _ => {
            return Err(Failure::bad_input("--method: the overview takes simulate or rule-of-thumb")
                .hint("`vramcast compare MODEL` shows all formulas"));
        }
    };
    for (name, value, most) in [
        ("--batch-size", arguments.batch_size, 1 << 20),
        ("--sequence-length", arguments.sequence_length.unwrap_or(1), 1 << 24),
    ] {
        if !(1..=most).contains(&value) {
            return Err(Failure::bad_input(format!("{name}: {value} is not from 1 to {most}")));
        }
    }
    let subject = Subject { assume: arguments.assume.assume, ..arguments.model.subject() };
    let found = subject.find(Reach::Machine, false)?;
    let model = found.require_model()?;
    let facts = match (Facts::of(model), by_rule) {
        (Err(silent), true) => return Err(Failure::bad_input(silent.to_string())),
        (facts, _) => facts.ok(),
    };
    let machine = arguments.machine.machine();
    let cards = machine.cards(&context.settings)?;
    let card = machine.card(arguments.gpu.clone().map(Value::from).as_ref(), &cards)?;
    let gpu = match (&card, arguments.gpu.as_deref()) {
        (Some(card), _) => serde_json::from_value(card.tree.clone()).unwrap_or_else(|_| Gpu::h200()),
        (None, Some(name)) => cards.find(name)?,
        (None, None) => Gpu::h200(),
    };
    let most = positions(model).unwrap_or(u64::MAX).max(1);
    let usual = work::usual_tokens(model);
    let seq_len = arguments.sequence_length.unwrap_or(usual).min(most);
    let target_len = target_positions(model).filter(|most| *most < seq_len);
    let batch = Batch { batch_size: arguments.batch_size, seq_len, target_len, ..Batch::default() };
    let inventory = model.inventory()?;
    let mut overview = Overview {
        model,
        inventory,
        facts,
        batch,
        lora_rank: arguments.lora_rank,
        gpu,
        allocator: card.as_ref().and_then(|card| card.allocator).unwrap_or_default(),
        by_rule,
        positions: most,
        refusals: card.map(|card| card.notes).unwrap_or_default(),
        all_linear: false,
    };
    if arguments.sequence_length.is_none() && seq_len == usual && usual < work::plain_tokens() {
        let said = format!("the model computes token by token: {usual} tokens here, --sequence-length says otherwise");
        overview.refusals.push(said);
    }
    let mut rows = Vec::new();
    for name in types(arguments, context) {
        let format = context.settings.storage_format(&name)?;
        rows.push(overview.row(&name, &format)?);
    }
    page(arguments, &found, &overview, &rows, context)
}

fn types(arguments: &Arguments, context: &Context) -> Vec<String> {
    if let Some(name) = &arguments.dtype {
        return vec![name.clone()];
    }
    if let Some(names) = &context.settings.display.data_types {
        return names.clone();
    }
    let own = context.settings.formats.iter().map(|format| format.name.clone());
    DATA_TYPES.iter().map(|name| (*name).to_owned()).chain(own).collect()
}

impl Overview<'_> {
    fn row(&mut self, name: &str, format: &StorageFormat) -> Result<Row, Failure> {
        if self.by_rule {
            return self.rule(name, format);
        }
        let shape = |dims: &[u64]| format.bytes(dims);
        let total = self
            .inventory
            .parameters
            .iter()
            .try_fold(0u64, |sum, parameter| sum.checked_add(shape(parameter.shape.sizes())?))
            .ok_or_else(|| Failure::bad_input(format!("{name}: the weights do not fit in 64 bits")))?;
        let mut row = Row { name: name.to_uppercase(), total, ..Row::default() };
        let plain = format.dtype.filter(|dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16));
        let scheme = match format.name.as_str() {
            "int8" => Some(Quantization { scheme: QuantizationScheme::Int8, ..Quantization::default() }),
            "int4" | "nf4" => Some(Quantization::default()),
            "nf4-dq" => Some(Quantization { double: true, ..Quantization::default() }),
            "fp4" => Some(Quantization { scheme: QuantizationScheme::Fp4, ..Quantization::default() }),
            _ => None,
        };
        match (plain, scheme) {
            (Some(dtype), _) => {
                row.inference = self.inference(dtype, None);
                row.training = self.training(dtype, false, None);
                row.lora = self.training(dtype, true, None);
                let quantization = Quantization { compute: dtype, ..Quantization::default() };
                row.qlora = self.training(dtype, true, Some(quantization));
            }
            (None, Some(quantization)) => {
                row.inference = self.inference(DType::BF16, Some(quantization.clone()));
                row.lora = self.training(DType::BF16, true, Some(quantization));
            }
            (None, None) => {
                let dense = self.inventory.total().saturating_mul(2);
                let rest = self.inference(DType::BF16, None).map(|bytes| bytes.saturating_sub(dense));
                row.inference = rest.map(|rest| rest.saturating_add(total));
                row.composed = row.inference.is_some();
            }
        }
        Ok(row)
    }

    /// The factors on a count of their own.
    fn rule(&self, name: &str, format: &StorageFormat) -> Result<Row, Failure> {
        let (bits, weights) = format
            .bits_per_weight()
            .ok_or_else(|| Failure::bad_input(format!("--dtype: {name} has no size per weight")))?;
        // The document's types have no scales: whole and half bytes.
        let bytes = match format.name.as_str() {
            "mxfp4" | "nvfp4" => 0.5,
            _ => bits as f64 / weights as f64 / 8.0,
        };
        let Some(facts) = &self.facts else { return Ok(Row::default()) };
        let row = rule_of_thumb::row(facts, bytes, self.lora_rank);
        Ok(Row {
            name: name.to_uppercase(),
            total: row.total as u64,
            inference: Some(row.inference as u64),
            training: Some(row.training as u64),
            lora: Some(row.lora as u64),
            ..Row::default()
        })
    }

    fn note(&mut self, what: &str, error: &PlanError) {
        let note = format!("{what}: {error}");
        if !self.refusals.contains(&note) {
            self.refusals.push(note);
        }
    }

    fn inference(&mut self, weights: DType, quantization: Option<Quantization>) -> Option<u64> {
        // Two new tokens: the second is the first that reads the cache. They need positions too.
        let prompt = self.batch.seq_len.min(self.positions.saturating_sub(2)).max(1);
        let plan = InferPlan {
            batch: Batch { seq_len: prompt, ..self.batch.clone() },
            new_tokens: 2,
            weights,
            quantization,
            gpu: self.gpu.clone(),
            allocator: self.allocator,
            ..InferPlan::default()
        };
        let forward = InferPlan { new_tokens: 0, ..plan.clone() };
        let run = simulation::infer(self.model, &plan).or_else(|_| simulation::infer(self.model, &forward));
        match run {
            Ok(run) => Some(run.process_bytes()),
            Err(error) => {
                self.note("inference", &error);
                None
            }
        }
    }

    fn training(&mut self, weights: DType, lora: bool, quantization: Option<Quantization>) -> Option<u64> {
        let adapter = lora.then(|| AdapterPlan::Lora(LoraPlan { rank: self.lora_rank, ..LoraPlan::default() }));
        let what = match (lora, &quantization) {
            (true, Some(_)) => "QLoRA",
            (true, None) => "LoRA",
            _ => "training",
        };
        // `prepare_model_for_kbit_training` turns it on unless told not to, as in `vramcast train --qlora`.
        let checkpointing = if quantization.is_some() { Checkpointing::Full } else { Checkpointing::Off };
        let plan = TrainPlan {
            batch: self.batch.clone(),
            weights,
            checkpointing,
            adapter,
            quantization,
            gpu: self.gpu.clone(),
            allocator: self.allocator,
            ..TrainPlan::default()
        };
        // Where PEFT's own choice of modules finds none, every linear is adapted.
        let run = simulation::train(self.model, &plan).or_else(|error| {
            let Some(AdapterPlan::Lora(lora)) = &plan.adapter else { return Err(error) };
            let lora = LoraPlan { targets: Targets::parse("all-linear"), ..lora.clone() };
            simulation::train(self.model, &TrainPlan { adapter: Some(AdapterPlan::Lora(lora)), ..plan.clone() })
                .inspect(|_| self.all_linear = true)
                .map_err(|_| error)
        });
        match run {
            Ok(run) => Some(run.process_bytes()),
            Err(error) => {
                self.note(what, &error);
                None
            }
        }
    }
}

fn page(
    arguments: &Arguments,
    found: &Found,
    overview: &Overview<'_>,
    rows: &[Row],
    context: &Context,
) -> Result<Answer, Failure> {
    let digits = context.settings.display.decimal_places;
    let number = |bytes: u64| format!("{:.digits$}", bytes as f64 / GIB);
    let cell = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), number);
    let architecture = overview.model.config()["model_type"].as_str().unwrap_or("unknown").to_owned();
    let parameters = match &overview.facts {
        Some(facts) if overview.by_rule => rule_of_thumb::parameters(facts.layers, facts.hidden, facts.vocab) as u64,
        _ => overview.inventory.total(),
    };
    let mut page = Page::new(format!("Model: {}", found.name));
    page.add(Block::Text(format!("Architecture: {architecture}\nParameters: {}", grouped(parameters))));
    let mut table = Table::new(&["Data Type", "Total Size", "Inference", "Training (Adam)", "LoRA", "QLoRA"]);
    for row in rows {
        let inference = format!("{}{}", if row.composed { "~" } else { "" }, cell(row.inference));
        table.row(vec![
            row.name.clone(),
            number(row.total),
            inference,
            cell(row.training),
            cell(row.lora),
            cell(row.qlora),
        ]);
    }
    page.table("Memory Requirements by Data Type and Scenario (GiB)", table);
    let mut document = json!({
        "schema": 1, "model": found.name, "architecture": architecture, "parameters": parameters,
        "method": if overview.by_rule { "rule-of-thumb" } else { "simulate" },
        "batch_size": overview.batch.batch_size, "sequence_length": overview.batch.seq_len,
        "lora_rank": overview.lora_rank,
        "rows": rows.iter().map(|row| json!({
            "dtype": row.name, "total": row.total, "inference": row.inference, "training": row.training,
            "lora": row.lora, "qlora": row.qlora,
        })).collect::<Vec<_>>(),
    });
    if arguments.show_detailed {
        detail::add(&mut page, &mut document, overview, rows, context)?;
    }
    for note in notes(overview, rows, found) {
        page.add(Block::Note(note));
    }
    context.answer(&page, document, Exit::Success)
}

fn notes(overview: &Overview<'_>, rows: &[Row], found: &Found) -> Vec<String> {
    let mut notes = found.notes.clone();
    if overview.by_rule {
        notes.push(
            "weights × 1.2 and × 4 × 1.3 on a count of 12Lh² + 2Vh + (2L + 1)h; without --method: simulated".into(),
        );
        return notes;
    }
    let batch = &overview.batch;
    if batch.seq_len == overview.positions {
        notes.push(format!("the model has {} positions", batch.seq_len));
    }
    notes.push(format!(
        "what the whole process takes on one {}, by simulation: {} × {} tokens, AdamW, LoRA rank {}",
        overview.gpu.name, batch.batch_size, batch.seq_len, overview.lora_rank
    ));
    if rows.iter().any(|row| row.composed) {
        notes.push("~: weights in this type beside the rest of a bf16 run".into());
    }
    if rows.iter().any(|row| matches!(row.name.as_str(), "INT8" | "INT4")) {
        notes.push("int8 and int4 run as bitsandbytes holds them (LLM.int8, nf4); a - has no such run".into());
    }
    if rows.iter().any(|row| row.qlora.is_some() || (row.lora.is_some() && row.training.is_none())) {
        notes.push(
            "QLoRA, and LoRA on int8 and int4: layers are recomputed, as prepare_model_for_kbit_training turns it on"
                .into(),
        );
    }
    if overview.all_linear {
        notes.push("LoRA on all linears: PEFT's modules for this type of model are not in it".into());
    }
    notes.extend(overview.refusals.iter().cloned());
    notes
}
