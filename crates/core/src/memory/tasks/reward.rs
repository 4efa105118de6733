//! TRL's `RewardTrainer` (trl 1.16: trainer/reward_trainer.py, `compute_loss`): chosen and rejected in one batch, one score each;
//! its `PRMTrainer` (experimental/prm): the model's own loss on two labels for every token.

use super::dpo::preference;
use super::player::{End, Given};
use super::{At, Stage, Task, numbers};
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::PlanError;

#[derive(Default)]
pub(super) struct Reward {
    batch: Vec<Tensor>,
}

impl Task for Reward {
    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let sizes = stage.sizes(at);
        self.batch = (0..2).map(|_| numbers(torch, 2 * sizes.samples, sizes.longest)).collect();
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let padded = stage.padded(at);
        let given = Given { ids: &self.batch[0], mask: &self.batch[1], labels: None, padded };
        let scores = stage.policy.pass(torch, &given, End::Logits)?.swap_remove(0);
        let flat = torch.reshape(&scores, Shape::from([scores.elements()]));
        drop(scores);
        Ok(preference(torch, &flat))
    }
}

#[derive(Default)]
pub(super) struct Process {
    batch: Vec<Tensor>,
}

impl Task for Process {
    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let sizes = stage.sizes(at);
        // Token ids, mask, labels.
        self.batch = (0..3).map(|_| numbers(torch, sizes.samples, sizes.longest)).collect();
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let padded = stage.padded(at);
        let given = Given { ids: &self.batch[0], mask: &self.batch[1], labels: None, padded };
        let logits = stage.policy.pass(torch, &given, End::Logits)?.swap_remove(0);
        Ok(torch.in_category(Category::Logits, |torch| {
            let (rows, labels) = (logits.elements() / logits.shape.last().max(1), logits.shape.last());
            let flat = torch.reshape(&logits, Shape::from([rows, labels]));
            drop(logits);
            let wide = torch.cast(&flat, DType::F32);
            let targets = self.batch[2].detached().with_shape(Shape::from([rows]));
            torch.cross_entropy(&wide, &targets)
        }))
    }
}
