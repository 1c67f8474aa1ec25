#!/usr/bin/env bash
# Fail when a training script got slower, sends more, or needs more memory than its baseline.
#
#   WRITE_BASELINE=1 examples/ci_gate.sh BASELINE torchrun --nproc-per-node 2 examples/train_tiny_fsdp2.py
#   examples/ci_gate.sh BASELINE torchrun --nproc-per-node 2 examples/train_tiny_fsdp2.py
#
# The first writes the baseline, a few kilobytes to commit with the code; without one the second fails. A run
# directory is a baseline, too. Thresholds come from the environment. The step that counts is the unrecorded
# one: let the script run a dozen steps more than are recorded, and choose MAX_SLOWDOWN above the spread of the
# machine's own step times.
set -euo pipefail

baseline=$1
shift
if [[ ! -e $baseline && -z ${WRITE_BASELINE:-} ]]; then
  echo "no baseline at $baseline: run once with WRITE_BASELINE=1" >&2
  exit 1
fi
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT

fsdp2prof record -q -o "$run" -- "$@"
if [[ -n ${WRITE_BASELINE:-} ]]; then
  fsdp2prof compare "$baseline" "$run" --write-baseline
  exit
fi
fsdp2prof compare "$baseline" "$run" \
  --fail-on "step_time_frac>${MAX_SLOWDOWN:-0.10}" \
  --fail-on "wire_bytes_frac>${MAX_WIRE_GROWTH:-0}" \
  --fail-on "peak_allocated_frac>${MAX_MEMORY_GROWTH:-0.01}"
