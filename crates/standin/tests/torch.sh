#!/usr/bin/env bash
# torch.sh FOLDER [rows|kinds|cards|scripts|all] [options of rows.py, names of scripts]: rehearsals with the real torch, on a machine without a GPU.
#
# Sets up an environment in FOLDER (about 6 GB; torch's NVIDIA packages come with it, though the stand-in takes their
# place), then runs: rows, the ledger's runs, scored against what an H200 measured; kinds, small programs of many kinds;
# cards, one of them on three cards; scripts, unmodified public trainers (scripts.sh). What cannot run here is named, and
# counts as skipped. Another version of torch, in a folder of its own: TORCH=2.6.0 TRANSFORMERS=4.57.6 torch.sh OTHER_FOLDER cards
set -euo pipefail
if [ $# -eq 0 ]; then sed -n '2,7s/^# \?//p' "$0"; exit 2; fi
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
what=${2:-all}
python=$folder/env/bin/python

if [ ! -e "$folder/ready" ]; then
  python3 -m venv "$folder/env"
  "$python" -m pip install --quiet "torch==${TORCH:-2.11.0}" "transformers==${TRANSFORMERS:-5.17.0}" "peft==${PEFT:-0.21.2}" accelerate \
    "bitsandbytes==${BITSANDBYTES:-0.50.2}" "liger-kernel==${LIGER:-0.8.5}" "trl==${TRL:-1.16.0}" datasets evaluate scikit-learn torchvision \
    ipykernel nbconvert numpy setuptools wheel
  DS_BUILD_OPS=0 "$python" -m pip install --quiet --no-build-isolation "deepspeed==${DEEPSPEED:-0.19.8}" ||
    echo "skipped: deepspeed did not install; its rows and its script will fail"
  touch "$folder/ready"
fi

cd "$root"
cargo build --quiet --package vramcast
export VRAMCAST=${VRAMCAST:-$root/${CARGO_TARGET_DIR:-target}/debug/vramcast}
# Kernels are not run, so more threads only get in each other's way.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if [ "$what" = rows ] || [ "$what" = all ]; then
  "$VRAMCAST" rehearse --quiet --no-sources -- "$python" "$here/rows.py" "$root/truth/ledger/h200.jsonl" --jobs "$(nproc)" "${@:3}" ||
    [ $? -eq 1 ] # jobs side by side need not fit one card together; what fails in a row ends with another code
fi
if [ "$what" = kinds ] || [ "$what" = all ]; then
  for kind in $("$python" "$here/programs/kinds.py"); do
    if "$VRAMCAST" rehearse --quiet -- "$python" "$here/programs/kinds.py" "$kind" > "$folder/kind-$kind.log" 2>&1; then
      echo "$kind: $(grep ^peaks "$folder/kind-$kind.log")"
    else
      echo "$kind: failed, see $folder/kind-$kind.log"
    fi
  done
fi
if [ "$what" = cards ] || [ "$what" = all ]; then
  version=$("$python" -c "import importlib.metadata as m; print(m.version('torch'))")
  for card in h200 a100 t4; do
    log=$folder/card-$card.log
    if "$VRAMCAST" rehearse --quiet --gpu $card -- "$python" "$here/programs/kinds.py" encoder-autocast > "$log" 2>&1; then
      echo "encoder-autocast on $card with torch $version: $(grep ^peaks "$log")"
    elif grep -q "^does not fit" "$log"; then
      echo "encoder-autocast on $card with torch $version: $(grep "^does not fit" "$log")"
    else
      echo "encoder-autocast on $card with torch $version: failed, see $log"
    fi
  done
fi
if [ "$what" = scripts ] || [ "$what" = all ]; then
  bash "$here/scripts.sh" "$folder" "${@:3}"
fi
