#!/usr/bin/env bash
# Builds the wheel, installs it in an empty environment and uses it there, outside the checkout:
# scripts/wheel_smoke.sh [FOLDER]. Two processes train for three steps; the model is exported,
# and the exported one writes.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-$(mktemp -d)}
uv="python3 -m uv"
$uv build --quiet --out-dir "$work/dist"
python3 - > "$work/constraints.txt" <<'PINS'
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["tool"]["uv"]["constraint-dependencies"]))
PINS
$uv venv --quiet --python 3.12 "$work/venv"
$uv pip install --quiet --python "$work/venv" --constraint "$work/constraints.txt" \
    "$work"/dist/megajax-*.whl
export PATH="$work/venv/bin:$PATH"
unset PYTHONPATH VIRTUAL_ENV
mkdir -p "$work/place" && cd "$work/place"
began=$SECONDS
flags="--train.steps=3 --train.global_batch=4 --train.seq_len=32 --model.layers=2 --eval.every=0
    --eval.sample_tokens=0 --cache_dir=$work/cache"
megajax --version
# shellcheck disable=SC2086
megajax train $flags --processes=2 --emulate=1 --run_dir=run
megajax hf export run exported
megajax generate --hf=exported --tokenizer=bytes --new_tokens=8 --prompt="def " --cache_dir="$work/cache"
echo "the wheel works: $((SECONDS - began)) s after its installation"
