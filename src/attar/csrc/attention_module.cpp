// The Python face of attention.h: addresses and sizes, as in module.cpp.

#include "attention.h"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "python.h"

namespace attar {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Pages pages_of(KvLayout layout, std::uintptr_t keys, std::uintptr_t values, std::uintptr_t key_scales,
               std::uintptr_t value_scales, std::uintptr_t key_zeros, std::uintptr_t value_zeros, std::int64_t blocks,
               std::int64_t block, std::int64_t kv_heads, std::int64_t head_dim, std::uintptr_t bases,
               std::int64_t units, std::int64_t bits, std::uintptr_t recent_keys, std::uintptr_t recent_values, std::int64_t tails,
               bool byte_scales, std::int64_t outliers, std::uintptr_t signs) {
    static_assert(sizeof(Signs) == 19 * sizeof(void*), "nineteen numbers side by side, as Python writes them");
    static_assert(sizeof(Bases) == 12 * sizeof(void*) && sizeof(TwoChannels) == sizeof(Bases),
                  "twelve addresses side by side, as Python writes them");
    return {layout,
            at<void>(keys),
            at<void>(values),
            at<void>(key_scales),
            at<void>(value_scales),
            at<void>(key_zeros),
            at<void>(value_zeros),
            blocks,
            block,
            kv_heads,
            head_dim,
            layout == KvLayout::kvquant ? nullptr : at<const Bases>(bases),
            units,
            bits,
            at<Bfloat16>(recent_keys),
            at<Bfloat16>(recent_values),
            tails,
            byte_scales,
            layout == KvLayout::kvquant ? at<const TwoChannels>(bases) : nullptr,
            outliers,
            at<const Signs>(signs)};
}

#define ATTAR_PAGES                                                                                        \
    KvLayout layout, std::uintptr_t keys, std::uintptr_t values, std::uintptr_t key_scales,                \
        std::uintptr_t value_scales, std::uintptr_t key_zeros, std::uintptr_t value_zeros,                 \
        std::int64_t blocks, std::int64_t block, std::int64_t kv_heads, std::int64_t head_dim,             \
        std::uintptr_t bases, std::int64_t units, std::int64_t bits, std::uintptr_t recent_keys,            \
        std::uintptr_t recent_values, std::int64_t tail_count, bool byte_scales, std::int64_t outliers, std::uintptr_t signs
#define ATTAR_PAGE_ARGUMENTS                                                                                 \
    "layout"_a, "keys"_a, "values"_a, "key_scales"_a, "value_scales"_a, "key_zeros"_a, "value_zeros"_a,          \
        "blocks"_a, "block"_a, "kv_heads"_a, "head_dim"_a, "bases"_a, "units"_a, "bits"_a, "recent_keys"_a, \
        "recent_values"_a, "tail_count"_a, "byte_scales"_a, "outliers"_a, "signs"_a
#define ATTAR_GIVEN_PAGES                                                                                         \
    pages_of(layout, keys, values, key_scales, value_scales, key_zeros, value_zeros, blocks, block, kv_heads,     \
             head_dim, bases, units, bits, recent_keys, recent_values, tail_count, byte_scales, outliers, signs)

void bound_attention(ATTAR_PAGES, std::uintptr_t q, std::int64_t rows, std::int64_t heads, std::int64_t sequences,
                     std::uintptr_t row_starts, std::uintptr_t lengths, std::uintptr_t tables, std::int64_t width,
                     std::uintptr_t positions, std::uintptr_t key_positions, std::uintptr_t tree,
                     std::int64_t tree_size, std::int64_t window,
                     float scale, float soft_cap, std::uintptr_t out, std::uintptr_t mass, std::uintptr_t tails,
                     std::uintptr_t dense_until, std::uintptr_t few_until, std::int64_t sinks, std::int64_t band,
                     float lost, std::int64_t whole, std::uintptr_t skipped, const std::string& level) {
    const Pages pages = ATTAR_GIVEN_PAGES;
    const Attention what{at<const float>(q),
                         rows,
                         heads,
                         sequences,
                         at<const std::int32_t>(row_starts),
                         at<const std::int32_t>(lengths),
                         at<const std::int32_t>(tables),
                         width,
                         at<const std::int32_t>(positions),
                         at<const std::int32_t>(key_positions),
                         at<const std::uint8_t>(tree),
                         tree_size,
                         window,
                         scale,
                         soft_cap,
                         at<float>(out),
                         at<float>(mass),
                         at<const std::int64_t>(tails),
                         at<const std::int32_t>(dense_until),
                         {at<const std::int32_t>(few_until), sinks, band, lost, whole, at<std::int64_t>(skipped)}};
    const Level checked = level_of(level);
    const Running kernel;
    attention(what, pages, checked);
}

void bound_write_kv(ATTAR_PAGES, std::uintptr_t q, std::uintptr_t k, std::uintptr_t v, std::int64_t q_stride,
                    std::int64_t k_stride, std::int64_t v_stride, std::int64_t rows, std::int64_t heads,
                    std::uintptr_t q_norm, std::uintptr_t k_norm, float eps, float offset, std::uintptr_t cos,
                    std::uintptr_t sin, std::int64_t angles, std::int64_t turned, std::uintptr_t angle,
                    std::uintptr_t slots, std::uintptr_t q_out, std::uintptr_t row_starts, std::uintptr_t tails,
                    std::int64_t sequences, const std::string& level) {
    const Pages pages = ATTAR_GIVEN_PAGES;
    const Write what{at<const float>(q),
                     at<const float>(k),
                     at<const float>(v),
                     q_stride,
                     k_stride,
                     v_stride,
                     rows,
                     heads,
                     at<const float>(q_norm),
                     at<const float>(k_norm),
                     eps,
                     offset,
                     at<const float>(cos),
                     at<const float>(sin),
                     angles,
                     turned,
                     at<const std::int32_t>(angle),
                     at<const std::int64_t>(slots),
                     at<float>(q_out),
                     at<const std::int32_t>(row_starts),
                     at<const std::int64_t>(tails),
                     sequences};
    const Level checked = level_of(level);
    const Running kernel;
    write_kv(what, pages, checked);
}

}  // namespace

