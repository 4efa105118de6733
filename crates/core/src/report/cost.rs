//! How long a step takes: a roofline over what the simulation counted, with figures of the cards' makers. An estimate, for
//! ranking plans.
//!
//! Products run at the card's peak, everything else at the speed of its memory, and nothing faster than kernels are started.
//! What cards exchange follows from the mesh: a ring moves twice its bytes to sum and once to gather or scatter. Sharded
//! parameters and gradients travel beside the computation; what tensor and expert parallel exchange is waited for.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::memory::effort::Effort;
use crate::memory::simulation::Simulation;
use crate::model::Model;
use crate::plan::parallel::{Engine, Parallel};
use crate::plan::{Checkpointing, ModelSizes, TrainPlan};
use crate::typed;

const EMBEDDED: &str = include_str!("../../data/speeds.toml");

/// Between machines each card has a port of 400 Gbit/s (NVIDIA DGX H100: eight ConnectX-7).
const BETWEEN_MACHINES: f64 = 50e9;
/// Cards of a machine.
const MACHINE: u64 = 8;
/// PCIe 4.0 with 16 lanes, one direction.
const TO_HOST: f64 = 32e9;
/// What products and copies reach of a data sheet, measured on an H200 apart from any model (truth/steps/h200.jsonl, row
/// `machine`), and what a kernel of an eager step takes to be started: the median of half of the steps there that wait for
/// nothing else. The other half scores it (docs/planner.md).
const START: f64 = 25.5e-6;
const REACHED: [f64; 3] = [0.81, 0.76, 0.89];

/// What a card computes and moves at most.
#[derive(Debug, Clone, Deserialize)]
struct Speed {
    name: String,
    narrow: f64,
    wide: f64,
    memory: f64,
    link: f64,
    #[serde(rename = "source")]
    _source: String,
}

#[derive(Deserialize)]
struct File {
    card: Vec<Speed>,
}

/// What a step costs on each card.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, schemars::JsonSchema)]
pub struct StepCost {
    /// Floating-point operations, as torch's FlopCounter counts them.
    pub operations: u64,
    /// Bytes read and written in the card's memory, about.
    pub moved: u64,
    /// Bytes sent to other cards.
    pub sent: u64,
    /// Bytes that go to the host or come from it.
    pub host: u64,
    /// Kernels that are started, about.
    pub kernels: u64,
    /// Seconds, as an estimate; absent where the card's figures are not known.
    pub seconds: Option<f64>,
    /// Tokens a second over all cards, by that estimate.
    pub tokens_per_second: Option<f64>,
}

/// What goes over links in a step: beside the computation, and what is waited for.
#[derive(Debug, Clone, Copy, Default)]
struct Sent {
    beside: f64,
    waited: f64,
}

fn speed(name: &str) -> Option<&'static Speed> {
    static TABLE: LazyLock<Vec<Speed>> =
        LazyLock::new(|| typed::embedded::<File>(EMBEDDED).map(|file| file.card).unwrap_or_default());
    TABLE.iter().find(|speed| speed.name == name)
}

/// The cost of a step that was simulated.
pub fn of_simulation(model: &Model, plan: &TrainPlan, simulation: &Simulation) -> StepCost {
    let program = || {
        let sizes = simulation.program.parameters.iter().map(|parameter| parameter.shape.elements());
        sizes.fold(0, u64::saturating_add)
    };
    // Tensor parallel's program is one card's.
    let cut = plan.parallel.as_ref().is_some_and(|parallel| parallel.mesh.tp > 1 && parallel.tensor().is_some());
    let whole = cut.then(|| model.inventory().ok()).flatten();
    let all = whole.map_or_else(program, |inventory| inventory.total());
    let trained = simulation.adapter.as_ref().map_or(all, |layout| layout.trainable());
    let text = model.config().get("text_config").filter(|text| text.is_object()).unwrap_or(model.config());
    let hidden = ["hidden_size", "n_embd", "d_model", "dim"].iter().find_map(|key| text[*key].as_u64());
    let sizes = ModelSizes::of(model.config(), plan.batch.seq_len);
    of(plan, &simulation.log.effort, &sizes, (all, trained), hidden.unwrap_or(1))
}

