"""others.py NAME FOLDER: short programs around public libraries, for the tables of docs/rehearse.md; sizes are fixed here, so that a later run can be held beside an earlier one.

Everything is made in FOLDER (`small.py FOLDER` first); nothing is fetched.
"""
import json, os, sys

import torch
import transformers

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__.replace("_", "-")] = function
    return function


def small(folder):
    path = os.path.join(folder, "model")
    return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)


def rows(folder):
    import datasets

    with open(os.path.join(folder, "data", "pairs.jsonl")) as file:
        return datasets.Dataset.from_list([json.loads(line) for line in file])


COMMON = dict(per_device_train_batch_size=8, max_steps=3, report_to="none", save_strategy="no", bf16=True)


@program
def sft(folder):
    import trl

    model, tokenizer = small(folder)
    args = trl.SFTConfig(output_dir=os.path.join(folder, "out"), max_length=256, **COMMON)
    trl.SFTTrainer(model, args=args, train_dataset=rows(folder), processing_class=tokenizer).train()


@program
def dpo(folder):
    import trl

    model, tokenizer = small(folder)
    pairs = rows(folder).map(lambda row: {"chosen": row["completion"], "rejected": row["completion"][::2]}, remove_columns="completion")
    args = trl.DPOConfig(output_dir=os.path.join(folder, "out"), max_length=256, **COMMON)
    trl.DPOTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer).train()


@program
def bert(folder):
    """The model that run_mlm.py is given."""
    config = transformers.BertConfig(vocab_size=32, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048, max_position_embeddings=256)
    transformers.BertForMaskedLM(config).save_pretrained(os.path.join(folder, "bert"))
    _, tokenizer = small(folder)
    tokenizer.add_special_tokens({"mask_token": "<mask>", "cls_token": "<s>", "sep_token": "</s>"})
    tokenizer.save_pretrained(os.path.join(folder, "bert"))


@program
def convnext(folder):
    import timm

    model = timm.create_model("convnext_tiny", pretrained=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 3, 224, 224, device="cuda")), torch.randint(0, 1000, (8,), device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def beams(folder):
    model, tokenizer = small(folder)
    tokens = tokenizer(["the card holds what the program"] * 2, return_tensors="pt").input_ids.cuda()
    made = model.cuda().generate(tokens, num_beams=4, max_new_tokens=40, min_new_tokens=40)
    print("length", made.shape[1] - tokens.shape[1])


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2])
