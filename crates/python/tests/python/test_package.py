"""The package as a user meets it."""

import html
import json
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import vramcast

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def test_the_command_and_the_library_say_the_same():
    words = ["train", "meta-llama/Meta-Llama-3-8B", "--batch-size", "4", "--gradient-checkpointing", "--json"]
    printed = subprocess.run([sys.executable, "-m", "vramcast", *words], capture_output=True, text=True, check=True)
    report = vramcast.train("meta-llama/Meta-Llama-3-8B", batch_size=4, gradient_checkpointing=True)
    assert report.to_dict() == json.loads(printed.stdout)
    assert report.allocated < report.reserved < report.process


def test_the_breakdown_sums_to_the_process():
    report = vramcast.train("gpt2", batch_size=2, seq_len=512)
    assert sum(report.breakdown.values()) == report.process
    frame = report.to_frame()
    assert int(frame["bytes"].sum()) == report.process
    assert "gpt2" in report._repr_html_() and "gpt2" in repr(report)


def test_inference_and_inspection():
    assert vramcast.infer("gpt2", prompt=256, new_tokens=8).process > 0
    assert vramcast.inspect("gpt2")["parameters"]["total"] == 124_439_808


def test_configs_are_taken_as_they_come():
    expected = vramcast.train("gpt2", seq_len=512).allocated
    config = SimpleNamespace(to_dict=lambda: dict(GPT2))

    class GPT2LMHeadModel:  # what a model of transformers looks like, on whatever device
        def __init__(self):
            self.config = config

    for model in (GPT2, config, GPT2LMHeadModel()):
        assert vramcast.train(model, seq_len=512).allocated == expected
    wide = GPT2LMHeadModel()
    wide.dtype = "torch.float32"  # its weights are what they are
    assert vramcast.train(wide, seq_len=512).allocated == vramcast.train("gpt2", seq_len=512, precision="fp32").allocated
    assert vramcast.train(wide, seq_len=512, precision="bf16").allocated == expected


def test_training_arguments_are_what_the_trainer_does():
    arguments = SimpleNamespace(
        per_device_train_batch_size=2, gradient_accumulation_steps=1, max_grad_norm=1.0, gradient_checkpointing=True,
        bf16=True, fp16=False, use_liger_kernel=False, optim="adafactor",
    )
    report = vramcast.train("gpt2", seq_len=512, training_arguments=arguments)
    plan = report.to_dict()["plan"]["train"]
    assert plan["autocast"] == "bf16" and plan["checkpointing"] == "full" and plan["optimizer"]["kind"] == "adafactor"
    assert not plan["keep_outputs"] and plan["batch"]["mask"] and plan["batch"]["batch_size"] == 2
    for refused in ({"optim": "no such one"}, {"optim": "sgd", "label_smoothing_factor": 0.1}):
        with pytest.raises(vramcast.InputError, match="no such one|label_smoothing_factor"):
            vramcast.train("gpt2", seq_len=512, training_arguments=SimpleNamespace(**refused))


def test_trainers_that_are_not_simulated_are_refused():
    # As TRL declares them: what tells whose config it is has its default.
    for name, mark, default in (("RLOOConfig", "rloo_k", 2), ("PRMConfig", "step_separator", None)):
        config = make_dataclass(name, [("optim", str, "adamw_torch"), (mark, object, default)])
        with pytest.raises(vramcast.InputError, match=f"{mark}.*not modelled"):
            vramcast.train("gpt2", seq_len=512, training_arguments=config())


def test_a_model_of_an_unknown_type_is_refused():
    unknown = {"model_type": "brand_new", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
               "intermediate_size": 128, "vocab_size": 100}
    for ask in (vramcast.train, vramcast.infer, vramcast.inspect):
        with pytest.raises(vramcast.InputError, match="brand_new is not known"):
            ask(unknown)
    assert any("guess" in note for note in vramcast.train(unknown, assume="decoder").notes)


def test_deepspeeds_settings_are_read():
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    by_itself = vramcast.train("gpt2", seq_len=512, gpus=8, engine="deepspeed", deepspeed=settings)
    arguments = SimpleNamespace(per_device_train_batch_size=1, optim="adamw_torch", deepspeed=settings)
    report = vramcast.train("gpt2", seq_len=512, gpus=8, training_arguments=arguments)
    for answer in (by_itself, report):
        assert answer["plan"]["train"]["parallel"]["engine"]["deepspeed"]["zero"]["stage"] == 3


def test_a_switch_can_be_off():
    on, off = (vramcast.train("gpt2", seq_len=512, flashattn=value)["plan"]["train"]["attention"] for value in (True, False))
    assert (on, off) == ("flash2", "eager")
    arguments = SimpleNamespace(optim="sgd", gradient_checkpointing=True)
    plan = vramcast.train("gpt2", seq_len=64, training_arguments=arguments, gradient_checkpointing=False)["plan"]["train"]
    assert plan["checkpointing"] == "off"


