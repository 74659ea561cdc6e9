// Attention over keys and values kept in blocks ("pages"), and the writing of them. Shapes: N rows of all B sequences
// of a call, one sequence after another; H query heads, G key-value heads, D head size, P = D rounded up to 16.
//
// Where a slot lies. A slot is one token's place: number `slot % block` of block `slot / block`. J is 1 for pages of
// floats and 4 for pages of int8, as many neighbours as the dot product of the type takes at once.
//   keys    [blocks, G, block / 16, ceil(D / J), 16, J]: runs of 16 slots, a vector lane a slot
//   values  [blocks, G, block / J, P, J]: a vector lane a column; columns from D on are never looked at
//   scales  [blocks, G, block], float32, of keys and of values, where the pages are int8 or fp8: value = code * scale
// A slot that was never written must hold finite floats, such as zeros: it is multiplied by zero.
//
// Pages in planes hold coordinates of a few bits, and have a basis to turn to them (kv/bit_planes.py has the arithmetic).
//   keys, values  [blocks, G, block / 16, U, 16]: of each run of slots, bit after bit of each 8 coordinates
//   scales        [blocks, G, block], bfloat16, or where so said a byte, the upper half of a float16 without its sign
//   recent        [tails, G, block, D], bfloat16, or none: where there is, the last block of each sequence lies in one of
//                 them until its last slot is written, and goes to its place then
//
// Pages of KIVI have codes of `bits` bits, 2 or 4, and float16 scales and zeros: code * scale + zero. A word has two bits of
// 16 codes, from the lowest; there is a plane of words for each two bits of a code, the low ones first.
//   keys    [blocks, G, block / 16, bits / 2, D]: words of 16 slots;  scales, zeros [blocks, G, block / group, D]
//   values  [blocks, G, block, bits / 2, D / 16]: words of 16 columns;  scales, zeros [blocks, G, block, D / group]
//   recent  as above
//
// Pages of KVQuant have codes of `bits` bits, 3 or 4, of coordinates (x - mean) / spread, and what stands apart. K is how many
// of a head's coordinates do; those of a block's first slot do besides (kv/kvquant.py has the arithmetic).
//   keys, values       [blocks, G, block, bits, D / 8]: bits of one rank, 8 columns a byte
//   scales             [blocks, G, block], bfloat16, of values alone: value = levels[code] * scale
//   outliers, columns  [blocks, G, block, K]: coordinates in bfloat16, and where they belong
//   firsts             [blocks, G, D], bfloat16
//
// One-bit keys lie beside pages of floats, int8 and fp8 (kv/signs.py). P pairs of columns turn, the first F of them fast.
// A table has as many runs as the longest sequence, up to a multiple of 32.
//   bits    [blocks, G, block / 16, ceil(D / 8), 16]: bit j of byte c is the sign of column 8 c + j
//   scales  [blocks, G, block], bfloat16
#pragma once

#include <cstdint>

#include "cpu.h"

