// Included in front of every file of llama.cpp when it is built for `make bench-peers`.
//
// GCC 12's _tile_loadconfig tells the compiler that it reads 8 bytes, where the instruction reads 64. The stores into the
// rest of llama.cpp's tile configuration are then dead and removed, and its AMX path ends in a general protection fault
// (ggml-org/llama.cpp, issue 20824 and pull request 26954). With the true size it runs, so the peer is measured on the
// fastest instructions of the machine. Clang is not affected.
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

static inline void load_tile_config(const void * config) {
    __asm__ volatile("ldtilecfg %0" : : "m"(*static_cast<const char(*)[64]>(config)));
}
#undef _tile_loadconfig
#define _tile_loadconfig load_tile_config
#endif
