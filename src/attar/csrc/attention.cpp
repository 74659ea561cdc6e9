// Attention over pages (the layout is drawn in attention.h): FlashAttention's online softmax (Dao et al. 2022) over
// fixed splits of the slots, which also is flash-decoding where one query has many slots.
//
// Batch invariance. The slots of a sequence are cut at multiples of SPLIT, counted from its start. A split gives a row
// its greatest score m, the sum l of its weights and the weighted sum o of values; what the splits give is merged in
// their order, by one formula. Nothing of this depends on the rows beside it, on how a prompt was cut into calls, on
// which blocks hold the slots or on threads: where a row does not see a slot, its weight is an exact zero, and a split
// that it does not see is not merged at all. Each score and each output is one chain of multiply-adds in the order of
// its index, however many of them the micro-kernels hold at once, so the levels agree to the bit as well.
//
// Pages of int8 are multiplied as integers. The query, and of each split the softmax weights (times the values'
// scales), become numbers of two bytes, 128 high + low, so that two dot products of bytes do what four multiply-adds
// and two conversions did: a core that converts to float first falls behind its memory from four queries a head on.
// Sums of integers are exact, in any order. The rounding to 1/16256 of the row's largest is well below the pages' own,
// 1/127.
//
// Memory. The working set is a tile a thread. Where there are fewer tiles than threads want, tiles are cut along the
// splits, and each split's (m, l, o) is kept until it is merged: fewer than 4 tiles a thread, O(slots) altogether.

#include "attention.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace attar {
namespace {

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
constexpr float LOG2E = 1.44269504088896341f;
constexpr std::int64_t LEAST_RUNS = 8;          // that a share of a sequence comes to

constexpr std::int64_t MOST_BITS = 6;           // of a coordinate
constexpr int TRIED = 8;  // scales of a head: shares of its size, or what is added to it as a byte
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

#define ATTAR_KERNELS "attention.inl"
#include "for_levels.h"

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

// Memory that a thread keeps from call to call, for fresh pages cost more than what is computed on them.
class Buffer {
   public:
    unsigned char* at_least(std::size_t bytes) {
        if (bytes > size_) {
            memory_.reset();
            memory_ = std::make_unique<unsigned char[]>(bytes + 64);
            size_ = bytes;
        }
        return memory_.get() + (64 - reinterpret_cast<std::uintptr_t>(memory_.get()) % 64);
    }

