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

#include "attention_tables.h"

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

#include "attention_checks.h"
#include "attention_choice.h"

// The first rows of sequence b, which are of the middle of a prompt and read little.
std::int64_t few_rows(const Attention& a, std::int64_t b) {
    if (a.prompts.until == nullptr) return 0;
    const std::int64_t own = std::int64_t{a.row_starts[b + 1]} - a.row_starts[b];
    return std::clamp<std::int64_t>(a.prompts.until[b] - (a.lengths[b] - own), 0, own);
}

// Tiles of the rows from .. to of a sequence and a key-value head; those from the first on read little, if any do.
void add_tiles(const Attention& a, Tile tile, std::int64_t from, std::int64_t to, std::vector<Tile>& tiles) {
    const bool few = from == 0 && a.prompts.until != nullptr && to == few_rows(a, tile.sequence);
    tile.window = few && a.prompts.band != 0 ? a.prompts.band : a.window;
    tile.sinks = few && a.prompts.band != 0 ? a.prompts.sinks : 0;
    tile.skips = few && a.prompts.band == 0;
    const std::int64_t pairs = to * tile.heads_each;
    for (tile.first_pair = from * tile.heads_each; tile.first_pair < pairs; tile.first_pair += TILE) {
        tile.rows = static_cast<int>(std::min<std::int64_t>(TILE, pairs - tile.first_pair));
        const std::int64_t first = tile.first_row + tile.first_pair / tile.heads_each;
        const std::int64_t last = tile.first_row + (tile.first_pair + tile.rows - 1) / tile.heads_each;
        const auto [low, high] = std::minmax_element(a.positions + first, a.positions + last + 1);
        tile.oldest = oldest_seen(*low, tile.window);
        tile.newest = *high;
        tile.last_oldest = oldest_seen(*high, tile.window);
        tile.first_newest = *low;
        const bool implied = a.key_positions == nullptr;
        const std::int64_t length = a.lengths[tile.sequence];
        const bool in_line = implied && tile.tree == nullptr;
        const std::int64_t end = in_line ? std::min<std::int64_t>(length, std::int64_t{*high} + 1) : length;
        tile.to = (end + SPLIT - 1) / SPLIT;
        tile.from = std::min<std::int64_t>(tile.to, implied && tile.sinks == 0 ? tile.oldest / SPLIT : 0);
        tiles.push_back(tile);
    }
}

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
        const std::int64_t rows = dense_rows(a, pages, b), few = std::min(rows, few_rows(a, b));
        for (tile.head = 0; tile.head < pages.kv_heads; ++tile.head) {
            add_tiles(a, tile, 0, few, tiles);
            add_tiles(a, tile, few, rows, tiles);
        }
        tile.window = tile.sinks = 0;
        tile.skips = false;
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
        if (tile.to - tile.from <= step || tile.skips) {  // what is skipped depends on the splits before
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

#include "attention_write.h"

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
