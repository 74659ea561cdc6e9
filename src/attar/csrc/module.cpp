// The Python face of the CPU kernels.
//
// Tensors arrive as addresses: `kernels/native/`, the only caller, has checked device, dtype, layout and shape, and an
// integer costs 10 ns where an array object costs microseconds. This extension knows nothing of torch and is built
// without it. Kernels run with the GIL released.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"
#include "quantize.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
std::int64_t quantize_rows_int8(std::uintptr_t x, std::int64_t rows, std::int64_t columns, std::uintptr_t codes,
                                std::uintptr_t scales, const std::string& level) {
    const attar::Level checked = attar::level_of(level);
    const nb::gil_scoped_release unlocked;
    return attar::quantize_rows_int8(reinterpret_cast<const T*>(x), rows, columns,
                                     reinterpret_cast<std::int8_t*>(codes), reinterpret_cast<float*>(scales), checked);
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "CPU kernels of attar. Called through attar.kernels.native, which checks what is passed.";
#if defined(_OPENMP)
    module.attr("openmp") = true;
#else
    module.attr("openmp") = false;
#endif
    module.def("features", &attar::features, "Instruction sets this machine has and its operating system supports.");
    module.def("levels", &attar::levels, "Kernel levels this machine runs, lowest first.");
    module.def(
        "decode_cpuid",
        [](std::uint32_t leaf1_ecx, std::uint32_t leaf7_ebx, std::uint32_t leaf7_ecx, std::uint32_t leaf7_edx,
           std::uint32_t leaf7_1_eax, std::uint64_t xcr0) {
            return attar::decode({leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1_eax, xcr0});
        },
        "leaf1_ecx"_a, "leaf7_ebx"_a, "leaf7_ecx"_a, "leaf7_edx"_a, "leaf7_1_eax"_a, "xcr0"_a,
        "What `features` says of a processor with these CPUID words.");
    module.def("quantize_rows_int8_float32", &quantize_rows_int8<float>, "x"_a, "rows"_a, "columns"_a, "codes"_a,
               "scales"_a, "level"_a, "The first row that is not finite, or -1.");
    module.def("quantize_rows_int8_bfloat16", &quantize_rows_int8<std::uint16_t>, "x"_a, "rows"_a, "columns"_a,
               "codes"_a, "scales"_a, "level"_a, "The first row that is not finite, or -1.");
}