   private:
    std::unique_ptr<unsigned char[]> memory_;
    std::size_t size_ = 0;
};

Sizes checked_sizes(const Pages& pages) {
    const bool planes = pages.layout == KvLayout::bit_planes, integers = planes || pages.layout == KvLayout::int8;
    const bool kivi = pages.layout == KvLayout::kivi, nuq = pages.layout == KvLayout::kvquant;
    const bool quantized = integers || kivi || pages.layout == KvLayout::fp8;
    if (pages.head_dim < 1 || pages.head_dim > MOST_COLUMNS) refuse("heads of 1 to 512 columns are supported");
    if (pages.kv_heads < 1 || pages.kv_heads > 1 << 16) refuse("impossible number of key-value heads");
    if (pages.block < 16 || pages.block % 16 != 0 || pages.block > 1 << 16)
        refuse("a block holds a multiple of 16 slots");
    const std::int64_t padded = (pages.head_dim + 15) / 16 * 16;
    const std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4 / padded / pages.kv_heads / pages.block;
    if (pages.blocks < 0 || pages.blocks > std::min<std::int64_t>(most, EMPTY)) refuse("impossible number of blocks");
    if (quantized != (pages.key_scales != nullptr) || (quantized || nuq) != (pages.value_scales != nullptr))
        refuse("pages of codes, and no others, have scales; those of KVQuant of values alone");
    if (kivi != (pages.key_zeros != nullptr) || kivi != (pages.value_zeros != nullptr))
        refuse("pages of KIVI, and no others, have zeros");
    if (planes != (pages.bases != nullptr)) refuse("planes, and no others, have bases");
    if (nuq != (pages.channels != nullptr)) refuse("pages of KVQuant, and no others, have channels");
    if (!planes && !kivi && pages.recent_keys != nullptr) refuse("planes and KIVI alone have recent blocks");
    if (kivi) {
        if (pages.recent_keys == nullptr || pages.recent_values == nullptr) refuse("KIVI wants recent blocks");
        if (pages.units < 16 || pages.units % 16 != 0 || pages.head_dim % pages.units != 0 ||
            pages.block % pages.units != 0)
            refuse("groups of KIVI are a multiple of 16, and divide blocks and heads");
    }
    if (planes) {
        if (pages.head_dim % 16 != 0) refuse("planes are of heads of a multiple of 16 columns");
        for (const Coordinates* each : {&pages.bases->keys, &pages.bases->values})
            for (std::int64_t g = 0; g < pages.kv_heads; ++g) {
                std::int64_t units = 0;
                for (std::int64_t i = 0; i < pages.head_dim / 8; ++i) {
                    const std::int64_t bits = each->bits[g * (pages.head_dim / 8) + i];
                    if (bits > MOST_BITS) refuse("a coordinate has 6 bits at most");
                    units += bits;
                }
                if (units != pages.units) refuse("the bits of a head do not add up to its planes");
            }
    }
    if (pages.signs != nullptr) {
        if (planes || kivi || nuq) refuse("one-bit keys lie beside pages of floats, int8 and fp8");
        const Signs& signs = *pages.signs;
        if (signs.fast < 0 || signs.slow < 0 || 2 * (signs.fast + signs.slow) > pages.head_dim ||
            signs.fast_padded < signs.fast || signs.fast_padded % 16 != 0 || signs.runs < 0 || signs.runs % RUNS != 0)
            refuse("impossible tables of angles");
        if ((signs.share == 0) == (signs.topk == 0) || signs.share < 0 || signs.share == 1 || signs.topk < 0 ||
            (signs.share == 0 && signs.topk < 2) || signs.whole < 0)
            refuse("rows read two runs or more, or half of all or less");
    }
    if (nuq) {
        if (pages.units != 3 && pages.units != 4) refuse("codes of KVQuant have 3 or 4 bits");
        if (pages.head_dim % 8 != 0 || pages.head_dim > 256)
            refuse("KVQuant is of heads of a multiple of 8 columns, 256 at most");
        if (pages.outliers < 1 || pages.outliers >= pages.head_dim) refuse("impossible number of outliers");
    }
    const std::int64_t key_run = integers ? (pages.head_dim + 3) / 4 * 64 : pages.head_dim * 16;
    std::int64_t raw_key = 0, raw_value = 0;
    if (planes) raw_key = raw_value = 16 * pages.units;
    if (kivi) raw_key = raw_value = 4 * pages.head_dim;
    if (nuq) raw_key = raw_value = 2 * pages.units * pages.head_dim;
    if (pages.layout == KvLayout::fp8) raw_key = key_run, raw_value = padded * 16;
    return {pages.kv_heads, pages.head_dim, padded, pages.block, key_run, padded * 16, raw_key, raw_value};
}

void check(const Attention& a, const Pages& pages) {
    if (a.rows < 0 || a.sequences < 0 || a.width < 0 || a.rows > EMPTY || a.sequences > EMPTY || a.width > EMPTY)
        refuse("impossible shape of rows or block tables");
    if (a.heads < 1 || a.heads > 1 << 16 || a.heads % pages.kv_heads != 0)
        refuse("query heads are not a multiple of the key-value heads");
    if (a.window < 0) refuse("a window is at least 1");
    if (a.width * pages.block > EMPTY) refuse("a block table reaches past 2^31 slots");
    if (a.tree != nullptr && a.key_positions != nullptr) refuse("a tree mask wants positions implied by the slots");
    if (a.row_starts[0] != 0 || a.row_starts[a.sequences] != a.rows) refuse("row_starts do not cover the rows");
    if ((pages.recent_keys != nullptr) != (a.tails != nullptr)) refuse("recent blocks want to be named, each sequence's");
    std::int64_t branches = 0;
    for (std::int64_t b = 0; b < a.sequences; ++b) {
        const std::int64_t own = std::int64_t{a.row_starts[b + 1]} - a.row_starts[b], length = a.lengths[b];
        if (own < 0) refuse("row_starts decrease");
        branches += own * own;
        if (a.tails != nullptr && (a.tails[b] < 0 || a.tails[b] >= pages.tails)) refuse("a recent block does not exist");
        if (length < own) refuse("a sequence has more rows than filled slots");
        if (length > a.width * pages.block) refuse("a length lies beyond its block table");
        for (std::int64_t i = 0; i * pages.block < length; ++i) {
            const std::int64_t block = a.tables[b * a.width + i];
            if (block < 0 || block >= pages.blocks) refuse("a block table names a block that does not exist");
        }
    }
    if (a.dense_until != nullptr) {
        if (pages.signs == nullptr) refuse("rows choose by one-bit keys, and there are none");
        if (a.mass != nullptr || a.tree != nullptr || a.key_positions != nullptr || a.window != 0)
            refuse("rows that choose keys have no mass, tree, positions of keys or window");
        for (std::int64_t b = 0; b < a.sequences; ++b)
            for (std::int64_t n = a.row_starts[b]; n < a.row_starts[b + 1]; ++n)
                if (a.positions[n] != a.lengths[b] - (a.row_starts[b + 1] - n) || a.positions[n] / 16 >= pages.signs->runs)
                    refuse("rows that choose keys are the last slots of their sequences, within the tables of angles");
    }
    if (a.tree != nullptr && a.tree_size != branches)
        refuse("tree masks are not [T, T] for every sequence's T rows");
    for (std::int64_t n = 0; n < a.rows; ++n)
        if (a.positions[n] < 0 || a.positions[n] == EMPTY) refuse("a position lies outside 0 .. 2^31 - 2");
}

#include "attention_choice.h"

// The tiles of a call, without buffers, sequence by sequence and head by head.
std::vector<Tile> tiles_of(const Attention& a, const Pages& pages, const Chosen& chosen) {
    std::vector<Tile> tiles;
    std::size_t next = 0;  // of `chosen`
    const std::uint8_t* tree = a.tree;
    for (std::int64_t b = 0; b < a.sequences; ++b) {
        Tile tile{};
        tile.sequence = b;
        tile.first_row = a.row_starts[b];
        tile.own_rows = a.row_starts[b + 1] - tile.first_row;
        tile.heads_each = a.heads / pages.kv_heads;
        tile.tree = tree;
        tile.part_at = -1;
        if (tree != nullptr) tree += tile.own_rows * tile.own_rows;
        const std::int64_t pairs = dense_rows(a, pages, b) * tile.heads_each;
        for (tile.head = 0; tile.head < pages.kv_heads; ++tile.head) {
            for (tile.first_pair = 0; tile.first_pair < pairs; tile.first_pair += TILE) {
                tile.rows = static_cast<int>(std::min<std::int64_t>(TILE, pairs - tile.first_pair));
                const std::int64_t first = tile.first_row + tile.first_pair / tile.heads_each;
                const std::int64_t last = tile.first_row + (tile.first_pair + tile.rows - 1) / tile.heads_each;
                const auto [low, high] = std::minmax_element(a.positions + first, a.positions + last + 1);
                tile.oldest = oldest_seen(*low, a.window);
                tile.newest = *high;
                tile.last_oldest = oldest_seen(*high, a.window);
                tile.first_newest = *low;
                const bool implied = a.key_positions == nullptr;
                const std::int64_t length = a.lengths[b];
                const bool in_line = implied && tree == nullptr;
                const std::int64_t end = in_line ? std::min<std::int64_t>(length, std::int64_t{*high} + 1) : length;
                tile.to = (end + SPLIT - 1) / SPLIT;
                tile.from = std::min<std::int64_t>(tile.to, implied ? tile.oldest / SPLIT : 0);
                tiles.push_back(tile);
            }
        }
        for (; next < chosen.scans.size() && chosen.scans[next].sequence == b; ++next) {
            const Scan& scan = chosen.scans[next];
            tile.head = scan.head;
            tile.chosen = chosen.lists.data() + scan.at;
            tile.chosen_runs = scan.budget;
            tile.oldest = tile.last_oldest = tile.from = 0;
            tile.newest = tile.first_newest = static_cast<std::int32_t>(scan.length - 1);
            tile.to = (scan.budget + RUNS - 1) / RUNS;
            for (std::int64_t at = 0; at < tile.heads_each; at += TILE) {
                tile.first_pair = (scan.row - tile.first_row) * tile.heads_each + at;
                tile.rows = static_cast<int>(std::min<std::int64_t>(TILE, tile.heads_each - at));
                tiles.push_back(tile);
            }
        }
    }
    return tiles;
}

// A thread's buffers, carved from one piece of memory.
class Bench {
   public:
    Bench(const Sizes& sizes, KvLayout layout)
        : sizes_(sizes),
          integers_(layout == KvLayout::bit_planes || layout == KvLayout::int8),
          bytes_(static_cast<std::size_t>(TILE) *
                     (4 * STRIDE + 2 * BYTE_STRIDE + 4 * 3 * static_cast<std::size_t>(sizes.padded) + 4 * 4 + 4 * 4) +
                 4 * 16 * 4 * static_cast<std::size_t>(sizes.padded) + 64 * 16 + (sizes.raw_key == 0 ? 0 : expanded())) {}

