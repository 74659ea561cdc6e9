#include "matrix.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace attar {
namespace {

constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20, PIECE = std::size_t{32} << 20;
constexpr std::int64_t MOST = std::int64_t{1} << 40;   // bytes of one matrix: far past any, far from overflow
constexpr std::int64_t LINE = 64;                      // bytes of a cache line
constexpr std::int64_t LONGEST_GROUP = std::int64_t{1} << 16;  // its sum of products of 8 by 8 bits fits 32

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Where code `column` of lane `lane` lies in a run: calls put(byte, shift, mask, dropped) for each plane of its bits,
// `dropped` low bits of the code belonging to planes before.
template <class Put>
inline void for_planes(int bits, std::int64_t lane, std::int64_t column, Put put) {
    const std::int64_t quad = column / 4, at = 4 * lane + column % 4;  // vector of the run, byte of the vector
    std::int64_t start = 0;
    int dropped = 0;
    if (bits == 8) {
        put(64 * quad + at, 0, 0xff, 0);
        return;
    }
    if (bits & 4) {
        put(start + 64 * (quad / 2) + at, static_cast<int>(4 * (quad % 2)), 0x0f, dropped);
        start += 64 * 4, dropped += 4;
    }
    if (bits & 2) {
        put(start + 64 * (quad / 4) + at, static_cast<int>(2 * (quad % 4)), 0x03, dropped);
        start += 64 * 2, dropped += 2;
    }
    if (bits & 1) put(start + at, static_cast<int>(quad), 0x01, dropped);
}

float number_at(const std::uint8_t* base, Number number, std::int64_t index) {
    if (number == Number::float32) {
        float value;
        std::memcpy(&value, base + 4 * index, sizeof value);
        return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, base + 2 * index, sizeof bits);
    return number == Number::bfloat16 ? to_float(Bfloat16{bits}) : to_float(Float16{bits});
}

void check_shape(std::int64_t rows, std::int64_t columns) {
    if (rows < 1 || columns < 1 || rows > MOST / 4 / columns) throw std::invalid_argument("impossible shape of a matrix");
}

// Codes of one stored row, unsigned, to `out`.
void unpack_row(const void* codes, bool plain, std::int64_t row, std::int64_t columns, int bits, std::uint8_t* out) {
    if (plain) {
        const auto* from = static_cast<const std::uint8_t*>(codes) + row * columns;
        const int middle = 1 << (bits - 1), mask = 2 * middle - 1;
        for (std::int64_t c = 0; c < columns; ++c) out[c] = static_cast<std::uint8_t>((from[c] + middle) & mask);
        return;
    }
    const std::int64_t words = (columns * bits + 31) / 32;
    const auto* from = static_cast<const std::uint8_t*>(codes) + 4 * row * words;
    const std::uint32_t mask = (1u << bits) - 1;
    for (std::int64_t c = 0; c < columns; ++c) {
        const std::int64_t bit = c * bits, byte = bit / 8;
        const std::uint32_t low = from[byte], high = byte + 1 < 4 * words ? from[byte + 1] : 0;
        out[c] = static_cast<std::uint8_t>((low | high << 8) >> bit % 8 & mask);
    }
}

// Nibbles 0 to 7 of a word in the order 0 4 1 5 2 6 3 7.
std::uint32_t interleave(std::uint32_t word) {
    const auto spread = [](std::uint32_t half) {
        half = (half | half << 8) & 0x00ff00ff;
        return (half | half << 4) & 0x0f0f0f0f;
    };
    return spread(word & 0xffff) | spread(word >> 16) << 4;
}

// A block of 4- or 8-bit codes. A stored word is a word of the block: of 8 bits as it is, of 4 bits with its nibbles
// interleaved. In a row's last word what lies past the last code becomes zero.
template <int BITS>
void pack_words(const std::uint8_t* codes, std::int64_t row_bytes, std::int64_t lanes, std::int64_t columns,
                std::uint32_t flip, std::uint8_t* out) {
    const auto word_of = [&](std::int64_t lane, std::int64_t at, std::size_t bytes) {
        std::uint32_t word = 0;
        std::memcpy(&word, codes + lane * row_bytes + at, bytes);
        return word ^ flip;
    };
    const std::int64_t whole = columns * BITS / 32 * 4;
    std::int64_t at = 0;
    for (; lanes == LANES && at + LINE <= whole; at += LINE) {  // rows may lie 4 KiB apart: each line is fetched once
        std::uint32_t square[LANES][LINE / 4];
        for (std::int64_t lane = 0; lane < LANES; ++lane) {
            std::memcpy(square[lane], codes + lane * row_bytes + at, LINE);
            for (std::uint32_t& word : square[lane]) word = BITS == 4 ? interleave(word) : word ^ flip;
        }
        for (std::int64_t i = 0; i < LINE / 4; ++i, out += 64)
            for (std::int64_t lane = 0; lane < LANES; ++lane) std::memcpy(out + 4 * lane, &square[lane][i], 4);
    }
    for (; at < whole; at += 4, out += 64)
        for (std::int64_t lane = 0; lane < lanes; ++lane) {
            const std::uint32_t word = word_of(lane, at, 4), packed = BITS == 4 ? interleave(word) : word;
            std::memcpy(out + 4 * lane, &packed, 4);
        }
    const std::int64_t rest = columns * BITS - whole * 8;  // bits
    for (std::int64_t lane = 0; rest && lane < lanes; ++lane) {
        const auto bytes = static_cast<std::size_t>((rest + 7) / 8);
        const std::uint32_t word = word_of(lane, whole, bytes) & ((1u << rest) - 1);
        const std::uint32_t packed = BITS == 4 ? interleave(word) : word;
        std::memcpy(out + 4 * lane, &packed, 4);
    }
}

// A block of codes of any width, by way of a byte a code.
void pack_planes(const void* codes, bool plain, std::int64_t first, std::int64_t lanes, std::int64_t columns,
                 std::int64_t padded, int bits, std::vector<std::uint8_t>& unpacked, std::uint8_t* out) {
    std::fill(unpacked.begin(), unpacked.end(), std::uint8_t{0});
    for (std::int64_t lane = 0; lane < lanes; ++lane)
        unpack_row(codes, plain, first + lane, columns, bits, unpacked.data() + lane * padded);
    for (std::int64_t run = 0; run < padded / RUN; ++run, out += 64 * bits)
        for (std::int64_t lane = 0; lane < LANES; ++lane) {
            const std::uint8_t* from = unpacked.data() + lane * padded + run * RUN;
            for (std::int64_t c = 0; c < RUN; ++c)
                for_planes(bits, lane, c, [&](std::int64_t byte, int shift, int mask, int dropped) {
                    out[byte] = static_cast<std::uint8_t>(out[byte] | (from[c] >> dropped & mask) << shift);
                });
        }
}

}  // namespace

