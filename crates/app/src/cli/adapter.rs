//! Flags of adapters and quantised bases.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use vramcast_core::plan::adapter::{Ia3Plan, OftPlan, OtherAdapter, PrefixPlan, PromptPlan, VeraPlan};
use vramcast_core::plan::{AdapterPlan, LoraPlan, Quantization, Situation, Targets, TrainPlan};
use vramcast_core::source::json;

use super::Failure;

/// What is trained instead of the whole model.
#[derive(Debug, Args)]
pub(super) struct AdapterArguments {
    /// Train LoRA adapters as PEFT adds them.
    #[arg(long, help_heading = "Adapters")]
    lora: bool,
    /// LoRA on a base quantised to nf4, after prepare_model_for_kbit_training.
    #[arg(long, help_heading = "Adapters")]
    qlora: bool,
    /// Rank of the adapters [default: 8].
    #[arg(long, value_name = "R", help_heading = "Adapters")]
    lora_rank: Option<u64>,
    /// Alpha of the adapters (no effect on memory).
    #[arg(long, value_name = "ALPHA", help_heading = "Adapters")]
    lora_alpha: Option<f64>,
    /// Dropout on the adapters' input [default: 0].
    #[arg(long, value_name = "P", help_heading = "Adapters")]
    lora_dropout: Option<f64>,
    /// Modules to adapt: names (comma-separated), a regular expression, or all-linear [default: PEFT's for the model type].
    #[arg(long, value_name = "TARGETS", help_heading = "Adapters")]
    lora_target_modules: Option<String>,
    /// Modules trained in full beside the adapters (comma-separated).
    #[arg(long, value_name = "NAMES", help_heading = "Adapters")]
    modules_to_save: Option<String>,
    /// Weight-decomposed adapters (DoRA).
    #[arg(long, help_heading = "Adapters")]
    dora: bool,
    /// An existing adapter_config.json, or a folder with one.
    #[arg(long, value_name = "PATH", help_heading = "Adapters")]
    adapter: Option<PathBuf>,
    /// Which of PEFT's methods: lora, ia3, vera, prompt-tuning, prefix-tuning or oft [default: lora].
    #[arg(long, value_name = "METHOD", help_heading = "Adapters")]
    peft_method: Option<Method>,
    /// Virtual tokens of prompt and prefix tuning [default: 20].
    #[arg(long, value_name = "N", help_heading = "Adapters")]
    virtual_tokens: Option<u64>,
    /// How the frozen base is held: nf4, nf4-dq, fp4, fp4-dq or int8.
    #[arg(long, value_name = "SCHEME", help_heading = "Adapters")]
    quantization: Option<String>,
}

/// PEFT's methods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    Lora,
    Ia3,
    Vera,
    PromptTuning,
    PrefixTuning,
    Oft,
}

impl AdapterArguments {
    /// A method other than LoRA, by its flags.
    fn other(&self, method: Method) -> Result<OtherAdapter, Failure> {
        let refused = [
            ("--lora", self.lora),
            ("--qlora", self.qlora),
            ("--dora", self.dora),
            ("--lora-dropout", self.lora_dropout.is_some()),
            ("--lora-alpha", self.lora_alpha.is_some()),
            ("--modules-to-save", self.modules_to_save.is_some()),
            ("--adapter", self.adapter.is_some()),
            ("--lora-rank", self.lora_rank.is_some() && !matches!(method, Method::Vera | Method::Oft)),
        ];
        if let Some((flag, _)) = refused.into_iter().find(|(_, given)| *given) {
            return Err(Failure::bad_input(format!("{flag} does not go with this --peft-method")));
        }
        let prompts = matches!(method, Method::PromptTuning | Method::PrefixTuning);
        if prompts && self.lora_target_modules.is_some() || !prompts && self.virtual_tokens.is_some() {
            let flag = if prompts { "--lora-target-modules" } else { "--virtual-tokens" };
            return Err(Failure::bad_input(format!("{flag} has no effect with this --peft-method")));
        }
        let targets = self.lora_target_modules.as_deref().map(targets).unwrap_or_default();
        let virtual_tokens = self.virtual_tokens.unwrap_or(20);
        Ok(match method {
            Method::Ia3 => OtherAdapter::Ia3(Ia3Plan { targets, ..Ia3Plan::default() }),
            Method::Vera => OtherAdapter::Vera(VeraPlan { targets, rank: self.lora_rank.unwrap_or(256) }),
            Method::Oft => {
                let plan = OftPlan { targets, ..OftPlan::default() };
                OtherAdapter::Oft(match self.lora_rank {
                    Some(rank) => OftPlan { rank, block_size: 0, ..plan },
                    None => plan,
                })
            }
            Method::PrefixTuning => {
                OtherAdapter::PrefixTuning(PrefixPlan { virtual_tokens, projection: false, encoder_hidden_size: None })
            }
            Method::PromptTuning | Method::Lora => {
                OtherAdapter::PromptTuning(PromptPlan { virtual_tokens, encoder_decoder: false })
            }
        })
    }

