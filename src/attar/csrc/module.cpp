// The Python face of the CPU kernels.
//
// Tensors arrive as addresses: `kernels/native/`, the only caller, has checked device, dtype, layout and shape, and an
// integer costs 10 ns where an array object costs microseconds. This extension knows nothing of torch and is built
// without it. Kernels run with the GIL released.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "attention.h"
#include "cpu.h"
#include "limits.h"
#include "linear.h"
#include "matrix.h"
#include "lookup.h"
#include "progressive.h"
#include "python.h"
#include "quantize.h"
#include "rows.h"
#include "sample.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
std::int64_t quantize_rows_int8(std::uintptr_t x, std::int64_t rows, std::int64_t columns, std::uintptr_t codes,
                                std::uintptr_t scales, const std::string& level) {
    const attar::Level checked = attar::level_of(level);
    const attar::Running kernel;
    return attar::quantize_rows_int8(reinterpret_cast<const T*>(x), rows, columns,
                                     reinterpret_cast<std::int8_t*>(codes), reinterpret_cast<float*>(scales), checked);
}

template <class T>
const T* address(std::uintptr_t at) {
    return reinterpret_cast<const T*>(at);
}

attar::Number number_of(const std::string& name) {
    if (name == "float32") return attar::Number::float32;
    if (name == "float16") return attar::Number::float16;
    if (name == "bfloat16") return attar::Number::bfloat16;
    throw std::invalid_argument("numbers are float32, float16 or bfloat16, not " + name);
}

attar::Number stored_number_of(const std::string& name) {
    if (name == "codes") return attar::Number::codes;
    if (name == "float8_e4m3fn") return attar::Number::e4m3;
    if (name == "float8_e5m2") return attar::Number::e5m2;
    if (name == "int8") return attar::Number::int8;
    throw std::invalid_argument("weights with scales are codes, float8_e4m3fn, float8_e5m2 or int8, not " + name);
}

attar::Rounding::Kind rounding_of(const std::string& name) {
    if (name.empty()) return attar::Rounding::none;
    if (name == "e4m3") return attar::Rounding::e4m3;
    if (name == "e5m2") return attar::Rounding::e5m2;
    if (name == "mxfp4") return attar::Rounding::mxfp4;
    if (name == "nvfp4") return attar::Rounding::nvfp4;
    if (name == "outliers") return attar::Rounding::outliers;
    throw std::invalid_argument("rows are rounded to e4m3, e5m2, mxfp4, nvfp4 or outliers, not " + name);
}

attar::Norm norm_of(const std::string& name) {
    if (name == "rms") return attar::Norm::rms;
    if (name == "layer") return attar::Norm::layer;
    throw std::invalid_argument("norms are rms or layer, not " + name);
}

attar::Activation activation_of(const std::string& name) {
    if (name == "silu") return attar::Activation::silu;
    if (name == "gelu") return attar::Activation::gelu;
    if (name == "gelu_tanh") return attar::Activation::gelu_tanh;
    if (name == "quick_gelu") return attar::Activation::quick_gelu;
    if (name == "relu") return attar::Activation::relu;
    throw std::invalid_argument("activations are silu, gelu, gelu_tanh, quick_gelu or relu, not " + name);
}

void bind_limits(nb::module_& module) {
    module.def("busy_ns", &attar::Running::total_ns, "Nanoseconds that this process has spent in kernels.");
    module.def(
        "read_all",
        [](const attar::Arena& arena, std::uintptr_t memory, std::int64_t bytes, const std::string& level) {
            const attar::Level checked = attar::level_of(level);
            static_cast<void>(arena);
            const attar::Running kernel;
            return attar::read_all(address<std::uint8_t>(memory), bytes, checked);
        },
        "arena"_a, "memory"_a, "bytes"_a, "level"_a, "Read memory of an arena once, on all threads.");
    module.def(
        "multiply_int8",
        [](std::int64_t rounds, bool tiles, const std::string& level) {
            const attar::Level checked = attar::level_of(level);
            const attar::Running kernel;
            return attar::multiply_int8(rounds, tiles, checked);
        },
        "rounds"_a, "tiles"_a, "level"_a, "Operations made.");
}

