#!/usr/bin/env bash
# Everything that only several GPUs can show, in one command: `launch/bench/multi_gpu.sh [--ranks N] [--only parity,exchange,pool,slice,full]`.
# One JSON in RESULTS (launch/bench/results/ by default) and one log; under eight minutes, with `full` under ten (--budget-seconds). NVLink multicast stays off.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
log=multi_gpu.log
if [ -n "${RESULTS:-}" ]; then mkdir -p "$RESULTS" && log="$RESULTS/multi_gpu.log"; fi
exec "$python" -m rorqual.launch bench multi-gpu --results-dir "${RESULTS:-launch/bench/results}" --log "$log" "$@"