    /// What kind of run the flags ask for.
    pub(super) fn situation(&self) -> Situation {
        match (
            self.lora || self.peft_method.is_some() || self.adapter.is_some() || self.lora_rank.is_some(),
            self.qlora || self.quantization.is_some(),
        ) {
            (_, true) => Situation::Quantised,
            (true, _) => Situation::Adapter,
            _ => Situation::Full,
        }
    }

    /// Puts the flags into a plan; returns what has no effect, by name.
    pub(super) fn apply(&self, plan: &mut TrainPlan) -> Result<Vec<String>, Failure> {
        let mut notes = Vec::new();
        if let Some(method) = self.peft_method.filter(|method| *method != Method::Lora) {
            plan.adapter = Some(AdapterPlan::Other(self.other(method)?));
            if let Some(text) = &self.quantization {
                plan.quantization = Some(Quantization::parse(text)?);
            }
            return Ok(notes);
        }
        if self.virtual_tokens.is_some() {
            return Err(Failure::bad_input("--virtual-tokens has no effect without --peft-method prompt-tuning"));
        }
        if let Some(path) = &self.adapter {
            let (adapter, ignored) = AdapterPlan::from_adapter_config(&read_adapter(path)?)?;
            plan.adapter = Some(adapter);
            notes.extend(ignored.iter().map(|key| format!("adapter_config.json: {key} has no effect on memory")));
        }
        let asked = self.lora
            || self.peft_method.is_some()
            || self.qlora
            || self.lora_rank.is_some()
            || self.lora_target_modules.is_some()
            || self.lora_dropout.is_some()
            || self.dora;
        if asked {
            let mut lora = match plan.adapter.take() {
                Some(AdapterPlan::Lora(lora)) => lora,
                None => LoraPlan::default(),
                Some(AdapterPlan::Other(_)) => {
                    return Err(Failure::bad_input("--lora flags do not go with an adapter of another method"));
                }
            };
            self.fill(&mut lora);
            plan.adapter = Some(AdapterPlan::Lora(lora));
        } else if self.modules_to_save.is_some() || self.lora_alpha.is_some() {
            return Err(Failure::bad_input("--modules-to-save and --lora-alpha have no effect without --lora"));
        }
        if let Some(text) = &self.quantization {
            let asked = Quantization::parse(text)?;
            plan.quantization = Some(match plan.quantization.take() {
                // What a framework does around it stays.
                Some(known) => Quantization { scheme: asked.scheme, double: asked.double, ..known },
                None => asked,
            });
        } else if self.qlora && plan.quantization.is_none() {
            plan.quantization = Some(Quantization::default());
        }
        Ok(notes)
    }

    fn fill(&self, lora: &mut LoraPlan) {
        lora.rank = self.lora_rank.unwrap_or(lora.rank);
        lora.alpha = self.lora_alpha.unwrap_or(lora.alpha);
        lora.dropout = self.lora_dropout.unwrap_or(lora.dropout);
        lora.dora |= self.dora;
        if let Some(text) = &self.lora_target_modules {
            lora.targets = targets(text);
        }
        if let Some(text) = &self.modules_to_save {
            lora.modules_to_save = text.split(',').map(|name| name.trim().to_owned()).collect();
        }
    }
}

/// Plain names are a list; anything with the signs of a regular expression is one.
fn targets(text: &str) -> Targets {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.,/ ".contains(c);
    if text != "all-linear" && text.chars().all(plain) {
        Targets::Names(text.split(',').map(|name| name.trim().to_owned()).collect())
    } else {
        Targets::parse(text)
    }
}

fn read_adapter(path: &std::path::Path) -> Result<serde_json::Value, Failure> {
    let file = if path.is_dir() { path.join("adapter_config.json") } else { path.to_owned() };
    let bytes = std::fs::read(&file).map_err(|e| Failure::bad_input(format!("--adapter {}: {e}", file.display())))?;
    json::parse(&bytes).map_err(|e| Failure::bad_input(format!("--adapter {}: {e}", file.display())))
}