using MatrixAndBias = std::tuple<std::shared_ptr<attar::Matrix>, std::uintptr_t>;

std::shared_ptr<attar::Factors> make_factors(const std::vector<MatrixAndBias>& weights, std::int64_t first,
                                             std::int64_t width, bool integer, std::int64_t activation_group,
                                             float fixed_scale, std::uintptr_t order, std::uintptr_t divisor,
                                             const std::string& gate, const std::string& rounding, bool wide) {
    auto out = std::make_shared<attar::Factors>();
    std::int64_t offset = first;
    for (const auto& [matrix, bias] : weights) {
        out->factors.push_back({matrix, address<float>(bias), offset});
        out->columns = matrix->columns;
        if (gate.empty()) offset += matrix->rows;
    }
    if (!gate.empty()) out->gate = std::make_shared<const attar::Activation>(activation_of(gate));
    out->width = width, out->integer = integer, out->activation_group = activation_group;
    out->rounding.kind = rounding_of(rounding);
    if (out->rounding.kind != attar::Rounding::none)
        out->rounding.group = activation_group, out->rounding.number = fixed_scale, out->activation_group = 0;
    out->wide = wide;
    out->fixed_scale = fixed_scale, out->order = address<std::int64_t>(order), out->divisor = address<float>(divisor);
    out->check();
    return out;
}