    std::size_t bytes() const { return (bytes_ + 4095) / 4096 * 4096; }

    void lay(Tile& tile, unsigned char* at) const {
        const auto take = [&at](std::size_t bytes) {
            unsigned char* found = at;
            at += (bytes + 63) / 64 * 64;
            return found;
        };
        const std::size_t row = sizeof(float) * TILE, columns = static_cast<std::size_t>(sizes_.padded);
        tile.q = take(row * columns);
        tile.q_stride = integers_ ? sizes_.padded : sizes_.head_dim;
        tile.part = reinterpret_cast<float*>(take(row * columns));
        tile.out = reinterpret_cast<float*>(take(row * columns));
        tile.wide = reinterpret_cast<float*>(take(4 * 16 * sizeof(float) * columns));
        tile.scores = reinterpret_cast<float*>(take(row * STRIDE));
        tile.weights = reinterpret_cast<std::int8_t*>(take(TILE * 2 * BYTE_STRIDE));
        for (float** each : {&tile.q_scale, &tile.top, &tile.total, &tile.weight_scale})
            *each = reinterpret_cast<float*>(take(row));
        for (std::int32_t** each : {&tile.q_bias, &tile.weight_bias})
            *each = reinterpret_cast<std::int32_t*>(take(2 * row));
        if (sizes_.raw_key == 0) return;
        tile.expanded_scales = reinterpret_cast<float*>(take(2 * SPLIT * sizeof(float)));
        tile.expanded = take(SPLIT / 16 * runs());
    }

