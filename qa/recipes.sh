#!/usr/bin/env bash
# Shell scripts, by ShellCheck; and the recipes for Kubernetes: their fields against its schemas, their numbers against each other.
# A LeaderWorkerSet is no type of Kubernetes' own, so of it the pods are looked at.
set -euo pipefail
cd "$(dirname "$0")/.."
# common.sh and floor.sh are sourced, and what they set is used there.
mapfile -t scripts < <(git ls-files '*.sh' '*.sbatch' .ci/run)
shellcheck --shell=bash --severity=warning --exclude=SC2034 "${scripts[@]}"
pin=kubernetes-validate==1.37.0
folder=${CARGO_TARGET_DIR:-$PWD/target}/recipes/$pin
[ -d "$folder/kubernetes_validate" ] ||
  python3 -m pip install -q --disable-pip-version-check --no-compile --root-user-action=ignore --target "$folder" "$pin"
PYTHONPATH=$folder python3 - examples/cluster/*.yaml <<'PYTHON'
import subprocess
import sys

import kubernetes_validate
import yaml


def pods_of(thing):
    """The pod templates in a manifest."""
    spec = thing["spec"]
    return [part for part in (spec.get("template"), spec.get("leaderWorkerTemplate", {}).get("workerTemplate")) if part]


def faults(thing, known):
    if known:
        kubernetes_validate.validate(thing, "1.37", strict=True)
    for pod in pods_of(thing):
        if not known:
            whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod["spec"]}
            kubernetes_validate.validate(whole, "1.37", strict=True)
        for container in pod["spec"]["containers"]:
            script = container["args"][0]
            check = subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, text=True, capture_output=True)
            if check.returncode:
                yield check.stdout
            words = script.split()
            nodes, ranks = (words[words.index(name) + 1] for name in ("--nnodes", "--nproc-per-node"))
            limits = container["resources"]["limits"]
            if int(ranks) != limits["nvidia.com/gpu"]:
                yield f"{ranks} ranks on {limits['nvidia.com/gpu']} GPUs"
            pieces = {thing["spec"].get(name, nodes) for name in ("completions", "parallelism")} - {nodes}
            if pieces - {int(nodes) if nodes.isdigit() else None}:
                yield f"--nnodes {nodes} and {pieces} pods"


def main():
    wrong = 0
    for path in sys.argv[1:]:
        with open(path) as file:
            for thing in yaml.safe_load_all(file):
                known = "/" not in thing["apiVersion"] or thing["apiVersion"].split("/")[0] in ("apps", "batch")
                try:
                    found = list(faults(thing, known))
                except kubernetes_validate.ValidationError as error:
                    found = [error.message]
                for text in found:
                    print(f"{path}: {thing['kind']}: {text}")
                    wrong += 1
    return wrong


sys.exit(1 if main() else 0)
PYTHON
echo "${#scripts[@]} scripts and the recipes of examples/cluster are sound"
