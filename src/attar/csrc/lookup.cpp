// Rows times weights of tables. Whatever the number of rows, threads or chunks, an output is made by the same operations:
//
//     lane l = sum over columns l, 16 + l, 32 + l, ...: fused multiply-adds of number and row, one chain
//     out = the lanes' sum, folded in halves (simd.inl) + each extra times the row, in order + bias
//
// Few rows wait for memory, where four outputs at a time keep the multipliers from waiting for each other; many rows share
// each looked-up vector, as many as the registers hold.

#include "lookup.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "pool.h"
#include "python.h"
#include "simd.h"

namespace attar {
namespace {

constexpr std::int64_t MOST = std::int64_t{1} << 40;         // elements of a matrix: far from overflow
constexpr std::int64_t SERIAL_BELOW = 1 << 18;               // multiplications; a shared call costs a microsecond
constexpr std::int64_t CHUNK_BYTES = std::int64_t{1} << 18;  // of rows that stay in the second cache

#define ATTAR_KERNELS "lookup.inl"
#include "for_levels.h"

// A buffer of one thread, kept from call to call, on whole cache lines.
float* at_least(std::int64_t floats) {
    static thread_local std::vector<float> memory;
    if (static_cast<std::int64_t>(memory.size()) < floats + 15) memory.resize(static_cast<std::size_t>(floats + 15));
    const auto start = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (64 - start % 64) % 64 / sizeof(float);
}

int code_at(const LookupMatrix& m, std::int64_t row, std::int64_t column) {
    const std::int64_t step = column / LANES, vector = step / m.per_word(), i = step % m.per_word();
    std::uint32_t word;
    std::memcpy(&word, m.codes + (row * m.vectors + vector) * 64 + column % LANES * 4, sizeof word);
    return static_cast<int>(word >> m.bits * i & ((1u << m.bits) - 1));
}

}  // namespace

std::shared_ptr<LookupMatrix> make_lookup(std::shared_ptr<Arena> arena, std::int64_t rows, std::int64_t columns, int bits,
                                          std::int64_t outliers, const std::int32_t* starts, const std::int32_t* places,
                                          const float* extras) {
    if (rows < 1 || columns < 1 || columns > std::numeric_limits<std::int32_t>::max() || rows > MOST / columns)
        throw std::invalid_argument("impossible shape of a matrix");
    if (bits < 2 || bits > 4) throw std::invalid_argument("codes into tables have 2 to 4 bits");
    if (outliers < 0 || outliers > rows * columns || (outliers && (!starts || !places || !extras)))
        throw std::invalid_argument("impossible number of outliers");
    bool inside = !outliers || (starts[0] == 0 && starts[rows] == outliers);
    for (std::int64_t row = 0; outliers && row < rows; ++row) inside &= starts[row] <= starts[row + 1];
    for (std::int64_t i = 0; i < outliers; ++i) inside &= places[i] >= 0 && places[i] < columns;
    if (!inside) throw std::invalid_argument("outliers lie outside of the matrix: the file is damaged");
    auto matrix = std::make_shared<LookupMatrix>();
    LookupMatrix& m = *matrix;
    m.rows = rows, m.columns = columns, m.bits = bits, m.outliers = outliers;
    const std::int64_t of_vector = m.per_word() * LANES;
    m.vectors = (columns + of_vector - 1) / of_vector;
    m.codes = arena->allocate(rows * m.vectors * 64);
    m.tables = reinterpret_cast<float*>(arena->allocate(rows * 64));
    m.starts = m.places = nullptr, m.extras = nullptr;
    if (outliers) {
        m.starts = reinterpret_cast<std::int32_t*>(arena->allocate(4 * (rows + 1)));
        m.places = reinterpret_cast<std::int32_t*>(arena->allocate(4 * outliers));
        m.extras = reinterpret_cast<float*>(arena->allocate(4 * outliers));
        std::memcpy(m.starts, starts, static_cast<std::size_t>(4 * (rows + 1)));
        std::memcpy(m.places, places, static_cast<std::size_t>(4 * outliers));
        std::memcpy(m.extras, extras, static_cast<std::size_t>(4 * outliers));
    }
    m.arena = std::move(arena);
    return matrix;
}

void fill_lookup(LookupMatrix& m, std::int64_t first, std::int64_t count, const std::uint8_t* codes,
                 const float* tables) {
    if (first < 0 || count < 0 || first > m.rows - count) throw std::invalid_argument("rows that the matrix does not have");
    const std::int64_t numbers = std::int64_t{1} << m.bits;
    bool known = true;
#pragma omp parallel for schedule(static) reduction(&& : known)
    for (std::int64_t row = 0; row < count; ++row) {
        std::uint8_t* to = m.codes + (first + row) * m.vectors * 64;
        std::memset(to, 0, static_cast<std::size_t>(m.vectors * 64));
        for (std::int64_t column = 0; column < m.columns; ++column) {
            const std::uint32_t code = codes[row * m.columns + column];
            known = known && code < numbers;
            const std::int64_t step = column / LANES, vector = step / m.per_word(), i = step % m.per_word();
            std::uint8_t* at = to + vector * 64 + column % LANES * 4;
            std::uint32_t word;
            std::memcpy(&word, at, sizeof word);
            word |= (code & (numbers - 1)) << m.bits * i;
            std::memcpy(at, &word, sizeof word);
        }
        for (std::int64_t i = 0; i < 16; ++i)
            m.tables[(first + row) * 16 + i] = tables[row * numbers + i % numbers];
    }
    if (!known) throw std::invalid_argument("a code is beyond its table");
}

void read_row(const LookupMatrix& m, std::int64_t row, float* out) {
    for (std::int64_t column = 0; column < m.columns; ++column) out[column] = m.tables[row * 16 + code_at(m, row, column)];
    if (m.outliers)
        for (std::int64_t i = m.starts[row]; i < m.starts[row + 1]; ++i) out[m.places[i]] += m.extras[i];
}

void LookupFactors::check() const {
    if (factors.empty()) throw std::invalid_argument("no weights to multiply by");
    const LookupMatrix& first = *factors.front().matrix;
    for (const LookupFactor& factor : factors) {
        const LookupMatrix& m = *factor.matrix;
        if (m.columns != first.columns || m.bits != first.bits)
            throw std::invalid_argument("weights of one call have the same input columns and bits");
        if (factor.offset < 0 || factor.offset > width - m.rows) throw std::invalid_argument("an output out of its row");
    }
    for (std::int64_t i = 0; order && i < first.columns; ++i)
        if (order[i] < 0 || order[i] >= first.columns) throw std::invalid_argument("a column that rows do not have");
}

void lookup_linear(const LookupFactors& factors, const float* x, std::int64_t rows, float* out, Level level) {
    const LookupMatrix& first = *factors.factors.front().matrix;
    const std::int64_t columns = first.columns, padded = first.padded(), width = factors.width;
    if (rows < 0 || rows > std::numeric_limits<std::int64_t>::max() / 1024 / std::max(padded, width))
        throw std::invalid_argument("impossible number of rows");
    const auto some = ATTAR_PICK(level, some_outputs);
    const std::int64_t chunk = std::max<std::int64_t>(16, CHUNK_BYTES / (4 * padded) / 4 * 4);
    float* const wide = at_least(std::min(rows, chunk) * padded);
    for (std::int64_t from = 0; from < rows; from += chunk) {
        const std::int64_t many = std::min(chunk, rows - from);
        for_rows(many, many * padded >= SERIAL_BELOW, [&](std::int64_t r) {
            const float* row = x + (from + r) * columns;
            float* to = wide + r * padded;
            for (std::int64_t c = 0; c < columns; ++c) to[c] = row[factors.order ? factors.order[c] : c];
            if (factors.divisor)
                for (std::int64_t c = 0; c < columns; ++c) to[c] /= factors.divisor[c];
            std::fill(to + columns, to + padded, 0.0f);
        });
        for (const LookupFactor& factor : factors.factors) {
            const std::int64_t outputs = factor.matrix->rows, blocks = (outputs + LANES - 1) / LANES;
            for_rows(blocks, many * columns * outputs >= SERIAL_BELOW, [&](std::int64_t block) {
                some(factor, wide, many, padded, block * LANES, std::min(outputs, (block + 1) * LANES), out + from * width,
                     width);
            });
        }
    }
}

namespace nb = nanobind;
using namespace nb::literals;

void bind_lookup(nb::module_& module) {
    nb::class_<LookupMatrix>(module, "LookupMatrix", "A weight of tables in kernel layout.")
        .def_ro("rows", &LookupMatrix::rows)
        .def_ro("columns", &LookupMatrix::columns)
        .def_prop_ro("bytes", &LookupMatrix::bytes, "What a product reads.");
    nb::class_<LookupFactors>(module, "LookupFactors", "Such weights that multiply the same rows in one call.");
    module.def(
        "make_lookup",
        [](std::shared_ptr<Arena> arena, std::int64_t rows, std::int64_t columns, int bits, std::int64_t outliers,
           std::uintptr_t starts, std::uintptr_t places, std::uintptr_t extras) {
            return make_lookup(std::move(arena), rows, columns, bits, outliers, reinterpret_cast<const std::int32_t*>(starts),
                               reinterpret_cast<const std::int32_t*>(places), reinterpret_cast<const float*>(extras));
        },
        "arena"_a, "rows"_a, "columns"_a, "bits"_a, "outliers"_a, "starts"_a, "places"_a, "extras"_a);
    module.def(
        "fill_lookup",
        [](LookupMatrix& matrix, std::int64_t first, std::int64_t count, std::uintptr_t codes, std::uintptr_t tables) {
            const Running kernel;
            fill_lookup(matrix, first, count, reinterpret_cast<const std::uint8_t*>(codes),
                        reinterpret_cast<const float*>(tables));
        },
        "matrix"_a, "first"_a, "count"_a, "codes"_a, "tables"_a);
    using MatrixAndBias = std::tuple<std::shared_ptr<LookupMatrix>, std::uintptr_t>;
    module.def(
        "lookup_factors",
        [](const std::vector<MatrixAndBias>& weights, std::int64_t first, std::int64_t width, std::uintptr_t order,
           std::uintptr_t divisor) {
            auto out = std::make_shared<LookupFactors>();
            for (const auto& [matrix, bias] : weights) {
                out->factors.push_back({matrix, reinterpret_cast<const float*>(bias), first});
                first += matrix->rows;
            }
            out->width = width;
            out->order = reinterpret_cast<const std::int64_t*>(order);
            out->divisor = reinterpret_cast<const float*>(divisor);
            out->check();
            return out;
        },
        "weights"_a, "first"_a, "width"_a, "order"_a, "divisor"_a);
    module.def(
        "linear",
        [](const LookupFactors& factors, std::uintptr_t x, std::int64_t rows, std::uintptr_t out, const std::string& level) {
            const Level checked = level_of(level);
            const Running kernel;
            lookup_linear(factors, reinterpret_cast<const float*>(x), rows, reinterpret_cast<float*>(out), checked);
        },
        "factors"_a, "x"_a, "rows"_a, "out"_a, "level"_a);
}

}  // namespace attar
