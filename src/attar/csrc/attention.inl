// Kernels of attention.cpp. All are about a tile: up to TILE pairs (query, head) of one sequence that read the same
// key-value head, against the slots of one split.

#include "tiles.inl"

#if ATTAR_LEVEL >= ATTAR_AVX512
constexpr int ABREAST = 4;  // vectors that a micro-kernel holds for each of its rows, of which it has ROWS at most
#else
constexpr int ABREAST = 1;
#endif

// ---- comparisons: lanes of all ones or all zeros

ATTAR_INLINE Ints at_most(Ints a, Ints b) {
    ATTAR_EACH a.piece[p] = a.piece[p] <= b.piece[p];
    return a;
}
ATTAR_INLINE Ints greater(Floats a, Floats b) {
    Ints out;
    ATTAR_EACH out.piece[p] = a.piece[p] > b.piece[p];
    return out;
}
ATTAR_INLINE Ints is_number(Floats a) {
    Ints out;
    ATTAR_EACH out.piece[p] = a.piece[p] == a.piece[p];
    return out;
}
ATTAR_INLINE Ints is_positive(Floats a) {
    Ints out;
    ATTAR_EACH out.piece[p] = a.piece[p] > FloatPiece{};
    return out;
}
ATTAR_INLINE Floats select(Ints mask, Floats yes, Floats no) {
    ATTAR_EACH yes.piece[p] =
        (FloatPiece)((mask.piece[p] & (IntPiece)yes.piece[p]) | (~mask.piece[p] & (IntPiece)no.piece[p]));
    return yes;
}
ATTAR_INLINE std::int32_t sum(Ints a) {
#if ATTAR_LEVEL >= ATTAR_AVX512
    return _mm512_reduce_add_epi32((__m512i)a.piece[0]);
#else
    std::uint32_t total = 0;  // modulo 2^32
    ATTAR_EACH for (int i = 0; i < WIDTH; ++i) total += static_cast<std::uint32_t>(a.piece[p][i]);
    return static_cast<std::int32_t>(total);
#endif
}
ATTAR_INLINE bool any(Ints mask) {
#if ATTAR_LEVEL >= ATTAR_AVX512
    return _mm512_test_epi32_mask((__m512i)mask.piece[0], (__m512i)mask.piece[0]) != 0;
#else
    return sum(mask) != 0;  // of lanes 0 or -1
#endif
}
ATTAR_INLINE void store_as_bytes(std::int8_t* to, Ints a) {  // the low byte of each lane
#if ATTAR_LEVEL >= ATTAR_AVX512
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)a.piece[0]));
#else
    typedef std::int8_t Bytes __attribute__((vector_size(WIDTH)));
    ATTAR_EACH {
        const Bytes low = __builtin_convertvector(a.piece[p], Bytes);
        std::memcpy(to + p * WIDTH, &low, sizeof low);
    }
#endif
}
ATTAR_INLINE Floats tanh(Floats x) {
    const Floats bounded = max(all(-15.0f), all(0.0f) - max(all(-15.0f), x));  // -x within -15 .. 15
    const Floats y = all(2.0f) / (exp(bounded + bounded) + all(1.0f)) - all(1.0f);
    return select(is_number(x), y, x);
}
ATTAR_INLINE Ints unsigned_codes(const std::int8_t* from) {  // 64 codes plus 128, as dot4_wide wants them
    Ints out = load_bytes(from);
    ATTAR_EACH out.piece[p] ^= IntPiece{} + static_cast<std::int32_t>(0x80808080u);
    return out;
}

// Numbers in two bytes: x = scale * (128 high + low), -127 <= high <= 127, -64 <= low < 64. `count` is a multiple of
// 16. A dot product with unsigned codes exceeds that with codes by 128 times the sum: hence the biases. Finite x only.
ATTAR_INLINE void split_in_bytes(const float* x, int count, float inverse, std::int8_t* high, std::int8_t* low,
                                 std::int32_t* bias_high, std::int32_t* bias_low) {
    Ints high_sum = all(0), low_sum = all(0);
    const Floats rounder = all(ROUNDER);
    for (int i = 0; i < count; i += 16) {
        const Ints code = bits_of(load(x + i) * all(inverse) + rounder) - bits_of(rounder);
        const Ints h = shift_right_signed(code + all(64), 7), l = code - shift_left(h, 7);
        store_as_bytes(high + i, h);
        store_as_bytes(low + i, l);
        high_sum = high_sum + h;
        low_sum = low_sum + l;
    }
    *bias_high = sum(all(0) - shift_left(high_sum, 7));
    *bias_low = sum(all(0) - shift_left(low_sum, 7));
}

// Blocks lie scattered, where the processor's own prefetching fails at every one of them, and few rows wait for memory
// more than they compute. So such a tile always has lines on their way into the second cache: while it reads keys,
// those of the values of every other run, the rest while it is at the softmax, and the keys of the next split while it
// reads values. Tiles of AMX are done with keys and values so soon that the softmax asks for more of both.
ATTAR_INLINE void ask_for(const void* soon, std::int64_t bytes) {
    __builtin_prefetch(static_cast<const char*>(soon) + bytes, 0, 2);
}

// ---- the micro-kernels: R rows by C vectors, in registers; each output is one chain in the order of the index

