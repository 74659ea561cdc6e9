#include "matrix.h"

#include <algorithm>
#include <cmath>
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
    if (number == Number::e4m3) return to_float(E4m3{base[index]});
    if (number == Number::e5m2) return to_float(E5m2{base[index]});
    if (number == Number::int8) return static_cast<float>(static_cast<std::int8_t>(base[index]));
    std::uint16_t bits;
    std::memcpy(&bits, base + 2 * index, sizeof bits);
    return number == Number::bfloat16 ? to_float(Bfloat16{bits}) : to_float(Float16{bits});
}

// The code of column `column`.
int code_at(const Matrix& m, const std::uint8_t* block, std::int64_t lane, std::int64_t column) {
    const std::uint8_t* run = block + column / RUN * 64 * m.bits;
    int code = 0;
    for_planes(m.bits, lane, column % RUN, [&](std::int64_t byte, int shift, int mask, int dropped) {
        code |= (run[byte] >> shift & mask) << dropped;
    });
    return code;
}

void check_shape(std::int64_t rows, std::int64_t columns) {
    if (rows < 1 || columns < 1 || rows > MOST / 4 / columns) throw std::invalid_argument("impossible shape of a matrix");
}

// Codes that are stored a byte each use no more of it than their bits. Those of a damaged file would wrap around.
void check_codes(const std::int8_t* codes, std::int64_t count, int bits) {
    const int middle = 1 << (bits - 1);
    bool beyond = false;
    for (std::int64_t i = 0; i < count; ++i) beyond |= codes[i] < -middle || codes[i] >= middle;
    if (beyond) throw std::invalid_argument("a code has more bits than its scheme: the file may be damaged");
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

// A plane of a run of codes: of each, BITS bits above those that are dropped.
template <int BITS>
void pack_plane(const std::uint8_t (&v)[8][64], int dropped, std::uint8_t*& out) {
    constexpr int EACH = 8 / BITS;  // vectors that share a chunk
    for (int n = 0; n < BITS; ++n, out += 64)
        for (int byte = 0; byte < 64; ++byte) {
            int packed = 0;
            for (int i = 0; i < EACH; ++i) packed |= (v[EACH * n + i][byte] >> dropped & ((1 << BITS) - 1)) << BITS * i;
            out[byte] = static_cast<std::uint8_t>(packed);
        }
}

// A block of codes [16, padded], a byte each and zero past the last, in planes.
void pack_planes(const std::uint8_t* codes, std::int64_t padded, int bits, std::uint8_t* out) {
    std::uint8_t v[8][64];
    for (std::int64_t k = 0; k < padded; k += RUN) {
        for (std::int64_t lane = 0; lane < LANES; ++lane)
            for (std::int64_t i = 0; i < 8; ++i) std::memcpy(v[i] + 4 * lane, codes + lane * padded + k + 4 * i, 4);
        int dropped = 0;
        if (bits == 8) {
            std::memcpy(out, v, sizeof v);
            out += sizeof v;
            continue;
        }
        if (bits & 4) pack_plane<4>(v, dropped, out), dropped += 4;
        if (bits & 2) pack_plane<2>(v, dropped, out), dropped += 2;
        if (bits & 1) pack_plane<1>(v, dropped, out);
    }
}

// `lanes` rows of elements [columns] to [columns, 16] from `out` on.
template <class T>
void transpose(const std::uint8_t* from, std::int64_t lanes, std::int64_t columns, std::uint8_t* to) {
    T* out = reinterpret_cast<T*>(to);
    constexpr std::int64_t SIDE = LINE / static_cast<std::int64_t>(sizeof(T));  // columns at a time
    const auto row = [&](std::int64_t lane) { return from + lane * columns * static_cast<std::int64_t>(sizeof(T)); };
    std::int64_t c = 0;
    for (; lanes == LANES && c + SIDE <= columns; c += SIDE) {
        T square[LANES][SIDE];
        for (std::int64_t lane = 0; lane < LANES; ++lane)
            std::memcpy(square[lane], row(lane) + c * static_cast<std::int64_t>(sizeof(T)), sizeof square[lane]);
        for (std::int64_t i = 0; i < SIDE; ++i)
            for (std::int64_t lane = 0; lane < LANES; ++lane) out[(c + i) * LANES + lane] = square[lane][i];
    }
    for (; c < columns; ++c)
        for (std::int64_t lane = 0; lane < lanes; ++lane)
            std::memcpy(out + c * LANES + lane, row(lane) + c * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
}

void transpose(const std::uint8_t* from, std::int64_t item, std::int64_t lanes, std::int64_t columns, std::uint8_t* out) {
    if (item == 4) return transpose<std::uint32_t>(from, lanes, columns, out);
    if (item == 2) return transpose<std::uint16_t>(from, lanes, columns, out);
    transpose<std::uint8_t>(from, lanes, columns, out);
}

// A zero point is one of the codes it is subtracted from. A damaged file may hold another: below the smallest it would
// wrap around in its byte, and where codes of zeros are filled in (2:4 sparse weights) they would wrap around above, too.
void check_zeros(const Matrix& m, const std::int8_t* zeros, std::int64_t rows) {
    const int middle = m.bits ? 1 << (m.bits - 1) : 128;
    const auto beyond = [middle](std::int8_t zero) { return zero < -middle || zero >= middle; };
    if (m.zeros && std::any_of(zeros, zeros + rows * m.real_groups(), beyond))
        throw std::invalid_argument("a zero point lies outside of the range of the codes: the file may be damaged");
}

// What lies beside the codes of block `b`: arrays of the rows that it has, moved on to the first of them.
void fill_beside(Matrix& m, std::int64_t b, std::int64_t lanes, const Rows& from) {
    const std::int64_t item = item_bytes(m.scale_number), scales = m.coarse, groups = m.real_groups();
    const std::int64_t real = (groups + m.fine - 1) / m.fine;
    transpose(from.scales, item, lanes, real, m.scales + b * scales * LANES * item);
    if (m.offsets) transpose(from.offsets, item, lanes, real, m.offsets + b * scales * LANES * item);
    const auto bytes = [&](const std::int8_t* rows, void* to) {
        transpose<std::uint8_t>(reinterpret_cast<const std::uint8_t*>(rows), lanes, groups,
                                static_cast<std::uint8_t*>(to) + b * m.groups * LANES);
    };
    if (m.fine_scales) bytes(from.fine_scales, m.fine_scales);
    if (m.fine_offsets) bytes(from.fine_offsets, m.fine_offsets);
    for (std::int64_t lane = 0; m.zeros && lane < lanes; ++lane)
        for (std::int64_t g = 0; g < groups; ++g)
            m.zeros[(b * m.groups + g) * LANES + lane] =
                static_cast<std::uint8_t>(from.zeros[lane * groups + g] + (m.bits ? 1 << (m.bits - 1) : 128));
}

// A NaN among codes of E4M3 is not one to the kernels, which have no compare to spare: it goes to the scale, so that
// products come out as they should.
void spread_nan(Matrix& m, std::int64_t b, std::int64_t lanes, const std::uint8_t* codes) {
    static const std::uint8_t NOT_A_NUMBER[] = {0xff, 0xff, 0xff, 0x7f};  // its last bytes are one of 16 bits too
    const std::int64_t item = item_bytes(m.scale_number);
    for (std::int64_t lane = 0; lane < lanes; ++lane)
        for (std::int64_t c = 0; c < m.columns; ++c)
            if ((codes[lane * m.columns + c] & 0x7f) == 0x7f)
                std::memcpy(m.scales + ((b * m.groups + c / m.group) * LANES + lane) * item, NOT_A_NUMBER + 4 - item,
                            static_cast<std::size_t>(item));
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

std::shared_ptr<Matrix> make_matrix(std::shared_ptr<Arena> arena, std::int64_t rows, std::int64_t columns,
                                    const Form& form) {
    check_shape(rows, columns);
    const bool codes = form.number == Number::codes;
    if (codes ? form.bits < 2 || form.bits > 8 : is_float(form.number) || form.bits)
        throw std::invalid_argument("codes have 2 to 8 bits");
    if (!is_float(form.scale_number)) throw std::invalid_argument("scales are floats");
    const bool whole = form.group == columns;
    if (form.group < 1 || columns % form.group || (codes && !whole && form.group % RUN && form.group != HALF_RUN))
        throw std::invalid_argument("a group is a multiple of 32 columns, or 16, that divides the row, or the whole row");
    if (!form.table.empty() && (form.table.size() != 16 || form.bits != 4 || form.zeros || form.offsets))
        throw std::invalid_argument("a table has 16 numbers, for codes of 4 bits without zero points or offsets");
    if ((form.offsets && (form.zeros || form.bits == 8 || !codes)) || form.fine < 0 || (form.fine & (form.fine - 1)) ||
        (form.zeros && !codes && form.number != Number::int8))
        throw std::invalid_argument("a form that has no kernel");
    const std::int64_t padded = !codes ? columns : round_up(columns, whole ? 2 * RUN : RUN);
    const std::int64_t group = whole ? padded : form.group;
    if (codes && group > LONGEST_GROUP) throw std::invalid_argument("a group has at most 65536 columns");
    auto matrix = std::make_shared<Matrix>();
    Matrix& m = *matrix;
    const std::int64_t item = item_bytes(form.scale_number);
    m.rows = rows, m.columns = columns, m.number = form.number, m.bits = codes ? form.bits : 0;
    m.group = group, m.groups = padded / group, m.padded = padded, m.scale_number = form.scale_number;
    m.block_bytes = codes ? padded / RUN * 64 * form.bits : columns * LANES;
    m.fine = std::max<std::int64_t>(1, form.fine);
    m.coarse = (m.groups + m.fine - 1) / m.fine;
    for (m.fine_shift = 0; std::int64_t{1} << m.fine_shift < m.fine;) ++m.fine_shift;
    const std::int64_t blocks = m.blocks(), scales = blocks * m.coarse * LANES * item, fine = blocks * m.groups * LANES;
    m.weights = arena->allocate(blocks * m.block_bytes);
    m.scales = arena->allocate(scales);
    m.zeros = form.zeros ? arena->allocate(fine) : nullptr;
    if (form.offsets) m.offsets = arena->allocate(scales);
    if (form.fine) m.fine_scales = reinterpret_cast<std::int8_t*>(arena->allocate(fine));
    if (form.fine && form.offsets) m.fine_offsets = reinterpret_cast<std::int8_t*>(arena->allocate(fine));
    m.looked_up = !form.table.empty(), m.integer = codes;
    for (std::size_t i = 0; i < form.table.size(); ++i) {
        const float value = m.table[i] = form.table[i];
        const bool small = value >= -128 && value <= 127 && std::nearbyint(value) == value;
        m.integer &= small;
        m.bytes_of_table[i] = static_cast<std::uint8_t>(small ? static_cast<int>(value) + 128 : 128);
    }
    m.arena = std::move(arena);
    return matrix;
}

void check_rows(const Matrix& m, std::int64_t first, std::int64_t rows) {
    if (!m.scales || first < 0 || first % LANES || rows < 1 || rows > m.rows - first ||
        (rows % LANES && first + rows != m.rows))
        throw std::invalid_argument("rows are filled sixteen at a time, those that the matrix has");
}

void fill_block(Matrix& m, std::int64_t b, std::int64_t lanes, const Rows& from) {
    std::uint8_t* out = m.weights + b * m.block_bytes;
    if (m.bits)
        pack_planes(from.codes, m.padded, m.bits, out);
    else
        transpose<std::uint8_t>(from.codes, lanes, m.columns, out);
    fill_beside(m, b, lanes, from);
    if (m.number == Number::e4m3) spread_nan(m, b, lanes, from.codes);
}

void fill_rows(Matrix& m, std::int64_t first, std::int64_t rows, const Rows& from) {
    check_rows(m, first, rows);
    const auto given = [](const void* array, bool wanted) { return (array != nullptr) == wanted; };
    if (!from.codes || !from.scales || !given(from.zeros, m.zeros) || !given(from.offsets, m.offsets) ||
        !given(from.fine_scales, m.fine_scales) || !given(from.fine_offsets, m.fine_offsets))
        throw std::invalid_argument("rows are filled from what the matrix is made of");
    check_zeros(m, from.zeros, rows);
    const std::int64_t columns = m.columns, blocks = (rows + LANES - 1) / LANES, item = item_bytes(m.scale_number);
    const std::int64_t groups = m.real_groups(), scales = (groups + m.fine - 1) / m.fine;
#pragma omp parallel
    {
        std::vector<std::uint8_t> padded(static_cast<std::size_t>(m.bits ? LANES * m.padded : 0));
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < blocks; ++i) {
            const std::int64_t row = i * LANES, lanes = std::min(LANES, rows - row);
            const std::uint8_t* codes = from.codes + row * columns;
            if (m.bits) {
                if (lanes < LANES) std::fill(padded.begin(), padded.end(), std::uint8_t{0});
                for (std::int64_t lane = 0; lane < lanes; ++lane)
                    std::memcpy(padded.data() + lane * m.padded, codes + lane * columns, static_cast<std::size_t>(columns));
                codes = padded.data();
            }
            const auto moved = [&](const auto* array, std::int64_t a_row) { return array ? array + row * a_row : nullptr; };
            fill_block(m, first / LANES + i, lanes,
                       {codes, moved(from.scales, scales * item), moved(from.zeros, groups),
                        moved(from.offsets, scales * item), moved(from.fine_scales, groups), moved(from.fine_offsets, groups)});
        }
    }
}

std::shared_ptr<Matrix> pack_codes(std::shared_ptr<Arena> arena, const void* codes, bool plain, std::int64_t rows,
                                   std::int64_t columns, int bits, std::int64_t group, const void* scales,
                                   Number scale_number, const std::int8_t* zeros) {
    Form form;
    form.bits = bits, form.group = group, form.scale_number = scale_number, form.zeros = zeros != nullptr;
    auto matrix = make_matrix(std::move(arena), rows, columns, form);
    Matrix& m = *matrix;
    const std::int64_t row_bytes = plain ? columns : (columns * bits + 31) / 32 * 4, groups = m.real_groups();
    const bool in_words = bits == 8 || (bits == 4 && !plain);
    check_zeros(m, zeros, rows);
    if (plain && bits < 8) check_codes(static_cast<const std::int8_t*>(codes), rows * columns, bits);
#pragma omp parallel
    {
        std::vector<std::uint8_t> unpacked(static_cast<std::size_t>(in_words ? 0 : LANES * m.padded));
#pragma omp for schedule(static)
        for (std::int64_t b = 0; b < m.blocks(); ++b) {
            const std::int64_t row = b * LANES, lanes = std::min(LANES, rows - row);
            std::uint8_t* out = m.weights + b * m.block_bytes;
            const auto* from = static_cast<const std::uint8_t*>(codes) + row * row_bytes;
            if (in_words && bits == 4) {
                pack_words<4>(from, row_bytes, lanes, columns, 0, out);
            } else if (in_words) {
                pack_words<8>(from, row_bytes, lanes, columns, plain ? 0x80808080u : 0, out);
            } else {
                if (lanes < LANES) std::fill(unpacked.begin(), unpacked.end(), std::uint8_t{0});
                for (std::int64_t lane = 0; lane < lanes; ++lane)
                    unpack_row(codes, plain, row + lane, columns, bits, unpacked.data() + lane * m.padded);
                pack_planes(unpacked.data(), m.padded, bits, out);
            }
            fill_beside(m, b, lanes, {nullptr, static_cast<const std::uint8_t*>(scales) + row * groups * item_bytes(scale_number),
                                      zeros ? zeros + row * groups : nullptr, nullptr, nullptr, nullptr});
        }
    }
    return matrix;
}

namespace {

// A matrix of floats, `kept` of which are stored of each row.
std::shared_ptr<Matrix> pack_floats(std::shared_ptr<Arena> arena, const void* weights, std::int64_t rows,
                                    std::int64_t columns, std::int64_t kept, Number number) {
    if (!is_float(number)) throw std::invalid_argument("a dense matrix holds floats");
    auto matrix = std::make_shared<Matrix>();
    const std::int64_t blocks = (rows + LANES - 1) / LANES, item = item_bytes(number);
    matrix->rows = rows, matrix->columns = columns, matrix->number = number, matrix->bits = 0;
    matrix->group = matrix->padded = columns, matrix->groups = 1, matrix->scale_number = number;
    matrix->block_bytes = kept * LANES * item, matrix->integer = false;
    matrix->weights = arena->allocate(blocks * matrix->block_bytes);
    matrix->scales = matrix->zeros = nullptr;
    matrix->arena = std::move(arena);
#pragma omp parallel for schedule(static)
    for (std::int64_t b = 0; b < blocks; ++b)
        transpose(static_cast<const std::uint8_t*>(weights) + b * LANES * kept * item, item,
                  std::min(LANES, rows - b * LANES), kept, matrix->weights + b * matrix->block_bytes);
    return matrix;
}

}  // namespace

std::shared_ptr<Matrix> pack_dense(std::shared_ptr<Arena> arena, const void* weights, std::int64_t rows,
                                   std::int64_t columns, Number number) {
    check_shape(rows, columns);
    return pack_floats(std::move(arena), weights, rows, columns, columns, number);
}

std::shared_ptr<Matrix> pack_sparse(std::shared_ptr<Arena> arena, const void* values, const std::uint8_t* places,
                                    std::int64_t rows, std::int64_t columns, Number number) {
    check_shape(rows, columns);
    if (columns % 8) throw std::invalid_argument("sparse rows are stored eight columns at a time");
    auto matrix = pack_floats(std::move(arena), values, rows, columns, columns / 2, number);
    const std::int64_t a_row = columns / 8;
    matrix->places = matrix->arena->allocate(matrix->blocks() * a_row * LANES);
#pragma omp parallel for schedule(static)
    for (std::int64_t b = 0; b < matrix->blocks(); ++b)
        transpose(places + b * LANES * a_row, 1, std::min(LANES, rows - b * LANES), a_row,
                  matrix->places + b * a_row * LANES);
    return matrix;
}

void read_row(const Matrix& m, std::int64_t row, float* out) {
    const std::int64_t b = row / LANES, lane = row % LANES;
    const std::uint8_t* block = m.block(b);
    for (std::int64_t c = 0; c < m.columns; ++c) {
        float value;
        if (m.places) {
            const int here = m.places[(b * m.columns / 8 + c / 8) * LANES + lane] >> c / 4 % 2 * 4, place = static_cast<int>(c % 4);
            const std::int64_t first = c / 4 * 2 * LANES + lane;
            out[c] = (here & 3) == place        ? number_at(block, m.number, first)
                     : (here >> 2 & 3) == place ? number_at(block, m.number, first + LANES)
                                                : 0.0f;
            continue;
        }
        if (m.number != Number::codes) {
            value = number_at(block, m.number, c * LANES + lane);
            if (!m.scales) {
                out[c] = value;
                continue;
            }
        }
        const std::int64_t group = c / m.group, at = (b * m.groups + group) * LANES + lane;
        const std::int64_t coarse = (b * m.coarse + (group >> m.fine_shift)) * LANES + lane;
        float scale = number_at(m.scales, m.scale_number, coarse);
        if (m.fine_scales) scale *= static_cast<float>(m.fine_scales[at]);
        if (m.number == Number::codes) {
            const int code = code_at(m, block, lane, c);
            if (m.offsets) {
                float offset = number_at(m.offsets, m.scale_number, coarse);
                if (m.fine_offsets) offset *= static_cast<float>(m.fine_offsets[at]);
                out[c] = std::fma(static_cast<float>(code), scale, offset);
                continue;
            }
            value = m.looked_up ? m.table[code] : static_cast<float>(code - (m.zeros ? m.zeros[at] : m.middle()));
        } else if (m.zeros) {
            value -= static_cast<float>(m.zeros[at]) - 128.0f;
        }
        out[c] = value * scale;
    }
}

}  // namespace attar
