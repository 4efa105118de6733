//! `vramcast infer`.

#[path = "infer_check.rs"]
mod check;
#[path = "infer_draft.rs"]
mod draft;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use vramcast_core::dtype::DType;
use vramcast_core::lens::{Method, Question};
use vramcast_core::plan::{
    AllocatorOptions, AttentionKind, CacheBackend, CacheImplementation, Choice, Gpu, InferPlan, Quantization,
    QuantizedCache,
};

use super::context::{Context, headroom};
use super::engines::{self, EngineArguments, EngineName, Need};
use super::hardware::{Card, HardwareArguments};
use super::lens::{self, LensArguments};
use super::media::MediaArguments;
use super::model::{Found, ModelArguments};
use super::{Answer, Failure, infer_table as table, plan_file, train};
use crate::estimate::run::{self as estimate, Options};
use crate::estimate::source::Reach;
use crate::estimate::start;

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
    /// A plan of generation as JSON, TOML or YAML; flags override it.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// A table: context x batch for hf, context x engine for the others.
    #[arg(long, help_heading = "Output")]
    table: bool,
    /// Prompts at once [default: 1].
    #[arg(long, short, value_name = "N", help_heading = "Batch")]
    batch_size: Option<u64>,
    /// Tokens of a prompt [default: 1024].
    #[arg(long, short, value_name = "N", visible_alias = "seq-len", help_heading = "Batch")]
    prompt: Option<u64>,
    /// Tokens to generate; 0: one forward pass [default: 128].
    #[arg(long, value_name = "N", help_heading = "Batch")]
    new_tokens: Option<u64>,
    /// Beams per prompt [default: 1].
    #[arg(long, value_name = "N", help_heading = "Batch")]
    beams: Option<u64>,
    /// Sample instead of taking the likeliest token.
    #[arg(long, help_heading = "Batch")]
    sample: bool,
    #[command(flatten)]
    media: MediaArguments,
    #[command(flatten)]
    draft: draft::DraftArguments,
    /// The type of the weights: bf16, fp16 or fp32 [default: as the config says, else bf16].
    #[arg(long, value_name = "TYPE", help_heading = "Precision")]
    dtype: Option<String>,
    /// How keys and values are kept [default: dynamic].
    #[arg(long, value_name = "HOW", help_heading = "Kernels")]
    cache: Option<Cache>,
    /// Compute everything again for every token (`use_cache=False`).
    #[arg(long, help_heading = "Kernels", conflicts_with = "cache")]
    no_kv_cache: bool,
    /// Who packs a quantised cache [default: quanto].
    #[arg(long, value_name = "WHO", help_heading = "Kernels")]
    cache_backend: Option<Backend>,
    /// Bits of a quantised cache [default: 4].
    #[arg(long, value_name = "N", help_heading = "Kernels")]
    cache_bits: Option<u64>,
    /// Elements of a quantised cache that share a scale [default: 64].
    #[arg(long, value_name = "N", help_heading = "Kernels")]
    cache_group_size: Option<u64>,
    /// New tokens that a quantised cache keeps in full width [default: 128].
    #[arg(long, value_name = "N", help_heading = "Kernels")]
    cache_residual: Option<u64>,
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
    /// Grows with every token.
    Dynamic,
    /// Allocated once.
    Static,
    /// Grows on the host.
    Offloaded,
    /// Refused: allocated once, on the host.
    #[value(alias = "offloaded_static")]
    OffloadedStatic,
    /// In few bits, but for the newest tokens.
    Quantized,
}

/// Who packs a quantised cache.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Backend {
    /// optimum-quanto.
    Quanto,
    /// HQQ.
    Hqq,
}

pub(super) fn run(arguments: &Arguments, context: &Context) -> Result<Answer, Failure> {
    let found = arguments.find()?;
    let model = found.require_model()?;
    arguments.serving.check(arguments.engine)?;
    arguments.check()?;
    if arguments.engine != EngineName::Hf {
        let gpu = arguments.card(None, context)?.gpu;
        let as_json = context.text_or_json("infer with a serving engine")?;
        // llama.cpp's logical batch goes by the same letter.
        let serving = &EngineArguments { logical_batch: arguments.batch_size, ..arguments.serving.clone() };
        let (engine, reach) = (arguments.engine, Reach::Machine);
        let request = engines::Request { engine, name: &found.name, model, arguments: serving, reach };
        return match arguments.need.solve {
            Some(_) => engines::solve_engine(&request, &arguments.need, &gpu, as_json),
            None => engines::run(&request, &gpu, arguments.table, as_json),
        };
    }
    if let Some(method) = arguments.lens.method.lens() {
        return arguments.formula(method, &found, context);
    }
    let (plan, notes) = arguments.plan(&found, context)?;
    if let Some(wanted) = arguments.need.solve {
        let as_json = context.text_or_json("infer --solve")?;
        return engines::solve_generate(wanted, &found.name, model, &plan, as_json);
    }
    if arguments.table {
        return table::of_generate(&found.name, model, &plan, context.text_or_json("infer --table")?);
    }
    arguments.lens.apply(&mut Question::of_infer(&plan), context)?;
    let kept = |memory: u64| arguments.fail_under_headroom.as_deref().map_or(Ok(0), |text| headroom(text, memory));
    let options = Options {
        kept: &kept,
        suggest: !arguments.no_suggestions,
        all_cards: arguments.all_gpus,
        cards: &|| Ok(context.cards()),
    };
    let estimate = estimate::generate(&found, plan, notes, &options)?;
    train::present(&estimate, (arguments.explain, arguments.timeline), context)
}

