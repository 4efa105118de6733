//! What is known of every optimizer: whose code it is, whether recorded runs back it, and what it cannot run on.

use super::{Implementation, Optimizer, OptimizerKind};
use crate::dtype::DType;
use crate::plan::{Fault, Faults};

impl OptimizerKind {
    /// All of them, and whose code each one is.
    pub const ALL: [(Self, &'static str); 36] = [
        (Self::AdamW, "torch.optim.AdamW"),
        (Self::Adam, "torch.optim.Adam"),
        (Self::Amsgrad, "torch.optim.AdamW, amsgrad"),
        (Self::Nadam, "torch.optim.NAdam"),
        (Self::Sgd, "torch.optim.SGD"),
        (Self::SgdMomentum, "torch.optim.SGD, momentum"),
        (Self::Nesterov, "torch.optim.SGD, nesterov"),
        (Self::Adagrad, "torch.optim.Adagrad"),
        (Self::Rmsprop, "torch.optim.RMSprop"),
        (Self::TorchAdafactor, "torch.optim.Adafactor"),
        (Self::Muon, "torch.optim.Muon (matrices only)"),
        (Self::SparseAdam, "torch.optim.SparseAdam (refused: dense gradients)"),
        (Self::Adafactor, "transformers Adafactor"),
        (Self::AdamW8bit, "bitsandbytes AdamW8bit"),
        (Self::PagedAdamW8bit, "bitsandbytes PagedAdamW8bit"),
        (Self::AdamWBnb32, "bitsandbytes AdamW32bit"),
        (Self::PagedAdamW32, "bitsandbytes PagedAdamW32bit"),
        (Self::Adam8bit, "bitsandbytes Adam8bit"),
        (Self::PagedAdam8bit, "bitsandbytes PagedAdam8bit"),
        (Self::PagedAdam32, "bitsandbytes PagedAdam32bit"),
        (Self::Lion, "bitsandbytes Lion"),
        (Self::Lion8bit, "bitsandbytes Lion8bit"),
        (Self::PagedLion8bit, "bitsandbytes PagedLion8bit"),
        (Self::PagedLion32, "bitsandbytes PagedLion32bit"),
        (Self::AdEMAMix, "bitsandbytes AdEMAMix"),
        (Self::AdEMAMix8bit, "bitsandbytes AdEMAMix8bit"),
        (Self::PagedAdEMAMix32, "bitsandbytes PagedAdEMAMix32bit"),
        (Self::PagedAdEMAMix8bit, "bitsandbytes PagedAdEMAMix8bit"),
        (Self::Lamb, "bitsandbytes LAMB"),
        (Self::Lamb8bit, "bitsandbytes LAMB8bit"),
        (Self::AnyPrecision, "torchdistx AnyPrecisionAdamW (adamw_anyprecision)"),
        (Self::AdaBelief, "adabelief-pytorch AdaBelief"),
        (Self::AdamMini, "adam-mini Adam_mini"),
        (Self::Shampoo, "torch_optimizer Shampoo"),
        (Self::GaLoreAdamW, "galore-torch GaLoreAdamW"),
        (Self::ApolloAdamW, "apollo-torch APOLLOAdamW"),
    ];

    /// Its name, as plans and flags spell it.
    pub fn name(self) -> String {
        serde_json::to_value(self).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
    }

    /// The same optimizer of bitsandbytes with its state in 32 bits.
    pub fn in_32_bits(self) -> Self {
        match self {
            Self::AdamW8bit => Self::AdamWBnb32,
            Self::PagedAdamW8bit => Self::PagedAdamW32,
            Self::Adam8bit => Self::AdamWBnb32,
            Self::PagedAdam8bit => Self::PagedAdam32,
            Self::Lion8bit => Self::Lion,
            Self::PagedLion8bit => Self::PagedLion32,
            Self::AdEMAMix8bit => Self::AdEMAMix,
            Self::PagedAdEMAMix8bit => Self::PagedAdEMAMix32,
            Self::Lamb8bit => Self::Lamb,
            other => other,
        }
    }

    /// Whether torch has a fused step for it that runs on CUDA.
    pub fn has_fused(self) -> bool {
        matches!(self, Self::AdamW | Self::Adam | Self::Amsgrad | Self::Sgd | Self::SgdMomentum | Self::Nesterov)
    }

    /// Whether torch steps it by lists, by one kernel or one parameter after the other, as asked.
    pub fn has_implementations(self) -> bool {
        matches!(
            self,
            Self::AdamW
                | Self::Adam
                | Self::Amsgrad
                | Self::Nadam
                | Self::Sgd
                | Self::SgdMomentum
                | Self::Nesterov
                | Self::Adagrad
                | Self::Rmsprop
                | Self::TorchAdafactor
        )
    }

    /// Whether it keeps its state in a projection of some rank.
    fn is_low_rank(self) -> bool {
        matches!(self, Self::GaLoreAdamW | Self::ApolloAdamW)
    }

    /// Whether large states lie in managed memory, which moves between host and card.
    pub fn is_paged(self) -> bool {
        matches!(
            self,
            Self::PagedAdamW8bit
                | Self::PagedAdamW32
                | Self::PagedAdam8bit
                | Self::PagedAdam32
                | Self::PagedLion8bit
                | Self::PagedLion32
                | Self::PagedAdEMAMix32
                | Self::PagedAdEMAMix8bit
        )
    }
}

impl Optimizer {
    /// Refuses what could not step on weights of this type.
    pub(in crate::plan) fn check(&self, weights: DType, adapted: bool, faults: &mut Faults) {
        const KIND: &str = "optimizer.kind";
        let (kind, name) = (self.kind, self.kind.name());
        let refused = [
            (self.master_weights && weights == DType::F32, "fp32 weights are their own master weights"),
            (self.master_weights && adapted, "adapters are fp32 already, and the model is not stepped"),
        ];
        for (_, problem) in refused.into_iter().filter(|(used, _)| *used) {
            faults.add(Fault::new("optimizer.master_weights", problem).or_drop("optimizer.master_weights"));
        }
        if let Some(dtype) = self.state {
            faults.when(kind != OptimizerKind::AnyPrecision, || {
                Fault::new("optimizer.state", format!("the state of {name} has no type of its own to choose"))
                    .or_set(KIND, "adamw-anyprecision")
                    .or_drop("optimizer.state")
            });
            faults.float("optimizer.state", dtype);
        }
        match kind {
            OptimizerKind::SparseAdam => {
                let what = "optimizer sparse-adam (it takes sparse gradients only, and these models make dense ones)";
                faults.add(Fault::unsupported(KIND, what).or_set(KIND, "adam"));
            }
            OptimizerKind::Lamb8bit => {
                let problem = "bitsandbytes 0.50 has no blockwise LAMB: lamb8bit stops at its first step";
                faults.add(Fault::new(KIND, problem).or_set(KIND, "lamb").or_set(KIND, "adamw8bit"));
            }
            OptimizerKind::AdaBelief => faults.when(weights == DType::F16, || {
                Fault::unsupported(KIND, "adabelief on fp16 weights (it swaps them for fp32 ones during the step)")
                    .or_set("weights", "bf16")
                    .or_set("weights", "fp32")
            }),
            OptimizerKind::Shampoo => faults.when(weights != DType::F32, || {
                Fault::new(KIND, "shampoo's singular values need fp32 weights").or_set("weights", "fp32")
            }),
            OptimizerKind::AdamMini | OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW => {
                faults.when(adapted, || {
                    Fault::new(KIND, "adam-mini, galore and apollo train a model's own matrices, not adapters")
                        .or_set(KIND, "adamw")
                });
            }
            _ => {}
        }
        let implementation = "optimizer.implementation";
        if !kind.has_implementations() {
            faults.when(self.implementation != Self::default().implementation, || {
                Fault::no_effect(implementation, format!("on {name}, which steps in one way only"))
            });
        } else {
            faults.when(self.implementation == Implementation::Fused && !kind.has_fused(), || {
                Fault::new(implementation, format!("torch's {name} has no fused step on CUDA"))
                    .or_set(implementation, "foreach")
            });
        }
        if kind.is_low_rank() {
            faults.range("optimizer.rank", self.rank, 1..=1 << 20);
        } else {
            faults.when(self.rank != Self::default().rank, || {
                Fault::new("optimizer.rank", format!("{name} has no rank"))
                    .or_drop("optimizer.rank")
                    .or_set(KIND, "galore-adamw")
                    .or_set(KIND, "apollo-adamw")
            });
        }
    }

