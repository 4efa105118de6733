//! Options of `vramcast infer` that have no effect beside others are refused by name.

use vramcast_core::plan::{CacheImplementation, Choice, InferPlan};

use super::{Arguments, EngineName};
use crate::cli::Failure;
use crate::cli::engines::Wanted;
use crate::cli::lens::MethodName;

impl Arguments {
    /// Refuses options that what was asked for would not look at.
    pub(super) fn check(&self) -> Result<(), Failure> {
        if self.engine != EngineName::Hf {
            return self.check_engine();
        }
        if self.need.concurrency.is_some() {
            return Err(Failure::bad_input("--concurrency has no effect on transformers").hint("use --batch-size"));
        }
        let (what, unseen): (&str, &[(&str, bool)]) = match (self.need.solve, self.table) {
            (Some(_), true) => {
                return Err(Failure::bad_input("--table and --solve are two answers").hint("ask for one"));
            }
            (Some(Wanted::Batch), _) => ("--solve batch", &[("--batch-size", self.batch_size.is_some())]),
            (Some(Wanted::Context), _) => ("--solve context", &[("--prompt", self.prompt.is_some())]),
            (Some(Wanted::Gpu), _) => ("--solve gpu", &[("--gpu", self.gpu.is_some())]),
            (None, true) => {
                ("--table", &[("--batch-size", self.batch_size.is_some()), ("--prompt", self.prompt.is_some())])
            }
            _ => ("", &[]),
        };
        let short = self.need.solve.is_some() || self.table;
        let shown = self.shown().map(|(flag, given)| (flag, given && short));
        let what = if short && what.is_empty() { "--solve" } else { what };
        first(unseen.iter().copied().chain(shown), &format!("has no effect with {what}"), "leave it out")
    }

    /// A serving engine knows neither prompts and tokens nor transformers' kernels.
    fn check_engine(&self) -> Result<(), Failure> {
        let title = self.engine.title();
        let no_effect = format!("has no effect on {title}");
        let logical = matches!(self.engine, EngineName::LlamaCpp);
        let lengths = [
            (
                "--batch-size",
                self.batch_size.is_some() && !logical,
                "use --max-num-seqs (vLLM), --parallel (llama.cpp, Ollama) or --concurrency with --solve",
            ),
            ("--prompt", self.prompt.is_some(), "use --context"),
            ("--new-tokens", self.new_tokens.is_some(), "use --context: prompt and new tokens together"),
            ("--beams", self.beams.is_some(), "every beam is a sequence of its own: use --concurrency with --solve"),
            ("--dtype", self.dtype.is_some(), "the config's dtype decides; see --quantization and --kv-cache-dtype"),
            ("--cache", self.cache.is_some(), "use --kv-cache-dtype, or --cache-type-k and -v"),
            ("--no-kv-cache", self.no_kv_cache, "engines always cache"),
            ("--plan", self.plan.is_some(), "use the engine's own flags"),
            ("--method", self.lens.method != MethodName::Simulate, "formulas are for transformers"),
        ];
        for (flag, given, hint) in lengths {
            first([(flag, given)].into_iter(), &no_effect, hint)?;
        }
        let others = [
            ("--sample", self.sample),
            ("--eager", self.eager),
            ("--cache-backend", self.cache_backend.is_some()),
            ("--cache-bits", self.cache_bits.is_some()),
            ("--cache-group-size", self.cache_group_size.is_some()),
            ("--cache-residual", self.cache_residual.is_some()),
            ("--alloc-conf", self.alloc_conf.is_some()),
        ];
        first(
            others.into_iter().chain(self.media.given()).chain(self.draft.given()).chain(self.shown()),
            &no_effect,
            "leave it out",
        )?;
        if self.need.concurrency.is_some() && !matches!(self.need.solve, Some(Wanted::Gpu | Wanted::Gpus)) {
            return Err(Failure::bad_input("--concurrency is what must fit: it needs --solve gpu or gpus"));
        }
        match (self.need.solve, self.table) {
            (Some(_), true) => Err(Failure::bad_input("--table and --solve are two answers").hint("ask for one")),
            (Some(Wanted::Gpu), _) if self.gpu.is_some() => {
                Err(Failure::bad_input("--gpu has no effect with --solve gpu").hint("leave it out"))
            }
            (Some(Wanted::Context), _) | (None, true) if self.serving.context.is_some() => {
                Err(Failure::bad_input("--context has no effect here: all lengths are tried").hint("leave it out"))
            }
            _ => Ok(()),
        }
    }

    /// What only a full report shows.
    fn shown(&self) -> impl Iterator<Item = (&'static str, bool)> + use<> {
        [
            ("--all-gpus", self.all_gpus),
            ("--fail-under-headroom", self.fail_under_headroom.is_some()),
            ("--no-suggestions", self.no_suggestions),
            ("--explain", self.explain),
            ("--timeline", self.timeline),
        ]
        .into_iter()
    }
}

/// Refuses settings of a plan that do nothing.
pub(super) fn without_effect(plan: &InferPlan) -> Result<(), Failure> {
    if plan.new_tokens > 0 {
        return Ok(());
    }
    let kept = !matches!(plan.cache, CacheImplementation::Dynamic | CacheImplementation::None);
    let flags = [("--beams", plan.beams > 1), ("--sample", plan.choice == Choice::Sample), ("--cache", kept)];
    first(
        flags.into_iter(),
        "has no effect without new tokens",
        "one forward pass chooses no tokens: raise --new-tokens",
    )
}

fn first<'a>(mut flags: impl Iterator<Item = (&'a str, bool)>, why: &str, hint: &str) -> Result<(), Failure> {
    match flags.find(|(_, given)| *given) {
        Some((flag, _)) => Err(Failure::bad_input(format!("{flag} {why}")).hint(hint)),
        None => Ok(()),
    }
}