void bind_linear(nb::module_& module) {
    nb::class_<attar::Arena>(module, "Arena", "Memory of one model's weights, on huge pages.")
        .def(nb::init<>())
        .def_prop_ro("bytes", &attar::Arena::bytes)
        .def(
            "allocate",
            [](attar::Arena& arena, std::int64_t bytes) {
                return reinterpret_cast<std::uintptr_t>(arena.allocate(bytes));
            },
            "bytes"_a, "Address of so many zeros, for as long as the arena lives.");
    nb::class_<attar::Matrix>(module, "Matrix", "A weight in kernel layout (docs/numerics.md).")
        .def_ro("rows", &attar::Matrix::rows)
        .def_ro("columns", &attar::Matrix::columns)
        .def_ro("group", &attar::Matrix::group)
        .def_ro("integer", &attar::Matrix::integer, "Whether its products with int8 rows are exact sums.")
        .def_prop_ro("bytes", &attar::Matrix::bytes, "What a product reads: codes, scales and what else there is.");
    nb::class_<attar::Factors>(module, "Factors", "Weights that multiply the same rows in one call.");
    module.def(
        "pack_codes",
        [](std::shared_ptr<attar::Arena> arena, std::uintptr_t codes, bool plain, std::int64_t rows,
           std::int64_t columns, int bits, std::int64_t group, std::uintptr_t scales, const std::string& scale_number,
           std::uintptr_t zeros) {
            const attar::Number number = number_of(scale_number);
            const attar::Running kernel;
            return attar::pack_codes(std::move(arena), address<void>(codes), plain, rows, columns, bits, group,
                                     address<void>(scales), number, address<std::int8_t>(zeros));
        },
        "arena"_a, "codes"_a, "plain"_a, "rows"_a, "columns"_a, "bits"_a, "group"_a, "scales"_a, "scale_number"_a,
        "zeros"_a);
    module.def(
        "make_matrix",
        [](std::shared_ptr<attar::Arena> arena, std::int64_t rows, std::int64_t columns, const std::string& number,
           int bits, std::int64_t group, const std::string& scale_number, bool zeros, bool offsets, std::int64_t fine,
           std::vector<float> table) {
            const attar::Form form{stored_number_of(number), bits,    group, number_of(scale_number),
                                   zeros,                    offsets, fine,  std::move(table)};
            return attar::make_matrix(std::move(arena), rows, columns, form);
        },
        "arena"_a, "rows"_a, "columns"_a, "number"_a, "bits"_a, "group"_a, "scale_number"_a, "zeros"_a, "offsets"_a,
        "fine"_a, "table"_a, "A matrix to be filled, some rows at a time.");
    module.def(
        "fill_rows",
        [](attar::Matrix& matrix, std::int64_t first, std::int64_t rows, std::uintptr_t codes, std::uintptr_t scales,
           std::uintptr_t zeros, std::uintptr_t offsets, std::uintptr_t fine_scales, std::uintptr_t fine_offsets) {
            const attar::Running kernel;
            attar::fill_rows(matrix, first, rows,
                             {address<std::uint8_t>(codes), address<std::uint8_t>(scales), address<std::int8_t>(zeros),
                              address<std::uint8_t>(offsets), address<std::int8_t>(fine_scales),
                              address<std::int8_t>(fine_offsets)});
        },
        "matrix"_a, "first"_a, "rows"_a, "codes"_a, "scales"_a, "zeros"_a = 0, "offsets"_a = 0, "fine_scales"_a = 0,
        "fine_offsets"_a = 0);
    module.def(
        "fill_ggml",
        [](attar::Matrix& matrix, std::int64_t first, std::int64_t rows, const std::string& type, std::uintptr_t blocks,
           std::int64_t bytes) {
            const attar::Running kernel;
            attar::fill_ggml(matrix, first, rows, type, address<std::uint8_t>(blocks), bytes);
        },
        "matrix"_a, "first"_a, "rows"_a, "type"_a, "blocks"_a, "bytes"_a);
    module.def(
        "prefer_huge_pages",
        [](std::uintptr_t start, std::int64_t bytes) { attar::prefer_huge_pages(address<void>(start), bytes); },
        "start"_a, "bytes"_a);
    module.def(
        "pack_dense",
        [](std::shared_ptr<attar::Arena> arena, std::uintptr_t weights, std::int64_t rows, std::int64_t columns,
           const std::string& number) {
            const attar::Number kind = number_of(number);
            const attar::Running kernel;
            return attar::pack_dense(std::move(arena), address<void>(weights), rows, columns, kind);
        },
        "arena"_a, "weights"_a, "rows"_a, "columns"_a, "number"_a);
    module.def(
        "pack_sparse",
        [](std::shared_ptr<attar::Arena> arena, std::uintptr_t values, std::uintptr_t places, std::int64_t rows,
           std::int64_t columns, const std::string& number) {
            const attar::Number kind = number_of(number);
            const attar::Running kernel;
            return attar::pack_sparse(std::move(arena), address<void>(values), address<std::uint8_t>(places), rows,
                                      columns, kind);
        },
        "arena"_a, "values"_a, "places"_a, "rows"_a, "columns"_a, "number"_a);
    module.def("factors", &make_factors, "weights"_a, "first"_a, "width"_a, "integer"_a, "activation_group"_a,
               "fixed_scale"_a, "order"_a, "divisor"_a, "gate"_a = "", "rounding"_a = "", "wide"_a = false);
    module.def(
        "linear",
        [](const attar::Factors& factors, std::uintptr_t x, std::int64_t rows, std::uintptr_t out,
           const std::string& level) {
            const attar::Level checked = attar::level_of(level);
            const attar::Running kernel;
            attar::linear(factors, address<float>(x), rows, reinterpret_cast<float*>(out), checked);
        },
        "factors"_a, "x"_a, "rows"_a, "out"_a, "level"_a);
    module.def(
        "many_rows", [](const std::string& level) { return attar::many_rows(attar::level_of(level)); }, "level"_a,
        "Rows from which products unpack weights to a buffer; -1: as was measured for each kind of weights.");
    module.def(
        "set_many_rows",
        [](const std::string& level, std::int64_t rows) { attar::set_many_rows(attar::level_of(level), rows); },
        "level"_a, "rows"_a);
}

