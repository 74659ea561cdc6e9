// AMX: eight tiles of up to 16 rows of 64 bytes, and products of bytes between them. Included by the kernels that use
// them, at the level that has them.
//
// The instructions are written out, because the compiler's own macros (GCC 12) do not say that they read memory, so that
// stores could sink below them, and drop a configuration that lies on the stack.
#if ATTAR_LEVEL == ATTAR_AMX

#if defined(ATTAR_EMULATE)
#define ATTAR_TILE_LOAD(tile, from, stride) emulated_tiles.load(tile, from, stride)
#define ATTAR_TILE_STORE(tile, to) emulated_tiles.store(tile, to, 64)
#define ATTAR_TILE_ZERO(tile) emulated_tiles.zero(tile)
#define ATTAR_TILE_DOT(letters, sum, x, codes) emulated_tiles.dot_##letters(sum, x, codes)
#define ATTAR_TILE_CONFIGURE(shapes) emulated_tiles.configure(&shapes)
#define ATTAR_TILE_RELEASE() emulated_tiles = {}
#else
#define ATTAR_TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(std::int64_t{stride}) : "memory")
#define ATTAR_TILE_STORE(tile, to) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(std::int64_t{64}) : "memory")
#define ATTAR_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
// sum [rows, 16] += x [rows, 4 k] times codes [k, 16, 4]; the letters say whether x and codes have signs (s) or not (u).
#define ATTAR_TILE_DOT(letters, sum, x, codes) \
    __asm__ volatile("tdpb" #letters "d %%tmm" #codes ", %%tmm" #x ", %%tmm" #sum ::)
#define ATTAR_TILE_CONFIGURE(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(shapes))
#define ATTAR_TILE_RELEASE() __asm__ volatile("tilerelease" ::)
#endif

struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};

    void set(int tile, std::int64_t height, std::int64_t width) {
        rows[tile] = static_cast<std::uint8_t>(height);
        bytes[tile] = static_cast<std::uint16_t>(width);
    }
    void use() const { ATTAR_TILE_CONFIGURE(*this); }
};
static void end_tiles() { ATTAR_TILE_RELEASE(); }

#endif
