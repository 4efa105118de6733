//! `vramcast infer`.

use clap::{Args, ValueEnum};
use vramcast_core::dtype::DType;
use vramcast_core::lens::{Method, Question};
use vramcast_core::memory::simulation;
use vramcast_core::plan::{
    AllocatorOptions, AttentionKind, Batch, CacheImplementation, Choice, Gpu, InferPlan, RunPlan,
};
use vramcast_core::planner::suggest;
use vramcast_core::report;

use super::context::{Context, headroom};
use super::engines::{self, EngineArguments, EngineName, Need};
use super::hardware::{self, Card, HardwareArguments};
use super::lens::{self, LensArguments};
use super::model::{Found, ModelArguments, positions};
use super::{Answer, Failure, infer_table as table, train};
use crate::exit::Exit;

/// What to generate, and how.
#[derive(Debug, Clone, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Who serves: transformers by simulation, or an engine by its own budget rules.
    #[arg(long, value_name = "ENGINE", default_value = "hf", visible_alias = "engines")]
    engine: EngineName,
    #[command(flatten)]
    serving: EngineArguments,
    #[command(flatten)]
    need: Need,
    /// A table: context x batch for hf, context x engine for the others.
    #[arg(long, help_heading = "Output")]
    table: bool,
    /// Prompts at once.
    #[arg(long, short, value_name = "N", default_value_t = 1, help_heading = "Batch")]
    batch_size: u64,
    /// Tokens of a prompt.
    #[arg(long, short, value_name = "N", default_value_t = 1024, visible_alias = "seq-len", help_heading = "Batch")]
    prompt: u64,
    /// Tokens to generate; 0: one forward pass.
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Batch")]
    new_tokens: u64,
    /// Beams per prompt.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Batch")]
    beams: u64,
    /// Sample instead of taking the likeliest token.
    #[arg(long, help_heading = "Batch")]
    sample: bool,
    /// The type of the weights: bf16, fp16 or fp32 [default: as the config says, else bf16].
    #[arg(long, value_name = "TYPE", help_heading = "Precision")]
    dtype: Option<String>,
    /// How keys and values are kept.
    #[arg(long, value_name = "HOW", default_value = "dynamic", help_heading = "Kernels")]
    cache: Cache,
    /// Compute everything again for every token (`use_cache=False`).
    #[arg(long, help_heading = "Kernels", conflicts_with = "cache")]
    no_kv_cache: bool,
    /// Use the model's eager attention instead of SDPA.
    #[arg(long, help_heading = "Kernels")]
    eager: bool,
    /// The card [default: this machine's, else H200]; see `vramcast list gpus`.
    #[arg(long, value_name = "NAME", help_heading = "Hardware")]
    gpu: Option<String>,
    #[command(flatten)]
    hardware: HardwareArguments,
    /// Say which of all known cards hold it.
    #[arg(long, help_heading = "Hardware")]
    all_gpus: bool,
    /// PYTORCH_ALLOC_CONF of the run.
    #[arg(long, value_name = "OPTIONS", help_heading = "Hardware")]
    alloc_conf: Option<String>,
    #[command(flatten)]
    lens: LensArguments,
    /// End with 1 when less than this stays free: 10% or 8GiB.
    #[arg(long, value_name = "SIZE", help_heading = "Output")]
    fail_under_headroom: Option<String>,
    /// Do not look for changes that would make it fit.
    #[arg(long, help_heading = "Output")]
    no_suggestions: bool,
    /// Show what is alive at the peak, tensor by tensor, and by module.
    #[arg(long, help_heading = "Output")]
    explain: bool,
    /// Plot memory over the run.
    #[arg(long, help_heading = "Output")]
    timeline: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Cache {
    Dynamic,
    Static,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let found = arguments.model.find(false)?;
    let model = found.require_model()?;
    arguments.serving.check(arguments.engine)?;
    if arguments.engine != EngineName::Hf {
        let gpu = arguments.card(context)?.gpu;
        let as_json = context.text_or_json("infer with a serving engine")?;
        let serving = &arguments.serving;
        let request = engines::Request { engine: arguments.engine, name: &found.name, model, arguments: serving };
        return match arguments.need.solve {
            Some(_) => engines::solve_engine(&request, &arguments.need, &gpu, as_json),
            None => engines::run(&request, &gpu, arguments.table, as_json),
        };
    }
    if let Some(method) = arguments.lens.method.lens() {
        return arguments.formula(method, &found, context);
    }
    let (plan, mut notes) = arguments.plan(found.stored_dtype(), context)?;
    if let Some(wanted) = arguments.need.solve {
        let as_json = context.text_or_json("infer --solve")?;
        return engines::solve_generate(wanted, &found.name, model, &plan, as_json);
    }
    if arguments.table {
        return table::of_generate(&found.name, model, &plan, context.text_or_json("infer --table")?);
    }
    let tokens = plan.batch.seq_len.saturating_add(plan.new_tokens);
    if let Some(most) = positions(model).filter(|most| *most < tokens) {
        notes.push(format!("{} has {most} positions, and {tokens} tokens need as many: torch would fail", found.name));
    }
    arguments.lens.apply(&mut Question::of_infer(&plan), context)?;
    let simulation = simulation::infer(model, &plan)?;
    let own = plan.gpu.clone();
    let kept = arguments.fail_under_headroom.as_deref().map_or(Ok(0), |text| headroom(text, own.memory))?;
    let limit = own.memory.saturating_sub(kept);
    let now = simulation.process_bytes();
    notes.extend(hardware::beside_others(&own, now));
    let suggestions = if now > limit && !arguments.no_suggestions {
        suggest::for_generation(model, &plan, limit, now, &context.cards())
    } else {
        Vec::new()
    };
    let judged: Vec<Gpu> = if arguments.all_gpus { context.cards().all().collect() } else { vec![own] };
    let mut report = report::summarize(&found.name, model, RunPlan::Infer(Box::new(plan)), &simulation, &judged);
    notes.extend(found.notes.iter().filter(|note| !model.notes().contains(note)).cloned());
    report.notes.splice(0..0, notes);
    let exit = if now <= limit { Exit::Success } else { Exit::No };
    train::present(&report, &suggestions, (arguments.explain, arguments.timeline), exit, context)
}

