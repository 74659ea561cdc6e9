// Products of float rows with weights that are looked up in a table of each output's own, and a few that are stored
// beside and added (formats/codecs/lookup.py). The specification is `linear` of kernels/ops.py.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu.h"
#include "matrix.h"

namespace attar {

// A row's codes are cut into vectors of sixteen 32-bit words, each lane's with P = 32 / bits codes from the lowest bit on:
// code i of lane l of vector v is that of column 16 (P v + i) + l. So a shift and one lookup in a register make a vector of
// sixteen weights side by side. Columns past the last have code 0, and rows are zero there.
struct LookupMatrix {
    std::int64_t rows, columns;  // outputs, inputs
    int bits;                    // of a code: 2, 3 or 4
    std::int64_t vectors;        // of a row
    std::uint8_t* codes;         // [rows, vectors, 64]
    float* tables;               // [rows, 16]: its numbers, again and again: what lies above a code then does not matter
    std::int64_t outliers;       // how many weights are stored beside
    std::int32_t *starts, *places;  // [rows + 1], [outliers]: the row's first, and the column of each; null without any
    float* extras;                  // [outliers]: what is added
    std::shared_ptr<Arena> arena;

    std::int64_t per_word() const { return 32 / bits; }
    std::int64_t padded() const { return vectors * per_word() * LANES; }
    std::int64_t bytes() const {  // that a product reads
        return rows * (vectors + 1) * 64 + (outliers ? 8 * outliers + 4 * (rows + 1) : 0);
    }
};

// A matrix whose rows are still to be filled, with its outliers: starts [rows + 1], places and extras [outliers]. Throws
// std::invalid_argument on an impossible shape, and where outliers lie outside of it.
std::shared_ptr<LookupMatrix> make_lookup(std::shared_ptr<Arena> arena, std::int64_t rows, std::int64_t columns, int bits,
                                          std::int64_t outliers, const std::int32_t* starts, const std::int32_t* places,
                                          const float* extras);

// Rows first .. first + count - 1: codes, a byte each, [count, columns], and tables [count, 2^bits]. Throws
// std::invalid_argument where these are not the matrix's.
void fill_lookup(LookupMatrix& matrix, std::int64_t first, std::int64_t count, const std::uint8_t* codes,
                 const float* tables);

// Row `row` as floats [columns].
void read_row(const LookupMatrix& matrix, std::int64_t row, float* out);

// One of the weights that multiply the same rows: its columns of the output begin at `offset`.
struct LookupFactor {
    std::shared_ptr<LookupMatrix> matrix;
    const float* bias;  // [rows of the matrix], or null
    std::int64_t offset;
};

// Weights whose products with the same rows are made in one call, for outputs of `width` columns.
struct LookupFactors {
    std::vector<LookupFactor> factors;
    std::int64_t width = 0;
    const std::int64_t* order = nullptr;  // [columns]: x[order[i]] is column i, or null
    const float* divisor = nullptr;       // [columns], or null

    // Throws std::invalid_argument where the weights do not share columns and bits, or an output lies outside.
    void check() const;
};

// x [rows, columns] to out [rows, width], contiguous. Throws std::invalid_argument on an impossible number of rows.
void lookup_linear(const LookupFactors& factors, const float* x, std::int64_t rows, float* out, Level level);

void bind_lookup(nanobind::module_& module);

}  // namespace attar
