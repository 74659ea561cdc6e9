// Blocks of GGML's types, as GGUF files store them, taken apart into the codes, scales and offsets of kernel layout.
//
// What fields mean and in which order their bits lie is written down, and held to the gguf package, in
// formats/codecs/ggml_blocks.py; this is the same for whoever loads a file and wants to wait less. A type is a struct: elements
// and bytes of a block, and `take`, which writes a block's parts to where its row has them.

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "matrix.h"

namespace attar {
namespace {

// Where the parts of the next block go.
struct Parts {
    std::uint8_t* codes;
    std::uint16_t *scale, *offset;
    std::int8_t *fine_scale, *fine_offset;
};

// Adds to codes, `SHIFT` bits up, the fields of BITS bits of BYTES bytes: each RUN bytes hold 8 / BITS slices of RUN
// codes, the first in the lowest bits.
template <int BYTES, int RUN_BYTES, int BITS, int SHIFT = 0>
void spread(const std::uint8_t* from, std::uint8_t* codes) {
    for (int start = 0; start < BYTES; start += RUN_BYTES)
        for (int bit = 0; bit < 8; bit += BITS)
            for (int i = 0; i < RUN_BYTES; ++i, ++codes) {
                const int field = (from[start + i] >> bit & ((1 << BITS) - 1)) << SHIFT;
                *codes = static_cast<std::uint8_t>(SHIFT ? *codes | field : field);
            }
}

std::uint16_t half(const std::uint8_t* from) { return static_cast<std::uint16_t>(from[0] | from[1] << 8); }
std::uint16_t negative(std::uint16_t number) { return static_cast<std::uint16_t>(number ^ 0x8000); }

// The eight scales and eight minima of six bits in Q4_K's and Q5_K's twelve bytes.
void six_bit_pairs(const std::uint8_t* from, const Parts& to) {
    for (int i = 0; i < 4; ++i) {
        const int first = from[i], second = from[4 + i], rest = from[8 + i];
        to.fine_scale[i] = static_cast<std::int8_t>(first & 63);
        to.fine_offset[i] = static_cast<std::int8_t>(second & 63);
        to.fine_scale[4 + i] = static_cast<std::int8_t>((rest & 15) | first >> 6 << 4);
        to.fine_offset[4 + i] = static_cast<std::int8_t>(rest >> 4 | second >> 6 << 4);
    }
}

void less(std::int8_t* fine, int count, int middle) {
    for (int i = 0; i < count; ++i) fine[i] = static_cast<std::int8_t>(fine[i] - middle);
}

std::uint8_t* as_bytes(std::int8_t* fine) { return reinterpret_cast<std::uint8_t*>(fine); }

template <bool FIVE, bool OFFSET>  // Q4_0, Q4_1, Q5_0, Q5_1, and IQ4_NL, which has Q4_0's fields
struct Legacy {
    static constexpr int ELEMENTS = 32, BYTES = 2 + 2 * OFFSET + 4 * FIVE + 16, FINE = 0;
    static void take(const std::uint8_t* from, const Parts& to) {
        to.scale[0] = half(from), from += 2;
        if (OFFSET) to.offset[0] = half(from), from += 2;
        spread<16, 16, 4>(from + 4 * FIVE, to.codes);
        if (FIVE) spread<4, 1, 1, 4>(from, to.codes);
    }
};
struct Q8_0 {
    static constexpr int ELEMENTS = 32, BYTES = 34, FINE = 0;
    static void take(const std::uint8_t* from, const Parts& to) {
        to.scale[0] = half(from);
        for (int i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 0x80;
    }
};
struct Q2_K {
    static constexpr int ELEMENTS = 256, BYTES = 84, FINE = 16;
    static void take(const std::uint8_t* from, const Parts& to) {
        for (int i = 0; i < 16; ++i) {
            to.fine_scale[i] = static_cast<std::int8_t>(from[i] & 15);
            to.fine_offset[i] = static_cast<std::int8_t>(from[i] >> 4);
        }
        spread<64, 32, 2>(from + 16, to.codes);
        to.scale[0] = half(from + 80), to.offset[0] = negative(half(from + 82));
    }
};
struct Q3_K {
    static constexpr int ELEMENTS = 256, BYTES = 110, FINE = 16;
    static void take(const std::uint8_t* from, const Parts& to) {
        spread<64, 32, 2>(from + 32, to.codes);
        spread<32, 32, 1, 2>(from, to.codes);
        spread<8, 8, 4>(from + 96, as_bytes(to.fine_scale));
        spread<4, 4, 2, 4>(from + 104, as_bytes(to.fine_scale));
        less(to.fine_scale, 16, 32);
        to.scale[0] = half(from + 108);
    }
};
template <bool FIVE>
struct Q45_K {
    static constexpr int ELEMENTS = 256, BYTES = 144 + 32 * FIVE, FINE = 8;
    static void take(const std::uint8_t* from, const Parts& to) {
        to.scale[0] = half(from), to.offset[0] = negative(half(from + 2));
        six_bit_pairs(from + 4, to);
        spread<128, 32, 4>(from + 16 + 32 * FIVE, to.codes);
        if (FIVE) spread<32, 32, 1, 4>(from + 16, to.codes);
    }
};
struct Q6_K {
    static constexpr int ELEMENTS = 256, BYTES = 210, FINE = 16;
    static void take(const std::uint8_t* from, const Parts& to) {
        spread<128, 64, 4>(from, to.codes);
        spread<64, 32, 2, 4>(from + 128, to.codes);
        std::memcpy(to.fine_scale, from + 192, 16);
        to.scale[0] = half(from + 208);
    }
};
struct IQ4_XS {
    static constexpr int ELEMENTS = 256, BYTES = 136, FINE = 8;
    static void take(const std::uint8_t* from, const Parts& to) {
        to.scale[0] = half(from);
        spread<4, 1, 4>(from + 4, as_bytes(to.fine_scale));
        spread<2, 1, 2, 4>(from + 2, as_bytes(to.fine_scale));
        less(to.fine_scale, 8, 32);
        spread<128, 16, 4>(from + 8, to.codes);
    }
};

// The upper half of a float32: what a bfloat16 is, where the lower half is zero.
std::uint16_t upper_half(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<std::uint16_t>(bits >> 16);
}

// Codes stand for twice E2M1's values, so that they are whole: scales are halved.
struct MXFP4 {
    static constexpr int ELEMENTS = 32, BYTES = 17, FINE = 0;
    static void take(const std::uint8_t* from, const Parts& to) {
        const std::uint32_t exponent = from[0], bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
        to.scale[0] = static_cast<std::uint16_t>(bits >> 16);
        spread<16, 16, 4>(from + 1, to.codes);
    }
};
struct NVFP4 {
    static constexpr int ELEMENTS = 64, BYTES = 36, FINE = 0;
    static void take(const std::uint8_t* from, const Parts& to) {
        for (int i = 0; i < 4; ++i) {
            // E4M3 without a sign, whose bit does not count, and with zero for a NaN; it is read as a float16 of another bias.
            const auto bits = static_cast<std::uint16_t>((from[i] & 0x7f) << 7);
            to.scale[i] = from[i] == 0x7f ? std::uint16_t{0} : upper_half(to_float(Float16{bits}) * 128.0f);
        }
        spread<32, 8, 4>(from + 4, to.codes);
    }
};

template <class Type>
void fill(Matrix& m, std::int64_t first, std::int64_t rows, const std::uint8_t* blocks, std::int64_t bytes) {
    const std::int64_t a_row = m.columns / Type::ELEMENTS, scales = m.coarse, groups = m.groups;
    const std::int64_t per_scale = a_row ? scales / a_row : 0, per_fine = Type::FINE;
    if (m.columns % Type::ELEMENTS || m.padded != m.columns || a_row == 0 || scales % a_row ||
        (Type::FINE ? groups != a_row * Type::FINE || m.fine != Type::FINE || !m.fine_scales : m.fine_scales != nullptr) ||
        item_bytes(m.scale_number) != 2 || m.zeros || bytes != rows * a_row * Type::BYTES)
        throw std::invalid_argument("the matrix is of another form than the type");
    const std::int64_t count = (rows + LANES - 1) / LANES;
#pragma omp parallel
    {
        const auto sized = [](std::int64_t size) { return static_cast<std::size_t>(size); };
        std::vector<std::uint8_t> codes(sized(LANES * m.padded));
        std::vector<std::uint16_t> scale(sized(LANES * scales)), offset(sized(LANES * scales));
        std::vector<std::int8_t> fine_scale(sized(LANES * groups)), fine_offset(sized(LANES * groups));
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t lanes = std::min(LANES, rows - i * LANES);
            if (lanes < LANES) std::fill(codes.begin(), codes.end(), std::uint8_t{0});
            for (std::int64_t lane = 0; lane < lanes; ++lane) {
                const std::uint8_t* from = blocks + (i * LANES + lane) * a_row * Type::BYTES;
                for (std::int64_t block = 0; block < a_row; ++block, from += Type::BYTES) {
                    const std::int64_t at = lane * scales + block * per_scale, fine = lane * groups + block * per_fine;
                    Type::take(from, {codes.data() + lane * m.padded + block * Type::ELEMENTS, scale.data() + at,
                                      offset.data() + at, fine_scale.data() + fine, fine_offset.data() + fine});
                }
            }
            fill_block(m, first / LANES + i, lanes,
                       {codes.data(), reinterpret_cast<const std::uint8_t*>(scale.data()), nullptr,
                        reinterpret_cast<const std::uint8_t*>(offset.data()), fine_scale.data(), fine_offset.data()});
        }
    }
}

struct Known {
    const char* name;
    int bits;
    bool offsets, looked_up;
    void (*fill)(Matrix&, std::int64_t, std::int64_t, const std::uint8_t*, std::int64_t);
};

const Known KNOWN[] = {
    {"Q4_0", 4, false, false, fill<Legacy<false, false>>}, {"Q4_1", 4, true, false, fill<Legacy<false, true>>},
    {"Q5_0", 5, false, false, fill<Legacy<true, false>>},  {"Q5_1", 5, true, false, fill<Legacy<true, true>>},
    {"Q8_0", 8, false, false, fill<Q8_0>},                 {"Q2_K", 2, true, false, fill<Q2_K>},
    {"Q3_K", 3, false, false, fill<Q3_K>},                 {"Q4_K", 4, true, false, fill<Q45_K<false>>},
    {"Q5_K", 5, true, false, fill<Q45_K<true>>},           {"Q6_K", 6, false, false, fill<Q6_K>},
    {"IQ4_NL", 4, false, true, fill<Legacy<false, false>>}, {"IQ4_XS", 4, false, true, fill<IQ4_XS>},
    {"MXFP4", 4, false, true, fill<MXFP4>},                {"NVFP4", 4, false, true, fill<NVFP4>},
};

}  // namespace

void fill_ggml(Matrix& m, std::int64_t first, std::int64_t rows, const std::string& type, const std::uint8_t* blocks,
               std::int64_t bytes) {
    check_rows(m, first, rows);
    for (const Known& known : KNOWN) {
        if (known.name != type) continue;
        if (m.bits != known.bits || !m.offsets == known.offsets || m.looked_up != known.looked_up)
            throw std::invalid_argument("the matrix is of another form than the type");
        return known.fill(m, first, rows, blocks, bytes);
    }
    throw std::invalid_argument("blocks of " + type + " have no kernel");
}

}  // namespace attar
