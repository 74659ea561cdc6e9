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
// (The widest plane holds the lowest bits of a code.)
//
// Codes are unsigned, the stored (signed) ones plus 2^(b-1), zero points likewise. Scales [groups, 16] and zero points
// [groups, 16] of a block have arrays of their own, which keeps codes on whole cache lines. A dense weight is [columns,
// 16] per block. Lanes past the last output column and columns past the last input column hold zeros.
//
// What a code stands for, of the group that it lies in:
//
//     (code - zero) * scale        a uniform grid; zero is 2^(b-1) where it is symmetric
//     code * scale + offset        where there are offsets [scales, 16], of the scales' dtype
//     table[code] * scale          where there is a table of 16 numbers, and 4 bits
//
// Where there are fine scales [groups, 16], signed bytes, `fine` groups share a scale, and a group's own is the product of
// the two; its offset likewise, with bytes of its own. float16 times a byte is exact in float32, and times a code of 6
// bits still: so GGML's blocks of 256 keep their size here, and their values.
//
// Dense weights of a byte (two float8 types, and int8) have scales too, int8 zero points, and groups of any size.
//
// Of 2:4 sparse weights of 16 or 32 bits only what is kept is there, two of four columns: [columns / 2, 16] per block; and
// where they were, [columns / 8, 16] bytes: two bits each, the first lowest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simd.h"

namespace attar {

constexpr std::int64_t LANES = 16, RUN = 32, HALF_RUN = 16;

enum class Number { codes, float32, float16, bfloat16, e4m3, e5m2, int8 };

inline std::int64_t item_bytes(Number number) {
    return number == Number::float32 ? 4 : number == Number::float16 || number == Number::bfloat16 ? 2 : 1;
}
inline bool is_float(Number number) { return number == Number::float32 || item_bytes(number) == 2; }

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
    std::int64_t group, groups;       // columns that share a scale, and how many such groups a row has, padding included
    std::int64_t padded;              // columns with padding: of runs if codes, of activations always
    Number scale_number;              // float32, float16 or bfloat16
    std::int64_t block_bytes;         // of the codes or the dense numbers of a block
    std::uint8_t *weights, *scales;   // scales: null if dense
    std::uint8_t* zeros;              // null if symmetric
    std::shared_ptr<Arena> arena;
    std::uint8_t* offsets = nullptr;  // null: there are none
    std::int64_t fine = 1, coarse = 0;  // groups that share a scale, a power of two, and scales of a row
    int fine_shift = 0;               // its logarithm
    std::int8_t *fine_scales = nullptr, *fine_offsets = nullptr;
    std::uint8_t* places = nullptr;   // of sparse weights
    bool looked_up = false;           // codes are of `table`
    bool integer = true;              // whether products with int8 are exact: of tables, where they hold small integers
    float table[16] = {};
    std::uint8_t bytes_of_table[16] = {};  // plus 128

    std::int64_t blocks() const { return (rows + LANES - 1) / LANES; }
    const std::uint8_t* block(std::int64_t index) const { return weights + index * block_bytes; }
    // Groups that hold columns of the weight: the last one of codes may be all padding.
    std::int64_t real_groups() const { return group >= columns ? 1 : columns / group; }
    std::int64_t bytes() const {  // that a product reads
        const std::int64_t item = item_bytes(scale_number);
        return blocks() * (block_bytes + (places ? columns / 8 * LANES : 0) + LANES * ((scales ? coarse * item : 0) + (offsets ? coarse * item : 0) +
                                                  groups * ((zeros ? 1 : 0) + (fine_scales ? 1 : 0) + (fine_offsets ? 1 : 0))));
    }
    // What codes without zero points subtract before they are scaled.
    std::int32_t middle() const { return looked_up ? 128 : offsets ? 0 : std::int32_t{1} << (bits - 1); }
    // Unpacked codes take all bits of a byte.
    bool wide() const { return bits == 8 || looked_up; }
    bool same_form(const Matrix& other) const {
        return number == other.number && bits == other.bits && group == other.group && padded == other.padded &&
               looked_up == other.looked_up && !offsets == !other.offsets && !places == !other.places;
    }
};

// What a matrix of codes, or of dense bytes, is made of besides them.
struct Form {
    Number number = Number::codes;  // or e4m3, e5m2, int8
    int bits = 0;                   // of codes
    std::int64_t group = 0;         // columns that share a scale: of codes 16, a multiple of 32, or the whole row
    Number scale_number = Number::float32;
    bool zeros = false, offsets = false;
    std::int64_t fine = 0;     // groups that share a scale and have fine ones; 0: there are none
    std::vector<float> table;  // 16 numbers, or none
};

// A matrix whose rows are still to be filled. Throws std::invalid_argument where the form or the shape has no kernel.
std::shared_ptr<Matrix> make_matrix(std::shared_ptr<Arena> arena, std::int64_t rows, std::int64_t columns, const Form& form);

// What rows are filled from: arrays of so many rows each. Codes are a byte each, unsigned, dense bytes as they are;
// scales and offsets [scales a row], zeros signed, fine ones [groups]; null where the matrix has none.
struct Rows {
    const std::uint8_t* codes;
    const std::uint8_t* scales;
    const std::int8_t* zeros;
    const std::uint8_t* offsets;
    const std::int8_t *fine_scales, *fine_offsets;
};

// Rows first .. first + rows - 1: `first` a multiple of 16, and so `rows`, unless they are the last. Throws
// std::invalid_argument where they are not, or not the matrix's, and where a zero point is none of the codes.
void fill_rows(Matrix& matrix, std::int64_t first, std::int64_t rows, const Rows& from);

// One block of 16 outputs, of which `lanes` exist: `from` holds their rows, codes as [16, padded].
void fill_block(Matrix& matrix, std::int64_t block, std::int64_t lanes, const Rows& from);
void check_rows(const Matrix& matrix, std::int64_t first, std::int64_t rows);

// The same from rows of a GGML type's blocks, `bytes` of them in all. Throws std::invalid_argument where the matrix is not
// of the form that the type has.
void fill_ggml(Matrix& matrix, std::int64_t first, std::int64_t rows, const std::string& type, const std::uint8_t* blocks,
               std::int64_t bytes);

// From codes packed back to back in 32-bit words, `words_per_row` words a row (compressed-tensors' order), or, where
// `plain`, from one signed byte a code. scales [rows, groups]; zeros signed [rows, groups] or null. Throws
// std::invalid_argument where the shape has no kernel: a group must be 16, a multiple of 32 or the whole row; and where
// a zero point or a plain code is outside of the range that `bits` have.
std::shared_ptr<Matrix> pack_codes(std::shared_ptr<Arena> arena, const void* codes, bool plain, std::int64_t rows,
                                   std::int64_t columns, int bits, std::int64_t group, const void* scales,
                                   Number scale_number, const std::int8_t* zeros);

std::shared_ptr<Matrix> pack_dense(std::shared_ptr<Arena> arena, const void* weights, std::int64_t rows,
                                   std::int64_t columns, Number number);

// 2:4 sparse: `values` [rows, columns / 2] that are kept, `places` [rows, columns / 8]. Throws std::invalid_argument where
// eight does not divide the columns.
std::shared_ptr<Matrix> pack_sparse(std::shared_ptr<Arena> arena, const void* values, const std::uint8_t* places,
                                    std::int64_t rows, std::int64_t columns, Number number);

// Row `row` of the matrix as floats [columns]: an embedding read from the table that the output matrix multiplies by.
void read_row(const Matrix& matrix, std::int64_t row, float* out);

}  // namespace attar