impl Arguments {
    /// The model of the command line, or the one that the plan file names.
    fn find(&self) -> Result<Found, Failure> {
        let mut model = self.model.clone();
        if model.is_silent()
            && let Some(path) = &self.plan
        {
            model.model = plan_file::read(path)?.value["model"].as_str().map(str::to_owned);
        }
        model.find(false)
    }

    /// The card of the flags, else that of a file, else that of a profile or of this machine.
    fn card(&self, of_file: Option<Gpu>, context: &Context) -> Result<Card, Failure> {
        let named = self.gpu.as_deref().map(|name| context.cards().find(name)).transpose()?;
        self.hardware.card(named.or(of_file), || Ok(context.cards()))
    }

    /// A formula takes any storage format for the weights.
    fn formula(&self, method: Method, found: &Found, context: &Context) -> Result<Answer, Failure> {
        let plain = Self { dtype: None, ..self.clone() };
        let (plan, _) = plain.plan(found, context)?;
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
        let found = self.find()?;
        let (plan, _) = self.plan(&found, context)?;
        Ok((found, plan))
    }

    /// The plan of the file, overridden by flags, and what a report should say.
    fn plan(&self, found: &Found, context: &Context) -> Result<(InferPlan, Vec<String>), Failure> {
        let mut notes = Vec::new();
        let file = self.plan.as_deref().map(plan_file::read).transpose()?;
        let names_card = file.as_ref().is_some_and(|file| file.value.get("gpu").is_some());
        let (mut plan, _) = start::generation(file, found.stored_dtype(), || Ok(context.cards()))?;
        plan.batch.batch_size = self.batch_size.unwrap_or(plan.batch.batch_size);
        plan.batch.seq_len = self.prompt.unwrap_or(plan.batch.seq_len);
        plan.new_tokens = self.new_tokens.unwrap_or(plan.new_tokens);
        plan.beams = self.beams.unwrap_or(plan.beams);
        notes.extend(self.media.apply(&mut plan.batch, found.model.as_ref())?);
        if let Some(text) = &self.serving.quantization {
            plan.quantization = Some(Quantization::parse(text)?);
        }
        if let Some(text) = &self.dtype {
            plan.weights = DType::parse(text)
                .ok_or_else(|| Failure::bad_input(format!("--dtype: {text} is not bf16, fp16 or fp32")))?;
        }
        let card = self.card(names_card.then(|| plan.gpu.clone()), context)?;
        notes.extend(card.from.map(|from| format!("{}: {from}", card.gpu.name)));
        notes.extend(card.notes);
        plan.gpu = card.gpu;
        plan.allocator = card.allocator.unwrap_or(plan.allocator);
        if let Some(text) = &self.alloc_conf {
            let (allocator, ignored) = AllocatorOptions::parse(text)?;
            notes.extend(ignored.iter().map(|key| format!("PYTORCH_ALLOC_CONF: {key} has no effect on these levels")));
            plan.allocator = allocator;
        }
        match (self.no_kv_cache, self.cache) {
            (true, _) => plan.cache = CacheImplementation::None,
            (_, Some(Cache::Dynamic)) => plan.cache = CacheImplementation::Dynamic,
            (_, Some(Cache::Static)) => plan.cache = CacheImplementation::Static,
            (_, Some(Cache::Offloaded)) => plan.cache = CacheImplementation::Offloaded,
            (_, Some(Cache::Quantized)) => plan.cache = CacheImplementation::Quantized(QuantizedCache::default()),
            (_, Some(Cache::OffloadedStatic)) => {
                let hint = "use dynamic, static, offloaded or quantized";
                return Err(Failure::bad_input("--cache offloaded-static is not simulated").hint(hint));
            }
            (false, None) => {}
        }
        self.pack_cache(&mut plan)?;
        if self.sample {
            plan.choice = Choice::Sample;
        }
        if self.eager {
            plan.attention = AttentionKind::Eager;
        }
        self.draft.apply(&mut plan)?;
        plan.check()?;
        check::without_effect(&plan)?;
        Ok((plan, notes))
    }

    /// Settings of a quantised cache.
    fn pack_cache(&self, plan: &mut InferPlan) -> Result<(), Failure> {
        let flags = [
            ("--cache-backend", self.cache_backend.is_some()),
            ("--cache-bits", self.cache_bits.is_some()),
            ("--cache-group-size", self.cache_group_size.is_some()),
            ("--cache-residual", self.cache_residual.is_some()),
        ];
        let CacheImplementation::Quantized(how) = &mut plan.cache else {
            return match flags.iter().find(|(_, given)| *given) {
                Some((flag, _)) => Err(Failure::bad_input(format!("{flag} has no effect on a cache in full width"))
                    .hint("add --cache quantized")),
                None => Ok(()),
            };
        };
        how.backend = self.cache_backend.map_or(how.backend, |backend| match backend {
            Backend::Quanto => CacheBackend::Quanto,
            Backend::Hqq => CacheBackend::Hqq,
        });
        how.bits = self.cache_bits.unwrap_or(how.bits);
        how.group_size = self.cache_group_size.unwrap_or(how.group_size);
        how.residual_length = self.cache_residual.unwrap_or(how.residual_length);
        Ok(())
    }
}