   private:
    std::size_t runs() const {
        return static_cast<std::size_t>(sizes_.key_run + sizes_.value_run) * (integers_ ? 1 : sizeof(float));
    }
    std::size_t expanded() const { return SPLIT / 16 * runs() + 2 * SPLIT * sizeof(float) + 2 * 64; }

    Sizes sizes_;
    bool integers_;
    std::size_t bytes_;
};

template <class T>
void run(const Attention& a, const Pages& pages, const Sizes& sizes, Level level) {
    const auto attend = ATTAR_PICK(level, attend<T>);
    const auto add_mass = ATTAR_PICK(level, add_mass<T>);
    const auto begin = ATTAR_PICK(level, begin);
    const auto merge = ATTAR_PICK(level, merge);
    const auto finish = ATTAR_PICK(level, finish);

    const Chosen chosen = choose(a, pages, sizes, level);
    std::vector<Tile> tiles = tiles_of(a, pages, chosen);
    std::int64_t splits = 0, work = 0;
    for (const Tile& tile : tiles) {
        splits += tile.to - tile.from;
        work += (tile.to - tile.from) * SPLIT * tile.rows * sizes.padded * 2;
    }
    const int threads = work < SERIAL_BELOW ? 1 : static_cast<int>(attar::threads());
    const std::int64_t count = static_cast<std::int64_t>(tiles.size());

    // Pieces of work: whole tiles, or, where these are too few, some splits of one.
    struct Piece {
        std::int64_t tile, from, to;
    };
    std::vector<Piece> pieces;
    const bool cut = threads > 1 && count < 4 * threads;
    const std::int64_t step = cut ? std::max<std::int64_t>(1, splits / (8 * threads)) : splits;
    const std::int64_t record = 2 + sizes.padded;
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        Tile& tile = tiles[i];
        if (tile.to - tile.from <= step) {
            pieces.push_back({i, tile.from, tile.to});
            continue;
        }
        tile.part_at = kept;
        kept += (tile.to - tile.from) * tile.rows * record;
        for (std::int64_t from = tile.from; from < tile.to; from += step)
            pieces.push_back({i, from, std::min(tile.to, from + step)});
    }

