#!/usr/bin/env bash
# Evaluate on several processes of one machine: tools/dist_test.sh CONFIG CHECKPOINT NUM_PROCESSES [arguments of tools/test.py]
set -euo pipefail
config=$1 checkpoint=$2 processes=$3
shift 3
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc_per_node="$processes" \
  "$(dirname "$0")/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
