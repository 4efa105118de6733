#!/usr/bin/env bash
# scripts.sh FOLDER [NAME…]: unmodified public trainers, launchers and notebooks on the pretended card, or those of them
# that are named; torch.sh calls it.
#
# TRL's sft.py comes with its package. transformers' run_clm.py and PEFT's trainer are in no package: they are taken from
# clones of their repositories (EXAMPLES_TRANSFORMERS, EXAMPLES_PEFT: a path or an address; else the public ones). Where a
# clone cannot be had, what needs it is named as skipped. Nothing of them is kept in this repository.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
wanted=" ${*:2} "
bin=$folder/env/bin
export PATH="$bin:$PATH"
failed=0

fetch() { # name, address, folder in it
  [ -d "$folder/$1/$3" ] && return 0
  rm -rf "${folder:?}/$1"
  git clone --quiet --depth 1 --filter=blob:none --no-checkout "$2" "$folder/$1" 2> "$folder/$1.log" &&
    git -C "$folder/$1" checkout --quiet HEAD -- "$3" 2>> "$folder/$1.log" ||
    { rm -rf "${folder:?}/$1"; echo "skipped: $1: no clone of $2 (see $folder/$1.log)"; return 1; }
}

expect() { # name, exit code, words of the report, options and command
  [[ $wanted = "  " || $wanted = *" $1 "* ]] || return 0
  rm -rf "$out" # what one trainer leaves there misleads the next
  "$VRAMCAST" rehearse --quiet "${@:4}" > "$folder/script-$1.log" 2>&1
  local code=$?
  if [ $code -eq "$2" ] && grep -q "$3" "$folder/script-$1.log"; then
    echo "$1: $(grep -m 1 '^allocated' "$folder/script-$1.log" | awk '{print $2 " GiB allocated"}')"
  else
    echo "$1: FAILED with exit code $code, see $folder/script-$1.log"
    failed=$((failed + 1))
  fi
}

ended="the program ran to its end"
[ -d "$folder/small/data" ] || python "$here/programs/small.py" "$folder/small" > "$folder/small.log" 2>&1
model=$folder/small/model
out=$folder/out
sft=$(python -c "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])")/scripts/sft.py
common=(--per_device_train_batch_size 4 --max_steps 3 --report_to none --output_dir "$out")

expect trl-sft 0 "$ended" --gpu l40s --skip-saving --compare -- python "$sft" --model_name_or_path "$model" \
  --dataset_name "$folder/small/data" --max_length 64 --use_peft --lora_r 8 "${common[@]}"

if fetch transformers "${EXAMPLES_TRANSFORMERS:-https://github.com/huggingface/transformers}" examples/pytorch/language-modeling; then
  clm=("$folder/transformers/examples/pytorch/language-modeling/run_clm.py" --model_name_or_path "$model" --train_file "$folder/small/data/lines.txt"
    --do_train --block_size 64 "${common[@]}")
  expect run-clm 0 "$ended" --gpu rtx4090 --skip-saving --compare -- python "${clm[@]}"
  for card in t4 a100 b200; do
    expect "run-clm-$card" 0 "$ended" --gpu $card --skip-saving -- python "${clm[@]}"
  done
  expect torchrun 0 "$ended" --gpus 2 --skip-saving -- torchrun --nproc_per_node 2 --master_port 29601 "${clm[@]}"
  expect accelerate-fsdp 0 "$ended" --gpus 2 --skip-saving -- accelerate launch --config_file "$here/programs/fsdp.yaml" "${clm[@]}"
  expect world-64 0 "$ended" --world 64 --rank 0 --skip-saving -- python "${clm[@]}"
  expect deepspeed 0 "$ended" --gpus 2 --skip-saving -- deepspeed --num_gpus 2 --master_port 29602 "${clm[@]}" \
    --deepspeed "$here/programs/zero2.json" --bf16
  printf '#!/bin/sh\nexec python "$@"\n' > "$folder/run.sh" && chmod +x "$folder/run.sh"
  expect shell-script 0 "$ended" --skip-saving --steps 2 -- "$folder/run.sh" "${clm[@]}"
fi
if fetch peft "${EXAMPLES_PEFT:-https://github.com/huggingface/peft}" examples/olora_finetuning; then
  mkdir -p "$folder/tasks" && python -c "
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
with open(sys.argv[2] + '/train.jsonl', 'w') as file:
    file.writelines(json.dumps({'instruction': row['prompt'], 'input': '', 'output': row['completion']}) + '\n' for row in rows)
" "$folder/small/data/pairs.jsonl" "$folder/tasks"
  expect peft-olora 0 "$ended" --skip-saving --steps 2 -- python "$folder/peft/examples/olora_finetuning/olora_finetuning.py" --base_model "$model" \
    --data_path "$folder/tasks" --output_dir "$out" --batch_size 4 --cutoff_len 64 --val_set_size 8
fi
expect notebook 0 "$ended" -- "$here/programs/steps.ipynb"
expect nbconvert 0 "$ended" -- jupyter nbconvert --to notebook --execute --output-dir "$out" "$here/programs/steps.ipynb"
expect out-of-memory 1 "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" --memory 16GiB -- python "$here/programs/full.py"
expect own-crash 4 "failed by itself (exit code 3)" -- python -c "import torch, sys; torch.zeros(9, device='cuda'); sys.exit(3)"
expect waits 5 "waits for a value that only a real GPU computes" -- python -c "
import torch
error = torch.rand(1, device='cuda').norm()
while True:
    if error.item() > 1e-3:
        break"
echo "scripts: $failed failed"
[ $failed -eq 0 ]
