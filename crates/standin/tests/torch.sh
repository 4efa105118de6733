#!/usr/bin/env bash
# torch.sh FOLDER [ID,ID,…]: rehearsals with the real torch. Sets up an environment in FOLDER (about 5 GB; torch's NVIDIA
# packages come with it, though the stand-in takes their place), then runs the ledger's rows and scores them.
# Other versions: TORCH=2.9.1 TRANSFORMERS=4.57.1 torch.sh OTHER_FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
if [ ! -x "$folder/env/bin/python" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/pip" install --quiet "torch==${TORCH:-2.11.0}" "transformers==${TRANSFORMERS:-5.17.0}" "peft==${PEFT:-0.21.2}" \
    accelerate "bitsandbytes==${BITSANDBYTES:-0.50.2}" "liger-kernel==${LIGER:-0.8.5}" numpy setuptools wheel
  DS_BUILD_OPS=0 "$folder/env/bin/pip" install --quiet --no-build-isolation "deepspeed==${DEEPSPEED:-0.19.8}" ||
    echo "deepspeed did not install: its rows will fail"
fi
cd "$root"
cargo build --quiet --package vramcast
exec "${CARGO_TARGET_DIR:-target}/debug/vramcast" rehearse --quiet --no-sources -- \
  "$folder/env/bin/python" "$here/rows.py" "$root/truth/ledger/h200.jsonl" "${@:2}"
