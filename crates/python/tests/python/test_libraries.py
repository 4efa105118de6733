"""Real objects of transformers and peft, on real torch. Run where those are; elsewhere skipped.

transformers and peft are never imported by the package: this is the proof that what they look like is what it reads.
"""

import pytest
import vramcast

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 128}


def make_config():
    return transformers.GPT2Config(**SIZES)


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


def test_a_config_object():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(make_config())
    assert vramcast.inspect(make_config())["parameters"]["total"] == count(model.parameters())


def test_a_model_on_the_meta_device_with_the_type_it_has():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(make_config())
    report = vramcast.train(model, seq_len=64)
    assert report["model"]["parameters"] == count(model.parameters())
    assert report["plan"]["train"]["weights"] == "fp32"
    assert vramcast.train(model.to(torch.bfloat16), seq_len=64)["plan"]["train"]["weights"] == "bf16"
    assert vramcast.infer(model, prompt=16, new_tokens=4)["plan"]["infer"]["weights"] == "bf16"


def test_lora_by_its_config_and_by_its_model():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = transformers.GPT2LMHeadModel(make_config())
    by_config = vramcast.train(model, peft_config=lora, seq_len=64)
    adapted = peft.get_peft_model(model, lora)
    trainable = count(parameter for parameter in adapted.parameters() if parameter.requires_grad)
    assert by_config["model"]["trainable"] == trainable
    assert vramcast.train(adapted, seq_len=64)["model"]["trainable"] == trainable


def test_training_arguments(tmp_path):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=3, gradient_accumulation_steps=2, optim="adafactor",
        gradient_checkpointing=True, report_to=[],
    )
    report = vramcast.train("gpt2", training_arguments=arguments, seq_len=64)
    plan = report["plan"]["train"]
    assert (plan["batch"]["batch_size"], plan["gradient_accumulation"], plan["checkpointing"]) == (3, 2, "full")
    assert plan["optimizer"]["kind"] == "adafactor"
    assert not any("not read" in note for note in report.notes), report.notes


def test_the_callback_in_a_real_trainer(tmp_path):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )
    tokens = torch.randint(0, 1000, (16,))
    guard = vramcast.MemoryGuard(seq_len=16)
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(make_config()), args=arguments, callbacks=[guard],
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 4,
    )
    trainer.train()
    assert guard.report is not None and guard.report.fits
    assert guard.report["plan"]["train"]["weights"] == "fp32"


def test_a_run_on_the_host_is_left_alone(tmp_path):
    guard = vramcast.MemoryGuard(action="raise", seq_len=16)
    guard.on_train_begin(transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True), None, None)
    assert guard.report is None