    static thread_local Buffer bench_memory, part_memory, end_memory;
    const Bench bench(sizes, pages.layout);
    float* const parts = reinterpret_cast<float*>(part_memory.at_least(sizeof(float) * static_cast<std::size_t>(kept)));
    float* ends = nullptr;
    if (a.mass != nullptr)
        ends = reinterpret_cast<float*>(
            end_memory.at_least(sizeof(float) * 2 * static_cast<std::size_t>(a.rows * a.heads)));
    const auto laid = [&](std::int64_t i) {
        Tile tile = tiles[i];
        bench.lay(tile, bench_memory.at_least(bench.bytes()));
        return tile;
    };

    const std::int64_t many = static_cast<std::int64_t>(pieces.size());
    for_each(many, threads > 1, [&](std::int64_t item) {
        const Piece& piece = pieces[many - 1 - item];  // the last see the most slots: they are begun first
        Tile tile = laid(piece.tile);
        if (tile.part_at < 0) {
            begin(sizes, tile);
            attend(a, pages, sizes, tile, piece.from, piece.to, nullptr);
            finish(a, pages, sizes, tile, ends);
        } else {
            attend(a, pages, sizes, tile, piece.from, piece.to,
                   parts + tile.part_at + (piece.from - tile.from) * tile.rows * record);
        }
    });
    if (kept > 0) {
        for_each(count, threads > 1, [&](std::int64_t i) {
            if (tiles[i].part_at < 0) return;
            Tile tile = laid(i);
            begin(sizes, tile);
            merge(sizes, tile, tile.to - tile.from, parts + tile.part_at);
            finish(a, pages, sizes, tile, ends);
        });
    }
    if (a.mass == nullptr) return;

