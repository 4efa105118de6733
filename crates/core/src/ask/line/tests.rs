use super::*;

mod engines;

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
        "lf.yaml" => {
            json!({"model_name_or_path": "gpt2", "stage": "sft", "finetuning_type": "lora", "cutoff_len": 512})
        }
        "lora.py" => json!(
            "parser = HfArgumentParser(TrainingArguments)\nargs, = parser.parse_args_into_dataclasses()\nm = \
             AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype='bfloat16')\nm.gradient_checkpointing_enable()\nm = get_peft_model(m, LoraConfig(r=4, \
             target_modules=['c_attn']))\nTrainer(model=m, args=args)\n"
        ),
        "own.py" => json!(
            "class Own(TrainingArguments):\n    bf16: bool = True\nargs, = HfArgumentParser(Own).parse_args_into_dataclasses()\nif args.lora:\n    m = \
             get_peft_model(AutoModelForCausalLM.from_pretrained('gpt2'), LoraConfig(r=4))\nTrainer(model=m, args=args)\n"
        ),
        "job.sbatch" => json!(
            "#!/bin/bash\n#SBATCH --gpus-per-node=4\nsrun torchrun --nproc_per_node 4 run_clm.py --model_name_or_path gpt2\n"
        ),
        "bare.py" => json!(
            "m = AutoModelForCausalLM.from_pretrained('gpt2')\nTrainer(model=m, args=TrainingArguments('o', per_device_train_batch_size=3))\n"
        ),
        "reward.py" => json!("rm = create_critic_model(args.model_name_or_path)\n"),
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
fn several_roles_are_a_placement() {
    let line = "python -m verl.trainer.main_ppo data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=a/b \
                actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo";
    let found = content(line).placement.unwrap();
    assert_eq!((found.groups[0].cards, found.groups[0].roles.len()), (8, 2));
    let line = "python -m openrlhf.cli.train_ppo_ray --pretrain a/b --vllm_num_engines 4 --colocate_actor_ref";
    assert_eq!(content(line).placement.unwrap().groups.len(), 3);
    // Generating is no training.
    assert!(
        refused("python generate.py --model_name_or_path a/b --max_new_tokens 8").contains("none of its arguments")
    );
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
            format!("accelerate launch --use_fsdp --fsdp_sharding_strategy 2 --num_processes 8 {script}"),
            "parallel.engine.fsdp1.strategy",
            json!("grad-op"),
        ),
        (format!("accelerate launch --mixed_precision bf16 {script}"), "autocast", json!("bf16")),
        (format!("accelerate launch --mixed_precision bf16 {script} --fp16 True"), "autocast", json!("fp16")),
        (
            format!("accelerate launch --multi_gpu --num_processes 2 --mixed_precision fp16 {script}"),
            "autocast",
            json!("fp16"),
        ),
        (format!("accelerate launch --mixed_precision no --num_processes 2 {script}"), "autocast", json!(null)),
        (
            format!("srun --nodes=2 --gpus-per-node=4 torchrun --nnodes 2 --nproc_per_node gpu {script}"),
            "parallel.gpus",
            json!(4),
        ),
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
        (format!("torchrun --nproc_per_node 0 {script}"), "starts nothing"),
        (format!("python {script} --bf16 True --fp16 True"), "bf16 and fp16 are both set"),
    ] {
        let text = refused(&line);
        assert!(text.contains(said) && text.lines().count() == 1, "{line}: {text}");
    }
}

#[test]
fn scripts_of_ones_own_are_read_by_what_they_say() {
    let own =
        content("deepspeed --num_gpus 4 f.py --model_name gpt2 --batch_size 2 --seq_length 512 --learning_rate 1e-4");
    assert_eq!(
        (own.model.as_deref(), at(&own, "batch.batch_size"), at(&own, "batch.seq_len")),
        (Some("gpt2"), json!(2), json!(512))
    );
    assert!(own.notes.iter().any(|note| note.starts_with("batch_size: the script's own")), "{:?}", own.notes);
    let glue = content("python run_glue.py --model_name_or_path bert-base-uncased --max_seq_length 128 --do_train");
    assert_eq!(
        (glue.framework.as_deref(), glue.auto_class.as_deref(), at(&glue, "batch.seq_len")),
        (Some("hf-trainer"), Some("AutoModelForSequenceClassification"), json!(128))
    );
    let other = content("python f.py --model_name_or_path gpt2 --max_length 128 --do_train");
    assert_eq!(other.framework.as_deref(), Some("trl"));
    assert!(other.notes.iter().any(|note| note.contains("--framework hf-trainer")), "{:?}", other.notes);
}

