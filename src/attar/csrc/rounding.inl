// Rows rounded to what a scheme's activations may be, other than int8, and back to floats: as formats/floats.py, fp4.py and
// llm_int8.py round them, to the bit. A row that is not finite becomes NaN.

// The nearest number, ties to even, of MANTISSA bits after the first and exponents from LEAST on, below which steps are
// those of 2^LEAST: adding 1.5 * 2^23 such steps leaves no bits for less than one. Not for what is past the largest.
template <int MANTISSA, int LEAST>
ATTAR_INLINE Floats nearest(Floats x) {
    const Ints exponent = max(bits_of(x) & all(0x7f800000), all((LEAST + 127) << 23));
    const Floats steps = from_bits((exponent + all((23 - MANTISSA) << 23)) | all(0x00400000));
    return (x + steps) - steps;
}

ATTAR_INLINE Floats clamped(Floats x, float most) {
    return all(0.0f) - max(all(0.0f) - max(x, all(-most)), all(-most));
}

// A number of E4M3 that is not negative, of one that is not past its largest.
static float to_e4m3(float x) {
    float lane[16];
    store(lane, nearest<3, -6>(all(x)));
    return lane[0];
}

// max|x|; of bits, so that infinities and NaN come out on top.
static float magnitude_of(const float* x, std::int64_t count) {
    std::uint32_t most = 0;
    for (std::int64_t k = 0; k < count; ++k) {
        std::uint32_t bits;
        std::memcpy(&bits, x + k, sizeof bits);
        most = std::max(most, bits & 0x7fffffffu);
    }
    float out;
    std::memcpy(&out, &most, sizeof out);
    return out;
}

template <class Round>
ATTAR_INLINE void in_place(float* x, std::int64_t count, Round round) {
    std::int64_t k = 0;
    for (; k + 16 <= count; k += 16) store(x + k, round(load(x + k)));
    if (k == count) return;
    float tail[16] = {};
    std::memcpy(tail, x + k, static_cast<std::size_t>(count - k) * 4);
    store(tail, round(load(tail)));
    std::memcpy(x + k, tail, static_cast<std::size_t>(count - k) * 4);
}

// One group of columns that share a scale.
static void round_group(const Rounding& how, float* x, std::int64_t count) {
    if (how.kind == Rounding::outliers) {
        const float threshold = how.number;
        float largest = 0;
        for (std::int64_t k = 0; k < count; ++k)
            if (std::fabs(x[k]) < threshold) largest = std::max(largest, std::fabs(x[k]));
        const float up = largest > 0 ? 127.0f / largest : 0.0f, down = largest / 127.0f;
        for (std::int64_t k = 0; k < count; ++k)
            if (std::fabs(x[k]) < threshold) x[k] = (x[k] * up + 12582912.0f - 12582912.0f) * down;
        return;
    }
    const float largest = magnitude_of(x, count);
    if (!(largest <= FLT_MAX)) {
        for (std::int64_t k = 0; k < count; ++k) x[k] = NAN;
        return;
    }
    float by;
    switch (how.kind) {
        case Rounding::mxfp4: {
            int exponent = 0;
            const float fraction = std::frexp(largest, &exponent);
            const int biased = largest > 0 ? exponent - 3 + (fraction >= 0.875f) + 127 : 0;
            by = std::ldexp(1.0f, std::clamp(biased, 0, 254) - 127);
            break;
        }
        case Rounding::nvfp4: {
            const float scale = to_e4m3(std::min(how.number * (largest / 6.0f), 448.0f));
            by = (scale == 0.0f ? 0.125f : scale) / how.number;
            break;
        }
        default:
            by = how.number != 0.0f ? how.number : largest / (how.kind == Rounding::e4m3 ? 448.0f : 57344.0f);
            if (by == 0.0f) by = FLT_EPSILON;
    }
    const Floats scale = all(by);
    if (how.kind == Rounding::e4m3)
        in_place(x, count, [&](Floats v) ATTAR_LAMBDA { return nearest<3, -6>(clamped(v / scale, 448.0f)) * scale; });
    else if (how.kind == Rounding::e5m2)
        in_place(x, count, [&](Floats v) ATTAR_LAMBDA { return nearest<2, -14>(clamped(v / scale, 57344.0f)) * scale; });
    else
        in_place(x, count, [&](Floats v) ATTAR_LAMBDA { return nearest<1, 0>(clamped(v / scale, 6.0f)) * scale; });
}

static void round_row(const Rounding& how, float* x, std::int64_t columns) {
    const bool outliers = how.kind == Rounding::outliers;
    if (outliers && !(magnitude_of(x, columns) <= FLT_MAX)) {
        for (std::int64_t k = 0; k < columns; ++k) x[k] = NAN;
        return;
    }
    const std::int64_t group = how.group ? how.group : columns;
    for (std::int64_t k = 0; k < columns; k += group) round_group(how, x + k, std::min(group, columns - k));
}
