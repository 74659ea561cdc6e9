// Kernels of quantize.cpp: plain loops, which every level's compiler settings vectorise.

ATTAR_INLINE std::int32_t bits_of(float value) { return bit_cast<std::int32_t>(value); }
ATTAR_INLINE std::int32_t bits_of(std::uint16_t value) { return static_cast<std::int32_t>(std::uint32_t{value} << 16); }

// Returns whether every value was finite.
template <class T>
static bool quantize_row(const T* x, std::int64_t columns, std::int8_t* codes, float* scale_out) {
    std::int32_t largest = 0;
    for (std::int64_t i = 0; i < columns; ++i) {
        const std::int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= INFINITY_BITS) return false;
    float scale = bit_cast<float>(largest) / 127.5f;
    if (scale == 0.0f) scale = FLT_EPSILON;
    for (std::int64_t i = 0; i < columns; ++i) {
        std::int32_t code = bits_of(bit_cast<float>(bits_of(x[i])) / scale + ROUNDER) - bits_of(ROUNDER);
        code = code < -128 ? -128 : code;
        codes[i] = static_cast<std::int8_t>(code > 127 ? 127 : code);
    }
    *scale_out = scale;
    return true;
}