void bind_rows(nb::module_& module) {
    nb::class_<attar::Table>(module, "Table", "Rows that ids choose: a packed matrix, or dense numbers in row order.")
        .def("__init__",
             [](attar::Table* at, std::uintptr_t dense, std::int64_t count, std::int64_t columns,
                const std::string& number) {
                 new (at) attar::Table{nullptr, nullptr, address<void>(dense), number_of(number), count, columns};
             })
        .def("__init__",
             [](attar::Table* at, const attar::Matrix& packed) {
                 new (at) attar::Table{&packed, nullptr, nullptr, attar::Number::codes, packed.rows, packed.columns};
             },
             nb::keep_alive<1, 2>())
        .def("__init__",
             [](attar::Table* at, const attar::LookupMatrix& tables) {
                 new (at) attar::Table{nullptr, &tables, nullptr, attar::Number::codes, tables.rows, tables.columns};
             },
             nb::keep_alive<1, 2>());
    module.def(
        "embed",
        [](const attar::Table& table, std::uintptr_t ids, std::int64_t rows, float scale,
           const attar::Table* position_table, std::uintptr_t positions, std::int64_t offset, std::uintptr_t out) {
            const attar::Running kernel;
            attar::embed(table, address<std::int64_t>(ids), rows, scale, position_table,
                         address<std::int64_t>(positions), offset, reinterpret_cast<float*>(out));
        },
        "table"_a, "ids"_a, "rows"_a, "scale"_a, "position_table"_a.none(), "positions"_a, "offset"_a, "out"_a);
    module.def(
        "norm",
        [](const std::string& kind, std::uintptr_t stream, std::uintptr_t delta, std::int64_t rows,
           std::int64_t columns, std::uintptr_t weight, std::uintptr_t bias, float eps, float offset,
           std::uintptr_t sum, std::uintptr_t out, const std::string& level) {
            const attar::Norm norm = norm_of(kind);
            const attar::Level checked = attar::level_of(level);
            const attar::Running kernel;
            attar::norm(norm, address<float>(stream), address<float>(delta), rows, columns, address<float>(weight),
                        address<float>(bias), eps, offset, reinterpret_cast<float*>(sum),
                        reinterpret_cast<float*>(out), checked);
        },
        "kind"_a, "stream"_a, "delta"_a, "rows"_a, "columns"_a, "weight"_a, "bias"_a, "eps"_a, "offset"_a, "sum"_a,
        "out"_a, "level"_a);
    module.def(
        "gumbel_max",
        [](std::uintptr_t rows, std::int64_t count, std::int64_t columns, std::uintptr_t seeds, std::uintptr_t indices,
           std::uintptr_t chosen) {
            const attar::Running kernel;
            attar::gumbel_max(address<double>(rows), count, columns, address<std::uint64_t>(seeds),
                              address<std::uint64_t>(indices), reinterpret_cast<std::int64_t*>(chosen));
        },
        "rows"_a, "count"_a, "columns"_a, "seeds"_a, "indices"_a, "chosen"_a);
    module.def(
        "activate",
        [](const std::string& kind, bool gated, std::uintptr_t x, std::int64_t rows, std::int64_t columns,
           std::uintptr_t out, const std::string& level) {
            const attar::Activation activation = activation_of(kind);
            const attar::Level checked = attar::level_of(level);
            const attar::Running kernel;
            attar::activate(activation, gated, address<float>(x), rows, columns, reinterpret_cast<float*>(out), checked);
        },
        "kind"_a, "gated"_a, "x"_a, "rows"_a, "columns"_a, "out"_a, "level"_a);
}

}  // namespace

NB_MODULE(_native, module) {
    // The engine freezes what it has loaded out of Python's collections, so that at its end all of this is still there:
    // no leak, and no news for whoever reads a server's log.
    nanobind::set_leak_warnings(false);
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
    attar::bind_attention(module);
    bind_limits(module);
    bind_linear(module);
    attar::bind_lookup(module);
    attar::bind_progressive(module);
    bind_rows(module);
    module.def("quantize_rows_int8_float32", &quantize_rows_int8<float>, "x"_a, "rows"_a, "columns"_a, "codes"_a,
               "scales"_a, "level"_a, "The first row that is not finite, or -1.");
    module.def("quantize_rows_int8_bfloat16", &quantize_rows_int8<std::uint16_t>, "x"_a, "rows"_a, "columns"_a,
               "codes"_a, "scales"_a, "level"_a, "The first row that is not finite, or -1.");
}
