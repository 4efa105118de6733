use super::*;

fn request(task: Task, words: &[(&str, &str)]) -> Result<Request, Vec<Fault>> {
    let named = words.iter().map(|(name, text)| {
        let given = if text.is_empty() { Given::Bare } else { Given::Text((*text).to_owned()) };
        ((*name).to_owned(), given)
    });
    Asked { task, named: named.collect(), ..Asked::default() }.request()
}

#[test]
fn two_names_of_a_place_agree() {
    let said = |words: &[(&str, &str)]| request(Task::Train, words).map_err(|faults| faults[0].to_string());
    let error = said(&[("precision", "bf16"), ("weights", "fp32")]).unwrap_err();
    assert!(error.contains("\"bf16\"") && error.contains("\"fp32\""), "{error}");
    assert!(said(&[("precision", "bf16"), ("weights", "bf16")]).is_ok());
    assert!(said(&[("precision", "bf16-mixed"), ("weights", "fp32")]).is_ok());
    assert!(said(&[("weights", "fp32"), ("autocast", "bf16")]).is_ok());
}

#[test]
fn what_is_off_asks_for_nothing() {
    for words in [
        &[("dora", "false")][..],
        &[("no-prepare-kbit", "false")],
        &[("eval-skip-logits", "false"), ("batch-eval-metrics", "no")],
        &[("vllm-enable-sleep-mode", "false"), ("task", "grpo")],
    ] {
        let stated = request(Task::Train, words).unwrap().stated;
        for part in ["/adapter", "/quantization", "/job", "/objective/vllm"] {
            assert_eq!(stated.pointer(part), None, "{words:?}: {stated}");
        }
    }
    let framework = Some("trl".to_owned());
    let named = vec![("no-prepare-kbit".to_owned(), Given::Text("false".into()))];
    let asked = Asked { named, framework, ..Asked::default() }.request().unwrap();
    assert_eq!(asked.stated.pointer("/quantization"), None);
    let beside = request(Task::Train, &[("dora", "false"), ("lora", "")]).unwrap().stated;
    assert_eq!(beside["adapter"]["dora"], json!(false));
}

#[test]
fn adapters_of_a_file_can_be_turned_off() {
    let asked = |words: &[(&str, &str)]| {
        let file = json!({"adapter": {"method": "lora"}, "quantization": {"scheme": "nf4"}, "weights": "bf16"});
        let named = words.iter().map(|(name, text)| ((*name).to_owned(), Given::Text((*text).to_owned())));
        Asked { trees: vec![file], named: named.collect(), ..Asked::default() }.request().unwrap()
    };
    for word in ["lora", "qlora"] {
        let request = asked(&[(word, "false")]);
        assert_eq!((request.stated, request.notes.len()), (json!({"weights": "bf16"}), 2));
    }
    let kept = asked(&[("qlora", "false"), ("lora", "true")]).stated;
    assert_eq!(kept, json!({"adapter": {"method": "lora"}, "weights": "bf16"}));
}

#[test]
fn details_of_what_is_not_there_are_refused() {
    for (task, words) in [
        (Task::Train, &[("lora", ""), ("quant-compute", "bf16")][..]),
        (Task::Train, &[("lora", ""), ("no-prepare-kbit", "")]),
        (Task::Train, &[("virtual-tokens", "8")]),
        (Task::Infer, &[("quant-compute", "fp32")]),
        (Task::Infer, &[("num-assistant-tokens", "5")]),
    ] {
        let faults = request(task, words).unwrap_err();
        assert!(faults.len() == 1 && faults[0].to_string().contains("has no effect"), "{words:?}: {faults:?}");
    }
    for (task, words) in [
        (Task::Train, &[("qlora", ""), ("quant-compute", "bf16")][..]),
        (Task::Train, &[("quantization", "fp4"), ("lora", ""), ("no-prepare-kbit", "")]),
        (Task::Train, &[("peft-method", "prompt-tuning"), ("virtual-tokens", "8")]),
        (Task::Infer, &[("assistant-model", "gpt2"), ("num-assistant-tokens", "5")]),
    ] {
        assert!(request(task, words).is_ok(), "{words:?}");
    }
}

fn runner(words: &[(&str, &str)]) -> Runner {
    request(Task::Train, words).unwrap().runner
}

#[test]
fn engines_follow_from_what_is_said() {
    assert_eq!(runner(&[("batch-size", "4")]), Runner::OneCard);
    assert_eq!(runner(&[("gpus", "8")]), Runner::Fsdp2);
    assert_eq!(runner(&[("gpus", "8"), ("zero", "3")]), Runner::Deepspeed);
    assert_eq!(runner(&[("tp", "2")]), Runner::Tp);
    assert_eq!(runner(&[("tp", "2"), ("gpus", "4")]), Runner::Fsdp2);
    assert_eq!(runner(&[("dp", "4")]), Runner::Ddp);
    assert_eq!(runner(&[("engine", "fsdp"), ("gpus", "2")]), Runner::Fsdp1);
    let tree = json!({"parallel": {"engine": {"megatron": {"deepspeed": {}}}}});
    let asked = Asked { trees: vec![tree], ..Asked::default() };
    assert_eq!(asked.request().unwrap().runner, Runner::MegatronDeepspeed);
}

#[test]
fn options_go_to_their_engine() {
    let request = request(Task::Train, &[("wrap", "root"), ("gpus", "2"), ("engine", "fsdp2")]).unwrap();
    assert_eq!(request.stated["parallel"]["engine"], json!({"fsdp2": {"wrap": "root"}}));
    let zero = super::tests::request(Task::Train, &[("zero", "1"), ("gpus", "2"), ("engine", "megatron-deepspeed")]);
    assert_eq!(zero.unwrap().stated.pointer("/parallel/engine/megatron/deepspeed/zero/stage"), Some(&json!(1)));
}

#[test]
fn all_that_is_wrong_comes_back() {
    let faults = request(
        Task::Train,
        &[("seq-len", "x"), ("wrap", "root"), ("beams", "2"), ("vpp", "2"), ("gpus", "2"), ("engine", "ddp")],
    );
    let paths: Vec<String> = faults.unwrap_err().into_iter().map(|fault| fault.path).collect();
    assert_eq!(paths.len(), 4, "{paths:?}");
    assert!(request(Task::Infer, &[("engine", "nobody")]).is_err());
}

#[test]
fn any_place_can_be_set() {
    let request = request(Task::Train, &[("set", "quantization.threshold=0"), ("qlora", "")]).unwrap();
    assert_eq!(request.stated["quantization"], json!({"threshold": 0}));
    let versions = self::request(Task::Train, &[("set", "stack.torch=2.10"), ("set", "stack.fla=\"0.6\"")]).unwrap();
    assert_eq!(versions.stated["stack"], json!({"torch": "2.10", "fla": "0.6"}));
}
