#!/usr/bin/env bash
# The kernels' threads under stress (check_pool.cpp), built with each sanitizer; then the extension built with
# AddressSanitizer and UndefinedBehaviorSanitizer, and the tests of its kernels run on it. A finding ends the run with a
# report and a failing status. The whole extension is not run with ThreadSanitizer: it knows neither torch's OpenMP nor
# Python, and reports them.
#
# A report goes to the standard error of the process, which pytest must therefore leave alone.
#
# Neither optimised nor inlined: with every level inlined into every kernel, instrumented code takes many minutes to compile,
# and the tests are small. Leaks are not looked for, as Python keeps much until it ends.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin build=build/sanitize
"$bin/cmake" -S . -B "$build" -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM="$PWD/$bin/ninja" \
    -DPython_EXECUTABLE="$PWD/$bin/python" -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)" \
    -DCMAKE_BUILD_TYPE=Debug \
    -DCMAKE_CXX_FLAGS_DEBUG="-O0 -g1 -DATTAR_NOT_INLINED -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
for sanitizer in thread address,undefined undefined; do  # the last one alone forks
    "$compiler" -std=c++17 -O1 -g1 -Wall -Wextra -Werror -fsanitize="$sanitizer" -fno-sanitize-recover=undefined -pthread \
        tools/check_pool.cpp src/attar/csrc/pool.cpp -o "$build/check_pool"
    TSAN_OPTIONS=halt_on_error=1 "$build/check_pool"
done
"$bin/ninja" -C "$build" --quiet
# Python itself is not built with the sanitizers, so their runtimes come first of all.
attention="tree_of_guesses or explicit_positions or sees_nothing or not_a_number or write_kv or refused or long_decode"
left_out="process or runtime or compressed_tensors or memory_does_not"  # other processes, other packages, memory
# Slow, and with nothing that the rest has not.
left_out+=" or limits_are_measured or two_thousand_rows or (sparse_prefill and (any_chunks or loses_more))"
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)" \
ASAN_OPTIONS=detect_leaks=0 OMP_WAIT_POLICY=passive "$bin/python" -m tools.with_extension "$build"/_native*.so \
    -q --capture=sys -k "(not test_attention or $attention) and not ($left_out)" tests/kernels/native "$@"