    // The weights again, now that their sums are known. A piece is the slots of one split of one head, whose tiles
    // stand in line: each slot's mass is added up in the order of the rows.
    const std::int64_t reach = a.width * pages.block;
    std::fill(a.mass, a.mass + a.sequences * pages.kv_heads * reach, 0.0f);
    std::vector<std::pair<std::int64_t, std::int64_t>> heads;  // tiles from .. to
    for (std::int64_t i = 0; i < count; ++i) {
        if (tiles[i].first_pair == 0) heads.push_back({i, i});
        heads.back().second = i + 1;
    }
    const std::int64_t most = (reach + SPLIT - 1) / SPLIT, total = static_cast<std::int64_t>(heads.size()) * most;
    for_each(total, threads > 1, [&](std::int64_t i) {
        const auto [from, to] = heads[i / most];
        const std::int64_t split = i % most;
        float* mass = a.mass + (tiles[from].sequence * pages.kv_heads + tiles[from].head) * reach;
        for (std::int64_t t = from; t < to; ++t) {
            Tile tile = laid(t);
            if (split >= tile.from && split < tile.to) add_mass(a, pages, sizes, tile, split, ends, mass);
        }
    });
}

template <class T>
void write(const Write& w, const Pages& pages, const Sizes& sizes, Level level) {
    const auto write_row = ATTAR_PICK(level, write_row<T>);
    const std::int64_t elements = w.rows * (w.heads + 2 * sizes.kv_heads) * sizes.head_dim;
    for_rows(w.rows, w.rows > 1 && elements >= SERIAL_WRITES, [&](std::int64_t row) {
        alignas(64) float x[MOST_COLUMNS];
        alignas(64) std::int8_t codes[MOST_COLUMNS];
        write_row(w, pages, sizes, row, x, codes);
    });
}

// Rows of one sequence that one thread writes at a time: those of a run, for its slots share bytes, or, where blocks are
// unfinished, all that there are, for the last of them may finish it.
struct RowsOf {
    std::int64_t from, to, owner;  // the owner is a run of slots, or an unfinished block
};

std::vector<RowsOf> pieces_of(const Write& w, bool recent) {
    std::vector<RowsOf> pieces;
    if (recent) {
        for (std::int64_t b = 0; b < w.sequences; ++b)
            if (w.row_starts[b] < w.row_starts[b + 1])
                pieces.push_back({w.row_starts[b], w.row_starts[b + 1], w.tails[b]});
        return pieces;
    }
    for (std::int64_t row = 0; row < w.rows; ++row) {
        const std::int64_t run = w.slots[row] / 16;
        if (pieces.empty() || pieces.back().owner != run || row - pieces.back().from == 16)
            pieces.push_back({row, row, run});
        pieces.back().to = row + 1;
    }
    return pieces;
}

void write_pieces(const Write& w, const Pages& pages, const Sizes& sizes, Level level) {
    const auto write_rows = ATTAR_PICK(level, write_rows);
    const auto finish_block = ATTAR_PICK(level, finish_block);
    const bool recent = pages.recent_keys != nullptr;
    const std::vector<RowsOf> pieces = pieces_of(w, recent);
    std::vector<std::int64_t> owners;
    for (const RowsOf& each : pieces) owners.push_back(each.owner);
    std::sort(owners.begin(), owners.end());
    // An owner that comes twice, as in a call whose rows are out of order, has one thread a head write everything.
    const bool apart = std::adjacent_find(owners.begin(), owners.end()) == owners.end();
    const std::int64_t many = static_cast<std::int64_t>(pieces.size()), lots = apart ? many : 1;
    const std::int64_t elements = w.rows * (w.heads + 2 * sizes.kv_heads) * sizes.head_dim;
    for_each(lots * sizes.kv_heads, elements >= SERIAL_WRITES / 16, [&](std::int64_t i) {
        alignas(64) float x[16 * MOST_COLUMNS];
        alignas(64) float y[16 * MOST_COLUMNS];
        const std::int64_t g = i % sizes.kv_heads, lot = i / sizes.kv_heads;
        for (std::int64_t p = apart ? lot : 0; p < (apart ? lot + 1 : many); ++p) {
            const RowsOf& piece = pieces[p];
            bool full = false;
            for (std::int64_t from = piece.from; from < piece.to; from += 16) {
                const std::int64_t to = std::min(piece.to, from + 16);
                write_rows(w, pages, sizes, from, to, piece.owner, g, x, y);
                for (std::int64_t row = from; recent && row < to; ++row)
                    full = full || w.slots[row] % sizes.block == sizes.block - 1;
            }
            if (full) finish_block(pages, sizes, w.slots[piece.from] / sizes.block, piece.owner, g, y);
        }
    });
}

}  // namespace

