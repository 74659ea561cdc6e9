// Rows times weights of two levels. Whatever the number of rows, threads or chunks, an output is made by the same
// operations:
//
//     sum = over all columns: row's int8 code times (code * factor - offset)      exact: integers of 32 bits
//     out = float(sum) * weight scale * row scale + bias                          in this order
//
// What makes this format of four bits fast is that nothing but whole numbers meets until a row's last column. Two ways
// use it differently. Few rows: speed is that of reading codes, so they are multiplied as they are, and factor and offset
// are applied to the sums of a group, by x (c f - o) = f (x c) - o x. Many rows: a panel of 64 outputs becomes int8 once,
// all columns of it, multiplied first and lessened after, four numbers of a 32-bit word at a time; then it is a product of
// int8, without the float operations that groups with floats of their own need at the end of each.
//
// Dot products of bytes take unsigned ones on one side: int8 weights are kept as bytes larger by 128, and 128 times the
// row's sum is taken off.

#include "progressive.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "linear.h"
#include "pool.h"
#include "python.h"
#include "quantize.h"
#include "simd.h"

namespace attar {
namespace {

constexpr std::int64_t STEP = 64;                            // columns of rows that lie together
constexpr std::int64_t PANEL = 4;                            // blocks
constexpr std::int64_t MOST_COLUMNS = std::int64_t{1} << 16;  // sums of products of int8 fit 32 bits
constexpr std::int64_t MOST = std::int64_t{1} << 40;         // elements of a matrix: far from overflow
constexpr std::int64_t PIECES = 8;                           // a thread, of the blocks of a few rows' product
constexpr std::int64_t SERIAL_BELOW = 1 << 15;               // multiplications; a shared call costs a microsecond
constexpr std::int64_t CHUNK_BYTES = std::int64_t{1} << 20;  // of int8 rows that share an unpacked panel
constexpr std::int64_t LARGEST_CHUNK = 512;                  // rows
constexpr std::int64_t OF_LEVEL[] = {5, 5, 5, 5, 5, 8};      // rows from which panels are unpacked, by Level

// Rows as int8, laid out as QuantizedRows are (linear.h), with what the kernels want of each row.
struct Int8Rows {
    std::int64_t rows, columns, groups, steps, tile;
    std::int8_t* codes;
    float* scales;         // [rows]
    std::int32_t* sums;    // [rows, groups]: of codes
    std::int32_t* totals;  // [rows]

    std::int64_t tiles() const { return (rows + tile - 1) / tile; }
    std::int64_t step_bytes() const { return tiles() * tile * STEP; }
    std::int8_t* at(std::int64_t row, std::int64_t step) const {
        return codes + step * step_bytes() + row * STEP;
    }
};

// A buffer of one thread, kept from call to call, on whole cache lines.
class Buffer {
   public:
    std::uint8_t* at_least(std::int64_t bytes) {
        if (static_cast<std::int64_t>(memory_.size()) < bytes + 63) memory_.resize(static_cast<std::size_t>(bytes + 63));
        const auto start = reinterpret_cast<std::uintptr_t>(memory_.data());
        return memory_.data() + (64 - start % 64) % 64;
    }

