// Kernels of limits.cpp.

#include "tiles.inl"

static std::int32_t read_stretch(const std::uint8_t* from, std::int64_t bytes) {
    Ints a = all(0), b = a, c = a, d = a;
    for (std::int64_t i = 0; i < bytes; i += 256) {
        a = a | load_bytes(from + i);
        b = b | load_bytes(from + i + 64);
        c = c | load_bytes(from + i + 128);
        d = d | load_bytes(from + i + 192);
    }
    std::int32_t lane[16], out = 0;
    store_bytes(lane, (a | b) | (c | d));
    for (const std::int32_t value : lane) out |= value;
    return out;
}

// Twelve sums: more than the latency of a dot product times the number that start in a cycle.
static std::int64_t dot_products(std::int64_t rounds) {
    constexpr int SUMS = ATTAR_LEVEL >= ATTAR_AVX512 ? 12 : 6;
    Ints sum[SUMS];
#pragma GCC unroll 12
    for (int j = 0; j < SUMS; ++j) sum[j] = all(j);  // all different, or they would be one
    Ints codes = all(0x01010101);
    std::int32_t x = 0x01010101;
    for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
        for (int j = 0; j < SUMS; ++j) {
#if defined(__x86_64__) && ATTAR_LEVEL >= ATTAR_AVX2 && !defined(ATTAR_EMULATE)
            // Or all rounds would be one. Where a dot product is several instructions, all sums would share the first.
            ATTAR_EACH __asm__ volatile("" : "+v"(codes.piece[p]));
#else
            __asm__ volatile("" : "+r"(x));
#endif
            sum[j] = dot4(sum[j], codes, x);
        }
    }
    Ints total = all(0);
#pragma GCC unroll 12
    for (int j = 0; j < SUMS; ++j) total = total + sum[j];
    std::int32_t lane[16];
    store_bytes(lane, total);
    return lane[0] == 1 ? 0 : rounds * SUMS * 64 * 2;  // never 1, which the compiler cannot know
}

static std::int64_t tile_products(std::int64_t rounds) {
#if ATTAR_LEVEL == ATTAR_AMX
    TileShapes shapes;
    for (int t = 0; t < 8; ++t) shapes.set(t, 16, 64);
    shapes.use();
    for (std::int64_t i = 0; i < rounds; ++i) {
        ATTAR_TILE_DOT(ss, 0, 4, 6);
        ATTAR_TILE_DOT(ss, 1, 4, 7);
        ATTAR_TILE_DOT(ss, 2, 5, 6);
        ATTAR_TILE_DOT(ss, 3, 5, 7);
    }
    end_tiles();
    return rounds * 4 * 16 * 16 * 64 * 2;
#else
    static_cast<void>(rounds);
    return 0;
#endif
}
