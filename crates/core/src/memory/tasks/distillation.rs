//! TRL's `DistillationTrainer` (trl 1.16: trainer/distillation_trainer.py, kernels/chunked_divergence.py): the student generates, then both
//! models run on that, and their distributions are compared tile by tile.
//!
//! The loss runs in place of the student's forward pass, so on one card accelerate's autocast is not around it.

use smallvec::smallvec;

use super::dpo::labels;
use super::player::{Given, Player};
use super::rollout::{self, Rollout};
use super::{At, Stage, Task, in_evaluation, in_phase, numbers, other_model, programs_of, without_graph};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::lower::Settings;
use crate::memory::phase::Work;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{Binary, Reduction};
use crate::plan::{PlanError, TrainPlan};

/// Tokens and columns of a tile.
const TILE: [u64; 2] = [4096, 32768];

#[derive(Default)]
pub(super) struct Distillation {
    buffered: Vec<Tensor>,
    teacher: Option<Player<'static>>,
}

impl Task for Distillation {
    fn load(&mut self, torch: &mut Torch, stage: &mut Stage) -> Result<(), PlanError> {
        self.teacher = teacher(torch, stage, None)?;
        Ok(())
    }

    fn period(&self, plan: &TrainPlan) -> u64 {
        u64::from(plan.gradient_accumulation.max(1))
    }

    fn prepare(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<(), PlanError> {
        let (plan, sizes) = (stage.plan, stage.sizes(at));
        let period = self.period(plan);
        if !at.index.is_multiple_of(period) {
            return Ok(());
        }
        let (rows, tokens) = (sizes.samples * period, plan.objective.completion());
        let what = Rollout { rows, prompt: sizes.longest, tokens, padded: stage.padded(at) };
        let all = rollout::generate(torch, &mut stage.policy, (plan, at), what)?;
        self.buffered =
            [sizes.longest, sizes.longest, tokens, tokens].map(|columns| numbers(torch, rows, columns)).into();
        drop(all);
        Ok(())
    }

    fn loss(&mut self, torch: &mut Torch, stage: &mut Stage, at: At) -> Result<Tensor, PlanError> {
        let sizes = stage.sizes(at);
        let tokens = stage.plan.objective.completion();
        let joined = [(); 2].map(|()| numbers(torch, sizes.samples, sizes.longest + tokens));
        let wanted = labels(torch, &joined[0]);
        let given = Given { ids: &joined[0], mask: &joined[1], labels: Some(&wanted), padded: stage.padded(at) };
        let count = sizes.samples * tokens;
        let autocast = stage.policy.settings.autocast.take();
        let student = stage.policy.hidden(torch, &given);
        stage.policy.settings.autocast = autocast;
        let (student, head) = student?;
        let Some(teacher) = &mut self.teacher else { return Ok(student) };
        let learn = |torch: &mut Torch| {
            in_evaluation(torch, |torch| without_graph(torch, |torch| teacher.hidden(torch, &given)))
        };
        let (taught, other_head) = in_phase(torch, at, Work::Teacher, learn)?;
        Ok(torch.in_category(Category::Logits, |torch| {
            let [student, taught] = [student, taught].map(|hidden| {
                let kept = torch.slice(&hidden, 1, tokens, 1);
                let dense = torch.contiguous(&kept);
                drop((hidden, kept));
                let flat = torch.reshape(&dense, Shape::from([count, dense.shape.last()]));
                let index = torch.fresh("nonzero", Shape::from([count]), DType::I64);
                torch.index(&flat, &index, flat.shape)
            });
            let divergence = divergence(torch, (&student, &head), (&taught, &other_head));
            let sum = torch.reduce(Reduction::Sum, &divergence, None, false);
            torch.scalar(Binary::Div, &sum)
        }))
    }
}

/// The model that is learned from, where the plan names one.
pub(super) fn teacher(
    torch: &mut Torch,
    stage: &Stage,
    autocast: Option<DType>,
) -> Result<Option<Player<'static>>, PlanError> {
    let Some(other) = &stage.plan.objective.teacher else { return Ok(None) };
    let programs = programs_of(other_model("objective.teacher", other, "AutoModelForCausalLM")?);
    let program = programs(stage.plan.batch.training_inputs())?;
    let weights = other.weights.unwrap_or(stage.plan.weights);
    let settings = Settings { weights, buffers: weights, autocast, ..stage.policy.settings };
    let teacher = Player::frozen(torch, &program, (programs, settings), Category::Teacher);
    Ok(Some(stage.apart(torch, &program, teacher)))
}

/// `ChunkedDivergenceFunction`: two tiles of fp32 logits, made again in backward, whose gradients are summed in fp32.
fn divergence(torch: &mut Torch, student: (&Tensor, &Tensor), teacher: (&Tensor, &Tensor)) -> Tensor {
    let rows = student.0.shape.size(0);
    let list = Shape::from([rows]);
    let tile = Shape::from([rows.min(TILE[0]), TILE[1]]);
    let figures: Vec<Tensor> = (0..9).map(|_| torch.fresh("zeros", list, DType::F32)).collect();
    let tiles = [(); 2].map(|()| torch.fresh("tile", tile, DType::F32));
    torch.use_blas();
    let sums = [(); 2].map(|()| torch.fresh("add", list, DType::F32));
    let entropy = torch.fresh("sub", list, DType::F32);
    let output = torch.fresh("sub", list, DType::F32);
    drop((figures, tiles, entropy));
    if !torch.records(&[student.0, student.1]) {
        return output;
    }
    let kept = [student.0, student.1, teacher.0, teacher.1, &sums[0], &sums[1]];
    let saved: Vec<Saved> = kept.into_iter().map(|tensor| Saved::new(torch, tensor)).collect();
    let (narrow, classes) = (student.0.dtype, student.1.shape.size(0));
    let wants = [student.0, student.1].map(|input| input.needs_grad().then_some((input.shape, input.dtype)));
    torch.attach(output, &[student.0, student.1], move |torch, gradient| {
        let kept: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let wide = wants.map(|want| want.map(|(shape, _)| torch.fresh("zeros", shape, DType::F32)));
        let tiles = [(); 2].map(|()| torch.fresh("tile", tile, DType::F32));
        // A tile's gradient in the type of the product; the next is made before its name goes.
        let narrow = (narrow != DType::F32).then(|| {
            let first = torch.fresh("_to_copy", tile, narrow);
            let next = classes.min(2 * TILE[1]).saturating_sub(TILE[1]);
            let next = (next > 0).then(|| torch.fresh("_to_copy", tile.with(1, next), narrow));
            (first, next)
        });
        torch.use_blas();
        drop(narrow);
        let mut results = smallvec![];
        for (sum, want) in wide.iter().zip(wants) {
            results.push(sum.as_ref().zip(want).map(|(sum, (_, dtype))| torch.cast(sum, dtype)));
        }
        drop((wide, tiles, kept, gradient));
        results
    })
}
