// Part of attention.inl: int8 pages by tiles of AMX. Eight rows of two bytes are sixteen rows of a tile, runs of keys and
// of values its columns. Sums of integers, so the bits are those of the other levels.

#if ATTAR_LEVEL == ATTAR_AMX

constexpr int GROUP = 8;  // rows, of two bytes each, that a tile takes

// Columns of a head that one product takes; 0 where keys do not end where a tile would.
ATTAR_INLINE std::int64_t tile_step(const Sizes& sizes) {
    return sizes.head_dim % 64 == 0 ? 64 : sizes.head_dim % 32 == 0 ? 32 : sizes.head_dim % 16 == 0 ? 16 : 0;
}

// Tiles 0 to 3 are sums, 4 queries and 5 keys, 6 weights and 7 values.
template <>
struct TilesFor<std::int8_t> {
    TilesFor(const Sizes& sizes, const Tile& tile) {
        const std::int64_t step = tile_step(sizes), rows = tile.rows < GROUP ? 2 * tile.rows : 2 * GROUP;
        if (step == 0) return;
        TileShapes shapes;
        for (int t = 0; t < 4; ++t) shapes.set(t, rows, 64);
        shapes.set(4, rows, step);
        shapes.set(5, step / 4, 64);
        shapes.set(6, rows, 64);
        shapes.set(7, 16, 64);
        shapes.use();
    }
    TilesFor(const TilesFor&) = delete;
    ~TilesFor() { end_tiles(); }
};

ATTAR_INLINE void zero_sums() {
    ATTAR_TILE_ZERO(0);
    ATTAR_TILE_ZERO(1);
    ATTAR_TILE_ZERO(2);
    ATTAR_TILE_ZERO(3);
}

// Sums of the rows first .. end in tiles 0 .. count - 1 to floats, tile t at to[16 t] of each row.
ATTAR_INLINE void put_sums(int count, int first, int end, const float* scale, float* to, std::int64_t stride) {
    alignas(64) std::int32_t sums[4][256];
    ATTAR_TILE_STORE(0, sums[0]);
    if (count > 1) ATTAR_TILE_STORE(1, sums[1]);
    if (count > 2) ATTAR_TILE_STORE(2, sums[2]);
    if (count > 3) ATTAR_TILE_STORE(3, sums[3]);
    for (int row = first; row < end; ++row)
        for (int t = 0; t < count; ++t) {
            const std::int32_t* high = sums[t] + 32 * (row - first);
            const Ints sum = shift_left(load_bytes(high), 7) + load_bytes(high + 16);
            store(to + row * stride + 16 * t, to_floats(sum) * all(scale[row]));
        }
}

// As `score`, for all rows and all runs of a split.
static void score_tiles(const Sizes& sizes, const Tile& tile, const Seen<std::int8_t>& seen) {
    const std::int64_t step = tile_step(sizes);
    const auto* q = static_cast<const std::int8_t*>(tile.q);
    for (int run = 0; run < seen.runs; run += 4) {
        const int count = seen.runs - run < 4 ? seen.runs - run : 4;
        const std::int8_t* const* keys = seen.keys + run;
        if (tile.rows <= FEW && sizes.raw_key == 0)
            for (std::int64_t at = 0; count > 1 && at < sizes.value_run; at += 64) ask_for(seen.values[run + 1], at);
        for (int first = 0; first < tile.rows; first += GROUP) {
            zero_sums();
            for (std::int64_t d = 0; d < sizes.head_dim; d += step) {
                ATTAR_TILE_LOAD(4, q + 2 * first * tile.q_stride + d, tile.q_stride);
                ATTAR_TILE_LOAD(5, keys[0] + 16 * d, 64);
                ATTAR_TILE_DOT(ss, 0, 4, 5);
                if (count > 1) {
                    ATTAR_TILE_LOAD(5, keys[1] + 16 * d, 64);
                    ATTAR_TILE_DOT(ss, 1, 4, 5);
                }
                if (count > 2) {
                    ATTAR_TILE_LOAD(5, keys[2] + 16 * d, 64);
                    ATTAR_TILE_DOT(ss, 2, 4, 5);
                }
                if (count > 3) {
                    ATTAR_TILE_LOAD(5, keys[3] + 16 * d, 64);
                    ATTAR_TILE_DOT(ss, 3, 4, 5);
                }
            }
            const int end = first + GROUP < tile.rows ? first + GROUP : tile.rows;
            put_sums(count, first, end, tile.q_scale, tile.scores + 16 * run, STRIDE);
        }
    }
}

// As `mix`, for all rows, columns and runs of a split. Tiles take 64 slots; past the last run weights are zero.
static void mix_tiles(const Sizes& sizes, const Tile& tile, const Seen<std::int8_t>& seen,
                      const std::int8_t* const* next) {
    const std::int64_t padded = sizes.padded, size = sizes.value_run;
    const int fours = (seen.runs + 3) / 4, filled = 16 * seen.runs;
    for (int row = 0; row < 2 * tile.rows; ++row)
        std::memset(tile.weights + row * BYTE_STRIDE + filled, 0, static_cast<std::size_t>(64 * fours - filled));
    for (std::int64_t column = 0; column < padded; column += 64) {
        const int count = padded - column < 64 ? static_cast<int>(padded - column) / 16 : 4;
        for (int first = 0; first < tile.rows; first += GROUP) {
            zero_sums();
            for (int four = 0; four < fours; ++four) {
                const std::int8_t* const* runs = seen.values + 4 * four;
                const int here = seen.runs - 4 * four < 4 ? seen.runs - 4 * four : 4;
                const std::int8_t* from = runs[0];
                if (here < 4 || runs[1] != from + size || runs[2] != from + 2 * size || runs[3] != from + 3 * size) {
                    auto* together = reinterpret_cast<std::int8_t*>(tile.wide);
                    for (int i = 0; i < here; ++i)
                        std::memcpy(together + i * size, runs[i], static_cast<std::size_t>(size));
                    from = together;
                }
                if (next != nullptr)
                    for (int i = 1; i < here; i += 2)
                        for (int t = 0; t < 4 * count; ++t) ask_for(next[4 * four + i], 16 * column + 64 * t);
                from += 4 * column;
                ATTAR_TILE_LOAD(6, tile.weights + 2 * first * BYTE_STRIDE + 64 * four, BYTE_STRIDE);
                ATTAR_TILE_LOAD(7, from, 4 * padded);
                ATTAR_TILE_DOT(ss, 0, 6, 7);
                if (count > 1) {
                    ATTAR_TILE_LOAD(7, from + 64, 4 * padded);
                    ATTAR_TILE_DOT(ss, 1, 6, 7);
                }
                if (count > 2) {
                    ATTAR_TILE_LOAD(7, from + 128, 4 * padded);
                    ATTAR_TILE_DOT(ss, 2, 6, 7);
                }
                if (count > 3) {
                    ATTAR_TILE_LOAD(7, from + 192, 4 * padded);
                    ATTAR_TILE_DOT(ss, 3, 6, 7);
                }
            }
            const int end = first + GROUP < tile.rows ? first + GROUP : tile.rows;
            put_sums(count, first, end, tile.weight_scale, tile.part + column, padded);
        }
    }
}

#endif
