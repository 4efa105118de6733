"""small.py FOLDER: a small model with random weights, a tokenizer and two little data sets, all made here; nothing is fetched."""
import json, os, sys

import tokenizers
import transformers

folder = sys.argv[1]
words = "the card holds what the program asks for and no more than that because memory is counted byte by byte".split()
lines = [" ".join(words[(3 * line + word) % len(words)] for word in range(40)) for line in range(64)]

core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *sorted(set(words))])}, unk_token="<unk>"))
core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=256)
tokenizer.save_pretrained(os.path.join(folder, "model"))

config = transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
                                  max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
transformers.LlamaForCausalLM(config).save_pretrained(os.path.join(folder, "model"))

os.makedirs(os.path.join(folder, "data"), exist_ok=True)
with open(os.path.join(folder, "data", "lines.txt"), "w") as file:
    file.write("\n".join(lines))
with open(os.path.join(folder, "data", "pairs.jsonl"), "w") as file:
    for line in lines:
        file.write(json.dumps({"prompt": line[:60], "completion": line[60:]}) + "\n")
