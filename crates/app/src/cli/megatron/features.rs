//! Megatron's features that most runs do without: fp8, uneven stages, multi-token prediction, states on the host.

use clap::{Args, ValueEnum};
use vramcast_core::plan::parallel::megatron::{ContextExchange, Dispatcher, Fp8, Fp8Recipe, Megatron, PipelineSplit};

use super::super::Failure;

/// Flags with the names of Megatron's arguments.
#[derive(Debug, Args)]
#[command(next_help_heading = "Megatron, more")]
pub(in super::super) struct FeatureArguments {
    /// Products in fp8: delayed, tensorwise (current scaling), blockwise or mxfp8.
    #[arg(long, value_name = "RECIPE", requires = "gpus")]
    fp8: Option<Recipe>,
    /// Weights are fp8 themselves.
    #[arg(long, requires = "fp8")]
    fp8_param_gather: bool,
    /// Make fp8 copies of bf16 weights for every micro-batch (disable_parameter_transpose_cache).
    #[arg(long, requires = "fp8", conflicts_with = "fp8_param_gather")]
    no_fp8_weight_cache: bool,
    /// First layers that stay in bf16.
    #[arg(long, value_name = "N", requires = "fp8")]
    num_layers_at_start_in_bf16: Option<u64>,
    /// Last layers that stay in bf16.
    #[arg(long, value_name = "N", requires = "fp8")]
    num_layers_at_end_in_bf16: Option<u64>,
    /// Layers of multi-token prediction behind the last.
    #[arg(long, value_name = "N", requires = "gpus")]
    mtp_num_layers: Option<u64>,
    /// Layers of the first pipeline stage; the others share the rest.
    #[arg(long, value_name = "N", requires = "pp")]
    decoder_first_pipeline_num_layers: Option<u64>,
    /// Layers of the last pipeline stage.
    #[arg(long, value_name = "N", requires = "pp")]
    decoder_last_pipeline_num_layers: Option<u64>,
    /// Count the embedding as a layer when layers are dealt out.
    #[arg(long, requires = "pp")]
    account_for_embedding_in_pipeline_split: bool,
    /// Count the loss as one.
    #[arg(long, requires = "pp")]
    account_for_loss_in_pipeline_split: bool,
    /// Which layers go where, as Et*3|(tt|)*29m|L (pipeline_model_parallel_layout).
    #[arg(long, value_name = "LAYOUT", requires = "pp")]
    pipeline_layout: Option<String>,
    /// The share of the optimizer's states on the host, 0 to 1 (optimizer_cpu_offload, with the precision-aware optimizer).
    #[arg(long, value_name = "SHARE", requires = "gpus")]
    optimizer_offload_fraction: Option<f64>,
    /// How context-parallel ranks exchange: p2p (a ring) or a2a (over heads) [default: p2p, as in Megatron].
    #[arg(long, value_name = "HOW", requires = "cp")]
    cp_comm_type: Option<Exchange>,
    /// Score tokens for experts in fp32.
    #[arg(long, requires = "gpus")]
    moe_router_fp32: bool,
    /// Run shared experts beside the exchange of tokens.
    #[arg(long, requires = "gpus")]
    moe_shared_expert_overlap: bool,
    /// Who brings tokens to their experts: alltoall or hybridep [default: alltoall].
    #[arg(long, value_name = "WHO", requires = "gpus")]
    moe_token_dispatcher: Option<DispatcherName>,
    /// Minor version of Megatron-Core 0 [default: 14].
    #[arg(long, value_name = "N", requires = "gpus")]
    megatron_core_minor: Option<u32>,
    /// Minor version of Transformer Engine 2 [default: 17].
    #[arg(long, value_name = "N", requires = "gpus")]
    transformer_engine_minor: Option<u32>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Recipe {
    Delayed,
    #[value(alias = "current")]
    Tensorwise,
    Blockwise,
    Mxfp8,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Exchange {
    P2p,
    A2a,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum DispatcherName {
    Alltoall,
    Hybridep,
}

impl FeatureArguments {
    /// Whether any of them is given.
    pub(super) fn is_used(&self) -> bool {
        let counted = [
            self.mtp_num_layers,
            self.decoder_first_pipeline_num_layers,
            self.decoder_last_pipeline_num_layers,
            self.megatron_core_minor.map(u64::from),
            self.transformer_engine_minor.map(u64::from),
        ];
        counted.iter().any(Option::is_some)
            || self.fp8.is_some()
            || self.account_for_embedding_in_pipeline_split
            || self.account_for_loss_in_pipeline_split
            || self.pipeline_layout.is_some()
            || self.optimizer_offload_fraction.is_some()
            || self.cp_comm_type.is_some()
            || self.moe_router_fp32
            || self.moe_token_dispatcher.is_some()
            || self.moe_shared_expert_overlap
    }

    /// Puts them into the options; the pipeline tells how many chunks a layout has.
    pub(super) fn apply(
        &self,
        options: &mut Megatron,
        [pp, cp]: [u64; 2],
        notes: &mut Vec<String>,
    ) -> Result<(), Failure> {
        options.fp8 = self.fp8.map(|recipe| Fp8 {
            recipe: match recipe {
                Recipe::Delayed => Fp8Recipe::Delayed,
                Recipe::Tensorwise => Fp8Recipe::Tensorwise,
                Recipe::Blockwise => Fp8Recipe::Blockwise,
                Recipe::Mxfp8 => Fp8Recipe::Mxfp8,
            },
            param_gather: self.fp8_param_gather,
            weight_cache: !self.no_fp8_weight_cache,
            layers_at_start_in_bf16: self.num_layers_at_start_in_bf16.unwrap_or(0),
            layers_at_end_in_bf16: self.num_layers_at_end_in_bf16.unwrap_or(0),
        });
        options.mtp_layers = self.mtp_num_layers.unwrap_or(0);
        options.split = self.split()?;
        if let Some(interleaved) = options.split.interleaved(pp) {
            let given = options.virtual_pipeline;
            if given > 1 && given != interleaved {
                return Err(Failure::bad_input(format!(
                    "--vpp {given}: the layout has {interleaved} chunks for each of {pp} stages"
                ))
                .hint("drop --vpp: the layout says it"));
            }
            options.virtual_pipeline = interleaved.max(1);
        }
        if let Some(share) = self.optimizer_offload_fraction {
            if !(0.0..=1.0).contains(&share) {
                return Err(Failure::bad_input(format!(
                    "--optimizer-offload-fraction: {share} is not between 0 and 1"
                )));
            }
            options.optimizer_cpu_offload_percent = (share * 100.0).round() as u64;
            // Megatron takes the offload only together with the precision-aware optimizer.
            options.precision_aware = Some(options.precision_aware.unwrap_or_default());
        }
        match self.cp_comm_type {
            Some(Exchange::A2a) => options.cp_comm = ContextExchange::A2a,
            Some(Exchange::P2p) => options.cp_comm = ContextExchange::P2p,
            None => {}
        }
        options.moe.router_fp32 = self.moe_router_fp32;
        options.moe.shared_expert_overlap = self.moe_shared_expert_overlap;
        options.moe.dispatcher = match self.moe_token_dispatcher {
            Some(DispatcherName::Hybridep) => Dispatcher::Hybridep,
            Some(DispatcherName::Alltoall) | None => Dispatcher::Alltoall,
        };
        (options.core, options.transformer_engine) = (self.megatron_core_minor, self.transformer_engine_minor);
        let unmeasured = [
            (options.fp8.is_some(), "fp8 products"),
            (cp > 1 && options.cp_comm == ContextExchange::P2p, "context parallel by a ring"),
            (options.mtp_layers > 0, "multi-token prediction"),
            (options.split != PipelineSplit::Even, "uneven stages"),
            (options.moe.dispatcher == Dispatcher::Hybridep, "the HybridEP dispatcher"),
            (options.optimizer_cpu_offload_percent > 0, "states on the host"),
            (!options.schedule.is_default(), "zero-bubble schedules"),
            (options.fsdp.is_some(), "Megatron-FSDP"),
            (options.cpu_offloading_layers > 0, "activations on the host"),
            (options.lora.is_some(), "LoRA beside Megatron's linears"),
            (options.deepspeed.is_some(), "Megatron-DeepSpeed's layers"),
        ];
        let named: Vec<&str> = unmeasured.into_iter().filter(|(used, _)| *used).map(|(_, name)| name).collect();
        if !named.is_empty() {
            notes.push(format!("{}: from the sources of Megatron, not yet measured", named.join(", ")));
        }
        Ok(())
    }

    fn split(&self) -> Result<PipelineSplit, Failure> {
        let ends = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers);
        let counted = (self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split);
        let ways = [ends != (None, None), counted != (false, false), self.pipeline_layout.is_some()];
        if ways.iter().filter(|way| **way).count() > 1 {
            return Err(Failure::bad_input("layers are dealt out in two ways at once")
                .hint("give layers of the ends, or what counts as a layer, or a layout"));
        }
        Ok(match (ends, counted, &self.pipeline_layout) {
            ((None, None), (false, false), None) => PipelineSplit::Even,
            (_, _, Some(layout)) => PipelineSplit::Layout(layout.clone()),
            ((None, None), (embedding, loss), None) => PipelineSplit::Counted { embedding, loss },
            ((first, last), _, None) => PipelineSplit::Ends { first, last },
        })
    }
}