namespace attar {

// kv/schemes.py has the same names (`Layout`).
enum class KvLayout { float32, bfloat16, int8, fp8, bit_planes, kivi, kvquant };

struct Bfloat16;

// The coordinates of one layer's keys or values, by key-value head.
struct Coordinates {
    const float* back;           // [G, D, D]: what mixtures are turned back by; of keys, transposed, what queries are
    const float* into;           // [G, D, D]
    const float* mean;           // [G, D], subtracted before and added behind
    const float* weights;        // [G, D]: what squared errors count
    const float* shares;         // [G, D]: the squares of share * coordinate add up to that of the scale to try
    const std::uint8_t* bits;    // [G, D / 8]: of each bucket's coordinates, U in all
};

struct Bases {
    Coordinates keys, values;
};

// What pages of KVQuant have of keys or of values besides codes and scales.
struct Channels {
    const float* mean;    // [G, D]
    const float* spread;  // [G, D]
    const float* levels;  // [2^bits], ascending
    Bfloat16* outliers;
    std::uint8_t* columns;
    Bfloat16* firsts;
};

struct TwoChannels {
    Channels keys, values;
};

// One-bit keys, and by what rows choose the runs of slots that they read.
struct Signs {
    std::uint8_t* bits;
    Bfloat16* scales;
    const float *means, *spreads;       // [G, D]
    const double* squares;              // [G]: sums of squared spreads
    const float *slow_cos, *slow_sin;   // [P - F, runs], at slot 8 of each run
    const float* speeds;                // [P - F]: angles from slot to slot
    const float *fast_cos, *fast_sin;   // [runs, F up to a multiple of 16], at slot 0
    const float *lane_cos, *lane_sin;   // [F, 16], from there
    std::int64_t slow, fast, fast_padded, runs;
    std::int64_t topk, share, whole;    // runs read, or 0 and one in how many; the length up to which all are
};

struct Pages {
    KvLayout layout;
    void* keys;
    void* values;
    void* key_scales;  // float32 of int8 and fp8, bfloat16 or a byte of planes, float16 of KIVI, else null
    void* value_scales;  // likewise, and bfloat16 of KVQuant
    void* key_zeros;  // of KIVI, else null
    void* value_zeros;
    std::int64_t blocks, block, kv_heads, head_dim;
    const Bases* bases;  // of planes, else null
    std::int64_t units;  // U of planes; of KIVI the group, tokens of keys and columns of values
    std::int64_t bits;   // of a code of KIVI or KVQuant
    Bfloat16 *recent_keys, *recent_values;  // null where there are none
    std::int64_t tails;                     // how many
    bool byte_scales;                       // of planes
    const TwoChannels* channels;            // of KVQuant, else null
    std::int64_t outliers;                  // K of KVQuant
    const Signs* signs;                     // one-bit keys, or null
};

// How rows of prompts read little, except a prompt's last ones (kv/sparse_prefill.py). Either they see the first `sinks`
// slots and the newest `band`; or, where `band` is 0, stretches of 64 slots are skipped whose weights are small for sure:
// `lost` of a row's weights at most, of rows that see more than `whole` slots.
struct Prompts {
    const std::int32_t* until;  // [B]: rows at earlier positions do; null: none
    std::int64_t sinks, band;
    float lost;
    std::int64_t whole;
    std::int64_t* skipped;      // [B]: slots that were skipped are added, each row's and head's; or null
};

struct Attention {
    const float* q;  // [N, H, D]
    std::int64_t rows, heads, sequences;
    const std::int32_t* row_starts;     // [B + 1]: the rows of sequence b are row_starts[b] .. row_starts[b + 1]
    const std::int32_t* lengths;        // [B]: slots filled, those of its own rows, the last ones, among them
    const std::int32_t* tables;         // [B, width]: which blocks hold the slots
    std::int64_t width;
    const std::int32_t* positions;      // [N]
    const std::int32_t* key_positions;  // [blocks, block], negative where empty; null: the slot's index in its sequence
    const std::uint8_t* tree;           // the masks [T, T] among a sequence's own T rows, one after another; or null
    std::int64_t tree_size;             // its bytes
    std::int64_t window;                // keys a query sees, itself among them; 0: all
    float scale, soft_cap;              // soft_cap 0: none
    float* out;                         // [N, H, D]
    float* mass;                        // [B, G, width * block]: what each slot received; or null
    const std::int64_t* tails;          // [B]: which recent block is whose; null where there are none
    const std::int32_t* dense_until;    // [B]: rows that see more slots choose what they read; null: all read all
    Prompts prompts;
};

struct Write {
    const float *q, *k, *v;                            // rows of heads [H, D], [G, D], [G, D]
    std::int64_t q_stride, k_stride, v_stride;         // elements from row to row
    std::int64_t rows, heads;
    const float *q_norm, *k_norm;                      // RMSNorm weights [D], or null
    float eps, offset;                                 // of these norms; the offset is added to the weight
    const float *cos, *sin;                            // [angles, turned / 2], or null
    std::int64_t angles, turned;
    const std::int32_t* angle;                         // [N]: which row of cos and sin
    const std::int64_t* slots;                         // [N]: block number * block + place in it
    float* q_out;                                      // [N, H, D]
    const std::int32_t* row_starts;                    // [B + 1], where there are recent blocks
    const std::int64_t* tails;                         // [B]
    std::int64_t sequences;
};

// Both throw std::invalid_argument, before any page is read or written, where a number leads out of its array.
void attention(const Attention& what, const Pages& pages, Level level);
void write_kv(const Write& what, const Pages& pages, Level level);

}  // namespace attar