void prefer_huge_pages(const void* start, std::int64_t bytes) {
#if defined(__linux__)
    const auto first = (reinterpret_cast<std::uintptr_t>(start) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const auto end = (reinterpret_cast<std::uintptr_t>(start) + static_cast<std::uintptr_t>(bytes)) / HUGE_PAGE * HUGE_PAGE;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
    static_cast<void>(start), static_cast<void>(bytes);
#endif
}

Arena::~Arena() {
    for (const Piece& piece : pieces_) {
#if defined(__linux__)
        munmap(piece.start, piece.size);
#else
        ::operator delete(piece.start, std::align_val_t{64});
#endif
    }
}

std::uint8_t* Arena::allocate(std::int64_t bytes) {
    if (bytes < 0 || bytes > MOST) throw std::bad_alloc();
    const std::size_t size = static_cast<std::size_t>(round_up(std::max<std::int64_t>(bytes, 1), 64));
    const std::lock_guard<std::mutex> locked(lock_);
    if (size > free_) {
        const std::size_t whole = std::max((size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE, PIECE);
        pieces_.reserve(pieces_.size() + 1);
#if defined(__linux__)
        // One huge page more than is asked for, and what does not lie on whole ones given back: mmap aligns to 4 KiB.
        void* raw = mmap(nullptr, whole + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (raw == MAP_FAILED) throw std::bad_alloc();
        auto* start = static_cast<std::uint8_t*>(raw);
        const std::size_t before = (HUGE_PAGE - reinterpret_cast<std::uintptr_t>(raw) % HUGE_PAGE) % HUGE_PAGE;
        if (before) munmap(start, before);
        if (HUGE_PAGE - before) munmap(start + before + whole, HUGE_PAGE - before);
        start += before;
        madvise(start, whole, MADV_HUGEPAGE);  // advice: without it the kernels are a little slower
#else
        auto* start = static_cast<std::uint8_t*>(::operator new(whole, std::align_val_t{64}));
        std::memset(start, 0, whole);
#endif
        pieces_.push_back({start, whole});
        free_ = whole;
    }
    const Piece& last = pieces_.back();
    std::uint8_t* out = last.start + (last.size - free_);
    free_ -= size;
    used_ += static_cast<std::int64_t>(size);
    return out;
}

std::shared_ptr<Matrix> pack_codes(std::shared_ptr<Arena> arena, const void* codes, bool plain, std::int64_t rows,
                                   std::int64_t columns, int bits, std::int64_t group, const void* scales,
                                   Number scale_number, const std::int8_t* zeros) {
    check_shape(rows, columns);
    if (bits < 2 || bits > 8) throw std::invalid_argument("codes have 2 to 8 bits");
    if (scale_number == Number::codes) throw std::invalid_argument("scales are floats");
    auto matrix = std::make_shared<Matrix>();
    const bool whole = group == columns;
    if (group < 1 || columns % group || (!whole && group % RUN))
        throw std::invalid_argument("a group is a multiple of 32 columns that divides the row, or the whole row");
    const std::int64_t padded = whole ? round_up(columns, 2 * RUN) : columns;
    if ((whole ? padded : group) > LONGEST_GROUP) throw std::invalid_argument("a group has at most 65536 columns");
    const std::int64_t blocks = (rows + LANES - 1) / LANES, groups = columns / group, item = item_bytes(scale_number);
    matrix->rows = rows, matrix->columns = columns, matrix->number = Number::codes, matrix->bits = bits;
    matrix->group = whole ? padded : group, matrix->groups = groups, matrix->padded = padded;
    matrix->scale_number = scale_number, matrix->block_bytes = padded / RUN * 64 * bits;
    matrix->weights = arena->allocate(blocks * matrix->block_bytes);
    matrix->scales = arena->allocate(blocks * groups * LANES * item);
    matrix->zeros = zeros ? arena->allocate(blocks * groups * LANES) : nullptr;
    matrix->arena = std::move(arena);
    const std::int64_t row_bytes = plain ? columns : (columns * bits + 31) / 32 * 4;
    const bool in_words = bits == 8 || (bits == 4 && !plain);
#pragma omp parallel
    {
        std::vector<std::uint8_t> unpacked(static_cast<std::size_t>(in_words ? 0 : LANES * padded));
#pragma omp for schedule(static)
        for (std::int64_t b = 0; b < blocks; ++b) {
            const std::int64_t lanes = std::min(LANES, rows - b * LANES);
            std::uint8_t* out = matrix->weights + b * matrix->block_bytes;
            const auto* from = static_cast<const std::uint8_t*>(codes) + b * LANES * row_bytes;
            if (in_words && bits == 4)
                pack_words<4>(from, row_bytes, lanes, columns, 0, out);
            else if (in_words)
                pack_words<8>(from, row_bytes, lanes, columns, plain ? 0x80808080u : 0, out);
            else
                pack_planes(codes, plain, b * LANES, lanes, columns, padded, bits, unpacked, out);
            for (std::int64_t g = 0; g < groups; ++g)
                for (std::int64_t lane = 0; lane < lanes; ++lane) {
                    const std::int64_t to = (b * groups + g) * LANES + lane, from = (b * LANES + lane) * groups + g;
                    std::memcpy(matrix->scales + to * item, static_cast<const std::uint8_t*>(scales) + from * item,
                                static_cast<std::size_t>(item));
                    if (zeros) matrix->zeros[to] = static_cast<std::uint8_t>(zeros[from] + matrix->middle());
                }
        }
    }
    return matrix;
}

std::shared_ptr<Matrix> pack_dense(std::shared_ptr<Arena> arena, const void* weights, std::int64_t rows,
                                   std::int64_t columns, Number number) {
    check_shape(rows, columns);
    if (number == Number::codes) throw std::invalid_argument("a dense matrix holds floats");
    auto matrix = std::make_shared<Matrix>();
    const std::int64_t blocks = (rows + LANES - 1) / LANES, item = item_bytes(number);
    matrix->rows = rows, matrix->columns = columns, matrix->number = number, matrix->bits = 0;
    matrix->group = matrix->padded = columns, matrix->groups = 1, matrix->scale_number = number;
    matrix->block_bytes = columns * LANES * item;
    matrix->weights = arena->allocate(blocks * matrix->block_bytes);
    matrix->scales = matrix->zeros = nullptr;
    matrix->arena = std::move(arena);
    const auto transpose = [&](auto zero) {
        using T = decltype(zero);
#pragma omp parallel for schedule(static)
        for (std::int64_t b = 0; b < blocks; ++b) {
            const std::int64_t lanes = std::min(LANES, rows - b * LANES);
            const T* from = static_cast<const T*>(weights) + b * LANES * columns;
            T* out = reinterpret_cast<T*>(matrix->weights + b * matrix->block_bytes);
            constexpr std::int64_t SIDE = LINE / sizeof(T);  // columns at a time
            std::int64_t c = 0;
            for (; lanes == LANES && c + SIDE <= columns; c += SIDE) {
                T square[LANES][SIDE];
                for (std::int64_t lane = 0; lane < LANES; ++lane)
                    std::memcpy(square[lane], from + lane * columns + c, sizeof square[lane]);
                for (std::int64_t i = 0; i < SIDE; ++i)
                    for (std::int64_t lane = 0; lane < LANES; ++lane) out[(c + i) * LANES + lane] = square[lane][i];
            }
            for (; c < columns; ++c)
                for (std::int64_t lane = 0; lane < lanes; ++lane) out[c * LANES + lane] = from[lane * columns + c];
        }
    };
    if (item == 4)
        transpose(std::uint32_t{0});
    else
        transpose(std::uint16_t{0});
    return matrix;
}

void read_row(const Matrix& matrix, std::int64_t row, float* out) {
    const std::int64_t b = row / LANES, lane = row % LANES;
    const std::uint8_t* block = matrix.block(b);
    if (matrix.number != Number::codes) {
        for (std::int64_t c = 0; c < matrix.columns; ++c) out[c] = number_at(block, matrix.number, c * LANES + lane);
        return;
    }
    for (std::int64_t c = 0; c < matrix.columns; ++c) {
        const std::uint8_t* run = block + c / RUN * 64 * matrix.bits;
        int code = 0;
        for_planes(matrix.bits, lane, c % RUN, [&](std::int64_t byte, int shift, int mask, int dropped) {
            code |= (run[byte] >> shift & mask) << dropped;
        });
        const std::int64_t at = (b * matrix.groups + c / matrix.group) * LANES + lane;
        const int zero = matrix.zeros ? matrix.zeros[at] : matrix.middle();
        out[c] = static_cast<float>(code - zero) * number_at(matrix.scales, matrix.scale_number, at);
    }
}

}  // namespace attar
