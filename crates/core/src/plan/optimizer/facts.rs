//! What is known of every optimizer: whose code it is, whether recorded runs back it, and what it cannot run on.

use super::{Implementation, Optimizer, OptimizerKind};
use crate::dtype::DType;
use crate::plan::PlanError;

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
    pub(in crate::plan) fn check(&self, weights: DType, adapted: bool) -> Result<(), PlanError> {
        let refuse = |what: &str, hint: &str| Err(PlanError::Conflict { what: what.into(), hint: hint.into() });
        match self.kind {
            _ if self.master_weights && weights == DType::F32 => {
                refuse("fp32 weights are their own master weights", "drop --master-weights, or use --precision bf16")
            }
            _ if self.master_weights && adapted => {
                refuse("adapters are fp32 already, and the model is not stepped", "drop --master-weights")
            }
            kind if self.state.is_some() && kind != OptimizerKind::AnyPrecision => refuse(
                &format!("the state of {} has no type of its own to choose", kind.name()),
                "use --optimizer adamw-anyprecision, or drop --optimizer-state-dtype",
            ),
            _ if self.state.is_some_and(|dtype| !matches!(dtype, DType::F32 | DType::BF16 | DType::F16)) => {
                Err(PlanError::BadValue {
                    key: "optimizer-state-dtype".into(),
                    value: self.state.map_or("", DType::name).into(),
                    expected: "fp32, bf16 or fp16".into(),
                })
            }
            OptimizerKind::SparseAdam => Err(PlanError::Unsupported {
                what: "optimizer sparse-adam (it takes sparse gradients only, and these models make dense ones)".into(),
                hint: "adam is its dense form".into(),
            }),
            OptimizerKind::Lamb8bit => refuse(
                "bitsandbytes 0.50 has no blockwise LAMB: lamb8bit stops at its first step",
                "use lamb or adamw8bit",
            ),
            kind if self.implementation == Implementation::Fused && kind.has_implementations() && !kind.has_fused() => {
                refuse(
                    &format!("torch's {} has no fused step on CUDA", kind.name()),
                    "use --optimizer-implementation foreach",
                )
            }
            kind if self.rank != Self::default().rank && !kind.is_low_rank() => refuse(
                &format!("{} has no rank", kind.name()),
                "drop --optimizer-rank, or use galore-adamw or apollo-adamw",
            ),
            OptimizerKind::AdaBelief if weights == DType::F16 => Err(PlanError::Unsupported {
                what: "adabelief on fp16 weights (it swaps them for fp32 ones during the step)".into(),
                hint: "use bf16 or fp32 weights".into(),
            }),
            OptimizerKind::Shampoo if weights != DType::F32 => {
                refuse("shampoo's singular values need fp32 weights", "use --precision fp32 or bf16-mixed")
            }
            OptimizerKind::AdamMini | OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW if adapted => {
                refuse("adam-mini, galore and apollo train a model's own matrices", "use adamw for adapters")
            }
            OptimizerKind::GaLoreAdamW | OptimizerKind::ApolloAdamW if !(1..=1 << 20).contains(&self.rank) => {
                Err(PlanError::BadValue {
                    key: "optimizer-rank".into(),
                    value: self.rank.to_string(),
                    expected: "from 1 to 1048576".into(),
                })
            }
            _ => Ok(()),
        }
    }

    /// What a report on a run with it should say.
    pub(in crate::plan) fn notes(&self) -> Vec<String> {
        let name = self.kind.name();
        let mut notes = Vec::new();
        if self.kind.is_paged() {
            notes.push(format!("optimizer {name}: paged states are managed memory, which torch's levels do not show"));
        }
        if self.implementation != Implementation::Foreach && !self.kind.has_implementations() {
            notes.push(format!("optimizer {name} steps in one way only: its implementation changes nothing"));
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
        assert!(matches!(
            with(OptimizerKind::SparseAdam).check(DType::BF16, false),
            Err(PlanError::Unsupported { .. })
        ));
        assert!(with(OptimizerKind::Shampoo).check(DType::BF16, false).is_err());
        assert!(with(OptimizerKind::Shampoo).check(DType::F32, false).is_ok());
        assert!(with(OptimizerKind::AdamMini).check(DType::F32, true).is_err());
        let fused = |kind| Optimizer { implementation: Implementation::Fused, ..with(kind) };
        assert!(fused(OptimizerKind::AdamW).check(DType::F32, false).is_ok());
        for kind in [OptimizerKind::Rmsprop, OptimizerKind::Nadam, OptimizerKind::Adagrad] {
            assert!(fused(kind).check(DType::F32, false).is_err());
        }
        assert!(fused(OptimizerKind::Lion).check(DType::F32, false).is_ok());
        assert!(fused(OptimizerKind::Lion).notes()[0].contains("one way only"));
        assert!(Optimizer { rank: 4, ..with(OptimizerKind::AdamW) }.check(DType::F32, false).is_err());
    }
}