def test_formulas_and_engines_have_their_own_answers():
    formula = vramcast.train("llama3-8b", method="components")
    assert isinstance(formula, vramcast.Formula) and formula.method == "components"
    assert sum(formula.terms.values()) == pytest.approx(formula.total)
    assert list(formula.to_frame()["bytes"]) == list(formula.terms.values())
    assert "components" in repr(formula) and "components" in formula._repr_html_() and formula.fits
    served = vramcast.infer("llama3-8b", engine="vllm")
    assert served["budgets"][0]["fits"] and "Report" in repr(served)


def test_what_does_not_fit_says_what_would():
    report = vramcast.train("llama3-8b", gpu="RTX 4090", seq_len=1024)
    assert not report.fits and report.suggestions and "too much" in repr(report)
    assert report.suggestions[0]["change"] in html.unescape(report._repr_html_())
    with pytest.raises(ValueError, match="to_frame"):
        report.to_frame("no such part")
    assert {"phase", "bytes"} <= set(report.to_frame("timeline").columns)


def test_a_lora_config_is_read():
    @dataclass
    class LoraConfig:
        peft_type: str = "LORA"
        r: int = 8
        lora_alpha: int = 16
        lora_dropout: float = 0.0
        target_modules: tuple = ("c_attn",)
        task_type: str = "CAUSAL_LM"

    report = vramcast.train("gpt2", seq_len=512, peft_config=LoraConfig())
    assert report.to_dict()["model"]["trainable"] == 12 * 8 * (768 + 3 * 768)


def test_objects_have_names_and_no_temporary_files():
    assert "gpt2 config" in repr(vramcast.train(GPT2, seq_len=64))
    assert vramcast.train({**GPT2, "_name_or_path": "me/mine"}, seq_len=64)["model"]["name"] == "mine"
    arguments = SimpleNamespace(optim="sgd", a_new_setting=3)
    assert any("not simulated: a_new_setting" in note for note in vramcast.train(GPT2, training_arguments=arguments).notes)
    with pytest.raises(vramcast.InputError, match="^label_smoothing_factor"):
        vramcast.train(GPT2, training_arguments=SimpleNamespace(optim="sgd", label_smoothing_factor=0.1))


def test_samples_are_no_longer_than_a_model_has_positions():
    for options in ({}, {"gpus": 2, "engine": "ddp"}, {"method": "components"}):
        with pytest.raises(vramcast.InputError, match="1024 positions, not 4096"):
            vramcast.train("gpt2", seq_len=4096, **options)
    report = vramcast.train("gpt2")
    assert report["plan"]["train"]["batch"]["seq_len"] == 1024 and any("1024 positions" in note for note in report.notes)


def test_errors_are_exceptions_with_the_same_words():
    with pytest.raises(vramcast.InputError, match="optimizer"):
        vramcast.train("gpt2", optimizer="no such one")
    with pytest.raises(ValueError):
        vramcast.train("gpt2", no_such_option=1)
    with pytest.raises(vramcast.VramcastError):
        vramcast.train({**GPT2, "n_layer": "twelve"})


def test_a_guard_warns_before_a_run_that_will_not_fit():
    with pytest.warns(vramcast.WillNotFit, match="GiB more than .* would fit with"):
        with vramcast.guard("meta-llama/Meta-Llama-3-8B", gpu="T4"):
            pass
    with pytest.raises(MemoryError):
        with vramcast.guard("meta-llama/Meta-Llama-3-8B", gpu="T4", action="raise"):
            pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback = vramcast.MemoryGuard(seq_len=256)
        arguments = SimpleNamespace(per_device_train_batch_size=1, optim="adamw_torch")
        callback.on_init_end(arguments, None, None)
        callback.on_train_begin(arguments, None, None, model=SimpleNamespace(config=GPT2))
    assert callback.report is not None and callback.report.fits


def test_threads_run_side_by_side():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        answers = set(pool.map(lambda _: vramcast.train("gpt2", seq_len=256).process, range(16)))
    assert len(answers) == 1


def test_the_notebook_runs():
    import nbclient
    import nbformat

    path = Path(__file__).parents[2] / "examples" / "vramcast.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120).execute()
    assert any("table" in str(cell.get("outputs")) for cell in notebook.cells)


def test_phases_are_named_in_a_rehearsal_and_do_nothing_elsewhere(monkeypatch):
    with vramcast.phase("warm-up"):
        pass
    seen = []

    @contextmanager
    def marked(name):
        seen.append(name)
        yield
        seen.append("end")

    monkeypatch.setitem(sys.modules, "vramcast_hook", SimpleNamespace(phase=marked))
    with pytest.raises(KeyError), vramcast.phase("evaluation"):
        raise KeyError
    assert seen == ["evaluation"]
    with vramcast.phase("saving"):
        pass
    assert seen == ["evaluation", "saving", "end"]


def test_roles_on_shared_cards(tmp_path):
    script = tmp_path / "run.sh"
    line = "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-0.5B --reward_pretrain Qwen/Qwen2.5-0.5B"
    script.write_text(f"{line} --actor_num_gpus_per_node 2 --vllm_num_engines 2 --colocate_all_models --zero_stage 3\n")
    placed = vramcast.train(plan=script, gpu="a100-80gb")
    assert isinstance(placed, vramcast.Placement)
    assert placed.groups[0]["cards"] == 2 and "actor" in placed.groups[0]["roles"]
    assert "Placement" in repr(placed)