// scores[r][16 c ..] = scale[r] * sum over d of q[r][d] * key[d]
template <int R, int C, class T>
static void score(const float* q, std::int64_t stride, const std::int32_t*, const float* scale, const T* const* keys,
                  std::int64_t size, float* scores, const T* soon) {
    Floats acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = all(0.0f);
    for (std::int64_t d = 0; d < size; ++d) {
        Floats key[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) key[c] = load_as_floats(keys[c] + 16 * d);
        if (C == 1) ask_for(soon, 16 * d * static_cast<std::int64_t>(sizeof(T)));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Floats x = all(q[r * stride + d]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) acc[r][c] = fma(x, key[c], acc[r][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) store(scores + r * STRIDE + 16 * c, acc[r][c] * all(scale[r]));
}

// out[r][16 c ..] += sum over slots of weights[r][slot] * value[slot]
template <int R, int C, class T>
static void mix(const float* weights, const std::int32_t*, const float*, const T* const* values, int runs, int last,
                std::int64_t columns, float* out, std::int64_t stride, const T* const* soon) {
    Floats acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * stride + 16 * c);
    for (int run = 0; run < runs; ++run) {
        const T* from = values[run];
        const int slots = run + 1 < runs ? 16 : last;
        for (int i = 0; i < slots; ++i, from += columns) {
            Floats value[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) value[c] = load_as_floats(from + 16 * c);
            if (soon != nullptr)
                for (int c = 0; c < C; ++c)
                    ask_for(soon[run], (i * columns + 16 * c) * static_cast<std::int64_t>(sizeof(T)));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Floats x = all(weights[r * STRIDE + 16 * run + i]);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) acc[r][c] = fma(x, value[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) store(out + r * stride + 16 * c, acc[r][c]);
}

ATTAR_INLINE std::int32_t four_bytes(const std::int8_t* from) {
    std::int32_t out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

// As above with q in two bytes, high and low in alternate rows, and biases [2 R].
template <int R, int C>
static void score(const std::int8_t* q, std::int64_t stride, const std::int32_t* bias, const float* scale,
                  const std::int8_t* const* keys, std::int64_t size, float* scores, const std::int8_t* soon) {
    Ints acc[2 * R][C];
#pragma GCC unroll 16
    for (int r = 0; r < 2 * R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = all(bias[r]);
    for (std::int64_t d = 0; d < size; d += 4) {
        Ints key[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) key[c] = unsigned_codes(keys[c] + 16 * d);
        if (C == 1) ask_for(soon, 16 * d);
#pragma GCC unroll 16
        for (int r = 0; r < 2 * R; ++r) {
            const std::int32_t x = four_bytes(q + r * stride + d);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) acc[r][c] = dot4_wide(acc[r][c], key[c], x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
            store(scores + r * STRIDE + 16 * c,
                  to_floats(acc[2 * r][c] * all(128) + acc[2 * r + 1][c]) * all(scale[r]));
}

template <int R, int C>
static void mix(const std::int8_t* weights, const std::int32_t* bias, const float* scale,
                const std::int8_t* const* values, int runs, int, std::int64_t columns, float* out,
                std::int64_t stride, const std::int8_t* const* soon) {
    Ints acc[2 * R][C];
#pragma GCC unroll 16
    for (int r = 0; r < 2 * R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = all(bias[r]);
    for (int run = 0; run < runs; ++run) {
        const std::int8_t* from = values[run];
        for (int i = 0; i < 16; i += 4, from += 4 * columns) {
            Ints value[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) value[c] = unsigned_codes(from + 64 * c);
            if (soon != nullptr)
                for (int c = 0; c < C; ++c) ask_for(soon[run], i * columns + 64 * c);
#pragma GCC unroll 16
            for (int r = 0; r < 2 * R; ++r) {
                const std::int32_t x = four_bytes(weights + r * BYTE_STRIDE + 16 * run + i);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) acc[r][c] = dot4_wide(acc[r][c], value[c], x);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
            store(out + r * stride + 16 * c,
                  to_floats(acc[2 * r][c] * all(128) + acc[2 * r + 1][c]) * all(scale[r]));
}

// ---- a tile against a split

// What the two element types differ in: float pages take rows of floats; int8 pages take rows of two bytes.
template <class T>
struct Rows {
    typedef float Element;
    static constexpr int MOST = 6, PARTS = 1;
};
template <>
struct Rows<std::int8_t> {
    typedef std::int8_t Element;
    static constexpr int MOST = 3, PARTS = 2;
};

template <class T>
constexpr bool TILED = ATTAR_LEVEL == ATTAR_AMX && Rows<T>::PARTS == 2;  // where heads end with a tile

// The runs of 16 slots of a split that some row of the tile may see.
template <class T>
struct Seen {
    int runs = 0, last = 16;  // `last`: slots of the last run that are filled
    std::int64_t index[SPLIT / 16];
    const T *keys[SPLIT / 16], *values[SPLIT / 16];
    const float *key_scales[SPLIT / 16], *value_scales[SPLIT / 16];
    bool whole[SPLIT / 16];  // whether every row sees every slot of the run
    // Of runs that are expanded: as they lie, and the run's number among all, or that of a recent block's slot.
    const std::uint8_t *raw_keys[SPLIT / 16], *raw_values[SPLIT / 16];
    std::int64_t at[SPLIT / 16];
    bool recent[SPLIT / 16];
    std::int32_t positions[SPLIT];  // INT32_MAX where a slot is empty
};

template <class T, int R>
static void score_rows(const Tile& tile, const T* const* keys, std::int64_t size, int first, int from, int to) {
    typedef Rows<T> Kind;
    const auto* q = static_cast<const typename Kind::Element*>(tile.q) + first * Kind::PARTS * tile.q_stride;
    const std::int32_t* bias = tile.q_bias + first * Kind::PARTS;
    float* out = tile.scores + first * STRIDE;
    int i = from;
    for (; i + ABREAST <= to; i += ABREAST)
        score<R, ABREAST>(q, tile.q_stride, bias, tile.q_scale + first, keys + (i - from), size, out + 16 * i,
                          keys[i - from]);
    for (; i < to; ++i)
        score<R, 1>(q, tile.q_stride, bias, tile.q_scale + first, keys + (i - from), size, out + 16 * i,
                    keys[i - from]);
}

template <class T, int R>
static void mix_rows(const Tile& tile, const T* const* runs, const T* const* next, int last, std::int64_t padded,
                     int first, int from, int to) {
    typedef Rows<T> Kind;
    const std::int32_t* bias = tile.weight_bias + first * Kind::PARTS;
    const float* scale = tile.weight_scale + first;
    const typename Kind::Element* weights;
    if constexpr (Kind::PARTS == 2)
        weights = tile.weights + first * 2 * BYTE_STRIDE;
    else
        weights = tile.scores + first * STRIDE;
    weights += 16 * from;
    float* out = tile.part + first * padded;
    const T *values[SPLIT / 16], *soon[SPLIT / 16];
    std::int64_t c = 0;
    const auto shift = [&] {
        for (int i = 0; i < to - from; ++i) {
            values[i] = runs[i] + c * (Kind::PARTS == 2 ? 4 : 1);
            if (next != nullptr) soon[i] = next[i] + c * (Kind::PARTS == 2 ? 4 : 1);
        }
        return next == nullptr ? nullptr : soon;
    };
    for (; c + 16 * ABREAST <= padded; c += 16 * ABREAST)
        mix<R, ABREAST>(weights, bias, scale, values, to - from, last, padded, out + c, padded, shift());
    for (; c < padded; c += 16)
        mix<R, 1>(weights, bias, scale, values, to - from, last, padded, out + c, padded, shift());
}

// Makes call(R), R a constant, for groups of rows of nearly equal size, MOST at most; `first` is a group's first row.
#define ATTAR_FOR_ROW_GROUPS(call)                                             \
    for (int first = 0, groups = (tile.rows + Rows<T>::MOST - 1) / Rows<T>::MOST; groups > 0; --groups) { \
        const int count = (tile.rows - first + groups - 1) / groups;           \
        if (count == 1) call(1);                                               \
        if (count == 2) call(2);                                               \
        if (count == 3) call(3);                                               \
        if constexpr (Rows<T>::MOST == 6) {                                    \
            if (count == 4) call(4);                                           \
            if (count == 5) call(5);                                           \
            if (count == 6) call(6);                                           \
        }                                                                      \
        first += count;                                                        \
    }

// Runs from .. to, at `keys`, against all rows of the tile.
template <class T>
static void score_runs(const Tile& tile, const T* const* keys, std::int64_t size, int from, int to) {
#define ATTAR_CALL(R) score_rows<T, R>(tile, keys, size, first, from, to)
    ATTAR_FOR_ROW_GROUPS(ATTAR_CALL)
#undef ATTAR_CALL
}
template <class T>
static void mix_runs(const Tile& tile, const T* const* values, const T* const* next, int last, std::int64_t padded,
                     int from, int to) {
#define ATTAR_CALL(R) mix_rows<T, R>(tile, values, next, last, padded, first, from, to)
    ATTAR_FOR_ROW_GROUPS(ATTAR_CALL)
#undef ATTAR_CALL
}

// Four runs at most as floats, for many rows: each would convert them again.
static const float* const* widen(const Bfloat16* const* runs, int count, std::int64_t size, const Tile& tile,
                                 const float** wide) {
    for (int i = 0; i < count; ++i) {
        float* to = tile.wide + i * size;
        for (std::int64_t at = 0; at < size; at += 16) store(to + at, load_as_floats(runs[i] + at));
        wide[i] = to;
    }
    return wide;
}

template <class T>
ATTAR_INLINE const T* run_of(const void* pages, std::int64_t block, std::int64_t head, std::int64_t run,
                             const Sizes& sizes, std::int64_t run_size) {
    return static_cast<const T*>(pages) + ((block * sizes.kv_heads + head) * (sizes.block / 16) + run) * run_size;
}

// Which runs of split `split` the tile may see, and where they lie.
template <class T>
static void look(const Attention& what, const Pages& pages, const Sizes& sizes, const Tile& tile, std::int64_t split,
                 Seen<T>& seen) {
    seen.runs = 0;
    seen.last = 16;
    const std::int64_t length = what.lengths[tile.sequence], own = length - tile.own_rows;
    const bool few = tile.chosen != nullptr;
    const std::int64_t end = few || length < (split + 1) * SPLIT ? length : (split + 1) * SPLIT;
    const std::int64_t runs = few ? tile.chosen_runs : (end + 15) / 16;
    const std::int64_t to = runs < (split + 1) * RUNS ? runs : (split + 1) * RUNS;
    const std::int32_t* table = what.tables + tile.sequence * what.width;
    const bool implied = what.key_positions == nullptr;
    const Ints lanes = load_bytes(LANES);
    for (std::int64_t number = split * RUNS; number < to; ++number) {
        const std::int64_t slot = 16 * (few ? tile.chosen[number] : number);
        const std::int64_t block = table[slot / sizes.block], run = slot % sizes.block / 16;
        std::int32_t* positions = seen.positions + 16 * seen.runs;
        const int filled = end - slot < 16 ? static_cast<int>(end - slot) : 16;
        bool whole = false;
        if (implied && (what.tree == nullptr || slot + 16 <= own)) {
            if (slot > tile.newest || (slot + 15 < tile.oldest && slot >= tile.sinks)) continue;
            whole = filled == 16 && slot + 15 <= tile.first_newest &&
                    (slot >= tile.last_oldest || slot + 16 <= tile.sinks);
            if (!whole) {
                store_bytes(positions, lanes + all(static_cast<std::int32_t>(slot)));
                for (int i = filled; i < 16; ++i) positions[i] = EMPTY;
            }
        } else {
            const std::int32_t* given = implied ? nullptr : what.key_positions + block * sizes.block + 16 * run;
            for (int i = 0; i < 16; ++i) {
                std::int32_t at = EMPTY;
                if (i >= filled)
                    ;
                else if (!implied)
                    at = given[i] >= 0 ? given[i] : EMPTY;
                else  // the rows of a tree stand in line, while their positions branch
                    at = slot + i < own ? static_cast<std::int32_t>(slot + i)
                                        : what.positions[tile.first_row + (slot + i - own)];
                positions[i] = at;
            }
            const Ints at = load_bytes(positions);
            if (!any(at_most(at, all(tile.newest)) & at_most(all(tile.oldest), at))) continue;
        }
        const int i = seen.runs++;
        seen.last = filled;
        seen.index[i] = slot;
        seen.whole[i] = whole;
        if (sizes.raw_key != 0) {  // what is to be asked for: `expand` makes the rest of it
            seen.recent[i] = what.tails != nullptr && slot / sizes.block == (length - 1) / sizes.block;
            seen.at[i] = seen.recent[i] ? (what.tails[tile.sequence] * sizes.kv_heads + tile.head) * sizes.block +
                                              slot % sizes.block
                                        : (block * sizes.kv_heads + tile.head) * (sizes.block / 16) + run;
            seen.raw_keys[i] = run_of<std::uint8_t>(pages.keys, block, tile.head, run, sizes, sizes.raw_key);
            seen.raw_values[i] = run_of<std::uint8_t>(pages.values, block, tile.head, run, sizes, sizes.raw_value);
            continue;
        }
        seen.keys[i] = run_of<T>(pages.keys, block, tile.head, run, sizes, sizes.key_run);
        seen.values[i] = run_of<T>(pages.values, block, tile.head, run, sizes, sizes.value_run);
        if constexpr (Rows<T>::PARTS == 2) {
            seen.key_scales[i] = run_of<float>(pages.key_scales, block, tile.head, run, sizes, 16);
            seen.value_scales[i] = run_of<float>(pages.value_scales, block, tile.head, run, sizes, 16);
        }
    }
}

// The share of lines that one of a row's three loops asks for, where it asks for any: of the values, what was not asked
// for while keys were read, and, where tiles leave little time for reading, half of the next split's keys.
template <class T>
struct Share {
    const Seen<T> *seen = nullptr, *next = nullptr;
    std::int64_t from = 0, to = 0;  // bytes of a run

    ATTAR_LAMBDA void ask(int i) const {
        if (TILED<T> ? i % 4 != 1 : i % 2 == 0)
            for (std::int64_t at = from; at < to; at += 64) ask_for(seen->values[i], at);
        if (TILED<T> && i % 2 == 0 && from < to && i < next->runs)
            for (std::int64_t at = from; at < to; at += 64) ask_for(next->keys[i], at);
    }
};
template <class T>
ATTAR_INLINE Share<T> share(const Tile& tile, const Sizes& sizes, const Seen<T>& seen, const Seen<T>& next, int row,
                            int loop) {
    if (tile.rows > FEW || sizes.raw_key != 0) return {};  // `expand` asks for what it takes
    const std::int64_t lines = sizes.value_run * static_cast<std::int64_t>(sizeof(T)) / 64;
    const std::int64_t part = 3 * row + loop, parts = 3 * tile.rows;
    return {&seen, &next, lines * part / parts * 64, lines * (part + 1) / parts * 64};
}

// Scores [runs * 16] of one row, as they come from the micro-kernel, to what the softmax takes: HIDDEN where the row
// does not see the slot. Returns whether it sees any. `top` is the greatest score, `broken` NaN where one was not
// finite, or 0.
template <class T>
static bool hide(const Attention& what, const Tile& tile, const Seen<T>& seen, Share<T> share, int row, float* scores,
                 float* top, float* broken) {
    const std::int64_t query = tile.first_pair + row, t = query / tile.heads_each;
    const std::int32_t at = what.positions[tile.first_row + t];
    const Ints newest = all(at), oldest = all(oldest_seen(at, tile.window));
    const Ints sinks = all(static_cast<std::int32_t>(tile.sinks) - 1);
    const std::int64_t own = what.lengths[tile.sequence] - tile.own_rows;
    const std::uint8_t* branch = what.tree == nullptr ? nullptr : tile.tree + t * tile.own_rows;
    Floats most = all(HIDDEN), wrong = all(0.0f);
    bool sees = false;
    for (int i = 0; i < seen.runs; ++i) {
        share.ask(i);
        Floats x = load(scores + 16 * i);
        if constexpr (Rows<T>::PARTS == 2) x = x * load(seen.key_scales[i]);
        if (what.soft_cap != 0.0f) x = all(what.soft_cap) * tanh(x / all(what.soft_cap));
        if (seen.whole[i]) {
            sees = true;
        } else {
            const Ints positions = load_bytes(seen.positions + 16 * i);
            Ints visible = at_most(positions, newest) & (at_most(oldest, positions) | at_most(positions, sinks));
            if (branch != nullptr && seen.index[i] + 16 > own) {
                std::int32_t allowed[16];
                for (int lane = 0; lane < 16; ++lane) {
                    const std::int64_t of_own = seen.index[i] + lane - own;
                    allowed[lane] = of_own < 0 || (of_own < tile.own_rows && branch[of_own] != 0) ? -1 : 0;
                }
                visible = visible & load_bytes(allowed);
            }
            x = select(visible, x, all(HIDDEN));
            sees = sees || any(visible);
        }
        store(scores + 16 * i, x);
        most = max(x, most);
        wrong = fma(x, all(0.0f), wrong);
    }
    *top = largest(most);
    *broken = sum(wrong);
    return sees;
}

// Scores of one row to exp(score - top); returns their sum.
template <class T>
ATTAR_INLINE float exponentials(const Seen<T>& seen, Share<T> share, float* scores, float top) {
    Floats total = all(0.0f);
    for (int i = 0; i < seen.runs; ++i) {
        share.ask(i);
        const Floats x = exp(load(scores + 16 * i) - all(top));
        store(scores + 16 * i, x);
        total = total + x;
    }
    return sum(total);
}

// The value's scale goes into the weight, and the weights of a row into two bytes.
static void weights_to_bytes(const Tile& tile, const Seen<std::int8_t>& seen, Share<std::int8_t> share, int row,
                             float* weights) {
    Floats most = all(0.0f), broken = all(0.0f);
    for (int i = 0; i < seen.runs; ++i) {
        share.ask(i);
        const Floats x = load(weights + 16 * i);
        const Floats scaled = select(is_positive(x), x * load(seen.value_scales[i]), all(0.0f));
        store(weights + 16 * i, scaled);
        most = max(scaled, most);
        broken = fma(scaled, all(0.0f), broken);  // NaN where the scale of a value is
    }
    const float top = largest(most);
    const bool lost = top < TINY;
    std::int8_t* high = tile.weights + row * 2 * BYTE_STRIDE;
    std::int32_t* bias = tile.weight_bias + row * 2;
    split_in_bytes(weights, 16 * seen.runs, lost ? 0.0f : TWO_BYTES / top, high, high + BYTE_STRIDE, bias, bias + 1);
    tile.weight_scale[row] = (lost ? 0.0f : top / TWO_BYTES) + sum(broken);
}

// The tile's queries, ready for the micro-kernels.
template <class T>
static void take_queries(const Attention& what, const Sizes& sizes, Tile& tile) {
    const std::int64_t size = sizes.head_dim, padded = sizes.padded;
    for (int row = 0; row < tile.rows; ++row) {
        const std::int64_t pair = tile.first_pair + row, t = pair / tile.heads_each, h = pair % tile.heads_each;
        const float* from = what.q + ((tile.first_row + t) * what.heads + tile.head * tile.heads_each + h) * size;
        if constexpr (Rows<T>::PARTS == 1) {
            std::memcpy(static_cast<float*>(tile.q) + row * tile.q_stride, from, sizeof(float) * size);
            tile.q_scale[row] = what.scale;
        } else {
            float* whole = tile.part;  // free until the first split
            std::memcpy(whole, from, sizeof(float) * size);
            for (std::int64_t d = size; d < padded; ++d) whole[d] = 0.0f;
            Floats most = all(0.0f), broken = all(0.0f);
            for (std::int64_t d = 0; d < padded; d += 16) {
                const Floats x = load(whole + d);
                most = max(x, max(all(0.0f) - x, most));
                broken = fma(x, all(0.0f), broken);
            }
            const float top = largest(most);
            const bool lost = top < TINY;
            std::int8_t* high = static_cast<std::int8_t*>(tile.q) + row * 2 * tile.q_stride;
            split_in_bytes(whole, static_cast<int>(padded), lost ? 0.0f : TWO_BYTES / top, high, high + tile.q_stride,
                           tile.q_bias + 2 * row, tile.q_bias + 2 * row + 1);
            tile.q_scale[row] = ((lost ? 0.0f : top / TWO_BYTES) + sum(broken)) * what.scale;
        }
    }
}

// A NaN or an infinity makes the scale NaN, so that whoever reads the slot sees it.
static void quantize(const float* x, std::int64_t padded, std::int8_t* codes, float* scale) {
    Floats most = all(0.0f), broken = all(0.0f);
    for (std::int64_t d = 0; d < padded; d += 16) {
        const Floats value = load(x + d);
        most = max(value, max(all(0.0f) - value, most));
        broken = fma(value, all(0.0f), broken);
    }
    const float step = largest(most) / 127.0f;
    const float by = step == 0.0f ? 1.0f : step;
    const Floats rounder = all(ROUNDER);
    for (std::int64_t d = 0; d < padded; d += 16)
        store_as_bytes(codes + d, bits_of(load(x + d) / all(by) + rounder) - bits_of(rounder));
    *scale = step + sum(broken);
}

// One head of one token into its slot: key d at keys[d / J * 16 * J + d % J], value d at values[d * J].
static void put(const float* x, std::int64_t size, std::int64_t stride, float* to) {
    for (std::int64_t d = 0; d < size; ++d) to[d * stride] = x[d];
}
static void put(const float* x, std::int64_t size, std::int64_t stride, Bfloat16* to) {
    for (std::int64_t d = 0; d < size; ++d) {
        std::uint32_t bits;
        std::memcpy(&bits, x + d, sizeof bits);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        to[d * stride].bits =
            static_cast<std::uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
}

// One head [D] in `x` [padded, zeros behind]: RMSNorm, then rotation.
static void prepare(float* x, std::int64_t size, std::int64_t padded, const float* weight, float eps, float offset,
                    const float* cos, const float* sin, std::int64_t half) {
    if (weight != nullptr) {
        Floats squares = all(0.0f);
        for (std::int64_t d = 0; d < padded; d += 16) squares = fma(load(x + d), load(x + d), squares);
        const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
        for (std::int64_t d = 0; d < size; ++d) x[d] = x[d] * factor * (weight[d] + offset);
    }
    if (cos != nullptr) {
        float* y = x + half;
        for (std::int64_t i = 0; i < half; ++i) {
            const float a = x[i], b = y[i];
            x[i] = a * cos[i] - b * sin[i];
            y[i] = b * cos[i] + a * sin[i];
        }
    }
}

#include "attention_planes.inl"
#include "attention_wide.inl"

// What a thread sets up for a tile of pages of T.
template <class T>
struct TilesFor {
    TilesFor(const Sizes&, const Tile&) {}
};

#include "attention_tiles.inl"
#include "attention_scan.inl"
#include "attention_skip.inl"

// All rows' scores with the runs of a split. Few rows wait for memory, which is read line after line if one run is
// taken at a time; many rows are to keep the multipliers busy.
template <class T>
static void score_split(const Sizes& sizes, const Tile& tile, const Seen<T>& seen) {
#if ATTAR_LEVEL == ATTAR_AMX
    if constexpr (sizeof(T) == 1)
        if (tile_step(sizes) != 0) return score_tiles(sizes, tile, seen);
#endif
    if (tile.rows <= FEW) {
        for (int run = 0; run < seen.runs; ++run) {
#define ATTAR_CALL(R) \
    if (tile.rows == R) \
    score<R, 1>(static_cast<const typename Rows<T>::Element*>(tile.q), tile.q_stride, tile.q_bias, tile.q_scale, \
                seen.keys + run, sizes.head_dim, tile.scores + 16 * run, \
                run % 2 != 0 && sizes.raw_key == 0 ? seen.values[run] : seen.keys[run])
            ATTAR_CALL(1);
            ATTAR_CALL(2);
            ATTAR_CALL(3);
            ATTAR_CALL(4);
            ATTAR_CALL(5);
            ATTAR_CALL(6);
            ATTAR_CALL(7);
            ATTAR_CALL(8);
#undef ATTAR_CALL
        }
        return;
    }
    for (int from = 0; from < seen.runs; from += 4) {  // 64 slots at a time stay in the first cache
        const int to = from + 4 < seen.runs ? from + 4 : seen.runs;
        if constexpr (sizeof(T) == 2) {
            const float* wide[4];
            if (tile.rows > FEW) {
                const float* const* keys = widen(seen.keys + from, to - from, sizes.key_run, tile, wide);
                score_runs(tile, keys, sizes.head_dim, from, to);
                continue;
            }
        }
        score_runs(tile, seen.keys + from, sizes.head_dim, from, to);
    }
}

// The values of a split, mixed by the rows' weights, to tile.part; `next` is the split behind it.
template <class T>
static void mix_split(const Sizes& sizes, const Tile& tile, const Seen<T>& seen, const Seen<T>& next) {
#if ATTAR_LEVEL == ATTAR_AMX
    if constexpr (sizeof(T) == 1)
        if (tile_step(sizes) != 0) {
            const bool ahead = tile.rows <= FEW && seen.runs <= next.runs && sizes.raw_key == 0;
            return mix_tiles(sizes, tile, seen, ahead ? next.keys : nullptr);
        }
#endif
    std::memset(tile.part, 0, sizeof(float) * tile.rows * sizes.padded);
    const int step = Rows<T>::PARTS == 2 ? SPLIT / 16 : 4;  // floats: 64 slots at a time stay in the first cache
    for (int run = 0; run < seen.runs; run += step) {
        const int end = run + step < seen.runs ? run + step : seen.runs;
        const int last = end == seen.runs ? seen.last : 16;
        if constexpr (sizeof(T) == 2) {
            const float* wide[4];
            if (tile.rows > FEW) {
                const float* const* values = widen(seen.values + run, end - run, sizes.value_run, tile, wide);
                mix_runs<float>(tile, values, nullptr, last, sizes.padded, run, end);
                continue;
            }
        }
        const bool ahead = tile.rows <= FEW && end <= next.runs && sizes.raw_key == 0;
        mix_runs<T>(tile, seen.values + run, ahead ? next.keys + run : nullptr, last, sizes.padded, run, end);
    }
}

// Adds what one split gave a row, (m, l, o), to what those before it gave.
ATTAR_INLINE void merge_row(float* top, float* total, float* out, float m, float l, const float* o,
                            std::int64_t padded) {
    if (m == -INFINITY) return;  // it saw nothing there
    const float highest = m > *top ? m : *top;
    const Floats before = exp(all(*top) - all(highest)), now = exp(all(m) - all(highest));
    for (std::int64_t c = 0; c < padded; c += 16) store(out + c, fma(load(out + c), before, load(o + c) * now));
    float lane[16];
    store(lane, fma(all(*total), before, all(l) * now));
    *total = lane[0];
    *top = highest;
}

// Runs the tile against splits from .. to. What each gives is merged into the tile's state, or, where `parts` is given,
// written there for `merge`: per split and row, m, l and o [padded].
template <class T>
static void attend(const Attention& what, const Pages& pages, const Sizes& sizes, Tile& tile, std::int64_t from,
                   std::int64_t to, float* parts) {
    take_queries<T>(what, sizes, tile);
    const TilesFor<T> tiles(sizes, tile);
    Lost lost;
    Seen<T> two[2];
    look(what, pages, sizes, tile, from, two[from % 2]);
    for (std::int64_t split = from; split < to; ++split) {
        Seen<T>& seen = two[split % 2];
        Seen<T>& next = two[1 - split % 2];
        next.runs = 0;
        if (split + 1 < to) look(what, pages, sizes, tile, split + 1, next);
        if (seen.runs == 0 && parts == nullptr) continue;  // between the first slots and the newest
        if (sizes.raw_key != 0) expand(pages, sizes, tile, false, seen, next);
        score_split(sizes, tile, seen);
        if (sizes.raw_key != 0) expand(pages, sizes, tile, true, seen, next);
        float m[TILE], l[TILE];
        if (tile.skips) skip(what, tile, seen, lost, m, l);
        for (int row = 0; row < tile.rows && !tile.skips; ++row) {
            float* scores = tile.scores + row * STRIDE;
            float broken;
            const bool sees = hide(what, tile, seen, share(tile, sizes, seen, next, row, 0), row, scores, m + row, &broken);
            l[row] = exponentials(seen, share(tile, sizes, seen, next, row, 1), scores, sees ? m[row] : 0.0f) + broken;
            if (!sees) m[row] = -INFINITY;
            if constexpr (Rows<T>::PARTS == 2) weights_to_bytes(tile, seen, share(tile, sizes, seen, next, row, 2), row, scores);
        }
        mix_split(sizes, tile, seen, next);
        for (int row = 0; row < tile.rows; ++row) {
            const float* o = tile.part + row * sizes.padded;
            if (parts == nullptr) {
                merge_row(tile.top + row, tile.total + row, tile.out + row * sizes.padded, m[row], l[row], o,
                          sizes.padded);
            } else {
                float* to_keep = parts + ((split - from) * tile.rows + row) * (2 + sizes.padded);
                to_keep[0] = m[row];
                to_keep[1] = l[row];
                std::memcpy(to_keep + 2, o, sizeof(float) * sizes.padded);
            }
        }
    }
}

static void begin(const Sizes& sizes, Tile& tile) {
    for (int row = 0; row < tile.rows; ++row) {
        tile.top[row] = -INFINITY;
        tile.total[row] = 0.0f;
    }
    std::memset(tile.out, 0, sizeof(float) * tile.rows * sizes.padded);
}

// The parts that `attend` left, in the order of the splits.
static void merge(const Sizes& sizes, Tile& tile, std::int64_t splits, const float* parts) {
    for (std::int64_t split = 0; split < splits; ++split)
        for (int row = 0; row < tile.rows; ++row, parts += 2 + sizes.padded)
            merge_row(tile.top + row, tile.total + row, tile.out + row * sizes.padded, parts[0], parts[1], parts + 2,
                      sizes.padded);
}

// The tile's state to the output; `ends`, where it is given, takes what the mass pass needs of each row.
static void finish(const Attention& what, const Pages& pages, const Sizes& sizes, Tile& tile, float* ends) {
    for (int row = 0; row < tile.rows; ++row) {
        const std::int64_t pair = tile.first_pair + row, t = pair / tile.heads_each, h = pair % tile.heads_each;
        const std::int64_t at = (tile.first_row + t) * what.heads + tile.head * tile.heads_each + h;
        const float total = tile.total[row];
        float* from = tile.out + row * sizes.padded;
        for (std::int64_t c = 0; c < sizes.padded; c += 16)  // + 0: no sign survives on a zero
            store(from + c, total == 0.0f ? all(0.0f) : load(from + c) / all(total) + all(0.0f));
        float* out = what.out + at * sizes.head_dim;
        if (pages.bases != nullptr) {
            const Coordinates& values = pages.bases->values;
            turn(from, 1, values.back + tile.head * sizes.head_dim * sizes.head_dim, sizes.head_dim, out);
            for (std::int64_t d = 0; d < sizes.head_dim; ++d) out[d] += values.mean[tile.head * sizes.head_dim + d];
        } else if (pages.channels != nullptr) {
            const float* spread = pages.channels->values.spread + tile.head * sizes.head_dim;
            const float* mean = pages.channels->values.mean + tile.head * sizes.head_dim;
            for (std::int64_t d = 0; d < sizes.head_dim; ++d) out[d] = from[d] * spread[d] + mean[d];
        } else {
            std::memcpy(out, from, sizeof(float) * sizes.head_dim);
        }
        if (ends != nullptr) {
            ends[2 * at] = tile.top[row];
            ends[2 * at + 1] = total;
        }
    }
}

// Adds to mass[slot] what the tile's rows gave the slots of one split.
template <class T>
static void add_mass(const Attention& what, const Pages& pages, const Sizes& sizes, Tile& tile, std::int64_t split,
                     const float* ends, float* mass) {
    Seen<T> seen;
    look(what, pages, sizes, tile, split, seen);
    if (seen.runs == 0) return;
    if (sizes.raw_key != 0) expand(pages, sizes, tile, false, seen, {});
    take_queries<T>(what, sizes, tile);
    const TilesFor<T> tiles(sizes, tile);
    score_split(sizes, tile, seen);
    for (int row = 0; row < tile.rows; ++row) {
        const std::int64_t pair = tile.first_pair + row, t = pair / tile.heads_each, h = pair % tile.heads_each;
        const float* end = ends + 2 * ((tile.first_row + t) * what.heads + tile.head * tile.heads_each + h);
        float* scores = tile.scores + row * STRIDE;
        float top, broken;
        if (!hide(what, tile, seen, {}, row, scores, &top, &broken)) continue;
        exponentials<T>(seen, {}, scores, end[0]);
        for (int i = 0; i < seen.runs; ++i) {
            float* to = mass + seen.index[i];
            store(to, load(to) + load(scores + 16 * i) / all(end[1]));
        }
    }
}

// ---- writing

// Row `row` of the call. `x` has room for one head, padded.
template <class T>
static void write_row(const Write& what, const Pages& pages, const Sizes& sizes, std::int64_t row, float* x,
                      std::int8_t* codes) {
    const std::int64_t size = sizes.head_dim, padded = sizes.padded, half = what.turned / 2;
    const std::int64_t angle = what.cos == nullptr ? 0 : what.angle[row] * half;
    const float* cos = what.cos == nullptr ? nullptr : what.cos + angle;
    const float* sin = what.cos == nullptr ? nullptr : what.sin + angle;
    const std::int64_t block = what.slots[row] / sizes.block, place = what.slots[row] % sizes.block;
    for (std::int64_t d = size; d < padded; ++d) x[d] = 0.0f;
    for (std::int64_t h = 0; h < what.heads; ++h) {
        std::memcpy(x, what.q + row * what.q_stride + h * size, sizeof(float) * size);
        prepare(x, size, padded, what.q_norm, what.eps, what.offset, cos, sin, half);
        if constexpr (std::is_same_v<T, Nuq>) {
            const float* spread = pages.channels->keys.spread + h / (what.heads / sizes.kv_heads) * size;
            for (std::int64_t d = 0; d < size; ++d) x[d] *= spread[d];
        }
        std::memcpy(what.q_out + (row * what.heads + h) * size, x, sizeof(float) * size);
    }
    for (std::int64_t g = 0; g < sizes.kv_heads; ++g) {
        const std::int64_t head = block * sizes.kv_heads + g, lane = place % 16;
        std::memcpy(x, what.k + row * what.k_stride + g * size, sizeof(float) * size);
        prepare(x, size, padded, what.k_norm, what.eps, what.offset, cos, sin, half);
        if (pages.signs != nullptr) put_signs(*pages.signs, sizes, head, g, place, x, cos, sin, half);
        constexpr bool RAW = std::is_same_v<T, Nuq>;
        const std::int64_t run = head * (sizes.block / 16) + place / 16;
        T* key = static_cast<T*>(pages.keys) + run * (RAW ? sizes.raw_key : sizes.key_run);
        T* value = static_cast<T*>(pages.values) + run * (RAW ? sizes.raw_value : sizes.value_run);
        if constexpr (RAW) {
            put_nuq(pages, sizes, head, place, false, x, key + lane * (sizes.raw_key / 16));
            std::memcpy(x, what.v + row * what.v_stride + g * size, sizeof(float) * size);
            put_nuq(pages, sizes, head, place, true, x, value + lane * (sizes.raw_value / 16));
        } else if constexpr (std::is_same_v<T, E4m3>) {
            quantize_fp8(x, padded, codes, static_cast<float*>(pages.key_scales) + head * sizes.block + place);
            for (std::int64_t d = 0; d < size; ++d) std::memcpy(key + 16 * d + lane, codes + d, 1);
            std::memcpy(x, what.v + row * what.v_stride + g * size, sizeof(float) * size);
            quantize_fp8(x, padded, codes, static_cast<float*>(pages.value_scales) + head * sizes.block + place);
            std::memcpy(value + lane * padded, codes, static_cast<std::size_t>(size));
        } else if constexpr (Rows<T>::PARTS == 1) {
            put(x, size, 16, key + lane);
            put(what.v + row * what.v_stride + g * size, size, 1, value + lane * padded);
        } else {
            quantize(x, padded, codes, static_cast<float*>(pages.key_scales) + head * sizes.block + place);
            put_key(codes, size, lane, key);
            std::memcpy(x, what.v + row * what.v_stride + g * size, sizeof(float) * size);
            quantize(x, padded, codes, static_cast<float*>(pages.value_scales) + head * sizes.block + place);
            put_value(codes, size, padded, lane, value);
        }
    }
}
