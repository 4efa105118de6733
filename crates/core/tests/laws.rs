//! Laws that hold for every plan and family: more work never takes less memory, reports add up, nothing leaks, and two
//! runs are the same to the byte.
//!
//! The laws of growth are stated on the bytes that tensors ask for (rounded to the allocator's 512-byte blocks). What
//! the caching allocator hands out may exceed that by up to 1 MiB per large block, since it does not split off small
//! remainders, and by how much depends on which blocks lie free: torch's own figure is not monotone to the byte.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Value, json};
use vramcast_core::dtype::DType;
use vramcast_core::memory::log::{Category, Event, Log, StorageInfo};
use vramcast_core::memory::phase::Work;
use vramcast_core::memory::simulation::{self, Simulation};
use vramcast_core::model::Model;
use vramcast_core::plan::adapter::Targets;
use vramcast_core::plan::{
    AdapterPlan, AttentionKind, Batch, Checkpointing, Gpus, Implementation, LoraPlan, Optimizer, OptimizerKind,
    RunPlan, TrainPlan,
};
use vramcast_core::report;

/// Families of different build, with the class each is trained as: class defaults, shrunk by [`tiny`].
const FAMILIES: [(&str, &str); 14] = [
    ("llama", "AutoModelForCausalLM"),
    ("qwen2", "AutoModelForCausalLM"),
    ("qwen3", "AutoModelForCausalLM"),
    ("gemma2", "AutoModelForCausalLM"),
    ("phi", "AutoModelForCausalLM"),
    ("phi3", "AutoModelForCausalLM"),
    ("olmo2", "AutoModelForCausalLM"),
    ("gpt2", "AutoModelForCausalLM"),
    ("gpt_neox", "AutoModelForCausalLM"),
    ("opt", "AutoModelForCausalLM"),
    ("mixtral", "AutoModelForCausalLM"),
    ("qwen3_moe", "AutoModelForCausalLM"),
    ("bert", "AutoModelForMaskedLM"),
    ("t5", "AutoModelForSeq2SeqLM"),
];

/// Families with routers, which PEFT refuses to adapt with dropout.
const EXPERTS: [&str; 2] = ["mixtral", "qwen3_moe"];

/// A family's class defaults with the sizes overridden, under every name that families use for them.
fn tiny(model_type: &str, layers: u64, hidden: u64, vocabulary: u64) -> Value {
    let mut config = json!({"model_type": model_type, "vocab_size": vocabulary});
    let mut set = |keys: &[&str], value: u64| keys.iter().for_each(|key| config[*key] = value.into());
    set(&["hidden_size", "n_embd", "d_model", "word_embed_proj_dim"], hidden);
    set(&["num_hidden_layers", "n_layer", "num_layers"], layers);
    set(&["intermediate_size", "ffn_dim", "d_ff", "n_inner"], 2 * hidden);
    set(&["num_attention_heads", "n_head", "num_heads"], hidden / 16);
    set(&["num_key_value_heads"], hidden / 32);
    set(&["head_dim", "d_kv"], 16);
    set(&["moe_intermediate_size"], hidden);
    set(&["num_experts", "num_local_experts"], 4);
    set(&["num_experts_per_tok"], 2);
    config
}

fn run(config: &Value, class: &str, plan: &TrainPlan) -> (Model, Simulation) {
    let model = Model::new(config.clone(), Some(class)).unwrap();
    let mut plan = plan.clone();
    if let (true, Some(AdapterPlan::Lora(lora))) =
        (EXPERTS.contains(&config["model_type"].as_str().unwrap()), &mut plan.adapter)
    {
        lora.dropout = 0.0;
    }
    let simulation = simulation::train(&model, &plan).unwrap_or_else(|error| panic!("{config}: {error}"));
    (model, simulation)
}

fn rounded(storage: &StorageInfo) -> u64 {
    storage.bytes.div_ceil(512) * 512
}

