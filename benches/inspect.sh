#!/usr/bin/env bash
# How long `inspect` takes beside `--version` and, where Python has torch and transformers, beside building the model on
# torch's meta device. Ratios of one run; needs hyperfine.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet
binary=${CARGO_TARGET_DIR:-target}/release/vramcast
model=${1:-meta-llama/Meta-Llama-3-8B}
commands=("$binary --version" "$binary inspect $model" "$binary train $model --batch-size 2")
python=${PYTHON:-python3}
if "$python" -c 'import torch, transformers' 2>/dev/null; then
  config=$(mktemp -d)
  trap 'rm -rf "$config"' EXIT
  "$binary" inspect "$model" --config > "$config/config.json"
  commands+=("$python -c 'import torch, transformers as t
with torch.device(\"meta\"): t.AutoModelForCausalLM.from_config(t.AutoConfig.from_pretrained(\"$config\"))'")
fi
hyperfine --warmup 2 --shell=none "${commands[@]}"