#[test]
fn what_hands_lines_on_is_seen_through() {
    for line in [
        "singularity exec --nv i.sif torchrun --nproc-per-node=4 t.py --do_train --model_name_or_path gpt2",
        "kubectl exec pod -- torchrun --nproc_per_node 4 t.py --do_train --model_name_or_path gpt2",
        "sbatch --gres=gpu:4 --wrap \"torchrun --nproc_per_node 4 t.py --do_train --model_name_or_path gpt2\"",
        "timeout 3600 nsys profile -o x torchrun --nproc_per_node 4 t.py --do_train --model_name_or_path gpt2",
        "eval torchrun --nproc_per_node 4 t.py --do_train --model_name_or_path gpt2",
        "docker run --gpus all nvcr.io/nvidia/pytorch:25.01 bash -c 'cd x && torchrun --nproc_per_node 4 t.py --do_train --model_name_or_path gpt2'",
        "deepspeed --include a:0,1@b:0,1 t.py --do_train --model_name_or_path gpt2",
    ] {
        let read = content(line);
        let cards = at(&read, "parallel.gpus").as_u64().unwrap() * at(&read, "parallel.nodes").as_u64().unwrap_or(1);
        assert_eq!((read.model.as_deref(), cards), (Some("gpt2"), 4), "{line}");
    }
    for module in ["axolotl.cli.train a.yml", "torchtitan.train --config x", "verl.trainer.main_ppo a=b"] {
        assert!(is_known(&shell::lines(&format!("python3 -m {module}"))[0]), "{module}");
    }
    assert!(!is_known(&shell::lines("docker pull vllm/vllm-openai")[0]));
}

#[test]
fn commands_of_tools_are_told_apart() {
    let lora = content("litgpt finetune checkpoints/a/b --train.micro_batch_size 2 --devices 2");
    assert_eq!((at(&lora, "adapter.rank"), at(&lora, "gradient_accumulation")), (json!(8), json!(4)));
    assert!(at(&lora, "adapter.targets").as_str().unwrap().contains("q_proj"));
    assert_eq!(at(&content("litgpt finetune_full checkpoints/a/b"), "adapter"), Value::Null);
    for (command, code) in [("finetune_adapter", "litgpt-adapter"), ("finetune_adapter_v2", "litgpt-adapter-v2")] {
        let own = content(&format!("litgpt {command} checkpoints/a/b --precision bf16-true --quantize bnb.nf4"));
        assert_eq!((at(&own, "model_code"), at(&own, "adapter")), (json!(code), Value::Null));
        assert!(refused(&format!("litgpt {command} checkpoints/a/b --devices 4")).contains("on several cards"));
    }
    assert!(refused("litgpt finetune_prefix checkpoints/a/b").contains("finetune_prefix"));
    let mixed = content("litgpt finetune_full checkpoints/a/b");
    assert_eq!((at(&mixed, "weights"), at(&mixed, "autocast")), (json!("fp32"), json!("bf16")));
    assert!(refused("litgpt finetune_lora checkpoints/a/b --quantize bnb.nf4").contains("add precision: bf16-true"));
    for (line, steps) in [("swift sft --model a/b", 16), ("NPROC_PER_NODE=4 swift sft --model a/b", 4)] {
        assert_eq!(at(&content(line), "gradient_accumulation"), json!(steps), "{line}");
    }
    let seen = content("CUDA_VISIBLE_DEVICES=0,1,2 FORCE_TORCHRUN=1 llamafactory-cli train lf.yaml");
    assert_eq!(at(&seen, "parallel.gpus"), json!(3));
    let swift = content(
        "NPROC_PER_NODE=4 megatron sft --model a/b --tuner_type full --tensor_model_parallel_size 2 --micro_batch_size 2 --global_batch_size 16 --max_length 1024",
    );
    assert_eq!((at(&swift, "parallel.mesh.tp"), at(&swift, "gradient_accumulation")), (json!(2), json!(4)));
    let gpt = content(
        "torchrun --nproc_per_node 8 train.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 32 --seq-length 128 --bf16 --vocab-size 100",
    );
    assert_eq!(at(&gpt, "gradient_accumulation"), json!(2));
    assert!(gpt.model.is_none() && gpt.config.is_some());
    let vllm = content("vllm serve a/b --max-model-len 8k --rope-scaling '{\"factor\": 4.0}'");
    assert!(
        vllm.named
            .iter()
            .any(|(name, given)| name == "max_model_len" && *given == crate::ask::Given::Value(json!(8000))),
        "{:?}",
        vllm.named
    );
    assert!(vllm.notes.iter().any(|note| note.ends_with(serving::STRETCHED)), "{:?}", vllm.notes);
}

