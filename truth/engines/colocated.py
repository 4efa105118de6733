#!/usr/bin/env python3
"""TRL's GRPO beside a colocated vLLM on a card that is pretended: what the card and torch hold after every phase.

    vramcast rehearse --gpu h100 --no-sources -- python colocated.py MODELS.json CASES.jsonl ROWS.jsonl

A case: id, model (of MODELS.json), batch, seq, completion, generations, share, sleep, lora, weights. vLLM runs eagerly (`enforce_eager`, which TRL has no argument for): a pretended card computes nothing that a graph
could be captured of faster. Needs trl 1.16 and a vLLM that it supports (0.22 to 0.31); one process per case."""
import json, os, subprocess, sys, tempfile, time
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1", VLLM_USE_V2_MODEL_RUNNER="0")


def words_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    known = {f"w{i}": i for i in range(2000)} | {"<pad>": 2000, "<eos>": 2001, "<unk>": 2002}
    tokens = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def run(case, config):
    import torch, transformers, trl, vllm
    from datasets import Dataset
    from trl.generation import vllm_generation as beside
    began, phases = time.time(), []

    def note(name):
        free, total = torch.cuda.mem_get_info()
        held = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "peak": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}
        phases.append({"phase": name, "used": total - free} | held)
        torch.cuda.reset_peak_memory_stats()
        print(case["id"], name, round(time.time() - began), phases[-1], flush=True)

    def watched(owner, method, name):
        inner = getattr(owner, method)

        def outer(*arguments, **options):
            made = inner(*arguments, **options)
            note(name + ("" if not options.get("tags") else " " + "+".join(options["tags"])))
            return made
        setattr(owner, method, outer)

    class Eager(vllm.LLM):
        def __init__(self, *arguments, **options):
            note("trainer loaded")
            super().__init__(*arguments, enforce_eager=True, skip_tokenizer_init=False, **options)
            note("engine made")
    beside.LLM = Eager
    for method in ("sleep", "wake_up", "generate"):
        watched(Eager, method, method)
    watched(beside.VLLMGeneration, "sync_weights", "sync")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        config = transformers.AutoConfig.for_model(**config)
        kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[case["weights"]]
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        words_tokenizer().save_pretrained(folder)
        peft = None
        if case.get("lora"):
            from peft import LoraConfig
            peft = LoraConfig(r=case["lora"]["r"], target_modules=case["lora"]["targets"], task_type="CAUSAL_LM")
        arguments = trl.GRPOConfig(output_dir=folder + "/out", per_device_train_batch_size=case["batch"], num_generations=case["generations"], max_completion_length=case["completion"], max_steps=3,
                                   use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=case["share"], vllm_enable_sleep_mode=case["sleep"], vllm_max_model_length=case["seq"] + case["completion"],
                                   model_init_kwargs={"dtype": str(kind).removeprefix("torch.")}, report_to=[], save_strategy="no", disable_tqdm=True, generation_kwargs={"ignore_eos": True}, **case.get("args", {}))
        data = Dataset.from_list([{"prompt": " ".join(f"w{(7 * i + k) % 2000}" for k in range(case["seq"]))} for i in range(32)])
        trainer = trl.GRPOTrainer(model=folder, reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions], args=arguments, train_dataset=data, processing_class=words_tokenizer(), peft_config=peft)
        note("made")

        class Steps(transformers.TrainerCallback):
            def on_step_end(self, *_, **__):
                note("step")
        trainer.add_callback(Steps())
        trainer.train()
    versions = {name: module.__version__ for name, module in {"torch": torch, "transformers": transformers, "trl": trl, "vllm": vllm}.items()}
    return {"id": case["id"], "model": case["model"], "config": config.to_dict(), "case": case, "software": versions, "gpu": torch.cuda.get_device_name(), "memory": torch.cuda.mem_get_info()[1], "phases": phases}


def main(models, cases, out, only=None):
    known = json.load(open(models))
    for case in map(json.loads, open(cases)):
        if only is None:  # vLLM begins CUDA when it is imported, so that a process for each is not forked
            subprocess.run([sys.executable, __file__, models, cases, out, case["id"]], check=False)
        elif case["id"] == only:
            print(json.dumps(run(case, known[case["model"]]["config"])), file=open(out, "a"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
