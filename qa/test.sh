#!/usr/bin/env bash
# Every test that needs no GPU. Installs what it needs; runs all suites even if one fails. usage: qa/test.sh [SUITE...]
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
"$here/install.sh" || exit 1
suites=("$@"); [ $# -gt 0 ] || suites=(L1_cli L0_lint L0_unittest L0_abi L1_cpp_distributed L1_robustness L1_install L1_torch)
passed=0 failed=0 summary=""
for suite in "${suites[@]}"; do
  start=$SECONDS
  if bash "$here/$suite/test.sh"; then passed=$((passed + 1)) verdict=passed; else failed=$((failed + 1)) verdict=FAILED; fi
  summary+="  $suite $verdict in $((SECONDS - start)) s"$'\n'
done
printf '\n%s' "$summary"
echo "suites: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
