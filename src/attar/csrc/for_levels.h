// Compiles the kernels of one file, ATTAR_KERNELS, once for every level: each copy in a namespace of the level's name,
// with simd.inl before it. The including file sits in namespace attar, and picks a copy at run time by `ATTAR_PICK`.
//
// Only functions defined between the pragmas may use a level's instructions. With compiler flags instead, an inline
// function of the standard library compiled for AVX-512 could be the copy that the linker keeps for everybody.

#if !defined(ATTAR_KERNELS)
#error "define ATTAR_KERNELS, the file of kernels"
#endif

#define ATTAR_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)  // which knows neither GCC's pragmas nor its choice of a width
#define ATTAR_WIDE ""
#define ATTAR_TARGET(features) \
    ATTAR_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define ATTAR_TARGET_END ATTAR_PRAGMA(clang attribute pop)
#else
#define ATTAR_WIDE ",prefer-vector-width=512"
#define ATTAR_TARGET(features) ATTAR_PRAGMA(GCC push_options) ATTAR_PRAGMA(GCC target(features))
#define ATTAR_TARGET_END ATTAR_PRAGMA(GCC pop_options)
#endif
#if defined(ATTAR_EMULATE)  // levels above AVX2 have its instructions alone
#define ATTAR_AND(features)
#else
#define ATTAR_AND(features) "," features
#endif
#define ATTAR_AVX512_FEATURES "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"

namespace portable {
#define ATTAR_LEVEL ATTAR_PORTABLE
#include "simd.inl"
#include ATTAR_KERNELS
#undef ATTAR_LEVEL
}  // namespace portable

#if defined(__x86_64__)

ATTAR_TARGET("avx2,fma,f16c")
namespace avx2 {
#define ATTAR_LEVEL ATTAR_AVX2
#include "simd.inl"
#include ATTAR_KERNELS
#undef ATTAR_LEVEL
}  // namespace avx2
ATTAR_TARGET_END

ATTAR_TARGET("avx2,fma,f16c" ATTAR_AND("avxvnni"))
namespace avxvnni {
#define ATTAR_LEVEL ATTAR_AVXVNNI
#include "simd.inl"
#include ATTAR_KERNELS
#undef ATTAR_LEVEL
}  // namespace avxvnni
ATTAR_TARGET_END

ATTAR_TARGET("avx2,fma,f16c" ATTAR_AND(ATTAR_AVX512_FEATURES ATTAR_WIDE))
namespace avx512 {
#define ATTAR_LEVEL ATTAR_AVX512
#include "simd.inl"
#include ATTAR_KERNELS
#undef ATTAR_LEVEL
}  // namespace avx512
ATTAR_TARGET_END

ATTAR_TARGET("avx2,fma,f16c" ATTAR_AND(ATTAR_AVX512_FEATURES ",amx-tile,amx-int8" ATTAR_WIDE))
namespace amx {
#define ATTAR_LEVEL ATTAR_AMX
#include "simd.inl"
#include ATTAR_KERNELS
#undef ATTAR_LEVEL
}  // namespace amx
ATTAR_TARGET_END

#define ATTAR_PICK(level, name)                       \
    ((level) == Level::amx       ? amx::name          \
     : (level) == Level::avx512  ? avx512::name       \
     : (level) == Level::avxvnni ? avxvnni::name      \
     : (level) == Level::avx2    ? avx2::name         \
                                 : portable::name)

#elif defined(__aarch64__)

ATTAR_TARGET("arch=armv8.2-a+dotprod")
namespace neon {
#define ATTAR_LEVEL ATTAR_NEON
#include "simd.inl"
#include ATTAR_KERNELS
#undef ATTAR_LEVEL
}  // namespace neon
ATTAR_TARGET_END

#define ATTAR_PICK(level, name) ((level) == Level::neon ? neon::name : portable::name)

#else

#define ATTAR_PICK(level, name) (static_cast<void>(level), portable::name)

#endif

#undef ATTAR_PRAGMA
#undef ATTAR_WIDE
#undef ATTAR_TARGET
#undef ATTAR_TARGET_END
#undef ATTAR_AND
#undef ATTAR_AVX512_FEATURES