impl Arguments {
    fn card(&self, context: &Context) -> Result<Card, Failure> {
        let named = self.gpu.as_deref().map(|name| context.cards().find(name)).transpose()?;
        self.hardware.card(named, || Ok(context.cards()))
    }

    /// A formula takes any storage format for the weights.
    fn formula(&self, method: Method, found: &Found, context: &Context) -> Result<Answer, Failure> {
        let plain = Self { dtype: None, ..self.clone() };
        let (plan, _) = plain.plan(found.stored_dtype(), context)?;
        let mut question = Question::of_infer(&plan);
        self.lens.apply(&mut question, context)?;
        if let Some(name) = &self.dtype {
            let bits = context.storage_format(name)?.bits_per_weight();
            let (bits, weights) =
                bits.ok_or_else(|| Failure::bad_input(format!("--dtype: {name} has no size per weight")))?;
            question.weight_bytes = bits as f64 / weights as f64 / 8.0;
        }
        lens::answer(method, found, &question, &plan.gpu, context)
    }

    /// The model and the plan, for commands that run it elsewhere.
    pub(super) fn found_and_plan(&self, context: &Context) -> Result<(Found, InferPlan), Failure> {
        let found = self.model.find(false)?;
        let (plan, _) = self.plan(found.stored_dtype(), context)?;
        Ok((found, plan))
    }

    fn plan(&self, stored: Option<DType>, context: &Context) -> Result<(InferPlan, Vec<String>), Failure> {
        let mut notes = Vec::new();
        let weights = match &self.dtype {
            Some(text) => DType::parse(text)
                .ok_or_else(|| Failure::bad_input(format!("--dtype: {text} is not bf16, fp16 or fp32")))?,
            None => stored.unwrap_or(DType::BF16),
        };
        let (allocator, ignored) = AllocatorOptions::parse(self.alloc_conf.as_deref().unwrap_or_default())?;
        notes.extend(ignored.iter().map(|key| format!("PYTORCH_ALLOC_CONF: {key} has no effect on these levels")));
        let card = self.card(context)?;
        notes.extend(card.from.map(|from| format!("{}: {from}", card.gpu.name)));
        notes.extend(card.notes);
        let plan = InferPlan {
            batch: Batch { batch_size: self.batch_size, seq_len: self.prompt, ..Batch::default() },
            new_tokens: self.new_tokens,
            cache: match (self.no_kv_cache, self.cache) {
                (true, _) => CacheImplementation::None,
                (_, Cache::Dynamic) => CacheImplementation::Dynamic,
                (_, Cache::Static) => CacheImplementation::Static,
            },
            beams: self.beams,
            choice: if self.sample { Choice::Sample } else { Choice::Greedy },
            weights,
            attention: if self.eager { AttentionKind::Eager } else { AttentionKind::Sdpa },
            gpu: card.gpu,
            allocator: if self.alloc_conf.is_some() { allocator } else { card.allocator.unwrap_or(allocator) },
            ..InferPlan::default()
        };
        plan.check()?;
        Ok((plan, notes))
    }
}