void attention(const Attention& what, const Pages& pages, Level level) {
    const Sizes sizes = checked_sizes(pages);
    check(what, pages);
    if (pages.layout == KvLayout::float32) return run<float>(what, pages, sizes, level);
    if (pages.layout == KvLayout::bfloat16) return run<Bfloat16>(what, pages, sizes, level);
    if (pages.layout == KvLayout::bit_planes || pages.layout == KvLayout::int8)
        return run<std::int8_t>(what, pages, sizes, level);
    run<float>(what, pages, sizes, level);  // which others become
}

void write_kv(const Write& what, const Pages& pages, Level level) {
    const Sizes sizes = checked_sizes(pages);
    if (what.rows < 0 || what.rows > EMPTY || what.heads < 1 || what.heads > 1 << 16)
        refuse("impossible shape of rows");
    if (what.q_stride < what.heads * sizes.head_dim || what.k_stride < sizes.kv_heads * sizes.head_dim ||
        what.v_stride < sizes.kv_heads * sizes.head_dim)
        refuse("rows of heads overlap");
    if ((what.q_norm == nullptr) != (what.k_norm == nullptr)) refuse("queries and keys are normed both or neither");
    if ((what.cos == nullptr) != (what.sin == nullptr) || (what.cos == nullptr) != (what.angle == nullptr))
        refuse("a rotation has cos, sin and angles");
    if (what.cos != nullptr && (what.turned < 2 || what.turned % 2 != 0 || what.turned > sizes.head_dim))
        refuse("an even number of columns turns, no more than a head has");
    if ((pages.recent_keys != nullptr) != (what.tails != nullptr))
        refuse("recent blocks want to be named, each sequence's");
    if (what.tails != nullptr) {
        if (what.row_starts[0] != 0 || what.row_starts[what.sequences] != what.rows)
            refuse("row_starts do not cover the rows");
        for (std::int64_t b = 0; b < what.sequences; ++b) {
            if (what.row_starts[b + 1] < what.row_starts[b]) refuse("row_starts decrease");
            if (what.tails[b] < 0 || what.tails[b] >= pages.tails) refuse("a recent block does not exist");
            for (std::int64_t n = what.row_starts[b] + 1; n < what.row_starts[b + 1]; ++n)
                if (what.slots[n] / pages.block != what.slots[n - 1] / pages.block)
                    refuse("with recent blocks, a call's rows of a sequence are of one block");
        }
    }
    if ((pages.layout == KvLayout::bit_planes || pages.layout == KvLayout::kivi || pages.layout == KvLayout::kvquant) &&
        what.heads % pages.kv_heads != 0)
        refuse("query heads are not a multiple of the key-value heads");
    for (std::int64_t n = 0; n < what.rows; ++n) {
        if (what.slots[n] < 0 || what.slots[n] >= pages.blocks * pages.block) refuse("a slot lies outside the pages");
        if (what.cos != nullptr && (what.angle[n] < 0 || what.angle[n] >= what.angles))
            refuse("a position lies outside the table of angles");
    }
    if (pages.layout == KvLayout::float32) return write<float>(what, pages, sizes, level);
    if (pages.layout == KvLayout::bfloat16) return write<Bfloat16>(what, pages, sizes, level);
    if (pages.layout == KvLayout::fp8) return write<E4m3>(what, pages, sizes, level);
    if (pages.layout == KvLayout::kvquant) return write<Nuq>(what, pages, sizes, level);
    if (pages.layout == KvLayout::bit_planes || pages.layout == KvLayout::kivi)
        return write_pieces(what, pages, sizes, level);
    write<std::int8_t>(what, pages, sizes, level);
}

}  // namespace attar
