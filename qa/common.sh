# Sourced by every qa script: where things are, and one way to run a check.
# Failures accumulate: `check` records them and goes on; `finish` writes JUnit XML and exits non-zero if there was one.
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit 1
SUITE=$(basename "$(cd "$(dirname "$0")" && pwd)")
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
export XML_LOG_DIR=${XML_LOG_DIR:-$TARGET/qa}
mkdir -p "$XML_LOG_DIR"
passed=0 failed=0 cases=""

# check NAME COMMAND...: runs the command and records whether it succeeded.
check() {
  local name=$1 start=$SECONDS; shift
  echo "--- $SUITE: $name"
  if "$@"; then
    passed=$((passed + 1)); cases+="<testcase classname=\"$SUITE\" name=\"$name\" time=\"$((SECONDS - start))\"/>"
  else
    local code=$?
    failed=$((failed + 1)); echo "!!! $SUITE: $name failed (exit $code)" >&2
    cases+="<testcase classname=\"$SUITE\" name=\"$name\" time=\"$((SECONDS - start))\"><failure message=\"exit $code\"/></testcase>"
  fi
}

finish() {
  printf '<?xml version="1.0"?>\n<testsuite name="%s" tests="%d" failures="%d">%s</testsuite>\n' \
    "$SUITE" $((passed + failed)) "$failed" "$cases" >"$XML_LOG_DIR/$SUITE.xml"
  echo "$SUITE: $passed passed, $failed failed"
  [ "$failed" -eq 0 ]; exit
}
