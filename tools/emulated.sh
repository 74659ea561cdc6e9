#!/usr/bin/env bash
# The extension built with ATTAR_EMULATE, and the tests of its kernels run on it: AVX-VNNI, AVX-512 and AMX beside portable
# C++ and AVX2, on any processor with AVX2. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin build=build/emulated
"$bin/cmake" -S . -B "$build" -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM="$PWD/$bin/ninja" \
    -DPython_EXECUTABLE="$PWD/$bin/python" -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)" \
    -DCMAKE_BUILD_TYPE=Release -DATTAR_EMULATE=ON
"$bin/ninja" -C "$build" --quiet
exec "$bin/python" -m tools.with_extension "$build"/_native*.so -q tests/kernels/native "$@"