fn of(plan: &TrainPlan, effort: &Effort, sizes: &ModelSizes, (all, trained): (u64, u64), hidden: u64) -> StepCost {
    let micro = f64::from(plan.gradient_accumulation.max(1));
    let sent = plan.parallel.as_ref().map_or_else(Sent::default, |parallel| {
        exchanged(plan, parallel, sizes, (all as f64, trained as f64), hidden as f64)
    });
    let (copies, world, pp) = plan.parallel.as_ref().map_or((1, 1, 1), |parallel| {
        let mesh = &parallel.mesh;
        (mesh.dp_replicate.saturating_mul(mesh.dp_shard), mesh.world(), mesh.pp)
    });
    let host = effort.host.saturating_add(offloaded(plan, all));
    let seconds = speed(&plan.gpu.name).map(|speed| {
        let link = if world > MACHINE { BETWEEN_MACHINES } else { speed.link * 1e9 };
        let products = effort.narrow_operations as f64 / (speed.narrow * REACHED[0] * 1e12)
            + effort.wide_operations as f64 / (speed.wide * REACHED[1] * 1e12);
        let moves = effort.moved as f64 / (speed.memory * REACHED[2] * 1e9);
        let busy = (products + moves).max(effort.kernels as f64 * START);
        let waited = sent.waited / (speed.link * 1e9) + host as f64 / TO_HOST;
        // Stages wait for the first micro-batch to come through.
        let bubble = 1.0 + (pp - 1) as f64 / micro;
        short(((busy + waited) * bubble).max(sent.beside / link))
    });
    let tokens = plan.batch.batch_size.saturating_mul(plan.batch.seq_len).saturating_mul(copies) as f64 * micro;
    StepCost {
        operations: effort.operations(),
        moved: effort.moved,
        sent: (sent.beside + sent.waited) as u64,
        host,
        kernels: effort.kernels,
        seconds,
        tokens_per_second: seconds.map(|seconds| (tokens / seconds.max(1e-9)).round()),
    }
}

/// Four digits: it is an estimate.
fn short(seconds: f64) -> f64 {
    format!("{seconds:.3e}").parse().unwrap_or(seconds)
}

/// What the options of engines keep on the host and bring back in every step: states, gradients and weights.
fn offloaded(plan: &TrainPlan, all: u64) -> u64 {
    let Some(parallel) = plan.parallel.as_ref().filter(|parallel| parallel.offloads()) else { return 0 };
    let share = all / parallel.mesh.world().max(1);
    // Gradients go, weights come.
    share.saturating_mul(2 * plan.weights.size())
}

fn exchanged(
    plan: &TrainPlan,
    parallel: &Parallel,
    sizes: &ModelSizes,
    (all, trained): (f64, f64),
    hidden: f64,
) -> Sent {
    let mesh = &parallel.mesh;
    let (tp, pp, cp, ep) = (mesh.tp as f64, mesh.pp as f64, mesh.cp as f64, mesh.ep as f64);
    let micro = f64::from(plan.gradient_accumulation.max(1));
    let part = |ways: f64| (ways - 1.0).max(0.0) / ways.max(1.0);
    let width = plan.weights.size() as f64;
    let (weights, gradients) = (all * width / (tp * pp), trained * width / (tp * pp));
    let (shard, copies) = (mesh.dp_shard as f64 * cp, mesh.dp_replicate as f64);
    let ring = part(shard);
    let mut sent = Sent::default();
    sent.beside += match &parallel.engine {
        Engine::Ddp(_) => 2.0 * gradients * part(copies),
        Engine::Deepspeed(options) if options.zero.stage >= 3 => micro * (2.0 * weights + gradients) * ring,
        Engine::Deepspeed(options) if options.zero.stage == 2 => (micro * gradients + weights) * ring,
        Engine::Fsdp1(_) | Engine::Fsdp2(_) => {
            micro * (2.0 * weights + gradients) * ring + 2.0 * gradients / shard * part(copies)
        }
        _ => (gradients + weights) * ring,
    };
    let layers = sizes.layers.unwrap_or(1) as f64 / pp;
    let tokens = plan.batch.batch_size as f64 * plan.batch.seq_len as f64 / cp;
    let passed = tokens * hidden * width.min(DType::BF16.size() as f64);
    let again = if plan.checkpointing == Checkpointing::Full { 1.5 } else { 1.0 };
    // Two sums on the way there and two on the way back, in each layer.
    sent.waited += micro * layers * 4.0 * again * passed * 2.0 * part(tp);
    if ep > 1.0 {
        let chosen = sizes.experts.map_or(1.0, |_| 2.0);
        sent.waited += micro * layers * 4.0 * again * passed * chosen * part(ep);
    }
    if pp > 1.0 {
        sent.waited += micro * 2.0 * passed;
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Gpus;

    #[test]
    fn speeds_are_of_cards_that_are_known() {
        let file: File = toml::from_str(EMBEDDED).unwrap();
        let cards = Gpus::embedded();
        for speed in &file.card {
            assert!(cards.find(&speed.name).is_ok_and(|card| card.name == speed.name), "{}", speed.name);
            assert!(speed.narrow >= speed.wide && speed.memory > speed.link, "{}", speed.name);
        }
    }
}
