"""Every example of the seeds' documents: their commands by the installed command, their Python by the package."""

import json
import shutil
import subprocess

import pytest
import vramcast

OVERVIEW = [
    "microsoft/DialoGPT-medium",
    "meta-llama/Llama-2-7b-hf --dtype bf16",
    "mistralai/Mistral-7B-v0.1 --batch-size 4 --sequence-length 4096",
    "--show-detailed microsoft/DialoGPT-medium",
    "--lora-rank 128 --show-detailed microsoft/DialoGPT-medium",
    "--list-types",
]

# Seed 001: the command, and the same by the package.
CALCULATOR = [
    ("--model microsoft/phi-2 --mode training", {}),
    ("--model llama3-8b --mode training", {}),
    (
        "--model microsoft/phi-2 --mode training --precision bf16 --optimizer adamw --batch-size 4 --seq-length 2048",
        {"precision": "bf16", "optimizer": "adamw", "batch_size": 4, "seq_length": 2048},
    ),
    (
        "--model microsoft/phi-2 --mode training --precision bf16 --optimizer adamw --batch-size 4 --gradient-checkpointing",
        {"precision": "bf16", "optimizer": "adamw", "batch_size": 4, "gradient_checkpointing": True},
    ),
    (
        "--model microsoft/phi-2 --mode training --optimizer sgd-momentum --precision bf16",
        {"optimizer": "sgd-momentum", "precision": "bf16"},
    ),
    (
        "--model microsoft/phi-2 --mode inference --precision bf16 --batch-size 1 --seq-length 2048",
        {"precision": "bf16", "batch_size": 1, "seq_length": 2048},
    ),
    ("--model microsoft/phi-2 --mode inference --precision bf16 --no-kv-cache", {"precision": "bf16", "no_kv_cache": True}),
    ("--model microsoft/phi-2 --mode inference", {}),
    ("--model mistralai/Mistral-7B-v0.1 --mode training", {}),
    ("--model meta-llama/Meta-Llama-3-8B --mode training", {}),
    ("--model microsoft/phi-2 --mode training --load-full-model", {"load_full_model": True}),
]

# Seed 003: options in its own words.
SEVEN = {
    "dtype": "bf16", "seq_len": 4096, "per_device_batch": 2, "grad_accum": 128, "zero": 2, "dp": 8, "tp": 1, "pp": 1,
    "flashattn": True, "grad_checkpoint": True,
}
THIRTEEN = {
    "dtype": "bf16", "seq_len": 8192, "per_device_batch": 1, "grad_accum": 256, "lora": True, "lora_rank": 8,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "zero": 3, "dp": 16, "flashattn": True,
    "grad_checkpoint": True,
}
SEVENTY = {
    "dtype": "bf16", "qlora": True, "lora_rank": 64, "seq_len": 4096, "per_device_batch": 1, "grad_accum": 512, "zero": 3,
    "dp": 32, "tp": 4, "flashattn": True, "grad_checkpoint": True,
}
PROBED = {"dtype": "bf16", "seq_len": 4096, "per_device_batch": 1, "grad_accum": 64, "flashattn": True, "grad_checkpoint": True}


