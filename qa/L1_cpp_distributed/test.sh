#!/usr/bin/env bash
# The C++ suites under mpirun with 2 and 4 ranks, on the host runtime.
. "$(dirname "$0")/../common.sh"
build=$TARGET/cpp
wheels=$("$ROOT/qa/wheels.sh")
te=$("$ROOT/qa/te_wheel.sh")
# The tests take most of the time to compile; debug information and optimisation half of that.
check "configure" cmake -S "$ROOT" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNVTE_EP_WHEEL_HEADERS="$wheels" \
  -DNVTE_EP_TE_HEADERS="$te/include" -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -DNDEBUG"
check "build" cmake --build "$build" -j2
check "ctest" ctest --test-dir "$build" --output-on-failure --output-junit "$XML_LOG_DIR/ctest.xml"
finish
