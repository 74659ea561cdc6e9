// A weight in the layout that the CPU kernels read, and the memory it lies in.
//
// Output columns go in blocks of 16, one lane of a vector each; a block is contiguous, so a thread that owns some blocks
// reads one stream. Inside a block the input dimension goes in runs of 32. A run of b-bit codes takes 64 b bytes and
// unpacks to eight vectors of 64 bytes, vector i holding, for lane c, the four codes of columns 4i .. 4i+3: exactly what
// a four-byte dot product and an AMX tile want, without a shuffle. Codes of 3, 5, 6 and 7 bits are split into planes of
// 4, 2 and 1 bits, each packed as those widths are:
//
//     4 bits: byte 4c+j of chunk n holds columns 8n+j (low nibble) and 8n+4+j (high nibble) of lane c
//     2 bits: byte 4c+j of chunk n holds columns 16n+j, +4, +8, +12, lowest bits first
//     1 bit:  byte 4c+j holds columns j, 4+j, .. 28+j, lowest bit first
//
// (The widest plane holds the lowest bits of a code.)//
// Codes are unsigned, the stored (signed) ones plus 2^(b-1), zero points likewise. Scales [groups, 16] and zero points
// [groups, 16] of a block have arrays of their own, which keeps codes on whole cache lines. A dense weight is [columns,
// 16] per block. Lanes past the last output column and columns past the last input column hold zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "simd.h"

namespace attar {

constexpr std::int64_t LANES = 16, RUN = 32;

enum class Number { codes, float32, float16, bfloat16 };

inline std::int64_t item_bytes(Number number) {
    return number == Number::codes ? 1 : number == Number::float32 ? 4 : 2;
}

// Memory of one model's weights: a few large pieces on huge pages (17 % more read bandwidth where translation misses
// are what limits it), given back together.
class Arena {
   public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena();
    // `bytes` of zeros, aligned to a cache line. Throws std::bad_alloc.
    std::uint8_t* allocate(std::int64_t bytes);
    std::int64_t bytes() const { return used_; }

   private:
    struct Piece {
        std::uint8_t* start;
        std::size_t size;
    };
    std::vector<Piece> pieces_;
    std::size_t free_ = 0;  // bytes left at the end of the last piece
    std::int64_t used_ = 0;
    std::mutex lock_;
};

// Asks that memory not touched yet come in huge pages, where the system has them and whole ones fit.
void prefer_huge_pages(const void* start, std::int64_t bytes);

struct Matrix {
    std::int64_t rows, columns;       // as the model sees it: outputs, inputs
    Number number;                    // of the weights
    int bits;                         // of a code; 0 if dense
    std::int64_t group, groups;       // columns that share a scale, and how many such groups a row has
    std::int64_t padded;              // columns with padding: of runs if codes, of activations always
    Number scale_number;              // float32, float16 or bfloat16
    std::int64_t block_bytes;         // of the codes or the dense numbers of a block
    std::uint8_t *weights, *scales;   // scales: null if dense
    std::uint8_t* zeros;              // null if symmetric
    std::shared_ptr<Arena> arena;

    std::int64_t blocks() const { return (rows + LANES - 1) / LANES; }
    const std::uint8_t* block(std::int64_t index) const { return weights + index * block_bytes; }
    std::int64_t bytes() const {  // that a product reads
        return blocks() * (block_bytes + (scales ? groups * LANES * item_bytes(scale_number) : 0) +
                           (zeros ? groups * LANES : 0));
    }
    // What symmetric codes subtract.
    std::int32_t middle() const { return std::int32_t{1} << (bits - 1); }
};

// From codes packed back to back in 32-bit words, `words_per_row` words a row (compressed-tensors' order), or, where
// `plain`, from one signed byte a code. scales [rows, groups]; zeros signed [rows, groups] or null. Throws
// std::invalid_argument where the shape has no kernel: a group must be a multiple of 32 or the whole row.
std::shared_ptr<Matrix> pack_codes(std::shared_ptr<Arena> arena, const void* codes, bool plain, std::int64_t rows,
                                   std::int64_t columns, int bits, std::int64_t group, const void* scales,
                                   Number scale_number, const std::int8_t* zeros);

std::shared_ptr<Matrix> pack_dense(std::shared_ptr<Arena> arena, const void* weights, std::int64_t rows,
                                   std::int64_t columns, Number number);

// Row `row` of the matrix as floats [columns]: an embedding read from the table that the output matrix multiplies by.
void read_row(const Matrix& matrix, std::int64_t row, float* out);

}  // namespace attar
