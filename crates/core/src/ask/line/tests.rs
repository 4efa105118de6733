use super::*;

/// Files that lines name.
fn open(name: &str) -> Result<Value, String> {
    Ok(match name {
        "train.py" => json!(
            "p.add_argument('--bs', default=2)\nargs = p.parse_args()\nmodel = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.bfloat16)\nconfig = \
             LoraConfig(r=4, target_modules=['c_attn'])\nt = TrainingArguments('out', per_device_train_batch_size=args.bs, optim=chosen())\n"
        ),
        "titan.toml" => json!({"job": {"dump_folder": "x"}, "model": {"name": "llama3", "flavor": "8B"},
            "training": {"local_batch_size": 2, "seq_len": 4096, "global_batch_size": 32}, "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
            "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 4}}),
        "torchtitan/models/llama3/config_registry.py" => json!(
            "def base():\n    return Trainer.Config(model_spec=model_registry('8B'), training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, \
             max_context_length=8192), activation_checkpoint=FullAC.Config())\ndef other():\n    config = base()\n    config.parallelism.tensor_parallel_degree = 8\n    return config\n"
        ),
        "nemo.yaml" => {
            json!({"recipe": "TrainFinetuneRecipeForNextTokenPrediction", "dist_env": {"backend": "nccl"}, "step_scheduler": {"local_batch_size": 4},
            "model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained", "pretrained_model_name_or_path": "a/b"},
            "peft": {"dim": 8, "target_modules": "*_proj"}, "packed_sequence": {"packed_sequence_size": 1024}})
        }
        _ => return Err("there is no such file".into()),
    })
}

fn content(line: &str) -> Content {
    let words = shell::lines(line).remove(0);
    read(&words, &open, &[]).unwrap_or_else(|faults| panic!("{line}: {faults:?}"))
}

fn refused(line: &str) -> String {
    let words = shell::lines(line).remove(0);
    read(&words, &open, &[]).unwrap_err().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn at(content: &Content, place: &str) -> Value {
    tree::get(&content.tree, place).cloned().unwrap_or_default()
}

#[test]
fn modules_shells_and_containers_are_seen_through() {
    let line = "torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.micro_batch_size_per_gpu=4 +data.max_length=2048 model.partial_pretrain=a/b";
    let verl = content(line);
    assert_eq!(
        (verl.model.as_deref(), at(&verl, "batch.seq_len"), at(&verl, "parallel.gpus")),
        (Some("a/b"), json!(2048), json!(4))
    );
    let inner = content("srun -N 2 bash -c \"torchrun --nproc_per_node=8 t.py --model_name_or_path gpt2 --do_train\"");
    assert_eq!(
        (inner.model.as_deref(), at(&inner, "parallel.gpus"), at(&inner, "parallel.nodes")),
        (Some("gpt2"), json!(8), json!(2))
    );
    let docker = content("docker run --gpus all -p 1:1 vllm/vllm-openai:latest --model a/b --max-model-len 4096");
    assert_eq!((docker.model.as_deref(), docker.task), (Some("a/b"), Some(crate::ask::Task::Infer)));
    assert_eq!(
        at(&content("mpirun -np 8 python t.py --do_train --model_name_or_path gpt2"), "parallel.gpus"),
        json!(8)
    );
    assert_eq!(
        content("uv run --with trl python t.py --do_train --model_name_or_path gpt2").model.as_deref(),
        Some("gpt2")
    );
    let deepspeed = content("deepspeed --module openrlhf.cli.train_sft --max_len 512 --pretrain a/b --zero_stage 3");
    assert_eq!(deepspeed.deepspeed.unwrap()["zero_optimization"]["stage"], 3);
}

#[test]
fn programs_are_read_by_their_line() {
    let text = refused("python train.py --bs 8");
    assert!(text.contains("optim: chosen(…) is not known without running"), "{text}");
    let words = shell::lines("python train.py --bs 8").remove(0);
    let read = read(&words, &open, &["optim".to_owned()]).unwrap();
    assert_eq!((at(&read, "batch.batch_size"), at(&read, "weights")), (json!(8), json!("bf16")));
    assert_eq!((at(&read, "adapter.rank"), at(&read, "adapter.targets")), (json!(4), json!(["c_attn"])));
}

#[test]
fn configurations_of_other_trainers() {
    let titan =
        content("torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file titan.toml --training.seq_len 2048");
    assert_eq!((at(&titan, "batch.seq_len"), at(&titan, "gradient_accumulation")), (json!(2048), json!(4)));
    assert_eq!(at(&titan, "checkpoints.selective"), json!("alternate-matmuls"));
    assert_eq!(at(&titan, "parallel.engine.fsdp2.tensor.form"), json!("torchtitan"));
    let python = content("torchrun -m torchtitan.train --module llama3 --config other");
    assert_eq!((python.model.as_deref(), at(&python, "parallel.mesh.tp")), (Some("meta-llama/Llama-3.1-8B"), json!(8)));
    assert_eq!((at(&python, "batch.batch_size"), at(&python, "checkpointing")), (json!(2), json!("full")));
    let nemo = content("automodel finetune llm -c nemo.yaml --step_scheduler.local_batch_size 2");
    assert_eq!(
        (at(&nemo, "batch.batch_size"), at(&nemo, "batch.seq_len"), at(&nemo, "adapter.rank")),
        (json!(2), json!(1024), json!(8))
    );
}

#[test]
fn several_roles_are_asked_for_one_by_one() {
    let line = "python -m verl.trainer.main_ppo data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=a/b \
                actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 trainer.n_gpus_per_node=8";
    let text = refused(line);
    assert!(text.contains("vramcast train a/b --engine fsdp1 --gpus 8 --batch-size 16 --seq-len 1536"), "{text}");
    assert!(refused("python -m openrlhf.cli.train_ppo_ray --pretrain a/b").contains("OpenRLHF's roles"));
    // Generating is no training.
    assert!(
        refused("python generate.py --model_name_or_path a/b --max_new_tokens 8").contains("none of its arguments")
    );
}

#[test]
fn a_modelfile_is_read() {
    let text = "FROM llama3:8b\nPARAMETER num_ctx 8192\nPARAMETER stop \"x\"\nSYSTEM \"\"\"\nFROM nowhere\n\"\"\"\n";
    let read = modelfile(text).unwrap();
    assert_eq!(read.model.as_deref(), Some("llama3-8b"));
    assert!(read.named.iter().any(|(name, _)| name == "ctx_size"));
}

#[test]
fn accelerate_says_who_spreads_and_the_trainer_what_in() {
    const FSDP: &str = "parallel.engine.fsdp1.mixed_precision.parameters";
    let script = "t.py --do_train --model_name_or_path gpt2";
    for (line, place, value) in [
        (format!("accelerate launch --use_fsdp --num_processes 8 {script} --bf16 True"), FSDP, json!("bf16")),
        (format!("accelerate launch --use_fsdp --num_processes 8 {script} --bf16 True"), "weights", json!("fp32")),
        (
            format!("accelerate launch --use_fsdp --mixed_precision bf16 --num_processes 8 {script}"),
            FSDP,
            json!("bf16"),
        ),
        (
            format!("accelerate launch --use_fsdp --mixed_precision bf16 --num_processes 8 {script} --fp16 True"),
            FSDP,
            json!("fp16"),
        ),
        (format!("accelerate launch --use_fsdp --num_processes 8 {script}"), FSDP, json!(null)),
        (
            format!(
                "accelerate launch --use_parallelism_config --parallelism_config_tp_size 2 --num_processes 8 {script}"
            ),
            "parallel.mesh.tp",
            json!(2),
        ),
        (format!("srun --gpus=8 --nodes=2 torchrun {script}"), "parallel.gpus", json!(4)),
        (format!("srun -G h100:16 -N 2 python {script}"), "parallel.gpus", json!(8)),
    ] {
        assert_eq!(at(&content(&line), place), value, "{line}: {place}");
    }
    for (line, said) in [
        (format!("accelerate launch --use_megatron_lm --megatron_lm_tp_degree 2 {script}"), "--use_megatron_lm"),
        (format!("accelerate launch --num_processes 8 --frobnicate 3 {script}"), "frobnicate is no key of accelerate"),
    ] {
        let text = refused(&line);
        assert!(text.contains(said) && text.lines().count() == 1, "{line}: {text}");
    }
}

#[test]
fn flags_of_serving_engines_in_their_own_words() {
    let given = |line: &str, name: &str| {
        let content = content(line);
        let found = content.named.iter().rev().find(|(known, _)| known == name).map(|(_, given)| given.clone());
        (content, found)
    };
    for (line, name, value) in [
        ("docker run --gpus all vllm/vllm-openai:v0.11.0 --model a/b", "engine_version", json!("0.11.0")),
        ("docker run ghcr.io/ggml-org/llama.cpp:server-cuda-b5781 -m x.gguf", "engine_version", json!("b5781")),
        ("trtllm-serve a/b --max_seq_len 4096 --backend pytorch", "context", json!(4096)),
        ("trtllm-serve a/b --max_num_tokens 512", "max_num_batched_tokens", json!(512)),
        ("trtllm-serve a/b --max_batch_size 16", "max_num_seqs", json!(16)),
        ("trtllm-serve a/b --kv_cache_free_gpu_memory_fraction 0.8", "gpu_memory_utilization", json!(0.8)),
        ("trtllm-serve a/b --tp_size 2", "tp_size", json!(2)),
    ] {
        let found = given(line, name).1.unwrap_or_else(|| panic!("{line}: {name}"));
        assert!(format!("{found:?}").contains(value.to_string().trim_matches('"')), "{line}: {found:?}");
    }
    let (latest, version) = given("docker run vllm/vllm-openai:latest --model a/b", "engine_version");
    assert!(version.is_none() && latest.model.as_deref() == Some("a/b"));
    for length in ["auto", "-1"] {
        let (auto, found) = given(&format!("vllm serve a/b --max-model-len {length}"), "max_model_len");
        assert!(found.is_none() && auto.notes.iter().any(|note| note.contains("the longest that fits")));
    }
    let ollama = content("ollama run llama3.1:8b-instruct-q8_0");
    assert_eq!(ollama.model.as_deref(), Some("llama3.1-8b"));
    assert!(ollama.named.iter().any(|(name, given)| name == "quantization" && format!("{given:?}").contains("Q8_0")));
    let elsewhere = refused("vllm serve a/b --device cpu");
    assert!(elsewhere.contains("device cpu"), "{elsewhere}");
}
