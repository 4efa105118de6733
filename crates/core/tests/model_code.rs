//! Models in the code of training libraries: what such code does not do is refused by name.

use serde_json::json;
use vramcast_core::dtype::DType;
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::{
    AdapterPlan, Batch, Framework, Kernels, LoraPlan, LossKind, ModelCode, Quantization, Situation, Targets, TrainPlan,
};

fn llama() -> serde_json::Value {
    json!({"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512})
}

fn peak(config: serde_json::Value, plan: &TrainPlan) -> Result<u64, String> {
    let model = Model::new(config, Some("AutoModelForCausalLM")).unwrap();
    simulation::train(&model, plan).map(|run| run.replay.peak_allocated()).map_err(|error| error.to_string())
}

fn plan(model_code: ModelCode) -> TrainPlan {
    TrainPlan { batch: Batch { batch_size: 2, seq_len: 300, ..Batch::default() }, model_code, ..TrainPlan::default() }
}

#[test]
fn other_architectures_and_options_are_refused_by_name() {
    let error = peak(json!({"model_type": "mixtral", "num_hidden_layers": 2}), &plan(ModelCode::Litgpt)).unwrap_err();
    assert!(error.contains("model type mixtral in LitGPT's model code"), "{error}");
    let error = peak(json!({"model_type": "gemma", "num_hidden_layers": 2}), &plan(ModelCode::Torchtune)).unwrap_err();
    assert!(error.contains("model type gemma in torchtune's model code"), "{error}");
    let error = peak(llama(), &TrainPlan { kernels: Kernels::Liger, ..plan(ModelCode::Torchtune) }).unwrap_err();
    assert!(error.contains("kernels of others with torchtune's model code"), "{error}");
    let mut chunked = plan(ModelCode::Litgpt);
    chunked.loss.kind = LossKind::Chunked;
    assert!(peak(llama(), &chunked).unwrap_err().contains("another loss with LitGPT's model code"));
    let dora = LoraPlan { dora: true, ..LoraPlan::default() };
    let dora = TrainPlan { adapter: Some(AdapterPlan::Lora(dora)), ..plan(ModelCode::Litgpt) };
    assert!(peak(llama(), &dora).unwrap_err().contains("more than rank, dropout and targets"));
    let targets = Targets::Names(vec!["router".into()]);
    let router = LoraPlan { targets, ..LoraPlan::default() };
    let router = TrainPlan { adapter: Some(AdapterPlan::Lora(router)), ..plan(ModelCode::Litgpt) };
    assert!(peak(llama(), &router).unwrap_err().contains("router is not query"));
}

/// LitGPT's LoRA trains what its config says, and nothing else.
#[test]
fn adapters_of_the_model_are_what_is_trained() {
    let lora = LoraPlan { rank: 8, ..LoraPlan::default() };
    let plan = TrainPlan { adapter: Some(AdapterPlan::Lora(lora)), ..plan(ModelCode::Litgpt) };
    let model = Model::new(llama(), Some("AutoModelForCausalLM")).unwrap();
    let run = simulation::train(&model, &plan).unwrap();
    let trained = run.program.parameters.iter().filter(|parameter| !plan.is_frozen(parameter));
    // Queries (256) and values (128) of two layers: one first matrix for both, one second of both widths.
    let sizes: u64 = trained.map(|parameter| parameter.shape.elements()).sum();
    assert_eq!(sizes, 2 * (16 * 256 + 384 * 8));
}

/// LitGPT's own adapters: a gate for each head from the third layer on, and in the second version all scales, biases and norms.
#[test]
fn litgpts_own_adapters_train_what_its_filter_says() {
    let mut deep = llama();
    deep["num_hidden_layers"] = json!(4);
    let model = Model::new(deep.clone(), Some("AutoModelForCausalLM")).unwrap();
    let linears = (256 + 2 * 128) + 256 + 2 * 512 + 256;
    for (code, trained) in [
        (ModelCode::LitgptAdapter, 2 * 4),
        (ModelCode::LitgptAdapterV2, 2 * 4 + 2 * (4 * linears + 1000) + 4 * 2 * 256 + 256),
    ] {
        let run = simulation::train(&model, &plan(code)).unwrap();
        let sizes = run.program.parameters.iter().filter(|parameter| !plan(code).is_frozen(parameter));
        assert_eq!(sizes.map(|parameter| parameter.shape.elements()).sum::<u64>(), trained, "{code:?}");
        let full = peak(deep.clone(), &plan(ModelCode::Litgpt)).unwrap();
        let quantised =
            TrainPlan { quantization: Some(Quantization { prepare: false, ..Quantization::default() }), ..plan(code) };
        let (narrow, plain) = (peak(deep.clone(), &quantised).unwrap(), peak(deep.clone(), &plan(code)).unwrap());
        assert!(narrow < plain && plain < full, "{code:?}: {narrow} {plain} {full}");
        let beside = TrainPlan { adapter: Some(AdapterPlan::Lora(LoraPlan::default())), ..plan(code) };
        assert!(peak(deep.clone(), &beside).unwrap_err().contains("adapters that the model brings itself"));
    }
}

/// Four bits hold less than sixteen, and a longer batch more than a shorter one.
#[test]
fn laws_hold() {
    for code in [ModelCode::Litgpt, ModelCode::LitgptSpring2024, ModelCode::Torchtune] {
        let lora = || Some(AdapterPlan::Lora(LoraPlan { dtype: Some(DType::BF16), ..LoraPlan::default() }));
        let adapted = TrainPlan { adapter: lora(), ..plan(code) };
        let full = peak(llama(), &plan(code)).unwrap();
        let beside = peak(llama(), &adapted).unwrap();
        let scheme = Quantization { prepare: false, ..Quantization::default() };
        let quantised = peak(llama(), &TrainPlan { quantization: Some(scheme), ..adapted.clone() }).unwrap();
        assert!(quantised < beside && beside < full, "{code:?}: {quantised} {beside} {full}");
        let mut longer = adapted;
        longer.batch.seq_len = 400;
        assert!(peak(llama(), &longer).unwrap() > beside);
    }
}

#[test]
fn frameworks_choose_their_code() {
    for (name, code) in [("litgpt", ModelCode::Litgpt), ("torchtune", ModelCode::Torchtune)] {
        let framework = Framework::find(name).unwrap();
        for situation in [Situation::Full, Situation::Adapter, Situation::Quantised] {
            assert_eq!(framework.apply(&TrainPlan::default(), situation).unwrap().model_code, code);
        }
    }
}
