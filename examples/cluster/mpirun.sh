#!/usr/bin/env bash
# A program on several machines of 8 GPUs, by Open MPI: ranks 0 to 7 on the first machine of the host file, and so on.
# usage: mpirun.sh HOSTFILE MACHINES PROGRAM...
set -euo pipefail
hosts=${1:?usage: mpirun.sh HOSTFILE MACHINES PROGRAM...} machines=${2:?} gpus=${GPUS:-8}
shift 2
# ppr fills a machine before the next; --map-by node would deal ranks in turn, and NVLink domains would have one rank each.
# Variables have to be the same on all ranks, so they are exported by name.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
exec mpirun --hostfile "$hosts" -n "$((machines * gpus))" --map-by "ppr:$gpus:node" --bind-to none \
  -x LD_LIBRARY_PATH -x NCCL_IB_TC="${NCCL_IB_TC:-0}" -x NVTE_EP_LOG="${NVTE_EP_LOG:-warn}" "$@"
