// Part of attention.cpp: constants, and what its kernels work on.

constexpr int SPLIT = 512;                      // slots
constexpr int STRIDE = SPLIT + 16;              // floats from a row of scores to the next: no power of two
constexpr int BYTE_STRIDE = SPLIT + 64;
constexpr int TILE = 48;                        // rows, that is pairs (query, head)
constexpr int FEW = 8;                          // rows that wait for memory more than they compute
constexpr float ROUNDER = 12582912.0f;          // 1.5 * 2^23: adding it rounds to the nearest integer, half to even
constexpr float TWO_BYTES = 16256.0f;           // 127 * 128: the largest number that `split_in_bytes` makes
constexpr float TINY = 1e-30f;                  // weights and queries below it are zero, whose inverse would overflow
constexpr float HIDDEN = -3e38f;                // the score of a slot that is not seen: finite, so that NaN can be told
constexpr std::int32_t EMPTY = std::numeric_limits<std::int32_t>::max();  // a position that no query sees
constexpr std::int64_t MOST_COLUMNS = 512;      // of a head: integer sums stay within 31 bits
constexpr std::int64_t SERIAL_BELOW = 1 << 18;  // multiply-adds; a shared call costs about as much as this many
constexpr std::int64_t SERIAL_WRITES = 1 << 15;  // elements

constexpr int RUNS = SPLIT / 16;
constexpr int STRETCH = 4;                      // runs that are skipped together, 64 slots
constexpr int STRETCHES = RUNS / STRETCH;       // of a split: a bit each of a byte
constexpr float LOG2E = 1.44269504088896341f;
constexpr std::int64_t LEAST_RUNS = 8;          // that a share of a sequence comes to

constexpr std::int64_t MOST_BITS = 6;           // of a coordinate
constexpr int TRIED = 8;  // scales of every head: shares of its size, or what is added to it as a byte
constexpr float STEPS[TRIED] = {0.75f, 0.825f, 0.9f, 0.975f, 1.05f, 1.125f, 1.2f, 1.3f};
constexpr int LEAST_BYTE = -3;

// Of b bits: the level of each code, and the code of the level nearest to each integer from -127, of two the lower. The
// halves are those of kv/schemes.py: Lloyd's levels for the normal distribution.
struct Tables {
    alignas(64) std::int8_t level[MOST_BITS + 1][64] = {};
    std::uint8_t code[MOST_BITS + 1][255] = {};
    float nearest[MOST_BITS + 1][255] = {};  // that level

    Tables() {
        static const std::int8_t halves[MOST_BITS + 1][32] = {
            {},
            {27},
            {15, 51},
            {8, 26, 46, 73},
            {4, 13, 22, 32, 43, 55, 70, 93},
            {2, 7, 11, 16, 21, 25, 30, 36, 41, 47, 53, 61, 69, 79, 91, 111},
            {1,  3,  6,  8,  10, 13, 15, 17, 20, 22, 24, 27, 30, 32, 35, 38,
             40, 43, 46, 49, 53, 56, 60, 64, 68, 73, 78, 84, 91, 99, 110, 127},
        };
        for (int b = 1; b <= MOST_BITS; ++b) {
            const int half = 1 << (b - 1);
            for (int i = 0; i < half; ++i) {
                level[b][half + i] = halves[b][i];
                level[b][half - 1 - i] = static_cast<std::int8_t>(-halves[b][i]);
            }
            for (int at = -127; at <= 127; ++at) {
                for (int i = 0; i + 1 < 2 * half; ++i)
                    if (level[b][i] + level[b][i + 1] < 2 * at) code[b][at + 127] = static_cast<std::uint8_t>(i + 1);
                nearest[b][at + 127] = level[b][code[b][at + 127]];
            }
        }
    }
};
const Tables TABLES;

constexpr std::int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Sizes {
    std::int64_t kv_heads, head_dim, padded, block;
    std::int64_t key_run, value_run;  // elements of a run of 16 slots of one head, once it is expanded
    std::int64_t raw_key, raw_value;  // bytes of a run that is expanded before it is used; else 0
};

struct Tile {
    std::int64_t sequence, head;          // the key-value head
    std::int64_t first_row, own_rows;     // of the sequence
    std::int64_t first_pair, heads_each;  // pair = row of the sequence * heads_each + query head of the group
    int rows;
    std::int64_t from, to;         // splits, of `chosen` where that is given
    const std::int32_t* chosen;    // the runs of 16 slots that its one row reads, ascending; or null: all
    std::int64_t chosen_runs;
    std::int32_t oldest, newest;   // positions that some row sees lie between
    std::int32_t last_oldest, first_newest;  // positions that every row sees lie between
    std::int64_t window, sinks;    // what each row sees: so many of the newest slots (0: all), and the first
    bool skips;                    // whether its rows skip stretches of small weights
    const std::uint8_t* tree;      // of the sequence
    std::int64_t part_at;          // where the parts of its splits lie, or -1: they are merged at once
    // Buffers of the thread.
    void* q;  // floats [TILE, D], or bytes [TILE, 2, padded]
    std::int64_t q_stride;
    float* wide;  // four runs of a head
    float *q_scale, *scores, *part, *out, *top, *total, *weight_scale;
    std::int32_t *q_bias, *weight_bias;
    std::int8_t* weights;
    void* expanded;          // the keys of a split, then its values: of planes as int8, else as floats
    float* expanded_scales;  // of planes: of its keys, then of its values
};

// One row's queries of one key-value head, to be compared with one-bit keys. The buffers are a thread's, or, where several
// threads share the splits, their results are not.
struct Scan {
    std::int64_t sequence, head, row, length;  // slots that the row sees
    int queries;
    std::int64_t runs, splits, width;  // width: runs up to a multiple of RUNS
    std::int64_t budget;               // runs that it reads
    std::int64_t at;                   // where the list of these begins
    std::int64_t stride;               // codes of a query
    std::int8_t* codes;                // [queries, stride]
    float *factor, *constant;          // [queries]
    std::int32_t* total;
    float* slow;                       // [queries, P - F, 4]
    float* fast;                       // [queries, 2, fast_padded]
    float *weights, *tops, *sums;      // [queries, width], [queries, splits] twice
};

inline std::int32_t oldest_seen(std::int32_t position, std::int64_t window) {
    return window == 0 || position < window ? 0 : static_cast<std::int32_t>(position - window + 1);
}

struct Nuq {
    std::uint8_t bits;  // of eight columns: what pages of KVQuant consist of
};