/// accelerate counts the processes of all machines, whatever Slurm says of a node.
#[test]
fn slurm_around_accelerate_counts_once() {
    let script = "t.py --do_train --model_name_or_path gpt2";
    for (line, cards) in [
        ("srun -N 2 --gres=gpu:8 accelerate launch --multi_gpu --num_machines 2 --num_processes 16", (8, 2)),
        ("srun -N 2 --gres=gpu:8 accelerate launch --multi_gpu --num_processes 16", (8, 2)),
        ("srun -N 2 --gres=gpu:8 accelerate launch --multi_gpu", (8, 2)),
        ("srun --gres=gpu:4 accelerate launch --multi_gpu", (4, 0)),
    ] {
        let read = content(&format!("{line} {script}"));
        let count = |place: &str| at(&read, place).as_u64().unwrap_or(0);
        assert_eq!((count("parallel.gpus"), count("parallel.nodes")), cards, "{line}");
    }
}

/// What a script does beside the arguments of its line is read, or said to be unread.
#[test]
fn a_script_is_read_beneath_its_arguments() {
    let read = content("python lora.py --per_device_train_batch_size 8 --bf16 True");
    assert_eq!((read.model.as_deref(), at(&read, "adapter.rank")), (Some("gpt2"), json!(4)));
    assert_eq!((at(&read, "checkpointing"), at(&read, "batch.batch_size")), (json!("full"), json!(8)));
    let unread = content("python own.py --per_device_train_batch_size 8 --model_name_or_path gpt2");
    assert_eq!(at(&unread, "adapter"), Value::Null);
    let notes = unread.notes.join("\n");
    assert!(notes.contains("own calls") && notes.contains("class Own"), "{notes}");
}

/// Engines read variables beside their flags; a flag stands over its variable, and what none stands for is said.
#[test]
fn slurm_counts_tasks_and_variables_count() {
    let script = "t.py --do_train --model_name_or_path gpt2";
    for (line, cards) in [
        ("srun -n4 python", 4),
        ("srun -N2 -n8 python", 8),
        ("srun --ntasks-per-node=4 python", 4),
        ("srun --gpus-per-task=1 -n4 python", 4),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch", 2),
        ("HIP_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node gpu", 3),
        ("NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node 4", 4),
    ] {
        let read = content(&format!("{line} {script}"));
        let all = at(&read, "parallel.gpus").as_u64().unwrap_or(1) * at(&read, "parallel.nodes").as_u64().unwrap_or(1);
        assert_eq!(all, cards, "{line}");
    }
    let asked = "#SBATCH -N2\n#SBATCH --gpus=8\nsrun python t.py --do_train --model_name_or_path gpt2\n";
    let words: Vec<String> = shell::lines(asked).into_iter().flatten().collect();
    assert_eq!(words[1..3], ["SLURM_NNODES=2", "SLURM_JOB_NUM_NODES=2"]);
    let one = content(&format!("CUDA_VISIBLE_DEVICES=0,1 NVTE_FLASH_ATTN=0 NCCL_DEBUG=INFO python {script}"));
    let said = one.notes.join("\n");
    assert!(said.contains("2 cards are shown to one process") && said.contains("NVTE_FLASH_ATTN=0"), "{said}");
    assert!(!said.contains("NCCL_DEBUG"), "{said}");
}

#[test]
fn scripts_are_read_where_a_queue_runs_them() {
    for line in ["sbatch job.sbatch", "bash job.sbatch"] {
        assert_eq!(content(line).model.as_deref(), Some("gpt2"), "{line}");
    }
}

/// What the line says and the program never looks at is named; what decides memory and is not known is refused.
#[test]
fn arguments_that_nobody_reads_are_said() {
    let bare = content("python bare.py --per_device_train_batch_size 8 --model_name_or_path gpt2-xl");
    assert_eq!(tree::get(&bare.tree, "batch.batch_size"), Some(&json!(3)));
    assert!(bare.notes.iter().any(|note| note.contains("reads no arguments")), "{:?}", bare.notes);
    let words =
        shell::lines("deepspeed main.py --model_name_or_path gpt2 --per_device_train_batch_size 4 --lora_dim 128")
            .remove(0);
    let faults = read(&words, &open, &[]).unwrap_err();
    assert!(faults[0].to_string().contains("lora_dim: 128"), "{faults:?}");
    // FastChat's, LLaVA's, alpaca-lora's: their ranks ask for adapters by themselves, TRL's beside `use_peft`.
    for (own, key) in [
        ("--lora_r 8", "lora_r"),
        ("--max_length 512 --lora_r 8", "lora_r"),
        ("--q_lora True", "q_lora"),
        ("--lora_enable True", "lora_enable"),
        ("--bits 4", "bits"),
    ] {
        let line = format!("python train.py --model_name_or_path gpt2 --per_device_train_batch_size 4 {own}");
        assert!(refused(&line).contains(&format!("{key}: ")), "{line}: {}", refused(&line));
    }
    let harmless = "python train.py --model_name_or_path gpt2 --per_device_train_batch_size 4 --bits 16";
    assert_eq!(content(harmless).model.as_deref(), Some("gpt2"));
    let peft =
        content("python train.py --model_name_or_path gpt2 --per_device_train_batch_size 4 --use_peft --lora_r 8");
    assert_eq!(at(&peft, "adapter.rank"), json!(8));
}

