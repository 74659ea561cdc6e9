#include "cpu.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace attar {
namespace {

const char* const NAMES[] = {"portable", "neon", "avx2", "avxvnni", "avx512", "amx"};  // in the order of Level

#if defined(ATTAR_EMULATE)
constexpr bool EMULATED = true;  // above AVX2
#else
constexpr bool EMULATED = false;
#endif

#if defined(__x86_64__)
Cpuid read_cpuid() {
    Cpuid words;
    std::uint32_t eax, ebx, ecx, edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) words.leaf1_ecx = ecx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        const std::uint32_t subleaves = eax;
        words.leaf7_ebx = ebx;
        words.leaf7_ecx = ecx;
        words.leaf7_edx = edx;
        if (subleaves >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) words.leaf7_1_eax = eax;
    }
    if (words.leaf1_ecx >> 27 & 1) {  // OSXSAVE: without it XGETBV itself is an illegal instruction
        std::uint32_t low, high;
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        words.xcr0 = std::uint64_t{high} << 32 | low;
    }
    return words;
}
#endif

// Linux saves the 8 KiB of tiles only for a process that has asked for them, and answers whether it may have them.
bool tiles_granted() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

bool has_all(const Features& features, std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(), [&](const char* name) {
        const auto found = features.find(name);
        return found != features.end() && found->second;
    });
}

}  // namespace

Features decode(const Cpuid& words) {
    const auto bit = [](std::uint32_t word, int index) { return (word >> index & 1) != 0; };
    const bool saved = bit(words.leaf1_ecx, 27);                                                // OSXSAVE
    const bool ymm = saved && bit(words.leaf1_ecx, 28) && (words.xcr0 & 0x06) == 0x06;          // AVX; XMM, YMM
    const bool zmm = ymm && bit(words.leaf7_ebx, 16) && (words.xcr0 & 0xe6) == 0xe6;            // and masks, ZMM
    const bool tiles = zmm && (words.xcr0 & 0x60000) == 0x60000;  // tile configuration and data
    return {
        {"sse4_2", bit(words.leaf1_ecx, 20)},
        {"fma", ymm && bit(words.leaf1_ecx, 12)},
        {"f16c", ymm && bit(words.leaf1_ecx, 29)},
        {"avx2", ymm && bit(words.leaf7_ebx, 5)},
        {"avx_vnni", ymm && bit(words.leaf7_1_eax, 4)},
        {"avx512f", zmm},
        {"avx512dq", zmm && bit(words.leaf7_ebx, 17)},
        {"avx512bw", zmm && bit(words.leaf7_ebx, 30)},
        {"avx512vl", zmm && bit(words.leaf7_ebx, 31)},
        {"avx512_vnni", zmm && bit(words.leaf7_ecx, 11)},
        {"avx512_bf16", zmm && bit(words.leaf7_1_eax, 5)},
        {"amx_tile", tiles && bit(words.leaf7_edx, 24)},
        {"amx_int8", tiles && bit(words.leaf7_edx, 25)},
    };
}

const Features& features() {
    static const Features found = []() -> Features {
#if defined(__x86_64__)
        return decode(read_cpuid());
#elif defined(__aarch64__) && defined(__linux__)
        const unsigned long bits = getauxval(AT_HWCAP);
        return {{"neon", (bits & HWCAP_ASIMD) != 0}, {"dotprod", (bits & HWCAP_ASIMDDP) != 0}};
#else
        return {};
#endif
    }();
    return found;
}

const std::vector<std::string>& levels() {
    static const std::vector<std::string> found = [] {
        std::vector<std::string> names{"portable"};
        const bool avx2 = has_all(features(), {"avx2", "fma", "f16c"});
        const bool avx512 = avx2 && (EMULATED || has_all(features(), {"avx512f", "avx512bw", "avx512dq", "avx512vl",
                                                                      "avx512_vnni"}));
        if (has_all(features(), {"neon", "dotprod"})) names.push_back("neon");
        if (avx2) names.push_back("avx2");
        if (avx2 && (EMULATED || has_all(features(), {"avx_vnni"}))) names.push_back("avxvnni");
        if (avx512) names.push_back("avx512");
        const bool tiles = EMULATED || (has_all(features(), {"amx_tile", "amx_int8"}) && tiles_granted());
        if (avx512 && tiles) names.push_back("amx");
        return names;
    }();
    return found;
}

Level level_of(const std::string& name) {
    const auto known = std::find(std::begin(NAMES), std::end(NAMES), name);
    if (known == std::end(NAMES)) throw std::invalid_argument("unknown kernel level " + name);
    if (std::find(levels().begin(), levels().end(), name) == levels().end())
        throw std::invalid_argument("this machine cannot run " + name + " kernels");
    return static_cast<Level>(known - std::begin(NAMES));
}

std::int64_t threads() {
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
}

}  // namespace attar
