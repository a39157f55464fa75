#!/usr/bin/env bash
# Train on several processes of one machine: tools/dist_train.sh CONFIG NUM_PROCESSES [arguments of tools/train.py]
set -euo pipefail
config=$1 processes=$2
shift 2
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc_per_node="$processes" \
  "$(dirname "$0")/train.py" "$config" --launcher pytorch "$@"
