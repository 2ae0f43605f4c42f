#!/usr/bin/env bash
# On a real cluster: what nvte-ep does over several machines, gathered in one archive for docs/verified.md or an issue.
# usage: nodes.sh BUNDLE OUT.tar.gz LAUNCHER...
#   qa/nodes.sh bundle out.tar.gz mpirun --hostfile hosts -n 16 --map-by ppr:8:node --bind-to none
#   qa/nodes.sh bundle out.tar.gz srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --distribution=block --mpi=pmix
# BUNDLE is what qa/L2_gpu/bundle.sh gathered, in a folder that all machines see. LAUNCHER starts a program on all ranks, one a GPU;
# the ranks need what qa/L2_gpu/test.sh names. SECONDS_EACH limits every part (300).
# Over all ranks: NCCL EP's own API case by case (nccl_ep_conformance), and the library's suite (test_ep). On the first rank of
# each machine: doctor, the links, the adapters, the variables, and a bench of that machine alone, since nvte-ep bench works on one.
# Ends with 0 if every part did; the archive is there in any case.
set -uo pipefail
usage="usage: nodes.sh BUNDLE OUT.tar.gz LAUNCHER..."
bundle=$(cd "${1:?$usage}" && pwd) || exit 2
out=$(realpath -m "${2:?$usage}")
shift 2
[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
launcher=("$@")
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
export LD_LIBRARY_PATH=$bundle:${LD_LIBRARY_PATH:-}
failed=0

# part NAME SCRIPT: runs the script on every rank; $machine is the name of the rank's machine, $local its number there.
part() {
  local name=$1 code start=$SECONDS
  # What a rank of Open MPI, of srun or of torchrun is told. Expanded on the rank.
  # shellcheck disable=SC2016
  local place='machine=$(uname -n); local=${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-${LOCAL_RANK:-0}}}; bundle=$1; '
  timeout -k 10 "${SECONDS_EACH:-300}" "${launcher[@]}" bash -c "$place$2" part "$bundle" >"$folder/$name.txt" 2>&1
  code=$?
  echo "$name: exit code $code after $((SECONDS - start)) s" | tee -a "$folder/summary.txt"
  [ "$code" -eq 0 ] || failed=1
}

{
  date -u
  echo "launcher: ${launcher[*]}"
  "$bundle/nvte-ep" --version
} >"$folder/summary.txt"
# shellcheck disable=SC2016
part ranks 'echo "rank ${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-${RANK:-?}}}: $machine, $local there"'
# shellcheck disable=SC2016
part machines '[ "$local" = 0 ] || exit 0
  exec > >(sed "s/^/$machine: /") 2>&1
  "$bundle/nvte-ep" doctor; env | grep -E "^(NCCL|NVTE_EP|UCX|FI)_" | sort
  for command in "nvidia-smi" "nvidia-smi topo -m" "ibv_devinfo -l" "ls -l /dev/gdrdrv" "ulimit -l"; do echo "\$ $command"; $command || true; done
  exit 0'
# shellcheck disable=SC2016
part conformance 'exec "$bundle/nccl_ep_conformance"'
# shellcheck disable=SC2016
part test_ep 'exec "$bundle/test_ep"'
# shellcheck disable=SC2016
part bench '[ "$local" = 0 ] || exit 0
  for name in $(compgen -e); do case $name in OMPI_*|PMI*|SLURM_*|RANK|WORLD_SIZE|LOCAL_RANK) unset "$name" ;; esac; done
  "$bundle/nvte-ep" bench --ranks "${GPUS:-8}" --tokens 128,4096 --hidden 7168 --top-k 8 --experts 256 --json'
tar -czf "$out" -C "$folder" . || exit 1
echo "$out"
exit $failed
