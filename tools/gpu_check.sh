#!/usr/bin/env bash
# What only a GPU can show, by one command: tools/gpu_check.sh [OUT]
#
# 1. the tests, those included that need a GPU
# 2. deformable attention of deformops and of torch, timed: float32 and bfloat16
# 3. layers timed in float32 and bfloat16, with the host synchronisations of a step
# 4. the exchange of experts in a group of nccl, against one process of the CPU
# 5. 200 iterations of a detector: dense, damex_best, 8 and 64 experts; bfloat16 if the
#    GPU has it, else float16
# 6. 8 experts under nccl: DDP, fully sharded (FSDP2), and, with 2 GPUs, spread over them
#
# Steps 4 and 6 take 2 GPUs if there are as many, else 1. On the CPU, 6 takes 2 processes
# of gloo (PROCESSES=1: one), and 4 a stand-in for a GPU.
#
# OUT (work_dirs/gpu_check) gets a log of each step, the tables of steps 2 and 3, and
# detectors.md. The data is the toy mixture, drawn where it is missing; nothing is
# downloaded. The same steps, small, on the CPU:
#   DEVICE=cpu CONFIG=damex-dino-tiny_r18_1xb8-4e_toy ITERS=13 TESTS=tests/test_errors.py tools/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python} device=${DEVICE:-cuda} iters=${ITERS:-200} tests=${TESTS:-tests}
config=${CONFIG:-damex-dino-4scale_r50_8xb2-12e_coco-voc} out=${1:-work_dirs/gpu_check}
mkdir -p "$out"

step() { # step NAME COMMAND...: its log is NAME.log; a failure is said, and the rest goes on
  local name=$1
  shift
  echo "== $name: $*"
  if "$@" > "$out/$name.log" 2>&1; then tail -n 3 "$out/$name.log"; else echo "FAILED; see $out/$name.log"; fi
}

[ -d data/toy ] || "$python" -m damex toydata
cat > "$out/detector.py" <<END
_base_ = ["$PWD/configs/damex_dino/$config.py"]
mixture = [
    dict(name=name, data_root=f"data/toy/{name}/", train="train.json", val="val.json",
         img="images/", weight=1.0)
    for name in ("shapes", "digits", "photos", "playroom", "arcade")
]
train_dataloader = dict(batch_size=2, sampler=dict(samples_per_epoch=2 * $iters))
max_epochs = 1
train_cfg = dict(val_interval=1000, val_begin=1000)
model = dict(backbone=dict(init_cfg=None))
END
{
  echo '_base_ = ["detector.py"]'
  sed 's/^moe = dict(/&_delete_=True,/' configs/_base_/moe/damex_best.py
} > "$out/damex_best.py"

step tests "$python" -m pytest -q "$tests"
small=() amp=(--amp)
if [ "$device" = cpu ]; then small=(--small) amp=(); fi
step attention "$python" tools/analysis/attention.py --device "$device" "${small[@]}" \
  --out "$out/attention.md"
if [ "$device" = cpu ]; then small+=(--rounds 1); fi
for dtype in float32 bfloat16; do
  step "layers_$dtype" "$python" tools/analysis/benchmark.py --device "$device" \
    --dtype "$dtype" "${small[@]}" --out "$out/layers_$dtype.md"
done
processes=${PROCESSES:-2} layout=device
if [ "$device" != cpu ]; then
  processes=$("$python" -c "import torch; print(min(2, torch.cuda.device_count()))") layout=GPUs
fi
step exchange "$python" -m pytest -q tests/test_moe/test_shards.py -k "$layout"
train() { # train NAME CONFIG OPTION...
  local name=$1 config=$2
  shift 2
  step "$name" "$python" -m damex train "$out/$config.py" "${amp[@]}" --work-dir "$out/$name" \
    --cfg-options default_hooks.checkpoint.save_best=None "$@"
}
train dense detector moe=None
train damex_best damex_best
train experts_8 detector moe.num_experts=8
train experts_64 detector moe.num_experts=64
for_all=() # mixed precision asks all processes whether a gradient overflowed
if [ "$device" != cpu ]; then for_all=(optim_wrapper.use_fsdp=True); fi
together() { # together NAME OPTION...: 8 experts in all processes
  local name=$1
  shift
  step "$name" env PYTHON="$python" tools/dist_train.sh "$out/detector.py" "$processes" \
    "${amp[@]}" --work-dir "$out/$name" --cfg-options \
    train_dataloader.sampler.samples_per_epoch=$((2 * iters * processes)) \
    default_hooks.checkpoint.save_best=None moe.num_experts=8 "$@"
}
together experts_8_ddp
together experts_8_fully_sharded model_wrapper_cfg.type=FullySharded "${for_all[@]}"
spread=()
if [ "$processes" -gt 1 ]; then
  spread=(experts_8_spread)
  together "${spread[0]}" moe.expert_parallel="$processes" "${for_all[@]}"
fi

"$python" - "$out" "$processes" "${spread[@]}" <<'END' | tee "$out/detectors.md"
import json
import sys
from pathlib import Path

print("| detector | seconds per iteration | images per second | peak memory |")
print("| --- | ---: | ---: | ---: |")
out, processes, *spread = sys.argv[1:]
together = ("experts_8_ddp", "experts_8_fully_sharded", *spread)
for name in ("dense", "damex_best", "experts_8", "experts_64", *together):
    path = Path(out) / name / "summary.json"
    if not path.is_file():
        print(f"| {name} | failed | - | - |")
        continue
    found = json.loads(path.read_text())
    seconds = found["train_seconds"] / found["trained_iterations"]
    memory = found["peak_memory_mib"] or float("nan")
    images = 2 * (int(processes) if name in together else 1)
    row = f"{seconds:.3f} | {images / seconds:.1f} | {memory:.0f} MiB"
    print(f"| {name} | {row} |")
END
