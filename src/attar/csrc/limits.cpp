#include "limits.h"

#include <stdexcept>

#include "simd.h"

namespace attar {
namespace {

#define ATTAR_KERNELS "limits.inl"
#include "for_levels.h"

}  // namespace

std::int64_t read_all(const std::uint8_t* memory, std::int64_t bytes, Level level) {
    if (bytes < 0 || bytes % 4096) throw std::invalid_argument("whole pages are read");
    const auto read = ATTAR_PICK(level, read_stretch);
    const std::int64_t workers = threads(), pages = bytes / 4096;
    std::int64_t seen = 0;
#pragma omp parallel for schedule(static) reduction(| : seen)
    for (std::int64_t worker = 0; worker < workers; ++worker) {
        const std::int64_t from = pages * worker / workers * 4096, to = pages * (worker + 1) / workers * 4096;
        seen |= read(memory + from, to - from);
    }
    return seen;
}

std::int64_t multiply_int8(std::int64_t rounds, bool tiles, Level level) {
    if (tiles && level != Level::amx) throw std::invalid_argument("tiles take the amx level");
    if (rounds < 0 || rounds > std::int64_t{1} << 40) throw std::invalid_argument("impossible number of rounds");
    const auto multiply = tiles ? ATTAR_PICK(level, tile_products) : ATTAR_PICK(level, dot_products);
    const std::int64_t workers = threads();
    std::int64_t made = 0;
#pragma omp parallel for schedule(static) reduction(+ : made)
    for (std::int64_t worker = 0; worker < workers; ++worker) made += multiply(rounds);
    return made;
}

}  // namespace attar