void bind_attention(nb::module_& module) {
    nb::enum_<KvLayout>(module, "KvLayout", "How keys and values lie in pages.")
        .value("float32", KvLayout::float32)
        .value("bfloat16", KvLayout::bfloat16)
        .value("int8", KvLayout::int8)
        .value("fp8", KvLayout::fp8)
        .value("bit_planes", KvLayout::bit_planes)
        .value("kivi", KvLayout::kivi)
        .value("kvquant", KvLayout::kvquant);
    module.def("attention", &bound_attention, ATTAR_PAGE_ARGUMENTS, "q"_a, "rows"_a, "heads"_a, "sequences"_a,
               "row_starts"_a, "lengths"_a, "tables"_a, "width"_a, "positions"_a, "key_positions"_a, "tree"_a,
               "tree_size"_a,
               "window"_a, "scale"_a, "soft_cap"_a, "out"_a, "mass"_a, "tails"_a,
               "dense_until"_a, "few_until"_a, "sinks"_a, "band"_a, "lost"_a, "whole"_a, "skipped"_a, "level"_a,
               "Attention of float32 rows over pages; addresses of what is absent are 0.");
    module.def("write_kv", &bound_write_kv, ATTAR_PAGE_ARGUMENTS, "q"_a, "k"_a, "v"_a, "q_stride"_a, "k_stride"_a,
               "v_stride"_a, "rows"_a, "heads"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "offset"_a, "cos"_a, "sin"_a,
               "angles"_a, "turned"_a, "angle"_a, "slots"_a, "q_out"_a, "row_starts"_a, "tails"_a, "sequences"_a, "level"_a,
               "Norm and rotate queries and keys; write keys and values into pages.");
}

}  // namespace attar
