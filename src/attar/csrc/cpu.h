// What this processor can run, decided once at load.
//
// A feature counts only if the processor has it and the operating system saves its registers (XGETBV): a virtual
// machine may offer AVX-512 to a kernel that does not, and an instruction on such a register would end the process.
//
// Kernels come in levels, each a superset of the one before (for_levels.h compiles them): `avxvnni` is AVX2 with the dot
// products of four bytes, `avx512` has them too, `amx` adds tiles of int8 products, which Linux grants to a process that
// asks for them, and `neon` is 64-bit Arm with dot products.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace attar {

using Features = std::map<std::string, bool>;

// The words of CPUID that matter here, and XCR0, the register states that the operating system saves (0: none).
struct Cpuid {
    std::uint32_t leaf1_ecx = 0;
    std::uint32_t leaf7_ebx = 0;
    std::uint32_t leaf7_ecx = 0;
    std::uint32_t leaf7_edx = 0;
    std::uint32_t leaf7_1_eax = 0;
    std::uint64_t xcr0 = 0;
};

enum class Level { portable, neon, avx2, avxvnni, avx512, amx };

// Pure, so that a test can ask about processors it does not have.
Features decode(const Cpuid& words);

// Of this machine. On x86: sse4_2 avx2 fma f16c avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16
// amx_tile amx_int8; on 64-bit Arm Linux: neon dotprod; nothing elsewhere.
const Features& features();

// Those this machine runs, lowest first; `portable` always is.
const std::vector<std::string>& levels();

// Throws std::invalid_argument where the name is unknown or this machine cannot run the level.
Level level_of(const std::string& name);

// Threads that a call may use: as many as torch's operations; 1 where kernels were built without OpenMP.
std::int64_t threads();

}  // namespace attar
