#!/usr/bin/env bash
# A PyTorch program on several machines of 8 GPUs, by torchrun: start it on each machine.
# usage: torchrun.sh MACHINES NUMBER_OF_THIS_ONE ADDRESS_OF_MACHINE_0 SCRIPT...
set -euo pipefail
machines=${1:?usage: torchrun.sh MACHINES NUMBER ADDRESS SCRIPT...} number=${2:?} address=${3:?} gpus=${GPUS:-8}
shift 3
# With --node-rank and static rendezvous a machine's ranks follow each other, in the order of the numbers.
exec torchrun --nnodes "$machines" --node-rank "$number" --nproc-per-node "$gpus" --master-addr "$address" \
  --master-port "${PORT:-29500}" "$@"
