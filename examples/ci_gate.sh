#!/usr/bin/env bash
# Fail when a training script got slower, sends more, or needs more memory than its baseline.
#
#   examples/ci_gate.sh BASELINE torchrun --nproc-per-node 2 examples/train_tiny_fsdp2.py
#
# BASELINE is a run directory or the JSON of `fsdp2prof analyze run RUN -o BASELINE.json`, small enough to keep
# beside the code. Without one, this run's is written there and the gate passes. Thresholds come from the
# environment. The step that counts is the unrecorded one: let the script run a dozen steps more than are recorded,
# and choose MAX_SLOWDOWN above the spread of the machine's own step times.
set -euo pipefail

baseline=$1
shift
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT

fsdp2prof record -q -o "$run" -- "$@"
if [[ ! -e $baseline ]]; then
  fsdp2prof analyze run "$run" --format json -o "$baseline"
  echo "wrote the baseline $baseline"
  exit
fi
fsdp2prof compare "$baseline" "$run" \
  --fail-on "step_time_frac>${MAX_SLOWDOWN:-0.10}" \
  --fail-on "wire_bytes_frac>${MAX_WIRE_GROWTH:-0}" \
  --fail-on "peak_allocated_frac>${MAX_MEMORY_GROWTH:-0.01}"