/// The most that tensors ask for at once.
fn peak(log: &Log) -> u64 {
    let (mut now, mut most) = (0, 0);
    for event in &log.events {
        match event {
            Event::Allocate(id) => now += rounded(&log.storages[id.0 as usize]),
            Event::Free(id) => now -= rounded(&log.storages[id.0 as usize]),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

/// What is alive after each of the first `events`.
fn alive(log: &Log, events: usize) -> Vec<StorageInfo> {
    let mut alive = vec![false; log.storages.len()];
    for event in &log.events[..events] {
        match event {
            Event::Allocate(id) => assert!(!std::mem::replace(&mut alive[id.0 as usize], true), "made twice"),
            Event::Free(id) => assert!(std::mem::replace(&mut alive[id.0 as usize], false), "freed twice"),
            _ => {}
        }
    }
    log.storages.iter().zip(alive).filter(|(_, alive)| *alive).map(|(info, _)| *info).collect()
}

/// Bytes asked for by storages of one category.
fn bytes_of(storages: &[StorageInfo], category: Category) -> u64 {
    storages.iter().filter(|info| info.category == category).map(|info| info.bytes).sum()
}

/// Where steps end: the places of the events that close the `zero` phases.
fn step_ends(log: &Log) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut zeroing = false;
    for (index, event) in log.events.iter().enumerate() {
        match event {
            Event::Phase(id) => zeroing = log.phases[*id as usize].work == Work::Zero,
            Event::PhaseEnd if zeroing => ends.push(index + 1),
            _ => {}
        }
    }
    ends
}

fn optimizers() -> impl Strategy<Value = Optimizer> {
    let kinds = prop::sample::select(vec![
        OptimizerKind::AdamW,
        OptimizerKind::Amsgrad,
        OptimizerKind::Sgd,
        OptimizerKind::SgdMomentum,
        OptimizerKind::Adagrad,
        OptimizerKind::Rmsprop,
        OptimizerKind::Adafactor,
        OptimizerKind::AdamW8bit,
        OptimizerKind::Lion,
    ]);
    let implementations = prop::sample::select(vec![Implementation::Foreach, Implementation::Forloop]);
    (kinds, implementations).prop_map(|(kind, implementation)| {
        let one_way = matches!(kind, OptimizerKind::Adafactor | OptimizerKind::AdamW8bit | OptimizerKind::Lion);
        let implementation = if one_way { Implementation::Foreach } else { implementation };
        Optimizer { kind, implementation, ..Optimizer::default() }
    })
}

fn precisions() -> impl Strategy<Value = (DType, Option<DType>)> {
    prop::sample::select(vec![
        (DType::BF16, None),
        (DType::F16, None),
        (DType::F32, None),
        (DType::F32, Some(DType::BF16)),
        (DType::F32, Some(DType::F16)),
    ])
}

fn plans() -> impl Strategy<Value = TrainPlan> {
    let sizes = (1..4_u64, 2..13_u64, prop::bool::ANY, 1..3_u32);
    let kernels = (prop::bool::ANY, prop::bool::ANY, prop::bool::ANY, prop::bool::ANY);
    let lora = prop::option::weighted(0.3, (1..9_u64, prop::sample::select(vec![0.0, 0.1])));
    let cards = prop::sample::select(vec!["H200", "A100-80GB", "RTX 4090", "T4"]);
    (sizes, precisions(), optimizers(), kernels, lora, cards).prop_map(
        |((batch_size, eights, mask, gradient_accumulation), precision, optimizer, kernels, lora, card)| {
            let (weights, autocast) = precision;
            let (eager, checkpointing, clip, keep_outputs) = kernels;
            let adapter = lora.map(|(rank, dropout)| {
                AdapterPlan::Lora(LoraPlan { rank, dropout, targets: Targets::AllLinear, ..LoraPlan::default() })
            });
            TrainPlan {
                batch: Batch { batch_size, seq_len: 8 * eights, mask, ..Batch::default() },
                weights,
                autocast,
                attention: if eager { AttentionKind::Eager } else { AttentionKind::Sdpa },
                checkpointing: if checkpointing { Checkpointing::Full } else { Checkpointing::Off },
                optimizer,
                gradient_accumulation,
                clip,
                keep_outputs,
                adapter,
                gpu: Gpus::embedded().find(card).unwrap(),
                ..TrainPlan::default()
            }
        },
    )
}

fn models() -> impl Strategy<Value = (Value, &'static str)> {
    let vocabularies = prop::sample::select(vec![320, 4000]);
    (prop::sample::select(FAMILIES.to_vec()), 1..4_u64, 1..4_u64, vocabularies)
        .prop_map(|((model_type, class), layers, hidden, words)| (tiny(model_type, layers, 64 * hidden, words), class))
}

proptest! {
    // Few cases from a fixed start, to be quick and the same everywhere; all laws hold on a thousand cases too.
    #![proptest_config(ProptestConfig {
        cases: 32,
        rng_seed: RngSeed::Fixed(7),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_larger_batch_never_takes_less((config, class) in models(), plan in plans(), more in 1..6_u64) {
        let mut larger = plan.clone();
        larger.batch.batch_size += more;
        let (small, large) = (run(&config, class, &plan).1, run(&config, class, &larger).1);
        prop_assert!(peak(&large.log) >= peak(&small.log), "{config} {plan:?}");
    }

    #[test]
    fn a_longer_sequence_never_takes_less((config, class) in models(), plan in plans(), more in 1..6_u64) {
        // Lengths stay multiples of eight: other lengths make torch pad masks or choose another attention kernel.
        let mut longer = plan.clone();
        longer.batch.seq_len += 8 * more;
        let (short, long) = (run(&config, class, &plan).1, run(&config, class, &longer).1);
        prop_assert!(peak(&long.log) >= peak(&short.log), "{config} {plan:?}");
    }

    #[test]
    fn deeper_and_wider_models_never_take_less(
        (model_type, class) in prop::sample::select(FAMILIES.to_vec()),
        (layers, hidden) in (1..4_u64, 1..4_u64),
        plan in plans(),
    ) {
        let base = run(&tiny(model_type, layers, 64 * hidden, 320), class, &plan).1;
        let deeper = run(&tiny(model_type, layers + 1, 64 * hidden, 320), class, &plan).1;
        let wider = run(&tiny(model_type, layers, 64 * hidden + 64, 320), class, &plan).1;
        prop_assert!(peak(&deeper.log) >= peak(&base.log), "{model_type} {plan:?}");
        prop_assert!(peak(&wider.log) >= peak(&base.log), "{model_type} {plan:?}");
    }

    #[test]
    fn a_wider_dtype_never_takes_less((config, class) in models(), plan in plans()) {
        // transformers' Adafactor steps on fp32 copies of 16-bit parameters and gradients, and on the fp32 ones themselves.
        prop_assume!(plan.optimizer.kind != OptimizerKind::Adafactor);
        // Cards before Ampere have fused attention for fp16 and fp32 but not for bf16, where torch falls back to the math
        // kernel and its squares: another kernel, and more memory than fp32 takes.
        let narrow = if plan.gpu.capability < Some(80) { DType::F16 } else { DType::BF16 };
        let half = TrainPlan { weights: narrow, autocast: None, ..plan };
        let single = TrainPlan { weights: DType::F32, ..half.clone() };
        let (narrow, wide) = (run(&config, class, &half).1, run(&config, class, &single).1);
        prop_assert!(peak(&wide.log) >= peak(&narrow.log), "{config} {half:?}");
    }

    #[test]
    fn reports_add_up((config, class) in models(), plan in plans()) {
        let (model, simulation) = run(&config, class, &plan);
        let report = report::summarize("tiny", &model, RunPlan::Train(Box::new(plan)), &simulation, Vec::new());
        let sum: u64 = report.breakdown.iter().map(|component| component.bytes).sum();
        prop_assert_eq!(sum, report.totals.process, "{} {:?}", config, report.breakdown);
        prop_assert!(report.totals.allocated <= report.totals.reserved);
        prop_assert!(report.totals.reserved <= report.totals.process);
        prop_assert!(report.totals.allocated >= peak(&simulation.log), "the allocator hands out what is asked for");
    }

    #[test]
    fn only_what_must_stay_outlives_a_step((config, class) in models(), plan in plans()) {
        let (_, simulation) = run(&config, class, &plan);
        let log = &simulation.log;
        let ends = step_ends(log);
        prop_assert_eq!(ends.len(), 3);
        let stays = [
            Category::Weights,
            Category::Adapters,
            Category::Buffers,
            Category::Batch,
            Category::OptimizerState,
            Category::Workspace,
        ];
        let kept = ends.iter().map(|end| alive(log, *end)).collect::<Vec<_>>();
        for storage in kept.iter().flatten() {
            prop_assert!(stays.contains(&storage.category), "{config} {plan:?}: {storage:?} is left over");
        }
        // From the first step on, the same: state and workspaces exist, and nothing is added.
        let sums = kept.iter().map(|kept| kept.iter().map(rounded).sum::<u64>()).collect::<Vec<_>>();
        prop_assert!(sums.windows(2).all(|pair| pair[0] == pair[1]), "{config} {plan:?}: {sums:?}");
        let parameters = simulation.program.parameters.iter().map(|p| p.shape.elements()).sum::<u64>();
        prop_assert_eq!(bytes_of(&kept[2], Category::Weights), parameters * plan.weights.size(), "{} {:?}", config, plan);
        // When the process lets go of everything, nothing is held by anyone.
        prop_assert!(alive(log, log.events.len()).is_empty());
    }

    #[test]
    fn two_runs_are_the_same((config, class) in models(), plan in plans()) {
        let (first, second) = (run(&config, class, &plan).1, run(&config, class, &plan).1);
        prop_assert_eq!(&first.log.events, &second.log.events);
        prop_assert_eq!(&first.log.phases, &second.log.phases);
        prop_assert_eq!(format!("{:?}", first.log.storages), format!("{:?}", second.log.storages));
        prop_assert_eq!(first.replay.peak_reserved(), second.replay.peak_reserved());
    }
}

/// Of what the allocator hands out the law does not hold, in torch as here: a larger batch leaves other blocks free for the
/// optimizer's step. BERT-base, bf16, AdamW, 128 tokens, three steps of the real torch 2.11 on the stand-in (`vramcast rehearse`).
#[test]
fn a_larger_batch_may_take_less_where_torch_does() {
    let entry = vramcast_core::source::catalogue::find("google-bert/bert-base-uncased").unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    let peaks = |batch_size: u64| {
        let batch = Batch { batch_size, seq_len: 128, ..Batch::default() };
        let run = simulation::train(&model, &TrainPlan { batch, ..TrainPlan::default() }).unwrap();
        (run.replay.peak_allocated(), run.replay.peak_reserved(), peak(&run.log))
    };
    let (five, six) = (peaks(5), peaks(6));
    let near = |ours: u64, torch: u64, percent: u64| ours.abs_diff(torch) * 100 <= torch * percent;
    assert!(near(five.0, 1_205_992_960, 1) && near(six.0, 1_202_323_968, 1), "{five:?} {six:?}");
    assert!(near(five.1, 1_386_217_472, 5) && near(six.1, 1_275_068_416, 5), "{five:?} {six:?}");
    assert!(six.0 < five.0 && six.1 < five.1 && six.2 >= five.2, "{five:?} {six:?}");
}
