// What this machine can do at best, to set a kernel's speed against: reading memory, and multiplying in registers.
#pragma once

#include <cstdint>

#include "cpu.h"

namespace attar {

// Reads `bytes` (a multiple of 4096) at `memory`, every thread a stretch of its own. The result depends on all of them.
std::int64_t read_all(const std::uint8_t* memory, std::int64_t bytes, Level level);

// `rounds` rounds of int8 multiplications and additions on every thread, in registers; returns how many, each product
// and each sum counted. By four-byte dot products, or, with `tiles`, AMX tiles. Throws std::invalid_argument where the
// level has none.
std::int64_t multiply_int8(std::int64_t rounds, bool tiles, Level level);

}  // namespace attar