   private:
    std::vector<std::uint8_t> memory_;
};

#define ATTAR_KERNELS "progressive.inl"
#include "for_levels.h"

thread_local Buffer of_thread, of_caller;

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Nibbles 0 to 7 of a word in the order 0 4 1 5 2 6 3 7.
std::uint32_t interleave(std::uint32_t word) {
    const auto spread = [](std::uint32_t half) {
        half = (half | half << 8) & 0x00ff00ff;
        return (half | half << 4) & 0x0f0f0f0f;
    };
    return spread(word & 0xffff) | spread(word >> 16) << 4;
}

// Whether codes of one group times its factor, less its offset, are int8, and none of the products passes a byte.
bool is_int8(const std::uint32_t* words, std::int64_t count, int factor, int offset) {
    if (offset > 128) return false;
    if (15 * factor - offset <= 127) return true;
    std::uint32_t most = 0;
    for (std::int64_t i = 0; i < count; ++i)
        for (int bit = 0; bit < 32; bit += 4) most = std::max(most, words[i] >> bit & 15);
    return static_cast<int>(most) * factor - offset <= 127;
}

Int8Rows quantize(const float* x, std::int64_t rows, const ProgressiveMatrix& m, Level level) {
    Int8Rows out{};
    out.rows = rows, out.columns = m.columns, out.groups = m.groups;
    out.steps = (m.columns + STEP - 1) / STEP, out.tile = std::min<std::int64_t>(rows, 16);
    const std::int64_t code_bytes = out.steps * out.step_bytes(), sum_bytes = round_up(rows * m.groups * 4, 64);
    std::uint8_t* memory = of_caller.at_least(code_bytes + sum_bytes + 2 * round_up(rows * 4, 64));
    out.codes = reinterpret_cast<std::int8_t*>(memory);
    out.sums = reinterpret_cast<std::int32_t*>(memory + code_bytes);
    out.scales = reinterpret_cast<float*>(memory + code_bytes + sum_bytes);
    out.totals = reinterpret_cast<std::int32_t*>(memory + code_bytes + sum_bytes + round_up(rows * 4, 64));
    const std::int64_t columns = m.columns, group = m.group, padded = out.steps * STEP;
    const auto sum = ATTAR_PICK(level, sum_groups);
    for_rows(rows, rows > 1 && rows * columns >= SERIAL_BELOW, [&](std::int64_t r) {
        auto* codes = reinterpret_cast<std::int8_t*>(of_thread.at_least(padded));
        std::memset(codes + columns, 0, static_cast<std::size_t>(padded - columns));
        if (quantize_rows_int8(x + r * columns, 1, columns, codes, out.scales + r, level) >= 0) {
            std::memset(codes, 0, static_cast<std::size_t>(columns));
            out.scales[r] = NAN;  // and with it the outputs
        }
        out.totals[r] = sum(codes, out.groups, group, out.sums + r * out.groups);
        for (std::int64_t s = 0; s < out.steps; ++s) std::memcpy(out.at(r, s), codes + s * STEP, STEP);
    });
    return out;
}

// Blocks [index * unit, ...) of all factors, counted through: (factor, first block).
struct Place {
    const ProgressiveFactor* factor;
    std::int64_t block;
};
std::int64_t count(const ProgressiveFactors& factors, std::int64_t unit) {
    std::int64_t total = 0;
    for (const ProgressiveFactor& factor : factors.factors) total += (factor.matrix->blocks() + unit - 1) / unit;
    return total;
}
Place find(const ProgressiveFactors& factors, std::int64_t index, std::int64_t unit) {
    for (const ProgressiveFactor& factor : factors.factors) {
        const std::int64_t here = (factor.matrix->blocks() + unit - 1) / unit;
        if (index < here) return {&factor, index * unit};
        index -= here;
    }
    return {nullptr, 0};
}

}  // namespace

std::shared_ptr<ProgressiveMatrix> pack_progressive(std::shared_ptr<Arena> arena, const std::uint32_t* codes,
                                                    std::int64_t rows, std::int64_t columns, std::int64_t group,
                                                    const std::uint8_t* factors, const std::uint8_t* offsets,
                                                    const float* scales) {
    if (rows < 1 || columns < 1 || rows > MOST / columns) throw std::invalid_argument("impossible shape of a matrix");
    if (columns > MOST_COLUMNS) throw std::invalid_argument("rows of int8 have at most 65536 columns");
    if (group < 1 || group % RUN || columns % group)
        throw std::invalid_argument("a group is a multiple of 32 columns that divides the row");
    auto matrix = std::make_shared<ProgressiveMatrix>();
    const std::int64_t groups = columns / group, words = columns / 8;
    matrix->rows = rows, matrix->columns = columns, matrix->group = group, matrix->groups = groups;
    const std::int64_t blocks = matrix->blocks();
    matrix->codes = arena->allocate(blocks * matrix->block_bytes());
    matrix->factors = arena->allocate(blocks * groups * LANES);
    matrix->offsets = arena->allocate(blocks * groups * LANES);
    matrix->scales = reinterpret_cast<float*>(arena->allocate(blocks * LANES * 4));
    matrix->arena = std::move(arena);
    std::int64_t bad = rows;
#pragma omp parallel for schedule(static) reduction(min : bad)
    for (std::int64_t b = 0; b < blocks; ++b)
        for (std::int64_t lane = 0; lane < std::min(LANES, rows - b * LANES); ++lane) {
            const std::int64_t row = b * LANES + lane;
            const std::uint32_t* from = codes + row * words;
            std::uint8_t* to = matrix->codes + b * matrix->block_bytes() + 4 * lane;
            for (std::int64_t i = 0; i < words; ++i) {
                const std::uint32_t word = interleave(from[i]);
                std::memcpy(to + i * 64, &word, 4);
            }
            for (std::int64_t g = 0; g < groups; ++g) {
                const std::uint8_t factor = factors[row * groups + g], offset = offsets[row * groups + g];
                if (!is_int8(from + g * group / 8, group / 8, factor, offset)) bad = std::min(bad, row);
                matrix->factors[(b * groups + g) * LANES + lane] = factor;
                matrix->offsets[(b * groups + g) * LANES + lane] = offset;
            }
            matrix->scales[row] = scales[row];
        }
    if (bad < rows)
        throw std::invalid_argument("codes of row " + std::to_string(bad) +
                                    " times factors, less offsets, are no int8: the file is damaged");
    return matrix;
}

void ProgressiveFactors::check() const {
    if (factors.empty()) throw std::invalid_argument("no weights to multiply by");
    const ProgressiveMatrix& first = *factors.front().matrix;
    for (const ProgressiveFactor& factor : factors) {
        const ProgressiveMatrix& m = *factor.matrix;
        if (m.columns != first.columns || m.group != first.group)
            throw std::invalid_argument("weights of one call have the same input columns and groups");
        if (factor.offset < 0 || factor.offset > width - m.rows) throw std::invalid_argument("an output out of its row");
    }
}

void progressive_linear(const ProgressiveFactors& factors, const float* x, std::int64_t rows, float* out, Level level) {
    const ProgressiveMatrix& first = *factors.factors.front().matrix;
    const std::int64_t width = factors.width, widest = std::max(first.columns, width);
    if (rows < 0 || rows > std::numeric_limits<std::int64_t>::max() / 1024 / widest)
        throw std::invalid_argument("impossible number of rows");
    if (rows == 0) return;
    const std::int64_t forced = many_rows(level), many = forced == MEASURED ? OF_LEVEL[static_cast<int>(level)] : forced;
    const bool parallel = rows * first.columns * width >= SERIAL_BELOW * 8;
    const Int8Rows int8 = quantize(x, rows, first, level);
    if (rows < many) {
        const auto few = ATTAR_PICK(level, few_rows);
        const std::int64_t blocks = count(factors, 1), pieces = parallel ? std::min(blocks, PIECES * threads()) : 1;
        // Blocks that lie together, so that each piece is a stream of memory.
        for_each(pieces, parallel, [&](std::int64_t piece) {
            std::int64_t at = blocks * piece / pieces;
            const std::int64_t end = blocks * (piece + 1) / pieces;
            while (at < end) {
                const Place place = find(factors, at, 1);
                const std::int64_t stop = std::min(place.factor->matrix->blocks(), place.block + end - at);
                few(*place.factor, int8, place.block, stop, out, width);
                at += stop - place.block;
            }
        });
        return;
    }
    const auto multiply = ATTAR_PICK(level, many_rows_of);
    const std::int64_t panels = count(factors, PANEL), panel_bytes = int8.steps * STEP * LANES * PANEL;
    const std::int64_t fit = CHUNK_BYTES / (int8.steps * STEP) / 32 * 32;
    const std::int64_t chunk = std::min(std::clamp<std::int64_t>(fit, 32, LARGEST_CHUNK), rows);
    const std::int64_t chunks = (rows + chunk - 1) / chunk;
    for_each(chunks * panels, parallel, [&](std::int64_t item) {
        const Place place = find(factors, item % panels, PANEL);
        const std::int64_t row = item / panels * chunk, blocks = place.factor->matrix->blocks() - place.block;
        multiply(*place.factor, int8, row, std::min(chunk, rows - row), place.block, std::min(PANEL, blocks),
                 of_thread.at_least(panel_bytes), out, width);
    });
}

namespace nb = nanobind;
using namespace nb::literals;

void bind_progressive(nb::module_& module) {
    nb::class_<ProgressiveMatrix>(module, "ProgressiveMatrix", "A weight of two levels in kernel layout.")
        .def_ro("rows", &ProgressiveMatrix::rows)
        .def_ro("columns", &ProgressiveMatrix::columns)
        .def_prop_ro("bytes", &ProgressiveMatrix::bytes, "What a product reads.");
    nb::class_<ProgressiveFactors>(module, "ProgressiveFactors", "Such weights that multiply the same rows in one call.");
    module.def(
        "pack_progressive",
        [](std::shared_ptr<Arena> arena, std::uintptr_t codes, std::int64_t rows, std::int64_t columns,
           std::int64_t group, std::uintptr_t factors, std::uintptr_t offsets, std::uintptr_t scales) {
            const Running kernel;
            return pack_progressive(std::move(arena), reinterpret_cast<const std::uint32_t*>(codes), rows, columns, group,
                                    reinterpret_cast<const std::uint8_t*>(factors),
                                    reinterpret_cast<const std::uint8_t*>(offsets),
                                    reinterpret_cast<const float*>(scales));
        },
        "arena"_a, "codes"_a, "rows"_a, "columns"_a, "group"_a, "factors"_a, "offsets"_a, "scales"_a);
    using MatrixAndBias = std::tuple<std::shared_ptr<ProgressiveMatrix>, std::uintptr_t>;
    module.def(
        "progressive_factors",
        [](const std::vector<MatrixAndBias>& weights, std::int64_t first, std::int64_t width) {
            auto out = std::make_shared<ProgressiveFactors>();
            for (const auto& [matrix, bias] : weights) {
                out->factors.push_back({matrix, reinterpret_cast<const float*>(bias), first});
                first += matrix->rows;
            }
            out->width = width;
            out->check();
            return out;
        },
        "weights"_a, "first"_a, "width"_a);
    module.def(
        "linear",
        [](const ProgressiveFactors& factors, std::uintptr_t x, std::int64_t rows, std::uintptr_t out,
           const std::string& level) {
            const Level checked = level_of(level);
            const Running kernel;
            progressive_linear(factors, reinterpret_cast<const float*>(x), rows, reinterpret_cast<float*>(out), checked);
        },
        "factors"_a, "x"_a, "rows"_a, "out"_a, "level"_a);
}

}  // namespace attar