def run(line: str) -> str:
    program = shutil.which("vramcast")
    assert program is not None, "the wheel installs the command"
    done = subprocess.run([program, *line.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("line", OVERVIEW)
def test_seed_000(line):
    assert "bf16" in run(line).lower()


def test_seed_000_with_settings_of_ones_own(tmp_path):
    own = {"your_custom_format": {"bytes_per_param": 0.75, "description": "Your custom 6-bit format"}}
    (tmp_path / "data_types.json").write_text(json.dumps(own))
    assert "your_custom_format" in run(f"--config-dir {tmp_path} microsoft/DialoGPT-medium").lower()


@pytest.mark.parametrize(("line", "options"), CALCULATOR)
def test_seed_001(line, options):
    document = json.loads(run(f"{line} --json"))
    model = line.split()[1]
    ask = vramcast.train if "training" in line else vramcast.infer
    assert ask(model, **options).to_dict() == document
    formula = ask(model, **options, method="components")
    assert formula.total == json.loads(run(f"{line} --method components --json"))["total"]


def test_seed_002():
    model_config = vramcast.ModelConfig(
        name="llama2-7b", num_parameters=7_000_000_000, num_layers=32, hidden_size=4096, num_attention_heads=32,
        vocab_size=32000, max_seq_len=4096,
    )
    training_config = vramcast.TrainingConfig(batch_size=4, gradient_accumulation_steps=4, dtype="bf16", optimizer="adamw")
    calculator = vramcast.GPUMemoryCalculator(
        model_config=model_config,
        training_config=training_config,
        parallelism_config=vramcast.ParallelismConfig(data_parallel_size=8),
        engine_config=vramcast.EngineConfig(type="deepspeed", zero_stage=3, offload_optimizer="cpu"),
        gpu_config=vramcast.GPUConfig(num_gpus=8, gpu_memory_gb=80),
    )
    result = calculator.calculate()
    printed = [
        f"Memory per GPU: {result.total_memory_per_gpu_gb:.2f} GB",
        f"Fits on GPU: {result.fits_on_gpu}",
        f"Utilization: {result.memory_utilization_percent:.1f}%",
    ]
    assert all(printed) and result.total_memory_per_gpu_gb > 0
    assert result.fits_on_gpu == (result.memory_utilization_percent <= 100)
    assert calculator.calculate(method="engines").method == "engines"
    calculator.parallelism_config.data_parallel_size = 3
    with pytest.raises(vramcast.InputError):
        calculator.calculate()


def test_seed_002_by_its_file(tmp_path):
    job = {
        "model": {
            "name": "llama2-7b", "num_parameters": "7B", "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "vocab_size": 32000, "max_seq_len": 4096,
        },
        "training": {
            "batch_size": 4, "gradient_accumulation_steps": 4, "optimizer": "adamw", "dtype": "bf16",
            "activation_checkpointing": 1,
        },
        "parallelism": {
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 8, "sequence_parallel": False,
        },
        "engine": {"type": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "none"},
        "hardware": {"num_gpus": 8, "gpu_memory_gb": 80},
    }
    path = tmp_path / "my_config.json"
    path.write_text(json.dumps(job))
    document = json.loads(run(f"calculate --config {path} --json"))
    parts = (vramcast.ModelConfig, vramcast.TrainingConfig, vramcast.ParallelismConfig, vramcast.EngineConfig, vramcast.GPUConfig)
    calculator = vramcast.GPUMemoryCalculator(*(part(**section) for part, section in zip(parts, job.values())))
    assert calculator.calculate().document == document
    run(f"validate {path}")
    assert "GiB" in run("quick 7 --gpus 8 --engine deepspeed")


@pytest.mark.parametrize(("model", "options"), [("meta-llama/Llama-2-7b-hf", SEVEN), ("meta-llama/Llama-2-13b-hf", THIRTEEN)])
def test_seed_003(model, options):
    plan = vramcast.train(model, **{**options, "grad_accum": 1})["plan"]["train"]
    assert (plan["batch"]["seq_len"], plan["batch"]["batch_size"]) == (options["seq_len"], options["per_device_batch"])
    assert plan["attention"] == "flash2" and plan["checkpointing"] == "full"
    assert plan["parallel"]["engine"]["deepspeed"]["zero"]["stage"] == options["zero"]
    assert vramcast.train(model, **options, method="factors").total > 0


def test_seed_003_qlora_and_the_probe():
    assert vramcast.train("meta-llama/Llama-2-70b-hf", **SEVENTY, method="factors").terms["base weights"] > 0
    assert vramcast.train("mistralai/Mistral-7B-v0.1", **{**PROBED, "grad_accum": 1}).process > 0


def test_seed_004_to_the_last_digit():
    e = vramcast.Estimator()
    assert e.estimate_gpu_memory_inference(precision=2) == 7e9 * 2 / 2**30
    assert e.estimate_gpu_memory_inference(precision=4) == 7e9 * 4 / 2**30
    assert e.estimate_gpu_memory_training() == (120.7826795578003, 104.3081283569336, 3.43603515625, 13.0385160446167)
    assert e.estimate_gpu_memory_training(stage=3, gpu_num=4) == (
        42.5515832901001, 26.0770320892334, 3.43603515625, 13.0385160446167,
    )
    assert e.estimate_gpu_memory_training(stage=3, gpu_num=4, s=2048) == (
        67.8596887588501, 26.0770320892334, 28.744140625, 13.0385160446167,
    )
    e = vramcast.Estimator(model_params=5e8, a=16, h=1024, L=24)
    assert e.estimate_gpu_memory_inference(precision=2) == 0.9313225746154785
    assert e.estimate_gpu_memory_training() == (
        9.310125827789307, 7.450580596923828, 0.92822265625, 0.9313225746154785,
    )
    assert e.estimate_gpu_memory_training(stage=3, gpu_num=4, s=2048) == (
        12.131858348846436, 1.862645149230957, 9.337890625, 0.9313225746154785,
    )
