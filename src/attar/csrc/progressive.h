// Products of rows with weights of two levels (formats/codecs/progressive.py): 4-bit codes that a whole number of their group
// multiplies and another lessens to int8, and one float a row. The specification is `linear` of kernels/ops.py.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu.h"
#include "matrix.h"

namespace attar {

// Codes lie as in a Matrix of 4 bits (matrix.h): in blocks of 16 outputs, in runs of 32 columns. Beside them, for each
// block, [groups, 16] factors and offsets and [16] scales. Lanes past the last output hold zeros.
struct ProgressiveMatrix {
    std::int64_t rows, columns;  // outputs, inputs
    std::int64_t group, groups;  // columns that share a factor, and how many such groups a row has
    std::uint8_t *codes, *factors, *offsets;
    float* scales;
    std::shared_ptr<Arena> arena;

    std::int64_t blocks() const { return (rows + LANES - 1) / LANES; }
    std::int64_t block_bytes() const { return columns * LANES / 2; }
    std::int64_t bytes() const {  // that a product reads
        return blocks() * (block_bytes() + groups * LANES * 2 + LANES * 4);
    }
};

// codes: 32-bit words of eight codes (compressed-tensors' order), [rows, columns / 8]; factors and offsets [rows, groups];
// scales [rows]. Throws std::invalid_argument where the shape has no kernel, and where a number would be no int8.
std::shared_ptr<ProgressiveMatrix> pack_progressive(std::shared_ptr<Arena> arena, const std::uint32_t* codes,
                                                    std::int64_t rows, std::int64_t columns, std::int64_t group,
                                                    const std::uint8_t* factors, const std::uint8_t* offsets,
                                                    const float* scales);

// One of the weights that multiply the same rows: its columns of the output begin at `offset`.
struct ProgressiveFactor {
    std::shared_ptr<ProgressiveMatrix> matrix;
    const float* bias;  // [rows of the matrix], or null
    std::int64_t offset;
};

// Weights whose products with the same rows are made in one call: of one group, for outputs of `width` columns.
struct ProgressiveFactors {
    std::vector<ProgressiveFactor> factors;
    std::int64_t width = 0;

    // Throws std::invalid_argument where the weights do not share columns and groups, or an output lies outside.
    void check() const;
};

// x [rows, columns] to out [rows, width], contiguous. Throws std::invalid_argument on an impossible number of rows.
void progressive_linear(const ProgressiveFactors& factors, const float* x, std::int64_t rows, float* out, Level level);

void bind_progressive(nanobind::module_& module);

}  // namespace attar