/// DeepSpeed-Chat's scripts make DeepSpeed's configuration of their own arguments.
#[test]
fn a_configuration_that_the_script_makes_is_read() {
    let line = "deepspeed --num_gpus 4 main.py --model_name_or_path gpt2 --per_device_train_batch_size 4 --deepspeed --zero_stage 2";
    let made = content(line).deepspeed.unwrap();
    assert_eq!((&made["zero_optimization"]["stage"], &made["fp16"]["enabled"]), (&json!(2), &json!(true)));
}

/// Pairs are trained by TRL's trainers, or by others after them.
#[test]
fn preferences_of_other_tools_are_tasks() {
    let kind = |line: &str| {
        let found = content(line);
        let said = found.notes.iter().any(|note| note.contains("is taken for TRL's"));
        (tree::get(&found.tree, "objective.kind").cloned(), said)
    };
    for (line, task) in [
        ("swift rlhf --rlhf_type kto --model gpt2 --train_type lora", "kto"),
        ("swift rlhf --model gpt2", "dpo"),
        (
            "llamafactory-cli train --stage dpo --pref_loss orpo --model_name_or_path gpt2 --finetuning_type lora --template x",
            "orpo",
        ),
        ("llamafactory-cli train --stage rm --model_name_or_path gpt2 --finetuning_type lora --template x", "reward"),
    ] {
        assert_eq!(kind(line), (Some(json!(task)), true), "{line}");
    }
    let online = content("python dpo_online.py --model_name_or_path gpt2 --per_device_train_batch_size 1");
    assert_eq!(tree::get(&online.tree, "objective.kind"), Some(&json!("online-dpo")));
    let words = shell::lines("python nash_md.py --model_name_or_path gpt2 --per_device_train_batch_size 1").remove(0);
    assert!(read(&words, &open, &[]).unwrap_err()[0].to_string().contains("another task"));
    let spread = content("trl dpo --model_name_or_path gpt2 --accelerate_config zero3");
    assert_eq!(tree::get(&spread.tree, "parallel.gpus"), Some(&json!(8)));
    let words = shell::lines("swift rlhf --rlhf_type grpo --model gpt2").remove(0);
    assert!(read(&words, &open, &[]).unwrap_err()[0].to_string().contains("--task grpo"));
}

#[test]
fn deepspeed_chat_is_read_as_it_trains() {
    let line = "deepspeed --num_gpus 8 main.py --model_name_or_path facebook/opt-1.3b --deepspeed --zero_stage 2 --lora_dim 128 --gradient_checkpointing";
    let all = content(line);
    assert_eq!(at(&all, "adapter.rank"), json!(128));
    assert_eq!(at(&all, "adapter.bias"), json!("others"));
    assert_eq!(at(&content(&format!("{line} --only_optimize_lora")), "adapter.bias"), json!("none"));
    assert!(refused(&format!("{line} --lora_module_name decoder.layers.0.self_attn")).contains("lora_module_name"));
    let reward = content(
        "deepspeed reward.py --model_name_or_path facebook/opt-350m --deepspeed --zero_stage 0 --num_train_epochs 1",
    );
    assert_eq!(at(&reward, "objective.kind"), json!("reward"));
    for (line, why) in [
        (
            "deepspeed main.py --actor_model_name_or_path a --critic_model_name_or_path b --deepspeed --zero_stage 3",
            "another task",
        ),
        ("deepspeed main.py --model_name_or_path a --distill_method one_stage --num_train_epochs 1", "distillation"),
        ("deepspeed main.py --model_name_or_path a --num_train_epochs 1 --deepspeed", "--deepspeed without a file"),
        ("deepspeed bench.py --model gpt2 --deepspeed", "none of its arguments"),
        ("accelerate launch {script_name.py} --lr 1", "is a placeholder"),
        ("python util.py --target_tensor_model_parallel_size 2", "cut anew"),
        (
            "torchrun run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size $2",
            "the script's text does not tell it",
        ),
    ] {
        assert!(refused(line).contains(why), "{line}: {}", refused(line));
    }
}

#[test]
fn verls_config_names_its_engine() {
    let line = "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml actor_rollout_ref.model.path=Qwen/Qwen3-8B \
                actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=grpo";
    assert!(refused(line).contains("strategy: megatron"));
    let mut plain = content(&line.replace("--config-name=ppo_megatron_trainer.yaml ", ""));
    let placement = plain.take_placement().unwrap();
    assert!(
        placement.notes.iter().any(|note| note.contains("tokens go through the model at once")),
        "{:?}",
        placement.notes
    );
}