    /// What a report on a run with it should say.
    pub(in crate::plan) fn notes(&self) -> Vec<String> {
        let name = self.kind.name();
        let mut notes = Vec::new();
        if self.kind.is_paged() {
            notes.push(format!("optimizer {name}: paged states are managed memory, which torch's levels do not show"));
        }
        if self.kind == OptimizerKind::GaLoreAdamW {
            notes.push("galore: the workspace of cuSOLVER's SVD at a change of projection is not counted".into());
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_optimizer() {
        for (kind, _) in OptimizerKind::ALL {
            let read: OptimizerKind = serde_json::from_value(kind.name().into()).unwrap();
            assert_eq!(read, kind);
        }
    }

    #[test]
    fn what_cannot_step_is_refused() {
        let with = |kind| Optimizer { kind, ..Optimizer::default() };
        let check = |optimizer: Optimizer, weights, adapted| {
            let mut faults = Faults::default();
            optimizer.check(weights, adapted, &mut faults);
            faults.end()
        };
        assert!(check(with(OptimizerKind::SparseAdam), DType::BF16, false).unwrap_err()[0].unsupported);
        assert!(check(with(OptimizerKind::Shampoo), DType::BF16, false).is_err());
        assert!(check(with(OptimizerKind::Shampoo), DType::F32, false).is_ok());
        assert!(check(with(OptimizerKind::AdamMini), DType::F32, true).is_err());
        let fused = |kind| Optimizer { implementation: Implementation::Fused, ..with(kind) };
        assert!(check(fused(OptimizerKind::AdamW), DType::F32, false).is_ok());
        for kind in [OptimizerKind::Rmsprop, OptimizerKind::Nadam, OptimizerKind::Adagrad] {
            assert!(check(fused(kind), DType::F32, false).is_err());
        }
        let one_way = check(fused(OptimizerKind::Lion), DType::F32, false).unwrap_err();
        assert!(one_way[0].path == "optimizer.implementation" && one_way[0].problem.contains("one way only"));
        assert!(check(Optimizer { rank: 4, ..with(OptimizerKind::AdamW) }, DType::F32, false).is_err());
    }
}
